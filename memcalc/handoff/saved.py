"""Saved plans: written whole with what to go back to, and read back with every check."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

import memcalc
from memcalc.api import CHOSEN
from memcalc.calibrations import NONE
from memcalc.convert.document import parsed
from memcalc.convert.reading import read_text
from memcalc.errors import FileError, InputError, MissingError, UnknownNameError
from memcalc.files import output_path, replacing
from memcalc.handoff.fallback import fallbacks
from memcalc.handoff.words import command_line, flags_of, typed
from memcalc.planner.plans import chosen_words
from memcalc.results import Estimate, Plan, Plans, SavedJob, SavedPlan
from memcalc.results.saved import Word
from memcalc.units import parse_count

__all__ = ["estimate_of", "load", "record_of", "save", "saved_alone", "saved_plan", "words_of"]

Record = TypeVar("Record", bound=BaseModel)
PINNED = "what was typed leaves no plan with the same layout and global batch that is smaller by a tenth and fits"
SMALLEST = "no plan with the same layout and global batch is smaller by a tenth and fits"


def save(
    plans: Plans,
    path: str,
    rank: int | str = 1,
    *,
    preset_dirs: Iterable[str] = (),
    force: bool = False,
) -> SavedPlan:
    """Write the plan of a rank to a file, with what to go back to if it does not run; the file is whole or not there.

    Parameters
    ----------
    plans
        What :func:`memcalc.plan` returned.
    path
        Where it is written, as JSON.
    rank
        Which of the plans, from 1.
    preset_dirs
        Folders with presets of your own, looked up first.
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
    found = saved_plan(plans, rank, preset_dirs)
    with replacing(target) as stream:
        stream.write((json.dumps(found.model_dump(mode="json", by_alias=True), indent=2) + "\n").encode())
    return found


def saved_plan(plans: Plans, rank: int | str = 1, preset_dirs: Iterable[str] = ()) -> SavedPlan:
    """Return the plan of a rank as it is saved."""
    place, dirs = parse_count(rank, "rank"), tuple(preset_dirs)
    if not plans.plans:
        raise MissingError("nothing fits, so there is no plan to save: memcalc plan lists the smallest changes.")
    plan = next((one for one in plans.plans if one.rank == place), None)
    if plan is None:
        raise InputError("rank", rank, f"must be from 1 to {len(plans.plans)}, the plans that are listed")
    return _saved(plan, plans.seq_len, plans.command, dirs)


def saved_alone(plan: Plan, preset_dirs: Iterable[str] = ()) -> SavedPlan:
    """Return one plan as it is saved, as if nothing but the job had been typed where it was found."""
    line = typed(plan.command)
    own = {"gpus", "seq_len", "global_batch"} | (set(line.words) - set(CHOSEN))
    node = [] if line.node is None else ["--node", line.node]
    flags = flags_of({name: value for name, value in line.words.items() if name in own}, line.settings)
    asked = command_line("plan", "--model", line.model, "--gpu", line.gpu, *node, *flags)
    return _saved(plan, parse_count(line.words["seq_len"], "seq_len"), asked, tuple(preset_dirs))


def _saved(plan: Plan, seq_len: int, command: str, dirs: tuple[str, ...]) -> SavedPlan:
    """Return a plan that a command found, with what to go back to."""
    line, asked = typed(plan.command), typed(command)
    words = {name: value for name, value in line.words.items() if name not in CHOSEN}
    job = SavedJob(model=line.model, gpu=line.gpu, node=line.node, seq_len=seq_len, words=words, settings=line.settings)
    safer = fallbacks(job, plan, asked.words, dirs)
    pinned = {"micro_batch", "recompute", "zero", "offload"} & set(asked.words)
    found = SavedPlan(
        version=memcalc.__version__,
        asked=command,
        job=job,
        plan=plan,
        fallback=safer,
        no_fallback="" if safer else PINNED if pinned else SMALLEST,
        notes=tuple(_not_carried(line.model, dirs, words.get("calibration"))),
    )
    estimate_of(found, preset_dirs=dirs)  # a file never holds a plan that its own words do not come to
    return found


