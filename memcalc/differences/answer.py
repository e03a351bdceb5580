"""The comparison itself: two jobs in, every change with its price out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memcalc import __version__
from memcalc.differences.changes import fields_between, one_of, paired
from memcalc.differences.costs import cost_between, terms_between
from memcalc.differences.sides import Given, Side, sides
from memcalc.differences.steps import Point, Walk
from memcalc.differences.texts import flat_words, split, text_of
from memcalc.errors import InputError
from memcalc.handoff.words import command_line, flags_of
from memcalc.planner.timed import unvalidated
from memcalc.results.diff import Diff, DiffSide

__all__ = ["diff"]


def diff(
    a: Given,
    b: Given,
    *,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **words: Any,
) -> Diff:
    """Compare two jobs: what is different, and what each change costs or saves.

    ``a`` and ``b`` are each a text as on the command line (a saved plan, an answer in JSON, a job's own files joined by
    commas, or words such as ``zero=3,recompute=full``), a mapping of words, or an answer of this library. The other
    words count for both. Raises :class:`memcalc.errors.InputError` for a side that cannot be read and
    :class:`memcalc.errors.MissingError` for what must be told.
    """
    dirs, told = tuple(preset_dirs), flat_words({**words, "settings": settings})
    first, second = sides(a, b, told, dirs)
    start, end = _point("A", first, dirs), _point("B", second, dirs)
    walk = Walk(paired(first, second, dirs))
    steps = walk.steps()
    return Diff(
        version=__version__,
        a=_side(first, start),
        b=_side(second, end),
        fields=fields_between(start.one, end.one, first.said | second.said),
        total=cost_between(start.figures, end.figures),
        steps=steps,
        terms=terms_between(start.estimate, end.estimate),
        warnings=tuple(_warnings(start, end)),
        command=_command(a, b, told, dirs),
    )


def _point(place: str, side: Side, dirs: tuple[str, ...]) -> Point:
    """The job of a side; what is impossible says of which."""
    try:
        return Point(one_of(side.words, dirs))
    except InputError as error:
        raise error.within(place) from None


def _side(side: Side, point: Point) -> DiffSide:
    return DiffSide(
        name=side.name,
        kind=side.kind,
        estimate=point.estimate,
        time=point.time,
        figures=point.figures,
        remarks=side.remarks,
    )


def _warnings(start: Point, end: Point) -> Iterator[str]:
    """What the figures do not know, each once, and which times no run validates."""
    both = [warning for warning in start.estimate.warnings if warning in end.estimate.warnings]
    yield from both
    for name, point in (("A", start), ("B", end)):
        yield from (f"{name}: {warning}" for warning in point.estimate.warnings if warning not in both)
    yield from unvalidated({"A": start.time, "B": end.time})


def _command(a: Given, b: Given, words: Mapping[str, Any], dirs: tuple[str, ...]) -> str:
    """The line that reproduces the answer; empty where a side or a word is no text."""
    names = [name for given in (a, b) if (name := _text(given)) is not None]
    if len(names) < 2 or not all(isinstance(value, str | int | bool) for value in words.values()):
        return ""
    parts = split(words)
    settings = {name: str(value) for name, value in parts.pop("settings").items()}
    folders = [part for folder in dirs for part in ("--preset-dir", folder)]
    return command_line("diff", *names, *flags_of(parts, settings), *folders)


def _text(given: Given) -> str | None:
    """A side as it is typed; None for an answer that is in no file."""
    if isinstance(given, Mapping):
        return text_of(flat_words(given))
    return given if isinstance(given, str) else None
