"""What vLLM and SGLang print while they start: settings, figures and the usual refusals, found line by line.

vLLM 0.8 to 0.19: v1/worker/gpu_worker.py, gpu_model_runner.py, v1/core/kv_cache_utils.py, device_allocator/cumem.py;
the line of the settings in v1/engine/core.py. Of several workers the first line counts: all ranks hold the same.

SGLang 0.4 and 0.5: srt/model_executor/model_runner.py, srt/mem_cache/memory_pool.py, srt/server_args.py. Its GB are
GiB, and its share is of what was free before the weights were loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memcalc.units import GIB

_SGLANG_SIGNS = re.compile(r"Load weight end\.|max_total_num_tokens=\d|ServerArgs\(|--mem-fraction-static")
"""What tells its log from vLLM's."""
_SGLANG_NUMBER = r"(-?\d[\d,]{0,17}(?:\.\d{0,20})?)"
_SGLANG_FIGURES = {
    "weights": rf"Load weight end\.[^\n]{{0,400}}?mem usage={_SGLANG_NUMBER} ?GB",
    "CUDA graphs": rf"Capture cuda graph end\.[^\n]{{0,400}}?mem usage={_SGLANG_NUMBER} ?GB",
}
_CACHE = (
    rf"KV Cache is allocated\.[^\n]{{0,400}}?K size: {_SGLANG_NUMBER} ?GB, V size: {_SGLANG_NUMBER} ?GB",
    rf"KV Cache is allocated\.[^\n]{{0,400}}?KV size: {_SGLANG_NUMBER} ?GB",
)
_SGLANG_TOKENS = (
    rf"KV Cache is allocated\.[^\n]{{0,400}}?#tokens: {_SGLANG_NUMBER}",
    rf"max_total_num_tokens={_SGLANG_NUMBER}",
)
_SGLANG_SETTINGS = {
    "model": (r"model_path='([^']+)'", r"--model(?:-path)?[= ](\S+)"),
    "version": (r"sglang(?:[ =v-]|==)+(\d+\.\d+)",),
    "tp": (r"\btp_size=(\d+)", r"--tp(?:-size)?[= ](\d+)"),
    "pp": (r"\bpp_size=(\d+)",),
    "max_len": (r"context_len(?:gth)?=(\d+)", r"--context-length[= ](\d+)"),
    "max_seqs": (r"max_running_requests=(\d+)", r"--max-running-requests[= ](\d+)"),
    "max_batched_tokens": (r"chunked_prefill_size=(\d+)", r"--chunked-prefill-size[= ](\d+)"),
    "utilization": (r"mem_fraction_static=(\d?\.\d+)", r"--mem-fraction-static[= ](\d?\.\d+)"),
    "quantization": (r"quantization='(\w[\w-]*)'",),
    "kv_dtype": (r"kv_cache_dtype='(\w+)'",),
}
_BEFORE = rf"Load weight begin\.[^\n]{{0,400}}?avail mem={_SGLANG_NUMBER} ?GB"
_AFTER = rf"Load weight end\.[^\n]{{0,400}}?avail mem={_SGLANG_NUMBER} ?GB, mem usage={_SGLANG_NUMBER} ?GB"
_SGLANG_FAILURES = {
    "no pool": r"Not enough memory\. Please try to increase --mem-fraction-static",
    "graphs": r"Capture (?:target decode )?(?:cuda|CUDA) graph failed",
}


def sglang_settings(text: str) -> dict[str, str]:
    """Settings by the word of ``memcalc serve``, and what was free before the weights, as ``before`` [GiB]."""
    stated = {
        name: next((m[1] for p in patterns if (m := re.search(p, text))), "")
        for name, patterns in _SGLANG_SETTINGS.items()
    }
    before, after = re.search(_BEFORE, text), re.search(_AFTER, text)
    if before:
        stated["before"] = before[1].replace(",", "")
    elif after:
        stated["before"] = f"{_number(after[1]) + _number(after[2]):.2f}"
    return {name: value for name, value in stated.items() if value}


def sglang_figures(text: str) -> dict[str, float]:
    """Figures by part [GiB]."""
    figures = {
        name: _number(match[1]) for name, pattern in _SGLANG_FIGURES.items() if (match := re.search(pattern, text))
    }
    cache = next((match for pattern in _CACHE if (match := re.search(pattern, text))), None)
    if cache:
        figures["KV cache"] = sum(map(_number, cache.groups()))
    return figures


