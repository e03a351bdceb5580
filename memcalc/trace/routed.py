"""A routed MLP: the router, the experts over the tokens sent to them, and shared experts.

Source: Transformers 5.23 ``integrations/moe.py`` (``grouped_mm_experts_forward``) and the routers of
``models/{mixtral,qwen3_moe,deepseek_v2,deepseek_v3}/modeling_*.py``; PyTorch 2.13 ``tools/autograd/derivatives.yaml``.

Routed experts one after another, with the tokens sent to each: Transformers 4.48 models/mixtral/modeling_mixtral.py.

The router of a mixture of experts: scores, the choice of experts, and their weights.

Source: Transformers 5.23 ``models/{mixtral,qwen3_moe,deepseek_v2,deepseek_v3}/modeling_*.py``; PyTorch 2.13
``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memcalc.specs.block import Mlp
from memcalc.trace import ops
from memcalc.trace.activation_steps import activation
from memcalc.trace.layers import BlockConfig, linear
from memcalc.trace.stacked_experts import DOWN, INNER, Stacks, routed_by, router_weight, stacks
from memcalc.trace.tape import Grads, Kind, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import MixtureOfExperts


def dense(
    tape: Tape, x: Tensor, spec: Mlp, setting: BlockConfig, hidden: int, name: str = "MLP", *, read: bool = False
) -> Tensor:
    """Two matrices, or three where gated; ``read``: a backward reads the output."""
    inner = gated(tape, x, spec, setting, name) if spec.gated else ungated(tape, x, spec, setting, name)
    inner = ops.dropout(tape, inner, f"{name} inner dropout", active=bool(spec.dropout) and setting.dropout)
    if spec.cast_before_down:
        inner = ops.cast(tape, inner, setting.weight, f"{name} inner activations, cast")
    with tape.unread(active=setting.compiled and not read):
        return linear(tape, inner, setting, f"{name} down projection", hidden, "h", setting.branch_output)


def gated(tape: Tape, x: Tensor, spec: Mlp, setting: BlockConfig, name: str) -> Tensor:
    """``activation(gate(x)) * up(x)``; gate and up may be views of one projection."""
    if spec.packed:
        both = linear(tape, x, setting, f"{name} gate and up", 2 * spec.ffn, "2·f", "tp")
        gate, up = ops.split(tape, both, [spec.ffn, spec.ffn], ["f", "f"], f"{name} gate and up")
        del both
        if kernel := setting.gate_kernel(spec.activation):
            return kernel(tape, gate, up, f"{name} product")
        return ops.mul(tape, up, activation(tape, gate, spec.activation, setting, name), f"{name} product")
    gate = linear(tape, x, setting, f"{name} gate", spec.ffn, "f", "tp")
    if kernel := setting.gate_kernel(spec.activation):
        up = linear(tape, x, setting, f"{name} up", spec.ffn, "f", "tp")
        return kernel(tape, gate, up, f"{name} product")
    gate = activation(tape, gate, spec.activation, setting, name)
    return ops.mul(tape, gate, linear(tape, x, setting, f"{name} up", spec.ffn, "f", "tp"), f"{name} product")


def ungated(tape: Tape, x: Tensor, spec: Mlp, setting: BlockConfig, name: str) -> Tensor:
    """``activation(up(x))``."""
    up = linear(tape, x, setting, f"{name} up", spec.ffn, "f", "tp")
    return activation(tape, up, spec.activation, setting, name)


INDEX = 8
"""Bytes of an index: ``torch.topk``, ``sort`` and advanced indexing use 64-bit integers."""


def routed(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """The experts' weighted sum and the shared experts' output."""
    writing = looped if setting.expert_loop else WRITINGS.get(setting.kernels, grouped)
    if not spec.shared_ffn:
        return writing(tape, x, spec, setting, hidden)

    def beside() -> Tensor:
        return dense(tape, x, _like(spec, spec.shared_ffn), setting, hidden, "shared experts'")

    # Qwen's classes run them before the experts since these are stacked (Transformers 5.24)
    first = beside() if spec.shared_gate and not setting.expert_loop else None
    total = writing(tape, x, spec, setting, hidden)
    shared = beside() if first is None else first
    del first
    if not spec.shared_gate:
        return ops.add(tape, total, shared, "experts' sum")
    gate = linear(tape, x, setting, "gate of shared experts", 1, "1")
    scale = ops.saves_output(tape, gate, "gate of shared experts, sigmoid")
    del gate
    return ops.add(tape, total, ops.mul(tape, scale, shared, "gated shared output"), "experts' sum")


def grouped(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """Tokens sorted by expert and multiplied by grouped matmuls; each token passes ``topk`` experts."""
    return sent(tape, x, [*router(tape, x, spec, setting)], spec, setting, hidden)


def sent(
    tape: Tape, x: Tensor, choice: list[Tensor], spec: MixtureOfExperts, setting: BlockConfig, hidden: int
) -> Tensor:
    """The same by a router's ``choice``, which is emptied: the experts' weights, their numbers, and what else lives."""
    weights, *passed = choice
    choice.clear()
    folded = stacks(tape, spec, setting, hidden)
    by_expert, order, counted, token = (tape.new(name, _rows(x, spec, 1, width)) for name, width in ROW_NUMBERS.items())
    tokens = indexed(tape, x, token, _rows(x, spec, hidden, x.size.width, "h"), "routed tokens")
    del token
    sent_rows = tokens if setting.exchanges_rows else None  # a variable of ``MoE.forward``
    tokens = to_experts(tape, tokens) if setting.exchanges_rows else tokens
    row_weights = indexed(tape, weights, order, weights.size, "weights of rows")
    ends = tape.new("ends of experts' rows", Size(spec.experts, 4, "once", "none", "E"))
    out, bias = experts_mlp(tape, tokens, spec, setting, hidden, (ends, by_expert), folded)
    out = from_experts(tape, out) if setting.exchanges_rows else out
    out = ops.mul(tape, out, row_weights, "weighted expert outputs")
    back = tape.new("rows in the tokens' order", _rows(x, spec, 1, INDEX))
    out = indexed(tape, out, back, out.size, "expert outputs in the tokens' order")
    del back, weights, passed, counted, bias, sent_rows  # as variables of the functions that run, they live until here
    out = added_up(tape, out, x.size.wide(out.size.width))
    return ops.cast(tape, out, x.size.width, "sum of expert outputs, cast")


def to_experts(tape: Tape, rows: Tensor) -> Tensor:
    """Rows that arrived, then sorted by expert, a copy that is kept (torchtitan c4e229115 expert_parallel.py)."""
    away = rows.size._replace(shard="if ep")
    arrived = tape.operator("all-to-all", lambda: tape.new("rows, exchanged", away))
    out = tape.new("experts' input, sorted", rows.size)
    del arrived
    return tape.record(out, [rows], _exchanged_back(tape, rows.size, away, "sent rows"))


def from_experts(tape: Tape, rows: Tensor) -> Tensor:
    """The experts' outputs in the order in which rows arrived, then back where they came from."""
    size, away = rows.size, rows.size._replace(shard="if ep")
    leaving = tape.new("experts' output, in order of arrival", away)
    out = tape.new("experts' output, in order", size._replace(shard="unless ep"))
    back = tape.operator("all-to-all", lambda: tape.new("experts' output, returned", away))
    del leaving
    out = Tensor(out.storage, size)
    return tape.record(out, [rows], _exchanged_back(tape, size, away, "sorted outputs"), [back.storage])


