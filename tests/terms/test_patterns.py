"""Blocks that repeat by pattern: their order is the config's own, and what they keep, when, where and how long follows.

The order is held against the layer lists that the config classes of Transformers make, what blocks keep against the
saved tensors of the real classes on fake tensors, and shares of stages against blocks counted one by one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers
from autograd import measure

import memcalc
from memcalc import catalog
from memcalc.allocator import replay
from memcalc.convert.formats.base import ConfigJob
from memcalc.convert.formats.megatron import model_flags
from memcalc.convert.huggingface import from_huggingface
from memcalc.errors import InputError
from memcalc.events import step_events
from memcalc.formulas.recompute import counts, parse_policy
from memcalc.grid import Grid, Layout
from memcalc.planner.costs import costs_of
from memcalc.specs.block import Attention, Block, Mlp
from memcalc.specs.flat import from_flat
from memcalc.specs.model import BlockGroup, Model, Pattern
from memcalc.specs.options import SharedSettings
from memcalc.stages import Rows
from memcalc.terms.activations import groups_of
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.order import counts_in, last_unit
from memcalc.terms.overhead import overhead_of
from memcalc.terms.parameters import block_count
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import trace

SMALL: dict[str, Any] = {
    "hidden_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 176, "vocab_size": 613, "head_dim": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72}


def windows(model: Model) -> list[bool]:
    """Return which blocks have a window."""
    return [model.groups[index].block.attention.window is not None for index in model.sequence]


def routed(model: Model) -> list[bool]:
    return [model.groups[index].block.is_moe for index in model.sequence]


@pytest.mark.parametrize("name", ["gemma-2-2b", "gemma-2-27b", "gemma-3-1b", "gemma-3-4b", "gemma-3-27b", "gpt-oss-20b",
                                  "gpt-oss-120b"])  # fmt: skip
def test_a_preset_has_the_layer_list_of_its_class(name: str) -> None:
    model = catalog.model(name)
    kind = {"gemma2": "gemma2", "gemma3": "gemma3_text", "gpt-oss": "gpt_oss"}[model.family]
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=model.num_layers)
    assert windows(model) == [layer == "sliding_attention" for layer in config.layer_types]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("gemma3_text", {"layer_types": ["full_attention", *["sliding_attention"] * 5, "full_attention"]}),
        ("gpt_oss", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 28}),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 5}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [1, 0, 0, 1, 1, 1, 0]}),
    ],
)
def test_a_config_is_read_with_the_layer_list_of_its_class(kind: str, keys: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, "pad_token_id": 0, **keys})
    model = from_huggingface({**SMALL, "model_type": kind, **keys})
    assert windows(model) == [layer == "sliding_attention" for layer in config.layer_types]


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("keys", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]},
                                  {"decoder_sparse_step": 3, "mlp_only_layers": [2]}])  # fmt: skip
def test_dense_and_routed_blocks_stand_as_in_the_class(kind: str, keys: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **EXPERTS, **keys})
    with torch.device("meta"):
        layers = transformers.AutoModelForCausalLM.from_config(config).model.layers
    model = from_huggingface({**SMALL, **EXPERTS, "model_type": kind, **keys})
    assert routed(model) == [hasattr(layer.mlp, "experts") for layer in layers]
    assert sum(tensor.numel() for tensor in layers.parameters()) == sum(
        block_count(model.groups[index].block).total for index in model.sequence
    )


def test_layers_that_no_formula_models_are_refused_by_name() -> None:
    types = ["linear_attention", *["full_attention"] * 6]
    with pytest.raises(InputError, match="linear_attention"):
        from_huggingface({**SMALL, "model_type": "gemma3_text", "layer_types": types})
    with pytest.raises(InputError, match="layer_types"):
        from_huggingface({**SMALL, "model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]})


def test_an_order_names_every_block_once_and_no_tower_twice() -> None:
    block = Block(hidden=8, attention=Attention(heads=1, kv_heads=1, head_dim=8), mlp=Mlp(ffn=8))
    groups = tuple(BlockGroup(count=2, block=block) for _ in range(2))
    about: dict[str, Any] = {"name": "x", "family": "x", "hidden": 8, "vocab": 8, "max_positions": 8, "source": "x"}
    turns = Model(**about, groups=groups, order=(Pattern(count=2, runs=((0, 1), (1, 1))),))
    assert turns.sequence == (0, 1, 0, 1)
    assert turns.model_copy(update={"order": ()}).sequence == (0, 0, 1, 1)
    with pytest.raises(ValueError, match="each block of each group once"):
        Model(**about, groups=groups, order=(Pattern(count=3, runs=((0, 1), (1, 1))),))
    towers = (groups[0], groups[1].model_copy(update={"tower": "encoder"}))
    with pytest.raises(ValueError, match="several towers"):
        Model(**about, groups=towers, order=(Pattern(count=2, runs=((0, 1), (1, 1))),))


# --------------------------------------------------------------------------------------------------------- what is kept


def kept(name: str, group: int, attention: str, batch: int, seq: int) -> int:
    """Return what one block of a preset keeps on one GPU in 16 bits."""
    block = catalog.model(name).groups[group].block
    window, tokens = block.attention.window, batch * seq
    setting = BlockConfig(
        attention="flash" if attention == "sdpa" else attention,
        sdpa=attention == "sdpa",
        windowed=window is not None and seq >= window,
        reentrant=False,
    )
    units = {"token": tokens, "pair": tokens * seq, "sink_pair": tokens * (seq + 1), "once": 1,
             "filled_pair": tokens * -(-seq // 16) * 16, "filled_token": batch * -(-seq // 32) * 32}  # fmt: skip
    return sum(r.size.bytes * units[r.size.unit] for r in trace(block, setting).kept_records)


@pytest.mark.parametrize(
    ("name", "attention", "batch", "seq", "sliding", "full"),
    [
        ("gpt-oss-20b", "eager", 1, 8192, 11_035_672_704, 11_035_672_704),
        ("gpt-oss-20b", "eager", 2, 2048, 2_296_610_944, 2_296_610_944),
        ("gpt-oss-20b", "flash", 1, 8192, 2_325_151_872, 2_325_151_872),
        ("gpt-oss-20b", "flash", 2, 2048, 1_162_576_000, 1_162_576_000),
        ("gemma-2-9b", "eager", 1, 8192, 10_855_047_168, 10_855_047_168),
        ("gemma-2-9b", "flash", 2, 2048, 1_099_292_672, 1_099_292_672),
        ("gemma-3-12b", "sdpa", 1, 8192, 2_945_906_704 - 16, 2_744_580_120 - 24),
        ("gemma-3-12b", "sdpa", 2, 2048, 1_422_653_456 - 16, 1_372_321_816 - 24),
        ("gemma-3-1b", "sdpa", 1, 8192, 1_053_216_784 - 16, 918_999_064 - 24),
        ("gemma-3-1b", "sdpa", 2, 2048, 476_286_992 - 16, 459_509_784 - 24),
    ],
)
def test_a_block_of_either_kind_keeps_what_its_class_saves(
    name: str, attention: str, batch: int, seq: int, sliding: int, full: int
) -> None:
    """Figures of the real classes of Transformers 5.23 with the Hub's configs on fake tensors.

    Less the state of the random generator: 16 bytes of the memory-efficient kernel, 24 of the flash kernel.
    """
    assert (kept(name, 0, attention, batch, seq), kept(name, 1, attention, batch, seq)) == (sliding, full)


@pytest.mark.parametrize(
    ("words", "attention"),
    [
        ({"model": "gemma-3-1b", "seq_len": 256}, "flash"),
        ({"model": "gemma-3-1b", "seq_len": 2048}, "sdpa"),
        ({"model": "mistral-7b-v0.1", "seq_len": 8192}, "efficient"),
        ({"model": "gpt-oss-20b", "seq_len": 256}, "eager"),
        ({"model": "gemma-2-2b", "seq_len": 256}, "eager"),
        ({"model": "gemma-3-1b", "seq_len": 2048, "gpu": "v100-32g", "precision": "fp16-autocast"}, "efficient"),
    ],
)
def test_a_class_gets_the_kernel_that_its_masks_leave(words: dict[str, Any], attention: str) -> None:
    answer = memcalc.estimate(**{"gpu": "h100", "framework": "hf", **words})
    assert answer.strategy.attention == attention


def test_a_class_without_pytorchs_kernels_is_given_none() -> None:
    with pytest.raises(InputError, match="none of PyTorch's kernels; use eager or flash"):
        memcalc.estimate(model="gpt-oss-20b", gpu="h100", framework="hf", attention="sdpa")


def on_grid(model: Model, recompute: str, seq: int, attention: str, **words: Any) -> ModelOnGrid:
    shared = SharedSettings(framework="plain", seq_len=seq, global_batch=2, attention=attention, **words)
    return ModelOnGrid(model, Grid(shared, (Layout(),), ("bf16",), (recompute,), (0,), ((),), (2,)))


@pytest.mark.parametrize("recompute", ["none", "full", "every-2", "every-3", "every-6"])
def test_the_policy_treats_the_blocks_that_stand_where_it_says(recompute: str) -> None:
    """Of seven blocks of Gemma 3 the sixth has no window."""
    saved = measure.saved_bytes("gemma3", recompute=recompute, seq=40, batch=2, layers=7)
    model = from_huggingface(saved.config.to_dict())
    ours = sum(int(np.max(group.kept)) for group in groups_of(on_grid(model, recompute, 40, "sdpa")))
    each = [k for place in range(7) for k in saved.at(place)]
    # Rotary tables and the mask are saved once for all blocks, and integers and random states are not counted
    own = [k for k in each if k.weight is None and k.shape and k.dtype.is_floating_point and k.shape[:2] != (1, 1)]
    assert ours == sum(k.nbytes for k in own)


@pytest.mark.parametrize("name", ["every-2", "every-3", "segments-2", "segments-3", "sqrt", "block-3", "uniform-2",
                                  "uniform-3", "full", "none", "mlp"])  # fmt: skip
def test_kinds_together_are_treated_as_one_kind_is(name: str) -> None:
    """Whatever the kinds are called, the sums over them are those of a stack of equal blocks."""
    policy = parse_policy(name)
    for layers in range(1, 12):
        row = tuple((0, 1, 1)[place % 3] for place in range(layers))
        rows = Rows((row,), np.zeros((1,) * 7, dtype=np.int64), ((len(row),),))
        found, whole = [counts_in((policy,), rows, kind)[0] for kind in (0, 1)], counts(policy, np.int64(layers))
        for field in ("treated", "whole", "recomputed"):
            assert sum(int(getattr(one, field).ravel()[0]) for one in found) == int(getattr(whole, field)), field


def test_the_unit_of_a_kind_is_that_of_its_last_block() -> None:
    assert last_unit(parse_policy("uniform-3"), (0, 1, 1, 0, 1, 1, 0), 1, (7,)) == (0, 1, 1)
    assert last_unit(parse_policy("uniform-3"), (0, 1, 1, 0, 1, 1, 0), 0, (7,)) == (0,)
    assert last_unit(parse_policy("every-2"), (0, 1, 0, 1), 0, (4,)) == ()
    assert last_unit(parse_policy("every-2"), (0, 1, 0, 1), 1, (4,)) == (1,)


# -------------------------------------------------------------------------------------------------- stages and seconds


@pytest.mark.parametrize(("stages", "schedule", "chunks"), [(2, "1f1b", 1), (4, "1f1b", 1), (4, "interleaved", 3),
                                                            (4, "zb-v", 2), (8, "interleaved", 2)])  # fmt: skip
@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b", "gemma-3-1b"])
def test_each_stage_holds_the_kinds_of_its_own_blocks(name: str, stages: int, schedule: str, chunks: int) -> None:
    model, parts = catalog.model(name), stages * chunks
    shared = SharedSettings(framework="fsdp2", seq_len=512, global_batch=stages)
    layout = Layout(pp=stages, schedule=schedule, vpp=chunks)
    grid = Grid(shared, (layout,), ("bf16",), ("none",), (3,), ((),), (1,), every_stage=True)
    sizes = [model.num_layers // parts + (part < model.num_layers % parts) for part in range(parts)]
    ends = list(accumulate(sizes, initial=0))
    held: list[list[int]] = [[] for _ in range(stages)]
    for part in range(parts):
        turn, place = divmod(part, stages)
        stage = stages - 1 - place if schedule == "zb-v" and turn % 2 else place
        held[stage] += model.sequence[ends[part] : ends[part + 1]]
    census = ModelOnGrid(model, grid)
    rows = [census.rows.distinct[index] for index in census.rows.index.ravel()]
    assert [list(row) for row in rows] == held
    for index, layers in enumerate(census.layers):
        assert layers.ravel().tolist() == [row.count(index) for row in held]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b"])
def test_seconds_are_those_of_the_blocks_that_have_a_window_and_of_those_that_have_none(name: str) -> None:
    """Between all blocks with a window and none, by the share of each."""
    model, gpu = catalog.model(name), catalog.gpu("h100")
    shared = SharedSettings(framework="fsdp2", seq_len=32768, global_batch=8, attention="flash")
    grid = Grid(shared, (Layout(dp=8),), ("bf16-mixed",), ("full",), (3,), ((),), (1,))

    def seconds(which: tuple[int, ...]) -> float:
        groups = (model.groups[which[0]].model_copy(update={"count": model.num_layers}),)
        one = model if len(which) > 1 else model.model_copy(update={"groups": groups, "order": ()})
        return float(np.max(costs_of(one, grid, gpu, catalog.node_for(gpu)).times.compute))

    share = model.groups[1].count / model.num_layers
    assert seconds((0, 1)) == pytest.approx((1 - share) * seconds((0,)) + share * seconds((1,)), rel=1e-3)
    assert seconds((0,)) < 0.98 * seconds((0, 1))


ALTERNATING = {
    "n_layers": 10, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 512, "max_positions": 4096, "window": 128,
}  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full", "every-2", "every-3", "uniform-2", "block-4"])
@pytest.mark.parametrize(
    "pattern",
    [
        {"full_every": 2},
        {"full_every": 3},
        {"full_layers": [0, 4]},
        {"moe": {"experts": 4, "topk": 2, "ffn": 1024, "dense_layers": [0, 2, 4, 6, 8]}},
    ],
)
@pytest.mark.parametrize("framework", ["fsdp2", "ddp"])
def test_the_peak_is_that_of_the_step_allocation_by_allocation(
    framework: str, pattern: dict[str, Any], recompute: str
) -> None:
    """The closed form of phases against a replay of one step, in which each block runs where it stands."""
    model = from_flat({**ALTERNATING, **pattern})
    shared = SharedSettings(framework=framework, seq_len=2048, global_batch=16, attention="eager")
    precision, zero = ("bf16-mixed", 3) if framework == "fsdp2" else ("bf16-autocast", 0)
    grid = Grid(shared, (Layout(dp=8),), (precision,), (recompute,), (zero,), ((),), (2,))
    census = ModelOnGrid(model, grid)
    gpu = catalog.gpu("h100")
    ledger = build_ledger(census, overhead_of(gpu, grid, grid.layouts[0]).workspaces)
    closed = int(ledger.peak().reshape(-1)[0])
    played = replay(list(step_events(census, ledger, 0))).peak_allocated
    assert -0.02 < closed / played - 1 < 0.05


@pytest.mark.parametrize("recompute", ["none", "full", "every-2", "every-3", "uniform-2", "block-4"])
@pytest.mark.parametrize("pattern", [{}, {"full_every": 2}, {"full_every": 3}, {"full_layers": [0, 4]}])
@pytest.mark.parametrize("framework", ["fsdp2", "ddp"])
def test_offloaded_blocks_are_on_the_host_in_each_phase(
    framework: str, pattern: dict[str, Any], recompute: str
) -> None:
    """The same replay where a block's saved tensors leave while the next one runs: those before the first are away."""
    model = from_flat({**ALTERNATING, **pattern})
    shared = SharedSettings(framework=framework, seq_len=2048, global_batch=16, attention="eager")
    precision, zero = ("bf16-mixed", 3) if framework == "fsdp2" else ("bf16-autocast", 0)
    grid = Grid(shared, (Layout(dp=8),), (precision,), (recompute,), (zero,), (("activations",),), (2,))
    census = ModelOnGrid(model, grid)
    gpu = catalog.gpu("h100")
    ledger = build_ledger(census, overhead_of(gpu, grid, grid.layouts[0]).workspaces)
    closed = int(ledger.peak().reshape(-1)[0])
    assert closed == pytest.approx(replay(list(step_events(census, ledger, 0))).peak_allocated, rel=0.021)


