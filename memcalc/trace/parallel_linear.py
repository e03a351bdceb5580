"""Tensor-parallel linear layers as TransformerEngine and Megatron-LM run them.

Under sequence parallelism a column-parallel layer keeps its sharded input and gathers it for the product, in forward
and again in backward; a row-parallel layer's whole output is reduced and scattered. Both whole tensors are short-lived.

Sources: TransformerEngine c188b533 ``pytorch/module/layernorm_linear.py`` and ``linear.py``; Megatron-LM 23e00ed
``core/tensor_parallel/layers.py``. Where products are 8-bit or 4-bit, operands are quantised
(:mod:`memcalc.trace.layers`).

Megatron-LM's linear layers with a frozen weight, and the adapters beside them.

A frozen layer keeps no input: ``Linear``, ``GroupedLinear`` and ``LinearWithFrozenWeight`` save the weight alone, and
``LayerNormLinear`` its input and the norm's statistics. The norm's output is kept once an adapter has it, as it was
quantised for an 8-bit product: it is cleared only where none is returned. Operands need one direction.

Megatron-Bridge's adapters split the ranks of A over the tensor-parallel group where the layer splits its outputs, read
the whole sequence, and gather what B makes beside a layer that splits its inputs. ms-swift's read a rank's part of the
sequence, and have the matrix that is no side of the split whole on each rank.

Sources: NVIDIA/TransformerEngine d0067d0d ``pytorch/module/{linear,layernorm_linear,grouped_linear}.py``;
NVIDIA/Megatron-LM d98e8a64 ``core/tensor_parallel/{layers,mappings}.py``; NVIDIA-NeMo/Megatron-Bridge 067f987d
``peft/utils.py`` (``ParallelLinearAdapter``, ``GroupedExpertLinearAdapter``) and ``peft/lora_layers.py``;
modelscope/mcore-bridge f020e479 ``tuners/lora.py`` (``LoraParallelLinear``), until 4.0 a part of ms-swift.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.layers import frozen_operands, gathered_input, input_again, kept_input, operands, product, weight_of
from memcalc.trace.tape import Grads, Leaf, Shard, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import Norm
    from memcalc.trace.adapters import Lora
    from memcalc.trace.layers import BlockConfig, Narrow


def normalised_linear(
    tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, elements: int, label: str, shard: Shard = "tp"
) -> Tensor:
    """``LayerNormLinear``, one autograd node: keeps its input, the normalised tensor and the norm's statistics."""
    if not setting.trainable:
        return frozen_normalised(tape, x, spec, setting, name, elements, label, shard)
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
        return frozen_column(tape, x, setting, name, elements, label, shard)
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
    return column_parallel(tape, x, setting._replace(narrow=None), "logits", vocab, "V", gathers=False)


def row_parallel(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, hidden: int, *, original: bool = False
) -> Tensor:
    """A row-parallel linear layer: keeps its input; the output's gradient is gathered in backward."""
    if not setting.trainable:
        return frozen_row(tape, x, setting, name, hidden)
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


