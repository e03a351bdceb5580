"""Scores, softmax and the weighted sum of values: by the kernel that PyTorch picks, or op by op.

Rules: PyTorch 2.13 ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (which kernel runs) and ``attention.cpp``
(what the memory-efficient and the math kernel do); Transformers 5.23 ``integrations/sdpa_attention.py`` and
``eager_attention_forward`` of each model.

Position biases on the scores, as the mask that PyTorch's attention takes (T5).

Source: Transformers 5.23 ``integrations/sdpa_attention.py``, ``create_position_bias_mask``, and
``models/t5/modeling_t5.py``; PyTorch 2.13 ``attention.cpp``, ``preprocess_mask``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.layers import BlockConfig
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor, Unit

if TYPE_CHECKING:
    from memcalc.specs.block import Attention


LARGEST_FLASH_HEAD, INDEX = 256, 8
"""Widest head of PyTorch's flash kernel [elements]; bytes of an index that a maximum keeps."""


def core(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: BlockConfig, prefix: str) -> Tensor:
    """Attention of projected queries, keys and values; the output is contiguous a token."""
    kind = kernel(spec, setting)
    grouped = k.size.elements < q.size.elements and spec.kv_form != "copied"
    projected = q.size.width
    if grouped and (kind in ("eager", "efficient") or not setting.grouped_kernel):
        view = kind == "efficient" and spec.kv_heads == 1 and setting.sdpa
        fold = kind == "eager" and spec.kv_heads == 1 and setting.kernels == "model"
        k, v = (
            repeated(tape, x, spec, f"{prefix}{name}", view=view, fold=fold) for x, name in ((k, "keys"), (v, "values"))
        )
    # Autocast's copies are handed over, so that nobody here holds them; what they are of stays until the kernel returns
    narrow = narrowed(tape, [q, k, v], setting, prefix)
    narrow.reverse()
    if kind == "eager":
        by_heads = grouped and setting.kernels == "model"  # repeat_kv's copies are contiguous a head
        return written_out(
            tape, narrow.pop(), narrow.pop(), narrow.pop(), spec, setting, prefix, projected, by_heads=by_heads
        )
    if kind == "math":
        return math(tape, narrow.pop(), narrow.pop(), narrow.pop(), spec, setting, prefix)
    out = fused(tape, narrow.pop(), narrow.pop(), narrow.pop(), spec, setting, prefix)
    if kind == "flash" and (by_heads_from_cat(spec) or spec.contiguous_queries) and setting.kernels == "model":
        # The output has the layout of the queries, which a copy or a concatenation makes contiguous a head
        return ops.copy(tape, out, f"{prefix}attention output, contiguous")
    return out


def kernel(spec: Attention, setting: BlockConfig) -> str:
    """``flash``, ``efficient``, ``math`` or ``eager``: what was asked for, or what PyTorch falls back on."""
    requested, mask = setting.attention, masked(spec, setting)
    if requested in ("eager", "math"):
        return requested
    if setting.sdpa and spec.kv_form == "copied":
        return "math"
    alike = spec.head_dim == spec.value_dim or not setting.sdpa
    if requested != "efficient" and setting.compute == 2 and not mask and alike and spec.head_dim <= LARGEST_FLASH_HEAD:
        return "flash"
    # Where there is a mask, or heads are wider than the flash kernel takes, Transformers repeats the key-value heads
    # instead of announcing groups (``use_gqa_in_sdpa`` of its 5.24)
    grouped = spec.kv_heads < spec.heads and spec.kv_form not in ("expanded", "broadcast")
    grouped = grouped and spec.head_dim <= LARGEST_FLASH_HEAD
    return "math" if grouped and setting.grouped_kernel and not mask else "efficient"


def masked(spec: Attention, setting: BlockConfig) -> bool:
    """Whether the kernel is given a mask."""
    windowed = setting.windowed and spec.window is not None
    explicit = spec.explicit_mask or spec.joins_batch
    return spec.scores_bias in BIASES or (setting.sdpa and (explicit or windowed))


