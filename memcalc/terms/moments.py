"""States of the optimizer on one rank, and the temporaries of its step, from the shapes of the tensors it updates."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.formulas.optimizer import (
    MEGATRON_SOAP,
    OPTIMIZERS,
    TORCH_ADAFACTOR,
    Form,
    OptimizerKind,
    States,
    Temporary,
    moment_bytes,
    step_temporary,
)
from memcalc.formulas.optimizer_states import GALORE_RANK, Weight, shard, state_traffic, widened_bytes
from memcalc.frameworks.megatron import stores_remainders, widened
from memcalc.grid import column
from memcalc.ledger import ALWAYS, Term
from memcalc.terms.adapted_layers import pairs_of
from memcalc.terms.adapters import AdaptersOnGrid, adapter_pairs, block_pairs
from memcalc.terms.parameters import is_biased
from memcalc.terms.tensors import TABLES, Layout, Place, Tensor, block_tensors, end_tensors, outside_matrices
from memcalc.terms.zero import largest_part, partitions_without_zero

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.frameworks import Habits
    from memcalc.grid import Grid
    from memcalc.specs.block import Block
    from memcalc.specs.model import Model
    from memcalc.terms.model_on_grid import ModelOnGrid


# What the update of states below fp32 copies, and what it reads and writes, on one rank (Megatron-LM).


LOW_RANKS = ("q_a", "kv_a")
"""Projections to a low rank, which a norm follows."""
SOURCE = "TransformerEngine d0067d0d pytorch/optimizers/fused_adam.py, get_unscaled_state and step"


def narrow_moments_term(census: ModelOnGrid) -> Term:
    """Adam's moments, each in its own width."""
    inputs = {
        "w_1": census.width("moment"),
        "w_2": census.width("second_moment"),
        "P": census.parameters,
        "N": np.where(sharded_from(census.grid, 1), census.grid.ranks, 1),
    }
    bytes_ = optimizer_moments(census)
    return Term("optimizer", "adamw moments", bytes_, ALWAYS, "(w_1 + w_2) · ⌈P / N⌉", SOURCE, inputs)


def widened_term(census: ModelOnGrid) -> Term:
    """The fp32 copies of narrow states, of the largest group of parameters."""
    copied = widened(census.grid.fixed, census.grid.habits)
    states, through = np.int64(len(copied)), np.int64("bf16" in copied)
    group, largest = largest_group(census), largest_share(census)
    bytes_ = np.asarray(widened_bytes(group, largest, states, through))
    inputs = {"k": states, "P_g": group, "P_max": largest}
    formula = "4 · k · P_g + 2 · P_max, the last for bf16 alone"
    return Term("optimizer", "fp32 copies of narrow states", bytes_, ("step",), formula, SOURCE, inputs)


def largest_group(census: ModelOnGrid) -> Array:
    """Parameters of the largest group of one optimizer on a rank [elements].

    Dense weights and experts have optimizers that step one after another, and what has no weight decay, vectors, is a
    group of its own (Megatron-LM d98e8a64 core/optimizer/__init__.py, ``_get_param_groups``).
    """
    sharded = sharded_from(census.grid, 1)
    sums: dict[bool, Array] = {False: np.int64(0), True: np.int64(0)}
    for each in rank_weights(census):
        sums[each.routed] = sums[each.routed] + each.number * each.weight.elements
    ranks, expert_ranks = (np.where(sharded, n, 1) for n in (census.grid.ranks, census.grid.expert_ranks))
    return np.maximum(shard(sums[False], ranks), shard(sums[True], expert_ranks))


def update_traffic(census: ModelOnGrid) -> Array:
    """What the update of moments and main weights reads and writes, with the 16-bit weight that it makes [bytes]."""
    per_element = column([_traffic(census.grid, name) for name in census.grid.precisions], "precision")
    return np.asarray(updated_elements(census) * per_element)


def _traffic(grid: Grid, precision: str) -> int:
    """Of one element: the low 16 bits of a main weight are read with its bf16 weight."""
    fixed = grid.fixed
    copied = widened(fixed, grid.habits)
    moments = sum(state_traffic(name, widened=name in copied) for name in (fixed.exp_avg_dtype, fixed.exp_avg_sq_dtype))
    main = state_traffic(fixed.main_params_dtype, widened=fixed.main_params_dtype in copied)
    weight = grid.habits.widths[precision].parameter
    return moments + (2 * weight + 2 * 2 if stores_remainders(fixed, precision, grid.habits) else main + weight)


