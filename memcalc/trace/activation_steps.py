"""Activations: one kernel, or the operators in which a model's class writes them.

Source: Transformers 5.24 ``activations.py``; PyTorch 2.13 ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from memcalc.trace import ops
from memcalc.trace.layers import WIDE, BlockConfig
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor


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
    # Each result is a temporary of the expression, and goes when the operator that takes it has returned
    power = ops.saves_input(tape, base, f"{name} cube", temporaries=2)
    del base
    cube = ops.plain(tape, power, f"{name} cube, scaled")
    del power
    polynomial = ops.add(tape, x, cube, f"{name} polynomial")
    del cube
    inner = ops.plain(tape, polynomial, f"{name} polynomial, scaled")
    del polynomial
    tanh = ops.saves_output(tape, inner, f"{name} tanh")
    del inner
    factor = ops.shifted(tape, tanh, f"{name} 1 + tanh")
    del tanh
    return ops.mul(tape, half, factor, f"{name} activation")


def gelu_bloom(tape: Tape, x: Tensor, setting: BlockConfig, name: str) -> Tensor:
    """A tanh GELU written op by op inside one autograd function, which keeps its input (``BloomGelu``)."""
    del setting
    return ops.saves_input(tape, x, f"{name} activation", temporaries=BLOOM_TEMPORARIES)


BLOOM_TEMPORARIES = 4
"""Tensors beside the result at the largest moment of ``bloom_gelu_back``: the tanh, half of x, and two factors."""


def relu2(tape: Tape, x: Tensor, setting: BlockConfig, name: str) -> Tensor:
    """``relu(x) ** 2``: the ReLU's result serves both, but for autocast, which computes a power in fp32."""
    up = ops.saves_output(tape, x, f"{name} ReLU")
    wide = ops.cast(tape, up, 4, f"{name} ReLU, fp32") if setting.autocast else up
    return ops.saves_input(tape, wide, f"{name} activation", temporaries=2)


def quick_gelu(tape: Tape, x: Tensor, setting: BlockConfig, name: str) -> Tensor:
    """``x * sigmoid(1.702 * x)`` (Transformers ``QuickGELUActivation``): the product keeps both of its factors."""
    del setting
    scaled = ops.plain(tape, x, f"{name} activation's input, scaled")
    factor = ops.saves_output(tape, scaled, f"{name} sigmoid")
    del scaled
    return ops.mul(tape, x, factor, f"{name} activation")


def xielu(tape: Tape, x: Tensor, setting: BlockConfig, name: str) -> Tensor:
    """``where(x > 0, p * x * x + b * x, (expm1(min(x, e)) - x) * n + b * x)`` (Transformers ``XIELUActivation``).

    p is the softplus of a parameter, n the sum of b and another's. They have one dimension, which widens a 16-bit x.
    """
    rising = learned_slope(tape, setting, f"{name} positive slope")
    falling = ops.shifted(tape, learned_slope(tape, setting, f"{name} negative slope"), f"{name} negative slope and b")
    positive = tape.new(f"{name} signs", x.size.wide(1))
    square = ops.mul(tape, ops.mul(tape, rising, x, f"{name} slope"), x, f"{name} square")
    above = ops.add(tape, square, ops.plain(tape, x, f"{name} line"), f"{name} positive side")
    del rising, square
    power = expm1(tape, least(tape, x, f"{name} negative input"), setting, f"{name} power")
    bend = ops.mul(tape, less(tape, power, x, f"{name} power less input"), falling, f"{name} bend")
    del power, falling
    below = ops.add(tape, bend, ops.plain(tape, x, f"{name} line"), f"{name} negative side")
    del bend
    return chosen(tape, positive, above, below, f"{name} activation")


def learned_slope(tape: Tape, setting: BlockConfig, name: str) -> Tensor:
    """``softplus`` of a learned number: keeps the parameter itself."""
    leaf = Leaf(f"{name} weight", keep=True) if setting.trainable else None
    out = tape.new(name, Size(1, WIDE if setting.autocast else setting.norm_weight or setting.weight, "once"))
    return tape.record(out, [leaf], lambda _: [tape.new(f"gradient of {name} weight", Size(1, 1, "once"), "gradient")])


def least(tape: Tape, x: Tensor, name: str) -> Tensor:
    """``min(x, constant)``: keeps x; its backward halves the gradient where both are equal, and masks the rest."""
    size = x.size

    def rule(_: Grads) -> Grads:
        equal, half = tape.new(f"equal places of {name}", size.wide(1)), tape.new(f"half gradient of {name}", size)
        grad = tape.new(f"gradient before {name}", size)
        del equal, half
        above = tape.new(f"larger places of {name}", size.wide(1))
        del above
        return [grad]

    return tape.record(tape.new(name, size), [x], rule, [x.storage])


def expm1(tape: Tape, x: Tensor, setting: BlockConfig, name: str) -> Tensor:
    """``exp(x) - 1``, which autocast computes in fp32: keeps its result; its backward adds one to it."""
    x = ops.cast(tape, x, WIDE, f"{name} input, fp32") if setting.autocast else x
    size, out = x.size, tape.new(name, x.size)

    def rule(_: Grads) -> Grads:
        factor = tape.new(f"{name} and one", size)
        grad = tape.new(f"gradient before {name}", size)
        del factor
        return [grad]

    return tape.record(out, [x], rule, [out.storage])


def less(tape: Tape, a: Tensor, b: Tensor, name: str) -> Tensor:
    """A difference: passes the gradient on to ``a``, and makes its negative for ``b``."""
    narrow, wide = b.size, b.size.wide(max(a.size.width, b.size.width))

    def rule(grads: Grads) -> Grads:
        negative = tape.new(f"gradient before {name}, negated", wide)
        grad = negative if wide == narrow else tape.new(f"gradient before {name}, cast", narrow)
        return [grads[0], grad]

    return tape.record(tape.new(name, wide), [a, b], rule)


def chosen(tape: Tape, condition: Tensor, a: Tensor, b: Tensor, name: str) -> Tensor:
    """``where``: keeps the condition; its backward makes a gradient of each side, zeros in the other's places."""
    size = a.size

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient of a side of {name}", size) for _ in range(2)]

    return tape.record(tape.new(name, size), [a, b], rule, [condition.storage])


STEPS = {
    "relu2": relu2, "gelu_new": gelu_new, "gelu_python": gelu_new, "gelu_bloom": gelu_bloom, "quick_gelu": quick_gelu,
    "xielu": xielu,
}  # fmt: skip
