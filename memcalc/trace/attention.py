"""Attention, as the operators between the norm and the residual sum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.checkpoint import region
from memcalc.trace.latent import latent_projections
from memcalc.trace.layers import Setting, linear, norm
from memcalc.trace.packed_adapter import PARTS, Packed, adapted_parts
from memcalc.trace.projection import Product
from memcalc.trace.scores import core, joined, repeated
from memcalc.trace.tape import Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.model import Attention, Norm


def attention(
    tape: Tape, x: Tensor, spec: Attention, setting: Setting, hidden: int, *, context: Tensor | None = None
) -> Tensor:
    """Multi-head attention with its projections; ``context`` is what cross attention reads instead of x."""
    prefix = "" if context is None else "cross-"
    q, k, v = projections(tape, x, spec, setting, x if context is None else context, prefix)

    def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(tape, q, k, v, spec, setting, prefix)

    out = region(tape, setting.checkpointed, "core_attn", scores, [q, k, v])
    del q, k, v
    return linear(tape, out, setting, f"{prefix}attention projection", hidden, "h", setting.branch_output)


def projections(
    tape: Tape, x: Tensor, spec: Attention, setting: Setting, context: Tensor, prefix: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values after their norms and the rotary embedding."""
    if spec.latent is not None:
        return latent_projections(tape, x, spec, spec.latent, setting)
    q_dim, kv_dim = spec.q_dim, spec.kv_dim
    if spec.packed_qkv:
        packed = packed_projection(tape, x, spec, setting, f"{prefix}query-key-value projection")
        q, k, v = ops.split(tape, packed, [q_dim, kv_dim, kv_dim], ["q", "k", "k"], "query-key-value projection")
        del packed
        if spec.kv_form == "broadcast":
            q, k, v = broadcast(tape, q, k, v, spec)
        elif spec.kv_form != "views":
            k, v = copied(tape, k, spec, "keys"), copied(tape, v, spec, "values")
    else:
        q = linear(tape, x, setting, f"{prefix}query projection", q_dim, "q", "tp")
        k = linear(tape, context, setting, f"{prefix}key projection", kv_dim, "k", "tp")
        v = linear(tape, context, setting, f"{prefix}value projection", kv_dim, "k", "tp")
    if spec.contiguous_queries:
        q = ops.plain(tape, q, f"{prefix}queries, scaled")
        q = ops.copy(tape, q, f"{prefix}queries, contiguous")
    if spec.qk_norm != "none":
        q = head_norm(tape, q, spec, setting, spec.heads, f"{prefix}query norm")
        k = head_norm(tape, k, spec, setting, spec.kv_heads, f"{prefix}key norm")
    if spec.rotary:
        q = rotary(tape, q, spec, setting, f"{prefix}queries")
        k = rotary(tape, k, spec, setting, f"{prefix}keys")
    return q, k, v


def packed_projection(tape: Tape, x: Tensor, spec: Attention, setting: Setting, name: str) -> Tensor:
    """One projection for queries, keys and values, with an adapter on all of it or on some of the three."""
    elements, label, lora = spec.q_dim + 2 * spec.kv_dim, "q + 2·k", setting.lora
    if lora is None or lora.targets.isdisjoint(PARTS):
        return linear(tape, x, setting, name, elements, label, "tp")
    parts = Packed(Product(name, setting.compute, elements, label, "tp"), (spec.q_dim, spec.kv_dim, spec.kv_dim))
    alone = replace(setting, lora=None)
    return adapted_parts(tape, x, lora, parts, lambda: linear(tape, x, alone, name, elements, label, "tp"))


def broadcast(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """``expand`` and ``reshape`` of interleaved heads: views where one head serves all, copies where it serves some."""
    if spec.kv_heads == spec.heads:
        return q, k, v
    size = k.size._replace(elements=spec.q_dim, label="q")
    if spec.kv_heads > 1:
        return (
            ops.copy(tape, q, "queries, copied"),
            ops.copy(tape, k, "keys, repeated", size),
            ops.copy(tape, v, "values, repeated", size),
        )
    return q, ops.expanded(tape, k, size, "keys"), ops.expanded(tape, v, size, "values")


def copied(tape: Tape, x: Tensor, spec: Attention, name: str) -> Tensor:
    """Keys or values indexed out of the packed projection, and expanded to all heads where the model does so."""
    x = ops.copy(tape, x, f"{name}, copied")
    return repeated(tape, x, spec, name) if spec.kv_form == "expanded" else x


def head_norm(tape: Tape, x: Tensor, spec: Attention, setting: Setting, heads: int, name: str) -> Tensor:
    """The norm of queries or keys: over each head, or over the whole projection."""
    kind: Norm = spec.qk_norm_kind
    groups = heads if spec.qk_norm == "head" else 1
    return norm(tape, x, kind, setting, name, groups=groups)


def rotary(tape: Tape, x: Tensor, spec: Attention, setting: Setting, name: str) -> Tensor:
    """The rotary embedding: only its result stays, since cosine and sine need no gradient."""
    if setting.kernels != "model" and setting.in_place:
        return ops.shifted(tape, x, name, in_place=True)
    if setting.compiled or setting.kernels != "model" or setting.rotary == "fused":
        wide = ops.plain(tape, ops.cast(tape, x, 4, f"{name} fp32"), f"{name} fp32, rotated")
        return ops.cast(tape, wide, x.size.width, name)
    narrow, width = x.size.width, 4 if spec.wide_rotary else max(x.size.width, setting.residual)
    if joined(spec):
        turned, label = round(x.size.elements * spec.rotary_fraction), x.size.label
        turning = ops.slice_of(tape, x, turned, label, f"{name}, part to rotate")
        rest = ops.slice_of(tape, x, x.size.elements - turned, label, f"{name}, part to pass")
        return ops.cat(tape, [_rotate(tape, turning, width, f"{name}, rotated part"), rest], name, label)
    out = _rotate(tape, x, width, name)
    return ops.cast(tape, out, narrow, f"{name}, cast") if spec.wide_rotary else out


def _rotate(tape: Tape, x: Tensor, width: int, name: str) -> Tensor:
    """``x * cos + rotate_half(x) * sin``, in the width of cosine and sine."""
    cosine = ops.scaled(tape, x, width, f"{name} · cos")
    half, label = x.size.elements // 2, x.size.label
    second = ops.plain(tape, ops.slice_of(tape, x, half, label, f"half of {name}"), f"half of {name}, negated")
    first = ops.slice_of(tape, x, half, label, f"half of {name}")
    swapped = ops.cat(tape, [second, first], f"{name}, halves swapped", label)
    del second, first
    return ops.add(tape, cosine, ops.scaled(tape, swapped, width, f"{name} · sin"), name)
