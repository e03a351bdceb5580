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
from memcalc.specs.model import Attention, Block, BlockGroup, Mlp, Model, Outside
from memcalc.specs.recorded import Execution, Mode, Recording, Segment, Treatment
from memcalc.specs.strategy import OptimizerImpl, Precision

if TYPE_CHECKING:
    from memcalc.probe.live.modules_run import Run
    from memcalc.probe.module_fit import Point
    from memcalc.probe.module_parts import Part
    from memcalc.results.module import ModuleProbe

MODES: tuple[Mode, ...] = ("fp32", "half", "autocast")
TREATMENTS: tuple[Treatment, ...] = ("none", "full")
USUAL_LENGTH = 512
GRAIN = 32
"""Lengths are multiples of it where they can be: kernels fill rows up to it, which no polynomial follows."""
ABSENT = "a module is run by torch, which is not installed: pip install 'memcalc[probe]'."
MOST_ERROR = 0.01
"""Share of a part's bytes by which a further run may differ from what the fitted sizes say."""


@dataclass(frozen=True)
class Source:
    """A module in the user's words."""

    module: str
    inputs: str = ""
    loss: str = ""
    block_class: str = ""
    seq_len: int = 0
    """The length around which sizes are fitted; 0 for the usual one."""

    @property
    def words(self) -> tuple[tuple[str, str], ...]:
        """The further options, as typed."""
        named = (("inputs", self.inputs), ("loss-fn", self.loss), ("block-class", self.block_class))
        return tuple((name, value) for name, value in named if value)


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
    every = []
    for done, (mode, treatment) in enumerate(pairs):
        if on_progress is not None:
            on_progress(done, len(pairs))
        every.append(_series(source, mode, treatment, points))
    segments, notes = _segments(every, by_length=by_length)
    return _model(source, every[0].runs[0], segments, notes, torch.__version__, by_length=by_length)


