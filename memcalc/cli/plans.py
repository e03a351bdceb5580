"""What becomes of plans: ``plan --save`` and ``export`` give one to a framework, ``report`` puts it on a page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memcalc
from memcalc.cli.options import with_model
from memcalc.cli.output import deliver, fail, tell
from memcalc.errors import CombinationError, InputError, MemcalcError, MissingError
from memcalc.files import begun_folder, check_folder, output_path
from memcalc.units import format_seconds

if TYPE_CHECKING:
    from memcalc.handoff.written import Exported
    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import Plans, SavedPlan
    from memcalc.specs.model import Model

PAGE = "report.html"
"""Where a page goes when no file is named."""
_ALWAYS = {"objective": "simplicity", "rank_all": False}
"""Options of a search that are always there."""


def search(to: str | None) -> Callable[..., Plans]:
    """Return the search of all plans, or of those that a format says."""
    if to is None:
        return memcalc.plan
    from memcalc.handoff import plan_to

    return partial(plan_to, to)


def check_target(save: str | None, write: str | None, rank: str | None, options: Mapping[str, Any]) -> None:
    """Refuse what could not be written before anything is computed."""
    if write is not None:
        if not write:
            raise InputError("write", write, "must be the path of a folder")
        check_folder(Path(write))
    if save is None:
        if rank is not None and write is None:
            raise InputError("rank", rank, "needs --save FILE")
        return
    target = output_path(save, bool(options["force"]), "save")
    if options.get("module") is not None or _is_recorded(str(options["model"])):
        raise InputError("save", save, "a recorded module trains with its own code; nothing is exported to it")
    if options["output"] is not None and target == Path(options["output"]).resolve():
        raise InputError("save", save, "must be another file than --output")


def _is_recorded(model: str) -> bool:
    from memcalc.convert.named_model import is_recorded

    return model.endswith(".json") and is_recorded(Path(model))


def can_start(plans: Plans) -> bool:
    """Whether ``--write`` has a script for the first plan: of a model that it feeds, of a framework with free sizes."""
    from memcalc.frameworks.capabilities import fed_with, formats_of

    if not plans.plans or not plans.job.model or _is_recorded(plans.job.model):
        return False
    try:
        model = memcalc.api.load_model(plans.job.model, plans.job.preset_dirs)
        form, *_ = formats_of(plans.plans[0].strategy.framework, model)
    except MemcalcError:
        return False
    return form != "torchtitan" and bool(fed_with(model))


def say_time(elapsed: float, *, details: bool) -> None:
    """Say on a terminal that shows all how long a search took [s].

    No file has it, so that the same question has the same answer.
    """
    if details and sys.stderr.isatty():
        tell(f"Searched in {format_seconds(elapsed)}.")


def save_plan(
    plans: Plans, path: str, rank: str | None, *, force: bool, dirs: tuple[str, ...], details: bool = False
) -> int:
    """Save a plan, and say on stderr what was saved, so that any format can be piped; return the exit code.

    Of the plans to go back to the first is told, with `details` each.
    """
    if not plans.plans:
        return fail(f"Nothing fits; {path} not written.", 1)
    from memcalc.handoff import refused_export

    saved = memcalc.save(plans, path, 1 if rank is None else rank, preset_dirs=dirs, force=force)
    tell(f"Saved plan #{saved.plan.rank} to {path}.")
    refused = refused_export(saved.plan, dirs)
    tell(f"No config: {refused}." if refused else f"Its config: memcalc export {shlex.quote(path)}")
    shown = saved.fallback if details else saved.fallback[:1]
    for plan in shown:
        more = f" {len(saved.fallback) - 1} more: -v" if len(saved.fallback) > len(shown) else ""
        tell(f"Fallback {plan.rank}: {plan.why}{more}")
    for sentence in (*([f"No fallback: {saved.no_fallback}."] if saved.no_fallback else []), *saved.notes):
        tell(sentence)
    return 0


def export(plan: str, *, to: str | None, rank: str | None, fallback: str | None, options: Mapping[str, Any]) -> int:
    """Write a plan for a framework, and say how to launch and to check it; return the exit code."""
    from memcalc.handoff import exported
    from memcalc.handoff.saved import load
    from memcalc.units import parse_count

    dirs, output = tuple(options["preset_dir"] or ()), options["output"]
    saved = load(plan, rank=rank, preset_dirs=dirs, calibration=options["calibration"])
    number = 0 if fallback is None else parse_count(fallback, "fallback")
    if output is None:
        result = exported(saved, to, fallback=number, preset_dirs=dirs)
        several = len(result.files) > 1
        parts = (f"==> {name} <==\n{text}" if several else text for name, text in result.files.items())
        deliver("\n".join(parts), None)
        for sentence in _said(result):
            tell(sentence)
    else:
        with begun_folder(output) as path:
            result = exported(saved, to, fallback=number, path=path, preset_dirs=dirs)
            _written(result, force=bool(options["force"]))
    return 0


def write_plan(
    plans: Plans, folder: str, to: str | None, rank: str | None, *, force: bool, dirs: tuple[str, ...]
) -> int:
    """Write a plan's files into a folder, and say how to launch and to check them; return the exit code."""
    from memcalc.handoff import started, write_job
    from memcalc.units import parse_count

    if not plans.plans:
        return fail(f"Nothing fits; {folder} not written.", 1)
    number = 1 if rank is None else parse_count(rank, "rank")
    plan = next((plan for plan in plans.plans if plan.rank == number), None)
    if plan is None:
        raise InputError("rank", rank, f"must be from 1 to {len(plans.plans)}, the plans that are listed")
    result = started(plans, plan, to, dirs)
    write_job(result, Path(folder), force=force)
    launch = shlex.quote(str(Path(folder) / "launch.sh"))
    lines = f"Launch: bash {launch}", f"Check:  cd {shlex.quote(folder)} && {result.check}"
    for sentence in (f"Wrote plan {number} in {folder}.", *(f"Note: {note}" for note in result.notes), *lines):
        tell(sentence)
    return 0


