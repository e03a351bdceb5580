"""Bytes kept for backward, and a block's backward: against autograd on the real classes, and the textbook.

The classes run on fake tensors that behave as on a GPU (:mod:`autograd`); the same config is read by the converter, and
the model that comes out is traced. What is compared is every tensor that autograd saves for a block and for the head,
parameters left out. Left out too are integers and numbers without a dimension: labels, the indices of an index, the
state of the random generator (24 bytes a fused attention), and the weights' sum of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from autograd import measure, timeline
from covering import covering

from memcalc.api import load_model
from memcalc.convert.huggingface import from_huggingface
from memcalc.frameworks.losses import HF_NEW
from memcalc.grid import Grid, Layout
from memcalc.probe.live.saved import SavedStorage
from memcalc.probe.live.timeline import Event
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.options import SharedSettings
from memcalc.terms.activations import groups_of
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.trace.layers import BlockConfig
from memcalc.trace.tape import Record, Tape, Tensor
from memcalc.trace.template import trace, trace_head

FAMILIES = (
    "gpt2", "gpt-neox", "opt", "bloom", "falcon-7b", "falcon-40b", "llama-2", "llama-3", "smollm2", "mistral",
    "mistral-window", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3-wide", "phi3", "olmo2", "starcoder2",
    "titan",
)  # fmt: skip
EAGER_ONLY = ("bloom", "gemma2")
PRECISIONS = ("bf16", "fp32", "fp32+autocast")
BATCH = 2
SEQ = (40, 64)
"""The first is no multiple of what the memory-efficient kernel fills rows (32) and keys (16) up to."""
TITAN = {"n_layers": 3, "hidden": 96, "heads": 4, "kv_heads": 2, "ffn": 176, "vocab": 613, "max_positions": 4096}


def filled(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def size_of(record: Record, seq: int, gradient: int = 4, batch: int = BATCH) -> int:
    """Return the bytes of a tensor of the trace on one rank."""
    tokens = batch * seq
    units = {
        "token": tokens,
        "pair": tokens * seq,
        "filled_pair": tokens * filled(seq, 16),
        "filled_token": batch * filled(seq, 32),
        "once": 1,
    }
    there = record.size.shard != "tp if single" or batch == 1
    return record.size.bytes * units[record.size.unit] * (gradient if record.kind == "gradient" else 1) * there


def model_of(family: str, config: Any) -> Model:
    """Return the model as a user's config.json gives it."""
    return from_flat(TITAN) if family == "titan" else from_huggingface(config.to_dict())


def setting_of(family: str, precision: str, attention: str, model: Model, seq: int) -> BlockConfig:
    width, window = 2 if precision == "bf16" else 4, model.main.block.attention.window
    return BlockConfig(
        weight=width,
        residual=width,
        autocast=precision == "fp32+autocast",
        attention="eager" if family in EAGER_ONLY else attention,
        kernels="fused" if family == "titan" else "model",
        sdpa=family != "titan",
        windowed=window is not None and seq >= window,
        reentrant=False,
    )


def counted(kept: SavedStorage) -> bool:
    """Return whether a saved tensor grows with the batch or the width of the model."""
    return kept.weight is None and bool(kept.shape) and (kept.dtype.is_floating_point or kept.dtype.itemsize == 1)


def saved_at(saved: measure.Saved, place: str | int) -> int:
    return sum(kept.nbytes for kept in saved.at(place) if counted(kept))


def compare(family: str, precision: str, attention: str, *, dropout: bool | None, seq: int) -> None:
    """Assert that the middle block, the last one and the head keep what autograd saves for them."""
    saved = measure.saved_bytes(family, precision=precision, attention=attention, dropout=dropout, batch=BATCH, seq=seq)
    model = model_of(family, saved.config)
    setting = setting_of(family, precision, attention, model, seq)
    block = sum(size_of(r, seq) for r in trace(model.main.block, setting).kept_records)
    end = trace_head(
        model.hidden, model.final_norm, model.vocab, setting, HF_NEW, "none", model.tail, softcap=model.head_softcap
    )
    head = sum(size_of(r, seq) for r in end.kept_records)
    assert {"block": block, "last": block, "head": head} == {
        "block": saved_at(saved, 1),
        "last": saved_at(saved, 2),
        "head": saved_at(saved, "head"),
    }


