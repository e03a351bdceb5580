"""The replay of the caching allocator against a second one, slow and plain, on random histories.

In `Model` a segment is a list of blocks and everything is found by looking at all of them, so that it shares neither
data nor code with the replay; both follow `c10/cuda/CUDACachingAllocator.cpp`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator import Event, replay

KIB, MIB = 2**10, 2**20


@dataclass
class Segment:
    """A range of addresses cut into blocks, each [size, state], state one of free, live, unmapped."""

    owner: tuple[int, bool]
    blocks: list[list[Any]]

    def tidy(self) -> None:
        """Make neighbours in the same state, unless live, one block."""
        kept: list[list[Any]] = []
        for block in self.blocks:
            if kept and block[1] != "live" and kept[-1][1] == block[1]:
                kept[-1][0] += block[0]
            else:
                kept.append(block)
        self.blocks[:] = kept

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield index and offset of every block."""
        at = 0
        for index, (size, _) in enumerate(self.blocks):
            yield index, at
            at += size


@dataclass
class Model:
    """The allocator's rules on plain lists: no index, everything found by looking at all blocks."""

    capacity: int
    expandable: bool
    segments: list[Segment] = field(default_factory=list)
    live: dict[int, tuple[Segment, list[Any]]] = field(default_factory=dict)
    reserved: int = 0
    peak: int = 0
    retries: int = 0

    def reserve(self, size: int) -> bool:
        """Ask the driver."""
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        return True

    def find(self, owner: tuple[int, bool], size: int) -> tuple[Segment, int] | None:
        """Return the segment and index of the best fit."""
        fits = []
        for number, segment in enumerate(self.segments):
            for index, at in segment.starts():
                have, state = segment.blocks[index]
                if segment.owner == owner and state == "free" and have >= size:
                    following = segment.blocks[index + 1 : index + 2]
                    reach = have + sum(more for more, kind in following if kind == "unmapped")
                    fits.append((have, number, at, index, reach))
        fits.sort()
        while len(fits) > 1 and fits[1][4] < fits[0][4]:
            del fits[0]
        return (self.segments[fits[0][1]], fits[0][3]) if fits else None

    def carve(self, key: int, segment: Segment, index: int, size: int) -> None:
        """Cut the request off a free block."""
        block = segment.blocks[index]
        rest = block[0] - size
        if rest >= 512 if segment.owner[1] or self.expandable else rest > MIB:
            segment.blocks.insert(index + 1, [rest, "free"])
            block[0] = size
        block[1] = "live"
        self.live[key] = (segment, block)

    def new_segment(self, owner: tuple[int, bool], size: int) -> tuple[Segment, int] | None:
        """Call cudaMalloc."""
        wanted = 2 * MIB if owner[1] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if not self.reserve(wanted):
            return None
        self.segments.append(Segment(owner, [[wanted, "free"]]))
        return self.segments[-1], 0

    def mapped(self, owner: tuple[int, bool], size: int) -> tuple[Segment, int] | None:
        """Find the lowest room in free and unmapped blocks and map what is missing, one gap at a time."""
        page = 2 * MIB if owner[1] else 20 * MIB
        for segment in self.segments:
            for index, at in segment.starts() if segment.owner == owner else ():
                states = [state for _, state in segment.blocks[index:]]
                room = sum(have for have, _ in segment.blocks[index : index + [*states, "live"].index("live")])
                if room >= size and (states[0] == "unmapped" or states[:2] == ["free", "unmapped"]):
                    return self.fill(segment, at, size, page)
        room = -(-(self.capacity * 9 // 8) // page) * page
        self.segments.append(Segment(owner, [[max(room, -(-size // page) * page), "unmapped"]]))
        return self.fill(self.segments[-1], 0, size, page)

    def fill(self, segment: Segment, start: int, size: int, page: int) -> tuple[Segment, int] | None:
        """Map the gaps of a range, from the lowest on."""
        while True:
            gap = next(
                (
                    (i, at)
                    for i, at in segment.starts()
                    if segment.blocks[i][1] == "unmapped" and start <= at < start + size
                ),
                None,
            )
            if gap is None:
                return segment, next(i for i, at in segment.starts() if at == start)
            index, at = gap
            have = segment.blocks[index][0]
            pages = min(-(-(start + size - at) // page) * page, have)
            if not self.reserve(pages):
                return None
            segment.blocks[index : index + 1] = [[pages, "free"], [have - pages, "unmapped"]][: 1 + (have > pages)]
            segment.tidy()

    def flush(self) -> None:
        """Give back what is free as a whole, and forget segments without memory."""
        for segment in list(self.segments):
            if self.expandable:
                self.unmap(segment, 2 * MIB if segment.owner[1] else 20 * MIB)
            if len(segment.blocks) == 1 and segment.blocks[0][1] != "live":
                self.reserved -= segment.blocks[0][0] if segment.blocks[0][1] == "free" else 0
                self.segments.remove(segment)

    def unmap(self, segment: Segment, page: int) -> None:
        """Give back the whole pages in free blocks."""
        cut: list[list[Any]] = []
        for index, at in segment.starts():
            size, state = block = segment.blocks[index]
            low, high = -(-at // page) * page, (at + size) // page * page
            if state == "free" and low < high:
                parts = [[low - at, "free"], [high - low, "unmapped"], [at + size - high, "free"]]
                cut += [part for part in parts if part[0]]
                self.reserved -= high - low
            else:
                cut.append(block)
        segment.blocks[:] = cut
        segment.tidy()

    def alloc(self, key: int, size: int, stream: int) -> bool:
        """Serve a request, or say that memory is out."""
        size = -(-size // 512) * 512
        owner = (stream, size <= MIB)
        grow = self.mapped if self.expandable else self.new_segment
        found = self.find(owner, size) or grow(owner, size)
        if found is None:
            self.flush()
            self.retries += 1
            found = grow(owner, size)
        if found is not None:
            self.carve(key, *found, size)
        return found is not None

    def free(self, key: int) -> None:
        """Put a block back."""
        segment, block = self.live.pop(key)
        block[1] = "free"
        segment.tidy()

    def allocated(self) -> int:
        """Return the sum of the live blocks [bytes]."""
        return sum(block[0] for _, block in self.live.values())


SIZES = [
    1,
    512,
    700 * KIB,
    MIB,
    MIB + 1,
    *(int(x * MIB) for x in (3, 6.5, 9.9995, 10, 11, 18.7, 20, 21, 35.25, 58, 90)),
]
histories = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.sampled_from(SIZES), st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
    ),
    max_size=60,
)
many = drawn(300)


def told(history: list[tuple[str, int, int]]) -> list[Event]:
    """Return the history as events; a free names one of the live allocations by its place among them."""
    live: list[int] = []
    events: list[Event] = []
    for key, (kind, number, stream) in enumerate(history):
        if kind == "alloc":
            live.append(key)
            events.append(Event("alloc", key, number, stream))
        elif live:
            events.append(Event("free", live.pop(number % len(live))))
    return events


@many
@given(history=histories, capacity=st.sampled_from([90, 150, 301, 5000]), expandable=st.booleans())
def test_random_histories_agree_with_the_model(
    history: list[tuple[str, int, int]], capacity: int, expandable: bool
) -> None:
    model, peak, failed = Model(capacity * MIB, expandable), 0, None
    events = told(history)
    for position, event in enumerate(events):
        if event.kind == "free":
            model.free(event.key)
        elif not model.alloc(event.key, event.size, event.stream):
            failed = position
            break
        peak = max(peak, model.allocated())
    found = replay(events, capacity=capacity * MIB, expandable=expandable)
    assert (found.out_of_memory and found.out_of_memory.position) == failed
    assert (found.peak_allocated, found.allocated_end) == (peak, model.allocated())
    assert (found.peak_reserved, found.reserved_end, found.retries) == (model.peak, model.reserved, model.retries)


@many
@given(history=histories, expandable=st.booleans())
def test_what_always_holds(history: list[tuple[str, int, int]], expandable: bool) -> None:
    events = told(history)
    found = replay(events, expandable=expandable)
    live = {event.key for event in events} - {event.key for event in events if event.kind == "free"}
    emptied = replay([*events, *(Event("free", key) for key in live), Event("empty")], expandable=expandable)
    assert found.peak_requested <= found.peak_allocated <= found.peak_reserved
    assert found.peak_reserved % (2 * MIB) == 0
    assert found.peak_reserved <= sum(found.pools.values())
    assert (emptied.allocated_end, emptied.reserved_end) == (0, 0)
    assert (emptied.peak_reserved, emptied.retries) == (found.peak_reserved, 0)
    assert replay(events, expandable=expandable, capacity=found.peak_reserved) == found


@many
@given(history=histories)
def test_streams_do_not_disturb_each_other(history: list[tuple[str, int, int]]) -> None:
    """Without a limit a stream's pool is what it would be were it alone."""
    events = told(history)
    streams = {event.key: event.stream for event in events if event.kind == "alloc"}
    for stream, peak in replay(events).pools.items():
        assert replay([event for event in events if streams[event.key] == stream]).peak_reserved == peak
