"""The steps in a trace, and what grows from one to the next."""

from __future__ import annotations

import numpy as np

from memcalc.probe.triage.frames import site_of
from memcalc.probe.triage.lives import Ints, Lives
from memcalc.probe.triage.snapshot import Snapshot
from memcalc.probe.triage.sorts import Readings
from memcalc.results.triage import TriageGrowth

__all__ = ["growth_of", "steps_of"]

_FEWEST = 3
"""Intervals between steps from which growth is said."""
_MOST_STEPS = 256
_SHOWN = 8


def steps_of(snapshot: Snapshot, lives: Lives, read: Readings) -> tuple[Ints, str]:
    """Return the entries at which steps end, and what they were found by.

    The optimizer's own entries and those of ``zero_grad`` mark the end of a step; where there are none, the training
    loop's own line, which goes back once a turn, marks a turn.
    """
    if not lives.entries:
        return np.zeros(0, dtype=np.int64), ""
    marks = _optimizer_runs(snapshot, lives, read)
    if len(marks) > 1:
        return marks, "the optimizer's allocations"
    turns = _turns(snapshot, lives)
    if len(turns) > 1:
        return turns, "turns of the innermost common loop"
    return marks, "the optimizer's allocations" if len(marks) else ""


def _optimizer_runs(snapshot: Snapshot, lives: Lives, read: Readings) -> Ints:
    """The last entry of each run of the optimizer; a forward between two tells them apart."""
    cleared = np.array([any(frame.name == "zero_grad" for frame in one.frames) for one in snapshot.stacks], dtype=bool)
    stepping = (read.of("optimizer") | cleared)[lives.stacks]
    forward = (read.of("forward") | read.of("loss"))[lives.stacks] & ~stepping
    where = np.flatnonzero(stepping)
    if not len(where):
        return where
    passed = np.concatenate(([0], np.cumsum(forward)))[where]
    last = np.append(np.flatnonzero(np.diff(passed)), len(where) - 1)
    return np.asarray(where[last])


def _turns(snapshot: Snapshot, lives: Lives) -> Ints:
    """Where the line of the outermost frame that changes goes back."""
    paths = [tuple((frame.file, frame.name, frame.line) for frame in reversed(one.frames)) for one in snapshot.stacks]
    deepest = max((len(path) for path in paths), default=0)
    for depth in range(min(deepest, 24)):
        owners: dict[tuple[str, str], int] = {}
        weights = np.bincount(lives.stacks, minlength=len(paths))
        for path, weight in zip(paths, weights, strict=True):
            if len(path) > depth:
                owners[path[depth][:2]] = owners.get(path[depth][:2], 0) + int(weight)
        if not owners:
            break
        owner = max(owners, key=lambda key: owners[key])
        line = np.array([path[depth][2] if len(path) > depth and path[depth][:2] == owner else -1 for path in paths])
        where = np.flatnonzero(line[lives.stacks] >= 0)
        back = np.flatnonzero(np.diff(line[lives.stacks][where]) < 0)
        if len(back) > 1:
            return np.asarray(where[back])
    return np.zeros(0, dtype=np.int64)


def growth_of(snapshot: Snapshot, lives: Lives, steps: Ints) -> tuple[TriageGrowth, ...]:
    """Return the call sites whose live bytes grew in every interval between steps, the fastest first.

    The interval to the first step's end is not looked at, since states are made there.
    """
    if len(steps) < _FEWEST + 1:
        return ()
    at = np.asarray(steps[np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).astype(int)])
    span = (len(steps) - 1) / (len(at) - 1)
    width = len(snapshot.stacks)
    held = np.zeros((len(at), width))
    count = np.zeros((len(at), width))
    for row, moment in enumerate(at):
        alive = lives.alive_at(int(moment))
        held[row] = np.bincount(lives.stack[alive], weights=lives.size[alive], minlength=width)
        count[row] = np.bincount(lives.stack[alive], minlength=width)
    change = np.diff(held, axis=0)
    growing = np.flatnonzero((change > 0).all(axis=0))
    sites: dict[str, list[float]] = {}
    for stack in growing:
        rates = sites.setdefault(site_of(snapshot.stacks[stack].frames), [0.0, 0.0])
        rates[0] += float(change[:, stack].mean()) / span
        rates[1] += float(np.diff(count[:, stack]).mean()) / span
    found = [
        TriageGrowth(site=site, bytes_per_step=rate, blocks_per_step=blocks, steps=len(steps) - 1)
        for site, (rate, blocks) in sites.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.bytes_per_step)[:_SHOWN])
