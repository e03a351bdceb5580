"""Replicas of the shards (HSDP): bytes and messages by hand, measured speed of fms-fsdp, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc import api
from memcalc.api import load_model, single
from memcalc.errors import CombinationError, InputError
from memcalc.frameworks import habits_of
from memcalc.grid import Layout
from memcalc.planner.axes import layouts_of
from memcalc.planner.direct import with_replicas
from memcalc.planner.pipelines import is_legal
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.timing.work import work_of
from memcalc.units import MIB

PARAMETERS, VOCAB, HIDDEN = 8_030_261_248, 128_256, 4096
"""Llama 3 8B; embedding, head and final norm are FSDP 2's root."""
ROOT = 2 * VOCAB * HIDDEN + HIDDEN
BLOCK = (PARAMETERS - ROOT) // 32
JOB: dict[str, Any] = {
    "model": "llama-3-8b", "gpu": "h100", "gpus": 16, "framework": "fsdp2", "zero": 3, "recompute": "full",
    "seq_len": 1024, "global_batch": 16, "precision": "bf16-mixed",
}  # fmt: skip


def of(**words: Any) -> Any:
    return memcalc.estimate(**{**JOB, **words})


def term(answer: Any, start: str) -> int:
    """The largest term whose name starts so [bytes]."""
    return max((entry.bytes for entry in answer.terms if entry.name.startswith(start)), default=0)