def _exchanged_back(tape: Tape, size: Size, away: Size, name: str) -> Callable[[Grads], Grads]:
    def rule(_: Grads) -> Grads:
        travelled = tape.new(f"gradient of {name}, exchanged", away)
        grad = tape.new(f"gradient of {name}", size)
        del travelled
        return [grad]

    return rule


ROW_NUMBERS = {
    "sorted expert numbers": INDEX,
    "order by expert": INDEX,
    "expert numbers to count": 4,
    "token of each row": INDEX,
}
"""Names and bytes of the integers of each row; the counting of rows an expert takes 32-bit ones."""
WRITINGS = {"model": grouped}
"""How the experts run, by the kernels of the setting."""


def experts_mlp(
    tape: Tape, tokens: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int, rows: tuple[Tensor, Tensor],
    folded: Stacks,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The experts' MLPs over rows sorted by expert, and the biases of the last ones, which the caller holds.

    ``rows`` are the ends of the experts' rows and the expert of each row; ``folded`` the weights under adapters.
    """
    name, k, ffn, (ends, by_expert) = "experts'", spec.topk, spec.ffn, rows
    width = ffn * (1 + spec.gated)
    folded.read(tape, INNER)
    bias = biases(tape, tokens, spec, width)
    up = grouped_linear(tape, tokens, setting, INNER, (spec, hidden, width), ends, folded)
    up = biased(tape, up, spec, setting, f"{name} up projection", by_expert)
    if spec.activation == "swiglu_clamped" and not setting.compiled:
        inner = swiglu_clamped(tape, up, k * ffn, name)
    elif spec.gated:
        gate, value = ops.split(tape, up, [k * ffn] * 2, ["k·f"] * 2, f"{name} gate and up")
        inner = ops.mul(tape, activation(tape, gate, spec.activation, setting, name), value, f"{name} product")
        del gate, value
    else:
        inner = activation(tape, up, spec.activation, setting, name)
    del up
    folded.read(tape, DOWN)
    bias = biases(tape, tokens, spec, hidden)
    out = grouped_linear(tape, inner, setting, DOWN, (spec, ffn, hidden), ends, folded)
    return biased(tape, out, spec, setting, f"{name} down projection", by_expert), bias


def biases(tape: Tape, tokens: Tensor, spec: MixtureOfExperts, elements: int) -> Tensor | None:
    """The biases of each row's expert, gathered: a variable until the next ones are, or the experts are done."""
    size = tokens.size._replace(elements=spec.topk * elements, label="k·f")
    return tape.new("biases of rows", size) if spec.expert_bias else None


def biased(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, name: str, by_expert: Tensor) -> Tensor:
    """A sum with the biases of each row's expert, in place: keeps which expert it is, to add up their gradients."""
    if not spec.expert_bias:
        return x
    size = Size(spec.experts * x.size.elements // spec.topk, 1, "once", "ep")
    leaf = Leaf(f"{name} bias", keep=True) if setting.trainable else None

    def rule(grads: Grads) -> Grads:
        return [grads[0], tape.new(f"gradient of {name} bias", size, "gradient") if leaf else None]

    return tape.record(Tensor(x.storage, x.size), [x, leaf], rule, [by_expert.storage if leaf else None])


def swiglu_clamped(tape: Tape, both: Tensor, elements: int, name: str) -> Tensor:
    """``(clamp(up) + 1) * gate * sigmoid(alpha * gate)`` op by op, of interleaved columns.

    Source: Transformers 5.23 ``models/gpt_oss/modeling_gpt_oss.py``, ``GptOssExperts._apply_gate``.
    """
    gate, up = (ops.slice_of(tape, both, elements, "k·f", f"{name} {part}") for part in ("gate", "up"))
    gate = ops.saves_input(tape, gate, f"{name} gate, clamped")
    up = ops.saves_input(tape, up, f"{name} up, clamped")
    turned = ops.saves_output(tape, ops.plain(tape, gate, f"{name} gate, scaled"), f"{name} sigmoid")
    glu = ops.mul(tape, gate, turned, f"{name} activation")
    return ops.mul(tape, ops.shifted(tape, up, f"{name} up and one"), glu, f"{name} product")


def grouped_linear(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, shape: tuple[MixtureOfExperts, int, int], ends: Tensor,
    folded: Stacks,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.grouped_mm``, which autocast leaves alone: the input takes the weight's dtype.

    ``shape`` is the mixture, and the width of one row before and after.
    """
    (spec, before, after), made = shape, folded.weights.get(name)
    given = ops.cast(tape, x, made.size.width if made else setting.weight, f"{name} input, cast")
    size, in_size = given.size._replace(elements=spec.topk * after, label="k·f"), given.size
    weight = Size(spec.experts * before * after, 1, "once", "ep")
    wanted = given.requires_grad
    leaf = made or (Leaf(f"{name} weight", keep=True) if setting.trainable else None)
    trained = setting.trainable if made is None else made.requires_grad
    full: tuple[Size, Kind] = (weight, "gradient") if made is None else (made.size, "activation")

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient of {name} input", in_size) if wanted else None
        return [grad, tape.new(f"gradient of {name} weight", *full) if trained else None]

    saved = [given.storage if trained else None, ends.storage, made.storage if made and wanted else None]
    return tape.record(
        tape.operator("grouped_mm", lambda: tape.new(f"{name} output", size)), [given, leaf], rule, saved
    )


def added_up(tape: Tape, rows: Tensor, size: Size) -> Tensor:
    """The sum over a token's experts; its gradient is expanded, and copied where rows become one dimension again."""
    back = rows.size
    return tape.record(
        tape.new("sum of expert outputs", size), [rows], lambda _: [tape.new("gradient of expert outputs", back)]
    )


def _rows(x: Tensor, spec: MixtureOfExperts, elements: int, width: int, label: str = "") -> Size:
    """The size of a tensor with a row for each token and chosen expert."""
    return x.size._replace(
        elements=spec.topk * elements, width=width, shard="none", label=f"k·{label}" if label else "k"
    )


def _like(spec: MixtureOfExperts, ffn: int) -> Mlp:
    return Mlp(ffn=ffn, gated=spec.gated, activation=spec.activation, packed=spec.shared_packed)


def looped(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """The experts' weighted sum, for balanced experts: each has one of ``experts / topk`` parts of the rows."""
    weights, chosen, logits = router(tape, x, spec, setting)
    total = tape.new("sum of expert outputs", x.size._replace(elements=hidden))
    mask = tape.new("chosen experts, one-hot", Size(spec.topk * spec.experts, INDEX, "token", "none", "k·E"))
    del chosen
    for number in range(spec.experts):
        total = _add_expert(tape, x, weights, total, spec, setting, f"expert {number}")
    del mask, logits
    return total


def _add_expert(
    tape: Tape, x: Tensor, weights: Tensor, total: Tensor, spec: MixtureOfExperts, setting: BlockConfig, name: str
) -> Tensor:
    """Add one expert's outputs into the sum, in place: ``index_add_`` keeps what it adds."""
    parts = max(spec.experts // spec.topk, 1)
    index = tape.new(f"{name} tokens' numbers", Size(2, INDEX, "token", "none", "2").part(parts))
    rows = indexed(tape, x, index, x.size.part(parts), f"{name} tokens")
    out = _expert(tape, rows, spec, setting, x.size.elements, parts)
    share = indexed(tape, weights, index, weights.size._replace(elements=1).part(parts), f"{name} weights")
    out = ops.cast(tape, ops.mul(tape, out, share, f"{name} outputs, weighted"), x.size.width, f"{name} outputs, cast")
    size = out.size

    def rule(grads: Grads) -> Grads:
        return [grads[0], tape.new(f"gradient of {name} outputs", size)]

    return tape.record(Tensor(total.storage, total.size), [total, out], rule, [index.storage, out.storage])


def _expert(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int, parts: int) -> Tensor:
    """An expert's MLP over its part of the rows."""
    up = linear(tape, x, setting, "expert gate" if spec.gated else "expert up", spec.ffn, "f", parts=parts)
    inner = activation(tape, up, spec.activation, setting, "expert")
    del up
    if spec.gated:
        inner = ops.mul(
            tape, inner, linear(tape, x, setting, "expert up", spec.ffn, "f", parts=parts), "expert product"
        )
    return linear(tape, inner, setting, "expert down projection", hidden, "h", parts=parts)


def router(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the chosen experts, their numbers, and the logits, which the caller holds while experts run."""
    made = router_weight(tape, spec, setting, x.size.elements)  # lives until this returns
    logits = router_logits(tape, x, spec, setting, made[0] if made else None)
    width = logits.size.width
    numbers = Size(spec.topk, INDEX, "token", "none", "k")
    if spec.scores == "sigmoid":
        scores = ops.saves_output(tape, logits, "router scores")
        experts = tape.new("chosen experts", numbers)
        weights = picked(tape, scores, experts, "weights of experts", [scores, experts])
    elif spec.scores == "chosen":
        scores = logits
        experts = tape.new("chosen experts", numbers)
        weights = ops.saves_output(tape, picked(tape, logits, experts, "chosen logits", [experts]), "router scores")
    else:
        scores = ops.saves_output(tape, logits, "router scores", 4)
        if spec.group_limited:
            scores = masked(tape, scores, "router scores of the best groups")
        experts = tape.new("chosen experts", numbers)
        weights = picked(tape, scores, experts, "weights of experts", [experts])
    del scores
    if spec.normalised:
        weights = normalised(tape, weights, setting)
    if spec.narrow_weights:
        weights = ops.cast(tape, weights, width, "weights of experts, cast")
    return ops.plain(tape, weights, "weights of experts, scaled") if spec.scaled else weights, experts, logits


def router_logits(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, made: Tensor | None) -> Tensor:
    """One number an expert; where the model asks for fp32, of fp32 copies of input and weight.

    ``made`` is the weight with an adapter that is folded in.
    """
    if made is not None:
        return routed_by(tape, x, made, setting, spec.experts, wide=spec.fp32_router)
    if not spec.fp32_router:
        return linear(tape, x, setting, "router", spec.experts, "E")
    wide = ops.cast(tape, x, 4, "router input, fp32")
    if setting.weight == 4:
        return linear(tape, wide, setting, "router", spec.experts, "E")
    elements, in_size = spec.experts * x.size.elements, wide.size
    copy = tape.new("router weight, fp32", Size(elements, 4, "once", "none", "E·h"), "weight copy")
    leaf = Leaf("router weight", keep=True) if setting.trainable else None

    def rule(_: Grads) -> Grads:
        grad = tape.new("gradient of router input", in_size)
        if leaf is None:
            return [grad, None]
        wide_gradient = tape.new("gradient of router weight, fp32", Size(elements, 4, "once"))
        del wide_gradient
        return [grad, tape.new("gradient of router weight", Size(elements, 1, "once"), "gradient")]

    out = tape.new("router output", wide.size._replace(elements=spec.experts, label="E"))
    return tape.record(out, [wide, leaf], rule, [wide.storage if leaf else None, copy.storage])


def picked(tape: Tape, scores: Tensor, experts: Tensor, name: str, saved: list[Tensor]) -> Tensor:
    """``topk`` or ``gather``: the backward scatters into zeros."""
    size = scores.size
    out = tape.new(name, experts.size.wide(size.width))
    return tape.record(out, [scores], lambda _: [tape.new(f"gradient before {name}", size)], [t.storage for t in saved])


def masked(tape: Tape, x: Tensor, name: str) -> Tensor:
    """``masked_fill``: keeps the mask."""
    mask, size = tape.new(f"{name}, mask", x.size.wide(1)), x.size
    return tape.record(tape.new(name, size), [x], lambda _: [tape.new(f"gradient before {name}", size)], [mask.storage])


def normalised(tape: Tape, weights: Tensor, setting: BlockConfig) -> Tensor:
    """``weights /= weights.sum()``: in place, so that autograd keeps a clone of what is overwritten, and the sum."""
    size = weights.size
    width = 4 if setting.autocast else size.width  # autocast sums in fp32
    total = tape.new("sum of weights", size._replace(elements=1, width=width, label="1"))
    before = tape.new("weights before their division", size)

    def rule(_: Grads) -> Grads:
        quotient, product = (tape.new(f"gradient of weights, {part}", size) for part in ("divided", "of the sum"))
        del product
        return [quotient]

    return tape.record(Tensor(weights.storage, size), [weights], rule, [total.storage, before.storage])


def indexed(tape: Tape, x: Tensor, index: Tensor, size: Size, name: str) -> Tensor:
    """``x[index]``: keeps the index; the backward adds rows into zeros."""
    back = x.size
    return tape.record(
        tape.new(name, size), [x], lambda _: [tape.new(f"gradient before {name}", back)], [index.storage]
    )