def test_gemma_4_with_activations_on_the_host_needs_no_room_for_all_its_blocks() -> None:
    """Axolotl's README has 25.2 GiB for QLoRA of the 31B; its sixty blocks keep 49 GiB, which are in host memory."""
    job: dict[str, Any] = {
        "model": "gemma-4-31b", "gpu": "h100", "framework": "hf", "seq_len": 2048, "micro_batch": 1, "global_batch": 4,
        "lora": "16:q,k,v,o,gate,up,down", "quantize": "nf4-dq", "zero": 0, "recompute": "none", "attention": "sdpa",
        "loss": "fused-linear", "optimizer": "adamw-8bit", "precision": "bf16", "autocast": True,
    }  # fmt: skip
    away, here = memcalc.estimate(**job, offload="activations"), memcalc.estimate(**job)
    kept = sum(term.bytes for term in away.off_gpu if term.name == "kept by blocks")
    assert kept > 45 * 2**30
    for phase in ("forward", "backward-last", "backward-first"):
        assert here.phases[phase] - away.phases[phase] > 0.9 * kept
    assert max(away.phases.values()) < 25.2 * 2**30


def test_megatrons_flags_list_the_routed_layers_and_have_none_for_sinks() -> None:
    experts = {"experts": 8, "topk": 2, "ffn": 64, "dense_layers": [1, 3]}
    turns = from_flat({**ALTERNATING, "n_layers": 4, "window": None, "moe": experts})
    words = {"gpu": "h100", "gpus": 8, "framework": "megatron", "seq_len": 512}
    job = ConfigJob.of(memcalc.estimate(model="qwen1.5-moe-a2.7b", **words), turns)
    assert model_flags(job, turns)["moe_layer_freq"] == "[1,0,1,0]"
    with pytest.raises(InputError, match="without sinks"):
        model_flags(job, catalog.model("gpt-oss-20b"))


