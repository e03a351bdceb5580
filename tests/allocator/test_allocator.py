"""The replay of the caching allocator against figures worked out by hand from PyTorch's source.

Function names in the docstrings are those of `c10/cuda/CUDACachingAllocator.cpp`.
"""

from typing import Any

import pytest

from memcalc.allocator import Event, Replay, replay
from memcalc.errors import InputError

MIB = 2**20


def alloc(key: int, size: float, stream: int = 0) -> Event:
    """Return a request, its size in MiB."""
    return Event("alloc", key, int(size * MIB), stream)


def free(key: int) -> Event:
    return Event("free", key)


def mark(name: str) -> Event:
    return Event("mark", name=name)


def run(*events: Event, **options: Any) -> Replay:
    return replay(events, **options)


def figures(found: Replay) -> tuple[float, float]:
    """Return peak allocated and peak reserved in MiB."""
    return found.peak_allocated / MIB, found.peak_reserved / MIB


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (3 * MIB + 1, 3146240)]
)
def test_sizes_are_rounded_to_512_bytes(size: int, rounded: int) -> None:
    """`round_size`; allocated_bytes takes block->size and requested_bytes orig_size (`alloc_found_block`)."""
    found = replay([("alloc", 1, size, 0, "")])
    assert (found.peak_allocated, found.peak_requested) == (rounded, size)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB - 511, 10),  # rounds to 10 MiB, which is no longer below kMinLargeAlloc
        (10 * MIB + 1, 12),
        (64 * MIB, 64),
        (64 * MIB + 1, 66),
    ],
)
def test_segment_of_a_single_request(size: int, segment: int) -> None:
    """`get_allocation_size`."""
    assert replay([("alloc", 1, size, 0, "")]).peak_reserved == segment * MIB


def test_large_segment_is_a_setting() -> None:
    assert run(alloc(1, 3), large_segment=32 * MIB).peak_reserved == 32 * MIB


def test_small_requests_share_a_segment() -> None:
    assert run(alloc(1, 1), alloc(2, 0.5), alloc(3, 0.5)).peak_reserved == 2 * MIB
    assert run(alloc(1, 1), alloc(2, 0.5), alloc(3, 0.75)).peak_reserved == 4 * MIB


def test_small_and_large_requests_do_not_share() -> None:
    """The rest of 20 MiB serves nothing of 1 MiB or less (`get_pool`)."""
    assert run(alloc(1, 2), alloc(2, 1)).peak_reserved == 22 * MIB


def test_a_rest_of_one_mebibyte_stays_with_its_block() -> None:
    """`should_split`: in the large pool the rest must be larger than kSmallSize, so 11 of 12 MiB is not split."""
    assert figures(run(alloc(1, 11))) == (12, 12)
    assert figures(run(alloc(1, 10.5))) == (10.5, 12)


def test_a_rest_serves_the_next_request() -> None:
    assert figures(run(alloc(1, 10.5), alloc(2, 1.25))) == (12, 12)  # 1.25 of the rest of 1.5: the 0.25 stay with it


def test_small_pool_splits_off_512_bytes() -> None:
    """`should_split`: in the small pool a rest of kMinBlockSize is kept apart."""
    two = [("alloc", 1, MIB, 0, ""), ("alloc", 2, MIB - 512, 0, ""), ("alloc", 3, 512, 0, "")]
    assert replay(two).peak_reserved == 2 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    """`get_free_block` is a lower_bound by size: 28 from the block of 30 leaves that of 40 for 35."""
    held = [alloc(1, 40), alloc(2, 30), free(1), free(2)]
    assert run(*held, alloc(3, 28), alloc(4, 35)).peak_reserved == 70 * MIB


def test_free_neighbours_become_one_block() -> None:
    """`try_merge_blocks`: whatever the order, three parts of a 20 MiB segment make 20 MiB again."""
    parts = [alloc(key, 6) for key in (1, 2, 3)]
    for order in ((1, 2, 3), (1, 3, 2), (3, 1, 2), (2, 3, 1)):
        assert run(*parts, *map(free, order), alloc(4, 20)).peak_reserved == 20 * MIB


def test_a_hole_between_live_blocks_is_no_larger_than_it_is() -> None:
    parts = [alloc(key, 6) for key in (1, 2, 3)]
    assert run(*parts, free(1), free(3), alloc(4, 9)).peak_reserved == 40 * MIB
    assert run(*parts, free(1), free(3), alloc(4, 8)).peak_reserved == 20 * MIB  # behind 2: 6 freed and 2 never used


