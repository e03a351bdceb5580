"""Plans of post-training: :func:`plan_rl` lists the jobs that fit, the best of each idea, the best first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc._version import __version__
from memcalc.api import load_model
from memcalc.errors import CombinationError, InputError
from memcalc.planner.answer import hardware_facts, model_facts
from memcalc.posttraining import answered, edits_of
from memcalc.posttraining.search import Found, Search
from memcalc.posttraining.words import RlJob, ask, completed, gpus_of, read_words
from memcalc.results.posttraining import Nearest, RlPlan, RlPlans, RlRemedy
from memcalc.serving.engines import number
from memcalc.specs.job import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.posttraining.search import Values

TOP = 6
"""Plans that are listed."""
REMEDIES, MORE_GPUS = 3, (2, 4, 8, 16)
"""Changes that are listed where nothing fits, and times as many GPUs."""
GROUNDS = {
    "memory, samples at once, rounds": "known from formulas, at the longest lengths",
    "update": "predicted by memcalc's time of a training step, all samples once, each of the longest length",
    "rollout": "a guess: weights and caches at full memory speed; no run supports it",
}  # fmt: skip


def plan_rl(
    *,
    model: str,
    gpu: str,
    gpus: int | str | None = None,
    node: str | None = None,
    preset_dirs: Iterable[str] = (),
    top: int | str | None = None,
    **options: Any,
) -> RlPlans:
    """Search how to lay out post-training on these GPUs; list the jobs that fit, the best of each idea.

    Parameters
    ----------
    model, gpu, gpus, node, preset_dirs
        As for :func:`memcalc.rl`.
    top
        How many plans are listed.
    **options
        As for :func:`memcalc.rl`; each pins what is searched otherwise. Where responses are generated ``prompts``, the
        prompts of a step, must be among them.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    count = gpus_of(gpus, options, searched=True)
    typed = {name: value for name, value in options.items() if value not in (None, "", [])}
    most = TOP if top is None else number(top, "top")
    search = Search(model, gpu, count, node, tuple(preset_dirs), typed)
    checked(search)
    ranked = sorted(search.found(), key=lambda result: result.order)
    if not ranked and search.error is not None and not search.missed.options:
        raise search.error
    ideas: dict[tuple[object, ...], Found] = {}
    for result in ranked:
        ideas.setdefault(result.idea, result)
    plans = tuple(_plan(search, rank, result) for rank, result in enumerate(list(ideas.values())[:most], 1))
    return _answer(search, plans, len(ranked), top)


def checked(search: Search) -> RlJob:
    """The job with nothing searched; a question that has no answer is refused before anything is computed."""
    ask(read_words(search.typed), searched=True)
    if str(search.typed.get("trainer") or "").startswith("megatron"):
        allowed = "layouts of Megatron-LM are not searched in post-training: memcalc rl takes one"
        raise CombinationError("trainer", search.typed["trainer"], allowed)
    batch = {} if {"micro_batch", "micro_tokens"} & set(search.typed) else {"micro_batch": 1}
    return completed(search.model, search.gpu, search.gpus, search.node, {**search.typed, **batch}, search.dirs, {})


def _plan(search: Search, rank: int, result: Found) -> RlPlan:
    """A plan with the figures of ``memcalc rl``."""
    job = result.job
    answer = answered(job, search.typed | result.changes, {}, search.figures, advice=False)
    rollout, served = answer.rollout, result.cast.served
    at_once = int(min(served.concurrency, served.max_seqs)) * rollout.engines if rollout and served else 0
    return RlPlan(
        rank=rank,
        choices={name: str(value) for name, value in result.choices.items()},
        changes={name: str(value) for name, value in result.changes.items()},
        trainer_gpus=job.trainer_gpus,
        engine_gpus=job.inputs.engine_gpus,
        verdict=answer.verdict,
        binding=answer.binding,
        headroom=answer.headroom,
        host=answer.host,
        engines=rollout.engines if rollout else 0,
        at_once=at_once,
        rounds=rollout.rounds if rollout else None,
        rollout_guess=result.rollout if rollout else None,
        update=result.update,
        job=answer.job,
        command=answer.command,
    )


