"""A mixture of experts as Megatron-LM runs it: all-to-all token dispatcher, fused permutation, grouped GEMM.

The peak of a model with experts often stands inside the forward of its last routed layer, because the locals of
``MoELayer.forward`` (the permuted and the exchanged tokens, the experts' output) stay referenced until it returns.

Sources: Megatron-LM 23e00ed ``core/transformer/moe/moe_layer.py`` (``custom_forward``), ``token_dispatcher.py``,
``experts.py`` (``TEGroupedMLP``), ``router.py``; TransformerEngine c188b533 ``pytorch/permutation.py``,
``module/grouped_linear.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.checkpoint import discarding
from memcalc.trace.layers import input_again, kept_input, operands
from memcalc.trace.parallel_linear import column_parallel, frozen_grouped, row_parallel
from memcalc.trace.tape import Grads, Leaf, Shard, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import MixtureOfExperts
    from memcalc.trace.layers import BlockConfig


def experts(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """Router, exchange, experts, exchange back, and the sum with the shared experts."""
    width = x.size.width
    rows = Size(hidden, width, "routed", "rows", "h")
    probs = router(tape, x, spec, trained=setting.trainable)
    permuted = permute(tape, x, probs, rows)
    sent = moved(tape, permuted, "tokens, exchanged", "rows if sorted", "rows if ep")
    # the experts read a copy sorted by expert; what came before stays referenced by the caller's locals
    given = moved(tape, sent, "experts' input", "rows", "rows if sorted")
    shared = shared_experts(tape, x, spec, setting, hidden)
    made = grouped(tape, given, probs, spec, setting, hidden)
    del given
    unsorted = moved(tape, made, "experts' output, in order of arrival", "rows", "rows if sorted")
    del made
    back = moved(tape, unsorted, "experts' output, returned", "rows if ep", "rows")
    out = unpermute(tape, back, x.size)
    del back
    if shared is not None:
        out = ops.add(tape, out, shared, "experts' sum")
    del permuted, sent, unsorted
    return out


def router(tape: Tape, x: Tensor, spec: MixtureOfExperts, *, trained: bool) -> Tensor:
    """Two fp32 softmaxes (of the choice and of the balancing loss), two masks, the map of rows and the choice.

    A frozen weight changes nothing: ``RouterGatingLinearFunction`` keeps its input, and makes its gradient all the
    same (Megatron-LM d98e8a64 ``core/transformer/moe/moe_utils.py``).
    """
    size, experts_ = x.size, spec.experts
    saved = [
        tape.new("router scores", size._replace(elements=2 * experts_, width=4, label="2·E")),
        tape.new("router masks", size._replace(elements=2 * experts_, width=1, label="2·E")),
        tape.new("map of routed rows", size._replace(elements=2 * experts_ + 1, width=4, label="2·E + 1")),
        tape.new("chosen experts", size._replace(elements=3 * spec.topk, width=8, label="3·topk")),
    ]
    probs = Tensor(saved[0].storage, saved[0].size)
    weight = Size(experts_ * size.elements, 1, "once", "none")

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of router input", size), tape.new("gradient of router weight", weight, "gradient")]

    leaf = Leaf("router weight", keep=True) if trained else None
    return tape.record(probs, [x, leaf], rule, [x.storage, *(tensor.storage for tensor in saved)])


def permute(tape: Tape, x: Tensor, probs: Tensor, rows: Size) -> Tensor:
    """The tokens in the order of their experts: keeps the map of rows, which the router's entry counts."""
    size, weights = x.size, probs.size
    out = tape.new("tokens, permuted", rows._replace(shard="rows if ep"))

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of permuted tokens", size), tape.new("gradient of probabilities", weights)]

    return tape.record(out, [x, probs], rule)


def moved(tape: Tape, x: Tensor, name: str, shard: Shard, before: Shard) -> Tensor:
    """An all-to-all or a sort by chunks: keeps nothing; it is no copy where there is nothing to move."""
    back = x.size._replace(shard=before)
    return tape.record(
        tape.new(name, x.size._replace(shard=shard)), [x], lambda _: [tape.new(f"gradient before {name}", back)]
    )


def grouped(tape: Tape, x: Tensor, probs: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """Two grouped products around an activation that is weighted by the tokens' probabilities."""
    wide = (2 if spec.gated else 1) * spec.ffn
    size = Size(wide, x.size.width, "routed", "routed ffn", "f_e")
    up = grouped_linear(tape, x, setting, "experts' up projection", size)
    again = "moe_act" in setting.checkpointed
    inner = weighted_activation(tape, up, probs, spec.ffn)
    del up
    size = Size(hidden, x.size.width, "routed", "rows if sorted", "h")
    out = grouped_linear(tape, inner, setting, "experts' down projection", size, original=again)
    if again:
        return discarding(tape, inner, out)
    return out


def grouped_linear(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, size: Size, *, original: bool = False
) -> Tensor:
    """``GroupedLinear``: keeps its input, as it is with ``original``; backward makes the gradient contiguous."""
    if not setting.trainable:
        return frozen_grouped(tape, x, setting, name, size)
    narrow = setting.narrow
    given, weight = x.size, Size(x.size.elements * size.elements, 1, "once", "experts")
    full = size._replace(shard="rows" if size.shard == "rows if sorted" else size.shard)
    saved, other = kept_input(tape, x, name, narrow, original=original)

    def rule(_: Grads) -> Grads:
        copied = [tape.new(f"gradient of {name} output, contiguous", full)]
        copied += operands(tape, full, name, narrow)
        copied += input_again(tape, given, name, narrow, original=original)
        inner = tape.new(f"gradient of {name} input", given)
        grad = tape.new(f"gradient of {name} weight", weight, "gradient")
        copied.clear()
        return [inner, grad]

    leaf, out = Leaf(f"{name} weight", keep=True), tape.new(f"{name} output", size)
    other.clear()
    return tape.record(out, [x, leaf], rule, [saved.storage])


def weighted_activation(tape: Tape, x: Tensor, probs: Tensor, ffn: int) -> Tensor:
    """``WeightedSwiGLUFunction``: keeps its input and the probabilities of the rows."""
    size, weights = x.size, probs.size
    rows = tape.new("probabilities of the rows", Size(1, 4, "routed", "rows", "1"))
    out = tape.new("experts' activation", size._replace(elements=ffn, label="f_e"))

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient before experts' activation", size), tape.new("gradient of probabilities", weights)]

    return tape.record(out, [x, probs], rule, [x.storage, rows.storage])


def unpermute(tape: Tape, x: Tensor, size: Size) -> Tensor:
    """The experts' outputs, added up a token: keeps nothing, because the weights were applied before."""
    rows = x.size._replace(shard="rows if ep")
    return tape.record(
        tape.new("sum of routed outputs", size), [x], lambda _: [tape.new("gradient of routed outputs", rows)]
    )


def shared_experts(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor | None:
    """A dense MLP on the same normalised input."""
    if not spec.shared_ffn:
        return None
    wide = (2 if spec.gated else 1) * spec.shared_ffn
    original = "layernorm" in setting.checkpointed
    up = column_parallel(tape, x, setting, "shared experts' up projection", wide, "f_s", original=original)
    size = up.size
    inner = tape.new("shared experts' activation", size._replace(elements=spec.shared_ffn, label="f_s"))
    saved = [up.storage]
    inner = tape.record(inner, [up], lambda _: [tape.new("gradient before shared experts' activation", size)], saved)
    del up, saved
    return row_parallel(tape, inner, setting, "shared experts' down projection", hidden)
