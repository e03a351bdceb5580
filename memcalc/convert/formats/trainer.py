"""Arguments of the Trainer and of a training script beside it, as JSON, as YAML, or as flags.

Transformers 5.23: training_args.py, trainer.py, examples/pytorch/language-modeling/run_clm.py; TRL 1.16:
trainer/sft_config.py, model_config.py, base_config.py, sft_trainer.py, scripts/sft.py. From 5.0 on from_pretrained()
takes the checkpoint's own dtype where none is given (modeling_utils.py); SFTTrainer and its script take float32. What
runs the ranks follows from the launcher's file: FSDP and DeepSpeed may be said here or there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, inner_document, key_table
from memcalc.convert.formats.fsdp_config import (
    ACCELERATED,
    STRATEGIES,
    ask_for_rows,
    ask_for_targets,
    fsdp_version,
    read_options,
    set_evaluation,
    set_generated,
    set_reductions,
    set_resumes,
)
from memcalc.convert.formats.preferences import is_trl, method_of_config, read_roles, refuse_other_work, set_by_name
from memcalc.convert.formats.trainer_writer import script_text, spelling, write
from memcalc.convert.formats.tuning import (
    LAYERS,
    LIGER_KERNELS,
    ask_for_launcher,
    parameters_of,
    refer_to_accelerate,
    set_dora,
    set_kernel,
    set_optimizer,
    set_stored,
    set_vision,
)
from memcalc.convert.objectives import ALGORITHMS, method_of_keys, refuse_method, refuse_switches

KEYS = key_table("trainer")
TRL_SIGNS = frozenset(KEYS.lists["trl_signs"])
_SCRIPT_DTYPES, _ATTENTION = KEYS.tables["dtypes"], KEYS.tables["attention"]
_FOUR = ("load_in_4bit", "use_4bit_quantization")
_EIGHT = ("load_in_8bit", "use_8bit_quantization")
_NESTED = ("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "use_nested_quant")
"""TRL's names, bitsandbytes' own, and those of PEFT's examples/sft (utils.py, train.py)."""
_TARGETS = ("lora_target_modules", "target_modules")  # TRL's name, and PEFT's own, which other scripts have
_LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "block_size", "model_max_length")
"""`max_seq_len` is how PEFT's scripts abbreviate `max_seq_length`: argparse takes a beginning that is unique."""


def read(document: Document) -> Config:
    """Return what the Trainer's arguments say of a job."""
    reader = ConfigReader(document, "trainer", "Transformers 5.23")
    refuse_other_work(reader)
    method, evidence = method_of_config(document)
    if method in ALGORITHMS:
        reader.set("rl.algorithm", ALGORITHMS[method], evidence.partition(",")[0].partition(" ")[0], default=True)
    else:
        refuse_method(document.path.name, method, evidence)
    if not method:
        set_by_name(reader)
    trl = is_trl(reader, TRL_SIGNS) or bool(method)
    reader.set("engine", "trainer", "per_device_train_batch_size")
    reader.fact("accelerated", True, "Trainer")
    _batch(reader)
    _precision(reader, trl)
    _checkpoints(reader, trl)
    momentum = "momentum=" in reader.text("optim_args").replace(" ", "")
    set_optimizer(reader, "optim", "adamw_torch_fused", momentum=momentum, any_form=False)
    _compile(reader)
    _kernels(reader, trl and not method)
    _fsdp(reader)
    _deepspeed(reader)
    read_script(reader, trl)
    set_generated(reader)
    read_roles(reader)
    if reader.flag("activation_offloading"):
        reader.set("offload", ("activations",), "activation_offloading")
    reader.harmless(*KEYS.names("harmless", "script"))
    reader.not_counted(KEYS.not_counted, counted=("optim_args",) if momentum else ())
    reader.not_modelled(KEYS.not_modelled, unless=(False, None, 0, 0.0, "", "none"))
    refer_to_accelerate(reader)
    refuse_switches(document.path.name, reader.unread(), engine=document.data.get("deepspeed", True) is True)
    if document.kind == "flags" or any("batch" in key for key in reader.unread()):
        ask_for_rows(reader, "its script")
    ask_for_targets(reader)
    ask_for_launcher(reader)
    return reader.finish()