def _answer(search: Search, plans: tuple[RlPlan, ...], fitting: int, top: int | str | None) -> RlPlans:
    """The answer, with the nearest job where none fits."""
    question = {"model": search.model, "gpu": search.gpu, "gpus": search.gpus, "node": search.node}
    job = checked(search)
    return RlPlans(
        version=__version__,
        model=model_facts(load_model(search.model, search.dirs)),
        hardware=hardware_facts(search.chip, search.host, search.gpus),
        algorithm=job.inputs.algorithm,
        framework=job.toolkit.name,
        capacity=search.capacity,
        samples=search.samples,
        searched=search.searched,
        fitting=fitting,
        plans=plans,
        nearest=None if plans else nearest_of(search),
        grounds={name: text for name, text in GROUNDS.items() if job.recipe.online or name != "rollout"},
        warnings=tuple(_warnings(plans)),
        assumptions={"reference": "yes" if job.reference else "none"},
        command=render("plan", options={**question, **search.typed, "top": top}, dirs=search.dirs),
    )


def _warnings(plans: tuple[RlPlan, ...]) -> Iterator[str]:
    unsure = [plan.update for plan in plans if plan.update is not None and not plan.update.validated]
    if unsure:
        low, high = (getattr(unsure[0], end) / unsure[0].seconds for end in ("low", "high"))
        yield f"times of updates are {unsure[0].basis}; one may take {low:.1f} to {high:.1f} times as long."
    if any(plan.rollout_guess for plan in plans):
        yield "rollout and update are taken one after the other: a trainer that runs beside its engines waits for less."


def nearest_of(search: Search) -> Nearest:
    """The job that lacks least, with changes that make it fit: of the job, else of the question itself."""
    options = search.missed.options
    job = search.job(options)
    answer = answered(job, options, {}, search.figures, advice=False)
    remedies: list[RlRemedy] = []
    for change, update in edits_of(job):
        if len(remedies) < REMEDIES and (remedy := _remedy(search, change, options | update)) is not None:
            remedies.append(remedy)
    for change, other in _further(search):
        if len(remedies) < REMEDIES and (first := next(other.found(), None)) is not None:
            remedies += filter(None, [_remedy(other, change, other.typed | first.changes)])
            if other.gpus != search.gpus:
                break
    return Nearest(
        reason=answer.reason or search.missed.reason, job=answer.job, command=answer.command, remedies=tuple(remedies)
    )


def _further(search: Search) -> Iterator[tuple[str, Search]]:
    """Changes of the question, of which everything is searched anew."""

    def anew(gpus: int, **update: Any) -> Search:
        typed = search.typed | update
        return Search(search.model, search.gpu, gpus, search.node, search.dirs, typed, search.figures)

    job = checked(search)
    if not job.lora:
        yield "--lora 16", anew(search.gpus, lora=16)
    if job.inputs.response > 1:
        half = job.inputs.response // 2
        yield f"--response {half}", anew(search.gpus, response=half)
    yield from ((f"--gpus {times * search.gpus}", anew(times * search.gpus)) for times in MORE_GPUS)


def _remedy(search: Search, change: str, options: Values) -> RlRemedy | None:
    """The change, if the job fits with it."""
    try:
        answer = answered(search.job(options), options, {}, search.figures, advice=False)
    except InputError:  # the framework cannot be told so
        return None
    lacks_host = answer.host_capacity is not None and answer.host > answer.host_capacity
    if answer.verdict == "does-not-fit" or lacks_host:
        return None
    device = answer.capacity - answer.headroom
    return RlRemedy(change=change, verdict=answer.verdict, device=device, job=answer.job, command=answer.command)
