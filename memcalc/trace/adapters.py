"""Low-rank adapters beside a linear layer, as PEFT and the fused kernels run them.

One adapter on the queries, keys and values of a packed projection, or on some of them (litgpt ``LoRAQKVLinear``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memcalc.trace import ops
from memcalc.trace.projection import Product, project
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

TARGETS = {
    "query projection": "q",
    "key projection": "k",
    "value projection": "v",
    "query-key-value projection": "qkv",
    "attention projection": "o",
    "query down projection": "q_a",
    "query up projection": "q_b",
    "key-value down projection": "kv_a",
    "key-value up projection": "kv_b",
    "mixer's input projection": "mixer_in",
    "mixer's gate projection": "mixer_in",
    "mixer's rate projection": "mixer_in",
    "mixer's step projection": "mixer_in",
    "mixer's decay down projection": "mixer_in",
    "mixer's decay up projection": "mixer_in",
    "mixer's gate down projection": "mixer_in",
    "mixer's gate up projection": "mixer_in",
    "mixer's output projection": "mixer_out",
    "MLP gate": "gate",
    "MLP up": "up",
    "MLP gate and up": "gate_up",
    "MLP down projection": "down",
    "shared experts' up": "up",
    "shared experts' gate and up": "gate_up",
    "shared experts' down projection": "down",
    "shared experts' gate": "gate",
    "gate of shared experts": "shared_gate",
    "expert gate": "gate",
    "expert up": "up",
    "expert down projection": "down",
    "router": "router",
    "logits": "head",
}
"""The interface's word for a linear layer, by the layer's name in the trace."""
PACKED_TARGETS = {
    "MLP up projection": ("gate_up", "up"),
    "MLP down projection": ("down",),
    "shared experts' up projection": ("gate_up", "up"),
    "shared experts' down projection": ("down",),
    "experts' up projection": ("gate_up", "up"),
    "experts' down projection": ("down",),
}
"""The same of Megatron-LM's layers: gate and up are one, and an expert's layers have the names of a dense MLP's."""


def target_of(name: str) -> str:
    """The interface's word for a linear layer; empty where it has none."""
    return TARGETS.get(name.removeprefix("cross-"), "")


@dataclass(frozen=True)
class Lora:
    """How adapters are run."""

    rank: int
    targets: frozenset[str]
    width: int = 4
    """Bytes of an adapter's parameter."""
    dropout: bool = False
    folds: bool = False
    """Adapters on a router, and on stacked experts, are folded into their weights (PEFT's ``ParamWrapper``)."""
    kernels: str = "model"
    """model: op by op (PEFT); fused: one autograd function a projection (unsloth, fms-acceleration)."""
    classes: str = ""
    """Whose classes stand beside Megatron-LM's layers: bridge, bridge-each or swift."""

    @property
    def gathers(self) -> bool:
        """Adapters of split outputs read the whole sequence, and those of split inputs gather theirs."""
        return self.classes.startswith("bridge")

    def stands_on(self, name: str) -> bool:
        """Whether one of Megatron-LM's layers has an adapter, by the layer's name in the trace."""
        return not self.targets.isdisjoint(PACKED_TARGETS.get(name, (target_of(name),)))


def adapted(
    tape: Tape, x: Tensor, lora: Lora, to: Product, base: Callable[[], Tensor], *, quantised: bool, autocast: bool
) -> Tensor:
    """``base(x) + B(A(dropout(x))) * scaling``.

    Over a 16-bit base x takes the adapter's dtype and the sum is cast back; over a quantised one the conversion is left
    to autocast where that is on. Source: PEFT 0.13.2 tuners/lora/layer.py (``Linear.forward``) and bnb.py
    (``Linear4bit.forward``, which clones the base's output).
    """
    if lora.kernels == "fused":
        return _fused(tape, x, lora, to, base)
    result = base()
    width = result.size.width
    if quantised:
        result = ops.copy(tape, result, f"{to.name} output, cloned")
    given = x if quantised and autocast else ops.cast(tape, x, lora.width, f"{to.name} adapter input, cast")
    delta = _low_rank(tape, given, lora, to, to.width if autocast else lora.width)
    if quantised:
        delta = ops.cast(tape, delta, width, f"{to.name} adapter output, cast")
    result = ops.add(tape, result, delta, f"{to.name} output with adapter")
    del delta
    return ops.cast(tape, result, width, f"{to.name} output with adapter, cast")


