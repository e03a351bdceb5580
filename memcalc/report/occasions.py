"""What a job does beside its steps, as lines of an answer and as a table of its explanation."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.tables import Line, Table, gib, header
from memcalc.results.details import Occasion
from memcalc.results.estimates import Estimate

OPTIONS = {"evaluation": "workload.eval_micro_batch=N", "saving": "strategy.state_dict=NAME"}
"""What says what a job does, by occasion."""


def occasion_lines(result: Estimate) -> Iterator[Line]:
    """Yield a line for each occasion that needs more than training does; what surely fails is a warning already."""
    for occasion in result.occasions:
        warned = occasion.certain and not occasion.fits
        if not warned and (not occasion.fits or occasion.allocated > result.peak.allocated):
            yield Line(_sentence(occasion, result), "text" if occasion.fits else "warning")


def _sentence(occasion: Occasion, result: Estimate) -> str:
    """How much it needs beside the step, and what it rests on."""
    size, step = gib(occasion.allocated, 1), gib(result.peak.allocated, 1)
    limit = "" if occasion.fits else f", more than the {gib(result.budget.usable, 1)} GiB that are usable"
    option = OPTIONS.get(occasion.name)
    hint = f" (by default; say otherwise with --set {option})" if option and not occasion.certain else ""
    text = f"{occasion.when[0].upper()}{occasion.when[1:]}{hint}"
    return f"{text}: {size} GiB allocated{limit}; a training step has {step} GiB."


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
