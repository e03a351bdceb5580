"""An answer made ready to be put before other people: the estimate of one strategy, and what belongs beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import memcalc
from memcalc.errors import InputError, MissingError
from memcalc.evidence import evidence_for
from memcalc.handoff.saved import estimate_of
from memcalc.handoff.words import typed
from memcalc.results import Estimate, Plans, Review, SavedPlan
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.results.saved import Word
    from memcalc.specs.model import Model

__all__ = ["review_of"]

_RECORDING = ("module", "inputs", "loss_fn", "block_class")
"""Words that say what a model was recorded from; the model itself is told."""


def review_of(
    answer: Estimate | Plans | SavedPlan,
    *,
    rank: int | str | None = None,
    model: Model | None = None,
    preset_dirs: Iterable[str] = (),
) -> Review:
    """Return an answer with what belongs beside it on one page.

    Of plans the one of `rank` is estimated, the first when left out; where nothing fits, the strategy that is closest.
    `model` is the recorded one, where the plans are of one. Raises :class:`memcalc.errors.InputError` for a rank that
    is not listed.
    """
    if rank is not None and not isinstance(answer, Plans):
        raise InputError("rank", rank, "says which of several plans is shown, and this is one strategy")
    dirs = tuple(preset_dirs)
    if isinstance(answer, Plans):
        return _of_plans(answer, rank, model, dirs)
    if isinstance(answer, SavedPlan):
        return _of_saved(answer, dirs)
    command = answer.command.replace("memcalc estimate", "memcalc report --estimate", 1)
    given = _without(_said(answer.command), answer.assumptions)
    return _review("strategy", answer, given=given, searched={}, command=command)


def _review(
    subject: str,
    estimate: Estimate | None,
    *,
    given: dict[str, str],
    searched: dict[str, str],
    command: str,
    **more: Any,
) -> Review:
    """Return a review; warnings and defaults are the estimate's, and those of `more` that it does not have."""
    own = {} if estimate is None else estimate.assumptions
    warned = () if estimate is None else estimate.warnings
    assumed = _without(_without(more.pop("assumptions", {}), searched) | _without(own, given), searched)
    values = {
        "subject": subject,
        "estimate": estimate,
        "plans": None,
        "chosen": None,
        "evidence": None if estimate is None else evidence_for(estimate),
        "given": given,
        "searched": searched,
        "assumptions": assumed,
        "warnings": tuple(dict.fromkeys((*warned, *more.pop("warnings", ())))),
        "command": command,
    }
    return Review.model_validate({**values, **more})


def _of_plans(plans: Plans, rank: int | str | None, model: Model | None, dirs: tuple[str, ...]) -> Review:
    given = _said(plans.command)
    command = plans.command.replace("memcalc plan", "memcalc report", 1)
    shared: dict[str, Any] = {"plans": plans, "assumptions": plans.assumptions, "warnings": plans.warnings}
    if not plans.plans:
        if rank is not None:
            raise MissingError("nothing fits, so there is no plan to show: leave --rank out for what is closest.")
        estimate = _estimated(plans.closest, model, dirs) if plans.closest else None
        searched = _searched(plans.closest, given, plans.assumptions) if plans.closest else {}
        return _review("closest", estimate, given=given, searched=searched, command=command, **shared)
    place = 1 if rank is None else parse_count(rank, "rank")
    plan = next((one for one in plans.plans if one.rank == place), None)
    if plan is None:
        raise InputError("rank", place, f"must be from 1 to {len(plans.plans)}, the plans that are listed")
    estimate = _estimated(plan.command, model, dirs)
    command += "" if rank is None else f" --rank {place}"
    searched = _searched(plan.command, given, plans.assumptions)
    return _review("plan", estimate, given=given, searched=searched, command=command, chosen=plan, **shared)


def _of_saved(saved: SavedPlan, dirs: tuple[str, ...]) -> Review:
    given, plan = _said(saved.asked), saved.plan
    command = saved.asked.replace("memcalc plan", "memcalc report", 1)
    estimate = estimate_of(saved, preset_dirs=dirs, timeline=True)
    return _review(
        "saved",
        estimate,
        given=given,
        searched=_searched(plan.command, given, {}),
        command=command + (f" --rank {plan.rank}" if plan.rank > 1 else ""),
        chosen=plan,
        fallback=saved.fallback,
        no_fallback=saved.no_fallback,
        notes=saved.notes,
    )


def _estimated(command: str, model: Model | None, dirs: tuple[str, ...]) -> Estimate:
    """Return the estimate that a line asks for; `model` in the place of its words for one."""
    line = typed(command)
    words: dict[str, Word] = {name: value for name, value in line.words.items() if name not in _RECORDING}
    return memcalc.estimate(
        model=line.model if model is None else model,
        gpu=line.gpu,
        node=line.node,
        settings=line.settings,
        preset_dirs=dirs,
        timeline=True,
        **words,
    )


def _said(command: str) -> dict[str, str]:
    """Return the words of a line, as they were typed."""
    line = typed(command)
    head = {"model": line.model, "gpu": line.gpu, **({} if line.node is None else {"node": line.node})}
    named = {
        name: "yes" if value is True else "no" if value is False else str(value) for name, value in line.words.items()
    }
    if "module" in named:
        head.pop("model")
    return {**head, **named, **line.settings}


def _searched(command: str, given: dict[str, str], assumed: dict[str, str]) -> dict[str, str]:
    """Return what a search chose: the words of its line that were left open, by what was typed or by default."""
    words = _said(command)
    fixed = {name for name, value in assumed.items() if not value.startswith("searched")}
    return {name: value for name, value in words.items() if given.get(name) != value and name not in fixed}


def _without(values: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in others}
