"""The answer of an inverse question as typed results, every figure that of ``estimate``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from memcalc._version import __version__
from memcalc.frameworks.capabilities import own_code
from memcalc.planner.answer import borrowed_by, components_of, hardware_facts, model_facts, scalar, strategy_of
from memcalc.planner.budget import capacity, offload_need, unknown_to
from memcalc.planner.defaults import habits_for
from memcalc.planner.direct import OWN_CODE, smaller_losses
from memcalc.planner.finalists import time_of, unchecked_warnings
from memcalc.planner.job import strategy_record
from memcalc.planner.limit_grid import BATCH, LimitJob, SimulatedLimit
from memcalc.planner.sentences import code_warnings
from memcalc.results.names import component_name, phase_name
from memcalc.results.plans import CurvePoint, Fit, Inverse, Miss, PlanPeak
from memcalc.specs.job import JobRecord, command_line
from memcalc.units import GIB

CACHE_STEP = GIB
"""Growth of the allocator's cache from one value to the next that is named as what binds."""


@dataclass(frozen=True)
class LimitQuery:
    """An inverse question."""

    record: JobRecord
    base: JobRecord
    """The estimate of what was pinned, with the model."""
    step: int
    """Only multiples of it are asked."""
    started: float
    """A clock [s]."""
    curve: bool = False
    """Whether the answer's strategy is also wanted at other values."""


def fit_of(job: LimitJob, limit: SimulatedLimit, value: int | str, base: JobRecord) -> Fit:
    """A confirmed strategy as a result."""
    grid, top, chosen = limit.census.grid, limit.peaks.top, limit.candidate
    parts = components_of(limit.ledger, grid, top).model_dump()
    need = offload_need(limit.census, job.node)
    strategy = strategy_of(grid)
    estimate = strategy_record(base, strategy, chosen.layout.gpus, chosen.seq_len, chosen.global_batch)
    return Fit(
        value=value,
        strategy=strategy,
        seq_len=chosen.seq_len,
        accumulation_steps=scalar(grid.accumulation),
        global_batch=chosen.global_batch,
        peak=limit.peaks.at(PlanPeak),
        component=max(parts, key=lambda name: parts[name]),
        free=limit.peaks.overhead.capacity - top.device,
        verdict=limit.peaks.verdict,
        time=time_of(limit.census, job.gpu, job.node),
        host_memory=need.host,
        tier_memory=need.tier,
        unknown=unknown_to(need, job.node),
        job=estimate,
        command=command_line(estimate),
    )


def miss_of(limit: SimulatedLimit, value: int | str, *, parameters: int | None = None) -> Miss:
    """A strategy that does not get the wanted verdict, and by how much its size is above the capacity."""
    peaks, overhead = limit.peaks, limit.peaks.overhead
    size = overhead.limit(peaks.predicted) if peaks.verdict == "tight" else peaks.top.device
    # a fragmented allocator fails a request although all of it would have been small enough
    least = peaks.replayed.short if peaks.replayed and not peaks.replayed.runs else 0
    missing = size - overhead.capacity if size > overhead.capacity else least
    return Miss(value=value, verdict=peaks.verdict, device=peaks.top.device, missing=missing, parameters=parameters)


def point_of(limit: SimulatedLimit, value: int) -> CurvePoint:
    """A strategy at one value."""
    return CurvePoint(
        value=value,
        global_batch=limit.candidate.global_batch,
        components=components_of(limit.ledger, limit.census.grid, limit.peaks.top),
        device=limit.peaks.top.device,
        verdict=limit.peaks.verdict,
        retries=limit.peaks.replayed.retries if limit.peaks.replayed else 0,
    )


def limit_of(job: LimitJob, fit: Fit | None, beyond: tuple[Miss, ...], outside: str) -> str:
    """What stands against more: memory at the peak of the answer, or what is ``outside`` of memory.

    Where logits are that peak it names a loss that makes fewer of them, if one can be had.
    """
    if fit is None:
        lacks = f", over by {beyond[0].missing / GIB:.1f} GiB" if beyond and beyond[0].missing else ""
        return outside or f"the smallest strategy does not fit{lacks}"
    if not beyond:
        return outside
    less = _less(job) if fit.peak.phase in ("loss", "forward") else ""
    return f"{component_name(fit.component)}, at the peak: {phase_name(fit.peak.phase)}{less}"


