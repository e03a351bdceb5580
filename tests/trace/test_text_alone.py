"""A model that reads images, trained on text alone: its tower is held and never runs."""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from autograd import images, mixer_kernels, timeline

from memcalc import api
from memcalc.allocator import replay
from memcalc.convert.huggingface import from_huggingface
from memcalc.events import step_events
from memcalc.probe.live import timeline as live
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces

BATCH, SEQ = 2, 256
MROPE = {"qwen2_5_vl": [4, 4, 4], "qwen3_vl": [4, 4, 4], "qwen3_vl_moe": [4, 4, 4], "qwen3_5": [1, 1, 1]}
"""Parts of the halves of a small head that are turned by time, height and width."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MROPE, "llava"])
def test_the_whole_step_is_that_of_the_class(kind: str) -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    more = {"num_hidden_layers": len(kinds)} | ({"layer_types": kinds} if kind == "qwen3_5" else {})
    with mock.patch.dict(images.TEXT, more):
        config = images.config_of(kind)
    if kind in MROPE:
        config.text_config.rope_parameters["mrope_section"] = MROPE[kind]
    config.text_config.use_cache = False
    with mixer_kernels.installed(f"{kind}_text"), cuda_like("auto"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with mock.patch.object(transformers.PreTrainedModel, "init_weights"):
                model = images.class_of(kind)(config).train()
        finally:
            torch.set_default_dtype(torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("visual" not in name and "vision" not in name and "projector" not in name)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
        optimizer = live.adamw(model, "foreach")
        states = timeline.stepped(model, optimizer)
        blocks = {f"block {n}": block for n, block in enumerate(model.model.language_model.layers)}
        steps = live.train(model, blocks, lambda: model(input_ids=tokens, labels=tokens).loss, optimizer, 1, 1, states)
    real = max(event.live for event in steps.events if event.step == steps.events[-1].step)
    job = api.single(
        model=from_huggingface(config.to_dict()), gpu="h100", framework="plain", precision="bf16", recompute="none",
        seq_len=SEQ, micro_batch=BATCH, global_batch=BATCH, attention="sdpa", images=0,
    )  # fmt: skip
    census = ModelOnGrid(job.job.model, job.grid)
    ledger = build_ledger(census, Workspaces(0, 0))
    assert replay(step_events(census, ledger, 0, observed=False)).peak_requested == pytest.approx(real, rel=0.003)
