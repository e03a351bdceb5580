"""What runs a job under Transformers: the Trainer's arguments, the script beside them, and the model as it makes it.

The script loads the model as they say, or makes it from sizes or a config.json, and trains on random data of the kind
that the model is fed. Its calls are those of Transformers 5.23 (hf_argparser.py, trainer.py, modeling_utils.py:
from_config) and PEFT 0.21 (mapping_func.py, tuners/lora/config.py).
"""

from __future__ import annotations

import textwrap
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from memcalc.catalog import read_toml
from memcalc.convert.document import Document
from memcalc.convert.formats.base import ConfigJob, hub_name
from memcalc.convert.formats.fsdp_config import LOSS_INSIDE, PLACED
from memcalc.convert.formats.tuning import ANY_FORM, DECAY, FLASH, LIGER_KERNELS, TRAINER_OPTIMIZERS
from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks import habits_of
from memcalc.specs.adapters import lora_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.specs.model import Model


_WRITTEN = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd")
_NAMES = {TRAINER_OPTIMIZERS[name][:2]: name for name in _WRITTEN}


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the arguments that run a job, and those of the script beside them, which loads model and adapters."""
    plan = job.strategy
    beside = "accelerate" in job.beside
    runs = (*_RUNS, "fsdp1", "plain") if beside else _RUNS
    allowed = "the Trainer runs hf (with FSDP 1 where --zero says so), fsdp2, ddp and deepspeed"
    job.require(job.framework in runs, "framework", allowed)
    job.require(job.framework != "ddp" or job.gpus > 1, "framework", "on one GPU the Trainer runs hf")
    return {
        **({} if job.editing else script_fields(job)),
        "per_device_train_batch_size": plan.micro_batch,
        **({} if job.editing else {"per_device_eval_batch_size": job.eval_micro_batch or plan.micro_batch}),
        "gradient_accumulation_steps": job.accumulation,
        **_precision(job),
        **_optimizer(job),
        **_kernels(job),
        **_compile(job, beside=beside),
        **_engine(job, beside=beside),
    }


_RUNS = ("hf", "fsdp2", "ddp", "deepspeed")


def script_fields(job: ConfigJob) -> dict[str, Any]:
    """What the script beside the arguments loads, and how: the model, its dtype, the kernel, tokens of a sequence."""
    plan = job.strategy
    job.require(bool(job.fed), "model", NO_SCRIPT)
    frozen = plan.lora and job.framework != "deepspeed" and plan.precision.endswith("mixed") and not plan.frozen_fp32
    narrow = plan.precision == "bf16" or plan.quantize != "none" or frozen
    half = "float16" if plan.precision.startswith("fp16") else "bfloat16"
    return {
        "model_name_or_path": hub_name(job),
        "block_size": job.seq_len,
        "dtype": half if narrow else "float32",
        "attn_implementation": _kernel(job),
        **({"freeze_vision_tower": True} if plan.vision != "trained" else {}),
        **({"freeze_multi_modal_projector": True} if plan.vision == "frozen" else {}),
        **_adapters(job),
    }


def _kernel(job: ConfigJob) -> str:
    """Of the kernels of `sdpa` PyTorch picks the one that the GPU and the model's class have."""
    plan = job.strategy
    job.require(plan.flash_version != 1, "strategy.flash_version", FLASH)
    if plan.flash_version == 3:
        return "flash_attention_3"
    return "eager" if plan.attention == "eager" else "sdpa"


def require_decoder(job: ConfigJob, writer: str) -> None:
    """Refuse what is no decoder of text alone, which is all that ``writer`` trains."""
    kind = job.fed
    other = "write it with --to trainer or accelerate" if kind else NO_SCRIPT
    job.require(kind == "text", "model", f"{writer} trains decoders of text: {other}")


NO_SCRIPT = (
    "memcalc has no training script for it: set what the plan says in a JSON of TrainingArguments for a script of your "
    "own, which memcalc check reads with --model"
)


def _adapters(job: ConfigJob) -> dict[str, Any]:
    """Adapters and a quantised base under the names that TRL's script has for them, and PEFT for their dtype."""
    plan = job.strategy
    lora = lora_of(plan.lora)
    if lora is None:
        return {}
    job.require_one_of("quantize", ("none", "nf4", "nf4-dq", "int8"), "bitsandbytes has")
    job.require(not plan.prepare_kbit, "strategy.prepare_kbit", "the script leaves norms in 16 bits")
    job.require(not plan.quantize_experts, "strategy.quantize_experts", "bitsandbytes leaves stacked experts alone")
    job.require(plan.lora_kernels == "model", "strategy.lora_kernels", "what is written has plain adapters of PEFT")
    known = plan.quantize == "none" or "/" in hub_name(job)
    job.require(known, "model", "a quantized base is loaded from the Hub or a folder: name one", value=job.model)
    return {
        "use_peft": True,
        "lora_r": lora.rank,
        "lora_alpha": 2 * lora.rank,
        "lora_dropout": plan.lora_dropout,
        "lora_target_modules": layer_names(job, "lora", lora.targets),
        "lora_modules_to_save": layer_names(job, "also-train", plan.also_train) or None,
        "autocast_adapter_dtype": plan.adapter_dtype == "fp32",
        "load_in_4bit": plan.quantize.startswith("nf4") or None,
        "load_in_8bit": plan.quantize == "int8" or None,
        "use_bnb_nested_quant": plan.quantize == "nf4-dq" or None,
    }