def sglang_tokens(text: str) -> int | None:
    """Tokens of the cache.

    >>> sglang_tokens("KV Cache is allocated. #tokens: 442750, K size: 27.02 GB, V size: 27.02 GB")
    442750
    """
    match = next((match for pattern in _SGLANG_TOKENS if (match := re.search(pattern, text))), None)
    return int(_number(match[1])) if match else None


def _number(text: str) -> float:
    return float(text.replace(",", ""))


_NUMBER = r"(-?\d[\d,]{0,17}(?:\.\d{0,20})?)"
"""Of bounded length, so that it is a size and its search takes a time that grows with the log alone."""
_SIZE = r"(\d{1,9}(?:\.\d{1,9})?)"
_DEVICE = r"[^(\n]{0,60}"
_FIGURES = {
    "weights": (rf"Model loading took {_NUMBER} ?Gi?B", rf"model weights take {_NUMBER} ?GiB",
        rf"weights memory: {_NUMBER} ?GiB"),
    "activations": (rf"activation peak memory takes {_NUMBER} ?GiB", rf"torch peak memory increase: {_NUMBER} ?GiB"),
    "outside PyTorch": (rf"non_torch_memory takes {_NUMBER} ?GiB",
        rf"non-torch forward increase memory: {_NUMBER} ?GiB"),
    "CUDA graphs": (rf"Graph capturing finished in \d+ secs, took {_NUMBER} ?GiB",),
    "KV cache": (rf"Available KV cache memory: {_NUMBER} ?GiB", rf"reserved for KV Cache is {_NUMBER} ?GiB"),
}  # fmt: skip
_TOKENS = re.compile(r"GPU KV cache size: (\d[\d,]{0,17}) tokens")
_SETTINGS = {
    "model": (r"with config: model='([^']+)'", r"'model(?:_tag)?': '([^']+)'", r"vllm serve (\S+)"),
    "version": (r"LLM engine \(v(\d+\.\d+)", r"vLLM API server version v?(\d+\.\d+)", r"\bversion (\d+\.\d+)"),
    "tp": (r"tensor_parallel_size['\"]?[=:] ?(\d+)", r"tensor-parallel-size[= ](\d+)"),
    "pp": (r"pipeline_parallel_size['\"]?[=:] ?(\d+)", r"pipeline-parallel-size[= ](\d+)"),
    "max_len": (r"max_seq_len=(\d+)", r"max_model_len['\"]?[=:] ?(\d+)", r"max-model-len[= ](\d+)"),
    "max_seqs": (r"max_num_seqs['\"]?[=:] ?(\d+)", r"max-num-seqs[= ](\d+)"),
    "max_batched_tokens": (r"max_num_batched_tokens['\"]?[=:] ?(\d+)", r"max-num-batched-tokens[= ](\d+)"),
    "utilization": (r"gpu_memory_utilization['\"]?[=:] ?(\d?\.\d+)", r"gpu-memory-utilization[= ](\d?\.\d+)",
        r"gpu_memory_utilization \((\d?\.\d+)\)", r"desired GPU memory utilization \((\d?\.\d+),"),
    "quantization": (r"quantization=(\w[\w-]*)",),
    "kv_dtype": (r"kv_cache_dtype['\"]?[=:] ?['\"]?(\w+)",),
    "total": (rf"total_gpu_memory \({_SIZE} ?GiB\)", rf"Free memory on device {_DEVICE}\([\d.]{{1,20}}/{_SIZE} GiB\)"),
    "free": (rf"Free memory on device {_DEVICE}\({_SIZE}/{_SIZE} GiB\)",),
}  # fmt: skip
_SLEEP = re.compile(rf"Sleep mode freed {_NUMBER} GiB memory, {_NUMBER} GiB memory is still in use")
_FAILURES = {
    "refused": r"on startup is less than desired GPU memory\s+utilization",
    "no cache": r"No available memory for the cache blocks",
    "too long": r"KV cache is needed, which is larger than|larger than the maximum number of tokens that can be stored",
    "warm-up": r"out of memory occurred when warming up sampler",
    "segments": r"[Ee]xpandable segments are not compatible with memory pool",
    "host": r"in sleep\s+cpu_backup_tensor = torch\.empty\(",
}
_WOKEN = "wake-up"
_ALLOCATOR, _EXHAUSTED, _AT = "cumem", "out of memory", "CUDA Error: out of memory at "
_STARTS = re.compile(
    "|".join((r"Available KV cache memory: ", r"reserved for KV Cache is", r"Initializing a V\d LLM engine",
        r"Load weight end\.[^\n]{0,400}avail mem=", r"max_total_num_tokens=\d", *_FAILURES.values(),
        *_SGLANG_FAILURES.values()))
)  # fmt: skip
"""What tells such a log from another, beside a pool that did not come back."""


