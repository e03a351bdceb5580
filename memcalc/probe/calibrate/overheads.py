"""Memory of a process outside its tensors, as measured: context, workspaces, communicators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.specs.calibration import Gain, Left, Measure, Residual
from memcalc.terms.overhead import workspaces_of
from memcalc.units import MIB

if TYPE_CHECKING:
    from memcalc.probe.calibrate.rows import Row
    from memcalc.specs.hardware import GPU
    from memcalc.specs.runs import RunsFile

FEWEST = {"context": 3, "world": 3, "group": 3, "workspace": 1}
"""Readings of each size below which it is left as it is; a workspace is a constant of the library, read exactly."""
OUTLIER = 4 * 1.4826
"""Median absolute deviations beyond which a reading is an outlier: four standard deviations of a normal spread."""
GRAIN = 16 * MIB
"""What readings of nvidia-smi may differ by without being outliers."""


@dataclass(frozen=True)
class Sample:
    """One figure and where it was read."""

    value: int
    origin: str


@dataclass(frozen=True)
class Overheads:
    """Fitted sizes, and what is to be reported of them."""

    sizes: dict[str, Measure]
    """By field of a calibration: context, workspace, world, group."""
    left: tuple[Left, ...]
    residuals: tuple[Residual, ...]
    notes: tuple[str, ...]


def measure_of(samples: Sequence[Sample]) -> tuple[Measure, list[str]]:
    """Return the median of readings with the range of those that are no outliers, and where the outliers were read.

    >>> measure_of([Sample(size, str(size)) for size in (500, 501, 502, 10**9)])[0].high
    502
    """
    values = np.array([sample.value for sample in samples], dtype=float)
    median = float(np.median(values))
    width = max(OUTLIER * float(np.median(np.abs(values - median))), GRAIN)
    within = np.abs(values - median) <= width
    median = float(np.median(values[within]))
    measure = Measure(
        bytes=round(median), low=int(values[within].min()), high=int(values[within].max()), rows=int(within.sum())
    )
    return measure, [sample.origin for sample, near in zip(samples, within, strict=True) if not near]


def overheads_of(rows: Sequence[Row], runs: RunsFile, gpu: GPU) -> Overheads:
    """Fit the sizes from probes and communicators of the GPU, and from rows with a reserved and a device figure."""
    probes = [probe for probe in runs.probe if probe.gpu == gpu.name]
    probe_ids = {probe.id for probe in probes}
    communicators = [communicator for communicator in runs.communicator if communicator.probe in probe_ids]
    contexts = [Sample(probe.context, probe.id) for probe in probes if probe.context]
    contexts += [Sample(row.beside, row.run.id) for row in rows if row.beside is not None and row.run.gpus == 1]
    samples = {
        "context": contexts,
        "workspace": [Sample(probe.blas_workspace, probe.id) for probe in probes if probe.blas_workspace],
        **{kind: [Sample(c.bytes, c.probe) for c in communicators if c.kind == kind] for kind in ("world", "group")},
    }
    sizes, outliers = _measured(samples)
    for name, further in (("world", 0), ("group", 1)):
        if "context" in sizes and name not in sizes:
            samples[name] += _communicators(rows, sizes, further)
            more, beyond = _measured({name: samples[name]})
            sizes, outliers = sizes | more, outliers | beyond
    notes = [f"outliers among readings of {name}: {', '.join(sorted(ids))}." for name, ids in outliers.items() if ids]
    return Overheads(
        sizes, tuple(_too_few(samples, sizes)), tuple(_workspace_residual(sizes, gpu, probe_ids)), tuple(notes)
    )


def _measured(samples: Mapping[str, Sequence[Sample]]) -> tuple[dict[str, Measure], dict[str, list[str]]]:
    measures = {name: measure_of(listed) for name, listed in samples.items() if len(listed) >= FEWEST[name]}
    enough = {name: measure for name, (measure, _) in measures.items() if measure.rows >= FEWEST[name]}
    return enough, {name: outliers for name, (_, outliers) in measures.items()}


def _communicators(rows: Iterable[Row], sizes: Mapping[str, Measure], beyond_world: int) -> list[Sample]:
    """What rows on several GPUs hold beyond the context: the world's communicator, or each further one."""
    samples = []
    for row in rows:
        joined = [term for term in row.estimate.outside if "group" in term.inputs]
        groups, sending = max(len(joined) - 1, 0), sum(t.bytes for t in row.estimate.outside if "peers" in t.inputs)
        if row.beside is None or not joined or bool(groups) != bool(beyond_world):
            continue
        if beyond_world and "world" not in sizes:
            continue
        remaining = row.beside - sending - sizes["context"].bytes - (sizes["world"].bytes if beyond_world else 0)
        samples.append(Sample(max(remaining // max(groups, 1), 0), row.run.id))
    return samples


def _too_few(samples: Mapping[str, Sequence[Sample]], sizes: Mapping[str, Measure]) -> Iterable[Left]:
    """Name the sizes with too few readings."""
    sources = {
        "context": "of probes, or of runs on one GPU with reserved and total figures",
        "workspace": "of probes",
        "world": "of [[communicator]], or of runs on several GPUs with both figures",
        "group": "of [[communicator]], or of such runs with TP, PP, CP or EP",
    }
    for name, needed in FEWEST.items():
        if name not in sizes:
            part = "communicators" if name in {"world", "group"} else name
            reason = f"{name}: {len(samples[name])} readings {sources[name]}, {needed} needed"
            yield Left.model_validate({"part": part, "reason": reason})


def _workspace_residual(sizes: Mapping[str, Measure], gpu: GPU, probes: Iterable[str]) -> Iterable[Residual]:
    """Report a workspace that differs from the size in PyTorch's source."""
    measured, source = sizes.get("workspace"), workspaces_of(gpu).handle
    if measured is None or measured.bytes == source:
        return
    yield Residual(
        kind="workspace",
        where="all rows",
        error=round(source / measured.bytes - 1, 4),
        rows=tuple(sorted(probes)),
        says=f"a cuBLAS handle keeps {measured.bytes:,} bytes, and PyTorch's source says {source:,} "
        "(CUBLAS_WORKSPACE_CONFIG changes it)",
    )


def gains_of(before: Sequence[Row], after: Sequence[Row]) -> Iterable[Gain]:
    """Errors of device - reserved of rows that were held back: of the context on one GPU, else of the libraries."""
    for part, one_gpu in (("context", True), ("communicators", False)):
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if a.beside is not None]
        pairs = [pair for pair in pairs if (pair[0].run.gpus == 1) is one_gpu]
        if not pairs:
            continue
        errors = np.abs([[_overhead_error(a), _overhead_error(b)] for a, b in pairs])
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


def _overhead_error(row: Row) -> int:
    budget = row.estimate.budget
    return budget.context + budget.libraries - (row.beside or 0)
