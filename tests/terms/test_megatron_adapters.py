"""Adapters beside Megatron-LM's layers: tensors and counts against modules in the shape of the sources, on one rank.

Sources: NVIDIA-NeMo/Megatron-Bridge 067f987d ``peft/utils.py``; modelscope/mcore-bridge f020e479 ``tuners/lora.py``;
TransformerEngine d0067d0d ``pytorch/module``; Megatron-LM d98e8a64 ``core/tensor_parallel``. A collective is what it
makes of a rank's tensor: a larger one, or a part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from memcalc.grid import Grid, Layout
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.options import SharedSettings
from memcalc.terms.activations import GroupActivations, groups_of
from memcalc.terms.adapters import trained
from memcalc.terms.model_on_grid import ModelOnGrid

torch = pytest.importorskip("torch")

S, RANK = 32, 8
FLAT = {
    "n_layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 256, "gated": True,
    "norm": "rmsnorm", "positions": "rope", "max_positions": 64,
}  # fmt: skip
MOE = {**FLAT, "moe": {"experts": 8, "topk": 2, "ffn": 48, "shared": 1}}
ALL = ("qkv", "o", "gate_up", "down")


def census(model: Model, layout: Layout, lora: str, classes: str, recompute: str = "none", **fixed: Any) -> ModelOnGrid:
    """Return the census of one strategy."""
    shared = SharedSettings(
        framework="megatron", kernels="te", seq_len=S, global_batch=64 * layout.dp, attention="cudnn", lora=lora,
        lora_classes=classes, adapter_dtype="bf16", **fixed,
    )  # fmt: skip
    return ModelOnGrid(
        model, Grid(shared, (layout,), ("bf16-mixed",), (recompute,), (1,), ((),), (1,), every_stage=True)
    )


def kept(group: GroupActivations) -> int:
    """Return the bytes that one block keeps."""
    return int(np.max(np.where(group.is_treated == 1, group.treated_block, group.whole_block)))


# ------------------------------------------------------------------------- a rank's modules, as the sources write them


class Saves(torch.autograd.Function):
    """An operator that makes an output of a shape and saves the tensors it is told to."""

    @staticmethod
    def forward(ctx: Any, shapes: Any, saved: Any, dtype: Any, *inputs: Any) -> Any:
        """Save the inputs whose numbers are told, and the outputs whose numbers are negative."""
        outs = tuple(inputs[0].new_zeros(shape, dtype=d) for shape, d in zip(shapes, dtype, strict=True))
        ctx.save_for_backward(*(inputs[i] if i >= 0 else outs[~i] for i in saved))
        ctx.inputs = [tuple(i.shape) for i in inputs]
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Give each input a gradient."""
        return None, None, None, *(grads[0].new_zeros(shape) for shape in ctx.inputs)


def operator(
    inputs: list[Any], shapes: list[tuple[int, ...]], saved: tuple[int, ...], wide: tuple[int, ...] = ()
) -> Any:
    """Run :class:`Saves`; outputs whose numbers are in ``wide`` are fp32."""
    dtypes = [torch.float32 if n in wide else torch.bfloat16 for n in range(len(shapes))]
    return Saves.apply(shapes, saved, dtypes, *inputs)


