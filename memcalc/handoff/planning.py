"""Plans for a format: the search over what its framework can be told, of which each plan is written to prove it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memcalc import api
from memcalc.convert.formats import FORMATS_OF, get_format
from memcalc.errors import CombinationError, InputError
from memcalc.handoff.exporting import known_format, written
from memcalc.planner.plans import pareto_ranks, replace_rank
from memcalc.planner.record import with_query
from memcalc.results.plans import Nearest, Plan, Plans
from memcalc.specs.job import command_line
from memcalc.units import parse_count

MORE = 2
"""Plans that are searched for each that is listed, since a format may not say them all."""


def plan_to(to: str, *, top: int | str | None = None, **keywords: Any) -> Plans:
    """Search as :func:`memcalc.plan`, and list those plans alone that a format says.

    Without ``framework`` it is the format's own, in the era whose files they are.

    Raises
    ------
    memcalc.errors.CombinationError
        Where the format is of another framework, and where it says none of the plans that fit.
    """
    name, count = known_format(to), parse_count(top or api.TOP, "top")
    framework = keywords.pop("framework", None) or _framework_of(name)
    if name not in FORMATS_OF.get(framework.partition("@")[0], ()):
        others = ", ".join(other for other, formats in FORMATS_OF.items() if name in formats)
        raise CombinationError("framework", framework, f"{get_format(name).title} is for --framework {others}")
    searched = api.plan(**keywords, framework=framework, top=MORE * count)
    dirs = tuple(keywords.get("preset_dirs") or ())
    plans, refusal = _able(searched, name, count, dirs)
    if searched.plans and not plans and refusal is not None:
        allowed = f"none of the {len(searched.plans)} plans that fit can be written so: {refusal}"
        raise CombinationError("to", name, allowed)
    query = {key: value for key, value in searched.job.query.items() if key != "top"}
    job = with_query(searched.job, "plan", **query, to=name, top=None if count == api.TOP else count)
    changed = {"plans": plans, "pareto": pareto_ranks(plans), "nearest": tuple(_said(searched, name, dirs))}
    return searched.model_copy(update={**changed, "job": job, "command": command_line(job)})


def _said(searched: Plans, name: str, dirs: tuple[str, ...]) -> Iterator[Nearest]:
    """Yield those changes that make the job fit, or nearly, whose plans the format says; asked for that format."""
    for answer in searched.nearest:
        if answer.job is None or answer.estimate is None:
            continue
        try:
            estimate = api.estimate(**{**answer.estimate.keywords(), "preset_dirs": dirs or answer.job.preset_dirs})
            written(estimate, name, None, dirs or answer.job.preset_dirs)
        except InputError:
            continue
        query = {key: value for key, value in answer.job.query.items() if key != "top"}
        job = with_query(answer.job, "plan", **query, to=name)
        yield answer.model_copy(update={"job": job, "command": command_line(job)})


def _framework_of(name: str) -> str:
    """The framework that a format is usually for, in the era whose files it writes."""
    places = {framework: formats.index(name) for framework, formats in _USUAL if name in formats}
    return get_format(name).era or min(places, key=lambda framework: places[framework])


_USUAL = sorted(FORMATS_OF.items(), key=lambda item: item[0] not in {"fsdp2", "hf", "fsdp1"})


def _able(searched: Plans, name: str, count: int, dirs: tuple[str, ...]) -> tuple[tuple[Plan, ...], str | None]:
    """The first plans that a format says, ranked anew, and why the first other one is not among them."""
    plans: list[Plan] = []
    refusal = None
    for plan in searched.plans:
        if len(plans) == count:
            break
        try:
            written(plan, name, None, dirs or plan.job.preset_dirs)
        except InputError as error:
            refusal = refusal or str(error)
        else:
            plans.append(replace_rank(plan, len(plans) + 1))
    return tuple(plans), refusal
