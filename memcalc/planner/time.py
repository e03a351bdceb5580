"""Step time of every strategy of a grid: a first, honest model, clearly a model.

Compute is matmul and attention work at a fraction of the dense peak plus elementwise traffic over the memory bandwidth;
communication is volume over link; offload is traffic over PCIe. What is not in it: kernel launch overhead, stragglers,
CPU time of an offloaded optimizer, shapes that tile badly.

The constants are those of a fuller closed form tried on 364 published throughput rows (llm-foundry, torchtitan,
Megatron-LM, BLOOM); this model's own error on them has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.errors import MissingError
from memcalc.formulas import bubbles
from memcalc.formulas import communication as comm
from memcalc.formulas import flops as fl
from memcalc.formulas import offload as off
from memcalc.formulas.census import model_count
from memcalc.formulas.pipeline import bubble_fraction
from memcalc.grid import column
from memcalc.terms import Census
from memcalc.terms.activations import GroupActivations, groups_of
from memcalc.terms.pipeline import SPLIT
from memcalc.terms.states import gradient_elements, updated_elements

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

MATMUL_EFFICIENCY = {"Ampere": 0.84, "Hopper": 0.84, "Blackwell": 0.47, "Volta": 0.67, "CDNA3": 0.32}
"""Fraction of the dense peak that large matmuls reach, by architecture; spread over left-out sources ±0.05."""
UNVALIDATED_EFFICIENCY = 0.6
ATTENTION_EFFICIENCY = {"Ampere": 0.38, "Hopper": 0.20, "Blackwell": 0.40, "CDNA3": 0.22}
UNVALIDATED_ATTENTION = 0.3
ELEMENTWISE_PASSES = {"model": 3.4, "fused": 1.35, "te": 1.35}
"""Traffic of norms, activations and residuals over its compulsory bytes, eager and fused kernels."""
OPERAND_PASSES = 1.5
"""Matmul traffic over its compulsory operand bytes."""
LINK_EFFICIENCY_IN_NODE = 0.45
LINK_EFFICIENCY_BETWEEN_NODES = 0.40
OVERLAP = 0.5
"""Share of sharding traffic that hides behind compute."""
OPTIMIZER_TRAFFIC = {"fused": 28, "foreach": 60, "loop": 60}
"""Bytes a parameter that the step reads and writes; doubled to match published steps."""


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step and its parts, over the grid; the slowest stage's."""

    compute: Array
    recompute: Array
    communication: Array
    offload: Array
    bubble: Array

    PARTS = ("compute", "recompute", "communication", "offload", "bubble")

    @property
    def parts(self) -> tuple[Array, ...]:
        """What adds up to the step; each spans only the axes that it depends on."""
        return tuple(getattr(self, name) for name in self.PARTS)


VALIDATED = ("a100", "h100", "v100", "b200", "gb200", "mi300x")


def is_validated(gpu: GPU) -> bool:
    """Whether published throughput of this GPU went into the constants."""
    return gpu.name.startswith(VALIDATED)


def peak_flops(gpu: GPU, precision: str) -> float:
    """Dense peak of the dtype in which a precision multiplies [FLOP/s]; an error where the preset has none."""
    peaks: dict[str, float] = {str(dtype): peak for dtype, peak in gpu.peak_flops.items()}
    dtype = precision.split("-", maxsplit=1)[0]
    if dtype not in peaks:
        raise MissingError(
            f"no {dtype} peak of {gpu.name} is known, which the time of {precision} needs: give a preset."
        )
    return peaks[dtype]


def step_times(census: Census, gpu: GPU, node: Node) -> Times:
    """Seconds of every strategy of the grid."""
    grid = census.grid
    m = grid.accumulation
    forward, again = compute_seconds(census, gpu)
    once = m * 3 * forward + optimizer_seconds(census, gpu)
    repeated = m * again
    busy = _slowest(once + repeated)
    messages = m * _slowest(layer_communication(census, gpu, node))
    sharding = _slowest(sharding_seconds(census, gpu, node))
    exposed = (1 - OVERLAP) * sharding + np.maximum(0, OVERLAP * sharding - busy)
    moved = _slowest(offload_seconds(census, gpu))
    bubble = idle(grid, busy + messages, _slowest(forward), _slowest(forward + again))
    communication = messages + exposed
    return Times(busy - _slowest(repeated), _slowest(repeated), communication, moved, bubble)


def idle(grid: Grid, busy: Array, forward: Array, backward: Array) -> Array:
    """Seconds that stages wait for one another: a fraction of the busy ones, or a zero-bubble schedule's own.

    A pass over weights takes as long as a forward, and one over inputs as long, besides what is computed again.
    """
    stages, m, chunks = grid.degree("pp"), grid.accumulation, grid.degree("vpp")
    share = busy * np.asarray(bubble_fraction(stages, m, chunks), dtype=float)
    if not np.any(grid.runs(*SPLIT)):
        return share
    names = column([layout.schedule for layout in grid.layouts], "layout", np.str_)
    return np.where(grid.runs(*SPLIT), bubbles.bubble(names, stages, m, chunks, forward, backward, forward), share)


