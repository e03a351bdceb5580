"""ms-swift's arguments, of `swift sft` and `swift pt`, as flags or YAML: version 4.6.0.dev0 (3602360a).

Sources: swift/arguments/sft_args.py, tuner_args.py, base_args/*.py; swift/trainers/arguments.py and mixin.py
(_fix_gradient_checkpointing), pipelines/train/tuner.py; the Trainer's own arguments: transformers 5.23. Weights are
loaded in `torch_dtype`, by default the checkpoint's own, and autocast follows from it (model_args.py,
_init_mixed_precision).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.fsdp_config import set_generation, set_resumes
from memcalc.convert.formats.preferences import halve_packs, read_swift
from memcalc.convert.formats.tuning import (
    fsdp_keys,
    set_also_trained,
    set_dora,
    set_fsdp,
    set_galore,
    set_kernel,
    set_lora,
    set_optimizer,
    set_stored,
)
from memcalc.convert.objectives import refuse_task
from memcalc.errors import ObjectiveError, cut, shown

_SOFTWARE = "ms-swift 4.6.0.dev0"
_KEYS, _TRAINER = key_table("swift"), key_table("trainer")
_DEEPSPEED: dict[str, dict[str, Any]] = _KEYS.tables["deepspeed"]
_TUNERS = (
    "lora", "full", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone", "ia3",
    "lora_llm", "dummy",
)  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ATTENTION = {
    "flash_attn": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash3", "flash_attention_4": "flash",
    "sdpa": "", "eager": "eager", "flex_attention": "flex", "none": "",
}  # fmt: skip
_METHODS = {name: name for name in ("bnb", "hqq", "eetq", "quanto", "fp8", "awq", "gptq", "gptq_v2")}
_BINARY = {"default", "last_round", "all", "ignore_empty_think", "ignore_think_prefix"}
"""Strategies of `loss_scale` that only mask (swift/loss_scale)."""
STEP = 16
"""Sequences of a step where nothing says how many: the accumulation is rounded up to it (trainers/arguments.py)."""


_OF_2 = ("sft_type", "model_id_or_path", "custom_train_dataset_path")
"""Arguments until 2.6, none of which 3.0 has; its defaults are others (docs/source/Instruction/ReleaseNote3.0.md)."""


def read(document: Document) -> Config:
    """Return what arguments of ms-swift say of a job."""
    reader = ConfigReader(_with_presets(document), "swift", _SOFTWARE)
    if there := [key for key in _OF_2 if reader.has(key)]:
        raise ObjectiveError(
            f"{document.path.name} has arguments of ms-swift 2 ({', '.join(there)}), which are not read: give memcalc "
            "estimate what it trains, or the arguments of ms-swift 3 on (--model, --tuner_type)."
        )
    refuse_task(document.path.name, reader.text("task_type", "causal_lm"))
    _refuse_parts(reader)
    algorithm = read_swift(reader, _KEYS)
    _share_sequences(reader, algorithm)
    reader.set("engine", "trainer", "model")
    reader.fact("accelerated", True, "Trainer")
    reader.set("model", reader.text("model"), "model") if reader.has("model") else None
    _batch(reader)
    halve_packs(reader, algorithm)
    tuner = "tuner_type" if reader.has("tuner_type") else "train_type"
    quantised = _adapter(reader, tuner)
    set_dora(reader, quantised=quantised)
    _precision(reader, quantised)
    _images(reader)
    sharded = _engine(reader)
    _checkpointing(reader, sharded)
    _kernels(reader, algorithm)
    _optimizer(reader)
    set_resumes(reader)
    set_generation(reader, reader.integer("max_new_tokens", 64, low=1), "max_new_tokens")
    reader.harmless(*_KEYS.harmless, *_KEYS.lists["of_lora"], *_TRAINER.harmless)
    known = ("loss_type",) if algorithm else ()  # of preferences a loss of the same size
    reader.not_counted({**_TRAINER.not_counted, **_KEYS.not_counted}, counted=known)
    others = {name: says for name, says in _TRAINER.not_modelled.items() if name != "router_aux_loss_coef"}
    off = (False, None, 0, 0.0, 1, "", "none")
    reader.not_modelled({**others, **_KEYS.not_modelled}, unless=off)
    reader.not_modelled({"router_aux_loss_coef": _TRAINER.not_modelled["router_aux_loss_coef"]})
    return reader.finish(
        known=(*_KEYS.names("harmless", "of_lora", "refused", "not_counted", "not_modelled"), *_TRAINER.harmless)
    )


def _share_sequences(reader: ConfigReader, algorithm: object) -> None:
    """Ranks that share a sequence: by Ulysses as far as heads divide into them, in a ring else.

    ms-swift 4.6 sequence_parallel/sequence_parallel.py, ``_init_device_mesh``: each holds an equal part of its tokens,
    and DeepSpeed and FSDP divide states over all ranks.
    """
    ways = reader.integer(key := "sequence_parallel_size", 1, low=1) or 1
    if ways == 1:
        return
    if algorithm or not (reader.has("deepspeed") or reader.has("fsdp")):
        raise ObjectiveError(
            f"{reader.document.path.name} shares each sequence out over {ways} ranks ({key}), by turns of Ulysses and "
            "ring attention: memcalc has figures for this in SFT under DeepSpeed or FSDP 2 alone."
        )
    reader.set("cp", ways, key)
    reader.set("cp_kind", "ring", key)


def _with_presets(document: Document) -> Document:
    """Put what --fsdp names, or has as JSON, in its place (sft_args.py, _init_fsdp)."""
    stated = document.data.get("fsdp") if isinstance(document.data, dict) else None
    table: Any = {"fsdp_config": _KEYS.tables["fsdp2"]} if stated == "fsdp2" else None
    if isinstance(stated, str) and stated.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            table = json.loads(stated)
    if not isinstance(table, dict):
        return document
    inner = {"fsdp": table.get("fsdp", "full_shard auto_wrap"), "fsdp_config": table.get("fsdp_config", {})}
    return replace(document, data={**document.data, **inner})


def _refuse_parts(reader: ConfigReader) -> None:
    """Refuse what trains another part of the model than is counted; beside adapters most of it says nothing."""
    adapters = reader.raw("tuner_type", reader.raw("train_type", "lora")) != "full"
    for key, says in _KEYS.tables["refused"].items():
        value = str(reader.raw(key, ""))
        if value.strip("[]").lower() not in ("", "false", "none", "0", "0.0") and (key == "freeze_llm" or not adapters):
            raise ObjectiveError(
                f"{reader.document.path.name} has {key} {cut(value)}, with which {says}: memcalc has no figures for "
                "this."
            )


def _batch(reader: ConfigReader) -> None:
    """Packs are `packing_length` long, else `max_length`; without either the model's own longest sequence."""
    packed = bool(reader.flag("packing"))
    longer = packed and reader.has("packing_length")
    reader.harmless("packing_length", "max_length")
    reader.set_integer("seq_len", "packing_length" if longer else "max_length")
    reader.set("varying_lengths", not packed, "packing")
    flat, alike = reader.flag("padding_free"), reader.flag("group_by_length")
    rule, key = ("flatten", "padding_free") if flat else ("grouped", "group_by_length") if alike else ("pad", "packing")
    reader.set("batch_rule", "bfd" if packed else rule, "packing" if packed else key)
    reader.set_integer("micro_batch", "per_device_train_batch_size", 1)
    steps = "gradient_accumulation_steps"
    if reader.has(steps) or (steps,) in reader.document.unknown:
        reader.set("accumulation", reader.integer(steps, low=1), steps)
    else:
        reader.set("batch_goal", STEP, steps)
    _evaluation(reader)


