"""What mixes tokens in attention's place, as the operators between the norm and the residual sum.

Source: Transformers 5.24 ``models/lfm2/modeling_lfm2.py``, ``Lfm2ShortConv`` with its own ``causal_conv1d_fn``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.specs.mixers import DeltaAttention, GatedDeltaNet, Mamba, Mamba2, ShortConvolution
from memcalc.trace import ops
from memcalc.trace.delta_attention import delta_attention
from memcalc.trace.delta_net import delta_net
from memcalc.trace.layers import BlockConfig, linear
from memcalc.trace.mamba import mamba
from memcalc.trace.mamba2 import mamba2
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.mixers import Mixer


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
