"""A search over layouts of post-training: :func:`plan_rl` lists the jobs that fit, the best first.

What a search of post-training decides: options that were not typed, with the values that a framework can be told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import ceil, inf, log
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.errors import InputError
from memcalc.formulas.serving import decode_seconds, decoded_token_reads
from memcalc.posttraining import cast_of, host_bytes, judged, roles_of, rollout_of
from memcalc.posttraining.figures import Figures
from memcalc.posttraining.frameworks import Recipe, Toolkit, recipe_of, toolkit_of
from memcalc.posttraining.phases import Cast, phases_of
from memcalc.posttraining.words import RlJob, check_engines, completed, read_words
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memcalc.results.posttraining import UpdateTime
    from memcalc.specs.hardware import GPU, Node

Values = dict[str, Any]
"""Options of ``memcalc rl`` by name."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of a GPU that an engine may take beside a trainer."""
RANKS = (1, 2, 4, 8)
"""Ranks of one engine: as far as a host has GPUs."""
PARTS = (0.25, 0.5, 0.75)
"""Shares of all GPUs that engines may have to themselves."""
SAMPLES, FEW_SAMPLES = (1, 2, 4, 8), (1, 4)
"""Samples of a micro-batch, and those that are tried beside engines."""
BUDGETS = (8192, 32768)
"""Tokens of a micro-batch of packed samples, beside the one sample that it must hold."""
MOST_SEQS = 1024
"""Sequences that an engine is let run at once at the most: vLLM's own default on large cards."""