def test_segments_never_become_one_block() -> None:
    assert run(alloc(1, 10), alloc(2, 10), free(1), free(2), alloc(3, 20)).peak_reserved == 40 * MIB


def test_peaks_of_two_streams_add() -> None:
    """`BlockComparatorSize` orders by stream first: a cached block serves only the stream that it was made for."""
    found = run(alloc(1, 100), free(1), alloc(2, 80, stream=7), free(2), alloc(3, 100))
    assert figures(found) == (100, 180)
    assert found.pools == {0: 100 * MIB, 7: 80 * MIB}


def test_an_empty_tensor_has_no_block() -> None:
    found = run(alloc(1, 0), free(1))
    assert (found.peak_allocated, found.peak_reserved) == (0, 0)


def test_largest_hole_is_read_when_reserved_peaks() -> None:
    found = run(alloc(1, 30), free(1), alloc(2, 32), alloc(3, 28))
    assert found.largest_hole == 30 * MIB  # 62 reserved first stand with 32 live; later 60 are


def test_a_full_card_gives_back_whole_free_segments() -> None:
    """`malloc`: alloc_block fails, release_cached_blocks, alloc_block again counts num_alloc_retries."""
    found = run(alloc(1, 40), alloc(2, 44), free(1), alloc(3, 50), capacity=100 * MIB)
    assert (found.retries, found.out_of_memory) == (1, None)
    assert (found.peak_reserved, found.reserved_end) == (94 * MIB, 94 * MIB)


def test_each_mark_knows_the_retries_before_it() -> None:
    marks = [("mark", 0, 0, 0, name) for name in ("a", "b", "c")]
    freed = [alloc(1, 40), alloc(2, 44), free(1)]
    found = run(marks[0], *freed, marks[1], alloc(3, 50), marks[2], capacity=100 * MIB)
    assert found.retries_at == (("a", 0), ("b", 0), ("c", 1))


def test_reserved_after_the_flush() -> None:
    held = [alloc(1, 60), alloc(2, 36), free(1), free(2), alloc(3, 70), free(3)]
    found = run(*held, capacity=100 * MIB)
    assert (found.peak_reserved, found.reserved_after_flush, found.retries) == (96 * MIB, 70 * MIB, 1)
    assert run(*held).reserved_after_flush == 166 * MIB


def test_all_streams_and_sizes_are_flushed() -> None:
    held = [alloc(1, 40, stream=1), alloc(2, 0.5), free(1), free(2)]
    assert run(*held, alloc(3, 90), capacity=100 * MIB).reserved_end == 90 * MIB


def test_a_hole_in_a_segment_in_use_cannot_be_given_back() -> None:
    """`release_blocks` frees only blocks without prev and next."""
    held = [alloc(1, 40), free(1), alloc(2, 10), alloc(3, 40), mark("last")]
    failed = run(*held, alloc(4, 40.5), capacity=100 * MIB).out_of_memory
    assert failed is not None
    assert (failed.position, failed.key, failed.phase) == (5, 4, "last")
    assert (failed.size, failed.segment) == (40.5 * MIB, 42 * MIB)
    assert (failed.allocated, failed.reserved) == (50 * MIB, 80 * MIB)


