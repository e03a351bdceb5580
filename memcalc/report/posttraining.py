"""Post-training as a document: whether it fits, each phase by role, what the engines hold; and plans of it."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.estimate import MOODS, warned
from memcalc.report.palette import ROLES
from memcalc.report.plan_words import assumed
from memcalc.report.tables import (
    Bars,
    BarsRow,
    Block,
    Code,
    Column,
    Document,
    Line,
    Report,
    Table,
    facts,
    gib,
    header,
    made,
    said,
)
from memcalc.results.posttraining import Nearest, Rl, RlLimit, RlPlan, RlPlans, RlRollout
from memcalc.units import format_count


def report(result: Rl) -> Report:
    """Return the answer of ``memcalc rl``."""
    table = _phases(result)
    bars, head, rollout = _bars(result), tuple(head_of(result)), result.rollout
    brief = (*head, bars._replace(compact=True), *_engines(rollout), *_brief(result))
    return made(result, _data(result), *head, bars, table, *_body(result), *_foot(result), screen=brief)


def _engines(rollout: RlRollout | None) -> Iterator[Line]:
    """Yield the engines in a line, where there are any."""
    if rollout is None:
        return
    most = "" if rollout.largest_utilization is None else f" (up to {rollout.largest_utilization:g})"
    cache = f"{rollout.tokens:,} tokens of cache each", f"{rollout.concurrency:.0f} samples at once"
    count = f"{rollout.engines} engine{'s' * (rollout.engines > 1)}"
    yield said("Rollout", count, f"utilization {rollout.utilization:g}{most}", *cache)


def _brief(result: Rl) -> Iterator[Block]:
    """Yield what to mind and what was assumed, for a terminal."""
    yield from _largest(result)
    if result.host:
        yield _host(result)
    yield from warned(result.warnings)
    yield from assumed(result.assumptions)
    yield Line("-v: every role in every phase", "faint")


def summary(result: Rl) -> str:
    """One line, as a queue shows it."""
    verdict = {"fits": "fits", "tight": "is tight", "does-not-fit": "does not fit"}[result.verdict]
    most = max(phase.allocated for phase in result.phases)
    hardware = result.hardware
    line = (
        f"{verdict}: {result.algorithm} of {result.model.name} needs {gib(most, 1)} of {gib(result.capacity, 1)} GiB "
        f"per GPU ({hardware.gpus} × {hardware.gpu}), most in {result.binding}"
    )
    line = f"{line}; {result.reason}" if result.reason else line
    line = f"{line}; fits up to a mean of {result.longest_mean:,}" if result.longest_mean is not None else line
    return f"{line}; fits with {result.edit.change}" if result.edit is not None else line


def head_of(result: Rl) -> Iterator[Line]:
    """Yield the verdict, what it is of, and the change that helps."""
    verdict = result.verdict.replace("-", " ")
    binding = next(phase for phase in result.phases if phase.name == result.binding)
    text = f"{result.binding} holds most, {gib(binding.allocated, 1)} of {gib(result.capacity, 1)} GiB"
    says = result.reason if result.verdict == "does-not-fit" else text
    if result.longest_mean is not None:
        says = f"fits while samples have at most {result.longest_mean:,} tokens on average"
    yield Line(f"{verdict} · {says}", "verdict", MOODS[result.verdict])
    hardware = result.hardware
    subject = f"{result.algorithm} of {result.model.name} ({format_count(result.model.parameters)} parameters)"
    yield Line(
        f"{subject} on {hardware.gpus} × {hardware.gpu}: {result.framework}, trained by {result.trainer}", "title"
    )
    if result.verdict == "tight":
        yield Line(f"Tight: {result.reason}.", "warning")
    if result.edit is not None:
        change = result.edit
        yield said("Change", f"{change.change}: {change.verdict}, {gib(change.device, 1)} GiB")
    elif result.verdict == "does-not-fit":
        yield Line("No change that is tried makes it fit: more GPUs, shorter lengths or adapters may.", label="Change")


def roles_in(result: Rl) -> list[str]:
    """Return the roles that a job has, in the order in which they are stacked everywhere."""
    there = {name for phase in result.phases for name in phase.roles}
    return [name for name in ROLES if name in there]


def _bars(result: Rl) -> Bars:
    names = roles_in(result)
    rows = tuple(
        BarsRow(
            phase.name,
            tuple((name, phase.roles.get(name, 0)) for name in names),
            f"{gib(phase.allocated, 1)} GiB",
            "bad" if phase.allocated > result.capacity else "good",
        )
        for phase in result.phases
    )
    end = max(result.capacity, *(row.size for row in rows))
    return Bars(rows, result.capacity, end, result.hardware.gpu)


def _phases(result: Rl) -> Table:
    names = roles_in(result)
    columns = (
        *header("phase | GPUs <4"),
        *(Column(name, "GiB", right=True, priority=2 if name == "contexts" else 1) for name in names),
        *header("sum [GiB] > | reserved [GiB] > | free [GiB] >3"),
    )
    rows = tuple(
        (
            phase.name,
            phase.gpus,
            *(gib(phase.roles[name]) if name in phase.roles else "" for name in names),
            gib(phase.allocated),
            gib(phase.device),
            gib(result.capacity - phase.allocated),
        )
        for phase in result.phases
    )
    return Table("A GPU by phase and role", columns, rows)


def _body(result: Rl) -> Iterator[Block]:
    if result.rollout is not None:
        yield _rollout(result.rollout)
    yield from _largest(result)
    yield _host(result)


def _host(result: Rl) -> Line:
    """Return what a node needs off its GPUs."""
    known = f" of {gib(result.host_capacity, 0)}" if result.host_capacity else ""
    return said("Host", f"{gib(result.host, 1)}{known} GiB per node, for what is parked, offloaded or asleep")


def _largest(result: Rl) -> Iterator[Block]:
    """Yield what was asked for beside the verdict."""
    if result.limit is not None:
        yield Line(_limit(result.limit), label="Largest")
        yield from [Code("With it", result.limit.command)] if result.limit.command else []


def _limit(limit: RlLimit) -> str:
    unit = "samples" if limit.what == "micro-batch" else "tokens"
    if limit.value is None:
        return f"No {limit.what} fits: {limit.reason}."
    against = f"; beyond it {limit.reason}" if limit.reason else ", the largest that is tried"
    multiple = f" (in multiples of {limit.step})" if limit.step > 1 else ""
    return f"Largest {limit.what} that fits: {limit.value:,} {unit}{multiple}{against}."


def _rollout(rollout: RlRollout) -> Table:
    largest = "none" if rollout.largest_utilization is None else f"{rollout.largest_utilization:g}"
    rows = (
        ("engines", str(rollout.engines)),
        ("utilization", f"{rollout.utilization:g}"),
        ("largest utilization", largest),
        ("tokens of one's cache", f"{rollout.tokens:,}"),
        ("samples at once, all of the longest length", f"{rollout.concurrency:.1f}"),
        ("rounds per step", "" if rollout.rounds is None else str(rollout.rounds)),
    )
    return Table("Rollout", header("engines | value >"), rows)


def _foot(result: Rl) -> Iterator[Block]:
    yield from warned(result.warnings)
    yield from facts("Assumed", result.assumptions)
    yield Code("Reproduce with", result.command)


def _data(result: Rl) -> Table:
    columns = header("phase | GPUs | role | size [bytes] > | sum [bytes] > | reserved [bytes] >")
    rows = tuple(
        (phase.name, phase.gpus, name, str(size), str(phase.allocated), str(phase.device))
        for phase in result.phases
        for name, size in phase.roles.items()
    )
    return Table("Post-training", columns, rows)


# ---------------------------------------------------------------------------------------------------------------- plans


_COLUMNS = (
    *header("# > | GPUs | recompute | trainer | update [s] > | free [GiB] > | engine | rollout [s, guess] >"),
    Column("rounds", "× samples", right=True),
)
_OFFLINE, _ON_SCREEN = 6, 8
"""Columns that are left where nothing is generated, and that a screen has."""
_DATA = header(
    "rank > | verdict | GPUs to train > | GPUs of engines > | engines > | samples at once > | rounds > | "
    "rollout, a guess [s] > | update [s] > | update, low [s] > | update, high [s] > | binding | free [bytes] > | "
    "host [bytes] > | command"
)
_ENGINE = {"engine_tp": "tp {}", "utilization": "at {}", "max_seqs": "{} seqs", "sleep": "sleep {}"}
_TRAINER = {
    "micro_tokens": "{} tokens", "micro_batch": "micro {}", "zero": "zero {}", "park": "park {}",
    "offload": "offload {}",
}  # fmt: skip
_ALWAYS = frozenset({"engine_tp", "utilization", "micro_tokens", "micro_batch"})
"""What a table says even where it is the framework's default."""


