"""Names of layers that are written, against PEFT on the real classes: each finds the layers that memcalc counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shallow import shallow

from memcalc import catalog, check
from memcalc.convert.formats.base import ConfigJob
from memcalc.convert.formats.trainer_writer import layer_names, sizes
from memcalc.convert.formats.tuning import targets_of, targets_of_pattern
from memcalc.errors import CombinationError, MissingError
from memcalc.frameworks import habits_of
from memcalc.planner.adapted_layers import resolved_targets
from memcalc.specs.adapters import Lora, in_class
from memcalc.specs.model import Model
from memcalc.specs.strategy import Strategy
from memcalc.terms.adapters import block_adapters

DENSE = (
    "apertus-8b", "afm-4.5b", "bloom-1b1", "command-r7b", "falcon-7b", "gemma-2-2b", "gemma-3-1b", "glm-4-9b-0414",
    "gpt2", "starcoder-15.5b", "gpt-j-6b", "gpt-neo-125m", "pythia-14m", "llama-3.2-1b", "lfm2-1.2b", "mpt-7b",
    "mistral-7b-v0.1", "nemotron-mini-4b", "opt-125m", "olmo-2-1b", "phi-1.5", "phi-3-mini-3.8b", "qwen2-0.5b",
    "qwen3-0.6b", "smollm3-3b", "stablelm-2-1.6b", "starcoder2-3b",
)  # fmt: skip
"""One model of each class whose blocks have linear layers alone."""
RANK = 8


def job_of(spec: Model) -> ConfigJob:
    return ConfigJob(spec.name, "h100", 1, 1, 512, 1, 1, Strategy(), spec=spec)


def trainable(peft: Any, spec: Model, names: list[str] | str) -> int:
    """What PEFT makes trainable of the model's own class, on the meta device."""
    import torch
    import transformers

    kind = getattr(transformers, str(spec.hf_class))
    with torch.device("meta"):
        base = kind(kind.config_class(**sizes(spec)))
        transposed = str(spec.hf_class).startswith("GPT2")  # Conv1D
        model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=names, fan_in_fan_out=transposed))
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


@pytest.mark.parametrize("name", DENSE)
def test_the_names_of_a_class_find_the_layers_that_are_counted(name: str) -> None:
    peft = pytest.importorskip("peft")
    spec = shallow(catalog.model(name))
    spec = spec.model_copy(update={"hf_config": {**spec.hf_config, "attn_implementation": "eager"}})
    every = resolved_targets(Lora(rank=RANK, targets=("all-linear",)), spec, habits_of("hf"))
    for targets in (every, every[:1], every[-1:], every[1:-1]):
        names = layer_names(job_of(spec), "lora", targets)
        resolved = resolved_targets(Lora(rank=RANK, targets=targets), spec, habits_of("hf"))
        counted = sum(group.count * sum(block_adapters(group.block, RANK, resolved)) for group in spec.groups)
        assert trainable(peft, spec, names) == counted, names
        read = targets_of(names)
        assert read is not None
        read = in_class(read, spec.architecture)
        assert set(resolved_targets(Lora(rank=RANK, targets=read), spec, habits_of("hf"))) == set(resolved)


def test_a_config_without_a_class_is_known_by_its_model_type() -> None:
    spec = catalog.model("opt-125m").model_copy(update={"hf_class": None, "family": "opt"})
    assert layer_names(job_of(spec), "lora", ("o", "up", "down")) == ["out_proj", "fc1", "fc2"]
    with pytest.raises(CombinationError, match="names of layers are known of q, k, v, o"):
        layer_names(job_of(spec), "lora", ("qkv",))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("llama-3.2-1b", ["self_attn.q_proj", "self_attn.k_proj", "up_proj"]),
        ("qwen3-0.6b", ["self_attn.v_proj", "self_attn.o_proj"]),
        ("gpt2", ["attn.c_attn"]),
        ("qwen3-next-80b-a3b", ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"]),
        ("qwen3-next-80b-a3b", ["in_proj_qkvz", "in_proj_ba", "o_proj"]),
    ],
)
def test_the_end_of_a_layers_path_names_it(name: str, names: list[str]) -> None:
    """PEFT takes a layer whose path ends with a name, of one part or of several."""
    peft, spec = pytest.importorskip("peft"), catalog.model(name)
    read = targets_of(names)
    assert read is not None
    resolved = resolved_targets(Lora(rank=RANK, targets=read), spec, habits_of("hf"))
    counted = sum(group.count * sum(block_adapters(group.block, RANK, resolved)) for group in spec.groups)
    assert trainable(peft, spec, names) == counted


