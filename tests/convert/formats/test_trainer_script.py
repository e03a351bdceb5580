"""The Trainer's script by what a model is fed: read back as the plan, layers by PEFT's own count, started on a CPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc import catalog
from memcalc.api import load_model
from memcalc.convert.formats.base import ConfigJob
from memcalc.convert.formats.trainer_writer import layer_names, sizes
from memcalc.errors import CombinationError
from memcalc.frameworks import habits_of
from memcalc.handoff import exported
from memcalc.handoff.saved import saved_plan
from memcalc.planner.adapted_layers import resolved_targets
from memcalc.specs.adapters import Lora
from memcalc.specs.strategy import Strategy
from memcalc.terms.adapters import block_adapters

JOBS: dict[str, dict[str, Any]] = {
    "t5-small": {"lora": "8:all-linear"},
    "bert-base": {},
    "whisper-tiny": {"seq_len": 448},
    "vit-base-16": {},
    "qwen2.5-vl-3b": {"image_size": "1024x768", "images": 2, "settings": {"workload.image_pixels": 401408}},
    "llava-1.5-7b": {"vision": "projector", "precision": "bf16"},
    "ministral-3-3b": {"vision": "frozen", "lora": 8, "image_size": "640x480"},
    "internvl3-1b": {"image_size": "640x480"},
    "smolvlm2-256m": {"images": 0},
}
"""Presets that are no decoders of text, each with a setting that the files or the line beside them must keep."""


@pytest.mark.slow
@pytest.mark.parametrize("model", JOBS)
def test_what_is_written_is_read_back_to_the_same_bytes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"micro_batch": 1, "global_batch": 4, "recompute": "none", "offload": "none", **JOBS[model]}
    plans = memcalc.plan(model=model, gpu="b200", gpus=2, framework="ddp", top=1, advice=False, **words)
    done = exported(saved_plan(plans))
    assert done.format == "trainer"
    for path, text in done.files.items():
        path.write_text(text, encoding="utf-8")
    _, *line = done.check.split()
    settings = {"settings": words["settings"]} if "settings" in words else {}
    images = {"image_size": words["image_size"]} if "image_size" in words else {}
    many = {"images": words["images"]} if "images" in words else {}
    again = memcalc.check([line[1]], gpu="b200", gpus=2, **images, **many, **settings).estimate
    assert again.peak.device == plans.plans[0].peak.device
    assert again.strategy.vision == words.get("vision", "frozen" if words.get("images") == 0 else "trained")


NAMED = (
    "qwen2-vl-2b", "qwen2.5-vl-3b", "qwen3-vl-2b", "llava-1.5-7b", "pixtral-12b", "smolvlm2-256m", "internvl3-1b",
    "ministral-3-3b", "t5-small", "flan-t5-small", "mt5-small",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_the_names_of_a_class_find_the_layers_that_are_counted(name: str) -> None:
    """PEFT on the real class, on the meta device: of the text and of the vision tower."""
    peft, torch, transformers = map(pytest.importorskip, ("peft", "torch", "transformers"))
    spec, habits, rank = catalog.model(name), habits_of("hf"), 8
    kind = getattr(transformers, str(spec.hf_class))
    for targets in (("all-linear",), ("q", "v"), ("o", "down")):
        found = resolved_targets(Lora(rank=rank, targets=targets), spec, habits)
        listed = layer_names(ConfigJob(name, "h100", 1, 1, 512, 1, 1, Strategy(), spec=spec), "lora", found)
        with torch.device("meta"):
            model = peft.get_peft_model(
                kind(kind.config_class(**sizes(spec))), peft.LoraConfig(r=rank, target_modules=listed)
            )
        real = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        stacked, split = habits.stacks_experts, habits.splits_packed
        blocks = [sum(block_adapters(g.block, rank, found, stacked=stacked, split=split)) for g in spec.groups]
        assert real == sum(group.count * size for group, size in zip(spec.groups, blocks, strict=True)), listed


def test_layers_whose_names_are_not_known_are_refused() -> None:
    """BERT's are `query`, `key`, `value`; a list of `q_proj` would find none of them."""
    job = ConfigJob("bert-base", "h100", 1, 1, 512, 1, 1, Strategy(lora="8"), spec=load_model("bert-base"))
    with pytest.raises(CombinationError, match="what its class calls its layers is not known"):
        layer_names(job, "lora", ("q", "v"))


