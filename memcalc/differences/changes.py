"""What is different between two jobs once every default is resolved, and which of it is a change of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from memcalc import api
from memcalc.differences.inputs import DiffInput
from memcalc.errors import MemcalcError
from memcalc.planner.answer import scalar, strategy_of
from memcalc.planner.job import split_options
from memcalc.preflight.names import bare
from memcalc.results.changes import DiffField, Value
from memcalc.specs.adapters import Lora
from memcalc.specs.hardware import Node
from memcalc.specs.model import Model
from memcalc.specs.options import BATCHING, BY_NAME, FIELDS, NEEDING, OPTIONS, BatchInputs
from memcalc.specs.strict import Option

if TYPE_CHECKING:
    from memcalc.planner.finalists import One

ANCHORS = ("framework", "precision", "optimizer", "zero", "offload", "recompute")
"""What a framework's own defaults depend on; they change with the first of these that does."""
BATCH = ("micro_batch", "gpus", "tp", "pp", "cp")
"""What the global batch follows from, where a file says how many micro-batches are accumulated."""
USUAL = (
    "framework", "seq_len", "global_batch", "precision", "optimizer", "optimizer_impl", "zero", "sp", "recompute",
    "attention", "loss", "kernels", "strategy.expandable_segments",
)  # fmt: skip
"""Options with a default that may depend on others: where both jobs agree on one, it stays so on the way."""
PARTS = {
    "tp": (("sp", *(row.name for row in NEEDING if row.needs == "tp")), "1"),
    "pp": (("pp_schedule", "vpp", "strategy.first_stage_layers", "strategy.last_stage_layers"), "1"),
    "cp": (("cp_kind",), "1"),
    "ep": (tuple(row.name for row in NEEDING if row.needs == "ep"), "1"),
    "offload": (("offload_to",), "none"),
    "lengths": (tuple(name for name in BATCHING if name != "lengths"), ""),
    # a quantised base is a change of its own
    "lora": (tuple(row.word for row in OPTIONS if row.needs_lora and row.name != "quantize"), "none"),
}
"""By option those that say something only beside it, and its value without them."""
LARGEST_GROUP = 3
"""Changes of which every combination is tried where none is possible alone; beyond, all that are left go together."""
_ABSENT = object()
Item = TypeVar("Item")

Change = tuple[str, ...]
"""Options that change at once."""


@dataclass(frozen=True)
class JobPair:
    """Both jobs as options that differ only where the jobs do."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    defaults: frozenset[str]
    """Options that nobody states: they follow from others."""
    dirs: tuple[str, ...]
    """Folders with presets of the user's own."""

    def after(self, applied: Iterable[Change]) -> dict[str, Any]:
        """The options of A with some changes."""
        options = dict(self.a)
        for name in (name for change in applied for name in change):
            options.pop(name, None)
            if name in self.b:
                options[name] = self.b[name]
        return options


def resolve(options: Mapping[str, Any], dirs: tuple[str, ...]) -> One:
    """The job of a flat table of options."""
    return api.single(preset_dirs=dirs, **split_options(options))


def align(a: DiffInput, b: DiffInput, dirs: tuple[str, ...]) -> JobPair:
    """State for both jobs what is the same, and what one leaves to a default that the other does not have.

    So no step on the way from one to the other changes what both have. An option is only stated where the job stays
    the same with it.
    """
    first, second = (_Stated(dict(job.options), resolve(job.options, dirs)) for job in (a, b))
    before, after = facts_of(first.job), facts_of(second.job)
    for name in sorted({*a.options, *b.options, *USUAL}, key=_turn):
        was, now = (facts.get(_field(name), _ABSENT) for facts in (before, after))
        if was == now and was is not _ABSENT:
            value = first.options.get(name, second.options.get(name, was))
            both = first.stating(name, value, dirs), second.stating(name, value, dirs)
            first, second = (both[0] or first, both[1] or second) if all(both) else (first, second)
        elif name in second.options and name not in first.options:
            first = first.stating(name, was, dirs) or first
        elif name in first.options and name not in second.options:
            second = second.stating(name, now, dirs) or second
    return JobPair(first.options, second.options, (a.defaults | b.defaults) - a.stated - b.stated, dirs)


@dataclass(frozen=True)
class _Stated:
    """Options, and the job that they come to."""

    options: dict[str, Any]
    job: One

    def stating(self, name: str, value: Any, dirs: tuple[str, ...]) -> _Stated | None:
        """The same job with one more option; None where it does not take it, or would be another one with it."""
        option = _as_option(value)
        if name in self.options and self.options[name] == option:
            return self
        options = {**self.options, name: option}
        try:
            stated = _Stated(options, resolve(options, dirs))
        except MemcalcError:
            return None
        return stated if option is not None and _same(self.job, stated.job) else None


