"""The tensors that autograd keeps in one block: the inventory from which every activation figure is summed.

Legend: T tokens of a micro-batch on a rank, h hidden, a heads, q = a * head_dim, k = kv_heads * head_dim, f ffn,
s keys.
Widths are bytes an element for three classes of precision, in this order: 16-bit weights, fp32 weights under
autocast, fp32 throughout.

Checked with PyTorch 2.13 (unique storages saved for backward, real Transformers 5.23 classes on fake tensors):
Llama-2-7B 45.533 h bytes a token with flash attention, GPT-2 58.083, BERT-large 34.078.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from memcalc.specs.model import Attention, Block, LatentAttention, MixtureOfExperts, Mlp, Norm

Widths = tuple[int, int, int]
Shard = Literal["tp", "sp", "none"]
Part = Literal["input", "norm", "mask", "qkv", "mla_up", "core", "attn_out", "mlp", "moe", "moe_act", "op"]

COMPUTE: Widths = (2, 2, 4)
RESIDUAL: Widths = (2, 4, 4)
FP32: Widths = (4, 4, 4)
BYTE: Widths = (1, 1, 1)
ABSENT_IN_FP32: Widths = (2, 2, 0)

PRECISION_CLASS = {
    "bf16": 0,
    "bf16-mixed": 0,
    "fp16-mixed": 0,
    "fp8-mixed": 0,
    "bf16-autocast": 1,
    "fp16-autocast": 1,
    "fp32": 2,
}


@dataclass(frozen=True)
class Saved:
    """One tensor that a block keeps for backward."""

    name: str
    elements: int
    """Elements a token, or a token and key where ``quadratic``."""
    widths: Widths
    shard: Shard
    """`tp`: divided by TP; `sp`: divided by TP where sequence parallelism is on; `none`: whole on each rank."""
    part: Part
    quadratic: bool = False
    expression: str = ""
    """The formula a token in the letters of the legend."""
    is_input: tuple[bool, bool, bool] = (False, False, False)
    """Where true, this storage is the block's input itself, which a checkpoint keeps anyway."""
    ops_only: bool = False
    """Kept by the selective-operator policy alone: output of a matmul that plain autograd does not need."""
    in_ops: bool = False
    """Kept by the selective-operator policy."""


def block_input(block: Block) -> Saved:
    """The residual stream on entry: what a checkpoint of the whole block keeps (2h bytes; 4h where it is fp32)."""
    return Saved("block input", block.hidden, RESIDUAL, "sp", "input", expression="h")


def block_inventory(block: Block, *, kernels: str, attention: str, dropout: bool = True) -> tuple[Saved, ...]:
    """Every tensor kept in one block without recomputation, in the order of execution.

    ``kernels`` is ``model`` (norms as the model's code writes them) or ``fused``; ``attention`` is the kernel;
    ``dropout`` switches the model's own dropout probabilities on.
    """
    parts: list[Saved] = []
    readers = 1 if block.attention.packed_qkv or block.attention.latent else 3
    mlp_readers = 2 if getattr(block.mlp, "gated", False) and not block.is_moe else 1
    if block.norms:
        parts += norm_saved("attention norm", block.norm, block.hidden, readers, kernels, first=True)
    parts += attention_saved(block.attention, attention, dropout=dropout)
    if block.cross_attention is not None:
        parts += norm_saved("cross-attention norm", block.norm, block.hidden, 1, kernels)
        parts += attention_saved(block.cross_attention, attention, dropout=dropout, prefix="cross-")
    if dropout and block.dropout:
        parts.append(Saved("attention dropout mask", block.hidden, BYTE, "sp", "mask", expression="h"))
    if block.norms > 1 and not block.parallel:
        parts += norm_saved("MLP norm", block.norm, block.hidden, mlp_readers, kernels)
    for index in range(2 + 2 * bool(block.cross_attention), block.norms):
        parts += norm_saved(f"output norm {index - 1}", block.norm, block.hidden, 0, kernels)
    parts += mlp_saved(block.mlp, block.hidden, kernels)
    if dropout and block.dropout:
        parts.append(Saved("MLP dropout mask", block.hidden, BYTE, "sp", "mask", expression="h"))
    return tuple(parts)


