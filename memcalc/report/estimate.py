"""An estimate as a document: the verdict first, then where the bytes stand, then every term."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memcalc.errors import InputError, UnknownNameError
from memcalc.report.lengths import length_lines
from memcalc.report.occasions import failing, occasion_lines, occasions_table
from memcalc.report.step_time import parts_table, stands_on, time_lines
from memcalc.report.tables import (
    Bar,
    Block,
    Branch,
    Code,
    Column,
    Leaf,
    Line,
    Report,
    Table,
    Tree,
    facts,
    gib,
    header,
    made,
    percent,
)
from memcalc.results.estimates import EXPANDABLE, ActivationBudget, Components, Estimate, TermFacts, flushed
from memcalc.specs.options import DEGREES
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB, KIB, MIB, format_bytes, format_count

MOODS = {"fits": "good", "tight": "close", "does-not-fit": "bad"}
TIERS = {"cpu": "host memory", "nvme": "NVMe", "cxl": "CXL memory"}
_SIZE = Column("size", "GiB", right=True)
_SHARE = Column("share", "%", right=True, meter=True, priority=1)
_TERM_COLUMNS = header("component | term | size [bytes] > | phases | formula | values put in | source")


def report(result: Estimate) -> Report:
    """Return the answer of ``memcalc estimate``."""
    return made(
        result,
        terms(result),
        *answer_of(result),
        *length_lines(result.lengths, result.verdict),
        bar_of(result),
        *_tables(result),
        *_notes(result),
        *occasion_lines(result),
        *foot_of(result),
    )


def terms(result: Estimate) -> Table:
    """Return the table with one row a term."""
    named: list[tuple[str, TermFacts]] = [(term.component, term) for term in result.terms]
    named += [(term.component, term) for term in result.outside]
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
    degrees = [f"{name.replace('_', '-')} {n}" for name in DEGREES if (n := getattr(strategy, name)) > 1]
    tier = "" if strategy.offload_to == "cpu" else f" to {strategy.offload_to}"
    offload = [f"offload {'+'.join(strategy.offload)}{tier}"] if strategy.offload else []
    adapters = [f"lora {strategy.lora}"] if strategy.lora else []
    base = [] if strategy.quantize == "none" else [f"base {strategy.quantize}"]
    text = [strategy.framework, strategy.precision, strategy.optimizer, *adapters, *base, f"zero {strategy.zero}"]
    return [*text, *degrees, f"recompute {strategy.recompute}", *offload]


def head_of(result: Estimate) -> tuple[Line, ...]:
    """Return the verdict, and the job in one sentence."""
    model, hardware, work = result.model, result.hardware, result.workload
    subject = f"{model.name} ({format_count(model.parameters)} parameters) on {hardware.gpus} × {hardware.gpu}"
    batch = f"micro-batch {work.micro_batch} × {work.seq_len} tokens", f"{work.accumulation_steps} accumulated"
    text = (*_words(result.strategy), *batch)
    title = Line(f"{subject}: {', '.join(text)}", "title", items=(subject, *text))
    return (Line(_verdict(result), "verdict", MOODS[result.verdict]), title)


def answer_of(result: Estimate) -> tuple[Line, ...]:
    """Return the verdict, the time of a step where one is known, and the job."""
    verdict, title = head_of(result)
    return (verdict, *time_lines(result), title)


def _verdict(result: Estimate) -> str:
    device, capacity = result.peak.device, result.budget.capacity
    used = f"{gib(device, 1)} of {gib(capacity, 1)} GiB ({percent(device, capacity)}%)"
    text = " · ".join(filter(None, (result.verdict.replace("-", " "), failing(result))))
    low, high = gib(result.interval.low, 1), gib(result.interval.high, 1)
    why = result.reason if device <= capacity else ""
    full = f"frees its cache {flushed(result.flushes)}" if result.flushes else ""
    return " · ".join(filter(None, (text, used, why, f"between {low} and {high} GiB", full)))


def bar_of(result: Estimate) -> Bar:
    """Return the GPU as a stacked bar."""
    budget, known = result.budget, result.interval
    return Bar(_parts(result), budget.capacity, margin=budget.reserve, low=known.low, high=known.high)


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
    columns = header("stage > | layers >2 | allocated [GiB] > | reserved [GiB] >1 | device [GiB] > | peak phase <3")
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
    rows = tuple((term.tier, term.component, term.name, gib(term.bytes)) for term in result.off_gpu)
    return Table("Off the GPU, one rank", (*header("memory | component <1 | term"), _SIZE), rows)


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
    if result.activation_budget is not None:
        yield _said("Room for activations", room_text(result.activation_budget), "Room")
    backward = f"{sized(saved.per_block)} a block, {sized(saved.outside_blocks)} outside the blocks"
    yield _said("One micro-batch keeps for backward", f"{backward}, {sized(saved.total)} in all", "Backward")
    yield from cache_of(result)
    parts = [(result.host_memory, "host memory"), (result.tier_memory, TIERS[result.strategy.offload_to])]
    if any(size for size, _ in parts):
        needed = " and ".join(f"{sized(size)} of {name}" for size, name in parts if size)
        yield Line(f"A node needs {needed} off its GPUs; the system and data loaders take theirs beside it.")


def cache_of(result: Estimate) -> Iterator[Line]:
    """Yield what expandable segments leave of the allocator's cache where that is less, and whether it fits then."""
    fits = result.expandable_verdict == "fits" and result.verdict != "fits"
    if result.expandable_device is None or not (fits or result.expandable_device < result.peak.device):
        return
    cache = f"{gib(result.components.reserve, 1)} GiB of freed blocks that PyTorch keeps"
    less = f"with {EXPANDABLE} the device figure is {gib(result.expandable_device, 1)} GiB{', which fits' * fits}"
    yield Line(f"Cache: {cache}; {less}.", label="Cache", items=(cache, less))


