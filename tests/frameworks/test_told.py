"""What the table of frameworks calls told, a writer of the framework writes; for all else it names the table's code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

import memcalc
from memcalc.api import load_model, single
from memcalc.convert.formats import get_format
from memcalc.errors import CombinationError, MemcalcError
from memcalc.formulas.recompute import unit_sizes
from memcalc.frameworks import FRAMEWORKS
from memcalc.frameworks.capabilities import (
    FORMATS_OF,
    OPTIONS,
    Capabilities,
    capabilities_of,
    formats_of,
    own_code,
    text_of,
    values_of,
)
from memcalc.handoff.written import Exported, first_written
from memcalc.results.estimates import Estimate
from memcalc.specs.options import BY_NAME
from memcalc.units import GIB

pytestmark = pytest.mark.usefixtures("answers_once")

COUNTED = {"every": "every-2", "block": "block-4", "uniform": "uniform-2", "segments": "segments-4"}
STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
FIELDS = ("reduce_dtype", "grad_accum_dtype", "fsdp_schedule", "precision_aware", *STATES)
BESIDE: list[dict[str, Any]] = [
    {}, {"recompute": "full"}, {"zero": 3}, {"zero": 3, "recompute": "full"}, {"zero": 1}, {"tp": 2},
    {"gpus": 1}, {"gpus": 1, "recompute": "full"}, {"strategy.fsdp_schedule": "simple"}, {"compile": "model"},
    {"optimizer": "adafactor"}, {"gpus": 1, "optimizer": "adafactor"},
    {"optimizer": "galore-adamw"},
]  # fmt: skip
"""Jobs in which a value may be told, the framework's defaults first."""
LEGACY = ("deepspeed@0.3", "deepspeed@0.4", "deepspeed@2021-01")
"""Eras of which no file is written: Megatron-DeepSpeed."""
NO_JOB = {("fsdp1", "optimizer", "galore-adamw"), ("fsdp2", "optimizer", "adafactor")}
"""What no job of the framework has: GaLore projects matrices, and flat shards are vectors; Adafactor's factors are
plain tensors, which mix with no DTensor."""


def tables() -> list[Any]:
    """Return the newest era of each framework that is written, with each table of its and a model that it is of."""
    found = []
    for name, known in FRAMEWORKS.items():
        model = "llama-3.1-8b" if name == "torchtitan" else "llama-3.2-1b"
        for era, habits in known[-1:] if name in FORMATS_OF else ():
            typed = f"{name}@{era}"
            marks = [] if typed.startswith("ddp@") else [pytest.mark.slow]
            if typed not in LEGACY:
                found.append(pytest.param(typed, habits.capabilities, model, id=typed, marks=marks))
            if habits.capabilities.tuned is not None:  # without the script, which runs no routed experts
                found.append(
                    pytest.param(typed, habits.capabilities.tuned, "olmoe-1b-7b", id=f"{typed} launched", marks=marks)
                )
    return found


TABLES = pytest.mark.parametrize(("framework", "able", "model"), tables())