def norm_saved(name: str, norm: Norm, hidden: int, readers: int, kernels: str, *, first: bool = False) -> list[Saved]:
    """A norm's saved tensors. Under autocast each of the ``readers`` linears keeps its own 16-bit copy of the output.

    An RMSNorm that the model writes out keeps an fp32 copy of its input, the normalised tensor and the product;
    LayerNorm and a fused RMSNorm keep the input, the output and their statistics.
    """
    own = first
    output: Widths = (2 if readers else 0, 2 * readers, 4 if readers else 0)
    out = Saved(f"{name} output", hidden, output, "sp", "norm", expression="h")
    if norm.kind == "layernorm":
        saved_input = Saved(f"{name} input", hidden, RESIDUAL, "sp", "norm", expression="h", is_input=(own, own, own))
        return [saved_input, Saved(f"{name} mean and rstd", 2, FP32, "sp", "norm", expression="2"), out]
    rstd = Saved(f"{name} rstd", 1, FP32, "sp", "norm", expression="1")
    if kernels == "fused":
        saved_input = Saved(f"{name} input", hidden, RESIDUAL, "sp", "norm", expression="h", is_input=(own, own, own))
        return [saved_input, rstd, out]
    copy = Saved(f"{name} fp32 copy", hidden, FP32, "sp", "norm", expression="h", is_input=(False, own, own))
    return [copy, rstd, Saved(f"{name} normalised", hidden, RESIDUAL, "sp", "norm", expression="h"), out]


def attention_saved(attn: Attention, kernel: str, *, dropout: bool, prefix: str = "") -> list[Saved]:
    """Queries, keys, values, the scores where they are materialised, and the output (input of the projection)."""
    materialised = kernel in {"eager", "math"}
    saved = latent_saved(attn, attn.latent) if attn.latent else qkv_saved(attn, prefix, repeated=materialised)
    saved += scores_saved(attn, dropout=dropout) if materialised else [logsumexp(attn, prefix)]
    width = attn.heads * (attn.latent.v_head_dim if attn.latent else attn.head_dim)
    saved.append(Saved(f"{prefix}attention output", width, COMPUTE, "tp", "attn_out", expression="q", in_ops=True))
    return saved


def qkv_saved(attn: Attention, prefix: str, *, repeated: bool) -> list[Saved]:
    """q, k, v after rotary; with materialised scores the keys and values are repeated to all heads."""
    kv = attn.q_dim if repeated else attn.kv_dim
    letter = "q" if repeated else "k"
    saved = [
        Saved(f"{prefix}query projection", attn.q_dim, COMPUTE, "tp", "op", expression="q", ops_only=True, in_ops=True),
        Saved(f"{prefix}queries", attn.q_dim, COMPUTE, "tp", "qkv", expression="q"),
        Saved(f"{prefix}keys", kv, COMPUTE, "tp", "qkv", expression=letter),
        Saved(f"{prefix}values", kv, COMPUTE, "tp", "qkv", expression=letter, in_ops=True),
    ]
    return saved + (qk_norm_saved(attn, prefix) if attn.qk_norm != "none" else [])


def qk_norm_saved(attn: Attention, prefix: str) -> list[Saved]:
    """The norms of q and k: an fp32 copy and the normalised tensor each."""
    width = attn.q_dim + attn.kv_dim
    return [
        Saved(f"{prefix}q and k norm fp32 copies", width, FP32, "tp", "qkv", expression="q + k"),
        Saved(f"{prefix}q and k normalised", width, COMPUTE, "tp", "qkv", expression="q + k"),
    ]


def logsumexp(attn: Attention, prefix: str) -> Saved:
    """What a fused attention kernel keeps instead of the scores: 4a bytes a token."""
    return Saved(f"{prefix}attention logsumexp", attn.heads, FP32, "tp", "core", expression="a", in_ops=True)


