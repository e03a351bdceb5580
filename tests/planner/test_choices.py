"""Several values on one axis: listed, a range, all but some, any."""

import pytest

import memcalc
from memcalc.errors import CombinationError, InputError, MemcalcError
from memcalc.planner.request import Choice, check_words, parse_choice
from memcalc.specs.options import SEARCHED

JOB = {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "seq_len": 1024, "global_batch": 64}


def taken(name: str, **words: object) -> set[object]:
    """Return the values of an axis among the listed plans."""
    return {
        getattr(plan.strategy, name) for plan in memcalc.plan(**JOB, **words, top=40, rank_all=True, advice=False).plans
    }


@pytest.mark.parametrize(
    ("typed", "kept"),
    [("2/8", [2, 8]), ("2..4", [2, 4]), ("..2", [1, 2]), ("4..", [4, 8]), ("not:1/4", [2, 8]), ("any", [1, 2, 4, 8])],
)
def test_what_is_typed(typed: str, kept: list[int]) -> None:
    choice = parse_choice("tp", typed, int, number=True)
    assert isinstance(choice, Choice)
    assert choice.of([1, 2, 4, 8]) == kept


@pytest.mark.parametrize("typed", ["2", 2, " 2 "])
def test_one_value_is_no_choice(typed: object) -> None:
    assert parse_choice("tp", typed, lambda value: int(str(value)), number=True) == 2


def test_a_list_is_several_values() -> None:
    request = check_words({"tp": [1, 2], "recompute": ["none", "full"], "zero": [3]}, None, several=True)
    assert request.choices["tp"].listed == (1, 2)
    assert request.choices["recompute"].listed == ("none", "full")
    assert request.given["zero"] == 3


@pytest.mark.parametrize("typed", ["8..2", "..", "2..x", "2/x", "not:x", "0..2", "/", "2//4"])
def test_a_wrong_choice_is_one_sentence(typed: str) -> None:
    with pytest.raises(InputError) as refused:
        memcalc.plan(**JOB, tp=typed)
    assert "tp" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_estimate_takes_one_value() -> None:
    with pytest.raises(InputError, match="takes one value"):
        memcalc.estimate(**{**JOB, "tp": "1/2"})


def test_every_searched_word_takes_several_values() -> None:
    values = {
        "gpus": "1/2", "global_batch": "8/16", "precision": "bf16/fp32", "optimizer": "adamw/lion", "zero": "2/3",
        "recompute": "none/full", "tp": "1/2", "sp": "true/false", "pp": "1/2", "pp_schedule": "1f1b/gpipe",
        "vpp": "1/2", "cp": "1/2", "ep": "1/2", "dp_replicate": "1/2", "offload": "none/optimizer,activations",
        "offload_to": "cpu/nvme", "micro_batch": "1/2",
    }  # fmt: skip
    assert set(values) == set(SEARCHED)
    assert set(check_words(values, None, several=True).choices) == set(SEARCHED)


@pytest.mark.slow
def test_bounds_and_exclusions_hold() -> None:
    assert taken("tp", tp="2..4") <= {2, 4}
    assert "none" not in taken("recompute", recompute="not:none")
    assert taken("offload", offload="none/optimizer") <= {(), ("optimizer",)}
    assert taken("precision", precision="bf16/bf16-mixed") <= {"bf16", "bf16-mixed"}


def test_an_optimizer_that_is_left_open_is_searched() -> None:
    smallest = memcalc.plan(
        **JOB, optimizer="adamw/sgd", offload="none", objective="memory", top=1, advice=False
    ).plans[0]
    assert smallest.strategy.optimizer == "sgd"
    assert "--optimizer sgd" in smallest.command
    alone = memcalc.plan(**JOB, optimizer="sgd", advice=False).searched
    assert memcalc.plan(**JOB, optimizer="adamw/sgd", advice=False).searched == 2 * alone


def test_a_choice_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="is left"):
        memcalc.plan(**JOB, micro_batch="1000..2000")


def test_a_bound_leaves_out_the_numbers_of_gpus_that_cannot_meet_it() -> None:
    words = {name: value for name, value in JOB.items() if name != "gpus"}
    answer = memcalc.plan(**words, tp="3..", advice=False)
    assert {plan.gpus for plan in answer.plans} == {4, 8}
    assert all(plan.strategy.tp >= 3 for plan in answer.plans)
    with pytest.raises(MemcalcError, match="no valid layout"):
        memcalc.plan(**{**JOB, "gpus": 2}, tp="3..")


def test_a_schedule_or_chunks_alone_are_searched_over_pipelines_where_the_framework_has_them() -> None:
    """The number of stages is open: `--pp-schedule interleaved` was refused for a pipeline of one stage."""
    job = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 4, "tp": 1, "cp": 1, "offload": "none", "recompute": "full"}
    for words in ({"pp_schedule": "interleaved"}, {"vpp": 2}, {"vpp": 2, "pp": "1/2"}):
        plans = memcalc.plan(**job, framework="megatron", **words, advice=False).plans
        assert plans
        assert all(plan.strategy.pp > 1 and plan.strategy.pp_schedule == "interleaved" for plan in plans)
    with pytest.raises(CombinationError, match="needs pp above 1"):
        memcalc.plan(**job, framework="fsdp2", pp_schedule="interleaved")


def test_a_search_computes_a_part_of_each_stage_again() -> None:
    """Megatron-LM counts them within each stage (training/arguments.py, --recompute-num-layers): of 8, not of 126."""
    job = {"model": "llama-3.1-405b", "gpu": "h100", "gpus": 1024, "seq_len": 8192, "offload": "none"}
    layout = {"framework": "megatron", "tp": 8, "pp": 16, "cp": 1}
    plans = memcalc.plan(**job, **layout, top=30, advice=False).plans
    blocks = {name for plan in plans if (name := plan.strategy.recompute).startswith("block-")}
    assert blocks
    assert blocks <= {"block-2", "block-4", "block-6"}
    full = memcalc.plan(**job, **layout, recompute="full", top=1, advice=False).plans[0]
    assert plans[0].time.step < full.time.step / 1.1


def test_blocks_that_are_computed_again_come_out_even_over_model_chunks() -> None:
    """Megatron-LM is told how many of each chunk: 10 blocks are 2 of each of 5, and none of 4."""
    job = {"model": "llama-3.1-70b", "gpu": "h200", "gpus": 32, "tp": 8, "pp": 4, "framework": "megatron", "cp": 1}
    words = {**job, "recompute": "block-10", "offload": "none", "pp_schedule": "interleaved"}
    assert {plan.strategy.vpp for plan in memcalc.plan(**words, vpp="4/5", advice=False).plans} == {5}
    refused = memcalc.plan(**words, vpp=4)
    assert not refused.plans
    assert "come out even over the model chunks" in refused.too_large


def test_the_distributed_optimizer_is_megatrons_simple_plan_and_whole_states_that_of_adapters() -> None:
    """Megatron-Bridge 067f987d recipes: use_distributed_optimizer but for PEFT."""
    job = {"model": "llama-3.2-1b", "gpu": "a100-40g", "gpus": 8, "framework": "megatron", "top": 1}
    assert memcalc.plan(**job, advice=False).plans[0].strategy.zero == 1
    assert memcalc.plan(**job, lora="16", advice=False).plans[0].strategy.zero == 0
