"""Scores, softmax and the weighted sum of values: by the kernel that PyTorch picks, or op by op.

Rules: PyTorch 2.13 ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (which kernel runs) and ``attention.cpp``
(what the memory-efficient and the math kernel do); Transformers 5.23 ``integrations/sdpa_attention.py`` and
``eager_attention_forward`` of each model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.bias import BIASES, position_bias
from memcalc.trace.layers import Setting
from memcalc.trace.tape import Grads, Size, Tape, Tensor, Unit

if TYPE_CHECKING:
    from memcalc.specs.model import Attention

LARGEST_FLASH_HEAD = 256


def core(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: Setting, prefix: str) -> Tensor:
    """Attention of projected queries, keys and values; the output is contiguous a token."""
    kind = kernel(spec, setting)
    grouped = k.size.elements < q.size.elements and spec.kv_form != "copied"
    projected = q.size.width
    if grouped and (kind in ("eager", "efficient") or not setting.grouped_kernel):
        k, v = repeated(tape, k, spec, f"{prefix}keys"), repeated(tape, v, spec, f"{prefix}values")
    q, k, v = narrowed(tape, q, k, v, setting, prefix)
    if kind == "eager":
        return written_out(tape, q, k, v, spec, setting, prefix, projected)
    if kind == "math":
        return math(tape, q, k, v, spec, setting, prefix)
    out = fused(tape, q, k, v, spec, setting, prefix)
    if kind == "flash" and (joined(spec) or spec.contiguous_queries) and setting.kernels == "model":
        # The output has the layout of the queries, which a copy or a concatenation makes contiguous a head
        return ops.copy(tape, out, f"{prefix}attention output, contiguous")
    return out


def kernel(spec: Attention, setting: Setting) -> str:
    """``flash``, ``efficient``, ``math`` or ``eager``: what was asked for, or what PyTorch falls back on."""
    asked, mask = setting.attention, masked(spec, setting)
    if asked in ("eager", "math"):
        return asked
    if setting.sdpa and spec.kv_form == "copied":
        return "math"
    alike = spec.head_dim == spec.value_dim or not setting.sdpa
    if asked != "efficient" and setting.compute == 2 and not mask and alike and spec.head_dim <= LARGEST_FLASH_HEAD:
        return "flash"
    # Where there is a mask, Transformers repeats the key-value heads instead of announcing groups
    grouped = spec.kv_heads < spec.heads and spec.kv_form not in ("expanded", "broadcast")
    return "math" if grouped and setting.grouped_kernel and not mask else "efficient"


def masked(spec: Attention, setting: Setting) -> bool:
    """Whether the kernel is given a mask."""
    windowed = setting.windowed and spec.window is not None
    return spec.scores_bias in BIASES or (setting.sdpa and (spec.explicit_mask or windowed))


def joined(spec: Attention) -> bool:
    """Whether the rotary embedding ends with a concatenation."""
    return spec.rotary and (spec.rotary_joined or spec.rotary_fraction < 1.0) and spec.latent is None


def repeated(tape: Tape, x: Tensor, spec: Attention, name: str) -> Tensor:
    """Keys or values for all query heads."""
    elements = x.size.elements * spec.heads // spec.kv_heads
    return ops.copy(tape, x, f"{name}, repeated", x.size._replace(elements=elements, label="q"))


def narrowed(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, setting: Setting, prefix: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast's copies of a kernel's inputs."""
    width = setting.compute
    return (
        ops.cast(tape, q, width, f"{prefix}queries, 16-bit copy"),
        ops.cast(tape, k, width, f"{prefix}keys, 16-bit copy"),
        ops.cast(tape, v, width, f"{prefix}values, 16-bit copy"),
    )


def fused(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: Setting, prefix: str) -> Tensor:
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

    def rule(_: Grads) -> Grads:
        grads: Grads = [tape.new(f"gradient of {prefix}attention input", size) for size in sizes]
        return [*grads, tape.new(f"gradient of {prefix}attention bias of each sequence", bias) if bias else None]

    saved = [q.storage, k.storage, v.storage, mask.storage if mask else None, out.storage, lse.storage]
    return tape.record(out, [q, k, v, mask], rule, saved)


def additive(tape: Tape, k: Tensor, spec: Attention, setting: Setting, width: int, prefix: str) -> Tensor | None:
    """The numbers that each call makes of a Boolean mask, to add to the scores (``convert_boolean_attn_mask``)."""
    if masked(spec, setting) and spec.scores_bias in BIASES:
        return position_bias(tape, spec, setting, prefix)
    if not masked(spec, setting) or spec.scores_bias != "none":
        return None
    unit: Unit = "filled_pair" if kernel(spec, setting) == "efficient" else pairs_of(k)
    return tape.new(f"{prefix}attention mask", Size(1, width, unit, "none", "s"))


