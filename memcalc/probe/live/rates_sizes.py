"""How large the timed operations are: from those that a launch bounds to those that fill a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memcalc.units import KIB, MIB

__all__ = ["Sizes", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """What is timed; each list goes from small to large."""

    dtypes: tuple[torch.dtype, ...]
    products: tuple[tuple[int, int, int], ...]
    """Rows, columns, and the inner dimension."""
    attention: tuple[tuple[int, int, int], ...]
    """Heads, head dimension, sequence."""
    attention_tokens: int
    """Tokens of a batch, if a sequence is shorter."""
    memory: tuple[int, ...]
    """Bytes of one tensor."""
    copies: tuple[int, ...]


_SQUARES = tuple((n, n, n) for n in (128, 256, 512, 1024, 2048, 4096, 8192))
_LAYERS = tuple(
    (tokens, columns, inner)
    for tokens in (512, 2048, 8192)
    for columns, inner in ((1024, 1024), (4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096))
)
"""Linear layers as Llama-like models have them."""


def sizes_of(device: str, changes: dict[str, Any]) -> Sizes:
    """Return the sizes for a device; `changes` replaces lists by name."""
    if device == "cuda":
        halves = (torch.bfloat16, torch.float16) if torch.cuda.get_device_capability()[0] >= 8 else (torch.float16,)
        sizes = Sizes(
            dtypes=(*halves, torch.float32),
            products=tuple(sorted((*_SQUARES, *_LAYERS), key=lambda mnk: mnk[0] * mnk[1] * mnk[2])),
            attention=tuple((2048 // d, d, seq) for seq in (256, 1024, 2048, 4096, 8192, 16384) for d in (64, 128)),
            attention_tokens=8192,
            memory=tuple(64 * KIB << (2 * i) for i in range(8)),
            copies=tuple(64 * KIB << (2 * i) for i in range(7)),
        )
    else:
        sizes = Sizes(
            dtypes=(torch.float32,),
            products=((16, 16, 16), (64, 64, 64), (128, 96, 64)),
            attention=((2, 16, 32), (2, 16, 64)),
            attention_tokens=64,
            memory=(64 * KIB, MIB),
            copies=(),
        )
    return replace(sizes, **{name: _tuples(value) for name, value in changes.items()})


def _tuples(value: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
