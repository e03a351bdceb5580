"""DeepSpeed's ZeRO and pipeline engine, against its own estimators and the sizes that its sources allocate.

Sources: deepspeedai/DeepSpeed v0.3.16, v0.5.10, v0.12.3 and edaa722; Megatron-DeepSpeed 541b967.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.events import step_events
from memcalc.frameworks import habits_of
from memcalc.grid import Grid, Layout
from memcalc.ledger import Ledger
from memcalc.runs import read_runs
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.options import SharedSettings
from memcalc.terms.build import build_ledger
from memcalc.terms.host import off_gpu_terms
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces
from memcalc.terms.zero import is_flat, steps_at_start
from memcalc.validation import Presets, figures_of, predict

LAYERS, HIDDEN, HEADS, FFN, VOCAB, LENGTH = 12, 1024, 16, 4096, 32768, 2048
BLOCK = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN + 2 * HIDDEN
"""Four attention matrices, two of the MLP, and the scales of two norms."""
PARAMETERS = LAYERS * BLOCK + VOCAB * HIDDEN + HIDDEN
RANKS = 8
HALF_BUCKET = 100_000_000
NO_WORKSPACES = Workspaces(0, 0)


def model() -> Model:
    """Return a model whose parameters can be counted by hand."""
    return from_flat(
        {
            "name": "counted", "family": "custom", "n_layers": LAYERS, "hidden": HIDDEN, "heads": HEADS,
            "kv_heads": HEADS, "ffn": FFN, "vocab": VOCAB, "gated": False, "norm": "rmsnorm", "tied": True,
            "positions": "none", "max_positions": LENGTH,
        }
    )  # fmt: skip


def grid(zero: int, framework: str = "deepspeed", **changes: Any) -> Grid:
    """Return one strategy of eight ranks; further fields by name."""
    axes: dict[str, Any] = {
        "layouts": (changes.pop("layout", Layout(dp=RANKS)),),
        "precisions": (changes.pop("precision", "fp16-mixed"),),
        "recomputes": (changes.pop("recompute", "full"),),
        "zeros": (zero,),
        "offloads": (changes.pop("offload", ()),),
        "micro_batches": (changes.pop("micro_batch", 1),),
    }
    batch = changes.pop("global_batch", 64)
    fixed = {"optimizer_impl": "fused", "kernels": "model", **changes}
    return Grid(
        SharedSettings(framework=framework, seq_len=LENGTH, global_batch=batch, **fixed), **axes, every_stage=True
    )


def ledger(*arguments: Any, **changes: Any) -> Ledger:
    """Return the ledger of one strategy, without the libraries' workspaces."""
    return build_ledger(ModelOnGrid(model(), grid(*arguments, **changes)), NO_WORKSPACES)


def amount(book: Ledger, phase: str, *words: str, stage: int = 0) -> int:
    """Return the bytes of the terms whose names hold one of the words, in a phase."""
    found = [t for t in (*book.terms, *book.holes) if phase in t.phases and any(word in t.name for word in words)]
    return sum(int(np.asarray(t.bytes).reshape(-1)[min(stage, np.asarray(t.bytes).size - 1)]) for t in found)


STATES = ("weights", "master", "moments", "gradients that the step reads", "fp32 copy of the gradients")


def states(book: Ledger) -> int:
    """Return what DeepSpeed's estimators count: weights, gradients in both widths, and the optimizer's states."""
    return amount(book, "step", *STATES)


def zero2(parameters: int, gpus: int) -> int:
    """GPU bytes by ``estimate_zero2_model_states_mem_needs`` (edaa722), nothing offloaded."""
    return 2 * parameters + 18 * parameters // gpus


def zero3(parameters: int, gpus: int) -> int:
    """GPU bytes by ``estimate_zero3_model_states_mem_needs`` (edaa722), the largest layer left out."""
    return 18 * parameters // gpus


@pytest.mark.parametrize("stage", [1, 2])
def test_states_are_those_of_the_estimator(stage: int) -> None:
    assert states(ledger(stage)) == pytest.approx(zero2(PARAMETERS, RANKS), abs=64 * RANKS)


