"""A job's launch script: what it asks of Slurm, what it sets, and the training command, read and never run.

The command's own arguments are those of a framework, whose format reads them; this one finds them. `#SBATCH` lines are
read as sbatch 26.11 reads them, launchers' options as torchrun (PyTorch 2.13), Accelerate 1.15 and DeepSpeed 0.19 do.
A line `#MEMCALC --model llama-3-8b --set strategy.x=y` says what no config says, and has its way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from memcalc import catalog
from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document, Place, Span
from memcalc.convert.environment import KNOWN, read_environment
from memcalc.convert.formats.base import Format
from memcalc.convert.handover import Handover, family, is_other_work
from memcalc.convert.launchers import Launch, launch_of
from memcalc.convert.own_words import own_lines, own_words
from memcalc.convert.ranks import read_ranks
from memcalc.convert.shell import Script, Word, read_script
from memcalc.convert.slurm import OPTIONS, Option, Request, sbatch_options, seconds, variables
from memcalc.errors import FileError, InputError, MissingError, shown

_DISTRIBUTED = ("torchrun", "accelerate", "deepspeed")
_RANKS = ("NGPU", "NNODES", "NPROC_PER_NODE")
"""Variables from which some launch scripts and tools take the number of ranks."""
_SLURM_COUNTS = (
    "nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "gpus", "gpus-per-node", "gres", "gpus-per-task",
    "tres-per-task", "gpus-per-socket", "mem", "mem-per-gpu", "mem-per-cpu", "time", "constraint",
)  # fmt: skip


def read(document: Document) -> Config:
    """Return what a launch script says of a job, and which configs it hands over."""
    if document.kind == "flags":
        return own_words(document)
    text, name = document.text, document.path.name
    options = sbatch_options(text)
    script = read_script(text, variables(Request(options)) if options else {}, name)
    own = own_lines(document)
    launch = _chosen(script, name, text, own)
    facts = _Facts(text)
    for key, option in options.items():
        facts.add(f"#SBATCH --{key}", option.value or True, Span(option.key, option.begin, option.end))
    _collect(facts, launch, script, bool(options))
    reading = Reading(facts.document(document), "launch", "Slurm 26.11 and the launchers")
    _slurm(reading, _request(options, launch), bool(options))
    if launch is not None:
        read_ranks(reading, launch, script)
        for one in Handover(document.path, text, script, launch).references():
            reading.references.append(one)
        if not reading.references and launch.launcher != "shell":
            says = f"{launch.script}'s own arguments are of no framework that memcalc knows, and count for nothing here"
            reading.note("warning", "MC001", "", says)
        if launch.launcher == "shell" and not reading.references:
            reading.refer("launch", launch.script, path=launch.script)
    read_environment(reading)
    reading.harmless(*_RANKS)
    if own.data:
        reading.refer("launch", "#MEMCALC", document=own)
    return reading.finish(known=[f"#SBATCH --{name}" for name in OPTIONS])


@dataclass
class _Facts:
    """What was found, each under a name as the script has it, with its place."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    spans: dict[Place, Span] = field(default_factory=dict)
    unknown: dict[Place, str] = field(default_factory=dict)

    def add(self, key: str, value: Any, span: Span | None, unknown: str = "") -> None:
        """Note one."""
        if unknown:
            self.unknown[(key,)] = unknown
        else:
            self.data[key] = value
        if span is not None:
            self.spans[(key,)] = span

    def word(self, key: str, word: Word) -> None:
        """Note the word that is an option's or a variable's value."""
        begin = next((place for place in word.places if place >= 0), None)
        span = None if begin is None else Span(begin, *(word.span or (-1, -1)))
        self.add(key, word.text, span, word.unknown)

    def document(self, origin: Document) -> Document:
        """All of it as a document."""
        return Document(origin.path, "shell", origin.text, self.data, lambda: self.spans, self.unknown)


def _collect(facts: _Facts, launch: Launch | None, script: Script, sbatch: bool) -> None:
    """Note the launcher's options, those of its srun, and the variables that change memory."""
    settings = {**script.variables, **(launch.command.settings if launch else {})}
    for name in (*KNOWN, *_RANKS):
        if name in settings:
            facts.word(name, settings[name])
    if launch is None:
        return
    for name, setting in launch.settings.items():
        key = f"{launch.launcher} --{name}"
        facts.word(key, setting.value or Word("True", setting.flag.places, setting.flag.unknown))
    for key, option in launch.step.items():
        if not sbatch and key in _SLURM_COUNTS:
            facts.add(f"srun --{key}", option.value, Span(option.key, option.begin, option.end))


def _request(options: dict[str, Option], launch: Launch | None) -> Request:
    """What the job asks for: of sbatch, and without it of the srun that starts the training."""
    step = launch.step if launch else {}
    return Request(options or {key: option for key, option in step.items() if key in _SLURM_COUNTS})


