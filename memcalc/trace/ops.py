"""Operators of PyTorch: what each allocates, what it saves, and what its backward allocates.

Rules: PyTorch 2.13 ``tools/autograd/derivatives.yaml`` and ``torch/csrc/autograd/FunctionsManual.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.trace.tape import Grads, Shard, Size, Tape, Tensor


def cast(tape: Tape, x: Tensor, width: int, name: str) -> Tensor:
    """``x.to(dtype)``: x itself where the width is the same."""
    if x.size.width == width:
        return x
    back = x.size
    out = tape.new(name, x.size.wide(width))
    return tape.record(out, [x], lambda _: [tape.new(f"gradient of {name}", back)])


def plain(tape: Tape, x: Tensor, name: str) -> Tensor:
    """An operator that saves nothing and whose backward makes a new gradient (negation, a product with a constant)."""
    size = x.size
    return tape.record(tape.new(name, size), [x], lambda _: [tape.new(f"gradient before {name}", size)])


def scaled_by_buffer(tape: Tape, x: Tensor, name: str) -> Tensor:
    """A product with a number of the model's, in place: autograd saves that number, and nothing else."""
    size = x.size
    out = Tensor(x.storage, size)
    return tape.record(out, [x], lambda _: [tape.new(f"gradient before {name}", size)], reads=True)


def scaled(tape: Tape, x: Tensor, width: int, name: str, constants: Sequence[Tensor] = ()) -> Tensor:
    """A product with a constant tensor of ``width`` bytes: the result and its gradient have the wider width of both.

    ``constants`` are tensors that nothing else keeps.
    """
    size, wide = x.size, x.size.wide(max(width, x.size.width))

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient before {name}", wide)
        return [grad if wide == size else tape.new(f"gradient before {name}, cast", size)]

    return tape.record(tape.new(name, wide), [x], rule, [tensor.storage for tensor in constants])


def saves_input(tape: Tape, x: Tensor, name: str, temporaries: int = 0) -> Tensor:
    """An operator whose derivative reads its input (SiLU, GELU, a power); ``temporaries`` in its backward."""
    size = x.size
    return tape.record(
        tape.new(name, size), [x], lambda g: _with_temporaries(tape, g, size, name, temporaries), [x.storage]
    )


def saves_output(tape: Tape, x: Tensor, name: str, width: int | None = None) -> Tensor:
    """An operator whose derivative reads its result (tanh, ReLU, rsqrt)."""
    size = x.size
    out = tape.new(name, size if width is None else size.wide(width))
    return tape.record(out, [x], lambda _: [tape.new(f"gradient before {name}", size)], [out.storage])


def softmax(tape: Tape, x: Tensor, name: str) -> Tensor:
    """``torch.softmax``: keeps its result; on CUDA its backward multiplies the gradient by it into a new tensor.

    Source: PyTorch 2.13 ``aten/src/ATen/native/cuda/SoftMax.cu``, ``softmax_backward_cuda_out``, whose structured
    result is there before.
    """
    size = x.size
    out = tape.new(name, size)

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient before {name}", size)
        product = tape.new(f"gradient · {name}", size, "workspace")
        del product
        return [grad]

    return tape.record(out, [x], rule, [out.storage])


def fused_softmax(tape: Tape, x: Tensor, rows: Size, name: str) -> Tensor:
    """A compiled softmax: two reductions, the largest score of each row and the sum, and a quotient made of them."""
    size = x.size
    reduced = tape.operator("reduction", lambda: tape.new(f"{name} statistics", rows))
    reduced = tape.record(reduced, [x], lambda _: [None])
    out = tape.new(name, size)
    return tape.record(out, [x, reduced], lambda _: [tape.new(f"gradient before {name}", size), None], [out.storage])


def _with_temporaries(tape: Tape, grads: Grads, size: Size, name: str, count: int) -> Grads:
    temporaries = [tape.new(f"temporary of {name}'s backward", size) for _ in range(count)]
    grad = tape.new(f"gradient before {name}", size)
    del temporaries, grads
    return [grad]


