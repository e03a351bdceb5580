"""An estimate as a document: the verdict first, then where the bytes stand, then every term."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from memcalc.report import plan_words
from memcalc.report.plan_words import time_lines
from memcalc.report.tables import Bar, Block, Code, Column, Line, Report, Table, facts, gib, header, made, percent, said
from memcalc.results.details import LengthFacts, Occasion
from memcalc.results.estimates import EXPANDABLE, ActivationBudget, Estimate, TermFacts, Verdict, flushed, mended
from memcalc.results.names import component_name, phase_name, phase_range
from memcalc.specs.job import command_line
from memcalc.units import GIB, KIB, MIB, format_bytes, format_count

MOODS = {"fits": "good", "tight": "close", "does-not-fit": "bad"}
TIERS = {"cpu": "host memory", "nvme": "NVMe", "cxl": "CXL memory"}
_SIZE = Column("size", "GiB", right=True)
_SHARE = Column("share", "%", right=True, meter=True, priority=1)
_JOINED = {
    "dp_replicate": "replicas", "dist_opt": "optimizer", "mp": "TP and PP", "tp_ep": "TP and EP", "tp_cp": "TP and CP",
}  # fmt: skip
_TERM_COLUMNS = header("component | term | size [bytes] > | phases | formula | values put in | source")


def report(result: Estimate) -> Report:
    """Return the answer of ``memcalc estimate``."""
    lengths = length_lines(result.lengths, result.verdict)
    head: tuple[Block, ...] = (*answer_of(result), *lengths, bar_of(result))
    blocks = (*head, *_tables(result), *_notes(result), *occasion_lines(result), *foot_of(result))
    return made(result, terms(result), *blocks, screen=(*head, *_brief(result)))


def _brief(result: Estimate) -> Iterator[Block]:
    """Yield what a screen says below the bar: where the peak is, what helps, what was assumed, how to go on."""
    peak = result.peak
    sums = f"{gib(peak.allocated)} GiB allocated", f"{gib(peak.reserved)} reserved"
    yield said("Peak", *where_of(result), *sums)
    yield from cache_of(result)
    yield from _host(result)
    if result.verdict != "does-not-fit":  # then what a step needs comes first
        yield from occasion_lines(result)
    yield from warned(result.warnings)
    yield from plan_words.assumed(told(result))
    if result.verdict == "does-not-fit":
        yield Code("Next, what fits instead", plan_words.search_line(result.job))
    else:
        yield Code("Next, every term", command_line(result.job, "explain"))
    yield Line("-v: components, phases, room for activations", "faint")


def where_of(result: Estimate) -> tuple[str, ...]:
    """Return where the peak is: the phase and, of a pipeline, the stage that all figures speak of."""
    peak, stages = result.peak, len(result.stages)
    return (phase_name(peak.phase), *((f"stage {peak.stage} of {stages}",) if stages > 1 else ()))


def warned(warnings: Iterable[str]) -> Iterator[Line]:
    """Yield a line for each warning."""
    for warning in warnings:
        yield Line(f"Warning: {warning}", "warning")


def briefly(warnings: Iterable[str]) -> Iterator[str]:
    """Yield warnings without the range of a step, where that stands beside each speed.

    >>> list(briefly(["times of stage 3 are not validated: offload; step times × 0.5 to × 2.0."]))
    ['times of stage 3 are not validated: offload.']
    """
    yield from (re.sub(r"; step times × [\d.]+ to × [\d.]+\.$", ".", warning) for warning in warnings)


def told(result: Estimate) -> dict[str, str]:
    """Return what was assumed; on one GPU nothing is sharded, so that a stage says nothing."""
    alone = result.hardware.gpus == 1
    return {name: text for name, text in result.assumptions.items() if not (alone and name == "zero")}


def terms(result: Estimate, *, readable: bool = False) -> Table:
    """Return the table with one row a term; `readable`: as people call components and phases."""
    named: list[tuple[str, TermFacts]] = [(term.component, term) for term in result.terms]
    named += [(term.component, term) for term in result.outside]
    named += [(off_gpu_name(term.tier), term) for term in result.off_gpu]
    rows = tuple(
        (*_named(name, term, result, readable=readable), term.formula, inputs_of(term), term.source)
        for name, term in named
    )
    return Table("Terms", _TERM_COLUMNS, rows)


def _named(name: str, term: TermFacts, result: Estimate, *, readable: bool) -> tuple[str, ...]:
    if not readable:
        return name, term.name, str(term.bytes), " ".join(term.phases)
    return component_name(name), term.name, str(term.bytes), phase_range(term.phases, result.phases) or "all phases"


def head_of(result: Estimate) -> tuple[Line, ...]:
    """Return the verdict, and the job in one sentence."""
    model, hardware, work = result.model, result.hardware, result.workload
    subject = f"{model.name} ({format_count(model.parameters)} parameters) on {hardware.gpus} × {hardware.gpu}"
    batch = (
        f"micro-batch {work.micro_batch} × {work.accumulation_steps} accumulation",
        f"sequence length {work.seq_len}",
    )
    text = (*plan_words.strategy_words(result.strategy), *batch)
    title = Line(f"{subject}: {', '.join(text)}", "title", items=(subject, *text))
    return (Line(verdict_of(result), "verdict", MOODS[result.verdict]), title)


def answer_of(result: Estimate) -> tuple[Line, ...]:
    """Return the verdict, the time of a step where one is known, and the job."""
    verdict, title = head_of(result)
    return (verdict, *time_lines(result), title)


def verdict_of(result: Estimate) -> str:
    """Return the verdict with the figures that it rests on."""
    device, capacity = result.peak.device, result.budget.capacity
    used = f"{gib(device, 1)} of {gib(capacity, 1)} GiB per GPU ({percent(device, capacity)}%)"
    text = " · ".join(filter(None, (result.verdict.replace("-", " "), failing(result))))
    low, high = gib(result.interval.low, 1), gib(result.interval.high, 1)
    why = result.reason if device <= capacity else ""
    full = f"frees its cache {flushed(result.flushes)}" if result.flushes else ""
    return " · ".join(filter(None, (text, used, why, f"95% range {low}–{high}", full, ends_above(result))))


def ends_above(result: Estimate) -> str:
    """Say how sure a verdict is whose range ends above the GPU: its margin has one side, and the range two."""
    return "19 of 20 runs fit" if result.verdict == "fits" and result.interval.high > result.budget.capacity else ""


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
    if result.off_gpu:
        yield _off_gpu(result)


def components_of(result: Estimate) -> Table:
    """Return the table of components at the peak."""
    device, rows, parts = result.peak.device, [], []
    for name, key, size, tool in _components(result):
        rows.append((name, gib(size), "" if tool and key != "total" else percent(size, device), tool))
        parts.append(key)
    columns = (Column("component"), _SIZE, _SHARE, Column("as tools report it", priority=2))
    title = f"At the peak ({', '.join(where_of(result))})"
    return Table(title, columns, tuple(rows), parts=tuple(parts))


def _components(result: Estimate) -> Iterator[tuple[str, str, int, str]]:
    """Yield what the device holds and the sums on the way: name, component, size [bytes], what reads a sum."""
    peak = result.peak
    for name, size in result.components.model_dump().items():
        if name != "reserve":
            yield component_name(name), name, size, ""
    yield "allocated", "", peak.allocated, "max_memory_allocated()"
    cache = [term for term in result.terms if term.component == "reserve" and term.bytes]
    if len(cache) > 1:
        yield from ((f"{component_name('reserve')}: {term.name}", "reserve", term.bytes, "") for term in cache)
    else:
        yield component_name("reserve"), "reserve", result.components.reserve, ""
    yield "reserved", "", peak.reserved, "max_memory_reserved()"
    for term in result.outside:
        group, ranks = (term.inputs.get(key, "") for key in ("group", "ranks"))
        joined = f"all {ranks} ranks" if group == "world" else f"{_JOINED.get(group, group.upper())} ({ranks} ranks)"
        sending = f"buffers to send, {str(term.inputs.get('between', '')).upper()} (to {term.inputs.get('peers')})"
        text = f"communicator, {joined}" if group else sending if "peers" in term.inputs else term.name
        yield text, "context", term.bytes, ""
    if not result.outside:
        yield component_name("context"), "context", peak.device - peak.reserved, ""
    yield component_name("device"), "total", peak.device, "nvidia-smi"


def _phases(result: Estimate) -> Table:
    usable = result.budget.usable
    rows = tuple((phase_name(name), gib(size), percent(size, usable)) for name, size in result.phases.items())
    share = Column("of usable", "%", right=True, meter=True, priority=1)
    return Table("Allocated by phase", (Column("phase"), _SIZE, share), rows)


def _stages(result: Estimate) -> Table:
    columns = header("stage > | layers >2 | allocated [GiB] > | reserved [GiB] >1 | total [GiB] > | peak phase <3")
    rows = tuple(
        (
            str(stage.stage), str(stage.layers), gib(stage.allocated), gib(stage.reserved), gib(stage.device),
            phase_name(stage.phase),
        )
        for stage in result.stages
    )  # fmt: skip
    return Table("Pipeline stages", columns, rows)


def _off_gpu(result: Estimate) -> Table:
    rows = tuple((term.tier, term.component, term.name, gib(term.bytes)) for term in result.off_gpu)
    return Table("Offloaded, per rank", (*header("memory | component <1 | term"), _SIZE), rows)


def off_gpu_name(tier: str) -> str:
    """Return what stands for a component where a term lies off the GPU."""
    return f"off the GPU: {tier}"


def on_node(result: Estimate, tier: str) -> int:
    """Return what a node keeps in a memory off its GPUs [bytes]."""
    return result.host_memory if tier == "host" else result.tier_memory


def _notes(result: Estimate) -> Iterator[Line]:
    budget, saved = result.budget, result.saved
    outside = (("context", budget.context), ("communicators", budget.libraries), ("kept free", budget.reserve))
    taken = "".join(f" − {gib(size)} {name}" for name, size in outside if size)
    yield _said("Usable", f"{gib(budget.usable)} GiB = {gib(budget.capacity)} capacity{taken}")
    if result.activation_budget is not None:
        yield _said("Room for activations", room_text(result.activation_budget), "Room")
    backward = f"{sized(saved.per_block)} per block + {sized(saved.outside_blocks)} outside blocks"
    yield _said("Saved for backward", f"{sized(saved.total)} per micro-batch: {backward}", "Backward")
    yield from cache_of(result)
    yield from _host(result)


def _host(result: Estimate) -> Iterator[Line]:
    """Yield what a node needs off its GPUs."""
    parts = [(result.host_memory, "host memory"), (result.tier_memory, TIERS[result.strategy.offload_to])]
    if any(size for size, _ in parts):
        needed = " and ".join(f"{sized(size)} of {name}" for size, name in parts if size)
        yield _said("Offloaded", f"{needed} per node, plus the OS and data loaders")


def cache_of(result: Estimate) -> Iterator[Line]:
    """Yield what expandable segments leave of the allocator's cache where that is less, and whether it runs then."""
    then = mended(result.verdict, result.expandable_verdict)
    if result.expandable_device is None or not (then or result.expandable_device < result.peak.device):
        return
    cache = f"{gib(result.components.reserve, 1)} GiB of freed blocks that PyTorch keeps; taken, not a margin"
    less = f"with {EXPANDABLE} the total is {gib(result.expandable_device, 1)} GiB{then and f', which {then}'}"
    yield Line(f"Cache: {cache}; {less}.", label="Cache", items=(cache, less))


