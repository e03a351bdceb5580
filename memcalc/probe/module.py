"""A module that is no preset, recorded: a model whose blocks are what a run on fake tensors showed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, get_args

from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.formulas.recompute import parse_policy
from memcalc.probe.module_fit import counts, execution_of, fitted, polynomial, relative_error
from memcalc.probe.module_parts import parts_of
from memcalc.specs.block import bare_block
from memcalc.specs.model import BlockGroup, Model, Outside
from memcalc.specs.recorded import Execution, Mode, Recording, Segment, Source, Treatment
from memcalc.specs.strategy import OptimizerImpl, Precision

if TYPE_CHECKING:
    from memcalc.probe.live.modules_run import Run
    from memcalc.probe.module_fit import Point
    from memcalc.probe.module_parts import Part
    from memcalc.results.probe import ModuleProbe

MODES: tuple[Mode, ...] = ("fp32", "half", "autocast")
TREATMENTS: tuple[Treatment, ...] = ("none", "full")
USUAL_LENGTH = 512
GRAIN = 32
"""Lengths are multiples of it where they can be: kernels fill rows up to it, which no polynomial follows."""
ABSENT = "a module is run by torch, which is not installed: pip install 'memcalc[probe]'."
MOST_ERROR = 0.01
"""Share of a part's bytes by which a further run may differ from the fitted sizes."""


@dataclass(frozen=True)
class Series:
    """The runs of one mode and treatment, by micro-batch and sequence length."""

    mode: Mode
    treatment: Treatment
    points: tuple[Point, ...]
    runs: tuple[Run, ...]

    @property
    def parts(self) -> list[list[Part]]:
        """The parts of each run."""
        return [parts_of(run.raw) for run in self.runs]