SMOLVLM = r"model.text_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.mark.parametrize(
    ("pattern", "targets"),
    [(SMOLVLM, ("q", "k", "v", "o", "gate", "up", "down")), (SMOLVLM.replace("text_", "vision_"), ())],
)
def test_a_pattern_finds_the_blocks_of_a_text_model(pattern: str, targets: tuple[str, ...]) -> None:
    """Idefics 3 and SmolVLM: ``modeling_smolvlm.py``, SmolVLMModel.text_model."""
    transformers = pytest.importorskip("transformers")
    import re

    import torch

    kind = transformers.models.smolvlm
    text = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
    text |= {"intermediate_size": 96, "pad_token_id": 0}
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    with torch.device("meta"):
        model = kind.SmolVLMForConditionalGeneration(kind.SmolVLMConfig(text_config=text, vision_config=vision))
    found = {
        name.split(".")[-1].removesuffix("_proj") for name, _ in model.named_modules() if re.fullmatch(SMOLVLM, name)
    }
    read = targets_of_pattern(pattern)
    assert found == {"q", "k", "v", "o", "gate", "up", "down"}
    assert read == targets


def test_a_refusal_names_the_unknown_layers_alone(tmp_path: Path) -> None:
    """PEFT would find the shared expert's layers alone, which no target of memcalc's is."""
    listed = "[linear_attn.in_proj_ba, q_proj, shared_expert.up_proj]"
    path = tmp_path / "a.yaml"
    path.write_text(
        f"base_model: Qwen/Qwen3-Next-80B-A3B-Instruct\nadapter: lora\nlora_r: 8\nlora_target_modules: {listed}\n"
    )
    with pytest.raises(MissingError, match=r"memcalc does not know \(shared_expert\.up_proj\)"):
        check([str(path)], gpu="h200", gpus=1, seq_len=128)


def test_a_file_that_is_given_is_the_one_that_a_script_names(tmp_path: Path) -> None:
    """A script's path is that of the folder in which the job starts; the file beside it was given from elsewhere."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    script = tmp_path / "jobs" / "train.sh"
    words = "--model Qwen/Qwen2.5-0.5B --tuner_type full --torch_dtype bfloat16 --max_length 512"
    script.write_text(f"NPROC_PER_NODE=2 swift sft {words} --deepspeed ./configs/ds.json\n")
    with pytest.raises(MissingError, match="is neither here nor beside it"):
        check([str(script)], gpu="h100")
    given = check([str(script), str(tmp_path / "ds.json")], gpu="h100").estimate
    assert (given.strategy.zero, given.strategy.framework) == (2, "deepspeed")


PATTERN = r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.mark.parametrize(
    ("base", "name", "listed", "kept"),
    [
        ("LiquidAI/LFM2-1.2B", "lfm2-1.2b", PATTERN, "8:q,k,v"),
        ("LiquidAI/LFM2-1.2B", "lfm2-1.2b", ["q_proj", "o_proj", "gate_proj"], "8:q"),
        ("LiquidAI/LFM2-1.2B", "lfm2-1.2b", ["q_proj", "out_proj", "w1"], "8:q,o,gate,mixer_out"),
        ("LiquidAI/LFM2-1.2B", "lfm2-1.2b", r"model.layers.\d+.(feed_forward.w[13]|self_attn.q_proj)", "8:gate,up,q"),
        ("tiiuae/falcon-7b", "falcon-7b", ["query_key_value", "dense", "q_proj"], "8:qkv,o"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-3.8b", ["qkv_proj", "gate_proj", "down_proj"], "8:qkv,down"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b", ["q_proj", "gate_proj"], "8:q,gate"),
    ],
)
def test_names_that_a_class_has_not_get_no_adapter(
    base: str, name: str, listed: list[str] | str, kept: str, tmp_path: Path
) -> None:
    """Axolotl's example of LFM2-8B lists Llama's names by a pattern: PEFT adapts queries, keys and values alone."""
    peft = pytest.importorskip("peft")
    path = tmp_path / "a.yaml"
    text = listed if isinstance(listed, list) else f"'{listed}'"
    path.write_text(f"base_model: {base}\nadapter: lora\nlora_r: {RANK}\nlora_target_modules: {text}\nbf16: true\n")
    lora = check([str(path)], gpu="h200", gpus=1, seq_len=128, micro_batch=1).estimate.strategy.lora
    assert lora == kept
    spec = catalog.model(name)
    spec = spec.model_copy(update={"hf_config": {**spec.hf_config, "attn_implementation": "eager"}})
    resolved = resolved_targets(Lora(rank=RANK, targets=tuple(kept[2:].split(","))), spec, habits_of("hf"))
    counted = sum(group.count * sum(block_adapters(group.block, RANK, resolved)) for group in spec.groups)
    assert trainable(peft, spec, listed) == counted
