"""Tokens on their way to routed experts and back: bytes of one micro-batch by link, and calls.

An all-to-all sends one copy for each expert a token goes to, over the link in its node and over the one network adapter
of its GPU. DeepEP and HybridEP send one copy a node, and from there one a rank. Sources: DeepEP ``README.md``; the
Megatron-Core MoE report, arXiv:2603.07685, table 7.

Which ranks of a group share a node.
"""

from __future__ import annotations

from functools import cache
from math import comb
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.formulas.flops import slower
from memcalc.formulas.offload import exposed_offload_seconds
from memcalc.specs.block import MixtureOfExperts

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import Node
    from memcalc.timing.blocks import BlockWork
    from memcalc.timing.rates import Hardware, Rates


ONE_COPY_A_NODE = 0.25
"""Share of the shorter of the two ways that the longer does not hide, where a copy travels both (DeepEP, HybridEP)."""


class Exchange(NamedTuple):
    """One kind of exchange of tokens of a rank."""

    inside: Array
    """Bytes over the link in the node."""
    outside: Array
    """Bytes over the rank's own network adapter."""
    calls: Array
    """Exchanges."""
    apart: Array
    """Share of the shorter way's time that stands beside the longer's: 1 where both take turns."""


def exchanges(grid: Grid, blocks: list[BlockWork], node: Node) -> tuple[Exchange, Exchange]:
    """Dispatch and combine, forward and backward, of all blocks of a stage; and those of what is computed again."""
    ranks = grid.degree("ep")
    here = in_node(grid, node, ranks, grid.expert_tp)  # neighbours whatever TP is (Megatron-LM, core/parallel_state.py)
    zero: Array = np.zeros((1,) * 7)
    inside, outside, calls = zero, zero, zero
    inside_again, outside_again, calls_again = zero, zero, zero
    many = (ranks > 1).astype(np.int64)
    for b in blocks:
        mlp = b.activations.group.block.mlp
        if not isinstance(mlp, MixtureOfExperts):
            continue
        near, far = _copies(grid, b, mlp, ranks, here)
        each, again = 4 * b.layers, b.reductions_again
        inside, outside, calls = inside + each * near, outside + each * far, calls + each * many
        inside_again, outside_again = inside_again + again * near, outside_again + again * far
        calls_again = calls_again + again * many
    apart = np.full((1,) * 7, ONE_COPY_A_NODE if grid.fixed.moe_dispatcher == "deepep" else 1.0)
    return Exchange(inside, outside, calls, apart), Exchange(inside_again, outside_again, calls_again, apart)


HIDING = 0.8
"""Share of another micro-batch's computation beside which tokens travel, where the two overlap."""


def exchange_seconds(exchange: Exchange, compute: Array, hardware: Hardware, rates: Rates) -> Array:
    """Time of tokens on their way that computation does not hide [s]."""
    inside = exchange.inside / (rates.exchange_inside * hardware.inside)
    outside = exchange.outside / (rates.exchange_between * hardware.between)
    longer = slower(inside, outside)
    taken = longer + exchange.apart * (inside + outside - longer) + exchange.calls * rates.exchange_call
    over = exposed_offload_seconds(taken, HIDING * compute)
    return np.asarray(over + rates.exposed_exchange * (taken - over))


def distinct_targets(topk: int, targets: int | Array, groups: int = 1, chosen: int = 1) -> Array:
    """Return on how many different ones of some ranks or nodes a token's experts are, where all are alike.

    They are of the chosen groups alone. Groups lie on the targets in their order: some whole, and a part of one more.
    Where groups are chosen for their best experts, random scores give up to a tenth more.

    Sources: Feller, "An Introduction to Probability Theory", 1968, volume 1, sections II.6 (which of a target's groups
    are chosen) and IV.2 (occupancy); DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (node-limited routing).

    >>> distinct_targets(1, 8).item(), distinct_targets(2, 2).item()
    (1.0, 1.5)
    >>> [round(distinct_targets(8, nodes, groups=8, chosen=4).item(), 2) for nodes in (2, 4, 8, 64)]
    [1.92, 2.91, 3.6, 7.18]
    """
    entire = np.asarray(np.minimum(groups // targets, groups - 1), dtype=np.int64)
    part = groups / targets - entire
    missed = sum(odds[entire] * (1 - (j + i * part) / chosen) ** topk for j, i, odds in _chances(groups, chosen))
    return np.asarray(targets * (1 - missed))


@cache
def _chances(groups: int, chosen: int) -> list[tuple[int, int, Array]]:
    """For 0, 1, 2, … groups and one more: j of them and i of it, and the probabilities that so many are chosen."""
    ways = [
        (j, i, [comb(n, j) * comb(groups - 1 - n, chosen - j - i) for n in range(groups)])
        for j in range(chosen + 1)
        for i in range(2)
        if j + i <= chosen
    ]
    return [(j, i, np.array([way / comb(groups, chosen) for way in counted])) for j, i, counted in ways]


def _copies(grid: Grid, block: BlockWork, experts: MixtureOfExperts, ranks: Array, here: Array) -> tuple[Array, Array]:
    """Bytes of one exchange of one block over each kind of link."""
    sent = 2 * block.activations.tokens // grid.sequence_shard * block.activations.group.block.hidden
    sent = sent * grid.fixed.expert_imbalance
    topk = experts.topk
    if grid.fixed.moe_dispatcher == "allgather":
        return sent * (here - 1), sent * (ranks - here)
    if grid.fixed.moe_dispatcher == "alltoall":
        return sent * topk * (here - 1) / ranks, sent * topk * (ranks - here) / ranks
    nodes = ranks / here
    groups = experts.n_group, experts.topk_group
    near = sent * distinct_targets(topk, ranks, *groups) * (ranks - 1) / ranks
    return near, sent * distinct_targets(topk, nodes, *groups) * (nodes - 1) / nodes


def unmade_rows(b: BlockWork) -> Array:
    """Bytes that one exchange of one block does not write where a token travels once for all experts of a rank.

    An all-to-all has rows for each expert, sorted before they leave and after they arrived. DeepEP and HybridEP take
    tokens as they are, and sort what arrives alone (Megatron-LM d98e8a64 ``core/transformer/moe/token_dispatcher.py``:
    ``_DeepepManager``, ``_HybridEPManager``).
    """
    grid, mlp, ranks = b.grid, b.activations.group.block.mlp, b.grid.degree("ep")
    if not isinstance(mlp, MixtureOfExperts) or grid.fixed.moe_dispatcher != "deepep":
        return np.int64(0)
    sent = 2 * b.activations.tokens // grid.sequence_shard * b.activations.group.block.hidden
    arrived = distinct_targets(mlp.topk, ranks, mlp.n_group, mlp.topk_group)
    return np.asarray((ranks > 1) * sent * (2 * mlp.topk - arrived))


def in_node(grid: Grid, node: Node, ranks: Array, stride: Array) -> Array:
    """Ranks of a group that share a node, where neighbours of the group are ``stride`` ranks apart.

    Where groups are no whole part of a node its end cuts some, and all wait for these: equal parts of one lie in each.
    Jobs that do not fill their nodes leave such GPUs out (64 of 72 of an NVL72, as NVIDIA's recipes do).
    """
    each, gpus = node.gpus // np.minimum(stride, node.gpus), grid.degree("gpus")
    cut = (ranks < each) & (each % ranks > 0) & (gpus > node.gpus) & (gpus % node.gpus == 0)
    return np.maximum(np.where(cut, np.gcd(each, ranks), np.minimum(ranks, each)), 1) + 0 * grid.degree("tp")
