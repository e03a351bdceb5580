"""Ranked plans as a document: what was assumed, the table, why the first is first, and how to see more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from memcalc.report import recipe
from memcalc.report.estimate import MOODS
from memcalc.report.render import Report
from memcalc.report.tables import Block, Code, Column, Document, Line, Table, facts, gib, percent
from memcalc.results import Nearest, Plan, Plans
from memcalc.units import GIB, format_count, format_seconds

__all__ = ["report"]


class _Field(NamedTuple):
    """A column of the plan table, how a plan fills it, and when a terminal or a page needs it."""

    column: Column
    value: Callable[[Plan, Plans], str]
    shown: str = "always"
    """always, varies (plans differ in it), used (some plan has not 1), special (some has any), data (in data alone)."""


def _count(title: str, name: str, priority: int) -> _Field:
    column = Column(title, right=True, priority=priority)
    return _Field(column, lambda plan, _: str(getattr(plan.strategy, name)), "used")


def _choice(title: str, name: str, priority: int, shown: str) -> _Field:
    return _Field(Column(title, priority=priority), lambda plan, _: str(getattr(plan.strategy, name)), shown)


def _bytes(title: str, name: str, shown: str) -> _Field:
    return _Field(Column(title, "GiB", right=True), lambda plan, _: gib(getattr(plan.peak, name)), shown)


def _seconds(name: str) -> _Field:
    return _Field(Column(name, "s", right=True), lambda plan, _: f"{getattr(plan.time, name):.4g}", "data")


def _beside(plan: Plan, result: Plans) -> str:
    """Return a plan's throughput beside that of the first [%]."""
    first = result.plans[0].time.tokens_per_second_per_gpu
    return "" if plan.rank == 1 else f"{100 * (plan.time.tokens_per_second_per_gpu / first - 1):+.1f}"


