"""What is different between two jobs once every default is resolved, and which of it is a change of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcalc import api
from memcalc.differences.sides import Side
from memcalc.differences.texts import split
from memcalc.errors import MemcalcError
from memcalc.planner.adapters import FIELDS_OF_LORA
from memcalc.planner.answer import scalar
from memcalc.planner.settings import FIELDS
from memcalc.preflight.names import bare
from memcalc.results.diff import DiffField, Value
from memcalc.specs.adapters import Lora
from memcalc.specs.hardware import Node
from memcalc.specs.model import Model

if TYPE_CHECKING:
    from memcalc.planner.one import One

__all__ = ["Change", "Pair", "changes", "facts_of", "fields_between", "one_of", "paired"]

ORDER = (
    "model", "gpu", "node", "gpus", "calibration", "framework", "precision", "seq_len", "quantize", "lora",
    "adapter_dtype", "also_train", "autocast", "optimizer", "optimizer_impl", "optimizer_in_backward", "tp", "sp", "pp",
    "pp_schedule", "vpp", "cp", "cp_kind", "ep", "zero", "offload", "offload_to", "recompute", "attention", "loss",
    "kernels", "compile", "micro_batch", "global_batch",
)  # fmt: skip
"""In which changes are applied: the job, its states, their layout, what is kept and computed again, then the batch."""
ANCHORS = ("framework", "precision", "optimizer", "zero", "offload", "recompute")
"""What a framework's own defaults depend on; they change with the first of these that does."""
BATCH = ("micro_batch", "gpus", "tp", "pp", "cp")
"""What the global batch follows from, where a file says how many micro-batches are accumulated."""
USUAL = (
    "framework", "seq_len", "global_batch", "precision", "optimizer", "optimizer_impl", "zero", "sp", "recompute",
    "attention", "loss", "kernels", "strategy.expandable_segments",
)  # fmt: skip
"""Words with a default that may depend on others: where both jobs agree on one, it stays so on the way."""
PARTS = {
    "tp": (("sp",), "1"),
    "pp": (("pp_schedule", "vpp", "strategy.first_stage_layers", "strategy.last_stage_layers"), "1"),
    "cp": (("cp_kind",), "1"),
    "offload": (("offload_to",), "none"),
    "lora": (
        ("adapter_dtype", "also_train", *(f"strategy.{name}" for name in FIELDS_OF_LORA), "workload.lora_dropout"),
        "none",
    ),
}
"""By word those that say something only beside it, and its value without them."""
_SAME = object()


@dataclass(frozen=True)
class Change:
    """Words that change at once."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """Both jobs in words that differ only where the jobs do."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    defaults: frozenset[str]
    """Words that nobody says: they follow from others."""
    dirs: tuple[str, ...]

    def after(self, changed: Iterable[Change]) -> dict[str, Any]:
        """The words of A with some changes."""
        words = dict(self.a)
        for name in (name for change in changed for name in change.words):
            words.pop(name, None)
            if name in self.b:
                words[name] = self.b[name]
        return words


def one_of(words: Mapping[str, Any], dirs: tuple[str, ...]) -> One:
    """The job of a flat table of words."""
    return api.single(preset_dirs=dirs, **split(words))


def paired(a: Side, b: Side, dirs: tuple[str, ...]) -> Pair:
    """Say on both sides what is the same, and what a side leaves to a default that the other one does not have.

    So no step on the way from one to the other changes what both have. A word is only said where the job stays the
    same with it.
    """
    first, second = (_Told(dict(side.words), one_of(side.words, dirs)) for side in (a, b))
    facts = [facts_of(side.one) for side in (first, second)]
    for name in sorted({*a.words, *b.words, *USUAL}, key=_place):
        values = [one.get(_fact(name), _SAME) for one in facts]
        if values[0] == values[1] and values[0] is not _SAME:
            raw = first.words.get(name, second.words.get(name, values[0]))
            agreed = first.saying(name, raw, dirs), second.saying(name, raw, dirs)
            first, second = (agreed[0] or first, agreed[1] or second) if all(agreed) else (first, second)
        elif name in second.words and name not in first.words:
            first = first.saying(name, values[0], dirs) or first
        elif name in first.words and name not in second.words:
            second = second.saying(name, values[1], dirs) or second
    return Pair(first.words, second.words, (a.defaults | b.defaults) - a.said - b.said, dirs)


