"""The commands. Each parses, makes one library call, and renders; what it returns is the exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.main

import memcalc
from memcalc.cli import presets
from memcalc.cli import validate as comparison
from memcalc.cli.errors import Group
from memcalc.cli.lazily import Commands
from memcalc.cli.options import DESTINATION, JOB, PRESETS, Command, Shared, given, takes
from memcalc.cli.output import destination

__all__ = ["EXAMPLES", "app"]

EXAMPLES = {
    "plan": "memcalc plan --model llama-2-7b --gpu a100-40g --gpus 8 --global-batch 512",
    "estimate": "memcalc estimate --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "explain": "memcalc explain --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "validate": "memcalc validate --grade A --worst 5",
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
        name = function.__name__
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


@_command("Jobs", *JOB, *PRESETS, *DESTINATION)
def plan(
    *,
    top: Annotated[str, typer.Option(metavar="N", rich_help_panel="Output", help="How many plans are listed.")] = "10",
    **options: Any,
) -> int:
    """List the strategies that fit, best first; what you do not pin is searched."""
    from memcalc import report

    target = destination(options)
    found = memcalc.plan(**given(options), top=top)
    target.show(report.of_plans(found))
    return 0 if found.plans else 1


@_command("Jobs", *JOB, *PRESETS, *DESTINATION)
def estimate(**options: Any) -> int:
    """Say whether one strategy fits, and where the bytes stand."""
    from memcalc import report

    target = destination(options)
    found = memcalc.estimate(**given(options))
    target.show(report.of_estimate(found))
    return int(found.verdict == "does-not-fit")


@_command("Jobs", *JOB, *PRESETS, *DESTINATION)
def explain(**options: Any) -> int:
    """Show every term of an estimate: formula, the values put in, bytes, phases, source."""
    from memcalc import report

    target = destination(options)
    found = memcalc.estimate(**given(options))
    target.show(report.of_terms(found))
    return int(found.verdict == "does-not-fit")


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
