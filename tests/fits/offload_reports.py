"""Reports of what DeepSpeed's ZeRO-3 shows with weights and optimizer offloaded, and the range that follows from them.

Neither says the tool that was read or the moment, so that no mechanism is fitted to them and they are no measured runs;
but a verdict that they contradict is none. Both are of LLaMA-Factory's ZeRO-3 offload example: "auto" buckets, live and
reused parameters 1e9, full reentrant checkpoints, eight GPUs. Printed "13G" and "27G" are taken as GiB.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import memcalc
from memcalc import catalog
from memcalc.terms.overhead import WEIGHTS_AWAY
from memcalc.units import GIB

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


def errors() -> list[float]:
    """Shown over predicted device memory - 1, of each report."""
    return [report.measured * GIB / predicted(report) - 1 for report in REPORTS]


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


def entry(low: float) -> list[str]:
    """The lines of the kind: it ends at the highest report; ``low`` is that of all kinds."""
    found = errors()
    high = max(found)
    without = [max(other for other in found if other is not error) for error in found]
    crossed = sum(error <= end for error, end in zip(found, without, strict=True)) / len(found)
    sources = " and ".join(report.source for report in REPORTS)
    return [
        "[[reserve]]",
        f'name = "{ALLOCATOR}"',
        f'kind = "{WEIGHTS_AWAY}"',
        "weight = 1.000",
        f"low = {low:.4f}",
        "middle = 0.0000",
        f"high = {high:.4f}",
        f"limit = {high:.4f}",
        f"coverage = {catalog.reserve(ALLOCATOR).coverage}",
        f"crossed = {crossed:.3f}",
        f"figures = {len(found)}",
        f"sources = {len(found)}",
        f'source = "tests/fits/offload_reports.py on the reports {sources}"',
    ]
