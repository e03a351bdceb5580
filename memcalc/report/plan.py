"""Ranked plans as a document: what to run first, the table of plans, what they share, and how to go on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memcalc.convert.named_model import is_recorded
from memcalc.report import plan_words as say
from memcalc.report.estimate import MOODS
from memcalc.report.plan_tables import cheapest_alike, data, recipe_blocks, remedy_blocks, short
from memcalc.report.plan_words import speed
from memcalc.report.tables import (
    MOST,
    Block,
    Code,
    Column,
    Document,
    Line,
    Report,
    Table,
    facts,
    gib,
    percent,
    said,
    trimmed,
)
from memcalc.results.plans import UNMEASURED_OFFLOAD, Nearest, Plan, Plans
from memcalc.specs.job import command_line
from memcalc.units import format_count, format_seconds, signed


class _Field(NamedTuple):
    """A column of the table, how a plan fills it, and whether it goes where all plans say the same."""

    column: Column
    value: Callable[[Plan, Plans], str]
    varies: bool = False


def _beside(plan: Plan, result: Plans) -> str:
    """Return a plan's throughput beside that of the first [%]."""
    first = result.plans[0].time.tokens_per_second_per_gpu
    return "" if plan.rank == 1 else signed(100 * (plan.time.tokens_per_second_per_gpu / first - 1), 1)


def _choice(title: str, name: str) -> _Field:
    return _Field(Column(title), lambda plan, _: str(getattr(plan.strategy, name)), varies=True)


_SHORT = (
    ("optimizer", "opt"),
    ("activations", "act"),
    ("modules:", ""),
    ("selective-core-attn", "core-attn"),
    ("selective-", "sel-"),
)
_ROLES = (("more headroom", "headroom"), ("full recompute", "full rec."), ("with offload", "offload"))
_ROLE = _Field(
    Column("plan", short=_ROLES, below=True, obvious="best", priority=1),
    lambda plan, _: (*plan.special, "-")[0],
    varies=True,
)
_LAYOUT = _Field(
    Column("parallelism", short=(("no-reshard", "no-resh"),)), lambda plan, _: say.parallelism(plan.strategy)
)
_TABLE = (
    _Field(Column("#", right=True), lambda plan, _: str(plan.rank)),
    _Field(Column("GPUs", right=True), lambda plan, _: str(plan.gpus), varies=True),
    _ROLE,
    _choice("framework", "framework"),
    _Field(Column("precision", short=(("bf16-", ""),)), lambda plan, _: plan.strategy.precision, varies=True),
    _choice("optimizer", "optimizer"),
    _choice("attention", "attention"),
    _choice("loss", "loss"),
    _LAYOUT,
    _Field(Column("recompute", short=_SHORT), lambda plan, _: plan.strategy.recompute),
    _Field(Column("offload", short=_SHORT), lambda plan, _: say.offload(plan.strategy)),
    _Field(Column("batch", "micro × accum"), lambda plan, _: say.batch(plan)),
    _Field(Column("global batch", right=True), lambda plan, _: str(plan.global_batch), varies=True),
    _Field(Column("GiB", "per GPU", right=True), lambda plan, _: gib(plan.peak.device)),
    _Field(Column("verdict"), lambda plan, _: _verdict_of(plan), varies=True),
    _Field(Column("tok/s/GPU", "90% range", right=True), lambda plan, _: speed(plan.time)),
    _Field(Column("vs #1", "%", right=True), _beside, varies=True),
    _Field(Column("host", "GiB/node", right=True), lambda plan, _: _host(plan), varies=True),
    _Field(Column("GPU-hours", right=True), lambda plan, _: f"{plan.gpu_hours:.0f}", varies=True),
)


def _policy(plan: Plan, result: Plans) -> str:
    """Return a policy; the modules of the only one that lists some are told below the table."""
    listed = {each.strategy.recompute for each in result.plans if each.strategy.recompute.startswith("modules:")}
    return say.short_policy(plan.strategy.recompute) if len(listed) == 1 else plan.strategy.recompute


