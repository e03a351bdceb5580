"""Where nothing fits: the smallest changes that would, each with its price in throughput."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from memcalc import catalog, results
from memcalc.errors import MemcalcError
from memcalc.planner.finalists import Finalist, finalists
from memcalc.planner.request import flag

if TYPE_CHECKING:
    from memcalc.planner.job import Job
    from memcalc.planner.search import Found
    from memcalc.specs.strategy import Strategy

FREE = ("recompute", "micro_batch", "zero", "tp", "sp", "pp", "cp", "ep", "offload", "precision", "pp_schedule", "vpp")
"""Words that a change may leave open, those first that change neither the update nor the hardware."""
OTHERWISE = (
    {"loss": "fused-linear"},
    {"optimizer": "adamw-8bit"},
    {"precision": "bf16"},
)
"""What a search does not change by itself, since it needs another kernel, or another update of the weights."""
FACTORS = (2, 4, 8, 16, 32, 64)
MOST = 3
"""Changes that are listed of each kind."""


def nearest(job: Job, gpus: int) -> Iterator[results.Nearest]:
    """One word that is given left open, then two; something else trained; another GPU; more GPUs."""
    baseline = _fastest(job.unlimited(), gpus)
    given = [name for name in FREE if name in job.request.given or name in job.request.choices]
    singles = list(_freed(job, gpus, [(name,) for name in given], baseline))
    yield from singles or list(_freed(job, gpus, list(combinations(given, 2)), baseline))[:MOST]
    for words in OTHERWISE:
        name, value = next(iter(words.items()))
        if name not in job.request.given:
            yield from _told(job.pinned(**words), gpus, f"--{flag(name)} {value}", baseline)
    yield from _other_gpu(job, gpus, baseline)
    yield from _more(job, gpus, baseline)


def _fastest(job: Job, gpus: int) -> float | None:
    """Throughput of the best strategy as asked for [tokens/s per GPU], whatever its memory."""
    outcome = job.search([gpus], 1).get(gpus)
    return outcome.best[0].tokens_per_second_per_gpu if outcome and outcome.best else None


def _freed(job: Job, gpus: int, sets: list[tuple[str, ...]], baseline: float | None) -> Iterator[results.Nearest]:
    for names in sets:
        yield from _told(job.freed(*names), gpus, "", baseline, names)


def _told(
    job: Job, gpus: int, change: str, baseline: float | None, names: tuple[str, ...] = ()
) -> Iterator[results.Nearest]:
    """The change, where it fits: what the freed words become, or ``change`` itself."""
    try:
        one = _best(job, gpus)
    except MemcalcError:
        return  # the change is not possible for this model, framework or GPU
    if one is None:
        return
    strategy, speed = one.strategy, one.found.tokens_per_second_per_gpu
    yield results.Nearest(
        change=change or " ".join(f"--{flag(name)} {typed(strategy, name)}" for name in names),
        device=one.peaks.top.device,
        tokens_per_second_per_gpu=speed,
        throughput=speed / baseline if baseline else None,
    )


def _best(job: Job, gpus: int) -> Finalist | None:
    """The best strategy that a replay lets run."""
    outcome = job.search([gpus], MOST).get(gpus)
    best: tuple[Found, ...] = outcome.best if outcome else ()
    return next(iter(finalists(job, best, 1)), None)


def typed(strategy: Strategy, name: str) -> str:
    """A word of a strategy as it is typed."""
    value = getattr(strategy, name)
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _other_gpu(job: Job, gpus: int, baseline: float | None) -> Iterator[results.Nearest]:
    """The smallest GPUs with more memory on which the job fits as it was asked for."""
    larger = [gpu for gpu in map(catalog.gpu, catalog.names("gpu")) if gpu.memory_bytes > job.gpu.memory_bytes]
    found: list[results.Nearest] = []
    for gpu in sorted(larger, key=lambda gpu: (gpu.vendor != job.gpu.vendor, gpu.memory_bytes)):
        if len(found) == MOST:
            break
        other = type(job)(job.freed().request, job.model, gpu, catalog.node_for(gpu))
        found += _told(other, gpus, f"--gpu {gpu.name}", baseline)
    yield from found


def _more(job: Job, gpus: int, baseline: float | None) -> Iterator[results.Nearest]:
    """The smallest multiple of the number of GPUs on which the job fits."""
    for factor in FACTORS:
        found = list(_told(job, gpus * factor, f"--gpus {gpus * factor}", baseline))
        if found:
            yield from found
            return
