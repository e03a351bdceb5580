"""Commands about jobs that files or words say: checks, differences, limits, exports, sweeps, ladders.

Each parses, makes one library call, and renders; what it returns is the exit code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memcalc
from memcalc.cli import plans
from memcalc.cli.answers import SEARCH, Beyond
from memcalc.cli.options import (
    CHART,
    DESTINATION,
    DETAILS,
    PRESETS,
    calibration,
    completes,
    free,
    given,
    model_or_module,
    with_model,
)
from memcalc.cli.output import INTERRUPTED, Destination, deliver, destination, draw, fail, picture_targets, tell
from memcalc.cli.registry import command
from memcalc.cli.serving import post_training, refuse_post_training, rl_ladder
from memcalc.errors import CombinationError, InputError
from memcalc.files import output_path, replacing
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.results.check import Check
    from memcalc.results.posttraining import Rl


_Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="The job's own files: configs, an sbatch script, in any order."),
]
_Edit = Annotated[int, typer.Option("--edit", metavar="N", help="Which of the listed edits --fix writes [default: 1]")]
_Fix = Annotated[bool, typer.Option("--fix", help="Write the edited file next to the original, as NAME.fits.json")]
_Brief = Annotated[bool, typer.Option("--brief", help="One line; so by default in a Slurm prolog.")]
_Survey = Annotated[
    str | None,
    typer.Option("--survey", metavar="DIR", help="Say of each config and script below a folder what it is read as."),
]


@command("Will it fit?", free, *PRESETS, *DESTINATION, *DETAILS)
def check(
    files: _Files = None,
    *,
    fix: _Fix = False,
    edit: _Edit = 1,
    brief: _Brief = False,
    survey: _Survey = None,
    **options: Any,
) -> int:
    """Check a job's config files, and suggest the smallest edits that fit.

    --format also takes github (annotations) and sarif.
    """
    if survey is not None:
        return _surveyed(survey, files or (), options=options)
    return _checked(files or (), fix=edit if fix else 0, brief=brief, options=options)


_A = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help='A saved plan or answer in JSON, a job\'s files joined by commas, or words: "zero=3,recompute=full".',
        show_default=False,
    ),
]
_B = Annotated[str, typer.Argument(metavar="B", help="The same for the other one.", show_default=False)]
_Terms = Annotated[
    str | None,
    typer.Option(
        metavar="N|all", rich_help_panel="Output", help="How many terms that differ are listed; 8 where left out."
    ),
]


@command("What changed, or failed?", free, post_training, *PRESETS, *DESTINATION, *DETAILS, *CHART)
def diff(a: _A, b: _B, *, terms: _Terms = None, **options: Any) -> int:
    """Compare two jobs: what each change costs in memory and speed.

    Options count for both; words stand on them, or change the other one where that is a file.
    """
    from memcalc.differences import diff as compare
    from memcalc.report import rl_steps
    from memcalc.report.diff import TERMS, report
    from memcalc.results.posttraining import RlDiff
    from memcalc.units import parse_count

    pictures, target = picture_targets(options, "chart"), destination(options)
    most = TERMS if terms is None else None if terms == "all" else parse_count(terms, "terms")
    answer = compare(a, b, **given(options))
    if isinstance(answer, RlDiff):
        if terms is not None:
            raise CombinationError("terms", terms, "post-training is compared by phases and roles")
        target.show(rl_steps.of_diff(answer))
        draw(pictures, {"chart": "posttraining"}, answer)
        return 0
    target.show(report(answer, most))
    draw(pictures, {"chart": "diff"}, answer)
    return 0


_Largest = Annotated[str, typer.Argument(metavar="WHAT", help="seq-len, micro-batch or model.")]
_Smallest = Annotated[
    str, typer.Argument(metavar="WHAT", help="gpus.", autocompletion=completes("gpus"), show_default=False)
]
_Tight = Annotated[bool, typer.Option("--tight", help="Also take what fits without a margin for error.")]
_Step = Annotated[str, typer.Option(metavar="N", help="Only multiples of N.")]
_Among = Annotated[str | None, typer.Option(metavar="TEXT", help="max model: only those with TEXT in a name.")]
_Family = Annotated[str | None, typer.Option(metavar="NAME", help="max model: only those of this family.")]
_UpTo = Annotated[str | None, typer.Option("--up-to", metavar="N", help="GPUs that are asked at most; 8 nodes.")]
_AnyCount = Annotated[
    bool, typer.Option("--any-count", help="Ask every number, not only powers of two and whole nodes.")
]


@command("What should I run?", model_or_module, *PRESETS, *DESTINATION, *DETAILS, *CHART)
def max_(
    what: _Largest,
    *,
    step: _Step = "1",
    tight: _Tight = False,
    search: _Among = None,
    family: _Family = None,
    beyond: Beyond = False,
    **options: Any,
) -> int:
    """Find the longest sequence, largest micro-batch or largest model that fits."""
    return _limit("max", what, options, step=step, tight=tight, search=search, family=family, beyond=beyond)


@command("What should I run?", model_or_module, *PRESETS, *DESTINATION, *DETAILS, *CHART)
def min_(
    what: _Smallest,
    *,
    up_to: _UpTo = None,
    any_count: _AnyCount = False,
    tight: _Tight = False,
    beyond: Beyond = False,
    **options: Any,
) -> int:
    """Find the fewest GPUs that fit, and the fastest plan on them."""
    return _limit("min", what, options, up_to=up_to, any_count=any_count, tight=tight, beyond=beyond)


def _limit(command_: str, what: str, options: dict[str, Any], **query: Any) -> int:
    """Find the limit, and show the answer; return the exit code."""
    from memcalc.cli import plans
    from memcalc.report.inverse import report
    from memcalc.report.progress import waiting

    pictures, target = picture_targets(options, "chart"), destination(options)
    curve: dict[str, Any] = {"curve": True} if pictures and command_ == "max" else {}
    find = memcalc.largest if command_ == "max" else memcalc.smallest
    keywords = with_model(options, needed=command_ == "min")
    with waiting(f"{command_} {what}", "models" if what == "model" else "strategies") as listen:
        answer = find(what, **keywords, **query, **curve, on_progress=listen)
    target.show(report(answer))
    plans.say_time(answer.elapsed, details=target.details)
    draw(pictures, {"chart": "inverse"}, answer)
    return int(answer.best is None)


_Plan = Annotated[
    str, typer.Argument(metavar="PLAN", help="What plan --save wrote, or plans in JSON.", show_default=False)
]
_To = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="deepspeed, accelerate, trainer, torchtitan, megatron, swift_megatron, axolotl or fsdp2 (a script); that "
        "of the plan's framework when left out.",
    ),
]
_Number = Annotated[str | None, typer.Option(metavar="N", help="Of several plans in JSON, the N-th; else the first.")]
_Fallback = Annotated[str | None, typer.Option(metavar="N", help="The N-th plan to go back to, in place of the plan.")]
_INTO = (
    DESTINATION[1]._replace(
        metavar="FILE|DIR", help="Write to FILE; in DIR under the name that the framework's examples use."
    ),
    DESTINATION[2],
)


@command("What should I run?", calibration, *PRESETS, *_INTO)
def export(plan: _Plan, *, to: _To = None, rank: _Number = None, fallback: _Fallback = None, **options: Any) -> int:
    """Write a saved plan as a framework config, with its launch command."""
    return plans.export(plan, to=to, rank=rank, fallback=fallback, options=options)


_FORM = 'mode = "plan" under [sweep], gpu = ["h100", "l40s"] and others under [jobs]'
_File = Annotated[
    str, typer.Argument(metavar="FILE.toml", help=f"Lists of words; every combination is one job: {_FORM}.")
]
_Jobs = Annotated[str | None, typer.Option(metavar="N", help="Processes; all cores when left out, 1 for this one.")]
_Scheduler = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS|local", help="Run on the Dask cluster of this scheduler, or on one started here."),
]
_Rows = Annotated[str, typer.Option(metavar="N", rich_help_panel="Output", help="How many rows are listed.")]


@command("To share", calibration, *PRESETS, *DESTINATION)
def sweep(file: _File, *, jobs: _Jobs = None, scheduler: _Scheduler = None, top: _Rows = "20", **options: Any) -> int:
    """Estimate or plan many jobs into one table (.csv, .json, .jsonl or .parquet). Resumes after an interruption."""
    from memcalc.report.progress import bar
    from memcalc.report.rows import report

    output, force = options.pop("output"), bool(options.pop("force"))
    target = destination({"output": None, "force": None, "format": options["format"]})
    most = parse_count(top, "top")
    done = 0

    def listen(state: Any) -> None:
        nonlocal done
        done = state.done
        drawn(state)

    try:
        with bar() as drawn:
            answer = memcalc.sweep(
                file,
                output=output,
                force=force,
                jobs=jobs,
                scheduler=scheduler,
                preset_dirs=tuple(options["preset_dir"] or ()),
                calibration=options["calibration"],
                on_progress=listen,
            )
    except KeyboardInterrupt:
        sentence = f"interrupted after {done:,} jobs; run the same command to resume." if output else "interrupted."
        return fail(sentence, INTERRUPTED)
    target.show(report(answer, most, output or ""))
    return 0


_Stage = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORDS",
        rich_help_panel=SEARCH,
        help='The next stage, as in "recompute=full,micro-batch=2"; repeatable. precision=16-bit is the reading\'s.',
    ),
]
_Stages = Annotated[
    bool, typer.Option("--recipe", rich_help_panel=SEARCH, help="The usual order of tuning, which ends where it fits.")
]
_Reading = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=SEARCH,
        help="Only one reading of 16 bits: pure-16-bit, fp32-master or autocast.",
    ),
]


@command("What should I run?", model_or_module, post_training, *PRESETS, *DESTINATION, *DETAILS, *CHART)
def ladder(*, stage: _Stage = None, recipe: _Stages = False, reading: _Reading = None, **options: Any) -> int:
    """Apply memory savings one by one until the job fits.

    With --algorithm they are those of post-training: sleep, logits, what is parked, recompute, micro-batches, the
    engine's share, sharding, offload, adapters.
    """
    from memcalc.report.ladder import report

    if options["algorithm"] is not None:
        return rl_ladder(options, stage=stage, recipe=recipe, mode=reading)
    refuse_post_training(options)
    pictures, target = picture_targets(options, "chart"), destination(options)
    answer = memcalc.ladder(**with_model(options), stages=stage or (), recipe=recipe, reading=reading)
    target.show(report(answer))
    draw(pictures, {"chart": "ladder"}, answer)
    return int(all(mode.first is None for mode in answer.readings))


# -------------------------------------------------------------------------------------------------------- a check shown


_EXTRA = ("github", "sarif")
_DATA = frozenset({"json", "csv", *_EXTRA})
"""Formats that programs read, which --brief does not shorten."""


def _checked(files: Sequence[str], *, fix: int, brief: bool, options: dict[str, Any]) -> int:
    """Check the files, show the answer, write the edit of a number where one was asked for; return the exit code."""
    from memcalc.preflight import check
    from memcalc.results.check import Check

    force = bool(options.get("force"))
    brief = brief or (options.get("format") is None and options.get("output") is None and _in_prolog())
    target = destination(options, _EXTRA)
    answer = check(files, **given(options))
    if not isinstance(answer, Check):
        return _show_roles(answer, target, fix=fix, brief=brief)
    written = _write(answer, fix, force) if fix else []
    if brief and target.form not in _DATA:
        deliver(f"memcalc: {answer.summary}\n", target.path)
    else:
        _show(answer, target)
    for path in written:
        tell(f"memcalc: wrote {path}")
    return int(answer.verdict == "does-not-fit")


def _show_roles(answer: Rl, target: Destination, *, fix: int, brief: bool) -> int:
    """Show the answer for a job of post-training; return the exit code."""
    from memcalc.report import posttraining

    if fix:
        raise CombinationError("fix", answer.algorithm, "files of post-training are not edited: the change is shown")
    if target.form in _EXTRA:
        raise CombinationError("format", target.form, f"{answer.algorithm} is shown in the formats of memcalc rl")
    if brief and target.form not in _DATA:
        deliver(f"memcalc: {posttraining.summary(answer)}\n", target.path)
    else:
        target.show(posttraining.report(answer))
    return int(answer.verdict == "does-not-fit")


def _surveyed(folder: str, files: Sequence[str], *, options: dict[str, Any]) -> int:
    """Show what the files below a folder are read as; return the exit code."""
    from memcalc.preflight.answer import survey
    from memcalc.report.check import survey_report

    if files:
        raise CombinationError("survey", folder, "it takes a folder or FILEs, not both")
    target = destination(options)
    target.show(survey_report(survey(folder, **given(options))))
    return 0


def _in_prolog() -> bool:
    """Whether Slurm runs this in a prolog (SLURM_SCRIPT_CONTEXT, slurm.schedmd.com/prolog_epilog.html)."""
    return os.environ.get("SLURM_SCRIPT_CONTEXT", "").startswith("prolog")


def _show(answer: Check, target: Destination) -> None:
    if target.form in _EXTRA:
        from memcalc.report.check import MACHINES

        deliver(MACHINES[target.form](answer), target.path)
    else:
        from memcalc.report import of_check

        target.show(of_check(answer))


def _write(answer: Check, number: int, force: bool) -> list[Path]:
    """Write each edited file beside its original, all of them or none."""
    if not answer.fixes:
        return []
    if not 1 <= number <= len(answer.fixes):
        raise InputError("edit", number, f"must be a listed edit, from 1 to {len(answer.fixes)}")
    edits = answer.fixes[number - 1].edits
    if not edits:
        change = ", ".join(answer.fixes[number - 1].changes)
        raise InputError("edit", number, f"is made by hand, in what memcalc does not edit: {change}")
    paths = [output_path(str(_beside(Path(edit.path))), force) for edit in edits]
    for path, edit in zip(paths, edits, strict=True):
        with replacing(path) as stream:
            stream.write(edit.text.encode())
    return paths


def _beside(path: Path) -> Path:
    """Where an edited file goes.

    >>> _beside(Path("conf/ds.json")).as_posix()
    'conf/ds.fits.json'
    """
    return path.with_name(f"{path.stem}.fits{path.suffix}")