_BRIEF = {
    "recompute": _Field(Column("recompute", short=_SHORT), _policy),
    "GiB": _Field(Column("GiB", right=True), lambda plan, _: gib(plan.peak.device, 1)),
    "parallelism": _LAYOUT._replace(column=_LAYOUT.column._replace(title="layout")),
}
_NAMED = _Field(Column("plan"), lambda plan, _: f"#{plan.rank} {(*plan.special, '')[0]}".strip())
_PASTED = ("GPUs", "plan", "parallelism", "recompute", "offload", "batch", "GiB", "tok/s/GPU", "vs #1", "GPU-hours")
"""Columns of the table in a document, as many as are there and it holds; others are told below it."""
_STATED = frozenset({"seq_len", "global_batch", "precision", "optimizer_impl", "loss", "kernels"})
"""Assumptions that a screen says elsewhere, or that an answer beside plans does not say either."""
_TIGHT = re.compile(r" (Tight: .*\.)$")
"""Why a plan is tight, at the end of why it is listed; a screen says it below the verdict."""
_PEAK = re.compile(r" Peak: .*? headroom\.")
MUCH = 1.5
"""How much faster another framework has to be for a change that leaves this one to be passed over."""
_WIDE = ("vs #1", "host", "GPU-hours")
"""Columns for which a narrow terminal has no room."""


def report(result: Plans, *, written: bool = False, starts: bool = False) -> Report:
    """Return the answer of ``memcalc plan``; `written`: a plan of it is saved or written by the same command.

    ``starts``: a script that starts the first can be written.
    """
    head = tuple(_head(result, brief=False))
    body = tuple(_found(result) if result.plans else _warnings(result))
    more = (*recipe_blocks(result), *_asked(result))
    page = (*head, *body, *remedy_blocks(result), *more, *_foot(result))
    brief = _worth_a_look(result)
    shown = tuple(_found(brief, brief=True)) if result.plans else body
    ways = (*remedy_blocks(result, brief=True), *more, *_next(result, len(brief.plans), written=written, starts=starts))
    screen = (*_head(result, brief=True), *shown, *ways)
    return Report(Document(page, data(result), screen), result.model_dump(mode="json", by_alias=True))


def _worth_a_look(result: Plans) -> Plans:
    """Return the plans that are listed for something, where there are several; all where so many were asked for."""
    listed = tuple(plan for plan in result.plans if plan.special)
    counted = any(result.job.query.get(name) for name in ("rank_all", "top"))
    if counted or not listed or len({plan.gpus for plan in result.plans}) > 1:
        return result
    return result.model_copy(update={"plans": listed})


def _head(result: Plans, *, brief: bool) -> Iterator[Line]:
    """Yield the answer and the job; ``brief``: without what is said further below."""
    model = result.model
    subject = [f"{model.name} ({format_count(model.parameters)})", f"sequence length {result.seq_len}"]
    if result.plans and len({plan.global_batch for plan in result.plans}) == 1:
        sequences = result.plans[0].global_batch
        subject.append(f"global batch {sequences} ({sequences * result.seq_len:,} tokens)")
    title = Line(" · ".join(subject), "title", items=tuple(subject))
    if not result.plans:
        needed, _, why = result.too_large.partition(". ")
        yield Line(f"does not fit · {needed.rstrip('.')}", "verdict", MOODS["does-not-fit"])
        yield title
        if why:
            yield Line(why.partition(", with ")[0] if brief else why)
        return
    yield from _answer(result, brief=brief)
    yield title
    caution = _TIGHT.search(result.plans[0].why)
    if brief and caution and len({plan.gpus for plan in result.plans}) == 1:
        yield Line(caution[1], "warning")


