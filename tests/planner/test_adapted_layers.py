"""Which layers of a mixture get adapters: parameters against PEFT's on the model's own class, on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
import transformers
from autograd import images, models

import memcalc
from memcalc.convert.huggingface import from_huggingface
from memcalc.errors import CombinationError
from memcalc.frameworks import habits_of
from memcalc.planner.adapted_layers import linear_targets, resolved_targets
from memcalc.preflight import check
from memcalc.specs.adapters import Lora
from memcalc.specs.model import Model
from memcalc.terms.adapters import block_adapters

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
"""PEFT 0.21 looks for the keys that it has made itself among modules, where they are those of parameters."""
RANK = 4
ATTENTION_ALONE = ("mixtral", "qwen3-moe", "olmoe", "minimax_m2")
"""Classes whose MLPs are experts and nothing else."""
WITH_OTHER_MLPS = (
    "deepseek-v2", "deepseek-v3", "glm4_moe", "glm4_moe_lite", "solar_open", "exaone_moe", "dots1", "ernie4_5_moe",
    "qwen3_next",
)  # fmt: skip
"""Classes with shared experts, or with dense first blocks, too."""
CONVERTED = (*ATTENTION_ALONE, *WITH_OTHER_MLPS)
UNCONVERTED = ("qwen2_moe", "gpt-oss", "granitemoe", "lfm2_moe", "jamba")
"""Classes whose names PEFT leaves as they are."""


def base_of(family: str) -> torch.nn.Module:
    config = models.hf_config(family)
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def model_of(family: str) -> Model:
    config = models.hf_config(family)
    known = {*type(config)().to_dict(), "head_dim"}
    return from_huggingface({name: value for name, value in config.to_dict().items() if name in known})


def names_of(base: torch.nn.Module) -> list[str]:
    """As axolotl, LLaMA-Factory and ms-swift list them."""
    linear = [name for name, layer in base.named_modules() if isinstance(layer, torch.nn.Linear)]
    return sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"})


def trainable(base: torch.nn.Module, names: str | list[str]) -> int:
    with torch.device("meta"):
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=names))
    return sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)


def counted(model: Model, targets: tuple[str, ...], version: str) -> int:
    habits = habits_of("hf")
    layers = resolved_targets(Lora(rank=RANK, targets=targets), model, habits, version)
    return sum(
        g.count * sum(block_adapters(g.block, RANK, layers, stacked=True, split=habits.splits_packed))
        for g in model.groups
    )


@pytest.fixture
def without_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT 0.18 has no conversion of names for stacked experts (that of 0.19 came with 5356277d)."""
    module = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
    monkeypatch.setattr(module, lambda *_, **__: None)


@pytest.mark.parametrize("family", ATTENTION_ALONE)
def test_linear_layers_of_a_mixture_are_those_of_attention(family: str) -> None:
    """Listed by name, with the PEFT that is installed."""
    model, base = model_of(family), base_of(family)
    found = linear_targets(model, habits_of("hf"))
    assert found == ("q", "k", "v", "o")
    assert counted(model, found, "0.21") == trainable(base, names_of(base))


@pytest.mark.usefixtures("without_conversion")
@pytest.mark.parametrize("family", [*ATTENTION_ALONE, *WITH_OTHER_MLPS])
def test_before_peft_0_19_all_linear_is_linear_layers_alone(family: str) -> None:
    model, base = model_of(family), base_of(family)
    expected = trainable(base_of(family), names_of(base))
    assert expected == trainable(base, "all-linear")
    assert counted(model, ("all-linear",), "0.18") == expected
    assert counted(model, linear_targets(model, habits_of("hf")), "0.18") == expected


@pytest.mark.parametrize("family", UNCONVERTED)
def test_classes_that_peft_does_not_convert_have_adapters_on_linear_layers_alone(family: str) -> None:
    model, base = model_of(family), base_of(family)
    assert counted(model, ("all-linear",), "0.21") == trainable(base, "all-linear")


@pytest.mark.parametrize("family", CONVERTED)
def test_all_linear_of_peft_is_the_router_and_the_stacked_experts_too(family: str) -> None:
    """PEFT gives each of an expert's two layers that are one the whole rank."""
    assert counted(model_of(family), ("all-linear",), "0.21") == trainable(base_of(family), "all-linear")


