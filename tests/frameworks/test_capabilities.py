"""The one table of what each framework can be told: it is complete, it bounds the search, and answers name the rest."""

from __future__ import annotations

import typing
from typing import Any

import pytest

import memcalc
from memcalc.api import load_model, single
from memcalc.errors import InputError
from memcalc.formulas.recompute import NAMES
from memcalc.frameworks import FRAMEWORKS, Habits
from memcalc.frameworks.capabilities import Capabilities, capabilities_of, check_told, own_code, policy_kind
from memcalc.planner.answer import strategy_of
from memcalc.planner.axes import OFFLOADS
from memcalc.planner.direct import policies
from memcalc.runs import read_runs
from memcalc.specs.strategy import OPTIMIZERS, OptimizerImpl, Strategy
from memcalc.validation import Presets, job_of, model_of

ERAS = [
    pytest.param(habits, able, id=f"{name}@{era}{'' if able is habits.capabilities else ' without script'}")
    for name, eras in FRAMEWORKS.items()
    for era, habits in eras
    for able in (habits.capabilities, habits.capabilities.tuned)
    if able is not None
]
SMALL: dict[str, Any] = {"model": "qwen2.5-0.5b", "gpu": "a100-40g", "seq_len": 2048, "global_batch": 16}
POLICIES = {
    *policies(load_model("deepseek-v3")), *policies(load_model("llama-2-7b")), *NAMES, "segments-4", "modules:mlp",
}  # fmt: skip


@pytest.mark.parametrize(("habits", "able"), ERAS)
def test_all_that_is_modelled_is_either_told_or_says_its_code(habits: Habits, able: Capabilities) -> None:
    """Values that the era's columns have, and all values of the axes that every framework shares."""
    assert {*map(str, habits.zero)} == {*able.zero.values}
    assert {*habits.widths} == {*able.precision.values}
    assert {*habits.losses, "fused-linear"} <= {*able.loss.values}
    assert {*OPTIMIZERS} == {*able.optimizer.values}
    assert {*typing.get_args(OptimizerImpl)} == {*able.optimizer_impl.values}
    assert all(able.recompute.needs(policy_kind(name)) is not None for name in POLICIES)
    kinds = {kind for kind in ("tp", "tp+sp", "pp", "cp", "ep") if habits.tensor_parallel}
    known = {*able.parallel.values} - {"dp", "hsdp"}
    assert {kind for kind in kinds if not {*kind.split("+")} & {*habits.lacks}} == known
    assert ("hsdp" in able.parallel.values) <= (max(habits.zero) > 0)
    offloads = [",".join(parts) or "none" for parts in OFFLOADS if "params" not in parts]
    assert all(able.offload.needs(value) is not None for value in offloads)


@pytest.mark.parametrize(("habits", "able"), ERAS)
def test_the_frameworks_own_defaults_are_told(habits: Habits, able: Capabilities) -> None:
    usual = Strategy()
    assert able.optimizer_impl.needs(habits.optimizer_impl) == ""
    for option in ("loss", "compile", "reduce_dtype", "grad_accum_dtype", "offload_to", "optimizer"):
        assert getattr(able, option).needs(getattr(usual, option)) == "", option


@pytest.mark.parametrize(("habits", "able"), ERAS)
def test_values_that_clash_are_values_of_the_table(habits: Habits, able: Capabilities) -> None:
    for clash in able.clashes:
        assert bool(clash.code) != bool(clash.why)
        for option, values in (clash.first, clash.second):
            assert {*values} & {*getattr(able, option).values}, (habits.name, option)


@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name not in ("plain", "ddp")])
def test_a_search_lists_what_the_framework_can_be_told(framework: str) -> None:
    found = memcalc.plan(**SMALL, gpus=2, framework=framework, top=6)
    assert found.plans
    for plan in found.plans:
        assert own_code(plan.strategy, load_model(SMALL["model"])) == plan.own_code == ()
    assert not any("code of your own" in warning for warning in found.warnings)


