"""Arguments of the Trainer, as JSON, as YAML, or as flags: Transformers 5.23, training_args.py and trainer.py.

Beside them stand those of a training script, TRL's among others (:mod:`memcalc.convert.formats.trainer_script`). What
runs the ranks follows from the launcher's file: FSDP and DeepSpeed may be said here or there.
"""

from __future__ import annotations

import json
from typing import Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.fsdp_options import STRATEGIES, read_options, said_version
from memcalc.convert.formats.optimizers import say_optimizer
from memcalc.convert.formats.trainer_keys import (
    HARMLESS,
    NOT_MODELLED,
    SCRIPT,
    SIGNS,
    TRL_SIGNS,
)
from memcalc.convert.formats.trainer_script import is_trl, read_script
from memcalc.convert.formats.trainer_writer import spelling, write


def read(document: Document) -> Config:
    """Return what the Trainer's arguments say of a job."""
    reading = Reading(document, "trainer", "Transformers 5.23")
    trl = is_trl(reading)
    reading.say("engine", "trainer", "per_device_train_batch_size")
    reading.say("accelerated", True, "per_device_train_batch_size")
    _batch(reading)
    _precision(reading, trl)
    _checkpoints(reading, trl)
    _optimizer(reading)
    _compile(reading)
    _kernels(reading, trl)
    _fsdp(reading)
    _deepspeed(reading)
    read_script(reading, trl)
    if reading.flag("activation_offloading"):
        reading.say("offload", ("activations",), "activation_offloading")
    reading.harmless(*HARMLESS, *SCRIPT)
    reading.not_modelled(NOT_MODELLED, unless=(False, None, 0, 0.0, "", "none"))
    return reading.finish()


def _batch(reading: Reading) -> None:
    size = reading.whole("per_device_train_batch_size", 8, low=1)
    reading.say("micro_batch", size, "per_device_train_batch_size")
    steps = reading.whole("gradient_accumulation_steps", 1, low=1)
    reading.say("accumulation", steps, "gradient_accumulation_steps")
    if reading.flag("accelerator_config.gradient_accumulation_kwargs.sync_each_batch"):
        reading.say("sync_each_batch", True, "accelerator_config.gradient_accumulation_kwargs.sync_each_batch")
    reading.harmless("accelerator_config.gradient_accumulation_kwargs.sync_with_dataloader")
    if reading.flag("auto_find_batch_size"):
        message = "the batch is halved after an out-of-memory error: this is the first one that is tried"
        reading.note("note", "MC004", "auto_find_batch_size", message)
    said = reading.text("eval_strategy", "no").lower() if reading.has("eval_strategy") else ""
    said = said or reading.text("evaluation_strategy", "no").lower()
    reading.say("evaluates", said != "no", "eval_strategy")
    size = reading.whole("per_device_eval_batch_size", 8, low=1)
    reading.say("eval_micro_batch", size, "per_device_eval_batch_size")


def _precision(reading: Reading, trl: bool) -> None:
    """TRL turns bf16 on where nothing is said (base_config.py). What is off here another file may turn on."""
    half, full = reading.flag("fp16"), reading.flag("bf16", None)
    off = bool(reading.flag("no_bf16"))
    full = (trl and not half and not off) if full is None else full
    if half and full:
        raise reading.wrong("fp16", True, "bf16 is true too, and the Trainer takes one")
    if half:
        reading.say("mixed", "fp16", "fp16")
    elif full:
        reading.say("mixed", "bf16", "bf16")
    else:
        reading.say("mixed", "no", "bf16", default=True)


def _options(reading: Reading, key: str) -> dict[str, Any]:
    """A table, which flags have as JSON."""
    value = reading.raw(key)
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise reading.wrong(key, value, "must be JSON") from None
    if value is not None and not isinstance(value, dict):
        raise reading.wrong(key, value, "must be a table")
    words = {"true": True, "false": False}  # a flag's values are texts
    return {name: words.get(str(one).lower(), one) for name, one in (value or {}).items()}


def _every(reading: Reading, key: str, value: Any) -> int:
    """How many blocks stand between checkpoints."""
    if isinstance(value, bool) or not str(value).isdecimal() or not 0 < int(str(value)) < 10_000:
        raise reading.wrong(key, value, "must be a whole number from 1")
    return int(str(value))


def _checkpoints(reading: Reading, trl: bool) -> None:
    """`gradient_checkpointing` is the older name; checkpoints are not reentrant unless asked to be."""
    new = reading.has("activation_checkpointing")
    key = "activation_checkpointing" if new else "gradient_checkpointing"
    on = reading.flag(key, trl and not reading.flag("no_gradient_checkpointing"))
    kwargs = _options(reading, f"{key}_kwargs")
    reading.harmless("activation_checkpointing", "activation_checkpointing_kwargs.", "activation_checkpointing_kwargs")
    reading.harmless("gradient_checkpointing", "gradient_checkpointing_kwargs.", "gradient_checkpointing_kwargs")
    every = _every(reading, f"{key}_kwargs.every_n_layers", kwargs.get("every_n_layers", 1))
    policy = "selective-ops" if kwargs.get("selective") else "full" if every == 1 else f"every-{every}"
    # said as a default, FSDP's own checkpointing goes before a Trainer that does none
    reading.say("recompute", policy if on else "none", key, default=not on)
    if not on:
        return
    reading.say("checkpoints_wrapped", True, key)
    # torch.utils.checkpoint takes True where keywords are given without it
    reentrant = kwargs.get("use_reentrant", bool(set(kwargs) - {"selective", "every_n_layers", "offload"}))
    reading.say("strategy.checkpoint", "reentrant" if reentrant else "non-reentrant", f"{key}_kwargs.use_reentrant")
    if kwargs.get("offload"):
        reading.say("offload", ("activations",), f"{key}_kwargs.offload")