def _slowest(seconds: Array) -> Array:
    """The slowest stage."""
    return np.max(seconds, axis=1, keepdims=True)


def compute_seconds(census: Census, gpu: GPU) -> tuple[Array, Array]:
    """Forward of one micro-batch on a rank, and what is computed again in its backward [s]."""
    grid, arch = census.grid, gpu.arch.split()[0]
    peaks = np.array([peak_flops(gpu, p) for p in grid.precisions]).reshape(grid.width("moment").shape)
    matmul = peaks * MATMUL_EFFICIENCY.get(arch, UNVALIDATED_EFFICIENCY)
    attention = peaks * ATTENTION_EFFICIENCY.get(arch, UNVALIDATED_ATTENTION)
    forward: Array = np.zeros(grid.stage.shape)
    again: Array = np.zeros(grid.stage.shape)
    for group in groups_of(census):
        linear = linear_flops(group) / grid.degree("tp") / matmul
        core = attention_core_flops(group) / grid.degree("tp") / attention
        linear = linear + operand_bytes(group) / gpu.bandwidth_bytes_per_s
        traffic = elementwise_bytes(group) / gpu.bandwidth_bytes_per_s
        forward = forward + group.layers * (linear + core + traffic)
        again = again + recomputed(group, linear, core, traffic)
    head = model_head_flops(census) / grid.degree("tp") / matmul
    return forward + head, again


def linear_flops(group: GroupActivations) -> Array:
    """Matmul work of one block's forward [FLOP]."""
    block = group.group.block
    attention, mlp = block.attention, block.mlp
    dense = getattr(mlp, "shared_ffn", mlp.ffn)
    work = fl.layer_matmul_flops(
        group.tokens, block.hidden, q_dim=attention.q_dim, kv_dim=attention.kv_dim, ffn=dense, gated=int(mlp.gated)
    )
    if block.is_moe:
        work = work + fl.experts_matmul_flops(
            group.tokens, getattr(mlp, "topk", 1), block.hidden, mlp.ffn, int(mlp.gated)
        )
    return work


def operand_bytes(group: GroupActivations) -> Array:
    """Memory traffic of one block's matmuls: weights and both operands, 1.5 times the compulsory bytes.

    It makes small micro-batches slow: with M rows a matmul's efficiency is 1 / (1 + c / M).
    """
    block, grid = group.group.block, group.grid
    weights = linear_flops(group) // (2 * group.tokens)
    width = block.hidden + block.mlp.ffn * getattr(block.mlp, "topk", 1)
    columns = 2 * (block.attention.q_dim + block.attention.kv_dim + width) + 2 * block.hidden
    return OPERAND_PASSES * 2 * (weights + group.tokens * columns) / grid.degree("tp")


def attention_core_flops(group: GroupActivations) -> Array:
    """Scores and their product with the values, one block's forward [FLOP]."""
    attention = group.group.block.attention
    return fl.attention_flops(group.tokens, group.keys, attention.q_dim, int(attention.causal))


def elementwise_bytes(group: GroupActivations) -> Array:
    """Memory traffic of one block's forward outside matmuls [bytes]."""
    block, grid = group.group.block, group.grid
    outside = 10 * block.hidden / grid.sequence_shard
    inside = (
        (3 if block.mlp.gated else 2) * block.mlp.ffn * getattr(block.mlp, "topk", 1)
        + 4 * (block.attention.q_dim + block.attention.kv_dim)
    ) / grid.degree("tp")
    return ELEMENTWISE_PASSES[grid.fixed.kernels] * 2 * group.tokens * (outside + inside)


def recomputed(group: GroupActivations, linear: Array, core: Array, traffic: Array) -> Array:
    """Seconds computed again by policy: whole blocks, or the dropped part of each."""
    block = group.group.block
    mlp_share = block.mlp.ffn * (2 + block.mlp.gated) * getattr(block.mlp, "topk", 1)
    share = mlp_share / (mlp_share + 2 * (block.attention.q_dim + block.attention.kv_dim))
    parts = []
    for policy, counts in zip(group.grid.policies, group.counts, strict=True):
        part = np.zeros(1)
        if policy.kind == "selective-ops":
            part = 0.5 * linear + traffic
        elif policy.kind == "parts":
            mlp, attention, scores = (
                ("mlp" in policy.parts) | ("moe" in policy.parts),
                "attention" in policy.parts,
                bool({"core_attn", "attention"} & policy.parts),
            )
            part = (
                linear * (share * mlp + (1 - share) * attention)
                + core * scores
                + traffic * (share * mlp + (1 - share) * scores)
            )
        parts.append(np.asarray(counts.recomputed * (linear + core + traffic) + counts.treated * part))
    shape = np.broadcast_shapes(*(p.shape for p in parts))
    return np.concatenate([np.broadcast_to(p, shape) for p in parts], axis=3)