def _not_carried(model: str, dirs: tuple[str, ...], calibration: Word | None) -> list[str]:
    """What must be there where the plan is exported, since its file does not have it."""
    said = []
    if dirs:
        said.append("presets of your own are not in this file: give --preset-dir where it is exported.")
    if Path(model).suffix in {".json", ".toml"} or Path(model).is_dir():
        said.append("the model is a path, which must lead to the same model where this file is exported.")
    if calibration not in {None, NONE}:
        said.append("the calibration is a file, which must be there too where this file is exported.")
    return said


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
        Folders with presets of your own, looked up first.
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
    found = _read(path, rank, tuple(preset_dirs))
    if calibration is None:
        return found
    words = {**found.job.words, "calibration": calibration}
    return found.model_copy(update={"job": found.job.model_copy(update={"words": words})})


def _read(path: str, rank: int | str | None, preset_dirs: tuple[str, ...]) -> SavedPlan:
    text = read_text(Path(path))
    data = parsed(Path(path), text, "json").data
    if isinstance(data, dict) and data.get("schema") == "memcalc.plan/1":
        return saved_plan(record_of(Plans, path, text), 1 if rank is None else rank, preset_dirs)
    if not isinstance(data, dict) or data.get("schema") != "memcalc.saved-plan/1":
        schema = data.get("schema") if isinstance(data, dict) else None
        said = "must be a plan that memcalc plan --save wrote, with the schema memcalc.saved-plan/1"
        raise FileError("file", path, said if schema is None else f"{said}, not {str(schema)[:40]!r}")
    found = record_of(SavedPlan, path, text)
    if rank is not None and parse_count(rank, "rank") != found.plan.rank:
        raise InputError("rank", rank, f"{Path(path).name} holds plan {found.plan.rank} alone")
    if found.version != memcalc.__version__:
        said = f"saved by memcalc {found.version}, read by {memcalc.__version__}."
        return found.model_copy(update={"notes": (*found.notes, said)})
    return found


def record_of(kind: type[Record], path: str, text: str) -> Record:
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
    place = [str(part) for part in first["loc"]]
    key = f"{Path(path).name}: {'.'.join(place)}"
    if first["type"] == "extra_forbidden":
        known = sorted(_fields(kind, place[:-1]))
        return UnknownNameError(f"{Path(path).name} key", ".".join(place), "must be a key of the schema", known)
    if first["type"] == "missing":
        return InputError(key, None, "must be given")
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
    return InputError(key, first["input"], said)


def _fields(kind: Any, place: list[str]) -> list[str]:
    """Return the keys of the table that a place leads to."""
    for part in place:
        if part.isdigit():
            continue
        kind = kind.model_fields[part].annotation
        inner = [one for one in getattr(kind, "__args__", ()) if isinstance(one, type) and issubclass(one, BaseModel)]
        kind = inner[0] if inner else kind
    return [field.alias or name for name, field in kind.model_fields.items()]


def words_of(saved: SavedPlan, fallback: int = 0) -> dict[str, Any]:
    """The words of :func:`memcalc.estimate` for a saved plan, or for one that it can go back to.

    Raises :class:`memcalc.errors.InputError` for a fallback that it does not have.
    """
    plan = chosen(saved, fallback)
    own = chosen_words(plan.strategy, plan.gpus, saved.job.seq_len, plan.global_batch)
    return {**saved.job.words, **own}


def chosen(saved: SavedPlan, fallback: int) -> Plan:
    """The plan, or the one to go back to of that number."""
    if fallback == 0:
        return saved.plan
    if not 0 < fallback <= len(saved.fallback):
        allowed = f"must be from 1 to {len(saved.fallback)}" if saved.fallback else saved.no_fallback
        raise InputError("fallback", fallback, allowed)
    return saved.fallback[fallback - 1]


def estimate_of(saved: SavedPlan, fallback: int = 0, preset_dirs: Iterable[str] = ()) -> Estimate:
    """Estimate a saved plan again.

    Raises :class:`memcalc.errors.InputError` where its words no longer come to the strategy that was saved.
    """
    job, plan = saved.job, chosen(saved, fallback)
    found = memcalc.estimate(
        model=job.model,
        gpu=job.gpu,
        node=job.node,
        settings=job.settings,
        preset_dirs=preset_dirs,
        **words_of(saved, fallback),
    )
    was, now = plan.strategy.model_dump(), found.strategy.model_dump()
    other = next((name for name in was if was[name] != now[name]), None)
    if other is not None:
        allowed = f"its words come to {now[other]!r} with memcalc {memcalc.__version__}: type it, and plan again"
        raise InputError(f"strategy.{other} of the saved plan", was[other], allowed)
    return found
