"""The MLP of a block, dense or routed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.layers import BlockConfig, linear
from memcalc.trace.tape import Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import Mlp


def dense(tape: Tape, x: Tensor, spec: Mlp, setting: BlockConfig, hidden: int, name: str = "MLP") -> Tensor:
    """Two matrices, or three where gated."""
    inner = gated(tape, x, spec, setting, name) if spec.gated else ungated(tape, x, spec, setting, name)
    inner = ops.dropout(tape, inner, f"{name} inner dropout", active=bool(spec.dropout) and setting.dropout)
    if spec.cast_before_down:
        inner = ops.cast(tape, inner, setting.weight, f"{name} inner activations, cast")
    with tape.unread(active=setting.compiled):
        return linear(tape, inner, setting, f"{name} down projection", hidden, "h", setting.branch_output)


def gated(tape: Tape, x: Tensor, spec: Mlp, setting: BlockConfig, name: str) -> Tensor:
    """``activation(gate(x)) * up(x)``; gate and up may be views of one projection."""
    if spec.packed:
        both = linear(tape, x, setting, f"{name} gate and up", 2 * spec.ffn, "2·f", "tp")
        gate, up = ops.split(tape, both, [spec.ffn, spec.ffn], ["f", "f"], f"{name} gate and up")
        del both
        if setting.compiled:
            return ops.recomputed_product(tape, gate, up, f"{name} product")
        return ops.mul(tape, up, activation(tape, gate, spec.activation, setting, name), f"{name} product")
    gate = linear(tape, x, setting, f"{name} gate", spec.ffn, "f", "tp")
    if setting.compiled:
        up = linear(tape, x, setting, f"{name} up", spec.ffn, "f", "tp")
        return ops.recomputed_product(tape, gate, up, f"{name} product")
    gate = activation(tape, gate, spec.activation, setting, name)
    return ops.mul(tape, gate, linear(tape, x, setting, f"{name} up", spec.ffn, "f", "tp"), f"{name} product")


def ungated(tape: Tape, x: Tensor, spec: Mlp, setting: BlockConfig, name: str) -> Tensor:
    """``activation(up(x))``."""
    up = linear(tape, x, setting, f"{name} up", spec.ffn, "f", "tp")
    return activation(tape, up, spec.activation, setting, name)


def activation(tape: Tape, x: Tensor, kind: str, setting: BlockConfig, name: str) -> Tensor:
    """One kernel, or the steps in which the model writes it."""
    if kind == "relu":
        return ops.saves_output(tape, x, f"{name} activation")
    steps = None if setting.kernels != "model" or setting.compiled else STEPS.get(kind)
    return ops.saves_input(tape, x, f"{name} activation") if steps is None else steps(tape, x, setting, name)


def gelu_new(tape: Tape, x: Tensor, setting: BlockConfig, name: str) -> Tensor:
    """``0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))`` (Transformers ``NewGELUActivation``)."""
    half = ops.plain(tape, x, f"{name} half of the activation's input")
    # Autocast computes a power in fp32
    base = ops.cast(tape, x, 4, f"{name} activation's input, fp32") if setting.autocast else x
    cube = ops.plain(tape, ops.saves_input(tape, base, f"{name} cube", temporaries=2), f"{name} cube, scaled")
    del base
    inner = ops.plain(tape, ops.add(tape, x, cube, f"{name} polynomial"), f"{name} polynomial, scaled")
    del cube
    factor = ops.shifted(tape, ops.saves_output(tape, inner, f"{name} tanh"), f"{name} 1 + tanh")
    del inner
    return ops.mul(tape, half, factor, f"{name} activation")


def gelu_bloom(tape: Tape, x: Tensor, setting: BlockConfig, name: str) -> Tensor:
    """A tanh GELU written op by op inside one autograd function, which keeps its input (``BloomGelu``)."""
    del setting
    return ops.saves_input(tape, x, f"{name} activation", temporaries=BLOOM_TEMPORARIES)


BLOOM_TEMPORARIES = 4
"""Tensors beside the result at the largest moment of ``bloom_gelu_back``: the tanh, half of x, and two factors."""


STEPS = {"gelu_new": gelu_new, "gelu_python": gelu_new, "gelu_bloom": gelu_bloom}
