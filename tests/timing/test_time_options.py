"""Options that change a step's time alone: in which direction, where they are refused, and that no byte moves."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.results.estimates import Estimate
from memcalc.specs.options import COMMAND_LINE
from memcalc.specs.strict import STEP_TIME

EXPERTS: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "gpu": "h100", "gpus": 32, "framework": "megatron", "ep": 32, "seq_len": 4096,
    "micro_batch": 1, "recompute": "none", "global_batch": 128,
}  # fmt: skip
"""Each token goes to 8 of 128 experts, on four nodes."""
SPLIT: dict[str, Any] = {
    "model": "llama-3.1-70b", "gpu": "h100", "gpus": 64, "framework": "megatron", "tp": 8, "sp": True, "pp": 4,
    "seq_len": 8192, "micro_batch": 1, "global_batch": 128, "recompute": "selective-core-attn",
}  # fmt: skip
SMALL: dict[str, Any] = {
    "model": "gpt2", "gpu": "h100", "gpus": 8, "framework": "megatron", "seq_len": 512, "micro_batch": 1,
    "global_batch": 64,
}  # fmt: skip
"""So little work that the host is what a step waits for."""
GATHERED: dict[str, Any] = {
    "model": "llama-2-7b", "gpu": "a100-80g", "gpus": 64, "framework": "deepspeed", "zero": 1, "seq_len": 2048,
    "global_batch": 128, "micro_batch": 2,
}  # fmt: skip
MOVES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "moe_dispatcher": (EXPERTS, ("deepep", "alltoall", "allgather")),
    "expert_imbalance": (EXPERTS, (1.0, 1.1, 1.5, 3.0)),
    "ep_overlap": (EXPERTS, (True, False)),
    "tp_comm_overlap": (SPLIT, (True, False)),
    "cuda_graphs": (SMALL, ("full", "partial", "none")),
    "zero_gather": (GATHERED, ("allgather", "broadcast")),
}
"""A job in which each counts, and its values from the fastest on.

