"""One residual block, in the order in which its parts run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memcalc.specs.block import MixtureOfExperts, Norm
from memcalc.trace import ops, transformer_engine
from memcalc.trace.attention import attention
from memcalc.trace.checkpoint import discarding, region
from memcalc.trace.every_expert import over_every_token
from memcalc.trace.experts_beside import dense_beside, with_experts
from memcalc.trace.layers import WIDE, BlockConfig, norm, weighted
from memcalc.trace.mixers import is_scaled, mixer
from memcalc.trace.parallel_linear import gathered, scattered
from memcalc.trace.routed import dense, routed
from memcalc.trace.tape import Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import Block

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
        return scattered(tape, out, y.size, setting, last=True)

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
    return dense(tape, x, block.own_mlp, setting, block.hidden)


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
    y = norm(tape, narrowed(tape, x, block, setting), block.norm, setting, f"{name} norm") if before else x
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
        y = norm(tape, y, block.norm, setting, f"{name} output norm")
    total = ops.add(tape, x, y, f"{name} residual sum")
    # The sum is an argument of the norm, so that the branch's variable still holds its output there (BertSelfOutput)
    return norm(tape, total, block.norm, setting, f"{name} norm") if block.norm_place == "post" else total


def narrowed(tape: Tape, x: Tensor, block: Block, setting: BlockConfig) -> Tensor:
    """What the norm is given of an fp32 residual stream: a copy as wide as its weight."""
    width = setting.norm_weight or setting.weight
    return ops.cast(tape, x, width, "residual stream, cast for the norm") if block.wide_residual else x


def parallel(tape: Tape, x: Tensor, block: Block, setting: BlockConfig, parts: list[tuple[str, Branch]]) -> Tensor:
    """Attention and MLP side by side, on one norm or on one each."""
    y = norm(tape, x, block.norm, setting, "attention norm") if block.norms else x
    if block.summed_branches:
        return summed(tape, x, y, block, setting, [part for _, part in parts])
    total = x
    for name, part in parts:
        if name == "MLP" and block.norms > 1:
            y = norm(tape, x, block.norm, setting, "MLP norm")
        out = ops.dropout(tape, part(y), f"{name} dropout", active=bool(block.dropout) and setting.dropout)
        total = ops.add(tape, total, out, f"{name} residual sum")
        del out
    return total


def summed(tape: Tape, x: Tensor, y: Tensor, block: Block, setting: BlockConfig, parts: list[Branch]) -> Tensor:
    """The branches' sum, made in place, with one dropout."""
    other = norm(tape, x, block.norm, setting, "MLP norm") if block.norms > 1 else y
    attended = parts[0](y)
    del y
    both = ops.add(tape, parts[1](other), attended, "sum of branches", in_place=True)
    del attended, other
    both = ops.dropout(tape, both, "residual dropout", active=bool(block.dropout) and setting.dropout)
    return ops.add(tape, x, both, "residual sum")
