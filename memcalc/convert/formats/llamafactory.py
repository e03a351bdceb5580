"""LLaMA-Factory's YAML or JSON, as its main branch of August 2026 reads it (ff6d4d12e, after 0.9.5).

Sources: hparams/*.py, model/adapter.py (init_adapter: what is trained becomes fp32), model/loader.py (the rest stays as
the checkpoint has it), model/model_utils/{checkpointing,quantization,attention,liger_kernel}.py, train/sft/workflow.py,
data/processor/supervised.py; the Trainer's own arguments: transformers 5.23 training_args.py.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats import llamafactory_keys as keys
from memcalc.convert.formats.base import Format, inner_document
from memcalc.convert.formats.optimizers import say_optimizer
from memcalc.convert.formats.tuning import fsdp_keys, say_fsdp, say_lora, say_stored, say_trained_besides

_TYPES = {"full": "full", "freeze": "freeze", "lora": "lora", "oft": "oft"}
_STAGES = {name: name for name in ("pt", "sft", "rm", "ppo", "dpo", "kto")}
_ATTENTION = {"auto": "", "sdpa": "", "disabled": "eager", "fa2": "flash", "fa3": "flash"}
"""``flash_attn``; PyTorch's own choice follows from the model's class."""
_METHODS = {"bnb": "bnb", "gptq": "gptq", "awq": "awq", "aqlm": "aqlm", "quanto": "quanto", "eetq": "eetq",
            "hqq": "hqq", "mxfp4": "mxfp4", "fp8": "fp8"}  # fmt: skip
_PADDED = 8
"""Batches are padded to a multiple of this (train/sft/workflow.py)."""


def read(document: Document) -> Config:
    """Return what a LLaMA-Factory config says of a job."""
    reading = Reading(document, "llamafactory", "LLaMA-Factory 0.9.6.dev0")
    reading.say("engine", "trainer", "model_name_or_path")
    reading.say("model", reading.text("model_name_or_path"), "model_name_or_path")
    stage = reading.one_of("stage", _STAGES, "sft")
    _batch(reading, stage)
    kind = reading.one_of("finetuning_type", _TYPES, "lora")
    quantised = _adapter(reading, kind)
    _precision(reading, kind)
    sharded = _engine(reading)
    _checkpointing(reading, sharded)
    _kernels(reading, stage, quantised)
    _optimizer(reading)
    if reading.has("ray_num_workers"):
        reading.say("gpus", reading.whole("ray_num_workers", 1, low=1), "ray_num_workers")
    if stage not in ("pt", "sft"):
        reading.not_modelled({"stage": "pairs of samples, and models beside the one that is trained"})
    reading.harmless(*keys.HARMLESS)
    reading.not_modelled(keys.NOT_MODELLED, unless=(False, None, 0, 0.0, 1, "", "none"))
    return reading.finish(known=keys.KNOWN)


def _batch(reading: Reading, stage: str) -> None:
    """Packed rows of supervised fine-tuning have one token more than ``cutoff_len``, then padding."""
    cut = reading.whole("cutoff_len", 2048, low=1) or 2048
    packed = bool(reading.flag("packing", stage == "pt")) or bool(reading.flag("neat_packing"))
    length = cut + 1 if packed and stage == "sft" else cut
    if not (packed and stage == "pt"):
        length = -(-length // _PADDED) * _PADDED
    reading.say("seq_len", length, "cutoff_len")
    if length != cut:
        said = f"cutoff_len {cut} becomes {length} tokens: rows are padded to a multiple of {_PADDED}"
        reading.note("note", "MC004", "cutoff_len", said)
    reading.say("varying_lengths", not packed, "packing")
    micro = reading.whole("per_device_train_batch_size", 8, low=1)
    reading.say("micro_batch", micro, "per_device_train_batch_size")
    steps = reading.whole("gradient_accumulation_steps", 1, low=1)
    reading.say("accumulation", steps, "gradient_accumulation_steps")
    evaluated = reading.whole("per_device_eval_batch_size", 8, low=1)
    reading.say("eval_micro_batch", evaluated, "per_device_eval_batch_size")
    reading.say("evaluates", reading.text("eval_strategy", "no") != "no", "eval_strategy")


def _adapter(reading: Reading, kind: str) -> bool:
    """Adapters, and whether the frozen base is quantised."""
    if kind == "oft":
        reading.ask("lora", "finetuning_type", "oft, whose rotations are not modelled,")
    if kind == "freeze":
        reading.not_modelled({"finetuning_type": "a few blocks are trained; all are counted as trained"})
    if kind not in ("lora", "oft"):
        reading.harmless(*keys.OF_LORA)
        return False
    if kind == "lora":
        rank = reading.whole("lora_rank", 8, low=1) or 8
        say_lora(reading, rank, "lora_target", every=reading.text("lora_target", "all") == "all")
        reading.say("workload.lora_dropout", reading.number("lora_dropout", 0.0), "lora_dropout")
        if reading.has("additional_target"):
            say_trained_besides(reading, "additional_target")
    reading.harmless(*keys.OF_LORA)
    return _quantised(reading)


def _quantised(reading: Reading) -> bool:
    """On-the-fly quantisation (configure_quantization); a checkpoint that is quantised already has its way."""
    bits = reading.whole("quantization_bit", low=1)
    method = reading.one_of("quantization_method", _METHODS, "bnb")
    double = reading.flag("double_quantization", True)
    reading.one_of("quantization_type", {"fp4": 0, "nf4": 0}, 0)
    if say_stored(reading, "model_name_or_path"):
        return True
    if bits is None:
        return False
    if method == "bnb" and bits not in (4, 8):
        raise reading.wrong("quantization_bit", bits, "must be 4 or 8 with bitsandbytes")
    if bits not in (4, 8):
        reading.ask("quantize", "quantization_bit", f"{bits} bits of {method}")
        return True
    four = "nf4-dq" if double and method == "bnb" else "nf4"
    reading.say("quantize", four if bits == 4 else "int8", "quantization_bit")
    if method != "bnb":
        reading.not_modelled({"quantization_method": f"weights of {method} are counted as those of bitsandbytes"})
    return True


def _precision(reading: Reading, kind: str) -> None:
    """What is trained is cast to fp32, unless pure_bf16 or BAdam forbids it; what is frozen stays, mostly in bf16."""
    pure, blocks = bool(reading.flag("pure_bf16")), bool(reading.flag("use_badam"))
    frozen = kind in ("lora", "oft")
    key = "use_badam" if blocks else "pure_bf16"
    reading.say("weights", "bf16" if frozen or pure or blocks else "fp32", key)
    mixed = "bf16" if reading.flag("bf16") else "fp16" if reading.flag("fp16") else "no"
    reading.say("mixed", mixed, "fp16" if mixed == "fp16" else "bf16")


def _engine(reading: Reading) -> int:
    """Who shares out the states; the version of FSDP, if it does."""
    listed = [part for item in reading.items("fsdp") if (part := str(item).lower()) not in ("false", "")]
    found = reading.raw("deepspeed")
    if listed:
        where = fsdp_keys(reading)
        say_fsdp(reading, where["version"], 2, listed, where, "cpu_offload")
        return reading.whole(where["version"], 2) or 2
    reading.harmless("fsdp_config.", "fsdp_config")
    reading.say("zero", 0, "fsdp")
    if isinstance(found, dict):
        reading.refer("deepspeed", "deepspeed", document=inner_document(reading.document, ("deepspeed",)))
        reading.harmless("deepspeed.")
    elif found:
        reading.refer("deepspeed", "deepspeed", path=reading.text("deepspeed"))
    return 0


def _checkpointing(reading: Reading, fsdp: int) -> None:
    """Every block is computed again unless told otherwise; checkpoints are reentrant, except under FSDP 2."""
    off = bool(reading.flag("disable_gradient_checkpointing"))
    on = not off or bool(reading.flag("gradient_checkpointing"))
    reading.harmless("gradient_checkpointing", "gradient_checkpointing_kwargs.", "gradient_checkpointing_kwargs")
    reading.say("recompute", "full" if on else "none", "disable_gradient_checkpointing")
    reentrant = bool(reading.flag("use_reentrant_gc", True))
    moved = bool(reading.flag("use_unsloth_gc"))
    if not on:
        return
    kind = "reentrant" if (reentrant and fsdp != 2 and not off) or moved else "non-reentrant"
    reading.say("strategy.checkpoint", kind, "use_unsloth_gc" if moved else "use_reentrant_gc")
    if moved:
        reading.say("offload", ("activations",), "use_unsloth_gc")
    if fsdp:
        reading.say("checkpoints_wrapped", True, "disable_gradient_checkpointing")


def _kernels(reading: Reading, stage: str, quantised: bool) -> None:
    kernel = reading.one_of("flash_attn", _ATTENTION, "")
    if kernel:
        reading.say("attention", kernel, "flash_attn")
    liger = "enable_liger_kernel" if reading.flag("enable_liger_kernel") else "use_liger_kernel"
    fused = bool(reading.flag(liger))
    reading.harmless("use_liger_kernel", "liger_kernel_config.", "liger_kernel_config")
    reading.say("kernels", "fused" if fused else "model", liger if fused else "enable_liger_kernel")
    loss = ("fused-linear" if stage in ("pt", "sft") else "fused-kernel") if fused else "standard"
    reading.say("loss", loss, liger if fused else "enable_liger_kernel")
    reading.say("compile", "model" if reading.flag("torch_compile") else "none", "torch_compile")
    if reading.flag("upcast_layernorm") and quantised:
        reading.say("strategy.prepare_kbit", True, "upcast_layernorm")
    elif reading.flag("upcast_layernorm"):
        reading.not_modelled({"upcast_layernorm": "norms in fp32 are modelled over a quantised base alone"})


def _optimizer(reading: Reading) -> None:
    if reading.flag("use_muon"):
        reading.say("optimizer", "muon", "use_muon")
        reading.harmless("optim")
    else:
        say_optimizer(reading, "optim", "adamw_torch_fused")


def _recognise(document: Document) -> bool:
    data: Any = document.data
    of_kind = document.kind in ("yaml", "json") and isinstance(data, dict)
    return of_kind and "model_name_or_path" in data and bool(keys.SIGNS & set(data))


FORMAT = Format(
    name="llamafactory",
    title="LLaMA-Factory YAML",
    software="LLaMA-Factory 0.9.6.dev0",
    recognise=_recognise,
    read=read,
    kind="yaml",
    filename="train.yaml",
)
"""LLaMA-Factory's own file."""
