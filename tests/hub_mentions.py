"""Which of the Hub's repositories that public configs and scripts name lead to a preset.

`python tests/hub_mentions.py FOLDER` takes a folder of examples, as `memcalc check --survey` reads them, and prints
each repository that stands behind a model's key with the preset that it leads to, then the share of repositories and of
mentions that lead to one. Paths of the authors' own machines are left out.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from memcalc import catalog
from memcalc.preflight.answer import ENDINGS

_NAMED = re.compile(
    r"""(?x)(?<![\w/])(?:--?|\+{0,2}|["']?)(?P<key>[\w.-]+)["']?\s*(?:=|:|\s)\s*["']?
    (?:\$\{\w+:-)?["']?(?:checkpoints/|\$\{?\w+\}?/|~/models/|/[\w/]*?models/)?
    (?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?=["'\s\},@]|$)"""
)
"""A key, and OWNER/NAME behind it: YAML, JSON, TOML, options and variables of a shell."""
_OF_MODELS = re.compile(
    r"(?i)(^|[._-])(base_model|model_name_or_path|pretrained_model_name(_or_path)?|models?|model_id|model_path|model\.path"
    r"|pretrain|hf_model_\w+|hf_model|teacher_model|hf_config_path|checkpoint(_dir)?|model_name|name_or_path)$"
)
"""How the keys end behind which a model stands."""
_OWN = frozenset({"model", "models", "output", "outputs", "checkpoint", "checkpoints", "exp", "robot-test"})
"""Folders of authors' machines, and repositories that hold tokenizers alone."""


def mentions(folder: Path) -> Iterator[str]:
    """Every repository behind a model's key in the configs and scripts below a folder, as often as it stands there."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in ENDINGS and path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                yield from _in_line(line)


def _in_line(line: str) -> Iterator[str]:
    if line.lstrip().startswith("#"):
        return
    for found in _NAMED.finditer(line):
        if _OF_MODELS.search(found["key"]) and found["name"].partition("/")[0].lower() not in _OWN:
            yield found["name"]


def main(folder: str) -> None:
    """Print each repository with where it leads, then the shares."""
    counts = Counter(mentions(Path(folder)))
    leads = {name: lead.preset if (lead := catalog.lookup(name)) else "" for name in counts}
    for name, count in counts.most_common():
        sys.stdout.write(f"{count:4} {name:60} {leads[name] or '-'}\n")
    resolved = [name for name in counts if leads[name]]
    times = sum(counts[name] for name in resolved)
    sys.stdout.write(
        f"{len(counts)} repositories, {len(resolved)} lead to a preset ({len(resolved) / len(counts):.0%}); "
        f"{counts.total()} mentions, {times} of them ({times / counts.total():.0%})\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
