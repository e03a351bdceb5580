"""What a plan says beyond its ranking: objectives, the front, why a strategy lost, what would fit, the recipe."""

import tomllib
from pathlib import Path

import pytest
from command_lines import keywords

import memcalc
from memcalc.errors import InputError
from memcalc.planner.sentences import parse_question
from memcalc.specs.strategy import Strategy

LAYOUTS = Path(__file__).resolve().parents[2] / "presets" / "runs" / "layouts"
JOB = {"model": "llama-2-7b", "gpu": "a100-40g", "gpus": 8, "global_batch": 128}
SMALL = {**JOB, "model": "llama-3.2-1b", "seq_len": 1024}
PINNED = {"zero": 3, "tp": 1, "pp": 1, "cp": 1, "recompute": "none", "offload": "none", "micro_batch": 4}


def test_each_objective_wins_at_its_own() -> None:
    first = {
        name: memcalc.plan(**SMALL, objective=name, top=1, advice=False).plans[0]
        for name in ("throughput", "memory", "simplicity")
    }
    speed = {name: plan.time.tokens_per_second_per_gpu for name, plan in first.items()}
    assert first["memory"].peak.device <= min(plan.peak.device for plan in first.values())
    assert speed["throughput"] >= max(speed.values())
    assert speed["simplicity"] >= speed["throughput"] / 1.25
    assert parts(first["simplicity"].strategy) <= parts(first["throughput"].strategy)


def parts(s: Strategy) -> int:
    """Count what plain data parallelism has not; CP on short sequences and PP inside a node count twice."""
    degrees = sum(degree > 1 for degree in (s.tp, s.pp, s.cp, s.ep))
    other_schedule = s.pp > 1 and s.pp_schedule != "1f1b"
    own = s.sp + (s.recompute != "none") + (s.zero > 0) + len(s.offload) + other_schedule
    return degrees + own + unusual(s)


def unusual(s: Strategy) -> int:
    """Count what is seldom done at 4,096 tokens on one node."""
    return (s.cp > 1) + (s.pp > 1)


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3.1-8b", "qwen2.5-3b"])
def test_the_first_is_the_simplest_of_those_within_five_percent(model: str) -> None:
    """What buys less than the error of its time counts only where nothing else is within a quarter of the fastest."""
    words = {**JOB, "model": model, "gpu": "a100-40g"}
    first = memcalc.plan(**words, top=1, seq_len=4096, advice=False).plans[0]
    fast = memcalc.plan(**words, objective="throughput", rank_all=True, top=40, seq_len=4096, advice=False).plans
    assert not unusual(first.strategy)
    assert not first.strategy.offload
    plain = [plan for plan in fast if not (unusual(plan.strategy) or plan.strategy.offload)]
    bound = plain[0].time.tokens_per_second_per_gpu / 1.05
    near = [plan for plan in plain if plan.time.tokens_per_second_per_gpu >= bound]
    assert first.parts == parts(first.strategy) <= min(parts(plan.strategy) for plan in near)
    assert first.time.tokens_per_second_per_gpu >= bound


def test_a_pipeline_of_more_stages_than_published_runs_have_is_not_first_where_another_is_near() -> None:
    """MLPerf's 405B on 512 H100 has 8 stages; 64 of two blocks are as fast by the model, and extrapolated."""
    answer = memcalc.plan(model="llama-3.1-405b", gpu="h100", gpus=512, framework="megatron", precision="fp8-mixed",
                          tp_comm_overlap=True, seq_len=8192, global_batch=1152, tp=8, top=1, advice=False,
                          settings={"strategy.reduce_dtype": "bf16", "strategy.embedding_in_split": True,
                                    "strategy.loss_in_split": True, "strategy.float8_all_gather": True})  # fmt: skip
    assert answer.plans[0].strategy.pp <= 16


def test_tensor_parallelism_comes_with_sequence_parallelism() -> None:
    """As in every recipe of Megatron-Bridge with TP; Korthikanti et al. measured it 3% faster (arXiv:2205.05198)."""
    answer = memcalc.plan(model="llama-3-8b", gpu="h100", gpus=8, framework="megatron", seq_len=8192, global_batch=128,
                          tp=2, pp=1, recompute="none", top=1, advice=False)  # fmt: skip
    assert answer.plans[0].strategy.sp


def test_offload_that_makes_nothing_faster_or_smaller_is_not_listed() -> None:
    answer = memcalc.plan(model="smollm2-135m", gpu="h100", gpus=8, seq_len=2048, global_batch=512, advice=False)
    best = answer.plans[0]
    for plan in answer.plans[1:]:
        faster = plan.time.tokens_per_second_per_gpu > best.time.tokens_per_second_per_gpu
        assert not plan.strategy.offload or faster or plan.peak.device <= 0.9 * best.peak.device


