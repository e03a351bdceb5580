"""Gated delta nets with the kernels of flash-linear-attention and causal-conv1d, which are taken where they are.

Source: Transformers 5.24 ``models/qwen3_5/modeling_qwen3_5.py`` and ``models/qwen3_next/modeling_qwen3_next.py``,
``models/olmo_hybrid/modeling_olmo_hybrid.py``;
flash-linear-attention bc3b101d ``ops/gated_delta_rule/chunk.py`` (what is saved, and each tensor of both directions),
``chunk_fwd.py``, ``wy_fast.py``, ``ops/common/chunk_{delta_h,o}.py``, ``modules/l2norm.py``; causal-conv1d
``causal_conv1d_interface.py``, ``CausalConv1dFn``.
Kimi Delta Attention: a delta rule whose states decay channel by channel, with flash-linear-attention's kernel.

Source: Transformers 5.24 ``models/kimi_linear/modeling_kimi_linear.py``, ``KimiLinearDeltaAttention``;
flash-linear-attention bc3b101d ``ops/kda/chunk.py`` (what is saved, and each tensor of both directions),
``chunk_fwd.py``, ``chunk_intra.py``, ``chunk_bwd.py``, ``wy_fast.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.specs.block import Norm
from memcalc.trace import ops
from memcalc.trace.layers import WIDE, BlockConfig, linear, weighted
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.mixers import DeltaAttention, GatedDeltaNet


def decay_rates(tape: Tape, elements: int, setting: BlockConfig, label: str = "H") -> Tensor:
    """One number a head, or a channel and place of its state: a trained exponent's exponential is kept for backward."""
    vector = Size(elements, WIDE, "once", "none", label)
    leaf = Leaf("decay", keep=True) if setting.trainable else None
    exponential = tape.new("decay, exponential", vector)
    exponential = tape.record(
        exponential, [leaf], lambda _: [tape.new("gradient of decay", vector.wide(1), "gradient")],
        [exponential.storage],
    )  # fmt: skip
    return tape.record(tape.new("decay", vector), [exponential], lambda grads: [grads[0]])


CHUNK = 64
"""Tokens of one chunk of the recurrence."""


def delta_net(tape: Tape, x: Tensor, spec: GatedDeltaNet, setting: BlockConfig, hidden: int) -> Tensor:
    """From a block's normalised input to the branch's output."""
    if spec.apart:
        return apart(tape, x, spec, setting, hidden)
    channels, gate, beta, step = inputs(tape, x, spec, setting)
    beta = rates(tape, beta, spec)
    decay = decays(tape, step, spec, setting)
    del step
    convolved = convolution(tape, channels, spec.taps, setting)
    del channels
    widths, labels = [spec.keys, spec.keys, spec.values], ["d_k", "d_k", "d_v"]
    q, k, v = ops.split(tape, convolved, widths, labels, "convolution's output")
    del convolved
    out = recurrence(tape, [q, k, v, decay, beta], spec)
    del q, k, v, decay, beta
    out = gated_norm(tape, out, gate, spec, setting)
    del gate
    return linear(tape, out, setting, "mixer's output projection", hidden, "h", setting.branch_output)


def apart(tape: Tape, x: Tensor, spec: GatedDeltaNet, setting: BlockConfig, hidden: int) -> Tensor:
    """The same with a projection for each part, in the order of OLMo Hybrid's class."""
    widths, labels = [spec.keys, spec.keys, spec.values], ["d_k", "d_k", "d_v"]
    q, k, v = convolved_parts(tape, x, widths, labels, spec.taps, setting)
    beta = linear(tape, x, setting, "mixer's rate projection", spec.value_heads, "H")
    beta = rates(tape, beta, spec)
    decay = decays(tape, linear(tape, x, setting, "mixer's step projection", spec.value_heads, "H"), spec, setting)
    out = recurrence(tape, [q, k, v, decay, beta], spec)
    gate = linear(tape, x, setting, "mixer's gate projection", spec.values, "d_v")
    out = gated_norm(tape, out, gate, spec, setting)
    return linear(tape, out, setting, "attention projection", hidden, "h", setting.branch_output)


