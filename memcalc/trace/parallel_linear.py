"""Tensor-parallel linear layers as TransformerEngine and Megatron-LM run them.

Under sequence parallelism a column-parallel layer keeps its sharded input and gathers it for the product, in forward
and again in backward; a row-parallel layer's whole output is reduced and scattered. Both whole tensors are short-lived.

Sources: TransformerEngine c188b533 ``pytorch/module/layernorm_linear.py`` and ``linear.py``; Megatron-LM 23e00ed
``core/tensor_parallel/layers.py``. Where products are 8-bit or 4-bit, operands are quantised
(:mod:`memcalc.trace.layers`).

Sequence parallelism as DTensor runs it: gathers before a branch, reduce-scatters after it.

Source: ``torch/distributed/tensor/parallel/style.py`` (PrepareModuleInput, RowwiseParallel) of PyTorch 2.13, with the
plan of torchtitan ``parallelize_llama.py`` (9dec370): each branch of a block gathers its input once, and its matmuls
keep that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.trace import frozen_linear
from memcalc.trace.layers import BlockConfig, gathered_input, input_again, kept_input, operands, product, weight_of
from memcalc.trace.tape import Grads, Leaf, Shard, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import Norm
    from memcalc.trace.layers import Narrow


def normalised_linear(
    tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, elements: int, label: str, shard: Shard = "tp"
) -> Tensor:
    """``LayerNormLinear``, one autograd node: keeps its input, the normalised tensor and the norm's statistics."""
    if not setting.trainable:
        return frozen_linear.normalised(tape, x, spec, setting, name, elements, label, shard)
    size = x.size
    numbers = 2 if spec.kind == "layernorm" else 1
    stats = tape.new(f"{name} norm statistics", size._replace(elements=numbers, width=4, label=str(numbers)))
    narrow = setting.narrow
    normalised, other = kept_input(tape, tape.new(f"{name} input", size), name, narrow)
    out = product(tape, size, name, elements, label, shard, narrow)
    other.clear()
    weight, made = weight_of(elements, size, shard), out.size

    def rule(_: Grads) -> Grads:
        inner, grad = backward_of_column(tape, size, weight, name, made, narrow)
        before = tape.new(f"gradient before {name}'s norm", size)
        del inner
        return [before, grad]

    leaf = Leaf(f"{name} weight", keep=True)
    return tape.record(out, [x, leaf], rule, [x.storage, normalised.storage, stats.storage])


def column_parallel(
    tape: Tape,
    x: Tensor,
    setting: BlockConfig,
    name: str,
    elements: int,
    label: str,
    shard: Shard = "tp",
    *,
    gathers: bool = True,
    original: bool = False,
) -> Tensor:
    """A column-parallel linear layer: keeps its (sharded) input, as it is with ``original``."""
    if not setting.trainable:
        return frozen_linear.column(tape, x, setting, name, elements, label, shard)
    size, narrow = x.size, setting.narrow
    saved, other = kept_input(tape, x, name, narrow, original=original)
    out = product(tape, size, name, elements, label, shard, narrow, gathers=gathers)
    other.clear()
    weight, made = weight_of(elements, size, shard), out.size

    def rule(_: Grads) -> Grads:
        again = input_again(tape, size, name, narrow, original=original)
        grads: Grads = list(backward_of_column(tape, size, weight, name, made, narrow, gathers=gathers))
        again.clear()
        return grads

    leaf = Leaf(f"{name} weight", keep=True)
    return tape.record(out, [x, leaf], rule, [saved.storage])


def output_layer(tape: Tape, x: Tensor, setting: BlockConfig, vocab: int) -> Tensor:
    """The logits; the gathered input lies in a buffer that lives all the time (``GlobalMemoryBuffer``)."""
    return column_parallel(tape, x, replace(setting, narrow=None), "logits", vocab, "V", gathers=False)


def row_parallel(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, hidden: int, *, original: bool = False
) -> Tensor:
    """A row-parallel linear layer: keeps its input; the output's gradient is gathered in backward."""
    if not setting.trainable:
        return frozen_linear.row(tape, x, setting, name, hidden)
    size, narrow = x.size, setting.narrow
    saved, other = kept_input(tape, x, name, narrow, original=original)
    partial_sum = tape.new(
        f"{name} output before its reduction", Size(hidden, size.width, size.unit, "full if sp", "h")
    )
    result = Size(hidden, size.width, size.unit, "sp", "h")
    out, weight = tape.operator("mm", lambda: tape.new(f"{name} output", result)), weight_of(hidden, size, "tp")
    del partial_sum
    other.clear()

    def rule(_: Grads) -> Grads:
        gathered = operands(tape, result._replace(shard="none"), name, narrow)
        if not gathered:
            gathered = [tape.new(f"gradient of {name} output, gathered", result._replace(shard="full if sp"))]
        gathered += input_again(tape, size, name, narrow, original=original)
        inner = tape.new(f"gradient of {name} input", size)
        grad = tape.new(f"gradient of {name} weight", weight, "gradient")
        gathered.clear()
        return [inner, grad]

    leaf = Leaf(f"{name} weight", keep=True)
    return tape.record(out, [x, leaf], rule, [saved.storage])


def backward_of_column(
    tape: Tape, size: Size, weight: Size, name: str, made: Size, narrow: Narrow | None = None, *, gathers: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight: the whole input gradient is reduced and scattered while the weight's is made.

    ``made`` is the extent of the output.
    """
    shared = weight.shard == "tp"
    passing = operands(tape, made, name, narrow)
    if gathers and shared:
        passing += gathered_input(tape, size, name, narrow, again=True)
    if shared:
        passing.append(tape.new(f"gradient of {name} input, whole", size._replace(shard="full if sp")))
    inner = tape.new(f"gradient of {name} input", size)
    grad = tape.new(f"gradient of {name} weight", weight, "gradient")
    passing.clear()
    return inner, grad


def gathered(tape: Tape, x: Tensor, setting: BlockConfig) -> Tensor:
    """The whole sequence on each rank; x itself without sequence parallelism."""
    if not setting.gathered_input_saved:
        return x
    back = x.size
    out = tape.new("gathered sequence", back._replace(shard="none"))
    return tape.record(out, [x], lambda _: [tape.new("gradient before the gather", back)])


def scattered(tape: Tape, x: Tensor, size: Size, setting: BlockConfig, *, last: bool = False) -> Tensor:
    """The sum over ranks of partial outputs, each rank its part of the sequence, of ``size``.

    ``last``: it ends the block.
    """
    if not setting.gathered_input_saved:
        return x
    back = x.size
    with tape.unread(active=last and setting.compiled):
        out = tape.operator("reduce-scatter", lambda: tape.new("reduced branch output", size))
    return tape.record(out, [x], lambda _: [tape.new("gradient of the branch output, gathered", back)])
