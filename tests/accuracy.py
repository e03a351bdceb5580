"""The page `docs/accuracy.md`: measured runs, our prediction, and what other calculators say of the same runs.

Run as a script, this file writes the page anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import engines

from memcalc.api import load_model
from memcalc.catalog import reserve, step_time
from memcalc.errors import MemcalcError
from memcalc.evidence import words_of
from memcalc.files import array_of_tables
from memcalc.report import Report, render
from memcalc.report.accuracy import ERROR_COLUMNS, error_cells, validation_report
from memcalc.report.tables import Block, Column, Document, Line, Table
from memcalc.results.comparison import RunScore, RunVerdict, Validation
from memcalc.results.details import ErrorSummary
from memcalc.runs import read_runs
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.runs import Run, RunsFile
from memcalc.specs.step_time import Kind, KindErrors, Reserve
from memcalc.terms.overhead import KINDS
from memcalc.units import signed
from memcalc.validation import Presets, model_of, summary_of, validate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
ROWS_PAGE = PAGE.parent / "reference" / "runs.md"
HEAD = """\
# Accuracy

Written by `python tests/accuracy.py` from the measured runs in [presets/runs](../presets/runs); a test keeps it \
current. `memcalc validate` prints the same for the shipped runs, or for a file of your own. Every run, with its \
error: [row by row](reference/runs.md). What else was checked: [evidence](evidence.md).
"""
ROWS_HEAD = """\
# Accuracy, row by row

Written by `python tests/accuracy.py`, as [accuracy](../accuracy.md), which has the results in short.
"""
ENGINES = "Engines and post-training"
IN_SHORT = ("What is compared", "Aims", "By group", "Does it fit?", "The range", "Throughput",
            "Throughput of these runs", ENGINES)  # fmt: skip
"""Headings of the first page; what else there is stands on the second."""
README = PAGE.parents[1] / "README.md"
EVIDENCE = PAGE.parents[1] / "presets" / "evidence.toml"
EVIDENCE_HEAD = """\
# Written by tests/accuracy.py from presets/runs; do not edit.
# Errors of measured runs, predicted / measured - 1, by kind of job and figure: memcalc report tells those of its job.
"""
START, END = "<!-- accuracy: written by tests/accuracy.py -->", "<!-- end of accuracy -->"
UNCOUNTED = (
    "Runs of which the speed alone was published (presets/runs/layouts) are not among these, unless they ran out of "
    "memory: most do not say what they recompute, or how their allocator was set, and more of them are predicted not "
    "to fit, as memcalc validate tells of each of those files."
)
READ_BY = {"allocated": "allocated", "reserved": "reserved", "device": "nvidia-smi"}
CLASSES = ("caching", "2021")
REPLAYED = "caching"
Pairs = list[tuple[float, str]]


@cache
def peers() -> ModuleType:
    """Return the other calculators; this folder is no package."""
    spec = spec_from_file_location("peers", Path(__file__).with_name("peers.py"))
    if spec is None or spec.loader is None:
        raise ImportError(spec)
    module = sys.modules["peers"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def preset(name: str) -> Model:
    return load_model(name)


def pages(runs: RunsFile, found: Validation) -> dict[Path, str]:
    """Return the page of results and that of all rows."""
    blocks = (
        *validation_report(found, full=True).document.blocks,
        *by_kind(kinds(runs, found)),
        *ranges(),
        *throughput(),
        *beside(found, runs),
        *engines_and_roles(),
    )
    parts: dict[Path, list[Block]] = {PAGE: [], ROWS_PAGE: []}
    path = PAGE
    for block in blocks:
        if isinstance(block, Line) and block.role == "heading":
            path = PAGE if block.text in IN_SHORT else ROWS_PAGE
        parts[path].append(block)
        if isinstance(block, Line) and "were predicted not to fit" in block.text:
            parts[path].append(Line(UNCOUNTED))
    heads = {PAGE: HEAD, ROWS_PAGE: ROWS_HEAD}
    return {
        path: f"{heads[path]}\n{render(Report(Document(tuple(part), Table('', (), ())), {}), 'markdown')}"
        for path, part in parts.items()
    }


def engines_and_roles() -> Iterator[Block]:
    """Return what published logs of engines and outcomes of post-training say; log by log they stand on other pages."""
    yield Line(ENGINES, "heading")
    yield Line(
        "What memcalc serve predicts, beside published start-up logs, and what memcalc rl says of public runs, beside "
        "their outcomes. Nearly all logs are of one campaign, so that this is a fit more than a forecast. Log by log, "
        "and run by run with what parts each, they stand on the pages of these commands."
    )
    yield _copied("Errors of engines", engines.summary())
    yield _copied("Verdicts of engines beside what happened", engines.outcomes())
    yield _copied("Verdicts of post-training beside what happened", engines.role_outcomes())


def _copied(title: str, table: str) -> Table:
    """Return a table of Markdown as one of a document."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.strip().splitlines()]
    head, _, *rows = lines
    return Table(
        title, tuple(Column(name, right=name not in ("predicted", head[0])) for name in head), tuple(map(tuple, rows))
    )