def plans_report(result: RlPlans) -> Report:
    """Return the answer of ``memcalc plan --algorithm``."""
    grounds = tuple(_grounds(result))
    commands = tuple(Code(f"Plan {plan.rank} phase by phase", plan.command) for plan in result.plans)
    warnings = (Line(f"Warning: {text}", "warning") for text in result.warnings)
    rest = (*warnings, *_nearest(result.nearest), *facts("Assumed", result.assumptions))
    again = Code("Reproduce with", result.command)
    blocks = (*_plans_head(result), *grounds, *rest, *commands, again)
    screen = (
        *_plans_head(result, _ON_SCREEN),
        *(grounds[2:] if result.plans else ()),
        *rest,
        *commands[:1],
        *_more(result),
    )
    return Report(Document(blocks, _plans_data(result), screen), result.model_dump(mode="json", by_alias=True))


def _more(result: RlPlans) -> Iterator[Line]:
    if result.plans:
        count = f"{result.samples:,} samples a step · {result.fitting} of {result.searched} jobs fit"
        yield Line(f"{count} · -v: rounds, each command", "faint")


def _plans_head(result: RlPlans, columns: int = len(_COLUMNS)) -> Iterator[Block]:
    hardware = result.hardware
    subject = f"{result.algorithm} of {result.model.name} ({format_count(result.model.parameters)} parameters)"
    title = Line(f"{subject} on {hardware.gpus} × {hardware.gpu} by {result.framework}", "title")
    if not result.plans:
        yield Line(f"does not fit · none of {result.searched} jobs that were tried", "verdict", MOODS["does-not-fit"])
        yield title
        return
    best = result.plans[0]
    summary = f"plan 1 has {gib(best.headroom, 1)} GiB free in {best.binding}"
    yield Line(f"{best.verdict} · {summary}", "verdict", MOODS[best.verdict])
    yield title
    shown = _COLUMNS[: columns if best.engines else _OFFLINE]
    yield Table("", shown, tuple(_row(plan)[: len(shown)] for plan in result.plans))


