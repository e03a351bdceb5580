"""Results in, text out: one document for each answer, rendered in any of six formats. Nothing is computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.report.render import FORMATS, Report, format_for, render

if TYPE_CHECKING:
    from memcalc.report.explain import Folding
    from memcalc.results import Check, Estimate, Plans, Triage

__all__ = ["FORMATS", "Report", "format_for", "of_check", "of_estimate", "of_plans", "of_terms", "of_triage", "render"]


def of_check(found: Check) -> Report:
    """Return the report on a job's own files."""
    from memcalc.report.check import report

    return report(found)


def of_estimate(found: Estimate) -> Report:
    """Return the report on an estimate."""
    from memcalc.report.estimate import report

    return report(found)


def of_terms(found: Estimate, folded: Folding | None = None) -> Report:
    """Return the report on every term of an estimate; `folded` says what a tree tells in one line."""
    from memcalc.report.explain import explanation

    return explanation(found, folded)


def of_plans(found: Plans) -> Report:
    """Return the report on ranked plans."""
    from memcalc.report.plan import report

    return report(found)


def of_triage(found: Triage) -> Report:
    """Return the report on a failure."""
    from memcalc.report.triage import report

    return report(found)
