"""A plan as a file: what was asked, the plan that was chosen, and what to go back to if it does not run."""

from __future__ import annotations

from typing import Literal

from memcalc.results.comparison import Evidence
from memcalc.results.estimates import Answer, Estimate, schema
from memcalc.results.plans import Plan, Plans
from memcalc.specs.job import JobRecord
from memcalc.specs.strict import Frozen


class SavedPlan(Answer):
    """What ``memcalc plan --save`` writes and ``memcalc export`` reads."""

    schema_: Literal["memcalc.saved-plan/2"] = schema("memcalc.saved-plan/2")
    job: JobRecord
    """The search that found it."""
    asked: str
    """The command line of ``job``."""
    plan: Plan
    """The one that was chosen, with its own job."""
    fallback: tuple[Plan, ...]
    """Safer plans of the same job, GPUs, layout and global batch: each needs clearly less than the one before."""
    no_fallback: str
    """Why there is no safer plan; empty where there is one."""
    notes: tuple[str, ...]
    """What the file does not carry, or was not written for."""


class Review(Frozen):
    """An answer made ready to be shown."""

    subject: Literal["strategy", "plan", "saved", "closest"]
    """What the estimate is of: what was typed, a plan of a search, a saved plan, or what is closest to fitting."""
    estimate: Estimate | None
    """``None`` where no strategy can run at all."""
    plans: Plans | None
    """The search, where there was one."""
    chosen: Plan | None
    """The plan that the estimate is of."""
    fallback: tuple[Plan, ...] = ()
    """What a saved plan goes back to."""
    no_fallback: str = ""
    """Why a saved plan has no safer one; empty elsewhere."""
    evidence: Evidence | None
    """What measured runs say of its kind of job; ``None`` without an estimate."""
    given: dict[str, str]
    """What was typed: word and value."""
    searched: dict[str, str]
    """What the search chose: word and value."""
    assumptions: dict[str, str]
    """Every default that was taken: field and value."""
    warnings: tuple[str, ...]
    """What the figures do not know."""
    command: str
    """The ``memcalc report`` line that makes the page again."""
    notes: tuple[str, ...] = ()
    """What is said of a saved plan's file."""