class RankWeight(NamedTuple):
    """Equal tensors of one rank."""

    weight: Weight
    number: Array
    """How many of them a rank has, before data-parallel ranks share them [1]."""
    routed: bool = False
    """Whether experts' ranks share them."""
    vector_follows: bool = False
    """Whether a bias or norm is updated after them."""


def optimizer_of(name: str, impl: str, habits: Habits) -> OptimizerKind:
    """The optimizer that a framework takes by that name: Megatron-LM and PyTorch have some of their own."""
    if name == "soap" and habits.layer_wise:
        return MEGATRON_SOAP
    return TORCH_ADAFACTOR if name == "adafactor" and impl == "foreach" else OPTIMIZERS[name]


def kind_of(grid: Grid) -> OptimizerKind:
    """The optimizer of a grid."""
    kind = optimizer_of(grid.fixed.optimizer, grid.fixed.optimizer_impl, grid.habits)
    if kind.decay and not grid.fixed.sgd_weight_decay:
        return replace(kind, foreach=Temporary(), loop=Temporary())
    return kind


def form_of(habits: Habits, kind: OptimizerKind) -> Form:
    """What an optimizer sees of weights that data-parallel ranks share."""
    if habits.zero_optimizer is not None:
        return "zero"
    if habits.layer_wise and "layers" in kind.shards:
        return "layers"
    return "rows" if habits.gather == "blocks" and not habits.flat_units else "flat"


def layout_of(habits: Habits) -> Layout:
    """How a framework's classes lay weights out."""
    stacked = not (habits.packed_weights or habits.expert_loop or habits.expert_modules)
    return Layout(packed=habits.packed_weights, stacked=stacked, joined=stacked and habits.own_code is None)


def sharded_from(grid: Grid, stage: int) -> Array:
    """Where a ZeRO stage of at least ``stage`` shards over the data-parallel ranks; all states wherever FSDP is on."""
    sharded = grid.zero_from(stage) | (grid.habits.full_shard & grid.zero_from(2))
    return sharded if stage > 1 or grid.habits.zero_optimizer is None else sharded | partitions_without_zero(grid)


def updated_elements(census: ModelOnGrid) -> Array:
    """Parameters whose optimizer states a rank holds [elements]."""
    return census.sharded(census.blocks + census.root, census.experts_or_none, sharded_from(census.grid, 1))


# ------------------------------------------------------------------------------------------------- tensors of one rank


def rank_weights(census: ModelOnGrid) -> Iterator[RankWeight]:
    """What the optimizer updates on a rank, vectors left out."""
    yield from _adapters(census) if isinstance(census, AdaptersOnGrid) else _own(census)


def _own(census: ModelOnGrid) -> Iterator[RankWeight]:
    grid, layout = census.grid, layout_of(census.grid.habits)
    yield from end_weights(census, "first")
    for group, layers in zip(census.model.groups, census.layers, strict=True):
        tensors = block_tensors(group.block, layout)
        for tensor in tensors:
            follows = _biased(group.block, tensor.target) or (tensor is tensors[-1] and group.block.norm.vectors > 0)
            yield weight_of_block(census, tensor, layers)._replace(vector_follows=follows)
    yield from end_weights(census, "last")
    if grid.fixed.mtp:
        hidden = census.model.hidden
        joined = Tensor("mtp_projection", (hidden, 2 * hidden))
        shape = (shard(hidden, grid.degree("tp")), 2 * hidden)
        yield RankWeight(_weight(census, joined, shape), grid.fixed.mtp * grid.is_last)


def end_weights(census: ModelOnGrid, position: Place) -> Iterator[RankWeight]:
    """The tensors of one end of the model."""
    grid, tp = census.grid, census.grid.degree("tp")
    for tensor in (tensor for end, tensor in end_tensors(census.model) if end == position):
        number = grid.is_first if position == "first" else grid.is_last
        shape: tuple[Array | int, ...] = tensor.shape
        if tensor.target in ("embedding", "head"):
            shape = (shard(census.vocab, tp), *tensor.shape[1:])
        if tensor.target == "embedding":
            again = bool(census.model.tied) | (bool(grid.fixed.mtp) & (not census.model.tied))
            number = number + grid.ends_apart * again * grid.is_last
        norms = position == "first" and any(o.name.endswith("embedding_norm") for o in census.model.outside)
        follows = norms or tensor.target.endswith(TABLES)
        yield RankWeight(_weight(census, tensor, shape), number, vector_follows=follows)


def _biased(block: Block, target: str) -> bool:
    """Whether a vector stands after a tensor in the order of its module's parameters."""
    kind, mixer = block.attention, block.mixer
    if kind is None:
        return (
            target in LOW_RANKS or bool(getattr(block.mlp, "bias", False)) or (mixer is not None and is_biased(mixer))
        )
    normed = kind.qk_norm != "none"
    known = {"q": kind.q_bias, "qkv": kind.q_bias, "k": kind.k_bias, "v": kind.v_bias, "o": kind.o_bias or normed}
    return known.get(target, target in LOW_RANKS or bool(getattr(block.mlp, "bias", False)))


