"""What an evaluation holds, beside the real Trainer on the CPU, every large tensor counted while it lives."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memcalc
from memcalc.formulas.activations import key_value_bytes
from memcalc.results.details import Occasion

VOCAB, LENGTH, BATCH = 3000, 16, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "framework": "hf", "zero": 3, "seq_len": 4096,
         "recompute": "full"}  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages of at least some size that lived at once."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.sizes, self.most = least, dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.least and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
                self.most = max(self.most, sum(self.sizes.values()))
        return out


def on_the_host(_tensors: Any) -> Any:
    """What leaves the device, which on the CPU would share its storage or be cast beside it: nothing that counts."""
    return np.zeros(1)


def trainer_bytes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, batches: int, *, flushed: int | None, mixed: bool, metrics: bool
) -> int:
    """Return the most bytes of logits that the real Trainer's evaluation has at once."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.trainer_pt_utils.nested_numpify", on_the_host)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model = model if mixed else model.to(torch.bfloat16)
    tokens = torch.arange(LENGTH)
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, bf16=mixed, per_device_eval_batch_size=BATCH, eval_accumulation_steps=flushed,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, eval_dataset=[{"input_ids": tokens, "labels": tokens}] * (batches * BATCH),
        compute_metrics=(lambda _: {}) if metrics else None,
    )  # fmt: skip
    with LiveBytes(2 * BATCH * LENGTH * VOCAB) as live:
        trainer.evaluate()
    return live.most


def evaluated(result: memcalc.Estimate, name: str = "evaluation") -> Occasion:
    return next(occasion for occasion in result.occasions if occasion.name == name)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("batches", "flushed"), [(1, None), (2, None), (3, None), (6, None), (6, 3), (6, 1)])
def test_kept_logits_are_those_of_the_real_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batches: int, flushed: int | None, mixed: bool
) -> None:
    most = trainer_bytes(monkeypatch, tmp_path, batches, flushed=flushed, mixed=mixed, metrics=True)
    assert logits_of(tmp_path, mixed, flushed or batches) == pytest.approx(most, rel=0.02)


def test_without_metrics_only_the_loss_has_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    most = trainer_bytes(monkeypatch, tmp_path, 8, flushed=None, mixed=True, metrics=False)
    assert logits_of(tmp_path, mixed=True, batches=0) == pytest.approx(most, rel=0.02)


def logits_of(folder: Path, mixed: bool, batches: int) -> int:
    """Return what memcalc says that an evaluation of the same model has beside its states [bytes]."""
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    fields = {"workload.eval_micro_batch": BATCH, "workload.eval_batches_kept": batches}
    result = memcalc.estimate(
        model=str(config), gpu="h100", framework="hf", seq_len=LENGTH, settings=fields,
        precision="bf16-autocast" if mixed else "bf16",
    )  # fmt: skip
    return sum(part.bytes for part in evaluated(result).parts if "logits" in part.name)


def test_every_rank_keeps_the_logits_of_all() -> None:
    fields = {"workload.eval_micro_batch": 1, "workload.eval_batches_kept": 4}
    occasion = evaluated(memcalc.estimate(**LLAMA, settings=fields))
    assert occasion.batch_outputs == 8 * 4096 * 128256 * 4
    assert any(part.bytes == 2 * 4 * occasion.batch_outputs for part in occasion.parts)


def test_what_the_job_evaluates_must_fit_and_what_is_assumed_need_not() -> None:
    plain = memcalc.estimate(**LLAMA)
    assert plain.verdict == "fits"
    assert not evaluated(plain).certain
    told = memcalc.estimate(**LLAMA, settings={"workload.eval_micro_batch": 64})
    assert told.verdict == "does-not-fit"
    assert (told.peak, told.phases, told.terms) == (plain.peak, plain.phases, plain.terms)
    assert any("evaluation runs out of memory" in warning for warning in told.warnings)
    none = memcalc.estimate(**LLAMA, settings={"workload.eval_micro_batch": 0})
    assert [occasion.name for occasion in none.occasions if occasion.name == "evaluation"] == []


def test_a_forward_without_gradients_keeps_no_block() -> None:
    """One block's working set, whatever the depth: no part grows with the number of blocks but the states."""
    parts = evaluated(memcalc.estimate(**{**LLAMA, "recompute": "none"})).parts
    with_checkpoints = evaluated(memcalc.estimate(**LLAMA)).parts
    assert parts == with_checkpoints


def test_the_trainer_before_5_returns_keys_and_values() -> None:
    words = {**LLAMA, "gpus": 1, "zero": 0, "precision": "bf16"}
    now, before = (evaluated(memcalc.estimate(**{**words, "framework": name})) for name in ("hf", "hf@4.49"))
    cache = 32 * 2 * 1024 * 8 * 4096 * 2  # layers, keys and values, 8 heads of 128, sequences, tokens, bf16
    assert "cached keys and values" not in {part.name for part in now.parts}
    assert cache in {part.bytes for part in before.parts if part.name == "cached keys and values"}


def test_an_encoder_has_no_cache_and_generates_nothing() -> None:
    words = {"model": "bert-base", "gpu": "a100-80g", "seq_len": 128, "settings": {"workload.eval_new_tokens": 8}}
    now, before = (memcalc.estimate(**words, framework=name) for name in ("hf", "hf@4.49"))
    assert evaluated(now).allocated == evaluated(before).allocated
    assert "generation" not in {occasion.name for occasion in now.occasions}


@pytest.mark.parametrize("length", [1, 5])
def test_the_cache_of_a_layer_is_that_of_transformers(length: int) -> None:
    cache = pytest.importorskip("transformers").DynamicCache()
    keys = torch.zeros(3, 2, length, 16, dtype=torch.bfloat16)
    cache.update(keys, keys.clone(), 0)
    layer = cache.layers[0]
    size = layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
    assert key_value_bytes(32, 32, 3 * length, 2) == size


def test_generation_has_the_cache_of_prompt_and_answer() -> None:
    fields = {"workload.eval_micro_batch": 4, "workload.eval_new_tokens": 4096}
    words = {**LLAMA, "gpus": 1, "zero": 0, "precision": "bf16", "settings": fields}
    sizes = {part.name: part.bytes for part in evaluated(memcalc.estimate(**words), "generation").parts}
    assert sizes["cached keys and values"] == 32 * 2 * 1024 * 4 * 8192 * 2
    assert sizes["logits of the last token"] == 4 * 4 * 128256
