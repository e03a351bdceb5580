"""litgpt's YAML, as litgpt 0.5.13 reads it with Lightning 2.6.

Sources at 26857050: finetune/{lora,full}.py and pretrain.py (setup, main), args.py, utils.py
(get_default_supported_precision, instantiate_bnb_optimizer); Lightning fabric/plugins/precision/fsdp.py. Which command
runs is in a launch line; without one, adapters' keys, ``model_name`` or neither tell it.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.optimizers import Optimizer
from memcalc.convert.formats.torchtune_keys import OPTIMIZERS

_COMMANDS = {
    "finetune": "lora", "finetune_lora": "lora", "finetune_full": "full", "pretrain": "pretrain",
    "finetune_lora_legacy": "lora", "finetune_adapter": "adapter", "finetune_adapter_v2": "adapter",
}  # fmt: skip
_BATCHES = {"lora": (1, 16), "full": (1, 16), "adapter": (1, 16), "pretrain": (4, 512)}
"""Defaults of ``setup``: micro-batch and global batch."""
_PARTS = (
    ("lora_query", ("q",), True), ("lora_key", ("k",), False), ("lora_value", ("v",), True),
    ("lora_projection", ("o",), False), ("lora_mlp", ("gate", "up", "down"), False), ("lora_head", ("head",), False),
)  # fmt: skip
"""Adapters: key, layers, default."""
_PRECISIONS = {
    "bf16-true": "bf16", "bf16-mixed": "bf16-autocast", "32-true": "fp32", "16-mixed": "fp16-autocast",
    "16-true": "bf16",
}  # fmt: skip
"""On one GPU; pure fp16 has the widths of bf16."""
_STORED = {
    "bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-dq", "bnb.fp4": "nf4", "bnb.fp4-dq": "nf4-dq", "bnb.int8-training": "int8",
}  # fmt: skip
_HARMLESS = (
    "out_dir", "data", "data.", "train", "train.save_interval", "train.log_interval", "train.lr_warmup_steps",
    "train.lr_warmup_fraction", "train.epochs", "train.max_tokens", "train.max_steps", "train.max_time",
    "train.max_norm", "train.min_lr", "eval.", "log.", "logger_name", "seed", "access_token", "resume", "tokenizer_dir",
    "initial_checkpoint_dir", "lora_alpha", "optimizer.",
)  # fmt: skip
_KNOWN = (
    *_HARMLESS, "checkpoint_dir", "model_name", "model_config", "precision", "quantize", "devices", "num_nodes",
    "lora_r", "lora_dropout", *(key for key, _, _ in _PARTS), "train.global_batch_size", "train.micro_batch_size",
    "train.max_seq_length", "train.tie_embeddings", "optimizer",
)  # fmt: skip
_SIGNS = frozenset({"train", "precision", "out_dir", "devices"})


def read(document: Document) -> Config:
    """Return what a litgpt config says of a job."""
    reading = Reading(document, "litgpt", "litgpt 0.5.13")
    command = _command(reading)
    reading.say("framework", "litgpt", "command")
    reading.say("loss", "chunked", "command")
    _model(reading, command)
    _batch(reading, command)
    ranks = _ranks(reading, command)
    _precision(reading, several=ranks != 1)
    quantised = _adapters(reading, command)
    _optimizer(reading, command, quantised)
    several = ranks != 1
    recompute = "full" if several and command != "pretrain" else "none"
    reading.say("recompute", recompute, "devices")
    reading.say("compile", "model" if command == "pretrain" else "none", "command")
    if several and command == "lora":
        says = "devices: adapters over several GPUs run on FSDP 2, and are counted on FSDP 1"
        reading.note("warning", "MC002", "devices", says)
    reading.harmless(*_HARMLESS)
    reading.not_modelled({"train.tie_embeddings": "embedding and head are one; counted apart"})
    return reading.finish(known=_KNOWN)


def _command(reading: Reading) -> str:
    found: str | None = reading.one_of("command", _COMMANDS)
    if found:
        return found
    data = reading.document.data
    if any(str(key).startswith("lora_") for key in data):
        return "lora"
    return "pretrain" if "model_name" in data or "model_config" in data else "full"


def _model(reading: Reading, command: str) -> None:
    key = "model_name" if command == "pretrain" else "checkpoint_dir"
    if reading.has("model_config"):
        reading.ask("model", "model_config", "sizes of its own")
    elif reading.has(key):
        reading.say("model", reading.text(key), key)
    reading.harmless("model_config.", "checkpoint_dir", "model_name")


def _batch(reading: Reading, command: str) -> None:
    """Without ``max_seq_length`` the longest sample of the data decides: it is asked for."""
    micro, whole = _BATCHES[command]
    reading.say("micro_batch", reading.whole("train.micro_batch_size", micro, low=1), "train.micro_batch_size")
    reading.say("train_batch", reading.whole("train.global_batch_size", whole, low=1), "train.global_batch_size")
    length = reading.whole("train.max_seq_length", low=1)
    if length is not None:
        reading.say("seq_len", length, "train.max_seq_length")
    reading.say("varying_lengths", command != "pretrain", "command")


def _ranks(reading: Reading, command: str) -> int | None:
    """GPUs in all, None where a run counts them: Fabric's FSDP shards all over them, and blocks are checkpointed."""
    raw = str(reading.raw("devices", "auto" if command == "pretrain" else 1)).lower()
    nodes = reading.whole("num_nodes", 1, low=1) or 1
    reading.say("sharded", 3, "devices")
    reading.say("nodes", nodes, "num_nodes")
    if raw in ("auto", "-1"):
        return None
    devices = reading.whole("devices", 1, low=1) or 1
    reading.say("gpus_per_node", devices, "devices")
    if nodes > 1 and command == "pretrain":
        reading.not_modelled({"num_nodes": "each node keeps all states (hybrid sharding)"}, unless=(1,))
    return devices * nodes