def cases(precisions: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [
        (family, precision, attention)
        for family in FAMILIES
        for precision in precisions
        for attention in ("flash", "eager")
        if (family, attention) != ("titan", "eager") and not (family in EAGER_ONLY and attention == "flash")
    ]


@pytest.mark.parametrize(("family", "precision", "attention"), cases(("bf16", "fp32+autocast")))
def test_a_block_and_the_head_keep_what_autograd_saves(family: str, precision: str, attention: str) -> None:
    compare(family, precision, attention, dropout=None, seq=SEQ[0])


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "falcon-7b", "llama-3", "phi3"])
def test_dropout_of_everything(family: str) -> None:
    compare(family, "bf16", "eager", dropout=True, seq=SEQ[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "precision", "dropout", "seq"),
    covering(2, [(case[0], case[2]) for case in cases(PRECISIONS[:1])], PRECISIONS, [None, False, True], SEQ),
)
def test_a_block_and_the_head_keep_what_autograd_saves_everywhere(
    kernel: tuple[str, str], precision: str, *, dropout: bool | None, seq: int
) -> None:
    """Any two choices occur together, with each kernel of each family."""
    family, attention = kernel
    compare(family, precision, attention, dropout=dropout, seq=seq)


@pytest.mark.parametrize("attention", ["flash", "efficient", "math", "eager"])
@pytest.mark.parametrize("family", ["llama-2", "llama-3", "mistral-window", "gpt2", "phi3"])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_kernels_by_name(family: str, attention: str, precision: str) -> None:
    compare(family, precision, attention, dropout=True, seq=SEQ[0])


def kept_by_stack(model: Model, recompute: str, seq: int, attention: str) -> int:
    """Return what the blocks of a model keep for one micro-batch, by the terms of an estimate."""
    shared = SharedSettings(framework="plain", seq_len=seq, global_batch=BATCH, attention=attention)
    grid = Grid(shared, (Layout(),), ("bf16",), (recompute,), (0,), ((),), (BATCH,))
    return sum(int(np.max(group.kept)) for group in groups_of(ModelOnGrid(model, grid)))


LAYERS = 4


def stack_of(saved: measure.Saved, places: range) -> int:
    """Return what blocks save, but for the cosine and sine of rotary embeddings, which the first saves for all."""
    return sum(k.nbytes for place in places for k in saved.at(place) if counted(k) and k.shape[:2] != (1, 1))


@pytest.mark.parametrize("recompute", ["none", "full", "every-2", "segments-2"])
@pytest.mark.parametrize("family", ["llama-3", "gpt2", "olmo2", "bloom"])
@pytest.mark.parametrize("seq", SEQ[:1])
def test_recomputation_keeps_the_inputs_of_the_blocks_it_treats(family: str, recompute: str, seq: int) -> None:
    saved = measure.saved_bytes(family, recompute=recompute, seq=seq, batch=BATCH, layers=LAYERS)
    expected = stack_of(saved, range(LAYERS))
    if recompute == "segments-2":
        # ``checkpoint_sequential`` of torch/utils/checkpoint.py runs the last segment without a checkpoint
        plain = measure.saved_bytes(family, seq=seq, batch=BATCH, layers=LAYERS)
        expected = stack_of(saved, range(2)) + stack_of(plain, range(2, LAYERS))
    attention = "eager" if family in EAGER_ONLY else "flash"
    assert kept_by_stack(model_of(family, saved.config), recompute, seq, attention) == expected


# ------------------------------------------------------------------------------------------------------------ backward


def new_sum(tape: Tape, before: Tensor | None, value: Tensor) -> Tensor:
    """Add gradients as autograd does with fake tensors: never in place, because a subclass might not allow it."""
    return value if before is None else tape.new("sum of gradients", before.size)