def _precision(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    dtype, _, kind = plan.precision.partition("-")
    # a DeepSpeed config with 16-bit weights must find the Trainer's own switch on (integrations/deepspeed.py)
    mixed = bool(kind) or plan.autocast or (job.framework == "deepspeed" and dtype != "fp32")
    return {"bf16": mixed and dtype == "bf16", "fp16": mixed and dtype == "fp16"}


def _compile(job: ConfigJob, *, beside: bool) -> dict[str, Any]:
    plan = job.strategy
    if beside:  # Accelerate's own YAML has it
        return {}
    job.require(plan.compile in {"none", "model"}, "compile", "the Trainer compiles the whole model")
    return {"torch_compile": plan.compile == "model"}


def _engine(job: ConfigJob, *, beside: bool) -> dict[str, Any]:
    """What runs the ranks, where that is not the launcher's file, and recomputation."""
    if job.framework in {"fsdp1", "fsdp2"} or (job.framework == "hf" and job.strategy.zero > 0):
        return (_fsdp_beside if beside else _fsdp)(job)
    named = job.framework == "deepspeed" and bool(job.beside) and not beside
    config = {"deepspeed": job.beside.get("deepspeed", "ds_config.json")} if named else {}
    return {**config, **_checkpoints(job)}


def _optimizer(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    if job.framework == "deepspeed" and job.beside:  # its own JSON names the optimizer, which then runs
        return {}
    kind = "sgd" if plan.optimizer == "sgd-momentum" else plan.optimizer
    if kind == "galore-adamw":
        return galore(job, "optim")
    name = ANY_FORM.get(kind) or _NAMES[kind, plan.optimizer_impl]
    momentum = "momentum=0.9" if plan.optimizer == "sgd-momentum" else None
    return {"optim": name, "optim_args": momentum, "weight_decay": DECAY if plan.sgd_weight_decay else None}


def galore(job: ConfigJob, key: str) -> dict[str, Any]:
    """GaLore under the key of the optimizer; a layer's name of the list matches every path that it is a part of."""
    plan = job.strategy
    return {
        key: "galore_adamw_layerwise" if plan.optimizer_in_backward else "galore_adamw",
        "optim_args": f"rank={plan.galore_rank}",
        "optim_target_modules": layer_names(job, "strategy.galore_targets", plan.galore_targets),
    }


def _kernels(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    fused = plan.kernels == "fused"
    job.require(plan.kernels in {"model", "fused"}, "kernels", "the Trainer has Liger's, or the model's own")
    losses = {"fused-linear": {}, "fused-kernel": {"cross_entropy": True}, "standard": {"cross_entropy": False}}
    job.require(plan.loss in losses, "loss", "the Trainer has standard, fused-kernel and fused-linear")
    job.require(not plan.tiled_loss, "strategy.tiled_loss", "the Trainer has Liger's loss")
    if not fused and plan.loss == "standard":
        return {"use_liger_kernel": False}
    chosen = {name: False for name in LIGER_KERNELS if not fused}
    if plan.loss != "fused-linear":
        chosen = {**chosen, "fused_linear_cross_entropy": False, **losses[plan.loss]}
    return {"use_liger_kernel": True, **{f"liger_kernel_config.{name}": on for name, on in chosen.items()}}


def checkpoints_itself(job: ConfigJob) -> bool:
    """Whether the Trainer checkpoints what FSDP shards: FSDP takes every block, and version 1 offloads nothing.

    The Trainer's checkpoints stand inside of FSDP's hooks, so that no block is gathered once more (5.23
    modeling_layers.py, GradientCheckpointingLayer).
    """
    plan, yaml = job.strategy, "accelerate" in job.beside and job.framework == "fsdp2"
    return plan.recompute.startswith("every-") or ("activations" in plan.offload and not yaml)


def _checkpoints(job: ConfigJob) -> dict[str, Any]:
    """Checkpoints of the Trainer's own; those of DeepSpeed's configs are not the Trainer's."""
    plan = job.strategy
    fields: dict[str, Any] = {"gradient_checkpointing": plan.recompute != "none"}
    if plan.recompute != "none":
        job.require(plan.checkpoint != "reentrant-inside", "strategy.checkpoint", PLACED)
        habit = "reentrant" if habits_of(plan.framework).reentrant else "non-reentrant"
        fields["gradient_checkpointing_kwargs.use_reentrant"] = (plan.checkpoint or habit) == "reentrant"
        fields["gradient_checkpointing_kwargs.every_n_layers"] = parse_policy(plan.recompute).count
        if plan.recompute == "full":
            del fields["gradient_checkpointing_kwargs.every_n_layers"]
    moved = "activations" in plan.offload and job.framework != "deepspeed"
    fields["gradient_checkpointing_kwargs.offload"] = True if moved else None
    return fields


def _fsdp(job: ConfigJob) -> dict[str, Any]:
    """FSDP, with its own checkpointing where it has what is wanted."""
    plan, itself = job.strategy, checkpoints_itself(job)
    version = 2 if job.framework == "fsdp2" else 1
    fields: dict[str, Any] = {
        "fsdp": True if version == 2 else "full_shard",
        "fsdp_config.version": version,
        "fsdp_config.activation_checkpointing": plan.recompute != "none" and not itself,
        "fsdp_config.cpu_offload": "params" in plan.offload,
        **(_checkpoints(job) if itself else {}),
    }
    if version == 2:
        job.require(plan.reshard != "always", "strategy.reshard", LOSS_INSIDE)
        fields["fsdp_config.reshard_after_forward"] = plan.zero == 3
    else:
        fields["fsdp_config.backward_prefetch"] = "backward_pre"
    return fields | accumulated(job)


def _fsdp_beside(job: ConfigJob) -> dict[str, Any]:
    """Accelerate's YAML has FSDP and its checkpointing."""
    return {**(_checkpoints(job) if checkpoints_itself(job) else {}), **accumulated(job)}


def accumulated(job: ConfigJob) -> dict[str, Any]:
    """Whether gradients are reduced after each micro-batch, not after the last alone."""
    stated = job.strategy.whole_accumulation
    if job.accumulation == 1 or (habits_of(job.strategy.framework).whole_accumulation if stated is None else stated):
        return {}
    return {"accelerator_config.gradient_accumulation_kwargs.sync_each_batch": True}


def spelling(document: Document, key: str) -> str:
    """Return a key as a file spells it: the older or the newer name of checkpointing, `fsdp_` before FSDP's options."""
    old, new = "gradient_checkpointing", "activation_checkpointing"
    if key.startswith(old) and new in document.data:
        return key.replace(old, new)
    table = document.data.get("fsdp_config")
    lead, _, name = key.partition(".")
    if lead == "fsdp_config" and isinstance(table, dict) and any(str(word).startswith("fsdp_") for word in table):
        return key if name in table else f"{lead}.fsdp_{name}"
    return key


_TYPES = {str: "str", int: "int", float: "float", bool: "bool", list: "list[str]"}


def script_text(job: ConfigJob) -> str:
    """Return the script of a job, whose plan stands in the arguments that it is given."""
    template = (files("memcalc.convert.formats") / "trainer_script.txt").read_text(encoding="utf-8")
    fields = {name: value for name, value in script_fields(job).items() if value is not None}
    kind, part = job.fed, _script_part(job)
    pictured = kind == "images" and job.image is not None
    parts = {
        "{title}": f"{job.model} on {job.gpus} x {job.gpu}",
        "{data}": part["data"],
        "{config}": configuration(job.sized(), "script.model_name_or_path"),
        "{fields}": "\n".join(f"    {name}: {_TYPES[type(value)]}" for name, value in fields.items()),
        "{imports}": "import re\nimport sys\n" if freezes(job) else "import sys\n",
        "{peft}": "import peft\n" if job.strategy.lora else "",
        "{needs}": "Transformers 5 and PEFT" if job.strategy.lora else "Transformers 5",
        "{constants}": _pictures(job, part["constants"]) if pictured else "",
        "{row}": part["row"].replace("{beside}", _beside(job)).removeprefix("\n"),
        "{joined}": part["joined"].replace("{joined}", _joined(job)) if pictured else "",
        "{model}": part.get("begin", "").removeprefix("\n") + _model(job, fields, part),
        "{collator}": ", data_collator=batched" if pictured else "",
    }
    for name, text in parts.items():
        template = template.replace(name, text)
    return template


def freezes(job: ConfigJob) -> bool:
    """Whether the script itself freezes a part of the model; under adapters PEFT does."""
    return job.strategy.vision != "trained" and not job.strategy.lora


def _script_part(job: ConfigJob) -> dict[str, str]:
    """The parts of the script by what the model is fed: text beside a tower that sees no image."""
    parts, kind = _scripts(), job.fed
    if kind == "images" and job.image is None:
        return {**parts["text"], "auto": parts[kind]["auto"]}
    return parts[kind]


def _joined(job: ConfigJob) -> str:
    """Rows that stand one after another in a batch; Idefics 3 and SmolVLM have the views of a sequence in one."""
    spec = job.sized()
    rule = spec.images.rule if spec.images is not None else ""
    beside = {"scaled": ("image_grid_thw",), "bounded": ("image_sizes",)}.get(rule, ())
    return repr((*(() if rule == "split" else ("pixel_values",)), *beside))


def _beside(job: ConfigJob) -> str:
    """What a row has beside the pixels."""
    spec, beside = job.sized(), _scripts()["beside"]
    rule = spec.images.rule if spec.images is not None else ""
    return beside.get(rule, "") or beside.get(spec.architecture, "")


def _pictures(job: ConfigJob, template: str) -> str:
    """The constants of the images of a sequence, whose last two sides are pixels or, of rows of patches, theirs."""
    spec, image = job.sized(), job.image
    if image is None or spec.images is None:
        return ""
    rule, (wide, high) = spec.images, job.image_sides
    pixels: tuple[int, ...] = (job.images * image.views, 3, high or rule.side, wide or rule.side)
    grid = ""
    if rule.rule == "scaled":
        pixels = (job.images * image.patches, spec.ends_of("vision").patch)
        grid = f'GRID = {(1, high // rule.patch, wide // rule.patch)}\n"""Frames, rows and columns of patches."""\n'
    filled = template.replace("{images}", str(job.images)).replace("{tokens}", str(image.tokens))
    return filled.replace("{pixels}", str(pixels)) + grid


def _model(job: ConfigJob, fields: dict[str, Any], part: dict[str, str]) -> str:
    """The lines that make the model, what of it is frozen, and the adapters over it."""
    plan, texts, vision = job.strategy, _scripts()["model"], _scripts()["vision"]
    base = texts["loaded"] if plan.quantize == "none" else texts["quantized"]
    lines = [base.replace("{auto}", part["auto"]).replace("{bits}", _scripts()["bits"].get(plan.quantize, ""))]
    parts, unless = vision["tower"], f" and {vision['inside']}"
    if plan.vision == "frozen":
        parts, unless = f"{parts}|{vision['projector']}", ""
    if freezes(job):
        lines.append(texts["frozen"].replace("{parts}", parts).replace("{kept}", unless))
    if plan.lora:
        saved = "script.lora_modules_to_save" if "lora_modules_to_save" in fields else "None"
        excluded = f'exclude_modules=r".*{vision["tower"]}.*", ' if plan.vision != "trained" else ""
        task = f'task_type="{part["task"]}", ' if part["task"] else ""
        adapted = texts["adapted"].replace("{saved}", saved).replace("{excluded}", excluded)
        lines.append(adapted.replace("{task}", task))
    return "".join(line.removeprefix("\n") for line in lines)


def sizes(spec: Model) -> dict[str, Any]:
    """The sizes that the model's class in Transformers takes; TOML has no null, and `null` stands for it."""
    return {key: _with_null(value) for key, value in spec.hf_config.items()}


def _with_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_null(inner) for key, inner in value.items()}
    return None if value == "null" else value


def configuration(spec: Model, name: str) -> str:
    """Return the expression that makes the configuration; ``name`` is that of its path or name on the Hub."""
    if not spec.hf_class or not spec.hf_config:
        return f"transformers.AutoConfig.from_pretrained({name})"
    pairs = ", ".join(f"{key}={value!r}" for key, value in sizes(spec).items())
    filled = textwrap.indent(textwrap.fill(pairs, 106), " " * 8)
    return f"transformers.{spec.hf_class}.config_class(\n{filled}\n    )"


def layer_names(job: ConfigJob, word: str, targets: Iterable[str]) -> list[str]:
    """The names of layers by memcalc's words for them, as the option ``word`` has them.

    Refuses one whose name is not known: a list of names would go without it, and nobody would be told.
    """
    tables = layer_tables()
    kind = job.spec.architecture if job.spec else ""
    names, listed = {**tables["usual"], **tables.get(kind, {})}, list(targets)
    job.require(job.fed == "text" or kind in tables, word, "what its class calls its layers is not known here")
    for target in listed:
        job.require(target in names, word, f"names of layers are known of {', '.join(names)}")
    entries = (names[target] for target in listed)
    return list(dict.fromkeys(name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)))


@cache
def _scripts() -> dict[str, dict[str, str]]:
    texts: dict[str, dict[str, str]] = read_toml(files("memcalc.convert.formats") / "trainer_scripts.toml")
    return texts


@cache
def layer_tables() -> dict[str, dict[str, Any]]:
    """What classes call their layers, by memcalc's words for them; `usual` is what most do."""
    tables: dict[str, dict[str, Any]] = read_toml(files("memcalc.convert.formats") / "layers.toml")
    return tables
