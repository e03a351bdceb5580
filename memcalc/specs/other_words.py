"""Values as other tools call them, and what they are called here; the one table of them."""

from __future__ import annotations

MEANT: dict[str, dict[str, str]] = {
    "framework": {
        "fsdp": "fsdp2", "fully_shard": "fsdp2", "zero": "deepspeed", "ds": "deepspeed", "zero3": "deepspeed",
        "huggingface": "hf", "transformers": "hf", "trainer": "hf", "accelerate": "hf", "trl": "hf", "axolotl": "hf",
        "llamafactory": "hf", "unsloth": "hf", "megatron-lm": "megatron", "megatron-core": "megatron",
        "nemo": "megatron", "mcore": "megatron", "titan": "torchtitan", "pytorch": "plain", "torch": "plain",
    },
    "precision": {
        "amp": "bf16-autocast", "mixed": "bf16-mixed", "bf16_mixed": "bf16-mixed", "bfloat16": "bf16",
        "float32": "fp32", "float16": "fp16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-mixed", "tf32": "fp32",
        "mxfp8": "fp8-mixed", "nvfp4": "fp8-mixed", "fp4": "fp8-mixed",
    },
    "optimizer": {
        "adam": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adam8bit": "adamw-8bit",
        "adamw_8bit": "adamw-8bit", "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit",
        "paged_adamw_32bit": "paged-adamw", "momentum": "sgd-momentum", "galore": "galore-adamw",
    },
    "attention": {
        "flash2": "flash", "fa2": "flash", "flash_attention_2": "flash", "flash-attn": "flash", "xformers": "efficient",
    },
    "quantize": {"4bit": "nf4", "int4": "nf4", "fp4": "nf4", "qlora": "nf4", "8bit": "int8", "bnb": "nf4"},
    "offload": {"cpu": "optimizer", "all": "optimizer,params", "param": "params", "nvme": "optimizer"},
    "recompute": {
        "true": "full", "yes": "full", "on": "full", "all": "full", "block": "full", "selective": "selective-core-attn",
        "false": "none", "no": "none", "off": "none",
    },
    "compile": {"true": "blocks", "false": "none"},
    "loss": {"liger": "fused-linear", "cut-cross-entropy": "fused-linear", "loss-parallel": "parallel"},
    "zero": {"zero2": "2", "zero3": "3"},
    "to": {"hf": "trainer", "transformers": "trainer", "ds": "deepspeed", "fsdp": "fsdp2", "titan": "torchtitan"},
}  # fmt: skip
"""By option: a value of another tool, in lower case, and the value here that is nearest in meaning."""


def meant(option: str, value: object) -> str | None:
    """The value of an option that a word of another tool stands for; None where none is known.

    >>> meant("framework", "FSDP"), meant("framework", "fsdp3")
    ('fsdp2', None)
    """
    return MEANT.get(option, {}).get(str(value).lower())
