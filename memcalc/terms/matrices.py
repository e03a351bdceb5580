"""The linear layers of a model, by the words that name them: what adapters and quantisation apply to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.specs.block import MixtureOfExperts

if TYPE_CHECKING:
    from memcalc.specs.block import Attention, Block, LatentAttention, Mlp
    from memcalc.specs.model import Model


@dataclass(frozen=True, slots=True)
class Matrix:
    """Equal linear layers of one block, or one outside the blocks."""

    target: str
    """q, k, v, qkv, o, gate, up, gate_up, down; q_a, q_b, kv_a, kv_b (latent attention); router; embedding, head."""
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


def block_matrices(block: Block) -> tuple[Matrix, ...]:
    """All linear layers of a block; a recorded one has its tensors instead (:mod:`memcalc.specs.recorded`)."""
    if block.recorded is not None:
        return ()
    linears = [*_attention(block.attention, block.hidden, block.hidden)]
    if block.cross_attention is not None:
        linears += _attention(block.cross_attention, block.hidden, block.cross_hidden or block.hidden)
    return (*linears, *_mlp(block.mlp, block.hidden))


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
        yield Matrix("q", hidden, spec.q_dim)
        yield Matrix("k", source, spec.kv_dim)
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
        yield from _dense(mlp.shared_ffn, hidden, gated=mlp.gated)


def _dense(ffn: int, hidden: int, *, gated: bool, packed: bool = False, count: int = 0) -> Iterator[Matrix]:
    many, routed = count or 1, bool(count)
    if gated and packed:
        yield Matrix("gate_up", hidden, 2 * ffn, many, routed)
    else:
        if gated:
            yield Matrix("gate", hidden, ffn, many, routed)
        yield Matrix("up", hidden, ffn, many, routed)
    yield Matrix("down", ffn, hidden, many, routed)
