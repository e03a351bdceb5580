"""The parameter tensors of a model by their shapes, for optimizers whose states depend on them.

Tensors of two dimensions and more are listed one by one; of vectors (norms, biases, sinks) only their elements count,
so that they are what the census has beyond the listed ones.

The tensors of a rank one by one, and the groups of them that DeepSpeed's stage 3 updates at a time.

Linear layers, embedding and head are counted; norms and biases are too small to matter. Adapters are left out. Of a
recorded model all tensors are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.specs.block import MixtureOfExperts
from memcalc.terms.parameters import channels_of, shapes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.specs.block import Attention, Block, LatentAttention, Mlp
    from memcalc.specs.model import Model, Outside
    from memcalc.specs.recorded import Recording
    from memcalc.terms.model_on_grid import ModelOnGrid


# The linear layers of a model, by the words that name them: what adapters and quantisation apply to.


@dataclass(frozen=True, slots=True)
class Matrix:
    """Equal linear layers of one block, or one outside the blocks."""

    target: str
    """q, k, v, qkv, o, gate, up, gate_up, down; q_a, q_b, kv_a, kv_b (latent attention); router; shared_gate;
    embedding, head."""
    inputs: int
    outputs: int
    count: int = 1
    routed: bool = False
    """A matrix of the routed experts."""
    parts: tuple[tuple[str, int], ...] = ()
    """The layers that are packed in it, by target, with their outputs."""

    @property
    def elements(self) -> int:
        """Weights of all of them, biases left out [elements]."""
        return self.count * self.inputs * self.outputs


WHOLE = ("q_a", "kv_a")
"""Matrices that tensor parallelism does not divide: latent attention's down projections."""


def block_matrices(block: Block) -> tuple[Matrix, ...]:
    """All linear layers of a block; a recorded one has its tensors instead (:mod:`memcalc.specs.recorded`)."""
    if block.recorded is not None:
        return ()
    linears = [Matrix(*shape) for shape in shapes_of(block.mixer, block.hidden)] if block.mixer else []
    if block.attention is not None:
        linears += _attention(block.attention, block.hidden, block.hidden)
    if block.cross_attention is not None:
        linears += _attention(block.cross_attention, block.hidden, block.cross_hidden or block.hidden)
    return (*linears, *(_mlp(block.mlp, block.hidden) if block.mlp else ()))


def elements_of(block: Block) -> tuple[int, int, int]:
    """A block's weights that are quantised: those that TP divides, those that it does not, and routed experts'."""
    matrices = [matrix for matrix in block_matrices(block) if matrix.target != "router"]
    routed = sum(matrix.elements for matrix in matrices if matrix.routed)
    replicated = sum(matrix.elements for matrix in matrices if matrix.target in WHOLE)
    return sum(matrix.elements for matrix in matrices) - routed - replicated, replicated, routed


def linear_layers(block: Block, *, stacked: bool) -> tuple[Matrix, ...]:
    """Those that are linear layers in the block's class: no routed experts whose weights are ``stacked`` in one tensor.

    Transformers 5.24 ``models/*/modeling_*.py``; PEFT adapts linear layers, and bitsandbytes quantises them.
    """
    mixture = block.mlp if isinstance(block.mlp, MixtureOfExperts) else None
    apart = stacked or (mixture is not None and mixture.unlisted)
    listed = [matrix for matrix in block_matrices(block) if not (matrix.routed and apart)]
    if mixture is not None and mixture.shared_gate:
        listed.append(Matrix("shared_gate", block.hidden, 1))
    return tuple(listed)


def outside_matrices(model: Model) -> tuple[Matrix, ...]:
    """The token embedding and the head."""
    width = model.embedding_dim or model.hidden
    embedding = [Matrix("embedding", model.vocab, width)] if model.vocab else []
    return (*embedding, *([Matrix("head", width, model.vocab)] if model.head and model.vocab else []))


