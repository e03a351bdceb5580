"""LLaMA-Factory's YAML or JSON, as its main branch of August 2026 reads it (ff6d4d12e, after 0.9.5).

Sources: hparams/*.py, model/adapter.py (init_adapter: what is trained becomes fp32), model/loader.py (the rest stays as
the checkpoint has it), model/model_utils/{checkpointing,quantization,attention,liger_kernel}.py, train/sft/workflow.py,
data/processor/supervised.py; the Trainer's own arguments: transformers 5.23 training_args.py.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.fsdp_config import (
    ask_for_rows,
    set_evaluation,
    set_generation,
    set_reductions,
    set_resumes,
    set_state_dict,
    tokens_up_to,
)
from memcalc.convert.formats.preferences import refuse_reference, set_algorithm
from memcalc.convert.formats.tuning import (
    fsdp_keys,
    refer_deepspeed,
    set_also_trained,
    set_dora,
    set_fsdp,
    set_galore,
    set_kernel,
    set_lora,
    set_optimizer,
    set_stored,
    set_vision,
)
from memcalc.convert.objectives import method_called, refuse_idle
from memcalc.errors import MissingError, ObjectiveError, cut

_KEYS = key_table("llamafactory")
_TYPES = {name: name for name in ("full", "freeze", "lora", "oft")}
_STAGES = {name: name for name in ("pt", "sft", "rm", "ppo", "dpo", "kto")}
_LOSSES = {**dict.fromkeys(("sigmoid", "hinge", "ipo", "kto_pair"), "dpo"), "orpo": "orpo", "simpo": "simpo"}
_ATTENTION = {"auto": "", "sdpa": "", "disabled": "eager", "fa2": "flash", "fa3": "flash3"}
"""``flash_attn``; PyTorch's own choice follows from the model's class."""
_METHODS = {name: name for name in ("bnb", "gptq", "awq", "aqlm", "quanto", "eetq", "hqq", "mxfp4", "fp8")}
_METHODS["bitsandbytes"] = "bnb"  # its name before 0.9.3
V1 = ("model_class", "peft_config", "dist_config", "quant_config")
"""Keys that the files of v1 have and those of 0.9 have not (examples/v1, src/llamafactory/v1/config)."""
_MEGATRON = ("use_mca", "tensor_model_parallel_size", "pipeline_model_parallel_size", "recompute_granularity")
_IDLE = ("export_dir", "infer_backend", "do_predict", "task")
"""Keys of files that merge, infer, predict or evaluate (hparams/evaluation_args.py)."""
_CHAT = frozenset(
    ["model_name_or_path", "adapter_name_or_path", "template", "finetuning_type", "trust_remote_code", "infer_dtype"]
)
"""Keys with which `llamafactory-cli chat`, `api` and `webchat` have enough."""
_STEPS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "num_train_epochs",
    "max_steps",
)
_PADDED = 8
"""Batches are padded to a multiple of this (train/sft/workflow.py)."""


def read(document: Document) -> Config:
    """Return what a LLaMA-Factory config says of a job."""
    reader = ConfigReader(document, "llamafactory", "LLaMA-Factory 0.9.6.dev0")
    _check_generation(reader)
    reader.set("engine", "trainer", "model_name_or_path")
    reader.set("model", reader.text("model_name_or_path"), "model_name_or_path")
    stage = reader.one_of("stage", _STAGES, "sft")
    algorithm = _objective(reader, stage)
    idle = [key for key in _IDLE if reader.text(key).lower() not in ("", "false")]
    if idle and not reader.flag("do_train"):
        refuse_idle(document.path.name, idle)
    if reader.has("tokenized_path") and not any(map(reader.has, _STEPS)):  # saves the tokens, and ends (data/loader.py)
        refuse_idle(document.path.name, ("tokenized_path, and nothing of a step",))
    _refuse_others(reader)
    _batch(reader, stage)
    kind = reader.one_of("finetuning_type", _TYPES, "lora")
    if reader.has("template") and _CHAT.issuperset(document.data):
        refuse_idle(document.path.name, ("a model and a template alone",))
    if algorithm:
        refuse_reference(reader, reader.text("model_name_or_path"), ("ref_model",), adapters=kind == "lora")
        reader.not_counted(_KEYS.tables["of_references"])
    quantized = _adapter(reader, kind)
    set_dora(reader, quantised=quantized)
    _precision(reader, kind)
    sharded = _engine(reader)
    _checkpointing(reader, sharded)
    _kernels(reader, quantized)
    _optimizer(reader)
    if reader.has("ray_num_workers"):
        reader.set_integer("gpus", "ray_num_workers", 1)
    reader.harmless(*_KEYS.harmless)
    reader.not_counted(_KEYS.not_counted)
    reader.not_modelled(_KEYS.not_modelled, unless=(False, None, 0, 0.0, 1, "", "none"))
    ask_for_rows(reader, "what reads the file")
    return reader.finish(known=_KEYS.names("of_lora", "refused", "not_modelled", "not_counted", "harmless"))


def _objective(reader: ConfigReader, stage: str) -> str:
    """What a stage optimizes, of pairs by ``pref_loss``; empty for the next token (hparams/finetuning_args.py)."""
    if stage == "ppo":
        raise ObjectiveError(
            f"{reader.document.path.name} trains by stage: ppo, whose answers Transformers generates beside a policy "
            "with a value head: memcalc rl counts vLLM and SGLang alone."
        )
    loss = reader.one_of("pref_loss", _LOSSES, "dpo")
    if stage == "dpo":
        return set_algorithm(reader, loss, "stage" if loss == "dpo" else "pref_loss", stage, "llamafactory")
    return set_algorithm(reader, method_called(stage), "stage", stage, "llamafactory")


def _check_generation(reader: ConfigReader) -> None:
    """Refuse files of LLaMA-Factory v1, and those that Megatron (mcore_adapter) trains: neither is read."""
    for keys, version in ((V1, "LLaMA-Factory v1"), (_MEGATRON, "LLaMA-Factory's Megatron (mcore_adapter)")):
        if there := [key for key in keys if reader.has(key)]:
            raise MissingError(
                f"{reader.document.path.name} is a file of {version} ({', '.join(there)}), whose keys are not read: "
                "give memcalc estimate what it trains."
            )


def _refuse_others(reader: ConfigReader) -> None:
    """Refuse what trains another part of the model, or another model, than is counted."""
    for key, says in _KEYS.tables["refused"].items():
        value = reader.text(key)
        if value == "freeze" if key == "finetuning_type" else value.lower() not in ("", "false", "none", "0"):
            raise ObjectiveError(
                f"{reader.document.path.name} has {key} {cut(value)}, with which {says}: memcalc has no "
                "figures for this."
            )


_PARTS = ("max_source_length", "max_target_length")
"""Of releases of 2023, before `cutoff_len`: each is 512 by default, and a row is as long as both."""


def _longest(reader: ConfigReader) -> tuple[str, int]:
    """The key that says how long a row may be, and its tokens."""
    part = "" if reader.has("cutoff_len") else next((part for part in _PARTS if reader.has(part)), "")
    if part:
        return part, sum(reader.integer(name, 512, low=1) or 512 for name in _PARTS)
    return "cutoff_len", reader.integer("cutoff_len", 2048, low=1) or 2048


def _batch(reader: ConfigReader, stage: str) -> None:
    """Packed rows of supervised fine-tuning have one token more than ``cutoff_len``, then padding."""
    key, cut = _longest(reader)
    packed = any([reader.flag("packing", stage == "pt"), reader.flag("neat_packing")])  # both are read
    length = cut + 1 if packed and stage == "sft" else cut
    if not (packed and stage == "pt"):
        length = -(-length // _PADDED) * _PADDED
    reader.set("seq_len", length, key)
    if length != cut:
        message = f"{key} {cut} becomes {length} tokens: rows are padded to a multiple of {_PADDED}"
        reader.note("note", "MC004", key, message)
    reader.set("varying_lengths", not packed, "packing")
    reader.set("batch_rule", "pad-max" if packed else "pad", "packing")
    reader.set("padded_to", _PADDED, "cutoff_len")
    reader.set_integer("micro_batch", "per_device_train_batch_size", 8)
    reader.set_integer("accumulation", "gradient_accumulation_steps", 1)
    _beside_steps(reader, length)


def _beside_steps(reader: ConfigReader, prompt: int) -> None:
    """Without metrics of its own a stage keeps the loss alone; ``compute_accuracy`` the largest logits.

    While it trains, generation ends at ``generation_max_length``, else ``cutoff_len`` (train/sft/workflow.py); after
    it, ``max_new_tokens`` count (hparams/generating_args.py).
    """
    _images(reader)
    set_reductions(reader)
    set_evaluation(reader)
    set_resumes(reader)
    reader.set("eval_keeps", "nothing", "compute_accuracy")
    longest, key = reader.integer("generation_max_length", low=1), "max_new_tokens"
    new = reader.integer(key, 1024, low=1) or 1
    inside = tokens_up_to(longest or prompt, prompt) or 1
    set_generation(reader, max(new, inside), key if new >= inside else "generation_max_length")
    beams = "each beam has a cache of its own"
    reader.not_modelled({"eval_num_beams": beams, "generation_num_beams": beams}, unless=(None, 1))


def _images(reader: ConfigReader) -> None:
    """What is trained of a vision part, where the model has one, and the size to which images shrink.

    Source: hparams/model_args.py (ProcessorArguments) and finetuning_args.py (FreezeArguments).
    """
    set_vision(reader, frozen=True)
    reader.set("workload.image_pixels", reader.integer("image_max_pixels", 768 * 768, low=1), "image_max_pixels")


def _adapter(reader: ConfigReader, kind: str) -> bool:
    """Adapters, and whether the frozen base is quantized."""
    if kind == "oft":
        reader.ask("lora", "finetuning_type", "oft", "is oft, whose rotations are not modelled")
    if kind not in ("lora", "oft"):
        reader.harmless(*_KEYS.lists["of_lora"])
        return False
    if kind == "lora":
        rank = reader.integer("lora_rank", 8, low=1) or 8
        set_lora(reader, rank, "lora_target", all_linear=reader.text("lora_target", "all") == "all")
        reader.set("workload.lora_dropout", reader.number("lora_dropout", 0.0), "lora_dropout")
        if reader.has("additional_target"):
            set_also_trained(reader, "additional_target")
    reader.harmless(*_KEYS.lists["of_lora"])
    return _quantised(reader)


def _quantised(reader: ConfigReader) -> bool:
    """On-the-fly quantisation (configure_quantization); a checkpoint that is quantized already has its way."""
    bits = reader.integer("quantization_bit", low=1)
    method = reader.one_of("quantization_method", _METHODS, "bnb")
    double = reader.flag("double_quantization", True)
    reader.one_of("quantization_type", {"fp4": 0, "nf4": 0}, 0)
    if set_stored(reader, "model_name_or_path"):
        return True
    if bits is None:
        return False
    if method == "bnb" and bits not in (4, 8):
        raise reader.error("quantization_bit", bits, "must be 4 or 8 with bitsandbytes")
    if bits not in (4, 8):
        reader.ask("quantize", "quantization_bit", str(bits), f"is {bits} bits of {method}, which are not modelled")
        return True
    four = "nf4-dq" if double and method == "bnb" else "nf4"
    reader.set("quantize", four if bits == 4 else "int8", "quantization_bit")
    if method != "bnb":
        reader.not_modelled({"quantization_method": f"weights of {method} are counted as those of bitsandbytes"})
    return True


def _precision(reader: ConfigReader, kind: str) -> None:
    """What is trained is cast to fp32, unless pure_bf16 forbids it; what is frozen stays, mostly in bf16."""
    pure, frozen = bool(reader.flag("pure_bf16")), kind in ("lora", "oft")
    mixed = "bf16" if reader.flag("bf16") else "fp16" if reader.flag("fp16") else "no"
    narrow = "fp16" if mixed == "fp16" and not pure else "bf16"  # hparams/parser.py, compute_dtype
    reader.set("weights", narrow if frozen or pure else "fp32", "pure_bf16")
    reader.set("mixed", mixed, "fp16" if mixed == "fp16" else "bf16")


def _engine(reader: ConfigReader) -> int:
    """Who shares out the states; the version of FSDP, if it does."""
    listed = [part for item in reader.items("fsdp") if (part := str(item).lower()) not in ("false", "")]
    if listed:
        where = fsdp_keys(reader)
        set_fsdp(reader, where["version"], 2, listed, where, "cpu_offload")
        set_state_dict(reader, where["state_dict_type"], "full")
        reader.harmless(where["final_state_dict_type"])
        return reader.integer(where["version"], 2) or 2
    reader.harmless("fsdp_config.", "fsdp_config")
    reader.set("zero", 0, "fsdp")
    refer_deepspeed(reader)
    return 0


def _checkpointing(reader: ConfigReader, fsdp: int) -> None:
    """Every block is computed again unless told otherwise; checkpoints are reentrant, except under FSDP 2."""
    off = bool(reader.flag("disable_gradient_checkpointing"))
    on = not off or bool(reader.flag("gradient_checkpointing"))
    reader.harmless("gradient_checkpointing", "gradient_checkpointing_kwargs.", "gradient_checkpointing_kwargs")
    reader.set("recompute", "full" if on else "none", "disable_gradient_checkpointing")
    reentrant = bool(reader.flag("use_reentrant_gc", True))
    moved = bool(reader.flag("use_unsloth_gc"))
    if not on:
        return
    kind = "reentrant" if (reentrant and fsdp != 2 and not off) or moved else "non-reentrant"
    reader.set("strategy.checkpoint", kind, "use_unsloth_gc" if moved else "use_reentrant_gc")
    if moved:
        reader.set("offload", ("activations",), "use_unsloth_gc")
    if fsdp:
        reader.set("checkpoints_wrapped", True, "disable_gradient_checkpointing")


def _kernels(reader: ConfigReader, quantized: bool) -> None:
    if kernel := reader.one_of("flash_attn", _ATTENTION, ""):
        set_kernel(reader, kernel, "flash_attn")
    liger = "enable_liger_kernel" if reader.flag("enable_liger_kernel") else "use_liger_kernel"
    fused = bool(reader.flag(liger))
    liger = liger if fused else "enable_liger_kernel"
    reader.harmless("use_liger_kernel", "liger_kernel_config.", "liger_kernel_config")
    reader.set("kernels", "fused" if fused else "model", liger)
    loss = "fused-linear" if fused else "standard"
    reader.set("loss", loss, liger)
    reader.set("compile", "model" if reader.flag("torch_compile") else "none", "torch_compile")
    if reader.flag("upcast_layernorm") and quantized:
        reader.set("strategy.prepare_kbit", True, "upcast_layernorm")
    elif reader.flag("upcast_layernorm"):
        reader.not_modelled({"upcast_layernorm": "norms in fp32 are modelled over a quantized base only"})


def _optimizer(reader: ConfigReader) -> None:
    if reader.flag("use_muon"):
        reader.set("optimizer", "muon", "use_muon")
        reader.harmless("optim")
    elif reader.flag("use_galore") and reader.text("optim", "adamw_torch").startswith("adamw_torch"):
        reader.set("optimizer", "galore-adamw", "use_galore")
        reader.set("optimizer_impl", "loop", "use_galore")
        reader.set("strategy.galore_rank", reader.integer("galore_rank", 16, low=1), "galore_rank")
        in_backward = bool(reader.flag("galore_layerwise"))
        set_galore(reader, "galore_layerwise", "galore_target", "all-linear", in_backward=in_backward)
    else:
        set_optimizer(reader, "optim", "adamw_torch_fused")
        reader.not_modelled({"use_galore": "gradients and moments are projected to a low rank (GaLore); counted whole"})


_FOREIGN = frozenset({"max_seq_length", "max_seq_len", "block_size", "train_file", "train_mode", "template_name"})
"""Keys of others' scripts, at which its parser stops (hparams/parser.py, without allow_extra_keys)."""


def _recognise(document: Document) -> bool:
    data: Any = document.data
    of_kind = document.kind in ("yaml", "json") and isinstance(data, dict)
    if not of_kind:
        return False
    if "model" in data and len(data.keys() & set(V1)) > 1:
        return True
    signs = data.keys() & {*_KEYS.lists["signs"], *_MEGATRON}
    return "model_name_or_path" in data and len(signs) > (1 if _FOREIGN & data.keys() else 0)


_SOFTWARE = "LLaMA-Factory 0.9.6.dev0"
FORMAT = Format("llamafactory", "LLaMA-Factory YAML", _SOFTWARE, _recognise, read, kind="yaml", filename="train.yaml")
