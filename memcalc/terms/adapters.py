"""A frozen base and what is trained beside it: the census of the trained part, and the bytes of the base."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from memcalc.formulas.adapters import Quantised, block_adapters, block_quantised, outside_adapters, quantised
from memcalc.formulas.matrices import outside_matrices
from memcalc.formulas.optimizer import shard
from memcalc.grid import column
from memcalc.ledger import ALWAYS, Term
from memcalc.terms.census import Census

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.adapters import Lora

ADAPTERS = "PEFT 0.13.2 tuners/lora/layer.py (update_layer) and utils/other.py (ModulesToSaveWrapper)"
QUANTISED = "bitsandbytes 0.43.3 nn/modules.py; AutoGPTQ 0.7.1 nn_modules/qlinear/qlinear_tritonv2.py"
NONE = Quantised(0, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class AdapterCensus(Census):
    """What is trained on a rank where the base is frozen: adapters, and copies of whole layers [elements]."""

    part: Literal["all", "adapters", "copies"] = "all"

    @property
    def suffix(self) -> str:
        """What its terms are told apart by."""
        return " of the trained copies" if self.part == "copies" else ""

    @property
    def _lora(self) -> Lora | None:
        return None if self.part == "copies" else self.grid.fixed.lora

    @property
    def _copied(self) -> tuple[str, ...]:
        return () if self.part == "adapters" else self.grid.fixed.also_train

    @cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        lora = self._lora
        return [block_adapters(g.block, lora.rank, lora.targets) if lora else (0, 0) for g in self.model.groups]

    @cached_property
    def block_dense(self) -> tuple[Array, ...]:
        """Adapters of one block of each group outside the routed experts."""
        return tuple(np.int64(dense) for dense, _ in self._blocks)

    @cached_property
    def block_experts(self) -> tuple[Array, ...]:
        """Adapters of the routed experts of one block of each group."""
        return tuple(np.int64(routed) for _, routed in self._blocks)

    def _outside(self, name: str) -> int:
        """Trained beside the embedding or the head: an adapter, and a copy of the whole."""
        lora, saved = self._lora, name in self._copied
        adapter = outside_adapters(self.model, lora.rank, lora.targets, name) if lora else 0
        return adapter + saved * sum(m.elements for m in outside_matrices(self.model) if m.target == name)

    @cached_property
    def embedding(self) -> Array:
        """Trained with the embedding, by stage."""
        return self._outside("embedding") * self.grid.is_first

    @cached_property
    def head(self) -> Array:
        """Trained with the head, by stage."""
        return self._outside("head") * self.grid.is_last

    @cached_property
    def root(self) -> Array:
        """Trained outside the blocks, by stage."""
        return self.embedding + self.head

    @cached_property
    def largest_tensor(self) -> Array:
        """Elements of the largest trained tensor."""
        lora = self._lora
        widest = max(max(g.block.hidden, getattr(g.block.mlp, "ffn", 0)) for g in self.model.groups)
        saved = [m.elements for m in outside_matrices(self.model) if m.target in self._copied]
        return np.int64(max([(lora.rank if lora else 0) * widest, *saved]))

    def sharded(self, dense: Array, experts: Array, where: Array | bool) -> Array:
        """Elements on a rank; FSDP ignores fused adapters, which every rank holds in full.

        Source: fms-acceleration plugins/fused-ops-and-kernels utils.py, ``lora_adapters_switch_ddp_from_fsdp``.
        """
        if self.grid.fixed.lora_kernels == "fused" and self.grid.habits.full_shard:
            return super().sharded(dense, experts, where=False)
        return super().sharded(dense, experts, where)

    def width(self, name: str) -> Array:
        """Bytes an element of one copy of a trained parameter, by precision."""
        return np.where(self.grid.width("master") > 0, self.grid.width(name), self._own_width(name))

    def _own_width(self, name: str) -> Array:
        """Adapters have a dtype of their own, copies that of their layer (PEFT ``_cast_adapter_dtype``)."""
        if name not in TRAINED_WIDTHS:
            return np.int64(0)
        if self.part == "copies":
            return self.grid.width("compute")
        return column([4 if self.grid.fixed.adapter_dtype == "fp32" else 2 for _ in self.grid.precisions], "precision")


TRAINED_WIDTHS = ("parameter", "gradient", "moment")


def trained(census: Census) -> Census:
    """The census of what is trained: the model's own where nothing is frozen."""
    return census if census.grid.fixed.lora is None else AdapterCensus(census.model, census.grid)