def _batch(reader: ConfigReader) -> None:
    reader.set_integer("micro_batch", "per_device_train_batch_size", 8)
    reader.set_integer("accumulation", "gradient_accumulation_steps", 1)
    set_reductions(reader)
    if reader.flag("auto_find_batch_size"):
        message = "the batch is halved after an out-of-memory error: this is the first one that is tried"
        reader.note("note", "MC004", "auto_find_batch_size", message)
    set_evaluation(reader)
    set_resumes(reader)


def _precision(reader: ConfigReader, trl: bool) -> None:
    """TRL turns bf16 on where nothing is said (base_config.py). What is off here another file may turn on."""
    half, full = reader.flag("fp16"), reader.flag("bf16", None)
    off = bool(reader.flag("no_bf16"))
    named = reader.text("mixed_precision").lower()  # of scripts that hand it to Accelerate
    if full is None and not half and named in ("bf16", "fp16", "no"):
        reader.set("mixed", named, "mixed_precision")
        return
    full = (trl and not half and not off) if full is None else full
    if half and full:
        raise reader.error("fp16", True, "bf16 is true too, and the Trainer takes one")
    dtype = "fp16" if half else "bf16"
    reader.set("mixed", dtype if half or full else "no", dtype, default=not (half or full))


def _every(reader: ConfigReader, key: str, value: Any) -> int:
    """How many blocks stand between checkpoints."""
    if isinstance(value, bool) or not str(value).isdecimal() or not 0 < int(str(value)) < 10_000:
        raise reader.error(key, value, "must be a whole number from 1")
    return int(str(value))


def _checkpoints(reader: ConfigReader, trl: bool) -> None:
    """`gradient_checkpointing` is the older name; checkpoints are not reentrant unless asked to be."""
    new = reader.has("activation_checkpointing")
    key = "activation_checkpointing" if new else "gradient_checkpointing"
    on = reader.flag(key, trl and not reader.flag("no_gradient_checkpointing"))
    kwargs = reader.options(f"{key}_kwargs")
    reader.harmless("activation_checkpointing", "activation_checkpointing_kwargs.", "activation_checkpointing_kwargs")
    reader.harmless("gradient_checkpointing", "gradient_checkpointing_kwargs.", "gradient_checkpointing_kwargs")
    interval = _every(reader, f"{key}_kwargs.every_n_layers", kwargs.get("every_n_layers", 1))
    policy = "selective-ops" if kwargs.get("selective") else "full" if interval == 1 else f"every-{interval}"
    # said as a default, FSDP's own checkpointing goes before a Trainer that does none
    reader.set("recompute", policy if on else "none", key, default=not on)
    if not on:
        return
    if not {"every_n_layers", "offload"} & set(kwargs):  # releases that have these checkpoint inside of FSDP's hooks
        reader.set("checkpoints_wrapped", True, key)
    # torch.utils.checkpoint takes True where keywords are given without it
    switch = "use_reentrant" if reader.has("use_reentrant") else f"{key}_kwargs.use_reentrant"  # of PEFT's examples
    usual = bool(set(kwargs) - {"selective", "every_n_layers", "offload"})
    reentrant = reader.flag(switch) if switch == "use_reentrant" else kwargs.get("use_reentrant", usual)
    reader.set("strategy.checkpoint", "reentrant" if reentrant else "non-reentrant", switch)
    if kwargs.get("offload"):
        reader.set("offload", ("activations",), f"{key}_kwargs.offload")


def _compile(reader: ConfigReader) -> None:
    on = reader.flag("torch_compile") or reader.has("torch_compile_backend") or reader.has("torch_compile_mode")
    backend = reader.text("torch_compile_backend", "inductor")
    if on and backend == "inductor":
        reader.set("compile", "model", "torch_compile")
    elif on:
        reader.not_modelled({"torch_compile_backend": "it is counted as running without a compiler"})


