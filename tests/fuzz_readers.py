"""Throw broken configs at every reader: `python tests/fuzz_readers.py --seconds 60 [--format NAME] [--seed N]`.

Cases are the files under tests/configs, changed at random, and random tables of the keys that a reader's source names.
Whatever comes, a reader answers with a record or with a MemcalcError, soon and in little memory; anything else is a
failure, printed with the file that reproduces it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memcalc.convert.argument_source import flag_document
from memcalc.convert.document import Document, read_document
from memcalc.convert.formats import base
from memcalc.convert.shell import read_script
from memcalc.errors import MemcalcError
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge

CONFIGS = Path(__file__).with_name("configs")
FORMATS_FOLDER = Path(base.__file__).parent
LONGEST_S = 10
"""For one case; a hang is cut off here."""
MOST_GROWTH = 512 << 20
"""Bytes that the process may grow by over all cases."""
ENDINGS = {"json": ".json", "yaml": ".yaml", "toml": ".toml", "shell": ".sh", "flags": ".sh"}
GIVEN = {
    "model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8, "seq_len": 2048, "micro_batch": 1, "settings": {},
}  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    8,
    4096,
    10**9,
    10**18,
    10**400,
    -1e308,
    1e-9,
    float("inf"),
    float("nan"),
    "",
    "auto",
    "true",
    "no",
    "1e-5",
    "bf16",
    "bfloat16",
    "fp16",
    "fp8",
    "adamw_torch",
    "full",
    "cpu",
    "nvme",
    "none",
    "0x10",
    "8:1",
    "../../etc/passwd",
    "ds.json",
    "a" * 5000,
    "\u202e",
    "é",
    "$HOME",
    "{{x}}",
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    {"a": 1},
    {"enabled": "auto"},
    {"enabled": 3},
    {"stage": 7},
    [{"path": 1}],
]
SNIPPETS = [
    "${",
    "$((",
    "$(",
    "`",
    '"',
    "'",
    "\\",
    "\\\n",
    "<<EOF\n",
    "{",
    "}",
    "[",
    "]",
    "&a ",
    "*a",
    "!!python/object:x ",
    "<<: *a",
    "---\n",
    ": ",
    "- ",
    "#",
    "\t",
    "\r\n",
    "\n",
    "=",
    "--",
    " --x ",
    "if [ ",
    " ]; then\n",
    "\nfi\n",
    "case x in\n",
    ";;\n",
    "esac\n",
    "for i in 1 2; do\n",
    "done\n",
    "f() {\n",
    "}\nf\n",
    "A+=(",
    ")",
    "eval ",
    "bash -c '",
    "X=$X$X\n",
    "99999999999999999999",
    "1e999",
    "nan",
    "\u0000",
    "\ufeff",
    "\ue000",
    "torchrun ",
    "srun ",
    "#SBATCH --nodes=",
    "#MEMCALC --",
    "{" * 70,
    "[" * 70,
    "a.b.c.d.",
    "|\n",
    ">\n",
    "? ",
    "%YAML 9\n",
]


class TooLong(BaseException):
    """A case did not end."""


def seeds(name: str, kind: str) -> list[str]:
    """Texts of a format's own examples, and of others of its kind."""
    own = sorted(path for path in CONFIGS.glob(f"{name}/**/*") if path.is_file())
    other = sorted(path for path in CONFIGS.glob(f"**/*{ENDINGS[kind]}") if path.is_file())
    return [path.read_text(encoding="utf-8", errors="replace") for path in (own or other)] or ["{}"]