def _written(result: Exported, *, force: bool) -> None:
    """Write the files of a plan, and say how to launch and to check them."""
    from memcalc.handoff import write_files

    write_files(result, force=force)
    for sentence in _said(result):
        deliver(f"{sentence}\n", None)


def _said(result: Exported) -> tuple[str, ...]:
    return (*(f"Note: {note}" for note in result.notes), f"Launch: {result.launch}", f"Check:  {result.check}")


def report(
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
    from memcalc.report.page import markup, page_of, said_of

    path, name = page_target(options)
    dirs = tuple(options["preset_dir"] or ())
    model: Model | None = None
    answer: Estimate | Plans | SavedPlan
    if saved is not None:
        answer = _loaded(saved, {"estimate": alone or None, **search}, options)
    elif options["gpu"] is None:
        raise InputError("gpu", "", "give --gpu, or pass a saved plan")
    else:
        keywords = with_model(options)
        model = None if isinstance(keywords["model"], str) else keywords["model"]
        if alone:
            refuse(search, "ranks plans, and --estimate searches none")
        answer = memcalc.estimate(**keywords, timeline=True) if alone else memcalc.plan(**keywords, **search)
    review = review_of(answer, rank=rank, model=model, preset_dirs=dirs)
    deliver(page_of(review, title=title, note=note), path)
    fits, sentence = said_of(review)
    without = "" if markup.draws() else f" {markup.UNDRAWN}"
    deliver(f"{sentence}\nWrote {name}, {path.stat().st_size / 1024:.0f} KiB.{without}\n", None)
    return int(not fits)


def estimated(saved: str | None, options: dict[str, Any], *, timeline: bool = False) -> Estimate:
    """Return the estimate of a job, or of the first plan in a file."""
    if saved is None:
        if options["gpu"] is None:
            raise InputError("gpu", "", "give --gpu, or pass a saved plan")
        return memcalc.estimate(**with_model(options), timeline=timeline)
    from memcalc.handoff.review import review_of

    review = review_of(_loaded(saved, {}, options), preset_dirs=tuple(options["preset_dir"] or ()))
    if review.estimate is None:
        raise MissingError(f"{saved} has no plan: nothing fits.")
    return review.estimate


def page_target(options: dict[str, Any]) -> tuple[Path, str]:
    """Take the file of a page out of `options`, and check it before anything is computed; also as it was typed."""
    name = options.pop("output")
    name = PAGE if name is None else name
    if not name.lower().endswith((".html", ".htm")):
        raise InputError("output", name, "the page is HTML, so its name must end in .html or .htm")
    return output_path(name, bool(options.pop("force"))), name


def _loaded(saved: str, search: dict[str, Any], options: dict[str, Any]) -> Plans | SavedPlan:
    """Return what a file holds; options of a job are refused beside it."""
    job = {name: value for name, value in options.items() if name != "preset_dir"}
    refuse({**search, **job}, f"{saved} tells the job")
    from memcalc.handoff.saved import load_answer

    return load_answer(saved)


def refuse(options: dict[str, Any], why: str) -> None:
    """Refuse what was typed and says nothing here."""
    for name, value in options.items():
        if value is not None and value != [] and value != _ALWAYS.get(name):
            raise CombinationError(name.replace("_", "-"), str(value), why)
