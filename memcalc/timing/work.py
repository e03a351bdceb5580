"""Work of one step on a rank, whatever the rates: operations, bytes and launches, over the grid's axes.

Everything that repeats with a micro-batch is counted for one micro-batch; the stage axis is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.formulas import flops as fl
from memcalc.formulas.flops import matmul_bytes
from memcalc.grid import column
from memcalc.specs.strategy import SCHEDULES
from memcalc.terms.activations import groups_of
from memcalc.terms.adapters import trained
from memcalc.terms.head import over_vocabularies
from memcalc.terms.moments import kind_of, optimizer_moments, update_traffic, updated_elements
from memcalc.terms.settings import in_tiles
from memcalc.terms.tensors import outside_matrices
from memcalc.timing.blocks import STEP, BlockWork, dequantised_bytes, recorded_flops
from memcalc.timing.experts import unmade_rows
from memcalc.timing.messages import Messages, messages_of

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import Node
    from memcalc.terms.model_on_grid import ModelOnGrid


class Part(NamedTuple):
    """What one part of a micro-batch costs: the first computation, or what is computed again."""

    linear: Array
    """Operations of the blocks' linear layers [FLOP]."""
    plain: Array
    """Operations of products that stay in 16 bits whatever the precision: the head, unfused scores [FLOP]."""
    unaligned: Array
    """Operations of products whose rows are no whole 16 bytes, so that matrix units cannot take them [FLOP]."""
    attention: Array
    """Operations of fused attention [FLOP]."""
    operands: Array
    """Compulsory traffic of the products [bytes]."""
    dequantised: Array
    """Traffic of turning quantised weights into 16 bits [bytes]."""
    written: Array
    """Bytes that kernels write outside them."""
    launches: Array
    """Kernels that the host launches as Python runs the model: forward, and what is computed again."""
    launches_backward: Array
    """Those that the engine of autograd launches."""
    dispatched: Array
    """Operators that pass a mode in Python besides."""
    hooked: Array
    """Passes of modules that hooks stand around."""
    waits: Array
    """Blocks of routed experts whose host waits for the numbers of tokens, forward and backward, as passes."""


class Pipeline(NamedTuple):
    """The pipeline of each layout."""

    stages: Array
    chunks: Array
    """Model chunks a stage."""
    schedule: Array
    """Place of its schedule among :data:`SCHEDULES`."""


class Work(NamedTuple):
    """All that a step does."""

    once: Part
    again: Part
    messages: Messages
    micro_batches: Array
    updated: Array
    """Traffic of the optimizer step [bytes]."""
    tensors: Array
    """Parameter tensors that the step visits."""
    awaited: Array
    """1 where the host waits for the passes before it updates: of a scaled loss it reads whether the step is taken
    (torch 2.13 ``torch/amp/grad_scaler.py``: ``_maybe_opt_step``); others wait after each tensor that they update."""
    alone: Array
    """1 where one process trains, without an engine that shards."""
    pipeline: Pipeline
    weights: Array
    """How many stages each entry of the stage axis stands for."""


def work_of(census: ModelOnGrid, node: Node) -> Work:
    """The work of every strategy of a grid."""
    grid = census.grid
    blocks = [BlockWork(group) for group in groups_of(census)]
    return Work(
        once=_once(census, blocks),
        again=_again(blocks),
        messages=messages_of(census, blocks, node),
        micro_batches=grid.accumulation,
        updated=optimizer_traffic(census),
        tensors=parameter_tensors(census, blocks),
        awaited=column([name.startswith("fp16-") or kind_of(grid).waits for name in grid.precisions], "precision"),
        alone=is_alone(grid),
        pipeline=pipeline(grid),
        weights=grid.stage_counts,
    )


def is_alone(grid: Grid) -> Array:
    """Whether one process trains, without an engine that shards."""
    return np.asarray((grid.degree("gpus") == 1) & (grid.zero == 0))


def pipeline(grid: Grid) -> Pipeline:
    """Each layout's pipeline, along the layout axis."""
    places = column([SCHEDULES.index(layout.schedule) for layout in grid.layouts], "layout")
    return Pipeline(grid.degree("pp"), grid.degree("vpp"), places)


def _add(parts: list[Array]) -> Array:
    """A sum, as an array with all axes."""
    total: Array = np.zeros((1,) * 7, dtype=np.int64)
    for part in parts:
        total = total + part
    return total


def _once(census: ModelOnGrid, blocks: list[BlockWork]) -> Part:
    head, head_bytes = head_work(census)
    return Part(
        linear=_add([b.layers * b.linear[0] for b in blocks]),
        plain=_add([head, *(b.layers * b.attention for b in blocks if not b.is_fused and b.is_aligned)]),
        unaligned=_add([b.layers * b.attention for b in blocks if not b.is_fused and not b.is_aligned]),
        attention=_add([b.layers * b.attention for b in blocks if b.is_fused]),
        operands=_add([head_bytes, *(b.layers * b.linear[1] for b in blocks)]),
        dequantised=_add([head_dequantised(census), *(b.layers * b.dequantised for b in blocks)]),
        written=_add(
            [head_written(census), accumulated(census)] + [b.layers * (b.written - 4 * unmade_rows(b)) for b in blocks]
        ),
        launches=_add([b.layers * b.launches[0] for b in blocks]),
        launches_backward=_add([b.layers * b.launches[1] for b in blocks]),
        dispatched=_add([]),
        hooked=_add([hooks(census.grid) * (2 * b.layers * b.modules) for b in blocks]),
        waits=_add([b.layers for b in blocks if b.activations.group.block.is_moe]),
    )


