"""Saved plans: written with safer plans of the same job to go back to, and read back with every check."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from memcalc import api
from memcalc._version import __version__
from memcalc.calibrations import NONE
from memcalc.convert.document import parse_document, read_text
from memcalc.errors import FileError, InputError, MemcalcError, MissingError, UnknownNameError
from memcalc.files import asks, output_path, replacing
from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks import habits_of
from memcalc.frameworks.capabilities import capabilities_of
from memcalc.planner.answer import strategy_of
from memcalc.planner.choice import SMALLER
from memcalc.planner.job import CHOSEN, pinned, with_query
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plan, Plans, SavedPlan
from memcalc.specs.job import JobRecord, Value, command_line
from memcalc.specs.model import Model
from memcalc.specs.options import DEGREES
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB, parse_count

MOST = 5
"""Plans to go back to, one after another."""
LISTED = 48
"""Plans of the search among which they are looked for, the fastest first."""


def fallbacks(plan: Plan, options: Mapping[str, Value], dirs: tuple[str, ...] = ()) -> tuple[Plan, ...]:
    """Return safer plans, each at least a tenth smaller than the one before; the fastest first, then what offloads.

    They keep the GPUs, the parallel layout, precision, optimizer and global batch, so that going back is one command:
    a smaller micro-batch with more accumulation, recomputation of every second block and then of all, resharding after
    forward, and what the framework can offload, last because its time is not fitted on measured runs. ``options`` are
    those of the search that found the plan; what was given there stays as it was given.
    """
    stays = set(plan.strategy.offload)
    plans = _searched(plan, _open(plan, options, dirs), dirs)
    ladder = _ladder(plan, sorted(plans, key=lambda other: bool(set(other.strategy.offload) - stays)))
    return tuple(itertools.islice(ladder, MOST))


def steps(plan: Plan, options: Mapping[str, Value], dirs: tuple[str, ...] = ()) -> tuple[Plan, ...]:
    """Return the plans that a running job can go over to: what recomputation and a smaller micro-batch alone give.

    All of them, the fastest first, whichever are smaller; sharding and offload stay, since they are fixed when a job
    starts, and the global batch is the same. ``options`` are those of the search, as for :func:`fallbacks`.
    """
    strategy = plan.strategy
    fixed = {"zero": str(strategy.zero), "offload": ",".join(strategy.offload) or "none"}
    plans = _searched(plan, {**_open(plan, options, dirs), **fixed}, dirs)
    others = [other for other in plans if other.verdict == "fits" and other.strategy != strategy]
    return tuple(_ranked(plan, rank, other) for rank, other in enumerate(others, 1))


def _searched(plan: Plan, options: Mapping[str, Any], dirs: Iterable[str]) -> tuple[Plan, ...]:
    """Plans of a search, the fastest first."""
    keywords = pinned(plan.job).keywords()
    try:
        job = {**keywords, **_unchanged(plan), **options, "preset_dirs": dirs, "advice": False}
        return api.plan(**job, objective="throughput", rank_all=True, top=LISTED).plans
    except MemcalcError:  # the options leave no other plan
        return ()


def _unchanged(plan: Plan) -> dict[str, Any]:
    """The choices of a search that a restart cannot change."""
    strategy = plan.strategy
    layout = {name: getattr(strategy, name) for name in DEGREES}
    pipeline = {"pp_schedule": strategy.pp_schedule, "vpp": strategy.vpp} if strategy.pp > 1 else {}
    return {
        "seq_len": plan.job.options["seq_len"], "framework": strategy.framework, "gpus": plan.gpus,
        "global_batch": plan.global_batch, "precision": strategy.precision, "optimizer": strategy.optimizer,
        **layout, **pipeline, **({"sp": strategy.sp} if strategy.tp > 1 else {}),
        **({"offload_to": strategy.offload_to} if strategy.offload else {}),
    }  # fmt: skip


def _open(plan: Plan, options: Mapping[str, Value], dirs: tuple[str, ...]) -> dict[str, Any]:
    """What may change, with the values that are tried; an option that was given keeps its own."""
    strategy, model = plan.strategy, api.load_model(str(plan.job.model), dirs)
    habits = habits_of(strategy.framework)
    share = plan.accumulation_steps * strategy.micro_batch
    sizes = [size for size in range(1, strategy.micro_batch + 1) if share % size == 0]
    tried: dict[str, list[Any]] = {
        "micro_batch": sizes,
        "recompute": [strategy.recompute, *(["every-2"] if _keeps_more(strategy, model) else []), "full"],
        "zero": [2, 3] if habits.full_shard and strategy.zero == 2 else [strategy.zero],
        "offload": [",".join(strategy.offload) or "none", "none", *_offloads(strategy)],
    }
    texts = {name: "/".join(dict.fromkeys(map(str, values))) for name, values in tried.items()}
    return {name: options.get(name, text) for name, text in texts.items()}


def _keeps_more(strategy: Strategy, model: Model) -> bool:
    """Whether checkpoints of every second block, which the framework can be told, stand between a policy and full."""
    policy = parse_policy(strategy.recompute)
    more = policy.kind == "none" or (policy.kind == "every" and policy.count > 2)
    by_launcher = bool(strategy.autocast or strategy.lora)  # by Accelerate, not by FSDP 2's script
    return more and capabilities_of(strategy.framework, model, adapters=by_launcher).recompute.needs("every") == ""


def _offloads(strategy: Strategy) -> list[str]:
    """What the framework can be told to move of the states, at this sharding."""
    direct = capabilities_of(strategy.framework).offload.direct
    states = [value for value in direct if value in {"optimizer", "params", "optimizer,params"}]
    habits = habits_of(strategy.framework)
    unsharded = habits.zero_optimizer is not None and strategy.zero == 0  # DeepSpeed moves what it divides
    if habits.full_shard or unsharded:  # there states go with the parameters
        states = [value for value in states if "optimizer" not in value]
    return [value for value in states if "params" not in value or strategy.zero in {2, 3}]


def _ladder(plan: Plan, plans: Iterable[Plan]) -> Iterator[Plan]:
    """Yield of plans in their order those that are clearly smaller than all before."""
    last, rank = plan, 0
    for other in plans:
        if other.verdict == "fits" and is_smaller(other, last):
            rank += 1
            yield _ranked(plan, rank, other)
            last = other


def is_smaller(plan: Plan, than: Plan) -> bool:
    """Whether a plan needs clearly less than another."""
    return plan.peak.device <= SMALLER * than.peak.device


def _ranked(plan: Plan, rank: int, other: Plan) -> Plan:
    """A plan at its rank, with what is different from the plan that it stands in for."""
    return other.model_copy(update={"rank": rank, "why": _why(plan, other)})


def _why(plan: Plan, other: Plan) -> str:
    """What is different, and what it brings and costs."""
    changed = [
        f"{name.replace('_', '-')} {_shown(before)} → {_shown(after)}"
        for name in ("micro_batch", "recompute", "zero", "offload")
        if (before := getattr(plan.strategy, name)) != (after := getattr(other.strategy, name))
    ]
    less = (plan.peak.device - other.peak.device) / GIB
    slower = 1 - other.time.tokens_per_second_per_gpu / plan.time.tokens_per_second_per_gpu
    speed = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
    return f"{', '.join(changed)}: −{less:.1f} GiB per GPU, {speed}."


def _shown(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


Record = TypeVar("Record", bound=BaseModel)
PINNED = "your options leave no plan that is 10% smaller with the same layout and global batch"
SMALLEST = "no plan that fits is 10% smaller with the same layout and global batch"
_SCHEMA, _OLDER = "memcalc.saved-plan/2", "memcalc.saved-plan/1"


def save(
    plans: Plans, path: str, rank: int | str = 1, *, preset_dirs: Iterable[str] = (), force: bool = False
) -> SavedPlan:
    """Write the plan of a rank to a file, with what to go back to if it does not run.

    Parameters
    ----------
    plans
        What :func:`memcalc.plan` returned.
    path
        Where it is written, as JSON.
    rank
        Which of the plans, from 1.
    preset_dirs
        Folders with presets of your own, looked up first; those of the search when left out.
    force
        Whether a file that exists is replaced.

    Returns
    -------
    SavedPlan
        What the file holds.

    Raises
    ------
    memcalc.errors.InputError
        For a rank that is not listed, and for a file that exists, unless ``force`` is true.
    """
    target = output_path(path, force)
    saved = saved_plan(plans, rank, preset_dirs)
    with replacing(target) as stream:
        stream.write((json.dumps(saved.model_dump(mode="json", by_alias=True), indent=2) + "\n").encode())
    return saved


def saved_plan(plans: Plans, rank: int | str = 1, preset_dirs: Iterable[str] = ()) -> SavedPlan:
    """Return the plan of a rank as it is saved."""
    number = parse_count(rank, "rank")
    if not plans.plans:
        raise MissingError("Nothing fits, so there is no plan to save. memcalc plan lists the smallest changes.")
    plan = next((plan for plan in plans.plans if plan.rank == number), None)
    if plan is None:
        raise InputError("rank", rank, f"must be from 1 to {len(plans.plans)}, the plans that are listed")
    return _saved(plan, plans.job, preset_dirs)


def saved_alone(plan: Plan, preset_dirs: Iterable[str] = ()) -> SavedPlan:
    """Return one plan as it is saved, as if nothing but the job had been given where it was found."""
    names = {"gpus", "seq_len", "global_batch"} | (plan.job.options.keys() - CHOSEN)
    options = {name: value for name, value in plan.job.options.items() if name in names}
    return _saved(plan, with_query(plan.job.model_copy(update={"options": options}), "plan"), preset_dirs)


def _saved(plan: Plan, job: JobRecord, preset_dirs: Iterable[str]) -> SavedPlan:
    """Return a plan that a search found, with what to go back to."""
    dirs = dirs_of(job, preset_dirs)
    if job.module:
        raise InputError("plan", job.module["module"], "a module trains with its own code; nothing is exported to it")
    safer = fallbacks(plan, job.options, dirs)
    pinned = {"micro_batch", "recompute", "zero", "offload"} & job.options.keys()
    keywords = {**plan.job.keywords(), "preset_dirs": dirs}  # a file never holds a plan that its job does not come to
    _same(plan.strategy, strategy_of(api.single(**keywords).grid))
    return SavedPlan(
        version=__version__,
        job=job,
        asked=command_line(job),
        plan=plan,
        fallback=safer,
        no_fallback="" if safer else PINNED if pinned else SMALLEST,
        notes=tuple(_not_carried(plan.job, dirs)),
    )


def dirs_of(job: JobRecord, preset_dirs: Iterable[str]) -> tuple[str, ...]:
    """Return the folders with presets of the user's own: those given, or those of the job."""
    return tuple(preset_dirs) or job.preset_dirs