def ranges() -> Iterator[Block]:
    """Return what the interval and the verdict stand on."""
    yield Line("The range", "heading")
    yield Line(
        "What no mechanism predicts is a range around the prediction of reserved and total memory, fitted by "
        "tests/fits/reserve.py on the runs above (grade A where there are enough) and widened until ranges that were "
        'fitted without a document hold the claimed share of that document\'s figures. The verdict "fits" asks for the '
        "limit, which one run of twenty exceeds."
    )
    yield Line(
        "Where the allocator is replayed each kind of job has its own range, since kinds are known unequally well: an "
        "end is Z q + (1 - Z) q_all, with the quantiles q of its own figures and q_all of all, and their credibility "
        "Z = n / (n + m) (Bühlmann 1967, ASTIN Bulletin 4:199). k figures of one document count in n as "
        "k / (1 + (k - 1) r) with their correlation r (the design effect of Kish 1965), and m is that of the least "
        "interval score on documents left out. Kinds with fewer than 5 figures have the range of all; those with 20 or "
        "more are widened until figures of documents left out are held. What is left out of a kind with one document "
        "leaves it the range of all."
    )
    columns = ("low", "high", "limit", "claim", "cross-validated", "figures", "documents")
    numbers = tuple(Column(name, right=True) for name in columns)
    whole = tuple((name, *_range_row(reserve(name))) for name in CLASSES)
    yield Table("By allocator", (Column("allocator"), *numbers), whole)
    kinds = [(kind, reserve(REPLAYED, kind)) for kind in KINDS]
    rows = tuple((kind, f"{known.weight:.2f}" if known.kind else "0", *_range_row(known)) for kind, known in kinds)
    yield Table(
        "By kind of job, where the allocator is replayed", (Column("kind"), Column("Z", right=True), *numbers), rows
    )
    apart = [known for _, known in kinds if known.kind]
    figures = sum(known.figures for known in apart)
    held = sum(known.crossed * known.figures for known in apart) / figures
    yield Line(
        f"Of the {figures} figures of kinds with a range of their own {100 * held:.1f}% lie in the range that was "
        "fitted without their document."
    )


def throughput() -> Iterator[Block]:
    """Return how good the step-time model is, as its fit found it."""
    table = step_time()
    yield Line("Throughput", "heading")
    pairs = {row.name: row for row in table.order}
    alike, layout = pairs["all pairs"], pairs["layout alone"]
    yield Line(
        "Errors of predicted steps by source; crossed figures are those by constants that were fitted without the "
        "source (tests/fits/step_time.py). Of pairs of runs of one source, model and GPU "
        f"that are more than 3% apart, {100 * alike.right / alike.pairs:.1f}% of {alike.pairs} are in the right order "
        f"(crossed {100 * alike.crossed_right / alike.pairs:.1f}%); of those that differ in layout, micro-batch and "
        f"sharding alone, {100 * layout.right / layout.pairs:.1f}% of {layout.pairs} "
        f"(crossed {100 * layout.crossed_right / layout.pairs:.1f}%)."
    )
    names = ("source", "runs", "median %", "90% within", "crossed median %", "crossed 90% within")
    rows = [
        (
            row.name,
            str(row.runs),
            *(f"{100 * e:.1f}" for e in (row.median, row.p90, row.crossed_median, row.crossed_p90)),
        )
        for row in table.error
    ]
    yield Table("By source", _aligned(names), tuple(rows))
    yield Line(
        "No mixture of experts was fitted on: their constants are those of dense runs and of others' measurements. "
        "The errors of their steps:"
    )
    names = ("source", "runs", "median %", "90% within", "middle %")
    rows = [
        (row.name, str(row.runs), *(f"{100 * e:.1f}" for e in (row.median, row.p90)), signed(100 * row.bias, 1))
        for row in table.experts
    ]
    yield Table("Mixtures of experts", _aligned(names), tuple(rows))
    kinds = tuple(
        (row.name, f"{signed(100 * row.low, 0)}%", f"{signed(100 * row.high, 0)}%", f"{100 * row.coverage:.0f}%",
         *("" if e is None else f"{100 * e:.1f}" for e in (row.crossed, row.by_source, row.median)), row.basis)
        for row in table.span
    )  # fmt: skip
    yield Line("Shares that lie in a range made without their source (tests/fits/ranges.py):")
    columns = ("kind of job", "low", "high", "claim", "cross-validated %", "by source %", "median error %", "basis")
    yield Table("Range of a step", _aligned(columns), kinds)
    yield Line("Throughput: layouts, runs and constants", "heading")
    sweeps = tuple(
        (row.name, str(row.sweeps), str(row.layouts), f"{100 * row.right / max(row.pairs, 1):.1f}% of {row.pairs}",
         f"{100 * row.regret:.1f}%", f"{row.first} of {row.sweeps}")
        for row in table.sweeps
    )  # fmt: skip
    heads = ("source", "sweeps", "layouts", "pairs in order", "speed lost by the first", "best among the first three")
    yield Table("Published sweeps over layouts, by constants fitted without their source", _aligned(heads), sweeps)
    left = tuple((row.reason, str(row.runs)) for row in table.left_out)
    yield Table("Not fitted on, by rules that look at no prediction", _aligned(("reason", "runs")), left)
    constants = tuple(
        (row.name, row.of, *(f"{each:.3g}" for each in (row.value, row.low, row.high)), row.unit,
         *("" if each is None else f"{each:.3g}" for each in (row.prior, row.prior_low, row.prior_high)),
         str(row.runs), str(row.sources), row.source)
        for row in table.constant
    )  # fmt: skip
    columns = ("constant", "of", "value", "least", "largest", "unit", "prior", "from", "to", "moves runs", "of sources",
               "source")  # fmt: skip
    yield Table("Constants, and their spread over refits without a source", _aligned(columns), constants)


