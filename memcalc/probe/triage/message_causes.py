"""From the figures of one message, and the stack above it, to causes.

The bounds are sums, not fits: holes caused it if holes and free memory would have held the request; another process if
its memory and the free memory would have. A share says whether that is the matter or the last straw.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.probe.triage.causes import cause, said
from memcalc.probe.triage.frames import Reading, read_stack
from memcalc.probe.triage.logs import Incident
from memcalc.probe.triage.messages import HOST_FORMS, Figures
from memcalc.results.triage import Confidence, TriageCause
from memcalc.units import GIB, MIB

__all__ = ["causes_of", "holes_cause", "other_processes", "outside_of", "stack_causes"]

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
    own = min((one for one in figures.processes if one[1] >= least), key=lambda one: one[1], default=None)
    if own is None or not figures.reserved:
        return figures.processes, None
    rest = list(figures.processes)
    rest.remove(own)
    return tuple(rest), own[1]


def outside_of(figures: Figures) -> int | None:
    """Bytes of this process outside PyTorch's allocator, where the message tells them."""
    _, own = other_processes(figures)
    return None if own is None or figures.reserved is None else max(own - figures.reserved, 0)


def causes_of(incident: Incident) -> list[TriageCause]:
    """Return the causes that a message and its stack speak for."""
    figures, reading = incident.figures, read_stack(incident.stack)
    if figures.form in HOST_FORMS or figures.form == "other framework":
        return list(_host(incident))
    found = [*_limits(figures), *holes_cause(figures), *_others(figures), *_outside(figures)]
    found += stack_causes(figures, reading)
    if figures.form in {"driver", "library", "NCCL"} and figures.tried is None:
        found += _driver(figures, reading)
    found += _full(figures, reading, bool(found))
    if incident.steps_before and incident.steps_before > 1 and not reading.evaluating:
        evidence = f"the log shows step {incident.steps_before} before it, so that the same job had fitted"
        found.append(cause("longer-batch", "possible", evidence))
    return found


def _host(incident: Incident) -> Iterator[TriageCause]:
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
    """A limit that was set, one tensor above the card, or a driver that refuses what it says it has."""
    tried, free = figures.tried, figures.free
    if tried is None:
        return
    if (
        figures.form != "MPS"
        and figures.limit
        and figures.limit < (figures.capacity or 1 << 60)
        and (free is None or free >= tried)
    ):
        held = figures.reserved if figures.reserved is not None else figures.allocated or 0
        if held + tried > figures.limit - _ROUNDING:
            yield cause(
                "limit", "certain", f"{said(figures.limit)} are allowed, {said(held)} held, {said(tried)} asked for",
            )  # fmt: skip
            return
    if figures.capacity and tried > figures.capacity:
        evidence = f"{said(tried)} were asked for at once, of {said(figures.capacity)} in all"
        yield cause("one-tensor", "certain", evidence, size=tried)
    elif free is not None and free > tried + _ROUNDING:
        evidence = f"{said(tried)} were asked for with {said(free)} free"
        yield cause("driver-refused", "likely", evidence)
    elif figures.capacity and tried > figures.capacity / 2 and (figures.reserved or 0) < figures.capacity / 2:
        evidence = f"{said(tried)} were asked for at once, of {said(figures.capacity)} in all"
        yield cause("one-tensor", "likely", evidence, size=tried)


def holes_cause(figures: Figures) -> Iterator[TriageCause]:
    """Whether the holes would have held the request."""
    tried, holes, reserved = figures.tried, figures.unallocated, figures.reserved
    if not tried or not holes or not reserved or (figures.free or 0) > tried + _ROUNDING:
        return
    enough = holes + (figures.free or 0) >= tried
    share = holes / reserved
    evidence = (
        f"{said(holes)} of {said(reserved)} reserved ({share:.0%}) are free but in pieces, "
        f"{said(figures.free or 0)} free in the driver, {said(tried)} asked for"
    )
    if enough and share >= _MUCH:
        yield cause("fragmentation", "likely", evidence, size=holes)
    elif enough or share >= 0.25:
        says = (
            "closing the holes would put it off, no more"
            if enough
            else "even closed, the holes would not have been enough"
        )
        yield cause("fragmentation", "possible", evidence, says, size=holes)


