"""An inference engine's memory: :func:`serve` says whether it starts, what its cache holds, and what can be set.

What would start in the place of an engine that does not fit: one change each, else two; and each is tried.
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc._version import __version__
from memcalc.convert.named_model import NamedModel, named_model
from memcalc.errors import CombinationError, MemcalcError
from memcalc.formulas.serving import sampler_bytes
from memcalc.results.estimates import HardwareFacts, ModelFacts, Verdict
from memcalc.results.serving import WAITING, EngineLimits, EngineStage, Served
from memcalc.serving.engines import check_model, completed, number, read_words, with_release
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
from memcalc.specs.hardware import GPU
from memcalc.specs.job import render
from memcalc.specs.model import Model
from memcalc.terms.parameters import model_count
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from memcalc.specs.hardware import Node


def serve(
    *,
    model: str | Model,
    gpu: str | GPU,
    gpus: int | str | None = None,
    node: str | None = None,
    tp: int | str = 1,
    pp: int | str = 1,
    preset_dirs: Iterable[str] = (),
    advice: bool = True,
    **options: Any,
) -> Served:
    """Say whether an inference engine starts, and what its cache holds.

    Parameters
    ----------
    model, gpu, node
        As for :func:`memcalc.estimate`.
    gpus
        GPUs in all: a multiple of ``tp`` times ``pp``, each multiple one engine.
    tp, pp
        Ranks of tensor parallelism, and pipeline stages, of one engine.
    preset_dirs
        Folders with presets of your own, looked up first.
    advice
        Whether what can be set is looked for.
    **options
        The words of an engine: ``engine``, ``utilization``, ``max_len`` [tokens], ``max_seqs``, and the others of
        ``memcalc serve --help``.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    dirs, assumptions = tuple(preset_dirs), dict[str, str]()
    given = read_words(options)
    ranks, stages = number(tp, "tp"), number(pp, "pp")
    chip = gpu if isinstance(gpu, GPU) else catalog.gpu(gpu, dirs)
    named = NamedModel(model) if isinstance(model, Model) else named_model(model, dirs)
    check_model(named.model, ranks, stages)
    engine, inputs = completed(given, named.model, chip, assumptions)
    count = ranks * stages if gpus is None else number(gpus, "gpus")
    if count % (ranks * stages):
        raise CombinationError("gpus", count, f"must be a multiple of the {ranks * stages} GPUs of one engine")
    host = catalog.node(node, dirs) if node else catalog.node_for(chip, dirs)
    if host.gpu != chip.name:
        raise CombinationError("node", node, f"it holds {host.gpu} GPUs, and --gpu is {chip.name}")
    job = EngineJob(named.model, chip, engine, inputs, ranks, stages)
    question = {"model": model if isinstance(model, str) else model.name, "gpu": chip.name, "gpus": gpus, "node": node}
    question |= {"tp": None if ranks == 1 else ranks, "pp": None if stages == 1 else stages, **given}
    return answer_of(job, host, count, question, assumptions, dirs, __version__, advice=advice)


FEWER_SEQUENCES = (256, 64, 16, 4, 1)
SHARES_OF_LENGTH = (2, 4, 8, 16, 32)
QUANTIZED = ("fp8", "int4")
RANKS = (2, 4, 8, 16)


def remedies(result: Served, keywords: Mapping[str, Any]) -> tuple[tuple[str, Served], ...]:
    """Return options as they are typed with the answer that they bring, the mildest of each kind that starts."""
    if result.verdict != "does-not-fit":
        return ()
    for kinds in (_kinds(result), _pairs(result)):
        started = [next(_started(changes, keywords), None) for changes in kinds]
        if any(started):
            return tuple(remedy for remedy in started if remedy is not None)
    return ()


def _kinds(result: Served) -> tuple[tuple[dict[str, Any], ...], ...]:
    """Return changes by kind: fewer sequences, a shorter context, a smaller cache, smaller weights, more GPUs."""
    return (
        tuple({"max_seqs": count} for count in FEWER_SEQUENCES if count < result.max_seqs),
        tuple({"max_len": result.max_len // share} for share in SHARES_OF_LENGTH if result.max_len // share),
        ({"kv_dtype": "fp8"},),
        tuple({"quantization": name} for name in QUANTIZED),
        _on_more(result),
    )


def _pairs(result: Served) -> tuple[tuple[dict[str, Any], ...], ...]:
    """Return smaller weights on more GPUs, for what starts with neither."""
    return tuple(tuple({"quantization": name, **more} for more in _on_more(result)) for name in QUANTIZED)


def _on_more(result: Served) -> tuple[dict[str, Any], ...]:
    return tuple({"tp": ranks, "gpus": ranks * result.pp} for ranks in RANKS if ranks > result.tp)


def _started(changes: tuple[dict[str, Any], ...], keywords: Mapping[str, Any]) -> Iterator[tuple[str, Served]]:
    """Yield what starts, in the order of the changes; what is refused is passed over."""
    for change in changes:
        if any(
            keywords.get(name) not in (None, "none", "auto") for name in change if name in {"kv_dtype", "quantization"}
        ):
            continue
        try:
            answer = serve(**{**keywords, **change}, advice=False)
        except MemcalcError:
            continue
        if answer.verdict != "does-not-fit":
            yield " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items()), answer


# ----------------------------------------------------------------------------------------------------------- the answer


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
        budget = f"{_gib(size + stage.cache)} GiB that utilization {job.inputs.utilization:g} gives"
        return f"weights and buffers need {_gib(size)} of the {budget}: no room for a cache"
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
