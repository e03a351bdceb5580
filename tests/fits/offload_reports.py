"""Reports of what jobs show whose weights are offloaded, and the ranges that follow from them.

Of DeepSpeed's ZeRO-3 neither says the tool that was read or the moment, so that no mechanism is fitted to them and they
are no measured runs; but a verdict that they contradict is none. Both are of LLaMA-Factory's ZeRO-3 offload example:
"auto" buckets, live and reused parameters 1e9, full reentrant checkpoints, eight GPUs. Printed "13G" and "27G" are
taken as GiB. Those of FSDP 1 are in presets/runs, of two documents, of which axolotl's names no tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import memcalc
from memcalc import catalog, validation
from memcalc.frameworks import habits_of
from memcalc.runs import read_runs
from memcalc.terms.overhead import UNITS_AWAY, WEIGHTS_AWAY, Choice, kind_of
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOCATOR = "caching"


class Report(NamedTuple):
    """One report."""

    source: str
    measured: float
    """What a GPU showed [GiB]."""
    hidden: int
    job: dict[str, Any]


REPORTS = (
    # lengths up to the example's cut of 1024; fp16, two micro-batches a step; DeepSpeed 0.15.3
    Report(
        "hiyouga/LlamaFactory#5977",
        13.0,
        4096,
        {"model": "llama-3-8b", "gpu": "rtx-3090", "precision": "fp16-mixed", "global_batch": 16, "seq_len": 1024},
    ),
    # the data set "identity": at most 160 tokens; precision not said
    Report(
        "hiyouga/LlamaFactory#7282",
        27.0,
        8192,
        {"model": "llama-3-70b", "gpu": "h200", "precision": "bf16-mixed", "global_batch": 8, "seq_len": 160},
    ),
)


def errors() -> dict[str, list[tuple[str, float]]]:
    """Shown over predicted memory - 1 of each report, with its source, by kind of job."""
    zero = [(report.source, report.measured * GIB / predicted(report) - 1) for report in REPORTS]
    return {WEIGHTS_AWAY: zero, UNITS_AWAY: list(_of_units())}


def _of_units() -> Iterator[tuple[str, float]]:
    """Of FSDP 1; a figure of which the tool is not said is taken for the process's."""
    for run in read_runs().run:
        habits = habits_of(run.strategy["framework"])
        choice = Choice(run.gpus, run.strategy.get("zero", 0), run.strategy.get("offload", ()), "none", False)
        if kind_of(habits, choice) == UNITS_AWAY:
            peak, known = validation.predict(run).peak, run.measured
            pairs = ((known.reserved, peak.reserved), (known.unknown, peak.device))
            yield from ((run.source.split()[0], shown / size - 1) for shown, size in pairs if shown)


def predicted(report: Report) -> int:
    """Device memory of a report's job [bytes]."""
    square = report.hidden**2
    buckets = {
        "strategy.reduce_bucket_size": square,
        "strategy.zero_prefetch_bucket": int(0.9 * square),
        "strategy.persistence_threshold": 10 * report.hidden,
    }
    words = {"framework": "deepspeed", "gpus": 8, "zero": 3, "offload": ("optimizer", "params"), "recompute": "full"}
    return memcalc.estimate(settings=buckets, micro_batch=1, **words, **report.job).peak.device


def entries(low: float) -> Iterator[list[str]]:
    """The lines of each kind: it holds all reports, and begins at ``low``, that of all kinds, or below."""
    for kind, found in errors().items():
        least, high = min(low, *(error for _, error in found)), max(error for _, error in found)
        sources = list(dict.fromkeys(source for source, _ in found))
        without = {source: max(error for other, error in found if other != source) for source in sources}
        crossed = sum(error <= without[source] for source, error in found) / len(found)
        yield [
            "[[reserve]]",
            f'name = "{ALLOCATOR}"',
            f'kind = "{kind}"',
            "weight = 1.000",
            f"low = {least:.4f}",
            "middle = 0.0000",
            f"high = {high:.4f}",
            f"limit = {high:.4f}",
            f"coverage = {catalog.reserve(ALLOCATOR).coverage}",
            f"crossed = {crossed:.3f}",
            f"figures = {len(found)}",
            f"sources = {len(sources)}",
            f'source = "tests/fits/offload_reports.py on the reports {" and ".join(sources)}"',
        ]