def test_a_window_under_fused_kernels_is_a_mask() -> None:
    """Liger replaces no attention: PyTorch's kernel gets the window as a mask, and keeps no scores."""
    job: dict[str, Any] = {"model": "mistral-7b-v0.1", "gpu": "h200", "gpus": 8, "seq_len": 8192}
    ours, fused = (memcalc.estimate(**job, kernels=kernels) for kernels in ("model", "fused"))
    assert fused.strategy.attention == ours.strategy.attention == "efficient"
    scores = 32 * 32 * 8192 * 8192 * 2  # blocks x heads x tokens x tokens x bytes
    assert fused.components.activations < min(ours.components.activations, scores // 2)


MODELS_OF_CHUNKS = {"llama-3-8b": {"pp": 4, "vpp": 8}, "deepseek-v2": {"pp": 4, "vpp": 15, "ep": 2}}
"""Each with as many chunks as blocks: 32 equal ones, 60 of which the first is dense."""


@pytest.mark.parametrize("model", MODELS_OF_CHUNKS)
def test_units_of_megatron_end_with_a_model_chunk(model: str) -> None:
    """In chunks of one block a checkpoint for each four is one for each.

    Its loop is over the layers of one ``TransformerBlock`` (d98e8a64 core/recompute.py), of which a chunk is one.
    """
    job = {"model": model, "gpu": "h100", "gpus": 8, "framework": "megatron", "seq_len": 2048, "global_batch": 64,
           "micro_batch": 1, "pp_schedule": "interleaved", "advice": False, **MODELS_OF_CHUNKS[model]}  # fmt: skip
    full = memcalc.estimate(**job, recompute="full")
    units = memcalc.estimate(**job, recompute="uniform-4")
    assert (units.peak.allocated, units.peak.reserved) == (full.peak.allocated, full.peak.reserved)
    assert units.time is not None
    assert full.time is not None
    assert units.time.step == full.time.step


def test_a_search_has_no_units_larger_than_a_model_chunk() -> None:
    """Of 80 blocks on 8 stages of 10 chunks each is one: `uniform-4` was listed, as 4 blocks per checkpoint."""
    answer = memcalc.plan(model="llama-3-70b", gpu="h100", gpus=64, framework="megatron", seq_len=8192, tp=8, cp=1,
                          global_batch=128, pp=8, pp_schedule="interleaved", vpp="5/10", rank_all=True, top=40,
                          offload="none", advice=False)  # fmt: skip
    sizes = {(plan.strategy.vpp, plan.strategy.recompute) for plan in answer.plans}
    assert (5, "uniform-2") in sizes
    assert not {(5, "uniform-4"), (10, "uniform-2"), (10, "uniform-4")} & sizes
