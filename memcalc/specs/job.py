"""The record of a job: all that is needed to ask for its answer again, and the command line that does so.

A sweep is lists of words whose every combination is one job:

```toml
[sweep]
mode = "plan"

[jobs]
model = ["llama-2-7b", "llama-3-8b"]
gpu = "a100-80g"
gpus = [8, 16]
set.strategy.reduce_dtype = ["bf16", "fp32"]

[[exclude]]
model = "llama-2-7b"
gpus = 16
```

The keys of `[jobs]` are the options with underscores, and below `set` the fields that `--set` takes; a value that
stands alone is a list of one.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from memcalc.errors import InputError, MissingError
from memcalc.specs.model import Model
from memcalc.specs.strict import Frozen, Strict

Largest = Literal["seq-len", "micro-batch", "model"]
"""What ``memcalc max`` is asked for."""


Smallest = Literal["gpus"]
"""What ``memcalc min`` is asked for."""


Command = Literal["estimate", "plan", "ladder", "max", "min", "rl"]
Value = str | int | float | bool


class JobRecord(Frozen):
    """A question as it was asked; an answer's ``command`` is rendered from it and never read back."""

    command: Command
    """The command of memcalc that answers it."""
    what: str = ""
    """Of ``max`` and ``min`` what is asked for, such as ``seq-len``; empty elsewhere."""
    model: str | None
    """A preset's name or a path; None for a recorded module, and where the model is what is asked for."""
    module: dict[str, str] = Field(default_factory=dict)
    """Of a recorded module ``module``, ``inputs``, ``loss_fn`` and ``block_class``; empty for a model with a name."""
    gpu: str
    """A preset's name."""
    node: str | None = None
    """A preset's name; None for the usual host of the GPU."""
    options: dict[str, Value] = Field(default_factory=dict)
    """Keywords of :func:`memcalc.estimate` that were given, the calibration that was taken among them."""
    settings: dict[str, Value] = Field(default_factory=dict)
    """Fields that have no option of their own, by dotted name."""
    query: dict[str, Value | tuple[str, ...]] = Field(default_factory=dict)
    """Options of the command itself, such as ``objective``."""
    preset_dirs: tuple[str, ...] = ()
    """Folders with presets of the user's own."""

    @model_validator(mode="after")
    def _of_a_model(self) -> Self:
        """Only where the model is what is asked for, none is named."""
        if self.model is None and not self.module and self.what != "model":
            raise ValueError("a job must name its model")
        return self

    def keywords(self, model: Model | None = None) -> dict[str, Any]:
        """The keywords with which the library's function gives the same answer; ``model`` stands for a module."""
        if self.module and model is None:
            raise MissingError(f"the job is of the module {self.module['module']}: give the model recorded from it.")
        named = {"model": model or self.model} if model or self.model is not None else {}
        places = {"gpu": self.gpu, "node": self.node, "settings": self.settings, "preset_dirs": self.preset_dirs}
        return {**named, **places, **self.options, **self.query}

    def with_options(self, **options: Value) -> Self:
        """The same job with some options set."""
        return self.model_copy(update={"options": {**self.options, **options}})


def command_line(job: JobRecord, command: str = "", *flags: str) -> str:
    """Return the line that asks for a job again, of its own command or of another one that takes the same options.

    >>> command_line(JobRecord(command="plan", model="gpt2", gpu="h100", options={"tp": "2/4", "sp": False}))
    'memcalc plan --model gpt2 --gpu h100 --tp 2/4 --no-sp'
    """
    head = [command or job.command, *([job.what] if job.what else []), *flags]
    places = {"model": job.model, **job.module, "gpu": job.gpu, "node": job.node}
    return render(*head, options={**places, **job.options, **job.query}, settings=job.settings, dirs=job.preset_dirs)


def _option(option: str, text: str) -> tuple[str, ...]:
    """An option and its value, which is a part of it where it could be taken for another option."""
    return (f"--{option}={text}",) if text.startswith("-") else (f"--{option}", text)


_TYPED = {"stages": "stage", "rank_all": "all"}
"""Options that are typed by another word than their keyword."""


def render(
    *arguments: str, options: Mapping[str, Any], settings: Mapping[str, Any] | None = None, dirs: Iterable[str] = ()
) -> str:
    """Return a ``memcalc`` line that a shell takes apart into these arguments and options, those of None left out.

    >>> render("check", "my config.json", options={"autocast": False}, settings={"workload.lora_dropout": 0.1})
    "memcalc check 'my config.json' --no-autocast --set workload.lora_dropout=0.1"
    """
    parts = ["memcalc", *arguments]
    for name, value in options.items():
        option = _TYPED.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            values = [str(item) for item in (value if isinstance(value, tuple) else (value,))]
            parts += [part for text in values for part in _option(option, text)]
    for key, value in (settings or {}).items():
        parts += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    for folder in dirs:
        parts += ["--preset-dir", folder]
    return shlex.join(parts)


Mode = Literal["plan", "estimate"]
"""What is asked of each job: its best plan, or the one strategy that its words describe."""
MODES: tuple[Mode, ...] = ("plan", "estimate")
SETTING = "set."
"""What begins the name of a field that has no option of its own."""

_MOST_EXCLUDED = 1000


def _listed(value: object) -> object:
    """Take one value as a list of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _flat(table: object) -> object:
    """Write the tables below `set` as dotted names."""
    if not isinstance(table, Mapping):
        return table
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if name == "set" and isinstance(value, Mapping):
            flat.update(_dotted(value))
        elif isinstance(value, Mapping):
            raise InputError(str(name), dict(value), "must be a value or a list of values")
        else:
            flat[name] = value
    return flat


def _dotted(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields below `set`, written as "strategy.zero" or as tables, by their full names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            for below, inner in value.items():
                yield f"{SETTING}{name}.{below}", inner
        else:
            yield f"{SETTING}{name}", value


Values = Annotated[tuple[Value, ...], BeforeValidator(_listed), Field(min_length=1)]
"""The values of one word."""
Words = Annotated[dict[str, Values], BeforeValidator(_flat)]
"""Words with their values."""


class SweepSettings(Strict):
    """What is asked of each job."""

    mode: Mode = "plan"
    """`plan`: the best plans; `estimate`: the one strategy that is given."""


class Sweep(Strict):
    """The content of a file.

    >>> Sweep(jobs={"model": "gpt2", "gpus": [1, 2]}).jobs
    {'model': ('gpt2',), 'gpus': (1, 2)}
    """

    sweep: SweepSettings = Field(default_factory=SweepSettings)
    """The mode."""
    jobs: Words
    """Each word with its values; the first varies slowest."""
    exclude: Annotated[tuple[Words, ...], Field(strict=False, max_length=_MOST_EXCLUDED)] = ()
    """Jobs that are left out: those that have one of the values for every word of a table."""
