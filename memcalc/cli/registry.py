"""The application, and how a command is registered: built when it is asked for, with its example in the help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.main

import memcalc
from memcalc.cli.errors import Group
from memcalc.cli.lazily import Commands
from memcalc.cli.options import Command, Shared, takes

__all__ = ["EXAMPLES", "app", "command"]

EXAMPLES = {
    "plan": "memcalc plan --model llama-2-7b --gpu a100-40g --gpus 8 --global-batch 512",
    "estimate": "memcalc estimate --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "explain": "memcalc explain --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "check": "memcalc check ds_config.json --model llama-2-7b --gpu a100-80g --gpus 8 --seq-len 4096",
    "diff": 'memcalc diff "recompute=none" "recompute=full,micro_batch=2" --model 7b --gpu a100-80g --gpus 8',
    "max": "memcalc max seq-len --model llama-2-7b --gpu a100-80g --gpus 8 --step 1024",
    "min": "memcalc min gpus --model llama-3-70b --gpu h100-sxm --offload none",
    "export": "memcalc export plan.json --to fsdp2",
    "sweep": "memcalc sweep sweep.toml --output table.csv",
    "calibrate": "memcalc calibrate probes.toml --output a100-80g.toml",
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
    """The commands that are registered."""

    commands: Any

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.commands = _COMMANDS


app = typer.Typer(cls=_OnDemand, rich_markup_mode="rich", pretty_exceptions_enable=False, invoke_without_command=True)


def command(panel: str, *options: Shared) -> Callable[[Command], Command]:
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
