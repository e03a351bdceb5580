"""What a job does beside its steps, as typed results, and what that does to the verdict."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.planner.answer import scalar
from memcalc.planner.budget import capacity
from memcalc.planner.stage_peaks import at_stage
from memcalc.results.details import Occasion, OccasionPart
from memcalc.terms.build import build_ledger
from memcalc.terms.occasions import checkpoints, evaluation_bytes, evaluations, on_gpu, writes_together
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.grid import Grid
    from memcalc.ledger import Term
    from memcalc.planner.job import PlanJob
    from memcalc.planner.stage_peaks import Peaks
    from memcalc.results.estimates import Estimate
    from memcalc.specs.hardware import Node
    from memcalc.specs.options import SharedSettings
    from memcalc.terms import occasions as terms
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Overhead, Workspaces


IN_TIME = ("loading", "resuming", "evaluation", "generation", "saving")
"""What a job does beside its steps."""
FORWARDS = frozenset({"evaluation", "generation"})
"""What of it needs no figure of the steps."""


def occasions_of(
    census: ModelOnGrid, overhead: Overhead, node: Node, names: Collection[str] = IN_TIME
) -> tuple[Occasion, ...]:
    """Loading, resuming, evaluation and saving of a grid of one strategy, in their order in time.

    Of those in ``names`` at least: what no other needs is not computed.
    """
    occasions: list[terms.Occasion] = []
    if not FORWARDS.issuperset(names):
        ranks = min(census.grid.layouts[0].gpus, node.gpus_per_host)
        occasions += checkpoints(census, build_ledger(census, overhead.workspaces), ranks)
    if not FORWARDS.isdisjoint(names):
        occasions += evaluations(census, overhead.workspaces)
    occasions.sort(key=lambda occasion: IN_TIME.index(occasion.name))
    return tuple(_answered(occasion, census, overhead.usable) for occasion in occasions)


def asked_for(fixed: SharedSettings) -> dict[str, str]:
    """What a job is told to do beside its steps: by occasion the field that says so."""
    fields = {
        "loading": ("strategy.loading", fixed.loading or fixed.kbit_passing),
        "resuming": ("workload.resumes", fixed.resumes),
        "evaluation": ("workload.eval_micro_batch", fixed.eval_micro_batch),
        "generation": ("workload.eval_new_tokens", fixed.eval_new_tokens),
        "saving": ("strategy.state_dict", fixed.state_dict),
    }
    return {name: field for name, (field, value) in fields.items() if value}


def uncounted(census: ModelOnGrid, occasions: tuple[Occasion, ...]) -> tuple[str, ...]:
    """A sentence for each thing that the job is told to do beside its steps, and of which nothing is known here."""
    grid, known = census.grid, {occasion.name for occasion in occasions}
    fields = asked_for(grid.fixed)
    if not writes_together(census):
        fields.pop("saving", None)  # each rank writes what it has
    where = "a recorded module" if census.model.recording is not None else grid.fixed.framework
    return tuple(
        f"{name} is not counted: {field} asks for it, and what {where} holds meanwhile is not modelled."
        for name, field in fields.items()
        if name not in known
    )


def _answered(occasion: terms.Occasion, census: ModelOnGrid, usable: int) -> Occasion:
    """On the stage that holds most; parts of the host are those of all its ranks."""
    stages = census.grid.num_stages
    stage = int(np.argmax(np.broadcast_to(on_gpu(occasion.terms), (1, stages, 1, 1, 1, 1, 1)).reshape(-1)))
    parts = [_part(term, at_stage(term.bytes, stage, stages), stage) for term in occasion.terms]
    parts = sorted((part for part in parts if part.bytes), key=lambda part: -part.bytes)
    allocated, host = (sum(part.bytes for part in parts if part.tier == tier) for tier in ("gpu", "host"))
    return Occasion(
        name=occasion.name, when=occasion.when, certain=occasion.certain, allocated=allocated, host=host,
        fits=allocated <= usable, batch_outputs=occasion.outputs, parts=tuple(parts),
    )  # fmt: skip


def _part(term: Term, size: int, stage: int) -> OccasionPart:
    inputs = {name: scalar(value, stage) for name, value in term.inputs.items()}
    return OccasionPart(
        name=term.name, bytes=size, tier=term.tier, formula=term.formula, inputs=inputs, source=term.source
    )


def fails_beside(
    job: PlanJob, census: ModelOnGrid, overhead: Overhead, searched: tuple[Grid, tuple[int, ...]] | None
) -> bool:
    """Whether a strategy cannot do what the job is told to do beside its steps.

    It was ``searched`` at an index of a grid, of whose strategies evaluations are all computed at once.
    """
    known = searched is not None and census.grid.fixed.eval_micro_batch and job.model.recording is None
    if known and searched and _evaluation_need(job, *searched, overhead.workspaces) > overhead.usable:
        return True
    return bool(failing_beside(census, overhead, job.node))


def _evaluation_need(job: PlanJob, grid: Grid, index: tuple[int, ...], workspaces: Workspaces) -> int:
    case = id(job.model), grid, workspaces
    if case not in job.evaluated:
        job.evaluated[case] = job.model, evaluation_bytes(job.on(grid), workspaces)
    need = job.evaluated[case][1]
    return int(need[tuple(min(at, length - 1) for at, length in zip(index, need.shape, strict=True))])


def with_occasions(
    estimate: Estimate, occasions: tuple[Occasion, ...], node: Node, uncounted: tuple[str, ...] = ()
) -> Estimate:
    """The estimate with what the job does beside its steps: what it was told to do has to fit too.

    ``uncounted`` are sentences on what it was told to do and what is not modelled.
    """
    failing = [occasion for occasion in occasions if occasion.certain and not occasion.fits]
    warnings = (
        *estimate.warnings, *_beyond(failing, estimate.budget.usable), *_on_host(occasions, estimate, node), *uncounted
    )  # fmt: skip
    verdict = "does-not-fit" if failing else estimate.verdict
    reason = estimate.reason or ", ".join(f"{occasion.name} does not fit" for occasion in failing)
    update = {"occasions": occasions, "warnings": warnings, "verdict": verdict, "reason": reason}
    return estimate.model_copy(update=update)


def with_beside(peaks: Peaks, census: ModelOnGrid, node: Node) -> Peaks:
    """The figures of a strategy, which does not fit where it cannot do what the job is told to do beside its steps."""
    failing = failing_beside(census, peaks.overhead, node)
    return replace(peaks, beside=", ".join(f"{occasion.name} does not fit" for occasion in failing))


def failing_beside(census: ModelOnGrid, overhead: Overhead, node: Node) -> list[Occasion]:
    """What the job is told to do beside its steps and cannot; nothing is computed where it is told nothing."""
    occasions = occasions_of(census, overhead, node, names) if (names := asked_for(census.grid.fixed)) else ()
    return [occasion for occasion in occasions if occasion.certain and not occasion.fits]


def _beyond(failing: Iterable[Occasion], usable: int) -> Iterable[str]:
    for occasion in failing:
        size = f"{occasion.allocated / GIB:.1f} of {usable / GIB:.1f} GiB"
        yield f"{occasion.name} runs out of memory, whatever training takes: {occasion.when} needs {size}."


def _on_host(occasions: Iterable[Occasion], estimate: Estimate, node: Node) -> Iterable[str]:
    """What the host cannot hold beside what is offloaded to it."""
    size = capacity(node, "host")
    for occasion in occasions:
        need = occasion.host + estimate.host_memory * (occasion.name != "loading")
        if size is not None and occasion.host and need > size:
            where = f"{need / GIB:.1f} GiB of host memory, and {node.name} has {size / GIB:.1f}"
            yield f"{occasion.name} may not fit on the host: {occasion.when} needs {where}."
