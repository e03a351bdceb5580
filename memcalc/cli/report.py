"""The page for other people: what it is made from, and where it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import memcalc
from memcalc.cli.modules import with_model
from memcalc.cli.output import deliver
from memcalc.errors import CombinationError, InputError
from memcalc.files import output_path

if TYPE_CHECKING:
    from memcalc.results import Estimate, Plans, SavedPlan
    from memcalc.specs.model import Model

__all__ = ["DEFAULT", "show"]

DEFAULT = "report.html"
"""Where the page goes when no file is named."""
_UNSAID = {"objective": "throughput", "top": "10"}
"""Options of a search that are always there."""


def show(
    saved: str | None,
    *,
    alone: bool,
    rank: str | None,
    title: str,
    note: str,
    search: dict[str, Any],
    options: dict[str, Any],
) -> int:
    """Write the page of a job or of a saved plan, and say where it is; return the exit code."""
    from memcalc.handoff.review import review_of
    from memcalc.report.page import drawn, page_of, said_of

    name = options.pop("output") or DEFAULT
    path = output_path(name, bool(options.pop("force")))
    dirs = tuple(options["preset_dir"] or ())
    model: Model | None = None
    answer: Estimate | Plans | SavedPlan
    if saved is not None:
        answer = _loaded(saved, {"estimate": alone or None, **search}, options)
    elif options["gpu"] is None:
        raise InputError("gpu", "", "give --gpu, or a plan's file")
    else:
        words = with_model(options)
        model = None if isinstance(words["model"], str) else words["model"]
        answer = memcalc.estimate(**_alone(words, search), timeline=True) if alone else memcalc.plan(**words, **search)
    found = review_of(answer, rank=rank, model=model, preset_dirs=dirs)
    deliver(page_of(found, title=title, note=note), path)
    fits, said = said_of(found)
    without = "" if drawn.draws() else f" {drawn.UNDRAWN}"
    deliver(f"{said}\nWrote {name}, {path.stat().st_size / 1024:.0f} KiB.{without}\n", None)
    return int(not fits)


def _alone(words: dict[str, Any], search: dict[str, Any]) -> dict[str, Any]:
    """Return the words of one strategy; what ranks plans has no place beside them."""
    _refuse(search, "ranks plans, and --estimate searches none")
    return words


def _loaded(saved: str, others: dict[str, Any], options: dict[str, Any]) -> Plans | SavedPlan:
    """Return what a file holds; the words of a job have no place beside it."""
    _refuse(
        {**others, **{name: value for name, value in options.items() if name != "preset_dir"}}, f"{saved} tells the job"
    )
    from memcalc.handoff.saved import load_answer

    return load_answer(saved)


def _refuse(words: dict[str, Any], why: str) -> None:
    for name, value in words.items():
        if value is not None and value != [] and value != _UNSAID.get(name):
            raise CombinationError(name.replace("_", "-"), str(value), why)