@dataclass(frozen=True)
class Space:
    """The options that are open."""

    typed: Mapping[str, Any]
    toolkit: Toolkit
    recipe: Recipe
    gpus: int
    length: int
    """The longest prompt with the longest response [tokens]."""

    def _open(self, name: str, values: Iterable[Any]) -> list[Values]:
        """Each value of an option that was not typed, else nothing to add."""
        return [{}] if name in self.typed else [{name: value} for value in values]

    def splits(self) -> list[Values]:
        """Engines beside the trainer, then on GPUs to themselves."""
        if not self.recipe.online:
            return [{}]
        sizes = {int(self.gpus * part) for part in PARTS} - {0, self.gpus}
        return [{}] if "engine_gpus" in self.typed else [{}, *({"engine_gpus": size} for size in sorted(sizes))]

    def trainers(self, gpus: int) -> Iterator[Values]:
        """How models are trained on so many GPUs, what is simplest and fastest first; micro-batches left out."""
        choices = self.toolkit.choices
        zero = choices.zero if gpus > 1 else ()
        axes = (
            self._open("offload", choices.offload),
            self._open("zero", zero) if zero else [{}],
            self._open("recompute", ("none", "full")),
        )
        for parts in product(*axes):
            yield {name: value for part in parts for name, value in part.items()}

    def batches(self) -> list[Values]:
        """Sizes of a micro-batch, the smallest first."""
        if {"micro_batch", "micro_tokens"} & set(self.typed):
            return [{}]
        if not (self.toolkit.choices.packs and self.recipe.online):
            return [{"micro_batch": size} for size in (FEW_SAMPLES if self.recipe.online else SAMPLES)]
        return [{"micro_tokens": size} for size in (self.length, *(size for size in BUDGETS if size > self.length))]

    def rests(self, *, apart: bool) -> Iterator[Values]:
        """What leaves a GPU between phases: trained models, and engines on the same GPUs."""
        choices = self.toolkit.choices
        if not self.recipe.online or apart:
            yield {}
            return
        for park, sleep in product(self._open("park", choices.park), self._open("sleep", choices.sleep)):
            yield {**park, **sleep}

    def engines(self, gpus: int, samples: int, *, apart: bool) -> Iterator[Values]:
        """Engines on so many GPUs for so many samples of a step; their share is left out."""
        decided = self.toolkit.at_once and not apart
        ranks = [rank for rank in RANKS if gpus % rank == 0]
        for tp in self._open("engine_tp", ranks):
            share = -(-samples * tp.get("engine_tp", 1) // gpus)
            sizes = sorted({self.toolkit.max_seqs or 256, min(share, MOST_SEQS)})
            yield from [tp] if decided else [{**tp, **seqs} for seqs in self._open("max_seqs", sizes)]

    def shares(self, *, apart: bool) -> list[Values]:
        """Shares of a GPU that an engine may take, the smallest first."""
        return [{}] if apart else self._open("utilization", SHARES)


DEFAULT_SEQS = 256
"""Sequences that an engine runs at once where a framework says no number (``posttraining.figures``)."""
CLOSE = 1.05
"""Plans whose times differ by less are taken for equally fast, and the simpler one goes first."""


@dataclass(frozen=True)
class Found:
    """A job that was computed."""

    job: RlJob
    choices: Values
    """What was decided."""
    changes: Values
    """Of it what is not the framework's default."""
    cast: Cast
    tight: bool
    rounds: int
    """Of generation, [1]."""
    rollout: float
    """A guess [s]."""
    update: UpdateTime | None
    headroom: int
    """Bytes."""

    @property
    def idea(self) -> tuple[object, ...]:
        """What plans have in common of which one is listed."""
        inputs = self.job.inputs
        if self.job.recipe.online:
            return inputs.engine_gpus, inputs.engine_tp
        return tuple(self.job.training.get(name) for name in ("zero", "recompute", "offload"))

    @property
    def order(self) -> tuple[object, ...]:
        """What fits with room first, then what is fast, takes few rounds, is simple, and leaves most free."""
        seconds = self.rollout + (self.update.seconds if self.update else 0)
        return self.tight, round(log(max(seconds, 1e-9)) / log(CLOSE)), self.rounds, len(self.changes), -self.headroom


@dataclass
class Missed:
    """The job that lacks least of those that do not fit."""

    options: Values = field(default_factory=dict)
    reason: str = ""
    lacks: float = inf
    """Bytes."""


@dataclass
class Search:
    """One question."""

    model: str
    gpu: str
    gpus: int
    node: str | None
    dirs: tuple[str, ...]
    typed: Values
    figures: Figures = field(default_factory=Figures)
    searched: int = 0
    missed: Missed = field(default_factory=Missed)
    error: InputError | None = None
    """The first that a job was refused with: what is told where all are."""

    @cached_property
    def space(self) -> Space:
        """What is open."""
        given = read_words(self.typed)
        toolkit = toolkit_of(given["framework"])
        recipe = recipe_of(toolkit, given["algorithm"])
        return Space(self.typed, toolkit, recipe, self.gpus, given["prompt"] + given["response"])

    @cached_property
    def samples(self) -> int:
        """Samples that times are of: the responses of a step, else the largest micro-batch on each rank, [1]."""
        given = read_words(self.typed)
        if not self.space.recipe.online:
            return int(max(*SAMPLES, given.get("micro_batch", 1)) * self.gpus)
        return int(given.get("prompts", 1) * given.get("samples", 1))

    @cached_property
    def chip(self) -> GPU:
        """Of which there are so many."""
        return catalog.gpu(self.gpu, self.dirs)

    @property
    def capacity(self) -> int:
        """Of one GPU [bytes]."""
        return self.chip.memory_bytes

    @cached_property
    def host_capacity(self) -> int | None:
        """Of a node [bytes]; None where it is its owner's choice."""
        return self.host.host_memory_bytes

    @cached_property
    def host(self) -> Node:
        """A node."""
        if self.node:
            return catalog.node(self.node, self.dirs)
        return catalog.node_for(self.chip, self.dirs)

    def job(self, options: Values) -> RlJob:
        """The job that ``memcalc rl`` makes of the same options."""
        job = completed(self.model, self.gpu, self.gpus, self.node, options, self.dirs, {})
        if job.recipe.online:
            check_engines(job)
        return job

    def found(self) -> Iterator[Found]:
        """Every job that fits."""
        for split in self.space.splits():
            size = split.get("engine_gpus") or read_words(self.typed).get("engine_gpus", 0)
            for trainer in self._trainers(split, self.gpus - size):
                for rest in self.space.rests(apart=bool(size)):
                    yield from self._engines({**self.typed, **split, **trainer, **rest}, size)

    def _trainers(self, split: Values, gpus: int) -> Iterator[Values]:
        """Trainers that fit by themselves.

        What is kept on the host is tried only where nothing else fits, and blocks are computed again only for
        micro-batches that do not fit otherwise.
        """
        fitting: dict[tuple[object, object], int] = {}
        for trainer in self.space.trainers(gpus):
            offload, zero = trainer.get("offload", "none"), trainer.get("zero")
            if offload != "none" and any(known == "none" for known, _ in fitting):
                return
            for batch in self.space.batches()[fitting.get((offload, zero), 0) :]:
                options = self.typed | split | trainer | batch
                if not self._trains(options):
                    break
                fitting[offload, zero] = fitting.get((offload, zero), 0) + 1
                yield {name: value for name, value in options.items() if name not in self.typed}

    def _trains(self, options: Values) -> bool:
        """Whether the trained models fit where all that can leave the GPU does."""
        if self.space.recipe.online:
            options = {"park": self.space.toolkit.choices.park[-1], "engine_tp": 1} | options
        try:
            cast = roles_of(self.job(options), self.figures)
        except InputError as error:
            self.error = self.error or error
            return False
        self.searched += 1
        phase = max(phases_of(cast), key=lambda phase: phase.allocated)
        lacks = phase.allocated - self.capacity
        if lacks > 0:
            self._missed(options, f"{phase.name} lacks memory", lacks)
        return lacks <= 0

    def _engines(self, options: Values, size: int) -> Iterator[Found]:
        """The job with each engine, of whose shares only those that take fewer rounds."""
        if not self.space.recipe.online:
            yield from self._computed(options)
            return
        for engine in self.space.engines(size or self.gpus, self.samples, apart=bool(size)):
            least = inf
            for share in self.space.shares(apart=bool(size)):
                for result in self._computed({**options, **engine, **share}):
                    if result.rollout < least:
                        least = result.rollout
                        yield result

    def _computed(self, options: Values) -> Iterator[Found]:
        """The job, if it fits."""
        try:
            usual = usual_of(self.job(options))
            decided = {name: value for name, value in options.items() if name not in self.typed}
            changes = {name: value for name, value in decided.items() if value != usual.get(name)}
            job = self.job(self.typed | changes)
            cast = cast_of(job, self.figures, advice=False)
        except InputError as error:
            self.error = self.error or error
            return
        self.searched += 1
        phases = tuple(phases_of(cast))
        verdict, reason = judged(cast, phases, self.capacity)
        binding = max(phase.allocated for phase in phases)
        host = host_bytes(cast, min(self.host.gpus_per_host, self.gpus))
        if self.host_capacity is not None and host > self.host_capacity:
            text = f"{host / GIB:.0f} GiB of host memory are needed, and a node has {self.host_capacity / GIB:.0f}"
            self._missed(options, text, host - self.host_capacity)
            return
        if verdict == "does-not-fit":
            self._missed(options, reason, max(0, binding - self.capacity))
            return
        update, guess = self.figures.updates(job, self.samples), rollout_guess(cast, self.chip)
        tight, headroom = verdict == "tight", self.capacity - binding
        rollout = rollout_of(cast)
        rounds = rollout.rounds or 0 if rollout else 0
        yield Found(job, decided, changes, cast, tight, rounds, guess, update, headroom)

    def _missed(self, options: Values, reason: str, lacks: float) -> None:
        if lacks < self.missed.lacks:
            self.missed = Missed(options, reason, lacks)


def rollout_guess(cast: Cast, gpu: GPU) -> float:
    """The time to read what generation reads at the memory's full speed, all samples of the longest length [s]."""
    job, served = cast.job, cast.served
    if served is None:
        return 0.0
    inputs = job.inputs
    engines = (inputs.engine_gpus or job.gpus) // inputs.engine_tp
    samples = ceil(max(1, inputs.prompts) * max(1, inputs.samples) / engines)
    rounds = ceil(samples / max(1, min(served.concurrency, served.max_seqs)))
    stage = served.stages[0]
    reads = sum(
        group.layers * group.token_bytes * decoded_token_reads(inputs.prompt, inputs.response, group.window)
        for group in stage.groups
    )
    active = served.model.active_parameters / served.model.parameters
    weights = stage.size("weights") * active
    return float(decode_seconds(rounds * inputs.response, weights, samples * reads, gpu.bandwidth_bytes_per_s))


def usual_of(job: RlJob) -> Values:
    """What the framework takes of what is searched where nothing is typed."""
    toolkit, apart = job.toolkit, bool(job.inputs.engine_gpus)
    seqs = {"max_seqs": toolkit.max_seqs or DEFAULT_SEQS} if toolkit.batched else {}
    return seqs | {
        "utilization": toolkit.apart if apart else toolkit.utilization,
        "engine_tp": toolkit.engine_tp,
        "sleep": "0" if apart else toolkit.sleep,
        "park": ",".join(toolkit.parks) or "none",
        "zero": toolkit.zero,
        "recompute": toolkit.recompute,
        "micro_batch": toolkit.micro_batch,
        "offload": "none",
    }