def _answer(result: Plans, *, brief: bool) -> Iterator[Line]:
    first, several = result.plans[0], len({plan.gpus for plan in result.plans}) > 1
    mood = "close" if first.unknown else MOODS[first.verdict]
    spread = say.parallelism(first.strategy).strip("-")
    strategy = f"recompute {first.strategy.recompute} · micro-batch {say.batch(first)}"
    where = f"{first.gpus} × {result.hardware.gpu}"
    figures = f"{gib(first.peak.device, 1)} of {gib(result.capacity, 1)} GiB per GPU"
    figures += f" ({percent(first.peak.device, result.capacity)}%)"
    rate = f"{speed(first.time)} tok/s/GPU"
    if several:
        yield Line(_counts(result), "verdict", mood)
        gpus = f"{first.gpus} GPU{'s' * (first.gpus > 1)}"
        yield Line(f"{gpus}: {spread}{' · ' * bool(spread)}{strategy}{_off(first, brief=brief)} · {rate}", "verdict")
        return
    on = f"{spread} on {where}" if spread else where
    offload = _off(first, brief=brief) or " · no offload"
    yield Line(f"{_verdict_of(first)}: {on} · {strategy}{offload}", "verdict", mood)
    yield Line(f"{figures} · {rate} · {format_seconds(first.time.step)}/step", "verdict")


def _off(plan: Plan, *, brief: bool) -> str:
    """Return what a plan offloads and the memory that this needs, behind a dot; nothing for nothing.

    ``brief``: without the memory, where a line of its own says that.
    """
    if not plan.strategy.offload:
        return ""
    need = "" if brief else say.host([plan])
    return f" · offload {say.offload(plan.strategy)}" + (f" ({need})" if need else "")


def _verdict_of(plan: Plan) -> str:
    return f"{plan.verdict} if {plan.unknown[0]} suffices" if plan.unknown else plan.verdict


def _counts(result: Plans) -> str:
    """Return from how many GPUs a job fits, with offload and without."""
    safe = [plan for plan in result.plans if plan.verdict == "fits"] or list(result.plans)
    fewest = min(safe, key=lambda plan: plan.gpus)
    gpu, without = result.hardware.gpu, result.without_offload
    tight = " and ".join(map(str, result.tight_without_offload))
    near = f" ({tight}: tight{_eased(result)})" if tight else ""
    start = f"{_verdict_of(fewest)}: from {fewest.gpus}"
    if not fewest.strategy.offload:
        return f"{start} × {gpu}{near}"
    tier = say.TIERS.get(fewest.strategy.offload_to, "CPU")
    if without is None:
        return f"{start} × {gpu}, only with {tier} offload ({say.host([fewest])})"
    return f"{start} GPU{'s' * (fewest.gpus > 1)} with {tier} offload · from {without} × {gpu} without{near}"


def _eased(result: Plans) -> str:
    """Return what makes the fewest of several counts safe without other numbers, and on how many GPUs."""
    gpus = min(plan.gpus for plan in result.plans)
    same = [answer for answer in result.nearest if answer.verdict == "fits" and answer.group == "same training"]
    change = next((answer.change for answer in same if "--gpus" not in answer.change and not answer.host_memory), "")
    return f"; {gpus} fits with {short(change)}" if change and gpus in result.tight_without_offload else ""


def _host(plan: Plan) -> str:
    return gib(plan.host_memory, 0) if plan.host_memory else ""


def _found(result: Plans, *, brief: bool = False) -> Iterator[Block]:
    rows = sorted(result.plans, key=lambda plan: plan.gpus)
    fields = [field for field in _TABLE if not field.varies or _varies(field, result)]
    several = len({plan.gpus for plan in result.plans}) > 1
    fields = [field for field in fields if not (several and field.column.title in {"plan", "vs #1"})]
    fields = [field for field in fields if several or field.column.title != "GPU-hours"]
    if several and len({plan.gpus for plan in result.plans}) == len(rows):  # then the count names a row, not its rank
        fields = [field for field in fields if field.column.title != "#"]
    narrow = [_BRIEF.get(field.column.title, field) for field in fields if field.column.title not in _WIDE]
    if brief and len(rows) == 1:  # which the first lines are
        yield from _shared(result, brief=brief)
        return
    tables = [
        Table(
            "Plans",
            tuple(field.column if chosen is fields else field.column._replace(unit="") for field in chosen),
            tuple(tuple(field.value(plan, result) for field in chosen) for plan in rows),
            titled=False,
        )
        for chosen in (fields, narrow)
    ]
    yield tables[0]._replace(narrow=tables[1], pasted=_pasted(fields, rows, result))
    yield from _shared(result, brief=brief)


