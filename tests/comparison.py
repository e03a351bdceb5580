"""The page `docs/comparison.md`: what other tools say of the same measured runs, beside memcalc.

memcalc's own errors are those of `docs/reference/runs.md`, figure by figure. Run as a script, this file writes the
table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from accuracy import preset
from peers import PEERS, Job, job_for, parameters_of

from memcalc.errors import MemcalcError
from memcalc.runs import read_runs
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.runs import Run
from memcalc.terms.parameters import model_count
from memcalc.validation import job_of, summary_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, EVERY_RUN = DOCS / "comparison.md", DOCS / "reference" / "runs.md"
TABLE = re.compile(r"(<!-- errors -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(
    r"^\| ([^|\s]+)\s*\| (allocated|reserved|total)\s*\|\s*([\d.]+) \|\s*([\d.]+) \|\s*([+−]?[\d.]+) \|", re.MULTILINE
)
HEAD = (
    "| tool | runs | its median error | 90% within | memcalc's median error | 90% within |",
    "| --- | --- | --- | --- | --- | --- |",
)

SIMUMAX = {
    "SMX-001": 66.44, "SMX-004": 60.51, "SMX-008": 28.17, "SMX-012": 44.37, "SMX-015": 103.52, "SMX-020": 86.88,
    "SMX-022": 81.31, "SMX-025": 52.68, "SMX-027": 38.38, "SMX-033": 86.55, "SMX-039": 147.89, "SMX-041": 116.50,
}  # fmt: skip
"""Allocated peaks that SimuMax publishes for the runs that it measured [GiB]: MooreThreads/SimuMax@4dcaae5
docs/b200/b200_release_v1.2_summary.md, column `perf alloc GiB`."""


def accelerate(run: Run) -> float | None:
    """huggingface/accelerate@16cb6eb src/accelerate/commands/estimate.py, "Training using Adam", on one GPU.

    The largest of four sums, with the fp32 size of the model as unit: 4 where nothing is in 16 bits, else 2.
    """
    words, _ = job_of(run)
    foreign = {name for name in ("lora", "quantize", "optimizer_in_backward") if words.get(name)}
    if foreign or words.get("gpus", 1) != 1 or words.get("optimizer", "adamw") != "adamw":
        return None
    model = _model(run)
    return None if model is None else (16 if words.get("precision") == "fp32" else 8) * model_count(model).total


def sixteen(job: Job) -> float | None:
    """The rule of 2 + 2 + 12 bytes a parameter, divided as ZeRO's stages divide them: arXiv:1910.02054, figure 1."""
    if not job.mixed:
        return None
    whole = parameters_of(job) / (job.tp * job.pp)
    return sum(size * whole / (job.dp if job.zero >= stage else 1) for size, stage in ((12, 1), (2, 2), (2, 3)))


def simumax(run: Run) -> float | None:
    """What SimuMax itself says of a run that it measured."""
    return SIMUMAX[run.id] * 2**30 if run.id in SIMUMAX else None


@cache
def own_errors() -> tuple[tuple[str, str, float], ...]:
    """Run, figure and memcalc's error, of every figure on the page of all runs."""
    page = EVERY_RUN.read_text(encoding="utf-8")
    every = page[page.index("## Every figure") : page.index("## Figures of an unknown kind")]
    figures = {"total": "device"}
    return tuple(
        (match[1], figures.get(match[2], match[2]), float(match[5].replace("−", "-")) / 100)
        for match in FIGURE.finditer(every)
    )


def of_job(formula: Callable[[Job], float | None]) -> Callable[[Run], float | None]:
    """A calculator of the sizes of a job, as one of a run."""

    def figure(run: Run) -> float | None:
        job = _job(run.id)
        return None if job is None else formula(job)

    return figure


@cache
def _runs() -> dict[str, Run]:
    return {run.id: run for run in read_runs().run}


@cache
def _job(name: str) -> Job | None:
    run = _runs()[name]
    model = _model(run)
    return None if model is None else job_for(run, model)


def _model(run: Run) -> Model | None:
    """The model of a run, where it can be read."""
    try:
        return preset(run.model) if isinstance(run.model, str) else from_flat({"name": run.id, **run.model})
    except MemcalcError:
        return None


TOOLS: dict[str, tuple[str, Callable[[Run], float | None]]] = {
    "16 bytes a parameter, by hand": ("", of_job(sixteen)),
    **{name: ("", of_job(formula)) for name, formula in PEERS.items()},
    "Accelerate, training on one GPU": ("", accelerate),
    "SimuMax, as published by its authors": ("allocated", simumax),
}
"""By name: the kind of figure that it says, where it says one, and its value for a run."""


def errors(name: str) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """Return the errors of a tool and of memcalc, of the figures that both have."""
    kind, formula = TOOLS[name]
    theirs, ours = [], []
    for run, figure, own in own_errors():
        if kind not in {"", figure}:
            continue
        said = formula(_runs()[run])
        measured = getattr(_runs()[run].measured, figure)
        if said is not None and measured is not None:
            theirs.append((said / measured - 1, run))
            ours.append((own, run))
    return theirs, ours


def table() -> str:
    """Return the table of errors."""
    return "\n".join([*HEAD, *_rows(), ""])


def _rows() -> Iterator[str]:
    for name in TOOLS:
        theirs, ours = (summary_of(pairs) for pairs in errors(name))
        cells = (_percent(s[key]) for s in (theirs, ours) for key in ("median_abs_error", "p90_abs_error"))
        yield f"| {name} | {theirs['count']} | {' | '.join(cells)} |"


def _percent(error: float) -> str:
    return f"{100 * error:.2f}%" if error < 0.1 else f"{100 * error:.0f}%"


def written(page: str) -> str:
    """Return the page with its table made anew."""
    return TABLE.sub(lambda match: f"{match[1]}{table()}{match[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