def _evaluation(reader: ConfigReader) -> None:
    """It evaluates as often as it saves where there is something to evaluate on, and keeps the loss alone."""
    evaluated = [key for key in ("val_dataset", "cached_val_dataset", "eval_dataset") if reader.items(key)]
    if (reader.number("split_dataset_ratio", 0.0) or 0) > 0:
        evaluated.append("split_dataset_ratio")
    strategy = reader.text("eval_strategy") or reader.text("save_strategy", "steps")
    reader.set(
        "evaluates",
        bool(evaluated) and strategy.lower() not in ("no", "false"),
        evaluated[0] if evaluated else "eval_strategy",
    )
    reader.set_integer("eval_micro_batch", "per_device_eval_batch_size", 1)
    reader.set_integer("eval_accumulation", "eval_accumulation_steps")
    reader.set("eval_keeps", "nothing", "eval_metric")


def _adapter(reader: ConfigReader, key: str) -> bool:
    """Adapters, and whether the frozen base is quantised. Every linear layer of the language model has one."""
    plugged = {reader.text(key): reader.text(key)} if reader.has("external_plugins") else {}
    kind = reader.one_of(key, {**plugged, **{name: name for name in _TUNERS}}, "lora")
    if kind == "full":
        return False
    if kind != "lora":
        reader.ask("lora", key, kind, f"is {kind}, which is not modelled")
        return _quantised(reader)
    rank = reader.integer("lora_rank", 8, low=1) or 8
    regex = reader.has("target_regex")
    names = {str(name) for name in reader.items("target_modules")} - {"all-router", "all-norm"}
    everything = not regex and ("all-linear" in names or not names)
    set_lora(reader, rank, "target_regex" if regex else "target_modules", everything, "target_parameters")
    reader.set("workload.lora_dropout", reader.number("lora_dropout", 0.05), "lora_dropout")
    if beside := sorted(names - {"all-linear"}) if everything else names & {"all-embedding"}:
        reader.not_modelled({"target_modules": f"beside it, adapters of {', '.join(beside)} are not counted"})
    if reader.items("modules_to_save"):
        set_also_trained(reader, "modules_to_save")
    if dtype := reader.one_of("lora_dtype", _DTYPES):
        reader.set("adapter_dtype", dtype, "lora_dtype")
    return _quantised(reader)