def weight_of_block(census: ModelOnGrid, tensor: Tensor, layers: Array) -> RankWeight:
    """One block's tensors, divided by tensor and expert parallelism."""
    grid = census.grid
    ranks = grid.expert_tp if tensor.routed else grid.degree("tp")
    *stack, rows, columns = tensor.shape
    rows = shard(rows, ranks) if tensor.divided == "rows" else rows
    columns = shard(columns, ranks) if tensor.divided == "columns" else columns
    count: Array = np.int64(tensor.count)
    if tensor.routed and tensor.target == "expert_bias":
        rows = shard(rows, grid.degree("ep"))
    elif tensor.routed and stack:
        stack = [shard(stack[0], grid.degree("ep"))]
    elif tensor.routed:
        count = shard(count, grid.degree("ep"))
    return RankWeight(_weight(census, tensor, (*stack, rows, columns)), layers * count, tensor.routed)


def _weight(census: ModelOnGrid, tensor: Tensor, shape: tuple[Array | int, ...]) -> Weight:
    fixed = census.grid.fixed
    return Weight(
        tensor.target,
        shape,
        linear=tensor.linear,
        width=census.width("moment"),
        rank=fixed.galore_rank or GALORE_RANK,
        targets=fixed.galore_targets,
    )


def _adapters(census: AdaptersOnGrid) -> Iterator[RankWeight]:
    """Low-rank pairs, and copies of embedding and head."""
    lora, grid = census.lora, census.grid
    ends = {"embedding": grid.is_first, "head": grid.is_last}
    outside = [(m, ends[m.target]) for m in outside_matrices(census.model)]
    for matrix, number in outside:
        if matrix.target in census.copied:
            tensor = Tensor(matrix.target, (matrix.outputs, matrix.inputs))
            yield RankWeight(_weight(census, tensor, tensor.shape), number)
    if lora is None:
        return
    blocks = zip(census.model.groups, census.layers, strict=True)
    if grid.fixed.lora_classes:
        for low, number in ((low, n) for group, n in blocks for low in pairs_of(group.block, lora, grid)):
            shape = (low.rows, low.columns)
            yield RankWeight(_weight(census, Tensor("adapter", (1, 1)), shape), number * low.count, low.routed)
        return
    stacked, split = grid.habits.stacks_experts, grid.habits.splits_packed
    rank, targets = lora.rank, lora.targets
    pairs = ((block_pairs(group.block, rank, targets, stacked=stacked, split=split), n) for group, n in blocks)
    inside = [(pair, n) for listed, n in pairs for pair in listed]
    ended = [(pair, number) for matrix, number in outside for pair in adapter_pairs([matrix], rank, targets)]
    for pair, number in (*inside, *ended):
        for shape in ((pair.rank, pair.inputs), (pair.outputs, pair.rank)):
            weight = _weight(census, Tensor("adapter", shape), shape)
            yield RankWeight(weight, number * pair.count, pair.routed)


# ----------------------------------------------------------------------------------------------- states and temporaries


def optimizer_moments(census: ModelOnGrid) -> Array:
    """Bytes of the moments of one rank, wherever they live."""
    grid, kind = census.grid, kind_of(census.grid)
    width = census.width("moment")
    if kind.states is not None:
        return (kind.width or width) * _state_elements(census, kind, kind.states)
    if grid.fixed.precision_aware:
        return np.asarray((width + census.width("second_moment")) * updated_elements(census))
    moments = moment_bytes(updated_elements(census), kind, width)
    if kind.block and grid.fixed.wide_embedding_moments and grid.fixed.adapters is None:
        tables = _embedding_elements(census.model)
        moments = moments + ~sharded_from(grid, 1) * (kind.moments * 4 * tables - moment_bytes(tables, kind))
    return moments


def _state_elements(census: ModelOnGrid, kind: OptimizerKind, states: States) -> Array:
    """State elements of a rank: of each weight by its shape, and of the rest as of vectors."""
    grid = census.grid
    sharded, rule = sharded_from(grid, 1), kind.shards.get(form_of(grid.habits, kind))
    dense, routed = _states(census, kind, states, np.int64(1))
    unsharded = dense + routed
    if rule == "as vectors":
        return np.where(sharded, kind.moments * updated_elements(census), unsharded)
    if rule == "by rows":
        cut, experts = _states(census, kind, states, np.where(sharded, grid.ranks, 1))
        return cut + experts
    return np.where(sharded, census.sharded(dense, routed, sharded), unsharded)


