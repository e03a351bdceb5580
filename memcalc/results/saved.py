"""A plan as a file: what was asked, the plan that was chosen, and what to go back to if it does not run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.results.plans import Plan
from memcalc.specs.model import Frozen

Word = str | int | bool


class SavedJob(Frozen):
    """The words of a job that a search does not choose."""

    model: str
    """As it was typed: a preset's name or a path."""
    gpu: str
    """As it was typed: a preset's name."""
    node: str | None
    """None for the usual host of the GPU."""
    seq_len: int = Field(gt=0)
    """Tokens a sequence."""
    words: dict[str, Word]
    """Further ones of :func:`memcalc.estimate`, such as a kernel that was asked for."""
    settings: dict[str, str]
    """Fields of ``--set``."""


class SavedPlan(Frozen):
    """What ``memcalc plan --save`` writes and ``memcalc export`` reads."""

    schema_: Literal["memcalc.saved-plan/1"] = Field(
        default="memcalc.saved-plan/1", alias="schema", serialization_alias="schema"
    )
    """The name and version of this record."""
    version: str
    """Of memcalc."""
    asked: str
    """The ``memcalc plan`` line that found it."""
    job: SavedJob
    """What the plan is for."""
    plan: Plan
    """The one that was chosen."""
    fallback: tuple[Plan, ...]
    """Safer plans of the same job, GPUs, layout and global batch: each needs clearly less than the one before."""
    no_fallback: str
    """Why there is no safer plan; empty where there is one."""
    notes: tuple[str, ...]
    """What the file does not carry, or was not written for."""
