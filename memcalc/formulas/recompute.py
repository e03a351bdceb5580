"""Recompute policies: which blocks, or which tensors of a block, are dropped in forward and computed again in backward.

A policy is a name. ``every-2`` (every second block is checkpointed) and ``uniform-2`` (one checkpoint for each two
blocks) are different things, as are ``segments-4`` (four checkpoints) and ``every-4``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.errors import InputError

if TYPE_CHECKING:
    from memcalc.formulas.inventory import Saved
    from memcalc.formulas.types import Array

PARTS_DROPPED: dict[str, frozenset[str]] = {
    "attention": frozenset({"qkv", "mla_up", "core", "attn_out"}),
    "mlp": frozenset({"mlp", "moe", "moe_act"}),
    "selective-core-attn": frozenset({"core"}),
}
MODULES: dict[str, frozenset[str]] = {
    "core_attn": frozenset({"core"}),
    "mlp": frozenset({"mlp"}),
    "moe": frozenset({"moe", "moe_act"}),
    "layernorm": frozenset({"norm"}),
    "moe_act": frozenset({"moe_act"}),
    "mla_up_proj": frozenset({"mla_up"}),
}
"""Megatron-LM's ``--recompute-modules`` by the parts of the inventory that each drops."""

NAMES = ("none", "full", "sqrt", "attention", "mlp", "selective-ops", "selective-core-attn")
PATTERNS = ("every-K", "segments-K", "block-N", "uniform-N", "modules:core_attn,mlp,…")
_COUNTED = re.compile(r"(every|segments|block|uniform)-([1-9]\d{0,3})")


@dataclass(frozen=True)
class Policy:
    """A parsed policy: ``kind`` is how blocks are treated, ``count`` its K or N, ``dropped`` the parts recomputed."""

    name: str
    kind: str
    count: int = 1
    dropped: frozenset[str] = frozenset()


def parse_policy(name: str) -> Policy:
    """The policy of that name, or an error that lists the names.

    >>> parse_policy("every-2").count
    2
    """
    if match := _COUNTED.fullmatch(name):
        return Policy(name, match[1], int(match[2]))
    if name in ("none", "full", "sqrt", "selective-ops"):
        return Policy(name, name)
    if name in PARTS_DROPPED:
        return Policy(name, "parts", dropped=PARTS_DROPPED[name])
    if name.startswith("modules:"):
        return Policy(name, "parts", dropped=_modules(name))
    raise InputError("recompute", name, f"one of {', '.join((*NAMES, *PATTERNS))}", NAMES)


def _modules(name: str) -> frozenset[str]:
    """Union of the parts of the modules listed after ``modules:``."""
    listed = name.removeprefix("modules:").split(",")
    for module in listed:
        if module not in MODULES:
            raise InputError("recompute modules:", module, f"the modules are {', '.join(MODULES)}", MODULES)
    return frozenset().union(*(MODULES[module] for module in listed))


def keeps(policy: Policy, saved: Saved) -> bool:
    """Whether a block treated by the policy in part (not checkpointed whole) keeps the tensor."""
    if policy.kind == "selective-ops":
        return saved.in_ops
    return not saved.ops_only and saved.part not in policy.dropped


@dataclass(frozen=True)
class Counts:
    """How a policy treats the blocks of one pipeline stage, as arrays over its layers."""

    checkpoints: Array
    """Block inputs kept."""
    whole: Array
    """Blocks that keep everything."""
    partial: Array
    """Blocks that keep what :func:`keeps` says."""
    unit: Array
    """Blocks computed again at once, while all other checkpoints are still alive."""
    recomputed: Array
    """Blocks whose forward runs twice."""


def counts(policy: Policy, layers: Array) -> Counts:
    """Blocks of a stage by treatment; ``layers`` may be an array."""
    zero = np.zeros_like(layers)
    one = np.minimum(layers, 1)
    if policy.kind in {"parts", "selective-ops"}:
        return Counts(zero + (policy.kind == "selective-ops") * layers, zero, layers, one, zero)
    if policy.kind == "none":
        return Counts(zero, layers, zero, zero, zero)
    if policy.kind == "full":
        return Counts(layers, zero, zero, one, layers)
    return _COUNTERS[policy.kind](policy.count, layers)


def _every(k: int, layers: Array) -> Counts:
    """Blocks k, 2k, … are checkpointed whole (torchtitan counts from one)."""
    done = layers // k
    last = np.minimum(done, 1) * (layers % k == 0)
    return Counts(done, layers - done, np.zeros_like(layers), last, done)


def _segments(k: int, layers: Array) -> Counts:
    """``torch.utils.checkpoint.checkpoint_sequential``: k segments, of which the last runs without a checkpoint."""
    size = np.maximum(layers // np.maximum(np.minimum(k, layers), 1), 1)
    segments = np.minimum(k, layers)
    last = layers - size * (segments - 1)
    bigger = np.maximum(size - last, 0)
    return Counts(np.maximum(segments - 1, 0), last, np.zeros_like(layers), bigger, layers - last)


def _sqrt(_: int, layers: Array) -> Counts:
    """Chen et al. 2016 (arXiv:1604.06174): about the square root of n segments."""
    return _segments_array(np.rint(np.sqrt(layers)).astype(np.int64), layers)


def _segments_array(k: Array, layers: Array) -> Counts:
    """Segments as in :func:`_segments` with a number for each entry."""
    size = np.maximum(layers // np.maximum(k, 1), 1)
    last = layers - size * np.maximum(k - 1, 0)
    return Counts(np.maximum(k - 1, 0), last, np.zeros_like(layers), np.maximum(size - last, 0), layers - last)


def _block(n: int, layers: Array) -> Counts:
    """Megatron's ``block`` method: the first n blocks of a stage are checkpointed, the others keep everything."""
    done = np.minimum(n, layers)
    return Counts(done, layers - done, np.zeros_like(layers), np.minimum(done, 1) * (done == layers), done)


def _uniform(n: int, layers: Array) -> Counts:
    """Megatron's ``uniform`` method: a checkpoint for each n blocks, all of which are computed again."""
    return Counts(-(-layers // n), np.zeros_like(layers), np.zeros_like(layers), np.minimum(n, layers), layers)


_COUNTERS = {"every": _every, "segments": _segments, "sqrt": _sqrt, "block": _block, "uniform": _uniform}
