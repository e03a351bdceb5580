"""On how many nodes and ranks a token's experts are, where routing is limited to some groups, and what that saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import memcalc
from memcalc import catalog
from memcalc.specs.model import Model
from memcalc.timing.experts import distinct_targets

TOKENS = 40_000
JOB: dict[str, Any] = {
    "gpu": "h800", "gpus": 1024, "framework": "megatron", "pp": 16, "ep": 64, "tp": 1,
    "seq_len": 4096, "micro_batch": 1, "global_batch": 1920, "recompute": "full",
    "settings": {"strategy.last_stage_layers": 1},
}  # fmt: skip


def routed(experts: int, topk: int, groups: int, chosen: int) -> NDArray[np.int64]:
    """The experts of tokens whose scores are drawn: of the groups with the largest sums of their two best scores.

    As ``DeepseekV3TopkRouter`` (Transformers 5.24, modeling_deepseek_v3.py) and Megatron-LM at d98e8a64
    (core/transformer/moe/moe_utils.py, ``group_limited_topk``) choose them.
    """
    scores = np.random.default_rng(7).random((TOKENS, groups, experts // groups))
    sums = np.sort(scores, axis=-1)[..., -2:].sum(axis=-1)
    left_out = np.argsort(sums, axis=-1)[:, : groups - chosen]
    scores[np.arange(TOKENS)[:, None], left_out] = -1
    return np.argsort(scores.reshape(TOKENS, experts), axis=-1)[:, -topk:]


def drawn(experts: int, topk: int, groups: int, chosen: int) -> NDArray[np.int64]:
    """The experts of tokens for which neither groups nor experts differ, one expert drawn twice at times."""
    rng = np.random.default_rng(7)
    of = np.argsort(rng.random((TOKENS, groups)), axis=-1)[:, :chosen]
    which = np.take_along_axis(of, rng.integers(chosen, size=(TOKENS, topk)), axis=-1)
    return which * (experts // groups) + rng.integers(experts // groups, size=(TOKENS, topk))


def met(chosen: NDArray[np.int64], experts: int, targets: int) -> float:
    """On how many targets the experts of a token are in the mean."""
    where = np.sort(chosen * targets // experts, axis=-1)
    return 1 + float((np.diff(where, axis=-1) > 0).sum(axis=-1).mean())


ROUTERS = [(256, 8, 8, 4), (160, 6, 8, 3), (256, 8, 4, 1), (64, 6, 1, 1), (256, 8, 8, 8)]
"""DeepSeek-V3, DeepSeek-V2, one group of four, and two without a limit."""


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("targets", [1, 2, 4, 8, 16, 32])
def test_targets_are_those_of_drawn_experts(router: tuple[int, int, int, int], targets: int) -> None:
    experts, topk, groups, chosen = router
    expected = distinct_targets(topk, targets, groups, chosen).item()
    assert met(drawn(*router), experts, targets) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("targets", [2, 4, 8, 16, 32])
def test_a_router_of_random_scores_meets_at_most_a_tenth_more(router: tuple[int, int, int, int], targets: int) -> None:
    """The chosen groups are those with the best experts, so that few of them stay without one."""
    experts, topk, groups, chosen = router
    expected = distinct_targets(topk, targets, groups, chosen).item()
    assert -0.005 <= met(routed(*router), experts, targets) / expected - 1 <= 0.11


def test_as_many_groups_as_there_are_limit_nothing() -> None:
    targets = np.arange(1, 100)
    np.testing.assert_allclose(distinct_targets(8, targets, 8, 8), distinct_targets(8, targets), rtol=1e-12)


def without_limit(model: Model) -> Model:
    """The same model, where a token's experts are of any group."""
    free = {"n_group": 1, "topk_group": 1}
    groups = tuple(
        group.model_copy(
            update={"block": group.block.model_copy(update={"mlp": group.block.mlp.model_copy(update=free)})}
        )
        if group.block.is_moe
        else group
        for group in model.groups
    )
    return model.model_copy(update={"groups": groups})


@pytest.mark.parametrize(("dispatcher", "spares"), [("deepep", True), ("alltoall", False), ("allgather", False)])
def test_a_limit_spares_copies_between_nodes_alone_and_no_byte_of_memory(dispatcher: str, spares: bool) -> None:
    """An all-to-all sends one copy for each expert, wherever it is."""
    v3 = catalog.model("deepseek-v3")
    limited, free = (
        memcalc.estimate(**{**JOB, "model": model, "moe_dispatcher": dispatcher}) for model in (v3, without_limit(v3))
    )
    assert limited.time is not None
    assert free.time is not None
    assert (limited.time.step < free.time.step) == spares
    assert (limited.time.step == free.time.step) != spares
    assert limited.peak == free.peak


def test_one_copy_for_each_rank_is_what_made_a_recipe_faster() -> None:
    """Qwen3 235B on 256 B300, EP 8 in its node: 4,865 tokens/s by all-to-all, 5,936 by HybridEP, nothing else changed.

    Megatron-Bridge docs/performance-summary.md, releases 26.04 and 26.04.01, and #3490 between them.
    """
    job = {"model": "qwen3-235b-a22b", "gpu": "b300", "gpus": 256, "framework": "megatron", "precision": "fp8-mixed"}
    job |= {"seq_len": 4096, "global_batch": 8192, "micro_batch": 2, "pp": 8, "ep": 8, "zero": 1, "recompute": "none"}
    names = {"float8": "mxfp8", "float8_all_gather": True, "reduce_dtype": "bf16", "expert_imbalance": 1, "etp": 1}
    settings = {f"strategy.{name}": value for name, value in names.items()}
    settings |= {"strategy.embedding_in_split": True, "strategy.loss_in_split": True}
    plain, single = (
        memcalc.estimate(**job, moe_dispatcher=dispatcher, settings=settings, advice=False)
        for dispatcher in ("alltoall", "deepep")
    )
    ratio = single.time.tokens_per_second_per_gpu / plain.time.tokens_per_second_per_gpu
    assert ratio == pytest.approx(5936 / 4865, abs=0.1)
    for estimate, measured in ((plain, 4865), (single, 5936)):
        assert estimate.time.tokens_per_second_per_gpu == pytest.approx(measured, rel=0.2)
