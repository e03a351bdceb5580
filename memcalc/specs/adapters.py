"""The words for adapters and for a quantised base: ``--lora 16:q,v``, ``--also-train head``, ``--quantize nf4``."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from memcalc.errors import InputError
from memcalc.specs.model import Frozen

Quantization = Literal["none", "nf4", "nf4-dq", "int8", "gptq-int4", "gptq-int8"]
AdapterDtype = Literal["fp32", "bf16"]
AlsoTrained = Literal["embedding", "head"]
Target = Literal[
    "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "q_a", "q_b", "kv_a", "kv_b", "router", "embedding",
    "head",
]  # fmt: skip
EVERY = ("all", "all-linear")
"""All linear layers with the head, or without it."""
LARGEST_RANK = 65_536


class Lora(Frozen):
    """Low-rank adapters."""

    rank: int = Field(gt=0)
    targets: tuple[str, ...] = ()
    """Layers that have an adapter; empty for the usual ones of the architecture."""

    def __str__(self) -> str:
        return f"{self.rank}:{','.join(self.targets)}" if self.targets else str(self.rank)


def parse_lora(value: object) -> Lora:
    """Adapters from ``RANK`` or ``RANK:TARGETS``.

    >>> parse_lora("16:q,v").targets
    ('q', 'v')
    """
    rank, _, targets = str(value).partition(":")
    if not rank.strip().isdigit() or not 0 < int(rank) <= LARGEST_RANK:
        raise InputError("lora", value, f"the rank must be a whole number from 1 to {LARGEST_RANK:,}, as in 16:q,k,v,o")
    named = tuple(dict.fromkeys(part.strip() for part in targets.split(",") if part.strip()))
    known = (*get_args(Target), *EVERY)
    for name in named:
        if name not in known:
            raise InputError("lora", value, f"a target is one of {', '.join(known)}, and {name!r} is none", known)
    if len(named) > 1 and any(name in EVERY for name in named):
        raise InputError("lora", value, f"{' and '.join(n for n in named if n in EVERY)} stands alone")
    return Lora(rank=int(rank), targets=named)


def parse_also_train(value: object) -> tuple[str, ...]:
    """Parts that are trained in full beside the adapters, from a comma-separated list."""
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    known = get_args(AlsoTrained)
    for part in listed:
        if part not in known:
            raise InputError("also-train", part, f"must be one of {', '.join(known)}", known)
    return tuple(name for name in known if name in listed)


def release(version: str) -> tuple[int, ...]:
    """A version as numbers that sort by age.

    >>> release("0.9") < release("0.12")
    True
    """
    return tuple(int(part) for part in version.split("."))
