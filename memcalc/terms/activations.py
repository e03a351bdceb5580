"""What one block keeps for backward, and the working sets of its forward and backward, over a grid."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.activations import saved_bytes
from memcalc.formulas.recompute import Counts, Policy, counts
from memcalc.grid import column
from memcalc.terms import shards
from memcalc.terms.adapters import AdapterCensus
from memcalc.terms.first_block import spared
from memcalc.terms.lengths import alike
from memcalc.terms.pipeline import blocks_in_flight
from memcalc.terms.settings import block_settings, gathering
from memcalc.trace.template import Sum, Template, trace

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.model import BlockGroup, Model
    from memcalc.terms.census import Census
    from memcalc.trace.layers import Setting
    from memcalc.trace.tape import Shard, Unit

MASK_FILL, ROW_FILL = 16, 32
"""Multiples of keys and of rows in the memory-efficient kernel (PyTorch 2.13 attention.cpp, ``preprocess_mask``, and
cuda/attention.cu, ``kAlignLSE``)."""


@dataclass(frozen=True, eq=False)
class GroupActivations:
    """Activations of one group of equal blocks over a grid."""

    group: BlockGroup
    layers: Array
    census: Census

    def is_of(self, model: Model, grid: Grid) -> bool:
        """Whether these are blocks of that model on that grid."""
        return self.census.model is model and self.grid == grid and self.grid.rows == grid.rows

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
        return self.grid.tokens if fixed is None else self.grid.micro_batch * -(-fixed // self.grid.degree("cp"))

    @cached_property
    def keys(self) -> Array:
        """Keys that a token attends to."""
        return self._length_of(self.group.tower)

    def _length_of(self, tower: str) -> Array:
        fixed = self.census.model.fixed_tokens.get(tower)
        return self.grid.seq_len if fixed is None else np.int64(fixed)

    @cached_property
    def units(self) -> dict[Unit, Array]:
        """How many of each unit a micro-batch has on a rank."""
        keys, cross_keys = self.keys, self._length_of("encoder")
        queries = -(-keys // self.grid.degree("cp"))
        return {
            "token": self.tokens,
            "pair": self.tokens * keys,
            "filled_pair": self.tokens * filled(keys, MASK_FILL),
            "cross": self._tokens_of("encoder"),
            "cross_pair": self.tokens * cross_keys,
            "square": keys * queries,
            "filled_square": filled(keys, MASK_FILL) * queries,
            "filled_cross": filled(cross_keys, MASK_FILL) * queries * (cross_keys % MASK_FILL != 0),
            "even_cross": cross_keys * queries * (cross_keys % MASK_FILL == 0),
            "filled_token": self.grid.micro_batch * filled(queries, ROW_FILL),
            "row": queries,
            "sample": self.grid.micro_batch,
            "routed": shards.routed_rows(self.tokens, self.group.block),
            "once": np.int64(1),
        }

    def ranks(self, shard: Shard) -> Array:
        """What divides a tensor."""
        if shard not in self._ranks:
            self._ranks[shard] = shards.ranks(self.grid, shard)
        return self._ranks[shard]

    @cached_property
    def _ranks(self) -> dict[Shard, Array]:
        return {}

    def present(self, shard: Shard) -> Array:
        """1 where a tensor exists."""
        return shards.present(self.grid, shard, self.group.block)

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

    @cached_property
    def _products(self) -> dict[tuple[Unit, Shard, int], Array]:
        """Bytes of tensors of one unit and shard, computed once: the sums of a block share most of them."""
        return {}

    def _product(self, unit: Unit, shard: Shard, coefficient: int) -> Array:
        whole = saved_bytes(np.int64(coefficient), self.units[unit], np.int64(1), self.ranks(shard))
        return whole * self.present(shard)

    def largest(self, sums: Sequence[Sum], gradient: Array) -> Array:
        """The largest of several sums [bytes]."""
        return largest([self.evaluate(total, gradient) for total in sums])

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """How these blocks run, by precision."""
        window = self.group.block.attention.window
        long = window is not None and alike(self.keys >= window)
        return tuple(replace(setting, windowed=long) for setting in block_settings(self.grid))

    def template(self, policy: Policy, setting: Setting, *, whole: bool = False) -> Template:
        """One block's execution under a policy, or (``whole``) where the policy leaves a block alone."""
        parts, treatment = (setting.checkpointed, "none") if whole else (policy.parts, policy.treatment)
        key = setting, parts, treatment
        if key not in self._templates:
            setting = setting if parts == setting.checkpointed else replace(setting, checkpointed=parts)
            self._templates[key] = trace(self.group.block, setting, treatment)
        return self._templates[key]

    @cached_property
    def _templates(self) -> dict[tuple[Setting, frozenset[str], str], Template]:
        return {}

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
        if self.grid.fixed.lora is not None:
            return [np.int64(w) for w in AdapterCensus(self.census.model, self.grid).width("gradient").reshape(-1)]
        widths = [habits.widths[p] for p in self.grid.precisions]
        narrow = habits.gather == "blocks" or habits.persistent_gradients
        return [np.int64(w.compute if narrow else w.gradient) for w in widths]

    @cached_property
    def alone(self) -> GroupActivations | None:
        """The same blocks over the ways of sharding them, where layouts have some in common."""
        if len(self.grid.layouts) == 1 or self.grid.ways.layouts == self.grid.layouts:
            return None
        model = self.census.model
        place = next(i for i, group in enumerate(model.groups) if group is self.group)
        return _known(_ALONE, type(self.census)(model, self.grid.ways))[place]

    @cached_property
    def _sums(self) -> dict[tuple[str, bool], Array]:
        return {}

    def over(self, sums: str, *, whole: bool = False) -> Array:
        """A sum of the template, or the largest of its sums, over precision and policy [bytes]."""
        if (sums, whole) not in self._sums and self.alone is not None:
            found = self.alone.over(sums, whole=whole)
            self._sums[sums, whole] = found if len(found) == 1 else found[self.grid.way]
        elif (sums, whole) not in self._sums:
            plain, gathers = self._over(sums, self.settings, whole=whole), gathering(self.grid)
            if gathers is not None:
                plain = np.where(self.grid.sequence_shard > 1, self._over(sums, gathers, whole=whole), plain)
            self._sums[sums, whole] = plain
        return self._sums[sums, whole]

    def _over(self, sums: str, settings: tuple[Setting, ...], *, whole: bool) -> Array:
        """The same under some settings, one a precision; blocks that are left alone do not depend on the policy."""
        policies = self.grid.policies[:1] if whole else self.grid.policies
        rows: dict[tuple[Setting, int], list[Array]] = {}
        for setting, width in zip(settings, self.gradient_width, strict=True):
            if (setting, int(width)) not in rows:
                rows[setting, int(width)] = self._row(sums, setting, width, policies, whole=whole)
        return self.stacked([rows[setting, int(w)] for setting, w in zip(settings, self.gradient_width, strict=True)])

    def _row(
        self, sums: str, setting: Setting, width: Array, policies: tuple[Policy, ...], *, whole: bool
    ) -> list[Array]:
        """The same under one setting, by policy: many policies treat a block alike."""
        alike = {(policy.treatment, policy.parts): policy for policy in policies}
        found = {
            treatment: self._of(getattr(self.template(policy, setting, whole=whole), sums), width)
            for treatment, policy in alike.items()
        }
        return [found[policy.treatment, policy.parts] for policy in policies]

    def _of(self, value: Sum | tuple[Sum, ...], width: Array) -> Array:
        return self.evaluate(value, width) if isinstance(value, dict) else self.largest(value, width)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """How each policy of the grid treats these blocks."""
        return tuple(counts(policy, self.layers) for policy in self.grid.policies)

    def field(self, name: str) -> Array:
        """One field of the counts along the recompute axis."""
        if name not in self._fields:
            each = [np.broadcast_to(getattr(c, name), self.layers.shape) for c in self.counts]
            self._fields[name] = np.concatenate(each, axis=3)
        return self._fields[name]

    @cached_property
    def _fields(self) -> dict[str, Array]:
        return {}

    @cached_property
    def whole_block(self) -> Array:
        """Bytes that one block keeps without recomputation, for one micro-batch."""
        return self.over("kept_sum", whole=True)

    @cached_property
    def treated_block(self) -> Array:
        """Bytes that one block keeps where the policy treats it."""
        return self.over("kept_sum")

    @cached_property
    def kept(self) -> Array:
        """Bytes that the stage's blocks keep for one micro-batch."""
        kept = self.field("whole") * self.whole_block + self.field("treated") * self.treated_block
        return kept - spared(self)

    @cached_property
    def flight(self) -> tuple[Array, Array]:
        """Blocks in flight and blocks of the stage: what one micro-batch keeps is held as often as their ratio."""
        return blocks_in_flight(self), np.maximum(self.layers, 1)

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
        return np.maximum(self.field("unit") - 1, 0) * self.whole_block

    @cached_property
    def last(self) -> Array:
        """Bytes that the last block's backward holds beyond what all blocks keep."""
        treated = self.over("backward_peaks") - self.treated_block + self.unit_extra
        if not np.any(self.is_treated == 0):
            return treated * self.exists
        whole = self.over("backward_peaks", whole=True) - self.whole_block
        return np.where(self.is_treated == 1, treated, whole) * self.exists

    @cached_property
    def first(self) -> Array:
        """Bytes of the first block's backward, when no other block keeps anything."""
        treated = self.over("backward_peaks") + self.unit_extra
        untreated = self.field("treated") == 0
        if not np.any(untreated):
            return treated * self.exists
        return np.where(untreated, self.over("backward_peaks", whole=True), treated) * self.exists

    @cached_property
    def forward(self) -> Array:
        """Bytes that the last block's forward holds beyond what all blocks keep."""
        treated = self.over("forward_peaks") - self.treated_block
        if not np.any(self.is_treated == 0):
            return treated * self.exists
        whole = self.over("forward_peaks", whole=True) - self.whole_block
        return np.where(self.is_treated == 1, treated, whole) * self.exists

    @cached_property
    def keeps_weights(self) -> Array:
        """1 along the recompute axis where a treated block keeps its 16-bit weight copies: only parts run again."""
        return column([policy.kind == "parts" for policy in self.grid.policies], "recompute")

    @cached_property
    def exists(self) -> Array:
        """1 where the stage has such a block."""
        return np.minimum(self.layers, 1)


