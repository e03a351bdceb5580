"""From the figures of one message, and the stack above it, to causes.

The bounds are sums, not fits: holes caused it if holes and free memory would have held the request; another process if
its memory and the free memory would have. A share says whether that is the matter or the last straw.

The causes that triage knows: what each is called, and the smallest change that usually helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from memcalc.catalog import read_toml
from memcalc.probe.triage.frames import StackContext, read_stack
from memcalc.probe.triage.logs import HOST_FORMS, Figures, OomEvent
from memcalc.results.triage import Confidence, TriageCause
from memcalc.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_MUCH = 0.10
"""Share from which holes or others are the matter and not the last straw."""
_OUTSIDE = 2 * GIB
"""Beyond what a context with its libraries and communicators takes: 0.3 to 1.5 GiB in the presets."""
_CONTEXT = (150 * MIB, 3 * GIB // 2)
"""What another rank's context on a GPU that is not its own takes."""
_FULL = 0.75
_ROUNDING = 0.006 * GIB
"""Half of the last printed digit, and a little: sums of printed figures are not surer."""


def other_processes(figures: Figures) -> tuple[tuple[tuple[int, int], ...], int | None]:
    """Return the processes that are not this one, and what this one holds by the driver's count.

    In a container the driver names this process by a number of the host's, so that none is called this process; then
    the smallest one that holds what PyTorch reserved is it.
    """
    if figures.this_process is not None or figures.reserved is None:
        return figures.processes, figures.this_process
    least = figures.reserved - _ROUNDING
    candidates = [process for process in figures.processes if process[1] >= least]
    this_process = min(candidates, key=lambda process: process[1], default=None)
    if this_process is None or not figures.reserved:
        return figures.processes, None
    others = list(figures.processes)
    others.remove(this_process)
    return tuple(others), this_process[1]


def outside_of(figures: Figures) -> int | None:
    """Bytes of this process outside PyTorch's allocator; None where the message does not have them."""
    _, this_process = other_processes(figures)
    return None if this_process is None or figures.reserved is None else max(this_process - figures.reserved, 0)


def causes_of(incident: OomEvent) -> list[TriageCause]:
    """Return the causes that a message and its stack speak for."""
    figures, context = incident.figures, read_stack(incident.stack)
    if figures.form in HOST_FORMS or figures.form == "other framework":
        return list(_host(incident))
    causes = [*_limits(figures), *holes_cause(figures), *_others(figures), *_outside(figures)]
    causes += stack_causes(figures, context)
    if figures.form in {"driver", "library", "NCCL"} and figures.tried is None:
        causes += _driver(figures, context)
    causes += _full(figures, context, bool(causes))
    if incident.steps_before and incident.steps_before > 1 and not context.evaluating:
        evidence = f"the log shows step {incident.steps_before} before it, so that the same job had fitted"
        causes.append(cause("longer-batch", "possible", evidence))
    return causes


def _host(incident: OomEvent) -> Iterator[TriageCause]:
    figures = incident.figures
    line = f"line {incident.line}: {incident.after[:160]}"
    if figures.form == "other framework":
        yield cause("not-pytorch", "certain", line)
    elif figures.form == "shared memory":
        yield cause("shared-memory", "likely", line)
    elif figures.form == "host allocator":
        yield cause("host-memory", "certain", line, size=figures.tried)
    else:
        sure = any(word in incident.after for word in ("oom", "OOM", "Out of memory", "OUT_OF_MEMORY"))
        says = "the kernel or the queue names memory" if sure else "a process was killed, which has other reasons too"
        yield cause("host-memory", "certain" if sure else "possible", line, says)


def _limits(figures: Figures) -> Iterator[TriageCause]:
    """A limit that was set, a tensor larger than the GPU, or a driver that refuses although it reports enough free."""
    tried, free = figures.tried, figures.free
    if tried is None:
        return
    if (
        figures.form != "MPS"
        and figures.limit
        and figures.limit < (figures.capacity or 1 << 60)
        and (free is None or free >= tried)
    ):
        reserved = figures.reserved if figures.reserved is not None else figures.allocated or 0
        if reserved + tried > figures.limit - _ROUNDING:
            evidence = f"{shown(figures.limit)} are allowed, {shown(reserved)} held, {shown(tried)} requested"
            yield cause("limit", "certain", evidence)
            return
    if figures.capacity and tried > figures.capacity:
        evidence = f"{shown(tried)} requested at once, of {shown(figures.capacity)} in all"
        yield cause("one-tensor", "certain", evidence, size=tried)
    elif free is not None and free > tried + _ROUNDING:
        evidence = f"{shown(tried)} requested with {shown(free)} free"
        yield cause("driver-refused", "likely", evidence)
    elif figures.capacity and tried > figures.capacity / 2 and (figures.reserved or 0) < figures.capacity / 2:
        evidence = f"{shown(tried)} requested at once, of {shown(figures.capacity)} in all"
        yield cause("one-tensor", "likely", evidence, size=tried)


