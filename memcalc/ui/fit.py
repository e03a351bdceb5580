"""The smallest edit of a strategy that makes it fit: the fewest options, and none that changes what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from memcalc import api
from memcalc.errors import MemcalcError
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plan
from memcalc.specs.options import DEGREES
from memcalc.ui.link import LinkedJob

EDITED = ("recompute", "micro_batch", "zero", "offload")
"""What an edit may change; equal edits are preferred in this order."""
_STAY = ("framework", "precision", "optimizer", "recompute", "zero", *DEGREES, "micro_batch")


class Edit(NamedTuple):
    """A change that makes a job fit."""

    changes: tuple[str, ...]
    """Each as option, old value and new value."""
    job: LinkedJob
    """The job as edited."""


def smallest_edit(job: LinkedJob, estimate: Estimate) -> Edit | None:
    """Return the edit of the fewest options with which the job fits, of those the fastest; None where none does.

    The global batch and the number of GPUs stay. An edit is proved by an estimate of the job as edited; one that is
    tight is taken where none fits.
    """
    tight: Edit | None = None
    for count in range(1, len(EDITED) + 1):
        plans = [plan for names in combinations(EDITED, count) for plan in _plans(names, job, estimate)]
        for plan in sorted(plans, key=lambda plan: (not plan.time.validated, plan.time.step)):
            edit = _edit(job, estimate, plan)
            verdict = _verdict(edit.job)
            if verdict == "fits":
                return edit
            tight = tight or (edit if verdict == "tight" else None)
    return tight


def _plans(names: tuple[str, ...], job: LinkedJob, estimate: Estimate) -> Iterator[Plan]:
    """Yield the fastest strategy that fits where some options are free and all else stays."""
    strategy, work = estimate.strategy, estimate.workload
    stays: dict[str, Any] = {name: getattr(strategy, name) for name in _STAY}
    stays |= {"offload": ",".join(strategy.offload) or "none", "global_batch": work.global_batch}
    free: dict[str, str | None] = dict.fromkeys(names)
    share = work.micro_batch * work.accumulation_steps
    smaller = [str(size) for size in range(1, work.micro_batch) if share % size == 0]
    if "micro_batch" in names:
        if not smaller:
            return
        free["micro_batch"] = "/".join(smaller)
    keywords = {**job.keywords(), "gpus": estimate.hardware.gpus, **stays, **free}
    try:
        yield from api.plan(**keywords, top=1, advice=False).plans
    except MemcalcError:  # the framework does not have that combination
        return


def _edit(job: LinkedJob, estimate: Estimate, plan: Plan) -> Edit:
    before, after = _values(estimate.strategy), _values(plan.strategy)
    changed = {name: value for name, value in after.items() if value != before[name]}
    changes = tuple(f"{name.replace('_', '-')} {before[name]} → {value}" for name, value in changed.items())
    if "micro_batch" in changed:  # the batch would follow from it
        changed["global_batch"] = str(estimate.workload.global_batch)
    return Edit(changes, job.having(changed))


def _values(strategy: Any) -> dict[str, str]:
    values = {name: getattr(strategy, name) for name in EDITED}
    return {name: ",".join(value) or "none" if name == "offload" else str(value) for name, value in values.items()}


def _verdict(job: LinkedJob) -> str:
    try:
        return api.estimate(**job.keywords(), advice=False).verdict
    except MemcalcError:
        return ""
