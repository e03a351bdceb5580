"""Every figure of every plan: the table that stands for plans as CSV."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memcalc.report.tables import Column, Table, gib, percent
from memcalc.results.plans import Plan, Plans


class _Field(NamedTuple):
    """A column of the table, and how a plan fills it."""

    column: Column
    value: Callable[[Plan, Plans], str]


def _count(title: str, name: str) -> _Field:
    return _Field(Column(title, right=True), lambda plan, _: str(getattr(plan.strategy, name)))


def _choice(title: str, name: str) -> _Field:
    return _Field(Column(title), lambda plan, _: str(getattr(plan.strategy, name)))


def _bytes(title: str, name: str) -> _Field:
    return _Field(Column(title, "GiB", right=True), lambda plan, _: gib(getattr(plan.peak, name)))


def _seconds(name: str) -> _Field:
    return _Field(Column(name, "s", right=True), lambda plan, _: f"{getattr(plan.time, name):.4g}")


def _beside(plan: Plan, result: Plans) -> str:
    """Return a plan's throughput beside that of the first [%]."""
    first = result.plans[0].time.tokens_per_second_per_gpu
    return "" if plan.rank == 1 else f"{100 * (plan.time.tokens_per_second_per_gpu / first - 1):+.1f}"


_PARTS = ("step", "compute", "host", "recompute", "communication", "offload", "optimizer", "bubble", "low", "high")
_FIELDS = (
    _Field(Column("#", right=True), lambda plan, _: str(plan.rank)),
    _Field(Column("GPUs", right=True), lambda plan, _: str(plan.gpus)),
    _choice("framework", "framework"),
    _choice("precision", "precision"),
    _choice("optimizer", "optimizer"),
    _Field(Column("ZeRO", right=True), lambda plan, _: str(plan.strategy.zero)),
    _Field(Column("DP", right=True), lambda plan, _: str(plan.data_parallel)),
    _count("TP", "tp"),
    _Field(Column("SP"), lambda plan, _: "yes" if plan.strategy.sp else "no"),
    _count("PP", "pp"),
    _choice("schedule", "pp_schedule"),
    _count("VPP", "vpp"),
    _count("CP", "cp"),
    _count("EP", "ep"),
    _count("replicas", "dp_replicate"),
    _Field(Column("recompute"), lambda plan, _: plan.strategy.recompute),
    _Field(Column("offload"), lambda plan, _: "+".join(plan.strategy.offload) or "none"),
    _choice("tier", "offload_to"),
    _choice("attention", "attention"),
    _choice("loss", "loss"),
    _Field(
        Column("batch", "micro × acc.", right=True),
        lambda plan, _: f"{plan.strategy.micro_batch} × {plan.accumulation_steps}",
    ),
    _Field(Column("global batch", right=True), lambda plan, _: str(plan.global_batch)),
    _bytes("allocated", "allocated"),
    _bytes("reserved", "reserved"),
    _bytes("peak", "device"),
    _Field(Column("used", "%", right=True), lambda plan, plans: percent(plan.peak.device, plans.capacity)),
    _Field(Column("verdict"), lambda plan, _: plan.verdict),
    _Field(Column("tok/s/GPU", right=True), lambda plan, _: f"{plan.time.tokens_per_second_per_gpu:.0f}"),
    _Field(Column("vs #1", "%", right=True), _beside),
    _Field(Column("MFU", "%", right=True), lambda plan, _: f"{100 * plan.time.mfu:.1f}"),
    *(_seconds(name) for name in _PARTS),
    _Field(Column("GPU-hours", right=True), lambda plan, _: f"{plan.gpu_hours:.4g}"),
    _Field(Column("host memory", "GiB", right=True), lambda plan, _: gib(plan.host_memory)),
    _Field(Column("tier memory", "GiB", right=True), lambda plan, _: gib(plan.tier_memory)),
    _Field(Column("command"), lambda plan, _: plan.command),
    _Field(Column("front"), lambda plan, plans: "yes" if plan.rank in plans.pareto else ""),
    _Field(Column("special"), lambda plan, _: ", ".join(plan.special)),
)


def data(result: Plans) -> Table:
    """Return the plans with all that is known of them in columns."""
    rows = tuple(tuple(field.value(plan, result) for field in _FIELDS) for plan in result.plans)
    return Table("Plans", tuple(field.column for field in _FIELDS), rows)
