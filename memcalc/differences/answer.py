"""The comparison itself: two jobs in, every change with its price out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memcalc._version import __version__
from memcalc.differences.changes import align, fields_between, resolve
from memcalc.differences.inputs import DiffInput, Given, read_inputs, text_of
from memcalc.differences.steps import DiffState, StepBuilder, cost_between, terms_between
from memcalc.errors import InputError
from memcalc.planner.finalists import unchecked_warnings
from memcalc.planner.record import flat_options, split_options
from memcalc.results.diff import Diff, DiffSide
from memcalc.specs.job import render


def diff(
    a: Given, b: Given, *, settings: Mapping[str, Any] | None = None, preset_dirs: Iterable[str] = (), **options: Any
) -> Diff:
    """Compare two jobs: what is different, and what each change costs or saves.

    ``a`` and ``b`` are each a text as on the command line (a saved plan, an answer in JSON, a job's own files joined by
    commas, or words such as ``zero=3,recompute=full``), a mapping of words, or an answer of this library. The other
    words count for both. Raises :class:`memcalc.errors.InputError` for a side that cannot be read and
    :class:`memcalc.errors.MissingError` for what must be told.
    """
    shared = flat_options({**options, "settings": settings})
    first, second, dirs = read_inputs(a, b, shared, tuple(preset_dirs))
    start, end = _state("A", first, dirs), _state("B", second, dirs)
    return Diff(
        version=__version__,
        a=_side(first, start),
        b=_side(second, end),
        fields=fields_between(start.job, end.job, first.stated | second.stated),
        total=cost_between(start.figures, end.figures),
        steps=StepBuilder(align(first, second, dirs)).steps(),
        terms=terms_between(start.estimate, end.estimate),
        warnings=tuple(_warnings(start, end)),
        command=_command(a, b, shared, dirs),
    )


def _state(side: str, job: DiffInput, dirs: tuple[str, ...]) -> DiffState:
    """A job with its figures; an impossible one is refused by its side."""
    try:
        return DiffState(resolve(job.options, dirs))
    except InputError as error:
        raise error.within(side) from None


def _side(job: DiffInput, state: DiffState) -> DiffSide:
    return DiffSide(
        name=job.name,
        kind=job.kind,
        estimate=state.estimate,
        time=state.time,
        figures=state.figures,
        remarks=job.remarks,
    )


def _warnings(start: DiffState, end: DiffState) -> Iterator[str]:
    """What the figures do not know, each once, and which times no run validates."""
    both = [warning for warning in start.estimate.warnings if warning in end.estimate.warnings]
    yield from both
    for name, state in (("A", start), ("B", end)):
        yield from (f"{name}: {warning}" for warning in state.estimate.warnings if warning not in both)
    yield from unchecked_warnings({"A": start.time, "B": end.time})


def _command(a: Given, b: Given, options: Mapping[str, Any], dirs: tuple[str, ...]) -> str:
    """The line that reproduces the answer; empty where a job or an option is no text."""
    names = [text_of(flat_options(given)) if isinstance(given, Mapping) else given for given in (a, b)]
    texts = [name for name in names if isinstance(name, str)]
    if len(texts) < 2 or not all(isinstance(value, str | int | bool) for value in options.values()):
        return ""
    parts = split_options(options)
    settings = parts.pop("settings")
    return render("diff", *texts, options=parts, settings=settings, dirs=dirs)