def _others(figures: Figures) -> Iterator[TriageCause]:
    tried, free, capacity = figures.tried, figures.free, figures.capacity
    if tried is None or free is None or not capacity or free > tried + _ROUNDING or tried > capacity:
        return
    others, own = other_processes(figures)
    held = sum(size for _, size in others)
    if held:
        listed = ", ".join(f"{pid}: {said(size)}" for pid, size in others[:6])
        small = [size for _, size in others if _CONTEXT[0] <= size <= _CONTEXT[1]]
        if len(small) > 1 and len({round(size / (16 * MIB)) for size in small}) == 1:
            says = f"{len(small)} other processes hold {said(small[0])} each, as contexts do ({listed})"
            yield cause("ranks-on-one-gpu", "likely", says, size=sum(small))
            held -= sum(small)
        if held and free + held >= tried:
            share = held / capacity
            evidence = f"other processes hold {said(held)} of {said(capacity)} ({share:.0%}; {listed})"
            sure: Confidence = "certain" if share >= 0.25 else "likely" if share >= _MUCH else "possible"
            yield cause("other-process", sure, evidence, size=held)
    known = figures.reserved if own is None else own
    if known is None:
        return
    rest = capacity - free - known - sum(size for _, size in others)
    if rest > _OUTSIDE and free + rest >= tried:
        evidence = f"{said(rest)} of {said(capacity)} are neither free nor this process's as far as it is told"
        sure_rest: Confidence = "likely" if rest / capacity >= _MUCH else "possible"
        yield cause(
            "other-process",
            sure_rest,
            evidence,
            "or this process holds it outside PyTorch's allocator",
            size=round(rest),
        )


def _outside(figures: Figures) -> Iterator[TriageCause]:
    outside, tried = outside_of(figures), figures.tried
    if outside is None or tried is None or outside < _OUTSIDE:
        return
    enough = outside + (figures.free or 0) >= tried
    share = outside / (figures.capacity or outside)
    evidence = f"this process holds {said(outside)} beside the {said(figures.reserved or 0)} that PyTorch reserved"
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


def stack_causes(figures: Figures, reading: Reading) -> Iterator[TriageCause]:
    """What the stack says was being made; a small request may be the last straw of something else."""
    if reading.evidence is None:
        return
    size = figures.tried
    large = size is not None and size >= 0.02 * (figures.capacity or 0)
    asked = "" if size is None else f"{said(size)} were asked for at "
    evidence = f"{asked}{reading.evidence.short}" + (f": {reading.evidence.code}" if reading.evidence.code else "")
    if reading.making == "predictions":
        yield cause("evaluation-outputs", "likely", evidence)
        return
    code = _BY_MAKING.get(reading.making) or _BY_PHASE.get(reading.phase)
    if code is not None:
        sure: Confidence = "likely" if large or code in {"first-step", "loading"} else "possible"
        yield cause(code, sure, evidence, size=size)
    if reading.phase == "evaluation" and not reading.without_grad:
        yield cause("evaluation-graph", "possible", evidence, "nothing on the stack switches gradients off")


def _driver(figures: Figures, reading: Reading) -> Iterator[TriageCause]:
    """A message of the driver or a library, which has no figures."""
    if reading.phase in {"setup", "loading", ""} or figures.form == "library":
        says = "the driver's message has no figures"
        sure: Confidence = "likely" if reading.phase in {"setup", "loading"} else "possible"
        yield cause("no-room-for-context", sure, says)
    if figures.form == "NCCL":
        says = "NCCL asks the driver itself, for what PyTorch's allocator has left"
        yield cause("outside-pytorch", "likely", says)


def _full(figures: Figures, reading: Reading, explained: bool) -> Iterator[TriageCause]:
    held = figures.allocated
    limit = figures.limit if figures.form == "MPS" else figures.capacity
    if not held or not limit:
        return
    share = (held + (figures.tried or 0)) / limit
    if figures.free is not None and figures.tried is not None and figures.free > figures.tried + _ROUNDING:
        return
    where = f", in {reading.phase}" if reading.phase else ""
    evidence = (
        f"PyTorch's tensors hold {said(held)} of {said(limit)}, {said(figures.tried or 0)} more were asked for{where}"
    )
    if share >= _FULL and held >= limit / 2:
        yield cause("too-large", "likely", evidence, size=held)
    elif not explained and held < limit:
        yield cause("too-large", "possible", evidence, size=held)