def _said(name: str, text: str, label: str = "") -> Line:
    """Return a sentence that a terminal shows as a label and what belongs to it."""
    return Line(f"{name}: {text}.", label=label or name, items=(f"keeps {text}" if label == "Backward" else text,))


def room_text(budget: ActivationBudget) -> str:
    """What the states leave of the usable memory, and the micro-batch and segments that fit in there."""
    taken = [
        (name, getattr(budget, name)) for name in ("parameters", "gradients", "optimizer", "buffers", "cache", "margin")
    ]
    less = "".join(f" - {gib(size)} {name}" for name, size in taken if size)
    micro = f"micro-batch up to {budget.micro_batch} fits" if budget.micro_batch else "no micro-batch fits"
    parts = {None: "no segments are enough", 1: ""}
    segments = parts.get(budget.segments, f"{budget.segments} checkpointed segments would do")
    left = f"{gib(budget.usable)}{less} = {gib(budget.available)} GiB, {gib(budget.activations)} taken"
    return "; ".join(filter(None, (left, micro, segments)))


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


OFF_GPU = "off-gpu"
_BRANCHES = (*Components.model_fields, "context", OFF_GPU)
FOLDS = ("others", "none", "all", *_BRANCHES)
"""What may be folded: terms that are not alive at the peak, nothing, everything, or components by name."""


@dataclass(frozen=True)
class Folding:
    """What a tree tells in one line."""

    others: bool = True
    """Terms that are not alive at the peak."""
    branches: frozenset[str] = frozenset()
    """Components, and what lies off the GPU."""


def folding(fold: str | None = None, only: str | None = None) -> Folding:
    """Read what is typed.

    >>> folding(only="activations").branches == set(_BRANCHES) - {"activations"}
    True
    >>> folding("none").others, folding("others,buffers").branches
    (False, frozenset({'buffers'}))
    """
    names = _names("fold", fold or "others", FOLDS)
    if len(names) > 1 and {"none", "all"} & set(names):
        raise InputError("fold", str(fold), "none and all stand alone")
    folded = set(_BRANCHES) if names == ["all"] else {name for name in names if name in _BRANCHES}
    if only is not None:
        folded |= set(_BRANCHES) - set(_names("only", only, _BRANCHES))
    return Folding("none" not in names, frozenset(folded))


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UnknownNameError(option, name, f"must be one or several of {', '.join(known)}", known)
    return names


def explanation(result: Estimate, folded: Folding | None = None) -> Report:
    """Return the answer of ``memcalc explain``: every term with formula, values and source, and the parts of a step."""
    beside = (*occasion_lines(result), *((occasions_table(result),) if result.occasions else ()))
    blocks = (*answer_of(result), tree_of(result, folded or Folding()), *_time(result), *beside, *foot_of(result))
    return made(result, terms(result), *blocks)


