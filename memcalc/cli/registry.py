"""The application: commands that are built when they are asked for, and errors as a line and an exit code."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer.main
from typer.core import TyperCommand, TyperGroup

import memcalc
from memcalc.cli.options import Command, Options, answer_for, listed, takes
from memcalc.cli.output import fail, unwritten
from memcalc.errors import InputError, MemcalcError, UnknownNameError, shown

# What ``--help`` shows of a command with many options: those that most people need, and examples, on one screen.

_WIDTH = 80
_FLAGS, _NAMES = 25, 12
"""Columns of an option with its value, where what is longer stands in a line of its own, and of a command's name."""
_SCREEN = 45
"""Lines of a screen: where the options are more, each is said more briefly."""
_LINES = 2
"""Lines of a list of names there."""
_SIZES = ("model", "gpu", "gpus", "seq_len", "micro_batch", "global_batch", "framework")
_STRATEGY = ("precision", "optimizer", "zero", "tp", "pp", "recompute", "offload", "lora", "quantize")
_RESULT = ("format", "output")

MAIN: dict[str, dict[str, tuple[str, ...]]] = {
    "plan": {
        "Job": ("model", "gpu", "gpus", "seq_len", "global_batch", "framework"),
        "Memory": ("lora", "quantize", "offload"),
        "Result": ("objective", "top", "save", "write", "output"),
    },
    "estimate": {"Job": _SIZES, "Strategy": _STRATEGY, "Result": _RESULT},
    "explain": {"Job": _SIZES, "Strategy": _STRATEGY, "Result": ("fold", "only", *_RESULT)},
    "ladder": {"Job": _SIZES, "Strategy": ("precision", "optimizer", "lora"), "Result": ("recipe", "stage", *_RESULT)},
    "report": {"Job": _SIZES, "Strategy": _STRATEGY[:6], "Result": ("output", "title", "force")},
    "check": {"Files": ("fix", "edit", "brief"), "Job": _SIZES[:6], "Result": _RESULT},
    "diff": {"Job": _SIZES, "Strategy": _STRATEGY[:5], "Result": ("terms", *_RESULT)},
    "max": {"Job": _SIZES, "Strategy": _STRATEGY, "Result": ("step", *_RESULT)},
    "min": {"Job": _SIZES, "Strategy": _STRATEGY, "Result": _RESULT},
    "ui": {"Job": _SIZES, "Strategy": _STRATEGY[:6], "Page": ("port", "no_open")},
    "serve": {
        "Engine": ("model", "gpu", "tp", "engine", "utilization", "max_len", "max_seqs", "kv_dtype", "quantization"),
        "Result": _RESULT,
    },
    "rl": {
        "Job": ("model", "gpu", "gpus", "algorithm", "framework", "prompt", "response", "micro_batch", "micro_tokens"),
        "Memory": ("lora", "logits", "park", "sleep", "utilization", "engine_gpus"),
        "Result": _RESULT,
    },
    "triage": {"Job": _SIZES, "Result": ("config", "saved", *_RESULT)},
    "probe": {
        "Measure": ("device", "gpu", "suite", "minutes", "ranks", "dry_run"),
        "Your own model, with --device fake": ("module", "inputs", "loss_fn", "save"),
        "Result": _RESULT,
    },
}
"""The options that ``--help`` shows, by heading; commands that are not here have few and show them all, by panel."""
CLOSING = {
    "plan": "Pin or limit what is searched with a value (--tp 2), a list (--zero 2/3), a range (--pp 2..8) or not:8. "
    "--algorithm grpo plans post-training."
}


def short_help(name: str, usage: str, docstring: str, parameters: Iterable[Any]) -> str:
    """Return the help of a command: what it does, its main options, examples, and where the others are."""
    by_name = {part.name: part for part in parameters if part.name != "help"}
    count = sum(part.param_type_name == "option" for part in by_name.values())
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    closing = " ".join((CLOSING.get(name, ""), f"All {count} options: memcalc {name} --help-all"))
    examples = [line for listed in (EXAMPLES, SECOND_EXAMPLES) if name in listed for line in _example(listed[name])]
    lines: list[str] = []
    for brief in (False, True):
        lines = [f"Usage: memcalc {name} {usage}"]
        for paragraph in paragraphs[: 1 if name in MAIN else None]:
            lines += ["", *_wrapped(paragraph)]
        for heading, names in (MAIN.get(name) or _by_panel(by_name.values())).items():
            lines += ["", heading, *(line for option in names for line in _option(by_name[option], brief=brief))]
        lines += ["", "Examples" if name in MAIN else "Example", *examples]
        lines += ["", *_wrapped(closing)] if name in MAIN else []
        if len(lines) <= _SCREEN:
            break
    return "\n".join([*lines, ""])


def _by_panel(parameters: Iterable[Any]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {"Arguments": [], "Options": []}
    for part in parameters:
        heading = "Arguments" if part.param_type_name == "argument" else part.rich_help_panel or "Options"
        groups.setdefault(heading, []).append(part.name)
    return {heading: names for heading, names in groups.items() if names}


def _wrapped(text: str, width: int = 80) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width)


