"""The ledger of a grid."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import AXES
from memcalc.ledger import Ledger, Term
from memcalc.terms.block_boundary import between_terms
from memcalc.terms.block_terms import activation_terms
from memcalc.terms.buffers import buffer_terms
from memcalc.terms.every_k_blocks import every_terms
from memcalc.terms.gradients import block_gradient_terms, local_gradient_terms, tied_terms, whole_gradient_terms
from memcalc.terms.head import head_terms, held_terms, prediction_terms
from memcalc.terms.recorded import recorded_terms
from memcalc.terms.states import state_terms

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Workspaces


def build_ledger(census: ModelOnGrid, workspaces: Workspaces, *, detail: bool = True) -> Ledger:
    """Every term of every strategy of a grid, on a rank of each pipeline stage.

    Without ``detail`` the tensors that blocks keep are one term: the same sum, for a search.
    """
    return Ledger([*activation_terms(census, detail=detail), *other_terms(census, workspaces)])


def other_terms(census: ModelOnGrid, workspaces: Workspaces) -> list[Term]:
    """The terms that do not depend on whether activations are offloaded."""
    return [
        *state_terms(census),
        *tied_terms(census),
        *local_gradient_terms(census),
        *every_terms(census),
        *between_terms(census),
        *recorded_terms(census),
        *head_terms(census),
        *prediction_terms(census),
        *held_terms(census),
        *whole_gradient_terms(census),
        *block_gradient_terms(census),
        *buffer_terms(census, workspaces),
    ]


def chosen_offloads(terms: list[Term], chosen: slice) -> list[Term]:
    """Terms of some of the offload axis alone."""
    axis = AXES.index("offload")

    def of(array: Array) -> Array:
        return array[(slice(None),) * axis + (chosen,)]

    several = (np.ndim(term.bytes) > 0 and term.bytes.shape[axis] > 1 for term in terms)
    return [replace(term, bytes=of(term.bytes)) if many else term for term, many in zip(terms, several, strict=True)]
