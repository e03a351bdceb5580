"""Tables beside ranked plans: what would make a job fit, the usual order of tuning, and every figure of every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from textwrap import fill
from typing import NamedTuple

from memcalc.report.plan_words import fewest_line
from memcalc.report.tables import Block, Code, Column, Line, Table, gib, header, percent, said
from memcalc.results.plans import Nearest, Plan, Plans, Remedy
from memcalc.units import GIB

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
FIELD = "strategy.expandable_segments=true"
_SCREEN = 80
"""Columns of the narrowest common terminal, which the table is made for."""
_GAPS = 8
"""Blanks between its columns."""
MOST = 3
"""Changes that a screen shows beside plans."""
_VERDICT = {"does-not-fit": "over by {}"}
_COLUMNS = (
    Column("change"),
    Column("costs"),
    Column("peak", "GiB", right=True),
    Column("verdict"),
    Column("host", "GiB per node", right=True),
    Column("tok/s/GPU", right=True),
    Column("range", "90%"),
)
_NARROW = (
    Column("change"),
    Column("GiB", right=True),
    Column("host", right=True),
    Column("verdict"),
    Column("tok/s/GPU", right=True),
)


def remedy_blocks(result: Plans, *, brief: bool = False) -> Iterator[Block]:
    """The table, what an environment variable is called, and the first remedy as a command.

    ``brief``: without groups, and beside plans the cheapest change of each group alone.
    """
    if not result.nearest:
        if not result.plans:
            yield Code("Next, the fewest GPUs that fit", fewest_line(result.job))
        return
    shown = _chosen(_one_line(result)) if brief else result
    if brief:
        yield from _brief_table(shown, len(result.nearest) - len(shown.nearest))
    else:
        rows = tuple(_row(answer, result.capacity) for answer in result.nearest)
        narrow = Table(_title(result), _NARROW, tuple(_grouped(result)))
        yield Table(_title(result), _COLUMNS, rows, narrow=narrow)
    if any(FIELD in answer.change for answer in shown.nearest):
        yield Line(f"expandable segments: {VARIABLE}", "faint")
    unknown = sorted({name for answer in shown.nearest for name in answer.unknown})
    if unknown and not (brief and any(plan.unknown for plan in result.plans)):  # which has a warning already
        yield Line(f"?: {' and '.join(unknown)} of node {result.hardware.node} is unknown.", "warning")
    known = (answer for answer in result.nearest if answer.verdict == "fits" and not answer.unknown)
    first = None if result.plans else next(known, None)
    if first is not None:
        yield Code("Next, the first that fits", first.command)
    elif not result.plans:
        yield Code("Next, the fewest GPUs that fit", fewest_line(result.job))


def _one_line(result: Plans) -> Plans:
    """Several frameworks that fit as one change: the first, which the figures are of, and the names of the others."""
    others = [item for item in result.nearest if item.group == "another framework" and item.verdict == "fits"]
    names = {str(item.job.options.get("framework")): item for item in others if item.job}
    first, *rest = names or ("",)
    if not rest:
        return result
    lead = names[first].model_copy(update={"change": f"{names[first].change} (or {', '.join(rest)})"})
    rows = (lead if item is names[first] else item for item in result.nearest if item not in others[1:])
    return result.model_copy(update={"nearest": tuple(rows)})


def _chosen(result: Plans) -> Plans:
    """Return what a screen shows of the changes: beside plans the best of a group, of at most three groups."""
    if not result.plans:
        return result
    best = [_best(list(answers)) for _, answers in groupby(result.nearest, key=lambda answer: answer.group)]
    order = sorted(range(len(best)), key=lambda at: (best[at].verdict != "fits", at))
    return result.model_copy(update={"nearest": tuple(best[at] for at in sorted(order[:MOST]))})


def _brief_table(result: Plans, more: int) -> Iterator[Block]:
    """Yield the table without groups, its title in its heading; what is not enough stands below it in one line."""
    title = _title(result) + (f" ({more} more: -v)" if more else "")
    columns = (_NARROW[0]._replace(title=title[:1].lower() + title[1:]), *_NARROW[1:])
    enough = [answer for answer in result.nearest if answer.verdict != "does-not-fit"]
    rows = tuple((short(answer.change), *_figures(answer, result.capacity)) for answer in enough)
    hosted = any(answer.host_memory for answer in enough)
    indices = [index for index, column in enumerate(columns) if hosted or column.title != "host"]
    if rows:
        yield Table(title, columns, rows, titled=False).keep(indices)
    others = [answer for answer in result.nearest if answer not in enough]
    if others:
        over = ((short(answer.change), gib(answer.device - result.capacity, 1)) for answer in others)
        yield said("Too large", *(f"{change} (by {size} GiB)" for change, size in over))


def short(change: str) -> str:
    """Return a change in fewer words.

    >>> short("--gpus 8 --set strategy.expandable_segments=true")
    '--gpus 8, expandable segments'
    """
    return change.replace(f" --set {FIELD}", ", expandable segments").replace(f"--set {FIELD}", "expandable segments")


def _best(answers: list[Nearest]) -> Nearest:
    """The first that fits: they stand in the order of what they cost."""
    return cheapest_alike(answers) or next((answer for answer in answers if answer.verdict == "fits"), answers[0])


CLEARLY = 1.25
"""How much faster a change has to be for one that stands before it to be passed over."""


def cheapest_alike(answers: Iterable[Nearest]) -> Nearest | None:
    """Return the first that trains alike on as many GPUs, fits without offload, and is not clearly beaten."""
    fits = [answer for answer in answers if answer.verdict == "fits" and not answer.host_memory]
    alike = [answer for answer in fits if answer.group == "same training" and "--gpus" not in answer.change]
    most = max((answer.tokens_per_second_per_gpu for answer in alike), default=0.0)
    return next((answer for answer in alike if CLEARLY * answer.tokens_per_second_per_gpu >= most), None)


def _title(result: Plans) -> str:
    fewest = min((plan.gpus for plan in result.plans), default=0)
    offloads = all(plan.strategy.offload for plan in result.plans if plan.gpus == fewest)
    safe = all(plan.verdict == "fits" for plan in result.plans[:1])
    why = "Faster" if safe and not offloads else "To fit safely"
    if offloads:
        why = "Alternatives" if any(answer.host_memory for answer in result.nearest) else "Alternatives to offload"
    return f"{why} on {fewest} GPU{'s' * (fewest > 1)}" if result.plans else "What would fit"


def _row(answer: Nearest, capacity: int) -> tuple[str, ...]:
    fits = answer.verdict != "does-not-fit"
    speed, span = (_speed(answer), _range(answer)) if fits else ("", "")
    return (
        answer.change, answer.group, gib(answer.device, 1), _verdict(answer, capacity), _host(answer), speed, span,
    )  # fmt: skip


def _grouped(result: Plans) -> Iterator[tuple[str, ...]]:
    figures = [_figures(answer, result.capacity) for answer in result.nearest]
    titles = [column.title for column in _NARROW[1:]]
    widest = _SCREEN - _GAPS - sum(max(map(len, cells)) for cells in zip(titles, *figures, strict=True))
    for group, answers in groupby(result.nearest, key=lambda answer: answer.group):
        yield group, "", "", "", ""
        for answer in answers:
            change = short(answer.change)
            cell = fill(change, widest, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
            yield cell, *_figures(answer, result.capacity)


def _figures(answer: Nearest, capacity: int) -> tuple[str, ...]:
    speed = f"{_speed(answer)} {_range(answer)}" if answer.verdict != "does-not-fit" else ""
    return gib(answer.device, 1), _host(answer), _verdict(answer, capacity), speed


def _host(answer: Nearest) -> str:
    return gib(answer.host_memory, 0) + "?" * bool(answer.unknown) if answer.host_memory else ""


def _verdict(answer: Nearest, capacity: int) -> str:
    over = f"{(answer.device - capacity) / GIB:.1f}"
    return _VERDICT.get(answer.verdict, answer.verdict).format(over)


def _speed(answer: Nearest) -> str:
    return f"{answer.tokens_per_second_per_gpu:.0f}"


def _range(answer: Nearest) -> str:
    low, high = (10 * round(value / 10) for value in (answer.slowest, answer.fastest))
    return f"({low}–{high})"


# ----------------------------------------------------------------------------------------------------------- the recipe


GOOD = 1.5
"""A return above which a remedy is said to be good."""


def recipe_blocks(result: Plans) -> Iterator[Block]:
    """Both tables, where they were asked for."""
    if result.recipe:
        columns = header("step | change | peak [GiB] > | fits | tok/s/GPU >")
        rows = tuple(
            (
                str(step.stage),
                step.change,
                gib(step.device),
                "yes" if step.fits else "no",
                f"{step.tokens_per_second_per_gpu:.0f}",
            )
            for step in result.recipe
        )
        yield Table("Tuning steps, cheapest first", columns, rows)
        yield from _beside_the_best(result)
    if result.remedies:
        columns = header("remedy | saved [%] > | time added [%] > | ratio > | reserved [GiB] >")
        rows = tuple(
            (
                remedy.change,
                f"{100 * remedy.saved:.1f}",
                f"{100 * remedy.slower:.1f}",
                _roi(remedy),
                gib(remedy.reserved),
            )
            for remedy in result.remedies
        )
        yield Table("Remedies by memory saved per time added", columns, rows)
        yield Line(f"Baseline: 16-bit training, no remedies. Above {GOOD} is a good trade.", "faint")


def _roi(item: Remedy) -> str:
    if item.saved <= 0:
        return "saves nothing"
    return "no cost" if item.roi is None else f"{item.roi:.2f}"


def _beside_the_best(result: Plans) -> Iterator[Line]:
    last = result.recipe[-1]
    if not result.plans or not last.fits:
        return
    best = max(plan.time.tokens_per_second_per_gpu for plan in result.plans if plan.gpus == last.strategy.gpus)
    gain = best / last.tokens_per_second_per_gpu - 1
    if gain > 0.005:
        yield Line(f"The search's best plan is {gain:.0%} faster than the recipe's last step.")


# ------------------------------------------------------------------------------------------- every figure of every plan


class _Field(NamedTuple):
    """A column of the table, and how a plan fills it."""

    column: Column
    value: Callable[[Plan, Plans], str]


def _degree(title: str, name: str) -> _Field:
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
    _degree("TP", "tp"),
    _Field(Column("SP"), lambda plan, _: "yes" if plan.strategy.sp else "no"),
    _degree("PP", "pp"),
    _choice("schedule", "pp_schedule"),
    _degree("VPP", "vpp"),
    _degree("CP", "cp"),
    _degree("EP", "ep"),
    _degree("replicas", "dp_replicate"),
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
