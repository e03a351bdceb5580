"""A sweep: lists of words whose every combination is one job.

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

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from memcalc.errors import InputError
from memcalc.specs.strict import Strict

Mode = Literal["plan", "estimate"]
"""What is asked of each job: its best plan, or the one strategy that its words describe."""
MODES: tuple[Mode, ...] = ("plan", "estimate")
SETTING = "set."
"""What begins the name of a field that has no option of its own."""
Value = str | int | float | bool

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