def _option(option: Any, *, brief: bool) -> Iterator[str]:
    """Yield an option's lines: its flag, what it takes, and the first sentence of what it is."""
    flag = "  " + " ".join(filter(None, (_flag(option), option.metavar)))
    needed = " Required." if option.required else ""
    if len(flag) >= _FLAGS:
        yield flag
        flag = ""
    sentence = " ".join((option.help or "").split()).partition(". ")[0].rstrip(".")
    for line in (_briefly if brief else _wrapped)(f"{sentence}.{needed}", _WIDTH - _FLAGS - 1):
        yield f"{flag:{_FLAGS}} {line}"
        flag = ""


def _flag(option: Any) -> str:
    return str(option.opts[0]) if option.param_type_name == "option" else ""


def _briefly(text: str, width: int) -> list[str]:
    """Return a sentence as lines, without what stands behind a semicolon, and a long list without its end.

    >>> _briefly("LoRA rank: train adapters instead of the weights; without R the usual rank.", 54)
    ['LoRA rank: train adapters instead of the weights.']
    >>> _briefly("one, two, three, four or five.", 12)
    ['one, two,', 'three, …']
    """
    if len(text) > width:
        text = re.sub(r";(?![^(]*\)).*", ".", text)
    lines = _wrapped(text, width)
    if len(lines) > _LINES and listed(text):
        lines = _wrapped(text, width - 2)[:_LINES]
        lines[-1] = f"{lines[-1].rpartition(',')[0]}, …"
    return lines


def _example(command: str) -> list[str]:
    """Return a command within the screen; where it is longer it goes on behind a backslash."""
    from memcalc.report.terminal_rows import broken

    return [f"  {line}" for line in broken(command, _WIDTH - 2)]


EXAMPLES = {
    "plan": "memcalc plan --model llama-2-7b --gpu a100-40g --gpus 8 --global-batch 512",
    "estimate": "memcalc estimate --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "explain": "memcalc explain --model llama-2-7b --gpu a100-80g --gpus 8 --zero 3",
    "report": "memcalc report --model llama-2-7b --gpu a100-40g --gpus 8 --output report.html",
    "ui": "memcalc ui --model llama-2-7b --gpu a100-40g --gpus 8 --zero 3",
    "check": "memcalc check ds_config.json --model llama-2-7b --gpu a100-80g --gpus 8 --seq-len 4096",
    "diff": 'memcalc diff "recompute=none" "recompute=full,micro_batch=2" --model 7b --gpu a100-80g --gpus 8',
    "ladder": "memcalc ladder --model llama-2-7b --gpu a100-80g --gpus 8",
    "max": "memcalc max seq-len --model llama-2-7b --gpu a100-80g --gpus 8 --step 1024",
    "min": "memcalc min gpus --model llama-3-70b --gpu h100-sxm --offload none",
    "serve": "memcalc serve --model llama-3.1-8b --gpu h100 --max-len 8192",
    "rl": "memcalc rl --algorithm grpo --framework verl --model qwen2.5-7b --gpu h100 --gpus 8 --prompt 1k "
    "--response 2k --micro-tokens 16k",
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
SECOND_EXAMPLES = {
    "plan": "memcalc plan --model llama-3-8b --gpu rtx-4090 --lora 16 --quantize nf4",
    "estimate": "memcalc estimate --model 7b --gpu h100 --gpus 16 --tp 2 --recompute full",
    "explain": "memcalc explain --model 7b --gpu h100 --gpus 8 --only activations",
    "check": "memcalc check train.sbatch --brief",
    "ladder": "memcalc ladder --model llama-3-8b --gpu rtx-4090 --recipe",
    "max": "memcalc max micro-batch --model llama-3-8b --gpu h100 --gpus 8 --seq-len 8k",
    "min": "memcalc min gpus --model llama-3-8b --gpu a100-40g --lora 16",
    "diff": "memcalc diff old.json new.json --model llama-2-7b --gpu a100-80g",
    "report": "memcalc report plan.json --output report.html",
    "serve": "memcalc serve --model qwen2.5-72b --gpu h100 --tp 4 --max-len 32k",
    "rl": "memcalc rl --algorithm dpo --framework trl --model 8b --gpu h100 --gpus 8 --prompt 1k --response 1k",
    "triage": "memcalc triage snapshot.pickle --gpu h100",
    "probe": "memcalc probe --device fake --module mymodel:build --save mymodel.json",
    "ui": "memcalc ui",
}
"""Another, for those whose --help is short."""
_LAST = "memcalc COMMAND --help · --version · --install-completion for your shell"
PANELS = ("What should I run?", "Will it fit?", "What changed, or failed?", "To share", "Measurements", "Presets")
"""What the commands are grouped by, in the order of the list."""


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
        except InputError as error:
            typed = {word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)}
            code = fail(error.sentence(typed), error.exit_code)
        except MemcalcError as error:
            code = fail(str(error), error.exit_code)
        except (_UsageError, typer.Abort) as error:
            code = fail(_usage(error), _USAGE)
        except OSError as error:
            code = unwritten(error)
        return sys.exit(code or 0) if standalone_mode else code