def host_limit(job: LimitJob, gpus: int, sizes: tuple[int, int]) -> str:
    """What binds where fewer GPUs would do but for the host: what offload needs of it there, and has [bytes]."""
    need, most = sizes
    share = ", its share of the node's" * job.by_share
    where = f"{gpus} GPU{'s' * (gpus > 1)}"
    return f"host memory: on {where} offload needs {need / GIB:,.0f} GiB per GPU and has {most / GIB:,.0f}{share}"


def cache_limit(best: SimulatedLimit, beyond: SimulatedLimit, value: int | str) -> str:
    """What binds where the allocator's cache alone grows at the next value; empty where tensors do.

    A freed block serves later requests up to its size, and the best fit is taken: where one size overtakes another, as
    the activations of one token more do a weight's gradient, blocks no longer serve both.
    """
    last, following = best.peaks.top, beyond.peaks.top
    grown = following.allocated - last.allocated
    more = following.reserved - last.reserved - grown
    if best.peaks.flushes or beyond.peaks.flushes or more <= max(grown, CACHE_STEP):
        return ""
    return f"allocator cache: {more / GIB:.1f} GiB more at {value:,}, where freed blocks no longer serve later requests"


def _less(job: LimitJob) -> str:
    _, habits = habits_for(job.request)
    losses = sorted(smaller_losses(job.request, habits, job.model).items(), key=lambda pair: bool(pair[1]))
    return "".join(f"; less with --loss {loss}" + f" ({OWN_CODE})" * bool(code) for loss, code in losses[:1])


def answer_of(
    job: LimitJob,
    query: LimitQuery,
    fit: Fit | None,
    beyond: tuple[Miss, ...],
    *,
    gpus: int,
    outside: str = "",
    instead: str = "",
    curve: tuple[CurvePoint, ...] = (),
    searched: int,
    replayed: int,
    warnings: tuple[str, ...] = (),
) -> Inverse:
    """The whole answer; ``instead`` is what binds other than tensors on the GPU."""
    schema: dict[str, Any] = {"schema": f"memcalc.{query.record.command}/1"}
    return Inverse(
        **schema,
        version=__version__,
        what=query.record.what,
        answer=None if fit is None else fit.value,
        step=query.step,
        safe=job.safe,
        model=model_facts(job.model),
        hardware=hardware_facts(job.gpu, job.node, gpus),
        best=fit,
        beyond=beyond,
        curve=curve,
        limit=instead or limit_of(job, fit, beyond, outside),
        searched=searched,
        replayed=replayed,
        elapsed=round(time.perf_counter() - query.started, 4),
        capacity=job.gpu.memory_bytes,
        warnings=(*job.request.warnings, *warnings, *_warnings(job, fit)),
        assumptions=_assumptions(job, query.record.what) | _share_of_host(job, fit),
        job=query.record,
        command=command_line(query.record),
    )


def _warnings(job: LimitJob, fit: Fit | None) -> list[str]:
    text = borrowed_by(job.gpu, [] if fit is None else [fit.strategy])
    if fit is not None and fit.host_memory and capacity(job.node, "host") is None:
        text.append(f"host memory of node {job.node.name} is unknown: the answer assumes that it suffices.")
    text += code_warnings({"the answer": own_code(fit.strategy, job.model)} if fit is not None else {})
    if fit is not None and fit.verdict == "tight":
        text.append("the answer is tight: some runs would run out of memory. Without --tight it has the 95% margin.")
    if fit is not None and job.model.positions != "none" and fit.seq_len > job.model.max_positions:
        text.append(f"beyond {job.model.name}'s {job.model.max_positions}-token context; only memory was checked.")
    return [*text, *(unchecked_warnings({"the answer": fit.time}) if fit is not None else [])]


def _share_of_host(job: LimitJob, fit: Fit | None) -> dict[str, str]:
    """What of the host's memory each GPU of an answer counts with, where that is not all of it."""
    size, ranks = capacity(job.node, "host"), job.node.gpus_per_host
    if not job.by_share or size is None or ranks == 1 or (fit is not None and not fit.host_memory):
        return {}
    return {"host memory": f"{size // ranks / GIB:,.0f} GiB per GPU, its share of the node's"}


def _assumptions(job: LimitJob, what: str) -> dict[str, str]:
    """What the search noted, less what the answer itself says."""
    query = {what.replace("-", "_"), "global_batch"}
    noted = {name: assumption for name, assumption in job.request.assumptions.items() if name not in query}
    sequences, tokens = job.batch
    if not sequences:
        noted["global_batch"] = f"at most {tokens:,} tokens, a multiple of micro-batch × ranks" if tokens else BATCH
    return noted
