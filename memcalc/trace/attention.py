"""Attention, as the operators between the norm and the residual sum.

Multi-head latent attention: queries, keys and values out of low-rank projections (DeepSeek-V2, arXiv:2405.04434).

Source: Transformers 5.23 ``models/{deepseek_v2,deepseek_v3}/modeling_*.py``.

What a graph that somebody refers to keeps alive: the tensors that the nodes before a tensor saved.

Backward empties the nodes that it runs. A checkpoint that is no function of its own computes its block again to fill
the nodes of forward, and the graph of that second run, which no backward runs, stays as it is for whoever refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.adapters import PARTS, Packed, Product, adapted_parts
from memcalc.trace.checkpoint import region
from memcalc.trace.layers import WIDE, BlockConfig, linear, norm
from memcalc.trace.scores import core, joined, repeated
from memcalc.trace.tape import Edge, Grads, Node, Size, Storage, Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.specs.block import Attention, LatentAttention, Norm


def attention(
    tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig, hidden: int, *, context: Tensor | None = None
) -> Tensor:
    """Multi-head attention with its projections; ``context`` is what cross attention reads instead of x."""
    prefix = "" if context is None else "cross-"
    gate, variables = list[Tensor](), list[Tensor]()
    q, k, v = projections(tape, x, spec, setting, x if context is None else context, prefix, gate, variables)

    def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(tape, q, k, v, spec, setting, prefix)

    out = region(tape, setting.checkpointed, "core_attn", scores, [q, k, v], setting.rerun)
    if setting.kernels == "model" and not setting.compiled:
        variables += [q, k, v]
    del q, k, v
    if gate:
        out = ops.mul(tape, out, ops.saves_output(tape, gate.pop(), "output gate"), "attention output, gated")
    if spec.head_gate:
        heads = ops.saves_output(
            tape, linear(tape, x, setting, "gate of heads", spec.heads, "a", "tp"), "gate of heads"
        )
        out = ops.mul(tape, out, heads, "attention output, gated")
        del heads
    if spec.joins_images:
        out = ops.copy(tape, out, f"{prefix}attention output of all images")
    projected = linear(tape, out, setting, f"{prefix}attention projection", hidden, "h", setting.branch_output)
    del out  # the projection takes its name; queries, keys and values follow when the function returns
    return projected


def projections(
    tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig, context: Tensor, prefix: str, gate: list[Tensor],
    variables: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values after their norms and the rotary embedding; what gates the output goes to ``gate``.

    What a variable of the class holds until attention returns goes to ``variables``.
    """
    if spec.latent is not None:
        return latent_projections(tape, x, spec, spec.latent, setting)
    if spec.value_norm:
        return in_turn(tape, x, spec, setting)
    q_dim, kv_dim = spec.q_dim, spec.kv_dim
    if spec.packed_qkv:
        packed = packed_projection(tape, x, spec, setting, f"{prefix}query-key-value projection")
        q, k, v = ops.split(tape, packed, [q_dim, kv_dim, kv_dim], ["q", "k", "k"], "query-key-value projection")
        if spec.kv_form in ("copied", "expanded") and setting.kernels == "model" and not setting.compiled:
            variables.append(packed)  # Falcon's ``fused_qkv``
        del packed
        if spec.kv_form == "broadcast":
            q, k, v = broadcast(tape, q, k, v, spec)
        elif spec.kv_form != "views":
            q = ops.copy(tape, q, "queries, copied") if spec.kv_form == "expanded" and spec.kv_heads > 1 else q
            k, v = copied(tape, k, spec, "keys"), copied(tape, v, spec, "values")
    else:
        q = gated_queries(tape, x, spec, setting, prefix, gate)
        k = linear(tape, context, setting, f"{prefix}key projection", kv_dim, "k", "tp")
        v = linear(tape, context, setting, f"{prefix}value projection", kv_dim, "k", "tp")
    if spec.contiguous_queries:
        q = ops.plain(tape, q, f"{prefix}queries, scaled")
        q = ops.copy(tape, q, f"{prefix}queries, contiguous")
    if spec.qk_norm != "none" and not spec.late_qk_norm:
        q = head_norm(tape, q, spec, setting, spec.heads, f"{prefix}query norm")
        k = head_norm(tape, k, spec, setting, spec.kv_heads, f"{prefix}key norm")
    if spec.rotary and spec.complex_rotary and as_complex(setting):
        q, k = complex_rotary(tape, q, k, prefix)
    elif spec.rotary:
        pairs = own_tables(tape, spec, setting)
        # One function is given both, so that its caller holds them as projected until it returns
        rotated = [rotary(tape, q, spec, setting, f"{prefix}queries", pairs)]
        rotated.append(rotary(tape, k, spec, setting, f"{prefix}keys", pairs))
        q = rotated.pop(0)
        k = rotated.pop()
    if spec.qk_norm != "none" and spec.late_qk_norm:
        q = head_norm(tape, q, spec, setting, spec.heads, f"{prefix}query norm")
        k = head_norm(tape, k, spec, setting, spec.kv_heads, f"{prefix}key norm")
    if spec.scaled_queries:
        scales = tape.new(f"{prefix}scales of places", Size(1, WIDE, "row", "none", "1"))
        variables.append(scales)
        q = ops.cast(
            tape, ops.scaled(tape, q, WIDE, f"{prefix}queries, scaled", [scales]), q.size.width, "queries, cast"
        )
    return q, k, v