@pytest.mark.parametrize(("gpus", "replicas"), [(16, 2), (32, 4), (16, 1), (64, 2)])
def test_states_are_those_of_the_ranks_of_one_replica(gpus: int, replicas: int) -> None:
    """16 bytes a parameter: fp32 weights, gradients and two moments, over dp / dp_replicate ranks."""
    found = of(gpus=gpus, global_batch=gpus, dp_replicate=replicas)
    ranks = gpus // replicas
    states = term(found, "weights") + term(found, "adamw moments") + 4 * -(-PARAMETERS // ranks)
    assert states == pytest.approx(16 * PARAMETERS / ranks, rel=1e-6)
    assert term(found, "gradients") == pytest.approx(4 * PARAMETERS / ranks, rel=1e-6)
    assert found.strategy.dp == gpus


def test_a_replica_holds_what_a_job_of_its_size_does() -> None:
    """In one micro-batch the all-reduce is in place, in the gradient itself: a communicator alone comes on top."""
    whole, half = of(dp_replicate=2), of(gpus=8, global_batch=8)
    assert whole.peak.allocated == half.peak.allocated
    assert whole.budget.libraries - half.budget.libraries == of(tp=2).budget.libraries - of().budget.libraries > 0


KEPT = [
    # global batch, dtype of the reduction, bytes an element that stay beside the gradient
    (16, "fp32", 0),
    (64, "fp32", 4),  # added to the gradient of an earlier micro-batch, and so another tensor
    (16, "bf16", 2),  # cast to the fp32 of the shard
    (64, "bf16", 2),
]


@pytest.mark.parametrize(("batch", "dtype", "width"), KEPT)
def test_what_was_reduced_stays_until_backward_ends(batch: int, dtype: str, width: int) -> None:
    """Of each unit but the root, whose reduction comes last (torch 2.13, FSDPParamGroup._all_reduce_state)."""
    settings = {"strategy.reduce_dtype": dtype}
    found = of(global_batch=batch, dp_replicate=2, settings=settings)
    assert term(found, "reduced gradients") == pytest.approx(width * 32 * BLOCK / 8, rel=1e-6)
    assert term(of(global_batch=batch, settings=settings), "reduced gradients") == 0


def test_gradients_on_their_way_to_the_host_stay_until_then() -> None:
    found = of(dp_replicate=2, offload="params")
    assert term(found, "reduced gradients") == pytest.approx(4 * 32 * BLOCK / 8, rel=1e-6)


@pytest.mark.parametrize("words", [{"framework": "fsdp1"}, {"framework": "megatron", "zero": 1, "recompute": "none"}])
def test_others_reduce_in_place(words: dict[str, Any]) -> None:
    assert term(of(global_batch=64, dp_replicate=2, **words), "reduced gradients") == 0


def test_megatrons_instances_divide_the_optimizer_alone() -> None:
    """Master weights and two moments of 4 bytes over dp / instances; weights and the gradient buffer are whole."""
    job = {"framework": "megatron", "zero": 1, "recompute": "none", "tp": 2}
    two, one = of(dp_replicate=2, **job), of(**job)
    for name, width in (("fp32 master", 4), ("adamw moments", 8)):
        assert term(two, name) == pytest.approx(2 * term(one, name), rel=1e-6)
        assert term(two, name) == pytest.approx(width * PARAMETERS / 2 / 4, rel=0.01)  # the vocabulary is padded
    for name in ("weights", "gradients"):
        assert term(two, name) == term(one, name)


def test_experts_are_shared_out_within_a_replica() -> None:
    """dp_shard x cp x tp / ep ranks share an expert (torchtitan 0.2.2, parallel_dims.py: efsdp)."""
    words = {"model": "mixtral-8x7b", "gpus": 64, "global_batch": 64, "framework": "torchtitan", "ep": 4}
    grid = single(**{**JOB, **words, "dp_replicate": 4}).grid
    assert (grid.ranks.item(), grid.expert_ranks.item()) == (16, 4)
    with pytest.raises(CombinationError, match="dp-replicate"):
        of(**words, dp_replicate=32)


# ------------------------------------------------------------------------------------------------------------ messages


def test_what_is_sent() -> None:
    """FSDP gathers twice and reduces once within the node; replicas all-reduce the shard: 2 (r - 1) / r of it."""
    one = single(**{**JOB, "dp_replicate": 2})
    census = ModelOnGrid(one.job.model, one.grid)
    sent = work_of(census, one.job.node).messages
    assert sent.gather.volume.item() == pytest.approx(7 / 8 * PARAMETERS * 2, rel=1e-6)
    assert sent.reduction.volume.item() == pytest.approx(7 / 8 * PARAMETERS * 4, rel=1e-6)
    repeats = sent.repeats
    assert (repeats.forward.item(), repeats.backward.item(), repeats.reductions.item()) == (1, 1, 1)
    assert (sent.gather.ranks.item(), sent.gather.in_node.item()) == (8, 8)
    assert sent.between.volume.item() == pytest.approx(2 * 1 / 2 * PARAMETERS / 8 * 4, rel=1e-6)
    assert (sent.between.ranks.item(), sent.between.in_node.item()) == (2, 1)
    assert sent.gradients_between.volume.item() == 0


# ------------------------------------------------------------------------------------------------- what is possible


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dp_replicate": 3}, "divisor of dp = 16"),
    ({"dp_replicate": 16}, "several ranks"),
    ({"dp_replicate": 2, "framework": "ddp", "zero": 0, "precision": "bf16-autocast"}, "not supported for"),
    ({"dp_replicate": 2, "framework": "deepspeed"}, "mics_shard_size.*zero_hpz_partition_size"),
    ({"dp_replicate": 2, "framework": "megatron", "zero": 0, "recompute": "none"}, "needs --zero 1"),
    ({"dp_replicate": 2, "framework": "megatron@core-0.9", "zero": 1}, "not supported for"),
    ({"dp_replicate": 2, "framework": "megatron", "zero": 1, "optimizer": "muon"}, "layer_wise_optimizer"),
    ({"dp_replicate": 2, "framework": "torchtune", "zero": 0, "precision": "bf16"}, "needs --zero 2"),
    ({"dp_replicate": 0}, "whole number from 1"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_cannot_be_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        of(**words)


def test_eras_that_cannot_be_told_need_code() -> None:
    """It came to torchtitan in September 2024 (db6b39acd)."""
    for era, code in (("2024-06", True), ("2024-09", False)):
        found = of(framework=f"torchtitan@{era}", dp_replicate=2)
        assert any("mesh of two dimensions" in warning for warning in found.warnings) is code


def test_context_parallel_ranks_share_the_states_too() -> None:
    """Two replicas of one data-parallel rank each, whose four context-parallel ranks share the states."""
    assert is_legal(load_model("llama-3-8b"), Layout(dp=2, cp=4, dp_replicate=2), 8192)
    assert not is_legal(load_model("llama-3-8b"), Layout(dp=2, dp_replicate=2), 8192)


def test_a_search_shards_within_nodes_or_over_all_ranks() -> None:
    """Of 32 GPUs on nodes of eight: shards over 32, 16 or 8 ranks."""
    words = {**JOB, "gpus": 32, "global_batch": 32, "micro_batch": 1, "tp": 1}
    found = memcalc.plan(**words, rank_all=True, top=99, advice=False)
    assert {plan.strategy.dp_replicate for plan in found.plans} == {1, 2, 4}
    assert found.searched == 3 * memcalc.plan(**words, dp_replicate=1, advice=False).searched
    pinned = memcalc.plan(**words, dp_replicate="not:1", top=1, advice=False).plans[0]
    assert pinned.strategy.dp_replicate > 1
    assert f"--dp-replicate {pinned.strategy.dp_replicate}" in pinned.command


def test_on_one_node_a_search_is_what_it_was() -> None:
    words = {**JOB, "gpus": 8, "global_batch": 8}
    assert memcalc.plan(**words, advice=False).searched == memcalc.plan(**words, dp_replicate=1, advice=False).searched


def test_fsdp1_shards_within_a_node() -> None:
    """Its hybrid strategies know the ranks of a node and all ranks alone (torch/distributed/fsdp/_init_utils.py)."""
    found = memcalc.plan(
        **{**JOB, "framework": "fsdp1", "gpus": 32, "global_batch": 32}, rank_all=True, top=99, advice=False
    )
    assert {plan.strategy.dp_replicate for plan in found.plans} == {1, 4}


def test_the_layout_is_called_as_practitioners_do(capsys: pytest.CaptureFixture[str]) -> None:
    from memcalc.cli.app import app

    with pytest.raises(SystemExit):
        app(["plan", "--model", "llama-3-8b", "--gpu", "h100", "--gpus", "16", "--dp-replicate", "2", "--top", "1"])
    assert "HSDP2×8" in capsys.readouterr().out


def test_replicas_count_in_the_device_figure() -> None:
    """One process group more, of at least a few MiB."""
    assert of(dp_replicate=2).budget.libraries - of().budget.libraries >= MIB


def test_no_shard_keeps_all_states_on_each_rank() -> None:
    """FSDP 1's NO_SHARD: fp32 weights, gradients and moments whole; units are cast one by one, so no 16-bit model."""
    weights = 4 * 1_235_814_400
    words = {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "framework": "fsdp1", "dp_replicate": 8, "seq_len": 512}
    answer = memcalc.estimate(**words, micro_batch=1, global_batch=8)
    sizes = {(term.component, term.name): term.bytes for term in answer.terms}
    assert sizes["parameters", "weights"] == sizes["gradients", "gradients"] == weights
    assert sizes["optimizer", "adamw moments"] == 2 * weights
    assert max(size for (part, _), size in sizes.items() if part == "buffers") < weights / 4
    with pytest.raises(memcalc.errors.CombinationError, match="several ranks"):
        memcalc.estimate(**{**words, "framework": "fsdp2"})


def test_a_search_tries_the_replicas_whose_ranks_divide_the_experts() -> None:
    """60 experts on 8 ranks fill 64 rows; 4 ranks of two replicas hold 15 each."""
    job = api.resolve("qwen1.5-moe-a2.7b", "h100", {"gpus": 8, "framework": "fsdp2"}, several=True)
    habits = habits_of("fsdp2")
    layouts = layouts_of(job.request, job.model, job.node, 8, 4096, habits)
    found = with_replicas(layouts, job.request, habits, job.model, job.node)
    assert {layout.dp_replicate for layout in found} == {1, 2}