def trained_parts(census: Census) -> tuple[Census, ...]:
    """The same, apart by the width in which it is trained: adapters, and copies of whole layers."""
    if census.grid.fixed.lora is None:
        return (census,)
    parts: tuple[Literal["adapters", "copies"], ...] = (
        ("adapters", "copies") if census.grid.fixed.also_train else ("adapters",)
    )
    return tuple(AdapterCensus(census.model, census.grid, part) for part in parts)


@dataclass(frozen=True, eq=False)
class Base:
    """The bytes of the frozen weights of a rank."""

    census: Census

    @cached_property
    def grid(self) -> Grid:
        """The grid of the census."""
        return self.census.grid

    @cached_property
    def width(self) -> Array:
        """Bytes of a frozen weight that is not quantised: 16 bits where compute has 16 bits."""
        return self.grid.width("compute")

    def _quantised(self, index: int) -> Quantised:
        fixed = self.grid.fixed
        if fixed.quantize == "none":
            return NONE
        return block_quantised(self.census.model.groups[index].block, fixed.quantize, fixed.gptq_group)

    def _head(self) -> Quantised:
        fixed, model = self.grid.fixed, self.census.model
        if fixed.quantize == "none" or not self.grid.habits.quantised_head or model.tied:
            return NONE
        return quantised([m for m in outside_matrices(model) if m.target == "head"], fixed.quantize, fixed.gptq_group)

    @cached_property
    def blocks(self) -> tuple[Array, ...]:
        """Bytes of one block of each group, the scales of quantised weights left out."""
        pairs = zip(self.census.block_dense, self.census.block_experts, strict=True)
        found = [(self._quantised(i), dense + experts) for i, (dense, experts) in enumerate(pairs)]
        return tuple(q.payload + self.width * (elements - q.elements) for q, elements in found)

    @cached_property
    def root(self) -> Array:
        """Bytes of what stands outside the blocks, by stage."""
        head = self._head()
        rest = self.census.root - head.elements * self.grid.is_last
        return self.width * rest + head.payload * self.grid.is_last

    @cached_property
    def state(self) -> Array:
        """Scales of quantised weights, which are no parameters and so are whole on every rank [bytes]."""
        counts = zip(self.census.layers, self.census.model.groups, strict=True)
        inside = sum((n * self._quantised(i).state for i, (n, _) in enumerate(counts)), np.int64(0))
        return inside + self._head().state * self.grid.is_last

    @cached_property
    def largest_block(self) -> Array:
        """Bytes of the largest block."""
        return np.maximum.reduce(np.broadcast_arrays(*self.blocks))

    @cached_property
    def all_blocks(self) -> Array:
        """Bytes of the stage's blocks."""
        return sum((n * b for n, b in zip(self.census.layers, self.blocks, strict=True)), np.int64(0))


def scales_term(census: Census) -> Term:
    """The scales of NF4, which are no parameters: neither sharded nor offloaded with them."""
    return Term("parameters", "scales of the frozen weights", Base(census).state, ALWAYS, "not sharded", QUANTISED)


def frozen_terms(census: Census, ranks: Array, here: Array) -> Iterator[Term]:
    """The weights under adapters: the base without its scales, and the adapters; ``ranks`` divide both."""
    base = Base(census)
    inputs = {"P": census.parameters, "w": base.width, "N": ranks}
    whole = shard(base.all_blocks + base.root, ranks) * here
    quantised_as = census.grid.fixed.quantize
    title = "frozen weights" if quantised_as == "none" else f"frozen weights, {quantised_as}"
    yield Term("parameters", title, whole, ALWAYS, "bytes of the base / N", QUANTISED, inputs)
    for own in trained_parts(census):
        width = own.width("parameter")
        bytes_ = width * own.sharded(own.blocks + own.root, own.experts_or_none, ranks > 1) * here
        inputs = {"w": width, "P_trained": own.parameters, "N": ranks}
        title = f"weights{own.suffix}" if own.suffix else "adapters"
        yield Term("parameters", title, bytes_, ALWAYS, "w · ⌈P_trained / N⌉", ADAPTERS, inputs)