def _attention(spec: Attention, hidden: int, source: int) -> Iterator[Matrix]:
    if spec.latent is not None:
        yield from _latent(spec, spec.latent, hidden)
        return
    if spec.packed_qkv:
        parts = (("q", spec.q_dim), ("k", spec.kv_dim), ("v", spec.kv_dim))
        yield Matrix("qkv", hidden, spec.q_dim + 2 * spec.kv_dim, parts=parts)
    else:
        yield Matrix("q", hidden, spec.q_dim * (1 + spec.output_gate))
        yield Matrix("k", source, spec.kv_dim)
        if not spec.values_of_keys:
            yield Matrix("v", source, spec.kv_dim)
    yield Matrix("o", spec.q_dim, hidden)


def _latent(spec: Attention, latent: LatentAttention, hidden: int) -> Iterator[Matrix]:
    queries = spec.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if latent.q_lora_rank:
        yield Matrix("q_a", hidden, latent.q_lora_rank)
        yield Matrix("q_b", latent.q_lora_rank, queries)
    else:
        yield Matrix("q", hidden, queries)
    yield Matrix("kv_a", hidden, latent.kv_lora_rank + latent.qk_rope_head_dim)
    yield Matrix("kv_b", latent.kv_lora_rank, spec.heads * (latent.qk_nope_head_dim + latent.v_head_dim))
    yield Matrix("o", spec.heads * latent.v_head_dim, hidden)


def _mlp(mlp: Mlp | MixtureOfExperts, hidden: int) -> Iterator[Matrix]:
    if not isinstance(mlp, MixtureOfExperts):
        yield from _dense(mlp.ffn, hidden, gated=mlp.gated, packed=mlp.packed)
        return
    yield Matrix("router", hidden, mlp.experts)
    yield from _dense(mlp.ffn, hidden, gated=mlp.gated, count=mlp.experts)
    if mlp.shared_ffn:
        yield from _dense(mlp.shared_ffn, hidden, gated=mlp.gated, packed=mlp.shared_packed)


def _dense(ffn: int, hidden: int, *, gated: bool, packed: bool = False, count: int = 0) -> Iterator[Matrix]:
    many, routed = count or 1, bool(count)
    if gated and packed:
        yield Matrix("gate_up", hidden, 2 * ffn, many, routed)
    else:
        if gated:
            yield Matrix("gate", hidden, ffn, many, routed)
        yield Matrix("up", hidden, ffn, many, routed)
    yield Matrix("down", ffn, hidden, many, routed)


Division = Literal["none", "rows", "columns"]
"""Which dimension of a weight tensor parallelism divides."""
Place = Literal["first", "last"]

BY_COLUMNS = ("o", "down")
"""Linear layers whose inputs tensor parallelism divides; of all others but those below it divides the outputs."""
UNDIVIDED = ("q_a", "kv_a", "router", "shared_gate")
LINEAR = ("pooler", "projection", "project_in", "project_out", "head_transform", "classifier")
"""Endings of the names of linear layers outside the blocks."""
VECTORS = {"pooler": 1, "head_transform": 3}
"""Vectors as wide as the model that are counted with a linear layer: its bias, and a norm."""
TABLES = ("positions", "token_types")
CHANNELS = 3
"""Colours of an image."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Equal parameter tensors of two dimensions or more."""

    target: str
    """As :class:`memcalc.terms.tensors.Matrix` names it, or that of a tensor outside the blocks."""
    shape: tuple[int, ...]
    """Sizes of its dimensions, rows before columns [1]."""
    count: int = 1
    """Tensors of this kind in one block [1]."""
    routed: bool = False
    """Of the routed experts: one tensor an expert, or all stacked where the shape has three dimensions."""
    divided: Division = "none"
    linear: bool = False
    """The weight of an ``nn.Linear`` in Transformers' class."""

    @property
    def elements(self) -> int:
        """Elements of all of them [1]."""
        return self.count * prod(self.shape)


class Layout(NamedTuple):
    """How a framework's classes lay their weights out."""

    packed: bool = False
    """Queries, keys and values are one weight, and so are gate and up, whatever the architecture (Megatron-LM)."""
    stacked: bool = False
    """All routed experts are one tensor of three dimensions (Transformers from 5.0 on, torchtitan, torchtune)."""
    joined: bool = False
    """Gate and up of stacked experts are one tensor (Transformers)."""