def test_typing_the_stage_of_the_first_plan_keeps_it() -> None:
    """ZeRO-1 does not fit at its micro-batch, for the holes of its own optimizer, and took it away too."""
    job = {"model": "gpt2", "gpu": "l40s", "gpus": 2, "framework": "deepspeed", "seq_len": 1000, "global_batch": 256}
    first = memcalc.plan(**job, advice=False).plans[0]
    typed = memcalc.plan(**job, zero=first.strategy.zero, advice=False).plans[0]
    assert typed.strategy == first.strategy


def test_a_list_has_one_row_of_an_idea_the_fastest_and_the_smallest() -> None:
    answer = memcalc.plan(**JOB, advice=False)
    assert len(answer.plans) <= 6
    roles = {role: plan for plan in answer.plans for role in plan.special}
    assert {"best", "fastest", "smallest", "full recompute", "with offload"} <= set(roles)
    assert answer.plans[0] is roles["best"]
    assert roles["fastest"] is max(answer.plans, key=lambda plan: plan.time.tokens_per_second_per_gpu)
    assert roles["smallest"] is min(answer.plans, key=lambda plan: plan.peak.device)
    ranked = memcalc.plan(**JOB, rank_all=True, top=12, advice=False).plans
    assert [plan.strategy for plan in ranked[:1]] == [answer.plans[0].strategy]
    speeds = [plan.time.tokens_per_second_per_gpu for plan in ranked]
    assert speeds[1:] == sorted(speeds[1:], reverse=True)
    assert max(speeds) == pytest.approx(roles["fastest"].time.tokens_per_second_per_gpu)


def test_gpu_hours_are_those_of_the_token_budget() -> None:
    answer = memcalc.plan(**{**SMALL, "gpus": None}, objective="cost", tokens="2T", advice=False)
    assert answer.token_budget == 2 * 10**12
    for plan in answer.plans:
        seconds = 2e12 / (plan.time.tokens_per_second_per_gpu * plan.gpus)
        assert plan.gpu_hours == pytest.approx(seconds * plan.gpus / 3600)
    hours = [plan.gpu_hours for plan in answer.plans if plan.verdict != "tight"]
    assert hours == sorted(hours)


def test_a_critical_batch_makes_large_batches_count_for_less() -> None:
    def best(critical: str | None) -> int:
        return (
            memcalc.plan(**{**SMALL, "global_batch": "64/1024"}, critical_batch=critical, top=1, advice=False)
            .plans[0]
            .global_batch
        )

    assert best(None) == 1024
    assert best("10k") == 64
    plan = memcalc.plan(**SMALL, critical_batch=128 * 1024, top=1, advice=False).plans[0]
    assert plan.statistical_efficiency == pytest.approx(0.5)


def test_why_names_what_costs_the_time() -> None:
    said = memcalc.plan(**JOB, top=1, why="tp=1,recompute=full,offload=none", advice=False).asked
    assert "slower than #1" in said
    said = memcalc.plan(
        **JOB, top=1, why="tp=1,pp=1,cp=1,recompute=none,offload=none,micro-batch=8", advice=False
    ).asked
    assert "does not fit" in said
    assert "activations" in said


def test_why_of_the_first_plan_itself() -> None:
    plan = memcalc.plan(**SMALL, top=1, advice=False).plans[0]
    s = plan.strategy
    words = f"zero={s.zero},tp={s.tp},pp={s.pp},cp={s.cp},recompute={s.recompute},micro-batch={s.micro_batch}"
    assert "as fast as #1" in memcalc.plan(**SMALL, top=1, why=words, advice=False).asked


@pytest.mark.parametrize("question", ["tp", "tensor=2", "tp=x", "=", "tp=2,color=red"])
def test_a_wrong_question_is_refused(question: str) -> None:
    with pytest.raises(InputError):
        memcalc.plan(**SMALL, top=1, why=question)


def test_a_question_may_hold_a_list_of_offloads() -> None:
    assert parse_question("offload=optimizer,activations,tp=2") == {"offload": ("optimizer", "activations"), "tp": 2}


def test_what_cannot_run_is_said_in_its_own_words() -> None:
    assert "no valid layout" in memcalc.plan(**SMALL, top=1, why="ep=2", advice=False).asked


def test_the_smallest_changes_fit_and_have_a_price() -> None:
    job = {**JOB, "gpus": 2, **PINNED, "micro_batch": 1}
    answer = memcalc.plan(**job)
    assert not answer.plans
    changes = {change.change: change for change in answer.nearest}
    assert any(name.startswith("--gpu ") for name in changes)
    assert any(name.startswith("--gpus ") for name in changes)
    for change in (change for change in answer.nearest if change.group != "not enough"):
        assert change.job is not None
        found = memcalc.plan(**change.job.keywords(), top=1, advice=False).plans[0]
        assert found.verdict == change.verdict
        assert found.time.tokens_per_second_per_gpu == pytest.approx(change.tokens_per_second_per_gpu)
        assert found.peak.device == change.device
        assert change.throughput is not None
        assert change.throughput > 0


