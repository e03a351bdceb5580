"""A frozen base and what is trained beside it: the census of the trained part, and the bytes of the base."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.formulas.parameters import lora_parameters
from memcalc.grid import column
from memcalc.ledger import ALWAYS, Term
from memcalc.specs.adapters import rank_on_stack
from memcalc.specs.block import MixtureOfExperts
from memcalc.terms.adapted_layers import (
    NONE,
    SOURCE,
    Quantised,
    active_parameters,
    block_parameters,
    block_quantised,
    quantised,
)
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.parameters import BlockCount, ParameterCount, model_count
from memcalc.terms.tensors import Matrix, linear_layers, outside_matrices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.adapters import Lora
    from memcalc.specs.block import Block
    from memcalc.specs.model import Model

ADAPTERS = "PEFT 0.13.2 tuners/lora/layer.py (update_layer) and utils/other.py (ModulesToSaveWrapper)"


@dataclass(frozen=True, slots=True)
class Pair:
    """Equal adapters: A is ``rank`` by ``inputs``, and B is ``outputs`` by ``rank``."""

    rank: int
    inputs: int
    outputs: int
    count: int = 1
    routed: bool = False
    """Of the routed experts."""
    stack: int = 0
    """Experts whose stacked weights they are on, as ranks of one pair; 0 on linear layers."""

    @property
    def magnitudes(self) -> int:
        """Numbers that DoRA has beside all of them, one for each output [elements]."""
        return self.count * self.outputs

    @property
    def parameters(self) -> int:
        """Of all of them [elements]."""
        return self.count * int(lora_parameters(self.rank, self.inputs, self.outputs))


def adapter_pairs(matrices: Iterable[Matrix], rank: int, targets: Iterable[str], *, split: bool = True) -> list[Pair]:
    """Return the adapters on the matrices that the targets name, or with ``split`` on layers packed in them."""
    named, linears = set(targets), list(matrices)
    full = [(m, m.outputs) for m in linears if m.target in named]
    parts = [(m, outputs) for m in linears for target, outputs in m.parts if target in named and split]
    return [Pair(rank, m.inputs, outputs, m.count, m.routed) for m, outputs in (*full, *parts)]


@lru_cache(maxsize=256)
def block_pairs(
    block: Block, rank: int, targets: tuple[str, ...], *, stacked: bool = False, split: bool = True
) -> tuple[Pair, ...]:
    """Return the adapters of one block, those on stacked experts at the end."""
    listed = adapter_pairs(linear_layers(block, stacked=stacked), rank, targets, split=split)
    return (*listed, *_on_stacks(block, rank, targets))


def _on_stacks(block: Block, rank: int, targets: tuple[str, ...]) -> Iterator[Pair]:
    """Each expert's adapters side by side, as PEFT keeps them (0.21 tuners/lora/layer.py, ``ParamWrapper``)."""
    mixture = block.mlp
    if not isinstance(mixture, MixtureOfExperts):
        return
    inner = (1 + mixture.gated) * mixture.ffn
    for down, inputs, outputs in ((False, block.hidden, inner), (True, mixture.ffn, block.hidden)):
        ranks = mixture.experts * rank_on_stack(rank, targets, down=down)
        if ranks:
            yield Pair(ranks, inputs, outputs, routed=True, stack=mixture.experts)


@lru_cache(maxsize=256)
def block_adapters(
    block: Block, rank: int, targets: tuple[str, ...], *, stacked: bool = False, split: bool = True
) -> tuple[int, int]:
    """Return the adapters' parameters of one block: outside the routed experts, and in them [elements]."""
    pairs = block_pairs(block, rank, targets, stacked=stacked, split=split)
    dense, routed = (sum(pair.parameters for pair in pairs if pair.routed is inside) for inside in (False, True))
    return dense, routed


def active_adapters(model: Model, lora: Lora, *, stacked: bool, classes: str = "") -> int:
    """Return the adapters' parameters that one token passes [elements]; ``classes`` are those beside Megatron-LM's."""
    if classes:
        return sum(group.count * active_parameters(group.block, lora) for group in model.groups)
    inside = sum(group.count * _active(group.block, lora, stacked=stacked) for group in model.groups)
    ends = sum(outside_adapters(model, lora.rank, lora.targets, name) for name in ("embedding", "head"))
    return inside + ends