def _time(result: Estimate) -> Iterator[Block]:
    if result.time is not None:
        yield parts_table(result.time)
        yield stands_on(result.time)


def tree_of(result: Estimate, folded: Folding) -> Tree:
    """Return the terms by component, the largest at the peak first, then what lies off the GPU."""
    sources = list(dict.fromkeys(term.source for term in _shown(result, folded)))
    inside, outside = _branches(result, folded, sources), _outside(result, folded, sources)
    branches = (*inside, *outside, *_off_gpu_branches(result, folded, sources))
    title = f"At the peak, in {result.peak.phase}; share of the device figure"
    return Tree(branches, terms(result), tuple(sources), title, "not at the peak")


def _shown(result: Estimate, folded: Folding) -> Iterator[TermFacts]:
    for component, members in _grouped(result):
        if component not in folded.branches:
            yield from (term for term in members if not folded.others or _at_peak(term, result))
    if "context" not in folded.branches:
        yield from result.outside
    if OFF_GPU not in folded.branches:
        yield from result.off_gpu


def _grouped(result: Estimate) -> list[tuple[str, list[TermFacts]]]:
    """Return terms by component, the reserve last; within one those at the peak first, the largest first."""
    grouped: dict[str, list[TermFacts]] = {}
    for term in sorted(result.terms, key=lambda term: (not _at_peak(term, result), -term.bytes)):
        grouped.setdefault(term.component, []).append(term)
    grouped.setdefault("reserve", [])
    return sorted(grouped.items(), key=lambda item: (item[0] == "reserve", -getattr(result.components, item[0])))


def _at_peak(term: TermFacts, result: Estimate) -> bool:
    return not term.phases or result.peak.phase in term.phases


def _branches(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    """A component's figure is what stands at the peak, since not all terms are alive at once."""
    device = result.peak.device
    for component, members in _grouped(result):
        size = getattr(result.components, component)
        yield Branch(
            component, sized(size), tuple(_leaf(term, result, folded, sources) for term in members),
            percent(size, device), component in folded.branches,
        )  # fmt: skip


def _outside(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    """What the process holds beside the allocator, and the sum of all."""
    device = result.peak.device
    size = device - result.peak.reserved
    leaves = tuple(_leaf(term, result, folded, sources) for term in result.outside)
    yield Branch("context", sized(size), leaves, percent(size, device), "context" in folded.branches)
    yield Branch("device", sized(device), (), percent(device, device))


def _leaf(term: TermFacts, result: Estimate, folded: Folding, sources: Sequence[str]) -> Leaf:
    alive = _alive(term.phases, result.phases)
    here = _at_peak(term, result)
    aside = folded.others and not here
    phases = alive if here else f"{alive}, not at the peak"
    share = percent(term.bytes, result.peak.device) if here else ""
    return Leaf(term.name, sized(term.bytes), _lines(term, phases, sources), share, alive, aside)


def _alive(phases: Sequence[str], known: Iterable[str]) -> str:
    if not phases or set(known) <= set(phases):
        return "in every phase"
    return f"in {', '.join(phases)}"


def _lines(term: TermFacts, when: str, sources: Sequence[str]) -> tuple[str, ...]:
    source = f" [{sources.index(term.source) + 1}]" if term.source in sources else ""
    lines = (f"= {term.formula}", inputs_of(term), f"{term.bytes} bytes, {when}{source}")
    return tuple(line for line in lines if line.strip())


def _off_gpu_branches(result: Estimate, folded: Folding, sources: Sequence[str]) -> Iterator[Branch]:
    for tier in sorted({term.tier for term in result.off_gpu}):
        members = sorted((term for term in result.off_gpu if term.tier == tier), key=lambda term: -term.bytes)
        leaves = tuple(
            Leaf(term.name, sized(term.bytes), _lines(term, _alive(term.phases, result.phases), sources))
            for term in members
        )
        says = f"of one rank; {sized(on_node(result, tier))} a node"
        total = sum(term.bytes for term in members)
        yield Branch(off_gpu_name(tier), sized(total), leaves, "", OFF_GPU in folded.branches, says)