def _said(name: str, text: str, label: str = "") -> Line:
    """Return a sentence that a terminal shows as a label and what belongs to it."""
    return Line(f"{name}: {text}.", label=label or name, items=(text,))


def room_text(budget: ActivationBudget) -> str:
    """What the states leave of the usable memory, and the micro-batch and segments that fit in there."""
    taken = [
        (name, getattr(budget, name)) for name in ("parameters", "gradients", "optimizer", "buffers", "cache", "margin")
    ]
    less = "".join(f" − {gib(size)} {name}" for name, size in taken if size)
    micro = f"micro-batch up to {budget.micro_batch} fits" if budget.micro_batch else "no micro-batch fits"
    parts = {None: "no checkpoint segments suffice", 1: ""}
    segments = parts.get(budget.segments, f"{budget.segments} checkpoint segments suffice")
    left = (
        f"{gib(budget.available)} GiB = {gib(budget.usable)} usable{less}; activations take {gib(budget.activations)}"
    )
    return "; ".join(filter(None, (left, micro, segments)))


def foot_of(result: Estimate) -> Iterator[Block]:
    """Yield warnings, assumptions and the command."""
    yield from warned(result.warnings)
    yield from facts("Assumed", told(result))
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


# -------------------------------------------------------------------------------------- sequences that differ in length