def test_two_halves_of_the_card() -> None:
    """PyTorch's test_cuda.py, test_out_of_memory_retry: beside the context one half fits, and again, but not two."""
    total, capacity = 16 * 1024, (16 * 1024 - 400) * MIB
    assert run(alloc(1, total / 2), alloc(2, total / 2), capacity=capacity).out_of_memory is not None
    found = run(alloc(1, total / 2), free(1), alloc(2, total / 2), capacity=capacity)
    assert (found.out_of_memory, found.retries, found.peak_reserved) == (None, 0, total // 2 * MIB)


def test_the_replay_ends_where_the_job_does() -> None:
    found = run(alloc(1, 10), alloc(2, 200), alloc(3, 10), capacity=100 * MIB)
    assert (found.allocated_end, found.retries) == (10 * MIB, 1)


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    """`free` with stream_uses inserts events; the block comes back when they are done (`process_events`)."""
    held = [alloc(1, 50), Event("record", 1, stream=3), free(1)]
    assert figures(run(*held, alloc(2, 50))) == (50, 100)
    assert figures(run(*held, Event("sync", stream=3), alloc(2, 50))) == (50, 50)
    assert figures(run(*held, Event("sync", stream=2), alloc(2, 50))) == (50, 100)


def test_a_block_waits_for_every_stream_that_uses_it() -> None:
    held = [alloc(1, 50), Event("record", 1, stream=3), Event("record", 1, stream=4), free(1), Event("sync", stream=3)]
    assert figures(run(*held, alloc(2, 50))) == (50, 100)
    assert figures(run(*held, Event("sync", stream=4), alloc(2, 50))) == (50, 50)


def test_a_use_by_its_own_stream_does_not_count() -> None:
    """`recordStream` ignores the stream that the block was allocated on."""
    assert figures(run(alloc(1, 50), Event("record", 1), free(1), alloc(2, 50))) == (50, 50)


def test_a_full_card_waits_for_other_streams() -> None:
    """`release_cached_blocks` begins with synchronize_and_free_events."""
    held = [alloc(1, 50), Event("record", 1, stream=3), free(1)]
    found = run(*held, alloc(2, 60), capacity=80 * MIB)
    assert (found.retries, found.reserved_end, found.out_of_memory) == (1, 60 * MIB, None)


def test_empty_cache_gives_back_without_a_retry() -> None:
    found = run(alloc(1, 50), free(1), Event("empty"))
    assert (found.reserved_end, found.retries) == (0, 0)


def test_phases_hold_their_own_peaks() -> None:
    """Each begins at what stands, as reset_peak_memory_stats sets the peak to the current figure."""
    step = [mark("forward"), alloc(1, 30), free(1), mark("backward"), alloc(2, 24), alloc(3, 10), mark("end")]
    found = run(alloc(0, 4), *step)
    assert {name: (a / MIB, r / MIB) for name, (a, r) in found.phases.items()} == {
        "": (4, 20),
        "forward": (34, 50),
        "backward": (38, 50),  # 24 of the 30 held before; its rest of 6 is too small for 10, that of 20 is not
        "end": (38, 50),
    }


def test_a_phase_that_comes_twice_keeps_the_larger_peak() -> None:
    found = run(mark("step"), alloc(1, 30), free(1), mark("step"), alloc(1, 20))
    assert found.phases == {"step": (30 * MIB, 30 * MIB)}


def test_blocks_from_max_split_on_are_kept_whole() -> None:
    """`get_free_block`: not for requests below the limit; for those above it within max_non_split_rounding_size."""
    held = [alloc(1, 60), free(1)]
    assert figures(run(*held, alloc(2, 30), max_split=40 * MIB)) == (60, 90)
    assert figures(run(*held, alloc(2, 42), alloc(3, 1.5), max_split=40 * MIB)) == (61.5, 80)  # 42 takes 60 whole
    assert figures(run(*held, alloc(2, 40), max_split=40 * MIB)) == (60, 100)
    assert figures(run(*held, alloc(2, 30), alloc(3, 30))) == (60, 60)


def test_oversize_blocks_are_given_back_first() -> None:
    """`release_available_cached_blocks` comes before release_cached_blocks and is not counted as a retry."""
    held = [alloc(1, 60), alloc(2, 12), free(1), free(2)]
    found = run(*held, alloc(3, 30), capacity=80 * MIB, max_split=40 * MIB)
    assert (found.retries, found.reserved_end) == (0, 42 * MIB)


def test_several_oversize_blocks_are_given_back_where_none_is_enough() -> None:
    """Largest first, until their sum covers the request."""
    held = [alloc(key, size) for key, size in ((1, 44), (2, 50), (3, 46))]
    found = run(*held, *map(free, (1, 2, 3)), alloc(4, 90), capacity=150 * MIB, max_split=40 * MIB)
    assert (found.retries, found.reserved_end) == (0, 134 * MIB)


def test_expandable_maps_pages() -> None:
    """`ExpandableSegment`: 2 MiB pages in the small pool, 20 MiB pages in the large one."""
    assert run(alloc(1, 0.5), expandable=True).peak_reserved == 2 * MIB
    assert figures(run(alloc(1, 41), expandable=True)) == (41, 60)


def test_expandable_grows_its_tail() -> None:
    """`try_allocate_expandable_block`: a free block before unmapped addresses grows, where a segment would be new."""
    held = [alloc(1, 30), free(1), alloc(2, 50)]
    assert run(*held, expandable=True).peak_reserved == 60 * MIB
    assert run(*held).peak_reserved == 80 * MIB


def test_expandable_splits_everything() -> None:
    """`should_split`: a rest of 512 B suffices, so 11 MiB is 11 MiB."""
    assert figures(run(alloc(1, 11), expandable=True)) == (11, 20)


def test_expandable_blocks_merge_over_pages() -> None:
    """As in PyTorch's test_max_split_expandable: three of 40 MiB fill 120, a fourth fails, then 120 fits as one."""
    three = [alloc(key, 40) for key in (1, 2, 3)]
    limit: dict[str, Any] = {"capacity": 120 * MIB, "expandable": True}
    assert run(*three, alloc(4, 40), **limit).out_of_memory is not None
    found = run(*three, free(1), free(2), free(3), alloc(4, 120), **limit)
    assert (found.out_of_memory, found.retries, found.peak_reserved) == (None, 0, 120 * MIB)


def test_expandable_hole_stays_mapped_until_the_card_is_full() -> None:
    """A hole before a live block cannot grow; `unmap_block` gives its whole pages back."""
    held = [alloc(1, 40), alloc(2, 40), free(1), alloc(3, 60)]
    assert run(*held, expandable=True).peak_reserved == 140 * MIB
    found = run(*held, expandable=True, capacity=120 * MIB)
    assert (found.retries, found.reserved_end, found.out_of_memory) == (1, 100 * MIB, None)


def test_expandable_unmaps_whole_pages_only() -> None:
    """The live block begins at 30 MiB, inside the second page: of the 30 free before it only the first page goes."""
    held = [alloc(1, 30), alloc(2, 30), free(1)]
    found = run(*held, alloc(3, 40), expandable=True, capacity=80 * MIB)
    assert (found.retries, found.reserved_end, found.allocated_end) == (1, 80 * MIB, 70 * MIB)
    assert run(*held, alloc(3, 60), expandable=True, capacity=80 * MIB).out_of_memory is not None


def test_expandable_fills_an_unmapped_gap_first() -> None:
    """`find_expandable_block` takes the lowest address: the gap of 40 with the 10 behind it serves 50."""
    held = [alloc(1, 50), alloc(2, 30), free(1), Event("empty")]
    found = run(*held, alloc(3, 50), expandable=True)
    assert (found.reserved_end, found.allocated_end) == (80 * MIB, 80 * MIB)


def test_expandable_gaps_become_one() -> None:
    """`unmap_block` merges: pages unmapped one after the other are mapped together or, short of memory, not at all."""
    held = [*(alloc(key, 20) for key in (1, 2, 3, 4)), free(1), Event("empty"), free(2), Event("empty")]
    found = run(*held, alloc(5, 20, stream=1), mark("last"), alloc(6, 40), expandable=True, capacity=80 * MIB)
    assert found.out_of_memory is not None
    assert found.phases["last"] == (60 * MIB, 60 * MIB)


def test_expandable_addresses_end() -> None:
    """`find_expandable_block`: a segment has room for 1 1/8 of the memory, here 120 MiB, the rest goes to another.

    Behind the fifth block only 20 are left, so the sixth stands apart, and what both leave is not one block of 60.
    """
    held = [*(alloc(key, 20) for key in (1, 2, 3, 4, 5)), free(2), free(4), alloc(6, 40)]
    found = run(*held, free(5), free(6), alloc(7, 60), expandable=True, capacity=100 * MIB)
    assert (found.retries, found.reserved_end, found.allocated_end) == (2, 100 * MIB, 100 * MIB)


def test_expandable_prefers_a_hole_to_the_tail() -> None:
    """`get_free_block`: the tail of 10 counts with all it can grow to, so 8 come from the hole of 12."""
    held = [alloc(1, 12), alloc(2, 38), free(1), alloc(3, 8)]
    assert run(*held, alloc(4, 30), expandable=True).reserved_end == 80 * MIB


def test_expandable_segments_are_by_stream() -> None:
    found = run(alloc(1, 40), free(1), alloc(2, 40, stream=1), expandable=True)
    assert found.pools == {0: 40 * MIB, 1: 40 * MIB}


@pytest.mark.parametrize(
    ("events", "options", "told"),
    [
        ([free(1)], {}, r"events\[0\].key 1: must name a live allocation for free"),
        ([alloc(1, 1), free(1), free(1)], {}, r"events\[2\]"),
        ([alloc(1, 1), alloc(1, 1)], {}, r"events\[1\]: key 1: must not be allocated while it is live"),
        ([alloc(1, -1)], {}, r"events\[0\]: size -1048576"),
        ([Event("aloc", 1, 5)], {}, "did you mean 'alloc'"),
        ([Event("record", 1, stream=2)], {}, "for record"),
        ([], {"capacity": -1}, "capacity"),
        ([], {"large_segment": 10 * MIB}, "large_segment"),
        ([], {"large_segment": 21 * MIB}, "multiple of 2 MiB"),
        ([], {"max_split": 19 * MIB}, "max_split"),
    ],
)
def test_impossible_events_and_settings_are_named(events: list[Event], options: dict[str, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        replay(events, **options)  # type: ignore[arg-type]