def test_states_of_stage_3_are_those_of_the_estimator() -> None:
    """It counts 16-bit weights, fp32 gradients, master weights and moments, but no 16-bit gradients."""
    book = ledger(3)
    narrow = amount(book, "step", "gradients that the step reads")
    assert states(book) - narrow == pytest.approx(zero3(PARAMETERS, RANKS), abs=64 * RANKS)
    assert narrow == pytest.approx(2 * PARAMETERS / RANKS, abs=64)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4), ("bf16-autocast", 4)])
def test_zero_updates_a_copy_of_weights_as_wide(stage: int, precision: str, width: int) -> None:
    """0.19.8: stage_1_and_2.py clones each partition; stage3.py shares it where a device equals its name: never."""
    book = ledger(stage, precision=precision)
    assert amount(book, "step", "master weights") == pytest.approx(width * PARAMETERS / RANKS, abs=64)


def test_without_zero_weights_as_wide_are_updated_themselves() -> None:
    assert amount(ledger(0, precision="fp32"), "step", "master weights") == 0


@pytest.mark.parametrize(
    ("precision", "kept", "peak", "within"), [("bf16-mixed", 25.74, 31.38, 0.005), ("bf16", 16.17, 18.93, 0.05)]
)
def test_a_published_run_with_narrow_states(precision: str, kept: float, peak: float, within: float) -> None:
    """memory_allocated() and its maximum on 4 H100: DeepSpeedExamples, training/bf16_master_weight/README.md."""
    run = next(run for run in read_runs().run if run.id == f"dsbf16-{precision}")
    assert run.measured.allocated == round(peak * 2**30)
    found = predict(run, Presets((), "none"))
    assert found.phases["backward-end"] / 2**30 == pytest.approx(kept, rel=0.005)
    assert found.peak.allocated / 2**30 == pytest.approx(peak, rel=within)


def test_the_host_has_what_the_estimators_say() -> None:
    """``estimate_zero2`` and ``estimate_zero3`` (edaa722): 16 and 18 bytes a parameter, shared by a node's ranks.

    They count no buffers, and no 16-bit gradients (:mod:`tests.test_offload` has those).
    """
    counted = {"fp32 master weights", "adamw moments", "fp32 gradients of the optimizer", "weights"}
    for stage, offload, each in ((2, ("optimizer",), 16), (3, ("optimizer", "params"), 18)):
        terms = off_gpu_terms(ModelOnGrid(model(), grid(stage, offload=offload)))
        held = sum(int(np.max(term.bytes)) for term in terms if term.name in counted)
        assert held * RANKS == pytest.approx(each * PARAMETERS, rel=1e-3)


def test_offloaded_states_leave_no_gradients_for_the_step() -> None:
    book = ledger(2, offload=("optimizer",))
    assert states(book) == 2 * PARAMETERS
    assert amount(book, "step", "on its way to the host") == 2 * VOCAB * HIDDEN


def test_stage_1_holds_all_gradients_until_they_are_reduced() -> None:
    book = ledger(1)
    assert amount(book, "backward-end", "gradients") == 2 * PARAMETERS
    assert amount(book, "step", "flattened gradients") == pytest.approx(2 * PARAMETERS / RANKS, abs=64)


def test_stage_0_copies_all_gradients_twice() -> None:
    """``FP16_Optimizer.step``: a list of fp32 copies, which are then flattened: 2 + 2 + 12 + 4 + 4 bytes."""
    assert amount(ledger(0), "step", *STATES, "flattened gradients") == 24 * PARAMETERS


def test_stage_3_copies_one_sub_group_at_a_time() -> None:
    group = 1_000_000
    book = ledger(3, sub_group_size=group)
    copies = amount(book, "step", "flattened gradients", "fp32 copy")
    assert 6 * group <= copies < 6 * (group + VOCAB * HIDDEN)  # the tensor that fills a group is the last of it


