"""The answer of an inverse question as a document: the value, the strategy there, and what stands beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memcalc.report import plan_words as say
from memcalc.report.estimate import MOODS, briefly, warned
from memcalc.report.plan_words import assumed, fewest_line, speed, strategy_words
from memcalc.report.tables import (
    Block,
    Code,
    Column,
    Line,
    Report,
    Table,
    facts,
    gib,
    header,
    in_one_row,
    made,
    percent,
    said,
)
from memcalc.results.plans import Fit, Inverse
from memcalc.specs.job import command_line
from memcalc.units import format_count, format_seconds

UNITS = {"seq-len": "tokens", "micro-batch": "sequences per micro-batch", "gpus": "GPUs", "model": ""}
_FURTHER = 8
"""How many times as many GPUs are asked where none of those that were suffices."""
_BEYOND = 2
"""Values beyond the answer that a screen shows."""
_DATA = header("value > | verdict | device [bytes] > | free [bytes] > | strategy | tok/s/GPU > | command")


def report(result: Inverse) -> Report:
    """Return the answer of ``memcalc max`` and ``memcalc min``."""
    body = tuple(_found(result, result.best) if result.best else _nothing(result))
    head = tuple(head_of(result))
    brief = _brief(result, result.best) if result.best else body
    screen = (*head, *brief, *_next(result))
    return made(result, _data(result), *head, *body, *_foot(result), screen=screen)


def _brief(result: Inverse, best: Fit) -> Iterator[Block]:
    """Yield what a terminal shows of an answer: the strategy, what limits it, and what lies around it."""
    stated = (item for item in strategy_words(best.strategy) if not item.startswith("offload "))  # the verdict has it
    yield said("With", *stated, _batch(best).partition(" accumulation")[0])
    share = 100 * best.time.mfu
    yield said("Speed", f"{speed(best.time)} tok/s/GPU", f"MFU {share:.0f}%", f"{format_seconds(best.time.step)}/step")
    if result.limit:
        yield said("Limit", result.limit)
    near = _neighbours(result.model_copy(update={"beyond": result.beyond[:_BEYOND]}))
    yield in_one_row(near, total="GiB", used=f"% of {gib(result.capacity, 1)}")


def _next(result: Inverse) -> Iterator[Block]:
    """Yield what to mind, and how to go on, for a terminal."""
    yield from warned(briefly(result.warnings))
    stated = {"framework", "precision", "optimizer", "seq_len", "global_batch", "optimizer_impl", "loss", "kernels"}
    yield from assumed({name: text for name, text in result.assumptions.items() if name not in stated})
    if result.best is not None:
        yield Code("Next, the answer as an estimate", short_command(result, result.best))
    else:
        yield _where_else(result)
    more = "" if result.best is None or not result.safe else " · --tight: no margin"
    moved = result.best is not None and result.best.strategy.offload and "offload" not in result.job.options
    resident = " · --offload none: GPU only" if moved else ""
    yield Line(f"{result.searched:,} strategies · -v: more{more}{resident}", "faint")


def _where_else(result: Inverse) -> Code:
    """Return what to ask where nothing fits: tight ones, more GPUs, and at last which changes would fit."""
    if result.what in {"seq-len", "micro-batch"}:
        return Code("Next, the fewest GPUs that fit", fewest_line(result.job))
    counts = [miss.value for miss in result.beyond if isinstance(miss.value, int)]
    if result.what != "gpus" or not counts:
        return Code("Reproduce with", result.command)
    query, most = result.job.query, max(counts)
    if any(miss.verdict == "tight" for miss in result.beyond):
        return Code("Next, tight ones too", _asked(result, {**query, "tight": True}))
    if query.get("up_to") is None:
        return Code(f"Next, up to {_FURTHER * most:,} GPUs", _asked(result, {**query, "up_to": _FURTHER * most}))
    options = {**result.job.options, "gpus": most}
    job = result.job.model_copy(update={"what": "", "options": options, "query": {}})
    return Code("Next, what would make it fit", command_line(job, "plan"))


def _asked(result: Inverse, query: dict[str, Any]) -> str:
    return command_line(result.job.model_copy(update={"query": query}))


def short_command(result: Inverse, best: Fit) -> str:
    """Return the answer's estimate without the options that say what an estimate assumes too."""
    options = {name: value for name, value in best.job.options.items() if result.assumptions.get(name) != str(value)}
    return command_line(best.job.model_copy(update={"options": options}))