_PARTS = ("step", "compute", "recompute", "communication", "offload", "optimizer", "bubble", "low", "high")
_SHORT = (("optimizer", "opt"), ("activations", "act"), ("modules:", ""), ("selective-", "sel-"))
_FIELDS = (
    _Field(Column("#", right=True), lambda plan, _: str(plan.rank)),
    _Field(Column("GPUs", right=True, priority=1), lambda plan, _: str(plan.gpus)),
    _choice("framework", "framework", 9, "varies"),
    _choice("precision", "precision", 5, "always"),
    _choice("optimizer", "optimizer", 6, "varies"),
    _Field(Column("ZeRO", right=True, priority=1), lambda plan, _: str(plan.strategy.zero)),
    _Field(Column("DP", right=True, priority=8), lambda plan, _: str(plan.data_parallel), "used"),
    _count("TP", "tp", 1),
    _Field(Column("SP", priority=3), lambda plan, _: "yes" if plan.strategy.sp else "no", "varies"),
    _count("PP", "pp", 1),
    _choice("schedule", "pp_schedule", 4, "varies"),
    _count("VPP", "vpp", 7),
    _count("CP", "cp", 1),
    _count("EP", "ep", 1),
    _Field(Column("recompute", priority=1, short=_SHORT), lambda plan, _: plan.strategy.recompute),
    _Field(Column("offload", priority=3, short=_SHORT), lambda plan, _: "+".join(plan.strategy.offload) or "none"),
    _choice("tier", "offload_to", 3, "varies"),
    _choice("attention", "attention", 8, "varies"),
    _choice("loss", "loss", 7, "varies"),
    _Field(
        Column("batch", "micro × acc.", right=True, priority=2),
        lambda plan, _: f"{plan.strategy.micro_batch} × {plan.accumulation_steps}",
    ),
    _Field(Column("global batch", right=True), lambda plan, _: str(plan.global_batch), "data"),
    _bytes("allocated", "allocated", "data"),
    _bytes("reserved", "reserved", "data"),
    _bytes("peak", "device", "always"),
    _Field(
        Column("used", "%", right=True, priority=4),
        lambda plan, plans: percent(plan.peak.device, plans.capacity),
    ),
    _Field(Column("verdict", priority=3), lambda plan, _: plan.verdict, "varies"),
    _Field(Column("tok/s/GPU", right=True), lambda plan, _: f"{plan.time.tokens_per_second_per_gpu:.0f}"),
    _Field(Column("beside #1", "%", right=True, priority=4), _beside, "varies"),
    _Field(Column("MFU", "%", right=True, priority=1), lambda plan, _: f"{100 * plan.time.mfu:.1f}"),
    *(_seconds(name) for name in _PARTS),
    _Field(Column("GPU-hours", right=True), lambda plan, _: f"{plan.gpu_hours:.4g}", "data"),
    _Field(Column("host memory", "GiB", right=True), lambda plan, _: gib(plan.host_memory), "data"),
    _Field(Column("tier memory", "GiB", right=True), lambda plan, _: gib(plan.tier_memory), "data"),
    _Field(Column("command"), lambda plan, _: plan.command, "data"),
    _Field(Column("front", priority=3), lambda plan, plans: "yes" if plan.rank in plans.pareto else "", "varies"),
    _Field(Column("special", priority=9, below=True), lambda plan, _: ", ".join(plan.special), "special"),
)
_NARROW = (
    _Field(
        Column("#", right=True), lambda plan, plans: f"{plan.rank}{'*' if plan.rank in plans.pareto else ' '}"
    ),
    _Field(Column("GPUs", right=True), lambda plan, _: str(plan.gpus), "varies"),
    _bytes("peak", "device", "always"),
    _Field(Column("tok/s", "/GPU", right=True), lambda plan, _: f"{plan.time.tokens_per_second_per_gpu:.0f}"),
    _Field(Column("to #1", "%", right=True, priority=2), _beside, "varies"),
    _Field(Column("MFU", "%", right=True, priority=4), lambda plan, _: f"{100 * plan.time.mfu:.1f}"),
    _choice("framework", "framework", 2, "varies"),
    _choice("precision", "precision", 2, "varies"),
    _choice("optimizer", "optimizer", 4, "varies"),
    _Field(Column("layout", "Z = ZeRO"), lambda plan, _: _layout(plan)),
    _Field(Column("recompute", short=_SHORT, priority=1), lambda plan, _: plan.strategy.recompute),
    _Field(
        Column("offload", short=(*_SHORT, ("none", "-")), priority=1),
        lambda plan, _: "+".join(plan.strategy.offload) or "none", "varies",
    ),
    _Field(
        Column("batch", "mb × acc", right=True, priority=1),
        lambda plan, _: f"{plan.strategy.micro_batch} × {plan.accumulation_steps}", "varies",
    ),
    _Field(Column("special", priority=9, below=True), lambda plan, _: ", ".join(plan.special), "special"),
)  # fmt: skip
"""What plans are compared by where there is little room."""


def report(result: Plans) -> Report:
    """Return the answer of ``memcalc plan``."""
    body = _found(result) if result.plans else _nothing(result)
    document = Document(
        (*_head(result), *body, *recipe.blocks(result), *_asked(result), *_foot(result)), _table(result, _FIELDS)
    )
    return Report(document, result.model_dump(mode="json", by_alias=True))


def _head(result: Plans) -> Iterator[Line]:
    model, hardware = result.model, result.hardware
    counts = sorted({plan.gpus for plan in result.plans}) or [hardware.gpus]
    gpus = ", ".join(map(str, counts[:-1])) + " or " * (len(counts) > 1) + str(counts[-1])
    subject = f"{model.name} ({format_count(model.parameters)} parameters) on {gpus} × {hardware.gpu}"
    yield _verdict(result)
    yield Line(
        f"{subject}, {result.seq_len} tokens a sequence",
        "title",
        items=(subject, f"{result.seq_len} tokens a sequence"),
    )


