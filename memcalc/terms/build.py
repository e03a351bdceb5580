"""The ledger of a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.ledger import Ledger, add_up
from memcalc.terms.activations import activation_terms, groups_of, in_flight, kept_bytes
from memcalc.terms.buffers import buffer_terms
from memcalc.terms.census import Census
from memcalc.terms.states import host_states, state_terms

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.model import Model


def build_ledger(model: Model, grid: Grid, workspace: int) -> Ledger:
    """Every term of every strategy of the grid, on a rank of each pipeline stage."""
    census = Census(model, grid)
    return Ledger([*state_terms(census), *activation_terms(census), *buffer_terms(census, workspace)])


def host_bytes(model: Model, grid: Grid) -> Array:
    """Bytes that one rank keeps off the GPU (offloaded states and activations), over the grid."""
    census = Census(model, grid)
    if not any("activations" in choice for choice in grid.offloads):
        return host_states(census)
    kept = add_up([kept_bytes(group) for group in groups_of(census)])
    return host_states(census) + kept * in_flight(grid) * grid.offloaded("activations")
