"""Megatron-LM: tensors, schedules and buffers against sums made by hand from its sources, and against its own logs.

Sources: NVIDIA/Megatron-LM 23e00ed (core 0.14), d98e8a64 (core 0.20) and b4bc51b (2021); TransformerEngine c188b533.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc.errors import CombinationError
from memcalc.formulas.pipeline import in_flight_interleaved
from memcalc.frameworks import habits_of
from memcalc.grid import Grid, Layout
from memcalc.ledger import PHASES
from memcalc.runs import read_runs
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.specs.options import SharedSettings
from memcalc.specs.runs import Run
from memcalc.terms.activations import GroupActivations, groups_of
from memcalc.terms.buffers import dummies
from memcalc.terms.head import with_predictors
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.pipeline import visits
from memcalc.units import MIB
from memcalc.validation import figures_of, predict

T, S = 4096, 4096
LLAMA = {
    "n_layers": 4, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128257, "gated": True,
    "norm": "rmsnorm", "positions": "rope", "max_positions": 131072,
}  # fmt: skip
GPT = {
    "n_layers": 12, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 50257, "gated": False, "norm": "layernorm",
    "bias": {"qkv": True, "o": True, "mlp": True}, "tied": True, "positions": "learned", "max_positions": 1024,
    "dropout": {"attention": 0.1, "block": 0.1, "embedding": 0.1},
}  # fmt: skip
DEEPSEEK = {
    "n_layers": 4, "hidden": 5120, "heads": 128, "ffn": 12288, "vocab": 102401, "gated": True, "norm": "rmsnorm",
    "positions": "rope", "max_positions": 4096,
    "moe": {"experts": 160, "topk": 6, "ffn": 1536, "shared": 2, "first_dense": 1},
    "mla": {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip


def census(model: Model, layout: Layout, micro_batch: int = 1, recompute: str = "none", **fixed: Any) -> ModelOnGrid:
    """Return the census of one strategy."""
    words = {"kernels": "te", "seq_len": S, "global_batch": 64 * layout.dp, "attention": "cudnn", **fixed}
    shared = SharedSettings(framework="megatron", **words)
    return ModelOnGrid(
        model, Grid(shared, (layout,), ("bf16-mixed",), (recompute,), (1,), ((),), (micro_batch,), every_stage=True)
    )


def kept(group: GroupActivations) -> int:
    """Return the bytes that one block keeps."""
    return int(np.max(np.where(group.is_treated == 1, group.treated_block, group.whole_block)))


def dense_by_hand(flat: dict[str, Any], tokens: int, t: int, sp: int, *, statistics: int) -> int:
    """Return the sum of one dense block: two inputs and their norms sharded, what is between divided by TP."""
    h, f = flat["hidden"], flat["ffn"]
    q, k = h, h // flat["heads"] * flat.get("kv_heads", flat["heads"])
    u = 2 * tokens * h // sp
    inner = 2 * tokens * (q + 2 * k) + 2 * tokens * q + 2 * tokens * f * (2 if flat["gated"] else 1) + 2 * tokens * f
    return 4 * u + inner // t + 2 * statistics * 4 * tokens // sp


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True), (4, False), (8, True)])
def test_a_dense_block_keeps_what_its_modules_save(tp: int, sp: bool) -> None:
    group = groups_of(census(from_flat(LLAMA), Layout(tp=tp, sp=sp)))[0]
    logsumexp = 4 * LLAMA["heads"] * T // tp
    assert kept(group) == dense_by_hand(LLAMA, T, tp, tp if sp else 1, statistics=1) + logsumexp


@pytest.mark.parametrize(("attention", "micro_batch"), [*product(["cudnn", "flash", "eager"], [1, 4])])
def test_what_the_attention_kernel_adds(attention: str, micro_batch: int) -> None:
    """FlashAttention 2 copies its output for several sequences; materialised scores keep 5 bytes each with dropout."""
    tokens, heads = 1024 * micro_batch, GPT["heads"]
    group = groups_of(census(from_flat(GPT), Layout(), micro_batch, seq_len=1024, attention=attention))[0]
    masks = 2 * tokens * GPT["hidden"]
    copy = 2 * tokens * GPT["hidden"] * (attention == "flash" and micro_batch > 1)
    square = 5 * heads * tokens * 1024 if attention == "eager" else 4 * heads * tokens
    assert kept(group) == dense_by_hand(GPT, tokens, 1, 1, statistics=2) + masks + copy + square


def test_all_to_all_context_parallelism_keeps_the_output_twice() -> None:
    ring, a2a = (
        kept(groups_of(census(from_flat(LLAMA), Layout(tp=2, sp=True, cp=4), seq_len=32768, cp_kind=kind))[0])
        for kind in ("ring", "a2a")
    )
    assert a2a - ring == 2 * 8192 * LLAMA["hidden"] // 2


def test_full_recomputation_keeps_the_input_alone() -> None:
    group = groups_of(census(from_flat(LLAMA), Layout(tp=4, sp=True), recompute="full"))[0]
    assert kept(group) == 2 * T * LLAMA["hidden"] // 4


def routed_by_hand(flat: dict[str, Any], rows: int) -> int:
    """Return the sum of one block with latent attention and experts, in the order in which its parts run."""
    h, a, mla, moe = flat["hidden"], flat["heads"], flat["mla"], flat["moe"]
    qr, kr, dr = mla["q_lora_rank"], mla["kv_lora_rank"], mla["qk_rope_head_dim"]
    dn, dv, e, k, fm = mla["qk_nope_head_dim"], mla["v_head_dim"], moe["experts"], moe["topk"], moe["ffn"]
    u = 2 * T * h
    latent = 2 * u + 4 * T + 4 * T * qr + 2 * T * (kr + dr) + 2 * T * kr + 8 * T
    attention = 2 * 2 * T * a * (dn + dr) + 2 * 2 * T * a * dv + 4 * a * T
    router = 2 * u + 4 * T + 18 * T * e + 4 * T + 24 * T * k
    return latent + attention + router + 2 * rows * h + 6 * rows * fm + 4 * rows + 6 * T * fm * moe["shared"]


def test_a_block_of_latent_attention_and_experts() -> None:
    rows = 160 * -(-T * 6 // 160)
    group = groups_of(census(from_flat(DEEPSEEK), Layout(dp=4, ep=4, pp=2)))[1]
    assert kept(group) == routed_by_hand(DEEPSEEK, rows)


def test_recomputed_up_projection_drops_queries_keys_and_values() -> None:
    """With them go the normalised latent vectors and their statistics; the latent vectors stay."""
    model, mla, a = from_flat(DEEPSEEK), DEEPSEEK["mla"], DEEPSEEK["heads"]
    plain, again = (
        kept(groups_of(census(model, Layout(dp=4, ep=4), recompute=recompute))[1])
        for recompute in ("none", "modules:mla_up_proj")
    )
    heads = 2 * (mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]) + mla["v_head_dim"]
    assert plain - again == 2 * T * (a * heads + mla["q_lora_rank"] + mla["kv_lora_rank"]) + 8 * T


def test_a_block_that_predicts_further_tokens() -> None:
    """It stands on the last stage, with an embedding, a projection of two hidden states to one, and three norms."""
    model, h = from_flat(LLAMA), LLAMA["hidden"]
    words = {"framework": "megatron", "pp": 2, "gpus": 2, "seq_len": S, "global_batch": 8, "gpu": "b200"}
    layers = [
        [stage.layers for stage in memcalc.estimate(model=model, settings={"strategy.mtp": n}, **words).stages]
        for n in (0, 1)
    ]
    assert layers == [[2, 2], [2, 3]]
    job = census(with_predictors(model, 1), Layout(pp=2), mtp=1)
    plain = census(model, Layout(pp=2))
    block = 2 * h * h + 2 * h * 1024 + 3 * h * LLAMA["ffn"] + 2 * h
    more = np.ravel(job.parameters) - np.ravel(plain.parameters)
    assert more.tolist() == [0, block + 128384 * h + 2 * h * h + 3 * h]


@pytest.mark.parametrize(("ep", "copies", "outputs"), [(4, 4, 2), (160, 3, 2), (1, 1, 3)])
def test_the_forward_of_a_routed_layer_holds_its_locals(ep: int, copies: int, outputs: int) -> None:
    """`MoELayer.forward`: permuted and exchanged tokens, expert output, what comes back; fewer where nothing moves.

    Beside them stand the sums of routed and of shared experts; where nothing comes back, also the sum of both.
    """
    h, rows = DEEPSEEK["hidden"], 160 * -(-T * 6 // 160)
    group = groups_of(census(from_flat(DEEPSEEK), Layout(dp=max(ep, 1), ep=ep)))[1]
    assert int(np.max(group.forward)) == copies * 2 * rows * h + outputs * 2 * T * h


def test_dummy_gradients_are_one_for_each_shape() -> None:
    h, q, k, f = LLAMA["hidden"], 8192, 1024, LLAMA["ffn"]
    vocab = 128384
    assert int(np.max(sum(dummies(census(from_flat(LLAMA), Layout()))))) == (
        h * (q + 2 * k) + q * h + 3 * h * f + vocab * h
    )


def test_shared_experts_as_wide_as_a_routed_one_have_its_dummies() -> None:
    one, two = (
        int(np.max(sum(dummies(census(from_flat({**DEEPSEEK, "moe": {**DEEPSEEK["moe"], "shared": n}}), Layout())))))
        for n in (1, 2)
    )
    assert two - one == 3 * DEEPSEEK["hidden"] * 2 * 1536


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(128257, 1, 128384), (50257, 2, 50432), (50257, 1, 50304)])
def test_the_vocabulary_is_padded(vocab: int, tp: int, padded: int) -> None:
    assert int(np.max(census(from_flat({**LLAMA, "vocab": vocab}), Layout(tp=tp)).vocab)) == padded


def first_forwards(stages: int, stage: int, chunks: int, group: int, m: int) -> list[int]:
    """Return how often each chunk has run forward before the first backward, by walking Megatron's schedule table."""
    table = [c for start in range(0, m, group) for c in range(chunks) for _ in range(min(group, m - start))]
    warmup = min((stages - stage - 1) * 2 + (chunks - 1) * group, m * chunks)
    done = table[: min(warmup + 1, m * chunks)]
    return [done.count(c) for c in range(chunks)]


