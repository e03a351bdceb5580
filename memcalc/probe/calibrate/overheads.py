"""What a process holds beside its tensors, read directly: context, workspaces, communicators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import Layout
from memcalc.specs.calibration import Gain, Left, Measure, Residual
from memcalc.terms.overhead import groups_of, workspaces_of
from memcalc.units import MIB

if TYPE_CHECKING:
    from memcalc.probe.calibrate.rows import Row
    from memcalc.specs.hardware import GPU
    from memcalc.specs.runs import RunsFile

__all__ = ["FEWEST", "Overheads", "Reading", "gains_of", "measure_of", "overheads_of"]

FEWEST = {"context": 3, "world": 3, "group": 3, "workspace": 1}
"""Readings of each size below which it is left as it is; a workspace is a constant of the library, read exactly."""
OUTLIER = 4 * 1.4826
"""Median absolute deviations beyond which a reading is an outlier: four standard deviations of a normal spread."""
GRAIN = 16 * MIB
"""What readings of nvidia-smi may differ by without being outliers."""


@dataclass(frozen=True)
class Reading:
    """One figure and where it was read."""

    value: int
    origin: str


@dataclass(frozen=True)
class Overheads:
    """What was found."""

    sizes: dict[str, Measure]
    """By field of a calibration: context, workspace, world, group."""
    left: tuple[Left, ...]
    residuals: tuple[Residual, ...]
    notes: tuple[str, ...]


def measure_of(readings: Sequence[Reading]) -> tuple[Measure, list[str]]:
    """Return the median of readings with the range of those that are no outliers, and where the outliers were read.

    >>> measure_of([Reading(size, str(size)) for size in (500, 501, 502, 10**9)])[0].high
    502
    """
    values = np.array([reading.value for reading in readings], dtype=float)
    middle = float(np.median(values))
    width = max(OUTLIER * float(np.median(np.abs(values - middle))), GRAIN)
    kept = np.abs(values - middle) <= width
    middle = float(np.median(values[kept]))
    found = Measure(
        bytes=round(middle), low=int(values[kept].min()), high=int(values[kept].max()), rows=int(kept.sum())
    )
    return found, [reading.origin for reading, inside in zip(readings, kept, strict=True) if not inside]


def layout_of(row: Row) -> Layout:
    """The parallel layout of a row."""
    s = row.estimate.strategy
    return Layout(dp=s.dp, tp=s.tp, sp=s.sp, pp=s.pp, cp=s.cp, ep=s.ep, schedule=s.pp_schedule, vpp=s.vpp)


def overheads_of(rows: Sequence[Row], runs: RunsFile, chip: GPU) -> Overheads:
    """Fit the sizes from probes and communicators of the GPU, and from rows with a reserved and a device figure."""
    probes = [probe for probe in runs.probe if probe.gpu == chip.name]
    own = {probe.id for probe in probes}
    talks = [one for one in runs.communicator if one.probe in own]
    contexts = [Reading(probe.context, probe.id) for probe in probes if probe.context]
    contexts += [Reading(row.beside, row.run.id) for row in rows if row.beside is not None and row.run.gpus == 1]
    readings = {
        "context": contexts,
        "workspace": [Reading(probe.blas_workspace, probe.id) for probe in probes if probe.blas_workspace],
        "world": [Reading(one.bytes, one.probe) for one in talks if one.kind == "world"],
        "group": [Reading(one.bytes, one.probe) for one in talks if one.kind == "group"],
    }
    sizes, outliers = _measured(readings)
    for name, further in (("world", 0), ("group", 1)):
        if "context" in sizes and name not in sizes:
            readings[name] += _communicators(rows, sizes, further)
            more, beyond = _measured({name: readings[name]})
            sizes, outliers = sizes | more, outliers | beyond
    notes = [f"outliers among readings of {name}: {', '.join(sorted(ids))}." for name, ids in outliers.items() if ids]
    return Overheads(sizes, tuple(_left(readings, sizes)), tuple(_workspace(sizes, chip, own)), tuple(notes))


def _measured(readings: Mapping[str, Sequence[Reading]]) -> tuple[dict[str, Measure], dict[str, list[str]]]:
    found = {name: measure_of(listed) for name, listed in readings.items() if len(listed) >= FEWEST[name]}
    kept = {name: one for name, (one, _) in found.items() if one.rows >= FEWEST[name]}
    return kept, {name: out for name, (_, out) in found.items()}


def _communicators(rows: Iterable[Row], sizes: Mapping[str, Measure], further: int) -> list[Reading]:
    """What rows on several GPUs hold beyond the context: the world's communicator, or each further one."""
    found = []
    for row in rows:
        layout = layout_of(row)
        groups = groups_of(layout)
        if row.beside is None or layout.gpus == 1 or bool(groups) != bool(further):
            continue
        if further and "world" not in sizes:
            continue
        rest = row.beside - sizes["context"].bytes - (sizes["world"].bytes if further else 0)
        found.append(Reading(max(rest // max(groups, 1), 0), row.run.id))
    return found


def _left(readings: Mapping[str, Sequence[Reading]], sizes: Mapping[str, Measure]) -> Iterable[Left]:
    """Say what has too few readings."""
    where = {
        "context": "of probes, or of runs on one GPU with reserved and device figures",
        "workspace": "of probes",
        "world": "of [[communicator]], or of runs on several GPUs with both figures",
        "group": "of [[communicator]], or of such runs with TP, PP, CP or EP",
    }
    for name, needed in FEWEST.items():
        if name not in sizes:
            part = "communicators" if name in {"world", "group"} else name
            said = f"{name}: {len(readings[name])} readings {where[name]}, {needed} needed"
            yield Left.model_validate({"part": part, "reason": said})


def _workspace(sizes: Mapping[str, Measure], chip: GPU, probes: Iterable[str]) -> Iterable[Residual]:
    """Say where a workspace is not what PyTorch's source says."""
    found, source = sizes.get("workspace"), workspaces_of(chip).handle
    if found is None or found.bytes == source:
        return
    yield Residual(
        kind="workspace",
        where="all rows",
        error=round(source / found.bytes - 1, 4),
        rows=tuple(sorted(probes)),
        says=f"a cuBLAS handle keeps {found.bytes:,} bytes, and PyTorch's source says {source:,} "
        "(CUBLAS_WORKSPACE_CONFIG changes it)",
    )


def gains_of(before: Sequence[Row], after: Sequence[Row]) -> Iterable[Gain]:
    """Errors of device - reserved of rows that were held back: of the context on one GPU, else of the libraries."""
    for part, alone in (("context", True), ("communicators", False)):
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if a.beside is not None]
        pairs = [pair for pair in pairs if (pair[0].run.gpus == 1) is alone]
        if not pairs:
            continue
        errors = np.abs([[_missed(a), _missed(b)] for a, b in pairs])
        medians, p90 = np.median(errors, axis=0), np.quantile(errors, 0.9, axis=0)
        yield Gain.model_validate(
            {
                "part": part,
                "figure": "device - reserved",
                "unit": "bytes",
                "rows": len(pairs),
                "median": tuple(map(float, medians.round())),
                "p90": tuple(map(float, p90.round())),
                "better": bool(medians[1] < medians[0]),
            }
        )


def _missed(row: Row) -> int:
    budget = row.estimate.budget
    return budget.context + budget.libraries - (row.beside or 0)
