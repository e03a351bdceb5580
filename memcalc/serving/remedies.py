"""What would start in the place of an engine that does not fit: one change each, else two; and each is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memcalc.errors import MemcalcError
from memcalc.results.serving import Served
from memcalc.serving import serve

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