def test_the_sides_of_an_image_make_the_patches_that_are_counted() -> None:
    """As many rows and columns of patches as the tower is counted with."""
    from memcalc.planner.images import seen_by, sides_of

    for name in ("qwen2.5-vl-3b", "qwen3-vl-2b", "ministral-3-3b", "pixtral-12b"):
        spec = catalog.model(name)
        assert spec.images is not None
        for size in ((640, 480), (1024, 768), (1920, 1080), (50, 3000)):
            wide, high = sides_of(spec.images, *size)
            patch = spec.images.patch
            assert (wide // patch) * (high // patch) == seen_by(spec, *size).patches, (name, size)


def _pictured(kind: str) -> dict[str, Any]:
    from autograd import images

    config = {**images.config_of(kind).to_dict(), "image_token_id": 5}
    if "qwen" in kind:  # half of a head's 24 in three sections
        config["text_config"]["rope_parameters"] |= {"mrope_section": [4, 4, 4]}
    return config


def _config(kind: str) -> dict[str, Any]:
    """A config of a class that trains in a second."""
    import transformers

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = {**small, "vocab_size": 99, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    widths = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    made: dict[str, Any] = {
        "t5": lambda: transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99),
        "masked": lambda: transformers.BertConfig(**bert, architectures=["BertForMaskedLM"]),
        "classes": lambda: transformers.BertConfig(**bert, architectures=["BertModel"]),
        "whisper": lambda: transformers.WhisperConfig(
            **widths, **heads, **special, max_source_positions=50, max_target_positions=64, num_mel_bins=8,
            architectures=["WhisperForConditionalGeneration"],
        ),
        "vit": lambda: transformers.ViTConfig(
            **small, image_size=32, patch_size=8, num_labels=5, architectures=["ViTForImageClassification"]
        ),
    }  # fmt: skip
    return made[kind]().to_dict() if kind in made else _pictured(kind)


STARTED: dict[str, dict[str, Any]] = {
    "t5": {"lora": "4"},
    "masked": {},
    "classes": {"recompute": "full"},
    "whisper": {},
    "vit": {"seq_len": 17},
    "qwen2_5_vl": {"image_size": "112x56", "images": 2, "vision": "projector"},
    "qwen3_vl": {"image_size": "112x56", "seq_len": 128, "lora": "4", "vision": "frozen"},
    "llava": {"vision": "frozen"},
    "mistral3": {"image_size": "112x56"},
    "internvl": {"image_size": "56x56", "lora": "4"},
    "gemma3": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STARTED)
def test_what_is_written_trains(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real class takes what it is fed: an image's features are as many as the places that are counted."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(_config(kind)), encoding="utf-8")
    words = {"seq_len": 48, "recompute": "none", "precision": "bf16-autocast", **STARTED[kind]}
    if "lora" in words:
        words.pop("precision")
    plans = memcalc.plan(
        model="config.json", gpu="h100", gpus=1, framework="hf", offload="none", micro_batch=2, global_batch=4, top=1,
        advice=False, **words,
    )  # fmt: skip
    done = exported(saved_plan(plans))
    for path, text in done.files.items():
        path.write_text(text, encoding="utf-8")
    arguments = Path("training_args.json")
    said = {**json.loads(arguments.read_text()), "use_cpu": True, "max_steps": 2, "save_strategy": "no"}
    arguments.write_text(json.dumps(said), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["train.py", "training_args.json"])
    runpy.run_path("train.py", run_name="__main__")
    assert "'train_loss'" in capsys.readouterr().out
