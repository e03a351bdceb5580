"""Remedies where nothing fits: what each costs, in which order, and that each is what its command answers."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, get_args

import pytest
from command_lines import keywords
from typer.testing import CliRunner

import memcalc
from memcalc.api import single
from memcalc.cli.app import app
from memcalc.frameworks.capabilities import own_code
from memcalc.planner.changes import Search
from memcalc.report.plan_tables import remedy_blocks
from memcalc.report.tables import Table
from memcalc.results.plans import Nearest, RemedyGroup

JOB: dict[str, Any] = {"model": "gpt2-xl", "gpu": "v100-16g", "gpus": 1, "seq_len": 1024, "offload": "none"}


@pytest.fixture(scope="module")
def answer() -> Any:
    return memcalc.plan(**JOB)


def by_group(answer: Any, group: str) -> list[Nearest]:
    """Return the remedies of a group."""
    return [remedy for remedy in answer.nearest if remedy.group == group]


def test_groups_stand_in_the_order_of_what_they_cost(answer: Any) -> None:
    assert not answer.plans
    order = [get_args(RemedyGroup).index(remedy.group) for remedy in answer.nearest]
    assert all(before <= after for before, after in pairwise(order))


def test_adapters_are_among_them_with_their_command(answer: Any) -> None:
    changes = {remedy.change for remedy in by_group(answer, "fewer trained parameters")}
    assert {"--lora 16", "--lora 16 --quantize nf4"} <= changes


def test_offload_says_its_host_memory(answer: Any) -> None:
    offloaded = next(remedy for remedy in by_group(answer, "same training") if "--offload" in remedy.change)
    assert offloaded.host_memory > 0


def test_each_is_what_its_command_answers(answer: Any) -> None:
    for remedy in (remedy for remedy in answer.nearest if remedy.group != "not enough"):
        assert remedy.job is not None
        first = memcalc.plan(**remedy.job.keywords(), top=1, advice=False).plans[0]
        assert (first.verdict, first.peak.device) == (remedy.verdict, remedy.device)
        assert remedy.slowest < first.time.tokens_per_second_per_gpu < remedy.fastest


def test_what_is_not_enough_does_not_fit(answer: Any) -> None:
    for remedy in by_group(answer, "not enough"):
        assert remedy.verdict == "does-not-fit"
        assert remedy.device > answer.capacity


def test_memory_of_unknown_size_is_said() -> None:
    """The node of the RTX 3090 has no host memory on file: nobody can say whether the offload has room."""
    result = memcalc.plan(model="llama-3.2-3b", gpu="rtx-3090", gpus=1, offload="none")
    offloaded = [remedy for remedy in result.nearest if "--offload" in remedy.change]
    assert offloaded
    assert all(remedy.unknown for remedy in offloaded)
    assert all(not remedy.unknown for remedy in result.nearest if "--gpu " in remedy.change)


def test_a_plan_that_is_tight_has_what_makes_it_safe() -> None:
    """LoRA of an 8B on a 24 GB card: logits of 128,256 words stand at the peak, which a fused loss never makes."""
    result = memcalc.plan(model="llama-3-8b", gpu="rtx-3090", gpus=1, lora=True, offload="none")
    assert {plan.verdict for plan in result.plans} == {"tight"}
    assert [remedy.verdict for remedy in result.nearest] == ["fits"] * len(result.nearest)
    assert "--loss fused-linear" in {remedy.change for remedy in result.nearest}


def test_who_has_hundreds_of_gpus_is_led_to_no_adapters() -> None:
    """A search for each would take longer than the answer, and name what nobody runs at that size."""
    job = {"model": "llama-2-7b", "gpu": "rtx-3090", "framework": "ddp"}
    for gpus, adapted in ((128, True), (256, False)):
        changes = [remedy.change for remedy in memcalc.plan(gpus=gpus, **job).nearest]
        assert changes
        assert any("--lora" in change for change in changes) is adapted


@pytest.mark.slow
def test_experts_on_hundreds_of_nodes_are_led_to_megatron() -> None:
    """DeepSeek-V3 ran on 2,048 H800 in a pipeline with EP 64 (arXiv:2412.19437); torchtitan's space is evaluated whole.

    Of frameworks whose spaces together are too large to search unasked, the one that is left out is not Megatron-LM.
    """
    result = memcalc.plan(model="deepseek-v3", gpu="h800", gpus=2048)
    others = [remedy for remedy in result.nearest if remedy.group == "another framework"]
    assert not result.plans
    assert [(other.change, other.verdict) for other in others][:1] == [("--framework megatron", "fits")]


@pytest.mark.slow
def test_two_consumer_gpus_are_led_to_a_quantised_base() -> None:
    """Answer.AI trains 70B by FSDP and QLoRA on two cards of 24 GB, its base in host memory.

    No plan is called safe: others' reports of such jobs are up to 46% above what is counted.
    """
    result = memcalc.plan(model="llama-3-70b", gpu="rtx-4090", gpus=2)
    adapters = [remedy for remedy in result.nearest if remedy.group == "fewer trained parameters"]
    assert {remedy.verdict for remedy in adapters} == {"tight"}
    assert all("--quantize nf4 --offload" in remedy.change for remedy in adapters)
    assert all(0 < remedy.host_memory < 70.6e9 for remedy in adapters)


def test_experts_on_many_nodes_are_led_to_expert_parallelism() -> None:
    """FSDP gathers each expert from everywhere and offloads; Megatron-LM's own example of Mixtral has EP 8.

    torchtitan has no flavor of its sizes; a screen has all others in one line, the fastest before what is much slower.
    """
    job = {"model": "mixtral-8x7b", "gpu": "h100", "gpus": 64}
    result = memcalc.plan(**job)
    others = [remedy for remedy in result.nearest if remedy.group == "another framework"]
    assert result.plans[0].strategy.offload
    assert [other.change for other in others] == [f"--framework {name}" for name in ("megatron", "deepspeed")]
    assert {other.verdict for other in others} == {"fits"}
    assert others[0].tokens_per_second_per_gpu > 2 * result.plans[0].time.tokens_per_second_per_gpu
    (table, *_) = (block for block in remedy_blocks(result, brief=True) if isinstance(block, Table))
    assert [row[0] for row in table.rows if "framework" in row[0]] == ["--framework megatron (or deepspeed)"]
    assert not [answer for answer in memcalc.plan(**job, framework="fsdp2").nearest if answer.group == others[0].group]


@pytest.mark.slow
def test_a_long_context_is_led_to_a_fused_loss_and_to_a_framework_that_cuts_the_sequence() -> None:
    """Llama 3.1 itself was taught 131,072 tokens with context parallelism (16); FSDP 2 alone has none.

    A launcher of FSDP 2 takes ``use_liger_kernel``, so that a loss without whole logits needs no code.
    """
    job = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 16, "seq_len": "128k", "global_batch": "4M tokens"}
    result = memcalc.plan(**job)
    assert not result.plans
    fused = result.nearest[0]
    assert (fused.change, fused.verdict) == ("--loss fused-linear --offload activations", "fits")
    assert fused.job is not None
    assert not own_code(memcalc.plan(**fused.job.keywords(), top=1, advice=False).plans[0].strategy)
    first = next(remedy for remedy in result.nearest if remedy.group == "another framework")
    assert first.verdict == "fits"
    assert first.job is not None
    plan = memcalc.plan(**first.job.keywords(), top=1, advice=False).plans[0]
    assert plan.verdict == "fits"
    assert plan.strategy.cp > 1
    assert not [answer for answer in memcalc.plan(**job, framework="fsdp2").nearest if answer.group == first.group]


def test_experts_within_a_node_are_led_to_expert_parallelism_too() -> None:
    """FSDP gathers 32 experts of each block for every micro-batch; the next line names what does not."""
    words = ["plan", "--model", "gpt-oss-20b", "--gpu", "h100", "--gpus", "8"]
    screen = " ".join(CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output.split())
    shown = re.search(r"Next add --offload none --framework (\w+): (\S+) times as fast", screen)
    assert shown is not None
    line = " ".join(["memcalc", *words])
    slow = memcalc.plan(**keywords(line), advice=False, top=1).plans[0].time
    fast = memcalc.plan(**keywords(f"{line} --offload none --framework {shown[1]}"), advice=False, top=1).plans[0]
    gain = fast.time.tokens_per_second_per_gpu / slow.tokens_per_second_per_gpu
    assert (fast.strategy.ep > 1, gain) == (True, pytest.approx(float(shown[2]), abs=0.05))


@pytest.mark.slow
def test_a_plan_that_pays_for_its_memory_in_time_does_not_hide_a_faster_framework() -> None:
    """405B on 512: Meta trained it with TP8 and PP16 (arXiv:2407.21783, table 4); FSDP 2 has no pipeline by itself."""
    job: dict[str, Any] = {"model": "llama-3.1-405b", "gpu": "h100", "gpus": 512, "offload": "none"}
    result = memcalc.plan(**job)
    (faster,) = (remedy for remedy in result.nearest if remedy.group == "another framework")
    assert (faster.change, faster.verdict) == ("--framework megatron", "fits")
    assert faster.tokens_per_second_per_gpu > 1.5 * result.plans[0].time.tokens_per_second_per_gpu
    assert faster.job is not None
    first = memcalc.plan(**faster.job.keywords(), top=1, advice=False).plans[0]
    assert (first.strategy.tp, first.strategy.pp, first.strategy.offload) == (8, 16, ())
    assert not memcalc.plan(**job, framework="fsdp2").nearest


@pytest.mark.slow
def test_offload_is_not_the_last_word_where_a_switch_makes_it_needless() -> None:
    """A fused AdamW makes no copies of the states, so eight cards of 192 GB hold 16 bytes a parameter of 70B."""
    words = ["plan", "--model", "llama-3.1-70b", "--gpu", "mi300x", "--gpus", "8"]
    screen = " ".join(CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output.split())
    assert "Next add --offload none --optimizer-impl fused: no slower" in screen
    line = " ".join(["memcalc", *words, "--offload none --optimizer-impl fused"])
    assert memcalc.plan(**keywords(line), advice=False).plans[0].verdict == "fits"


def test_a_slow_plan_that_fits_does_not_hide_a_fast_one() -> None:
    """Four L4 over PCIe: whole logits leave room for tensor parallelism alone, other segments for more."""
    words = ["plan", "--model", "llama-3.2-3b", "--gpu", "l4", "--gpus", "4", "--framework", "deepspeed"]
    words += ["--seq-len", "2048"]
    screen = CliRunner().invoke(app, words, env={"COLUMNS": "120"}).output
    shown = re.search(r"Next      add (.+): (\S+) times as fast", screen)
    assert shown is not None
    slow, fast = (memcalc.plan(**keywords(" ".join(["memcalc", *words, more]))) for more in ("", shown[1]))
    assert (slow.plans[0].verdict, fast.plans[0].verdict) == ("fits", "fits")
    faster = fast.plans[0].time.tokens_per_second_per_gpu / slow.plans[0].time.tokens_per_second_per_gpu
    assert faster == pytest.approx(float(shown[2]), abs=0.05)
    assert faster > 1.5
    assert all(remedy.tokens_per_second_per_gpu > slow.plans[0].time.tokens_per_second_per_gpu * 1.5
               for remedy in slow.nearest)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        {"model": "llama-3.2-3b", "gpu": "l4", "gpus": 4, "framework": "deepspeed", "seq_len": 2048},
        {"model": "gpt3-175b", "gpu": "h100", "gpus": 128, "framework": "fsdp2", "offload": "none", "seq_len": 2048},
        {"model": "llama-3.1-405b", "gpu": "h100", "gpus": 512, "offload": "none"},
    ],
)
def test_what_is_left_out_as_too_slow_to_be_named_changes_no_answer(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = memcalc.plan(**job).nearest
    monkeypatch.setattr(Search, "may_reach", lambda *_: True)
    assert memcalc.plan(**job).nearest == named


def test_a_plan_that_fits_has_no_remedies() -> None:
    result = memcalc.plan(model="llama-3-8b", gpu="a100-80g", gpus=1, lora=True, top=1)
    assert result.plans[0].verdict == "fits"
    assert not result.nearest


def test_a_large_cache_is_compared_with_expandable_segments() -> None:
    job = {"model": "llama-2-7b", "gpu": "a100-40g", "gpus": 8, "zero": 3, "recompute": "full"}
    result = memcalc.estimate(**job, advice=True)
    expandable = memcalc.estimate(**job, settings={"strategy.expandable_segments": True})
    assert result.components.reserve > 0.1 * result.peak.device
    assert result.expandable_device == expandable.peak.device < result.peak.device
    assert expandable.expandable_device is None
    assert memcalc.estimate(**job, advice=False).expandable_device is None


def test_a_small_cache_is_not_spoken_of() -> None:
    result = memcalc.estimate(model="llama-3-8b", gpu="a100-80g", gpus=1, lora=True, recompute="full", advice=True)
    assert result.components.reserve <= 0.1 * result.peak.device
    assert result.expandable_device is None


@pytest.mark.slow
def test_a_framework_that_does_not_run_a_models_mixers_is_none_of_them() -> None:
    """Megatron-LM has blocks of its own, and the kernels of Mamba mixers take no adapters."""
    result = memcalc.plan(model="jamba-v0.1", gpu="h100", gpus=64)
    assert result.plans
    assert not [remedy for remedy in result.nearest if "megatron" in remedy.change]
    short = memcalc.plan(model="falcon-mamba-7b", gpu="rtx-4090", gpus=1, offload="none")
    assert short.nearest
    assert not [remedy for remedy in short.nearest if "--lora" in remedy.change]


def test_one_gpu_needs_no_copies_of_fsdp() -> None:
    """16-bit weights, gradients and moments of 8B are 59.8 GiB; FSDP 2 gathers blocks even from itself."""
    result = memcalc.plan(model="llama-3.1-8b", gpu="h100", gpus=1)
    narrow = {remedy.change: remedy.verdict for remedy in by_group(result, "numerics")}
    assert narrow == {"--precision bf16": "tight", "--framework hf --precision bf16": "fits"}


def test_one_gpu_is_led_to_paged_states() -> None:
    """6,738,415,616 weights and gradients of 2 bytes are 25.1 GiB; 8-bit moments, 12.6 GiB, leave no room in 39.4.

    torchtune trains 8B on one GPU so, updating in backward where gradients are too much (8B_full_single_device.yaml).
    """
    result = memcalc.plan(model="llama-2-7b", gpu="a100-40g", gpus=1)
    narrow = by_group(result, "numerics")
    assert {each.change: each.verdict for each in narrow} == {"--precision bf16 --optimizer paged-adamw-8bit": "fits"}
    assert 25.1 < narrow[0].device / 2**30 < 39.4
    assert narrow[0].host_memory > 12.6 * 2**30
    small = memcalc.plan(model="llama-2-7b", gpu="rtx-4090", gpus=1, offload="none")
    (paged,) = by_group(small, "numerics")
    assert paged.change.endswith("--optimizer paged-adamw-8bit --optimizer-in-backward true --global-batch 1")
    assert 12.6 < paged.device / 2**30 < 23.6
    again = memcalc.plan(**keywords(paged.command), advice=False).plans[0]
    assert (again.global_batch, again.accumulation_steps) == (1, 1)


def test_a_batch_that_was_asked_for_is_not_made_one_sequence() -> None:
    result = memcalc.plan(model="llama-2-7b", gpu="rtx-4090", gpus=1, offload="none", global_batch=64)
    assert not [remedy for remedy in result.nearest if "--global-batch" in remedy.change]


def test_megatrons_gradients_in_16_bits_are_a_remedy_and_its_larger_loss_is_none() -> None:
    """NVIDIA's recipe of Llama 3 8B on 8 H100, TP1 CP2 of 8,192 tokens: Megatron-Bridge 0.7, perf_recipes/llama/h100.

    It reduces in bf16 (perf_recipes/_common.py); 8,030,261,248 gradients then have two bytes each, not four.
    """
    words = {"model": "llama-3-8b", "gpu": "h100", "gpus": 8, "framework": "megatron", "cp": 2, "tp": 1, "pp": 1}
    words |= {"seq_len": 8192, "global_batch": 128, "micro_batch": 1, "recompute": "none", "offload": "none"}
    answer = memcalc.plan(**words)
    assert not answer.plans
    narrow = {remedy.change: remedy.verdict for remedy in by_group(answer, "numerics")}
    assert narrow["--set strategy.reduce_dtype=bf16"] == "fits"
    assert not [remedy for remedy in answer.nearest if "fused-kernel" in remedy.change]
    recipe = memcalc.estimate(**words, settings={"strategy.reduce_dtype": "bf16"})
    assert recipe.components.gradients == 2 * 8_030_261_248


def test_a_gpu_without_bf16_trains_in_fp16_without_code() -> None:
    """FSDP 2's script scales the loss; gradients of fp32 shards are unscaled (torch/amp/grad_scaler.py)."""
    first = memcalc.plan(model="gpt2", gpu="v100-32g", gpus=2, top=1, advice=False).plans[0]
    assert (first.strategy.precision, first.own_code) == ("fp16-mixed", ())


