"""From a grid's words to how a block runs: the settings of :mod:`memcalc.trace`, one for each precision."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from memcalc.specs.adapters import release
from memcalc.trace.adapters import Lora
from memcalc.trace.layers import WIDE, BlockConfig, Narrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.formulas import Array
    from memcalc.frameworks.losses import Loss
    from memcalc.grid import Grid
    from memcalc.specs.model import Model


COMPILED_BLOCKS = ("blocks", "blocks+loss", "model")
PACKED_BITS = {"none": 0, "int8": 8, "int4": 4}
"""Bits of an element that hooks pack."""
COMPILED_LOSS = ("blocks+loss", "loss")


def block_settings(grid: Grid, model: Model) -> tuple[BlockConfig, ...]:
    """How blocks run under each precision of the grid; sequence parallelism gathers where all layouts have it."""
    sequence = grid.habits.gathers_inputs and bool(np.all(grid.sequence_shard > 1))
    settings = (_setting(grid, precision, model) for precision in grid.precisions)
    return tuple(setting._replace(gathered_input_saved=sequence) for setting in settings)


def gathering_settings(grid: Grid, model: Model) -> tuple[BlockConfig, ...] | None:
    """The same with the gathers, where only some layouts have sequence parallelism; else None."""
    some = grid.habits.gathers_inputs and bool(np.any(grid.sequence_shard > 1))
    if not some or bool(np.all(grid.sequence_shard > 1)):
        return None
    return tuple(setting._replace(gathered_input_saved=True) for setting in block_settings(grid, model))


def _setting(grid: Grid, precision: str, model: Model) -> BlockConfig:
    fixed, habits = grid.fixed, grid.habits
    width = 4 if precision == "fp32" or precision.endswith("-autocast") else 2
    wide_norms = fixed.prepare_kbit and fixed.quantize != "none"
    return BlockConfig(
        weight=width,
        residual=WIDE if wide_norms or model.wide_residual else width,
        casts_input=model.wide_residual and grid.habits.casts_inputs and precision.endswith("-mixed"),
        autocast=precision.endswith("-autocast") or fixed.autocast,
        kernels=fixed.kernels,
        cp_kind=fixed.cp_kind,
        adds_gradients=habits.adds_gradients,
        attention="flash" if fixed.attention == "sdpa" else fixed.attention,
        # A kernel of another name than flash is PyTorch's own, called as the model's class does; Liger leaves it there
        sdpa=fixed.kernels in ("model", "fused") and fixed.attention in ("efficient", "math", "sdpa"),
        gathers_logits=habits.gathers_inputs,
        rotary=habits.rotary,
        compiled=fixed.compile in COMPILED_BLOCKS,
        compiled_parts=habits.compiles_parts and fixed.compile in COMPILED_BLOCKS,
        compressed=PACKED_BITS[fixed.compress_activations],
        grouped_kernel=not habits.repeats_keys,
        keeps_every_matmul=fixed.fsdp_schedule == "simple" and habits.graph_keeps_matmuls,
        keeps_biased=habits.keeps_biased,
        operators=(("router", "router"),) if habits.leaves_router else (),
        keeps_attention=fixed.attention in habits.saved_attention,
        keeps_exchange=model.architecture in habits.keeps_exchange,
        exchanges_rows=habits.exchanges_rows,
        reentrant=is_reentrant(grid),
        stops_early=habits.stops_early and not is_reentrant(grid),
        partitioned=fixed.partition_activations,
        trainable=fixed.adapters is None or mixed(grid),
        lora=_adapters(grid),
        also_train=frozenset(fixed.also_train),
        quantize=fixed.quantize,
        quantised_experts=fixed.quantize_experts,
        quantised_head=habits.quantised_head,
        quantised_input_kept=keeps_input(fixed.quantize, fixed.bnb),
        quantised_copy_kept=fixed.quantize == "int8" and release(fixed.bnb) < KEEPS_NO_COPY,
        quantised_from_half=habits.quantises_half and fixed.quantize.startswith("nf4") and precision.startswith("bf16"),
        norm_weight=4 if wide_norms else 0,
        end_weight=4 if wide_norms and fixed.kbit_ends else 0,
        narrow=_narrow(grid, precision),
        float8_attention=fixed.float8_attention,
        float8_activation=fixed.float8_activation,
        transposes_weights=fixed.float8_transposes and not fixed.float8_transpose_cache,
        embedding_leaf=fixed.adapters is not None and is_reentrant(grid) and not habits.engine,
        expert_loop=habits.expert_loop,
        in_place=habits.in_place_kernels,
    )


def _narrow(grid: Grid, precision: str) -> Narrow | None:
    """How TransformerEngine quantises operands; None where it does not."""
    recipe = grid.recipe if precision.startswith("fp8") and grid.fixed.kernels == "te" else None
    if recipe is None:
        return None
    copies = recipe.stored(transposes=grid.fixed.float8_transposes)
    return Narrow(recipe.direction, copies, recipe.per_tensor, recipe.keeps_original)


def keeps_input(kind: str, bitsandbytes: str) -> bool:
    """Whether a product with a quantised weight keeps its input: that of 8-bit integers always does."""
    return kind == "int8" or (kind.startswith("nf4") and release(bitsandbytes) < KEEPS_NO_INPUT)


def in_tiles(grid: Grid) -> bool:
    """Whether the loss is TRL's, which casts a tile of the head's weight at a time and makes gradients in backward."""
    return grid.fixed.loss == "fused-linear" and grid.fixed.tiled_loss


def is_reentrant(grid: Grid) -> bool:
    """Whether checkpoints are autograd functions of their own."""
    return grid.fixed.checkpoint.startswith("reentrant") if grid.fixed.checkpoint else grid.habits.reentrant


def enters_units_again(grid: Grid) -> bool:
    """Whether recomputation runs FSDP 1's hooks a second time, on a detached input: reentrant checkpoints around units.

    A checkpoint inside of a unit, as AnswerDotAI/fsdp_qlora 05ed9f2 wraps blocks (train.py), runs its module alone.
    """
    return is_reentrant(grid) and grid.fixed.checkpoint != "reentrant-inside"


def mixed(grid: Grid) -> bool:
    """Whether frozen weights are views of flat parameters that need a gradient, and so are given one."""
    return grid.fixed.adapters is not None and grid.habits.mixed_units and min(grid.zeros) >= 2


KEEPS_NO_INPUT = (0, 43)
"""The release of bitsandbytes from which ``MatMul4Bit`` does not keep its input (autograd/_functions.py)."""
KEEPS_NO_COPY = (0, 45)
"""The release from which ``MatMul8bitLt`` keeps no 8-bit copy of its input where the weight is frozen."""


def _adapters(grid: Grid) -> Lora | None:
    fixed = grid.fixed
    if fixed.adapters is None:
        return None
    targets, width = frozenset(fixed.adapters.targets), 4 if fixed.adapter_dtype == "fp32" else 2
    habits, dropout = grid.habits, fixed.lora_dropout > 0
    folds = habits.stacks_experts and habits.own_code is None
    return Lora(
        fixed.adapters.rank, targets, width, dropout, folds=folds, kernels=fixed.lora_kernels,
        classes=fixed.lora_classes,
    )  # fmt: skip


# Sequence lengths of one grid: a column, as long as what is run does not depend on the length.
#
# Formulas take any column of lengths. What is traced, though, branches on the length: a window masks longer
# sequences, and a loss cuts a sequence into parts of so many positions. :func:`runs` splits lengths where a branch
# changes, and each run is a grid of its own.


MIXED = "the sequence lengths of a grid must be one run of memcalc.terms.settings.runs"


def runs(model: Model, loss: Loss, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Ascending lengths, split where a window or the number of a loss's parts changes.

    >>> from memcalc import catalog
    >>> from memcalc.frameworks.losses import HF_NEW
    >>> runs(catalog.model("mistral-7b-v0.1"), HF_NEW, [1024, 4095, 4096, 8192])
    [(1024, 4095), (4096, 8192)]
    """
    windows = {attention.window for attention in model.attentions if attention.window is not None}
    rows = rows_of(loss)

    def branch(length: int) -> tuple[object, ...]:
        return (*(length >= window for window in windows), *(-(-length // part) for part in rows))

    return [tuple(run) for _, run in groupby(lengths, key=branch)]


def rows_of(loss: Loss) -> tuple[int, ...]:
    """Positions of a loss's parts, with a trained base and with a frozen one, where they are fixed."""
    kinds = (loss, loss.frozen) if loss.frozen is not None else (loss,)
    return tuple(sorted({item.rows for item in kinds if item.rows}))


def alike(branch: Array) -> bool:
    """The one side of a branch that all lengths of a grid take."""
    taken = bool(np.all(branch))
    if taken != bool(np.any(branch)):
        raise ValueError(MIXED)
    return taken


def one_length(loss: Loss, grid: Grid) -> None:
    """Hold that a loss has the same number of parts at all lengths of a grid."""
    for rows in rows_of(loss):
        if len({-(-length // rows) for length in grid.lengths}) > 1:
            raise ValueError(MIXED)
