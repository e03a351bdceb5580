"""What one page puts before other people: an estimate, the plans that it was chosen from, and how right it is."""

from __future__ import annotations

from typing import Literal

from memcalc.results.estimates import Estimate
from memcalc.results.evidence import Evidence
from memcalc.results.plans import Plan, Plans
from memcalc.specs.model import Frozen


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