def filled(length: Array | int, multiple: int) -> Array:
    """The length up to the next multiple."""
    return np.asarray(-(-length // multiple) * multiple, dtype=np.int64)


def full(value: Array) -> Array:
    """A scalar with all axes of a grid."""
    return np.asarray(value).reshape((1,) * 7) if np.ndim(value) == 0 else value


def largest(arrays: Sequence[Array]) -> Array:
    """Element by element maximum of broadcastable arrays."""
    top = arrays[0]
    for array in arrays[1:]:
        top = np.maximum(top, array)
    return top


def add_all(arrays: Sequence[Array]) -> Array:
    """Sum of broadcastable arrays."""
    total: Array = np.int64(0)
    for array in arrays:
        total = total + array
    return total


_LATEST: deque[list[GroupActivations]] = deque(maxlen=2)
_ALONE: deque[list[GroupActivations]] = deque(maxlen=1)


@lru_cache(maxsize=4)
def groups_of(census: Census) -> list[GroupActivations]:
    """The activations of each group of blocks, computed once for grids that differ in what is offloaded alone.

    A block's own tensors do not depend on that.
    """
    return _known(_LATEST, type(census)(census.model, census.grid.with_offloads(((),))))


def _known(latest: deque[list[GroupActivations]], census: Census) -> list[GroupActivations]:
    """The groups of a census, if they are among the latest, else new ones."""
    known = next((groups for groups in latest if groups[0].is_of(census.model, census.grid)), None)
    if known is None:
        known = [GroupActivations(g, n, census) for g, n in zip(census.model.groups, census.layers, strict=True)]
        latest.append(known)
    return known
