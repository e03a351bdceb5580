"""Sentences: a strategy in a few words, why a plan is listed, why a strategy lost, what is too large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.planner.answer import components_of, strategy_of
from memcalc.planner.axes import DEGREES
from memcalc.planner.finalists import Finalist, single_grid, single_ledger
from memcalc.planner.peaks import stage_peaks
from memcalc.planner.rooms import need_of, shortages
from memcalc.terms import Census
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.planner.job import Job
    from memcalc.planner.objectives import Goal
    from memcalc.planner.search import Found
    from memcalc.specs.strategy import Strategy


def words_of(strategy: Strategy) -> list[str]:
    """What a search decides of a strategy, in a few words."""
    degrees = [f"{name} {getattr(strategy, name)}" for name in DEGREES if getattr(strategy, name) > 1]
    if strategy.pp > 1 and strategy.pp_schedule != "1f1b":
        degrees.append(strategy.pp_schedule + (f" with {strategy.vpp} chunks" if strategy.vpp > 1 else ""))
    if strategy.tp > 1 and not strategy.sp:
        degrees.append("no sp")
    return [
        strategy.precision,
        f"zero {strategy.zero}",
        *degrees,
        f"recompute {strategy.recompute}",
        *([f"offload {'+'.join(strategy.offload)}{_tier(strategy)}"] if strategy.offload else []),
        f"micro-batch {strategy.micro_batch}",
    ]


def _tier(strategy: Strategy) -> str:
    return "" if strategy.offload_to == "cpu" else f" to {strategy.offload_to}"


def short(found: Found) -> str:
    """A found strategy in a few words."""
    return ", ".join(words_of(strategy_of(found.grid, found.index)))


def why(one: Finalist, first: Finalist, goal: Goal, *, on_front: bool) -> str:
    """One sentence on why a plan is listed, what its time is spent on and where its peak stands."""
    top, overhead = one.peaks.top, one.peaks.overhead
    free = f"the peak stands at {top.phase}, {gib(overhead.capacity - top.device)} GiB stay free"
    caution = "; tight, because the upper end of its range does not fit" if one.is_tight else ""
    return f"{_role(one, first, goal, on_front=on_front)}: {spent(one.found)}; {free}{caution}."


def _role(one: Finalist, first: Finalist, goal: Goal, *, on_front: bool) -> str:
    gpus = one.found.layout.gpus
    place = f"on {gpus} GPU{'s' * (gpus > 1)}"
    if one is first:
        best = {"memory": "smallest", "simplicity": "simplest of those nearly as fast as the fastest"}
        return f"{best.get(goal.name, 'fastest that fits')} {place}"
    speed = one.found.tokens_per_second_per_gpu / first.found.tokens_per_second_per_gpu - 1
    than = f"{abs(speed):.1%} {'faster' if speed > 0 else 'slower'} than the first"
    less = first.peaks.top.device - one.peaks.top.device
    if on_front and less > 0:
        return f"nothing as small is faster: {gib(less)} GiB less than the first, {than}"
    return than


def spent(found: Found) -> str:
    """What takes most of the step beside computing."""
    times = {name: seconds for name, seconds in found.times.items() if name != "compute"}
    largest = max(times, key=lambda name: times[name])
    share = times[largest] / found.step
    return f"{largest} takes {share:.0%} of the step" if share >= 0.01 else "nearly all of the step is compute"


def gib(size: int) -> str:
    """A size in GiB with one decimal."""
    return f"{size / GIB:.1f}"


def too_large(job: Job, smallest: Found) -> str:
    """Which component is too large even in the smallest strategy."""
    name, size, device, capacity = largest_component(job, smallest)
    return (
        f"nothing fits on {smallest.layout.gpus} x {job.gpu.name}: even the smallest strategy "
        f"({short(smallest)}) needs {gib(device)} of {gib(capacity)} GiB, of which {name} {gib(size)} GiB."
    )


def too_cramped(job: Job, found: Found) -> str:
    """Which memory off the GPU keeps a strategy from running, and whether the GPU does too."""
    need = need_of(Census(job.model, single_grid(found)), job.node)
    lacking = " ".join(shortages(need, job.node))
    _, _, device, capacity = largest_component(job, found)
    beside = f" On the GPU it needs {gib(device)} of {gib(capacity)} GiB." if device > capacity else ""
    return f"memory off the GPU is too small for {short(found)}: {lacking}{beside}"


def largest_component(job: Job, found: Found) -> tuple[str, int, int, int]:
    """The largest component of a strategy's peak, its bytes, and the bytes on the device and of its capacity."""
    census, ledger, overhead = single_ledger(job, found)
    top = max(stage_peaks(census, ledger, overhead), key=lambda stage: stage.reserved)
    parts = components_of(ledger, census.grid, top).model_dump()
    name = max(parts, key=lambda key: parts[key])
    return name, parts[name], top.device, overhead.capacity
