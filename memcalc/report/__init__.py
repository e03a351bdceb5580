"""Results in, text out: one document for each answer, rendered in any of six formats. Nothing is computed here."""

from __future__ import annotations

from memcalc.report.estimate import explanation as of_terms
from memcalc.report.estimate import report as of_estimate
from memcalc.report.plan import report as of_plans
from memcalc.report.render import FORMATS, Report, format_for, render

__all__ = ["FORMATS", "Report", "format_for", "of_estimate", "of_plans", "of_terms", "render"]
