"""Replicas of the shards (HSDP): how many a search tries, and what they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.errors import CombinationError
from memcalc.planner.direct import kinds
from memcalc.planner.pipelines import is_legal

if TYPE_CHECKING:
    from memcalc.frameworks import Habits
    from memcalc.grid import Layout
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import Node
    from memcalc.specs.model import Model

KIND = "hsdp"
"""What the table of frameworks calls it among the kinds of parallelism."""


def with_replicas(
    layouts: Iterable[Layout], request: Request, habits: Habits, model: Model, node: Node, seq_len: int
) -> list[Layout]:
    """Layouts with each number of replicas that is wanted; by itself a search tries those of :func:`usual_replicas`."""
    given, choice = request.given.get("dp_replicate"), request.choices.get("dp_replicate")
    searched = given is None and KIND in kinds(request, habits, model)
    result = []
    for layout in layouts:
        counts = usual_replicas(layout, node.gpus, one_node=habits.flat_units) if searched else [given or 1]
        if choice is not None:
            counts = choice.of(counts, [n for n in range(1, layout.dp + 1) if layout.dp % n == 0])
        several = [replace(layout, dp_replicate=count) for count in counts]
        result += [each for each in several if each == layout or is_legal(model, each, seq_len)]
    return result


def usual_replicas(layout: Layout, node_gpus: int, *, one_node: bool = False) -> list[int]:
    """One, and so many that each shares its states within a node, or within 2, 4, 8, … of several.

    FSDP 1 knows the ranks of ``one_node`` and all ranks alone (torch/distributed/fsdp/_init_utils.py).

    >>> from memcalc.grid import Layout
    >>> usual_replicas(Layout(dp=32), 8), usual_replicas(Layout(dp=8, tp=4), 8), usual_replicas(Layout(dp=8), 8)
    ([1, 4, 2], [1, 4, 2], [1])
    """
    ranks = layout.dp * layout.cp * layout.tp
    sizes = [node_gpus << power for power in range(1 if one_node else ranks.bit_length())]
    return [1, *(ranks // size for size in sizes if size < ranks and ranks % size == 0)]


def check_replicated(replicas: int, zero: int, habits: Habits) -> None:
    """Refuse replicas of what is not sharded."""
    least = 2 if habits.full_shard else 1
    if replicas > 1 and zero < least:
        allowed = f"needs --zero {least} or more: without shards all data-parallel ranks are replicas"
        raise CombinationError("dp-replicate", replicas, allowed)