def _aligned(names: tuple[str, ...]) -> tuple[Column, ...]:
    return tuple(
        Column(name, right=name not in {"source", "reason", "kind of job", "basis", "constant", "of"}) for name in names
    )


def _range_row(known: Reserve) -> tuple[str, ...]:
    ends = (f"{signed(100 * end, 1)}%" for end in (known.low, known.high, known.limit))
    return (*ends, *(f"{100 * s:.0f}%" for s in (known.coverage, known.crossed)), *_counts(known))


def _counts(known: Reserve) -> tuple[str, str]:
    return str(known.figures), str(known.sources)


def readme(text: str, found: Validation) -> str:
    """Return README with the line of what was reached."""
    head, rest = text.split(START)
    return f"{head}{START}\n{line(found)}\n{END}{rest.split(END)[1]}"


def line(found: Validation) -> str:
    """Return what was reached in one sentence: each figure's median error, then the verdicts."""
    total = found.summary
    runs = len({score.id for score in found.runs})
    errors = {group.name: group for group in found.groups if group.by == "figure"}
    each = ", ".join(f"{_percent(errors[name].median_abs_error)} ({said})" for name, said in READ_BY.items())
    speed = next(row for row in step_time().error if row.name == "all")
    return (
        f"**How right:** median error {each} on {runs} published runs; of {total.ran_out} that ran out of memory "
        f"{total.false_fits} were predicted to fit. Speed: {_percent(speed.crossed_median)} on {speed.runs} dense "
        "runs, each source left out of the fit that predicts it ([row by row](docs/accuracy.md))."
    )


def _percent(error: float | None) -> str:
    return "none" if error is None else f"{100 * error:.2g}%"


def beside(found: Validation, runs: RunsFile) -> Iterator[Block]:
    """Return the tables of the other calculators, each beside memcalc on the very runs that it has an answer for."""
    yield Line("Other calculators on the same runs", "heading")
    yield Line(
        "The published formulas of four calculators, written anew from their source (tests/peers.py), against the same "
        "measured figures. Each row has the runs that the calculator has an answer for: training of all weights with "
        "Adam, without context parallelism. EleutherAI's has no word for attention that never stores its scores; "
        "DeepSpeed's estimator counts model states alone, and llm-analysis aims at a lower bound, both by their own "
        "account."
    )
    kinds: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("All runs", ()),
        ("By group", tuple(sorted({score.group for score in found.runs}))),
    )
    for title, groups in kinds:
        rows = tuple(_rows(found, runs, groups))
        if rows:
            yield Table(title, (Column("calculator"), Column("group"), *_columns()), rows)


def _columns() -> Iterator[Column]:
    yield from ERROR_COLUMNS
    yield Column("memcalc median", "%", right=True)
    yield Column("memcalc p90", "%", right=True)


