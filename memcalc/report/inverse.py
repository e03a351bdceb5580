"""The answer of an inverse question as a document: the value, the strategy there, and what stands beyond it."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report import plan_words as say
from memcalc.report.estimate import MOODS, strategy_words
from memcalc.report.step_time import speed
from memcalc.report.tables import Block, Code, Column, Line, Report, Table, facts, gib, header, made, percent
from memcalc.results.plans import Fit, Inverse
from memcalc.units import format_count

UNITS = {"seq-len": "tokens", "micro-batch": "sequences per micro-batch", "gpus": "GPUs", "model": ""}
_DATA = header("value | verdict | device [bytes] > | free [bytes] > | strategy | tok/s/GPU > | command")


def report(result: Inverse) -> Report:
    """Return the answer of ``memcalc max`` and ``memcalc min``."""
    body = _found(result, result.best) if result.best else _nothing(result)
    return made(result, _data(result), *head_of(result), *body, *_foot(result))


def head_of(result: Inverse) -> Iterator[Line]:
    """Yield the answer, and the question in one line."""
    hardware, best = result.hardware, result.best
    wanted = "" if result.safe else "; tight ones too"
    subject = "" if result.what == "model" else f" for {result.model.name} ({format_count(result.model.parameters)})"
    kind = "Largest" if result.schema_ == "memcalc.max/1" else "Fewest" if result.what == "gpus" else "Smallest"
    index = hardware.gpu if result.what == "gpus" else f"{hardware.gpus} × {hardware.gpu}"
    text = "nothing fits" if best is None else f"{_value(result, result.answer)} · {_verdict(best)}"
    yield Line(text, "verdict", MOODS[best.verdict] if best else "bad")
    length = f", sequence length {best.seq_len}" if best and result.what != "seq-len" else ""
    yield Line(f"{kind} {result.what}{subject} on {index}{length}{wanted}", "title")


def _verdict(best: Fit) -> str:
    """The verdict, with what it rests on: memory of unknown size, and what is offloaded."""
    text = f"{best.verdict} if {best.unknown[0]} suffices" if best.unknown else best.verdict
    if not best.strategy.offload:
        return text
    need = say.host([best])
    return f"{text} · offload {say.offload(best.strategy)}" + (f" ({need})" if need else "")


def _value(result: Inverse, value: int | str | None) -> str:
    if result.what == "model":
        return f"{value} ({format_count(result.model.parameters)})"
    unit = "GPU" if result.what == "gpus" and value == 1 else UNITS[result.what]
    return f"{value} {unit}"


def _found(result: Inverse, best: Fit) -> Iterator[Block]:
    label = strategy_words(best.strategy)
    yield Line(f"With {label}, {_batch(best)}.", label="With", items=(*label.split(", "), *_batch(best).split(", ")))
    if result.limit:
        yield Line(f"Limited by: {result.limit}.", label="Limited by", items=(result.limit,))
    yield _neighbours(result)
    share = 100 * best.time.mfu
    figures = f"{speed(best.time)} tok/s/GPU", f"MFU {share:.1f}%", f"{best.time.step:.4g} s/step"
    yield Line(f"Speed there: {', '.join(figures)}.", label="Speed", items=figures)


def _batch(best: Fit) -> str:
    micro = best.strategy.micro_batch
    return f"micro-batch {micro} × {best.accumulation_steps} accumulation, global batch {best.global_batch}"


def _nothing(result: Inverse) -> Iterator[Block]:
    yield Line(f"{result.limit[:1].upper()}{result.limit[1:]}.")
    if result.beyond:
        yield _neighbours(result)


def _neighbours(result: Inverse) -> Table:
    """The answer between what fits and what does not."""
    columns = (
        Column(result.what, right=result.what != "model"),
        *header("verdict | total [GiB] >"),
        Column("used", "%", right=True, priority=1, meter=True),
        *header("headroom [GiB] > | over by [GiB] >"),
    )
    best, rows = result.best, []
    if best is not None:
        device = best.peak.device
        rows = [(str(best.value), best.verdict, gib(device), percent(device, result.capacity), gib(best.free), "")]
    rows += [
        (str(m.value), m.verdict, gib(m.device), percent(m.device, result.capacity), "", gib(m.missing, 3))
        for m in result.beyond
    ]
    return Table("Around the limit", columns, tuple(rows))


def _foot(result: Inverse) -> Iterator[Block]:
    for warning in result.warnings:
        yield Line(f"Warning: {warning}", "warning")
    yield from facts("Assumed", result.assumptions)
    tried = f"Searched {result.searched:,} strategies, {result.replayed} simulated"
    yield Line(f"{tried}; {gib(result.capacity)} GiB per GPU.", "faint")
    yield Code("Reproduce with", result.command)
    if result.best is not None:
        yield Code("Details", result.best.command)


def _data(result: Inverse) -> Table:
    best, rows = result.best, []
    if best is not None:
        rate = f"{best.time.tokens_per_second_per_gpu:.0f}"
        text = strategy_words(best.strategy)
        rows = [(str(best.value), best.verdict, str(best.peak.device), str(best.free), text, rate, best.command)]
    rows += [(str(m.value), m.verdict, str(m.device), str(-m.missing), "", "", "") for m in result.beyond]
    return Table("Inverse", _DATA, tuple(rows))
