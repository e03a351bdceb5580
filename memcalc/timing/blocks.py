"""Work of one group's blocks for one micro-batch on a rank: operations, operand bytes, traffic and launches.

Matrix products follow from the block's matrices. Traffic and launches are read from the same symbolic execution as
memory: each tensor that is allocated is written once by one kernel, so that what a policy runs again, what a compiler
fuses and what adapters add is counted where the operators stand.

Memory traffic of turning a quantised base into 16 bits, for each product anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas import flops as fl
from memcalc.formulas.flops import attention_backward_flops, matmul_bytes
from memcalc.formulas.quantization import dequantisation_bytes
from memcalc.terms.adapted_layers import adapted_tensors, matrix_bytes, quantised_layers
from memcalc.terms.adapters import Pair, block_pairs
from memcalc.terms.model_on_grid import local_experts
from memcalc.terms.parameters import mixing_flops
from memcalc.terms.settings import is_reentrant
from memcalc.terms.tensors import Matrix, block_matrices, linear_layers
from memcalc.trace.partition import kept_products

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.formulas import Array
    from memcalc.formulas.recompute import Policy
    from memcalc.grid import Grid
    from memcalc.specs.adapters import Lora
    from memcalc.specs.recorded import Segment
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.tensors import Tensor
    from memcalc.trace.layers import BlockConfig


ROW_PARALLEL = ("o", "down")
ATTENTION = ("q", "k", "v", "qkv", "o", "q_a", "q_b", "kv_a", "kv_b", "mixer_in", "mixer_out")
TILE = 128
"""Rows of a tile of grouped products (DeepGEMM, CUTLASS)."""
FUSED = ("flash", "efficient", "cudnn", "sdpa")
"""Attention kernels that never store the scores."""


def recorded_flops(activations: GroupActivations, segment: Segment) -> Array:
    """Operations of a recorded part's forward [FLOP]."""
    return sum((np.int64(count) * activations.units[unit] for unit, count in segment.flops.items()), np.int64(0))