def _active(block: Block, lora: Lora, *, stacked: bool) -> int:
    dense, routed = block_adapters(block, lora.rank, lora.targets, stacked=stacked)
    experts = block.mlp if isinstance(block.mlp, MixtureOfExperts) else None
    return dense + (routed * experts.topk // experts.experts if experts else 0)


def outside_adapters(model: Model, rank: int, targets: Iterable[str], name: str) -> int:
    """Return the adapter's parameters of the ``embedding`` or the ``head`` [elements]."""
    return sum(pair.parameters for pair in adapter_pairs(outside_matrices(model), rank, {name} & set(targets)))


@dataclass(frozen=True, eq=False)
class AdaptersOnGrid(ModelOnGrid):
    """What is trained on a rank where the base is frozen: adapters, and copies of whole layers [elements]."""

    part: Literal["all", "adapters", "copies"] = "all"

    @property
    def suffix(self) -> str:
        """What its terms are told apart by."""
        return " of the trained copies" if self.part == "copies" else ""

    @property
    def lora(self) -> Lora | None:
        """Rank and targets of its adapters; None where it is copies alone."""
        return None if self.part == "copies" else self.grid.fixed.adapters

    @property
    def copied(self) -> tuple[str, ...]:
        """What is trained as a copy: embedding, head."""
        return () if self.part == "adapters" else self.grid.fixed.also_train

    @cached_property
    def _blocks(self) -> list[tuple[Array, Array]]:
        lora, frozen = self.lora, self.grid.fixed.vision != "trained"
        adapted = [lora is not None and not (frozen and group.tower == "vision") for group in self.model.groups]
        return [
            self._adapters_of(group.block, lora) if lora and here else (np.int64(0), np.int64(0))
            for group, here in zip(self.model.groups, adapted, strict=True)
        ]

    def _adapters_of(self, block: Block, lora: Lora) -> tuple[Array, Array]:
        """Adapters of one block on a rank, outside the routed experts and on them."""
        if self.grid.fixed.lora_classes:
            return block_parameters(block, lora, self.grid)
        stacked, split = self.grid.habits.stacks_experts, self.grid.habits.splits_packed
        dense, routed = block_adapters(block, lora.rank, lora.targets, stacked=stacked, split=split)
        if self.grid.fixed.lora_kernels == "dora":
            pairs = block_pairs(block, lora.rank, lora.targets, stacked=stacked, split=split)
            dense += sum(pair.magnitudes for pair in pairs if not pair.routed)
            routed += sum(pair.magnitudes for pair in pairs if pair.routed)
        return np.int64(dense), np.int64(routed)

    @cached_property
    def block_dense(self) -> tuple[Array, ...]:
        """Adapters of one block of each group outside the routed experts."""
        return tuple(dense for dense, _ in self._blocks)

    @cached_property
    def block_experts(self) -> tuple[Array, ...]:
        """Adapters of the routed experts of one block of each group."""
        return tuple(routed for _, routed in self._blocks)

    def _outside(self, name: str) -> int:
        """Trained beside the embedding or the head: an adapter, and a copy of the whole."""
        lora, saved = self.lora, name in self.copied
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
        lora = self.lora
        widest = max(max(g.block.hidden, getattr(g.block.mlp, "ffn", 0)) for g in self.model.groups)
        saved = [m.elements for m in outside_matrices(self.model) if m.target in self.copied]
        blocks = [g.block for g in self.model.groups] if lora else []
        stacks = [pair for block in blocks if lora for pair in _on_stacks(block, lora.rank, lora.targets)]
        saved += [pair.rank * max(pair.inputs, pair.outputs) for pair in stacks]
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


def _adapters_on_grid(census: ModelOnGrid, part: Literal["all", "adapters", "copies"]) -> AdaptersOnGrid:
    return AdaptersOnGrid(census.model, census.grid, census.traces, census.blocks_cache, part)


def folded_adapters(census: ModelOnGrid) -> list[int]:
    """Adapters of one block of each group that are on stacked experts [elements]."""
    lora = census.grid.fixed.adapters
    if lora is None:
        return [0 for _ in census.model.groups]
    return [sum(p.parameters for p in _on_stacks(g.block, lora.rank, lora.targets)) for g in census.model.groups]


@dataclass(frozen=True, eq=False)
class WithoutTower(ModelOnGrid):
    """What is trained on a rank where a vision tower, or its projector too, is not."""

    @cached_property
    def count(self) -> ParameterCount:
        """Parameters of the trained part by place."""
        model, counted = self.model, super().count
        frozen = self.grid.fixed.vision == "frozen"
        away = [o for o in model.outside if o.tower == "vision" and (frozen or "projector" not in o.name)]
        groups = [
            (n, BlockCount(0, 0, 0, 0, 0) if group.tower == "vision" else block)
            for group, (n, block) in zip(model.groups, counted.groups, strict=True)
        ]
        text = model.model_copy(
            update={
                "groups": tuple(group for group in model.groups if group.tower != "vision"),
                "order": (),
                "outside": tuple(o for o in model.outside if o not in away),
            }
        )
        largest = model_count(text).largest_tensor
        first = counted.outside_first - sum(o.parameters for o in away if o.place == "first")
        return counted._replace(outside_first=first, groups=tuple(groups), largest_tensor=largest)


def trained(census: ModelOnGrid) -> ModelOnGrid:
    """The census of what is trained: the model's own where nothing is frozen."""
    fixed = census.grid.fixed
    if fixed.adapters is not None:
        return _adapters_on_grid(census, "all")
    if fixed.vision == "trained":
        return census
    return WithoutTower(census.model, census.grid, census.traces, census.blocks_cache)


def trained_parts(census: ModelOnGrid) -> tuple[ModelOnGrid, ...]:
    """The same, apart by the width in which it is trained: adapters, and copies of whole layers."""
    if census.grid.fixed.adapters is None:
        return (trained(census),)
    parts: tuple[Literal["adapters", "copies"], ...] = (
        ("adapters", "copies") if census.grid.fixed.also_train else ("adapters",)
    )
    return tuple(_adapters_on_grid(census, part) for part in parts)


@dataclass(frozen=True, eq=False)
class Base:
    """The bytes of the frozen weights of a rank."""

    census: ModelOnGrid

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
        block, stacked = self.census.model.groups[index].block, self.grid.habits.stacks_experts
        experts = fixed.quantize_experts
        return block_quantised(block, fixed.quantize, fixed.gptq_group, stacked=stacked, experts=experts)

    def _head(self) -> Quantised:
        fixed, model = self.grid.fixed, self.census.model
        if fixed.quantize == "none" or not self.grid.habits.quantised_head or model.tied:
            return NONE
        return quantised([m for m in outside_matrices(model) if m.target == "head"], fixed.quantize, fixed.gptq_group)

    @cached_property
    def blocks(self) -> tuple[Array, ...]:
        """Bytes of one block of each group, the scales of quantised weights left out."""
        pairs = zip(self.census.block_dense, self.census.block_experts, strict=True)
        results = [(self._quantised(i), dense + experts, experts) for i, (dense, experts) in enumerate(pairs)]
        more = self._width_of_stacks - self.width
        return tuple(q.payload + self.width * (n - q.elements) + more * experts for q, n, experts in results)

    @cached_property
    def _width_of_stacks(self) -> Array:
        """Bytes of a weight of experts in one parameter, which bitsandbytes leaves and PEFT casts to fp32."""
        fixed, width = self.grid.fixed, self.width
        casts = fixed.kbit_experts and not fixed.quantize_experts and self.grid.habits.stacks_experts
        return np.maximum(width, 4) if casts else width

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


def scales_term(census: ModelOnGrid) -> Term:
    """The scales of NF4, which are no parameters: neither sharded nor offloaded with them."""
    return Term("parameters", "scales of the frozen weights", Base(census).state, ALWAYS, "not sharded", SOURCE)


def frozen_terms(census: ModelOnGrid, ranks: Array, here: Array, replaced: Array) -> Iterator[Term]:
    """The weights under adapters: the base without its scales and ``replaced`` elements, and the adapters.

    ``ranks`` divide both; another term has the 8-bit form of what is replaced.
    """
    base = Base(census)
    width = np.maximum(4 * census.grid.fixed.frozen_fp32, base.width)
    inputs = {"P": census.parameters, "w": width, "N": ranks}
    ends = base.root * np.where(base.width == 2, 1, 0) * any(setting.end_weight for setting in census.settings)
    unquantised = base.all_blocks + base.root + ends - base.width * replaced
    frozen = shard(unquantised * width // base.width, ranks) * here
    quantised_as = census.grid.fixed.quantize
    title = "frozen weights" if quantised_as == "none" else f"frozen weights, {quantised_as}"
    formula = "bytes of what is not quantised / N" if np.any(replaced) else "bytes of the base / N"
    yield Term("parameters", title, frozen, ALWAYS, formula, SOURCE, inputs)
    for part in trained_parts(census):
        width = part.width("parameter")
        bytes_ = width * part.sharded(part.blocks + part.root, part.experts_or_none, ranks > 1) * here
        inputs = {"w": width, "P_trained": part.parameters, "N": ranks}
        title = f"weights{part.suffix}" if part.suffix else "adapters"
        yield Term("parameters", title, bytes_, ALWAYS, "w · ⌈P_trained / N⌉", ADAPTERS, inputs)