@dataclass(frozen=True)
class _Told:
    """Words, and the job that they come to."""

    words: dict[str, Any]
    one: One

    def saying(self, name: str, value: Any, dirs: tuple[str, ...]) -> _Told | None:
        """The same job with one more word; None where it does not take it, or would be another one with it."""
        word = _typed(value)
        if name in self.words and self.words[name] == word:
            return self
        try:
            told = _Told({**self.words, name: word}, one_of({**self.words, name: word}, dirs))
        except MemcalcError:
            return None
        return told if word is not None and _same(self.one, told.one) else None


def _same(before: One, after: One) -> bool:
    jobs = before.job, after.job
    return before.grid == after.grid and all(
        getattr(jobs[0], part) == getattr(jobs[1], part) for part in ("model", "gpu", "node")
    )


def _typed(value: Any) -> Any:
    """A resolved value as a word; None where there is no word for it."""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Node):
        return value.name
    return str(value) if isinstance(value, str | Lora) and str(value) else value if isinstance(value, Model) else None


def facts_of(one: One) -> dict[str, Any]:
    """All that a job is, by field, every default resolved."""
    grid, job = one.grid, one.job
    layout, fixed = grid.layouts[0], dict(vars(grid.fixed))
    fixed.pop("global_tokens")
    if fixed["lora"] is None:
        fixed["adapter_dtype"] = None
    return {
        "model": bare(job.model).model_copy(update={"name": job.model.name}),
        "gpu": job.gpu.model_copy(update={"calibration": None}),
        "node": job.node,
        "calibration": job.gpu.calibration,
        "gpus": layout.gpus,
        "precision": grid.precisions[0],
        "recompute": grid.recomputes[0],
        "zero": grid.zeros[0],
        "offload": grid.offloads[0],
        "micro_batch": grid.micro_batches[0],
        **{name: getattr(layout, name) for name in ("dp", "tp", "sp", "pp", "vpp", "cp", "ep")},
        "pp_schedule": layout.schedule,
        **fixed,
        "accumulation_steps": scalar(grid.accumulation),
    }


def _fact(name: str) -> str:
    """The field that a word is resolved to."""
    return name.partition(".")[2] or name


_DOTTED = {name.partition(".")[2]: name for name in FIELDS}


def _place(name: str) -> tuple[int, str]:
    """Where a word stands in the order; fields of ``--set`` come before the batch."""
    last = ORDER.index("micro_batch")
    return (ORDER.index(name) if name in ORDER else last - 1, name)


def changes(pair: Pair) -> tuple[Change, ...]:
    """The words that differ, in the order in which they are applied; some go with another one that differs."""
    differ = sorted(
        {name for name in (*pair.a, *pair.b) if pair.a.get(name, _SAME) != pair.b.get(name, _SAME)}, key=_place
    )
    own = [name for name in differ if name not in pair.defaults] or differ[:1]
    heads = {name: _head(name, own, pair) for name in differ}
    groups = {head: tuple(name for name in differ if heads[name] == head) for head in heads.values()}
    return tuple(Change(groups[name]) for name in differ if name in groups)


def _head(name: str, own: list[str], pair: Pair) -> str:
    """The word that one goes with: what a default or the batch follows from, or what it is a part of; else itself."""
    if name not in own:
        anchors = BATCH if name == "global_batch" else (*ANCHORS, own[0])
        return next((anchor for anchor in anchors if anchor in own), name)
    sides = (pair.a, pair.b)
    for owner, (parts, neutral) in PARTS.items():
        if owner in own and name in parts and any(str(side.get(owner, neutral)) == neutral for side in sides):
            return owner
    one_sided = any(name not in side for side in sides)
    return "framework" if "framework" in own and name in FIELDS and one_sided else name


def fields_between(before: One, after: One, told: Iterable[str]) -> tuple[DiffField, ...]:
    """What is different, what was told first."""
    return tuple(sorted(_fields(before, after, set(told)), key=lambda one: (one.follows, _place(one.field))))


def _fields(before: One, after: One, told: set[str]) -> Iterator[DiffField]:
    was, now = facts_of(before), facts_of(after)
    for name, value in was.items():
        if value != now[name]:
            word = _DOTTED.get(name, name)
            old, new = _value(value), _value(now[name])
            if old == new:  # two of one name, such as a preset of one's own
                new = f"{new} (another one)"
            yield DiffField(field=word, before=old, after=new, follows=word not in told)


def _value(value: Any) -> Value:
    """A value as it is shown: a list as it is typed, a preset by its name."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = getattr(value, "said", None) or getattr(value, "name", None)
    return str(named or value)
