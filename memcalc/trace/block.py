"""One residual block, in the order in which its parts run.

What mixes tokens in attention's place, as the operators between the norm and the residual sum: Transformers 5.24
``models/lfm2/modeling_lfm2.py``, ``Lfm2ShortConv`` with its own ``causal_conv1d_fn``.

Routed experts beside a dense MLP, each with norms of its own; the router reads the residual stream too: Transformers
5.24 ``models/gemma4/modeling_gemma4.py`` (``Gemma4TextRouter``, ``Gemma4TextDecoderLayer``).

Experts that each run over every token, as batched products of inputs that the router's scores have multiplied:
Transformers 5.24 ``models/llama4/modeling_llama4.py`` (``Llama4Router``, ``Llama4TextMoe``, ``Llama4TextExperts``);
PyTorch 2.13 ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memcalc.specs.block import MixtureOfExperts, Mlp, Norm
from memcalc.specs.mixers import DeltaAttention, GatedDeltaNet, Mamba, Mamba2, ShortConvolution
from memcalc.trace import ops, transformer_engine
from memcalc.trace.activation_steps import activation
from memcalc.trace.attention import attention
from memcalc.trace.checkpoint import discarding, region
from memcalc.trace.delta_net import delta_attention, delta_net
from memcalc.trace.layers import WIDE, BlockConfig, gathered, linear, norm, scattered, weighted
from memcalc.trace.mamba import mamba, mamba2
from memcalc.trace.routed import INDEX, added_up, dense, normalised, picked, routed, sent
from memcalc.trace.tape import Edge, Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import Block
    from memcalc.specs.mixers import Mixer


def over_every_token(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """All experts' outputs added up, and the shared experts' over which that sum is added in place."""
    logits = linear(tape, x, setting, "router", spec.experts, "E")
    scores = scores_of_chosen(tape, logits, spec)
    copies = x.size._replace(elements=spec.experts * hidden, label="E·h")
    rows = ops.copy(tape, x, "tokens of every expert", copies)
    # Experts come before tokens in what they read, so that the scores are copied in that order
    rows = ops.mul(tape, rows, ops.copy(tape, scores, "scores by expert"), "weighted tokens")
    out = batched_experts(tape, rows, spec, setting, hidden)
    if not spec.shared_ffn:
        return added_up(tape, out, x.size.wide(WIDE if setting.autocast else out.size.width))
    alone = Mlp(ffn=spec.shared_ffn, gated=spec.gated, activation=spec.activation, packed=spec.shared_packed)
    shared = dense(tape, x, alone, setting, hidden, "shared experts'")
    total = added_up(tape, out, x.size.wide(WIDE if setting.autocast else out.size.width))
    del rows, out, logits, scores  # as variables of the function that runs, they live until here
    return ops.add(tape, shared, total, "experts' sum", in_place=True)


def scores_of_chosen(tape: Tape, logits: Tensor, spec: MixtureOfExperts) -> Tensor:
    """The sigmoid of the chosen experts' logits, in fp32 and cast back, and zeros of all others."""
    numbers = tape.new("chosen experts", Size(spec.topk, INDEX, "token", "none", "k"))
    best = picked(tape, logits, numbers, "chosen logits", [numbers])
    back = best.size

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of chosen logits", back)]

    only = tape.record(tape.new("logits of chosen experts", logits.size), [best], rule, [numbers.storage])
    del best
    scores = ops.saves_output(tape, ops.cast(tape, only, WIDE, "logits of chosen experts, fp32"), "router scores")
    return ops.cast(tape, scores, logits.size.width, "router scores, cast")