def test_beyond_searches_more_and_each_plan_says_its_code() -> None:
    narrow = memcalc.plan(**SMALL, gpus=2, top=1, advice=False)
    wide = memcalc.plan(**SMALL, gpus=2, beyond=True, top=30, advice=False)
    assert wide.searched > narrow.searched
    assert any(plan.own_code for plan in wide.plans)
    pipelined = [plan for plan in wide.plans if plan.strategy.pp > 1]
    assert all(any(sentence.startswith("pp: ") for sentence in plan.own_code) for plan in pipelined)
    assert wide.job.query["beyond"] is True
    assert "--beyond" in wide.command


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({"recompute": "sqrt"}, "recompute sqrt: wrap runs of blocks"),
        ({"pp": 2}, "pp: cut the model into stages"),
        ({"offload": "optimizer"}, "offload optimizer: write an optimizer"),
    ],
)
def test_a_pin_is_honoured_and_its_code_is_named(words: dict[str, Any], code: str) -> None:
    found = memcalc.plan(**SMALL, gpus=2, top=3, **words)
    assert found.plans
    for plan in found.plans:
        stated = {name: getattr(plan.strategy, name) for name in words}
        assert stated == {**words, **({"offload": ("optimizer",)} if "offload" in words else {})}
        assert any(sentence.startswith(code) for sentence in plan.own_code)
    assert any(f"code of your own: {code}" in warning for warning in found.warnings)
    alone = memcalc.estimate(**SMALL, gpus=2, **words)
    assert any(code in warning for warning in alone.warnings)


def test_where_only_code_of_ones_own_fits_the_answer_says_so() -> None:
    """16 bytes a parameter of 1.24 x 10^9 are 18.4 GiB: without shards they need an optimizer in host memory."""
    found = memcalc.plan(model="llama-3.2-1b", gpu="l4", gpus=1, framework="plain")
    assert not found.plans
    assert "offload optimizer: write an optimizer" in found.too_large
    assert "--beyond" in found.too_large


@pytest.mark.parametrize(
    "words",
    [
        {"framework": "megatron", "zero": 0, "offload": "optimizer"},  # use_precision_aware_optimizer needs zero 1
        {"framework": "megatron", "model": "mixtral-8x7b", "tp": 2, "sp": False, "ep": 2},  # yaml_arguments.py, 338
        {"framework": "megatron", "offload": "params"},
        {"framework": "ddp", "offload": "params"},
        {"framework": "fsdp2", "settings": {"strategy.grad_accum_dtype": "fp32"}},  # of DeepSpeed's JSON alone
    ],
)
def test_what_does_not_exist_in_a_framework_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        memcalc.estimate(**{**SMALL, "gpus": 4, **words})


def test_parts_are_told_of_the_classes_that_have_them() -> None:
    """GPT-2's blocks call them attn, and its class has no plan for tensor parallelism."""
    for name, code in (("llama-3-8b", False), ("gpt2", True)):
        assert bool(own_code(Strategy(zero=3, recompute="mlp"), load_model(name))) is code
        assert bool(own_code(Strategy(zero=3, tp=2), load_model(name))) is code
    assert own_code(Strategy(zero=3, tp=2, sp=True), load_model("llama-3-8b"))
    assert own_code(Strategy(zero=3, tp=2, offload=("activations",)), load_model("llama-3-8b"))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "t5-base"])
def test_models_that_the_script_does_not_run_have_what_launchers_say(name: str) -> None:
    """Accelerate and the Trainer checkpoint every block or none."""
    model = load_model(name)
    assert own_code(Strategy(zero=3, recompute="block-4"), model)
    assert not own_code(Strategy(zero=3, recompute="full"), model)


def test_adapters_are_launched_without_the_script() -> None:
    assert own_code(Strategy(zero=3, recompute="block-4", lora="16:q"))
    assert capabilities_of("fsdp2", adapters=True) is capabilities_of("fsdp2").tuned