def length_lines(facts: LengthFacts | None, verdict: Verdict) -> Iterator[Line]:
    """Yield the data, the longest micro-batch, what the allocator reserves over others, and how many steps fit."""
    if facts is None:
        return
    lengths = (
        f"{facts.lengths}: {facts.sequences:,} sequences, median {facts.median:,}, p99 {facts.p99:,}, longest "
        f"{facts.longest:,} tokens"
    )
    batches = (
        f"longest micro-batch {facts.rows:,} × {facts.tokens:,} = {facts.rows * facts.tokens:,} tokens, mean "
        f"{facts.mean_tokens:,.0f} (batching {facts.batching})"
    )
    yield _line("Lengths", lengths, batches)
    if facts.replayed:
        run = f"{facts.replayed} micro-batches of {facts.shapes} shapes simulated, then the longest (seed {facts.seed})"
        yield _line("Allocator", run, reserved_text(facts))
    yield _line("Steps", *steps_texts(facts, verdict))


def reserved_text(facts: LengthFacts) -> str:
    """What is reserved over the run, beside what the longest micro-batch takes alone."""
    more = ", more with each new shape" * facts.grows
    return f"{gib(facts.in_sequence)} GiB reserved{more}; {gib(facts.alone)} GiB where every micro-batch is the longest"


