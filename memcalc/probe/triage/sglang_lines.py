"""What SGLang prints while it starts, in the words of :mod:`memcalc.probe.triage.engine_lines`.

SGLang 0.4 and 0.5: srt/model_executor/model_runner.py, srt/mem_cache/memory_pool.py, srt/server_args.py. Its GB are
GiB, and its share is of what was free before the weights were loaded.
"""

from __future__ import annotations

import re

SIGNS = re.compile(r"Load weight end\.|max_total_num_tokens=\d|ServerArgs\(|--mem-fraction-static")
"""What tells its log from vLLM's."""
_NUMBER = r"(-?\d[\d,]{0,17}(?:\.\d{0,20})?)"
_FIGURES = {
    "weights": rf"Load weight end\.[^\n]{{0,400}}?mem usage={_NUMBER} ?GB",
    "CUDA graphs": rf"Capture cuda graph end\.[^\n]{{0,400}}?mem usage={_NUMBER} ?GB",
}
_CACHE = (
    rf"KV Cache is allocated\.[^\n]{{0,400}}?K size: {_NUMBER} ?GB, V size: {_NUMBER} ?GB",
    rf"KV Cache is allocated\.[^\n]{{0,400}}?KV size: {_NUMBER} ?GB",
)
_TOKENS = (rf"KV Cache is allocated\.[^\n]{{0,400}}?#tokens: {_NUMBER}", rf"max_total_num_tokens={_NUMBER}")
_SETTINGS = {
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
_BEFORE = rf"Load weight begin\.[^\n]{{0,400}}?avail mem={_NUMBER} ?GB"
_AFTER = rf"Load weight end\.[^\n]{{0,400}}?avail mem={_NUMBER} ?GB, mem usage={_NUMBER} ?GB"
FAILURES = {
    "no pool": r"Not enough memory\. Please try to increase --mem-fraction-static",
    "graphs": r"Capture (?:target decode )?(?:cuda|CUDA) graph failed",
}


def sglang_settings(text: str) -> dict[str, str]:
    """Settings by the word of ``memcalc serve``, and what was free before the weights, as ``before`` [GiB]."""
    stated = {
        name: next((m[1] for p in patterns if (m := re.search(p, text))), "") for name, patterns in _SETTINGS.items()
    }
    before, after = re.search(_BEFORE, text), re.search(_AFTER, text)
    if before:
        stated["before"] = before[1].replace(",", "")
    elif after:
        stated["before"] = f"{_number(after[1]) + _number(after[2]):.2f}"
    return {name: value for name, value in stated.items() if value}


def sglang_figures(text: str) -> dict[str, float]:
    """Figures by part [GiB]."""
    figures = {name: _number(match[1]) for name, pattern in _FIGURES.items() if (match := re.search(pattern, text))}
    cache = next((match for pattern in _CACHE if (match := re.search(pattern, text))), None)
    if cache:
        figures["KV cache"] = sum(map(_number, cache.groups()))
    return figures


def sglang_tokens(text: str) -> int | None:
    """Tokens of the cache.

    >>> sglang_tokens("KV Cache is allocated. #tokens: 442750, K size: 27.02 GB, V size: 27.02 GB")
    442750
    """
    match = next((match for pattern in _TOKENS if (match := re.search(pattern, text))), None)
    return int(_number(match[1])) if match else None


def _number(text: str) -> float:
    return float(text.replace(",", ""))
