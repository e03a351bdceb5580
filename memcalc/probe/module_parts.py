"""From the lives of storages in one step to what each part of a model allocates and frees, in order.

A model is a chain of parts: what stands before its blocks, the blocks, what stands after them. A storage belongs to the
part that makes it. What passes from one part to the next (an output, its gradient) is the next one's first storage;
anything else that is alive in a part that did not make it is written there as a storage of its own for as long, so that
at every moment the sum is that of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, groupby

BEFORE, BETWEEN, AFTER = "embedding", "between", "head"
SCALAR = 8
"""Bytes of the loss and its gradient, which live through all of backward and are nobody's business."""
KINDS = {"gradient": "gradient", "tied": "gradient", "weight copy": "weight copy"}


@dataclass
class Life:
    """One storage from birth to death."""

    number: int
    bytes: int
    phase: str
    """``forward`` or ``backward``, when it was made."""
    part: str
    start: int
    end: int | None
    """Positions among all events; None where it outlives the step."""
    module: str = ""
    op: str = ""
    node: str = ""
    kind: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    end_phase: str = ""
    end_part: str = ""


@dataclass
class Raw:
    """What one run of a module showed."""

    order: list[str]
    """Paths of the blocks as they ran."""
    lives: list[Life]
    given: dict[str, int]
    made: dict[str, int]
    coming: dict[str, int]
    flops: dict[str, int]


@dataclass
class Part:
    """One part's storages and events in one run; indices as in :class:`memcalc.specs.recorded.Execution`."""

    path: str
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    passing: list[int] = field(default_factory=list)
    output: int = 0
    incoming: int = 0
    outgoing: int | None = None
    flops: int = 0

    @property
    def structure(self) -> tuple[object, ...]:
        """All but the sizes: equal in runs that differ in the batch alone."""
        ends = self.output, self.incoming, self.outgoing
        return (
            tuple(self.kinds),
            tuple(self.forward),
            tuple(self.backward),
            tuple(self.saved),
            tuple(self.passing),
            ends,
        )


Moment = tuple[str, int]
"""Forward or backward, and the number of the part."""


@dataclass
class _Span:
    """Where a storage begins and ends, by part."""

    life: Life
    begin: Moment
    end: Moment


def parts_of(raw: Raw) -> list[Part]:
    """The parts of a run, in the order of forward."""
    paths = [BEFORE, *raw.order, AFTER]
    spans = _spans(raw, paths)
    return [_Writer(raw, spans, paths, index).part() for index in range(len(paths))]


def _spans(raw: Raw, paths: list[str]) -> list[_Span]:
    """The parts in which storages are made and freed; those between two blocks belong to the later one."""
    numbers = {part: number for number, part in enumerate(paths)}
    deaths = [(life.end, life, False) for life in raw.lives if life.end is not None]
    moments = sorted([*((life.start, life, True) for life in raw.lives), *deaths], key=lambda moment: moment[0])
    begins: dict[int, Moment] = {}
    ends: dict[int, Moment] = {}
    reached = 0
    for _, life, born in moments:
        phase, part = (life.phase, life.part) if born else (life.end_phase, life.end_part)
        if phase == "forward" and part in numbers and part != AFTER:
            reached = max(reached, numbers[part])
        if phase == "end":
            number, phase = 0, "end"
        else:
            number = min(reached + 1, len(paths) - 1) if part == BETWEEN else numbers.get(part, 0)
        (begins if born else ends)[life.number] = (phase, number)
    return [_Span(life, begins[life.number], ends.get(life.number, ("end", 0))) for life in raw.lives]