def _not_carried(job: JobRecord, dirs: tuple[str, ...]) -> list[str]:
    """What must be there where the plan is exported, since its file does not have it."""
    notes = []
    if dirs:
        notes.append("custom presets are not saved. Pass --preset-dir to export.")
    path = Path(job.model or "")
    if path.suffix in {".json", ".toml"} or asks(path.is_dir):
        notes.append("the model is saved as a path; it must exist where you export.")
    if job.options.get("calibration", NONE) != NONE:
        notes.append("the calibration is saved as a path; it must exist where you export.")
    return notes


def load(
    path: str, *, rank: int | str | None = None, preset_dirs: Iterable[str] = (), calibration: str | None = None
) -> SavedPlan:
    """Read a saved plan, or of a list of plans in JSON (``memcalc plan --format json``) the one of a rank.

    Parameters
    ----------
    path
        The file.
    rank
        Which of a list of plans, from 1; the first when left out.
    preset_dirs
        Folders with presets of your own, looked up first; those of the search when left out.
    calibration
        A file, or ``none``, in place of the one with which the plan was found.

    Returns
    -------
    SavedPlan
        The plan; one that another version of memcalc saved says so in its ``notes``.

    Raises
    ------
    memcalc.errors.InputError
        For whatever is neither of them.
    """
    answer = load_answer(path)
    if isinstance(answer, Plans):
        answer = saved_plan(answer, 1 if rank is None else rank, preset_dirs)
    elif rank is not None and parse_count(rank, "rank") != answer.plan.rank:
        raise InputError("rank", rank, f"{Path(path).name} holds plan {answer.plan.rank} only")
    if calibration is None:
        return answer
    job = answer.job.with_options(calibration=calibration)
    plan, *safer = (_calibrated(plan, calibration) for plan in (answer.plan, *answer.fallback))
    return answer.model_copy(update={"job": job, "asked": command_line(job), "plan": plan, "fallback": tuple(safer)})