def _kernels(reader: ConfigReader, trl: bool) -> None:
    """Liger's kernels, by default with the loss that makes no logits; TRL's trainer makes none in any case."""
    table = reader.options("liger_kernel_config")
    reader.harmless("liger_kernel_config.", "liger_kernel_config")
    named = "use_liger" if reader.has("use_liger") else "use_liger_kernel"  # as TRL's ModelConfig had it
    on = reader.flag(named)
    reader.harmless("use_liger_kernel", "use_liger")
    if on:
        left_out = [name for name in LIGER_KERNELS if table.get(name) is False]
        reader.set("kernels", "model" if len(left_out) == len(LIGER_KERNELS) else "fused", named)
        if 0 < len(left_out) < len(LIGER_KERNELS):
            reader.note("warning", "MC002", "liger_kernel_config", "kernels that are left out count as fused too")
    if trl:
        message = "logits are in tiles since TRL 1.15, as counted; before 1.7 they were whole: --framework hf@5.12"
        reader.note("note", "MC004", "loss_type", message)
        reader.set("loss", "fused-linear", "loss_type")
        reader.set("strategy.tiled_loss", True, "loss_type")
    elif on:
        linear = table.get("fused_linear_cross_entropy", True)
        kernel = "fused-kernel" if table.get("cross_entropy") else "standard"
        reader.set("loss", "fused-linear" if linear else kernel, named)


def _fsdp(reader: ConfigReader) -> None:
    """`fsdp` turns it on; its older form is a text of options, of which `fsdp_config` goes first."""
    value = reader.raw("fsdp", "")
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    names = [str(name).lower() for name in names]
    table = reader.raw("fsdp_config")
    if not names or names == ["false"]:
        reader.harmless("fsdp_config.", "fsdp_config")
        return
    if not {*STRATEGIES, "offload", "auto_wrap", "true"}.issuperset(names):
        raise reader.error("fsdp", value, "must be true, or some of full_shard, shard_grad_op, offload, auto_wrap")
    legacy = next((STRATEGIES[name] for name in names if name in STRATEGIES), "")
    if "offload" in names:
        reader.set("offload", ("params",), "fsdp")
    if isinstance(table, str) and not table.strip().startswith("{"):
        reader.refer("fsdp_config", "fsdp_config", path=table)
    elif isinstance(table, str):
        inner = Document(reader.document.path, "json", table, reader.options("fsdp_config"))
        reader.refer("fsdp_config", "fsdp_config", document=inner)
    else:
        version = fsdp_version(reader, "fsdp_config", 2)
        read_options(reader, "fsdp_config", version, wraps="transformer_based_wrap", legacy=legacy)


def _deepspeed(reader: ConfigReader) -> None:
    value = reader.raw("deepspeed")
    if name := reader.document.unknown.get(("deepspeed",)):
        reader.set("engine", "deepspeed", "deepspeed")
        reader.ask("sharing", "deepspeed", name, f"is {name!r}, a file that only a run knows; give it as a FILE too")
    if not value:
        return
    if value is True:  # deepspeed.add_config_arguments: a switch beside --deepspeed_config
        reader.set("engine", "deepspeed", "deepspeed")
        if not reader.has("deepspeed_config"):
            reader.ask("zero", "deepspeed", "config", "is on, and its config is not given")
        return
    if isinstance(value, str) and not value.strip().startswith("{"):
        reader.refer("deepspeed", "deepspeed", path=value)
        return
    data = {**reader.document.data, "deepspeed": reader.options("deepspeed")}
    inner = inner_document(replace(reader.document, data=data), ("deepspeed",))
    reader.refer("deepspeed", "deepspeed", document=inner)


def _recognise(document: Document) -> bool:
    if document.kind not in {"json", "yaml", "flags"} or not isinstance(document.data, dict):
        return False
    keys = set(document.data)
    signs = keys.intersection(KEYS.lists["signs"])
    return len(signs) > 1 or bool(signs and (TRL_SIGNS & keys or method_of_keys(document.data)[0] in ALGORITHMS))


def read_script(reader: ConfigReader, trl: bool) -> None:
    """Set what model the script loads, how, and what it feeds."""
    if reader.text("config_overrides"):
        reader.ask("model", "config_overrides", "-", "gives a model that is made anew other sizes than its config has")
    elif key := _model_key(reader):
        reader.set("model", reader.text(key), key)
    if trl:
        reader.set("trl", True, next((key for key in reader.document.data if key in TRL_SIGNS), "beta"))
    quantized = _adapters(reader)
    set_dora(reader, quantised=quantized)
    _weights(reader, trl, quantized)
    _attention(reader)
    _length(reader, trl)
    set_vision(reader)
    reader.harmless("model_init_kwargs.")


