"""An engine's start-up log beside what ``memcalc serve`` predicts of it: the term that differs, and why it failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memcalc import catalog
from memcalc._version import __version__
from memcalc.errors import CombinationError, MissingError
from memcalc.preflight.names import gpu_named, model_named
from memcalc.probe.triage.engine_lines import EngineLines, engine_lines
from memcalc.results.serving import EngineLog, LoggedTerm, Served
from memcalc.serving import serve
from memcalc.units import GIB

_WORDS = ("tp", "pp", "max_len", "max_seqs", "max_batched_tokens", "utilization")
_OF_A_GPU = ("model", "gpu", "gpus", "node", "tp", "pp")
"""Options that a log may be told beside what it says."""
_QUANTIZED = {
    "fp8": "fp8",
    "awq": "int4",
    "gptq": "int4",
    "awq_marlin": "int4",
    "gptq_marlin": "int4",
    "mxfp4": "mxfp4",
}
REST = "activations and outside PyTorch"
"""What a log that prints weights and cache alone leaves for both."""
_USUAL = {"weights": 0.4, "KV cache": 0.5, "CUDA graphs": 0.5, "activations": 0.3, "outside PyTorch": 0.3, REST: 0.5}
"""What nine of ten start-up logs differ by, rounded up [GiB] (docs/serving.md)."""
_TOKENS = 0.02
"""The same of a cache's tokens, as a share."""


def engine_log(text: str, name: str, options: Mapping[str, Any], dirs: tuple[str, ...]) -> EngineLog:
    """Compare a start-up log with the prediction for what it says, and explain its failure.

    Raises :class:`memcalc.errors.MissingError` for a model or GPU that neither the log nor the user says.
    """
    lines = engine_lines(text)
    unknown: list[str] = []
    served = _served(lines, options, dirs, unknown)
    terms = tuple(_terms(lines, served))
    off = [term for term in terms if not term.agrees and term.unit == "bytes"]
    parts = [term for term in off if term.name != "KV cache"] or off  # the cache is what the others leave
    largest = max(parts, key=lambda term: abs(term.logged - term.predicted), default=None)
    causes, changes = _explained(lines, served)
    return EngineLog(
        version=__version__,
        source=name,
        failure=_FAILURES.get(lines.failure, ""),
        causes=(*causes, *_asleep(lines)),
        changes=changes,
        terms=terms,
        differs=largest.name if largest is not None else "",
        served=served,
        unknown=tuple(unknown),
    )


def _served(lines: EngineLines, options: Mapping[str, Any], dirs: tuple[str, ...], unknown: list[str]) -> Served:
    """The prediction for what the log says, and the user beside it."""
    other = next((option for option in options if option not in _OF_A_GPU), None)
    if other is not None:
        raise CombinationError(other.replace("_", "-"), options[other], "an engine's log takes model, gpu, tp and pp")
    logged = lines.settings.get("model")
    if options.get("model") is None and logged is None:
        raise MissingError("the log does not name its model: give --model.")
    if lines.engine == "sglang" and "utilization" not in lines.settings:
        raise MissingError("the log does not say mem_fraction_static: keep the line of its server_args.")
    if options.get("gpu") is None:
        raise MissingError("the log does not name its GPU: give --gpu.")
    model = str(options["model"]) if options.get("model") else model_named(str(logged), dirs=dirs)
    gpu = catalog.gpu(gpu_named(str(options["gpu"]), dirs), dirs)
    total = float(lines.settings.get("total", 0))
    if total > 0:
        gpu = gpu.model_copy(update={"memory_bytes": int(total * GIB)})
    keywords: dict[str, Any] = {word: lines.settings[word] for word in _WORDS if word in lines.settings}
    keywords |= {name: options[name] for name in ("tp", "pp", "node") if options.get(name) is not None}
    quantized = _QUANTIZED.get(lines.settings.get("quantization", "None").lower())
    if quantized is not None:
        keywords["quantization"] = quantized
    if lines.settings.get("kv_dtype", "auto").startswith("fp8"):
        keywords["kv_dtype"] = "fp8"
    version = lines.settings.get("version")
    if version is None:
        unknown.append("the release: the newest that is modelled stands in for it")
    for word, text in (("max_len", "the longest sequence"), ("max_seqs", "sequences at once")):
        if word not in keywords:
            unknown.append(f"{text}: the engine's default stands in")
    if lines.failure == "refused" and total > 0 and "free" in lines.settings:
        keywords["other"] = f"{max(0.0, total - float(lines.settings['free'])):.2f}GiB"
    engine = lines.engine if version is None else f"{lines.engine}@{version}"
    served = serve(model=model, gpu=gpu, engine=engine, preset_dirs=dirs, **keywords)
    if "before" not in lines.settings:
        return served
    beside = sum(served.stages[0].size(name) for name in ("context", "outside PyTorch"))
    missing = gpu.memory_bytes - beside - float(lines.settings["before"]) * GIB  # a trainer on the same GPU, say
    keywords["other"] = f"{max(0.0, missing) / GIB:.2f}GiB"
    return serve(model=model, gpu=gpu, engine=engine, preset_dirs=dirs, **keywords)


