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


def fits_beyond(job: PlanJob, gpus: int) -> str:
    """Where nothing fits that the framework can be told: what does with which code; empty where nothing does."""
    if job.request.beyond:
        return ""
    wider = replace(job, request=replace(job.request, assumptions={}, beyond=True), tally=None)
    try:
        plan = best_plan(wider, gpus)
    except InputError:
        return ""
    code = own_code(plan.strategy, job.model) if plan else ()
    return f"With code of your own it fits, see --beyond: {'; '.join(code)}." if code else ""