def model_head_flops(census: Census) -> Array:
    """Matmul work of the head's forward on its stage [FLOP]."""
    model = census.model
    return fl.logits_flops(census.grid.tokens, model.hidden, model.vocab * model.head) * census.grid.is_last


def optimizer_seconds(census: Census, gpu: GPU) -> Array:
    """Reading and writing parameters, gradients and states once [s]."""
    return (
        2.0 * OPTIMIZER_TRAFFIC[census.grid.fixed.optimizer_impl] * updated_elements(census) / gpu.bandwidth_bytes_per_s
    )


def link_bytes_per_s(grid: Grid, gpu: GPU, node: Node, ranks: Array) -> Array:
    """Bandwidth that one rank of a group sees: NVLink or PCIe within a node, the network between nodes."""
    inside = LINK_EFFICIENCY_IN_NODE * (
        node.intra_link_bytes_per_s or gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s or 16e9
    )
    between = LINK_EFFICIENCY_BETWEEN_NODES * (node.internode_bytes_per_s_per_gpu or 12.5e9)
    return np.where(ranks <= node.gpus, inside, np.minimum(inside, between * grid.degree("tp")))


def layer_communication(census: Census, gpu: GPU, node: Node) -> Array:
    """Tensor, context, expert and pipeline messages of one micro-batch [s]."""
    grid, model = census.grid, census.model
    link = link_bytes_per_s(grid, gpu, node, grid.degree("tp"))
    wide = link_bytes_per_s(grid, gpu, node, grid.degree("tp") * grid.degree("cp"))
    volume: Array = np.zeros(1)
    for group in groups_of(census):
        block = group.group.block
        reductions = 4 + 2 * (group.field("recomputed") > 0)
        volume = (
            volume
            + group.layers
            * comm.tensor_parallel_bytes(group.tokens, block.hidden, 2, grid.degree("tp"), reductions)
            / link
        )
        if np.any(grid.degree("cp") > 1):
            keys = 2 * 2 * group.tokens * block.attention.kv_dim // grid.degree("tp")
            volume = volume + group.layers * comm.context_parallel_bytes(keys, grid.degree("cp")) / wide
        if np.any(grid.degree("ep") > 1) and block.is_moe:
            routed = comm.expert_parallel_bytes(
                group.tokens, block.hidden, 2, grid.degree("ep"), topk=getattr(block.mlp, "topk", 1)
            )
            volume = volume + group.layers * routed / link_bytes_per_s(
                grid, gpu, node, grid.degree("ep") * grid.degree("tp")
            )
    if np.any(grid.degree("pp") > 1):
        between = link_bytes_per_s(grid, gpu, node, grid.degree("gpus"))
        volume = (
            volume
            + comm.pipeline_bytes(grid.tokens, model.hidden, 2, grid.degree("vpp")) * (grid.degree("pp") > 1) / between
        )
    return volume


def sharding_seconds(census: Census, gpu: GPU, node: Node) -> Array:
    """Gathers and reductions over the data-parallel ranks in one step [s]."""
    grid = census.grid
    parameters = census.parameters
    reduce_width = np.maximum(
        grid.width("compute"), 4 if grid.fixed.reduce_dtype == "fp32" and grid.habits.full_shard else 2
    )
    volume = comm.zero_bytes(
        parameters * grid.width("compute"), parameters * reduce_width, grid.ranks, grid.zero, grid.accumulation
    )
    return volume / link_bytes_per_s(grid, gpu, node, grid.degree("gpus"))


def offload_seconds(census: Census, gpu: GPU) -> Array:
    """Traffic to the host over PCIe in one step [s]; that of parameters repeats with each micro-batch."""
    grid, link = census.grid, gpu.pcie_bytes_per_s or 16e9
    if not any(grid.offloads):
        return np.zeros((1,) * 7)
    local, m = updated_elements(census), grid.accumulation
    optimizer = off.optimizer_offload_bytes(
        gradient_elements(census) * grid.width("gradient"), local * grid.width("compute")
    )
    weights = off.parameter_offload_bytes(local * grid.width("parameter"), m)
    traffic = optimizer * grid.offloaded("optimizer") + (weights + optimizer) * grid.offloaded("params")
    if any("activations" in choice for choice in grid.offloads):
        kept = sum(group.kept for group in groups_of(census))
        traffic = traffic + off.activation_offload_bytes(kept, m) * grid.offloaded("activations")
    return off.offload_seconds(traffic, link)


def model_flops_per_token(model: Model, seq_len: int) -> float:
    """Model FLOPs a token, forward and backward, attention counted in full (arXiv:2204.02311 appendix B)."""
    width = model.main.block.attention.q_dim
    return float(fl.model_flops_per_token(model_count(model).active, model.num_layers, width, seq_len))


__all__ = ["Times", "is_validated", "model_flops_per_token", "peak_flops", "step_times"]