def _terms(lines: EngineLines, served: Served) -> Iterator[LoggedTerm]:
    """Each figure that the log prints, beside its prediction."""
    stage = served.stages[0]
    predicted = {name: stage.size(name) for name in ("weights", "activations", "outside PyTorch", "CUDA graphs")}
    predicted["KV cache"] = stage.cache
    predicted[REST] = predicted["activations"] + predicted["outside PyTorch"]
    logged = dict(lines.figures)
    if lines.engine == "vllm" and {"weights", "KV cache"} <= set(logged) and "activations" not in logged:
        within = logged.get("CUDA graphs", predicted["CUDA graphs"]) * any(
            term.within for term in stage.terms if term.name == "CUDA graphs"
        )
        budget = int(served.utilization * served.capacity)
        logged[REST] = budget - logged["weights"] - logged["KV cache"] - within
    for name, size in logged.items():
        close = abs(size - predicted[name]) <= max(_USUAL[name] * GIB, 0.01 * predicted[name])
        yield LoggedTerm(name=name, logged=size, predicted=predicted[name], unit="bytes", agrees=close)
    if lines.tokens is not None:
        close = abs(lines.tokens - served.tokens) <= _TOKENS * served.tokens
        yield LoggedTerm(
            name="tokens of the cache", logged=lines.tokens, predicted=served.tokens, unit="tokens", agrees=close
        )


_FAILURES = {
    "refused": "refused to start: less was free than its utilization takes",
    "no cache": "refused to start: nothing was left for the cache",
    "too long": "refused to start: its cache holds no sequence of the longest length",
    "warm-up": "ran out of memory as it warmed up its sampler",
    "segments": "refused to start: expandable segments beside its memory pool",
    "wake-up": "ran out of memory as it woke up",
    "host": "ran out of host memory as it fell asleep",
    "no pool": "refused to start: nothing was left for the cache",
    "graphs": "ran out of memory as it captured CUDA graphs",
}


def _explained(lines: EngineLines, served: Served) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a failure follows from, and what helps."""
    kind = lines.failure
    share = f"{served.utilization:g}"
    ranks = served.tp * served.pp
    weights = sum(stage.size("weights") for stage in served.stages) * served.tp / GIB
    causes: dict[str, str] = {
        "host": f"sleep level 1 copies the weights of {ranks} ranks, {weights:.1f} GiB in all, into pinned host memory",
        "refused": f"{share} of the GPU are taken, and other processes, or a trainer's cache, hold the rest",
        "no cache": f"weights, a step and what lies outside PyTorch fill {share} of the GPU",
        "too long": f"{share} of the GPU leave {max(0, served.stages[0].cache) / GIB:.2f} GiB for the cache",
        "warm-up": f"the logits of {served.max_seqs} sequences lie beside the pool, and {share} leave no room for them",
        "segments": "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, which the pool of sleep mode does not take",
        "wake-up": "weights and cache come back beside what the trainer's allocator still holds",
        "no pool": f"weights, and what was in use before them, fill {share} of what was free",
        "graphs": f"steps and CUDA graphs lie beside weights and pool, and {share} leave no room for them",
    }
    if {"free", "total"} <= lines.settings.keys() and kind == "refused":
        free, total = lines.settings["free"], lines.settings["total"]
        causes["refused"] = (
            f"{share} of {total} GiB are more than the {free} GiB that are free: other processes, or a trainer's "
            "cache, hold the rest"
        )
    return ((causes[kind],) if kind else ()), tuple(_changes(kind, served))


def _changes(kind: str, served: Served) -> Iterator[str]:
    limits = served.limits
    assert limits is not None  # noqa: S101  # an engine that is served alone has them
    if kind in ("refused", "warm-up") and limits.largest_utilization is not None:
        share = min(limits.largest_utilization, served.utilization)
        yield f"--gpu-memory-utilization {share:g} or less, the largest that is predicted to start"
    if kind == "refused":
        yield "torch.cuda.empty_cache() in the trainer before the engine starts, or its states off the GPU"
    if kind == "graphs" and limits.largest_utilization is not None:
        share = min(limits.largest_utilization, served.utilization)
        yield f"--mem-fraction-static {share:g} or less, the largest that is predicted to start"
        yield "fewer CUDA graphs: a smaller --cuda-graph-max-bs"
    if kind == "no pool" and limits.smallest_utilization is not None:
        yield f"--mem-fraction-static {limits.smallest_utilization:g} or more, which holds one sequence"
    if kind == "warm-up":
        yield f"--max-num-seqs below {served.max_seqs}: as many as one rollout needs"
    if kind in ("no cache", "too long") and limits.smallest_utilization is not None:
        yield f"--gpu-memory-utilization {limits.smallest_utilization:g} or more, which holds one sequence"
    if kind == "too long" and limits.largest_max_len is not None:
        yield f"--max-model-len {limits.largest_max_len} or less"
    if kind == "segments":
        yield "expandable_segments off while the engine allocates, as verl switches it, or no sleep mode"
    if kind == "host":
        yield "sleep level 2, where the trainer sends all weights anew, or more host memory for the job"
    if kind == "wake-up":
        yield "torch.cuda.empty_cache() in the trainer before wake_up(), weights first and the cache last"


def _asleep(lines: EngineLines) -> Iterator[str]:
    """What an engine kept while it slept."""
    if lines.slept is not None:
        freed, stays = (size / GIB for size in lines.slept)
        yield f"asleep it gave {freed:.2f} GiB back, and {stays:.2f} GiB stayed in use, other processes' included"