def keys_of(name: str) -> list[str]:
    """Names of keys: the short texts in the source of a format, and of the modules that are named as it is."""
    found: set[str] = set()
    for path in FORMATS_FOLDER.glob(f"{name}*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {part for part in node.value.split() if re.fullmatch(r"[A-Za-z][\w.-]{1,60}", part)}
    return sorted(key.rstrip(".") for key in found)


def table(rng: random.Random, keys: list[str]) -> dict[str, Any]:
    """A random table of some of the keys, dotted ones as tables in tables."""
    data: dict[str, Any] = {}
    for key in rng.sample(keys, min(len(keys), rng.randint(0, 14))):
        inner = data
        *tables, last = key.split(".") if rng.random() < 0.9 else [key]
        for one in tables:
            found = inner.setdefault(one, {})
            inner = found if isinstance(found, dict) else {}
        inner[last] = copy.deepcopy(rng.choice(VALUES))  # a table among them may be filled later on
    return data


def as_text(data: Any, kind: str) -> str:
    """A table in a format's own syntax."""
    if kind in ("shell", "flags"):
        return "python train.py " + " ".join(f"--{key} {value}" for key, value in _flat(data))
    if kind == "toml":
        return "".join(f"{key} = {_toml(value)}\n" for key, value in _flat(data))
    return json.dumps(data)


def _flat(data: dict[str, Any], lead: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{lead}{key}.")
        else:
            yield lead + key, value


def _toml(value: Any) -> str:
    return "''" if value is None else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def mutated(rng: random.Random, text: str) -> str:
    """A text with some characters, lines and pieces changed."""
    for _ in range(rng.randint(1, 6)):
        at, length = rng.randint(0, len(text)), rng.randint(0, 40)
        how = rng.randint(0, 5)
        if how == 0:
            text = text[:at] + text[at + length :]
        elif how == 1:
            text = text[:at] + rng.choice(SNIPPETS) + text[at:]
        elif how == 2:
            text = text[:at] + text[at : at + length] * rng.randint(2, 5) + text[at + length :]
        elif how == 3:
            lines = text.splitlines(keepends=True)
            rng.shuffle(lines)
            text = "".join(lines)
        elif how == 4:
            text = re.sub(r"\b\d+\b", lambda _: str(rng.choice(VALUES))[:500], text, count=rng.randint(1, 3))
        else:
            text = text[:at] + chr(rng.randint(1, 0x2FF)) + text[at + 1 :]
    return text


def case(rng: random.Random, kind: str, own: list[str], keys: list[str]) -> str:
    """One text."""
    if rng.random() < 0.4 and keys:
        text = as_text(table(rng, keys), kind)
        return text if rng.random() < 0.7 else mutated(rng, text)
    return mutated(rng, rng.choice(own))


def read_all(name: str, path: Path) -> None:
    """Read a file as a format: as one that it is named to be of, as flags, and as one of the files of a job."""
    form = base.get_format(name)
    for read in (lambda: form.read(read_document(path)), lambda: form.read(_flags(path)), lambda: _joined(path)):
        try:
            read()
        except MemcalcError as error:
            if "\n" in str(error) or len(str(error)) > 4000:
                raise AssertionError(f"an error must be one sentence: {str(error)[:300]!r}") from error


def _flags(path: Path) -> Document:
    words = [word for command in read_script(path.read_text(encoding="utf-8")).commands for word in command.tokens]
    return flag_document(path, path.read_text(encoding="utf-8"), words, pairs=True)


def _joined(path: Path) -> None:
    merge(read_files([str(path)]), GIVEN)


def fuzz(name: str, seed: int, cases: int | None = None, seconds: float = 0.0) -> int:
    """Run cases of one format until so many are done or so much time is over; return their number."""
    rng = random.Random(f"{seed} {name}")  # noqa: S311
    kind = base.get_format(name).kind
    own, keys, done, begin = seeds(name, kind), keys_of(name), 0, time.monotonic()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    folder = Path(tempfile.mkdtemp(prefix="memcalc-fuzz-"))
    signal.signal(signal.SIGALRM, _cut_off)
    while done < cases if cases is not None else time.monotonic() - begin < seconds:
        text = case(rng, kind, own, keys)
        path = folder / f"{name}-{seed}-{done}{ENDINGS[kind]}"
        path.write_text(text, encoding="utf-8", errors="replace", newline="")
        signal.alarm(LONGEST_S)
        try:
            read_all(name, path)
        except (Exception, TooLong):  # noqa: BLE001
            signal.alarm(0)
            traceback.print_exc()
            raise SystemExit(f"{name}: case {done} of seed {seed} fails: {path}") from None
        signal.alarm(0)
        done += 1
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - grown > MOST_GROWTH:
            raise SystemExit(f"{name}: case {done} of seed {seed} takes more than {MOST_GROWTH} bytes: {path}")
        path.unlink()
    folder.rmdir()
    return done


def _cut_off(*_: object) -> None:
    raise TooLong(f"more than {LONGEST_S} s")


def main() -> None:
    """Fuzz one format, or all, for some seconds each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each format")
    parser.add_argument("--format", choices=base.FORMATS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in [options.format] if options.format else base.FORMATS:
        done = fuzz(name, options.seed, seconds=options.seconds)
        sys.stdout.write(f"{name}: {done} cases of seed {options.seed} answered\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
