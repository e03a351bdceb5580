"""The ledger of a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.ledger import Ledger, add_up
from memcalc.terms.activations import activation_terms, groups_of, in_flight
from memcalc.terms.buffers import buffer_terms
from memcalc.terms.states import host_states, state_terms

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.census import Census


def build_ledger(census: Census, workspace: int, *, detail: bool = True) -> Ledger:
    """Every term of every strategy of a grid, on a rank of each pipeline stage.

    ``workspace`` is that of one BLAS handle [bytes]. Without ``detail`` the tensors that blocks keep are one term: the
    same sum, for a search.
    """
    activations = activation_terms(census, detail=detail)
    return Ledger([*state_terms(census), *activations, *buffer_terms(census, workspace)])


def host_bytes(census: Census) -> Array:
    """Bytes that one rank keeps off the GPU (offloaded states and activations), over the grid."""
    if not any("activations" in choice for choice in census.grid.offloads):
        return host_states(census)
    kept = add_up([group.kept for group in groups_of(census)])
    return host_states(census) + kept * in_flight(census.grid) * census.grid.offloaded("activations")
