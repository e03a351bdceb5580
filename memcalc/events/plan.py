"""What of a step's order is known beforehand: units of checkpoints, weights in the order of their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.trace.template import trace

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.ledger import Term
    from memcalc.terms.activations import GroupActivations
    from memcalc.trace.template import Template

STEPS = 2
"""Optimizer states appear in the first step, so that the second is the first to show the peak."""
ALTERNATING = 3
"""Where gradients are flattened, they take the place of the step's before: the third is like all that follow."""


def melts(term: Term) -> bool:
    """Whether a term is there in the last block's backward and gone in the first's, and goes block by block."""
    return "backward-last" in term.phases and not {"backward-first", "backward-end"} & set(term.phases)


def weights_of(activations: GroupActivations) -> list[int]:
    """Elements of each weight of a block, in the order of the modules."""
    setting = replace(activations.settings[0], trainable=True, lora=None, quantize="none", also_train=frozenset())
    template = activations.census.traces.get(trace, activations.group.block, setting, "none")
    gradients = [record.size.elements for record in template.records if record.kind == "gradient"]
    return gradients[::-1]


def passes(flight: int, count: int) -> Iterator[tuple[bool, int]]:
    """Micro-batches in flight first, then one backward and one forward in turn: whether it is a forward, and which.

    >>> [("F" if forward else "B") + str(index) for forward, index in passes(2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    for index in range(min(flight, count)):
        yield True, index
    for index in range(count):
        yield False, index
        if flight + index < count:
            yield True, flight + index


def storage_bytes(
    activations: GroupActivations, template: Template, scalar: Callable[[Array], int], *, observed: bool
) -> list[int]:
    """Bytes of each storage of a template on the stage whose values ``scalar`` reads."""
    width = scalar(activations.gradient_width[0])
    units = {unit: scalar(count) for unit, count in activations.units.items()}
    shards = {record.size.shard for record in template.records}
    ranks = {shard: scalar(activations.ranks(shard)) for shard in shards}
    there = {shard: scalar(activations.present(shard)) for shard in shards}
    return [
        -(-r.size.bytes * (width if r.kind == "gradient" else 1) * units[r.size.unit] // ranks[r.size.shard])
        * there[r.size.shard]
        * (r.kind != "observed" or observed)
        for r in template.records
    ]


def in_shares(total: int, shares: list[int]) -> list[int]:
    """A total in proportion to shares; the first has the rest.

    >>> in_shares(10, [1, 2])
    [4, 6]
    """
    count = sum(shares)
    sizes = [total * share // count for share in shares]
    sizes[0] += total - sum(sizes)
    return sizes