def _usage(error: Exception) -> str:
    """Return the sentence for a wrong command line."""
    if isinstance(error, typer.Abort):
        return "aborted."
    if hasattr(error, "possibilities"):
        name = str(getattr(error, "option_name", ""))
        context = getattr(error, "ctx", None)
        if answer := answer_for(name, str(getattr(context, "info_name", ""))):
            return f"unknown option {shown(name)}: memcalc says {answer}."
        return str(UnknownNameError("option", name, "must be one that --help lists", error.possibilities or ()))
    sentence = _UNPRINTABLE.sub("?", str(getattr(error, "format_message", error.__str__)()))
    sentence = re.sub(r"^Missing option '(--[\w-]+)'", r"\1 is missing", sentence)
    return sentence if sentence.endswith("?") else f"{sentence.rstrip('.')}; --help shows an example."


class _Command(TyperCommand):
    """A command whose options may stand without their value, where the table says what that means.

    Its ``--help`` shows the main options where there are many, and ``--help-all`` all of them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the value in where it is left out."""
        if _HELP_ALL in args:
            super().format_help(ctx, ctx.make_formatter())
            ctx.exit()
        rest = list(super().parse_args(ctx, list(completed(args))))
        for part in self.params:  # "$NODE" of a script that never set it is not the same as no option
            name, value = str(part.name), ctx.params.get(part.name)
            typed = part.param_type_name == "option" and ctx.get_parameter_source(name).name == "COMMANDLINE"
            if typed and isinstance(value, str) and not value.strip() and name not in {"model", "gpu"}:
                raise InputError(name, value, "give a value, or leave the option out")
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the main options and two examples, or all where they are few."""
        docstring = str(self.help).partition("\n\nExample:")[0]
        usage = " ".join(self.collect_usage_pieces(ctx))
        formatter.write(short_help(str(self.name), usage, docstring, self.get_params(ctx)))


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
        self._makers: dict[str, Callable[..., Any]] = {}
        self._built: dict[str, Any] = {}

    def add(self, name: str, make: Callable[..., Any]) -> None:
        """Add a command that `make` builds, with all its options or those that some flags name."""
        self._makers[name] = make

    def for_line(self, name: str, args: Sequence[str]) -> Any:
        """Return a command with the options that its line names; as a whole where one is not known, as --help is."""
        if name not in self._makers or name in self._built:
            return self.get(name)
        flags = {word.partition("=")[0] for word in args if word.startswith("-")}
        made = self._makers[name](flags)
        known = {flag for part in made.params for flag in (*part.opts, *part.secondary_opts)}
        return made if flags <= known else self[name]

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


_HELP_ALL = "--help-all"
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a line, and build of it what the line needs."""
        made = None if ctx.resilient_parsing else _COMMANDS.for_line(args[0], args[1:])
        return (args[0], made, args[1:]) if made else super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands by what is asked, on one screen; none is built for it."""
        lines = [f"Usage: {ctx.command_path} COMMAND [OPTIONS]", ""]
        for paragraph in inspect.cleandoc(str(self.help)).split("\n\n"):
            lines += _wrapped(paragraph)
        panel = ""
        for name, outline in sorted(_OUTLINES.items(), key=_panel):
            if str(outline.rich_help_panel) != panel:
                panel = str(outline.rich_help_panel)
                lines += ["", panel]
            text = str(outline.help).partition("\n\n")[0].partition(". ")[0].rstrip(".") + "."
            indent = " " * _NAMES
            lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:{_NAMES - 2}}", subsequent_indent=indent)
        formatter.write("\n".join([*lines, "", *_wrapped(_LAST), ""]))


def _panel(entry: tuple[str, Any]) -> tuple[int, bool]:
    """The turn of a command in the list: that of its group, the one that most people need first in it."""
    name, outline = entry
    return PANELS.index(outline.rich_help_panel), name not in {"plan", "check"}


app = typer.Typer(cls=_OnDemand, rich_markup_mode="rich", pretty_exceptions_enable=False, invoke_without_command=True)


def command(panel: str, *options: Options) -> Callable[[Command], Command]:
    """Register a command that takes `options`, with its example in the help."""

    def register(function: Command) -> Command:
        name = function.__name__.rstrip("_")
        help_text = f"{function.__doc__}\n\nExample: [bold]{EXAMPLES[name]}[/bold]"

        def build(flags: Collection[str] | None = None) -> Any:
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            taking = takes(*options, flags=flags)(function)
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
    """Will this training job fit in GPU memory, and which strategy is best? No GPU needed.

    Exit codes: 0 fits or done, 1 does not fit, 2 invalid input, 3 more information needed.
    """
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
        return 2
    return 0