def record_model(
    source: Source,
    modes: Sequence[Mode] = MODES,
    treatments: Sequence[Treatment] = TREATMENTS,
    on_progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Run a module on fake tensors at several micro-batches and lengths, and make a model of what it allocates.

    ``on_progress`` is told how many of how many series of runs are done.
    """
    if not has_torch():
        raise MissingError(ABSENT)
    import torch

    from memcalc.probe.live.modules import functions, takes_length

    called = functions(source)
    by_length = takes_length(called)
    points = points_of(source.seq_len or USUAL_LENGTH, by_length=by_length)
    pairs = list(product(modes, treatments))
    all_series = []
    for done, (mode, treatment) in enumerate(pairs):
        if on_progress is not None:
            on_progress(done, len(pairs))
        all_series.append(_series(source, mode, treatment, points))
    segments, notes = _segments(all_series, by_length=by_length)
    return _model(source, all_series[0].runs[0], segments, notes, torch.__version__, by_length=by_length)


def probe(
    source: Source,
    *,
    precision: str | None = None,
    recompute: str | None = None,
    optimizer: str | None = None,
    optimizer_impl: str | None = None,
    micro_batch: str | None = None,
    seq_len: str | None = None,
    with_model: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[ModuleProbe, str]:
    """What two steps of a module save and use; with ``with_model`` also the text of the recorded model."""
    if not has_torch():
        raise MissingError(ABSENT)
    from memcalc.planner.as_is import mode_of
    from memcalc.planner.request import one_of, positive
    from memcalc.probe.live.modules_run import probe_module

    name = one_of(precision or "fp32", "precision", tuple(p for p in get_args(Precision) if not p.startswith("fp8")))
    kind = recompute or "none"
    if parse_policy(kind).kind not in {"none", "full", "every", "segments"}:
        raise CombinationError("recompute", kind, "a module's own steps are run with none, full, every-K or segments-K")
    length = positive(seq_len, "seq_len") if seq_len is not None else USUAL_LENGTH
    result = probe_module(
        source,
        precision=name,
        mode=mode_of(name),
        recompute=kind,
        optimizer=optimizer or "adamw",
        implementation=one_of(optimizer_impl or "foreach", "optimizer_impl", get_args(OptimizerImpl)),
        micro_batch=positive(micro_batch, "micro_batch") if micro_batch is not None else 1,
        seq_len=length,
    )
    if not with_model:
        return result, ""
    from memcalc.convert.named_model import recorded_text

    model = record_model(source, on_progress=on_progress)
    notes = () if model.recording is None else model.recording.notes
    return result.model_copy(update={"notes": notes}), recorded_text(model)


def modes_for(precision: str | None) -> tuple[Mode, ...]:
    """How a module is run for one precision, or for all that a search tries."""
    from memcalc.planner.as_is import mode_of

    known = precision in get_args(Precision)
    return (mode_of(str(precision)),) if known else MODES


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def points_of(seq_len: int, *, by_length: bool) -> tuple[Point, ...]:
    """Micro-batches and lengths to run: six points fix six coefficients, one tests them; the last is one sequence."""
    if not by_length:
        return (2, 1), (3, 1), (5, 1), (1, 1)
    if seq_len < 4:
        raise InputError("seq-len", seq_len, "a module is run at a quarter of it and more, so it must be at least 4")
    grain = GRAIN if seq_len >= 4 * GRAIN else 1
    first, second = (seq_len // part // grain * grain for part in (4, 2))
    lengths = first, second, seq_len
    return (*((batch, s) for batch in (2, 3) for s in lengths), (4, first + second), (1, seq_len))


def _series(source: Source, mode: Mode, treatment: Treatment, points: tuple[Point, ...]) -> Series:
    from memcalc.probe.live.modules import build, functions, tensors
    from memcalc.probe.live.modules_run import follow

    called = functions(source)
    runs = []
    for batch, seq in points:
        with tensors(fake=True):
            make = partial(build, source, called, mode, batch, seq)
            runs.append(follow(make, source.block_class or None, treatment))
    return Series(mode, treatment, points, tuple(runs))


def _segments(all_series: list[Series], *, by_length: bool) -> tuple[list[Segment], list[str]]:
    """Each part over all modes and treatments, and what is to be said of them."""
    notes: list[str] = []
    executions: list[list[Execution]] = []
    last: list[list[Part]] = []
    for series in all_series:
        last = series.parts
        new_executions = _executions(series, last, notes, by_length=by_length)
        executions = executions or [[] for _ in new_executions]
        if len(new_executions) != len(executions):
            raise InputError("module", "", "its blocks are not the same in every precision")
        for executions_of_part, new in zip(executions, new_executions, strict=True):
            executions_of_part.append(new)
    run, points = all_series[-1].runs[0], all_series[-1].points
    segments = []
    for number, runs in enumerate(executions):
        path = last[0][number].path
        flops = polynomial(
            points, [float(parts[number].flops) for parts in last[: len(points) - 1]], by_length=by_length
        )
        segments.append(
            Segment(
                name=run.classes.get(path, path),
                tensors=tuple(run.tensors[path]),
                flops={unit: max(round(value), 0) for unit, value in flops.items() if round(value) > 0},
                runs=tuple(runs),
            )
        )
    return segments, list(dict.fromkeys(notes))


def _executions(series: Series, parts: list[list[Part]], notes: list[str], *, by_length: bool) -> list[Execution]:
    """The parts of one mode and treatment, with sizes fitted over the runs; the last but one run tests them."""
    points, several = series.points[:-1], parts[:-1]
    executions = []
    for number, part in enumerate(several[0]):
        same = [run[number] for run in several if len(run) == len(several[0])]
        if len(same) < len(several) or any(other.structure != part.structure for other in same):
            where = part.path or "the module"
            raise CombinationError(
                "module", where, "it allocates in another order at another micro-batch or length, so no sizes follow"
            )
        sizes = fitted(points[:-1], [run.bytes for run in same[:-1]], part.kinds, part.dtypes, by_length=by_length)
        error = relative_error(sizes, points[-1], same[-1].bytes, part.kinds, part.dtypes)
        if error > MOST_ERROR:
            reason = f"its sizes follow no law of micro-batch and length: at {points[-1]} they are {error:.0%} off"
            raise CombinationError("module", part.path or "the module", reason)
        executions.append(execution_of(part, sizes, series.mode, series.treatment))
    alone, predicted = _alone(series.points[-1], parts[-1], executions)
    if abs(predicted - alone) > MOST_ERROR * alone:
        notes.append(
            f"at micro-batch 1 ({series.mode}, recompute {series.treatment}) a run made tensors of {alone:,} bytes, "
            f"and the sizes of larger ones say {predicted:,}"
        )
    return executions


def _alone(point: Point, parts: list[Part], executions: list[Execution]) -> tuple[int, int]:
    """Bytes made in a run of one sequence, and those predicted from the sizes of larger micro-batches."""
    units = counts(point)
    made = sum(size for part in parts for size, kind in zip(part.bytes, part.kinds, strict=True) if kind != "gradient")
    predicted = sum(
        r.elements * r.width * units[r.unit] for run in executions for r in run.records if r.kind != "gradient"
    )
    return made, predicted


def _model(
    source: Source, run: Run, segments: list[Segment], notes: list[str], torch: str, *, by_length: bool
) -> Model:
    """The model with these parts."""
    entry, *blocks, head = segments
    groups: list[BlockGroup] = []
    for segment in blocks:
        if groups and groups[-1].block.recorded == segment:
            groups[-1] = groups[-1].model_copy(update={"count": groups[-1].count + 1})
        else:
            groups.append(BlockGroup(count=1, block=bare_block(recorded=segment)))
    rows, columns = run.tied or (0, 0)
    outside = (
        ("before the blocks", entry.parameters - rows * columns, "first"),
        ("after the blocks", head.parameters, "last"),
    )
    name = source.module.rpartition(":")[2]
    return Model.model_validate({
        "name": name,
        "family": "recorded",
        "hidden": columns or 1,
        "vocab": rows,
        "tied": bool(rows),
        "head": bool(rows),
        "positions": "none",
        "max_positions": (source.seq_len or USUAL_LENGTH) if by_length else 1,
        "final_norm": None,
        "groups": tuple(groups),
        "outside": tuple(Outside(name=n, parameters=count, place=at) for n, count, at in outside if count > 0),
        "source": f"{source.module}, run on fake tensors by torch {torch}",
        "recording": Recording(
            origin=source.module, words=source.words, entry=entry, head=head, loss=run.taken, per_sequence=by_length,
            buffers=run.buffers, notes=tuple(notes), torch=torch,
        ),
    })  # fmt: skip