def _precision(reading: Reading, *, several: bool) -> None:
    """Mixed precision is autocast over fp32 weights on one GPU, and FSDP's own over several."""
    found = reading.one_of("precision", _PRECISIONS, "bf16-autocast")
    reading.say("precision", found.replace("autocast", "mixed") if several else found, "precision")


def _adapters(reading: Reading, command: str) -> bool:
    if command == "adapter":
        reading.ask("lora", "command", "adapters that are not LoRA's, which")
    if command != "lora":
        return False
    rank = reading.whole("lora_r", 8, low=1)
    targets = [target for key, targets, on in _PARTS if reading.flag(key, on) for target in targets]
    reading.say("lora", f"{rank}:{','.join(targets)}", "lora_r")
    reading.say("workload.lora_dropout", reading.number("lora_dropout", 0.05), "lora_dropout")
    stored = reading.one_of("quantize", _STORED)
    if stored:
        reading.say("quantize", stored, "quantize")
        reading.say("strategy.bnb", "0.42", "quantize")
    return bool(stored)


def _optimizer(reading: Reading, command: str, quantised: bool) -> None:
    """A class, or its name in torch.optim; over a quantised base it is bitsandbytes' paged AdamW whatever is said."""
    table = isinstance(reading.raw("optimizer"), dict)
    key = "optimizer.class_path" if table else "optimizer"
    name = reading.text(key, "AdamW")
    known = {**OPTIMIZERS, **{name.removeprefix("torch.optim."): found for name, found in OPTIMIZERS.items()}}
    found: Optimizer = reading.one_of(key, known, OPTIMIZERS["torch.optim.AdamW"], fold=False)
    if quantised and "AdamW" not in name:
        raise reading.wrong(key, name, "must be an AdamW over a quantised base")
    momentum = found.name == "sgd" and bool(reading.number("optimizer.init_args.momentum", 0.0))
    fused = found.impl == "foreach" and (command == "pretrain" or bool(reading.flag("optimizer.init_args.fused")))
    plain = "sgd-momentum" if momentum else found.name
    reading.say("optimizer", "paged-adamw" if quantised else plain, key)
    if not quantised:
        reading.say("optimizer_impl", "fused" if fused else found.impl, key)


def _recognise(document: Document) -> bool:
    data: Any = document.data
    if document.kind not in ("yaml", "flags") or not isinstance(data, dict):
        return False
    if str(data.get("command")) in _COMMANDS:
        return True
    named = "checkpoint_dir" in data or "model_name" in data
    return named and "train" in data and len(_SIGNS & set(data)) > 1 and "per_device_train_batch_size" not in data


FORMAT = Format(
    name="litgpt",
    title="litgpt YAML",
    software="litgpt 0.5.13",
    recognise=_recognise,
    read=read,
    kind="yaml",
    filename="config.yaml",
)
"""litgpt's own file."""