def _calibrated(plan: Plan, calibration: str) -> Plan:
    job = plan.job.with_options(calibration=calibration)
    return plan.model_copy(update={"job": job, "command": command_line(job)})


def load_answer(path: str) -> Plans | SavedPlan:
    """Read a saved plan, or the plans that ``memcalc plan --format json`` wrote, as they are.

    Raises :class:`memcalc.errors.InputError` for whatever is not one of them.
    """
    text = read_text(Path(path))
    data = parse_document(Path(path), text, "json").data
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == "memcalc.plan/1":
        return record_from(Plans, path, text)
    if schema == _OLDER:
        again = f"its line under asked, given again with --save and --force, writes it as {_SCHEMA}"
        raise FileError("file", path, f"must not be of the older schema {_OLDER}, whose plans have no job: {again}")
    if schema != _SCHEMA:
        allowed = f"must be a saved plan with the schema {_SCHEMA}; create one with memcalc plan --save"
        raise FileError("file", path, allowed if schema is None else f"{allowed}, not {str(schema)[:40]!r}")
    saved = record_from(SavedPlan, path, text)
    if saved.version != __version__:
        note = f"saved by memcalc {saved.version}, read by {__version__}."
        return saved.model_copy(update={"notes": (*saved.notes, note)})
    return saved