def convolved_parts(
    tape: Tape, x: Tensor, widths: list[int], labels: list[str], taps: int, setting: BlockConfig
) -> list[Tensor]:
    """Queries, keys and values of a projection each, side by side for one convolution, which is cut to its length."""
    parts = [
        linear(tape, x, setting, f"{name} projection", width, label)
        for name, width, label in zip(("query", "key", "value"), widths, labels, strict=True)
    ]
    channels = ops.cat(tape, parts, "convolution's input", "2·d_k + d_v")
    parts.clear()
    convolved = convolution(tape, channels, taps, setting)
    convolved = ops.slice_of(tape, convolved, sum(widths), "2·d_k + d_v", "convolution's output")
    return ops.split(tape, convolved, widths, labels, "convolution's output")


def inputs(tape: Tape, x: Tensor, spec: GatedDeltaNet, setting: BlockConfig) -> tuple[Tensor, ...]:
    """The convolution's channels, the gate, and what rates and decays are made of."""
    keys, values, heads = spec.keys, spec.values, spec.value_heads
    if not spec.packed:
        channels = linear(tape, x, setting, "mixer's input projection", spec.channels, "2·d_k + d_v")
        gate = linear(tape, x, setting, "mixer's gate projection", values, "d_v")
        beta = linear(tape, x, setting, "mixer's rate projection", heads, "H")
        return channels, gate, beta, linear(tape, x, setting, "mixer's step projection", heads, "H")
    both = linear(tape, x, setting, "mixer's input projection", 2 * keys + 2 * values, "2·d_k + 2·d_v")
    rates = linear(tape, x, setting, "mixer's rate projection", 2 * heads, "2·H")
    widths, labels = [keys, keys, values, values], ["d_k", "d_k", "d_v", "d_v"]
    views = ops.split(tape, both, widths, labels, "mixer's input projection")
    del both
    beta, step = ops.split(tape, rates, [heads, heads], ["H", "H"], "mixer's rate projection")
    del rates
    value, gate = (ops.copy(tape, view, name) for view, name in ((views[2], "values"), (views[3], "gate")))
    beta, step = ops.copy(tape, beta, "rates"), ops.copy(tape, step, "steps")
    q, k = (ops.copy(tape, view, name) for view, name in ((views[0], "queries"), (views[1], "keys")))
    del views
    return ops.cat(tape, [q, k, value], "convolution's input", "2·d_k + d_v"), gate, beta, step


def rates(tape: Tape, x: Tensor, spec: GatedDeltaNet) -> Tensor:
    """How far each head corrects its state: a sigmoid, which is kept, or twice that."""
    out = ops.saves_output(tape, x, "delta rule's rates")
    return ops.plain(tape, out, "delta rule's rates, doubled") if spec.doubled else out


def decays(tape: Tape, step: Tensor, spec: GatedDeltaNet, setting: BlockConfig) -> Tensor:
    """``-exp(A) · softplus(a + dt)`` in fp32: keeps the softplus' input and output, and two vectors of all heads."""
    wide = ops.cast(tape, step, WIDE, "steps, fp32")
    soft = ops.saves_input(tape, ops.shifted(tape, wide, "steps, shifted"), "steps, softplus")
    del wide
    return rated(tape, soft, spec.value_heads, setting)


def rated(tape: Tape, soft: Tensor, heads: int, setting: BlockConfig) -> Tensor:
    """The product of steps and the rate of each head: keeps both."""
    rate = decay_rates(tape, heads, setting)
    size, vector, trained = soft.size, rate.size, setting.trainable

    def rule(_: Grads) -> Grads:
        grad = tape.new("gradient of steps", size)
        if not trained:
            return [grad, None]
        product = tape.new("gradient of decay, before its sum", size)
        del product
        return [grad, tape.new("gradient of decay, summed", vector)]

    saved = [soft.storage if trained else None, rate.storage]
    return tape.record(tape.new("decays", size), [soft, rate], rule, saved)


