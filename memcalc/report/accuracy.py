"""The page of accuracy: what is compared and how, what was aimed at and reached, every row, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten
from typing import Literal

from memcalc.report.tables import Block, Column, Line, Report, Table, header, made
from memcalc.results.comparison import RunReason, RunScore, TargetResult, Validation
from memcalc.results.details import ErrorSummary
from memcalc.results.names import component_name
from memcalc.units import GIB, signed

FAR = 0.05
"""A row with a larger |error| is listed by name with its explanation."""
ERROR_COLUMNS = header("figures > | median [%] > | p90 [%] > | worst [%] > | worst run <3")
ROW_COLUMNS = header(
    "run | figure | measured [GiB] > | predicted [GiB] > | error [%] > | in interval <6 | "
    "group <2 | framework <3 | GPUs <4 | rank <7 | grade <8 | software <9 | source <10"
)
MOST, MOST_BRIEF = 10, 4
"""Rows that are furthest off: in all of an answer, and on a screen."""
_FEW_REASONS = 2
"""Reasons that a screen has room for."""
_SCREEN_COLUMNS = ("run", "figure", "measured", "predicted", "error", "framework")
_LONGEST_REASON = 180
_PAGE_COLUMNS = ("run", "figure", "measured", "predicted", "error", "framework", "GPUs", "grade")


def in_percent(error: float | None) -> str:
    """Return the size of an error in percent, and nothing for none.

    >>> in_percent(0.5), in_percent(None)
    ('50.00', '')
    """
    return "" if error is None else f"{100 * error:.2f}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def brief(reason: str) -> str:
    """Return a reason as a table's cell can hold it; the JSON has it in full."""
    return shorten(reason, _LONGEST_REASON, placeholder=" …")


def error_cells(summary: ErrorSummary) -> tuple[str, ...]:
    """Return the cells of ``ERROR_COLUMNS``."""
    sizes = (summary.median_abs_error, summary.p90_abs_error, summary.worst)
    return (str(summary.count), *(in_percent(size) for size in sizes), summary.worst_id or "")


def row_cells(score: RunScore, *, data: bool = False) -> tuple[str, ...]:
    """Return the cells of ``ROW_COLUMNS``; with `data` in a record's words and in ASCII, for other programs."""
    within = "" if score.figure == "allocated" else "yes" if score.within else "no"
    error = f"{100 * score.error:+.2f}" if data else signed(100 * score.error)
    return (
        score.id, score.figure if data else component_name(score.figure), f"{score.measured / GIB:.3f}",
        f"{score.predicted / GIB:.3f}", error, within, score.group, score.framework, f"{score.gpus} × {score.gpu}",
        score.rank, score.grade, score.software, score.source,
    )  # fmt: skip


def blocks(result: Validation) -> Iterator[Block]:
    """Return the page from top to bottom."""
    yield from _how(result)
    yield from (Line(f"With the calibration {validation}.") for validation in result.calibrations)
    yield from _targets(result.targets)
    yield from _parts(result)
    yield from _verdicts(result)
    yield from _throughput(result)
    yield from _far(result)
    yield from _rows(result.runs)
    yield from _unknown(result)
    yield from _reasons("Not modelled", "No prediction; the sentence says why.", result.not_modelled)
    yield from _reasons("Left out", "Published runs that cannot be compared, and why.", result.left_out)


def _how(result: Validation) -> Iterator[Block]:
    total, runs = result.summary, len({score.id for score in result.runs})
    yield Line("What is compared", "heading")
    yield Line(
        f"{counted(total.count, 'figure')} of {counted(runs, 'measured run')}, each with its source, against what "
        "memcalc predicts for the same settings. A figure is one of three: allocated "
        "(torch.cuda.max_memory_allocated()), reserved (torch.cuda.max_memory_reserved()) and total (nvidia-smi, the "
        "process)."
    )
    yield Line(
        "The error is predicted / measured − 1; median, 90th percentile and worst are of its absolute value. A run's "
        "figure is that of the rank which was read, by default the highest over all ranks. Where a source does not "
        "say which of the three figures it gives, the run is listed and not scored. A run that ran out of memory is a "
        "bound: only its verdict is checked."
    )
    yield Line(
        "Grade A and A-: every setting was read in the source. Grade B: something is assumed from context, or the "
        "figure was read coarsely."
    )
    yield _summaries("All runs", "figure", _by_figure(result))


