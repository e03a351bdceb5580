"""The commands. Each parses, makes one library call, and renders; what it returns is the exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer
import typer.main

import memcalc
from memcalc.cli import export as handing
from memcalc.cli import inverse, presets
from memcalc.cli import sweep as many
from memcalc.cli import validate as comparison
from memcalc.cli.errors import Group
from memcalc.cli.lazily import Commands
from memcalc.cli.modules import A_MODULES_STEP, MODEL_OR_MODULE, refuse_module, with_model
from memcalc.cli.options import DESTINATION, JOB, PRESETS, Command, Shared, takes
from memcalc.cli.output import destination

__all__ = ["EXAMPLES", "app"]

EXAMPLES = {
    "plan": "memcalc plan --model llama-2-7b --gpu a100-40g --gpus 8 --global-batch 512",
    "estimate": "memcalc estimate --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "explain": "memcalc explain --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "check": "memcalc check ds_config.json --model llama-2-7b --gpu a100-80g --gpus 8 --seq-len 4096",
    "max": "memcalc max seq-len --model llama-2-7b --gpu a100-80g --gpus 8 --step 1024",
    "min": "memcalc min gpus --model llama-3-70b --gpu h100-sxm --offload none",
    "export": "memcalc export plan.json --to fsdp2",
    "sweep": "memcalc sweep sweep.toml --output table.csv",
    "validate": "memcalc validate --grade A --worst 5",
    "probe": "memcalc probe --dry-run --gpu rtx-3090",
    "triage": "memcalc triage train.log --model llama-3-8b --gpu h100 --gpus 8",
    "models": "memcalc models --search llama",
    "gpus": "memcalc gpus a100-80g",
    "nodes": "memcalc nodes --format markdown",
}
"""One for each command: its --help shows it."""

_HELP = {"help_option_names": ["--help", "-h"]}
_COMMANDS = Commands()


class _OnDemand(Group):
    """The commands of this module."""

    commands: Any

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.commands = _COMMANDS


app = typer.Typer(cls=_OnDemand, rich_markup_mode="rich", pretty_exceptions_enable=False, invoke_without_command=True)


def _command(panel: str, *options: Shared) -> Callable[[Command], Command]:
    """Register a command that takes `options`, with its example in the help."""

    def register(function: Command) -> Command:
        name = function.__name__.rstrip("_")
        help_text = f"{function.__doc__}\n\nExample: [bold]{EXAMPLES[name]}[/bold]"

        def build() -> Any:
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            taking = takes(*options)(function)
            alone.command(name, help=help_text, rich_help_panel=panel, context_settings=_HELP)(taking)
            return typer.main.get_command(alone)

        _COMMANDS.add(name, build)
        return function

    return register


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memcalc {memcalc.__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback(context_settings=_HELP)
def start(
    context: typer.Context,
    version: _Version = False,
) -> int:
    """Memory budgets and training plans for large models, before a GPU is touched.

    Exit codes: 0 it fits or is done, 1 it does not fit, 2 wrong input, 3 something must be told.
    """
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
        return 2
    return 0


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


@_command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION)
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

    handing.check_target(save, rank, options)
    force, dirs = bool(options["force"]), tuple(options["preset_dir"] or ())
    target = destination(options)
    found = memcalc.plan(
        **with_model(options),
        objective=objective,
        critical_batch=critical_batch,
        tokens=tokens,
        why=why,
        recipe=recipe,
        top=top,
    )
    target.show(report.of_plans(found))
    if save is not None:
        return handing.keep(found, save, rank, force=force, dirs=dirs)
    return 0 if found.plans else 1


@_command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION)
def estimate(**options: Any) -> int:
    """Say whether one strategy fits, and where the bytes stand."""
    from memcalc import report

    target = destination(options)
    found = memcalc.estimate(**with_model(options))
    target.show(report.of_estimate(found))
    return int(found.verdict == "does-not-fit")


@_command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION)
def explain(**options: Any) -> int:
    """Show every term of an estimate: formula, the values put in, bytes, phases, source."""
    from memcalc import report

    target = destination(options)
    found = memcalc.estimate(**with_model(options))
    target.show(report.of_terms(found))
    return int(found.verdict == "does-not-fit")


_FREE = tuple(replace(option, required=False) for option in JOB)
_Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="The job's own files: configs, an sbatch script, in any order."),
]
_Fix = Annotated[bool, typer.Option("--fix", help="Write the edited file beside the original, as NAME.fits.json.")]
_Brief = Annotated[bool, typer.Option("--brief", help="One line; so by default in a Slurm prolog.")]


@_command("Jobs", *_FREE, *PRESETS, *DESTINATION)
def check(files: _Files = None, *, fix: _Fix = False, brief: _Brief = False, **options: Any) -> int:
    """Say whether a job fits, from its own config files, and show the smallest edit of them that makes it fit.

    --format also takes github (annotations) and sarif.
    """
    from memcalc.cli import check as preflight

    return preflight.show(files or (), fix=fix, brief=brief, options=options)


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


@_command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION)
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


@_command("Jobs", *MODEL_OR_MODULE, *PRESETS, *DESTINATION)
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


@_command("Jobs", *PRESETS, *_INTO)
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


@_command("Jobs", *PRESETS, *DESTINATION)
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


_Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUNS.toml|DIR]...", help="Files of measured runs; the shipped ones when left out."),
]
_Strict = Annotated[bool, typer.Option("--strict", help="Leave out runs with a setting that is assumed.")]
_Group = Annotated[str | None, typer.Option(metavar="NAME", help="Only the runs of this group.")]
_Grade = Annotated[str | None, typer.Option(metavar="GRADE", help="Only this grade: A (which takes A- too), A- or B.")]
_Figure = Annotated[str | None, typer.Option(metavar="NAME", help="Score only allocated, reserved or device.")]
_Worst = Annotated[str, typer.Option(metavar="N", rich_help_panel="Output", help="How many of the worst are listed.")]


@_command("Measurements", *PRESETS, *DESTINATION)
def validate(
    runs: _Runs = None,
    *,
    strict: _Strict = False,
    group: _Group = None,
    grade: _Grade = None,
    figure: _Figure = None,
    worst: _Worst = "10",
    **options: Any,
) -> int:
    """Compare predictions with measured runs: the shipped ones, or your own."""
    return comparison.show(
        runs or (), strict=strict, group=group, grade=grade, figure=figure, worst=worst, options=options
    )


_Device = Annotated[str, typer.Option(metavar="NAME", help="cuda, cpu (tiny models, counted) or fake (your --module).")]
_Gpu = Annotated[
    str | None, typer.Option(metavar="NAME", help="The GPU's preset; by the driver's name of it when left out.")
]
_Suite = Annotated[
    str, typer.Option(metavar="NAME", help="full, small (a quick look), steps (of training alone) or machine.")
]
_Minutes = Annotated[str | None, typer.Option(metavar="N", help="Begin no job that would end later.")]
_Ranks = Annotated[
    str | None, typer.Option(metavar="N", help="Processes of the jobs of several GPUs; all GPUs when left out.")
]
_Dry = Annotated[bool, typer.Option("--dry-run", help="Only say what would run, and what it needs.")]
_RUNS_FILE = (
    replace(DESTINATION[0], help="Of what is shown: rich, markdown, csv, json, latex or html."),
    replace(DESTINATION[1], help="The runs file; probe.toml when left out."),
    replace(DESTINATION[2], help="Begin anew, and replace FILE where it exists."),
)


@_command("Measurements", *PRESETS, *A_MODULES_STEP, *_RUNS_FILE)
def probe(
    *,
    device: _Device = "cuda",
    gpu: _Gpu = None,
    suite: _Suite = "full",
    minutes: _Minutes = None,
    ranks: _Ranks = None,
    dry_run: _Dry = False,
    **options: Any,
) -> int:
    """Measure training steps and rates on this machine, to a runs file; an interrupted probe goes on.

    --device fake needs none: a module of your own is run on fake tensors.
    """
    from memcalc.cli import probe as measuring
    from memcalc.cli import probe_module

    if device == "fake":
        return probe_module.show(options)
    refuse_module(options)
    return measuring.show(options, device=device, gpu=gpu, suite=suite, minutes=minutes, ranks=ranks, dry_run=dry_run)


_Failure = Annotated[
    str,
    typer.Argument(
        metavar="FILE|-", help="A log with an out-of-memory message, or a memory snapshot.", show_default=False
    ),
]
_Config = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", rich_help_panel="Job", help="A config file of the job, as for check; repeatable."),
]
_Planned = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", rich_help_panel="Job", help="The job as plan --save wrote it.")
]


@_command("Measurements", *_FREE, *PRESETS, *DESTINATION)
def triage(file: _Failure, *, config: _Config = None, saved: _Planned = None, **options: Any) -> int:
    """Say why a job ran out of memory, from its message or a snapshot, and what would help.

    Exit code 0 where a cause is at least likely, 3 where more must be recorded.
    """
    from memcalc.cli import triage as failures

    return failures.show(file, config=config or (), plan=saved, options=options)


_Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Show this one in full, with its sources.")]
_Search = Annotated[str | None, typer.Option(metavar="TEXT", help="Only those with TEXT in a name, or the nearest.")]


@_command("Presets", *PRESETS, *DESTINATION)
def models(name: _Name = None, search: _Search = None, **options: Any) -> int:
    """List the models, or show one with its sources."""
    return presets.show("models", name, search, options)


@_command("Presets", *PRESETS, *DESTINATION)
def gpus(name: _Name = None, search: _Search = None, **options: Any) -> int:
    """List the GPUs, or show one with its sources."""
    return presets.show("gpus", name, search, options)


@_command("Presets", *PRESETS, *DESTINATION)
def nodes(name: _Name = None, search: _Search = None, **options: Any) -> int:
    """List the nodes, or show one with its sources."""
    return presets.show("nodes", name, search, options)