def steps_texts(facts: LengthFacts, verdict: Verdict) -> tuple[str, ...]:
    """How many steps fit; "all" is said of the longest micro-batch, and so of every step there can be."""
    if facts.fitting == 1:
        after = "" if verdict == "fits" else ", some after the allocator has given its cache back"
        return (f"fits for all steps, the longest micro-batch among them{after}",)
    limit = f"micro-batches of up to {facts.fitting_tokens:,} tokens fit" if facts.fitting_tokens else "none fits"
    fits = f"fits for {share_text(facts.fitting)} of {facts.steps:,} simulated steps, {share_text(facts.running)}"
    return f"{fits} without the 95% margin", limit


def share_text(share: float) -> str:
    """A share that is never rounded up to all, nor down to nothing.

    >>> share_text(0.99984), share_text(0.5), share_text(1.0), share_text(0.0004)
    ('99.9%', '50.0%', '100%', '<0.1%')
    """
    if share in {0.0, 1.0}:
        return f"{share:.0%}"
    return f"{int(share * 1000) / 10:.1f}%" if share >= 0.001 else "<0.1%"


def _line(label: str, *texts: str) -> Line:
    return Line(f"{label}: {'; '.join(texts)}.", label=label, items=texts)


# ----------------------------------------------------------------------------------------------------- beside the steps


OPTIONS = {"evaluation": "workload.eval_micro_batch=N", "saving": "strategy.state_dict=NAME"}
"""What says what a job does, by occasion."""


def occasion_lines(result: Estimate) -> Iterator[Line]:
    """Yield a line for each occasion that needs more than training does; what surely fails is a warning already."""
    for occasion in result.occasions:
        warned = occasion.certain and not occasion.fits
        if not warned and (not occasion.fits or occasion.allocated > result.peak.allocated):
            yield Line(_sentence(occasion, result), "warning")


def _sentence(occasion: Occasion, result: Estimate) -> str:
    """How much it needs beside the step, and what it rests on."""
    size, step = gib(occasion.allocated, 1), gib(result.peak.allocated, 1)
    option = OPTIONS.get(occasion.name)
    hint = f" It is a default: --set {option}." if option and not occasion.certain else ""
    kind, needs = ("Note", f"takes {size} GiB")
    if not occasion.fits:
        kind, needs = "Warning", f"does not fit: {size} of {gib(result.budget.usable, 1)} usable GiB"
    return f"{kind}: {occasion.when} {needs}; a training step takes {step}.{hint}"


def failing(result: Estimate) -> str:
    """What the job was told to do beside its steps and cannot; empty where all fits."""
    occasions = [occasion for occasion in result.occasions if occasion.certain and not occasion.fits]
    return ", ".join(f"{each.name} needs {gib(each.allocated, 1)} GiB" for each in occasions)


def occasions_table(result: Estimate) -> Table:
    """Return the table of all occasions, each with what it is made of."""
    rows: list[tuple[str, ...]] = []
    for occasion in result.occasions:
        source = "asked for" if occasion.certain else "by default"
        rows.append((occasion.name, f"{occasion.when} ({source})", gib(occasion.allocated), gib(occasion.host), ""))
        rows += [("", part.name, *_sizes(part.bytes, part.tier), part.source) for part in occasion.parts]
    columns = header("between steps | what | GPU [GiB] > | host [GiB/node] > | source <3")
    return Table("Between steps, allocated", columns, tuple(rows))


def _sizes(size: int, tier: str) -> tuple[str, str]:
    return (gib(size), "") if tier == "gpu" else ("", gib(size))
