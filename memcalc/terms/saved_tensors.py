"""Terms of the saved tensors of a group of blocks, one by one, for a grid of one strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.activations import saved_bytes
from memcalc.ledger import KEPT, Term
from memcalc.terms.frozen_first_block import spared_records

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.activations import GroupActivations
    from memcalc.trace.tape import Record

INVENTORY = "PyTorch 2.13 tools/autograd/derivatives.yaml on the model's operators; arXiv:2205.05198 section 4"


def kept_terms(activations: GroupActivations, here: Array) -> Iterator[Term]:
    """One term a saved tensor of a grid of one strategy: blocks that keep it, its bytes, micro-batches in flight."""
    tower = f"{activations.group.tower} " if len(activations.census.model.groups) > 1 else ""
    policy, setting = activations.grid.policies[0], activations.settings[0]
    for field, untreated in (("treated", False), ("whole", True)):
        blocks = activations.field(field)
        if blocks.any():
            spared = spared_records(activations.census, activations.index, setting, policy) if untreated else ()
            names = {record.name for record in spared}
            for record in activations.template(policy, setting, untreated=untreated).kept_records:
                keeping = blocks - activations.grid.is_first if record.name in names else blocks
                yield kept_term(activations, record, f"{tower}{record.name}", keeping, here)


def kept_term(activations: GroupActivations, record: Record, name: str, blocks: Array, here: Array) -> Term:
    """The term of one saved tensor over all blocks that keep it."""
    size, units = record.size, activations.units[record.size.unit]
    bytes_ = saved_bytes(np.int64(size.elements), units, np.int64(size.width), activations.ranks(size.shard))
    bytes_ = bytes_ * activations.present(size.shard)
    flight, stage = activations.flight
    divided = size.shard != "none" and bool(np.any(activations.ranks(size.shard) > 1))
    inputs = {
        "elements": size.elements,
        "T": activations.tokens,
        "w": size.width,
        "blocks": blocks,
        "n": flight / stage,
        **({"s": activations.keys} if size.unit == "pair" else {}),
        **({"t": activations.ranks(size.shard)} if divided else {}),
    }
    formula = f"({size.label}) · T · w · blocks · n" + (" / t" if divided else "")
    return Term(
        "activations", name, bytes_ * blocks * flight * here // stage, KEPT, formula, INVENTORY, inputs, in_events=True
    )
