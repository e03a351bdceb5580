"""A plan handed on: saved with what to go back to, and written as a framework's config, or refused with what can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from memcalc import api, catalog
from memcalc.convert.formats import get_format
from memcalc.errors import CombinationError, InputError, MemcalcError
from memcalc.files import output_path, replacing, write_folder
from memcalc.frameworks.capabilities import FORMATS_OF, formats_of
from memcalc.handoff.saved import chosen, dirs_of, load, save, saved_plan
from memcalc.handoff.written import PASSED, Exported, anchored, first_written, known_format, write_plan
from memcalc.planner.direct import OWN_CODE
from memcalc.planner.job import value_text, with_query
from memcalc.planner.plans import pareto_ranks, replace_rank
from memcalc.planner.request import NOT, OR
from memcalc.results.plans import Nearest, Plan, Plans, SavedPlan
from memcalc.specs.job import JobRecord, command_line
from memcalc.specs.options import BY_NAME, SEARCHED
from memcalc.units import GIB, parse_count, signed

__all__ = ["export", "load", "save"]


def export(
    plan: SavedPlan | Plans,
    *,
    to: str | None = None,
    rank: int | str = 1,
    fallback: int = 0,
    preset_dirs: Iterable[str] = (),
) -> dict[str, str]:
    """Return the files, by name, that run a plan under a framework: the plan of a rank, or what it can go back to.

    Parameters
    ----------
    plan
        A saved plan, or what :func:`memcalc.plan` returned.
    to
        The format, a name of ``memcalc export --help``; that of the plan's own framework when left out.
    rank
        Which of several plans, from 1.
    fallback
        Which of a saved plan's fallbacks, from 1; 0 for the plan itself.
    preset_dirs
        Folders with presets of your own, looked up first; those of the search when left out.

    Returns
    -------
    dict
        The text of each file by its name.

    Raises
    ------
    memcalc.errors.CombinationError
        Naming what the format cannot say, and the nearest plan that it can.
    """
    dirs = tuple(preset_dirs)
    saved = saved_plan(plan, rank, dirs) if isinstance(plan, Plans) else plan
    return {str(path): text for path, text in exported(saved, to, fallback=fallback, preset_dirs=dirs).files.items()}


def exported(
    saved: SavedPlan,
    to: str | None = None,
    *,
    fallback: int = 0,
    path: Path | None = None,
    preset_dirs: Iterable[str] = (),
) -> Exported:
    """Write a saved plan in a format, read it back, and find the lines that launch and check it.

    ``path`` is a file, or a folder, in which files have their usual names. Without a format those of the plan's
    framework are tried, the usual one first.
    """
    plan = chosen(saved, fallback)
    if path is not None:
        plan = anchored(plan)
    dirs = dirs_of(plan.job, preset_dirs)
    names = _formats(plan, to, dirs)
    try:
        result = first_written(plan, names, path, dirs)
    except CombinationError as error:
        allowed = error.allowed + _way_out(saved, fallback, names[0], dirs, error.field)
        raise CombinationError(error.field, error.value, allowed) from None
    return replace(result, notes=(*saved.notes, *result.notes))


def started(plans: Plans, plan: Plan, to: str | None, preset_dirs: Iterable[str] = ()) -> Exported:
    """Write one of the plans of a search, to be started from its folder, or refuse it with what can be written."""
    dirs = dirs_of(plan.job, preset_dirs)
    names = _formats(plan, to, dirs)
    try:
        return first_written(anchored(plan), names, None, dirs)
    except CombinationError as error:
        allowed = error.allowed + way_out(plans.job, names[0], error.field)
        raise CombinationError(error.field, error.value, allowed) from None


def _formats(plan: Plan, to: str | None, dirs: tuple[str, ...]) -> tuple[str, ...]:
    """The format that was named, or those that run a plan of its framework and model."""
    if to is not None:
        return (known_format(to),)
    strategy = plan.strategy
    return formats_of(strategy.framework, api.load_model(str(plan.job.model), dirs), adapters=bool(strategy.lora))


def _way_out(saved: SavedPlan, fallback: int, to: str, dirs: tuple[str, ...], field: str) -> str:
    """The end of a refusal: a plan to go back to that the format can say, or the line that searches one."""
    for number, plan in enumerate(saved.fallback, 1):
        if number != fallback and _takes(plan, to, dirs):
            return f"; its fallback {number} can be written: --fallback {number}"
    return way_out(saved.job, to, field)


def _takes(plan: Plan, to: str, dirs: tuple[str, ...]) -> bool:
    try:
        write_plan(plan, to, None, dirs)
    except CombinationError:
        return False
    return True


def refused_export(plan: Plan, preset_dirs: Iterable[str] = ()) -> str:
    """Why ``memcalc export`` does not write a plan where no format is named; empty if it does."""
    try:
        dirs = dirs_of(plan.job, preset_dirs)
        first_written(anchored(plan), _formats(plan, None, dirs), None, dirs)
    except InputError as error:
        return error.allowed or str(error)
    except MemcalcError as error:
        return str(error)
    return ""


def write_files(result: Exported, *, force: bool) -> None:
    """Write what was exported: files that are complete or not there, replaced with ``force`` alone."""
    targets = {output_path(str(path), force): text for path, text in result.files.items()}
    for path, text in targets.items():
        with replacing(path) as stream:
            stream.write(text.encode())


def write_job(result: Exported, folder: Path, *, force: bool) -> None:
    """Write what was exported into a folder, with a script that starts it from there and says how to check it."""
    texts = {path.name: text for path, text in result.files.items()}
    head = "#!/bin/bash", "# Written by memcalc; check it before every start with:", f"# {result.check}"
    line = result.launch + (' "$@"' if result.format in PASSED else "")
    texts["launch.sh"] = "\n".join([*head, 'cd "$(dirname "$0")" || exit 1', line, ""])
    write_folder(folder, texts, force=force)


# --------------------------------------------------------------------------------------------------- plans for a format


MORE = 2
"""Plans that are searched for each that is listed, since a format may not say them all."""
NARROWED = 6
"""How often a search is repeated without a value for which the format refuses its first plan."""
UPDATES = ("optimizer", "precision")
"""Options by which the weights come out otherwise."""
OTHERS = ("trainer", "fsdp2", "deepspeed")
"""Formats that say most jobs, in the order in which they are tried for one that a format cannot say."""


def plan_to(to: str, *, top: int | str | None = None, **keywords: Any) -> Plans:
    """Search as :func:`memcalc.plan`, and list those plans alone that a format says.

    Without ``framework`` it is the format's own, in the era whose files they are.

    Raises
    ------
    memcalc.errors.CombinationError
        Where the format is of another framework, and where it says none of the plans that fit.
    """
    several = str(keywords.get("gpus")).isdigit() and str(keywords.get("gpus")) != "1"
    if several and keywords.get("lora") and keywords.get("framework") is None and to in FORMATS_OF["ddp"]:
        with suppress(MemcalcError):  # copies of what is frozen, ahead of shards that are gathered for each micro-batch
            copied, _, unsaid = _searched(to, top, {**keywords, "framework": "ddp"})
            if copied.plans and unsaid is None and copied.plans[0].verdict == "fits":
                return copied
    plans, fitting, refusal = _searched(to, top, keywords)
    if refusal is None:
        return plans
    if get_format(to).launched and keywords.get("tp") is None:  # which FSDP 2's script alone has, ahead of all else
        with suppress(MemcalcError):
            undivided, _, unsaid = _searched(to, top, {**keywords, "tp": 1})
            if undivided.plans and unsaid is None:
                return undivided
    allowed = f"none of the {fitting} plans that fit can be written so: {str(refusal).rstrip('.')}"
    raise CombinationError("to", to, f"{allowed}{way_out(_typed(plans.job, keywords), to, refusal.field)}")


def _typed(job: JobRecord, keywords: Mapping[str, Any]) -> JobRecord:
    """A job without what a format settled of it, which another one may not have."""
    given = {name for name, value in keywords.items() if value is not None} | {"framework"}
    options = {name: value for name, value in job.options.items() if name in given}
    stated = keywords.get("settings") or {}
    return job.model_copy(
        update={"options": options, "settings": {name: value for name, value in job.settings.items() if name in stated}}
    )


def way_out(job: JobRecord, to: str, field: str) -> str:
    """The end of a refusal: the line that plans what a format says, which has been tried; empty where none does.

    First the format itself, with the ``field`` that it cannot say left open, or under DeepSpeed, then others; what
    training computes is given up last.
    """
    options = {name: value for name, value in job.options.items() if name != "framework"}
    elsewhere = job.model_copy(update={"options": options})
    engine = job.model_copy(update={"options": {**options, "framework": "deepspeed"}})
    ways = [(form, job if form in _formats_of(job) else elsewhere) for form in (to, *OTHERS) if form != to]
    ways = [(to, engine)] * (to in FORMATS_OF["deepspeed"] and to not in OTHERS) + ways
    opened = _left_open(job if to in _formats_of(job) else elsewhere, field)
    dropped = next((name for name in elsewhere.options if name not in opened.options), "").replace("_", "-")
    ways = [*ways, (to, opened)] if dropped in UPDATES else [(to, opened), *ways]
    for form, candidate in ways:
        if form == job.query.get("to", "") and candidate == job:
            continue
        try:
            keywords = {name: value for name, value in candidate.keywords().items() if name not in ("to", "top")}
            plans, _, refusal = _searched(form, 1, keywords)
        except MemcalcError:
            continue
        if plans.plans and refusal is None:
            lead = f"for {get_format(form).title}" if form != to else "plan what it can say"
            lead += f", without --{dropped}" if candidate is opened and dropped in UPDATES else ""
            query = {**plans.job.query, "top": job.query.get("top")}
            return f"; {lead}: {command_line(with_query(plans.job, 'plan', **query))}"
    return ""


def _formats_of(job: JobRecord) -> tuple[str, ...]:
    return FORMATS_OF.get(str(job.options.get("framework", "")).partition("@")[0], ())


def _left_open(job: JobRecord, field: str) -> JobRecord:
    """The job without what it says of a field that a search decides, or that has no option of its own."""
    row = BY_NAME.get(field.removeprefix("strategy.").replace("-", "_"))
    if row is None or (row.panel and not row.searched):
        return job
    options, settings = ({n: v for n, v in part.items() if n != row.word} for part in (job.options, job.settings))
    return job.model_copy(update={"options": options, "settings": settings})


def _searched(to: str, top: Any, keywords: dict[str, Any]) -> tuple[Plans, int, InputError | None]:
    """The plans that a format says, how many fit, and where it says none of these why not the first."""
    name, count = known_format(to), parse_count(top or api.TOP, "top")
    framework = keywords.get("framework") or _framework_of(name, keywords)
    settled = {**get_format(name).narrows, **_settled(name, framework, keywords)}
    settings = {**(settled.pop("settings", None) or {}), **(keywords.get("settings") or {})}
    options = {**settled, **_given({**keywords, "framework": None, "settings": settings or None})}
    if name not in FORMATS_OF.get(framework.partition("@")[0], ()):
        others = ", ".join(other for other, formats in FORMATS_OF.items() if name in formats)
        raise CombinationError("framework", framework, f"{get_format(name).title} is for --framework {others}")
    dirs = tuple(keywords.get("preset_dirs") or ())
    searched = first = api.plan(**options, framework=framework, top=MORE * count)
    plans, refusal = _able(searched, name, count, dirs)
    for _ in range(NARROWED):
        is_first = bool(plans) and plans[0].command == searched.plans[0].command
        narrower = _narrower(options, keywords, refusal) if refusal and not is_first else {}
        if not narrower:
            break
        options |= narrower
        other = api.plan(**options, framework=framework, top=MORE * count)
        able, refused = _able(other, name, count, dirs)
        if not other.plans:
            break
        searched, plans, refusal = other, able, refused
    query = {key: value for key, value in first.job.query.items() if key != "top"}
    job = with_query(first.job, "plan", **query, to=name, top=None if count == api.TOP else count)
    changed = {"plans": plans, "pareto": pareto_ranks(plans), "nearest": tuple(_said(searched, name, dirs))}
    changed["warnings"] = tuple(text for text in searched.warnings if not plans or OWN_CODE not in text)
    answer = searched.model_copy(update={**changed, "job": job, "command": command_line(job)})
    return answer, len(searched.plans), None if plans else refusal


def _narrower(options: Mapping[str, Any], keywords: Mapping[str, Any], refusal: InputError) -> dict[str, str]:
    """The option without the value for which the first plan is refused, where the search alone chose that."""
    name = refusal.field.replace("-", "_")
    known = str(options.get(name, NOT))
    if name not in SEARCHED or keywords.get(name) is not None or not known.startswith(NOT):
        return {}
    without = [part for part in known.removeprefix(NOT).split(OR) if part]
    value = value_text(refusal.value)
    return {} if value in without else {name: f"{NOT}{OR.join([*without, value])}"}


def _given(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


def _said(searched: Plans, name: str, dirs: tuple[str, ...]) -> Iterator[Nearest]:
    """Yield those changes that make the job fit, or nearly, whose plans the format says; asked for that format."""
    for answer in searched.nearest:
        if answer.job is None or answer.estimate is None:
            continue
        try:
            estimate = api.estimate(**{**answer.estimate.keywords(), "preset_dirs": dirs or answer.job.preset_dirs})
            write_plan(estimate, name, None, dirs or answer.job.preset_dirs)
        except InputError:
            continue
        query = {key: value for key, value in answer.job.query.items() if key != "top"}
        job = with_query(answer.job, "plan", **query, to=name)
        yield answer.model_copy(update={"job": job, "command": command_line(job)})


def _settled(name: str, framework: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """What a format's framework settles of a job where nothing is said of it, so that plans are of what then runs."""
    form = get_format(name)
    launched = framework.partition("@")[0] == "fsdp2" and form.launched
    half = launched and not _has_bf16(keywords)
    if keywords.get("lora"):
        scaled = {"autocast": True} if half else {}  # the switch that scales the loss is the one of autocast
        over = {**form.over_adapters, **scaled}
        narrow = {"strategy.reduce_dtype": "bf16"} if launched and over.get("autocast") else {}
        return {**over, "settings": {**form.settles, **over.get("settings", {}), **narrow}}
    stated = {"precision", "autocast"} & _given(keywords).keys()
    if not launched or stated:
        narrow_weights = {} if stated or form.casts_shards else _narrow_weights(framework.partition("@")[0], keywords)
        return {**narrow_weights, "settings": dict(form.settles)}
    # Accelerate 1.15, accelerator.py (prepare_model) and utils/dataclasses.py (set_mixed_precision of its plugin)
    precision = "fp16-mixed" if half else "bf16-mixed" if form.casts_shards else "bf16"
    return {"precision": precision, "autocast": True, "settings": {**form.settles, "strategy.reduce_dtype": "bf16"}}


