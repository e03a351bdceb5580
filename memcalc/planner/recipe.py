"""What each remedy saves and costs, and the usual order of tuning: the cheapest remedy first, then a full card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from memcalc.errors import MemcalcError
from memcalc.frameworks.capabilities import own_code
from memcalc.planner import defaults, direct
from memcalc.planner.answer import strategy_of
from memcalc.planner.axes import offloads_of
from memcalc.planner.choice import FASTEST_ONLY
from memcalc.planner.direct import policies
from memcalc.planner.finalists import SimulatedPlan, finalist
from memcalc.planner.job import value_text
from memcalc.planner.request import flag, micro_batches_of
from memcalc.results.plans import RecipeStep, Remedy
from memcalc.specs.options import DEGREES

if TYPE_CHECKING:
    from memcalc.planner.job import PlanJob
    from memcalc.planner.search import Candidate

Stage = Literal["start", "16-bit compute", "recompute", "offload", "fill the card"]
OTHERS: dict[str, Any] = {
    "loss": "fused-linear", "optimizer": "adamw-8bit", "optimizer_in_backward": True, "zero": 3, "tp": 2,
}  # fmt: skip
"""Remedies that are neither recomputation nor offload."""


class Tuning(NamedTuple):
    """A job on a number of GPUs with everything pinned that is not being tuned."""

    job: PlanJob
    gpus: int

    def at(self, options: dict[str, Any]) -> Candidate | None:
        """The strategy with some words, on a card with room for it; None where it cannot run."""
        given = self.job.request.given
        open_words = {name: value for name, value in options.items() if name not in given}
        try:
            job = self.job.pinned(gpus=self.gpus, **open_words).unlimited()
            outcome = job.search([self.gpus], FASTEST_ONLY).get(self.gpus)
        except MemcalcError:
            return None
        return outcome.best[0] if outcome and outcome.best else None

    def replayed(self, options: dict[str, Any]) -> SimulatedPlan | None:
        """The same with its replayed figures."""
        candidate = self.at(options)
        return finalist(self.job.unlimited(), candidate) if candidate else None

    def code(self, candidate: Candidate) -> set[str]:
        """What somebody has to write for a strategy."""
        return set(own_code(strategy_of(candidate.grid, candidate.index), self.job.model))

    def fits(self, plan: SimulatedPlan) -> bool:
        """Whether it fits on the real card."""
        return plan.peaks.top.device <= self.job.gpu.memory_bytes


def start(job: PlanJob) -> dict[str, Any]:
    """Plain training: no parallelism beyond data, no recomputation, no offload, one sequence at a time."""
    _, habits = defaults.habits_for(job.request)
    degrees = dict.fromkeys(DEGREES if habits.tensor_parallel else ("dp_replicate",), 1)
    stage = defaults.zero_stages(job.request, habits)[0]
    return {**degrees, "zero": stage, "recompute": "none", "offload": (), "micro_batch": 1, "optimizer": "adamw"}


def sixteen_bit(job: PlanJob) -> str:
    """The usual precision with 16-bit compute."""
    _, habits = defaults.habits_for(job.request)
    return defaults.precisions_for(job.gpu, habits, start(job)["zero"], frozen=defaults.is_frozen(job.request))[0]


def remedies(job: PlanJob, gpus: int) -> tuple[Remedy, ...]:
    """What each remedy saves and adds beside plain 16-bit training, the best return first."""
    tuning, base = Tuning(job, gpus), {**start(job), "precision": sixteen_bit(job)}
    plain = tuning.at(base)
    if plain is None:
        return ()
    result = [remedy for options in _each(job) if (remedy := _remedy(tuning, base, options, plain)) is not None]
    return tuple(
        sorted(result, key=lambda choice: (choice.saved <= 0, choice.slower > 0, -(choice.roi or 0), -choice.saved))
    )


def _each(job: PlanJob) -> Iterator[dict[str, Any]]:
    yield from ({"recompute": policy} for policy in _told(job, "recompute"))
    yield from ({"offload": choice} for choice in _told(job, "offload"))
    yield from ({name: value} for name, value in OTHERS.items())


def _told(job: PlanJob, name: str) -> list[Any]:
    """Of the policies or the kinds of offload, without none, those that the framework can be told."""
    _, habits = defaults.habits_for(job.request)
    values: list[Any] = policies(job.model) if name == "recompute" else offloads_of(habits)
    tried = direct.usual(job.request, habits, job.model, name, values)
    return [value for value in tried if value not in ("none", ())]


def _remedy(tuning: Tuning, base: dict[str, Any], options: dict[str, Any], plain: Candidate) -> Remedy | None:
    name, value = next(iter(options.items()))
    if tuning.job.request.given.get(name) is not None or base.get(name) == value:
        return None
    candidate = tuning.at({**base, **options})
    if candidate is None or (not tuning.job.request.beyond and tuning.code(candidate) - tuning.code(plain)):
        return None
    saved = 1 - candidate.reserved / plain.reserved
    slower = plain.tokens_per_second_per_gpu / candidate.tokens_per_second_per_gpu - 1
    return Remedy(
        change=f"--{flag(name)}" if value is True else f"--{flag(name)} {value_text(value)}",
        reserved=candidate.reserved,
        saved=saved,
        slower=slower,
        roi=saved / slower if slower > 0 else None,
        tokens_per_second_per_gpu=candidate.tokens_per_second_per_gpu,
    )


class AppliedRemedy(NamedTuple):
    """One step of the usual order, with the strategy that it arrives at."""

    stage: Stage
    word: str
    """What it changes of the step before."""
    plan: SimulatedPlan
    fits: bool


def recipe(job: PlanJob, gpus: int) -> tuple[RecipeStep, ...]:
    """The usual order as results."""
    return tuple(_step(taken) for taken in steps_of(job, gpus))


def steps_of(job: PlanJob, gpus: int, precision: str = "") -> list[AppliedRemedy]:
    """The usual order: 16 bits; recompute where it does not fit; offload where it still does not; then a full card.

    ``precision`` takes the place of the usual one with 16-bit compute.
    """
    tuning, options = Tuning(job, gpus), {**start(job), "precision": "fp32"}
    steps: list[AppliedRemedy] = []
    now = _take(tuning, steps, "start", "precision", options)
    options["precision"] = precision or sixteen_bit(job)
    now = _take(tuning, steps, "16-bit compute", "precision", options) or now
    for name in ("recompute", "offload"):
        if now is None or tuning.fits(now) or name in job.request.given or not (values := _told(job, name)):
            continue
        options[name] = _cheapest(tuning, options, name, values)
        now = _take(tuning, steps, name, name, options) or now
    if now is not None and tuning.fits(now) and "micro_batch" not in job.request.given:
        sizes = micro_batches_of(now.candidate.grid.fixed.global_batch)
        options["micro_batch"] = _cheapest(tuning, options, "micro_batch", sizes, full=True)
        _take(tuning, steps, "fill the card", "micro_batch", options)
    return steps


def _take(
    tuning: Tuning, steps: list[AppliedRemedy], stage: Stage, word: str, options: dict[str, Any]
) -> SimulatedPlan | None:
    """Note a step; nothing where the framework or the GPU does not have it, or it changes nothing."""
    value = tuning.replayed(options)
    if value is not None and (not steps or steps[-1].plan.strategy != value.strategy):
        steps.append(AppliedRemedy(stage, word, value, tuning.fits(value)))
    return value


def _step(taken: AppliedRemedy) -> RecipeStep:
    strategy, value = taken.plan.strategy, value_text(getattr(taken.plan.strategy, taken.word))
    return RecipeStep(
        stage=taken.stage,
        change=f"micro-batch {value}" if taken.word == "micro_batch" else value,
        strategy=strategy,
        device=taken.plan.peaks.top.device,
        fits=taken.fits,
        tokens_per_second_per_gpu=taken.plan.candidate.tokens_per_second_per_gpu,
    )


def _cheapest(tuning: Tuning, options: dict[str, Any], name: str, values: list[Any], *, full: bool = False) -> Any:
    """The fastest value that fits by a replay; where none does the smallest, or with ``full`` the value as it is."""
    tried = [(value, fit) for value in values if (fit := tuning.at({**options, name: value})) is not None]
    by_speed = sorted(tried, key=lambda pair: -pair[1].tokens_per_second_per_gpu)
    for value, fit in by_speed:
        if fit.reserved <= tuning.job.gpu.memory_bytes and tuning.fits(finalist(tuning.job.unlimited(), fit)):
            return value
    return options[name] if full or not tried else min(tried, key=lambda pair: pair[1].reserved)[0]