def _pasted(fields: Sequence[_Field], rows: Sequence[Plan], result: Plans) -> tuple[Block, ...]:
    """Return the table in the columns of a document, which names a plan by its number or its count of GPUs."""
    ranked = any(field.column.title == "#" for field in fields)
    scheduled = _LAYOUT._replace(value=lambda plan, _: say.parallelism(plan.strategy, scheduled=True))
    there = {field.column.title: field for field in fields if field.column.title != "#"}
    there |= {"parallelism": scheduled, **({"plan": _NAMED} if ranked else {})}
    shown = [there.pop(title) for title in [title for title in _PASTED if title in there][:MOST]]
    chosen = [*shown, *there.values()]
    cells = tuple(tuple(field.value(plan, result) for field in chosen) for plan in rows)
    names = [f"#{plan.rank}" if ranked else f"{plan.gpus} GPU{'s' * (plan.gpus > 1)}" for plan in rows]
    return trimmed(Table("Plans", tuple(field.column for field in chosen), cells), len(shown), names)


def _varies(field: _Field, result: Plans) -> bool:
    return len({field.value(plan, result) for plan in result.plans}) > 1


def _shared(result: Plans, *, brief: bool) -> Iterator[Line]:
    """Yield what all plans have in common, what words on the screen mean, and what to mind.

    ``brief``: without where the peak of the first one is.
    """
    yield said("All plans" if len(result.plans) > 1 else "Plan #1", *_alike(result, brief=brief))
    policies = tuple(say.legend(result.plans))
    if policies:
        yield said("Recompute", *policies)
    yield from _offloads(result)
    if len({plan.gpus for plan in result.plans}) == 1:
        first = result.plans[0]
        role = _TIGHT.sub("", _PEAK.sub("", first.why)).replace("Simplest plan within", "Simplest within")
        role += say.open_order(result.plans)
        yield said("Why #1", role if brief else f"{first.why} MFU {100 * first.time.mfu:.1f}%.")
    for code in dict.fromkeys(plan.own_code for plan in result.plans if plan.own_code):
        ranks = [f"#{plan.rank}" for plan in result.plans if plan.own_code == code]
        yield said("Beyond", f"{_listed(ranks)} need{'s' * (len(ranks) == 1)} your own code: {'; '.join(code)}.")
    yield from _warnings(result)


def _alike(result: Plans, *, brief: bool) -> Iterator[str]:
    first = result.plans[0].strategy
    values: dict[str, Callable[[Plan], str]] = {
        "framework": lambda plan: plan.strategy.framework,
        "precision": lambda plan: plan.strategy.precision,
        "optimizer": lambda plan: say.precision(plan.strategy),
        "attention": lambda plan: f"{plan.strategy.attention} attention",
    }
    yield from (value(result.plans[0]) for value in values.values() if len(set(map(value, result.plans))) == 1)
    if first.lora:
        yield f"lora {first.lora}" + (f" on {first.quantize}" if first.quantize != "none" else "")
    if first.loss != "standard" and len({plan.strategy.loss for plan in result.plans}) == 1:
        yield f"{first.loss} loss"
    yield result.hardware.node if brief else f"node {result.hardware.node}"
    if "network" in result.assumptions:
        yield f"network assumed: {result.assumptions['network']}"


