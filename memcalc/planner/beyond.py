"""What is said of code that a framework leaves to its user: what plans need, and what would fit with some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.errors import InputError
from memcalc.frameworks.capabilities import own_code
from memcalc.planner.choice import best_plan
from memcalc.planner.direct import OWN_CODE

if TYPE_CHECKING:
    from memcalc.planner.job import PlanJob

MOST = 3_000_000
"""Strategies above which no space is searched for one more sentence: a few seconds."""


def code_warnings(needed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What code plans need, by the names of the plans; without the names where all of them need it.

    >>> code_warnings({"#1": ("recompute sqrt: wrap runs of blocks",), "#2": ()})
    ['#1 needs code of your own: recompute sqrt: wrap runs of blocks.']
    """
    names: dict[str, list[str]] = {}
    for name, sentences in needed.items():
        for sentence in sentences:
            names.setdefault(sentence, []).append(name)
    return [_warning(sentence, listed, len(listed) == len(needed)) for sentence, listed in names.items()]


def _warning(sentence: str, names: list[str], is_common: bool) -> str:
    if is_common and len(names) > 1:
        return f"all plans need {OWN_CODE}: {sentence}."
    return f"{', '.join(names)} need{'s' * (len(names) == 1)} {OWN_CODE}: {sentence}."


def is_soon_searched(job: PlanJob, gpus: int) -> bool:
    """Whether the space of a job is small enough to be searched for a sentence that nobody asked for."""
    return job.size(gpus) <= MOST


def unopened(job: PlanJob, gpus: int) -> int:
    """Strategies of the space with code of one's own, where it is too large to be searched unasked; else 0."""
    if job.request.beyond:
        return 0
    wider = _wider(job)
    try:
        return 0 if is_soon_searched(wider, gpus) else wider.size(gpus)
    except InputError:
        return 0


def fits_beyond(job: PlanJob, gpus: int, unopened: int) -> str:
    """Where nothing fits that the framework can be told: what does with which code, or that it was not searched.

    Empty where nothing does. ``unopened`` is as the function of that name gives it.
    """
    if job.request.beyond:
        return ""
    if unopened:
        return f"What fits with {OWN_CODE} was not searched: --beyond searches it too ({unopened:,} strategies)."
    try:
        plan = best_plan(_wider(job), gpus)
    except InputError:
        return ""
    code = own_code(plan.strategy, job.model) if plan else ()
    return f"With code of your own it fits, see --beyond: {'; '.join(code)}." if code else ""


def _wider(job: PlanJob) -> PlanJob:
    return replace(job, request=replace(job.request, assumptions={}, beyond=True), tally=None)