def _model_key(reader: ConfigReader) -> str:
    keys = ("model_name_or_path", "model_name", "model_id", "model")
    return next((key for key in keys if isinstance(reader.raw(key), str)), "")


def _weights(reader: ConfigReader, trl: bool, quantized: bool) -> None:
    keys = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    key = next((key for key in keys if reader.has(key)), "")
    if not key and not trl:
        if not quantized:
            reader.set("script_loads", "not said", "dtype")
        return
    name, key = reader.one_of(key, _SCRIPT_DTYPES, "fp32") if key else "fp32", key or "dtype"
    if quantized and name == "fp32":  # as PEFT's prepare_model_for_kbit_training leaves it
        for field in ("prepare_kbit", "kbit_ends"):
            reader.set(f"strategy.{field}", True, key)
        says = f"{key} float32 keeps norms, embedding, head and what blocks hand on in fp32, as it is counted"
        reader.note("note", "MC004", key, says, f"{key} bfloat16 takes less (TRL's default is float32)")
        return
    if name == "auto":
        reader.note("note", "MC004", key, f"{key} auto is the checkpoint's own dtype: counted as bf16")
    reader.set("weights", "bf16" if name == "auto" else name, key)


_FLASH = ("use_flash_attention_2", "use_flash_attention", "use_flash_attn")
"""Switches of scripts that load a model with FlashAttention-2: alignment-handbook's before 2024, PEFT's examples."""


def _attention(reader: ConfigReader) -> None:
    """`sdpa`, the default, takes the kernel that the model's class allows, which memcalc knows."""
    for key in ("attn_implementation", "model_init_kwargs.attn_implementation"):
        name = reader.one_of(key, _ATTENTION, "")
        if name == "flex":
            reader.not_modelled({key: "it counts as a fused kernel"})
        elif name:
            set_kernel(reader, name, key)
    for key in _FLASH:
        if reader.flag(key):
            set_kernel(reader, "flash", key)


_PACKING = {"bfd": "bfd", "bfd_split": "bfd-split", "bfd-requeue": "bfd-split", "wrapped": "wrapped"}
"""TRL's packing_strategy as a value of batching (1.10, trainer/sft_config.py)."""


def _length(reader: ConfigReader, trl: bool) -> None:
    """Tokens of a sequence, and whether batches differ in length: packed and cut ones do not."""
    key = next((key for key in _LENGTHS if reader.integer(key, low=1) is not None), "")
    if key:
        reader.set("seq_len", reader.integer(key), key)
    elif trl:
        reader.set("seq_len", 1024, "max_length")
    if reader.flag("packing") or reader.flag("pad_to_max_length") or reader.has("block_size"):
        same = next(key for key in ("packing", "pad_to_max_length", "block_size") if reader.has(key))
        reader.set("varying_lengths", False, same)
        packs = _PACKING.get(reader.text("packing_strategy") or "bfd") if reader.flag("packing") else None
        reader.set("batch_rule", packs or "pad-max", same)
    elif reader.flag("group_by_length") or reader.text("train_sampling_strategy") == "group_by_length":
        named = "group_by_length" if reader.has("group_by_length") else "train_sampling_strategy"
        reader.set("varying_lengths", True, named)
        reader.set("batch_rule", "grouped", named)
    elif trl:
        reader.set("varying_lengths", True, "packing")
        reader.set("batch_rule", "flatten" if reader.flag("padding_free") else "pad", "padding_free")
    if reader.integer("pad_to_multiple_of", low=1) is not None:
        reader.set("padded_to", reader.integer("pad_to_multiple_of"), "pad_to_multiple_of")


