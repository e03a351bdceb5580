"""Several configs as the words of one estimate: what each says, which one has its way, and what follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memcalc import catalog
from memcalc.convert.config import Config, Finding, Said
from memcalc.convert.facts import FACTS
from memcalc.errors import MissingError
from memcalc.planner.request import NUMBERS, SETTINGS, check_words
from memcalc.planner.settings import FIELDS
from memcalc.preflight.names import gpu_named, model_named, preset_like
from memcalc.preflight.runtime import (
    compared,
    filled_in,
    mismatches,
    precision,
    prevails,
    sharded,
    trimmed,
    yields,
)
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.units import parse_count

__all__ = ["Joined", "joined"]

_ENGINES = ("deepspeed", "fsdp2", "fsdp1", "ddp", "trainer")
"""What decides how the states are kept, the most particular first."""
_NEEDED = ("model", "gpu", "gpus", "seq_len", "micro_batch")
"""What no default can stand for: each changes the answer by as much as the job is large."""


@dataclass
class Joined:
    """The words of the job, where each came from, and what was found while joining."""

    words: dict[str, Any] = field(default_factory=dict)
    """For :func:`memcalc.estimate`."""
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """What is no word itself (:mod:`memcalc.convert.facts`)."""
    origins: dict[str, tuple[Config, Said]] = field(default_factory=dict)
    """By word, field or fact: the config that had its way; none for what the user typed."""
    engines: set[str] = field(default_factory=set)
    findings: list[tuple[Config, Finding]] = field(default_factory=list)

    def place(self, name: str) -> dict[str, Any]:
        """Where a name belongs."""
        return self.facts if name in FACTS else self.settings if name in FIELDS else self.words

    def take(self, config: Config, said: Said) -> None:
        """Keep what a file says; what is stated goes before a default, and of two statements the later one."""
        if said.word == "engine":
            self.engines.add(said.value)
            return
        before = self.origins.get(said.word)
        if before is not None and (
            (said.default and not yields(before[1], said)) or self._prevails(before, config, said)
        ):
            return
        if before is not None and said.word == "gpu" and str(said.value) in str(before[1].value):
            return
        if before is not None and said.word == "offload":  # each file names a part
            said = replace(said, value=tuple(dict.fromkeys((*before[1].value, *said.value))))
            before = None
        if before is not None and not before[1].default and before[1].value != said.value:
            self._conflict(before, config, said)
        self.origins[said.word] = (config, said)
        self.place(said.word)[said.word] = said.value

    @staticmethod
    def _prevails(before: tuple[Config, Said], config: Config, said: Said) -> bool:
        return not before[1].default and prevails(before, config, said)

    def _conflict(self, before: tuple[Config, Said], config: Config, said: Said) -> None:
        if compared(before, config, said) or said.word in {"optimizer_impl", "gpu"}:
            return  # a queue's word for a GPU is often a part of its name
        if (config.format, config.document.kind) == ("launch", "flags"):  # a line #MEMCALC: the user's own word
            return
        first, other = before[0].document.path.name, before[1]
        message = (
            f"{said.field} is {_shown(said.value)}, and {other.field} of {first} is {_shown(other.value)}: "
            f"counted as {_shown(said.value)}"
        )
        self.findings.append((config, Finding("warning", "MC003", said.field, message, "say it once", said.place)))

    def typed(self, words: Mapping[str, Any]) -> None:
        """Take what the user typed, which has its way."""
        for name, value in words.items():
            if value is not None:
                self.origins.pop(name, None)
                self.place(name)[name] = value

    @property
    def ways(self) -> int:
        """Ranks that share one copy of the data [-]."""
        return int(self.words.get("tp", 1)) * int(self.words.get("pp", 1)) * int(self.words.get("cp", 1))


def joined(configs: Iterable[Config], given: Mapping[str, Any], dirs: tuple[str, ...] = ()) -> Joined:
    """Join configs; ``given`` are the words that the user typed, with ``settings``.

    Raises :class:`memcalc.errors.MissingError` that names all that must be told.
    """
    job, configs = Joined(), tuple(configs)
    for config in configs:
        for said in config.said:
            job.take(config, said)
    job.typed({name: value for name, value in given.items() if name != "settings"})
    for name, value in given.get("settings", {}).items():
        if value is None:
            continue
        word = SETTINGS.get(name, name)
        job.origins.pop(word, None)
        (job.settings if word == name and name not in FACTS else job.place(word))[word] = value
    _checked(job)
    _sequence_parallel(job)
    _counts(job)
    _framework(job)
    sharded(job)
    precision(job)
    mismatches(job, configs)
    trimmed(job)
    _tell(job)
    if "gpu" in job.origins:
        job.facts["gpu"] = gpu_named(job.facts["gpu"], dirs)
    if "model" in job.origins:
        job.facts["model"] = _model(job, dirs)
    _attention(job, dirs)
    filled_in(job, dirs)
    _unsharded(job)
    _batch(job)
    return job


def _checked(job: Joined) -> None:
    """Check each word by itself, as an estimate does, before anything is derived from it; numbers become numbers."""
    settings = {name: value for name, value in job.settings.items() if value is not None}
    found = check_words({name: value for name, value in job.words.items() if value is not None}, settings).given
    job.words |= {name: found[name] for name in (*NUMBERS, "zero") if name in found}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _model(job: Joined, dirs: tuple[str, ...]) -> str | Model:
    """The model that a file names, or describes by its sizes."""
    said = job.facts["model"]
    if not isinstance(said, Mapping):
        return model_named(str(said), _folder(job), dirs)
    vocab = job.facts.get("model.vocab", said.get("vocab"))
    return preset_like(from_flat({**said, "vocab": parse_count(vocab, "model.vocab")}), dirs)


def _attention(job: Joined, dirs: tuple[str, ...]) -> None:
    """Transformer Engine's choice: cuDNN from Hopper on, flash attention on Ampere; it has no fused kernel for fp32.

    Its release 2.11, attention/dot_product_attention/utils.py, get_attention_backend.
    """
    if job.facts.get("attention_library") != "te" or job.words.get("attention") or job.words.get("precision") == "fp32":
        return
    capability = catalog.gpu(str(job.facts["gpu"]), dirs).compute_capability
    if capability is not None and float(capability) >= 8:
        job.words["attention"] = "cudnn" if float(capability) >= 9 else "flash"


def _unsharded(job: Joined) -> None:
    """Warn of torchtitan on a single data-parallel rank: without FSDP it trains fp32 weights (parallelize_llama)."""
    origin = job.origins.get("framework")
    if origin is None or origin[1].value.partition("@")[0] != "torchtitan" or int(job.words.get("cp", 1)) > 1:
        return
    if int(job.words["gpus"]) <= job.ways:
        config, said = origin
        says = "FSDP and its mixed precision need two data-parallel ranks; counted as FSDP on one"
        message = f"one data-parallel rank changes memory and is not modelled: {says}"
        job.findings.append((config, Finding("warning", "MC002", said.field, message, place=said.place)))


def _folder(job: Joined) -> str:
    """Where a path to a model starts: the folder of the file that names it."""
    origin = job.origins.get("model")
    return str(origin[0].document.path.parent) if origin else "."


def _sequence_parallel(job: Joined) -> None:
    """Without tensor parallelism a sequence is shared with nobody: frameworks switch it off, and so it counts."""
    if job.words.get("sp") and int(job.words.get("tp", 1)) == 1 and "sp" in job.origins:
        config, said = job.origins["sp"]
        message = (
            "sequence parallelism shares a sequence out over tensor-parallel ranks, and there is one: it saves nothing"
        )
        suggestion = "tensor parallelism of 2 or more"
        job.findings.append((config, Finding("warning", "MC107", said.field, message, suggestion, said.place)))
        job.words["sp"] = False


def _counts(job: Joined) -> None:
    """GPUs in all: as said, or from nodes and GPUs of each, or from the parts of the batch; or the micro-batch."""
    if job.words.get("gpus") is not None:
        _share(job)
        return
    each, nodes = job.facts.get("gpus_per_node"), job.facts.get("nodes")
    if each is not None:
        job.words["gpus"] = int(each) * int(nodes or 1)
        _share(job)
        return
    whole, micro, steps = job.facts.get("train_batch"), job.words.get("micro_batch"), job.facts.get("accumulation")
    if whole and micro and steps and int(whole) % (int(micro) * int(steps)) == 0:
        job.words["gpus"] = int(whole) // (int(micro) * int(steps)) * job.ways


def _share(job: Joined) -> None:
    """The micro-batch where only the whole is said (DeepSpeed 0.19, config.py, _set_batch_related_parameters)."""
    whole = job.facts.get("train_batch")
    if whole is not None and job.words.get("micro_batch") is None and "micro_batch" not in job.origins:
        ranks = max(int(job.words["gpus"]) // job.ways, 1)
        job.words["micro_batch"] = max(int(whole) // ranks // int(job.facts.get("accumulation") or 1), 1)


def _framework(job: Joined) -> None:
    """Which runtime keeps the states: said by name, or following from the engines that the files name."""
    if job.words.get("framework") is not None or not job.engines:
        return
    engine = next(name for name in _ENGINES if name in job.engines)
    if engine == "fsdp1" and "trainer" in job.engines:
        engine = "hf"
    elif engine == "trainer":
        engine = "ddp" if int(job.words.get("gpus", 1)) > 1 else "hf"
    job.words["framework"] = engine


def _tell(job: Joined) -> None:
    """Ask at once for all that no file says and no default can stand for."""
    asked = [
        f"{_flag(name)} (line of {config.document.path.name}: {said.field} comes from {said.unknown!r}, which only a run tells)"  # noqa: E501
        for name, (config, said) in job.origins.items()
        if said.unknown
    ]
    known = {**job.words, **job.facts}
    asked += [_flag(name) for name in _NEEDED if known.get(name) is None and name not in job.origins]
    sizes = job.facts.get("model")
    if isinstance(sizes, Mapping) and sizes.get("vocab") is None and known.get("model.vocab") is None:
        asked.append("--set model.vocab=… (the tokenizer's)")
    if asked:
        raise MissingError(f"the files do not say all that the answer depends on: give {', '.join(asked)}.")


def _flag(name: str) -> str:
    return f"--set {name}=…" if name in FIELDS else f"--{name.replace('_', '-')}"


def _batch(job: Joined) -> None:
    """The global batch, from its parts; a whole that is said and not the product of its parts is an error."""
    gpus, micro = int(job.words["gpus"]), int(job.words["micro_batch"])
    ranks = max(gpus // job.ways, 1)
    whole, steps = job.facts.get("train_batch"), job.facts.get("accumulation")
    if job.words.get("global_batch") is not None or (whole is None and steps is None):
        return
    if whole is None:
        job.words["global_batch"] = micro * int(steps or 1) * ranks
        return
    if steps is not None and int(whole) != micro * int(steps) * ranks and "train_batch" in job.origins:
        config, said = job.origins["train_batch"]
        message = (
            f"{said.field} is {whole}, and micro-batch {micro} × accumulation {steps} × {ranks} data-parallel ranks "
            f"is {micro * int(steps) * ranks}: the job stops at its start"
        )
        suggestion = f"{said.field} {micro * int(steps) * ranks}"
        job.findings.append((config, Finding("error", "MC106", said.field, message, suggestion, said.place)))
        whole = micro * int(steps) * ranks
    job.words["global_batch"] = int(whole)
