"""Kimi Delta Attention: a delta rule whose states decay channel by channel, with flash-linear-attention's kernel.

Source: Transformers 5.24 ``models/kimi_linear/modeling_kimi_linear.py``, ``KimiLinearDeltaAttention``;
flash-linear-attention bc3b101d ``ops/kda/chunk.py`` (what is saved, and each tensor of both directions),
``chunk_fwd.py``, ``chunk_intra.py``, ``chunk_bwd.py``, ``wy_fast.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.specs.block import Norm
from memcalc.trace import ops
from memcalc.trace.delta_net import CHUNK, convolved_parts, rated
from memcalc.trace.layers import WIDE, BlockConfig, linear, weighted
from memcalc.trace.tape import Grads, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.mixers import DeltaAttention

SUB_CHUNK, KEYS_AT_ONCE = 16, 32
"""Tokens of a diagonal block, and channels of a key that one program of backward takes."""
STRICT = Norm(scale="wide", written_out=True)


def delta_attention(tape: Tape, x: Tensor, spec: DeltaAttention, setting: BlockConfig, hidden: int) -> Tensor:
    """From a block's normalised input to the branch's output."""
    parts = convolved_parts(tape, x, [spec.inner] * 3, ["d"] * 3, spec.taps, setting)
    decay = forget_gate(tape, x, spec, setting)
    beta = linear(tape, x, setting, "mixer's rate projection", spec.heads, "H")
    beta = ops.saves_output(tape, beta, "delta rule's rates")
    out = recurrence(tape, [*parts, decay, beta], spec)
    del parts
    gate = low_rank(tape, x, spec, setting, "gate")
    out = gated_norm(tape, out, gate, spec, setting)
    return linear(tape, out, setting, "attention projection", hidden, "h", setting.branch_output)


def low_rank(tape: Tape, x: Tensor, spec: DeltaAttention, setting: BlockConfig, name: str) -> Tensor:
    """A projection through the width of one head."""
    low = linear(tape, x, setting, f"mixer's {name} down projection", spec.head_dim, "d_h")
    return linear(tape, low, setting, f"mixer's {name} up projection", spec.inner, "d")


def forget_gate(tape: Tape, x: Tensor, spec: DeltaAttention, setting: BlockConfig) -> Tensor:
    """``-exp(A) · softplus(f + dt)`` of each channel in fp32, the softplus op by op."""
    wide = ops.cast(tape, low_rank(tape, x, spec, setting, "decay"), WIDE, "decays, fp32")
    shifted = ops.shifted(tape, wide, "decays, shifted")
    del wide
    size, mask = shifted.size, tape.new("large decays, mask", shifted.size.wide(1))
    summed = ops.shifted(tape, ops.saves_output(tape, shifted, "decays' exponential"), "decays' exponential and one")
    log = ops.saves_input(tape, summed, "decays' logarithm")
    del summed

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient of {name}", size) for name in ("decays where large", "decays' logarithm")]

    soft = tape.record(tape.new("decays, softplus", size), [shifted, log], rule, [mask.storage])
    del shifted, log, mask
    return rated(tape, soft, spec.heads, setting)


def recurrence(tape: Tape, given: list[Tensor], spec: DeltaAttention) -> Tensor:
    """The delta rule by chunks: keeps what it was given, decays summed up, and two matrices a chunk.

    q and k are normalised first. What stands between the chunks is computed again in backward.
    """
    q, k, v, decay, beta = given
    size, heads = v.size, spec.heads
    states = size._replace(elements=spec.inner * spec.head_dim // CHUNK, label="d·d_h/64")
    norms = Size(heads, WIDE, size.unit, "none", "H")
    copies = [tape.new(f"{name}, contiguous", size) for name in ("queries", "keys", "values")]
    rows, statistics = [], []
    for name in ("queries", "keys"):
        rows.append(tape.new(f"{name}, normalised", size))
        statistics.append(tape.new(f"{name}' norms", norms))
    summed = tape.new("decays, summed up", decay.size)
    matrices = [
        tape.new(f"products of {names}", size._replace(elements=heads * CHUNK, label="64·H"))
        for names in ("queries and keys", "keys")
    ]
    diagonal = tape.new("products of keys, diagonal", norms._replace(elements=heads * SUB_CHUNK, label="16·H"))
    working = [tape.new(f"delta rule's {name}", size) for name in ("keys", "values", "decayed keys")]
    del diagonal
    working += [tape.new("delta rule's states", states), tape.new("delta rule's new values", size)]
    out = tape.new("delta rule's output", size)
    saved = [*rows, *statistics, copies[2], summed, decay, beta, *matrices]
    del working, copies, q, k, v

    def rule(_: Grads) -> Grads:
        return _backward(tape, size, states, norms, beta_size)

    beta_size = beta.size
    return tape.record(out, given, rule, [tensor.storage for tensor in saved])


def _backward(tape: Tape, size: Size, states: Size, norms: Size, beta: Size) -> Grads:
    wide, matrix = size.wide(WIDE), norms._replace(elements=norms.elements * CHUNK, label="64·H")
    working = [tape.new(f"delta rule's {name}", size) for name in ("keys", "values", "decayed keys")]
    working += [tape.new("decayed queries", size)]
    working += [tape.new("delta rule's states", states), tape.new("delta rule's new values", size)]
    working.append(tape.new("gradient of products of queries and keys", matrix))
    local = tape.new("gradient of new values, within chunks", size)
    working.append(tape.new("gradient of states", states))
    new = tape.new("gradient of new values", size)
    del local
    before = [tape.new(f"gradient of {name}, between chunks", wide) for name in ("queries", "keys")]
    v = tape.new("gradient of values", size)
    before.append(tape.new("gradient of decays, between chunks", wide))
    before += [tape.new("gradient of rates, between chunks", norms), tape.new("gradient of products of keys", matrix)]
    del new
    q, k = (tape.new(f"gradient of {name}, fp32", wide) for name in ("queries", "keys"))
    parts = -(-size.elements // norms.elements // KEYS_AT_ONCE)
    rates = tape.new("gradient of rates, in parts", norms._replace(elements=parts * norms.elements))
    decays = tape.new("gradient of decays, within chunks", wide)
    rates = tape.new("gradient of rates, fp32", norms)
    del before
    decays = tape.new("gradient of decays", wide)
    del working
    q, k = tape.new("gradient of queries", size), tape.new("gradient of keys", size)
    rates = rates if beta.width == WIDE else tape.new("gradient of rates", beta)
    return [q, k, v, decays, rates]


def gated_norm(tape: Tape, x: Tensor, gate: Tensor, spec: DeltaAttention, setting: BlockConfig) -> Tensor:
    """An RMSNorm of each head times the sigmoid of the gate, op by op, all in fp32."""
    width, heads = x.size.width, spec.heads
    wide = ops.cast(tape, x, WIDE, "gated norm's fp32 copy")
    del x
    square = ops.saves_input(tape, wide, "gated norm's square", temporaries=2)
    variance = ops.mean(tape, square, "gated norm's variance", heads)
    del square
    rstd = ops.saves_output(tape, variance, "gated norm's rstd")
    normalised = ops.mul(tape, wide, rstd, "gated norm's normalised")
    del wide, rstd, variance
    scaled = weighted(tape, normalised, STRICT, setting, "gated norm", heads)
    del normalised
    active = ops.saves_output(tape, ops.cast(tape, gate, WIDE, "gate, fp32"), "gate's sigmoid")
    out = ops.mul(tape, scaled, active, "gated norm's product")
    del scaled, active
    return ops.cast(tape, out, width, "gated norm's output, cast")