def _same(before: One, after: One) -> bool:
    jobs = before.job, after.job
    return before.grid == after.grid and all(
        getattr(jobs[0], part) == getattr(jobs[1], part) for part in ("model", "gpu", "node")
    )


def _as_option(value: Any) -> Any:
    """A resolved value as an option; None where no option gives it."""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Node):
        return value.name
    return str(value) if isinstance(value, str | Lora) and str(value) else value if isinstance(value, Model) else None


def facts_of(single: One) -> dict[str, Any]:
    """All that a job is, by field, every default resolved."""
    grid, job = single.grid, single.job
    fields = {**dict(grid.fixed), **dict(strategy_of(grid))}
    del fields["global_tokens"]
    if not fields["lora"]:
        fields |= {"lora": None, "adapter_dtype": None}
    return {
        "model": bare(job.model).model_copy(update={"name": job.model.name}),
        "gpu": job.gpu.model_copy(update={"calibration": None}),
        "node": job.node,
        "calibration": job.gpu.calibration,
        **dict(BatchInputs() if job.lengths is None else job.lengths.inputs),
        "gpus": grid.layouts[0].gpus,
        **fields,
        "accumulation_steps": scalar(grid.accumulation),
    }


def _field(name: str) -> str:
    """The field that an option is resolved to."""
    return name.partition(".")[2] or name


_DOTTED = {option.name: name for name, option in FIELDS.items()}


def _turn(name: str) -> tuple[int, str]:
    """Where an option stands in the order in which changes are applied."""
    option = BY_NAME.get(_field(name))
    return (option.step if option else Option._field_defaults["step"], name)


def changes_of(pair: JobPair) -> tuple[Change, ...]:
    """The options that differ, in the order in which they are applied; some go with another one that differs."""
    differ = sorted(
        {name for name in (*pair.a, *pair.b) if pair.a.get(name, _ABSENT) != pair.b.get(name, _ABSENT)}, key=_turn
    )
    stated = [name for name in differ if name not in pair.defaults] or differ[:1]
    heads = {name: _head(name, stated, pair) for name in differ}
    parts = {head: tuple(name for name in differ if heads[name] == head) for head in heads.values()}
    return tuple(parts[name] for name in differ if name in parts)


def _head(name: str, stated: list[str], pair: JobPair) -> str:
    """The option that another goes with: what it follows from, or is a part of; else itself."""
    if name not in stated:
        anchors = BATCH if name == "global_batch" else (*ANCHORS, stated[0])
        return next((anchor for anchor in anchors if anchor in stated), name)
    jobs = (pair.a, pair.b)
    for owner, (parts, neutral) in PARTS.items():
        if owner in stated and name in parts and any(str(job.get(owner, neutral)) == neutral for job in jobs):
            return owner
    one_sided = any(name not in job for job in jobs)
    return "framework" if "framework" in stated and name in FIELDS and one_sided else name


def fields_between(before: One, after: One, stated: Iterable[str]) -> tuple[DiffField, ...]:
    """What is different, what was stated first."""
    fields = _fields(before, after, set(stated))
    return tuple(sorted(fields, key=lambda change: (change.follows, _turn(change.field))))


def _fields(before: One, after: One, stated: set[str]) -> Iterator[DiffField]:
    was, now = facts_of(before), facts_of(after)
    for name, value in was.items():
        if value != now[name]:
            option = _DOTTED.get(name, name)
            old, new = _value(value), _value(now[name])
            if old == new:  # two of one name, such as a preset of one's own
                new = f"{new} (another one)"
            yield DiffField(field=option, before=old, after=new, follows=option not in stated)


def _value(value: Any) -> Value:
    """A value as it is shown: a list as it is typed, a preset by its name."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = getattr(value, "said", None) or getattr(value, "name", None)
    return str(named or value)


def groups(remaining: list[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield what may be applied at once: single changes first, small groups, at last all that remain."""
    for size in range(1, min(LARGEST_GROUP, len(remaining)) + 1):
        yield from combinations(remaining, size)
    yield tuple(remaining)


def named(fields: Iterable[DiffField]) -> str:
    """Return what was stated to change, in a few words; what follows where nothing was stated.

    >>> named([DiffField(field="micro_batch", before=1, after=2, follows=False)])
    'micro-batch 1 → 2'
    """
    listed = list(fields)
    stated = [change for change in listed if not change.follows] or listed
    return ", ".join(f"{change.option} {change.was} → {change.now}" for change in stated)