def probe(
    source: Source,
    *,
    precision: str | None = None,
    recompute: str | None = None,
    optimizer: str | None = None,
    optimizer_impl: str | None = None,
    micro_batch: str | None = None,
    seq_len: str | None = None,
    whole: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[ModuleProbe, str]:
    """What two steps of a module keep and hold; with ``whole`` also the text of the model that it is recorded as."""
    if not has_torch():
        raise MissingError(ABSENT)
    from memcalc.planner.recorded import mode_of
    from memcalc.planner.request import one_of, positive
    from memcalc.probe.live.modules_probe import probe_module

    name = one_of(precision or "fp32", "precision", tuple(p for p in get_args(Precision) if not p.startswith("fp8")))
    kind = recompute or "none"
    if parse_policy(kind).kind not in {"none", "full", "every", "segments"}:
        raise CombinationError("recompute", kind, "a module's own steps are run with none, full, every-K or segments-K")
    length = positive(seq_len, "seq_len") if seq_len is not None else USUAL_LENGTH
    found = probe_module(
        source,
        precision=name,
        mode=mode_of(name),
        recompute=kind,
        optimizer=optimizer or "adamw",
        implementation=one_of(optimizer_impl or "foreach", "optimizer_impl", get_args(OptimizerImpl)),
        micro_batch=positive(micro_batch, "micro_batch") if micro_batch is not None else 1,
        seq_len=length,
    )
    if not whole:
        return found, ""
    from memcalc.convert.recorded import recorded_text

    model = record_model(source, on_progress=on_progress)
    notes = () if model.recording is None else model.recording.notes
    return found.model_copy(update={"notes": notes}), recorded_text(model)


def modes_for(precision: str | None) -> tuple[Mode, ...]:
    """How a module is run for one precision, or for all that a search tries."""
    from memcalc.planner.recorded import mode_of

    known = precision in get_args(Precision)
    return (mode_of(str(precision)),) if known else MODES


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def points_of(seq_len: int, *, by_length: bool) -> tuple[Point, ...]:
    """Where a module is run: six points fix six coefficients, a seventh tests them; an eighth is one sequence alone."""
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


def _segments(every: list[Series], *, by_length: bool) -> tuple[list[Segment], list[str]]:
    """Each part over all modes and treatments, and what is to be said of them."""
    notes: list[str] = []
    executions: list[list[Execution]] = []
    last: list[list[Part]] = []
    for series in every:
        last = series.parts
        found = _executions(series, last, notes, by_length=by_length)
        executions = executions or [[] for _ in found]
        if len(found) != len(executions):
            raise InputError("module", "", "its blocks are not the same in every precision")
        for known, new in zip(executions, found, strict=True):
            known.append(new)
    run, points = every[-1].runs[0], every[-1].points
    segments = []
    for number, runs in enumerate(executions):
        place = last[0][number].place
        flops = polynomial(
            points, [float(parts[number].flops) for parts in last[: len(points) - 1]], by_length=by_length
        )
        segments.append(
            Segment(
                name=run.classes.get(place, place),
                tensors=tuple(run.tensors[place]),
                flops={unit: max(round(value), 0) for unit, value in flops.items() if round(value) > 0},
                runs=tuple(runs),
            )
        )
    return segments, list(dict.fromkeys(notes))


def _executions(series: Series, parts: list[list[Part]], notes: list[str], *, by_length: bool) -> list[Execution]:
    """The parts of one mode and treatment, with sizes fitted over the runs; the last but one run tests them."""
    points, several = series.points[:-1], parts[:-1]
    found = []
    for number, part in enumerate(several[0]):
        same = [run[number] for run in several if len(run) == len(several[0])]
        if len(same) < len(several) or any(other.structure != part.structure for other in same):
            where = part.place or "the module"
            raise CombinationError(
                "module", where, "it allocates in another order at another micro-batch or length, so no sizes follow"
            )
        sizes = fitted(points[:-1], [one.bytes for one in same[:-1]], part.kinds, part.dtypes, by_length=by_length)
        error = relative_error(sizes, points[-1], same[-1].bytes, part.kinds, part.dtypes)
        if error > MOST_ERROR:
            said = f"its sizes follow no law of micro-batch and length: at {points[-1]} they are {error:.0%} off"
            raise CombinationError("module", part.place or "the module", said)
        found.append(execution_of(part, sizes, series.mode, series.treatment))
    alone, predicted = _alone(series.points[-1], parts[-1], found)
    if abs(predicted - alone) > MOST_ERROR * alone:
        notes.append(
            f"at micro-batch 1 ({series.mode}, recompute {series.treatment}) a run made tensors of {alone:,} bytes, "
            f"and the sizes of larger ones say {predicted:,}"
        )
    return found


def _alone(point: Point, parts: list[Part], executions: list[Execution]) -> tuple[int, int]:
    """Bytes made in a run of one sequence, and those that the sizes of larger micro-batches say."""
    units = counts(point)
    made = sum(size for part in parts for size, kind in zip(part.bytes, part.kinds, strict=True) if kind != "gradient")
    said = sum(r.elements * r.width * units[r.unit] for run in executions for r in run.records if r.kind != "gradient")
    return made, said


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
            groups.append(BlockGroup(count=1, block=block_of(segment)))
    rows, columns = run.tied or (0, 0)
    beside = (
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
        "outside": tuple(Outside(name=n, parameters=count, place=place) for n, count, place in beside if count > 0),
        "source": f"{source.module}, run on fake tensors by torch {torch}",
        "recording": Recording(
            origin=source.module, words=source.words, entry=entry, head=head, loss=run.taken, per_sequence=by_length,
            buffers=run.buffers, notes=tuple(notes), torch=torch,
        ),
    })  # fmt: skip


def block_of(segment: Segment) -> Block:
    """A recorded block: its other fields stand for nothing, and are as small as they can be."""
    return Block(
        hidden=1,
        attention=Attention(heads=1, kv_heads=1, head_dim=8, causal=False, rotary=False),
        mlp=Mlp(ffn=1, gated=False),
        norms=0,
        recorded=segment,
    )