def traced_backward(model: Model, setting: BlockConfig, policy: str, seq: int, gradient: int) -> int:
    """Return the most bytes that a block's backward adds to what is alive when it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "_sum", new_sum)
        template = trace(model.main.block, setting, policy)
    live = most = 0
    for event in template.backward:
        size = size_of(template.records[event if event >= 0 else ~event], seq, gradient)
        live += size if event >= 0 else -size
        most = max(most, live)
    return most


@cache
def run_step(family: str, precision: str, attention: str, recompute: str, seq: int) -> tuple[Event, ...]:
    steps = timeline.step_timeline(
        family, precision=precision, attention=attention, recompute=recompute, seq=seq, batch=BATCH, steps=1
    )
    return tuple(event for event in steps.events if event.phase == "backward")


def real_backward(events: tuple[Event, ...], blocks: list[str]) -> int:
    """Return the same of the middle of three blocks."""
    places = [event.part for event in events]
    first = len(places) - places[::-1].index(blocks[2])
    inside = events[first : first + places[first:].index(blocks[0])]
    return max(event.live for event in inside) - events[first - 1].live


BACKWARDS = (
    ("llama-2", "flash"), ("llama-3", "eager"), ("gpt2", "flash"), ("gpt2", "eager"), ("gemma2", "eager"),
    ("bloom", "eager"), ("olmo2", "flash"), ("titan", "flash"),
)  # fmt: skip
BLOCKS = {"gpt2": "transformer.h", "bloom": "transformer.h", "titan": "layers"}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "precision", "recompute"), covering(2, BACKWARDS, ["bf16", "fp32"], ["none", "full"]))
def test_a_backward_needs_what_autograd_allocates(case: tuple[str, str], precision: str, recompute: str) -> None:
    family, attention = case
    """Within 0.1%: the trace leaves the gradients of biases out."""
    seq, path = 192, BLOCKS.get(family, "model.layers")
    model = model_of(family, None if family == "titan" else measure.models.hf_config(family))
    setting = setting_of(family, precision, attention, model, seq)
    ours = traced_backward(model, setting, recompute, seq, 2 if precision == "bf16" else 4)
    events = run_step(family, precision, attention, recompute, seq)
    assert ours == pytest.approx(real_backward(events, [f"{path}.{i}" for i in range(3)]), rel=1e-3)


@pytest.mark.parametrize("family", ["llama-3", "gemma2", "bloom", "olmo2"])
def test_a_block_computed_again_under_autocast_makes_its_weights_16_bit_anew(family: str) -> None:
    """Where it was not checkpointed, the copies are those of forward, which are a term of their own."""
    seq, path = 192, BLOCKS.get(family, "model.layers")
    model = model_of(family, measure.models.hf_config(family))
    setting = setting_of(family, "fp32+autocast", "eager", model, seq)
    events = run_step(family, "fp32+autocast", "eager", "full", seq)
    real = real_backward(events, [f"{path}.{i}" for i in range(3)])
    assert traced_backward(model, setting, "full", seq, 4) == pytest.approx(real, rel=1e-3)


def test_in_place_sums_take_less_than_new_ones() -> None:
    """Real tensors: the gradient of a residual stream is added to in place where nothing else holds it."""
    block = load_model("llama-2-7b").main.block
    in_place = sum(event >= 0 for event in trace(block, BlockConfig()).backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "_sum", new_sum)
        assert sum(event >= 0 for event in trace(block, BlockConfig()).backward) > in_place


# ------------------------------------------------------------------------------------------------ presets, the textbook

ALONE = Layout()


def kept_a_token(
    model: Model,
    seq_len: int,
    precision: str = "bf16",
    layout: Layout = ALONE,
    recompute: str = "none",
    framework: str = "plain",
    **fixed: str,
) -> float:
    """Return the bytes that one block keeps, a token and hidden unit, as the grid of one strategy gives them."""
    shared = SharedSettings(framework=framework, seq_len=seq_len, global_batch=layout.dp, **fixed)
    block = groups_of(ModelOnGrid(model, Grid(shared, (layout,), (precision,), (recompute,), (0,), ((),), (1,))))[0]
    kept = block.treated_block if np.any(block.field("treated")) else block.whole_block
    return int(np.max(kept)) / (seq_len * model.hidden)


MEASURED: list[tuple[str, int, dict[str, Any], float]] = [
    ("bert-large", 512, {"attention": "eager"}, 74.016),
    ("bert-large", 512, {"attention": "flash"}, 34.078),
    ("gpt2", 1024, {"attention": "eager"}, 138.021),
    ("gpt2", 1024, {"attention": "flash"}, 58.083),
    ("llama-2-7b", 2048, {"attention": "flash"}, 45.533),
    ("llama-3-8b", 2048, {"attention": "flash"}, 49.033),
    ("llama-2-7b", 2048, {"attention": "flash", "kernels": "fused"}, 37.533),
    ("llama-2-7b", 2048, {"attention": "eager"}, 141.502),
    ("llama-2-7b", 2048, {"attention": "flash", "precision": "bf16-autocast"}, 55.533),
    ("llama-2-7b", 2048, {"attention": "efficient", "precision": "fp32"}, 83.033),
    ("llama-2-7b", 2048, {"recompute": "full"}, 2.0),
    ("gpt2", 1024, {"recompute": "full"}, 2.0),
    ("llama-2-7b", 2048, {"recompute": "full", "precision": "fp32"}, 4.0),
]
"""Unique storages saved for backward, parameters left out, of the real Transformers 5.23 classes on PyTorch 2.13."""


@pytest.mark.parametrize(("name", "seq_len", "choice", "expected"), MEASURED)
def test_blocks_keep_what_pytorch_keeps(name: str, seq_len: int, choice: dict[str, Any], expected: float) -> None:
    assert kept_a_token(load_model(name), seq_len, **choice) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("attention", "expected"), [("eager", 88.021), ("flash", 56.083)])
def test_gpt2_without_dropout(attention: str, expected: float) -> None:
    block, seq_len = load_model("gpt2").main.block, 1024
    records = trace(block, BlockConfig(attention=attention, dropout=False)).kept_records
    bytes_ = sum(size_of(record, seq_len, batch=1) for record in records) / seq_len
    assert bytes_ / block.hidden == pytest.approx(expected, abs=5e-4)


TEXTBOOK = [
    ("without parallelism", Layout(), "none", lambda _, scores: 34 + 5 * scores),
    ("tensor parallelism", Layout(tp=8), "none", lambda t, scores: 10 + 24 / t + 5 * scores / t),
    ("with sequence parallelism", Layout(tp=8, sp=True), "none", lambda t, scores: 34 / t + 5 * scores / t),
    ("selective", Layout(), "selective-core-attn", lambda *_: 34),
    ("tensor parallelism, selective", Layout(tp=8), "selective-core-attn", lambda t, _: 10 + 24 / t),
    ("both, selective", Layout(tp=8, sp=True), "selective-core-attn", lambda t, _: 34 / t),
    ("full", Layout(tp=8), "full", lambda *_: 2),
]


@pytest.mark.parametrize(
    ("layout", "recompute", "formula"), [row[1:] for row in TEXTBOOK], ids=[r[0] for r in TEXTBOOK]
)
@pytest.mark.parametrize("name", ["megatron-22b", "gpt3-175b", "megatron-530b"])
def test_textbook(name: str, layout: Layout, recompute: str, formula: Callable[[int, float], float]) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 2; the paper leaves out a LayerNorm's statistics, 16/h.

    Megatron computes a GELU in one kernel, so the kernels are the fused ones; with sequence parallelism it gathers a
    layer's input again in backward.
    """
    model, seq_len = load_model(name), 2048
    scores = model.groups[0].block.attention.heads * seq_len / model.hidden
    sequence = layout.tp if layout.sp else 1
    statistics = 0 if recompute == "full" else 16 / model.hidden / sequence
    fixed = {"attention": "eager", "kernels": "fused"}
    kept = kept_a_token(model, seq_len, "bf16-mixed", layout, recompute, "megatron", **fixed)
    assert kept == pytest.approx(formula(layout.tp, scores) + statistics, rel=1e-9)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu"])
def test_selective_operators_keep_the_output_of_a_matmul_whatever_the_activation(activation: str) -> None:
    """The policy stores what matmuls write: of an ungated MLP the up projection, f elements a token, and no more."""
    block = load_model("gpt2").main.block
    block = block.model_copy(update={"mlp": block.mlp.model_copy(update={"activation": activation, "bias": False})})
    kept = trace(block, BlockConfig(dropout=False), "selective-ops").kept_records
    assert sum(record.size.elements for record in kept if record.name.startswith("MLP")) == block.mlp.ffn