def add(tape: Tape, a: Tensor, b: Tensor, name: str, *, in_place: bool = False) -> Tensor:
    """A sum, new or over ``a``: saves nothing; the gradient is passed on as it is, cast where an input is narrower."""
    width = max(a.size.width, b.size.width)
    sizes = (a.size, b.size)

    def rule(grads: Grads) -> Grads:
        return [_pass_on(tape, grads[0], size, name) for size in sizes]

    out = Tensor(a.storage, a.size) if in_place else tape.new(name, a.size.wide(width))
    return tape.record(out, [a, b], rule)


def _pass_on(tape: Tape, grad: Tensor | None, size: Size, name: str) -> Tensor | None:
    if grad is None or grad.size.width == size.width:
        return None if grad is None else Tensor(grad.storage, grad.size)
    return tape.new(f"gradient of a part of {name}", size)


def shifted(tape: Tape, x: Tensor, name: str, *, in_place: bool = False) -> Tensor:
    """A sum with what needs no gradient (a mask, a constant): saves nothing, and the gradient is passed on as it is."""
    out = Tensor(x.storage, x.size) if in_place else tape.new(name, x.size)
    return tape.record(out, [x], lambda grads: [grads[0]])


def softcap(tape: Tape, given: list[Tensor], name: str) -> Tensor:
    """``x / cap``, its ``tanh``, and that times the cap: one variable, so that each lets go of what it was made of.

    ``given`` has x alone, and is emptied. Source: Transformers 5.24 ``models/gemma2/modeling_gemma2.py``.
    """
    x = plain(tape, given.pop(), f"{name}, divided")
    x = saves_output(tape, x, f"{name}' tanh")
    return plain(tape, x, f"{name}, capped")


def mul(tape: Tape, a: Tensor, b: Tensor, name: str) -> Tensor:
    """A product: each factor is kept where the other needs a gradient."""
    width = max(a.size.width, b.size.width)
    big = a.size if a.size.elements >= b.size.elements else b.size
    parts = [(a.size, a.requires_grad), (b.size, b.requires_grad)]

    def rule(grads: Grads) -> Grads:
        grad = grads[0]
        wanted = reversed([needed for _, needed in parts])
        full = [tape.new(f"gradient of a factor of {name}", grad.size) if grad and w else None for w in wanted]
        tape.release()
        return [_reduced(tape, full.pop(), size, name) for size, _ in parts]

    saved = [b.storage if a.requires_grad else None, a.storage if b.requires_grad else None]
    return tape.record(tape.new(name, big.wide(width)), [a, b], rule, saved)


def recomputed_product(tape: Tape, a: Tensor, b: Tensor, name: str) -> Tensor:
    """A product with an activation of ``a`` in one generated kernel: both inputs are kept, the activation is not.

    Where a checkpoint computes it again, the kernel that makes the gradients of both writes the product too: it is
    there beside them and what they are made of. Source: what PyTorch 2.13 ``torch/_inductor/codegen/wrapper.py`` writes
    for a gated MLP under ``torch.utils.checkpoint`` (``tag_activation_checkpoint``), the product's matmul after it.
    """
    sizes, out = (a.size, b.size), tape.new(name, b.size)

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient of a factor of {name}", size) for size in sizes]

    return tape.record(out, [a, b], rule, [a.storage, b.storage, *[out.storage] * tape.again])