def _offloads(result: Plans) -> Iterator[Line]:
    offloaded = [plan for plan in result.plans if plan.strategy.offload]
    if not offloaded:
        return
    if len(offloaded) == len(result.plans) > 1:
        names = "all plans"
    elif len({plan.gpus for plan in result.plans}) > 1:
        counts = sorted(plan.gpus for plan in offloaded)
        names = f"on {_listed(map(str, counts))} GPU{'s' * (counts != [1])}"
    else:
        names = _listed(f"#{plan.rank}" for plan in offloaded)
    unchecked = any(UNMEASURED_OFFLOAD in warning for warning in result.warnings)
    doubt = "speed unmeasured (× 0.5–2)" if unchecked else ""
    need = say.host(offloaded).replace(" of host memory per node", " host memory/node")
    yield said("Offload", f"{names}: {'; '.join(filter(None, (need, doubt)))}")


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _warnings(result: Plans) -> Iterator[Line]:
    for warning in result.warnings:
        if UNMEASURED_OFFLOAD not in warning and "code of your own" not in warning:
            yield Line(f"Warning: {warning}", "warning")


def _asked(result: Plans) -> Iterator[Line]:
    if result.asked:
        yield Line(f"Asked: {result.asked}", "verdict")


def _tried(result: Plans) -> str:
    sure = "surely fit" if any(plan.unknown for plan in result.plans) else "fit"
    bounded = f" ({result.searched - result.bounded:,} evaluated, the rest bounded)" if result.bounded else ""
    return f"{result.feasible:,} of {result.searched:,} strategies {sure}{bounded}"


def _next(result: Plans, shown: int, *, written: bool, starts: bool) -> Iterator[Block]:
    """Yield how to go on, for a terminal that shows so many of the plans."""
    if not result.plans:
        yield from say.assumed({name: text for name, text in result.assumptions.items() if name not in _STATED})
        yield Line(f"{_tried(result)} · -v: all of it", "faint")
        return
    first = result.plans[0]
    if len({plan.gpus for plan in result.plans}) > 1:
        count = f"{first.gpus} GPU{'s' * (first.gpus > 1)}"
        yield Code(f"Next, all plans for {count}", command_line(result.job.with_options(gpus=first.gpus)))
    elif is_recorded(Path(result.job.model or "")):  # trains with its own code, so that no plan of it is saved
        yield Code("Next, #1 as an estimate", first.command)
    elif better := _better(result):
        times = better.tokens_per_second_per_gpu / first.time.tokens_per_second_per_gpu
        gain = "no slower" if first.strategy.offload and times < MUCH else f"{times:.1f} times as fast"
        yield said("Next", f"add {'--offload none ' * bool(first.strategy.offload)}{better.change}: {gain}")
    elif not written:
        saved = "--save plan.json to save #1 with plans to fall back on"
        yield said(
            "Next", f"add {'--write out/ to launch #1, --save plan.json to keep fallbacks' if starts else saved}"
        )
    more = ", more" * (len(result.plans) > shown)
    details = f" · -v: peak, MFU{more}" if len({plan.gpus for plan in result.plans}) == 1 else ""
    yield Line(f"{_tried(result)} · --all: full ranking{details}", "faint")


def _better(result: Plans) -> Nearest | None:
    """Return a change that trains alike on the same GPUs, needs no offload and is no slower than #1.

    It may be another framework where that is much faster than what changes less.
    """
    first = result.plans[0]
    if first.verdict != "fits" and not first.strategy.offload:
        return None
    fits = [item for item in result.nearest if item.verdict == "fits" and not item.host_memory]
    least = first.time.tokens_per_second_per_gpu
    near = cheapest_alike(result.nearest)
    near = near if near is not None and near.tokens_per_second_per_gpu >= least else None
    least = MUCH * (near.tokens_per_second_per_gpu if near else least)
    others = (item for item in fits if item.group == "another framework")
    return next((item for item in others if item.tokens_per_second_per_gpu >= least), near)


def _foot(result: Plans) -> Iterator[Block]:
    yield from facts("Assumed", result.assumptions)
    yield Line(f"{_tried(result)}; {gib(result.capacity)} GiB per GPU.", "faint")
    yield Code("Reproduce with", result.command)
    if result.plans:
        yield Code("Details of #1", result.plans[0].command)