def _narrow_weights(framework: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """The precision of weights that are loaded in the dtype of the arithmetic, as axolotl does (resolve_dtype)."""
    dtype = "bf16" if _has_bf16(keywords) else "fp16"
    if framework == "deepspeed":
        return {"precision": f"{dtype}-mixed"}
    unsharded = framework == "ddp" or str(keywords.get("gpus")) == "1"
    return {"precision": "bf16", "autocast": True} if unsharded and dtype == "bf16" else {}


def _has_bf16(keywords: dict[str, Any]) -> bool:
    gpu = catalog.gpu(str(keywords["gpu"]), tuple(keywords.get("preset_dirs") or ()))
    return gpu.supports("bf16")


def _framework_of(name: str, keywords: dict[str, Any]) -> str:
    """The framework that a format is usually for, in the era whose files it writes.

    Where the launchers of Transformers train on several GPUs it is FSDP 2, the Trainer's default since Transformers 5,
    which deprecates version 1 (training_args.py, _process_fsdp_args). Where that casts no shards (axolotl), DeepSpeed
    trains all weights in fp16: torch's GradScaler refuses gradients in it (amp/grad_scaler.py, _unscale_grads_).
    """
    form = get_format(name)
    halved = not form.casts_shards and not keywords.get("lora") and keywords.get("precision") != "fp32"
    if halved and not _has_bf16(keywords):
        return "deepspeed"
    if name in FORMATS_OF["fsdp2"][1:]:
        return "hf" if str(keywords.get("gpus") or "") == "1" else "fsdp2"
    places = {framework: formats.index(name) for framework, formats in _USUAL if name in formats}
    return form.era or min(places, key=lambda framework: places[framework])


_USUAL = sorted(FORMATS_OF.items(), key=lambda item: item[0] not in {"fsdp2", "hf", "fsdp1"})


def _able(searched: Plans, name: str, count: int, dirs: tuple[str, ...]) -> tuple[tuple[Plan, ...], InputError | None]:
    """The first plans that a format says, ranked anew, and why the first other one is not among them."""
    plans: list[Plan] = []
    refusal: InputError | None = None
    for plan in searched.plans:
        if len(plans) == count:
            break
        try:
            write_plan(plan, name, None, dirs or plan.job.preset_dirs)
        except InputError as error:
            refusal = refusal or error
        else:
            plans.append(replace_rank(plan, len(plans) + 1).model_copy(update={"own_code": ()}))
    return tuple(_led(plans, get_format(name).title)), refusal


def _led(plans: list[Plan], title: str) -> Iterator[Plan]:
    """The plans of a format, told apart from the first of them where that of the whole search is none of these."""
    for plan in plans:
        if not plans or "vs #1" not in plans[0].why:
            yield plan
            continue
        first, (role, _, rest) = plans[0], plan.why.partition(". ")
        less = (plan.peak.device - first.peak.device) / GIB
        speed = plan.time.tokens_per_second_per_gpu / first.time.tokens_per_second_per_gpu - 1
        role = f"{signed(less, 1)} GiB, {signed(100 * speed, 1)}% speed vs #1"
        if plan is first:
            role = f"First plan that {title} can say"
        special = tuple(word for word in plan.special if word != "best")
        yield plan.model_copy(
            update={"why": f"{role}. {rest}", "special": ("best", *special) if plan is first else special}
        )
