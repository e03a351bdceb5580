"""Recompute policies: which blocks, or which tensors of a block, are dropped in forward and computed again in backward.

A policy is a name. ``every-2`` (every second block is checkpointed) and ``uniform-2`` (one checkpoint for each two
blocks) are different things, as are ``segments-4`` (four checkpoints) and ``every-4``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.formulas import Array

PARTS: dict[str, frozenset[str]] = {
    "attention": frozenset({"attention"}),
    "mlp": frozenset({"mlp", "moe"}),
    "selective-core-attn": frozenset({"core_attn"}),
    "submodules": frozenset({"attention", "mlp", "moe", "norm"}),
}
"""Policies that compute parts of blocks again, by the parts that :class:`memcalc.trace.layers.BlockConfig` names.

``submodules`` has a checkpoint round each module of a block, so that the inputs of all of them stay: Accelerate v1.8.0
to v1.14.0 utils/fsdp_utils.py (``fsdp2_apply_ac``), NeMo RL models/automodel, NeMo Automodel.
"""
MODULES = ("core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj")
"""Megatron-LM's ``--recompute-modules``."""

NAMES = ("none", "full", "sqrt", "attention", "mlp", "submodules", "selective-ops", "selective-core-attn")
PATTERNS = ("every-K", "segments-K", "block-N", "uniform-N", "modules:core_attn,mlp,…")
_COUNTED = re.compile(r"(every|segments|block|uniform)-([1-9]\d{0,3})")


@dataclass(frozen=True)
class Policy:
    """A parsed policy."""

    name: str
    """As typed."""
    kind: str
    """How blocks are treated."""
    count: int = 1
    """Its K or N."""
    skipped: int = 0
    """Of every-K the blocks before the first that is checkpointed: K - 1, or none where a framework begins with it."""
    parts: frozenset[str] = frozenset()
    """What is computed again, where that is a part of a block."""

    @property
    def by_chunk(self) -> bool:
        """Whether each model chunk of a stage is treated by itself.

        Megatron-LM's units end with a chunk: its loop is over the layers of one ``TransformerBlock`` (core/recompute.py
        of d98e8a64). ``block-N`` counts the blocks of the whole stage, which come out even over its chunks.
        """
        return self.kind == "uniform"

    @property
    def treatment(self) -> str:
        """What happens to a block that the policy treats: none (parts of it apart), full or selective-ops."""
        return {"none": "none", "parts": "none", "selective-ops": "selective-ops"}.get(self.kind, "full")


def parse_policy(name: str) -> Policy:
    """The policy of that name, or an error that lists the names.

    >>> parse_policy("every-2").count
    2
    """
    if match := _COUNTED.fullmatch(name):
        count = int(match[2])
        return Policy(name, match[1], count, skipped=count - 1 if match[1] == "every" else 0)
    if name in ("none", "full", "sqrt", "selective-ops"):
        return Policy(name, name)
    if name in PARTS:
        return Policy(name, "parts", parts=PARTS[name])
    if name == "modules":  # as plans call it on a screen
        raise InputError(
            "recompute", name, f"list some of {', '.join(MODULES)}, as in modules:{','.join([*MODULES][:2])}"
        )
    if name.startswith("modules:"):
        return Policy(name, "parts", parts=_modules(name))
    raise InputError("recompute", name, f"one of {', '.join((*NAMES, *PATTERNS))}", NAMES)


def _modules(name: str) -> frozenset[str]:
    """Union of the parts of the modules listed after ``modules:``."""
    listed = name.removeprefix("modules:").split(",")
    for module in listed:
        if module not in MODULES:
            raise InputError("recompute modules:", module, f"the modules are {', '.join(MODULES)}", MODULES)
    return frozenset(listed)


class Counts(NamedTuple):
    """How a policy treats the blocks of one pipeline stage, as arrays over its layers."""

    treated: Array
    """Checkpoints (of a block, or of a unit of blocks), or blocks of which parts are computed again."""
    whole: Array
    """Blocks that keep everything."""
    unit: Array
    """Blocks computed again at once when the last block's backward runs, while all other checkpoints are alive; 0
    where the last block keeps everything."""
    recomputed: Array
    """Blocks whose forward runs twice."""


def counts(policy: Policy, layers: Array) -> Counts:
    """Blocks of a stage by treatment; ``layers`` may be an array."""
    zero = np.zeros_like(layers)
    single = np.minimum(layers, 1)
    if policy.kind in {"parts", "selective-ops"}:
        return Counts(layers, zero, single, zero)
    if policy.kind == "none":
        return Counts(zero, layers, zero, zero)
    if policy.kind == "full":
        return Counts(layers, zero, single, layers)
    if policy.kind == "every":
        return _every(policy, layers)
    return _COUNTERS[policy.kind](policy.count, layers)