def record_from(kind: type[Record], path: str, text: str) -> Record:
    """Return the record that the JSON of a file holds, checked."""
    try:
        json.loads(text, parse_constant=lambda name: _no_number(path, name))
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise _sentence(error, path, kind) from None


def _no_number(path: str, name: str) -> NoReturn:
    raise FileError("file", path, f"must have finite numbers, not {name}")


def _sentence(error: ValidationError, path: str, kind: type[BaseModel]) -> InputError:
    """Return the first thing that is wrong with a file as one sentence."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    key = f"{Path(path).name}: {'.'.join(location)}"
    if first["type"] == "extra_forbidden":
        names = sorted(_fields(kind, location[:-1]))
        return UnknownNameError(f"{Path(path).name} key", ".".join(location), "must be a key of the schema", names)
    if first["type"] == "missing":
        older = ": an older memcalc wrote none, so ask again with this one" if location[-1] == "job" else ""
        return InputError(key, None, f"must be given{older}")
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
    return InputError(key, first["input"], message)


def _fields(kind: Any, location: list[str]) -> list[str]:
    """Return the keys of the table that a location leads to."""
    for part in location:
        if part.isdigit():
            continue
        kind = kind.model_fields[part].annotation
        inner = [
            item for item in getattr(kind, "__args__", ()) if isinstance(item, type) and issubclass(item, BaseModel)
        ]
        kind = inner[0] if inner else kind
    return [field.alias or name for name, field in kind.model_fields.items()]


def chosen(saved: SavedPlan, fallback: int) -> Plan:
    """The plan, or the one to go back to of that number."""
    if fallback == 0:
        return saved.plan
    if not 0 < fallback <= len(saved.fallback):
        allowed = f"must be from 1 to {len(saved.fallback)}" if saved.fallback else saved.no_fallback
        raise InputError("fallback", fallback, allowed)
    return saved.fallback[fallback - 1]


def estimate_of(
    saved: SavedPlan, fallback: int = 0, preset_dirs: Iterable[str] = (), *, timeline: bool = False
) -> Estimate:
    """Estimate a saved plan again, or what it can go back to; ``timeline`` adds one step over time.

    Raises :class:`memcalc.errors.InputError` where its job no longer comes to the strategy that was saved.
    """
    plan = chosen(saved, fallback)
    return estimated_again(plan, dirs_of(plan.job, preset_dirs), timeline=timeline)


def estimated_again(
    plan: Plan | Estimate, dirs: tuple[str, ...], *, timeline: bool = False, advice: bool = True
) -> Estimate:
    """Estimate a plan by its own job, which must come to its strategy."""
    estimate = api.estimate(**{**plan.job.keywords(), "preset_dirs": dirs}, timeline=timeline, advice=advice)
    _same(plan.strategy, estimate.strategy)
    return estimate


def _same(saved: Strategy, resolved: Strategy) -> None:
    was, now = saved.model_dump(), resolved.model_dump()
    for name in was:
        if was[name] != now[name]:
            allowed = f"its job resolves to {now[name]!r} with memcalc {__version__}: give it, and plan again"
            raise InputError(f"strategy.{name} of the saved plan", was[name], allowed)