def gated_in_place(tape: Tape, gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Activation and product in one function, which keeps gate and up; backward writes the gradients over them.

    Of views of one projection it makes contiguous copies. Source: Liger-Kernel 0.8.5 ``ops/swiglu.py``
    (``LigerSiLUMulFunction``), ``ops/geglu.py`` (``LigerGELUMulFunction``), ``ops/utils.py`` (``ensure_contiguous``).
    """
    views = gate.storage is up.storage
    factors = [tape.new(f"{name}'s factor, contiguous", x.size) if views else x for x in (gate, up)]
    sizes, saved = (gate.size, up.size), [x.storage for x in factors]

    def rule(_: Grads) -> Grads:
        return [Tensor(storage, size) for storage, size in zip(saved, sizes, strict=True)]

    return tape.record(tape.new(name, up.size), [gate, up], rule, saved)


def _reduced(tape: Tape, grad: Tensor | None, size: Size, name: str) -> Tensor | None:
    """A factor's gradient as the engine hands it on: summed where the factor was broadcast, in the factor's width."""
    if grad is None or (size.elements, size.unit, size.width) == (grad.size.elements, grad.size.unit, grad.size.width):
        return grad
    return tape.new(f"gradient of a factor of {name}, reduced", size)


def mean(tape: Tape, x: Tensor, name: str, groups: int = 1) -> Tensor:
    """A mean over the last dimension, or over ``groups`` parts of it; its backward makes a full tensor."""
    size = x.size
    out = tape.new(name, size._replace(elements=groups, label=str(groups)))
    return tape.record(out, [x], lambda _: [tape.new(f"gradient before {name}", size)])


def cat(tape: Tape, parts: list[Tensor], name: str, label: str = "") -> Tensor:
    """A concatenation: a new tensor; gradients are views of one."""
    elements = sum(part.size.elements for part in parts)
    size = parts[0].size._replace(elements=elements, label=label)
    sizes = [part.size for part in parts]

    def rule(grads: Grads) -> Grads:
        grad = grads[0]
        return [None if grad is None else Tensor(grad.storage, s) for s in sizes]

    return tape.record(tape.new(name, size), parts, rule)


def split(tape: Tape, x: Tensor, elements: list[int], labels: list[str], name: str) -> list[Tensor]:
    """Views of one storage; the backward concatenates the gradients (``split``, ``chunk``, ``unbind``)."""
    size = x.size
    outs = [Tensor(x.storage, size._replace(elements=n, label=lab)) for n, lab in zip(elements, labels, strict=True)]
    return tape.record_many(outs, [x], lambda _: [tape.new(f"gradient of {name}", size)])


def slice_of(tape: Tape, x: Tensor, elements: int, label: str, name: str) -> Tensor:
    """A slice: a view; its backward makes a full tensor of zeros with the slice filled in."""
    size = x.size
    out = Tensor(x.storage, size._replace(elements=elements, label=label))
    return tape.record(out, [x], lambda _: [tape.new(f"gradient of {name}", size)])


def dropout(tape: Tape, x: Tensor, name: str, *, active: bool, bits: int = 8) -> Tensor:
    """``native_dropout``: keeps a mask of one byte an element, TransformerEngine's (``tex.dropout_fwd``) of one bit."""
    if not active:
        return x
    size = x.size
    mask = tape.new(f"{name} mask", size._replace(elements=-(-size.elements * bits // 8), width=1))
    out = tape.new(name, size)
    tape.record(out, [x], lambda _: [tape.new(f"gradient before {name}", size)], [mask.storage])
    tape.needed = len(tape.events)  # the mask is a result of the operator
    return out


def copy(tape: Tape, x: Tensor, name: str, size: Size | None = None, shard: Shard | None = None) -> Tensor:
    """A contiguous copy, or an expansion to ``size``: saves nothing. A ``shard`` may say where there is one at all."""
    back, size = x.size, size or x.size
    made = tape.new(name, size if shard is None else size._replace(shard=shard))
    if shard == "tp if batched":
        made.storage.base = tape.new(f"{name} as a view", x.storage.size._replace(shard="tp if single")).storage
    return tape.record(
        Tensor(made.storage, size), [x], lambda g: [_shrink(tape, g[0], back, f"gradient before {name}")]
    )


def expanded(tape: Tape, x: Tensor, size: Size, name: str) -> Tensor:
    """A view that repeats; its backward sums."""
    back = x.size
    return tape.record(
        Tensor(x.storage, size), [x], lambda _: [tape.new(f"gradient before the expansion of {name}", back)]
    )


def _shrink(tape: Tape, grad: Tensor | None, size: Size, name: str) -> Tensor | None:
    """The gradient of an expansion is a sum; that of a copy is a view."""
    if grad is None or grad.size.elements == size.elements:
        return None if grad is None else Tensor(grad.storage, size)
    return tape.new(name, size)


def matmul(tape: Tape, a: Tensor, b: Tensor, out: Size, name: str) -> Tensor:
    """A batched product of two activations; both are kept."""
    sizes = (a.size, b.size)

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient of an input of {name}", size) for size in sizes]

    saved = [b.storage if a.requires_grad else None, a.storage if b.requires_grad else None]
    return tape.record(tape.operator("bmm", lambda: tape.new(name, out)), [a, b], rule, saved)
