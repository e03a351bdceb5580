"""The answer of an inverse question as typed results, every figure that of ``estimate``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from memcalc import __version__, results
from memcalc.planner.answer import components_of, hardware_facts, model_facts, scalar, strategy_of
from memcalc.planner.columns import BATCH, Confirmed, Inquiry
from memcalc.planner.plans import command_of
from memcalc.planner.rooms import capacity, need_of
from memcalc.planner.timed import time_of, unvalidated


@dataclass(frozen=True)
class Asked:
    """An inverse question in words: ``base`` is the ``estimate`` line of what was pinned, ``started`` a clock [s]."""

    schema: Literal["memcalc.max/1", "memcalc.min/1"]
    what: str
    step: int
    base: str
    command: str
    started: float
    curve: bool = False
    """Whether the answer's strategy is also wanted at other values."""


def fit_of(job: Inquiry, found: Confirmed, value: int | str, base: str) -> results.Fit:
    """A confirmed strategy as a result."""
    grid, top, chosen = found.census.grid, found.peaks.top, found.candidate
    layout = chosen.layout
    parts = components_of(found.ledger, grid, top).model_dump()
    need = need_of(found.census, job.node)
    peak = {name: getattr(top, name) for name in ("reserved", "device", "phase", "stage")}
    return results.Fit(
        value=value,
        strategy=strategy_of(grid),
        seq_len=chosen.seq_len,
        accumulation_steps=scalar(grid.accumulation),
        global_batch=chosen.global_batch,
        peak=results.PlanPeak(allocated=found.peaks.allocated, **peak),
        component=max(parts, key=lambda name: parts[name]),
        free=found.peaks.overhead.capacity - top.device,
        verdict=found.peaks.verdict,
        time=time_of(job.model, grid, job.gpu, job.node),
        host_memory=need.host,
        tier_memory=need.tier,
        command=command_of(base, strategy_of(grid), layout.gpus, chosen.seq_len, chosen.global_batch),
    )


def miss_of(found: Confirmed, value: int | str, *, safe: bool, parameters: int | None = None) -> results.Miss:
    """A strategy that does not get the wanted verdict."""
    peaks, overhead = found.peaks, found.peaks.overhead
    missing = overhead.device(peaks.predicted) - overhead.capacity
    if peaks.replayed and not peaks.replayed.runs:
        # Where a request fails, no more is known than what it lacks and what the tensors need at least
        missing = max(peaks.replayed.short, overhead.device(peaks.top.allocated) - overhead.capacity)
    elif safe and peaks.verdict == "tight":
        missing = overhead.limit(peaks.predicted) - overhead.capacity
    return results.Miss(
        value=value,
        verdict=peaks.verdict,
        device=peaks.top.device,
        missing=max(missing, 0),
        parameters=parameters,
    )


def point_of(found: Confirmed, value: int) -> results.CurvePoint:
    """A strategy at one value."""
    return results.CurvePoint(
        value=value,
        global_batch=found.candidate.global_batch,
        components=components_of(found.ledger, found.census.grid, found.peaks.top),
        device=found.peaks.top.device,
        verdict=found.peaks.verdict,
        retries=found.peaks.replayed.retries if found.peaks.replayed else 0,
    )


def limit_of(fit: results.Fit | None, beyond: tuple[results.Miss, ...], outside: str) -> str:
    """What stands against more: memory at the peak of the answer, or what is ``outside`` of memory."""
    if fit is None:
        return outside or "even the smallest strategy does not fit"
    if not beyond:
        return outside
    return f"{fit.component} at {fit.peak.phase}, where the peak stands"


def answer_of(
    job: Inquiry,
    asked: Asked,
    fit: results.Fit | None,
    beyond: tuple[results.Miss, ...],
    *,
    gpus: int,
    outside: str = "",
    curve: tuple[results.CurvePoint, ...] = (),
    searched: int,
    replayed: int,
    warnings: tuple[str, ...] = (),
) -> results.Inverse:
    """The whole answer."""
    words: dict[str, Any] = {"schema": asked.schema}
    return results.Inverse(
        **words,
        version=__version__,
        what=asked.what,
        answer=None if fit is None else fit.value,
        step=asked.step,
        safe=job.safe,
        model=model_facts(job.model),
        hardware=hardware_facts(job.gpu, job.node, gpus),
        best=fit,
        beyond=beyond,
        curve=curve,
        limit=limit_of(fit, beyond, outside),
        searched=searched,
        replayed=replayed,
        elapsed=round(time.perf_counter() - asked.started, 4),
        capacity=job.gpu.memory_bytes,
        warnings=(*warnings, *_warnings(job, fit)),
        assumptions=_assumptions(job, asked.what),
        command=asked.command,
    )


def _warnings(job: Inquiry, fit: results.Fit | None) -> list[str]:
    said = []
    if fit is not None and fit.host_memory and capacity(job.node, "host") is None:
        said.append(f"host memory of node {job.node.name} is unknown: the answer assumes that it suffices.")
    if fit is not None and fit.verdict == "tight":
        said.append(
            "the answer is tight: not every run would fit; --safe asks for one that the measured range supports."
        )
    if fit is not None and job.model.positions != "none" and fit.seq_len > job.model.max_positions:
        said.append(f"{job.model.name} was made for {job.model.max_positions} tokens: only memory was asked here.")
    return [*said, *(unvalidated({"the answer": fit.time}) if fit is not None else [])]


def _assumptions(job: Inquiry, what: str) -> dict[str, str]:
    """What the search noted, less what the answer itself says."""
    asked = {what.replace("-", "_"), "global_batch"}
    noted = {name: said for name, said in job.request.assumptions.items() if name not in asked}
    sequences, tokens = job.batch
    if not sequences:
        noted["global_batch"] = f"at most {tokens:,} tokens, in whole steps of micro-batch x ranks" if tokens else BATCH
    return noted
