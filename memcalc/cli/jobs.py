"""Commands about jobs. Each parses, makes one library call, and renders; what it returns is the exit code."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

import memcalc
from memcalc.cli import export as handing
from memcalc.cli import inverse
from memcalc.cli import sweep as many
from memcalc.cli.modules import MODEL_OR_MODULE, with_model
from memcalc.cli.options import CALIBRATION, CHART, DESTINATION, FREE, PRESETS, TIMELINE
from memcalc.cli.output import destination, draw, picture_targets
from memcalc.cli.registry import command

_SEARCH = "Search"
_Top = Annotated[str, typer.Option(metavar="N", rich_help_panel="Output", help="How many plans are listed.")]
_Objective = Annotated[
    str,
    typer.Option(
        metavar="NAME", rich_help_panel=_SEARCH, help="throughput, memory, gpus, cost (GPU-hours) or simplicity."
    ),
]
_Critical = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", rich_help_panel=_SEARCH, help="Critical batch size: larger batches count for less."),
]
_Tokens = Annotated[
    str | None, typer.Option(metavar="TOKENS", rich_help_panel=_SEARCH, help="Budget that GPU-hours are told for.")
]
_Recipe = Annotated[
    bool,
    typer.Option("--recipe", rich_help_panel=_SEARCH, help="Also the usual order of tuning, and what remedies return."),
]
_Why = Annotated[
    str | None,
    typer.Option(metavar="WORDS", rich_help_panel=_SEARCH, help='Why a strategy is not the plan, as in "tp=1,zero=3".'),
]
_Save = Annotated[
    str | None, typer.Option(metavar="FILE", rich_help_panel="Output", help="Save a plan and its fallback, for export.")
]
_Rank = Annotated[
    str | None,
    typer.Option(metavar="N", rich_help_panel="Output", help="Which plan is saved; the first when left out."),
]


@command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION, *CHART)
def plan(
    *,
    objective: _Objective = "throughput",
    critical_batch: _Critical = None,
    tokens: _Tokens = None,
    why: _Why = None,
    recipe: _Recipe = False,
    top: _Top = "10",
    save: _Save = None,
    rank: _Rank = None,
    **options: Any,
) -> int:
    """List the strategies that fit, best first; what you do not pin is searched.

    A word may leave several values open: 2/4, 2..8, not:8, any.
    """
    from memcalc import report
    from memcalc.report.progress import waiting

    handing.check_target(save, rank, options)
    force, dirs = bool(options["force"]), tuple(options["preset_dir"] or ())
    pictures = picture_targets(options, "chart")
    target = destination(options)
    words = with_model(options)
    with waiting("plan", "strategies") as listen:
        found = memcalc.plan(
            **words,
            objective=objective,
            critical_batch=critical_batch,
            tokens=tokens,
            why=why,
            recipe=recipe,
            top=top,
            on_progress=listen,
        )
    target.show(report.of_plans(found))
    draw(pictures, {"chart": "plan"}, found)
    if save is not None:
        return handing.keep(found, save, rank, force=force, dirs=dirs)
    return 0 if found.plans else 1


@command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION, *CHART, *TIMELINE)
def estimate(**options: Any) -> int:
    """Say whether one strategy fits, and where the bytes stand."""
    from memcalc import report

    pictures = picture_targets(options, "chart", "timeline")
    target = destination(options)
    found = memcalc.estimate(**with_model(options), timeline="timeline" in pictures)
    target.show(report.of_estimate(found))
    draw(pictures, {"chart": "estimate", "timeline": "timeline"}, found)
    return int(found.verdict == "does-not-fit")


_Fold = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        rich_help_panel="Output",
        help="In one line: others (not alive at the peak; the default), none, all, or components by name.",
    ),
]
_Only = Annotated[
    str | None, typer.Option(metavar="LIST", rich_help_panel="Output", help="Fold all components but these.")
]


@command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION)
def explain(*, fold: _Fold = None, only: _Only = None, **options: Any) -> int:
    """Show every term of an estimate: formula, the values put in, bytes, phases, source."""
    from memcalc import report
    from memcalc.report.explain import folding

    target, folded = destination(options), folding(fold, only)
    found = memcalc.estimate(**with_model(options))
    target.show(report.of_terms(found, folded))
    return int(found.verdict == "does-not-fit")


_Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="The job's own files: configs, an sbatch script, in any order."),
]
_Fix = Annotated[bool, typer.Option("--fix", help="Write the edited file beside the original, as NAME.fits.json.")]
_Brief = Annotated[bool, typer.Option("--brief", help="One line; so by default in a Slurm prolog.")]


@command("Jobs", *FREE, *PRESETS, *DESTINATION)
def check(files: _Files = None, *, fix: _Fix = False, brief: _Brief = False, **options: Any) -> int:
    """Say whether a job fits, from its own config files, and show the smallest edit of them that makes it fit.

    --format also takes github (annotations) and sarif.
    """
    from memcalc.cli import check as preflight

    return preflight.show(files or (), fix=fix, brief=brief, options=options)


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


@command("Jobs", *FREE, *PRESETS, *DESTINATION, *CHART)
def diff(a: _A, b: _B, *, terms: _Terms = None, **options: Any) -> int:
    """Say what is different between two jobs, and what each change costs or saves; ends with 0 whichever fits.

    Options count for both; words stand on them, or change the other one where that is a file.
    """
    from memcalc.cli import diff as difference

    return difference.show(a, b, terms=terms, options=options)


_Largest = Annotated[
    str,
    typer.Argument(metavar="WHAT", help="seq-len, micro-batch or model.", autocompletion=inverse.completion("Largest")),
]
_Smallest = Annotated[
    str, typer.Argument(metavar="WHAT", help="gpus.", autocompletion=inverse.completion("Smallest"), show_default=False)
]
_Safe = Annotated[bool, typer.Option("--safe", help="Ask for the verdict fits, not tight.")]
_Step = Annotated[str, typer.Option(metavar="N", help="Only multiples of N.")]
_Among = Annotated[str | None, typer.Option(metavar="TEXT", help="max model: only those with TEXT in a name.")]
_Family = Annotated[str | None, typer.Option(metavar="NAME", help="max model: only those of this family.")]
_UpTo = Annotated[str | None, typer.Option("--up-to", metavar="N", help="GPUs that are asked at most; 8 nodes.")]
_AnyCount = Annotated[
    bool, typer.Option("--any-count", help="Ask every number, not only powers of two and whole nodes.")
]


@command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION, *CHART)
def max_(
    what: _Largest,
    *,
    step: _Step = "1",
    safe: _Safe = False,
    search: _Among = None,
    family: _Family = None,
    **options: Any,
) -> int:
    """Find the largest sequence length, micro-batch or model that fits; what you do not pin is searched."""
    return inverse.show("max", what, options, step=step, safe=safe, search=search, family=family)


@command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION, *CHART)
def min_(
    what: _Smallest,
    *,
    up_to: _UpTo = None,
    any_count: _AnyCount = False,
    safe: _Safe = False,
    **options: Any,
) -> int:
    """Find the fewest GPUs on which a strategy fits, and the fastest one there."""
    return inverse.show("min", what, options, up_to=up_to, any_count=any_count, safe=safe)


_Plan = Annotated[
    str, typer.Argument(metavar="PLAN", help="What plan --save wrote, or plans in JSON.", show_default=False)
]
_To = Annotated[
    str,
    typer.Option(
        metavar="FORMAT", help="deepspeed, accelerate, trainer, torchtitan, megatron, axolotl or fsdp2 (a script)."
    ),
]
_Number = Annotated[str | None, typer.Option(metavar="N", help="Of several plans in JSON, the N-th; else the first.")]
_Fallback = Annotated[str | None, typer.Option(metavar="N", help="The N-th plan to go back to, in place of the plan.")]
_INTO = (
    replace(
        DESTINATION[1],
        metavar="FILE|DIR",
        help="Write there instead of on the screen; into DIR under the name that the framework's examples use.",
    ),
    DESTINATION[2],
)


@command("Jobs", *CALIBRATION, *PRESETS, *_INTO)
def export(
    plan: _Plan,
    *,
    to: _To,
    rank: _Number = None,
    fallback: _Fallback = None,
    **options: Any,
) -> int:
    """Write a saved plan as a framework's own config, and say how to launch and to check it."""
    return handing.show(plan, to=to, rank=rank, fallback=fallback, options=options)


_File = Annotated[str, typer.Argument(metavar="FILE.toml", help="Lists of words; every combination is one job.")]
_Jobs = Annotated[str | None, typer.Option(metavar="N", help="Processes; all cores when left out, 1 for this one.")]
_Scheduler = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS|local", help="Run on the Dask cluster of this scheduler, or on one started here."),
]
_Rows = Annotated[str, typer.Option(metavar="N", rich_help_panel="Output", help="How many rows are listed.")]


@command("Jobs", *CALIBRATION, *PRESETS, *DESTINATION)
def sweep(
    file: _File,
    *,
    jobs: _Jobs = None,
    scheduler: _Scheduler = None,
    top: _Rows = "20",
    **options: Any,
) -> int:
    """Answer many jobs at once, to a table: .csv, .json, .jsonl or .parquet; an interrupted one goes on."""
    return many.show(file, jobs=jobs, scheduler=scheduler, top=top, options=options)
