"""An answer made ready to be put before other people: the estimate of one strategy, and what belongs beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc import api
from memcalc.convert.document import parse_document, read_text
from memcalc.errors import InputError, MissingError
from memcalc.evidence import evidence_for
from memcalc.handoff.saved import dirs_of, estimate_of, record_from
from memcalc.posttraining import rl_again
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plans, Review, SavedPlan
from memcalc.results.posttraining import Rl, RlPlans
from memcalc.specs.job import JobRecord, command_line
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.specs.model import Model


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
    command = command_line(answer.job, "report", "--estimate")
    given = _without(_texts(answer.job), answer.assumptions)
    return _review("strategy", answer, given=given, searched={}, command=command)


def load_roles(path: str) -> Rl | RlPlans | None:
    """Read an answer about post-training that ``--format json`` wrote; None where the file is of something else."""
    text = read_text(Path(path))
    data = parse_document(Path(path), text, "json").data
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == "memcalc.rl/1":
        return record_from(Rl, path, text)
    return record_from(RlPlans, path, text) if schema == "memcalc.rl-plans/1" else None


def roles_of(answer: Rl | RlPlans, rank: int | str | None = None) -> tuple[Rl, RlPlans | None]:
    """Return the job of post-training that a page is about, and the plans that it is one of.

    Of plans that of `rank`, the first when left out; where nothing fits, the job that lacks least. Raises
    :class:`memcalc.errors.InputError` for a rank that is not listed.
    """
    if isinstance(answer, Rl):
        if rank is not None:
            raise InputError("rank", rank, "says which of several plans is shown, and this is one job")
        return answer, None
    if not answer.plans and answer.nearest is not None:
        if rank is not None:
            raise MissingError("Nothing fits, so there is no plan to show. Drop --rank for the closest job.")
        return rl_again(answer.nearest.job), answer
    number = 1 if rank is None else parse_count(rank, "rank")
    plan = next((plan for plan in answer.plans if plan.rank == number), None)
    if plan is None:
        raise InputError("rank", number, f"must be from 1 to {len(answer.plans)}, the plans that are listed")
    return rl_again(plan.job), answer


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
    defaults = {} if estimate is None else estimate.assumptions
    warned = () if estimate is None else estimate.warnings
    assumed = _without(_without(more.pop("assumptions", {}), searched) | _without(defaults, given), searched)
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
    given, command = _texts(plans.job), _page(plans.job, rank)
    shared: dict[str, Any] = {"plans": plans, "assumptions": plans.assumptions, "warnings": plans.warnings}
    if not plans.plans:
        if rank is not None:
            raise MissingError("Nothing fits, so there is no plan to show. Drop --rank for the closest strategy.")
        closest = plans.closest_job
        estimate = _estimated(closest, model, dirs) if closest else None
        searched = _searched(closest, given, plans.assumptions) if closest else {}
        return _review("closest", estimate, given=given, searched=searched, command=command, **shared)
    number = 1 if rank is None else parse_count(rank, "rank")
    plan = next((plan for plan in plans.plans if plan.rank == number), None)
    if plan is None:
        raise InputError("rank", number, f"must be from 1 to {len(plans.plans)}, the plans that are listed")
    estimate = _estimated(plan.job, model, dirs)
    searched = _searched(plan.job, given, plans.assumptions)
    return _review("plan", estimate, given=given, searched=searched, command=command, chosen=plan, **shared)


def _of_saved(saved: SavedPlan, dirs: tuple[str, ...]) -> Review:
    given, plan = _texts(saved.job), saved.plan
    estimate = estimate_of(saved, preset_dirs=dirs, timeline=True)
    return _review(
        "saved",
        estimate,
        given=given,
        searched=_searched(plan.job, given, {}),
        command=_page(saved.job, plan.rank if plan.rank > 1 else None),
        chosen=plan,
        fallback=saved.fallback,
        no_fallback=saved.no_fallback,
        notes=saved.notes,
    )


def _page(job: JobRecord, rank: int | str | None) -> str:
    """The ``memcalc report`` line of a search."""
    query = {name: value for name, value in job.query.items() if name != "recipe"}
    if rank is not None:
        query["rank"] = parse_count(rank, "rank")
    return command_line(job.model_copy(update={"query": query}), "report")


def _estimated(job: JobRecord, model: Model | None, dirs: tuple[str, ...]) -> Estimate:
    """Return the estimate of a job; `model` is what its module was recorded as."""
    return api.estimate(**{**job.keywords(model), "preset_dirs": dirs_of(job, dirs)}, timeline=True)


def _texts(job: JobRecord) -> dict[str, str]:
    """Return what was given for a job, by option, as text."""
    places = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.module, **job.options, **job.query}
    texts = {name: _text(value) for name, value in places.items() if value is not None}
    return {**texts, **{name: str(value) for name, value in job.settings.items()}}


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _searched(job: JobRecord, given: dict[str, str], assumed: dict[str, str]) -> dict[str, str]:
    """Return what a search chose: the options of a plan that were left open, by the user or by default."""
    fixed = {name for name, value in assumed.items() if not value.startswith("searched")}
    return {name: value for name, value in _texts(job).items() if given.get(name) != value and name not in fixed}


def _without(values: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in others}
