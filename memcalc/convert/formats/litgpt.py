"""litgpt's YAML, as litgpt 0.5.13 reads it with Lightning 2.6.

Sources at 26857050: finetune/{lora,full}.py and pretrain.py (setup, main), args.py, utils.py
(get_default_supported_precision, instantiate_bnb_optimizer); Lightning fabric/plugins/precision/fsdp.py. Which command
runs is in a launch line; without one, adapters' keys, ``model_name`` or neither tell it.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.torchtune import OPTIMIZERS
from memcalc.convert.formats.tuning import Optimizer, set_decay
from memcalc.frameworks.litgpt import LITGPT

_KEYS = key_table("litgpt")
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
_SIGNS = frozenset({"train", "precision", "out_dir", "devices"})


def read(document: Document) -> Config:
    """Return what a litgpt config says of a job."""
    reader = ConfigReader(document, "litgpt", "litgpt 0.5.13")
    command = _command(reader)
    reader.set("framework", "litgpt", "command")
    reader.set("loss", LITGPT.loss, "command")
    _model(reader, command)
    _batch(reader, command)
    several = _ranks(reader, command) != 1
    # mixed precision is autocast over fp32 weights on one GPU, and FSDP's own over several
    precision = reader.one_of("precision", _PRECISIONS, "bf16-autocast")
    reader.set("precision", precision.replace("autocast", "mixed") if several else precision, "precision")
    quantized = _adapters(reader, command)
    _optimizer(reader, command, quantized)
    recompute = LITGPT.sharded_recompute if several and command != "pretrain" else LITGPT.recompute
    reader.set("recompute", recompute, "devices")
    reader.set("compile", "model" if command == "pretrain" else "none", "command")
    if several and command == "lora":
        says = "devices: adapters over several GPUs run on FSDP 2, and are counted on FSDP 1"
        reader.note("warning", "MC002", "devices", says)
    reader.harmless(*_KEYS.harmless)
    reader.not_counted(_KEYS.not_counted)
    reader.not_modelled({"train.tie_embeddings": "embedding and head are one; counted apart"})
    return reader.finish(known=_KEYS.names("harmless", "not_counted", "read"))


def _command(reader: ConfigReader) -> str:
    command: str | None = reader.one_of("command", _COMMANDS)
    if command:
        return command
    data = reader.document.data
    if any(str(key).startswith("lora_") for key in data):
        return "lora"
    return "pretrain" if "model_name" in data or "model_config" in data else "full"


def _model(reader: ConfigReader, command: str) -> None:
    key = "model_name" if command == "pretrain" else "checkpoint_dir"
    if reader.has("model_config"):
        reader.ask("model", "model_config", "sizes", "has sizes of its own, which are not read")
    elif reader.has(key):
        reader.set("model", reader.text(key), key)
    reader.harmless("model_config.", "checkpoint_dir", "model_name")


def _batch(reader: ConfigReader, command: str) -> None:
    """Without ``max_seq_length`` the longest sample of the data decides: it is asked for."""
    micro, global_batch = _BATCHES[command]
    reader.set_integer("micro_batch", "train.micro_batch_size", micro)
    reader.set_integer("train_batch", "train.global_batch_size", global_batch)
    reader.set("batch_floored", True, "train.global_batch_size")  # args.py, gradient_accumulation_iters
    reader.set_integer("seq_len", "train.max_seq_length")
    reader.set("varying_lengths", command != "pretrain", "command")


def _ranks(reader: ConfigReader, command: str) -> int | None:
    """GPUs in all, None where a run counts them: Fabric's FSDP shards all over them, and blocks are checkpointed."""
    raw = str(reader.raw("devices", "auto" if command == "pretrain" else 1)).lower()
    nodes = reader.integer("num_nodes", 1, low=1) or 1
    reader.set("sharded", 3, "devices")
    reader.set("nodes", nodes, "num_nodes")
    if raw in ("auto", "-1"):
        return None
    devices = reader.integer("devices", 1, low=1) or 1
    reader.set("gpus_per_node", devices, "devices")
    if nodes > 1 and command == "pretrain":
        reader.set("dp_replicate", nodes, "num_nodes")
    return devices * nodes


def _adapters(reader: ConfigReader, command: str) -> bool:
    if command == "adapter":
        reader.ask("lora", "command", command, "trains adapters that are not LoRA's, which are not modelled")
    if command != "lora":
        return False
    rank = reader.integer("lora_r", 8, low=1)
    targets = [target for key, targets, on in _PARTS if reader.flag(key, on) for target in targets]
    reader.set("lora", f"{rank}:{','.join(targets)}", "lora_r")
    reader.set("adapts_what_is_there", True, "lora_r")
    reader.set("workload.lora_dropout", reader.number("lora_dropout", 0.05), "lora_dropout")
    if stored := reader.one_of("quantize", _STORED):
        reader.set("quantize", stored, "quantize")
        reader.set("strategy.bnb", "0.42", "quantize")
    return bool(stored)


def _optimizer(reader: ConfigReader, command: str, quantized: bool) -> None:
    """A class, or its name in torch.optim; over a quantized base it is bitsandbytes' paged AdamW whatever is said."""
    table = isinstance(reader.raw("optimizer"), dict)
    key = "optimizer.class_path" if table else "optimizer"
    name = reader.text(key, "AdamW")
    known = {**OPTIMIZERS, **{name.removeprefix("torch.optim."): kind for name, kind in OPTIMIZERS.items()}}
    optimizer: Optimizer = reader.one_of(key, known, OPTIMIZERS["torch.optim.AdamW"], fold=False)
    if quantized and "AdamW" not in name:
        raise reader.error(key, name, "must be an AdamW over a quantized base")
    momentum = optimizer.name == "sgd" and bool(reader.number("optimizer.init_args.momentum", 0.0))
    fused = optimizer.impl == "foreach" and (command == "pretrain" or bool(reader.flag("optimizer.init_args.fused")))
    plain = "sgd-momentum" if momentum else optimizer.name
    reader.set("optimizer", "paged-adamw" if quantized else plain, key)
    set_decay(reader, plain, "optimizer.init_args.weight_decay")
    if not quantized:
        reader.set("optimizer_impl", "fused" if fused else optimizer.impl, key)


def _recognise(document: Document) -> bool:
    data: Any = document.data
    if document.kind not in ("yaml", "flags") or not isinstance(data, dict):
        return False
    if str(data.get("command")) in _COMMANDS:
        return True
    named = "checkpoint_dir" in data or "model_name" in data
    return named and "train" in data and len(_SIGNS & set(data)) > 1 and "per_device_train_batch_size" not in data


FORMAT = Format("litgpt", "litgpt YAML", "litgpt 0.5.13", _recognise, read, kind="yaml", filename="config.yaml")