def _rows(found: Validation, runs: RunsFile, groups: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name in peers().PEERS:
        for group in groups or ("all",):
            scores = [score for score in found.runs if group in {"all", score.group}]
            theirs, ours = against(name, scores, runs)
            if theirs:
                own = error_cells(_summary(ours))
                yield (name, group, *error_cells(_summary(theirs)), own[1], own[2])


def _summary(errors: Pairs) -> ErrorSummary:
    return ErrorSummary.model_validate(summary_of(errors))


def against(name: str, scores: Iterable[RunScore], runs: RunsFile) -> tuple[Pairs, Pairs]:
    """Return the errors of a calculator and of memcalc on the figures that the calculator has an answer for."""
    by_id = {run.id: run for run in runs.run}
    theirs, ours = Pairs(), Pairs()
    for score in scores:
        figure = figure_of(name, by_id[score.id])
        if figure is not None:
            theirs.append((figure / score.measured - 1, score.id))
            ours.append((score.error, score.id))
    return theirs, ours


def figure_of(name: str, run: Run) -> float | None:
    """Return what a calculator says of a run [bytes], or None where it does not apply."""
    try:
        model = preset(run.model) if isinstance(run.model, str) else from_flat({"name": run.id, **run.model})
    except MemcalcError:
        return None
    job = peers().job_for(run, model)
    return None if job is None else peers().PEERS[name](job)


def kinds(runs: RunsFile, found: Validation) -> list[KindErrors]:
    """Return the errors by kind of job, sorted; only kinds with a scored figure or a verdict."""
    together: dict[tuple[Any, ...], dict[str, Any]] = {}
    scores: dict[str, list[RunScore]] = {}
    for score in found.runs:
        scores.setdefault(score.id, []).append(score)
    verdicts = {verdict.id: verdict for verdict in found.verdicts}
    presets = Presets()
    for run in runs.run:
        if run.id not in verdicts:
            continue
        counts = ("runs", "ran", "false_rejects", "ran_out", "false_fits")
        kind = kind_of_run(run, presets).model_dump()
        entry = together.setdefault(tuple(kind.values()), {**kind, **dict.fromkeys(counts, 0), "errors": {}})
        _count(entry, verdicts[run.id], scores.get(run.id, []))
    return [KindErrors.model_validate(entry) for _, entry in sorted(together.items())]


def kind_of_run(run: Run, presets: Presets) -> Kind:
    """Return the kind of a run from its own words; `test_kinds_of_runs_are_those_of_their_estimates` compares."""
    words = run.strategy
    return Kind(
        framework=str(words["framework"]).partition("@")[0],
        adapters=bool(words.get("lora")),
        experts=model_of(run, presets).is_moe,
        offload=words.get("offload") not in {None, "none", "", ()},
    )


def _count(entry: dict[str, Any], verdict: RunVerdict, scores: list[RunScore]) -> None:
    """Add one run."""
    entry["runs"] += bool(scores)
    if verdict.outcome == "fits":
        entry["ran"] += 1
        entry["false_rejects"] += verdict.wrong
    else:
        entry["ran_out"] += 1
        entry["false_fits"] += verdict.wrong
    for score in scores:
        entry["errors"].setdefault(score.figure, []).append(round(score.error, 6))


def evidence(entries: list[KindErrors]) -> str:
    """Return the file of the errors by kind."""
    return f"{EVIDENCE_HEAD}\n{array_of_tables('kind', [entry.model_dump(mode='json') for entry in entries])}"


def by_kind(entries: list[KindErrors]) -> Iterator[Block]:
    """Return the same errors as a table, beside the verdicts."""
    yield Line("By kind of job", "heading")
    yield Line("What memcalc report says of the kind of its job: a kind is set apart by these four traits.")
    rows = [
        (words_of(entry), name, *error_cells(_summary([(e, "") for e in errors]))[:4])
        for entry in entries
        for name, errors in sorted(entry.errors.items())
    ]
    yield Table("Absolute error", (Column("kind of job"), Column("figure"), *ERROR_COLUMNS[:4]), tuple(rows))
    counts = ("runs that ran", "predicted not to fit", "ran out of memory", "predicted to fit")
    told = tuple((words_of(e), *map(str, (e.ran, e.false_rejects, e.ran_out, e.false_fits))) for e in entries)
    yield Table("Verdicts", (Column("kind of job"), *(Column(name, right=True) for name in counts)), told)


def written() -> dict[Path, str]:
    """Return what page and README should say."""
    runs = read_runs()
    found = validate(runs)
    return {
        EVIDENCE: evidence(kinds(runs, found)),
        **pages(runs, found),
        README: readme(README.read_text(encoding="utf-8"), found),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
