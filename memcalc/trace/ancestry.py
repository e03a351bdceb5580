"""What a graph that somebody refers to keeps alive: the tensors that the nodes before a tensor saved.

Backward empties the nodes that it runs. A checkpoint that is no function of its own computes its block again to fill
the nodes of forward, and the graph of that second run, which no backward runs, stays as it is for whoever refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.trace.tape import Edge, Node, Storage, Tensor


def saved_before(tensors: Sequence[Tensor]) -> list[Storage]:
    """What the nodes saved that some tensors come from, each node once."""
    waiting: list[Edge | None] = [tensor.edge for tensor in tensors]
    seen: set[Node] = set()
    storages: list[Storage] = []
    while waiting:
        edge = waiting.pop()
        if not isinstance(edge, tuple) or edge[0] in seen:
            continue
        seen.add(edge[0])
        storages += edge[0].saved
        waiting += edge[0].edges
    return storages
