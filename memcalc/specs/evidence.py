"""Errors on measured runs by kind of job, as they are shipped: written by a comparison, read by an answer."""

from __future__ import annotations

from pydantic import Field

from memcalc.specs.runs import Figure
from memcalc.specs.strict import Frozen


class Kind(Frozen):
    """What sets jobs apart whose predictions were measured apart."""

    framework: str
    """Without its era."""
    adapters: bool = False
    """Adapters are trained beside frozen weights."""
    experts: bool = False
    """The model is a mixture of experts."""
    offload: bool = False
    """Something is kept off the GPU."""


class KindErrors(Kind):
    """The measured runs of one kind beside their predictions."""

    runs: int = Field(ge=0)
    """Runs with a scored figure."""
    ran: int = Field(ge=0)
    """Runs that ran."""
    false_rejects: int = Field(ge=0)
    """Of those that ran, how many were said not to fit."""
    ran_out: int = Field(ge=0)
    """Runs that ran out of memory."""
    false_fits: int = Field(ge=0)
    """Of those that ran out of memory, how many were said to fit."""
    errors: dict[Figure, tuple[float, ...]]
    """predicted / measured - 1 of each figure [-]."""
