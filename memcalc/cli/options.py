"""The options that mean the same everywhere, and how a command takes them.

Values stay as typed: the library reads and checks them, so that a wrong one gets the same sentence from Python and
from the command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from memcalc.errors import CombinationError, InputError

if TYPE_CHECKING:
    from memcalc.specs.recorded import Source
    from memcalc.specs.strict import Option

Command = TypeVar("Command", bound=Callable[..., Any])
_MODULE, _OUTPUT = "Module", "Output"


@dataclass(frozen=True)
class Shared:
    """One option; `kind` is str, bool (a flag) or list (repeatable)."""

    name: str
    panel: str
    metavar: str
    help: str
    kind: type = str
    values: tuple[str, ...] = ()
    """Names that complete it."""
    presets: str = ""
    """Or the kind of presets whose names do: models, gpus or nodes."""
    required: bool = False
    negative: bool = False
    letter: str = ""
    """The option in one letter."""

    @classmethod
    def of(cls, option: Option) -> Shared:
        """Return an option of the table."""
        kind = {"flag": bool, "list": list}.get(option.kind, str)
        return cls(
            option.name, option.panel, option.metavar, option.text, kind, option.values, option.completed_by,
            option.required, option.negative,
        )  # fmt: skip

    def parameter(self) -> inspect.Parameter:
        """Return the option as typer reads it from a signature."""
        flag = f"--{self.name.replace('_', '-')}"
        declared = f"{flag}/--no-{flag[2:]}" if self.negative else flag
        letter = [f"-{self.letter}"] if self.letter else []
        info = typer.Option(
            declared, *letter, help=self.help, metavar=self.metavar, rich_help_panel=self.panel,
            show_default=False, autocompletion=self._complete if self.values or self.presets else None,
        )  # fmt: skip
        kind: Any = list[str] if self.kind is list else self.kind
        annotation: Any = Annotated[kind if self.required else kind | None, info]
        default = inspect.Parameter.empty if self.required else None
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def _complete(self, incomplete: str) -> list[str]:
        from memcalc import catalog

        names = self.values or catalog.names(self.presets.removesuffix("s"))  # type: ignore[arg-type]
        return [name for name in names if name.startswith(incomplete)]


@cache
def job() -> tuple[Shared, ...]:
    """Return the options that say a job, read from their table when a command that takes them is built."""
    from memcalc.specs.options import COMMAND_LINE

    return tuple(Shared.of(option) for option in COMMAND_LINE)


def free() -> tuple[Shared, ...]:
    """Return the same where something else may say the job."""
    return tuple(replace(option, required=False) for option in job())


def calibration() -> tuple[Shared, ...]:
    """Return the option for a calibration alone."""
    return tuple(option for option in job() if option.name == "calibration")


MODULE = (
    Shared("module", _MODULE, "PACKAGE:FACTORY", "Your own model: package:function returning an nn.Module"),
    Shared("inputs", _MODULE, "PACKAGE:FUNCTION",
        "Function that returns one batch: function(micro_batch, seq_len) [default: example_inputs next to the factory]",
    ),
    Shared("loss_fn", _MODULE, "PACKAGE:FUNCTION", "Loss function [default: output.loss]"),
    Shared("block_class", _MODULE, "NAME", "Block class [default: detected]"),
)  # fmt: skip
PRESETS = (Shared("preset_dir", _OUTPUT, "DIR", "Your own presets, looked up first; repeatable.", kind=list),)
DESTINATION = (
    Shared("format", _OUTPUT, "NAME",
        "rich, plain, markdown, csv, json, latex, html, svg or xlsx; by default from the ending of FILE, else rich.",
    ),
    Shared("output", _OUTPUT, "FILE", "Write to FILE"),
    Shared("force", _OUTPUT, "", "Overwrite FILE", kind=bool),
)  # fmt: skip
DETAILS = (Shared("verbose", _OUTPUT, "", "Show all of the answer on the screen.", kind=bool, letter="v"),)
CHART = (Shared("chart", _OUTPUT, "FILE", "Also write a chart: .svg, .png, .pdf, .html"),)
TIMELINE = (Shared("timeline", _OUTPUT, "FILE", "Also chart memory over one step"),)


Options = Shared | Callable[[], tuple[Shared, ...]]
"""An option, or what gives several when a command is built."""


def takes(*options: Options) -> Callable[[Command], Command]:
    """Give a command `options` besides its own parameters; it receives them as keywords."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [part for part in signature.parameters.values() if part.kind is not part.VAR_KEYWORD]
        shared = [part for option in options for part in ((option,) if isinstance(option, Shared) else option())]
        parts = [*(option.parameter() for option in shared), *parameters]
        parts.sort(key=lambda part: part.kind)
        command.__signature__ = signature.replace(parameters=parts)  # type: ignore[attr-defined]
        command.__annotations__ = {part.name: part.annotation for part in parts}
        return command

    return decorate


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords for the library: what was typed, under the library's names."""
    keywords = {name: value for name, value in options.items() if value not in (None, [])}
    pairs, dirs = keywords.pop("set", []), keywords.pop("preset_dir", ())
    return {**keywords, "preset_dirs": tuple(dirs), "settings": dict(_pair(pair) for pair in pairs)}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError("set", text, "must be key=value, such as strategy.reduce_dtype=bf16")
    return key.strip(), value.strip()