def pairs_of(k: Tensor) -> Unit:
    """The unit of scores, by the tower that their keys are of."""
    return "pair" if k.size.unit == "token" else "cross_pair"


def math(tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: Setting, prefix: str) -> Tensor:
    """``_scaled_dot_product_attention_math``: computes in fp32 whatever its inputs are."""
    narrow = q.size.width
    q = ops.plain(tape, ops.cast(tape, q, 4, f"{prefix}queries, fp32"), f"{prefix}queries, scaled")
    k, v = ops.cast(tape, k, 4, f"{prefix}keys, fp32"), ops.cast(tape, v, 4, f"{prefix}values, fp32")
    mask = additive(tape, k, spec, setting, 4, prefix)
    if k.size.elements < q.size.elements and spec.kv_form != "copied":
        k, v = repeated(tape, k, spec, f"{prefix}keys"), repeated(tape, v, spec, f"{prefix}values")
    k = ops.plain(tape, k, f"{prefix}keys, scaled")
    scores = product(tape, q, k, spec, prefix)
    if mask is not None or spec.causal:
        scores = ops.shifted(tape, scores, f"{prefix}attention scores, masked", in_place=True)
    weights = ops.saves_output(tape, scores, f"{prefix}attention softmax")
    del q, k, mask, scores
    out = weighted_values(tape, weights, v, spec, setting, prefix)
    return ops.cast(tape, out, narrow, f"{prefix}attention output, 16-bit copy")


def written_out(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, spec: Attention, setting: Setting, prefix: str, projected: int
) -> Tensor:
    """Materialised scores, as ``eager_attention_forward``; ``projected`` is the width of the queries as projected."""
    width = q.size.width
    scores = product(tape, q, k, spec, prefix)
    del q, k
    if setting.kernels != "model":
        # One kernel scales, masks and normalises in the width of the scores (Megatron, ``FusedScaleMaskSoftmax``)
        weights = ops.saves_output(tape, scores, f"{prefix}attention softmax")
        del scores
        return weighted_values(tape, weights, v, spec, setting, prefix)
    if spec.scores_bias != "in-product":
        scores = ops.plain(tape, scores, f"{prefix}attention scores, scaled")
    if spec.softcap:
        scores = ops.softcap(tape, scores, f"{prefix}attention scores")
    if spec.scores_bias in ("added", *BIASES):
        scores = ops.shifted(tape, scores, f"{prefix}attention scores with their bias")
    if spec.causal:
        scores = ops.shifted(tape, scores, f"{prefix}attention scores, masked")
    scores = ops.cast(tape, scores, 4 if spec.upcast_softmax or setting.autocast else width, f"{prefix}scores, fp32")
    weights = ops.saves_output(tape, scores, f"{prefix}attention softmax")
    del scores
    # Cast back to the queries' width, which under autocast is fp32 where the rotary embedding made them so
    weights = ops.cast(tape, weights, projected if spec.upcast_softmax else width, f"{prefix}attention weights")
    return weighted_values(tape, weights, v, spec, setting, prefix)


def product(tape: Tape, q: Tensor, k: Tensor, spec: Attention, prefix: str) -> Tensor:
    """Queries times keys, both made contiguous a head."""
    q, k = ops.copy(tape, q, f"{prefix}queries, contiguous"), by_head(tape, k, spec, spec.q_dim, f"{prefix}keys")
    size = Size(spec.heads, q.size.width, pairs_of(k), "tp", "a·s")
    return ops.matmul(tape, q, k, size, f"{prefix}attention scores")


def weighted_values(tape: Tape, weights: Tensor, v: Tensor, spec: Attention, setting: Setting, prefix: str) -> Tensor:
    """Dropout of the weights and their product with the values, made contiguous a token."""
    weights = ops.dropout(tape, weights, f"{prefix}attention dropout", active=bool(spec.dropout) and setting.dropout)
    weights = ops.cast(tape, weights, v.size.width, f"{prefix}attention weights, 16-bit copy")
    values = spec.heads * spec.value_dim
    v = by_head(tape, v, spec, values, f"{prefix}values")
    size = Size(values, v.size.width, "token", "tp", "q")
    out = ops.matmul(tape, weights, v, size, f"{prefix}attention output")
    del weights, v
    return ops.copy(tape, out, f"{prefix}attention output, contiguous")


def by_head(tape: Tape, x: Tensor, spec: Attention, elements: int, name: str) -> Tensor:
    """Keys or values contiguous a head; a product expands to all heads those that are shared without being repeated."""
    return repeated(tape, x, spec, name) if x.size.elements < elements else ops.copy(tape, x, f"{name}, contiguous")