def _optimizer(reading: Reading) -> None:
    momentum = "momentum=" in reading.text("optim_args").replace(" ", "")
    say_optimizer(reading, "optim", "adamw_torch_fused", momentum=momentum, every_form=False)


def _compile(reading: Reading) -> None:
    on = reading.flag("torch_compile") or reading.has("torch_compile_backend") or reading.has("torch_compile_mode")
    backend = reading.text("torch_compile_backend", "inductor")
    if on and backend == "inductor":
        reading.say("compile", "model", "torch_compile")
    elif on:
        reading.not_modelled({"torch_compile_backend": "it is counted as running without a compiler"})


def _kernels(reading: Reading, trl: bool) -> None:
    """Liger's kernels, by default with the loss that makes no logits; TRL's trainer makes none in any case."""
    table = _options(reading, "liger_kernel_config")
    reading.harmless("liger_kernel_config.", "liger_kernel_config")
    on = reading.flag("use_liger_kernel")
    if on:
        reading.say("kernels", "fused", "use_liger_kernel")
        if any(table.get(name) is False for name in ("rope", "rms_norm", "swiglu")):
            reading.note("warning", "MC002", "liger_kernel_config", "kernels that are left out count as fused too")
    if trl:
        message = "SFTTrainer makes no whole logits: its loss is counted as Liger's fused one"
        reading.note("note", "MC004", "loss_type", message)
        reading.say("loss", "fused-linear", "loss_type")
    elif on:
        linear = table.get("fused_linear_cross_entropy", True)
        kernel = "fused-kernel" if table.get("cross_entropy") else "standard"
        reading.say("loss", "fused-linear" if linear else kernel, "use_liger_kernel")


def _fsdp(reading: Reading) -> None:
    """`fsdp` turns it on; its older form is a text of options, of which `fsdp_config` goes first."""
    value = reading.raw("fsdp", "")
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    names = [str(name).lower() for name in names]
    table = reading.raw("fsdp_config")
    if not names or names == ["false"]:
        reading.harmless("fsdp_config.", "fsdp_config")
        return
    for name in names:
        if name not in {*STRATEGIES, "offload", "auto_wrap", "true"}:
            allowed = "must be true, or some of full_shard, shard_grad_op, offload, auto_wrap"
            raise reading.wrong("fsdp", value, allowed)
    legacy = next((STRATEGIES[name] for name in names if name in STRATEGIES), "")
    if "offload" in names:
        reading.say("offload", ("params",), "fsdp")
    if isinstance(table, str) and not table.strip().startswith("{"):
        reading.refer("fsdp_config", "fsdp_config", path=table)
    elif isinstance(table, str):
        inner = Document(reading.document.path, "json", table, _options(reading, "fsdp_config"))
        reading.refer("fsdp_config", "fsdp_config", document=inner)
    else:
        version = said_version(reading, "fsdp_config", 2)
        read_options(reading, "fsdp_config", version, wraps="transformer_based_wrap", legacy=legacy)


def _deepspeed(reading: Reading) -> None:
    value = reading.raw("deepspeed")
    if not value:
        return
    if isinstance(value, str) and not value.strip().startswith("{"):
        reading.refer("deepspeed", "deepspeed", path=value)
        return
    outer = reading.document
    place = ("deepspeed",)

    def spans() -> dict[Any, Any]:
        """The places of the inner table's values."""
        return {at[1:]: span for at, span in outer.spans.items() if at[:1] == place}

    inner = Document(outer.path, outer.kind, outer.text, _options(reading, "deepspeed"), spans)
    reading.refer("deepspeed", "deepspeed", document=inner)


def _recognise(document: Document) -> bool:
    if document.kind not in {"json", "yaml", "flags"} or not isinstance(document.data, dict):
        return False
    found = set(document.data)
    return len(SIGNS & found) > 1 or bool(SIGNS & found and TRL_SIGNS & found)


FORMAT = Format(
    name="trainer",
    title="arguments of Transformers' Trainer",
    software="Transformers 5.23",
    recognise=_recognise,
    read=read,
    write=write,
    spelling=spelling,
    kind="json",
    filename="training_args.json",
    choices={
        "micro_batch": (),
        "recompute": ("none", "full"),
        "optimizer": (
            "adamw",
            "adamw-8bit",
            "paged-adamw",
            "paged-adamw-8bit",
            "adafactor",
            "lion",
            "lion-8bit",
            "sgd",
        ),
    },
)
"""The Trainer's arguments, whatever form they have."""