@pytest.mark.parametrize(("stages", "chunks", "group", "m"), [(4, 8, 0, 4), (4, 3, 0, 8), (4, 3, 5, 10), (4, 2, 0, 8)])
def test_chunks_in_flight(stages: int, chunks: int, group: int, m: int) -> None:
    model = from_flat({**GPT, "n_layers": stages * chunks})
    job = census(model, Layout(pp=stages, schedule="interleaved", vpp=chunks), microbatch_group=group, global_batch=m)
    (moment,) = visits(job.grid)
    for stage in range(stages):
        counted = [int(np.ravel(count)[stage]) for count in moment]
        assert counted == first_forwards(stages, stage, chunks, group or stages, m)
        assert sum(counted) == in_flight_interleaved(stage, stages, m, chunks, group or stages)


def test_embedding_and_loss_take_the_place_of_blocks() -> None:
    """Six blocks, embedding and loss over four stages of two chunks: the last chunk is the loss alone."""
    model = from_flat({**GPT, "n_layers": 6})
    layout = Layout(pp=4, schedule="interleaved", vpp=2)
    job = census(model, layout, embedding_in_split=True, loss_in_split=True)
    chunks = [np.ravel(chunk).tolist() for chunk in job.chunks[0]]
    assert chunks == [[0, 1, 1, 1], [1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("first", "last", "blocks"), [(2, 2, [2, 4, 4, 2]), (0, 3, [3, 3, 3, 3]), (3, 1, [3, 4, 4, 1])]
)
def test_uneven_stages(first: int, last: int, blocks: list[int]) -> None:
    job = census(from_flat(GPT), Layout(pp=4), first_stage_layers=first, last_stage_layers=last)
    assert np.ravel(job.layers[0]).tolist() == blocks


def test_a_stage_cannot_take_all_blocks() -> None:
    with pytest.raises(CombinationError, match="must be at most 3, so that 2 stages have blocks"):
        estimate(pp=2, gpus=2, settings={"strategy.first_stage_layers": 4})


def test_experts_have_their_own_tensor_parallelism() -> None:
    """With etp 1 an expert is whole on a rank, and each of tp x dp / ep ranks holds its own share of its states."""
    model = from_flat(DEEPSEEK)
    whole, split = (census(model, Layout(dp=4, tp=2, sp=True, ep=4), etp=etp) for etp in (1, 0))
    assert int(np.max(whole.block_experts[1])) == 2 * int(np.max(split.block_experts[1]))
    assert int(np.max(whole.grid.expert_ranks)) == 2
    assert int(np.max(split.grid.expert_ranks)) == 1


def estimate(**words: Any) -> Any:
    """Return the estimate of a Llama of four blocks on B200."""
    chosen = {"framework": "megatron", "gpus": 8, "seq_len": S, "global_batch": 64, "attention": "cudnn", **words}
    return memcalc.estimate(model=from_flat(LLAMA), gpu="b200", **chosen)


def test_the_schedule_keeps_gradients_of_the_boundary() -> None:
    """The loop's variables: what was sent back on all but the first stage, what was received on all but the last."""
    sent = 2 * T * LLAMA["hidden"]
    by_stage = {stage.stage: stage.allocated for stage in estimate(pp=4, gpus=4).stages}
    assert len(by_stage) == 4
    terms = {term.name: term.bytes for term in estimate(pp=2, gpus=2).terms}
    held = [terms.get(f"gradient {what} the micro-batch before", 0) for what in ("sent back by", "received for")]
    assert sum(held) == sent


def test_fused_weight_gradients_cost_dummies_and_save_gradients() -> None:
    fused, plain = (
        {term.name: term.bytes for term in estimate(settings={"strategy.wgrad_fusion": value}).terms}
        for value in ("true", "false")
    )
    assert "dummy weight gradients" in fused
    assert "dummy weight gradients" not in plain


@pytest.mark.parametrize(("loss", "bytes_"), [("standard", 6), ("fused-kernel", 10), ("triton", 2)])
def test_losses_hold_their_generations_of_logits(loss: str, bytes_: int) -> None:
    """cross_entropy.py, fused_cross_entropy.py, and TransformerEngine's kernel that writes over the logits."""
    terms = {term.name: term.bytes for term in estimate(loss=loss).terms}
    logits, hidden = T * 128384, 2 * T * LLAMA["hidden"]
    assert terms["final norm, logits and loss"] == pytest.approx(bytes_ * logits + 2 * hidden, rel=1e-4)


def runs_of(*groups: str) -> list[Run]:
    """Return the shipped runs of some groups that give an allocated peak."""
    return [run for run in read_runs().run if run.group in groups and "allocated" in run.measured.figures]


def error(run: Run) -> float:
    """Return the relative error of the rank that was read."""
    return figures_of(run, predict(run))["allocated"] / run.measured.figures["allocated"] - 1


@pytest.mark.parametrize("run", runs_of("SMX dense"), ids=lambda run: run.id)
def test_dense_runs(run: Run) -> None:
    assert abs(error(run)) <= 0.0002


@pytest.mark.parametrize("run", runs_of("SMX MoE/MLA"), ids=lambda run: run.id)
def test_routed_runs(run: Run) -> None:
    assert abs(error(run)) <= 0.0015


@pytest.mark.parametrize(
    "run",
    [r for r in runs_of("Megatron 2021") if str(r.strategy["framework"]).startswith("megatron")],
    ids=lambda r: r.id,
)
def test_logs_of_2021(run: Run) -> None:
    assert abs(error(run)) <= 0.002


def test_each_stage_of_2021_holds_one_micro_batch_less() -> None:
    """Logged: 24,432.01 and 24,299.01 MiB on stages 2 and 3 of 4: ten inputs, an output, and a mask of 1 MiB."""
    runs = {run.id: run for run in runs_of("Megatron 2021")}
    second, third = (predict(runs[name]).stages[stage].allocated for name, stage in (("BSM-002", 1), ("BSM-003", 2)))
    assert second - third == (11 * 12 + 1) * MIB


def test_gradients_of_2021_are_held_twice() -> None:
    """22 bytes a parameter in backward: states, fp32 gradients, 16-bit ones of this step and of the one before."""
    habits = habits_of("megatron@2021-05")
    widths = habits.widths["fp16-mixed"]
    states = widths.parameter + widths.master + 2 * widths.moment + habits.main_gradients
    assert states + widths.gradient * (1 + habits.flattened_gradients) == 22


def test_resident_bytes_as_logged() -> None:
    """Twelve small blocks on 8 ranks: the tests' golden values give 581,489,664 bytes between two steps."""
    run = {run.id: run for run in runs_of("Megatron CI")}["megatron-011"]
    terms = predict(run).terms
    always = sum(term.bytes for term in terms if len(term.phases) == len(PHASES))
    buffer = next(term.bytes for term in terms if term.name == "gradients of earlier micro-batches")
    assert always + buffer == pytest.approx(581_489_664, rel=2e-5)


def test_moments_of_a_rank_as_logged() -> None:
    """The peak of the second step is 8 bytes over two ranks a parameter above the first: 7.789 GB on the last stage."""
    run = {run.id: run for run in runs_of("Megatron CI")}["megatron-002"]
    moments = next(term.bytes for term in predict(run).terms if term.name == "adamw moments")
    assert moments == pytest.approx(57_686.87 * MIB - 50_259.02 * MIB, rel=1e-4)
