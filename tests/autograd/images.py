"""Small models of Transformers that read images, and what their towers and projectors save for backward."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import transformers
from torch import nn

from memcalc.probe.live.cuda_like import cuda_like
from memcalc.probe.live.saved import SavedStorage, node_names, recording
from memcalc.probe.live.step_models import wrap_blocks

TEXT = {"hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 613, "head_dim": 24}  # fmt: skip
VIT = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
       "image_size": 56, "patch_size": 14}  # fmt: skip
QWEN = {"depth": 3, "num_heads": 4, "patch_size": 14}
QWEN3 = QWEN | {"hidden_size": 64, "intermediate_size": 112, "out_hidden_size": 96, "num_position_embeddings": 16}
SMALL: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN | {"embed_dim": 64, "hidden_size": 96},
    "qwen2_5_vl": QWEN | {"hidden_size": 64, "intermediate_size": 112, "out_hidden_size": 96, "window_size": 56,
                          "fullatt_block_indexes": [1]},
    "qwen3_vl": QWEN3 | {"deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": QWEN3 | {"deepstack_visual_indexes": [1]},
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "llama4": VIT | {"intermediate_size": 256, "projector_input_dim": 80, "projector_output_dim": 80,
                     "vision_output_dim": 80},
    "gemma3": VIT | {"vision_use_head": False},
    "llava": VIT,
    "deepseek_vl": VIT | {"vision_use_head": False},
    "internvl": VIT | {"image_size": [56, 56], "patch_size": [14, 14]},
    "idefics3": VIT,
    "smolvlm": VIT,
    "paligemma": VIT | {"vision_use_head": False, "projection_dim": 96},
    "mistral3": VIT | {"head_dim": 16},
    "lighton_ocr": VIT | {"head_dim": 16},
}  # fmt: skip
"""The vision part of each family's config."""
WHOLE: dict[str, dict[str, Any]] = {"gemma3": {"mm_tokens_per_image": 4}}
VIEWS, SIDE, PATCH = 2, 56, 14
PATCHES = (SIDE // PATCH) ** 2
"""Of one view."""
WINDOW = 16
"""Rows of a square that the blocks of Qwen2.5-VL see."""


class Tower(NamedTuple):
    """What a tower and its projector save, and the config of the whole."""

    config: Any
    storages: list[SavedStorage]
    blocks: list[str]


def config_of(kind: str) -> Any:
    """A small config of a family."""
    whole = transformers.AutoConfig.for_model(kind)
    return type(whole)(
        text_config={**TEXT, "model_type": whole.text_config.model_type},
        vision_config={**SMALL[kind], "model_type": whole.vision_config.model_type},
        **WHOLE.get(kind, {}),
    )


def class_of(kind: str) -> Any:
    """Its class."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return getattr(transformers, names[kind])


@contextlib.contextmanager
def without_values(kind: str) -> Iterator[None]:
    """Give towers the lengths and masks that they read from values, which fake tensors do not have."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    rows = VIEWS * PATCHES
    whole, squares = (np.arange(0, rows + 1, step) for step in (PATCHES, WINDOW))
    known = {
        "get_vision_position_ids": torch.zeros(rows, 2, dtype=torch.long),
        "get_vision_attention_seqlens": (whole, PATCHES),
        "get_vision_window_index": (torch.arange(rows // 4), squares),
        "get_max_seqlen": PATCHES,
        "get_vision_interpolation_indices_and_weights": (torch.zeros(rows, 4, dtype=torch.long), torch.zeros(rows, 4)),
        "create_bidirectional_mask": None,
    }
    with contextlib.ExitStack() as stack:
        for name in known.keys() & vars(module).keys():
            stack.enter_context(mock.patch.object(module, name, lambda *_, value=known[name], **__: value))
        yield


def saved_by_tower(kind: str, *, recompute: str = "none") -> Tower:
    """What the tower and the projector of a small model in bf16 save for two views."""
    config = config_of(kind)
    with cuda_like("auto"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with mock.patch.object(transformers.PreTrainedModel, "init_weights"):
                whole = class_of(kind)(config).train()
                model = getattr(whole, "model", whole)
        finally:
            torch.set_default_dtype(torch.float32)
        tower = tower_of(model)
        path = next(name for name, module in model.named_modules() if module is tower)
        listed = next(n for n, m in tower.named_modules() if isinstance(m, nn.ModuleList) and "merger" not in n)
        blocks = {f"{path}.{listed}.{i}": block for i, block in enumerate(tower.get_submodule(listed))}
        wrap_blocks(blocks, recompute)
        with recording(model, list(blocks)) as recorder, without_values(kind):
            seen, tokens = features(kind, model, tower)
            loss = sum(part.sum() for part in tokens)
        del seen  # until the model's forward is over its output holds the tower's
        return Tower(config, recorder.result(node_names(loss.grad_fn)), list(blocks))


def tower_of(model: Any) -> Any:
    """The vision tower, whatever the class calls it."""
    names = ("visual", "vision_tower", "vision_model", "vision_encoder")
    return next(getattr(model, name) for name in names if hasattr(model, name))


def features(kind: str, model: Any, tower: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tower's output, and what the projector makes of it."""
    pixels = torch.zeros(VIEWS, 3, SIDE, SIDE, dtype=torch.bfloat16)
    if "qwen" in kind:
        rows = torch.zeros(VIEWS * PATCHES, 3 * 2 * PATCH**2, dtype=torch.bfloat16)
        seen = tower(rows, grid_thw=torch.zeros(VIEWS, 3, dtype=torch.long))
        return seen, [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or [])]
    if kind in {"mistral3", "lighton_ocr"}:
        sizes = [(SIDE, SIDE)] * VIEWS
        seen = tower(pixels, image_sizes=sizes).last_hidden_state
        projector = model.multi_modal_projector if kind == "mistral3" else model.vision_projection
        return seen, [projector(seen.squeeze(0), sizes)]
    if kind in {"idefics3", "smolvlm"}:
        seen = tower(pixels, patch_attention_mask=None).last_hidden_state
        return seen, [model.connector(seen)]
    if kind == "llama4":
        seen = tower(pixels)
        return seen, [model.multi_modal_projector(seen.last_hidden_state.view(-1, seen.last_hidden_state.shape[-1]))]
    seen = model.get_image_features(pixel_values=pixels)
    tokens = seen.pooler_output
    # The last block's output, which LLaVA's projector does not read, lives as long as the output of the model
    return seen, [*(tokens if isinstance(tokens, list | tuple) else [tokens]), seen.last_hidden_state]