def test_a_base_under_adapters_stands_whole_on_each_gpu_where_it_fits() -> None:
    """The Trainer on several GPUs without FSDP is DDP: nothing frozen is gathered for each micro-batch."""
    small = {"model": "llama-3.1-8b", "gpu": "t4", "gpus": 2, "lora": 16, "quantize": "nf4", "seq_len": 2048}
    first = memcalc.plan(**small, advice=False).plans[0]
    assert (first.strategy.framework, first.strategy.zero, first.verdict) == ("hf", 0, "fits")
    alike = memcalc.estimate(**{**first.job.keywords(), "framework": "ddp", "optimizer_impl": "fused"})
    assert alike.peak.device == first.peak.device
    large = memcalc.plan(model="llama-3-70b", gpu="h100", gpus=8, lora=16, top=1, advice=False).plans[0]
    assert (large.strategy.zero, large.verdict) == (3, "fits")  # 141 GB of weights


def test_adapters_are_planned_under_autocast_where_that_is_faster_and_without_where_that_alone_fits() -> None:
    """``bf16`` of the Trainer: adapters multiply in 16 bits, and logits are cast to fp32 (torch, amp/autocast_mode)."""
    job: dict[str, Any] = {"gpu": "rtx-a6000", "gpus": 4, "lora": "16:all-linear", "global_batch": 32, "top": 1}
    faster = memcalc.plan(model="llama-3.1-8b", **job, advice=False).plans[0]
    without = memcalc.plan(model="llama-3.1-8b", **job, autocast=False, advice=False).plans[0]
    assert (faster.strategy.autocast, without.strategy.autocast) == (True, False)
    assert faster.time.step < without.time.step
    assert memcalc.estimate(**faster.job.keywords()).peak.device == faster.peak.device
    full = memcalc.plan(model="llama-3-8b", gpu="rtx-3090", gpus=1, lora=True, offload="none", advice=False).plans[0]
    assert (full.strategy.autocast, full.verdict) == (False, "tight")


def test_what_is_pinned_brings_nothing_that_needs_code_beside_it() -> None:
    """FSDP 2's script cannot be told activations offloaded beside TP: where one is given the other is left out."""
    words: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-40g", "gpus": 4, "recompute": "full", "advice": False}
    words["offload"] = "params,activations"
    open_ = memcalc.plan(**words, top=20).plans
    assert {plan.own_code for plan in open_} == {()}
    assert memcalc.plan(**words, tp=2, top=1).plans[0].own_code


@pytest.mark.parametrize(
    ("framework", "has"), [("megatron", False), ("torchtitan", False), ("fsdp2", True), ("hf", True)]
)
def test_remedies_are_numerics_that_the_framework_has(framework: str, has: bool) -> None:
    """Megatron-LM and torchtitan have no 8-bit AdamW (megatron/training/arguments.py; components/optimizer.py)."""
    one = single(model="llama-2-7b", gpu="a100-40g", gpus=8, framework=framework)
    changes = {change.text for change in Search(one.job, 8, one.record).numerics}
    assert ("--optimizer adamw-8bit" in changes) is has
