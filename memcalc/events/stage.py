"""One stage of a strategy, as numbers: its blocks, its units and their sizes, and weights in Megatron-LM's buffers.

What of a step's order is known beforehand: units of checkpoints, weights in the order of their modules.

Megatron-LM makes weights apart and lays them into one tensor, of which each rank's optimizer has a part. Source:
23e00ed core/distributed/param_and_grad_buffer.py (``_ParamAndGradBuffer``: the buffer is made while the weights are
there, from the last to the first; ``bucket_size`` is None without ``--overlap-grad-reduce``) and
core/optimizer/distrib_optimizer.py (``_build_model_and_main_param_groups``: a main weight for each part of a weight in
the rank's range, as the optimizer is made).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from memcalc.events.units import Sizes
from memcalc.ledger import ALWAYS
from memcalc.terms.activations import GroupActivations, groups_of
from memcalc.terms.adapters import Base, trained
from memcalc.terms.buffers import copies_in_events
from memcalc.terms.fsdp2 import Units
from memcalc.terms.moments import end_weights, layout_of, rank_weights, weight_of_block
from memcalc.terms.states import in_one_buffer
from memcalc.terms.tensors import block_tensors
from memcalc.terms.zero import is_flat, partitions_without_zero, sub_group
from memcalc.trace.template import trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memcalc.formulas import Array
    from memcalc.ledger import Ledger, Term
    from memcalc.specs.block import Block
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.moments import RankWeight
    from memcalc.trace.template import Template


Rank = Literal["first", "middle", "last"]
"""One of the ranks that share a buffer."""


def weights_of_rank(
    census: ModelOnGrid, blocks: Sequence[Block], scalar: Callable[[Array | int], int]
) -> tuple[list[int], list[int]]:
    """Elements of each weight of a rank with these blocks, in the order of the modules: dense ones, and experts'.

    Norms and biases are one more of each, so that their sums are the census's.
    """

    def listed(weights: Iterable[RankWeight]) -> list[tuple[bool, int]]:
        return [(w.routed, scalar(w.weight.elements)) for w in weights for _ in range(scalar(w.number))]

    inside = {block: listed(_of_block(census, block)) for block in set(blocks)}
    ends = listed(end_weights(census, "first")), listed(end_weights(census, "last"))
    in_order = [*ends[0], *(weight for block in blocks for weight in inside[block]), *ends[1]]
    sizes = {routed: [size for each, size in in_order if each == routed] for routed in (False, True)}
    totals = {False: scalar(census.blocks + census.root), True: scalar(census.experts_or_none)}
    for routed, total in totals.items():
        rest = total - sum(sizes[routed])
        sizes[routed] += [rest] * (rest > 0)
    return sizes[False], sizes[True]


def _of_block(census: ModelOnGrid, block: Block) -> Iterator[RankWeight]:
    """A block's weights; attention makes its output projection first (core/transformer/attention.py)."""
    tensors = block_tensors(block, layout_of(census.grid.habits))
    for tensor in sorted(tensors, key=lambda tensor: tensor.target != "o"):
        yield weight_of_block(census, tensor, np.int64(1))


def telling_ranks(census: ModelOnGrid, stage: int) -> list[Rank]:
    """The ranks whose parts tell what all of them reserve: one with weights of blocks, as most have, and an end's.

    The first rank has the head, and the last one the embedding: large tensors that leave large holes.
    """
    grid = census.grid
    ranks = int(np.max(grid.ranks))
    if not grid.habits.persistent_gradients or not np.any(grid.zero) or ranks == 1:
        return ["middle"]
    ends: list[Rank] = ["last"] * (stage == 0 and ranks > 2) or ["first"] * (0 < stage == grid.num_stages - 1)
    return ["middle", *ends]