def words_of(framework: str, model: str, option: str, value: str) -> dict[str, Any]:
    """The words of a job that has a value of an option."""
    name = framework.partition("@")[0]
    words: dict[str, Any] = {"model": model, "gpu": "h200", "gpus": 1 if name == "plain" else 4, "seq_len": 2048}
    if option == "parallel":
        kind = {"hsdp": "dp_replicate"}.get(value, value.partition("+")[0])
        degrees = {} if kind == "dp" else {kind: 2, **({"sp": value == "tp+sp"} if kind == "tp" else {})}
        degrees |= {"gpus": 16} if kind == "dp_replicate" else {}  # FSDP 1 has one replica a node
        return {**words, **degrees, **({"model": "deepseek-v2-lite"} if kind == "ep" else {})}
    if option == "uneven":
        blocks = load_model(model).num_layers
        if value.endswith("in_split"):  # both, so that Megatron-LM's stages have equal shares
            ends = {"strategy.embedding_in_split": True, "strategy.loss_in_split": True}
        else:
            ends = {f"strategy.{value}": blocks // 2 - 1}
        return {**words, "pp": 2, **ends}
    if option == "recompute":
        return {**words, option: COUNTED.get(value, "modules:mlp" if value == "modules" else value)}
    if (option, value) == ("loss", "parallel"):
        return {**words, option: value, "tp": 2}
    if option == "offload_to":
        part = {"megatron": "optimizer", "ddp": "activations", "plain": "activations"}.get(name, "params")
        return {**words, option: value, "offload": part}
    known = BY_NAME[option]
    if known.needs and value != text_of(known.default):
        words |= {"model": "deepseek-v2-lite", "ep": 2} if known.needs == "ep" else {"tp": 2}
        words |= {"compile": "blocks"} if (name, option) == ("torchtitan", "tp_comm_overlap") else {}
        words |= {"strategy.etp": 1} if (name, option) == ("torchtitan", "moe_dispatcher") else {}
    words |= {"strategy.precision_aware": True} if option in STATES and value != "fp32" else {}
    value = value == "true" if option == "precision_aware" else value
    return {**words, f"strategy.{option}" if option in FIELDS else option: value}


@cache
def estimated(framework: str, given: tuple[tuple[str, Any], ...]) -> Estimate | None:
    """The estimate of a job; None where the framework has no such job."""
    words = {name: value for name, value in given if "." not in name}
    settings = {name: value for name, value in given if "." in name and value}
    try:
        return memcalc.estimate(framework=framework, micro_batch=1, settings=settings, advice=False, **words)
    except MemcalcError:
        return None


def jobs(framework: str, model: str, option: str, value: str) -> Iterator[tuple[Estimate, tuple[str, ...]]]:
    """Yield jobs with a value of an option, the plainest first, each with what has to be written for it."""
    words = words_of(framework, model, option, value)
    for beside in BESIDE:
        estimate = estimated(framework, tuple({**beside, **words, **_kept(words, beside)}.items()))
        if estimate is not None and (option, value) in values_of(estimate.strategy):
            yield estimate, own_code(estimate.strategy, load_model(estimate.job.model or ""))


def _kept(words: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """The GPUs of the job beside, where the value needs no more."""
    return {"gpus": beside["gpus"]} if "gpus" in beside and not {"tp", "pp", "cp", "ep"} & set(words) else {}


def exported(estimate: Estimate, to: str | None = None) -> Exported:
    """Write a job in the first format of its framework that says it, and read it back."""
    plan: Any = SimpleNamespace(job=estimate.job, strategy=estimate.strategy, peak=estimate.peak)
    names = formats_of(estimate.strategy.framework) if to is None else (to,)
    return first_written(plan, names, None, ())


def is_said(done: Exported, estimate: Estimate) -> bool:
    """Whether what runs has the plan's bytes, or a note says which the launcher makes of it."""
    notes = [note for note in done.notes if "deprecates FSDP 1" not in note]
    moved = [note for note in notes if f"not the planned {estimate.peak.device / GIB:.2f}" in note]
    return not notes or bool(moved and get_format(done.format).decided)


@TABLES
def test_what_is_told_is_written_and_read_back_to_the_byte(framework: str, able: Capabilities, model: str) -> None:
    """The export itself compares bytes, workload and strategy with the plan's, and raises where they differ."""
    wrong = []
    for option in OPTIONS:
        if option == "offload_to" and able.offload.direct == ("none",):
            continue
        for value in getattr(able, option).direct:
            if (framework.partition("@")[0], option, value) in NO_JOB:
                assert next(jobs(framework, model, option, value), None) is None
                continue
            told = next((estimate for estimate, code in jobs(framework, model, option, value) if not code), None)
            if told is None:
                wrong.append(f"{option} {value}: in no job without code")
                continue
            try:
                if not is_said(exported(told), told):
                    wrong.append(f"{option} {value}: other bytes")
            except CombinationError as error:
                wrong.append(f"{option} {value}: {error}")
    assert not wrong


@TABLES
def test_what_needs_code_is_refused_by_the_tables_own_sentence(framework: str, able: Capabilities, model: str) -> None:
    """Or written, by a format that says more than the framework is told, or without the script."""
    wrong = []
    for option in OPTIONS:
        told = getattr(able, option).direct
        for value, code in getattr(able, option).code.items():
            if value in told:  # by some classes of models alone
                continue
            adds = [name for name in formats_of(framework) if value in get_format(name).adds.get(option, ())]
            for estimate, needed in islice(jobs(framework, model, option, value), 1):
                assert not needed or any(code in sentence for sentence in needed), (option, value)
                try:
                    done = exported(estimate)
                    if needed and done.format not in adds:
                        wrong.append(f"{option} {value}: written as {done.format}")
                except CombinationError as error:
                    if not needed or not any(sentence.partition(": ")[2] in str(error) for sentence in needed):
                        wrong.append(f"{option} {value}: {error}")
    assert not wrong


@pytest.mark.parametrize("framework", LEGACY)
def test_no_file_is_written_of_megatron_deepspeed(framework: str) -> None:
    estimate = memcalc.estimate(model="gpt2", gpu="a100-40g", gpus=2, framework=framework, micro_batch=1)
    with pytest.raises(CombinationError, match="Megatron-DeepSpeed"):
        exported(estimate)


def test_checkpoints_of_the_trainer_stand_where_fsdps_own_say_less() -> None:
    """Accelerate 1.15 refuses FSDP 1 with an offload of checkpoints, and knows every block or none."""
    for framework, words in (
        ("hf", {"zero": 3, "recompute": "every-2"}),
        ("hf", {"zero": 3, "recompute": "full", "offload": "activations"}),
        ("fsdp1", {"recompute": "full", "offload": "params,activations"}),
    ):
        estimate = estimated(framework, tuple({"model": "llama-3.2-1b", "gpu": "h100", "gpus": 4, **words}.items()))
        assert estimate is not None
        done = exported(estimate)
        texts = "".join(done.files.values())
        assert "gradient_checkpointing_kwargs" in texts
        assert "activation_checkpointing_offload: true" not in texts
        assert is_said(done, estimate)


def test_an_optimizer_steps_in_the_form_that_it_has() -> None:
    """The Trainer's Adafactor is a loop, PyTorch's SGD a foreach, whatever AdamW is in the framework."""
    small = {"model": "gpt2", "gpu": "a100-40g", "gpus": 1}
    forms = {name: memcalc.estimate(**small, framework="hf", optimizer=name) for name in ("adamw", "adafactor", "sgd")}
    assert {name: one.strategy.optimizer_impl for name, one in forms.items()} == {
        "adamw": "fused", "adafactor": "loop", "sgd": "foreach",
    }  # fmt: skip
    assert memcalc.estimate(**small, framework="deepspeed", optimizer="sgd").strategy.optimizer_impl == "foreach"


@pytest.mark.parametrize("every", [2, 3, 5])
def test_every_kth_block_is_the_one_that_transformers_checkpoints(every: int) -> None:
    """The real model's own flags, after its own call."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=7,
        vocab_size=8,
    )
    model = transformers.LlamaForCausalLM(config)
    model.activation_checkpointing_enable(every_n_layers=every)
    flags = [int(layer.gradient_checkpointing) for layer in model.model.layers]
    for framework in ("hf", "ddp", "deepspeed", "fsdp1"):
        job = memcalc.estimate(model="gpt2", gpu="a100-40g", gpus=2, framework=framework, recompute=f"every-{every}")
        (policy,) = single(**job.job.keywords()).grid.policies
        assert unit_sizes(policy, 7) == flags


@pytest.mark.parametrize(("framework", "checkpointed"), [("hf", 3), ("ddp", 3), ("plain", 2), ("fsdp2", 2)])
def test_every_fifth_of_twelve_blocks(framework: str, checkpointed: int) -> None:
    """Transformers checkpoints blocks 0, 5 and 10, torchtitan and the script 4 and 9: each keeps its input alone."""
    job = {"model": "gpt2", "gpu": "a100-40g", "gpus": 1 if framework in ("hf", "plain") else 2, "framework": framework}
    none, fifth, full = (
        memcalc.estimate(**job, recompute=policy).saved.total for policy in ("none", "every-5", "full")
    )
    assert 12 * (none - fifth) == checkpointed * (none - full)


def test_megatrons_optimizer_on_the_host_is_adam_alone() -> None:
    """validate_args asks for the precision-aware optimizer beside it, and OptimizerConfig has that of Adam alone."""
    with pytest.raises(CombinationError, match="Adam alone"):
        memcalc.estimate(
            model="llama-3-8b", gpu="h100", gpus=8, framework="megatron", zero=1, optimizer="muon", offload="optimizer"
        )


def test_torchtitan_cuts_those_models_into_stages_for_which_it_has_a_function() -> None:
    """0.2.2 models/*/__init__.py, pipelining_fn: Llama 3 and DeepSeek, not Qwen 3 and gpt-oss, which a file refuses."""
    told = {"llama-3.1-8b": True, "deepseek-v3": True, "qwen3-8b": False, "gpt-oss-20b": False}
    for name, cut in told.items():
        model = load_model(name)
        assert (capabilities_of("torchtitan", model).parallel.needs("pp", model) == "") == cut
    job: dict[str, Any] = {"model": "qwen3-8b", "gpu": "h100", "gpus": 16, "framework": "torchtitan", "tp": 1, "top": 1}
    plan = memcalc.plan(**job, pp=2, cp=1, recompute="full", offload="none", advice=False).plans[0]
    assert any("pipelining_fn" in code for code in plan.own_code)