@lru_cache(maxsize=256)
def block_tensors(block: Block, layout: Layout) -> tuple[Tensor, ...]:
    """Return the tensors of one block that are no vectors."""
    matrices = block_matrices(block)
    if layout.packed:
        matrices = tuple(_packed(matrices))
    dense = [_tensor(m) for m in matrices if not (m.routed and layout.stacked)]
    routed = [m for m in matrices if m.routed and layout.stacked]
    mlp, beside = block.mlp, _filters(block)
    if block.attention is not None and block.attention.head_gate:
        beside.append(Tensor("head_gate", (block.attention.heads, block.hidden), linear=True))
    if isinstance(mlp, MixtureOfExperts):
        if layout.stacked:  # the router is no nn.Linear there either
            dense = [replace(t, linear=False) if t.target == "router" else t for t in dense]
        if mlp.shared_gate:
            beside.append(Tensor("shared_gate", (1, block.hidden), linear=True))
    return (*dense, *_stacked(routed, layout, mlp), *beside)


def _filters(block: Block) -> list[Tensor]:
    """The weight of a mixer's convolution, one filter for each channel."""
    mixer = block.mixer
    return [] if mixer is None else [Tensor("mixer_filter", (channels_of(mixer, block.hidden), 1, mixer.taps))]


def _tensor(matrix: Matrix) -> Tensor:
    divided: Division = "columns" if matrix.target in BY_COLUMNS else "rows"
    return Tensor(
        matrix.target,
        (matrix.outputs, matrix.inputs),
        matrix.count,
        matrix.routed,
        "none" if matrix.target in UNDIVIDED else divided,
        linear=True,
    )


def _packed(matrices: tuple[Matrix, ...]) -> Iterator[Matrix]:
    """Weights of one input side by side: queries with keys and values, gate with up."""
    rest = list(matrices)
    while rest:
        matrix = rest.pop(0)
        for first, others, name in (("q", ("k", "v"), "qkv"), ("gate", ("up",), "gate_up")):
            beside = rest[: len(others)]
            if matrix.target == first and tuple(m.target for m in beside) == others:
                del rest[: len(others)]
                matrix = replace(matrix, target=name, outputs=matrix.outputs + sum(m.outputs for m in beside))
        yield matrix


def _stacked(matrices: list[Matrix], layout: Layout, mlp: object) -> Iterator[Tensor]:
    """The routed experts' weights, and their biases, as one tensor for each linear layer of an expert."""
    for matrix in _packed(tuple(matrices)) if layout.joined else matrices:
        shape = (matrix.count, matrix.outputs, matrix.inputs)
        divided: Division = "columns" if matrix.target in BY_COLUMNS else "rows"
        yield Tensor(matrix.target, shape, 1, routed=True, divided=divided)
        if isinstance(mlp, MixtureOfExperts) and mlp.expert_bias:
            yield Tensor("expert_bias", (matrix.count, matrix.outputs), 1, routed=True)


def end_tensors(model: Model) -> tuple[tuple[Place, Tensor], ...]:
    """Return the tensors outside the blocks that are no vectors, each with the end that owns it.

    A tied head is the embedding's tensor, and not listed again.
    """
    listed: list[tuple[Place, Tensor]] = []
    for matrix in outside_matrices(model):
        head = matrix.target == "head"
        if not (head and model.tied):
            shape = (matrix.outputs, matrix.inputs) if head else (matrix.inputs, matrix.outputs)
            listed.append(("last" if head else "first", Tensor(matrix.target, shape, divided="rows", linear=head)))
    for tensor in model.outside:
        listed += [(tensor.place, each) for each in _outside(model, tensor)]
    return tuple(listed)


