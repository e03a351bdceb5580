"""Routed experts beside a dense MLP, each with norms of its own; the router reads the residual stream too.

Source: Transformers 5.24 ``models/gemma4/modeling_gemma4.py`` (``Gemma4TextRouter``, ``Gemma4TextDecoderLayer``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.specs.block import Mlp, Norm
from memcalc.trace import ops
from memcalc.trace.layers import BlockConfig, linear, norm, weighted
from memcalc.trace.routed import INDEX, dense, normalised, picked, sent
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import Block, MixtureOfExperts


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