def test_two_words_are_changed_only_where_one_is_not_enough() -> None:
    answer = memcalc.plan(model="llama-2-13b", gpu="rtx-3090", gpus=1, **PINNED)
    own = [change.change for change in answer.nearest if "--gpu" not in change.change]
    assert own
    assert all(text.count("--") == 2 for text in own if "recompute" in text)


def test_the_recipe_takes_no_remedy_that_it_does_not_need() -> None:
    roomy = memcalc.plan(**{**SMALL, "gpu": "a100-80g"}, recipe=True, top=1).recipe
    assert [step.stage for step in roomy] == ["start", "16-bit compute", "fill the card"]
    scarce = memcalc.plan(**{**JOB, "gpus": 1, "pp": 1}, recipe=True, top=1).recipe
    assert [step.stage for step in scarce][:4] == ["start", "16-bit compute", "recompute", "offload"]
    assert not scarce[0].fits
    assert scarce[-1].fits
    capacity = memcalc.plan(**JOB, top=1, advice=False).capacity
    assert all(step.fits == (step.device <= capacity) for step in scarce)


def test_the_return_of_a_remedy_is_memory_over_time() -> None:
    found = {remedy.change: remedy for remedy in memcalc.plan(**JOB, recipe=True, top=1).remedies}
    full, some = found["--recompute full"], found["--recompute every-2"]
    assert full.saved > some.saved > 0
    assert full.slower > some.slower > 0
    assert full.roi == pytest.approx(full.saved / full.slower)
    plain = memcalc.plan(**JOB, **{**PINNED, "micro_batch": 1, "zero": 2}, top=1, precision="bf16-mixed", advice=False)
    assert plain.searched == 1


def test_experts_that_fsdp2_fills_up_are_warned_of() -> None:
    """16 experts over 64 ranks: each rank gathers a row for each of 64; over 16 it gathers what there is."""
    job = {"model": "jamba-v0.1", "gpu": "h100", "gpus": 64, "framework": "fsdp2", "recompute": "full"}
    warned = [
        [
            warning
            for warning in memcalc.estimate(**job, dp_replicate=replicas).warnings
            if "filled up to 64, 4 times" in warning
        ]
        for replicas in (1, 4)
    ]
    assert [len(found) for found in warned] == [1, 0]


def test_an_encoder_of_text_says_that_it_predicts_no_words() -> None:
    """BertModel has no head; with that of BertForMaskedLM logits of 30,522 words are kept."""
    assert memcalc.estimate(model="bert-base", gpu="a100-40g").assumptions["head"].startswith("none")
    for name in ("gpt2", "t5-small", "vit-base-16", "clip-vit-b-32"):
        assert "head" not in memcalc.estimate(model=name, gpu="a100-40g").assumptions


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, True),
        ({"gpus": 8}, False),
        ({"moe_dispatcher": "deepep", "ep_overlap": True}, False),
        ({"framework": "fsdp2", "zero": 3, "recompute": "full"}, False),
        ({"model": "llama-3.2-1b"}, False),
    ],
)
def test_a_search_says_which_options_could_hide_the_exchanges_of_experts(words: dict, said: bool) -> None:
    """DeepSeek-V3's published speed on 2,048 H800 needs both; a search takes Megatron-LM's defaults."""
    pinned = {"tp": 1, "pp": 1, "cp": 1, "zero": 1, "micro_batch": 1, "recompute": "none"}
    job = {"model": "olmoe-1b-7b", "gpu": "h100", "gpus": 16, "framework": "megatron", "seq_len": 4096, "top": 1}
    warnings = memcalc.plan(**job | pinned | {"global_batch": 64} | words).warnings
    assert any("--moe-dispatcher deepep --ep-overlap" in text for text in warnings) == said


def test_exchanges_within_a_node_have_a_faster_dispatcher_too() -> None:
    """Qwen3 235B's recipe on B300 became 22% faster by HybridEP alone, EP 8 in its node (Megatron-Bridge #3490)."""
    job = {"model": "olmoe-1b-7b", "gpu": "h100", "gpus": 8, "framework": "megatron", "seq_len": 4096, "top": 1}
    for ep, said in ((8, True), (1, False)):
        answer = memcalc.plan(**job, tp=1, pp=1, cp=1, ep=ep, recompute="full", global_batch=64, advice=False)
        assert answer.plans
        assert any("sends fewer copies" in text for text in answer.warnings) == said