def _by_figure(result: Validation) -> list[tuple[str, ErrorSummary]]:
    return [(component_name(group.name), group) for group in result.groups if group.by == "figure"]


def _summaries(title: str, name: str, rows: Sequence[tuple[str, ErrorSummary]]) -> Table:
    return Table(title, (Column(name), *ERROR_COLUMNS), tuple((text, *error_cells(part)) for text, part in rows))


def _targets(targets: Sequence[TargetResult]) -> Iterator[Block]:
    if not targets:
        return
    aims = ("figures", "median", "median aimed at", "p90", "p90 aimed at")
    columns = (
        *header("runs | figure"),
        *(Column(title, "%" if title != "figures" else "", right=True) for title in aims),
        Column("met"),
    )
    yield Line("Aims", "heading")
    yield Table("Aimed at and reached", columns, tuple(_target_cells(target) for target in targets))


def _target_cells(target: TargetResult) -> tuple[str, ...]:
    return (
        target.name,
        component_name(target.figure),
        str(target.count),
        in_percent(target.median_abs_error),
        in_percent(target.median_target),
        in_percent(target.p90_abs_error),
        in_percent(target.p90_target),
        {True: "yes", False: "no", None: "no run"}[target.met],
    )


def _parts(result: Validation) -> Iterator[Block]:
    kinds: dict[Literal["group", "framework", "gpu"], str] = {
        "group": "By group", "framework": "By framework and era", "gpu": "By GPU"
    }  # fmt: skip
    for by, title in kinds.items():
        parts = [part for part in result.groups if part.by == by]
        if parts:
            columns = (Column(by), Column("figure"), *ERROR_COLUMNS)
            yield Line(title, "heading")
            yield Table(
                "Absolute error",
                columns,
                tuple((part.name, component_name(part.figure), *error_cells(part)) for part in parts),
            )


def _verdicts(result: Validation) -> Iterator[Block]:
    total = result.summary
    yield Line("Does it fit?", "heading")
    yield Line(
        f"Of {total.ran_out} runs that ran out of memory, {total.false_fits} were predicted to fit. "
        f"Of {total.ran} runs that ran, {total.false_rejects} were predicted not to fit."
    )
    if total.covered_of:
        claimed = total.coverage_claim
        yield Line(
            f"{total.covered} of {total.covered_of} reserved and total figures "
            f"({100 * total.covered / total.covered_of:.1f}%) lie within the interval of the prediction"
            + ("." if claimed is None else f", which claims {100 * claimed:.0f}%.")
        )
    wrong = tuple(
        (entry.id, entry.outcome, entry.verdict, f"{entry.device / GIB:.2f}", f"{entry.capacity / GIB:.2f}")
        for entry in result.verdicts
        if entry.wrong
    )
    if wrong:
        sizes = header("predicted total [GiB] > | capacity [GiB] >")
        yield Table("Wrong verdicts", (*header("run | outcome | verdict"), *sizes), wrong)


def _throughput(result: Validation) -> Iterator[Block]:
    """Return measured throughput beside the predicted one, by group and by sweep."""
    if not result.throughput:
        return
    yield Line("Throughput of these runs", "heading")
    yield Line(_speeds(result))
    columns = (Column("group"), *ERROR_COLUMNS, *header("in range > | left out, median [%] > | p90 [%] >"))
    rows = tuple(
        (part.name, *error_cells(part), f"{part.covered} of {part.count}",
         *(in_percent(size) for size in (part.left_out_median, part.left_out_p90)))
        for part in result.throughput_groups
    )  # fmt: skip
    yield Table("Absolute error of tokens a second", columns, rows)
    if result.orders:
        columns = header("group | sweep | layouts > | pairs in order > | lost by the first [%] > | best stands at >")
        orders = tuple(
            (order.group, order.sweep, str(order.layouts), f"{order.right} of {order.pairs}",
             in_percent(order.regret), str(order.rank))
            for order in result.orders
        )  # fmt: skip
        yield Table("Layouts of a sweep in order", columns, orders)