@dataclass
class Rank:
    """One rank of a tensor-parallel group, with adapters of some classes."""

    tp: int
    sp: bool
    classes: str
    targets: tuple[str, ...]
    dropout: float = 0.0
    parameters: list[Any] = field(default_factory=list)

    def weight(self, rows: int, columns: int) -> Any:
        """A trained weight of a rank."""
        self.parameters.append(torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16)))
        return self.parameters[-1]

    @property
    def gathers(self) -> bool:
        """Whether the adapters are Megatron-Bridge's."""
        return self.classes.startswith("bridge")

    def seq(self, x: Any, factor: float) -> Any:
        """A collective along the sequence, which saves nothing."""
        return operator([x], [(int(x.shape[0] * factor), x.shape[1])], ())[0]

    def product(self, x: Any, rows: int, columns: int) -> Any:
        """A linear layer with a trained weight, which saves its input."""
        w = self.weight(rows, columns)
        return operator([x, w], [(x.shape[0], rows)], (0, 1))[0]

    def dropped(self, x: Any) -> Any:
        """``nn.Dropout`` as it runs on CUDA, with a mask of one byte an element."""
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x

    def added(self, out: Any, x: Any, low: tuple[int, int], high: tuple[int, int], low_factor: float) -> Any:
        """The layer's output and ``B(A(dropout(x)))``; ``low_factor`` is the collective's on what A makes."""
        y = self.product(self.dropped(x), *low)
        if low_factor != 1:
            y = self.seq(y, low_factor)
        if self.gathers and y.shape[1] != RANK:
            y = operator([y], [(y.shape[0], RANK)], ())[0]
        z = self.product(y, *high)
        if z.shape != out.shape:
            z = operator([z], [tuple(out.shape)], ())[0]
        return operator([out, z * 2.0], [tuple(out.shape)], ())[0]

    def normalised(self, x: Any, outputs: int, target: str) -> Any:
        """``LayerNormLinear`` with a frozen weight: it saves the normalised tensor where it returns it."""
        h, t, whole = x.shape[1], self.tp, x.shape[0] * (self.tp if self.sp else 1)
        shapes = [(whole, outputs // t), (x.shape[0], 1), (x.shape[0], h)]
        if target not in self.targets:
            return operator([x], shapes[:2], (0, ~1), (1,))[0]
        if self.gathers and self.sp:
            out, _, _, y = operator([x], [*shapes, (whole, h)], (0, ~1, ~2), (1,))
        else:
            out, _, y = operator([x], shapes, (0, ~1, ~2), (1,))
        if self.gathers:
            return self.added(out, y, (RANK // t, h), (outputs // t, RANK), 1)
        return self.swift_column(out, y, h, outputs)

    def swift_column(self, out: Any, y: Any, h: int, outputs: int) -> Any:
        """A on the rank's own tokens; B keeps what A made and gathers it for its product."""
        y = self.dropped(y)
        low, w = self.product(y, RANK, h), self.weight(outputs // self.tp, RANK)
        z = operator([low, w], [tuple(out.shape)], (0, 1))[0]
        return operator([out, z * 2.0], [tuple(out.shape)], ())[0]

    def row(self, x: Any, hidden: int, target: str) -> Any:
        """A row-parallel layer with a frozen weight, whose output is reduced, or reduced and scattered."""
        part = x.shape[0] // (self.tp if self.sp else 1)
        out = operator([x], [(part, hidden)], ())[0]
        if target not in self.targets:
            return out
        low, high = (RANK, x.shape[1]), (hidden // self.tp if self.gathers else hidden, RANK)
        return self.added(out, x, low, high, 1 if self.gathers or not self.sp else 1 / self.tp)

    def attention(self, x: Any, flat: dict[str, Any]) -> Any:
        """Norm and packed projection, fused attention, output projection, residual sum."""
        h, t, d = flat["hidden"], self.tp, flat["hidden"] // flat["heads"]
        kv = d * flat["kv_heads"]
        packed = self.normalised(x, h + 2 * kv, "qkv")
        q, k, v = operator([packed], [(packed.shape[0], n // t) for n in (h, kv, kv)], ())
        out, _ = operator([q, k, v], [tuple(q.shape), (q.shape[0], flat["heads"] // t)], (0, 1, 2, ~0, ~1), (1,))
        return operator([x, self.row(out, h, "o")], [tuple(x.shape)], ())[0]

    def mlp(self, x: Any, flat: dict[str, Any]) -> Any:
        """Norm and up projection, activation, down projection, residual sum."""
        h, f = flat["hidden"], flat["ffn"]
        up = self.normalised(x, 2 * f, "gate_up")
        inner = operator([up], [(up.shape[0], f // self.tp)], (0,))[0]
        return operator([x, self.row(inner, h, "down")], [tuple(x.shape)], ())[0]

    def column(self, x: Any, outputs: int, target: str) -> Any:
        """A column-parallel layer without a norm, as the shared experts have it."""
        h, t, out_rows = x.shape[1], self.tp, x.shape[0] * (self.tp if self.sp else 1)
        out = operator([x], [(out_rows, outputs // t)], ())[0]
        if target not in self.targets:
            return out
        if not self.gathers:
            return self.swift_column(out, x, h, outputs)
        y = self.dropped(x)
        y = self.seq(y, t) if self.sp else y
        low = self.product(y, RANK // t, h)
        return self.scaled(
            out, self.product(operator([low], [(y.shape[0], RANK)], ())[0] if t > 1 else low, outputs // t, RANK)
        )

    def scaled(self, out: Any, high: Any) -> Any:
        """The sum with the adapter's scaled output."""
        return operator([out, high * 2.0], [tuple(out.shape)], ())[0]

    def grouped(self, x: Any, outputs: int, target: str, sizes: tuple[int, int], local: int) -> Any:
        """``GroupedLinear`` with a frozen weight; A and B of ``sizes``, of all local experts where each has its own."""
        out = operator([x], [(x.shape[0], outputs)], ())[0]
        if target not in self.targets:
            return out
        many = 1 if self.classes == "bridge" else local
        w_in, w_out = self.weight(many, sizes[0]), self.weight(many, sizes[1])
        low = operator([self.dropped(x), w_in], [(x.shape[0], RANK)], (0, 1))[0]
        return self.scaled(out, operator([low, w_out], [(x.shape[0], outputs)], (0, 1))[0])

    def experts(self, x: Any, flat: dict[str, Any], ep: int, etp: int) -> Any:
        """Norm, router, routed experts and shared ones; what moves rows saves nothing."""
        h, moe, tokens = flat["hidden"], flat["moe"], x.shape[0]
        e, k, f, local = moe["experts"], moe["topk"], moe["ffn"], moe["experts"] // ep
        y, _ = operator([x], [tuple(x.shape), (tokens, 1)], (0, ~1), (1,))
        # fp32 scores and maps, masks of bytes, the choice in 64 bits: as much as a trained block has of them
        probs, _ = operator([y], [(tokens, 4 * e + 1 + 6 * k), (tokens, e)], (0, ~0, ~1), (0,))
        rows = S * k // (self.tp // etp)
        given, weights = operator([y, probs], [(rows, h), (rows, 1)], (), (1,))
        up = self.grouped(given, 2 * f // etp, "gate_up", (RANK * h // etp, 2 * f * RANK // etp), local)
        inner = operator([up, weights], [(rows, f // etp)], (0, 1))[0]
        down = self.grouped(inner, h, "down", (RANK * f // etp, h * RANK // etp), local)
        shared = self.column(y, 2 * f, "gate_up")
        shared = operator([shared], [(shared.shape[0], f // self.tp)], (0,))[0]
        both = operator([down, self.row(shared, h, "down")], [tuple(x.shape)], ())[0]
        return operator([x, both], [tuple(x.shape)], ())[0]


def saved_by(rank: Rank, run: Any) -> int:
    """Return the bytes of the distinct storages that are saved and no parameters."""
    storages: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = run()
    own = {p.untyped_storage()._cdata for p in rank.parameters}
    del alive
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


def dense_block(rank: Rank, *, wanted: bool = True) -> int:
    """Return what the modules of a dense block save; ``wanted``: a gradient flows to its input."""
    tokens = S // (rank.tp if rank.sp else 1)
    x = torch.zeros(tokens, FLAT["hidden"], dtype=torch.bfloat16, requires_grad=wanted)
    return saved_by(rank, lambda: rank.mlp(rank.attention(x, FLAT), FLAT))


LAYOUTS = [(1, False), (2, False), (2, True), (4, True)]


@pytest.mark.parametrize("classes", ["bridge", "swift"])
@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("targets", [ALL, ("qkv",), ("o", "down"), ("gate_up",)])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_dense_block_keeps_what_its_modules_save(
    classes: str, tp: int, sp: bool, targets: tuple[str, ...], dropout: float
) -> None:
    lora = f"{RANK}:{','.join(targets)}"
    job = census(from_flat(FLAT), Layout(tp=tp, sp=sp), lora, classes, lora_dropout=dropout)
    rank = Rank(tp, sp, classes, targets, dropout)
    assert kept(groups_of(job)[0]) == dense_block(rank)
    assert int(trained(job).block_dense[0].flat[0]) == sum(p.numel() for p in rank.parameters)


ROUTED = [
    ("bridge", Layout(), 0), ("bridge-each", Layout(), 0), ("swift", Layout(), 0),
    ("bridge", Layout(dp=4, ep=4), 0), ("bridge-each", Layout(dp=4, ep=4), 0), ("swift", Layout(dp=4, ep=4), 0),
    ("bridge", Layout(dp=2, tp=2, sp=True, ep=2), 1), ("swift", Layout(dp=2, tp=2, sp=True, ep=2), 1),
    ("bridge", Layout(dp=2, tp=2, sp=True, ep=2), 2), ("bridge-each", Layout(dp=2, tp=2, sp=True, ep=2), 2),
]  # fmt: skip


@pytest.mark.parametrize(("classes", "layout", "etp"), ROUTED)
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_block_with_experts_keeps_what_its_modules_save(
    classes: str, layout: Layout, etp: int, dropout: float
) -> None:
    """One pair for all experts of a rank, or one for each; those of the shared experts are a dense MLP's."""
    lora = f"{RANK}:{','.join(ALL)}"
    job = census(from_flat(MOE), layout, lora, classes, lora_dropout=dropout, etp=etp)
    rank, tokens = Rank(layout.tp, layout.sp, classes, ALL, dropout), S // (layout.tp if layout.sp else 1)
    x = torch.zeros(tokens, MOE["hidden"], dtype=torch.bfloat16, requires_grad=True)
    bytes_ = saved_by(rank, lambda: rank.experts(rank.attention(x, MOE), MOE, layout.ep, etp or layout.tp))
    assert kept(groups_of(job)[0]) == bytes_
    counted = trained(job)
    elements = int(counted.block_dense[0].flat[0]) + int(counted.block_experts[0].flat[0])
    assert elements == sum(p.numel() for p in rank.parameters)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_first_block_keeps_less_where_no_gradient_flows_to_its_input(tp: int) -> None:
    """Under Megatron-Bridge alone: ms-swift asks for a gradient of the embedding's output in any case."""
    words, spared = f"{RANK}:{','.join(ALL)}", []
    for classes in ("bridge", "swift"):
        group = groups_of(census(from_flat(FLAT), Layout(tp=tp), words, classes))[0]
        spared.append(FLAT["n_layers"] * kept(group) - int(np.max(group.kept)))
    whole, first = (dense_block(Rank(tp, False, "bridge", ALL), wanted=wanted) for wanted in (True, False))
    assert spared == [whole - first, 0]