class _Writer:
    """Writes one part."""

    def __init__(self, raw: Raw, spans: list[_Span], places: list[str], index: int) -> None:
        self.raw, self.spans, self.index, self.last = raw, spans, index, len(places) - 1
        self.path = places[index]
        self.out = Part(self.path, flops=raw.flops.get(self.path, 0))
        self.by_number = {span.life.number: span for span in spans}
        self.known: dict[int, int] = {}
        self.input = self._passed(index)
        self.output = self._passed(index + 1)
        self.coming = raw.coming.get(self.path, 0)
        self.going = raw.coming.get(places[index - 1], 0) if index else 0

    def _passed(self, index: int) -> int:
        """The storage with which a part begins: what the block before it made, or what the first block was given."""
        order = self.raw.order
        if not 0 < index <= self.last:
            return 0
        return self.raw.given.get(order[0], 0) if index == 1 else self.raw.made.get(order[index - 2], 0)

    def part(self) -> Part:
        """Forward, saved storages, backward."""
        out = self.out
        span = self.by_number.get(self.input)
        self._record(span, "input") if span else self._empty("input")
        self._forward()
        out.output = self.known.get(self.output, 0) if self.index < self.last else self._empty("loss")
        incoming = self.by_number.get(self.coming)
        keeps = set(out.saved)
        if incoming is None or self.index == self.last:
            out.incoming = self._empty("gradient of the output")
        else:
            out.incoming = self._record(incoming, "gradient of the output")
        self._backward(keeps)
        out.forward, out.backward = in_order(out.forward), in_order(out.backward)
        out.outgoing = self.known.get(self.going) if self.index else None
        return out

    def _record(self, span: _Span, title: str = "") -> int:
        """List a storage; its index."""
        life, out = span.life, self.out
        inside = life.module.removeprefix(self.path).lstrip(".") if self.path else life.module
        operator = life.op.split(".")[0].lstrip("_")
        out.names.append(title or ": ".join(part for part in (inside, operator) if part) or "storage")
        out.kinds.append(KINDS.get(life.kind, "activation"))
        out.bytes.append(life.bytes)
        out.dtypes.append(life.dtype)
        self.known[life.number] = len(out.names) - 1
        return len(out.names) - 1

    def _empty(self, title: str) -> int:
        self.out.names.append(title)
        self.out.kinds.append("external")
        self.out.bytes.append(0)
        self.out.dtypes.append("uint8")
        return len(self.out.names) - 1

    def _alive_at(self, moment: Moment) -> list[_Span]:
        """Storages made before a part's forward or backward that are alive when it begins."""
        return [s for s in self.spans if before(s.begin, moment) and not before(s.end, moment)]

    def _forward(self) -> None:
        """Events of forward; what backward frees is saved, unless it passes on to the next part."""
        here, out = ("forward", self.index), self.out
        passing = [
            span
            for span in self._alive_at(here)
            # what the part before made and this one frees; longer lives pass, and are listed where they were made
            if span.end == here and span.begin == ("forward", self.index - 1) and span.life.number != self.input
        ]
        out.forward += [self._record(span) for span in passing if span.life.kind != "weight copy"]
        for _, span, born in self._moments(here):
            if span.life.kind == "weight copy":
                continue
            if born:
                out.forward.append(self._record(span))
            elif span.life.number in self.known:
                out.forward.append(~self.known[span.life.number])
        for number, index in self.known.items():
            span = self.by_number[number]
            freed = ~index in out.forward
            if freed or number == self.output != self.input:
                continue
            if span.end[0] != "forward":
                out.saved.append(index)
                continue
            out.forward.append(~index)
            if span.end[1] > self.index + 1 and number != self.input:
                out.passing.append(index)

    def _moments(self, here: Moment) -> list[tuple[int, _Span, bool]]:
        """Births and deaths in a part's forward or backward, in order."""
        births = ((s.life.start, s, True) for s in self.spans if s.begin == here)
        deaths = ((s.life.end or 0, s, False) for s in self.spans if s.end == here and s.life.end is not None)
        return sorted(chain(births, deaths), key=lambda moment: moment[0])

    def _backward(self, keeps: set[int]) -> None:
        """Events of backward: saved storages are freed as in the run, or at the end where a later part has them too."""
        here, out = ("backward", self.index), self.out
        numbers = {index: number for number, index in self.known.items()}
        early = [i for i in sorted(keeps) if before(self.by_number[numbers[i]].end, here)]
        out.backward += [~index for index in early]
        alive = set(keeps) - set(early) | {out.incoming}
        for span in self._alive_at(here):
            number = span.life.number
            other = number != self.coming and span.life.kind not in {"gradient", "weight copy"}
            # made in backward, or in the forward of a later part whose backward is over: as what a loss refers to
            made = other and (span.begin[0] == "backward" or span.begin[1] > self.index)
            # the output that the next part kept, and this one too
            shared = number == self.output and span.begin[0] == "forward" and self.known.get(number, -1) not in keeps
            if (made or shared) and span.life.kind != "tied" and span.life.bytes > SCALAR:
                index = self._record(span)
                out.backward.append(index)
                alive.add(index)
        for _, span, born in self._moments(here):
            index = self.known.get(span.life.number, -1)
            if born:
                index = self._record(span)
                out.backward.append(index)
                if out.kinds[index] != "gradient":
                    alive.add(index)
            elif index in alive:
                out.backward.append(~index)
                alive.discard(index)
        outgoing = self.known.get(self.going, -1)
        out.backward += [~index for index in sorted(alive) if index not in {outgoing, out.incoming} or index == -1]
        if out.incoming in alive and out.incoming != outgoing:
            out.backward.append(~out.incoming)


def in_order(events: list[int]) -> list[int]:
    """The same with frees that follow one another sorted: of those at once the order is left to chance.

    >>> in_order([1, ~3, ~2, 4, ~1])
    [1, -3, -4, 4, -2]
    """
    out: list[int] = []
    for is_free, run in groupby(events, key=lambda event: event < 0):
        among = list(run)
        out += sorted(among, reverse=True) if is_free else among
    return out


def before(first: Moment, other: Moment) -> bool:
    """Whether a moment comes before another: forward from the first part to the last, then backward the other way."""
    return _rank(first) < _rank(other)


def _rank(moment: Moment) -> tuple[int, int]:
    phase, index = moment
    return {"forward": (0, index), "backward": (1, -index)}.get(phase, (2, 0))