def test_megatrons_stages_are_alike_unless_said() -> None:
    """Layers must be divisible by the stages (arguments.py, validate_args); embedding and loss may count as layers."""
    words: dict[str, Any] = {"gpu": "a100-80g", "framework": "megatron", "tp": 8}
    for model, stages in (("gpt3-175b", 11), ("llama-2-70b", 12)):
        with pytest.raises(InputError, match="divisor"):
            memcalc.estimate(**words, model=model, pp=stages, gpus=8 * stages)
    job = {**words, "model": "llama-3.1-405b", "pp": 16, "gpus": 128}
    fields = {"strategy.embedding_in_split": True, "strategy.loss_in_split": True}
    assert memcalc.estimate(**job, settings=fields).strategy.pp == 16
    assert memcalc.estimate(
        **job, settings=dict.fromkeys(("strategy.first_stage_layers", "strategy.last_stage_layers"), 7)
    )
    with pytest.raises(InputError, match="15 stages between"):
        memcalc.estimate(**job, settings={"strategy.first_stage_layers": 7})


def test_a_search_offers_no_stages_that_megatron_refuses() -> None:
    found = memcalc.plan(model="gpt2-large", gpu="a100-40g", gpus=8, framework="megatron", top=30, advice=False)
    assert load_model("gpt2-large").num_layers == 36
    assert any(plan.strategy.pp > 1 for plan in found.plans)
    for plan in found.plans:
        ends = (plan.strategy.first_stage_layers, plan.strategy.last_stage_layers)
        parts = 36 - sum(ends) + plan.strategy.embedding_in_split + plan.strategy.loss_in_split
        stages = plan.strategy.pp - sum(map(bool, ends))
        assert parts % (stages * plan.strategy.vpp) == 0


@pytest.mark.parametrize(
    ("framework", "last"), [("fsdp2", "params"), ("deepspeed", "optimizer"), ("ddp", "activations")]
)
def test_the_ladder_ends_with_an_offload_that_the_framework_has(framework: str, last: str) -> None:
    found = memcalc.ladder(**SMALL, gpus=2, framework=framework)
    assert [stage.change for stage in found.readings[0].stages][-1] == f"offload={last}"


def test_what_is_told_passes_and_a_refusal_lists_what_there_is() -> None:
    check_told(Strategy(framework="megatron", zero=1, precision="bf16-mixed", optimizer_impl="fused"))
    with pytest.raises(InputError, match="compile"):
        check_told(Strategy(framework="megatron", zero=1, optimizer_impl="fused", compile="model"))


def test_a_search_shares_blocks_out_unequally_where_the_depth_does_not_divide_them() -> None:
    """Llama 3's 405B: 126 blocks, TP 8, PP 16, a block less in the first and the last stage (arXiv:2407.21783)."""
    found = memcalc.plan(
        model="llama-3.1-405b", gpu="h100", gpus=512, framework="megatron", tp=8, cp=1, recompute="none",
        offload="none", top=6, rank_all=True, advice=False,
    )  # fmt: skip
    deep = [plan for plan in found.plans if plan.strategy.pp == 16]
    assert deep
    for plan in deep:
        assert plan.strategy.embedding_in_split
        assert plan.strategy.loss_in_split
        again = memcalc.estimate(**plan.job.keywords())
        assert (again.strategy, again.peak.device) == (plan.strategy, plan.peak.device)


def test_published_runs_did_what_the_table_calls_told() -> None:
    """Of 385 runs as their sources state them, with the frameworks of their time; the rest is modelled, and named.

    LLM Foundry's ran on Composer, a trainer of its own with an optimizer of its own (DecoupledAdamW); the probe's own
    script hands PyTorch's optimizer in each of its forms; Lightning Thunder's benchmark is litgpt's model in a loop of
    its own.
    """
    own = ("llm-foundry", "Lightning Thunder benchmark")
    presets, named = Presets(), []
    runs = [run for run in read_runs().run if run.strategy.get("float8") != "nvfp4" and run.group not in own]
    runs = [run for run in runs if not run.source.startswith("memcalc probe")]
    for run in runs:
        options, settings = job_of(run)
        made = single(model=model_of(run, presets), gpu=presets.gpu(run.gpu), settings=settings, **options)
        named += [(run.id, code) for code in own_code(strategy_of(made.grid), made.job.model)]
    assert len(runs) > 350
    assert len(named) < 0.04 * len(runs), named