@dataclass(frozen=True, eq=False)
class BlockWork:
    """Work of one group of equal blocks over a grid."""

    activations: GroupActivations

    @cached_property
    def grid(self) -> Grid:
        """The grid."""
        return self.activations.grid

    @cached_property
    def layers(self) -> Array:
        """Blocks on each stage."""
        return self.activations.layers

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The block's linear layers, in the order in which they run."""
        return block_matrices(self.activations.group.block)

    @cached_property
    def modules(self) -> int:
        """Modules that one block's forward calls: linear layers, two norms, the activation, and what holds them."""
        listed = linear_layers(self.activations.group.block, stacked=self.grid.habits.stacks_experts)
        return 6 + sum(matrix.count for matrix in listed)

    @cached_property
    def is_fused(self) -> bool:
        """Whether attention is one kernel."""
        spec = self.activations.group.block.attention
        return spec is None or (self.grid.fixed.attention in FUSED and spec.fused)

    @property
    def recorded(self) -> Segment | None:
        """The record of the block, if it has one."""
        return self.activations.group.block.recorded

    def _rows(self, matrix: Matrix) -> Array:
        """Tokens that pass all its copies together; experts that TP does not split see its ranks' own tokens."""
        if not matrix.routed:
            return self.activations.tokens
        return self.activations.units["routed"] * self.grid.expert_tp // self.grid.degree("tp")

    def _ranks(self, matrix: Matrix) -> Array:
        """Ranks that share one such matrix."""
        return self.grid.expert_tp if matrix.routed else self.grid.degree("tp")

    def flops_of(self, matrix: Matrix) -> Array:
        """Operations of its forward on a rank [FLOP]; rows of an expert fill whole tiles."""
        rows = self._rows(matrix)
        if matrix.routed:
            many = local_experts(self.grid, self.activations.group.block)
            busy = (rows * self.grid.fixed.expert_imbalance / many).astype(np.int64)
            rows = many * (-(-busy // TILE) * TILE)
        return fl.matmul_flops(rows, matrix.inputs, matrix.outputs) // self._ranks(matrix)

    def operands_of(self, matrix: Matrix) -> Array:
        """Bytes that one of its products reads and writes at the least [bytes]."""
        rows, ranks = self._rows(matrix), self._ranks(matrix)
        row = matrix.target in ROW_PARALLEL
        inner, columns = (matrix.inputs // ranks, matrix.outputs) if row else (matrix.inputs, matrix.outputs // ranks)
        if not matrix.routed:
            return matmul_bytes(rows, inner, columns)
        many = local_experts(self.grid, self.activations.group.block)
        return many * matmul_bytes(rows // many, inner, columns)

    def _sum(self, name: str, matrices: tuple[Matrix, ...]) -> Array:
        if (name, matrices) not in self._sums:
            of = getattr(self, name)
            self._sums[name, matrices] = sum((of(matrix) for matrix in matrices), np.int64(0))
        return self._sums[name, matrices]

    @cached_property
    def _sums(self) -> dict[tuple[str, tuple[Matrix, ...]], Array]:
        return {}

    @cached_property
    def products(self) -> int:
        """Products of one linear layer for each of its forwards: forward, and the gradients of input and weight."""
        if self.activations.is_frozen:
            return 1
        return 3 if self.grid.fixed.adapters is None else 2

    @cached_property
    def linear(self) -> tuple[Array, Array]:
        """Operations [FLOP] and operand bytes of one block's linear layers, forward and backward."""
        if self.recorded is not None:
            return fl.step_flops(recorded_flops(self.activations, self.recorded)), np.int64(0)
        flops, operands = (self._sum(name, self.matrices) for name in ("flops_of", "operands_of"))
        return self.products * flops + self._adapters, self.products * operands

    def _dequantised(self, matrices: tuple[Matrix, ...], products: int) -> Array:
        setting, group = self.activations.settings[0], self.grid.fixed.gptq_group
        block, stacked = self.activations.group.block, self.grid.habits.stacks_experts
        listed = quantised_layers(block, setting.quantize, stacked=stacked)
        return np.int64(dequantised_bytes([m for m in matrices if m in listed], setting, group, products))

    @cached_property
    def dequantised(self) -> Array:
        """Traffic of dequantisation in one block, forward and backward [bytes]."""
        return self._dequantised(self.matrices, STEP)

    @cached_property
    def dequantised_again(self) -> Array:
        """The same for the stage's products that run again [bytes]."""
        return self._again([self._dequantised(self.again(policy)[0], FORWARD) for policy in self.grid.policies])

    @cached_property
    def _adapters(self) -> Array:
        """Operations of the adapters, forward and backward [FLOP]."""
        lora = self.grid.fixed.adapters
        if lora is None:
            return np.int64(0)
        if self.grid.fixed.lora_classes:
            return sum((self._beside(tensor, lora) for tensor in self._adapted(lora)), np.int64(0))
        linears = linear_layers(self.activations.group.block, stacked=self.grid.habits.stacks_experts)
        wide = sum(m.inputs + m.outputs for m in linears if m.target in lora.targets)
        beside = fl.step_flops(fl.matmul_flops(self.activations.tokens, lora.rank, wide)) // self.grid.degree("tp")
        return beside + sum((self._fold(pair) for pair in self._folded(lora)), np.int64(0))

    def _adapted(self, lora: Lora) -> tuple[Tensor, ...]:
        return adapted_tensors(self.activations.group.block, lora.targets)

    def _beside(self, tensor: Tensor, lora: Lora) -> Array:
        """Operations of adapters beside one of Megatron-LM's layers, of which ranks share A and B [FLOP]."""
        rows = self._rows(Matrix(tensor.target, 0, 0, routed=tensor.routed)) * (1 if tensor.routed else tensor.count)
        ranks = self.grid.expert_tp if tensor.routed else self.grid.degree("tp")
        return fl.step_flops(fl.matmul_flops(rows, lora.rank, sum(tensor.shape[-2:]))) // ranks

    def _folded(self, lora: Lora) -> list[Pair]:
        block, stacked = self.activations.group.block, self.grid.habits.stacks_experts
        return [pair for pair in block_pairs(block, lora.rank, lora.targets, stacked=stacked) if pair.stack]

    def _fold(self, pair: Pair) -> Array:
        """Operations of adapters on stacked experts: four products of the pair, and the gradient of all experts [FLOP].

        PEFT 0.21 folds them in twice, as ``register_parametrization`` runs what it registers (torch 2.13).
        """
        rows = self.activations.units["routed"]
        return 4 * fl.matmul_flops(pair.inputs, pair.rank, pair.outputs) + fl.matmul_flops(
            rows, pair.inputs, pair.outputs
        )

    @cached_property
    def scores(self) -> Array:
        """Operations of attention's two products, or of a mixer in its place, in one block's forward [FLOP]."""
        attention, mixer = self.activations.group.block.attention, self.activations.group.block.mixer
        if mixer is not None:
            return mixing_flops(mixer, self.activations.tokens)
        if attention is None:
            return np.int64(0)
        keys = self.activations.keys
        causal = int(attention.causal and self.is_fused)
        width = attention.q_dim
        # In floats: of a million tokens the count is beyond 64 bits
        tokens = np.asarray(self.activations.tokens, dtype=float)
        full = fl.attention_flops(tokens, keys, width, causal) // self.grid.degree("tp")
        if attention.window is None or not self.is_fused:
            return full
        halved = causal * attention.chunked  # the first tokens of a part see few before them
        near = fl.attention_flops(tokens, attention.window, width, halved) // self.grid.degree("tp")
        return np.minimum(full, near)

    @cached_property
    def attention(self) -> Array:
        """Operations of attention in one block, forward and backward [FLOP]."""
        backward = attention_backward_flops(self.scores) if self.is_fused else 2 * self.scores
        return self.scores + backward

    @cached_property
    def is_aligned(self) -> bool:
        """Whether matrix units can take the batched products of unfused attention: heads in whole 16 bytes."""
        attention = self.activations.group.block.attention
        return attention is None or attention.head_dim % 8 == 0

    # ------------------------------------------------------------------------------------------------ what runs again

    def again(self, policy: Policy) -> tuple[tuple[Matrix, ...], bool]:
        """The linear layers that a policy runs again in a block that it treats, and whether attention is among them."""
        if policy.kind == "none":
            return (), False
        if policy.kind == "selective-ops":
            first, listed = self.activations.settings[0], [(m.target, m.routed) for m in self.matrices]
            stored = kept_products(self.activations.group.block, first, listed)
            again = tuple(m for m, stays in zip(self.matrices, stored, strict=True) if not stays)
            return self._unfinished(again), not first.keeps_attention
        if policy.kind == "parts":
            return self._parts(policy.parts)
        return self._unfinished(self.matrices), True

    def _unfinished(self, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        """A checkpoint that is no function of its own stops once it has what backward reads: before the last product.

        ``torch/utils/checkpoint.py``, ``set_checkpoint_early_stop``, which torchtitan turns off. A compiled block's
        graph has no product that nothing reads.
        """
        last, setting = self.matrices[-1] if self.matrices else None, self.activations.settings[0]
        stops = not is_reentrant(self.grid) and (self.grid.habits.stops_early or setting.compiled)
        return tuple(m for m in matrices if not (stops and m is last))

    def _parts(self, parts: frozenset[str]) -> tuple[tuple[Matrix, ...], bool]:
        chosen: list[Matrix] = []
        for matrix in self.matrices:
            in_attention = matrix.target in ATTENTION
            runs_again = "attention" in parts if in_attention else bool({"mlp", "moe"} & parts)
            if runs_again or ("mla_up_proj" in parts and matrix.target in {"q_b", "kv_b"}):
                chosen.append(matrix)
        return self._unfinished(tuple(chosen)), bool({"core_attn", "attention"} & parts)

    def _again(self, each: list[Array]) -> Array:
        """A quantity of treated blocks by policy, for all blocks of the stage that run again."""
        values = []
        for policy, counts, value in zip(self.grid.policies, self.activations.counts, each, strict=True):
            all_runs = policy.kind not in {"selective-ops", "parts"}
            values.append(np.asarray((counts.recomputed if all_runs else counts.treated) * value))
        shape = np.broadcast_shapes(*(array.shape for array in values))
        return np.concatenate([np.broadcast_to(array, shape) for array in values], axis=3)

    @cached_property
    def linear_again(self) -> tuple[Array, Array]:
        """Operations [FLOP] and operand bytes of the stage's linear layers that run again."""
        if self.recorded is not None:
            forward = recorded_flops(self.activations, self.recorded)
            return self._again([forward * (policy.kind != "none") for policy in self.grid.policies]), np.int64(0)
        chosen = [self.again(policy)[0] for policy in self.grid.policies]
        flops = self._again([self._sum("flops_of", matrices) for matrices in chosen])
        return flops, self._again([self._sum("operands_of", matrices) for matrices in chosen])

    @cached_property
    def modules_again(self) -> Array:
        """Modules of the stage's blocks that run again."""
        return self._again([np.int64(self.modules * (policy.kind != "none")) for policy in self.grid.policies])

    @cached_property
    def attention_again(self) -> Array:
        """Operations of the stage's attention that runs again [FLOP]."""
        return self._again([self.scores * self.again(policy)[1] for policy in self.grid.policies])

    @cached_property
    def reductions_again(self) -> Array:
        """Reductions over tensor-parallel ranks that run again, by the stage's blocks."""
        reductions = []
        for policy in self.grid.policies:
            targets = {matrix.target for matrix in self.again(policy)[0]}
            full = policy.kind not in {"none", "parts", "selective-ops"}
            reductions.append(np.int64(2 if full else 1 if {"o", "down"} & targets else 0))
        return self._again(reductions)

    @cached_property
    def exchanges_again(self) -> Array:
        """Exchanges of tokens of whole mixtures of experts that run again, by the stage's blocks."""
        mixtures = [
            "moe" in policy.parts if policy.kind == "parts" else policy.kind not in {"none", "selective-ops"}
            for policy in self.grid.policies
        ]
        return self._again([np.int64(2 * again) for again in mixtures])

    # ---------------------------------------------------------------------------------------- traffic and launches

    @cached_property
    def written(self) -> Array:
        """Bytes that one block without recomputation writes, forward and backward."""
        return self.activations.over("written_sum", untreated=True)

    @cached_property
    def launches(self) -> tuple[Array, Array]:
        """Kernels of one block without recomputation: forward, and backward."""
        return self._launches(untreated=True)

    def _launches(self, *, untreated: bool) -> tuple[Array, Array]:
        plain = self._launches_under(self.activations.settings, untreated=untreated)
        gathers = self.activations.census.gathering_settings
        if gathers is None:
            return plain
        sharded, shared = self.grid.sequence_shard > 1, self._launches_under(gathers, untreated=untreated)
        forward, backward = (np.where(sharded, *pair) for pair in zip(shared, plain, strict=True))
        return forward, backward

    def _launches_under(self, settings: tuple[BlockConfig, ...], *, untreated: bool) -> tuple[Array, Array]:
        policies = self.grid.policies[:1] if untreated else self.grid.policies
        rows = [
            [self.activations.template(policy, setting, untreated=untreated).launches for policy in policies]
            for setting in settings
        ]
        forward, backward = (
            self.activations.stacked([[np.int64(pair[way]) for pair in row] for row in rows]) for way in (0, 1)
        )
        return forward, backward

    @cached_property
    def written_again(self) -> Array:
        """Bytes that the stage's blocks write because of recomputation."""
        return self._beyond(self.activations.over("written_sum") - self.written)

    @cached_property
    def launches_again(self) -> Array:
        """Kernels of the stage's blocks because of recomputation."""
        return self._beyond(sum(self._launches(untreated=False)) - sum(self.launches))

    @cached_property
    def dispatched(self) -> Array:
        """Operators of the stage's blocks that pass a mode in Python, in forward and as they run again.

        torch/utils/checkpoint.py: ``_CachingTorchDispatchMode`` and ``_CachedTorchDispatchMode`` of selective
        checkpoints; a compiled block's graph holds what they chose.
        """
        passes = 2 * (not self.activations.settings[0].compiled) * self.launches[0]
        return self._again([passes * (policy.kind == "selective-ops") for policy in self.grid.policies])

    def _beyond(self, each: Array) -> Array:
        """What treated blocks do beyond others, times the blocks that run again."""
        number = np.concatenate(
            [
                np.broadcast_to(
                    counts.treated if policy.kind in {"selective-ops", "parts"} else counts.recomputed,
                    self.layers.shape,
                )
                for policy, counts in zip(self.grid.policies, self.activations.counts, strict=True)
            ],
            axis=3,
        )
        return number * np.maximum(each, 0)


FORWARD, STEP = 1, 2
"""Products with a frozen weight: in forward; in forward and for the input's gradient."""


def dequantised_bytes(matrices: Iterable[Matrix], setting: BlockConfig, group: int, products: int) -> int:
    """Return the traffic of some products of each matrix in all its copies [bytes]; ``group`` is that of GPTQ.

    Source: bitsandbytes 0.43.3 autograd/_functions.py: ``MatMul4Bit`` dequantises in forward and in backward,
    ``MatMul8bitLt`` multiplies 8-bit integers in forward; AutoGPTQ 0.7.1 nn_modules/triton_utils/dequant.py.
    """
    wanted = products - (setting.quantize == "int8")
    return sum(wanted * m.count * _once(m, setting, group) for m in matrices if setting.quantises(m.target))


def _once(matrix: Matrix, setting: BlockConfig, group: int) -> int:
    stored = sum(matrix_bytes(matrix.inputs, matrix.outputs, setting.quantize, group))
    casts = (setting.quantize == "int8") + setting.quantised_from_half
    double = setting.quantize == "nf4-dq"
    return int(dequantisation_bytes(stored, matrix.inputs * matrix.outputs, double, casts))