def _adapters(reader: ConfigReader) -> bool:
    """Say adapters and a quantized base; return whether it is quantized."""
    narrow = next((key for key in _FOUR if reader.flag(key)), "")
    four, eight = bool(narrow), next((key for key in _EIGHT if reader.flag(key)), "")
    narrow = narrow or eight or _EIGHT[0]
    nested = next((key for key in _NESTED if reader.flag(key)), "")
    reader.harmless(*_FOUR, *_EIGHT, *_NESTED)
    ranks = next((key for key in ("lora_r", "lora_rank") if reader.has(key)), "")
    switches = ("use_peft", "use_lora", "use_peft_lora")
    if not any(reader.flag(key) for key in switches):
        switched = any(reader.has(key) for key in switches) or reader.document.data.get("train_mode") == "full"
        if switched or not ranks:
            reader.harmless(*KEYS.lists["of_lora"])
            if four or eight:
                message = "a quantized base is trained with adapters: without them its weights stay as they are"
                reader.note("warning", "MC002", narrow, message, "use_peft true")
            return False
    rank = reader.integer(key := ranks or "lora_r", 16, low=1)
    switch = "" if ranks else next((name for name in switches[1:] if reader.flag(name)), "")
    listed, targets = _targets(reader)
    if switch:  # TRL's own switch is use_peft: its default is none of a script that has another
        reader.ask("lora", switch, "-", "is on, and its script's own default is the rank")
    elif reader.has(listed) and not targets:
        named = ", ".join(map(str, reader.items(listed)))[:60]
        reader.ask("lora", listed, named, f"names layers that memcalc does not know ({named})")
    else:
        reader.set("lora", f"{rank}:{','.join(targets)}" if targets else str(rank), key)
    reader.set("workload.lora_dropout", reader.number("lora_dropout", 0.05), "lora_dropout")
    saved_key = "modules_to_save" if reader.has("modules_to_save") else "lora_modules_to_save"
    if saved := [name for name in _layers(reader, saved_key) if name in {"embedding", "head"}]:
        reader.set("also_train", tuple(saved), saved_key)
    model = _model_key(reader)
    if model and set_stored(reader, model):  # its own config overrides what is asked for (quantizers/auto.py)
        if any(setting.name == "quantize" and setting.value == "nf4-dq" for setting in reader.settings):
            reader.set("adapter_dtype", "bf16", model)
        return True
    if four or eight:
        reader.set("quantize", ("nf4-dq" if nested else "nf4") if four else "int8", narrow)
        # sft_trainer.py: adapters over a quantized base are cast to bf16; norms are left as they are
        if not reader.has("autocast_adapter_dtype"):
            reader.set("adapter_dtype", "bf16", narrow)
    if reader.has(cast := "autocast_adapter_dtype"):  # an argument of PEFT's get_peft_model
        reader.set("adapter_dtype", "fp32" if reader.flag(cast) else "bf16", cast)
    return bool(four or eight)


def _targets(reader: ConfigReader) -> tuple[str, list[str]]:
    """The key that names the layers with adapters, and those of them that memcalc knows."""
    key = next((name for name in _TARGETS if reader.has(name)), _TARGETS[0])
    targets, stacked = _layers(reader, key), parameters_of(reader, "lora_target_parameters")
    if stacked and targets == ["all-linear"]:
        reader.not_modelled({"lora_target_parameters": "beside all-linear, adapters of parameters are not counted"})
        return key, targets
    return key, [*targets, *stacked]


def _layers(reader: ConfigReader, key: str) -> list[str]:
    """The layers that a list of modules names; what memcalc has no word for is a warning."""
    layers: dict[str, None] = {}
    for name in reader.items(key):
        known = ("all-linear",) if str(name).lower() == "all-linear" else LAYERS.get(str(name), ())
        if not known:
            reader.note("warning", "MC002", key, f"{key} has {name!r}, whose adapters are not counted")
        layers |= dict.fromkeys(known)
    return list(layers)


_OPTIMIZERS = ("adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit", "adafactor", "lion", "lion-8bit", "sgd")
FORMAT = Format(
    "trainer", "arguments of Transformers' Trainer", "Transformers 5.23", _recognise, read, write,
    spelling=spelling, filename="training_args.json", script=script_text, launched=True,
    decided=(*ACCELERATED, "wide_embedding_moments"),
    choices={
        "micro_batch": (), "recompute": ("none", "full"), "optimizer": _OPTIMIZERS, "whole_accumulation": (False,),
    },
)  # fmt: skip
"""The Trainer's arguments, whatever form they have."""