@pytest.mark.parametrize("family", WITH_OTHER_MLPS)
def test_names_of_other_mlps_move_to_the_experts(family: str) -> None:
    """As axolotl lists them: shared experts and dense blocks lose their adapters to the routed ones."""
    model, base = model_of(family), base_of(family)
    found = linear_targets(model, habits_of("hf"))
    assert {"gate", "up", "down"} < {*found}
    assert counted(model, found, "0.19") == trainable(base, names_of(base))


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3", *UNCONVERTED[:3]])
@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("q", "experts_gate_up", "experts_down"), ["experts.gate_up_proj", "experts.down_proj"]),
        (("q", "experts_down"), ["experts.down_proj"]),
    ],
)
def test_parameters_that_are_named_have_the_rank_once(family: str, targets: tuple[str, ...], names: list[str]) -> None:
    layer = "q_b_proj" if family == "deepseek-v3" else "q_proj"
    words = ("q_b", *targets[1:]) if family == "deepseek-v3" else targets
    with torch.device("meta"):
        config = peft.LoraConfig(r=RANK, target_modules=[layer], target_parameters=names)
        adapted = peft.get_peft_model(base_of(family), config)
    expected = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert counted(model_of(family), words, "0.21") == expected


def test_gate_and_up_of_stacked_experts_go_together() -> None:
    """PEFT raises a ValueError too; ``gate`` and ``up`` of a class that it does not convert are no layers."""
    with pytest.raises(ValueError, match="without also targeting up_proj"):
        trainable(base_of("qwen3-moe"), ["gate_proj", "down_proj"])
    with pytest.raises(CombinationError, match="gate and up of stacked experts are one weight"):
        counted(model_of("qwen3-moe"), ("gate", "down"), "0.21")
    with pytest.raises(CombinationError, match=r"has q, k, v, o, .*experts_gate_up, experts_down"):
        counted(model_of("gpt-oss"), ("gate", "up"), "0.21")


def test_peft_0_19_takes_all_linear_of_a_mixture_for_letters() -> None:
    """``set("all-linear")`` in its conversion (c97e9c81 utils/transformers_weight_conversion.py)."""
    with pytest.raises(CombinationError, match=r"PEFT 0\.19 finds none of its letters.*strategy\.peft=0\.20"):
        counted(model_of("mixtral"), ("all-linear",), "0.19")


AXOLOTL = "adapter: lora\nlora_r: 16\nlora_target_linear: true\nsequence_len: 512\nmicro_batch_size: 1\ndatasets: []\n"
FACTORY = (
    "stage: sft\nfinetuning_type: lora\nlora_rank: 16\nlora_target: all\ncutoff_len: 512\ndataset: my\n"
    "template: default\nper_device_train_batch_size: 1\noutput_dir: out\n"
)
LATENT = "q,kv_a,kv_b,o"
FILES = {
    "axolotl, mixtral": ("base_model: mistralai/Mixtral-8x7B-v0.1\n" + AXOLOTL, "q,k,v,o"),
    "axolotl, olmoe": ("base_model: allenai/OLMoE-1B-7B-0924\n" + AXOLOTL, "q,k,v,o"),
    "LLaMA-Factory, qwen3": ("model_name_or_path: Qwen/Qwen3-30B-A3B\n" + FACTORY, "q,k,v,o"),
    "LLaMA-Factory, shared": (
        "model_name_or_path: moonshotai/Moonlight-16B-A3B\n" + FACTORY, f"{LATENT},gate,up,down",
    ),
    "axolotl, shared": (
        "base_model: moonshotai/Moonlight-16B-A3B\n" + AXOLOTL, f"{LATENT},experts_gate,experts_up,experts_down",
    ),
    "axolotl, parameters": (
        "base_model: openai/gpt-oss-20b\n" + AXOLOTL.replace("lora_target_linear: true", (
            "lora_target_modules: [q_proj, v_proj]\n"
            "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]"
        )),
        "q,v,experts_gate_up,experts_down",
    ),
    "LLaMA-Factory, layers of a Llama": (
        "model_name_or_path: mistralai/Mixtral-8x7B-v0.1\n"
        + FACTORY.replace("all", "q_proj,v_proj,gate_proj,up_proj,down_proj"), "q,v",
    ),
    "axolotl, qwen2": ("base_model: Qwen/Qwen1.5-MoE-A2.7B\n" + AXOLOTL, "q,k,v,o,gate,up,down,shared_gate"),
}  # fmt: skip


def checked(folder: Path, text: str, **given: Any) -> Any:
    pytest.importorskip("yaml")
    (folder / "job.yaml").write_text(text)
    return check([str(folder / "job.yaml")], gpu="h200", gpus=1, **given)


@pytest.mark.parametrize("name", FILES)
def test_frameworks_over_peft_adapt_what_it_finds_by_their_names(tmp_path: Path, name: str) -> None:
    text, targets = FILES[name]
    assert checked(tmp_path, text).estimate.strategy.lora == f"16:{targets}"