@pytest.mark.slow
def test_whole_experts_beside_tensor_parallelism_are_searched() -> None:
    """Mixtral 8x22B on 128 H100 reaches 1,946 tokens/s with ETP 1, 1,828 with experts split (arXiv:2504.14960).

    The command of a plan says what the search chose.
    """
    job = {"model": "mixtral-8x22b", "gpu": "h100", "gpus": 128, "framework": "megatron", "seq_len": 4096}
    job |= {"global_batch": 256, "expert_imbalance": 1, "tp": 2, "pp": 8, "objective": "throughput", "top": 1}
    job["settings"] = {"strategy.experts_padded": True, "strategy.reduce_dtype": "bf16"}
    open_plan = memcalc.plan(**job, advice=False).plans[0]
    split = {**job["settings"], "strategy.etp": 2}
    split_plan = memcalc.plan(**{**job, "settings": split}, advice=False).plans[0]
    assert open_plan.strategy.etp == 1
    ratio = open_plan.time.tokens_per_second_per_gpu / split_plan.time.tokens_per_second_per_gpu
    assert ratio == pytest.approx(1946 / 1828, abs=0.08)
    assert "--set strategy.etp=1" in open_plan.command
    again = memcalc.estimate(**keywords(open_plan.command))
    assert (again.peak.device, again.strategy.etp) == (open_plan.peak.device, 1)


def test_more_expert_ranks_than_data_parallel_ones_are_found() -> None:
    """Megatron-Bridge's Qwen3 30B-A3B in TP 4, EP 4 on four GPUs: experts share out the ranks of TP."""
    job = {"model": "qwen3-30b-a3b", "gpu": "b200", "gpus": 4, "framework": "megatron", "tp": 4, "ep": 4}
    first = memcalc.plan(**job, optimizer="sgd-momentum", top=1, advice=False).plans[0]
    assert (first.strategy.tp, first.strategy.ep, first.strategy.etp) == (4, 4, 1)


def test_experts_are_not_searched_where_a_framework_or_a_model_has_none_apart() -> None:
    """Megatron-LM's core 0.9 (2024-10) has no --expert-tensor-parallel-size."""
    job = {"gpus": 8, "gpu": "h200", "tp": 2, "optimizer": "sgd-momentum", "offload": "none", "recompute": "full"}
    for words in ({"framework": "megatron@2024-10"}, {"framework": "torchtitan"}):
        plans = memcalc.plan(model="qwen3-30b-a3b", **job, **words, top=5, rank_all=True, advice=False).plans
        assert plans
        assert {plan.strategy.etp for plan in plans} == {0}
    dense = memcalc.plan(model="llama-3.2-1b", **job, framework="megatron", top=5, rank_all=True, advice=False)
    assert {plan.strategy.etp for plan in dense.plans} == {0}


@pytest.mark.slow
def test_a_pipeline_of_experts_that_no_ranks_share_out_is_not_first_where_another_is_near() -> None:
    """NVIDIA's recipes of Qwen3 235B on 256 B300 have EP 8, and none of 127 published pipelines EP 1."""
    answer = memcalc.plan(model="qwen3-235b-a22b", gpu="b300", gpus=256, framework="megatron", seq_len=4096,
                          global_batch=8192, top=3, advice=False)  # fmt: skip
    first, speed = answer.plans[0], [plan.time.tokens_per_second_per_gpu for plan in answer.plans]
    assert (first.strategy.ep, first.strategy.tp, first.strategy.recompute) == (8, 1, "none")
    assert max(speed) < 1.25 * speed[0]


def test_every_published_pipeline_of_routed_experts_shares_them_out() -> None:
    """What the choice of plans rests on: none has all experts on each rank, or shares them out over more than 64."""
    rows = [
        {**{f"strategy.{name}": value for name, value in sweep["strategy"].items()},
         **dict(zip(sweep["columns"], row, strict=True))}
        for name in ("moe", "megatron-bridge")
        for sweep in tomllib.loads((LAYOUTS / f"{name}.toml").read_text(encoding="utf-8"))["sweep"]
        for row in sweep["rows"]
    ]  # fmt: skip
    routed = [row for row in rows if "strategy.expert_imbalance" in row and (row.get("strategy.pp") or 1) > 1]
    assert len(routed) > 60
    assert all((row.get("strategy.ep") or 1) > 1 for row in routed)
    assert max(row.get("strategy.ep") or 1 for row in rows) <= 64


@pytest.mark.slow
def test_experts_over_more_ranks_than_in_any_published_layout_are_not_first_where_another_is_near() -> None:
    """DeepSeek-V3 was trained on 2,048 H800 with EP 64 (arXiv:2412.19437, section 3.2); it has 256 experts."""
    answer = memcalc.plan(model="deepseek-v3", gpu="h800", gpus=2048, framework="megatron", top=3, advice=False)
    assert answer.plans[0].strategy.ep <= 64
    assert max(plan.strategy.ep for plan in answer.plans[1:]) > 64