Eight copies of a token over the network are more than one for each of three other nodes, and all tokens on all ranks
are more than eight copies; the tokens of the busiest rank are waited for; what is hidden, and kernels that are launched
at once, save time; 64 broadcasts one after another take longer than one gather.
"""


def estimated(job: dict[str, Any], **words: Any) -> Estimate:
    return memcalc.estimate(**{**job, **words})


def seconds(answer: Estimate) -> float:
    assert answer.time is not None
    return answer.time.step


def test_every_option_of_the_panel_is_here() -> None:
    assert {option.name for option in COMMAND_LINE if option.panel == STEP_TIME} == {*MOVES}


@pytest.mark.parametrize("name", MOVES)
def test_time_moves_in_the_right_direction_and_no_byte_moves(name: str) -> None:
    job, values = MOVES[name]
    answers = [estimated(job, **{name: value}) for value in values]
    steps = [seconds(answer) for answer in answers]
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)
    plain = estimated(job)
    for answer in answers:
        assert (answer.peak, answer.components, answer.phases) == (plain.peak, plain.components, plain.phases)
        assert (answer.stages, answer.host_memory, answer.terms) == (plain.stages, plain.host_memory, plain.terms)


@pytest.mark.parametrize("name", ["tp_comm_overlap", "cuda_graphs", "ep_overlap"])
@pytest.mark.parametrize("job", [EXPERTS, SPLIT, SMALL, {**EXPERTS, "tp": 2, "sp": True, "ep": 16}], ids=str)
def test_what_hides_time_never_costs_any(name: str, job: dict[str, Any]) -> None:
    able = {"tp_comm_overlap": job.get("tp", 1) > 1, "ep_overlap": job.get("ep", 1) > 1}
    if able.get(name, True):
        assert seconds(estimated(job, **{name: MOVES[name][1][0]})) <= seconds(estimated(job))


def test_within_a_node_one_copy_for_each_rank_is_less_than_one_for_each_expert() -> None:
    """Eight experts of a token are on seven ranks at the most, and on fewer where two share one."""
    inside = {**EXPERTS, "gpus": 8, "ep": 8}
    assert seconds(estimated(inside, moe_dispatcher="deepep")) < seconds(estimated(inside, moe_dispatcher="alltoall"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**SPLIT, "moe_dispatcher": "deepep"}, "llama-3.1-70b has no routed experts"),
    ({**SPLIT, "expert_imbalance": 2}, "llama-3.1-70b has no routed experts"),
    ({**EXPERTS, "ep": 1, "moe_dispatcher": "deepep"}, "moe-dispatcher 'deepep': needs ep above 1"),
    ({**EXPERTS, "ep": 1, "ep_overlap": True}, "needs ep above 1"),
    ({**EXPERTS, "tp_comm_overlap": True}, "needs tp above 1"),
    ({**EXPERTS, "expert_imbalance": 0.9}, "must be a number from 1 to 1,000"),
    ({**EXPERTS, "expert_imbalance": "nan"}, "must be a number from 1 to 1,000"),
    ({**EXPERTS, "moe_dispatcher": "deep-ep"}, "must be one of alltoall, deepep, allgather"),
    ({**EXPERTS, "ep_overlap": True, "moe_dispatcher": "allgather"}, "only with alltoall and deepep"),
    ({**EXPERTS, "ep_overlap": True, "recompute": "full"}, "without full recomputation"),
    ({**SPLIT, "sp": False, "tp_comm_overlap": True}, "only with sequence parallelism"),
    ({**SPLIT, "cuda_graphs": "partial", "recompute": "full"}, "--cuda-graphs full"),
    ({**SPLIT, "framework": "torchtitan", "recompute": "full", "cuda_graphs": "full"}, "torchtitan has none"),
    ({**SPLIT, "framework": "torchtitan", "recompute": "full", "tp_comm_overlap": True}, "--compile blocks or model"),
    ({**GATHERED, "framework": "fsdp2", "zero": 3, "tp": 2, "tp_comm_overlap": True}, "fsdp2 cannot be told to"),
    ({**GATHERED, "framework": "fsdp2", "zero": 3, "zero_gather": "broadcast"}, "fsdp2 has allgather"),
    ({**EXPERTS, "framework": "megatron@core-0.5", "moe_dispatcher": "deepep"}, "has alltoall, allgather"),
]


@pytest.mark.parametrize(("job", "says"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_what_cannot_apply_is_refused(job: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        memcalc.estimate(**job)


def test_a_search_refuses_what_no_strategy_of_its_own_can_use() -> None:
    with pytest.raises(InputError, match="gpt2 has no routed experts"):
        memcalc.plan(**{**SMALL, "moe_dispatcher": "deepep"})
    with pytest.raises(InputError, match="fsdp2 has none"):
        memcalc.plan(model="gpt2", gpu="h100", gpus=2, cuda_graphs="full")
    with pytest.raises(InputError, match="needs tp above 1"):
        memcalc.plan(**{**SMALL, "tp": 1, "tp_comm_overlap": True})


@pytest.mark.slow
def test_plans_that_an_option_says_nothing_of_are_without_it() -> None:
    """Each is the estimate that its own line names."""
    found = memcalc.plan(
        model="deepseek-v2-lite", gpu="h100", gpus=16, framework="megatron", moe_dispatcher="deepep",
        tp_comm_overlap=True, ep="1/8", tp="1/2", pp=1, cp=1, rank_all=True, top=60, advice=False,
    )  # fmt: skip
    kinds = {(plan.strategy.ep > 1, plan.strategy.tp > 1) for plan in found.plans}
    assert len(kinds) >= 2
    for plan in found.plans:
        strategy, line = plan.strategy, plan.command
        assert (strategy.moe_dispatcher == "deepep") == (strategy.ep > 1) == ("--moe-dispatcher" in line)
        assert strategy.tp_comm_overlap == (strategy.tp > 1) == ("--tp-comm-overlap" in line)
    for plan in found.plans[:3]:
        again = memcalc.estimate(**plan.job.keywords())
        assert (again.strategy, again.peak.device, again.time) == (plan.strategy, plan.peak.device, plan.time)


def test_a_difference_of_degrees_takes_along_what_says_nothing_without_them() -> None:
    answer = memcalc.diff(
        "ep=8,moe_dispatcher=deepep,tp=1", "ep=1,tp=2,tp_comm_overlap=true",
        model="deepseek-v2-lite", gpu="h100", gpus=16, framework="megatron",
    )  # fmt: skip
    assert answer.b.estimate.strategy.tp_comm_overlap


def test_memory_that_is_not_counted_is_named() -> None:
    """Pools of CUDA graphs are bytes in reality (torch.cuda.CUDAGraph): no figure here has them."""
    assert not any("not counted" in warning for warning in estimated(SPLIT).warnings)
    answer = estimated(SPLIT, cuda_graphs="full", tp_comm_overlap=True)
    (warning,) = [warning for warning in answer.warnings if "not counted in memory" in warning]
    assert "pools of CUDA graphs" in warning
    assert "buffers for the messages of split products" in warning