def _quantised(reader: ConfigReader) -> bool:
    method, bits = reader.one_of("quant_method", _METHODS), reader.raw("quant_bits")
    double = reader.flag("bnb_4bit_use_double_quant", True)
    if reader.has("model") and set_stored(reader, "model"):
        return True
    if method is None:
        return False
    if str(bits) == "4":
        reader.set("quantize", "nf4-dq" if double and method == "bnb" else "nf4", "quant_bits")
    elif str(bits) == "8" or method == "fp8":
        reader.set("quantize", "int8", "quant_bits")
    else:
        reader.ask("quantize", "quant_bits", method, f"is {shown(bits)} bits of {method}, which are not modelled")
    if method != "bnb":
        reader.not_modelled({"quant_method": f"weights of {method} are counted as those of bitsandbytes"})
    return True


def _precision(reader: ConfigReader, quantised: bool) -> None:
    """Autocast is bf16 over bf16 weights, and fp16 over those of fp16 and fp32, unless a file says otherwise."""
    dtype = reader.one_of("torch_dtype", _DTYPES)
    if dtype is None:
        message = "torch_dtype is the checkpoint's own where no file says it: counted as bf16"
        reader.note("note", "MC004", "torch_dtype", message)
    weights = dtype or "bf16"
    if not quantised:
        reader.set("weights", weights, "torch_dtype")
    half, full = reader.flag("fp16", weights != "bf16"), reader.flag("bf16", weights == "bf16")
    if half and full and not reader.has("fp16"):
        half = False
    mixed = "bf16" if full else "fp16" if half else "no"
    reader.set("mixed", mixed, "fp16" if mixed == "fp16" else "bf16")


def _images(reader: ConfigReader) -> None:
    """What is trained of a vision part, and the size to which images shrink (tuner_args.py, _init_multimodal_full)."""
    tower, projector = reader.flag("freeze_vit", True), reader.flag("freeze_aligner", True)
    trained = "trained" if not tower else "frozen" if projector else "projector"
    reader.set("vision", trained, "freeze_vit")
    if reader.has("max_pixels"):
        reader.set("workload.image_pixels", reader.integer("max_pixels", low=1), "max_pixels")
    reader.harmless("vit_gradient_checkpointing")