def _states(census: ModelOnGrid, kind: OptimizerKind, states: States, ranks: Array) -> tuple[Array, Array]:
    """State elements outside the routed experts and in them, where ``ranks`` share the rows of each tensor."""
    rest = {False: census.blocks + census.root, True: census.experts_or_none}
    total: dict[bool, Array] = {False: np.int64(0), True: np.int64(0)}
    for each in rank_weights(census):
        weight = each.weight._replace(ranks=ranks)
        total[each.routed] = total[each.routed] + each.number * states(weight)
        rest[each.routed] = rest[each.routed] - each.number * weight.elements
    dense, routed = (total[key] + kind.moments * shard(np.maximum(rest[key], 0), ranks) for key in (False, True))
    return dense, routed


def _embedding_elements(model: Model) -> int:
    """Elements of all tables that are looked up, whose moments bitsandbytes can be told to keep in 32 bits.

    Transformers 5.23, trainer.py, create_optimizer: ``register_module_override(module, "weight", {"optim_bits": 32})``
    for each ``nn.Embedding``; sharded tables are other tensors, and stay in 8 bits.
    """
    return sum(table.parameters for end in model.ends for table in end.lookups)


def temporary_bytes(census: ModelOnGrid) -> Array:
    """Bytes that the optimizer step of a rank allocates and frees again."""
    grid, kind = census.grid, kind_of(census.grid)
    if kind.temporary is not None:
        sharded = kind.shards.get(form_of(grid.habits, kind)) == "by rows"
        ranks = np.where(sharded_from(grid, 1), grid.ranks, 1) if sharded else np.int64(1)
        largest: Array = np.int64(0)
        for each in rank_weights(census):
            bytes_ = kind.temporary(each.weight._replace(ranks=ranks)) * np.minimum(each.number, 1)
            largest = np.maximum(largest, bytes_)
        return (kind.width or census.width("moment")) * largest
    local = updated_elements(census)
    tensor = largest_share(census)
    stepped = local
    if grid.habits.zero_optimizer is not None:  # stage 3 steps one sub-group after another (stage3.py, _optimizer_step)
        stepped = largest_part(census, local)
    impl, before = grid.fixed.optimizer_impl, np.int64(0)
    if impl == "loop" and kind.loop != kind.foreach and census.model.recording is None:
        tensor, before = in_a_row(census, kind.loop)
    return step_temporary(stepped, tensor, census.width("moment"), impl=impl, kind=kind, preceding=before)


def turns_of(census: ModelOnGrid) -> tuple[int, int]:
    """Tensors that the update of one weight takes, and those that live on into the next one's; (0, 0): all at once.

    An optimizer of flat shards has no weights to go through.
    """
    grid, kind = census.grid, kind_of(census.grid)
    undivided = not np.any(sharded_from(grid, 1)) and grid.habits.zero_optimizer is None
    if grid.fixed.optimizer_impl != "loop" or kind.temporary is not None or kind.loop.local:
        return 0, 0
    return (kind.loop.largest, kind.loop.before) if undivided or form_of(grid.habits, kind) == "rows" else (0, 0)


def in_a_row(census: ModelOnGrid, copies: Temporary) -> tuple[Array, Array]:
    """Elements of the tensor at which a loop over all of them holds most, and of the one before it.

    Vectors, which are small, stand between two tensors: a bias after its weight, norms between two blocks.
    """
    grid = census.grid
    ranks = np.where(sharded_from(grid, 1), grid.ranks, 1)
    by_rows = form_of(grid.habits, kind_of(grid)) == "rows"
    most, before, previous = (np.asarray(value) for value in (-1, 0, 0))
    largest = largest_share(census)
    for each in rank_weights(census):
        rows, *rest = each.weight.shape
        columns = reduce(mul, rest, np.int64(1))
        size = shard(rows, ranks) * columns if by_rows else shard(rows * columns, ranks)
        size = np.minimum(np.where(each.number > 0, size, 0), updated_elements(census))
        total = copies.largest * size + copies.before * previous
        largest, before = np.where(total > most, size, largest), np.where(total > most, previous, before)
        most = np.maximum(most, total)
        previous = np.where(each.number > 0, 0 if each.vector_follows else size, previous)
    return largest, before


def largest_share(census: ModelOnGrid) -> Array:
    """Elements of the largest tensor that a rank updates."""
    ranks = np.where(sharded_from(census.grid, 1), census.grid.ranks, 1)
    return np.minimum(shard(census.largest_tensor, ranks), updated_elements(census))
