"""What the comments of a script ask for: `#SBATCH` lines of Slurm, and memcalc's own.

`#SBATCH` as sbatch 26.11 reads it: the GPUs, the variables of the job. Memcalc's own lines are
`#MEMCALC --model llama-3-8b --seq-len 8192 --set strategy.x=y`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.catalog import read_toml
from memcalc.convert.config import OPTION_NAMES, Config, ConfigReader
from memcalc.convert.document import Document, KeyPath, Span, inside
from memcalc.convert.shell_values import State, Token
from memcalc.convert.shell_words import Lexer
from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.options import CHOICES, FIELDS, FLAGS, NUMBERS
from memcalc.units import parse_count

_TABLES = read_toml(files("memcalc.convert") / "slurm.toml")
_BARE, _PERHAPS, _VALUED = (frozenset(_TABLES["options"][kind].split()) for kind in ("bare", "perhaps", "valued"))
OPTIONS = _BARE | _PERHAPS | _VALUED
"""Of sbatch and srun; without a value, with one after =, with one."""
_TOKEN = re.compile(r"(?:\"[^\"]*\"|'[^']*'|\\.|[^\s#\"'\\])+")


class Option(NamedTuple):
    """One option: its value, and where option and value stand in the text."""

    value: str
    key: int
    begin: int
    end: int


def sbatch_options(text: str) -> dict[str, Option]:
    """Return the options of the `#SBATCH` lines; they end at the first line that is neither empty nor a comment."""
    options: dict[str, Option] = {}
    at = 0
    for line in text.splitlines(keepends=True):
        if line.startswith("#SBATCH"):
            begin = at + len("#SBATCH")
            body = line[len("#SBATCH") :]
            body = body[: _comment(body)]
            arguments = [(match[0], begin + match.start()) for match in _TOKEN.finditer(body)]
            options |= options_of(arguments)[0]
        elif line.strip() and not line.lstrip().startswith("#"):
            break
        at += len(line)
    return options


def _comment(body: str) -> int:
    """Where a comment begins in the rest of a line."""
    at = 0
    while match := re.compile(r"\s*(#)|\s*" + _TOKEN.pattern).match(body, at):
        if match[1]:
            return match.start(1)
        at = match.end()
    return len(body)


def options_of(arguments: Iterable[tuple[str, int]]) -> tuple[dict[str, Option], int]:
    """Return the options at the begin of some words, each with its place, and how many of the words they are."""
    listed = list(arguments)
    options: dict[str, Option] = {}
    at = 0
    while at < len(listed):
        argument, position = listed[at]
        at += 1
        if not argument.startswith("-") or argument == "--":
            return options, at - (argument != "--")
        name, begin = _named(argument)
        if begin < 0 and name not in _BARE | _PERHAPS and at < len(listed):
            value, start = listed[at]
            at += 1
        else:
            value, start = (argument[begin:], position + begin) if begin >= 0 else ("", position + len(argument))
        options[name] = Option(re.sub(r"[\"']|\\(?=.)", "", value), position, start, start + len(value))
    return options, at


def _named(argument: str) -> tuple[str, int]:
    """The name of an option, and where its value begins in the word, below 0 where it is not there."""
    if argument.startswith("--"):
        name, equals, _ = argument[2:].partition("=")
        return name, len(name) + 3 if equals else -1
    name = _TABLES["short"].get(argument[1:2], argument[1:2])
    if len(argument) > 2 and name not in _BARE:
        return name, 3 if argument[2] == "=" else 2
    return name, -1


@dataclass(frozen=True)
class Request:
    """What a job's options come to; None where they do not say it."""

    options: Mapping[str, Option]

    def value(self, *names: str) -> tuple[str, str]:
        """The first of some options that is given, and its value."""
        return next(((name, self.options[name].value) for name in names if name in self.options), ("", ""))

    def _count(self, *names: str) -> int | None:
        text = self.value(*names)[1]
        return int(text) if re.fullmatch(r"\d{1,7}", text) else None

    @property
    def nodes(self) -> int | None:
        """Nodes: as said, or as tasks and tasks of each need; one where nothing is said. None for a range."""
        text = self.value("nodes")[1]
        if text:
            low, _, high = text.partition("-")
            return int(low) if re.fullmatch(r"\d{1,7}", low) and high in ("", low) else None
        tasks, each = self._count("ntasks"), self.per_node
        if tasks and each:
            return -(-tasks // each)
        if "gpus" in self.options:  # as many as the GPUs need
            return None
        return 1 if (tasks or 1) == 1 else None

    @property
    def per_node(self) -> int | None:
        """Tasks of each node, where they are said."""
        return self._count("ntasks-per-node", "tasks-per-node")

    @property
    def tasks(self) -> int | None:
        """Tasks: as said, or from those of each node."""
        tasks = self._count("ntasks")
        if tasks is not None or self.per_node is None:
            return tasks
        return None if self.nodes is None else self.nodes * self.per_node

    @property
    def gpus(self) -> tuple[str, int | None, int | None, tuple[str, ...]]:
        """The option that asks for GPUs, GPUs of each node, GPUs in all, and their types."""
        name, text = self.value("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task", "gpus-per-socket")
        if name == "gres" and "gpu" not in text:
            name, text = self.value("gpus", "gpus-per-task", "tres-per-task", "gpus-per-socket")
        count, types = _gpus(text, bare=not name.startswith(("gres", "tres")))
        if not name or not count:
            return "", None, None, types
        each: int | None = count
        if name in ("gpus", "gpus-per-task", "tres-per-task"):
            tasks = self.tasks or self.nodes
            total = count if name == "gpus" else count * tasks if tasks else None
            each = total // self.nodes if total and self.nodes and total % self.nodes == 0 else None
            return name, each, total, types
        if name == "gpus-per-socket":
            sockets = self._count("sockets-per-node")
            each = count * sockets if sockets else None
        return name, each, each * self.nodes if each and self.nodes else None, types

    @property
    def memory(self) -> tuple[str, int | None]:
        """The option that asks for host memory, and that of each node [bytes]; 0 is all that a node has."""
        name, text = self.value("mem", "mem-per-gpu", "mem-per-cpu")
        match = re.fullmatch(r"(\d{1,12})([KMGT]?)B?", text.upper())
        if not match:
            return name, None
        amount = int(match[1]) << {"K": 10, "M": 20, "": 20, "G": 30, "T": 40}[match[2]]
        times = {"mem": 1, "mem-per-gpu": self.gpus[1], "mem-per-cpu": self._cpus}[name]
        return name, amount * times or None if times else None

    @property
    def _cpus(self) -> int | None:
        """CPUs of each node that are asked for."""
        each = self._count("cpus-per-task") or 1
        tasks, nodes = self.tasks, self.nodes
        return each * (self.per_node or (-(-tasks // nodes) if tasks and nodes else 1))


def _gpus(text: str, *, bare: bool) -> tuple[int, tuple[str, ...]]:
    """How many GPUs a request is for, and of which types: `gpu:a100:4,license:1`, or bare `a100:4`.

    >>> _gpus("gpu:a100:4,tmp:10G", bare=False)
    (4, ('a100',))
    >>> _gpus("8", bare=True)
    (8, ())
    """
    total, types = 0, list[str]()
    for item in filter(None, text.split(",")):
        parts = re.split(r"[:=]", re.sub(r"\(.*", "", item.removeprefix("gres/").removeprefix("gres:")))
        if not bare:
            if parts[0] != "gpu":
                continue
            parts = parts[1:]
        count = int(parts.pop()) if parts and re.fullmatch(r"\d{1,6}", parts[-1]) else 1
        total += count
        types += [part for part in parts[:1] if part not in types]
    return total, tuple(types)


def seconds(text: str) -> int | None:
    """A limit of time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds].

    >>> seconds("1-12:30:00"), seconds("90"), seconds("20:00:00")
    (131400, 5400, 72000)
    """
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,5}))?(?::(\d{1,5}))?", text)
    if not match:
        return None
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    if match[1] is None and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, rest = (*parts, 0, 0)[:3]
    return int(match[1] or 0) * 86400 + hours * 3600 + minutes * 60 + rest


def variables(request: Request) -> dict[str, str | None]:
    """The variables that Slurm sets in the job; None for those whose value only the job knows."""
    options, each = request.options, request.gpus[1]
    values: dict[str, str | int | None] = {
        "SLURM_JOB_NUM_NODES": request.nodes,
        "SLURM_NNODES": request.nodes,
        "SLURM_GPUS_ON_NODE": each,
        "SLURM_NTASKS": request.tasks,
        "SLURM_NPROCS": request.tasks,
        "SLURM_NTASKS_PER_NODE": request.per_node,
        "SLURM_CPUS_ON_NODE": None,
    }
    values = {name: value for name, value in values.items() if value is not None or name == "SLURM_CPUS_ON_NODE"}
    for option in ("gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task", "job-name"):
        if option in options:
            values[f"SLURM_{option.upper().replace('-', '_')}"] = options[option].value
    if "array" in options:
        values |= {"SLURM_ARRAY_TASK_ID": None, "SLURM_ARRAY_JOB_ID": None}
    return {
        **dict.fromkeys(_TABLES["variables"]["set_by_the_job"].split()),
        **{name: None if v is None else str(v) for name, v in values.items()},
    }


_LEAD = "#MEMCALC"
_COUNTS = frozenset({*NUMBERS, "nodes", "gpus_per_node", "accumulation", "train_batch", "zero", "vpp"})
"""Words that are joined with others, and so must be numbers."""
_NOT_TYPED = frozenset({"engine", "mixed", "weights"})
"""Facts that only a config states."""
_TYPED = sorted({*OPTION_NAMES, *FLAGS} - set(FIELDS) - _NOT_TYPED)


def directives(document: Document) -> Document:
    """Return the words of these lines as a document; `launch` among them is the number of a launch."""
    data: dict[str, Any] = {}
    spans: dict[KeyPath, Span] = {}
    at = 0
    for line in document.text.splitlines(keepends=True):
        if line.startswith(_LEAD) and line[len(_LEAD) : len(_LEAD) + 1] in (" ", "\t"):
            tokens = _tokens(document, at + len(_LEAD), at + len(line.rstrip()))
            _take(document, tokens, data, spans)
        at += len(line)
    return Document(document.path, "flags", document.text, data, lambda: spans)


def _tokens(document: Document, begin: int, end: int) -> list[Token]:
    """The words of a line; a variable in it would be a mistake, since nothing expands it."""
    lexer = Lexer(document.text[:end], State(document.path.name))
    lexer.at = begin
    tokens: list[Token] = []
    while lexer.at < end:
        if document.text[lexer.at] in " \t\r\n;&|()<>":
            lexer.at += 1
        elif document.text[lexer.at] == "#":
            break
        else:
            tokens += lexer.tokens()
    return tokens


def _take(document: Document, tokens: list[Token], data: dict[str, Any], spans: dict[KeyPath, Span]) -> None:
    at, where = 0, f"{document.path.name}: {_LEAD}"
    while at < len(tokens):
        flag, equals, rest = tokens[at].text.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        value: str | None = rest if equals else None
        bare = name.removeprefix("no_") in FLAGS
        if value is None and not bare and at + 1 < len(tokens) and not tokens[at + 1].text.startswith("--"):
            at += 1
            value = tokens[at].text
        if not flag.startswith("--") or (name not in {*_TYPED, "set", "launch"} and not bare):
            names = [f"--{name.replace('_', '-')}" for name in (*_TYPED, "set")]
            raise UnknownNameError(where, flag, "must be an option of memcalc estimate", names)
        if tokens[at].unknown:
            raise InputError(f"{where} {flag}", tokens[at].unknown, "must be a value: nothing expands it")
        key, setting = _pair(document.path.parent, where, name, flag, value)
        data[key] = setting
        span = tokens[at].span or (0, 0)
        spans[(key,)] = Span(span[0], *span)
        at += 1


def _pair(folder: Path, where: str, name: str, flag: str, value: str | None) -> tuple[str, Any]:
    """The word that an option is, and its value."""
    if name.removeprefix("no_") in FLAGS:
        return name.removeprefix("no_"), not name.startswith("no_")
    if value is None:
        raise InputError(where, flag, "must have a value")
    if name == "calibration" and not any(inside(Path(value), root) for root in (folder, Path())):
        raise InputError(f"{where} {flag}", value, "must lie in the script's folder, or where memcalc runs")
    if name == "set":
        key, equals, value = value.partition("=")
        if not equals:
            raise InputError(f"{where} --set", key, "must be NAME=VALUE, as in strategy.reduce_dtype=bf16")
        if key not in FIELDS:
            raise UnknownNameError(f"{where} --set", key, "must be the dotted name of a field", FIELDS)
        return key.replace(".", "/"), value
    if name in _COUNTS:
        return name, parse_count(value, f"{where} {flag}")
    if name in CHOICES and value not in CHOICES[name]:
        allowed = CHOICES[name]
        raise InputError(f"{where} {flag}", value, f"must be one of {', '.join(allowed)}", allowed)
    return name, value


def read_directives(document: Document) -> Config:
    """Return what these lines say."""
    reader = ConfigReader(document, "launch", "memcalc")
    for key in document.data:
        if key.replace("/", ".") not in OPTION_NAMES:
            where = f"{document.path.name}: {_LEAD}"
            raise UnknownNameError(where, key, "must be an option of memcalc estimate", _TYPED)
        reader.set(key.replace("/", "."), reader.raw(key), key)
    return reader.finish()
