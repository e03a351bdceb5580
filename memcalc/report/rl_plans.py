"""Plans of post-training as a document: the best first, what stands behind each figure, and the lines to go on with."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.estimate import MOODS
from memcalc.report.tables import Block, Code, Column, Document, Line, Report, Table, facts, gib, header
from memcalc.results.posttraining import Nearest, RlPlan, RlPlans
from memcalc.units import format_count

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


def report(result: RlPlans) -> Report:
    """Return the answer of ``memcalc plan --algorithm``."""
    grounds = tuple(_grounds(result))
    commands = tuple(Code(f"Plan {plan.rank} phase by phase", plan.command) for plan in result.plans)
    warnings = (Line(f"Warning: {text}", "warning") for text in result.warnings)
    rest = (*warnings, *_nearest(result.nearest), *facts("Assumed", result.assumptions))
    again = Code("Reproduce with", result.command)
    blocks = (*_head(result), *grounds, *rest, *commands, again)
    screen = (*_head(result, _ON_SCREEN), *(grounds[2:] if result.plans else ()), *rest, *commands[:1], *_more(result))
    return Report(Document(blocks, _data(result), screen), result.model_dump(mode="json", by_alias=True))


def _more(result: RlPlans) -> Iterator[Line]:
    if result.plans:
        count = f"{result.samples:,} samples a step · {result.fitting} of {result.searched} jobs fit"
        yield Line(f"{count} · -v: rounds, each command", "faint")


def _head(result: RlPlans, columns: int = len(_COLUMNS)) -> Iterator[Block]:
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


def _data(result: RlPlans) -> Table:
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
