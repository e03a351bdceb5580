"""From the stages of an engine to its answer: the pool, the verdict, and why."""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, Any

from memcalc.formulas.serving import sampler_bytes
from memcalc.results.estimates import HardwareFacts, ModelFacts, Verdict
from memcalc.results.serving import WAITING, EngineLimits, EngineStage, Served
from memcalc.serving.engines import with_release
from memcalc.serving.stages import (
    ACTIVATIONS,
    CONTEXT,
    GRAPHS,
    NON_TORCH,
    OTHER,
    WEIGHTS,
    EngineJob,
    logged_tokens,
    most_bytes,
    sequence_blocks,
    stages_of,
)
from memcalc.specs.job import render
from memcalc.terms.parameters import model_count
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memcalc.specs.hardware import Node

# What can be set: the furthest value of each setting with which an engine starts and serves.

WARM_UP = 12
"""Bytes a logit that the sampler's warm-up takes once more, after the pool was taken."""
GRAPHS_ROUTED, GRAPHS_DENSE = 2.5, 1.15
"""How far above the estimate CUDA graphs were measured, with and without routed experts."""


def beside(job: EngineJob, stage: EngineStage, *, careful: bool = False) -> int:
    """What lies beside the budget [bytes]; with ``careful`` also what has been seen to come on top."""
    size = stage.outside
    if job.engine.counts_others and job.engine.budget == "whole":
        size -= stage.size(CONTEXT) + stage.size(OTHER)
    if not careful:
        return size
    more = GRAPHS_ROUTED if job.model.is_moe else GRAPHS_DENSE
    graphs = (more - 1) * stage.size(GRAPHS) * (not job.engine.graphs_within)
    last = stage.stage == job.pp - 1
    return int(size + graphs + last * sampler_bytes(job.inputs.max_seqs, job.model.vocab, WARM_UP))


def needed(job: EngineJob, stage: EngineStage) -> int:
    """What one sequence of the longest length needs of the cache [bytes]."""
    layers = stage.groups[0].layers
    return sequence_blocks(stage.groups) * job.engine.block_tokens * layers * most_bytes(stage.groups)


def limits_of(job: EngineJob, stages: tuple[EngineStage, ...]) -> EngineLimits:
    """The furthest values, each with all others as they are."""
    least = max(_least(job, stage) for stage in stages)
    most = min(_most(job, stage) for stage in stages)
    return EngineLimits(
        largest_utilization=most if most > 0 else None,
        smallest_utilization=least if least <= 1 else None,
        largest_max_len=last_that_works(1, job.model.max_positions, lambda n: _starts(job.told(max_len=n), stages)),
        largest_max_seqs=last_that_works(1, job.inputs.max_batched_tokens, lambda n: holds_all(job.told(max_seqs=n))),
    )


def _most(job: EngineJob, stage: EngineStage) -> float:
    """The largest share, in hundredths, that leaves room for what lies beside it."""
    total = job.gpu.memory_bytes
    if job.engine.budget == "static":
        free = total - stage.size(CONTEXT) - stage.size(OTHER) - stage.size(NON_TORCH)
        rest = stage.size(ACTIVATIONS) + stage.size(GRAPHS)
        return floor(100 * (1 - rest / free)) / 100 if free > 0 else 0
    return max(0, floor(100 * (total - beside(job, stage, careful=True)) / total) / 100)


def _least(job: EngineJob, stage: EngineStage) -> float:
    """The smallest share, in hundredths, that leaves one sequence its cache."""
    want = needed(job, stage) - stage.cache
    if job.engine.budget == "static":
        free = job.gpu.memory_bytes - stage.size(CONTEXT) - stage.size(OTHER) - stage.size(NON_TORCH)
        return ceil(100 * (needed(job, stage) + stage.size(WEIGHTS)) / free) / 100 if free > 0 else 2
    return ceil(100 * (job.inputs.utilization + want / job.gpu.memory_bytes)) / 100


def _starts(job: EngineJob, stages: tuple[EngineStage, ...]) -> bool:
    """Whether the pools hold one sequence; they do not depend on the longest length."""
    again = stages_of(job)
    return all(new.blocks >= sequence_blocks(new.groups) for new in again) and len(again) == len(stages)


def holds_all(job: EngineJob) -> bool:
    """Whether the pool holds all sequences at once, each of the longest length."""
    stages = stages_of(job)
    return all(stage.blocks >= job.inputs.max_seqs * sequence_blocks(stage.groups) for stage in stages)


