"""What each remedy saves and costs, and the usual order of tuning: the cheapest remedy first, then a full card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from memcalc import results
from memcalc.errors import MemcalcError
from memcalc.planner import request as rq
from memcalc.planner.axes import MICRO_BATCHES, OFFLOADS, policies
from memcalc.planner.finalists import Finalist, finalist
from memcalc.planner.request import flag

if TYPE_CHECKING:
    from memcalc.planner.job import Job
    from memcalc.planner.search import Found

Stage = Literal["start", "16-bit compute", "recompute", "offload", "fill the card"]
OTHERS: tuple[dict[str, Any], ...] = (
    {"loss": "fused-linear"},
    {"optimizer": "adamw-8bit"},
    {"optimizer_in_backward": True},
    {"zero": 3},
    {"tp": 2},
)
"""Remedies that are neither recomputation nor offload."""


@dataclass(frozen=True)
class Tuning:
    """A job on a number of GPUs with everything pinned that is not being tuned."""

    job: Job
    gpus: int

    def at(self, words: dict[str, Any]) -> Found | None:
        """The strategy with some words, on a card with room for it; None where it cannot run."""
        given = self.job.request.given
        open_words = {name: value for name, value in words.items() if name not in given}
        try:
            outcome = self.job.pinned(gpus=self.gpus, **open_words).unlimited().search([self.gpus], 1).get(self.gpus)
        except MemcalcError:
            return None
        return outcome.best[0] if outcome and outcome.best else None

    def replayed(self, words: dict[str, Any]) -> Finalist | None:
        """The same with its replayed figures."""
        found = self.at(words)
        return finalist(self.job.unlimited(), found) if found else None

    def fits(self, one: Finalist) -> bool:
        """Whether it fits on the real card."""
        return one.peaks.top.device <= self.job.gpu.memory_bytes


def start(job: Job) -> dict[str, Any]:
    """Plain training: no parallelism beyond data, no recomputation, no offload, one sequence at a time."""
    _, habits = rq.habits_for(job.request)
    degrees = dict.fromkeys(("tp", "pp", "cp", "ep"), 1) if habits.tensor_parallel else {}
    stage = rq.zero_stages(job.request, habits)[0]
    return {**degrees, "zero": stage, "recompute": "none", "offload": (), "micro_batch": 1, "optimizer": "adamw"}


def sixteen_bit(job: Job) -> str:
    """The usual precision with 16-bit compute."""
    _, habits = rq.habits_for(job.request)
    return rq.precisions_for(job.gpu, habits, start(job)["zero"])[0]


def remedies(job: Job, gpus: int) -> tuple[results.Remedy, ...]:
    """What each remedy saves and adds beside plain 16-bit training, the best return first."""
    tuning, base = Tuning(job, gpus), {**start(job), "precision": sixteen_bit(job)}
    plain = tuning.at(base)
    if plain is None:
        return ()
    found = [remedy for words in _each(job) if (remedy := _remedy(tuning, base, words, plain)) is not None]
    return tuple(sorted(found, key=lambda one: (one.saved <= 0, one.slower > 0, -(one.roi or 0), -one.saved)))


def _each(job: Job) -> Iterator[dict[str, Any]]:
    yield from ({"recompute": policy} for policy in policies(job.model.num_layers) if policy != "none")
    yield from ({"offload": choice} for choice in OFFLOADS if choice)
    yield from OTHERS


def _remedy(tuning: Tuning, base: dict[str, Any], words: dict[str, Any], plain: Found) -> results.Remedy | None:
    name, value = next(iter(words.items()))
    if tuning.job.request.given.get(name) is not None or base.get(name) == value:
        return None
    found = tuning.at({**base, **words})
    if found is None:
        return None
    saved = 1 - found.reserved / plain.reserved
    slower = plain.tokens_per_second_per_gpu / found.tokens_per_second_per_gpu - 1
    return results.Remedy(
        change=f"--{flag(name)}" if value is True else f"--{flag(name)} {_typed(value)}",
        reserved=found.reserved,
        saved=saved,
        slower=slower,
        roi=saved / slower if slower > 0 else None,
        tokens_per_second_per_gpu=found.tokens_per_second_per_gpu,
    )


def _typed(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Taken:
    """One step of the usual order, with the strategy that it arrives at."""

    stage: Stage
    word: str
    """What it changes of the step before."""
    one: Finalist
    fits: bool


def recipe(job: Job, gpus: int) -> tuple[results.RecipeStep, ...]:
    """The usual order as results."""
    return tuple(_step(taken) for taken in steps_of(job, gpus))


def steps_of(job: Job, gpus: int, precision: str = "") -> list[Taken]:
    """The usual order: 16 bits; recompute where it does not fit; offload where it still does not; then a full card.

    ``precision`` takes the place of the usual one with 16-bit compute.
    """
    tuning, words = Tuning(job, gpus), {**start(job), "precision": "fp32"}
    steps: list[Taken] = []
    now = _take(tuning, steps, "start", "precision", words)
    words["precision"] = precision or sixteen_bit(job)
    now = _take(tuning, steps, "16-bit compute", "precision", words) or now
    for name, values in (
        ("recompute", [policy for policy in policies(job.model.num_layers) if policy != "none"]),
        ("offload", [choice for choice in OFFLOADS if choice]),
    ):
        if now is None or tuning.fits(now) or name in job.request.given:
            continue
        words[name] = _cheapest(tuning, words, name, values)
        now = _take(tuning, steps, cast("Stage", name), name, words) or now
    if now is not None and tuning.fits(now) and "micro_batch" not in job.request.given:
        words["micro_batch"] = _cheapest(tuning, words, "micro_batch", list(MICRO_BATCHES), full=True)
        _take(tuning, steps, "fill the card", "micro_batch", words)
    return steps


def _take(tuning: Tuning, steps: list[Taken], stage: Stage, word: str, words: dict[str, Any]) -> Finalist | None:
    """Note a step; nothing where the framework or the GPU does not have it, or it changes nothing."""
    one = tuning.replayed(words)
    if one is not None and (not steps or steps[-1].one.strategy != one.strategy):
        steps.append(Taken(stage, word, one, tuning.fits(one)))
    return one


def _step(taken: Taken) -> results.RecipeStep:
    """A step with its figures."""
    strategy, value = taken.one.strategy, _typed(getattr(taken.one.strategy, taken.word))
    return results.RecipeStep(
        stage=taken.stage,
        change=f"micro-batch {value}" if taken.word == "micro_batch" else value,
        strategy=strategy,
        device=taken.one.peaks.top.device,
        fits=taken.fits,
        tokens_per_second_per_gpu=taken.one.found.tokens_per_second_per_gpu,
    )


def _cheapest(tuning: Tuning, words: dict[str, Any], name: str, values: list[Any], *, full: bool = False) -> Any:
    """The fastest value that fits by a replay; where none does the smallest, or with ``full`` the value as it is."""
    found = [(value, one) for value in values if (one := tuning.at({**words, name: value})) is not None]
    by_speed = sorted(found, key=lambda pair: -pair[1].tokens_per_second_per_gpu)
    for value, one in by_speed:
        if one.reserved <= tuning.job.gpu.memory_bytes and tuning.fits(finalist(tuning.job.unlimited(), one)):
            return value
    return words[name] if full or not found else min(found, key=lambda pair: pair[1].reserved)[0]
