"""DeepSpeed's JSON, as DeepSpeed 0.19 reads it (runtime/config.py, runtime/constants.py, runtime/zero/config.py)."""

from __future__ import annotations

import re
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import ConfigJob, Format, key_table
from memcalc.convert.formats.tuning import DECAY, set_decay
from memcalc.convert.objectives import refuse_idle

_KEYS = key_table("deepspeed")
_OPTIMIZERS = {
    "adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon", "lamb": "adamw",
    "onebitadam": "adamw", "zerooneadam": "adamw", "onebitlamb": "adamw", "muadam": "adamw", "muadamw": "adamw",
    "musgd": "sgd", "adagrad": "sgd-momentum",
}  # fmt: skip
"""By the number of states each keeps (runtime/engine.py, _configure_basic_optimizer)."""
_EXTRA_STATE = {"onebitadam", "zerooneadam", "onebitlamb", "lamb"}
"""Those that keep error feedback or norms besides the two moments."""
_TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "sgd-momentum": "SGD", "muon": "Muon"}
_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16", "half": "fp16", "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16",
}  # fmt: skip
_DEVICES = {"none": "", "cpu": "cpu", "nvme": "nvme"}
_SIZES = {
    "reduce_bucket_size": "strategy.reduce_bucket_size",
    "stage3_prefetch_bucket_size": "strategy.zero_prefetch_bucket",
    "stage3_param_persistence_threshold": "strategy.persistence_threshold",
    "stage3_max_live_parameters": "strategy.max_live_parameters",
    "sub_group_size": "strategy.sub_group_size",
}
"""Of `zero_optimization`: counts of elements, and the field of memcalc that has them."""


