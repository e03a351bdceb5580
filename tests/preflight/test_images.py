"""What files of trainers say of images counts for models that read them, and for no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc import check
from memcalc.errors import MissingError

QWEN = {
    "model_type": "qwen2_vl", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 500,
    "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 64},
}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "vocab_size": 500}  # fmt: skip
LLAMAFACTORY = """model_name_or_path: ./model
stage: sft
do_train: true
finetuning_type: full
dataset: some
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
"""


def keywords(folder: Path, model: dict[str, Any], text: str, **options: Any) -> str:
    """The command line to which a LLaMA-Factory file comes."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "sft.yaml").write_text(text)
    return check([folder / "sft.yaml"], gpu="h100", gpus=1, **options).estimate.command


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        ("", "frozen"),
        ("freeze_vision_tower: false\n", "trained"),
        ("freeze_multi_modal_projector: false\n", "projector"),
    ],
)
def test_llamafactory_freezes_the_vision_part_by_default(tmp_path: Path, more: str, trained: str) -> None:
    command = keywords(tmp_path, QWEN, LLAMAFACTORY + more, image_size="1024x768")
    assert f"--vision {trained}" in command or trained == "trained"
    assert "workload.image_pixels=589824" in command


def test_its_limit_of_pixels_can_be_another(tmp_path: Path) -> None:
    command = keywords(tmp_path, QWEN, LLAMAFACTORY + "image_max_pixels: 262144\n", image_size="1024x768")
    assert "workload.image_pixels=262144" in command


def test_a_text_model_has_none_of_it(tmp_path: Path) -> None:
    command = keywords(tmp_path, LLAMA, LLAMAFACTORY)
    assert "--vision" not in command
    assert "image_pixels" not in command


def test_the_size_of_images_is_asked_for_with_all_else(tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct\nuse_peft: true\n", encoding="utf-8")
    with pytest.raises(MissingError, match="--gpus, --image-size"):
        check([str(path)], gpu="h100")


def test_a_file_of_text_alone_needs_no_size_of_images(tmp_path: Path) -> None:
    command = keywords(tmp_path, QWEN, LLAMAFACTORY, images=0)
    assert "--images 0" in command
    assert "image_pixels" not in command
