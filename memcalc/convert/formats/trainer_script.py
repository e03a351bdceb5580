"""What a training script takes beside the Trainer's arguments: model, lengths, adapters, quantisation.

TRL 1.16 (trainer/sft_config.py, model_config.py, base_config.py, sft_trainer.py, scripts/sft.py) and Transformers'
examples/pytorch/language-modeling/run_clm.py. From 5.0 on from_pretrained() takes the checkpoint's own dtype where
none is given (modeling_utils.py); SFTTrainer and its script take float32.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Reading
from memcalc.convert.formats.trainer_keys import MODULES, TRL_SIGNS

__all__ = ["is_trl", "read_script"]

_DTYPES = {
    "float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16",
    "half": "fp16", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "auto": "auto",
    "none": "auto",
}  # fmt: skip
_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "kernels-community/flash-attn2": "flash",
    "kernels-community/flash-attn": "flash", "eager": "eager", "sdpa": "", "flex_attention": "flex", "none": "",
}  # fmt: skip
_LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "block_size", "model_max_length")
"""`max_seq_len` is how PEFT's scripts abbreviate `max_seq_length`: argparse takes a beginning that is unique."""


def is_trl(reading: Reading) -> bool:
    """Whether TRL's own defaults hold: keys of its newest release, none of those that it no longer has."""
    old = reading.has("max_seq_length") or reading.has("max_seq_len")
    return bool(TRL_SIGNS & set(reading.document.data)) and not old


def read_script(reading: Reading, trl: bool) -> None:
    """Say what model the script loads, how, and what it feeds."""
    for key in ("model_name_or_path", "model_name", "model_id", "model"):
        if isinstance(reading.raw(key), str):
            reading.say("model", reading.text(key), key)
            break
    if trl:
        reading.say("trl", True, next(key for key in reading.document.data if key in TRL_SIGNS))
    quantized = _adapters(reading)
    _weights(reading, trl, quantized)
    _attention(reading)
    _length(reading, trl)
    reading.harmless("model_init_kwargs.")


def _weights(reading: Reading, trl: bool, quantized: bool) -> None:
    keys = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    key = next((key for key in keys if reading.has(key)), "")
    if not key and not trl:
        if quantized:
            return
        reading.say("script_loads", "not said", "dtype")
        return
    name = reading.one_of(key, _DTYPES, "fp32") if key else "fp32"
    key = key or "dtype"
    if quantized and name == "fp32":
        says = f"with {key} float32 what is not quantised is fp32, and products are; here both count as bf16"
        reading.note("warning", "MC002", key, says, f"{key} bfloat16")
        return
    if name == "auto":
        reading.note("note", "MC004", key, f"{key} auto is the checkpoint's own dtype: counted as bf16")
    reading.say("weights", "bf16" if name == "auto" else name, key)


def _attention(reading: Reading) -> None:
    """`sdpa`, the default, takes the kernel that the model's class allows, which memcalc knows."""
    for key in ("attn_implementation", "model_init_kwargs.attn_implementation"):
        name = reading.one_of(key, _ATTENTION, "")
        if name == "flex":
            reading.not_modelled({key: "it counts as a fused kernel"})
        elif name:
            reading.say("attention", name, key)


def _length(reading: Reading, trl: bool) -> None:
    """Tokens of a sequence, and whether batches differ in length: packed and cut ones do not."""
    key = next((key for key in _LENGTHS if reading.whole(key, low=1) is not None), "")
    if key:
        reading.say("seq_len", reading.whole(key), key)
    elif trl:
        reading.say("seq_len", 1024, "max_length")
    if reading.flag("packing") or reading.flag("pad_to_max_length") or reading.has("block_size"):
        same = next(key for key in ("packing", "pad_to_max_length", "block_size") if reading.has(key))
        reading.say("varying_lengths", False, same)
    elif reading.flag("group_by_length") or reading.text("train_sampling_strategy") == "group_by_length":
        named = "group_by_length" if reading.has("group_by_length") else "train_sampling_strategy"
        reading.say("varying_lengths", True, named)
    elif trl:
        reading.say("varying_lengths", True, "packing")


def _adapters(reading: Reading) -> bool:
    """Say adapters and a quantised base; return whether it is quantised."""
    four, eight = reading.flag("load_in_4bit"), reading.flag("load_in_8bit")
    nested = next((key for key in ("use_bnb_nested_quant", "bnb_4bit_use_double_quant") if reading.flag(key)), "")
    ranks = next((key for key in ("lora_r", "lora_rank") if reading.has(key)), "")
    reading.flag("use_bnb_nested_quant"), reading.flag("bnb_4bit_use_double_quant")
    on = next((key for key in ("use_peft", "use_lora", "use_peft_lora") if reading.flag(key)), "")
    if not on:
        switched = any(reading.has(key) for key in ("use_peft", "use_lora", "use_peft_lora"))
        if switched or not ranks:
            reading.harmless("lora_r", "lora_rank", "lora_dropout", "lora_target_modules", "lora_modules_to_save")
            if four or eight:
                message = "a quantised base is trained with adapters: without them its weights stay as they are"
                reading.note("warning", "MC002", "load_in_4bit" if four else "load_in_8bit", message, "use_peft true")
            return False
    key = ranks or "lora_r"
    rank = reading.whole(key, 16, low=1)
    targets = _layers(reading, "lora_target_modules")
    reading.say("lora", f"{rank}:{','.join(targets)}" if targets else str(rank), key)
    reading.say("workload.lora_dropout", reading.number("lora_dropout", 0.05), "lora_dropout")
    if saved := [name for name in _layers(reading, "lora_modules_to_save") if name in {"embedding", "head"}]:
        reading.say("also_train", tuple(saved), "lora_modules_to_save")
    if four or eight:
        reading.say(
            "quantize", ("nf4-dq" if nested else "nf4") if four else "int8", "load_in_4bit" if four else "load_in_8bit"
        )
        # sft_trainer.py: adapters over a quantised base are cast to bf16; norms are left as they are
        reading.say("adapter_dtype", "bf16", "load_in_4bit" if four else "load_in_8bit")
    return bool(four or eight)


def _layers(reading: Reading, key: str) -> list[str]:
    """The layers that a list of modules names; what memcalc has no word for is a warning."""
    found: dict[str, Any] = {}
    for name in reading.items(key):
        known = MODULES.get(str(name).lower())
        if known is None:
            reading.note("warning", "MC002", key, f"{key} has {name!r}, whose adapters are not counted")
        else:
            found[known] = True
    return list(found)