def test_what_is_found_is_said_with_the_release_that_is_taken(tmp_path: Path) -> None:
    text = FILES["axolotl, mixtral"][0]
    stacked, looped = checked(tmp_path, text), checked(tmp_path, text, framework="hf@4.49")
    told = [f.message for file in stacked.files for f in file.findings if f.code == "MC004" and "experts" in f.message]
    assert len(told) == 1
    assert "since Transformers 5.0, which is taken: they hold no adapter; --framework hf@4.49" in told[0]
    assert looped.estimate.strategy.lora == "16:q,k,v,o,router,gate,up,down"


def test_an_estimate_says_that_experts_hold_none() -> None:
    job: dict[str, Any] = {"gpu": "h200", "gpus": 1, "lora": "8:all-linear"}
    said = "stacked parameters, as since Transformers 5.0, and hold no adapter; --framework hf@4.49"
    for model, settings in (("qwen1.5-moe-a2.7b", {}), ("qwen3-30b-a3b", {"strategy.peft": "0.18"})):
        warnings = memcalc.estimate(model=model, settings=settings, **job).warnings
        assert [said in text for text in warnings].count(True) == 1
    looped = memcalc.estimate(model="qwen1.5-moe-a2.7b", framework="hf@4.49", **job)
    assert not any(said in text for text in looped.warnings)


def test_what_folding_costs_is_said() -> None:
    job: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "h200", "gpus": 1, "lora": "8:all-linear"}
    folded = memcalc.estimate(**job, settings={"workload.lora_dropout": 0.1}).warnings
    said = ("folds adapters of stacked experts into new weights", "PEFT stops at workload.lora_dropout 0.1")
    assert [any(part in text for text in folded) for part in said] == [True, True]
    alone = memcalc.estimate(**job | {"lora": "8:q,v"}, settings={"workload.lora_dropout": 0.1}).warnings
    assert not any(part in text for text in alone for part in said)


def test_gptq_of_stacked_experts_is_refused() -> None:
    """Optimum 05418739 and Transformers 5.24 put quantised layers in the place of ``nn.Linear`` alone."""
    job: dict[str, Any] = {"model": "mixtral-8x7b", "gpu": "h200", "gpus": 1, "lora": "8:q,v"}
    for kind in ("gptq-int4", "gptq-int8"):
        with pytest.raises(CombinationError, match=r"experts of mixtral-8x7b are stacked.*hf@4\.49.*--quantize nf4"):
            memcalc.estimate(**job, quantize=kind)
    assert memcalc.estimate(**job, quantize="gptq-int4", framework="hf@4.49").strategy.quantize == "gptq-int4"
    assert memcalc.estimate(**job, quantize="nf4").strategy.quantize == "nf4"
    dense = job | {"model": "mistral-7b-v0.1"}
    assert memcalc.estimate(**dense, quantize="gptq-int4").strategy.quantize == "gptq-int4"


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h", "mamba2"])
def test_all_linear_of_mixers_whose_output_projection_peft_refuses(family: str) -> None:
    """What the refusal names instead is what PEFT takes."""
    model = model_of(family)
    with pytest.raises(ValueError, match="Module 'out_proj' is incompatible with Mamba-based models"):
        trainable(base_of(family), "all-linear")
    with pytest.raises(CombinationError, match="PEFT refuses the output projection") as refused:
        counted(model, ("all-linear",), "0.21")
    words = str(refused.value).rpartition(f"give {RANK}:")[2].rstrip(".").split(",")
    names = [name for name in names_of(base_of(family)) if name != "out_proj"]
    assert counted(model, tuple(words), "0.21") == trainable(base_of(family), names)


def test_ms_swift_leaves_that_projection_out(tmp_path: Path) -> None:
    text = (
        "model: tiiuae/Falcon-H1-1.5B-Base\ndataset: my\ntrain_type: lora\nlora_rank: 16\ntarget_modules: all-linear\n"
        "max_length: 512\nper_device_train_batch_size: 1\n"
    )
    assert checked(tmp_path, text).estimate.strategy.lora == "16:mixer_in,q,k,v,o,gate,up,down"


def test_a_class_without_attention_has_no_usual_layers() -> None:
    """PEFT knows no ``target_modules`` of such a class either (0.21 utils/constants.py), and asks for them."""
    with pytest.raises(ValueError, match="Please specify `target_modules`"):
        peft.get_peft_model(base_of("mamba2"), peft.LoraConfig(r=RANK))
    with pytest.raises(CombinationError, match=f"no attention for usual layers; name some, as in {RANK}:mixer_in"):
        counted(model_of("mamba2"), (), "0.21")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_usual_layers_are_the_decoders_where_a_tower_packs_its_own(family: str) -> None:
    """PEFT lists neither class, and its text models' queries and values (0.21 utils/constants.py)."""
    config = images.config_of(family)
    with torch.device("meta"):
        base = images.class_of(family)(config)
    model = from_huggingface(config.to_dict())
    assert counted(model, (), "0.21") == trainable(base, ["q_proj", "v_proj"])