# -------------------------------------------------------------------------------------------------------- the launch


def _chosen(script: Script, name: str, text: str, own: Document) -> Launch | None:
    """The training command. Of several the one that a line `#MEMCALC --launch N` names; else it is asked for."""
    launches = [launch for command in script.commands if (launch := launch_of(command)) is not None]
    likely = [one for one in launches if not is_other_work(one)]
    trains = [one for one in likely if one.launcher in _DISTRIBUTED or family(one)]
    found = _different(trains or [one for one in likely if one.launcher != "shell"] or likely)
    if not found and not launches and not own.data and "#SBATCH" not in text:
        raise FileError("file", name, "must start a training: it has no command that memcalc knows")
    wanted = own.data.pop("launch", None)
    if wanted is not None:
        if not str(wanted).isdecimal() or len(str(wanted)) > 4 or not 1 <= int(wanted) <= len(found):
            raise InputError("#MEMCALC --launch", wanted, f"must be from 1 to {len(found)}, the launches of {name}")
        return found[int(wanted) - 1]
    if len(found) > 1:
        lines = [text.count("\n", 0, one.command.begin) + 1 for one in found]
        listed = "; ".join(
            f"{number}: {one.launcher} {shown(one.script)[1:-1]} of line {line}"
            for number, (one, line) in enumerate(zip(found[:9], lines, strict=False), 1)
        )
        raise MissingError(
            f"{name} starts {len(found)} trainings ({listed}), each of which must fit: choose one by a line "
            f"`#MEMCALC --launch 1` in {name}, or give each a script of its own."
        )
    return found[0] if found else None


def _different(launches: list[Launch]) -> list[Launch]:
    """Each launch once: branches of a condition often start the same one."""
    found: dict[tuple[str, ...], Launch] = {}
    for one in launches:
        found.setdefault(tuple(word.text for word in one.command.words), one)
    return list(found.values())


# -------------------------------------------------------------------------------------------------------------- Slurm


def _slurm(reading: Reading, request: Request, sbatch: bool) -> None:
    """State what the job asks the queue for."""
    lead = "#SBATCH --" if sbatch else "srun --"
    if not request.options:
        return
    name, each, whole, types = request.gpus
    if request.nodes is not None or whole is None or "nodes" in request.options:
        _count(reading, "nodes", request.nodes, lead + (request.value("nodes", "ntasks")[0] or "nodes"), 1)
    if each is not None:
        reading.say("gpus_per_node", each, lead + name)
    elif whole is not None:
        reading.say("gpus", whole, lead + name)
    elif name:
        reading.ask("gpus_per_node", lead + name, str(reading.raw(lead + name)))
    if types:
        _gpu(reading, types, lead + request.value("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task")[0])
    else:
        _constraint(reading, request, lead)
    key, memory = request.memory
    if memory is not None:
        reading.say("host_memory", memory, lead + key)
    limit = request.value("time")[1]
    if limit and seconds(limit) is not None:
        reading.say("time_limit", seconds(limit), f"{lead}time")
    reading.harmless(*(lead + option for option in OPTIONS))


def _count(reading: Reading, word: str, value: int | None, key: str, least: int) -> None:
    if value is None:
        reading.ask(word, key, str(reading.raw(key, key)))
    elif value < least:
        raise reading.wrong(key, value, f"must be a whole number from {least}")
    else:
        reading.say(word, value, key)


def _gpu(reading: Reading, types: tuple[str, ...], key: str) -> None:
    if len(types) > 1:
        raise reading.wrong(
            key, reading.raw(key), f"asks for GPUs of {len(types)} types: memcalc counts one type a job"
        )
    reading.say("gpu", types[0], key)


def _constraint(reading: Reading, request: Request, lead: str) -> None:
    """A feature that is called as a GPU is, such as `a100-80g` or `v100-32g`, names the GPU."""
    presets = [re.sub(r"[\s_]+", "-", name.lower()) for name in catalog.names("gpu")]
    features = re.split(r"[&|,*()\[\]]+", request.value("constraint")[1])
    found = [one for one in features if any(_begins(name, one.lower().replace("_", "-")) for name in presets)]
    if len(found) == 1:
        reading.say("gpu", found[0], f"{lead}constraint")


def _begins(name: str, feature: str) -> bool:
    return bool(re.match(r"[a-z]+\d", feature)) and (name == feature or name.startswith(f"{feature}-"))


def _recognise(document: Document) -> bool:
    """Whether a text is a script that starts something, or that asks Slurm for something."""
    return document.kind == "shell" and bool(document.text.strip())


FORMAT = Format(
    name="launch",
    title="launch script",
    software="Slurm 26.11, torchrun 2.13, Accelerate 1.15, DeepSpeed 0.19",
    recognise=_recognise,
    read=read,
    kind="shell",
)
"""An sbatch script or a plain one."""
