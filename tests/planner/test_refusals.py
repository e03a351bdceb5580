"""What no strategy can be is refused by its own name, by every command alike, and is never a defect."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.api import load_model
from memcalc.cli.app import app
from memcalc.errors import InputError
from memcalc.frameworks import habits_of
from memcalc.specs.options import FIELDS

JOB = ["--model", "gpt2", "--gpu", "h200", "--gpus", "2"]
COMMANDS = [["plan"], ["estimate"], ["ladder"], ["max", "micro-batch"]]


def refusal(*words: str) -> str:
    """What a command says that refuses its input."""
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == 2, (words, answer.exception)
    return answer.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("framework", ["deepspeed", "ddp"])
@pytest.mark.parametrize("optimizer", [[], ["--optimizer", "soap"]], ids=["adamw", "soap"])
def test_a_precision_that_the_framework_has_not_is_what_is_refused(
    command: list[str], framework: str, optimizer: list[str]
) -> None:
    widths = habits_of(framework).widths
    assert "fp8-mixed" not in widths
    said = refusal(*command, *JOB, "--framework", framework, "--precision", "fp8-mixed", *optimizer)
    assert "--precision 'fp8-mixed'" in said
    assert all(name in said for name in widths)


@pytest.mark.parametrize("command", [*COMMANDS, ["ladder", "--recipe"]], ids=" ".join)
@pytest.mark.parametrize("framework", ["fsdp2", "fsdp1", "torchtitan"])
def test_an_optimizer_that_runs_at_no_stage_of_the_framework_is_what_is_refused(
    command: list[str], framework: str
) -> None:
    said = refusal(*command, *JOB, "--framework", framework, "--optimizer", "soap")
    assert "--optimizer 'soap'" in said
    assert "ddp" in said


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "fsdp2", "ddp"])
def test_a_recipe_of_8_bit_products_is_refused_where_no_precision_that_is_searched_has_any(framework: str) -> None:
    words = {"model": "gpt2", "gpu": "h200", "gpus": 2, "framework": framework}
    settings = {"strategy.float8": "rowwise_with_gw_hp"}
    with pytest.raises(InputError, match=r"strategy\.float8 .* needs precision fp8-mixed"):
        memcalc.plan(**words, settings=settings)
    with pytest.raises(InputError, match=r"strategy\.float8 .* needs precision fp8-mixed"):
        memcalc.estimate(**words, settings=settings)


@pytest.mark.parametrize("key", [key for key, row in FIELDS.items() if row.kind == "count"])
@pytest.mark.parametrize("beyond", ["least", "most"])
def test_a_count_beyond_its_bounds_is_refused_with_them(key: str, beyond: str) -> None:
    row = FIELDS[key]
    value = row.least - 1 if beyond == "least" else row.most + 1
    said = refusal("estimate", *JOB, "--set", f"{key}={value}")
    assert f"{key} '{value}'" in said
    assert f"from {row.least} to {row.most:,}" in said


@pytest.mark.parametrize("bound", ["least", "most"])
def test_the_bounds_of_a_field_that_every_job_has_are_taken(bound: str) -> None:
    for key in ("strategy.mtp", "strategy.flash_version", "workload.eval_batches_kept"):
        answer = memcalc.estimate(model="gpt2", gpu="h200", settings={key: getattr(FIELDS[key], bound)})
        assert answer.peak.allocated > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [({"zero": 3, "settings": {"strategy.reshard": "never"}}, "strategy.reshard 'never': is zero 2, not 3")],
)
def test_where_no_strategy_is_possible_the_reason_is_that_of_an_estimate(words: dict[str, object], reason: str) -> None:
    answer = memcalc.plan(model="gpt2", gpu="h100", **{"gpus": 2, **words})
    assert not answer.plans
    assert reason in answer.too_large
    assert answer.seq_len == 1024


@pytest.mark.parametrize("words", [("max", "micro-batch", *JOB), ("max", "seq-len", *JOB), ("min", "gpus", *JOB[:4])])
def test_a_width_of_added_gradients_holds_in_inverse_questions(words: tuple[str, ...]) -> None:
    """Of what DeepSpeed of 2021 trains without ZeRO it leaves out the widths that its engine refuses."""
    options = ["--framework", "deepspeed@2021", "--set", "strategy.grad_accum_dtype=fp16"]
    answer = CliRunner().invoke(app, [*words, *options])
    assert answer.exit_code == 0, answer.exception


EXPERTS = {"model": "deepseek-v2-lite", "gpu": "h200", "gpus": 8, "framework": "megatron"}


def test_an_expert_is_split_over_a_divisor_or_a_multiple_of_the_other_ranks() -> None:
    split = {"settings": {"strategy.etp": 3}}
    for call in (memcalc.estimate, memcalc.plan):
        with pytest.raises(InputError, match=r"strategy\.etp 3: must be a divisor or a multiple of tp = 2"):
            call(**EXPERTS, **split, tp=2)


def test_a_refusal_of_expert_ranks_names_the_setting_under_which_there_are_enough() -> None:
    words = {**EXPERTS, "tp": 4, "ep": 8}
    allowed = "must be a divisor of dp x cp = 2; of 8 where no expert is split: --set strategy.etp=1"
    with pytest.raises(InputError, match=allowed):
        memcalc.estimate(**words)
    assert memcalc.estimate(**words, settings={"strategy.etp": 1}).strategy.ep == 8
    with pytest.raises(InputError, match=r"must be a divisor of dp x cp = 2\.$"):
        memcalc.estimate(**{**words, "ep": 16})


def test_a_search_lists_what_an_estimate_takes() -> None:
    split = {"settings": {"strategy.etp": 2}}
    plans = memcalc.plan(**EXPERTS, **split, advice=False).plans
    assert plans
    for plan in plans:
        assert plan.job is not None
        assert memcalc.estimate(**plan.job.keywords()).strategy == plan.strategy


def test_an_expert_on_more_ranks_than_the_rest_has_the_rows_of_all_of_them() -> None:
    """Its input is gathered over them, so that it grows with them; what its split weights make of it does not."""
    kept = []
    for split in (1, 2, 4):
        words = {**EXPERTS, "ep": 8 // split, "micro_batch": 1, "seq_len": 4096, "recompute": "none"}
        terms = memcalc.estimate(**words, settings={"strategy.etp": split}).terms
        kept.append({term.name: term.bytes for term in terms if term.component == "activations"})
    one, two, four = kept
    gathered, divided = "decoder experts' input", "decoder experts' up projection output"
    assert (two[gathered], four[gathered]) == (2 * one[gathered], 4 * one[gathered])
    assert one[divided] == two[divided] == four[divided]


LARGE = {"model": "llama-3.1-405b", "gpu": "h100", "gpus": 1024, "seq_len": 8192, "framework": "megatron"}


@pytest.mark.parametrize("vpp", [1, 4])
def test_a_depth_that_divides_blocks_with_embedding_and_loss_alone_is_planned_where_it_is_typed(vpp: int) -> None:
    """126 blocks, embedding and loss are 128 parts: Llama 3 405B had 16 stages (arXiv:2407.21783, table 4)."""
    typed = (
        memcalc.plan(**LARGE, tp=8, pp=16, cp=1, vpp=vpp, recompute="full", offload="none", top=1, advice=False)
        .plans[0]
        .strategy
    )
    assert (typed.pp, typed.vpp, typed.embedding_in_split, typed.loss_in_split) == (16, vpp, True, True)


@pytest.mark.parametrize("chunks", [[], ["--vpp", "4"]], ids=["stages", "chunks"])
def test_an_estimate_names_the_fields_that_make_unequal_stages_possible(chunks: list[str]) -> None:
    words = ["estimate", "--model", "llama-3.1-405b", "--gpu", "h100", "--gpus", "1024", "--framework", "megatron"]
    words += ["--tp", "8", "--pp", "16", "--recompute", "full", "--global-batch", "512", *chunks]
    fields = "--set strategy.embedding_in_split=true --set strategy.loss_in_split=true"
    assert f"or set unequal stages: {fields}." in refusal(*words)
    assert CliRunner().invoke(app, [*words, *fields.split()]).exit_code == 0


def test_chunks_that_no_shares_make_possible_are_refused_in_a_search_too() -> None:
    with pytest.raises(InputError, match=r"pp x vpp = 48 to be a divisor of the 126 blocks of llama-3\.1-405b\.$"):
        memcalc.plan(**LARGE, pp=16, vpp=3)


KERNELS = ("sdpa", "efficient", "math", "flash")
HAS = {"bloom-560m": (), "mpt-7b": (), "gpt-neo-125m": ("flash",), "gemma-2-2b": ("flash",), "gpt2": KERNELS}
"""Kernels that a class of Transformers 5.24 takes, by its ``_supports_sdpa`` and ``_supports_flash_attn``."""


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model", HAS)
def test_a_kernel_that_the_class_has_not_is_refused(model: str, kernel: str) -> None:
    """Transformers raises as the model is loaded; eager alone runs on them all."""
    job = {"gpu": "h200", "framework": "hf", "gpus": 1, "seq_len": 512, "precision": "bf16"}
    if kernel in HAS[model]:
        assert memcalc.estimate(model=model, attention=kernel, **job).strategy.attention == kernel
        return
    with pytest.raises(InputError, match=rf"attention '{kernel}': the class of {model} has n.*; use eager"):
        memcalc.estimate(model=model, attention=kernel, **job)


@pytest.mark.parametrize("model", HAS)
def test_the_kernels_of_a_class_are_those_of_transformers(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, str(load_model(model).hf_class))
    assert (cls._supports_sdpa, cls._supports_flash_attn) == ("sdpa" in HAS[model], "flash" in HAS[model])
