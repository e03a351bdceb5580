"""The kinds of jobs whose predictions are known unequally well, and which of them a strategy is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from memcalc.frameworks import Habits
    from memcalc.grid import Grid

ONE_GPU = "one GPU"
FSDP1 = "FSDP 1"
FSDP2 = "FSDP 2"
GROWING = "FSDP 2, expandable segments"
ENGINE = "TransformerEngine"
EARLY = "PyTorch before 1.13"
BLOCKS = "compiled blocks"
GRAPH = "compiled graph"
OFFLOADED = "offloaded"
WEIGHTS_AWAY = "ZeRO-3, weights offloaded"
OTHERS = "others"
KINDS = (ONE_GPU, FSDP1, FSDP2, GROWING, ENGINE, EARLY, BLOCKS, GRAPH, OFFLOADED, WEIGHTS_AWAY, OTHERS)
"""Kinds of jobs whose allocator is replayed; those of 2021 whose is not are one by themselves, without a name here."""
SHARDED = 2
"""The stage of ZeRO from which FSDP shards."""


class Choice(NamedTuple):
    """What of a strategy decides its kind."""

    gpus: int
    zero: int
    offload: tuple[str, ...]
    compile: str
    expandable_segments: bool


def kind_of(habits: Habits, choice: Choice) -> str:
    """The kind of a strategy: what its mechanisms are least known for comes first; empty where nothing is replayed.

    >>> from memcalc.frameworks import habits_of
    >>> [kind_of(habits_of("hf"), Choice(2, zero, (), "none", False)) for zero in (3, 0)]
    ['FSDP 1', 'others']
    """
    if habits.allocator != "caching":
        return ""
    if not habits.lazy_kernels:
        return EARLY
    if choice.offload:
        away = habits.zero_optimizer is not None and "params" in choice.offload
        return WEIGHTS_AWAY if away else OFFLOADED
    if choice.compile != "none":
        return GRAPH if choice.compile == "model" else BLOCKS
    if choice.gpus == 1:
        return ONE_GPU
    if habits.engine:
        return ENGINE
    if not habits.full_shard or choice.zero < SHARDED:
        return OTHERS
    if habits.flat_units:
        return FSDP1
    return GROWING if choice.expandable_segments else FSDP2


def kinds_of(grid: Grid) -> dict[tuple[bool, int, tuple[str, ...]], str]:
    """The kinds of a grid's strategies: by whether they have one GPU, by sharding stage and by what is offloaded."""
    fixed = grid.fixed
    return {
        (alone, zero, offload): kind_of(
            grid.habits, Choice(2 - alone, zero, offload, fixed.compile, fixed.expandable_segments)
        )
        for alone in {layout.gpus == 1 for layout in grid.layouts}
        for zero in grid.zeros
        for offload in grid.offloads
    }
