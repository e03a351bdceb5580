"""The rows of one GPU: checked against each other, predicted, split into those that fit and those that judge.

Errors that are no noise are told from the rest: of one sign and size in all rows that share something, or growing with
something.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from memcalc import validation
from memcalc.errors import CombinationError, MemcalcError, MissingError, UnknownNameError
from memcalc.probe.measure.records import PHASES
from memcalc.specs.calibration import Residual
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.formulas import Array
    from memcalc.results.estimates import Estimate
    from memcalc.specs.hardware import GPU
    from memcalc.specs.runs import Run, RunsFile
    from memcalc.validation import Presets


HELD = 0.2
"""Share of the rows that is held back at least."""
HELD_MOST = 0.3
"""And at most: a family of rows that would go beyond it stays."""
APART = {"allocated": 0.02, "reserved": 0.1, "device": 0.1, "time": 0.25}
"""Figures of the same job further apart than this share contradict each other."""
COARSE = 0.02
"""A figure of grade B may have been rounded by this share."""
_VARIED = ("micro_batch", "seq_len", "global_batch")
"""What differs between near-copies of a job."""


@dataclass(frozen=True)
class Row:
    """A run with its prediction."""

    run: Run
    estimate: Estimate
    family: str
    """Equal for near-copies, which are fitted on or held back together."""

    @property
    def beside(self) -> int | None:
        """What the process holds outside its allocator [bytes]; None where the run does not have both figures."""
        figures = self.run.measured.figures
        return figures["device"] - figures["reserved"] if {"device", "reserved"} <= set(figures) else None


def gpu_of(runs: RunsFile, name: str | None, presets: validation.Presets) -> GPU:
    """Return the GPU that is meant.

    Raises :class:`memcalc.errors.CombinationError` for rows of several GPUs where none is named, and
    :class:`memcalc.errors.UnknownNameError` for one that no row has.
    """
    used = [presets.gpu(gpu).name for gpu in [*(run.gpu for run in runs.run), *(probe.gpu for probe in runs.probe)]]
    counts = Counter(used).most_common()
    if not counts:
        raise MissingError("a calibration needs rows: the files have no [[run]] and no [[probe]].")
    listed = ", ".join(f"{gpu} ({count})" for gpu, count in counts)
    if name is None:
        if len(counts) > 1:
            raise CombinationError(
                "runs", len(used), f"a calibration is of one GPU, and --gpu must say which: {listed}"
            )
        return presets.gpu(counts[0][0])
    preset = presets.gpu(name)
    if preset.name not in dict(counts):
        raise UnknownNameError("gpu", name, f"the rows are of {listed}", dict(counts))
    return preset


def check(runs: Sequence[Run], gpu: GPU) -> None:
    """Refuse rows that cannot be true together, naming them."""
    for run in runs:
        _check_figures(run, gpu)
    by_settings: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_settings[_settings_key(run)].append(run)
    for same in by_settings.values():
        for first, other in pairwise(same):
            _check_pair(first, other)


def _check_figures(run: Run, gpu: GPU) -> None:
    """Refuse figures that no process can have."""
    figures = run.measured.figures
    for low, high in (("allocated", "reserved"), ("reserved", "device"), ("allocated", "device")):
        if low in figures and high in figures and figures[low] > figures[high]:
            message = f"{low} is {_gib(figures[low])} and {high} {_gib(figures[high])} GiB, which no process can have"
            raise CombinationError("run", run.id, message)
    capacity = max(run.gpu_memory or gpu.memory_bytes, gpu.nvidia_smi_bytes or 0)
    largest = max(figures.values(), default=0)
    if largest > capacity * (1 + COARSE if run.grade == "B" else 1):
        message = f"{_gib(largest)} GiB were measured, and {gpu.name} has {_gib(capacity)}"
        raise CombinationError("run", run.id, message)


def _check_pair(first: Run, other: Run) -> None:
    """Refuse two figures of one job that are too far apart."""
    pairs: dict[str, tuple[float | None, float | None]] = {
        name: (getattr(first.measured, name), getattr(other.measured, name)) for name in APART if name != "time"
    }
    pairs["time"] = (_speed(first), _speed(other))
    for name, (a, b) in pairs.items():
        if a and b and abs(a / b - 1) > APART[name]:
            message = f"it is the same job as {first.id}, and their {name} figures are {abs(a / b - 1):.0%} apart"
            raise CombinationError("run", other.id, f"{message}: leave one out")


def _speed(run: Run) -> float | None:
    return 1 / run.seconds if run.seconds else run.tokens_per_second_per_gpu


def _settings_key(run: Run) -> str:
    """Equal for the same job measured twice in the same campaign: all that was set, and where it was read."""
    # A comment says what no setting can, such as the commit that made the same job faster
    settings = (
        run.model,
        run.gpu_memory,
        run.gpus,
        run.workload,
        run.strategy,
        run.software,
        run.rank,
        run.probe,
        run.comment,
    )
    return json.dumps(settings, sort_keys=True, default=str)


def predicted(runs: Iterable[Run], presets: validation.Presets) -> Iterator[Row]:
    """Yield each run that memcalc can predict; ``memcalc validate`` lists the others."""
    for run in runs:
        try:
            estimate = validation.predict(run, presets)
            validation.figures_of(run, estimate)
        except MemcalcError:
            continue
        yield Row(run, estimate, family_of(run))


def family_of(run: Run) -> str:
    """A text that near-copies of a job share: all of it but batch and length, hashed so that it orders at random."""
    strategy = {name: value for name, value in run.strategy.items() if name not in _VARIED}
    workload = {name: value for name, value in run.workload.items() if name not in _VARIED}
    model = run.model if isinstance(run.model, str) else {k: v for k, v in run.model.items() if k != "max_positions"}
    settings = json.dumps([model, run.gpus, strategy, workload], sort_keys=True, default=str)
    return hashlib.sha256(settings.encode()).hexdigest()


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows to fit on and those held back: whole families, in the order of their hashes.

    The same rows always split alike, in whatever order they are read.
    """
    sizes = Counter(row.family for row in rows)
    held_back: set[str] = set()
    count = 0
    for family in sorted(sizes):
        if count < HELD * len(rows) and count + sizes[family] <= HELD_MOST * len(rows):
            held_back.add(family)
            count += sizes[family]
    ordered = sorted(rows, key=lambda row: row.run.id)
    return [r for r in ordered if r.family not in held_back], [r for r in ordered if r.family in held_back]