def convolution(
    tape: Tape, x: Tensor, taps: int, setting: BlockConfig, *, bias: bool = False, turned: bool = False
) -> Tensor:
    """A causal convolution with its activation in one kernel, channels last: keeps its input.

    A gradient that comes ``turned``, channels first, is copied.
    """
    size, leaf = x.size, Leaf("convolution weight", keep=True) if setting.trainable else None
    weights = Size(size.elements * (taps + bias), 1, "once")

    def rule(_: Grads) -> Grads:
        grad = tape.new("gradient of convolution's input", size)
        copied = tape.new("gradient of convolution's output, channels last", size) if turned else None
        del copied
        return [grad, tape.new("gradient of convolution weight", weights, "gradient") if leaf else None]

    return tape.record(tape.new("convolution's output", size), [x, leaf], rule, [x.storage])


def recurrence(tape: Tape, given: list[Tensor], spec: GatedDeltaNet) -> Tensor:
    """The delta rule by chunks, of q, k, v, decays and rates: keeps copies of what it was given, and a matrix a chunk.

    q and k are normalised first. What stands between the chunks is computed again in backward.
    """
    q, k, v, decay, beta = given
    width, heads = v.size.width, spec.value_heads
    sizes = [tensor.size for tensor in given]
    of_heads = v.size._replace(elements=heads * spec.key_dim, label="H·d")
    states = v.size._replace(elements=heads * spec.key_dim * spec.value_dim // CHUNK, label="H·d·d/64")
    norms = Size(spec.key_heads, WIDE, v.size.unit, "none", "H_k")
    copies = [tape.new(f"{name}, contiguous", t.size) for name, t in (("queries", q), ("keys", k), ("values", v))]
    rows = [tape.new(f"{name}, normalised", q.size) for name in ("queries", "keys")]
    statistics = [tape.new(f"{name}' norms", norms) for name in ("queries", "keys")]
    summed = tape.new("decays, summed up", decay.size)
    solved = tape.new("delta rule's chunks", Size(heads * CHUNK, width, v.size.unit, "none", "64·H"))
    between = _between(tape, of_heads, v.size, states)
    out = tape.new("delta rule's output", v.size)
    saved = [*rows, *statistics, copies[2], summed, beta, solved]
    del between, copies

    def rule(_: Grads) -> Grads:
        return _backward(tape, sizes, of_heads, states)

    return tape.record(out, given, rule, [tensor.storage for tensor in saved])


def _between(tape: Tape, of_heads: Size, values: Size, states: Size) -> list[Tensor]:
    """Keys and values of the corrections, the states at each chunk's start, and the new values."""
    return [
        tape.new("delta rule's keys", of_heads),
        tape.new("delta rule's values", values),
        tape.new("delta rule's states", states),
        tape.new("delta rule's new values", values),
    ]


def _backward(tape: Tape, sizes: list[Size], of_heads: Size, states: Size) -> Grads:
    q_size, k_size, values, decay, beta = sizes
    grouped = of_heads.elements != q_size.elements
    between = _between(tape, of_heads, values, states)
    local = tape.new("gradient of new values, within chunks", values)
    between.append(tape.new("gradient of states", states))
    between.append(tape.new("gradient of new values", values))
    del local
    q, k = (tape.new(f"gradient of {name}, each head", of_heads) for name in ("queries", "keys"))
    steps = tape.new("gradient of decays, within chunks", decay)
    between.append(tape.new("gradient of delta rule's keys", of_heads))
    if grouped:
        q = tape.new("gradient of queries, summed", q_size)
        k = tape.new("gradient of keys, summed", k_size)
    other = tape.new("gradient of keys, of corrections", of_heads)
    v = tape.new("gradient of values", values)
    between.append(tape.new("gradient of decays, of corrections", decay))
    rates = tape.new("gradient of rates", beta)
    if grouped:
        other = tape.new("gradient of keys, of corrections, summed", k_size)
    steps = tape.new("gradient of decays, summed", decay)
    del between, other
    q = tape.new("gradient of queries", q_size)
    k = tape.new("gradient of keys", k_size)
    return [q, k, v, steps, rates]


def normalised_heads(tape: Tape, wide: Tensor, heads: int) -> Tensor:
    """Each head over its root mean square, op by op, in fp32."""
    square = ops.saves_input(tape, wide, "gated norm's square", temporaries=2)
    variance = ops.mean(tape, square, "gated norm's variance", heads)
    del square
    rstd = ops.saves_output(tape, variance, "gated norm's rstd")
    return ops.mul(tape, wide, rstd, "gated norm's normalised")


def gated_norm(tape: Tape, x: Tensor, gate: Tensor, spec: GatedDeltaNet, setting: BlockConfig) -> Tensor:
    """An RMSNorm of each head times the SiLU of the gate, op by op, in fp32 but for the learned scale."""
    width, heads = x.size.width, spec.value_heads
    wide = ops.cast(tape, x, WIDE, "gated norm's fp32 copy")
    del x
    normalised = normalised_heads(tape, wide, heads)
    del wide
    narrow = ops.cast(tape, normalised, width, "gated norm's normalised, cast")
    del normalised
    scaled = weighted(tape, narrow, Norm(), setting, "gated norm", heads)
    del narrow
    active = ops.saves_input(tape, ops.cast(tape, gate, WIDE, "gate, fp32"), "gate's activation")
    out = ops.mul(tape, scaled, active, "gated norm's product")
    del scaled, active
    return ops.cast(tape, out, width, "gated norm's output, cast")


SUB_CHUNK, KEYS_AT_ONCE = 16, 32
"""Tokens of a diagonal block, and channels of a key that one program of backward takes."""
STRICT = Norm(scale="wide", written_out=True)


def delta_attention(tape: Tape, x: Tensor, spec: DeltaAttention, setting: BlockConfig, hidden: int) -> Tensor:
    """From a block's normalised input to the branch's output."""
    parts = convolved_parts(tape, x, [spec.inner] * 3, ["d"] * 3, spec.taps, setting)
    decay = forget_gate(tape, x, spec, setting)
    beta = linear(tape, x, setting, "mixer's rate projection", spec.heads, "H")
    beta = ops.saves_output(tape, beta, "delta rule's rates")
    out = channel_recurrence(tape, [*parts, decay, beta], spec)
    del parts
    gate = low_rank(tape, x, spec, setting, "gate")
    out = sigmoid_gated_norm(tape, out, gate, spec, setting)
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


def channel_recurrence(tape: Tape, given: list[Tensor], spec: DeltaAttention) -> Tensor:
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
        return _channel_backward(tape, size, states, norms, beta_size)

    beta_size = beta.size
    return tape.record(out, given, rule, [tensor.storage for tensor in saved])


def _channel_backward(tape: Tape, size: Size, states: Size, norms: Size, beta: Size) -> Grads:
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


def sigmoid_gated_norm(tape: Tape, x: Tensor, gate: Tensor, spec: DeltaAttention, setting: BlockConfig) -> Tensor:
    """An RMSNorm of each head times the sigmoid of the gate, op by op, all in fp32."""
    width, heads = x.size.width, spec.heads
    wide = ops.cast(tape, x, WIDE, "gated norm's fp32 copy")
    del x
    normalised = normalised_heads(tape, wide, heads)
    del wide
    scaled = weighted(tape, normalised, STRICT, setting, "gated norm", heads)
    del normalised
    active = ops.saves_output(tape, ops.cast(tape, gate, WIDE, "gate, fp32"), "gate's sigmoid")
    out = ops.mul(tape, scaled, active, "gated norm's product")
    del scaled, active
    return ops.cast(tape, out, width, "gated norm's output, cast")