def in_turn(tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, then keys, then values, each with its norm; values may be keys as they are projected.

    Source: Transformers 5.24 ``models/gemma4/modeling_gemma4.py``, ``Gemma4TextAttention.forward``.
    """
    q = linear(tape, x, setting, "query projection", spec.q_dim, "q", "tp")
    q = rotary(tape, head_norm(tape, q, spec, setting, spec.heads, "query norm"), spec, setting, "queries")
    k = v = linear(tape, x, setting, "key projection", spec.kv_dim, "k", "tp")
    if not spec.values_of_keys:
        v = linear(tape, x, setting, "value projection", spec.kv_dim, "k", "tp")
    k = rotary(tape, head_norm(tape, k, spec, setting, spec.kv_heads, "key norm"), spec, setting, "keys")
    unweighted = spec.qk_norm_kind.model_copy(update={"weight": False})
    v = norm(tape, v, unweighted, setting, "value norm", groups=spec.kv_heads)
    if spec.shares_keys:
        tape.share([k, v], saved_before([k, v]))
    return q, k, v


def as_complex(setting: BlockConfig) -> bool:
    """Whether complex numbers are turned as the class writes it, by no kernel in its place."""
    return setting.kernels == "model" and not setting.compiled and setting.rotary != "fused"


def complex_rotary(tape: Tape, q: Tensor, k: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
    """Queries and keys as complex fp32 numbers, turned and cast back; variables of one function until it returns.

    Source: Transformers 5.24 ``models/llama4/modeling_llama4.py``, ``apply_rotary_emb``.
    """
    pairs = [(q, f"{prefix}queries"), (k, f"{prefix}keys")]
    wide = [ops.cast(tape, x, WIDE, f"{name}, fp32") for x, name in pairs]
    turned_ = [ops.plain(tape, x, f"{name}, fp32, rotated") for x, (_, name) in zip(wide, pairs, strict=True)]
    out = [ops.cast(tape, x, y.size.width, name) for x, (y, name) in zip(turned_, pairs, strict=True)]
    return out[0], out[1]


def gated_queries(
    tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig, prefix: str, gate: list[Tensor]
) -> Tensor:
    """Queries out of a projection of their own, which may hold a gate of the output beside each head."""
    name = f"{prefix}query projection"
    if not spec.output_gate:
        return linear(tape, x, setting, name, spec.q_dim, "q", "tp")
    both = linear(tape, x, setting, name, 2 * spec.q_dim, "2·q", "tp")
    q, other = ops.split(tape, both, [spec.q_dim] * 2, ["q"] * 2, name)
    del both
    gate.append(ops.copy(tape, other, "output gate, contiguous"))
    return q


def own_tables(tape: Tape, spec: Attention, setting: BlockConfig) -> list[Tensor]:
    """Cosine and sine as a block repeats their elements for itself; nothing where all blocks read the same ones."""
    if setting.kernels != "model" or setting.compiled or setting.rotary == "fused":
        return []
    width = 4 if spec.wide_rotary else setting.residual
    size = Size(round(spec.head_dim * spec.rotary_fraction), width, "row", "none", "d")
    return [tape.new(f"repeated {table}", size) for table in ("cosine", "sine") for _ in range(spec.rotary_pairs)]


def packed_projection(tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig, name: str) -> Tensor:
    """One projection for queries, keys and values, with an adapter on all of it or on some of the three."""
    elements, label, lora = spec.q_dim + 2 * spec.kv_dim, "q + 2·k", setting.lora
    if lora is None or lora.targets.isdisjoint(PARTS):
        return linear(tape, x, setting, name, elements, label, "tp")
    parts = Packed(Product(name, setting.compute, elements, label, "tp"), (spec.q_dim, spec.kv_dim, spec.kv_dim))
    alone = setting._replace(lora=None)
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
    return repeated(tape, x, spec, name, view=spec.kv_heads == 1) if spec.kv_form == "expanded" else x


def head_norm(tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig, heads: int, name: str) -> Tensor:
    """The norm of queries or keys: over each head, or over the whole projection."""
    kind: Norm = spec.qk_norm_kind
    groups = heads if spec.qk_norm == "head" else 1
    return norm(tape, x, kind, setting, name, groups=groups)


def rotary(
    tape: Tape, x: Tensor, spec: Attention, setting: BlockConfig, name: str, tables: Sequence[Tensor] = ()
) -> Tensor:
    """The rotary embedding: its result stays, and ``tables`` that the block made, which need no gradient."""
    if setting.kernels != "model" and "norms" in setting.in_place:
        return ops.shifted(tape, x, name, in_place=True)
    if setting.compiled or setting.kernels != "model" or setting.rotary == "fused":
        wide = ops.plain(tape, ops.cast(tape, x, 4, f"{name} fp32"), f"{name} fp32, rotated")
        return ops.cast(tape, wide, x.size.width, name)
    narrow, width = x.size.width, 4 if spec.wide_rotary else max(x.size.width, setting.residual)
    if joined(spec):
        turned, label = round(x.size.elements * spec.rotary_fraction), x.size.label
        turning = ops.slice_of(tape, x, turned, label, f"{name}, part to rotate")
        rest = ops.slice_of(tape, x, x.size.elements - turned, label, f"{name}, part to pass")
        return ops.cat(tape, [_rotate(tape, turning, width, f"{name}, rotated part", tables), rest], name, label)
    out = _rotate(tape, x, width, name, tables)
    return ops.cast(tape, out, narrow, f"{name}, cast") if spec.wide_rotary else out


def _rotate(tape: Tape, x: Tensor, width: int, name: str, tables: Sequence[Tensor] = ()) -> Tensor:
    """``x * cos + rotate_half(x) * sin``, in the width of cosine and sine."""
    cosine = ops.scaled(tape, x, width, f"{name} · cos", tables)
    half, label = x.size.elements // 2, x.size.label
    first = ops.slice_of(tape, x, half, label, f"half of {name}")
    second = ops.plain(tape, ops.slice_of(tape, x, half, label, f"half of {name}"), f"half of {name}, negated")
    swapped = ops.cat(tape, [second, first], f"{name}, halves swapped", label)
    del second, first
    sine = ops.scaled(tape, swapped, width, f"{name} · sin")
    del swapped
    return ops.add(tape, cosine, sine, name)


def latent_projections(
    tape: Tape, x: Tensor, spec: Attention, latent: LatentAttention, setting: BlockConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; the rotated part of a key is one for all heads."""
    nope, rope = latent.qk_nope_head_dim * spec.heads, latent.qk_rope_head_dim
    q = queries(tape, x, spec, latent, setting)
    if not spec.rotary:
        low = linear(tape, x, setting, "key-value down projection", latent.kv_lora_rank + rope, "r_kv + d_r")
        kv_low, k_turn = ops.split(tape, low, [latent.kv_lora_rank, rope], ["r_kv", "d_r"], "latent keys and values")
        del low
        kv_low = norm(tape, kv_low, spec.qk_norm_kind, setting, "key-value latent norm")
        return q, *keys_and_values(tape, kv_low, k_turn, spec, latent, setting)
    q_pass, q_turn = ops.split(tape, q, [nope, rope * spec.heads], ["a·d_n", "a·d_r"], "queries")
    del q
    low = linear(tape, x, setting, "key-value down projection", latent.kv_lora_rank + rope, "r_kv + d_r")
    kv_low, k_turn = ops.split(tape, low, [latent.kv_lora_rank, rope], ["r_kv", "d_r"], "latent keys and values")
    del low
    kv_low = norm(tape, kv_low, spec.qk_norm_kind, setting, "key-value latent norm")
    q_turn = turned(tape, q_turn, latent, setting, "queries' rotated part")
    k_turn = turned(tape, k_turn, latent, setting, "keys' rotated part")
    q = _joined(tape, q_pass, q_turn)
    k, v = keys_and_values(tape, kv_low, k_turn, spec, latent, setting)
    return q, k, v


def queries(tape: Tape, x: Tensor, spec: Attention, latent: LatentAttention, setting: BlockConfig) -> Tensor:
    """Queries through their low rank, or by one projection where there is none."""
    if latent.q_lora_rank is None:
        return linear(tape, x, setting, "query projection", spec.q_dim, "q", "tp")
    low = linear(tape, x, setting, "query down projection", latent.q_lora_rank, "r_q")
    low = norm(tape, low, spec.qk_norm_kind, setting, "query latent norm")
    return linear(tape, low, setting, "query up projection", spec.q_dim, "q", "tp")


def keys_and_values(
    tape: Tape, low: Tensor, k_turn: Tensor, spec: Attention, latent: LatentAttention, setting: BlockConfig
) -> tuple[Tensor, Tensor]:
    """Keys are copied into a new tensor beside their rotated part; values stay a view of the projection."""
    nope, values = latent.qk_nope_head_dim * spec.heads, latent.v_head_dim * spec.heads
    both = linear(tape, low, setting, "key-value up projection", nope + values, "a·(d_n + d_v)", "tp")
    k_pass, v = ops.split(tape, both, [nope, values], ["a·d_n", "a·d_v"], "keys and values")
    sizes = (k_pass.size, k_turn.size)

    def rule(grads: Grads) -> Grads:
        full = tape.new("gradient of keys", grads[0].size) if grads[0] else None
        del full
        return [tape.new("gradient of a part of keys", size) for size in sizes]

    keys = tape.new("keys", k_pass.size._replace(elements=spec.q_dim, label="q"))
    return tape.record(keys, [k_pass, k_turn], rule), v


def turned(tape: Tape, x: Tensor, latent: LatentAttention, setting: BlockConfig, name: str) -> Tensor:
    """The rotary embedding of the part that carries positions."""
    if latent.rotation == "complex":
        return _complex(tape, x, name)
    # Cosine and sine have the dtype of the residual stream, to which the product is promoted
    width, half, label = max(x.size.width, setting.residual), x.size.elements // 2, x.size.label
    even = ops.slice_of(tape, x, half, label, f"{name}, even")
    odd = ops.slice_of(tape, x, half, label, f"{name}, odd")
    first = _sum_of_products(tape, (even, odd), width, f"{name}, first half")
    second = _sum_of_products(tape, (odd, even), width, f"{name}, second half")
    return ops.cat(tape, [first, second], name, label)


def _complex(tape: Tape, x: Tensor, name: str) -> Tensor:
    """A product of complex fp32 numbers, cast back."""
    wide = ops.plain(tape, ops.cast(tape, x, 4, f"{name}, fp32"), f"{name}, fp32, rotated")
    return ops.cast(tape, wide, x.size.width, name)


def _sum_of_products(tape: Tape, pair: tuple[Tensor, Tensor], width: int, name: str) -> Tensor:
    """``a * cos ± b * sin``."""
    a, b = (ops.scaled(tape, part, width, f"{name}, product") for part in pair)
    return ops.add(tape, a, b, name)


def _joined(tape: Tape, first: Tensor, second: Tensor) -> Tensor:
    """Queries whole again: ``cat`` takes the wider of both dtypes."""
    width = max(first.size.width, second.size.width)
    first, second = (ops.cast(tape, part, width, "part of queries, cast") for part in (first, second))
    return ops.cat(tape, [first, second], "queries", "q")


def saved_before(tensors: Sequence[Tensor]) -> list[Storage]:
    """What the nodes saved that some tensors come from, each node once."""
    waiting: list[Edge | None] = [tensor.edge for tensor in tensors]
    seen: set[Node] = set()
    storages: list[Storage] = []
    while waiting:
        edge = waiting.pop()
        if not isinstance(edge, tuple) or edge[0] in seen:
            continue
        seen.add(edge[0])
        storages += edge[0].saved
        waiting += edge[0].edges
    return storages