def listed(names: Iterable[str], most: int = 4) -> str:
    """Return some names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    all_names = list(names)
    remaining = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {remaining} more" if remaining > 0 else "")


def counted(rows: Collection[object]) -> str:
    """Return how many rows there are.

    >>> counted(["a"]), counted([])
    ('1 row', '0 rows')
    """
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


TOLERANCE = {"allocated": 0.03, "phase": 0.05, "step time": 0.15}
"""|predicted / measured - 1| from which a common error is structural."""
FEWEST = 4
"""Rows that must share an error."""
PURE = 0.8
"""Share of them on the same side, beyond half of the tolerance."""
MOST = 6
"""Residuals of one kind that are reported."""
CORRELATED = 12
"""Rows from which a correlation is looked for."""
COEFFICIENT = 0.6
"""Spearman's coefficient from which a correlation is reported."""
CHANCE = 2.58
"""Standard errors, 1 / sqrt(rows - 1), that it must have at least: chance gives as much once in a hundred times."""
FIELDS = (
    "framework", "precision", "recompute", "attention", "optimizer", "optimizer_impl", "zero", "tp", "pp", "cp", "ep",
    "loss", "kernels", "compile", "quantize", "lora", "offload",
)  # fmt: skip
Kind = Literal["allocated", "phase", "step time"]


@dataclass(frozen=True)
class Error:
    """Predicted / measured - 1 of one row."""

    row: Row
    value: float


def allocated_errors(rows: Iterable[Row]) -> list[Error]:
    """The errors of the allocated figure, which is a sum of mechanisms and is never fitted."""
    errors = []
    for row in rows:
        measured = row.run.measured.allocated
        if measured:
            errors.append(Error(row, validation.figures_of(row.run, row.estimate)["allocated"] / measured - 1))
    return errors


def phase_errors(rows: Iterable[Row]) -> dict[str, list[Error]]:
    """The same by phase, where a probe read them."""
    errors: dict[str, list[Error]] = defaultdict(list)
    for row in rows:
        for phase, size in row.run.phases.items():
            predicted = max(row.estimate.phases[name] for name in PHASES[phase])
            errors[phase].append(Error(row, predicted / size - 1))
    return errors