def part_of_rank(weights: list[int], ranks: int, rank: Rank = "middle") -> list[int]:
    """The parts of weights that one of several ranks has of their buffer, which begins with the last weight.

    They are made in the order of the buffer (distrib_optimizer.py, ``_build_optimizer_group_ranges``).

    >>> part_of_rank([4, 6, 2], 1), part_of_rank([4, 6, 2], 3), part_of_rank([4, 6, 2], 4)
    ([2, 6, 4], [4], [2, 1])
    >>> part_of_rank([4, 6, 2], 3, "first"), part_of_rank([4, 6, 2], 3, "last")
    ([2, 2], [4])
    """
    size = -(-sum(weights) // ranks)
    first = {"first": 0, "middle": ranks // 2, "last": ranks - 1}[rank] * size
    after = first + size
    parts, at = list[int](), 0
    for weight in reversed(weights):
        inside = min(at + weight, after) - max(at, first)
        parts += [inside] * (inside > 0)
        at += weight
    return parts


class Stage:
    """What one stage holds under one strategy."""

    def __init__(self, census: ModelOnGrid, ledger: Ledger, stage: int, rank: Rank = "middle") -> None:
        self.census, self.ledger, self.stage, self.rank = census, ledger, stage, rank
        self.grid = census.grid

    def scalar(self, array: Array | int) -> int:
        """A value on this stage."""
        flat = np.asarray(array).reshape(-1)
        return int(flat[min(self.stage, flat.size - 1)])

    @cached_property
    def layers(self) -> list[GroupActivations]:
        """The group of each block of the stage, in order."""
        rows, groups = self.census.rows, groups_of(self.census)
        return [groups[index] for index in rows.distinct[self.scalar(rows.index)]]

    @cached_property
    def widths(self) -> list[GroupActivations]:
        """Those of the blocks, or where embedding or head is a stage of its own those of the model's (torchtitan)."""
        return self.layers or groups_of(self.census)

    @cached_property
    def shares(self) -> list[int]:
        """Elements of each weight of the stage, in the order of the modules; what is in none of them stands for one.

        Where tensor parallelism divides them they are in proportion.
        """
        if self.buffered is not None:
            return [*self.buffered[0], *self.buffered[1]]
        census = self.census
        groups = {id(a): a for a in self.layers}
        weights = {key: weights_of(a) for key, a in groups.items()}
        blocks = [share for a in self.layers for share in weights[id(a)]]
        before = self.scalar(census.count.outside_first * self.grid.is_first)
        after = self.scalar((census.count.outside_last + census.count.final_norm) * self.grid.is_last)
        head = 0 if self.tied else max(self.scalar(census.head) - after, 0)
        inside = [self.scalar(census.embedding) - before, before, *blocks]
        rest = max(self.scalar(census.parameters) - sum(inside) - head, 0)
        return [share for share in (*inside, rest, head) if share] or [1]

    @cached_property
    def buffered(self) -> tuple[list[int], list[int]] | None:
        """Of Megatron-LM, elements of dense weights and of experts', which have a buffer each."""
        if not self.grid.habits.persistent_gradients or self.trained is not self.census:
            return None
        return weights_of_rank(self.census, [a.group.block for a in self.layers], self.scalar)

    @cached_property
    def updated(self) -> list[int]:
        """Elements of each tensor that the rank's optimizer updates, or what they are in proportion to."""
        if self.flat or self.buffered is None or not self.scalar(self.grid.zero):
            return self.flat or self.shares
        ranks = self.scalar(self.grid.ranks), self.scalar(self.grid.expert_ranks)
        both = zip(self.buffered, ranks, strict=True)
        return [part for weights, count in both for part in part_of_rank(weights, count, self.rank)]

    @cached_property
    def flat(self) -> list[int]:
        """What DeepSpeed's flat tensors are in proportion to, if any: matrices, and vectors, which do not decay.

        At stage 3 groups of weights, in the order of the modules.
        """
        grid, census = self.grid, self.trained
        if grid.habits.zero_optimizer is None or not self.scalar(is_flat(grid)):
            return []
        if self.scalar(grid.zero) == 3 and grid.fixed.adapters is None:
            return filled([-(-share // self.scalar(grid.ranks)) for share in self.shares], sub_group(grid))
        total = self.scalar(census.parameters)
        listed = sum(self.scalar(each.number * each.weight.elements) for each in rank_weights(census))
        matrices = min(listed or total, total)
        return [matrices, total - matrices] if matrices < total else [1]

    @cached_property
    def split(self) -> bool:
        """Whether the embedding is a unit of its own."""
        return self.grid.habits.gather == "blocks" and not self.grid.habits.flat_units and Units(self.census).split

    @property
    def last_unit(self) -> int:
        """The unit of norm and head (and, unless it is apart, the embedding), after those of the blocks."""
        return len(self.layers)

    @property
    def first_unit(self) -> int:
        """The unit of the embedding."""
        return self.last_unit + 1 if self.split else self.last_unit

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The model chunk of each unit: that of a block, of the head, which is in the last, and of the embedding.

        Each is a root of FSDP 2, whose communication has streams of its own unless a script shares them: torchtitan
        b5bcd76 does not (torch 2.13 ``_fsdp_state.py``, ``_lazy_init``; ``_fully_shard.py``, ``share_comm_ctx``).
        """
        chunks = range(len(self.census.chunks[0]))
        sizes = [sum(self.scalar(group[chunk]) for group in self.census.chunks) for chunk in chunks]
        return (*(chunk for chunk, size in zip(chunks, sizes, strict=True) for _ in range(size)), chunks[-1], 0)

    @cached_property
    def trained(self) -> ModelOnGrid:
        """The census of what is trained."""
        return trained(self.census)

    @cached_property
    def tied(self) -> bool:
        """Whether embedding and head are one weight on this stage, whose gradients are added."""
        both = self.grid.is_first * self.grid.is_last
        return bool(self.census.model.tied and self.scalar(both))

    @cached_property
    def copies(self) -> bool:
        """Whether autocast's 16-bit weights come and go with the tensors of blocks and head."""
        return bool(self.grid.width("cached").any()) and copies_in_events(self.census)

    @property
    def gradient_width(self) -> int:
        """Bytes of a weight's gradient as backward makes it."""
        return self.scalar(self.widths[0].gradient_width[0])

    @property
    def embedding_gradient_width(self) -> int:
        """Bytes of the embedding's gradient as backward makes it: no product adds it to a buffer."""
        narrow = self.scalar(self.grid.width("compute"))
        return narrow if self.grid.habits.persistent_gradients else self.gradient_width

    def embedding_gradient(self) -> int:
        """Bytes of the gradients of the embedding and what precedes the blocks."""
        return self.scalar(self.trained.embedding) * self.embedding_gradient_width

    def undivided_gradient(self) -> int:
        """Bytes of the embedding's gradient before it is cut into those of tensor-parallel ranks."""
        sharded = self.grid.habits.gather == "blocks" and not self.grid.habits.flat_units
        return self.scalar(Units(self.trained).undivided) if sharded and self.scalar(self.grid.zero) >= 2 else 0

    def gradients(self, phase: str = "step") -> int:
        """Bytes of all gradients that are on the GPU in a phase; those of the step stay until then."""
        return sum(self.scalar(t.bytes) for t in self.ledger.terms if t.with_weights and phase in t.phases)

    @cached_property
    def wraps_weights(self) -> bool:
        """Whether DeepSpeed runs a wrapper of fp16 without ZeRO, whose step makes an fp32 copy of each gradient."""
        grid = self.grid
        here = grid.habits.zero_optimizer is not None and not self.scalar(grid.zero)
        return here and bool(self.scalar((grid.is_mixed == 1) & ~partitions_without_zero(grid)))

    @cached_property
    def kept_gradients(self) -> int:
        """Bytes of gradients in a tensor that DeepSpeed's engine makes once, for life."""
        if self.grid.habits.zero_optimizer is None:
            return 0
        if self.scalar(in_one_buffer(self.grid)):
            return self.gradients()
        terms = (t for t in self.ledger.terms if t.with_weights and len(t.phases) == len(ALWAYS))
        return sum(self.scalar(term.bytes) for term in terms)

    @property
    def sharers(self) -> int:
        """Ranks that share each unit where its shards are on the host, else 0."""
        return self.scalar(self.grid.ranks) * ("params" in self.grid.offloads[0])

    @property
    def loaded(self) -> list[list[int]]:
        """Bytes of the weights of one block of each kind, and of embedding and head with its norm, as they load."""
        base, width = Base(self.census), self.scalar(self.grid.width("parameter"))
        compute, embedding = self.scalar(self.grid.width("compute")), self.scalar(self.census.embedding)
        blocks = {a.index: a for a in self.layers}.values()
        gathered = [(self.scalar(base.blocks[a.index]) * width // compute, weights_of(a)) for a in blocks]
        head = max(self.scalar(self.census.root) - embedding, 0)
        return [*(in_shares(*block) for block in gathered), [embedding * width, head * width]]

    def unit_sizes(self) -> list[Sizes]:
        """Bytes of each block of the stage as a unit, and of the root unit."""
        base, model = Base(self.census), self.trained
        gathered = [self.scalar(base.blocks[a.index]) for a in self.layers]
        if self.grid.fixed.float8_all_gather:
            gathered = [size // self.scalar(self.grid.width("compute")) for size in gathered]
        first = self.scalar(model.embedding) * self.split
        outside = [self.scalar(base.root) - first * self.scalar(self.grid.width("compute"))]
        experts = [self.scalar(model.block_experts[a.index]) for a in self.layers]
        dense = [self.scalar(model.block_dense[a.index]) for a in self.layers]
        units = list(zip([*gathered, *outside], [*dense, self.scalar(model.root) - first], [*experts, 0], strict=True))
        units.append((first * self.scalar(self.grid.width("compute")), first, 0))
        sizes = {unit: self._sizes_of(*unit) for unit in set(units)}
        return [sizes[unit] for unit in units]

    def _sizes_of(self, gathered: int, dense: int, experts: int) -> Sizes:
        """Of ``gathered`` bytes of weights; what is updated of them, dense or ``experts``, has ranks of its own."""
        grid, reduce_width, updated = self.grid, self.scalar(self.grid.reduce_width), dense + experts
        share = self.scalar(self.trained.sharded(np.int64(dense), np.int64(experts), where=True))
        narrowed = self.scalar(grid.width("parameter")) != self.scalar(grid.width("compute"))
        elsewhere = grid.persistent_gradients or self.gradients("backward-end") <= self.kept_gradients
        return Sizes(
            whole=gathered,
            shard_copy=narrowed * (gathered * share // updated if updated else -(-gathered // self.scalar(grid.ranks))),
            reduce_input=updated * reduce_width,
            reduced=0 if elsewhere else share * self.scalar(self.trained.width("gradient")),
            reduce_output=share * reduce_width,
        )


STEPS = 2
"""Optimizer states appear in the first step, so that the second is the first to show the peak."""
ALTERNATING = 3
"""Where gradients are flattened, they take the place of the step's before: the third is like all that follow."""


def melts(term: Term) -> bool:
    """Whether a term is there in the last block's backward and gone in the first's, and goes block by block."""
    return "backward-last" in term.phases and not {"backward-first", "backward-end"} & set(term.phases)


def weights_of(activations: GroupActivations) -> list[int]:
    """Elements of each weight of a block, in the order of the modules."""
    setting = activations.settings[0]._replace(trainable=True, lora=None, quantize="none", also_train=frozenset())
    template = activations.census.traces.get(trace, activations.group.block, setting, "none")
    gradients = [record.size.elements for record in template.records if record.kind == "gradient"]
    return gradients[::-1]


def passes(flight: int, count: int) -> Iterator[tuple[bool, int]]:
    """Micro-batches in flight first, then one backward and one forward in turn: whether it is a forward, and which.

    >>> [("F" if forward else "B") + str(index) for forward, index in passes(2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    for index in range(min(flight, count)):
        yield True, index
    for index in range(count):
        yield False, index
        if flight + index < count:
            yield True, flight + index


def storage_bytes(
    activations: GroupActivations, template: Template, scalar: Callable[[Array], int], *, observed: bool
) -> list[int]:
    """Bytes of each storage of a template on the stage whose values ``scalar`` reads."""
    width = scalar(activations.gradient_width[0])
    units = {unit: scalar(count) for unit, count in activations.units.items()}
    shards = {record.size.shard for record in template.records}
    ranks = {shard: scalar(activations.ranks(shard)) for shard in shards}
    there = {shard: scalar(activations.present(shard)) for shard in shards}
    return [
        -(-r.size.bytes * (width if r.kind == "gradient" else 1) * units[r.size.unit] // ranks[r.size.shard])
        * there[r.size.shard]
        * (r.kind != "observed" or observed)
        for r in template.records
    ]


def filled(sizes: list[int], limit: int) -> list[int]:
    """Sums of sizes in order, each of them closed by the one with which it reaches the limit.

    >>> filled([3, 4, 2, 1], 5)
    [7, 3]
    """
    out, group = list[int](), 0
    for size in sizes:
        group += size
        if group >= limit:
            out.append(group)
            group = 0
    return [*out, group] if group else out


def in_shares(total: int, shares: list[int]) -> list[int]:
    """A total in proportion to shares; the first has the rest.

    >>> in_shares(10, [1, 2])
    [4, 6]
    """
    count = sum(shares)
    sizes = [total * share // count for share in shares]
    sizes[0] += total - sum(sizes)
    return sizes