def scores_saved(attn: Attention, *, dropout: bool) -> list[Saved]:
    """Materialised scores: the textbook 5as/h with dropout, 6as/h where the softmax runs in fp32 and is copied back."""
    upcast = attn.rotary
    widths: Widths = (4, 4, 4) if upcast else COMPUTE
    saved = [Saved("attention softmax", attn.heads, widths, "tp", "core", quadratic=True, expression="a·s")]
    if upcast:
        saved.append(
            Saved(
                "attention softmax, 16-bit copy",
                attn.heads,
                ABSENT_IN_FP32,
                "tp",
                "core",
                quadratic=True,
                expression="a·s",
            )
        )
    if dropout and attn.dropout:
        saved.append(Saved("attention dropout mask", attn.heads, BYTE, "tp", "core", quadratic=True, expression="a·s"))
        saved.append(
            Saved("attention softmax, dropped", attn.heads, COMPUTE, "tp", "core", quadratic=True, expression="a·s")
        )
    return saved


def latent_saved(attn: Attention, latent: LatentAttention) -> list[Saved]:
    """Multi-head latent attention: the low-rank projections with their norms, then full-width q, k, v."""
    ranks = (latent.q_lora_rank or 0) * 2 + 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
    qk = attn.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    values = attn.heads * latent.v_head_dim
    return [
        Saved(
            "latent projections and norms", ranks, COMPUTE, "none", "qkv", expression="2·q_rank + 2·kv_rank + d_rope"
        ),
        Saved("queries", qk, COMPUTE, "tp", "mla_up", expression="a·(d_nope + d_rope)"),
        Saved("keys", qk, COMPUTE, "tp", "mla_up", expression="a·(d_nope + d_rope)"),
        Saved("values", values, COMPUTE, "tp", "mla_up", expression="a·d_v", in_ops=True),
    ]


def mlp_saved(mlp: Mlp | MixtureOfExperts, hidden: int, kernels: str) -> list[Saved]:
    """The MLP's intermediates; a routed MLP keeps them for each of the top-k experts of a token."""
    experts = getattr(mlp, "experts", 0)
    if not experts:
        saved = dense_saved("MLP", mlp.ffn, mlp.activation, kernels, gated=mlp.gated, part="mlp")
        return [*saved, Saved("MLP output", hidden, COMPUTE, "none", "op", expression="h", ops_only=True, in_ops=True)]
    topk, shared = int(mlp.topk), int(mlp.shared_ffn)  # type: ignore[union-attr]
    saved = [
        Saved("router probabilities", 2 * experts, FP32, "sp", "moe", expression="2·E"),
        Saved("routed tokens", topk * hidden, COMPUTE, "sp", "moe", expression="topk·h"),
        *dense_saved("experts'", topk * mlp.ffn, mlp.activation, kernels, gated=mlp.gated, part="moe"),
        Saved("routed outputs", topk * hidden, COMPUTE, "sp", "moe", expression="topk·h"),
    ]
    return saved + (
        dense_saved("shared experts'", shared, mlp.activation, kernels, gated=mlp.gated, part="mlp") if shared else []
    )


KEPT_BY_ACTIVATION = {"gelu_python": 4, "gelu_new": 4, "gelu_fast": 4, "relu": 0}
"""Tensors of width ffn that an ungated activation keeps besides its output; one (its input) where not listed."""


def dense_saved(name: str, ffn: int, activation: str, kernels: str, *, gated: bool, part: Part) -> list[Saved]:
    """Intermediates of width f: gate, up, activation, product where gated; else the activation's input and output."""
    act_part: Part = "moe_act" if part == "moe" else part
    out = Saved(f"{name} product", ffn, COMPUTE, "tp", act_part, expression="f")
    if gated:
        fused = (
            []
            if kernels == "fused-act"
            else [Saved(f"{name} activation of gate", ffn, COMPUTE, "tp", act_part, expression="f")]
        )
        gate = Saved(f"{name} gate", ffn, COMPUTE, "tp", part, expression="f", in_ops=True)
        return [gate, Saved(f"{name} up", ffn, COMPUTE, "tp", part, expression="f"), *fused, out]
    kept = KEPT_BY_ACTIVATION.get(activation, 1)
    kept = min(kept, 1) if kernels == "fused" else kept
    inner = [Saved(f"{name} up", ffn, COMPUTE, "tp", part, expression="f", ops_only=not kept, in_ops=True)]
    if kept > 1:
        rest = kept - 1
        steps = f"{name} activation, step by step"
        inner.append(Saved(steps, rest * ffn, COMPUTE, "tp", part, expression=f"{rest}·f"))
    return [*inner, out]