_GATHERS = (
    "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)  # fmt: skip
"""Names by which whole weights are asked for, the newest first."""


def read(document: Document) -> Config:
    """Return what a DeepSpeed JSON says of a job."""
    reader = ConfigReader(document, "deepspeed", "DeepSpeed 0.19")
    if re.search(r"(^|[_-])eval", document.path.stem.lower()) and not reader.has("optimizer"):
        refuse_idle(document.path.name, ("by its name",))
    reader.set("engine", "deepspeed", "zero_optimization")
    _batch(reader)
    _precision(reader)
    _zero(reader)
    _rest(reader)
    reader.harmless(*_KEYS.harmless)
    reader.not_counted(_KEYS.not_counted)
    reader.not_modelled(_KEYS.not_modelled, unless=(False, None, 0, 1, -1, "", "none"))
    for key in _KEYS.lists["removed"]:
        if reader.has(key):
            message = f"{key} is refused by DeepSpeed 0.19; what an older release does with it is not counted"
            reader.note("warning", "MC002", key, message)
    return reader.finish()


def _batch(reader: ConfigReader) -> None:
    """One micro-batch a step where its size is stated and the whole is not (_set_batch_related_parameters)."""
    micro, steps = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    alone = reader.has(micro) and not reader.has("train_batch_size") and not reader.has(steps)
    reader.set_integer("micro_batch", micro)
    reader.set_integer("accumulation", steps, 1 if alone else None)
    reader.set_integer("train_batch", "train_batch_size")


def _precision(reader: ConfigReader) -> None:
    """`bf16` and `fp16` give 16-bit weights with an fp32 master; `torch_autocast` runs over the weights as they are."""
    narrow = [name for name in ("bf16", "bfloat16", "fp16") if _enabled(reader, name)]
    if len(narrow) > 1:
        raise reader.error(f"{narrow[-1]}.enabled", True, f"{narrow[0]}.enabled is true too, and DeepSpeed takes one")
    autocast = _enabled(reader, "torch_autocast")
    dtype = reader.one_of("torch_autocast.dtype", _DTYPES, "bf16") if autocast else ""
    if autocast and not narrow:
        reader.set("precision", f"{dtype}-autocast", "torch_autocast.enabled")
    elif not narrow:
        # what is auto or absent the Trainer and Accelerate fill in (set_mixed_precision of Accelerate's plugin)
        if reader.raw("bf16.enabled") != "auto" and reader.raw("fp16.enabled") != "auto":
            reader.set("mixed", "no", "bf16.enabled")
    else:
        name = "bf16" if narrow[0] == "bfloat16" else narrow[0]
        states = reader.flag(f"{narrow[0]}.bf16_optimizer_states")
        weights = reader.flag(f"{narrow[0]}.{name}_master_weights_and_grads")
        if states and weights:
            reader.set("precision", name, f"{narrow[0]}.enabled")
        else:
            reader.set("mixed", name, f"{narrow[0]}.enabled")
            on = {"bf16_optimizer_states": states, f"{name}_master_weights_and_grads": weights}
            says = "only a part of the optimizer's states is 16-bit"
            reader.not_modelled({f"{narrow[0]}.{key}": says for key in on if on[key]})
        _messages(reader, name)
        if autocast:  # engine.py, _configure_distributed_model: bf16 and fp16 cast the weights, autocast or not
            reader.set("autocast", True, "torch_autocast.enabled")
            if dtype != name:
                reader.not_modelled({"torch_autocast.dtype": f"{dtype} products are made of {name} weights"})
    if width := reader.one_of("data_types.grad_accum_dtype", _DTYPES):
        reader.set("strategy.grad_accum_dtype", width, "data_types.grad_accum_dtype")


def _messages(reader: ConfigReader, width: str) -> None:
    """The width in which gradients are summed; by default that of the weights (engine.py, communication_data_type)."""
    key = "communication_data_type"
    if reader.one_of(key, _DTYPES, width) != width:
        reader.not_modelled({key: f"each bucket is cast from {width} for its reduction, and sent so"})


def _enabled(reader: ConfigReader, name: str) -> bool:
    return reader.raw(f"{name}.enabled") != "auto" and bool(reader.flag(f"{name}.enabled"))


def _zero(reader: ConfigReader) -> None:
    stage = reader.integer("zero_optimization.stage", 0)
    if stage not in {0, 1, 2, 3}:
        raise reader.error("zero_optimization.stage", stage, "must be 0, 1, 2 or 3")
    reader.set("zero", stage, "zero_optimization.stage")
    auto = tuple(word for key, word in _SIZES.items() if reader.raw(f"zero_optimization.{key}") == "auto")
    if auto:
        reader.set("filled_in", auto, "zero_optimization")
    for key, word in _SIZES.items():
        reader.set_integer(word, f"zero_optimization.{key}", low=0)
    if reader.has(key := "zero_optimization.overlap_comm"):
        reader.set("strategy.overlap_comm", reader.flag(key), key)
    _saved(reader, stage)
    _offload(reader, stage)


def _saved(reader: ConfigReader, stage: int) -> None:
    """Only stage 3 has weights to gather; at stages below, and without a key, a rank writes what it has."""
    keys = [f"zero_optimization.{key}" for key in _GATHERS if reader.has(f"zero_optimization.{key}")]
    if keys and stage == 3 and reader.raw(keys[0]) != "auto":
        reader.set("strategy.state_dict", "full" if reader.flag(keys[0]) else "sharded", keys[0])


def stays(reader: ConfigReader, key: str, stage: int) -> bool:
    """Whether weights stay on the GPU: below stage 3 no engine takes `offload_param` (engine.py)."""
    if stage < 3:
        says = f"{key} counts for nothing at stage {stage}: weights are offloaded at 3 only"
        reader.note("warning", "MC001", key, says)
    return stage < 3


def _offload(reader: ConfigReader, stage: int) -> None:
    """Deprecated truth values of before 0.5 stand for the CPU."""
    zero = "zero_optimization"
    parts = (("optimizer", "offload_optimizer", "cpu_offload"), ("params", "offload_param", "cpu_offload_param"))
    offloads = {
        part: (f"{zero}.{table}.device", _device(reader, f"{zero}.{table}", f"{zero}.{old}"))
        for part, table, old in parts
    }
    checkpoints = "activation_checkpointing.cpu_checkpointing"
    offloads["activations"] = (checkpoints, "cpu" if reader.flag(checkpoints) else "")
    offloads = {part: (key, device) for part, (key, device) in offloads.items() if device}
    if "params" in offloads and stays(reader, offloads["params"][0], stage):
        del offloads["params"]
    if offloads:
        key = next(iter(offloads.values()))[0]
        tiers = {device for _, device in offloads.values()}
        reader.set("offload", tuple(offloads), key)
        reader.set("offload_to", "nvme" if "nvme" in tiers else "cpu", key)
        reader.not_counted(_KEYS.tables["on_host"])
        if "nvme" in tiers:
            reader.not_counted(_KEYS.tables["on_nvme"])
        if len(tiers) > 1:
            says = "what goes to the CPU and what goes to NVMe is counted as one tier; the GPU's share is the same"
            reader.note("warning", "MC002", key, says)


def _device(reader: ConfigReader, key: str, old: str) -> str:
    device: str = reader.one_of(f"{key}.device", _DEVICES, "") or ("cpu" if reader.flag(old) else "")
    ratio = reader.number(f"{key}.ratio", 1.0)
    if device and ratio is not None and ratio < 1.0:
        reader.not_modelled({f"{key}.ratio": "only a part of the states leaves the GPU; here all of them do"})
    reader.not_modelled({f"{key}.super_offload": "a part of the update runs on the GPU (SuperOffload)"})
    reader.harmless(f"{key}.")
    return device


def _rest(reader: ConfigReader) -> None:
    if reader.flag(key := "activation_checkpointing.partition_activations"):
        reader.set("strategy.partition_activations", True, key)
    if tensor := reader.integer("tensor_parallel.autotp_size", 0):
        reader.set("tp", tensor, "tensor_parallel.autotp_size")
    reader.harmless("tensor_parallel.")
    if (ranks := reader.integer("sequence_parallel_size", 1, low=1) or 1) > 1:
        reader.set("cp", ranks, "sequence_parallel_size")
    name = reader.text("optimizer.type").lower()
    if not name:
        return
    if name not in _OPTIMIZERS:
        says = "an optimizer from outside DeepSpeed; its states are counted as AdamW's"
        reader.note("warning", "MC002", "optimizer.type", f"optimizer.type {name!r}: {says}")
    momentum = name in {"sgd", "musgd"} and bool(reader.number("optimizer.params.momentum", 0.0))
    reader.set("optimizer", "sgd-momentum" if momentum else _OPTIMIZERS.get(name, "adamw"), "optimizer.type")
    set_decay(reader, _OPTIMIZERS.get(name, "adamw"), "optimizer.params.weight_decay")
    if name in _EXTRA_STATE:
        reader.not_modelled({"optimizer.type": "it keeps buffers besides the two moments"})
    # get_optimizer_configuration: FusedAdam, else torch.optim
    fused = name in {"adam", "adamw", "lion", "lamb", "muon"} and not reader.flag("optimizer.params.torch_adam")
    reader.set("optimizer_impl", "fused" if fused else "foreach", "optimizer.type")


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the config that runs a job; what it cannot say stands in the Trainer's arguments beside it."""
    plan = job.strategy
    job.require(job.framework == "deepspeed", "framework", "DeepSpeed JSON is written for --framework deepspeed")
    fields: dict[str, Any] = {
        # DeepSpeed and Transformers multiply by all ranks, those of AutoTP too: with it what follows says enough
        "train_batch_size": job.global_batch if plan.tp == 1 else None,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        **_precision_fields(job),
        "zero_optimization.stage": plan.zero,
        **{f"zero_optimization.{key}": getattr(plan, word.split(".")[1]) for key, word in _SIZES.items()},
        "zero_optimization.overlap_comm": plan.overlap_comm,
    }
    for part, key in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        if part in plan.offload:
            fields[f"zero_optimization.{key}.device"] = plan.offload_to
            fields[f"zero_optimization.{key}.pin_memory"] = True
    fields["activation_checkpointing.cpu_checkpointing"] = "activations" in plan.offload or None
    fields["activation_checkpointing.partition_activations"] = plan.partition_activations or None
    fields["optimizer.type"] = _TITLES[plan.optimizer]
    # transformers 5.24 integrations/deepspeed.py fills in what is auto alone: else 1e-3, and no clipping, hold
    fields |= {"optimizer.params.lr": "auto", "gradient_clipping": "auto"} if not job.editing else {}
    if plan.optimizer == "sgd-momentum":
        fields["optimizer.params.momentum"] = 0.9
    fields["optimizer.params.weight_decay"] = DECAY if plan.sgd_weight_decay else None
    if plan.optimizer_impl == "foreach":
        fields["optimizer.params.torch_adam"] = True
    fields["data_types.grad_accum_dtype"] = plan.grad_accum_dtype or None
    fields["tensor_parallel.autotp_size"] = plan.tp if plan.tp > 1 else None
    return fields


def _precision_fields(job: ConfigJob) -> dict[str, Any]:
    dtype, _, kind = job.strategy.precision.partition("-")
    if job.strategy.precision == "fp32":
        return {"bf16.enabled": False}
    over = kind == "autocast" or job.strategy.autocast
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    autocast = {"torch_autocast.enabled": True, "torch_autocast.dtype": name} if over else {}
    if kind == "autocast":
        return autocast
    narrow = {} if kind else {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    return {f"{dtype}.enabled": True, **narrow, **autocast}


FORMAT = Format(
    "deepspeed", "DeepSpeed JSON", "DeepSpeed 0.19",
    lambda document: document.kind == "json" and not document.data.keys().isdisjoint(_KEYS.lists["signs"]),
    read, write, filename="ds_config.json", beside=("trainer",),
    choices={
        "micro_batch": (), "zero": (0, 1, 2, 3), "offload": ("none", "optimizer", "optimizer,params"),
        "optimizer": tuple(_TITLES),
    },
)  # fmt: skip
"""DeepSpeed's own file, alone or beside a Trainer that fills in what is `auto`."""