@dataclass(frozen=True)
class EngineLines:
    """What was found."""

    settings: dict[str, str]
    """By the word of ``memcalc serve``, and version, total and free [GiB]."""
    figures: dict[str, int]
    """By part [bytes]."""
    tokens: int | None
    """Of the cache."""
    failure: str
    """The kind of failure; empty where the log has none of the usual ones."""
    slept: tuple[int, int] | None
    """What sleep gave back, and what stays in use [bytes]."""
    engine: str = "vllm"
    """Whose log it is."""


def is_engine_log(text: str) -> bool:
    """Whether a log is that of an engine's start.

    >>> is_engine_log("INFO gpu_worker.py:298] Available KV cache memory: 8.77 GiB")
    True
    """
    return bool(_STARTS.search(text)) or any(
        _woke_without_memory(line) for line in text.splitlines() if _ALLOCATOR in line
    )


def engine_failed(text: str) -> bool:
    """Whether an engine's start failed in one of the usual ways, and not a trainer beside it.

    >>> engine_failed("ValueError: No available memory for the cache blocks.")
    True
    """
    return bool(_failure(text)) or any(re.search(pattern, text) for pattern in _SGLANG_FAILURES.values())


def engine_lines(text: str) -> EngineLines:
    """Read a start-up log.

    >>> engine_lines("INFO gpu_worker.py:298] Available KV cache memory: 8.00 GiB").figures
    {'KV cache': 8589934592}
    """
    if _SGLANG_SIGNS.search(text):
        failure = next((name for name, pattern in _SGLANG_FAILURES.items() if re.search(pattern, text)), "")
        sizes = {name: int(size * GIB) for name, size in sglang_figures(text).items()}
        return EngineLines(sglang_settings(text), sizes, sglang_tokens(text), failure, slept=None, engine="sglang")
    figures = {name: _first(patterns, text) for name, patterns in _FIGURES.items()}
    settings = {name: _first(patterns, text) for name, patterns in _SETTINGS.items()}
    tokens, slept = _TOKENS.search(text), _SLEEP.search(text)
    return EngineLines(
        settings={name: value for name, value in settings.items() if value},
        figures={name: _bytes(value) for name, value in figures.items() if value},
        tokens=int(tokens[1].replace(",", "")) if tokens else None,
        failure=_failure(text),
        slept=(_bytes(slept[1]), _bytes(slept[2])) if slept else None,
    )


def _failure(text: str) -> str:
    """The kind of failure; empty for none of the usual ones."""
    failure = next((name for name, pattern in _FAILURES.items() if re.search(pattern, text)), "")
    return failure or _WOKEN * _woke_without_memory(text)


def _woke_without_memory(text: str) -> bool:
    """Whether the pool of sleep mode could not be filled again: its file before the error, or behind it in its line.

    >>> _woke_without_memory("CUDA Error: out of memory at cumem_allocator.cpp:62")
    True
    """
    at = text.find(f"{_ALLOCATOR}_allocator")
    if at >= 0 and text.find(_EXHAUSTED, at) >= 0:
        return True
    return any(_ALLOCATOR in line.partition(_AT)[2] for line in text.splitlines() if _AT in line)


def _first(patterns: tuple[str, ...], text: str) -> str:
    """What the first pattern that is there has found."""
    return next((match[1] for pattern in patterns if (match := re.search(pattern, text))), "")


def _bytes(number: str) -> int:
    return int(float(number.replace(",", "")) * GIB)