def batched_experts(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """The experts' MLPs, gate and up in one product."""
    ffn, each = spec.ffn, spec.experts
    up = batched_linear(tape, x, setting, "experts' up projection", (spec, hidden, ffn * (1 + spec.gated)))
    if not spec.gated:
        inner = activation(tape, up, spec.activation, setting, "experts'")
        return batched_linear(tape, inner, setting, "experts' down projection", (spec, ffn, hidden))
    gate, value = ops.split(tape, up, [each * ffn] * 2, ["E·f"] * 2, "experts' gate and up")
    inner = activation(tape, gate, spec.activation, setting, "experts'")
    inner = ops.mul(tape, value, inner, "experts' product")
    out = batched_linear(tape, inner, setting, "experts' down projection", (spec, ffn, hidden))
    del up, gate, value  # variables of the function that runs
    return out


def batched_linear(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, shape: tuple[MixtureOfExperts, int, int]
) -> Tensor:
    """``torch.bmm`` with the weights of all experts, of which autocast makes a 16-bit copy.

    ``shape`` is the mixture, and the width of one row before and after.
    """
    spec, before, after = shape
    given = ops.cast(tape, x, setting.compute, f"{name} input, 16-bit copy")
    weight, autocast = Size(spec.experts * before * after, 1, "once", "ep"), setting.compute != setting.weight
    leaf = Leaf(f"{name} weight", keep=True) if setting.trainable else None
    edge: Edge | None = tape.cast_weight(leaf, weight) if leaf and autocast else leaf
    wanted, in_size = given.requires_grad, given.size

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient of {name} input", in_size) if wanted else None
        if leaf is None or not autocast:
            return [grad, tape.new(f"gradient of {name} weight", weight, "gradient") if leaf else None]
        return [grad, tape.new(f"gradient of {name} weight, 16-bit", weight.wide(2))]

    copied = tape.weight_copy(name, weight.wide(2)) if autocast else None
    size = given.size._replace(elements=spec.experts * after, label="E·f")
    out = tape.operator("bmm", lambda: tape.new(f"{name} output", size))
    return tape.record(out, [given, edge], rule, [given.storage if leaf else None, copied], reads=True)


Branch = Callable[[Tensor], Tensor]


def run_block(tape: Tape, x: Tensor, block: Block, setting: BlockConfig, context: Tensor | None = None) -> Tensor:
    """The block's output from its input; ``context`` is the other tower's output (cross attention)."""
    if setting.kernels == "te" and transformer_engine.is_written(block, setting):
        return transformer_engine.run(tape, x, block, setting)

    def self_attention(y: Tensor) -> Tensor:
        out = attention(tape, gathered(tape, y, setting), block.own_attention, setting, block.hidden)
        return scattered(tape, out, y.size, setting)

    def mixing(y: Tensor) -> Tensor:
        spec = block.mixer
        if spec is None:
            return self_attention(y)
        mixed = mixer(tape, y, spec, setting, block.hidden)
        return mixed if block.attention is None else beside(tape, y, mixed, self_attention, scaled=is_scaled(spec))

    def cross_attention(y: Tensor, other: Tensor) -> Tensor:
        spec = block.cross_attention or block.own_attention
        return attention(tape, y, spec, setting, block.hidden, context=other)

    def feed_forward(y: Tensor) -> Tensor:
        out = mlp(tape, gathered(tape, y, setting), block, setting)
        return scattered(tape, out, y.size, setting, last=not reads_output(block))

    again, how, moe = setting.checkpointed, setting.rerun, "moe" if block.is_moe else "mlp"
    parts: list[tuple[str, Branch]] = []
    if block.attention is not None or block.mixer is not None:
        name = "mixer" if block.attention is None else "attention"
        parts.append((name, lambda y: region(tape, again, "attention", mixing, [y], how)))
    if context is not None:
        other = context
        parts.append(("cross-attention", lambda y: region(tape, again, "attention", cross_attention, [y, other], how)))
    if block.mlp is not None:
        parts.append(("MLP", lambda y: region(tape, again, moe, feed_forward, [y], how)))
    if block.parallel:
        return parallel(tape, x, block, setting, parts)
    variables = list[Tensor]()
    for name, part in parts:
        x = residual(tape, x, block, setting, name, part, variables)
    return ops.scaled_by_buffer(tape, x, "block output, scaled") if block.scaled else x


def mlp(tape: Tape, x: Tensor, block: Block, setting: BlockConfig) -> Tensor:
    """The MLP, dense or routed."""
    if isinstance(block.mlp, MixtureOfExperts):
        if block.mlp.own_norms:
            return dense_beside(tape, x, block.mlp, setting, block.hidden)
        run = over_every_token if block.mlp.every_expert else routed
        return run(tape, x, block.mlp, setting, block.hidden)
    read = reads_output(block) and not setting.gathered_input_saved  # else it is the sum over ranks that is read
    return dense(tape, x, block.own_mlp, setting, block.hidden, read=read)


def reads_output(block: Block) -> bool:
    """Whether the backward of a norm or scale reads what the MLP ends with."""
    return block.norm_place in ("both", "branch", "post") or block.layer_scale


def beside(tape: Tape, x: Tensor, mixed: Tensor, attend: Branch, *, scaled: bool) -> Tensor:
    """Attention on the input that a mixer had, and the sum of both; ``scaled`` by constants before and after."""
    if scaled:
        x, mixed = ops.plain(tape, x, "attention input, scaled"), ops.plain(tape, mixed, "mixer's output, scaled")
    attended = attend(x)
    del x
    attended = ops.plain(tape, attended, "attention output, scaled") if scaled else attended
    return ops.add(tape, mixed, attended, "sum of mixer and attention")


def residual(
    tape: Tape, x: Tensor, block: Block, setting: BlockConfig, name: str, part: Branch, variables: list[Tensor]
) -> Tensor:
    """One branch with its norms, dropout and residual sum; what a variable of the block holds goes to ``variables``."""
    before = block.norms > 0 and block.norm_place in ("pre", "both")
    y = own_norm(tape, narrowed(tape, x, block, setting), block, setting, f"{name} norm") if before else x
    x = ops.cast(tape, x, WIDE, "residual stream, fp32") if block.wide_residual else x
    y = discarding(tape, y, part(y)) if before and "layernorm" in setting.checkpointed else part(y)
    if name == "attention" and block.own_attention.outlives_sum and setting.kernels == "model":
        variables.append(y)
    if name == "MLP" and isinstance(block.mlp, MixtureOfExperts) and block.mlp.own_norms:
        y = with_experts(tape, x, y, block, block.mlp, setting, variables)
    y = ops.dropout(tape, y, f"{name} dropout", active=bool(block.dropout) and setting.dropout)
    if block.layer_scale:
        y = weighted(tape, y, Norm(), setting, f"{name} scale")
    if block.norm_place in ("both", "branch"):
        y = own_norm(tape, y, block, setting, f"{name} output norm")
    total = ops.add(tape, x, y, f"{name} residual sum")
    # The sum is an argument of the norm, so that the branch's variable still holds its output there (BertSelfOutput)
    return own_norm(tape, total, block, setting, f"{name} norm") if block.norm_place == "post" else total


def own_norm(tape: Tape, x: Tensor, block: Block, setting: BlockConfig, name: str) -> Tensor:
    """A norm of the block itself, under a checkpoint of its own where the policy names it."""
    again = setting.checkpointed
    return region(tape, again, "norm", lambda y: norm(tape, y, block.norm, setting, name), [x], setting.rerun)


def narrowed(tape: Tape, x: Tensor, block: Block, setting: BlockConfig) -> Tensor:
    """What the norm is given of an fp32 residual stream: a copy as wide as its weight."""
    width = setting.norm_weight or setting.weight
    return ops.cast(tape, x, width, "residual stream, cast for the norm") if block.wide_residual else x


def parallel(tape: Tape, x: Tensor, block: Block, setting: BlockConfig, parts: list[tuple[str, Branch]]) -> Tensor:
    """Attention and MLP side by side, on one norm or on one each."""
    y = own_norm(tape, x, block, setting, "attention norm") if block.norms else x
    if block.summed_branches:
        return summed(tape, x, y, block, setting, [part for _, part in parts])
    total = x
    for name, part in parts:
        if name == "MLP" and block.norms > 1:
            y = own_norm(tape, x, block, setting, "MLP norm")
        out = ops.dropout(tape, part(y), f"{name} dropout", active=bool(block.dropout) and setting.dropout)
        total = ops.add(tape, total, out, f"{name} residual sum")
        del out
    return total


def summed(tape: Tape, x: Tensor, y: Tensor, block: Block, setting: BlockConfig, parts: list[Branch]) -> Tensor:
    """The branches' sum, made in place, with one dropout."""
    other = own_norm(tape, x, block, setting, "MLP norm") if block.norms > 1 else y
    attended = parts[0](y)
    del y
    both = ops.add(tape, parts[1](other), attended, "sum of branches", in_place=True)
    del attended, other
    both = ops.dropout(tape, both, "residual dropout", active=bool(block.dropout) and setting.dropout)
    return ops.add(tape, x, both, "residual sum")


def mixer(tape: Tape, x: Tensor, spec: Mixer, setting: BlockConfig, hidden: int) -> Tensor:
    """From a block's normalised input to the branch's output."""
    if isinstance(spec, ShortConvolution):
        return short_convolution(tape, x, spec, setting, hidden)
    if isinstance(spec, GatedDeltaNet):
        return delta_net(tape, x, spec, setting, hidden)
    if isinstance(spec, DeltaAttention):
        return delta_attention(tape, x, spec, setting, hidden)
    if isinstance(spec, Mamba):
        return mamba(tape, x, spec, setting, hidden)
    return mamba2(tape, x, spec, setting, hidden)


def is_scaled(spec: Mixer) -> bool:
    """Whether constants multiply what goes in and out of it, and of attention beside it."""
    return isinstance(spec, Mamba2) and spec.scaled


def short_convolution(tape: Tape, x: Tensor, spec: ShortConvolution, setting: BlockConfig, hidden: int) -> Tensor:
    """Three parts of a projection: two gates, before and after a convolution of the third."""
    parts = linear(tape, x, setting, "mixer's input projection", 3 * hidden, "3·h")
    before, after, value = ops.split(tape, parts, [hidden] * 3, ["h"] * 3, "mixer's input projection")
    del parts
    gated = ops.mul(tape, before, value, "convolution's input")
    del before, value
    out = ops.mul(tape, after, causal(tape, gated, spec, setting), "convolution's output, gated")
    del after, gated
    out = ops.copy(tape, out, "convolution's output, tokens first")
    return linear(tape, out, setting, "mixer's output projection", hidden, "h", setting.branch_output)


def causal(tape: Tape, x: Tensor, spec: ShortConvolution, setting: BlockConfig) -> Tensor:
    """A convolution of each channel alone along the sequence: its output has ``taps - 1`` places more, cut off after.

    Keeps its input.
    """
    x = ops.cast(tape, x, setting.compute, "convolution's input, 16-bit copy")
    size, leaf = x.size, Leaf("convolution weight", keep=True) if setting.trainable else None
    weights = Size(size.elements * (spec.taps + spec.bias), 1, "once")

    def rule(_: Grads) -> Grads:
        grad = tape.new("gradient of convolution's input", size)
        return [grad, tape.new("gradient of convolution weight", weights, "gradient") if leaf else None]

    longer = size._replace(unit="convolved", label="h")
    out = tape.record(tape.new("convolution's output", longer), [x, leaf], rule, [x.storage])
    return cut(tape, out, size)


def cut(tape: Tape, x: Tensor, size: Size) -> Tensor:
    """The first places of a longer sequence: a view, whose gradient is filled up with zeros."""
    longer = x.size
    return tape.record(Tensor(x.storage, size), [x], lambda _: [tape.new("gradient of convolution's output", longer)])


def dense_beside(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """The dense MLP, which reads the branch's norm."""
    return dense(tape, x, Mlp(ffn=spec.shared_ffn, gated=spec.gated, activation=spec.activation), setting, hidden)


def with_experts(
    tape: Tape, x: Tensor, mlp: Tensor, block: Block, spec: MixtureOfExperts, setting: BlockConfig,
    variables: list[Tensor],
) -> Tensor:  # fmt: skip
    """The sum of the dense MLP's output and that of experts which read the residual stream ``x``.

    What variables of the block hold until it ends goes to ``variables``.
    """
    first = norm(tape, mlp, block.norm, setting, "dense MLP's output norm")
    weights, experts, scores = router(tape, x, block.norm, spec, setting)
    variables += [first, weights, experts, scores]
    second = norm(tape, x, block.norm, setting, "experts' norm")
    second = sent(tape, second, [weights, experts], spec, setting, block.hidden)
    second = norm(tape, second, block.norm, setting, "experts' output norm")
    variables.append(second)
    return ops.add(tape, first, second, "sum of dense MLP and experts")


def router(
    tape: Tape, x: Tensor, kind: Norm, spec: MixtureOfExperts, setting: BlockConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the chosen experts, their numbers, and the probabilities of all."""
    x = norm(tape, x, kind.model_copy(update={"weight": False}), setting, "router's norm")
    x = ops.plain(tape, weighted(tape, x, Norm(), setting, "router's scale"), "router input, scaled")
    probabilities = ops.saves_output(tape, linear(tape, x, setting, "router", spec.experts, "E"), "router scores", 4)
    experts = tape.new("chosen experts", Size(spec.topk, INDEX, "token", "none", "k"))
    weights = normalised(tape, picked(tape, probabilities, experts, "weights of experts", [experts]), setting)
    scales = scales_of_chosen(tape, experts, spec, setting)
    return ops.mul(tape, weights, scales, "weights of experts, scaled"), experts, probabilities


def scales_of_chosen(tape: Tape, experts: Tensor, spec: MixtureOfExperts, setting: BlockConfig) -> Tensor:
    """A learned number of each chosen expert: keeps their numbers."""
    leaf = Leaf("scales of experts weight", keep=True) if setting.trainable else None

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of scales of experts", Size(spec.experts, 1, "once"), "gradient")]

    out = tape.new("scales of chosen experts", experts.size.wide(setting.norm_weight or setting.weight))
    return tape.record(out, [leaf], rule, [experts.storage])