def counts_of_chunks(policy: Policy, chunks: Sequence[Array]) -> Counts:
    """The same of stages that hold several model chunks, of so many blocks each.

    >>> counts_of_chunks(parse_policy("uniform-2"), [np.array([3]), np.array([3])]).treated.tolist()
    [4]
    """
    if not policy.by_chunk:
        return counts(policy, sum(chunks, np.int64(0)))
    each = [counts(policy, layers) for layers in chunks]
    unit = each[0].unit
    for layers, chunk in zip(chunks[1:], each[1:], strict=True):
        unit = np.where(layers > 0, chunk.unit, unit)
    blocks = ([getattr(chunk, name) for chunk in each] for name in ("treated", "whole", "recomputed"))
    treated, untreated, recomputed = (sum(counted, np.int64(0)) for counted in blocks)
    return Counts(treated, untreated, unit, recomputed)


def _every(policy: Policy, layers: Array) -> Counts:
    """Blocks k, 2k, … are checkpointed whole (torchtitan counts from one), or 1, k + 1, … (Transformers from zero)."""
    done = np.maximum(-(-(layers - policy.skipped) // policy.count), 0)
    last = np.minimum(done, 1) * ((layers - 1 - policy.skipped) % policy.count == 0)
    return Counts(done, layers - done, last, done)


def _segments(k: int, layers: Array) -> Counts:
    """``torch.utils.checkpoint.checkpoint_sequential``: k segments, of which the last runs without a checkpoint."""
    return _segments_array(np.minimum(k, layers), layers)


def _sqrt(_: int, layers: Array) -> Counts:
    """Chen et al. 2016 (arXiv:1604.06174): about the square root of n segments."""
    return _segments_array(np.rint(np.sqrt(layers)).astype(np.int64), layers)


def _segments_array(k: Array, layers: Array) -> Counts:
    """Segments as in :func:`_segments` with a number for each entry."""
    size = np.maximum(layers // np.maximum(k, 1), 1)
    last = layers - size * np.maximum(k - 1, 0)
    return Counts(np.maximum(k - 1, 0), last, np.maximum(size - last, 0), layers - last)


def _block(n: int, layers: Array) -> Counts:
    """Megatron's ``block`` method: the first n blocks of a stage are checkpointed, the others keep everything."""
    done = np.minimum(n, layers)
    return Counts(done, layers - done, np.minimum(done, 1) * (done == layers), done)


def _uniform(n: int, layers: Array) -> Counts:
    """Megatron's ``uniform`` method: a checkpoint for each n blocks, all of which are computed again."""
    return Counts(-(-layers // n), np.zeros_like(layers), np.minimum(n, layers), layers)


_COUNTERS = {"segments": _segments, "sqrt": _sqrt, "block": _block, "uniform": _uniform}


def units_of_chunks(policy: Policy, chunks: Sequence[int]) -> list[int]:
    """Those of a stage that holds model chunks of so many blocks each (:func:`unit_sizes`).

    >>> units_of_chunks(parse_policy("uniform-2"), [3, 3]), units_of_chunks(parse_policy("every-2"), [3, 3])
    ([2, 1, 2, 1], [0, 1, 0, 1, 0, 1])
    """
    parts = chunks if policy.by_chunk else [sum(chunks)]
    return [size for layers in parts for size in unit_sizes(policy, layers)]


def unit_sizes(policy: Policy, layers: int) -> list[int]:
    """Blocks of each checkpoint unit of a row of blocks, in order; 0 for a block that keeps everything.

    >>> unit_sizes(parse_policy("segments-3"), 12)
    [4, 4, 0, 0, 0, 0]
    """
    kind, count = policy.kind, policy.count
    if kind in {"none", "parts", "selective-ops", "full"}:
        return [0 if kind == "none" else 1] * layers
    if kind == "every":
        return [int(index >= policy.skipped and (index - policy.skipped) % count == 0) for index in range(layers)]
    if kind == "block":
        return [1] * min(count, layers) + [0] * max(layers - count, 0)
    if kind == "uniform":
        return [min(count, layers - start) for start in range(0, layers, count)]
    segments = min(count, layers) if kind == "segments" else int(np.rint(np.sqrt(layers)))
    size = max(layers // max(segments, 1), 1)
    checkpointed = max(segments - 1, 0)
    return [size] * checkpointed + [0] * (layers - size * checkpointed)