def holes_cause(figures: Figures) -> Iterator[TriageCause]:
    """Whether the holes would have held the request."""
    tried, holes, reserved = figures.tried, figures.unallocated, figures.reserved
    if not tried or not holes or not reserved or (figures.free or 0) > tried + _ROUNDING:
        return
    enough = holes + (figures.free or 0) >= tried
    share = holes / reserved
    evidence = (
        f"{shown(holes)} of {shown(reserved)} reserved ({share:.0%}) are free but in pieces, "
        f"{shown(figures.free or 0)} free in the driver, {shown(tried)} requested"
    )
    if enough and share >= _MUCH:
        yield cause("fragmentation", "likely", evidence, size=holes)
    elif enough or share >= 0.25:
        says = "defragmenting would only delay it" if enough else "defragmenting would not have been enough"
        yield cause("fragmentation", "possible", evidence, says, size=holes)


def _others(figures: Figures) -> Iterator[TriageCause]:
    tried, free, capacity = figures.tried, figures.free, figures.capacity
    if tried is None or free is None or not capacity or free > tried + _ROUNDING or tried > capacity:
        return
    others, this_process = other_processes(figures)
    others_total = sum(size for _, size in others)
    if others_total:
        listed = ", ".join(f"{pid}: {shown(size)}" for pid, size in others[:6])
        small = [size for _, size in others if _CONTEXT[0] <= size <= _CONTEXT[1]]
        if len(small) > 1 and len({round(size / (16 * MIB)) for size in small}) == 1:
            says = f"{len(small)} other processes hold {shown(small[0])} each, as contexts do ({listed})"
            yield cause("ranks-on-one-gpu", "likely", says, size=sum(small))
            others_total -= sum(small)
        if others_total and free + others_total >= tried:
            share = others_total / capacity
            evidence = f"other processes hold {shown(others_total)} of {shown(capacity)} ({share:.0%}; {listed})"
            sure: Confidence = "certain" if share >= 0.25 else "likely" if share >= _MUCH else "possible"
            yield cause("other-process", sure, evidence, size=others_total)
    used = figures.reserved if this_process is None else this_process
    if used is None:
        return
    unaccounted = capacity - free - used - sum(size for _, size in others)
    if unaccounted > _OUTSIDE and free + unaccounted >= tried:
        evidence = f"{shown(unaccounted)} of {shown(capacity)} are neither free nor known to be this process's"
        sure_rest: Confidence = "likely" if unaccounted / capacity >= _MUCH else "possible"
        yield cause(
            "other-process",
            sure_rest,
            evidence,
            "or this process holds it outside PyTorch's allocator",
            size=round(unaccounted),
        )


def _outside(figures: Figures) -> Iterator[TriageCause]:
    outside, tried = outside_of(figures), figures.tried
    if outside is None or tried is None or outside < _OUTSIDE:
        return
    enough = outside + (figures.free or 0) >= tried
    share = outside / (figures.capacity or outside)
    evidence = f"this process holds {shown(outside)} on top of the {shown(figures.reserved or 0)} that PyTorch reserved"
    yield cause("outside-pytorch", "likely" if enough and share >= _MUCH else "possible", evidence, size=outside)


_BY_MAKING = {
    "logits": "logits",
    "attention scores": "attention-scores",
    "attention mask": "attention-scores",
    "optimizer states": "first-step",
    "optimizer temporaries": "optimizer-temporaries",
    "kv cache": "generation",
    "gathered weights": "gather",
}
_BY_PHASE = {"loading": "loading", "recompute": "recompute", "gather": "gather", "generation": "generation"}


