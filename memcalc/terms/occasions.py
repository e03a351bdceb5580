"""What a rank holds beside its steps: the states that stay there all the time, and what one occasion adds to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import PHASES, Ledger, Term
from memcalc.sums import add_up

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.model_on_grid import ModelOnGrid


@dataclass(frozen=True)
class Occasion:
    """One thing that a job does beside its steps, on a grid of one strategy."""

    name: str
    """loading, resuming, evaluation, generation or saving."""
    when: str
    """What it is, in a few words."""
    terms: tuple[Term, ...]
    """On the GPU by rank and stage, on the host by node (``tier``); all of one moment."""
    certain: bool
    """Whether the job was told to do it; else it is what its framework does by default."""
    outputs: int = 0
    """Of an evaluation: the outputs of one batch of all ranks [bytes]."""


def resident(ledger: Ledger, census: ModelOnGrid, components: Iterable[str] = ()) -> list[Term]:
    """What stays on the GPU between steps; of some components alone where they are named.

    One buffer of all gradients stays too, which the ledger has by the moments of a step.
    """
    names = set(components)
    terms = [term for term in ledger.terms if set(term.phases) >= set(PHASES)]
    if census.grid.persistent_gradients:
        terms += [t for t in ledger.terms if t.component == "gradients" and "step" in t.phases and t not in terms]
    return [replace(term, phases=()) for term in terms if not names or term.component in names]


def on_gpu(terms: Iterable[Term]) -> Array:
    """The sum of what lies on the GPU, by stage [bytes]."""
    return add_up([term.bytes for term in terms if term.tier == "gpu"])


def larger(first: list[Term], *others: list[Term]) -> list[Term]:
    """Of the moments of an occasion the one with the largest stage."""
    return max([first, *others], key=lambda terms: int(np.max(on_gpu(terms))))


def whole_weights(census: ModelOnGrid, ledger: Ledger, away: Iterable[Term]) -> Array:
    """All weights of a stage, put together from the shards of its ranks, wherever these lie [bytes]."""
    grid = census.grid
    shards = [term.bytes for term in resident(ledger, census, ["parameters"])]
    shards += [term.bytes for term in away if term.component == "parameters"]
    sharded = grid.zero_from(2 if grid.habits.full_shard else 3)
    return add_up(shards) * np.where(sharded, grid.ranks, 1)


def weights_are_sharded(census: ModelOnGrid) -> bool:
    """Whether data-parallel ranks share the weights."""
    grid = census.grid
    stage = 2 if grid.habits.full_shard else 3
    return bool(np.any(grid.zero_from(stage) & (grid.ranks > 1)))


def writes_together(census: ModelOnGrid) -> bool:
    """Whether ranks share what a checkpoint has: weights, or the states of Megatron-LM's distributed optimizer."""
    grid = census.grid
    states = grid.habits.name == "megatron" and bool(np.any(grid.zero_from(1) & (grid.ranks > 1)))
    return states or weights_are_sharded(census)


def largest_unit(census: ModelOnGrid) -> Array:
    """Elements of what FSDP 1 gathers at once: a block, or embedding and head together."""
    return np.maximum(census.largest_block, census.root)
