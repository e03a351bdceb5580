"""A job as the text that a link holds: options as they are typed on the command line, joined as in a query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from memcalc.errors import InputError, MissingError, UnknownNameError
from memcalc.specs.job import JobRecord
from memcalc.specs.options import COMMAND_LINE
from memcalc.specs.posttraining import RL_OPTIONS

CONFIG = "config.json"
"""What a pasted model is called: its command line runs where the text was saved under this name."""
PASTED = "config"
"""The key of a pasted model; its value is the text of its ``config.json``."""
MOST_PAIRS = 120
"""Of one link; the table has fewer options."""
OPTIONS = {row.name.replace("_", "-"): row for row in (*RL_OPTIONS, *COMMAND_LINE)}
"""By the name in a link; those of post-training stand beside an algorithm alone."""
_FILED = ("model", "gpu", "node", "critic-model", "reward-model")
"""Options whose value may be a file's name on the command line."""


@dataclass(frozen=True)
class LinkedJob:
    """What a link says."""

    options: dict[str, str] = field(default_factory=dict)
    """By the library's keyword."""
    settings: dict[str, str] = field(default_factory=dict)
    """By dotted name."""
    config: str = ""
    """The text of a pasted model."""

    def keywords(self) -> dict[str, Any]:
        """The keywords of :func:`memcalc.estimate`; a pasted model lies under its usual name in the folder."""
        if self.config:
            Path(CONFIG).write_text(self.config, encoding="utf-8")
        options = {**self.options, **({"model": CONFIG} if self.config else {})}
        for name in ("model", "gpu"):
            if not options.get(name):
                raise MissingError(f"which {name}? give {name}.")
        return {**options, "settings": self.settings}

    @property
    def has_roles(self) -> bool:
        """Whether it is post-training."""
        return bool(self.options.get("algorithm"))

    def without(self, *names: str) -> LinkedJob:
        """The same job with some options left out."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in names})

    def having(self, options: Mapping[str, Any]) -> LinkedJob:
        """The same job with some options set."""
        return replace(self, options={**self.options, **{name: _text(value) for name, value in options.items()}})

    def text(self) -> str:
        """What the link holds."""
        options = {name: value for name, value in self.options.items() if not (self.config and name == "model")}
        return urlencode([*_pairs(options, self.settings), *([(PASTED, self.config)] if self.config else [])])


def parse_link(text: str) -> LinkedJob:
    """Read what a link holds; an unknown name, and whatever would have a file of this machine read, is refused.

    >>> parse_link("model=7b&gpu=h100&seq-len=4k&set=strategy.reduce_dtype%3Dbf16").options["seq_len"]
    '4k'
    """
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_PAIRS)
    except ValueError:
        raise InputError("link", text, f"must hold at most {MOST_PAIRS} options") from None
    options: dict[str, str] = {}
    settings: dict[str, str] = {}
    config = ""
    for name, value in pairs:
        if name == PASTED:
            config = value
        elif name == "set":
            key, _, stated = value.partition("=")
            settings[key.strip()] = stated.strip()
        elif name not in OPTIONS:
            raise UnknownNameError("option", name, "must be one that memcalc estimate --help lists", OPTIONS)
        elif value:
            options[OPTIONS[name].name] = _no_file(name, value)
    return LinkedJob(options, settings, config)


def _no_file(name: str, value: str) -> str:
    """A value that names no file; a page is served to whoever reaches its port."""
    path = Path(value)
    reads = name in _FILED and path.suffix in {".json", ".toml"} and value != CONFIG
    reads = reads or (name == "calibration" and value != "none")
    if reads or path.is_absolute() or value.startswith("~") or ".." in path.parts:
        raise InputError(name, value, "the page reads no files of this machine; paste or drop what the file holds")
    return value


def link_of(job: JobRecord, config: str = "") -> str:
    """Return what a link to a job holds; ``config`` is the text of its pasted model.

    >>> link_of(JobRecord(command="estimate", model="gpt2", gpu="h100", options={"seq_len": 4096, "sp": False}))
    'model=gpt2&gpu=h100&seq-len=4096&sp=false'
    """
    places = {"model": job.model, "gpu": job.gpu, "node": job.node}
    options = {name: _text(value) for name, value in {**places, **job.options}.items() if value is not None}
    return LinkedJob(options, {name: _text(value) for name, value in job.settings.items()}, config).text()


def _pairs(options: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        yield name.replace("_", "-"), value
    for name, value in settings.items():
        yield "set", f"{name}={value}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
