"""The replay of what is reserved alone, against the whole one."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc import api
from memcalc.allocator import Event, mapped_up_to, replay, reserved_up_to
from memcalc.errors import MemcalcError
from memcalc.events import step_events
from memcalc.terms.build import build_ledger
from memcalc.terms.overhead import overhead_of

KIB, MIB = 2**10, 2**20
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 40 * MIB),
    st.sampled_from([512, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB, 10 * MIB - 1, 10 * MIB, 12 * MIB]),
)
"""Around every threshold of the rules: 512 B, 1 MiB, 2 MiB, 10 MiB."""


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int, int, str]]:
    """Allocations and frees in any order on three streams, some sizes again and again, as training has them."""
    known, live, events = draw(st.lists(SIZES, min_size=1, max_size=6)), [], [Event("mark", name="begin")]
    for key in range(1, draw(st.integers(2, 120))):
        if live and draw(st.integers(0, 9)) < 4:
            events.append(Event("free", live.pop(draw(st.integers(0, len(live) - 1)))))
        events.append(Event("alloc", key, draw(st.sampled_from(known)), draw(st.integers(0, 2))))
        live.append(key)
    return [tuple(event) for event in events]


@drawn(150)
@given(histories())
def test_it_reserves_what_the_whole_replay_does(events: list[tuple[str, int, int, int, str]]) -> None:
    peak = replay(events).peak_reserved
    assert reserved_up_to(events, peak) == peak
    assert reserved_up_to(events, peak - 1) is None


@drawn(60)
@given(histories(), st.integers(1, 300))
def test_a_bound_within_the_card_tells_what_the_card_does(
    events: list[tuple[str, int, int, int, str]], room: int
) -> None:
    """None exactly where the allocator of a card of that size has to give its cache back, or fails."""
    on_card = replay(events, capacity=room * MIB)
    short = reserved_up_to(events, room * MIB)
    assert (short is None) == (on_card.retries > 0)
    assert short is None or short == on_card.peak_reserved


@drawn(150)
@given(histories())
def test_so_do_segments_that_grow(events: list[tuple[str, int, int, int, str]]) -> None:
    peak = replay(events, expandable=True).peak_reserved
    assert mapped_up_to(events, peak, 1 << 40) == peak
    assert mapped_up_to(events, peak - 1, 1 << 40) is None


@drawn(150)
@given(histories(), st.integers(1, 300))
def test_segments_that_grow_have_the_room_of_the_card(events: list[tuple[str, int, int, int, str]], room: int) -> None:
    """On a card that is nearly full, the last block has hardly more addresses behind it than others have bytes."""
    on_card = replay(events, capacity=room * MIB, expandable=True)
    mapped = mapped_up_to(events, room * MIB, room * MIB)
    assert (mapped is None) == (on_card.retries > 0)
    assert mapped is None or mapped == on_card.peak_reserved


WORDS: dict[str, tuple[Any, ...]] = {
    "framework": ("fsdp2", "fsdp1", "megatron", "deepspeed", "ddp", "torchtitan"),
    "zero": (0, 1, 2, 3),
    "tp": (1, 1, 2),
    "pp": (1, 1, 2),
    "recompute": ("none", "full", "attention", "selective-ops", "every-2"),
    "micro_batch": (1, 2, 3),
    "global_batch": (16, 48, 96),
    "seq_len": (512, 1000, 2048),
    "precision": ("bf16-mixed", "fp16-mixed", "fp32"),
    "offload": ((), (), ("optimizer",), ("params",), ("activations",)),
    "optimizer": ("adamw", "sgd"),
}


def written(seed: int) -> Iterator[list[tuple[str, int, int, int, str]]]:
    """Yield the events of one possible strategy after another, of any word any value."""
    draw = random.Random(seed)  # noqa: S311  # the same strategies in every run
    while True:
        words = {name: draw.choice(values) for name, values in WORDS.items()}
        try:
            one = api.single(model=draw.choice(["gpt2", "llama-3.2-1b"]), gpu="a100-80g", gpus=8, **words)
            overhead = overhead_of(one.job.gpu, one.grid, one.grid.layouts[0])
        except MemcalcError:  # what the framework cannot be told together
            continue
        stage = draw.randrange(one.grid.num_stages)
        yield list(step_events(one.census, build_ledger(one.census, overhead.workspaces, detail=False), stage))


@pytest.mark.parametrize(("seed", "count"), [(1, 24), pytest.param(2, 1000, marks=pytest.mark.slow)])
def test_so_does_it_of_any_strategy(seed: int, count: int) -> None:
    for events in islice(written(seed), count):
        peak, grown = replay(events).peak_reserved, replay(events, expandable=True).peak_reserved
        assert (reserved_up_to(events, peak), reserved_up_to(events, peak - 1)) == (peak, None)
        assert (mapped_up_to(events, grown, 1 << 40), mapped_up_to(events, grown - 1, 1 << 40)) == (grown, None)


def test_blocks_that_another_stream_still_has_are_not_there_for_others() -> None:
    """As of a broadcast whose copies are freed at once; a full device waits for the stream, and has them back."""
    events = [Event("alloc", 1, 50 * MIB)]
    for key in (2, 3):
        events += [Event("alloc", key, 50 * MIB), Event("drop", key, stream=1)]
    events += [Event("sync", stream=1), Event("free", 2), Event("free", 3), Event("alloc", 4, 50 * MIB)]
    played = replay(events)
    assert (played.peak_reserved, played.peak_allocated) == (150 * MIB, 100 * MIB)
    assert reserved_up_to(events, 150 * MIB) == 150 * MIB
    assert mapped_up_to(events, 200 * MIB, 200 * MIB) == replay(events, expandable=True).peak_reserved == 160 * MIB
    full = replay(events, capacity=100 * MIB)
    assert full.out_of_memory is None
    assert (full.peak_reserved, full.retries) == (100 * MIB, 1)
    assert replay([event for event in events if event.kind == "alloc"], capacity=100 * MIB).out_of_memory is not None
