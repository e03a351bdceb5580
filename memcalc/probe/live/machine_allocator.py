"""The caching allocator's answers to planned requests, compared with those of :mod:`memcalc.allocator`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memcalc.allocator import replay
from memcalc.units import MIB

Counters = tuple[int, int]
"""Allocated and reserved [bytes]."""


@dataclass(frozen=True)
class Scene:
    """Requests on a stream of their own, whose pools are empty."""

    name: str
    steps: tuple[int, ...]
    """Bytes to allocate; or -n: the n-th allocation is freed."""


SCENES = (
    Scene("rounding of a small request", (1, 513)),
    Scene("the largest small request", (MIB, MIB, 1)),
    Scene("the smallest large request", (MIB + 1, 9 * MIB, 9 * MIB)),
    Scene("the largest request in a shared segment", (10 * MIB - 512,)),
    Scene("the smallest request with a segment of its own", (10 * MIB,)),
    Scene("rounding of a segment", (10 * MIB + 1,)),
    Scene("a large rest of 1 MiB", (12 * MIB, -1, 11 * MIB)),
    Scene("a large rest above 1 MiB", (12 * MIB, -1, 11 * MIB - 512)),
    Scene("best fit", (16 * MIB, 12 * MIB, -1, -2, 12 * MIB, 16 * MIB)),
)
"""Each shows one rule of the allocator."""


@dataclass(frozen=True)
class Seen:
    """One scene, and the counters after each of its steps, from zero."""

    scene: Scene
    counters: tuple[Counters, ...]


def watch(allocate: Callable[[Any, int], Any], cuda: Any = torch.cuda) -> list[Seen]:
    """Play the scenes on the device; `allocate` takes a stream and bytes, and returns what keeps them alive."""
    return [Seen(scene, tuple(_steps(scene, allocate, cuda))) for scene in SCENES]


def _steps(scene: Scene, allocate: Callable[[Any, int], Any], cuda: Any) -> Iterator[Counters]:
    stream, tensors = cuda.Stream(), list[Any]()
    allocated, reserved = cuda.memory_allocated(), cuda.memory_reserved()
    for step in scene.steps:
        if step > 0:
            tensors.append(allocate(stream, step))
        else:
            tensors[-step - 1] = None
        yield cuda.memory_allocated() - allocated, cuda.memory_reserved() - reserved


def on_stream(stream: Any, size: int) -> torch.Tensor:
    """Allocate on a stream."""
    with torch.cuda.stream(stream):
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def played(scene: Scene, *, expandable: bool) -> tuple[Counters, ...]:
    """Return the counters of a scene in the replay."""
    events: list[tuple[str, int, int, int, str]] = []
    counters, allocations = [], 0
    for step in scene.steps:
        allocations += step > 0
        events.append(("alloc", allocations, step, 0, "") if step > 0 else ("free", -step, 0, 0, ""))
        end = replay(events, expandable=expandable)
        counters.append((end.allocated_end, end.reserved_end))
    return tuple(counters)


def differences(seen: list[Seen], *, expandable: bool) -> list[str]:
    """Describe each difference between the allocator and the replay: a wrong rule, not noise."""
    sentences = []
    for scene, counters in ((observed.scene, observed.counters) for observed in seen):
        expected = played(scene, expandable=expandable)
        step = next((i for i, pair in enumerate(zip(counters, expected, strict=True)) if pair[0] != pair[1]), None)
        if step is not None:
            real, replayed = counters[step], expected[step]
            sentences.append(
                f"{scene.name}: after step {step + 1} of {list(scene.steps)} the allocator has {real[0]} bytes "
                f"allocated and {real[1]} reserved, the replay {replayed[0]} and {replayed[1]}"
            )
    return sentences


def sizes(seen: list[Seen]) -> dict[str, int]:
    """Return the sizes that the scenes show [bytes]."""
    first = {observed.scene.name: observed.counters[0] for observed in seen}
    rounding, small = first["rounding of a small request"]
    sizes_by_name = {
        "rounding": rounding,
        "small_segment": small,
        "large_segment": first["the smallest large request"][1],
        "segment_of_10_mib_and_1": first["rounding of a segment"][1],
    }
    return {name: size for name, size in sizes_by_name.items() if size > 0}