def frozen_normalised(
    tape: Tape, x: Tensor, spec: Norm, setting: BlockConfig, name: str, elements: int, label: str, shard: Shard
) -> Tensor:
    """``LayerNormLinear``: keeps its input and the statistics, and for an adapter the normalised tensor too."""
    size, lora, numbers = x.size, _adapter(setting, name), 2 if spec.kind == "layernorm" else 1
    stats = tape.new(f"{name} norm statistics", size._replace(elements=numbers, width=4, label=str(numbers)))
    made = tape.new(f"{name} input", size)
    narrow = setting.narrow_once
    # Where an adapter reads the whole norm's output, that is what is gathered (return_layernorm_output_gathered)
    wide = None if lora is not None and lora.gathers else narrow
    inputs = gathered_input(tape, size, name, wide) if shard == "tp" else []
    read, other = kept_input(tape, made, name, narrow)
    out_size = size._replace(elements=elements, label=label, shard=shard)
    out = tape.operator("mm", lambda: tape.new(f"{name} output", out_size))
    other.clear()

    def rule(_: Grads) -> Grads:
        fused = setting.fuses_mlp and name.startswith("MLP")  # the activation's backward has quantised it
        weight = weight_of(elements, size, shard)
        read = [] if fused else frozen_operands(tape, setting, name, out_size, weight)
        inner = _input_gradient(tape, size, name, shard, read)
        if lora is not None and lora.kernels != "fused":
            inner = tape.new(f"gradient of {name} input, with the adapter's", size)
        before = tape.new(f"gradient before {name}'s norm", size)
        del inner
        return [before]

    if lora is None:
        del inputs, read
        return tape.record(out, [x], rule, [x.storage, stats.storage])
    given = _whole(made, inputs) if lora.gathers and inputs else Tensor(made.storage, size)
    saved = [x.storage, stats.storage] if lora.kernels == "fused" else [x.storage, stats.storage, read.storage]
    tape.record_many([out, given], [x], rule, saved)
    del made, inputs, read, saved
    return _beside_column(tape, [out], given, lora, name)


def frozen_column(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, elements: int, label: str, shard: Shard = "tp"
) -> Tensor:
    """A column-parallel layer, or one that every rank has whole: keeps nothing of its own."""
    size, lora, narrow = x.size, _adapter(setting, name), setting.narrow_once
    read, other = kept_input(tape, x, name, narrow)
    out = product(tape, size, name, elements, label, shard, narrow)
    other.clear()
    del read
    made = out.size

    def rule(_: Grads) -> Grads:
        read = frozen_operands(tape, setting, name, made, weight_of(elements, size, shard))
        return [_input_gradient(tape, size, name, shard, read)]

    tape.record(out, [x], rule, reads=True)
    if lora is None:
        return out
    return _beside_column(tape, [out], x, lora, name, gathers=lora.gathers and shard == "tp")


def frozen_row(tape: Tape, x: Tensor, setting: BlockConfig, name: str, hidden: int) -> Tensor:
    """A row-parallel layer: keeps nothing; its output's gradient is gathered in backward."""
    size, lora, narrow = x.size, _adapter(setting, name), setting.narrow_once
    fused = setting.fuses_mlp and name.startswith("MLP")  # the activation has quantised it
    read, other = kept_input(tape, x, name, None if fused else narrow)
    result = Size(hidden, size.width, size.unit, "sp", "h")
    partial_sum = tape.new(f"{name} output before its reduction", result._replace(shard="full if sp"))
    out = tape.operator("mm", lambda: tape.new(f"{name} output", result))
    del partial_sum, read
    other.clear()

    def rule(_: Grads) -> Grads:
        gathered = frozen_operands(tape, setting, name, result._replace(shard="none"), weight_of(hidden, size, "tp"))
        if narrow is None:
            gathered = [tape.new(f"gradient of {name} output, gathered", result._replace(shard="full if sp"))]
        inner = tape.new(f"gradient of {name} input", size)
        gathered.clear()
        return [inner]

    tape.record(out, [x], rule, reads=True)
    return out if lora is None else _beside_row(tape, [out], x, lora, name)


def frozen_grouped(tape: Tape, x: Tensor, setting: BlockConfig, name: str, size: Size) -> Tensor:
    """``GroupedLinear``: keeps nothing of its own; an adapter has the rows of all experts beside each other."""
    given, lora, narrow = x.size, _adapter(setting, name), setting.narrow_once
    full = size._replace(shard="rows" if size.shard == "rows if sorted" else size.shard)
    read, other = kept_input(tape, x, name, narrow)
    del read
    other.clear()

    def rule(_: Grads) -> Grads:
        copied = [tape.new(f"gradient of {name} output, contiguous", full), *operands(tape, full, name, narrow)]
        inner = tape.new(f"gradient of {name} input", given)
        copied.clear()
        return [inner]

    out = tape.record(tape.new(f"{name} output", size if lora is None else full), [x], rule, reads=True)
    if lora is None:
        return out
    x = ops.dropout(tape, x, f"{name} adapter dropout", active=lora.dropout, bits=1 if lora.kernels == "fused" else 8)
    low_size = Size(lora.rank, given.width, "routed", "rows", "r")
    low = _product(tape, x, f"{name} adapter A", tape.new(f"{name} adapter A output", low_size))
    del x
    high = [_product(tape, low, f"{name} adapter B", tape.new(f"{name} adapter B output", full))]
    del low
    outs = [out]
    del out
    return _added(tape, outs, high, name, size)