def head_of(result: Inverse) -> Iterator[Line]:
    """Yield the answer, and the question in one line."""
    hardware, best = result.hardware, result.best
    wanted = "" if result.safe else "; tight ones too"
    subject = "" if result.what == "model" else f" for {result.model.name} ({format_count(result.model.parameters)})"
    kind = {"seq-len": "Longest sequence", "gpus": "Fewest GPUs"}.get(result.what, f"Largest {result.what}")
    index = hardware.gpu if result.what == "gpus" else f"{hardware.gpus} × {hardware.gpu}"
    text = "nothing fits" if best is None else f"{_value(result, result.answer)} · {_verdict(best)}"
    yield Line(text, "verdict", MOODS[best.verdict] if best else "bad")
    length = f", sequence length {best.seq_len}" if best and result.what != "seq-len" else ""
    yield Line(f"{kind}{subject} on {index}{length}{wanted}", "title")


def _verdict(best: Fit) -> str:
    """The verdict, with what it rests on: memory of unknown size, and what is offloaded."""
    text = f"{best.verdict} if {best.unknown[0]} suffices" if best.unknown else best.verdict
    if not best.strategy.offload:
        return text
    need = say.host([best]).replace(" of host memory per node", "/node")
    return f"{text} · offload {', '.join(filter(None, (say.offload(best.strategy), need)))}"


def _value(result: Inverse, value: int | str | None) -> str:
    if result.what == "model":
        return f"{value} ({format_count(result.model.parameters)})"
    single = {"seq-len": "token", "micro-batch": "sequence per micro-batch", "gpus": "GPU"}
    unit = single[result.what] if value == 1 else UNITS[result.what]
    return f"{value:,} {unit}" if isinstance(value, int) else f"{value} {unit}"


def _found(result: Inverse, best: Fit) -> Iterator[Block]:
    label = strategy_words(best.strategy)
    items = (*label, *_batch(best).split(", "))
    yield Line(f"With {', '.join(items)}.", label="With", items=items)
    if result.limit:
        yield Line(f"Limited by: {result.limit}.", label="Limited by", items=(result.limit,))
    yield _neighbours(result)
    share = 100 * best.time.mfu
    figures = f"{speed(best.time)} tok/s/GPU", f"MFU {share:.1f}%", f"{format_seconds(best.time.step)}/step"
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
        Column("GPUs" if result.what == "gpus" else result.what, right=result.what != "model"),
        *header("total [GiB] >"),
        Column("used", "%", right=True, priority=1, meter=True),
        *header("verdict"),
    )
    points = [(best.value, best.peak.device, best.verdict, 0) for best in (result.best,) if best is not None]
    points += [(miss.value, miss.device, miss.verdict, miss.missing) for miss in result.beyond]
    size = result.capacity
    beside = " without that offload" if result.limit.startswith("host memory: on ") else ""
    rows = [
        (
            _count(value),
            gib(device),
            percent(device, size),
            margin(device, verdict, size, missing) + beside * (device > size),
        )
        for value, device, verdict, missing in points
    ]
    return Table("Around the limit", columns, tuple(rows))


def _count(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def margin(device: int, verdict: str, capacity: int, missing: int) -> str:
    """The verdict on a value, with what is left or lacking; of what fails below the capacity, to a single request."""
    if device > capacity:
        return f"over by {gib(device - capacity, 1)} GiB"
    headroom = f"{gib(capacity - device, 1)} GiB headroom"
    tight = "tight: inside the 95% margin" if missing else "tight: fills the GPU with its cache and frees it"
    failing = f"a request lacks {gib(missing, 1)} GiB" if missing else "what the job does beside its steps"
    return {"fits": f"fits, {headroom}", "tight": tight}.get(verdict, f"out of memory: {failing}")


def _foot(result: Inverse) -> Iterator[Block]:
    yield from warned(result.warnings)
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
        text = ", ".join(strategy_words(best.strategy))
        rows = [(str(best.value), best.verdict, str(best.peak.device), str(best.free), text, rate, best.command)]
    rows += [(str(m.value), m.verdict, str(m.device), str(-m.missing), "", "", "") for m in result.beyond]
    return Table("Inverse", _DATA, tuple(rows))