def _speeds(result: Validation) -> str:
    """Return the errors of throughput in one sentence."""
    total = result.throughput_groups[-1]
    return (
        f"Throughput of {counted(total.count, 'run')}: |error| median {in_percent(total.median_abs_error)}%, "
        f"p90 {in_percent(total.p90_abs_error)}%; {total.covered} in the range"
    )


def _far(result: Validation) -> Iterator[Block]:
    far = sorted((score for score in result.runs if abs(score.error) > FAR), key=lambda score: -abs(score.error))
    yield Line("Far off", "heading")
    yield Line(f"{len(far)} of {len(result.runs)} figures are more than {100 * FAR:.0f}% off.")
    if far:
        known = {entry.id: entry.reason for entry in result.explained}
        rows = tuple(
            (s.id, component_name(s.figure), signed(100 * s.error), known.get(s.id, "unexplained")) for s in far
        )
        yield Table("Figures that are far off", header("run | figure | error [%] > | why"), rows)


def _rows(scores: Sequence[RunScore]) -> Iterator[Block]:
    places = [index for index, column in enumerate(ROW_COLUMNS) if column.title in _PAGE_COLUMNS]
    yield Line("Every figure", "heading")
    for group in sorted({score.group for score in scores}):
        rows = tuple(row_cells(score) for score in scores if score.group == group)
        yield Table(group, ROW_COLUMNS, rows).keep(places)


def _unknown(result: Validation) -> Iterator[Block]:
    if not result.unknown:
        return
    sizes = ("measured", "allocated", "reserved", "device")
    columns = (Column("run"), *(Column(component_name(name), "GiB", right=True) for name in sizes))
    rows = tuple((entry.id, *(f"{getattr(entry, name) / GIB:.2f}" for name in sizes)) for entry in result.unknown)
    yield Line("Figures of an unknown kind", "heading")
    yield Table("Measured, and the three predicted figures; not scored", columns, rows)


def _reasons(title: str, text: str, entries: Iterable[RunReason]) -> Iterator[Block]:
    """Return runs with their reasons, those with the same reason in one row."""
    together: dict[str, list[str]] = {}
    for entry in entries:
        together.setdefault(entry.reason, []).append(entry.id)
    if together:
        listed = sorted(together.items(), key=lambda item: (-len(item[1]), item[0]))
        rows = tuple((str(len(names)), brief(reason), ", ".join(names)) for reason, names in listed)
        yield Line(title, "heading")
        yield Line(f"{counted(sum(len(names) for names in together.values()), 'run')}. {text}")
        yield Table(title, header("runs > | reason | which"), rows)


def validation_report(result: Validation, worst: int | None = None, *, full: bool = False) -> Report:
    """Return the answer of ``memcalc validate``: with the `worst` rows, or in `full` the page of accuracy."""
    rows = Table("Runs", ROW_COLUMNS, tuple(row_cells(score, data=True) for score in result.runs))
    if full:
        return made(result, rows, *blocks(result))
    brief = _screen(result, MOST_BRIEF if worst is None else worst)
    return made(result, rows, *_detailed(result, MOST if worst is None else worst), screen=brief)


def _screen(result: Validation, worst: int) -> Iterator[Block]:
    """Yield what a terminal shows: the errors, the verdicts, each figure, what is furthest off."""
    yield from _answers(result)
    if result.runs:
        columns = header("figure | figures > | median % > | p90 % > | worst % > | worst run")
        rows = tuple((name, *error_cells(group)) for name, group in _by_figure(result))
        yield Table("By figure", columns, rows, titled=False)
    if result.runs and worst:
        columns = header("furthest off | figure | measured GiB > | predicted > | error % > | framework <1")
        indices = [[column.title for column in ROW_COLUMNS].index(name) for name in _SCREEN_COLUMNS]
        rows = tuple(tuple(row_cells(score)[index] for index in indices) for score in _ranked(result.runs)[:worst])
        yield Table("Furthest off", columns, rows, titled=False)
    yield from _absent(result)
    others = f"{len(result.left_out)} left out, with reasons: --format markdown · " * bool(result.left_out)
    yield Line(f"{others}-v: by group, more of each run", "faint")