def structural(errors: Sequence[Error], kind: Kind, where: str = "") -> Iterator[Residual]:
    """Yield the errors that rows share, those that most rows share first; each row counts in one of them."""
    remaining = list(errors)
    for _ in range(MOST):
        sets = _subsets(remaining)
        best = max(sets, key=lambda name: _weight(sets[name], kind), default="")
        if not best or not _weight(sets[best], kind):
            return
        shared = sets[best]
        ids = {error.row.run.id for error in shared}
        alike = [name for name in sets if {error.row.run.id for error in sets[name]} == ids]
        yield _residual(shared, kind, f"{where}{', '.join(alike[:3])}", dict(map(_parts, alike[:1])))
        remaining = [error for error in remaining if error.row.run.id not in ids]


def _parts(name: str) -> tuple[str, str]:
    field, _, value = name.partition(" = ")
    return field, value


def _subsets(errors: Sequence[Error]) -> dict[str, list[Error]]:
    """The rows that share something, by what they share."""
    subsets: dict[str, list[Error]] = {"all rows": list(errors)}
    for error in errors:
        for name, value in _shared(error.row).items():
            subsets.setdefault(f"{name} = {value}", []).append(error)
    return subsets


def _shared(row: Row) -> dict[str, Any]:
    strategy = row.estimate.strategy
    values = {name: getattr(strategy, name) for name in FIELDS}
    values["offload"] = ",".join(strategy.offload) or "none"
    several = "several" if row.run.gpus > 1 else "one"
    return {**{name: value for name, value in values.items() if value != ""}, "GPUs": several, "group": row.run.group}


def _weight(errors: Sequence[Error], kind: Kind) -> float:
    """How much a common error explains; 0 where it is none."""
    values = np.array([error.value for error in errors])
    tolerance = TOLERANCE[kind]
    if len(values) < FEWEST or abs(np.median(values)) <= tolerance:
        return 0.0
    sign = np.sign(np.median(values))
    alike = np.mean(sign * values > tolerance / 2)
    return float(len(values) * abs(np.median(values))) if alike >= PURE else 0.0


def _residual(errors: Sequence[Error], kind: Kind, where: str, shared: dict[str, str]) -> Residual:
    middle = float(np.median([error.value for error in errors]))
    what = {"allocated": "allocated bytes are", "phase": "allocated bytes are", "step time": "step times are"}[kind]
    ids = sorted(error.row.run.id for error in errors)
    side = "above" if middle > 0 else "below"
    message = f"{what} predicted {abs(middle):.1%} {side} the measured in {counted(ids)} ({where}): {listed(ids)}"
    of_strategy = {name: value for name, value in shared.items() if name in FIELDS}
    return Residual(kind=kind, where=where, error=round(middle, 4), rows=tuple(ids), shared=of_strategy, says=message)


def correlations(errors: Sequence[Error], presets: Presets) -> Iterator[Residual]:
    """Yield what the error of the allocated figure grows with: tokens, parameters or logits."""
    values = np.array([error.value for error in errors])
    if len(values) < CORRELATED or np.quantile(values, 0.9) - np.quantile(values, 0.1) < 2 * TOLERANCE["allocated"]:
        return
    sizes = [_sizes(error.row, presets) for error in errors]
    for name in sizes[0]:
        column = np.array([size[name] for size in sizes])
        if np.ptp(column) == 0:
            continue
        coefficient = float(np.corrcoef(ranks(column), ranks(values))[0, 1])
        if abs(coefficient) >= max(COEFFICIENT, CHANCE / np.sqrt(len(values) - 1)):
            ids = tuple(sorted(error.row.run.id for error in errors))
            message = f"the error of allocated bytes {'grows' if coefficient > 0 else 'falls'} with {name}"
            yield Residual(
                kind="correlation", where=name, error=round(coefficient, 3), rows=ids,
                says=f"{message}: rank correlation {coefficient:.2f} over {len(ids)} rows",
            )  # fmt: skip


def ranks(values: Array) -> Array:
    """Return the places of values in their order, equal ones at the mean of theirs.

    >>> ranks(np.array([30.0, 10.0, 30.0, 20.0])).tolist()
    [3.5, 1.0, 3.5, 2.0]
    """
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[position])


def _sizes(row: Row, presets: Presets) -> Mapping[str, float]:
    work, model = row.estimate.workload, validation.model_of(row.run, presets)
    tokens = work.micro_batch * work.seq_len
    return {
        "tokens a micro-batch": tokens,
        "parameters a GPU": row.estimate.model.parameters / row.run.gpus,
        "logits": tokens * model.vocab,
    }