def joined(spec: Attention) -> bool:
    """Whether the rotary embedding ends with a concatenation."""
    return spec.rotary and (spec.rotary_joined or spec.rotary_fraction < 1.0) and spec.latent is None


def by_heads_from_cat(spec: Attention) -> bool:
    """Whether that makes queries and keys contiguous a head."""
    return joined(spec) and not spec.rotary_by_token


def repeated(tape: Tape, x: Tensor, spec: Attention, name: str, *, view: bool = False, fold: bool = False) -> Tensor:
    """Keys or values for all query heads: a copy, or a view where a fused kernel repeats a single head.

    With ``fold`` it is a single head that a product reads, of a single sequence as a view: batch and heads fold into
    one dimension without a copy.
    """
    size = x.size._replace(elements=x.size.elements * spec.heads // spec.kv_heads, label="q")
    if view:
        return ops.expanded(tape, x, size, name)
    return ops.copy(tape, x, f"{name}, repeated", size, "tp if batched" if fold else None)


def narrowed(tape: Tape, inputs: list[Tensor], setting: BlockConfig, prefix: str) -> list[Tensor]:
    """Autocast's copies of a kernel's queries, keys and values."""
    names = [f"{prefix}{name}, 16-bit copy" for name in ("queries", "keys", "values")]
    return [ops.cast(tape, x, setting.compute, name) for x, name in zip(inputs, names, strict=True)]


def fused(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: BlockConfig, prefix: str) -> Tensor:
    """A fused kernel keeps its inputs, its mask, its output and the logsumexp of each row."""
    mask = additive(tape, k, spec, setting, setting.compute, prefix)
    sizes = (q.size, k.size, v.size)
    values = spec.heads * spec.value_dim
    out = tape.operator(
        "sdpa", lambda: tape.new(f"{prefix}attention output", q.size._replace(elements=values, label="q"))
    )
    rows: Unit = "filled_token" if kernel(spec, setting) == "efficient" else q.size.unit
    lse = tape.operator("sdpa", lambda: tape.new(f"{prefix}attention logsumexp", Size(spec.heads, 4, rows, "tp", "a")))
    bias = mask.size._replace(unit=pairs_of(k)) if mask is not None and mask.requires_grad else None
    flash = kernel(spec, setting) == "flash"

    def rule(_: Grads) -> Grads:
        grads: Grads = [tape.new(f"gradient of {prefix}attention input", size) for size in sizes]
        if flash:
            _within_backward(tape, sizes, spec, prefix)
        return [*grads, tape.new(f"gradient of {prefix}attention bias of each sequence", bias) if bias else None]

    saved = [q.storage, k.storage, v.storage, mask.storage if mask else None, out.storage, lse.storage]
    return tape.record(out, [q, k, v, mask], rule, saved)


def _within_backward(tape: Tape, sizes: tuple[Size, Size, Size], spec: Attention, prefix: str) -> None:
    """What flash attention's backward allocates beside the gradients, and frees again: fp32 sums and whole heads.

    Source: FlashAttention 2.8 csrc/flash_attn/flash_api.cpp, ``mha_bwd``, and PyTorch 2.13
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: ``softmax_d`` and ``dq_accum``; with fewer
    key-value heads ``dk_expanded`` and ``dv_expanded``.
    """
    q, k, v = sizes
    inside = [
        tape.new(f"{prefix}attention row sums", Size(spec.heads, 4, q.unit, "tp", "a"), "workspace"),
        tape.new(f"gradient of {prefix}queries, fp32", q.wide(4), "workspace"),
    ]
    if k.elements < q.elements:
        values = v._replace(elements=spec.heads * spec.value_dim)
        inside += [
            tape.new(f"gradient of {prefix}keys of all heads", k._replace(elements=q.elements), "workspace"),
            tape.new(f"gradient of {prefix}values of all heads", values, "workspace"),
        ]
    inside.clear()


def additive(tape: Tape, k: Tensor, spec: Attention, setting: BlockConfig, width: int, prefix: str) -> Tensor | None:
    """The numbers that each call makes of a Boolean mask, to add to the scores (``convert_boolean_attn_mask``)."""
    if masked(spec, setting) and spec.scores_bias in BIASES:
        return position_bias(tape, spec, setting, prefix)
    if not masked(spec, setting) or spec.scores_bias != "none" or spec.joins_batch:  # that mask is no Boolean one
        return None
    unit: Unit = "filled_pair" if kernel(spec, setting) == "efficient" else pairs_of(k)
    return tape.new(f"{prefix}attention mask", Size(1, width, unit, "none", "s"))


def pairs_of(k: Tensor) -> Unit:
    """The unit of scores, by the tower that their keys are of."""
    return "pair" if k.size.unit == "token" else "cross_pair"


def math(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: BlockConfig, prefix: str) -> Tensor:
    """``_scaled_dot_product_attention_math``: computes in fp32 whatever its inputs are.

    Its variables live until it returns: what it casts, the scaled queries, the mask, which has the inputs' width.
    """
    narrow = q.size.width
    mask = additive(tape, k, spec, setting, narrow, prefix)
    wide = [ops.cast(tape, x, 4, f"{prefix}{name}, fp32") for x, name in ((q, "queries"), (k, "keys"), (v, "values"))]
    q, k, v = ops.plain(tape, wide[0], f"{prefix}queries, scaled"), wide[1], wide[2]
    if k.size.elements < q.size.elements and spec.kv_form != "copied":
        k, v = repeated(tape, k, spec, f"{prefix}keys"), repeated(tape, v, spec, f"{prefix}values")
    k = ops.plain(tape, k, f"{prefix}keys, scaled")
    scores = product(tape, q, k, spec, prefix)
    if mask is not None or spec.causal:
        scores = ops.shifted(tape, scores, f"{prefix}attention scores, masked", in_place=True)
    weights = ops.softmax(tape, scores, f"{prefix}attention softmax")
    del k, scores
    returned = ops.cast(tape, weights, narrow, f"{prefix}attention weights, 16-bit copy")
    out = summed_values(tape, weights, v, spec, setting, prefix)
    out = ops.cast(tape, out, narrow, f"{prefix}attention output, 16-bit copy")
    del q, weights, v, mask, returned  # the last is the function's second result, which its caller leaves alone
    wide.clear()
    return ops.copy(tape, out, f"{prefix}attention output, contiguous")


def written_out(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: BlockConfig, prefix: str, projected: int,
    *, by_heads: bool = False,
) -> Tensor:  # fmt: skip
    """Materialised scores, as ``eager_attention_forward``; ``projected`` is the width of the queries as projected.

    ``by_heads`` says that keys and values are contiguous a head; what a concatenation made is so too. Until the softmax
    is known, a variable holds the scores before their cast to fp32 (``softmax(scores, dtype=float32)``), beside the
    product itself where that has a name of its own (BLOOM), or the unmasked ones (Falcon masks them in the call).
    """
    width, unit = q.size.width, q.size.unit
    turned = setting.kernels == "model" and (by_heads_from_cat(spec) or spec.half_rotary or spec.latent is not None)
    if spec.wide_scores and setting.kernels == "model" and not setting.autocast:
        q, k = ops.cast(tape, q, 4, f"{prefix}queries, fp32"), ops.cast(tape, k, 4, f"{prefix}keys, fp32")
    given = [q, k]
    q = q if turned else ops.copy(tape, q, f"{prefix}queries, contiguous")
    if not by_heads and not (turned and k.size.elements == q.size.elements):
        k = by_head(tape, k, spec, spec.q_dim, f"{prefix}keys")
    scores = scores_of(tape, q, k, spec, prefix)
    given.clear()
    del q, k
    if setting.kernels != "model":
        # One kernel scales, masks and normalises in the width of the scores (Megatron, ``FusedScaleMaskSoftmax``)
        weights = ops.saves_output(tape, scores, f"{prefix}attention softmax")
        del scores
        return weighted_values(tape, weights, v, spec, setting, prefix)
    if spec.scores_bias != "in-product":
        scores = ops.plain(tape, scores, f"{prefix}attention scores, scaled")
    if spec.softcap:
        uncapped = [scores]
        del scores
        scores = ops.softcap(tape, uncapped, f"{prefix}attention scores")
    if spec.scores_bias in ("added", *BIASES):
        scores = ops.shifted(tape, scores, f"{prefix}attention scores with their bias")
    unmasked = scores
    if spec.causal:
        scores = ops.shifted(tape, scores, f"{prefix}attention scores, masked")
    if spec.scores_bias != "in-product" and not spec.explicit_mask:
        unmasked = scores
    if spec.sinks:
        weights, joined_ = with_sinks(tape, scores, spec, setting, prefix)
        del scores, unmasked
        out = weighted_values(tape, weights, v, spec, setting, prefix, by_heads=by_heads)
        del joined_  # a variable of the function that runs, it lives until here
        return out
    variables = [scores, unmasked]
    scores = ops.cast(tape, scores, 4 if spec.upcast_softmax or setting.autocast else width, f"{prefix}scores, fp32")
    if setting.compiled:
        rows = Size(2 * spec.heads, 4, unit, "tp", "2·a")
        weights = ops.fused_softmax(tape, scores, rows, f"{prefix}attention softmax")
    else:
        weights = ops.softmax(tape, scores, f"{prefix}attention softmax")
    variables.clear()
    del scores, unmasked
    # Cast back to the queries' width, which under autocast is fp32 where the rotary embedding made them so
    weights = ops.cast(tape, weights, projected if spec.upcast_softmax else width, f"{prefix}attention weights")
    return weighted_values(tape, weights, v, spec, setting, prefix, by_heads=by_heads)


def with_sinks(tape: Tape, scores: Tensor, spec: Attention, setting: BlockConfig, prefix: str) -> tuple[Tensor, Tensor]:
    """The softmax over a row's scores and its head's sink, without the sink's column; and what went into it.

    Source: Transformers 5.23 ``models/gpt_oss/modeling_gpt_oss.py``, ``eager_attention_forward``: a concatenation, a
    subtraction of the row's maximum, and a softmax in the width of the scores.
    """
    narrow = scores.size.wide(max(scores.size.width, setting.weight))  # autocast promotes what is concatenated
    wide, logits = narrow._replace(unit="sink_pair", label="a·(s + 1)"), scores.size
    row = narrow._replace(elements=spec.heads, unit="token", label="a")
    leaf = Leaf(f"{prefix}sinks", keep=True) if setting.trainable else None

    def apart(grads: Grads) -> Grads:
        sink = tape.new(f"gradient of {prefix}sinks", Size(spec.heads, 1, "once"), "gradient") if leaf else None
        if grads[0] is None or logits == narrow:
            return [Tensor(grads[0].storage, narrow) if grads[0] else None, sink]
        return [tape.new(f"gradient of {prefix}attention scores, cast", logits), sink]

    def reduced(grads: Grads) -> Grads:
        negated = tape.new(f"gradient of {prefix}largest scores, before its sum", wide)
        small = tape.new(f"gradient of {prefix}largest scores", row)
        del negated
        return [grads[0], small]

    joined_ = tape.record(tape.new(f"{prefix}attention scores with sinks", wide), [scores, leaf], apart)
    places = tape.new(f"{prefix}places of the largest scores", row.wide(INDEX))
    largest = tape.record(
        tape.new(f"{prefix}largest scores", row), [joined_], lambda _: [tape.new("gradient of all scores", wide)],
        [places.storage],
    )  # fmt: skip
    less = tape.record(tape.new(f"{prefix}attention scores less the largest", wide), [joined_, largest], reduced)
    del joined_, largest
    weights = ops.softmax(tape, less, f"{prefix}attention softmax")
    sliced = tape.record(
        Tensor(weights.storage, narrow), [weights], lambda _: [tape.new(f"gradient of {prefix}softmax, filled", wide)]
    )
    return sliced, less


def product(tape: Tape, q: Tensor, k: Tensor, spec: Attention, prefix: str) -> Tensor:
    """Queries times keys, both made contiguous a head."""
    q, k = ops.copy(tape, q, f"{prefix}queries, contiguous"), by_head(tape, k, spec, spec.q_dim, f"{prefix}keys")
    return scores_of(tape, q, k, spec, prefix)


def scores_of(tape: Tape, q: Tensor, k: Tensor, spec: Attention, prefix: str) -> Tensor:
    """The same of what is contiguous."""
    size = Size(spec.heads, q.size.width, pairs_of(k), "tp", "a·s")
    return ops.matmul(tape, q, k, size, f"{prefix}attention scores")


def weighted_values(
    tape: Tape, weights: Tensor, v: Tensor, spec: Attention, setting: BlockConfig, prefix: str,
    *, by_heads: bool = False,
) -> Tensor:  # fmt: skip
    """Dropout of the weights and their product with the values, made contiguous a token."""
    out = summed_values(tape, weights, v, spec, setting, prefix, by_heads=by_heads)
    del weights, v
    return ops.copy(tape, out, f"{prefix}attention output, contiguous")


def summed_values(
    tape: Tape, weights: Tensor, v: Tensor, spec: Attention, setting: BlockConfig, prefix: str,
    *, by_heads: bool = False,
) -> Tensor:  # fmt: skip
    """Dropout of the weights and their product with the values."""
    weights = ops.dropout(tape, weights, f"{prefix}attention dropout", active=bool(spec.dropout) and setting.dropout)
    weights = ops.cast(tape, weights, v.size.width, f"{prefix}attention weights, 16-bit copy")
    values = spec.heads * spec.value_dim
    v = v if by_heads else by_head(tape, v, spec, values, f"{prefix}values")
    size = Size(values, v.size.width, "token", "tp", "q")
    return ops.matmul(tape, weights, v, size, f"{prefix}attention output")


def by_head(tape: Tape, x: Tensor, spec: Attention, elements: int, name: str) -> Tensor:
    """Keys or values contiguous a head; a product expands to all heads those that are shared without being repeated."""
    if x.size.elements >= elements:
        return ops.copy(tape, x, f"{name}, contiguous")
    return repeated(tape, x, spec, name, fold=spec.kv_heads == 1)


BIASES = ("relative", "zeros")


def position_bias(tape: Tape, spec: Attention, setting: BlockConfig, prefix: str) -> Tensor:
    """The bias of each head, without the batch, with its keys filled up as the memory-efficient kernel wants them.

    Each block makes its own, of the one that the first block looked up: a contiguous copy, or one with a causal mask in
    it. Zeros are shared by all blocks unless they must be filled up.
    """
    cross = spec.scores_bias == "zeros"
    size = Size(spec.heads, setting.compute, "filled_cross" if cross else "filled_square", "tp", "a·s")
    bias = tape.new(f"{prefix}attention bias", size)
    if cross:
        return bias
    mask = tape.new("causal mask", Size(1, 1, "square", "none", "1")) if spec.causal else None
    leaf = Leaf("position bias", keep=True) if setting.trainable else None

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of position bias", size._replace(unit="square"))]

    return tape.record(bias, [leaf], rule, [mask.storage if mask else None])
