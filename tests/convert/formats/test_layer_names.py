"""Names of layers that are written, against PEFT on the real classes: each finds the layers that memcalc counts."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc import catalog
from memcalc.convert.formats.base import ConfigJob
from memcalc.convert.formats.trainer_writer import layer_names, sizes
from memcalc.convert.formats.tuning import targets_of
from memcalc.errors import CombinationError
from memcalc.frameworks import habits_of
from memcalc.planner.adapted_layers import resolved_targets
from memcalc.specs.adapters import Lora
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


def trainable(peft: Any, spec: Model, names: list[str]) -> int:
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
    spec = catalog.model(name)
    spec = spec.model_copy(update={"hf_config": {**spec.hf_config, "attn_implementation": "eager"}})
    every = resolved_targets(Lora(rank=RANK, targets=("all-linear",)), spec, habits_of("hf"))
    for targets in (every, every[:1], every[-1:], every[1:-1]):
        names = layer_names(job_of(spec), "lora", targets)
        resolved = resolved_targets(Lora(rank=RANK, targets=targets), spec, habits_of("hf"))
        counted = sum(group.count * sum(block_adapters(group.block, RANK, resolved)) for group in spec.groups)
        assert trainable(peft, spec, names) == counted, names
        read = targets_of(names)
        assert read is not None
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