def _engine(reader: ConfigReader) -> str:
    """Who shares out the states: deepspeed, fsdp, or nobody."""
    name = reader.raw("deepspeed")
    if isinstance(name, str) and name in _DEEPSPEED:
        data = {**_DEEPSPEED[name], "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
        reader.refer("deepspeed", "deepspeed", document=Document(reader.document.path, "json", "", data, part=True))
    elif isinstance(name, dict) or str(name or "").lstrip().startswith("{"):
        reader.refer("deepspeed", "deepspeed", document=_inline(reader, name))
    elif name:
        reader.refer("deepspeed", "deepspeed", path=reader.text("deepspeed"))
    if unknown := reader.document.unknown.get(("fsdp",), ""):
        reader.ask("zero", "fsdp", unknown)
    listed = [str(item).lower() for item in reader.items("fsdp") if str(item).lower() not in ("false", "")]
    if not listed or listed[0].endswith(".json"):
        if listed:
            reader.refer("trainer", "fsdp", path=reader.text("fsdp"))
        reader.harmless("fsdp_config.", "fsdp_config")
        if not name and not listed:
            reader.set("zero", 0, "deepspeed")
        return "deepspeed" if name else "fsdp" if listed else ""
    where = fsdp_keys(reader)
    set_fsdp(reader, where["version"], 2, listed, where, "offload_params")
    reader.harmless(*where.values())
    return "fsdp"


def _inline(reader: ConfigReader, value: Any) -> Document:
    """DeepSpeed's config as it stands among the arguments."""
    if not isinstance(value, dict):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise reader.error("deepspeed", value, "must be JSON, a file, or a name such as zero2") from None
    reader.harmless("deepspeed.")
    if not isinstance(value, dict):
        raise reader.error("deepspeed", value, "must be a table")
    return Document(reader.document.path, "json", "", value, part=True)


def _checkpointing(reader: ConfigReader, engine: str) -> None:
    """On unless told otherwise; reentrant under DeepSpeed and FSDP, and where one process alone runs."""
    fsdp_checkpoints = any(
        setting.name == "recompute" for setting in reader.settings
    )  # FSDP's checkpoints take their place
    on = bool(reader.flag("gradient_checkpointing", True))
    stated = reader.raw("gradient_checkpointing_kwargs")
    reader.harmless("gradient_checkpointing_kwargs.", "gradient_checkpointing_kwargs")
    if fsdp_checkpoints:
        return
    reader.set("recompute", "full" if on else "none", "gradient_checkpointing", default=not on)
    if not on:
        return
    keywords = str(stated).lower().replace("'", '"').replace(" ", "")
    asked_for = True if '"use_reentrant":true' in keywords else False if '"use_reentrant":false' in keywords else None
    reentrant = bool(engine) if asked_for is None else asked_for
    key = "gradient_checkpointing_kwargs"
    reader.set("strategy.checkpoint", "reentrant" if reentrant else "non-reentrant", key)
    if asked_for is None and not engine:
        reader.set("checkpoint_alone", "reentrant", key)
    if engine == "fsdp":
        reader.set("checkpoints_wrapped", True, "gradient_checkpointing")


def _kernels(reader: ConfigReader, algorithm: str) -> None:
    """Liger's fused loss gives way to any other (seq2seq_trainer.py, compute_loss)."""
    kernel = reader.one_of("attn_impl", _ATTENTION, "")
    if kernel == "flex":
        reader.not_modelled({"attn_impl": "it counts as a fused kernel"})
    elif kernel:
        set_kernel(reader, kernel, "attn_impl")
    liger = bool(reader.flag("use_liger_kernel"))
    scale = set(reader.text("loss_scale", "default").split("+"))
    weighted = (
        any(reader.flag(name) for name in ("enable_dft_loss", "enable_channel_loss"))
        or bool(reader.number("label_smoothing_factor", 0.0))
        or not scale <= _BINARY
        or (not algorithm and reader.has("loss_type"))
    )
    reader.set("kernels", "fused" if liger else "model", "use_liger_kernel")
    reader.set("loss", "fused-linear" if liger and not weighted else "standard", "use_liger_kernel")
    if not liger and not algorithm and reader.flag("use_logits_to_keep", None) is not False:
        message = (
            "ms-swift makes the logits of labelled tokens only; estimated as all, since no file gives their number"
        )
        reader.note("note", "MC004", "use_logits_to_keep", message)
    reader.harmless("liger_kernel_config.", "liger_kernel_config")
    reader.set("compile", "model" if reader.flag("torch_compile") else "none", "torch_compile")


def _optimizer(reader: ConfigReader) -> None:
    """A plugin's goes before that of the Trainer; GaLore's has a rank of 128 (trainers/arguments.py)."""
    plugin = reader.text("optimizer")
    galore = reader.flag("use_galore") or plugin == "galore"
    if plugin in ("muon", "muonclip"):
        reader.set("optimizer", "muon", "optimizer")
        reader.harmless("optim", "optim_args")
    elif galore and reader.text("optim", "adamw_torch").startswith("adamw_torch"):
        reader.set("optimizer", "galore-adamw", "use_galore")
        reader.set("optimizer_impl", "loop", "use_galore")
        reader.set("strategy.galore_rank", reader.integer("galore_rank", 128, low=1), "galore_rank")
        set_galore(reader, "use_galore", "galore_target_modules", "all-linear", in_backward=False)
    else:
        set_optimizer(reader, "optim", "adamw_torch_fused", any_form=False)
    reader.harmless("optimizer", "galore_rank", "galore_target_modules", "use_galore")


def _recognise(document: Document) -> bool:
    data: Any = document.data
    if document.kind not in ("yaml", "json") or not isinstance(data, dict) or not isinstance(data.get("model"), str):
        return False
    return not data.keys().isdisjoint(("tuner_type", "train_type", "rlhf_type")) and not _megatron(data)


def _megatron(data: dict[str, Any]) -> bool:
    return bool(data.keys() & {"micro_batch_size", "global_batch_size", "tensor_model_parallel_size"})


FORMAT = Format("swift", "ms-swift arguments", _SOFTWARE, _recognise, read, kind="yaml", filename="sft.yaml")
"""Arguments of `swift sft`, as flags or YAML."""