def _again(blocks: list[BlockWork]) -> Part:
    return Part(
        linear=_add([b.linear_again[0] for b in blocks]),
        plain=_add([b.attention_again for b in blocks if not b.is_fused and b.is_aligned]),
        unaligned=_add([b.attention_again for b in blocks if not b.is_fused and not b.is_aligned]),
        attention=_add([b.attention_again for b in blocks if b.is_fused]),
        operands=_add([b.linear_again[1] for b in blocks]),
        dequantised=_add([b.dequantised_again for b in blocks]),
        written=_add([b.written_again - b.exchanges_again * unmade_rows(b) for b in blocks]),
        launches=_add([b.launches_again for b in blocks]),
        launches_backward=_add([]),
        dispatched=_add([b.dispatched for b in blocks]),
        hooked=_add([hooks(b.grid) * b.modules_again for b in blocks]),
        waits=_add([b.reductions_again / 6 for b in blocks if b.activations.group.block.is_moe]),
    )


def hooks(grid: Grid) -> Array:
    """1 where hooks fetch and release the weights of each module, forward and backward: DeepSpeed's stage 3.

    DeepSpeed edaa7221 ``runtime/zero/parameter_offload.py``: ``_register_deepspeed_module``.
    """
    hooked = grid.habits.zero_optimizer is not None and np.any(grid.zero == 3)
    return (grid.zero == 3).astype(np.int64) if hooked else np.int64(0)


def head_work(census: ModelOnGrid) -> tuple[Array, Array]:
    """Operations [FLOP] and operand bytes of the output projection, forward and backward, on its stage."""
    grid, model = census.grid, census.model
    if model.recording is not None:
        ends = (model.recording.entry, model.recording.head)
        outer = groups_of(census)[-1]
        return fl.step_flops(sum((recorded_flops(outer, end) for end in ends), np.int64(0))), np.int64(0)
    if not (model.head and model.vocab):
        return np.int64(0), np.int64(0)
    trained = grid.fixed.adapters is None or "head" in grid.fixed.also_train
    products = 2 + trained + in_tiles(grid)  # tiles are computed again in backward
    divided = grid.habits.tensor_parallel
    columns = census.vocab // grid.degree("tp") if divided else census.vocab
    width = model.embedding_dim or model.hidden
    flops = products * fl.matmul_flops(grid.tokens, width, columns)
    return flops * grid.is_last, products * matmul_bytes(grid.tokens, width, columns) * grid.is_last


def head_dequantised(census: ModelOnGrid) -> Array:
    """Traffic of dequantising the head, where a framework quantises it, on its stage [bytes]."""
    if not census.grid.habits.quantised_head or census.model.tied:
        return np.int64(0)
    setting, group = census.settings[0], census.grid.fixed.gptq_group
    heads = [matrix for matrix in outside_matrices(census.model) if matrix.target == "head"]
    return dequantised_bytes(heads, setting, group, STEP) * census.grid.is_last


def head_written(census: ModelOnGrid) -> Array:
    """Bytes that final norm, logits and loss write, forward and backward, on their stage."""
    grid = census.grid
    written = over_vocabularies(census, "written_sum")
    if grid.fixed.loss == "fused-linear":
        written = written + 8 * grid.tokens * census.vocab // grid.degree("tp") * grid.is_last
    return written


def accumulated(census: ModelOnGrid) -> Array:
    """Bytes that adding weight gradients up writes, where matmuls add them to a buffer that stays."""
    grid = census.grid
    if not (grid.habits.persistent_gradients and grid.fixed.wgrad_fusion):
        return np.int64(0)
    updated = trained(census)
    return updated.parameters * updated.width("gradient")


# ------------------------------------------------------------------------------------------------------- the optimizer


def optimizer_traffic(census: ModelOnGrid) -> Array:
    """Bytes that the step reads and writes once: states and weights both ways, gradients, the 16-bit copy."""
    updated = trained(census)
    kind = kind_of(census.grid)
    if census.grid.fixed.precision_aware:
        return updated.width("gradient") * updated_elements(updated) + update_traffic(updated)
    master, parameter = updated.width("master"), updated.width("parameter")
    each = updated.width("gradient") + np.where(master > 0, 2 * master + parameter, 2 * parameter)
    if kind.states is not None:
        return np.asarray(updated_elements(updated) * each + 2 * optimizer_moments(updated))
    moments = kind.moments * (kind.width or updated.width("moment"))
    return np.asarray(updated_elements(updated) * (2 * moments + each))


def weights_of(block: BlockWork) -> int:
    """Parameter tensors of one block."""
    if block.recorded is not None:
        return len(block.recorded.tensors)
    return sum(m.count if m.routed else 1 for m in block.matrices) + 2


def parameter_tensors(census: ModelOnGrid, blocks: list[BlockWork]) -> Array:
    """Parameter tensors of a stage, about: each linear layer's weight, the norms, embedding and head."""
    each = [b.layers * weights_of(b) for b in blocks]
    return _add([*each, np.int64(3)]) + 0 * census.grid.stage