def stack_causes(figures: Figures, context: StackContext) -> Iterator[TriageCause]:
    """Causes from what the stack shows was being allocated; a small request may be incidental."""
    if context.evidence is None:
        return
    size = figures.tried
    large = size is not None and size >= 0.02 * (figures.capacity or 0)
    request = "" if size is None else f"{shown(size)} requested at "
    evidence = f"{request}{context.evidence.short}" + (f": {context.evidence.code}" if context.evidence.code else "")
    if context.making == "predictions":
        yield cause("evaluation-outputs", "likely", evidence)
        return
    code = _BY_MAKING.get(context.making) or _BY_PHASE.get(context.phase)
    if code is not None:
        sure: Confidence = "likely" if large or code in {"first-step", "loading"} else "possible"
        yield cause(code, sure, evidence, size=size)
    if context.phase == "evaluation":
        # The logits of a batch are usual there: what stands beside them is what an evaluation need not hold
        asks: Confidence = "likely" if large and context.making == "logits" else "possible"
        if not context.without_grad:
            yield cause("evaluation-graph", asks, evidence, "nothing on the stack switches gradients off")
        if context.making == "logits":
            yield cause("evaluation-outputs", asks, evidence, "logits of earlier batches may be kept as well")


def _driver(figures: Figures, context: StackContext) -> Iterator[TriageCause]:
    """A message of the driver or a library, which has no figures."""
    if context.phase in {"setup", "loading", ""} or figures.form == "library":
        says = "the driver's message has no figures"
        sure: Confidence = "likely" if context.phase in {"setup", "loading"} else "possible"
        yield cause("no-room-for-context", sure, says)
    if figures.form == "NCCL":
        says = "NCCL asks the driver itself, for what PyTorch's allocator has left"
        yield cause("outside-pytorch", "likely", says)


def _full(figures: Figures, context: StackContext, explained: bool) -> Iterator[TriageCause]:
    allocated = figures.allocated
    limit = figures.limit if figures.form == "MPS" else figures.capacity
    if not allocated or not limit:
        return
    share = (allocated + (figures.tried or 0)) / limit
    if figures.free is not None and figures.tried is not None and figures.free > figures.tried + _ROUNDING:
        return
    where = f", in {context.phase}" if context.phase else ""
    more = shown(figures.tried or 0)
    evidence = f"PyTorch's tensors hold {shown(allocated)} of {shown(limit)}, {more} more requested{where}"
    if share >= _FULL and allocated >= limit / 2:
        yield cause("too-large", "likely", evidence, size=allocated)
    elif not explained and allocated < limit:
        yield cause("too-large", "possible", evidence, size=allocated)


@dataclass(frozen=True)
class Cause:
    """A cause: what it is called, and the smallest change that usually helps."""

    title: str
    remedy: str
    options: tuple[tuple[str, str], ...] = ()
    """Options of the estimate that are the remedy."""


CAUSES = {
    code: Cause(entry["title"], entry["remedy"], tuple(map(tuple, entry.get("options", ()))))
    for code, entry in read_toml(files("memcalc.probe") / "triage" / "causes.toml").items()
}
"""By code."""
_RANK = {"certain": 0, "likely": 1, "possible": 2}


def cause(code: str, confidence: Confidence, *evidence: str, size: int | None = None) -> TriageCause:
    """Return a cause of a code with what speaks for it."""
    entry = CAUSES[code]
    return TriageCause(
        code=code, title=entry.title, confidence=confidence, evidence=evidence, bytes=size, remedy=entry.remedy
    )


def ranked(causes: list[TriageCause]) -> tuple[TriageCause, ...]:
    """Order causes by how sure they are, then by what they account for; each code once, the surest.

    That the job fills the card comes after whatever says more; in an evaluation what it keeps for nothing comes first.
    """
    by_code: dict[str, TriageCause] = {}
    for item in sorted(causes, key=_order):
        by_code.setdefault(item.code, item)
    return tuple(by_code.values())


def _order(item: TriageCause) -> tuple[int, bool, bool, float]:
    size = float("inf") if item.bytes is None else item.bytes
    return _RANK[item.confidence], item.code == "too-large", not item.code.startswith("evaluation-"), -size


def shown(size: float) -> str:
    """Return a size as evidence has it.

    >>> shown(3 << 30), shown(20 << 20), shown(2048), shown(512)
    ('3.00 GiB', '20.0 MiB', '2.0 KiB', '512 B')
    """
    for unit, least, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if abs(size) >= least:
            return format_bytes(size, unit, digits)
    return format_bytes(size, "B", 0)
