"""Terms of the activations: the inventory summed over blocks, the block computed again, and the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.activations import backward_transient_bytes, fused_linear_loss_bytes, logits_bytes, saved_bytes
from memcalc.formulas.inventory import COMPUTE, Saved, block_input, block_inventory, norm_saved
from memcalc.formulas.pipeline import in_flight_1f1b, in_flight_gpipe, in_flight_interleaved
from memcalc.formulas.recompute import Counts, counts, keeps
from memcalc.frameworks.habits import FP32_LOGITS
from memcalc.grid import column
from memcalc.ledger import Term

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.model import BlockGroup
    from memcalc.terms.census import Census

KEPT = ("forward", "loss", "backward-last")
BACKWARD = ("backward-last", "backward-first")
LOSS_SOURCES = (
    "Transformers loss/loss_utils.py, torchtitan components/loss.py, Megatron-LM core/tensor_parallel/cross_entropy.py"
)
INVENTORY = "autograd's saved tensors, PyTorch 2.13 on Transformers 5.23 classes; arXiv:2205.05198 section 4"


def in_flight(grid: Grid) -> Array:
    """Micro-batches whose activations a stage holds at once, in units of the stage's own blocks."""
    stages, m = grid.degree("pp"), grid.accumulation
    if grid.fixed.pp_schedule == "gpipe":
        return np.where(stages > 1, in_flight_gpipe(m), 1)
    if grid.fixed.pp_schedule == "interleaved":
        chunks = in_flight_interleaved(grid.stage, stages, m, grid.fixed.vpp)
        return np.where(stages > 1, -(-chunks // grid.fixed.vpp), 1)
    return in_flight_1f1b(grid.stage, stages, m)


@dataclass(frozen=True, eq=False)
class GroupActivations:
    """Activations of one group of equal blocks over a grid."""

    group: BlockGroup
    layers: Array
    census: Census

    @cached_property
    def grid(self) -> Grid:
        """The grid of the census."""
        return self.census.grid

    @cached_property
    def tokens(self) -> Array:
        """Tokens of a micro-batch that pass these blocks on a rank."""
        fixed = self.census.model.fixed_tokens.get(self.group.tower)
        return self.grid.tokens if fixed is None else self.grid.micro_batch * -(-fixed // self.grid.degree("cp"))

    @cached_property
    def keys(self) -> int:
        """Keys that a token attends to."""
        return self.census.model.fixed_tokens.get(self.group.tower, self.grid.fixed.seq_len)

    @cached_property
    def inventory(self) -> tuple[Saved, ...]:
        """The tensors of one block."""
        fixed = self.grid.fixed
        return block_inventory(self.group.block, kernels=fixed.kernels, attention=fixed.attention)

    def width(self, saved: Saved) -> Array:
        """Bytes an element, by precision."""
        return np.asarray(saved.widths)[self.grid.precision_class]

    def bytes_of(self, saved: Saved) -> Array:
        """Bytes of one saved tensor of one block and one micro-batch on a rank."""
        ranks = {"tp": self.grid.degree("tp"), "sp": self.grid.sequence_shard, "none": np.int64(1)}[saved.shard]
        keys = self.keys if saved.quadratic else 1
        return saved_bytes(np.int64(saved.elements), self.tokens, self.width(saved), ranks, keys)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """How each policy of the grid treats these blocks."""
        return tuple(counts(policy, self.layers) for policy in self.grid.policies)

    def by_policy(self, values: list[Array]) -> Array:
        """Arrays over layout and stage, one a policy, stacked along the recompute axis."""
        return np.concatenate([np.broadcast_to(v, self.layers.shape) for v in values], axis=3)

    def kept_blocks(self, saved: Saved) -> Array:
        """Blocks of the stage that keep a tensor, by policy."""
        return (self.field("whole") + self.field("partial")) * self._kept(saved)

    def field(self, name: str) -> Array:
        """One field of the counts along the recompute axis."""
        return self.by_policy([getattr(c, name) for c in self.counts])

    @cached_property
    def whole_block(self) -> Array:
        """Bytes that one block keeps without recomputation, for one micro-batch."""
        return _sum([self.bytes_of(saved) for saved in self.inventory if not saved.ops_only])

    @cached_property
    def kept_of_one(self) -> Array:
        """Bytes that one block keeps by policy, where it is not checkpointed whole."""
        return _sum([self.bytes_of(saved) * self._kept(saved) for saved in self.inventory])

    def _kept(self, saved: Saved) -> Array:
        """1 along the recompute axis where a block that is not checkpointed whole keeps a tensor."""
        return column([keeps(policy, saved) for policy in self.grid.policies], "recompute")

    @cached_property
    def kept(self) -> Array:
        """Bytes that the stage's blocks keep for one micro-batch, checkpoints included."""
        blocks = self.field("whole") + self.field("partial")
        return blocks * self.kept_of_one + self.field("checkpoints") * self.checkpoint

    @cached_property
    def checkpoint(self) -> Array:
        """Bytes of one block's input."""
        return self.bytes_of(block_input(self.group.block))

    @cached_property
    def shared_input(self) -> Array:
        """Bytes of a block's inventory that are its input itself."""
        shared = [
            self.bytes_of(s) * np.asarray(s.is_input, dtype=np.int64)[self.grid.precision_class]
            for s in self.inventory
            if any(s.is_input)
        ]
        return _sum(shared) if shared else np.int64(0)

    @cached_property
    def again(self) -> Array:
        """Bytes that backward adds when it computes the last unit (or part of a block) again."""
        unit, partial = self.field("unit"), np.minimum(self.field("partial"), 1)
        checkpointed = unit * self.whole_block - np.minimum(unit, 1) * self.shared_input
        return np.where(partial > 0, self.whole_block - self.kept_of_one, checkpointed)

    @cached_property
    def first_unit(self) -> Array:
        """Bytes of the first unit of blocks while its backward runs."""
        unit = np.maximum(self.field("unit"), 1) * np.minimum(self.layers, 1)
        checkpoint = np.minimum(self.field("checkpoints"), 1)
        return unit * self.whole_block + checkpoint * (self.checkpoint - self.shared_input)


def _sum(arrays: list[Array]) -> Array:
    total: Array = np.int64(0)
    for array in arrays:
        total = total + array
    return total


@lru_cache(maxsize=4)
def groups_of(census: Census) -> list[GroupActivations]:
    """The activations of each group of blocks, computed once a census."""
    return [GroupActivations(g, n, census) for g, n in zip(census.model.groups, census.layers, strict=True)]


def activation_terms(census: Census, *, detail: bool) -> Iterator[Term]:
    """All terms of the activations; without ``detail`` the saved tensors of a group of blocks are one term."""
    groups, grid = groups_of(census), census.grid
    flight, here = in_flight(grid), 1 - grid.offloaded("activations")
    for activations in groups:
        if detail:
            yield from kept_terms(activations, flight * here)
        else:
            yield Term("activations", "kept by blocks", activations.kept * flight * here, KEPT, "sum", INVENTORY)
    if np.any(here == 0):
        transit = 2 * _largest([np.maximum(a.kept_of_one, a.checkpoint) for a in groups])
        moving = transit * grid.offloaded("activations")
        title = "blocks on their way to and from the host"
        yield Term("activations", title, moving, KEPT, "2 · kept of one block", INVENTORY)
    again = _largest([a.again for a in groups])
    formula = "unit · A - A_input, or A - A_kept where only a part is computed again"
    yield Term("activations", "block computed again", again, ("backward-last",), formula, INVENTORY)
    first = _largest([a.first_unit for a in groups])
    yield Term("activations", "first block", first, ("backward-first",), "unit · A + checkpoint", INVENTORY)
    if np.any(flight > 1):
        others = _sum([a.kept for a in groups]) * (flight - 1) * here
        pipeline = "arXiv:2104.04473 section 2.2"
        title = "other micro-batches in flight"
        yield Term("activations", title, others, ("backward-first",), "kept · (n - 1)", pipeline)
    yield transient_term(census, groups)
    yield from head_terms(census)


def _largest(arrays: list[Array]) -> Array:
    largest = arrays[0]
    for array in arrays[1:]:
        largest = np.maximum(largest, array)
    return largest


def kept_terms(activations: GroupActivations, factor: Array) -> Iterator[Term]:
    """One term a saved tensor: blocks that keep it × its bytes × micro-batches in flight."""
    tower = f"{activations.group.tower} " if len(activations.census.model.groups) > 1 else ""
    block = activations.group.block
    for saved in activations.inventory:
        blocks = activations.kept_blocks(saved)
        if not blocks.any():
            continue
        yield kept_term(activations, saved, f"{tower}{saved.name}", blocks, factor)
    checkpoints = activations.field("checkpoints")
    if checkpoints.any():
        yield kept_term(activations, block_input(block), f"{tower}checkpoints (block inputs)", checkpoints, factor)


def kept_term(activations: GroupActivations, saved: Saved, name: str, blocks: Array, factor: Array) -> Term:
    """The term of one saved tensor over all blocks that keep it."""
    inputs = {
        "elements": saved.elements,
        "T": activations.tokens,
        "w": activations.width(saved),
        "blocks": blocks,
        "n": factor,
        **({"s": activations.keys} if saved.quadratic else {}),
        **({"t": activations.grid.degree("tp")} if saved.shard == "tp" else {}),
    }
    divisor = {"tp": " / t", "sp": " / t" if np.any(activations.grid.sequence_shard > 1) else "", "none": ""}[
        saved.shard
    ]
    formula = f"({saved.expression}) · T · w · blocks · n{divisor}"
    return Term("activations", name, activations.bytes_of(saved) * blocks * factor, KEPT, formula, INVENTORY, inputs)


def transient_term(census: Census, groups: list[GroupActivations]) -> Term:
    """Gradients inside the block whose backward runs."""
    grid = census.grid
    width = np.asarray(COMPUTE)[grid.precision_class]
    parts = []
    for a in groups:
        mlp = a.group.block.mlp
        ffn = mlp.ffn * getattr(mlp, "topk", 1)
        parts.append(
            backward_transient_bytes(a.tokens, a.group.block.hidden, ffn, width, grid.degree("tp"))
            * np.minimum(a.layers, 1)
        )
    return Term(
        "activations",
        "gradients inside the block",
        _largest(parts),
        BACKWARD,
        "w · T · (2·f / t + 2·h)",
        INVENTORY,
        {"w": width, "T": grid.tokens},
    )


def head_terms(census: Census) -> Iterator[Term]:
    """The final norm's saved tensors and the logits with what the loss computes from them."""
    grid, model = census.grid, census.model
    outer = GroupActivations(model.groups[-1], census.layers[-1], census)
    if model.final_norm is not None:
        saved = norm_saved("final norm", model.final_norm, model.hidden, 1, grid.fixed.kernels)
        bytes_ = _sum([outer.bytes_of(s) for s in saved]) * grid.is_last
        yield Term(
            "activations",
            "final norm",
            bytes_,
            ("forward", "loss"),
            "input, statistics and output of the final norm",
            INVENTORY,
            {"T": outer.tokens, "h": model.hidden},
        )
    if model.head and model.vocab:
        yield from loss_terms(census)


def loss_terms(census: Census) -> Iterator[Term]:
    """The logits' bytes at the end of forward and in the loss's backward; one chunk where they are never stored."""
    grid, vocab = census.grid, census.model.vocab
    width = np.asarray(COMPUTE)[grid.precision_class]
    source = f"{grid.habits.name}'s {grid.fixed.loss} loss: {LOSS_SOURCES}"
    inputs = {"T": grid.tokens, "V": vocab}
    if grid.fixed.loss == "fused-linear":
        chunk = fused_linear_loss_bytes(grid.tokens, vocab, census.model.hidden, width) * grid.is_last
        yield Term(
            "activations",
            "loss in chunks of rows",
            chunk,
            ("forward", "loss"),
            "(w + 4) · V · c + w · T · h",
            "Liger-Kernel ops/fused_linear_cross_entropy.py v0.5.0",
            inputs,
        )
        return
    divided = grid.habits.vocab_parallel or grid.fixed.loss == "parallel"
    ranks = grid.degree("tp") if divided else np.int64(1)
    for phase, index in (("forward", 0), ("loss", 1)):
        in16, in32 = grid.habits.loss[grid.fixed.loss][index], FP32_LOGITS[index]
        numerator = np.where(width == 2, in16.numerator * in32.denominator, in32.numerator * in16.denominator)
        bytes_ = logits_bytes(grid.tokens, vocab, numerator, in16.denominator * in32.denominator, ranks)
        title = "logits and loss" if phase == "forward" else "logits and their gradients"
        formula = f"{in16} · T · V with 16-bit logits, {in32} · T · V with fp32" + (" / t" if divided else "")
        yield Term("activations", title, bytes_ * grid.is_last, (phase,), formula, source, inputs)