def _adapter(setting: BlockConfig, name: str) -> Lora | None:
    """The adapters of a layer, by its name; None where it has none."""
    return setting.lora if setting.lora is not None and setting.lora.stands_on(name) else None


def _beside_column(
    tape: Tape, out: list[Tensor], given: Tensor, lora: Lora, name: str, *, gathers: bool = False
) -> Tensor:
    """The sum with the adapter of a layer that splits its outputs; ``gathers``: it gathers the sequence itself."""
    bits = 1 if lora.kernels == "fused" else 8
    x = ops.dropout(tape, given, f"{name} adapter dropout", active=lora.dropout, bits=bits)
    x = _gathered(tape, x, name, dropped=lora.dropout) if gathers else x
    low = _low(tape, x, lora, name)
    del x
    size = out[0].size
    if lora.kernels == "fused":
        return _accumulated(tape, out.pop(), low, name)
    inputs = [] if lora.gathers else gathered_input(tape, low.size, f"{name} adapter B", None)
    made = tape.new(f"{name} adapter B output", size)
    del inputs
    again = None if lora.gathers else low.size._replace(shard="full if sp")
    high = [_product(tape, low, f"{name} adapter B", made, [] if again is None else [again, again])]
    del low, made
    return _added(tape, out, high, name, size)


def _beside_row(tape: Tape, out: list[Tensor], given: Tensor, lora: Lora, name: str) -> Tensor:
    """The sum with the adapter of a layer that splits its inputs."""
    bits = 1 if lora.kernels == "fused" else 8
    x = ops.dropout(tape, given, f"{name} adapter dropout", active=lora.dropout, bits=bits)
    size = out[0].size
    low_size = size._replace(elements=lora.rank, label="r", shard="none" if lora.gathers else "sp")
    partial_sum = tape.new(f"{name} adapter A output before its reduction", low_size._replace(shard="full if sp"))
    low = _product(tape, x, f"{name} adapter A", tape.new(f"{name} adapter A output", low_size))
    del x, partial_sum
    if lora.kernels == "fused":
        return _accumulated(tape, out.pop(), low, name)
    high = [_split_outputs(tape, low, size, name) if lora.gathers else _local(tape, low, size, name)]
    del low
    return _added(tape, out, high, name, size)


def _low(tape: Tape, x: Tensor, lora: Lora, name: str) -> Tensor:
    """What A makes beside split outputs: under Megatron-Bridge a part of the ranks, which are then gathered."""
    size = x.size._replace(elements=lora.rank, label="r")
    parts = [size._replace(shard=shard) for shard in _PARTS] if lora.gathers else []
    made = [tape.new(f"{name} adapter A output, of a rank", part) for part in parts]
    low = _product(tape, x, f"{name} adapter A", tape.new(f"{name} adapter A output", size), parts[:1])
    made.clear()
    return low


_PARTS: tuple[Shard, Shard] = ("part if tp", "full if tp")
"""A rank's own columns, and those of all ranks, rank by rank, until a copy has them token by token."""


def _split_outputs(tape: Tape, low: Tensor, size: Size, name: str) -> Tensor:
    """Megatron-Bridge's B beside a row-parallel layer: its outputs are split and gathered, and a view is cut of them.

    The view is a rank's part of the sequence, which is contiguous as it is.
    """
    parts = [tape.new(f"{name} adapter B output, of a rank", size._replace(shard=shard)) for shard in _PARTS]
    gathered = tape.new(f"{name} adapter B output", size._replace(shard="none"))
    parts.clear()
    before = [size._replace(shard="full if sp"), size._replace(shard="part if tp")]
    return _product(tape, low, f"{name} adapter B", Tensor(gathered.storage, size), before)