def _verdict(result: Plans) -> Line:
    if not result.plans:
        return Line(f"does not fit · {result.too_large}", "verdict", MOODS["does-not-fit"])
    first = result.plans[0]
    used = f"{gib(first.peak.device, 1)} of {gib(result.capacity, 1)} GiB"
    used += f" ({percent(first.peak.device, result.capacity)}%)"
    said = f"#1 takes {used} and makes {first.time.tokens_per_second_per_gpu:.0f} tok/s/GPU"
    return Line(f"{first.verdict} · {said}", "verdict", MOODS[first.verdict])


def _found(result: Plans) -> Iterator[Block]:
    wide = _table(result, tuple(field for field in _FIELDS if _needed(field, result)))
    narrow = _table(result, tuple(field for field in _NARROW if _needed(field, result)))
    yield replace(wide, narrow=narrow)
    first = result.plans[0]
    yield Line(f"Why #{first.rank}: {first.why}", label=f"Why #{first.rank}", items=(first.why,))
    if result.pareto:
        ranks = tuple(f"#{rank}" for rank in result.pareto)
        said = "No other plan is both smaller and faster than"
        yield Line(f"{said} {', '.join(ranks)}.", label="Front *", items=(f"{said} {', '.join(ranks)}.",))


def _nothing(result: Plans) -> Iterator[Block]:
    if result.nearest:
        columns = (
            Column("smallest change that would fit"),
            Column("peak", "GiB", right=True),
            Column("tok/s/GPU", right=True),
            Column("throughput", "%", right=True, priority=1),
        )
        yield Table("Nearest", columns, tuple(_change(change) for change in result.nearest))
        yield Line("Throughput beside that of the job as asked for, had it fitted.", "faint")


def _change(change: Nearest) -> tuple[str, str, str, str]:
    share = "unknown" if change.throughput is None else f"{100 * change.throughput:.0f}"
    return change.change, gib(change.device), f"{change.tokens_per_second_per_gpu:.0f}", share


def _asked(result: Plans) -> Iterator[Line]:
    if result.asked:
        yield Line(f"Asked: {result.asked}", "verdict")


def _foot(result: Plans) -> Iterator[Block]:
    for warning in result.warnings:
        yield Line(f"Warning: {warning}", "warning")
    yield from facts("Assumed", result.assumptions)
    tried = f"{result.searched} strategies searched, {result.feasible} fit, {format_seconds(result.elapsed)}"
    yield Line(f"{tried}; {gib(result.capacity)} GiB a GPU.", "faint")
    yield Code("Reproduce with", result.command)
    if result.plans:
        yield Code("Byte by byte", result.plans[0].command)


def _table(result: Plans, fields: tuple[_Field, ...]) -> Table:
    rows = tuple(tuple(field.value(plan, result) for field in fields) for plan in result.plans)
    return Table("Plans", tuple(_drawn(field.column, result) for field in fields), rows)


def _drawn(column: Column, result: Plans) -> Column:
    """Return the column of peaks with a small bar, which the GPU's capacity fills."""
    return replace(column, meter=True, whole=result.capacity / GIB) if column.title == "peak" else column


def _layout(plan: Plan) -> str:
    """Return how a plan shards, in a few letters.

    >>> from types import SimpleNamespace as Some
    >>> _layout(Some(strategy=Some(zero=1, tp=8, sp=True, pp=4, vpp=2, cp=1, ep=1)))
    'Z1 TP8+SP PP4x2'
    """
    chosen = plan.strategy
    words = [f"Z{chosen.zero}"]
    words += [f"TP{chosen.tp}" + "+SP" * chosen.sp] * (chosen.tp > 1)
    words += [f"PP{chosen.pp}" + f"x{chosen.vpp}" * (chosen.vpp > 1)] * (chosen.pp > 1)
    words += [f"{name.upper()}{getattr(chosen, name)}" for name in ("cp", "ep") if getattr(chosen, name) > 1]
    return " ".join(words)


def _needed(field: _Field, result: Plans) -> bool:
    values = {field.value(plan, result) for plan in result.plans}
    several = len(values) > 1
    return {"always": True, "varies": several, "used": values != {"1"}, "special": values != {""}, "data": False}[
        field.shown
    ]