def last_that_works(low: int, high: int, works: Callable[[int], bool]) -> int | None:
    """The last number of a range that works, where none above one that fails does."""
    if not works(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def answer_of(
    job: EngineJob,
    host: Node,
    gpus: int,
    question: Mapping[str, Any],
    assumptions: dict[str, str],
    dirs: tuple[str, ...],
    version: str,
    *,
    advice: bool,
) -> Served:
    """The answer for an engine; with ``advice`` also what can be set."""
    stages = stages_of(job)
    pool = min(stages, key=lambda stage: stage.blocks)
    inputs, block = job.inputs, job.engine.block_tokens
    count = model_count(job.model)
    verdict, reason = _judged(job, stages)
    options = {name: value for name, value in question.items() if value is not None and value is not False}
    return Served(
        version=version,
        model=ModelFacts(name=job.model.name, parameters=count.total, active_parameters=count.active),
        hardware=HardwareFacts(
            gpu=job.gpu.name, gpus=gpus, node=host.name, nodes=-(-gpus // host.gpus_per_host),
            gpus_per_node=host.gpus_per_host,
        ),
        engine=with_release(job.inputs.engine),
        era=job.engine.name,
        tp=job.tp,
        pp=job.pp,
        replicas=gpus // (job.tp * job.pp),
        **inputs.model_dump(include={"utilization", "max_len", "max_seqs", "max_batched_tokens"}),
        capacity=job.gpu.memory_bytes,
        budget=job.budget,
        stages=stages,
        blocks=pool.blocks,
        block_tokens=block,
        tokens=logged_tokens(pool.groups, pool.blocks, block, inputs.max_len, job.engine.logs),
        concurrency=pool.blocks / sequence_blocks(pool.groups),
        device=max(_device(job, stage) for stage in stages),
        verdict=verdict,
        reason=reason,
        limits=limits_of(job, stages) if advice else None,
        warnings=tuple(_warnings(job, host, pool)),
        assumptions=assumptions,
        command=render("serve", options=options, dirs=dirs),
    )  # fmt: skip


def _device(job: EngineJob, stage: EngineStage) -> int:
    """What the GPU holds once the engine has started, its profiled step included [bytes]."""
    if job.engine.budget == "whole":
        return job.budget + beside(job, stage)
    return max(0, stage.cache) + sum(term.bytes for term in stage.terms)


def _judged(job: EngineJob, stages: tuple[EngineStage, ...]) -> tuple[Verdict, str]:
    """The verdict, and why it is not that it fits."""
    for stage in stages:
        reason = _refusal(job, stage)
        if reason:
            return "does-not-fit", f"{reason}{'' if job.pp == 1 else f' (stage {stage.stage})'}"
    for stage in stages:
        spare = job.gpu.memory_bytes - (
            job.budget + beside(job, stage, careful=True) if job.engine.budget == "whole" else _device(job, stage)
        )
        if spare < 0:
            return "tight", (
                f"engines have run out in the sampler's warm-up, after taking their pool, with as little left; "
                f"{_gib(-spare)} GiB more would be safe"
            )
    return "fits", ""


def _refusal(job: EngineJob, stage: EngineStage) -> str:
    """Why the engine does not start; empty where it does."""
    total = job.gpu.memory_bytes
    free = max(0, total - stage.size(CONTEXT) - stage.size(OTHER))
    if job.engine.budget == "whole" and not job.engine.counts_others and job.budget > free:
        return (
            f"the engine refuses to start: utilization {job.inputs.utilization:g} needs {_gib(job.budget)} GiB, "
            f"{_gib(free)} GiB are free"
        )
    if stage.cache <= 0:
        size = sum(term.bytes for term in stage.terms if term.within)
        budget = f"{_gib(size + stage.cache)} GiB of utilization {job.inputs.utilization:g}"
        return f"no memory is left for the cache: all else needs {_gib(size)} of the {budget}"
    if stage.blocks < sequence_blocks(stage.groups):
        return f"the cache of {_gib(stage.cache)} GiB does not hold one sequence of {job.inputs.max_len} tokens"
    device = _device(job, stage)
    if device > total:
        return f"{_gib(device - total)} GiB too little for what lies outside the pool"
    return ""


def _warnings(job: EngineJob, host: Node, pool: EngineStage) -> Iterator[str]:
    inputs, model = job.inputs, job.model
    concurrency = pool.blocks / sequence_blocks(pool.groups)
    if inputs.max_len > model.max_positions:
        yield f"{model.name} has a context of {model.max_positions} tokens; engines refuse more by default."
    if 1 <= concurrency < inputs.max_seqs:
        yield (
            f"the cache holds {concurrency:.1f} sequences of {inputs.max_len} tokens at once, fewer than the "
            f"{inputs.max_seqs} that may run: {WAITING}."
        )
    if job.tp * job.pp > host.gpus_per_host:
        yield f"one engine spans hosts, since each has {host.gpus_per_host} GPUs; no such log was compared."
    if job.gpu.name != "h100":
        yield "what lies outside PyTorch was measured on H100; on other cards it differs by some 0.1 to 0.3 GiB."
    if job.engine.name.startswith("sglang"):
        yield "SGLang's pool was compared with a single published log."
    if any(len(stage.groups) > 1 for stage in [pool]) and job.engine.budget == "static":
        yield "SGLang divides its pool between full and windowed layers by its own ratio, which is not counted."
    if pool.size(ACTIVATIONS) > pool.size("weights"):
        yield "the sampler's step takes more than the weights: --max-seqs of what is needed gives that to the cache."


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