def _low_rank(tape: Tape, x: Tensor, lora: Lora, to: Product, width: int) -> Tensor:
    """``B(A(dropout(x))) * scaling``."""
    down = Product(f"{to.name} adapter A", width, lora.rank, "r", "none", to.parts)
    up = replace(to, name=f"{to.name} adapter B", width=width)
    dropped = ops.dropout(tape, x, f"{to.name} adapter dropout", active=lora.dropout)
    low = project(tape, dropped, down, trained=True)
    del dropped
    high = project(tape, low, up, trained=True)
    del low
    return ops.plain(tape, high, f"{to.name} adapter output")


def _fused(tape: Tape, x: Tensor, lora: Lora, to: Product, base: Callable[[], Tensor]) -> Tensor:
    """One function: keeps x and, with dropout, the dropped x; no mask, and nothing of the low rank.

    Source: fms-acceleration plugins/fused-ops-and-kernels fused_ops/unsloth_lora/bnb/fast_lora.py (``LoRA_QKV``,
    ``LoRA_W``) and utils.py (``matmul_lora``).
    """
    with tape.no_grad():
        out = base()
        dropped = _dropped(tape, x, to.name) if lora.dropout else x
        delta = tape.new(f"{to.name} adapter output", out.size)
        del delta
    size = x.size
    weights = [Size(lora.rank * n, 1, "once") for n in (size.elements, to.elements)]
    leaves = [Leaf(f"{to.name} adapter {part} weight", keep=True) for part in "AB"]

    def rule(_: Grads) -> Grads:
        parts = [tape.new(f"gradient of {to.name} adapter", weight, "gradient") for weight in weights]
        grad = tape.new(f"gradient of {to.name} input", size)
        gradient = tape.new(f"gradient of {to.name} adapter's input", size)
        del gradient
        return [grad, *parts]

    return tape.record(Tensor(out.storage, out.size), [x, *leaves], rule, [x.storage, dropped.storage])


def _dropped(tape: Tape, x: Tensor, name: str) -> Tensor:
    mask = tape.new(f"{name} adapter dropout mask", x.size.wide(1))
    dropped = tape.new(f"{name} adapter dropout", x.size)
    del mask
    return dropped


PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Packed:
    """A packed projection: what it makes, and the outputs of its queries, keys and values [elements]."""

    to: Product
    outputs: tuple[int, int, int]

    def chosen(self, lora: Lora) -> list[int]:
        """Outputs of the parts that have an adapter."""
        return [size for name, size in zip(PARTS, self.outputs, strict=True) if name in lora.targets]


def adapted_parts(tape: Tape, x: Tensor, lora: Lora, packed: Packed, base: Callable[[], Tensor]) -> Tensor:
    """``base(x) + pad(conv(A(dropout(x)))) * scaling``: one A for all parts, one convolution for the parts' B.

    Where a part has no adapter the others are copied into zeros by an index, which keeps them for their gradient's
    shape. Source: Lightning-AI/litgpt lora.py at 069f6584 and f84b6109 (``LoRAQKVLinear.forward``, ``zero_pad``);
    derivatives.yaml, ``index_copy``.
    """
    result, parts = base(), packed.chosen(lora)
    delta = _packed_low_rank(tape, x, lora, packed, parts)
    if len(parts) < len(PARTS):
        delta = _padded(tape, delta, packed.to)
    delta = ops.plain(tape, delta, f"{packed.to.name} adapter output, scaled")
    return ops.add(tape, result, delta, f"{packed.to.name} output with adapter")


def _packed_low_rank(tape: Tape, x: Tensor, lora: Lora, packed: Packed, parts: list[int]) -> Tensor:
    to, name, rank = packed.to, f"{packed.to.name} adapter", lora.rank
    dropped = ops.dropout(tape, x, f"{name} dropout", active=lora.dropout)
    low = project(tape, dropped, Product(f"{name} A", lora.width, rank * len(parts), "n·r"), trained=True)
    del dropped
    if len(set(packed.outputs)) == 1:  # a grouped convolution
        return project(tape, low, replace(to, name=f"{name} B", elements=sum(parts), label="n·q"), trained=True)
    pieces = ops.split(tape, low, [rank] * len(parts), ["r"] * len(parts), f"{name} A")
    del low
    high = [
        project(tape, piece, replace(to, name=f"{name} B of part {index}", elements=size, label="q"), trained=True)
        for index, (piece, size) in enumerate(zip(pieces, parts, strict=True))
    ]
    pieces.clear()
    return ops.cat(tape, high, f"{name} output", "n·q") if len(high) > 1 else high.pop()


def _padded(tape: Tape, x: Tensor, to: Product) -> Tensor:
    """``index_copy`` into zeros: keeps what it copies."""
    size = x.size

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient of {to.name} adapter output", size)]

    out = tape.new(f"{to.name} adapter output, padded", to.output(x))
    return tape.record(out, [x], rule, [x.storage])