def _absent(result: Validation) -> Iterator[Line]:
    """Yield why runs have no prediction, where few sentences say so."""
    reasons = Counter(entry.reason for entry in result.not_modelled)
    if len(reasons) <= _FEW_REASONS:
        yield from (Line(f"{count} not modelled: {brief(reason)}", "faint") for reason, count in reasons.items())
    else:
        yield Line(f"{len(result.not_modelled)} not modelled, each with its reason: -v", "faint")


def _detailed(result: Validation, worst: int) -> Iterator[Block]:
    yield from _answers(result)
    if result.runs:
        groups = [group for group in result.groups if group.by == "group"]
        columns = (*header("group | figure"), *ERROR_COLUMNS)
        rows = tuple((g.name, component_name(g.figure), *error_cells(g)) for g in groups)
        yield _summaries("By figure", "figure", _by_figure(result))
        yield Table("By group", columns, rows)
    if result.runs and worst:
        yield _worst(result.runs, worst)
    if result.not_modelled:
        yield _run_reasons(result)
    if result.left_out:
        yield Line(
            f"{counted(len(result.left_out), 'published run')} left out, each with its reason (--format markdown).",
            "faint",
        )


def _answers(result: Validation) -> Iterator[Line]:
    """Yield how far off memory is, the verdicts, and how far off speed is."""
    yield Line(_errors(result), "verdict")
    yield from (Line(f"With the calibration {validation}.", "faint") for validation in result.calibrations)
    yield from (Line(text, mood=mood) for text, mood in _run_verdicts(result))
    if result.throughput:
        yield Line(_speeds(result))


def _errors(result: Validation) -> str:
    total = result.summary
    if not total.count:
        return "no figure is scored"
    runs = len({score.id for score in result.runs})
    spread = ", ".join(
        f"{name} {in_percent(value)}%"
        for name, value in (("median", total.median_abs_error), ("p90", total.p90_abs_error), ("worst", total.worst))
    )
    return f"{counted(total.count, 'figure')} of {counted(runs, 'run')}: |error| {spread}"


def _run_verdicts(result: Validation) -> Iterable[tuple[str, str]]:
    """Return the wrong verdicts and the coverage of the interval, each with its mood."""
    total = result.summary
    if total.ran_out:
        mood = "bad" if total.false_fits else "good"
        yield f"Predicted to fit, ran out of memory: {total.false_fits} of {total.ran_out}", mood
    if total.ran:
        yield (
            f"Predicted not to fit, ran: {total.false_rejects} of {total.ran}",
            "bad" if total.false_rejects else "good",
        )
    if total.covered_of:
        claim = "no coverage is claimed" if total.coverage_claim is None else f"claim {100 * total.coverage_claim:.0f}%"
        yield f"Reserved and total inside the 95% range: {total.covered} of {total.covered_of} ({claim})", ""


def _ranked(scores: Sequence[RunScore]) -> list[RunScore]:
    return sorted(scores, key=lambda score: -abs(score.error))


def _worst(scores: Sequence[RunScore], count: int) -> Table:
    ranked = _ranked(scores)[:count]
    shown = [index for index, column in enumerate(ROW_COLUMNS) if column.title not in {"software", "source"}]
    return Table(f"Worst {len(ranked)}", ROW_COLUMNS, tuple(row_cells(score) for score in ranked)).keep(shown)


def _run_reasons(result: Validation) -> Table:
    counted = Counter(entry.reason for entry in result.not_modelled).most_common()
    columns = header("runs > | reason")
    return Table("Not modelled", columns, tuple((str(count), brief(reason)) for reason, count in counted))