def _decided(plan: RlPlan, forms: dict[str, str]) -> str:
    """What a plan decides of its engines or its trainer."""
    names = [name for name in forms if name in plan.choices and (name in _ALWAYS or name in plan.changes)]
    return ", ".join(forms[name].format(_short(plan.choices[name])) for name in names)


def _short(value: str) -> str:
    """Return a number of tokens as it is typed.

    >>> _short("32768"), _short("3072"), _short("256")
    ('32k', '3k', '256')
    """
    number = int(value) if value.isdecimal() else 0
    return f"{number // 1024}k" if number > 1024 and number % 1024 == 0 else value


def _row(plan: RlPlan) -> tuple[str, ...]:
    split = f"{plan.trainer_gpus} + {plan.engine_gpus}" if plan.engine_gpus else str(plan.trainer_gpus)
    verdict = " (tight)" if plan.verdict == "tight" else ""
    return (
        str(plan.rank),
        split,
        plan.choices.get("recompute", ""),
        _decided(plan, _TRAINER) + verdict,
        "" if plan.update is None else f"{plan.update.seconds:.3g}",
        gib(plan.headroom, 1),
        _decided(plan, _ENGINE),
        "" if plan.rollout_guess is None else f"{plan.rollout_guess:.3g}",
        "" if plan.rounds is None else f"{plan.rounds} × {plan.at_once:,}",
    )


def _grounds(result: RlPlans) -> Iterator[Line]:
    bases = list(dict.fromkeys(plan.update.basis for plan in result.plans if plan.update is not None))
    for name, text in result.grounds.items():
        basis = f": {'; '.join(bases)}" if name == "update" and bases else ""
        yield Line(f"{name}: {text}{basis}.", "faint", label=name.split(",")[0].capitalize(), items=(f"{text}{basis}",))


def _nearest(nearest: Nearest | None) -> Iterator[Block]:
    if nearest is None:
        return
    yield Line(f"Nearest: {nearest.reason}.", label="Nearest", items=(nearest.reason,))
    for remedy in nearest.remedies:
        yield Line(f"Fits with {remedy.change}: {gib(remedy.device, 1)} GiB, {remedy.verdict}.", label="Change")
    if not nearest.remedies:
        yield Line("No single change that is tried makes it fit.", label="Change")
    yield Code("The nearest phase by phase", nearest.command)
    yield from (Code(f"With {remedy.change}", remedy.command) for remedy in nearest.remedies[:1])


def _plans_data(result: RlPlans) -> Table:
    rows = tuple(
        (
            str(plan.rank),
            plan.verdict,
            str(plan.trainer_gpus),
            str(plan.engine_gpus),
            str(plan.engines),
            str(plan.at_once),
            "" if plan.rounds is None else str(plan.rounds),
            "" if plan.rollout_guess is None else f"{plan.rollout_guess:.4g}",
            *_times(plan),
            plan.binding,
            str(plan.headroom),
            str(plan.host),
            plan.command,
        )
        for plan in result.plans
    )
    return Table("Plans", _DATA, rows)


def _times(plan: RlPlan) -> tuple[str, str, str]:
    update = plan.update
    if update is None:
        return "", "", ""
    return f"{update.seconds:.4g}", f"{update.low:.4g}", f"{update.high:.4g}"
