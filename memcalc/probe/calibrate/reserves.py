"""The reserve of one GPU: how far its reserved and device figures lie from what mechanisms predict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from memcalc import catalog, validation
from memcalc.probe.calibrate.ranges import FEWEST, Slack, outliers, own_reserve, score, slack_of
from memcalc.specs.calibration import FittedReserve, Gain, Left

if TYPE_CHECKING:
    from memcalc.probe.calibrate.rows import Row
    from memcalc.specs.reserve import Reserve

__all__ = ["CLASSES", "gains_of", "reserves_of"]

CLASSES = ("caching", "2021")
DEVIATION = 1.4826 * 1.2533
"""Standard error of a median over the median absolute deviation and the root of the count, for a normal spread."""
SURE = 3
"""Standard errors from which a shift is no chance."""
FAMILIES = 2
"""Kinds of jobs at least: a range is checked against each without it."""


def slacks(rows: Iterable[Row]) -> list[Slack]:
    """The reserved, or else the device figure of each row that has one."""
    found = []
    for row in rows:
        if {"reserved", "device"} & set(row.run.measured.figures):
            middle = catalog.reserve(row.estimate.interval.allocator).middle
            found.append(slack_of(row.run, row.estimate, row.family, middle))
    return found


def reserves_of(rows: Sequence[Row]) -> tuple[list[FittedReserve], list[Left], list[str]]:
    """Fit the range of each class of allocator; say which stay as they are, and which rows are outliers."""
    every, fitted, left, far = slacks(rows), [], [], []
    for name in CLASSES:
        own = [slack for slack in every if slack.allocator == name]
        families = len({slack.source for slack in own})
        if len(own) < FEWEST or families < FAMILIES:
            if own or name == "caching":
                said = f"{len(own)} reserved or device figures of {families} kinds of jobs, {FEWEST} of 2 needed"
                left.append(Left(part="reserve", reason=f"{name}: {said}"))
            continue
        middle = round(_middle(name, rows), 4)
        far += outliers(own, middle)
        found = own_reserve([slack for slack in own if slack.run not in far], middle)
        if found is None:
            said = "no range holds the figures of a kind of job that was left out"
            left.append(Left(part="reserve", reason=f"{name}: {said}"))
        else:
            fitted.append(found)
    return fitted, left, far


def _middle(name: str, rows: Sequence[Row]) -> float:
    """What the allocator reserves beyond the prediction, from rows whose allocated figure was read too.

    Reserved over allocated, measured over predicted: an error of the allocated figure is in both and cancels, so that a
    wrong term is never taken for slack. Rows without that figure cannot tell the two apart, and leave the shipped one.
    """
    known = catalog.reserve(name).middle
    ratios = []
    for row in rows:
        figures = row.run.measured.figures
        if row.estimate.interval.allocator != name or "allocated" not in figures:
            continue
        predicted = validation.figures_of(row.run, row.estimate)
        if "reserved" in figures:
            reserved = figures["reserved"]
        elif "device" in figures:
            reserved = figures["device"] - row.estimate.budget.context - row.estimate.budget.libraries
        else:
            continue
        mechanisms = predicted["reserved"] / (1 + known) / predicted["allocated"]
        ratios.append(reserved / figures["allocated"] / mechanisms - 1)
    if len(ratios) < FEWEST:
        return known
    middle = float(np.median(ratios))
    noise = float(np.median(np.abs(np.array(ratios) - middle))) * DEVIATION / np.sqrt(len(ratios))
    return middle if abs(middle - known) > SURE * noise else known


def gains_of(rows: Sequence[Row], fitted: Sequence[FittedReserve]) -> Iterator[Gain]:
    """What held-back figures say of each range, and of the shipped one; outliers count for the coverage alone."""
    every = slacks(rows)
    for reserve in fitted:
        own = [slack for slack in every if slack.allocator == reserve.name]
        far = outliers(own, reserve.middle) if own else []
        known: Reserve = catalog.reserve(reserve.name)
        before, after = ([score(one, slack) for slack in own] for one in (known, reserve))
        if not own:
            continue
        errors = np.abs([[slack.error(known.middle), slack.error(reserve.middle)] for slack in own])
        near = [slack.run not in far for slack in own]
        scores = [float(np.mean([each for each, _, _ in found], where=near)) for found in (before, after)]
        yield Gain.model_validate(
            {
                "part": "reserve",
                "figure": f"reserved, device ({reserve.name})",
                "unit": "share",
                "rows": len(own),
                "median": tuple(map(float, np.median(errors, axis=0).round(4))),
                "p90": tuple(map(float, np.quantile(errors, 0.9, axis=0).round(4))),
                "covered": tuple(sum(inside for _, inside, _ in found) for found in (before, after)),
                "width": tuple(round(one.high - one.low, 4) for one in (known, reserve)),
                "score": tuple(round(each, 4) for each in scores),
                "better": scores[1] < scores[0],
            }
        )
