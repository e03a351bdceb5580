"""An estimate as a document: the verdict first, then where the bytes stand, then every term."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from memcalc.report.render import Report
from memcalc.report.tables import (
    Bar,
    Block,
    Code,
    Column,
    Document,
    Line,
    Table,
    facts,
    gib,
    percent,
)
from memcalc.results import Estimate, TermFacts
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB, KIB, MIB, format_bytes, format_count

__all__ = [
    "bar_of", "components_of", "foot_of", "head_of", "inputs_of", "made", "off_gpu_name", "on_node", "report", "sized",
    "strategy_words", "terms",
]  # fmt: skip

MOODS = {"fits": "good", "tight": "close", "does-not-fit": "bad"}
TIERS = {"cpu": "host memory", "nvme": "NVMe", "cxl": "CXL memory"}
_SIZE = Column("size", "GiB", right=True)
_SHARE = Column("share", "%", right=True, meter=True, priority=1)
_TERM_COLUMNS = (
    Column("component"),
    Column("term"),
    Column("size", "bytes", right=True),
    Column("phases"),
    Column("formula"),
    Column("values put in"),
    Column("source"),
)


def report(result: Estimate) -> Report:
    """Return the answer of ``memcalc estimate``."""
    return made(result, *head_of(result), bar_of(result), *_tables(result), *_notes(result), *foot_of(result))


def made(result: Estimate, *blocks: Block) -> Report:
    """Return blocks about an estimate with its data: one row a term, and its JSON."""
    return Report(Document(blocks, terms(result)), result.model_dump(mode="json", by_alias=True))


def terms(result: Estimate) -> Table:
    """Return the table with one row a term."""
    named: list[tuple[str, TermFacts]] = [(term.component, term) for term in result.terms]
    named += [(off_gpu_name(term.tier), term) for term in result.off_gpu]
    rows = tuple(
        (name, term.name, str(term.bytes), " ".join(term.phases), term.formula, inputs_of(term), term.source)
        for name, term in named
    )
    return Table("Terms", _TERM_COLUMNS, rows)


def strategy_words(strategy: Strategy) -> str:
    """Return a strategy in a few words: what shards and stores, then the degrees above one.

    >>> strategy_words(Strategy(zero=3, recompute="full", tp=2))
    'fsdp2, bf16-mixed, adamw, zero 3, tp 2, recompute full'
    >>> strategy_words(Strategy(framework="plain", precision="bf16", zero=0, lora="16", quantize="nf4"))
    'plain, bf16, adamw, lora 16, base nf4, zero 0, recompute none'
    """
    return ", ".join(_words(strategy))


def _words(strategy: Strategy) -> list[str]:
    degrees = [f"{name} {getattr(strategy, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(strategy, name) > 1]
    tier = "" if strategy.offload_to == "cpu" else f" to {strategy.offload_to}"
    offload = [f"offload {'+'.join(strategy.offload)}{tier}"] if strategy.offload else []
    adapters = [f"lora {strategy.lora}"] if strategy.lora else []
    base = [] if strategy.quantize == "none" else [f"base {strategy.quantize}"]
    words = [strategy.framework, strategy.precision, strategy.optimizer, *adapters, *base, f"zero {strategy.zero}"]
    return [*words, *degrees, f"recompute {strategy.recompute}", *offload]


def head_of(result: Estimate) -> tuple[Line, ...]:
    """Return the verdict, and the job in one sentence."""
    model, hardware, work = result.model, result.hardware, result.workload
    subject = f"{model.name} ({format_count(model.parameters)} parameters) on {hardware.gpus} × {hardware.gpu}"
    batch = f"micro-batch {work.micro_batch} × {work.seq_len} tokens", f"{work.accumulation_steps} accumulated"
    words = (*_words(result.strategy), *batch)
    title = Line(f"{subject}: {', '.join(words)}", "title", items=(subject, *words))
    return (Line(_verdict(result), "verdict", MOODS[result.verdict]), title)


def _verdict(result: Estimate) -> str:
    device, capacity = result.peak.device, result.budget.capacity
    used = f"{gib(device, 1)} of {gib(capacity, 1)} GiB ({percent(device, capacity)}%)"
    said = result.verdict.replace("-", " ")
    low, high = gib(result.interval.low, 1), gib(result.interval.high, 1)
    return f"{said} · {used} · between {low} and {high} GiB"


def bar_of(result: Estimate) -> Bar:
    """Return the GPU as a stacked bar."""
    budget, known = result.budget, result.interval
    return Bar(_parts(result), budget.capacity, kept=budget.reserve, low=known.low, high=known.high)


def _parts(result: Estimate) -> tuple[tuple[str, int], ...]:
    """Return the parts of ``device`` [bytes]: the components, then what the process holds outside the allocator."""
    inside = [(name, int(size)) for name, size in result.components.model_dump().items()]
    return (*inside, ("context", result.peak.device - result.peak.reserved))


def _tables(result: Estimate) -> Iterator[Block]:
    yield components_of(result)
    yield _phases(result)
    if len(result.stages) > 1:
        yield _stages(result)
    yield _figures(result)
    if result.off_gpu:
        yield _off_gpu(result)


def components_of(result: Estimate) -> Table:
    """Return the table of components at the peak."""
    device = result.peak.device
    rows = [(name, gib(size), percent(size, device)) for name, size in _parts(result)]
    return Table(
        "At the peak", (Column("component"), _SIZE, _SHARE), (*rows, ("device", gib(device), percent(device, device)))
    )


def _phases(result: Estimate) -> Table:
    usable = result.budget.usable
    rows = tuple((name, gib(size), percent(size, usable)) for name, size in result.phases.items())
    share = Column("of usable", "%", right=True, meter=True, priority=1)
    return Table(f"Allocated by phase; the peak stands at {result.peak.phase}", (Column("phase"), _SIZE, share), rows)


def _stages(result: Estimate) -> Table:
    columns = (
        Column("stage", right=True),
        Column("layers", right=True, priority=2),
        Column("allocated", "GiB", right=True),
        Column("reserved", "GiB", right=True, priority=1),
        Column("device", "GiB", right=True),
        Column("peak phase", priority=3),
    )
    rows = tuple(
        (str(stage.stage), str(stage.layers), gib(stage.allocated), gib(stage.reserved), gib(stage.device), stage.phase)
        for stage in result.stages
    )
    return Table("Pipeline stages", columns, rows)


def _figures(result: Estimate) -> Table:
    peak = result.peak
    rows = (
        ("allocated", gib(peak.allocated), "torch.cuda.max_memory_allocated()"),
        ("reserved", gib(peak.reserved), "torch.cuda.max_memory_reserved()"),
        ("device", gib(peak.device), "nvidia-smi, this process"),
    )
    return Table("Three figures", (Column("figure"), _SIZE, Column("as read by", priority=1)), rows)


def _off_gpu(result: Estimate) -> Table:
    """What one rank keeps off the GPU."""
    columns = (Column("memory"), Column("component", priority=1), Column("term"), _SIZE)
    rows = tuple((term.tier, term.component, term.name, gib(term.bytes)) for term in result.off_gpu)
    return Table("Off the GPU, one rank", columns, rows)


def off_gpu_name(tier: str) -> str:
    """Return what stands for a component where a term lies off the GPU."""
    return f"off the GPU: {tier}"


def on_node(result: Estimate, tier: str) -> int:
    """Return what a node keeps in a memory off its GPUs [bytes]."""
    return result.host_memory if tier == "host" else result.tier_memory


def _notes(result: Estimate) -> Iterator[Line]:
    budget, saved = result.budget, result.saved
    taken = f"{gib(budget.context)} context - {gib(budget.libraries)} libraries - {gib(budget.reserve)} reserve"
    yield _said("Budget", f"{gib(budget.capacity)} GiB capacity - {taken} = {gib(budget.usable)} GiB usable")
    kept = f"{sized(saved.per_block)} a block, {sized(saved.outside_blocks)} outside the blocks"
    yield _said("One micro-batch keeps for backward", f"{kept}, {sized(saved.total)} in all", "Backward")
    parts = [(result.host_memory, "host memory"), (result.tier_memory, TIERS[result.strategy.offload_to])]
    if any(size for size, _ in parts):
        needed = " and ".join(f"{sized(size)} of {name}" for size, name in parts if size)
        yield Line(f"A node needs {needed} off its GPUs; the system and data loaders take theirs beside it.")


def _said(name: str, said: str, label: str = "") -> Line:
    """Return a sentence that a terminal shows as a label and what belongs to it."""
    return Line(f"{name}: {said}.", label=label or name, items=(said,) if not label else (f"keeps {said}",))


def foot_of(result: Estimate) -> Iterator[Block]:
    """Yield warnings, assumptions and the command."""
    for warning in result.warnings:
        yield Line(f"Warning: {warning}", "warning")
    yield from facts("Assumed", result.assumptions)
    yield Code("Reproduce with", result.command)


def inputs_of(term: TermFacts) -> str:
    """Return the values that a term's formula was given."""
    return ", ".join(f"{name} = {_value(value)}" for name, value in term.inputs.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def sized(size: int) -> str:
    """Return `size` [bytes] in the binary unit that suits it."""
    unit = next((unit for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if size >= scale / 10), "B")
    return format_bytes(size, unit).replace(",", "")