def completion(names: str) -> Callable[[str], list[str]]:
    """What completes the argument of ``max`` or ``min``; ``names`` is a choice of :mod:`memcalc.specs.strategy`."""

    def complete(incomplete: str) -> list[str]:
        from memcalc.specs import strategy

        return [name for name in get_args(getattr(strategy, names)) if name.startswith(incomplete)]

    return complete


# --------------------------------------------------------------------------------- a module in the place of a model

MODULE_OPTIONS = ("module", "inputs", "loss_fn", "block_class")
OF_A_STEP = ("precision", "recompute", "optimizer", "optimizer_impl", "micro_batch", "seq_len")
"""What the steps of ``probe --device fake`` are told."""


def model_or_module() -> tuple[Shared, ...]:
    """Return the options that say a job, with those of a module in the place of a model."""
    return (*(replace(option, required=option.required and option.name != "model") for option in job()), *MODULE)


def module_step() -> tuple[Shared, ...]:
    """Return the options of the steps of a module on a fake device."""
    panel = MODULE[0].panel
    return (
        *MODULE,
        *(replace(option, panel=panel) for option in job() if option.name in OF_A_STEP),
        Shared("save", panel, "FILE", "Where the recorded model is written, for --model."),
    )


def source_of(options: dict[str, Any], seq_len: str | None) -> Source | None:
    """Take the options of a module out of the others."""
    module = {name: options.pop(name, None) for name in MODULE_OPTIONS}
    if module["module"] is None:
        for name, value in module.items():
            if value is not None:
                raise CombinationError(name.replace("_", "-"), value, "needs --module")
        return None
    from memcalc.planner.request import positive
    from memcalc.specs.recorded import Source

    length = 0 if seq_len is None else positive(seq_len, "seq_len")
    factory, inputs, loss, block_class = (module[name] or "" for name in MODULE_OPTIONS)
    return Source(factory, inputs, loss, block_class, seq_len=length)


def refuse_module(options: dict[str, Any]) -> None:
    """Refuse the options of a module where a device is measured."""
    for name in (*MODULE_OPTIONS, *OF_A_STEP, "save"):
        if options.get(name) is not None:
            raise CombinationError(name.replace("_", "-"), options[name], "is for --device fake")


def with_model(options: dict[str, Any], *, needed: bool = True) -> dict[str, Any]:
    """Return the keywords for the library, with the model that a module was recorded as where one is named."""
    source = source_of(options, options.get("seq_len"))
    named = options.get("model")
    if source is None:
        if named is None and needed:
            raise InputError("model", "", "give --model, or --module package.module:factory")
        return given(options)
    if named is not None:
        raise CombinationError("model", named, "--module is given too; one of them says what is trained")
    from memcalc.probe.module import modes_for, record_model
    from memcalc.report.progress import waiting

    with waiting("record the module", "series") as listen:
        model = record_model(source, modes_for(options.get("precision")), on_progress=listen)
    return {**given(options), "model": model}
