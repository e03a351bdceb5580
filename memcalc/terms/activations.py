"""What one block keeps for backward, and the working sets of its forward and backward, over a grid."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, cast

import numpy as np

from memcalc.formulas.activations import saved_bytes
from memcalc.formulas.recompute import Counts, Policy, counts_of_chunks
from memcalc.terms import model_on_grid
from memcalc.terms.adapters import AdaptersOnGrid
from memcalc.terms.model_on_grid import BlockCache
from memcalc.terms.order import Stack, ahead, behind, checkpoints_need_gradients, from_first, from_start, spared_records
from memcalc.terms.pipeline import adds_at_once, blocks_in_flight
from memcalc.terms.settings import alike
from memcalc.trace.template import Template, trace
from memcalc.trace.working_sets import Sum, total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.model import BlockGroup
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.tape import Shard, Unit

MASK_FILL, ROW_FILL, SCAN_CHUNK = 16, 32, 2048
"""Multiples of keys and of rows in the memory-efficient kernel (PyTorch 2.13 attention.cpp, ``preprocess_mask``, and
cuda/attention.cu, ``kAlignLSE``)."""


@dataclass(eq=False)
class GroupActivations:
    """Activations of one group of equal blocks over a grid; what is computed once is kept as long as this is."""

    group: BlockGroup
    index: int
    """Place of the group among the model's."""
    layers: Array
    """Blocks of the group on each stage."""
    census: ModelOnGrid
    groups: list[GroupActivations]
    """Those of all groups of the model."""
    _ranks: dict[Shard, Array] = field(default_factory=dict, init=False, repr=False)
    _products: dict[tuple[Unit, Shard, int], Array] = field(default_factory=dict, init=False, repr=False)
    """Bytes of tensors of one unit and shard: the sums of a block share most of them."""
    _templates: dict[tuple[object, ...], Template] = field(default_factory=dict, init=False, repr=False)
    _sums: dict[tuple[str, bool], Array] = field(default_factory=dict, init=False, repr=False)
    _fields: dict[str, Array] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def grid(self) -> Grid:
        """The grid of the census."""
        return self.census.grid

    @cached_property
    def tokens(self) -> Array:
        """Tokens of a micro-batch that pass these blocks on a rank."""
        return self._tokens_of(self.group.tower)

    def _tokens_of(self, tower: str) -> Array:
        fixed = self.census.model.fixed_tokens.get(tower)
        return self.grid.tokens if fixed is None else self._samples_of(tower) * -(-fixed // self.grid.degree("cp"))

    def _samples_of(self, tower: str) -> Array:
        """Sequences of a micro-batch, or the views of their images."""
        return self.grid.micro_batch * (self.census.model.views if tower == "vision" else 1)

    @cached_property
    def keys(self) -> Array:
        """Keys that a token attends to."""
        spec = self.group.block.attention
        length = self._length_of(self.group.tower)
        if spec is None:
            return length
        if spec.joins_batch:
            return self.tokens
        return length if spec.chunk is None else np.minimum(length, spec.chunk)

    def _length_of(self, tower: str) -> Array:
        fixed = self.census.model.fixed_tokens.get(tower)
        return self.grid.seq_len if fixed is None else np.int64(fixed)

    @cached_property
    def units(self) -> dict[Unit, Array]:
        """How many of each unit a micro-batch has on a rank."""
        keys, cross_keys = self.keys, self._length_of("encoder")
        samples = self._samples_of(self.group.tower)
        joins = self.group.block.attention is not None and self.group.block.attention.joins_batch
        queries = -(-(keys if joins else self._length_of(self.group.tower)) // self.grid.degree("cp"))
        return {
            "token": self.tokens,
            "pair": self.tokens * keys,
            "sink_pair": self.tokens * (keys + 1),
            "filled_pair": self.tokens * filled(keys, MASK_FILL),
            "cross": self._tokens_of("encoder"),
            "cross_pair": self.tokens * cross_keys,
            "square": keys * queries,
            "filled_square": filled(keys, MASK_FILL) * queries,
            "filled_cross": filled(cross_keys, MASK_FILL) * queries * (cross_keys % MASK_FILL != 0),
            "even_cross": cross_keys * queries * (cross_keys % MASK_FILL == 0),
            "filled_token": (1 if joins else samples) * filled(queries, ROW_FILL),
            "convolved": self.tokens + samples * (self.group.block.mixer.taps - 1 if self.group.block.mixer else 0),
            "scan_chunk": samples * -(-queries // SCAN_CHUNK),
            "row": queries,
            "sample": samples,
            "image": self.grid.micro_batch * self.census.model.image_tokens,
            "routed": model_on_grid.routed_rows(self.tokens, self.group.block, self.grid.fixed.expert_overload),
            "once": np.int64(1),
        }

    def ranks(self, shard: Shard) -> Array:
        """What divides a tensor."""
        if shard not in self._ranks:
            self._ranks[shard] = model_on_grid.ranks(self.grid, shard)
        return self._ranks[shard]

    def present(self, shard: Shard) -> Array:
        """1 where a tensor exists."""
        return model_on_grid.present(self.grid, shard, self.group.block)

    def evaluate(self, total: Sum, gradient: Array) -> Array:
        """Bytes of a sum of tensors; ``gradient`` is the width of a weight's gradient."""
        out: Array = np.int64(0)
        products = self._products
        for (unit, shard, is_gradient), coefficient in total.items():
            key = unit, shard, int(coefficient * gradient) if is_gradient else coefficient
            product = products.get(key)
            if product is None:
                product = products[key] = self._product(*key)
            out = out + product
        return out

    def _product(self, unit: Unit, shard: Shard, coefficient: int) -> Array:
        bytes_ = saved_bytes(np.int64(coefficient), self.units[unit], np.int64(1), self.ranks(shard))
        return bytes_ * self.present(shard)

    def largest(self, sums: Sequence[Sum], gradient: Array) -> Array:
        """The largest of several sums [bytes]."""
        return largest([self.evaluate(total, gradient) for total in sums])

    @cached_property
    def settings(self) -> tuple[BlockConfig, ...]:
        """How these blocks run, by precision."""
        window = self.group.block.attention.window if self.group.block.attention is not None else None
        long = window is not None and alike(self.keys >= window)
        settings = tuple(setting._replace(windowed=long) for setting in self.census.settings)
        return tuple(s._replace(trainable=False, lora=None) for s in settings) if self.is_frozen else settings

    @cached_property
    def is_frozen(self) -> bool:
        """Whether these are blocks of a vision tower that is not trained."""
        return self.group.tower == "vision" and self.grid.fixed.vision != "trained"

    def template(
        self, policy: Policy, setting: BlockConfig, *, untreated: bool = False, copies: bool = False
    ) -> Template:
        """One block's execution under a policy, or where the policy leaves a block alone (``untreated``).

        ``copies`` says whether autocast's 16-bit weights are among its tensors.
        """
        parts, treatment = (setting.checkpointed, "none") if untreated else (policy.parts, policy.treatment)
        referred = untreated and self.group.block.shares_keys and policy.treatment == "full"
        key = setting, parts, treatment, copies, referred
        if key not in self._templates:
            setting = setting if parts == setting.checkpointed else setting._replace(checkpointed=parts)
            more = {name: True for name, on in (("copies", copies), ("referred", referred)) if on}
            if self.is_frozen and not checkpoints_need_gradients(self.grid, treatment):
                more["wanted"] = False
            self._templates[key] = self.census.traces.get(trace, self.group.block, setting, treatment, **more)
        return self._templates[key]

    def stacked(self, value: list[list[Array]]) -> Array:
        """Values by precision and policy, as an array over the grid's axes."""
        rows = [np.concatenate(np.broadcast_arrays(*(full(v) for v in row)), axis=3) for row in value]
        return np.concatenate(np.broadcast_arrays(*rows), axis=2)

    @cached_property
    def gradient_width(self) -> list[Array]:
        """Bytes of a weight's gradient while its block runs, by precision; none where matmuls add to the buffer."""
        habits = self.grid.habits
        if habits.persistent_gradients and self.grid.fixed.wgrad_fusion:
            return [np.int64(0) for _ in self.grid.precisions]
        if self.grid.fixed.adapters is not None:
            return [np.int64(w) for w in AdaptersOnGrid(self.census.model, self.grid).width("gradient").reshape(-1)]
        widths = [habits.widths[p] for p in self.grid.precisions]
        narrow = habits.gather == "blocks" or habits.persistent_gradients
        return [np.int64(w.compute if narrow else w.gradient) for w in widths]

    @cached_property
    def alone(self) -> GroupActivations | None:
        """The same blocks over the ways of sharding them, where layouts have some in common."""
        if len(self.grid.layouts) == 1 or self.grid.ways.layouts == self.grid.layouts:
            return None
        by_sharding = self.census.blocks_cache.by_sharding
        if not by_sharding:
            by_sharding += groups_of(replace(self.census, grid=self.grid.ways, blocks_cache=BlockCache()))
        return cast("GroupActivations", by_sharding[self.index])

    @cached_property
    def stack(self) -> Stack[GroupActivations] | None:
        """The groups whose blocks run in one loop with these; None where there are no others."""
        indices = next(indices for indices in self.census.stacks if self.index in indices)
        if self.index > indices[0]:
            return self.groups[indices[0]].stack
        return Stack([self.groups[index] for index in indices], self.census) if len(indices) > 1 else None

    def over(self, sums: str, *, untreated: bool = False) -> Array:
        """A sum of the template, or the largest of its sums, over precision and policy [bytes]."""
        if (sums, untreated) not in self._sums and self.alone is not None:
            values = self.alone.over(sums, untreated=untreated)
            self._sums[sums, untreated] = values if len(values) == 1 else values[self.grid.way]
        elif (sums, untreated) not in self._sums:
            plain, gathers = self._over(sums, self.settings, untreated=untreated), self.census.gathering_settings
            if gathers is not None:
                plain = np.where(self.grid.sequence_shard > 1, self._over(sums, gathers, untreated=untreated), plain)
            self._sums[sums, untreated] = plain
        return self._sums[sums, untreated]

    def backward(self, *, untreated: bool = False) -> Array:
        """The largest working set of a block's backward [bytes]."""
        if ("backward", untreated) not in self._sums:
            peaks, adds = self.over("backward_peaks", untreated=untreated), adds_at_once(self.grid)
            added = np.where(adds, self.over("added_peaks", untreated=untreated), peaks) if np.any(adds) else peaks
            self._sums["backward", untreated] = added
        return self._sums["backward", untreated]

    def _over(self, sums: str, settings: tuple[BlockConfig, ...], *, untreated: bool) -> Array:
        """The same under some settings, one a precision; blocks that are left alone do not depend on the policy."""
        policies = self.grid.policies[: 1 if untreated and not self.group.block.shares_keys else None]
        rows: dict[tuple[BlockConfig, int], list[Array]] = {}
        for setting, width in zip(settings, self.gradient_width, strict=True):
            if (setting, int(width)) not in rows:
                rows[setting, int(width)] = self._row(sums, setting, width, policies, untreated=untreated)
        return self.stacked([rows[setting, int(w)] for setting, w in zip(settings, self.gradient_width, strict=True)])

    def _row(
        self, sums: str, setting: BlockConfig, width: Array, policies: tuple[Policy, ...], *, untreated: bool
    ) -> list[Array]:
        """The same under one setting, by policy: many policies treat a block alike."""
        alike = {(policy.treatment, policy.parts): policy for policy in policies}
        values = {
            treatment: self._of(getattr(self.template(policy, setting, untreated=untreated), sums), width)
            for treatment, policy in alike.items()
        }
        return [values[policy.treatment, policy.parts] for policy in policies]

    def _of(self, value: Sum | tuple[Sum, ...], width: Array) -> Array:
        return self.evaluate(value, width) if isinstance(value, dict) else self.largest(value, width)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """How each policy of the grid treats these blocks."""
        if self.stack is not None:
            return self.stack.counts(self)
        chunks = self.census.chunks[self.index]
        return tuple(counts_of_chunks(policy, chunks) for policy in self.grid.policies)

    def field(self, name: str) -> Array:
        """One field of the counts along the recompute axis."""
        if name not in self._fields:
            each = [np.broadcast_to(getattr(c, name), self.layers.shape) for c in self.counts]
            self._fields[name] = np.concatenate(each, axis=3)
        return self._fields[name]

    @cached_property
    def whole_block(self) -> Array:
        """Bytes that one block keeps without recomputation, for one micro-batch."""
        return self.over("kept_sum", untreated=True)

    @cached_property
    def treated_block(self) -> Array:
        """Bytes that one block keeps where the policy treats it."""
        return self.over("kept_sum")

    @cached_property
    def kept(self) -> Array:
        """Bytes that the stage's blocks keep for one micro-batch."""
        return self.field("whole") * self.whole_block + self.field("treated") * self.treated_block - self._spared

    @property
    def _spared(self) -> Array:
        """Bytes that the stage's first block does not keep, by precision and policy."""
        of = partial(spared_records, self.census, self.index)
        records = [[of(setting, policy) for policy in self.grid.policies] for setting in self.settings]
        if not any(map(any, records)):
            return np.int64(0)
        sizes = [[self.evaluate(total(each), np.int64(0)) for each in row] for row in records]
        return self.stacked(sizes) * self.grid.is_first

    @cached_property
    def flight(self) -> tuple[Array, Array]:
        """Blocks in flight and blocks of the stage: what one micro-batch keeps is held as often as their ratio."""
        return blocks_in_flight(self.census, self.index), np.maximum(self.layers, 1)

    @cached_property
    def kept_in_flight(self) -> Array:
        """Bytes that the stage's blocks keep for all micro-batches in flight."""
        return self.kept * self.flight[0] // self.flight[1]

    @cached_property
    def is_treated(self) -> Array:
        """1 where the policy treats the block whose backward runs first."""
        return np.minimum(self.field("unit"), 1)

    @cached_property
    def unit_extra(self) -> Array:
        """Bytes of the other blocks of a unit that is computed again at once."""
        return self.stack.unit_extra(self) if self.stack else np.maximum(self.field("unit") - 1, 0) * self.whole_block

    @cached_property
    def last(self) -> Array:
        """Bytes that the last block's backward holds beyond what all blocks keep."""
        treated = self.backward() - self.treated_block + self.unit_extra
        if not np.any(self.is_treated == 0):
            return treated * self.exists
        untreated = self.backward(untreated=True) - self.whole_block
        return np.where(self.is_treated == 1, treated, untreated) * self.exists

    @cached_property
    def first(self) -> Array:
        """Bytes of the first block's backward, when no other block keeps anything."""
        treated = self.backward() + self.unit_extra
        untreated = (self.field("treated") == 0) & (self.field("recomputed") == 0)
        if not np.any(untreated):
            return treated * self.exists
        return np.where(untreated, self.backward(untreated=True), treated) * self.exists

    @cached_property
    def forward(self) -> Array:
        """Bytes that the last block's forward holds beyond what all blocks keep."""
        treated = self.over("forward_peaks") - self.treated_block
        if not np.any(self.is_treated == 0):
            return treated * self.exists
        untreated = self.over("forward_peaks", untreated=True) - self.whole_block
        return np.where(self.is_treated == 1, treated, untreated) * self.exists

    def in_order(self, here: Array) -> tuple[Array, Array, Array]:
        """The three of them beyond what stands before it (forward, last block) or comes after it (first block).

        Of several kinds of blocks only one stands last, or first: where the last one of another kind runs, those behind
        it keep nothing yet, or nothing any more and have left gradients; where its first one runs backward, those
        before it keep what they do (``here``: 1, and 0 where that is on the host), and have no gradients yet.
        """
        if (stack := self.stack) is None:
            return self.forward, self.last, self.first
        last = self.last - stack.left(behind(self.index), here)
        return self.forward - stack.kept(behind(self.index)) * here, last, self.first_in_order(stack, here)

    def first_in_order(self, stack: Stack[GroupActivations], here: Array) -> Array:
        """The third of them, of several kinds of blocks."""
        before = [stack.left(ahead(self.index, skipped), here) for skipped in (0, 1)]
        # Memory falls or rises by as much with each pattern: its first or its last block of a kind needs most
        most = (stack.left(from_first(self.index), here) <= 0) | (stack.number(self, from_start(0, 1)) == 1)
        return (self.first + np.where(first_apart(self.grid), before[1], before[0])) * most

    @cached_property
    def exists(self) -> Array:
        """1 where the stage has such a block."""
        return np.minimum(self.layers, 1)


def first_apart(grid: Grid) -> Array:
    """Whether what the first block keeps is counted of its own accord (:func:`memcalc.terms.fsdp2.reduction_terms`)."""
    return grid.zero_from(2) & (grid.habits.gather == "blocks") & (not grid.habits.flat_units)


def filled(length: Array | int, multiple: int) -> Array:
    """The length up to the next multiple."""
    return np.asarray(-(-length // multiple) * multiple, dtype=np.int64)


def full(value: Array) -> Array:
    """A scalar with all axes of a grid."""
    return np.asarray(value).reshape((1,) * 7) if np.ndim(value) == 0 else value


def largest(arrays: Sequence[Array]) -> Array:
    """Element by element maximum of broadcastable arrays."""
    return reduce(np.maximum, arrays)


def add_all(arrays: Sequence[Array]) -> Array:
    """Sum of broadcastable arrays."""
    return reduce(np.add, arrays, np.int64(0))


def groups_of(census: ModelOnGrid) -> list[GroupActivations]:
    """The activations of each group of blocks, computed once for grids that differ in what is offloaded alone."""
    groups: list[GroupActivations] = census.blocks_cache.groups
    if not groups:
        resident = census.with_offloads(((),))
        for index, (group, layers) in enumerate(zip(census.model.groups, resident.layers, strict=True)):
            groups.append(GroupActivations(group, index, layers, resident, groups))
    return groups
