"""The application: commands that are built when they are asked for, and errors as a line and an exit code."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

import memcalc
from memcalc.cli.options import Command, Options, takes
from memcalc.cli.other_flags import answer_for
from memcalc.cli.output import fail
from memcalc.errors import MemcalcError, UnknownNameError, shown

EXAMPLES = {
    "plan": "memcalc plan --model llama-2-7b --gpu a100-40g --gpus 8 --global-batch 512",
    "estimate": "memcalc estimate --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "explain": "memcalc explain --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "report": "memcalc report --model llama-2-7b --gpu a100-40g --gpus 8 --output report.html",
    "check": "memcalc check ds_config.json --model llama-2-7b --gpu a100-80g --gpus 8 --seq-len 4096",
    "diff": 'memcalc diff "recompute=none" "recompute=full,micro_batch=2" --model 7b --gpu a100-80g --gpus 8',
    "ladder": "memcalc ladder --model llama-2-7b --gpu a100-80g --gpus 8",
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


_USAGE = 2
# the common class of typer's usage errors has no public name
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Group(TyperGroup):
    """The command group; it answers errors with one line instead of a usage text or a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; what it returns is the exit code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except MemcalcError as error:
            code = fail(str(error), error.exit_code)
        except (_UsageError, typer.Abort) as error:
            code = fail(_usage(error), _USAGE)
        return sys.exit(code or 0) if standalone_mode else code


def _usage(error: Exception) -> str:
    """Return the sentence for a wrong command line."""
    if isinstance(error, typer.Abort):
        return "aborted."
    if hasattr(error, "possibilities"):
        name = str(getattr(error, "option_name", ""))
        if answer := answer_for(name):
            return f"option {shown(name)} is not known: memcalc says {answer}."
        return str(UnknownNameError("option", name, "must be one that --help lists", error.possibilities or ()))
    sentence = _UNPRINTABLE.sub("?", str(getattr(error, "format_message", error.__str__)()))
    return sentence if sentence.endswith("?") else f"{sentence.rstrip('.')}; --help shows an example."


class _Command(TyperCommand):
    """A command whose options may stand without their value, where the table says what that means."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the value in where it is left out."""
        return list(super().parse_args(ctx, list(completed(args))))


def completed(args: Sequence[str]) -> Iterator[str]:
    """The words of a command line, with the value of each option that stands alone and may.

    >>> list(completed(["--lora", "--gpus", "2", "--lora", "8"]))
    ['--lora', 'usual', '--gpus', '2', '--lora', '8']
    """
    from memcalc.specs.options import COMMAND_LINE

    alone = {f"--{option.name.replace('_', '-')}": option.alone for option in COMMAND_LINE if option.alone}
    for index, word in enumerate(args, 1):
        yield word
        if word in alone and (index == len(args) or args[index].startswith("-")):
            yield alone[word]


class Commands(Mapping[str, Any]):
    """The commands of a group by name, each built once."""

    def __init__(self) -> None:
        self._makers: dict[str, Callable[[], Any]] = {}
        self._built: dict[str, Any] = {}

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Add a command that `make` builds."""
        self._makers[name] = make

    def __getitem__(self, name: str) -> Any:
        """Return a command, built."""
        if name not in self._built:
            self._built[name] = self._makers[name]()
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, in the order in which they were added."""
        return iter(self._makers)

    def __len__(self) -> int:
        """Count the commands."""
        return len(self._makers)


_HELP = {"help_option_names": ["--help", "-h"]}
_COMMANDS = Commands()
_OUTLINES: dict[str, TyperCommand] = {}
"""The commands by name, with their help and no options."""


class _OnDemand(Group):
    """The commands that are registered."""

    commands: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _COMMANDS

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands by what their help begins with; none is built for it."""
        self.commands = _OUTLINES
        super().format_help(ctx, formatter)
        self.commands = _COMMANDS


app = typer.Typer(cls=_OnDemand, rich_markup_mode="rich", pretty_exceptions_enable=False, invoke_without_command=True)


def command(panel: str, *options: Options) -> Callable[[Command], Command]:
    """Register a command that takes `options`, with its example in the help."""

    def register(function: Command) -> Command:
        name = function.__name__.rstrip("_")
        help_text = f"{function.__doc__}\n\nExample: [bold]{EXAMPLES[name]}[/bold]"

        def build() -> Any:
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            taking = takes(*options)(function)
            alone.command(name, cls=_Command, help=help_text, rich_help_panel=panel, context_settings=_HELP)(taking)
            return typer.main.get_command(alone)

        _COMMANDS.add(name, build)
        _OUTLINES[name] = TyperCommand(name, help=inspect.cleandoc(help_text), rich_help_panel=panel)
        return function

    return register


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memcalc {memcalc.__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback(context_settings=_HELP)
def start(context: typer.Context, version: _Version = False) -> int:
    """Memory budgets and training plans for large models, before a GPU is touched.

    Exit codes: 0 it fits or is done, 1 it does not fit, 2 wrong input, 3 something must be told.
    """
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
        return 2
    return 0