def _outside(model: Model, tensor: Outside) -> Iterator[Tensor]:
    """What a named tensor outside the blocks stands for; nothing where it is a vector."""
    group = next((g for g in model.groups if g.tower == tensor.tower), model.groups[0])
    width, ends = group.block.hidden, model.ends_of(tensor.tower)
    shapes: list[tuple[int, ...]] = []
    if tensor.name.endswith("relative_bias"):
        heads = group.block.own_attention.heads
        shapes = [(tensor.parameters // heads, heads)]
    elif tensor.name == "convolutions":
        shapes = [(width, ends.mel_bins, 3), (width, width, 3)]
    elif tensor.name == "patches":
        side = round((ends.patch / CHANNELS) ** 0.5)
        shapes = [(width, CHANNELS, side, side)]
    elif tensor.name.endswith((*LINEAR, *TABLES)):
        vectors = VECTORS.get(tensor.name, 0) * width
        biased = tensor.name == "classifier"
        shapes = [((tensor.parameters - vectors) // (width + biased), width)]
    for shape in shapes:
        yield Tensor(tensor.name, shape, linear=tensor.name.endswith(LINEAR))


def tensors(census: ModelOnGrid, where: Array | bool) -> Iterator[tuple[Array, Array]]:
    """How many tensors of a kind a rank has, and the elements of its part of each; divided where ``where`` holds."""
    for group, layers in zip(census.model.groups, census.layers, strict=True):
        for matrix in block_matrices(group.block):
            count, elements, ranks = _on_rank(census, matrix, where)
            yield layers * count, shard(elements, ranks)
    grid = census.grid
    ranks = grid.degree("tp") * np.where(where, grid.ranks, 1)
    if census.model.recording is not None:
        yield from recorded_tensors(census, census.model.recording, ranks)
        return
    for matrix in outside_matrices(census.model):
        first = matrix.target == "embedding"
        if first or not census.model.tied:
            yield grid.is_first if first else grid.is_last, shard(matrix.elements, ranks)


def recorded_tensors(census: ModelOnGrid, recording: Recording, ranks: Array) -> Iterator[tuple[Array, Array]]:
    """The same of a recorded model, whose tensors are known one by one."""
    single = np.int64(1)
    for layers, part in zip(census.layers, census.model.recorded_blocks, strict=True):
        yield from ((layers, shard(elements, ranks)) for elements in part.tensors)
    for end in (recording.entry, recording.head):
        yield from ((single, shard(elements, ranks)) for elements in end.tensors)


def _on_rank(census: ModelOnGrid, matrix: Matrix, where: Array | bool) -> tuple[Array, int, Array]:
    """Tensors of one block, the elements of each before sharding, and what divides them.

    The routed experts of a layer are one tensor, unless the framework has a module for each.
    """
    grid, elements = census.grid, matrix.inputs * matrix.outputs
    if not matrix.routed:
        return np.int64(matrix.count), elements, grid.degree("tp") * np.where(where, grid.ranks, 1)
    ranks = grid.expert_tp * np.where(where, grid.expert_ranks, 1)
    if grid.habits.expert_loop:
        return matrix.count // grid.degree("ep"), elements, ranks
    return np.int64(1), elements * matrix.count, ranks * grid.degree("ep")


def largest_group(census: ModelOnGrid, limit: int) -> Array:
    """Elements of the largest of the groups into which a rank's tensors are laid until each has ``limit`` or more.

    Source: DeepSpeed edaa722 runtime/zero/stage3.py, _create_fp16_sub_groups: a group ends behind the tensor that fills
    it, and the last one with the last tensor, so that a group is larger than ``limit`` by up to that tensor's part.
    """
    group: Array = np.int64(0)
    largest: Array = np.int64(0)
    for part in _in_order(census):
        group = group + part
        largest = np.maximum(largest, group)
        group = np.where(group >= limit, 0, group)
    return np.asarray(largest)


def _in_order(census: ModelOnGrid) -> Iterator[Array]:
    """A rank's part of each tensor under stage 3, as the modules have them: embedding, blocks, head."""
    model, ranks = census.model, census.grid.degree("tp") * census.grid.ranks
    if model.recording is not None:
        for layers, part in recorded_tensors(census, model.recording, ranks):
            yield from [part] * int(np.max(layers))
        return
    ends = {matrix.target == "embedding": shard(matrix.elements, ranks) for matrix in outside_matrices(model)}
    yield ends.get(True, np.int64(0))
    for group in model.groups:
        for _ in range(group.count):
            for matrix in block_matrices(group.block):
                count, elements, shares = _on_rank(census, matrix, where=True)
                yield from [shard(elements, shares)] * int(np.max(count))
    if not model.tied:
        yield ends.get(False, np.int64(0))