def test_the_norm_reads_one_gradient_in_fp64() -> None:
    """``g.data.double().norm(2)``: 8 bytes of the largest tensor, where that is more than the copies made later."""
    ranks = 64
    book = ledger(2, layout=Layout(dp=ranks))
    share = -(-PARAMETERS // ranks)
    step = amount(book, "step", "flattened gradients", "fp32 copy", "fp64 copy")
    assert step == 8 * min(VOCAB * HIDDEN, share)


def buckets(stage: int, framework: str, **changes: Any) -> int:
    return amount(ledger(stage, framework, **changes), "backward-first", "contiguous gradient buckets")


def test_buckets_are_allocated_whole() -> None:
    default = 2 * 500_000_000
    assert buckets(2, "deepspeed") == default
    assert buckets(3, "deepspeed") == default
    assert buckets(2, "deepspeed", overlap_comm=True) == 2 * default
    assert buckets(3, "deepspeed", overlap_comm=True) == default
    assert buckets(2, "deepspeed", reduce_bucket_size=HIDDEN * HIDDEN) == 2 * HIDDEN * HIDDEN


def test_stage_1_has_contiguous_gradients_since_0_13() -> None:
    """deepspeedai/DeepSpeed#4887; with an offloaded optimizer in every version."""
    assert buckets(1, "deepspeed@0.13") == 2 * 500_000_000
    assert buckets(1, "deepspeed@0.12") == 0
    assert buckets(1, "deepspeed@0.12", offload=("optimizer",)) == 2 * 500_000_000


def test_a_bucket_comes_with_the_first_gradient_since_0_18_3() -> None:
    """v0.18.2 calls ``setup_buckets`` (then ``backward_prologue``) before backward, v0.18.3 in a gradient's hook."""
    for framework, beside in (("deepspeed@0.18.2", 2 * 500_000_000), ("deepspeed", 0)):
        for stage in (1, 2):
            assert amount(ledger(stage, framework), "loss", "contiguous gradient buckets") == beside
            assert buckets(stage, framework) == 2 * 500_000_000
        assert amount(ledger(3, framework), "loss", "contiguous gradient buckets") == 2 * 500_000_000


def predicted(name: str) -> Any:
    """Return the figures of one measured run on an H200."""
    run = next(run for run in read_runs().run if run.id == f"trainers-h200/{name}")
    return figures_of(run, predict(run, Presets((), "none")))


@pytest.mark.parametrize(
    ("run", "allocated"), [("ds2-qwen05b-4x2048", 33_266_843_648), ("ds2-offload-qwen05b-4x2048", 27_611_078_656)]
)
def test_no_bucket_stands_beside_logits_on_an_h200(run: str, allocated: int) -> None:
    """DeepSpeed 0.19.8 on an H200, whose bucket is 1,000,000,000 bytes: 3% above its peak if it stood there."""
    assert predicted(run)["allocated"] == pytest.approx(allocated, rel=0.0005)


@pytest.mark.parametrize(
    ("run", "reserved"),
    [
        ("ds1-llama1b-gc-2x2048", 31_765_561_344), ("ds2-qwen05b-4x2048", 41_823_502_336),
        ("ds2-offload-qwen05b-4x2048", 35_131_490_304), ("ds3-llama1b-gc-2x2048", 34_758_197_248),
    ],
)  # fmt: skip
def test_flat_states_reserve_what_they_did_on_an_h200(run: str, reserved: int) -> None:
    """DeepSpeed 0.19.8; a tensor for each weight fits in what activations leave, and is 11 to 14% short of it."""
    assert predicted(run)["reserved"] == pytest.approx(reserved, rel=0.002)


STARTED = {1: [2357, 4714, 4714], 3: [2357, 3826, 3826, 888, 888, 3826, 954, 2357]}
"""MiB of what the engine of 0.19.8 requests once weights are flat (Llama 3.2 1B), in order, as the H200's allocator
recorded it: weights, masters, zeros; at stage 3 masters by way of copies, and bucket and gradients."""
STEPPED = {1: [2357, 2357, 4714, 4714, 4714], 3: [1913, 3826, 3826, 3826, 888, 888]}
"""And in its first step: gradients, their flat copy, that in fp32, moments of one sub-group after another."""


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engine_requests_what_it_did_on_an_h200(stage: int) -> None:
    single = memcalc.api.single(
        model="llama-3.2-1b", gpu="h200", gpus=1, framework="deepspeed", zero=stage, precision="bf16-mixed",
        recompute="full", micro_batch=2, global_batch=2, seq_len=2048, settings={"strategy.optimizer_impl": "fused"},
    )  # fmt: skip
    census = ModelOnGrid(single.job.model, single.grid)
    requests: dict[str, list[int]] = {}
    mark = ""
    for kind, _, size, _, name in step_events(census, build_ledger(census, NO_WORKSPACES), 0):
        mark = name if kind == "mark" else mark
        if kind == "mark" and name in requests:
            break
        if kind == "alloc" and size > 800 << 20:
            requests.setdefault(mark, []).append(round(size / 2**20))
    assert requests["start"] == STARTED[stage]
    assert requests["step"] == STEPPED[stage]


def test_when_moments_appear() -> None:
    """``initialize_optimizer_states`` steps until 0.13.1, in the wrappers of fp16 to this day, BF16_Optimizer's not."""
    for framework, stage, precision, early in (
        ("deepspeed@0.12", 1, "fp16-mixed", True), ("deepspeed@0.12", 3, "fp16-mixed", True),
        ("deepspeed@0.12", 0, "bf16-mixed", True), ("deepspeed@0.17", 1, "fp16-mixed", False),
        ("deepspeed@0.17", 0, "bf16-mixed", False), ("deepspeed@0.17", 0, "fp16-mixed", True),
        ("deepspeed", 3, "bf16-mixed", False), ("deepspeed", 0, "bf16-mixed", True), ("deepspeed", 0, "fp32", False),
    ):  # fmt: skip
        assert bool(np.all(steps_at_start(grid(stage, framework, precision=precision)))) is early


def test_which_states_are_flat() -> None:
    """``FP16_UnfusedOptimizer`` and torch's own have a tensor a weight, and so has, nearly, stage 1 of 0.3."""
    assert np.all(is_flat(grid(0)))
    assert not np.any(is_flat(grid(0, optimizer_impl="loop")))
    assert not np.any(is_flat(grid(0, precision="fp32")))
    assert np.all(is_flat(grid(0, "deepspeed@0.17", precision="bf16-mixed", optimizer_impl="loop")))
    assert [bool(np.all(is_flat(grid(stage, "deepspeed@0.3")))) for stage in (1, 2)] == [False, True]


def test_no_buckets_overlap_in_a_pipeline() -> None:
    layout = Layout(dp=4, pp=2)
    assert buckets(1, "deepspeed", layout=layout, overlap_comm=True) == 2 * 500_000_000


def test_without_contiguous_gradients_a_bucket_is_flattened() -> None:
    book = ledger(1, "deepspeed@0.5", reduce_bucket_size=HALF_BUCKET)
    assert amount(book, "backward-end", "flattened bucket") == 2 * HALF_BUCKET
    book = ledger(1, "deepspeed@0.5")
    assert amount(book, "backward-end", "flattened bucket") == 2 * PARAMETERS


def test_until_0_3_stage_1_copies_all_gradients() -> None:
    assert amount(ledger(1, "deepspeed@0.3"), "backward-end", "flat copy of all") == 2 * PARAMETERS
    assert amount(ledger(1, "deepspeed@0.4"), "backward-end", "flat copy of all") == 0


def test_stage_2_adds_a_new_share_to_the_old_one() -> None:
    share = -(-PARAMETERS // RANKS)
    several, one = ledger(2, global_batch=64), ledger(2, global_batch=RANKS)
    assert amount(several, "backward-first", "share of the gradients") == 2 * share
    assert amount(one, "backward-first", "share of the gradients") == 0


def test_the_share_of_the_gradients_is_allocated_whole() -> None:
    """``grads_in_partition = torch.empty(total_size)`` with the first gradient that is reduced."""
    share = -(-PARAMETERS // RANKS)
    book = ledger(2, global_batch=RANKS)
    assert int(np.max(book.component("gradients", "backward-last"))) == pytest.approx(2 * share, abs=64)


def test_partitioned_checkpoints() -> None:
    """``partition_activations``: each of t ranks keeps 1 / t of a block's input, and gathers it for its backward."""
    whole, parts = (
        ledger(1, "deepspeed@0.5", layout=Layout(dp=2, tp=4), partition_activations=on) for on in (False, True)
    )
    assert amount(whole, "forward", "block input") == LAYERS * HIDDEN_STATES
    assert amount(parts, "forward", "block input", "checkpoint's input") == LAYERS * HIDDEN_STATES // 4
    first = [amount(book, "backward-first", "first block") for book in (whole, parts)]
    assert first[1] - first[0] == HIDDEN_STATES // 4


def test_bf16_gradients_in_fp32() -> None:
    """``BF16_Optimizer``: whole at stage 1, which then makes no copies; a share from stage 2 on."""
    asked = {"precision": "bf16-mixed", "grad_accum_dtype": "fp32"}
    first, second = ledger(1, **asked), ledger(2, **asked)
    assert amount(first, "forward", "gradients in fp32") == 4 * PARAMETERS
    assert amount(first, "step", "flattened gradients", "fp32 copy") == 0
    share = -(-PARAMETERS // RANKS)
    assert amount(second, "forward", "in fp32") == 2 * share
    assert amount(second, "step", "flattened gradients", "fp32 copy") == 4 * share
    assert amount(ledger(1, "deepspeed@0.5", **asked), "forward", "in fp32") == 0


def test_stage_3_gathers_a_block_and_the_prefetch() -> None:
    ahead = 1_000_000
    small = 2 * HIDDEN * LAYERS
    book = ledger(3, zero_prefetch_bucket=ahead)
    assert amount(book, "backward-first", "gathered block") == 2 * (BLOCK + ahead)
    assert amount(book, "step", "stay whole") == 2 * small
    assert amount(ledger(3, zero_prefetch_bucket=ahead, max_live_parameters=0), "backward-first", "gathered block") == (
        2 * BLOCK
    )
    assert amount(ledger(3, persistence_threshold=HIDDEN), "step", "stay whole") == 0


def test_stage_3_keeps_what_it_uses_again_soon() -> None:
    """The whole model is used again within 10^9 elements, so that at the loss all of it is gathered."""
    book = ledger(3)
    assert amount(book, "loss", "gathered", "stay whole") == 2 * PARAMETERS
    assert amount(ledger(2), "loss", "gathered", "stay whole") == 0


def test_the_printed_formula_of_gathered_weights_gives_their_bytes() -> None:
    """Each symbol has its value, the prefetch among them, and norms stay whole on every rank already."""
    for changes in ({}, {"zero_prefetch_bucket": 1_000_000}, {"offload": ("optimizer", "params")}):
        terms = [term for term in ledger(3, **changes).terms if term.name.startswith("gathered")]
        assert len(terms) == 3
        for term in terms:
            values = {name: int(np.max(value)) for name, value in term.inputs.items()}
            text = term.formula.replace(" · ", " * ")
            assert eval(text, {"min": min, "max": max}, values) == int(np.max(term.bytes)), term.formula  # noqa: S307


def test_one_rank_gathers_nothing() -> None:
    """``_no_gather_coalesced`` (v0.12.3 partition_parameters.py): the weight is a view of its only partition."""
    alone = Layout(dp=1)
    assert amount(ledger(3, layout=alone), "loss", "gathered", "stay whole") == 0
    assert amount(ledger(3, layout=alone, offload=("optimizer", "params")), "loss", "gathered") > 0


def test_stage_3_has_one_buffer_for_its_gradients() -> None:
    book = ledger(3, global_batch=RANKS)
    share = -(-PARAMETERS // RANKS)
    for phase in ("forward-last", "forward", "loss", "backward-last", "backward-first", "backward-end"):
        assert int(np.max(book.component("gradients", phase))) == pytest.approx(2 * share, abs=64)


def test_what_is_contiguous_stands_in_segments_of_its_own() -> None:
    """The flat gradients of a bucket, and the fp32 gradients of a shard or the flat output of an all-gather."""
    book = ledger(1, "deepspeed@0.5", layout=Layout(dp=2))
    assert amount(book, "backward-last", "segments") == 2 * PARAMETERS + 4 * (PARAMETERS // 2)
    assert amount(book, "step", "segments") == 0
    assert int(np.max(book.reserved())) > int(np.max(book.peak()))


HIDDEN_STATES = 2 * LENGTH * HIDDEN


def test_the_engine_keeps_inputs_and_outputs_of_a_stage() -> None:
    """Without TP the received tensor stands beside the copy that the blocks read; outputs wait for their backward."""
    book = ledger(1, "deepspeed@0.5", layout=Layout(dp=2, pp=4))
    flight = (4, 3, 2, 1)
    received = [amount(book, "forward", "received inputs", stage=s) for s in range(4)]
    assert received == [0, *(n * HIDDEN_STATES for n in flight[1:])]
    outputs = [amount(book, "forward", "outputs of the stage", stage=s) for s in range(4)]
    assert outputs == [*(n * HIDDEN_STATES for n in flight[:-1]), 0]


def test_with_tp_outputs_are_kept_in_parts() -> None:
    book = ledger(1, "deepspeed@0.5", layout=Layout(dp=1, tp=2, pp=4))
    assert amount(book, "forward", "received inputs", stage=1) == 0
    assert amount(book, "forward", "outputs of the stage", stage=1) == 3 * HIDDEN_STATES // 2
    assert amount(book, "backward-first", "gathered again", stage=1) == HIDDEN_STATES


@pytest.mark.parametrize(("batches", "forward", "loss", "step"), [(1, 0, 0, 1), (2, 1, 1, 2), (8, 2, 1, 2)])
def test_the_last_stage_keeps_logits_of_two_micro_batches(batches: int, forward: int, loss: int, step: int) -> None:
    """``pipe_buffers['outputs']`` has two slots, and nobody clears them on the last stage."""
    for tp in (1, 2):
        layout = Layout(dp=1, tp=tp, pp=2)
        book = ledger(1, "deepspeed@0.5", layout=layout, global_batch=batches)
        logits = 4 * LENGTH * VOCAB // tp
        kept = ("logits of earlier", "logits of the micro-batch", "logits of this")
        for phase, slots in (("forward", forward), ("loss", loss), ("backward-first", step), ("step", step)):
            assert amount(book, phase, *kept, stage=1) == slots * logits
            assert amount(book, phase, *kept, stage=0) == 0


def test_the_engine_runs_pipelines_alone_since_transformers_models_are_trained() -> None:
    assert amount(ledger(1), "step", "logits of this") == 0
    assert amount(ledger(1, layout=Layout(dp=4, pp=2)), "step", "logits of this", stage=1) > 0
    assert amount(ledger(1, "deepspeed@0.5"), "step", "logits of this") == 2 * 4 * LENGTH * VOCAB


def test_logits_of_the_pipeline() -> None:
    """``float16_to_fp32`` frees the 16-bit logits; exponential and gradient are computed in place: 4 + 2 bytes."""
    book = ledger(1, "deepspeed@0.5")
    held = amount(book, "loss", "logits and their gradients")
    assert 6 * LENGTH * VOCAB <= held <= 6 * LENGTH * VOCAB + 6 * HIDDEN_STATES


def test_eras_by_version_and_by_month() -> None:
    assert habits_of("deepspeed@2023-12") is habits_of("deepspeed@0.12")
    assert habits_of("deepspeed@2021-11") is habits_of("deepspeed@0.5")
    assert habits_of("deepspeed") is habits_of("deepspeed@2026-01") is habits_of("deepspeed@0.18.3")
    assert habits_of("deepspeed@0.18.2") is habits_of("deepspeed@2025-10")
    assert habits_of("deepspeed@0.17") is habits_of("deepspeed@2025-06")
    assert habits_of("deepspeed@0.16") is habits_of("deepspeed@2025-01")


def estimate(**words: Any) -> Any:
    given = {"model": "gpt3-1.3b", "gpu": "a100-80g", "gpus": 8, "framework": "deepspeed", "global_batch": 64, **words}
    return memcalc.estimate(**given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"cp": 2, "pp": 2, "zero": 1}, "pp 2: not modelled beside --cp 2"),
        ({"tp": 2, "sp": True}, "sequence parallelism"),
        ({"pp": 2, "zero": 2}, "stages 0 and 1"),
        ({"pp": 2, "pp_schedule": "gpipe"}, "1f1b"),
    ],
)
def test_what_deepspeed_lacks_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        estimate(**words)


def test_a_pipeline_takes_stage_1_by_default() -> None:
    seen = estimate(pp=2, tp=2, attention="eager").strategy
    assert (seen.zero, seen.sp) == (1, False)
    assert estimate().strategy.zero == 3


def test_all_kernels_are_loaded_before_cuda_11_7() -> None:
    """1.78 GiB on an A100 with torch 1.10.2, 0.47 GiB since (stas00/ml-engineering)."""
    old, new = (estimate(framework=f"deepspeed@{era}", zero=1).budget.context for era in ("0.5", "0.13"))
    assert old / 2**30 == pytest.approx(1.78, abs=0.01)
    assert new / 2**30 == pytest.approx(0.47, abs=0.01)


def test_stage_3_steps_one_sub_group_at_a_time() -> None:
    """runtime/zero/stage3.py, _optimizer_step: a multi-tensor AdamW keeps a denominator of one sub-group in fp32."""
    words = {"model": "llama-2-70b", "gpu": "h200", "gpus": 8, "framework": "deepspeed", "zero": 3,
             "optimizer_impl": "foreach", "recompute": "full"}  # fmt: skip
    sizes = {
        elements: next(
            term.bytes
            for term in memcalc.estimate(**words, settings={"strategy.sub_group_size": elements}).terms
            if term.name == "temporaries of the step"
        )
        for elements in (10**9, 5 * 10**8)
    }
    for elements, size in sizes.items():
        assert 4 * elements <= size < 4 * (elements + 8192 * 32000 // 8)  # and one tensor's share, the head's at most


ULYSSES: dict[str, Any] = {
    "model": "qwen3-4b", "gpu": "h100", "gpus": 4, "framework": "deepspeed", "zero": 3, "global_batch": 8,
    "recompute": "full", "loss": "standard",
}  # fmt: skip


@pytest.mark.parametrize(("tokens", "measured"), [(8192, 23.4), (32768, 35.0), (65536, 50.5), (98304, 66.0)])
def test_ranks_that_share_a_sequence_take_what_was_measured(tokens: int, measured: float) -> None:
    """huggingface/blog ulysses-sp.md (March 2026): GiB of Qwen3-4B by ZeRO-3 with SP 4, whose states are on the GPUs.

    It says that the optimizer was offloaded; 76.4 GiB on one GPU are 16 bytes a parameter and the logits.
    """
    answer = memcalc.estimate(**ULYSSES, cp=4, seq_len=tokens)
    assert answer.peak.allocated / 2**30 == pytest.approx(measured, rel=0.08)


def test_a_sequence_that_ran_out_beside_ulysses_does_not_fit() -> None:
    """The same: 131,072 tokens ran out of 80 GB; on one GPU 8,192 tokens took 76.4 GiB."""
    assert memcalc.estimate(**ULYSSES, cp=4, seq_len=131072).verdict == "does-not-fit"
    alone = memcalc.estimate(**{**ULYSSES, "gpus": 1}, seq_len=8192)
    assert alone.peak.allocated / 2**30 == pytest.approx(76.4, rel=0.002)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": "qwen2.5-7b", "gpus": 8, "cp": 8}, "must divide the 28 of qwen2.5-7b"),
        ({"cp": 4, "cp_kind": "allgather"}, "exchanges the sequence for heads: a2a"),
        ({"cp": 2, "tp": 2}, "not modelled beside --cp 2"),
        ({"cp": 4, "framework": "deepspeed@2025-06"}, "not modelled for deepspeed"),
        ({"model": "qwen2.5-7b", "gpus": 8, "cp": 8, "framework": "fsdp2", "cp_kind": "a2a"}, "must divide the 28"),
    ],
)
def test_what_cannot_share_a_sequence_is_refused(words: dict[str, Any], said: str) -> None:
    """DeepSpeed 0.18.2 runtime/sequence_parallel/ulysses_sp.py: heads divide into the ranks."""
    with pytest.raises(InputError, match=said):
        memcalc.estimate(**{**ULYSSES, **words})
