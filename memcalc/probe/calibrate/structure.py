"""Errors that are no noise: of one sign and size in all rows that share something, or growing with something."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from memcalc import validation
from memcalc.probe.calibrate.rows import Row, counted, listed
from memcalc.probe.measure.records import PHASES
from memcalc.specs.calibration import Residual

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from memcalc.formulas import Array
    from memcalc.validation import Presets

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