def _local(tape: Tape, low: Tensor, size: Size, name: str) -> Tensor:
    """ms-swift's B beside a row-parallel layer, which each rank has whole."""
    return _product(tape, low, f"{name} adapter B", tape.new(f"{name} adapter B output", size))


def _product(tape: Tape, x: Tensor, name: str, out: Tensor, before: list[Size] | None = None) -> Tensor:
    """One trained product: keeps x; backward has tensors of the sizes ``before`` beside it."""
    size, made, wanted = x.size, out.size, x.requires_grad
    weight, leaf = Size(made.elements * size.elements, 1, "once"), Leaf(f"{name} weight", keep=True)

    def rule(_: Grads) -> Grads:
        passing = [tape.new(f"passing in {name}'s backward", each) for each in before or ()]
        inner = tape.new(f"gradient of {name} input", size) if wanted else None
        grad = tape.new(f"gradient of {name} weight", weight, "gradient")
        passing.clear()
        return [inner, grad]

    return tape.record(out, [x, leaf], rule, [x.storage])


def _accumulated(tape: Tape, out: Tensor, low: Tensor, name: str) -> Tensor:
    """What B makes, scaled and added to the layer's output by the product itself.

    Source: TransformerEngine d0067d0d ``pytorch/ops/fused/{forward_linear_scale_add,backward_linear_scale}.py``, under
    Megatron-Bridge 067f987d ``peft/lora_layers.py`` (``TEFusedLoRALinear``).
    """
    size, weight = low.size, Size(out.size.elements * low.size.elements, 1, "once")
    leaf, made = Leaf(f"{name} adapter B weight", keep=True), out.size

    def rule(grads: Grads) -> Grads:
        inner = tape.new(f"gradient of {name} adapter B input", size)
        grad = tape.new(f"gradient of {name} adapter B weight", weight, "gradient")
        return [None if grads[0] is None else Tensor(grads[0].storage, made), inner, grad]

    return tape.record(Tensor(out.storage, made), [out, low, leaf], rule, [low.storage])


def _added(tape: Tape, out: list[Tensor], high: list[Tensor], name: str, size: Size) -> Tensor:
    """The layer's output and the adapter's, which is scaled first, in a new tensor."""
    base, scaled = out.pop(), ops.plain(tape, high.pop(), f"{name} adapter output, scaled")
    sizes = base.size, scaled.size

    def rule(grads: Grads) -> Grads:
        return [None if grads[0] is None else Tensor(grads[0].storage, each) for each in sizes]

    return tape.record(tape.new(f"{name} output with adapter", size), [base, scaled], rule)


def _input_gradient(tape: Tape, size: Size, name: str, shard: Shard, read: list[Tensor]) -> Tensor:
    """The input's gradient, whole until it is reduced and scattered where outputs are split; ``read`` makes it."""
    unreduced = [tape.new(f"gradient of {name} input, whole", size._replace(shard="full if sp"))] * (shard == "tp")
    inner = tape.new(f"gradient of {name} input", size)
    unreduced.clear()
    read.clear()
    return inner


def _whole(made: Tensor, gathered: list[Tensor]) -> Tensor:
    """The normalised tensor as it was gathered for the product; itself where the sequence is not split."""
    storage = gathered.pop().storage
    storage.base = made.storage
    return Tensor(storage, made.size._replace(shard="none"))


def _gathered(tape: Tape, x: Tensor, name: str, *, dropped: bool) -> Tensor:
    """The whole sequence of an adapter's input; x itself, which others keep too, where the sequence is not split."""
    back = x.size
    made = tape.new(f"{name} adapter input, gathered", back._replace(shard="none" if dropped else "full if sp"))
    if not dropped:
        made.storage.base = x.storage
    out = Tensor(made.storage, back._replace(shard="none"))
    return tape.record(out, [x], lambda _: [tape.new(f"gradient before {name}'s gather", back)])
