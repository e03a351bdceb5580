"""Multi-head latent attention: queries, keys and values out of low-rank projections (DeepSeek-V2, arXiv:2405.04434).

Source: Transformers 5.23 ``models/{deepseek_v2,deepseek_v3}/modeling_*.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.layers import Setting, linear, norm
from memcalc.trace.tape import Grads, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.model import Attention, LatentAttention


def latent_projections(
    tape: Tape, x: Tensor, spec: Attention, latent: LatentAttention, setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; the rotated part of a key is one for all heads."""
    nope, rope = latent.qk_nope_head_dim * spec.heads, latent.qk_rope_head_dim
    q = queries(tape, x, spec, latent, setting)
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


def queries(tape: Tape, x: Tensor, spec: Attention, latent: LatentAttention, setting: Setting) -> Tensor:
    """Queries through their low rank, or by one projection where there is none."""
    if latent.q_lora_rank is None:
        return linear(tape, x, setting, "query projection", spec.q_dim, "q", "tp")
    low = linear(tape, x, setting, "query down projection", latent.q_lora_rank, "r_q")
    low = norm(tape, low, spec.qk_norm_kind, setting, "query latent norm")
    return linear(tape, low, setting, "query up projection", spec.q_dim, "q", "tp")


def keys_and_values(
    tape: Tape, low: Tensor, k_turn: Tensor, spec: Attention, latent: LatentAttention, setting: Setting
) -> tuple[Tensor, Tensor]:
    """Keys are copied into a new tensor beside their rotated part; values stay a view of the projection."""
    nope, values = latent.qk_nope_head_dim * spec.heads, latent.v_head_dim * spec.heads
    both = linear(tape, low, setting, "key-value up projection", nope + values, "a·(d_n + d_v)", "tp")
    k_pass, v = ops.split(tape, both, [nope, values], ["a·d_n", "a·d_v"], "keys and values")
    sizes = (k_pass.size, k_turn.size)

    def rule(grads: Grads) -> Grads:
        whole = tape.new("gradient of keys", grads[0].size) if grads[0] else None
        del whole
        return [tape.new("gradient of a part of keys", size) for size in sizes]

    keys = tape.new("keys", k_pass.size._replace(elements=spec.q_dim, label="q"))
    return tape.record(keys, [k_pass, k_turn], rule), v


def turned(tape: Tape, x: Tensor, latent: LatentAttention, setting: Setting, name: str) -> Tensor:
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
