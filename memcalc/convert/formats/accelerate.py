"""Accelerate's YAML, as `accelerate launch --config_file` of Accelerate 1.15 reads it.

Sources: commands/config/config_args.py (ClusterConfig), commands/launch.py (defaults of the flags that the file fills
in), utils/launch.py, utils/dataclasses.py (the plugins).
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.fsdp_options import read_options, said_version
from memcalc.convert.job import Job

_TYPES = {
    "no": "trainer", "multi_gpu": "ddp", "fsdp": "fsdp", "deepspeed": "deepspeed", "megatron_lm": "megatron",
}  # fmt: skip
"""`distributed_type`, and what runs the ranks."""
_DTYPES = {"no": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_HARMLESS = (
    "compute_environment", "debug", "downcast_bf16", "machine_rank", "main_training_function", "main_process_ip",
    "main_process_port", "rdzv_backend", "rdzv_conf", "same_network", "tpu_env", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "command_file", "commands", "use_cpu", "gpu_ids", "module",
    "enable_cpu_affinity", "mpirun_config.", "deepspeed_config.deepspeed_multinode_launcher",
    "deepspeed_config.deepspeed_hostfile", "deepspeed_config.deepspeed_exclusion_filter",
    "deepspeed_config.deepspeed_inclusion_filter", "deepspeed_config.zero3_init_flag",
    "deepspeed_config.zero3_save_16bit_model", "deepspeed_config.gradient_clipping",
    "deepspeed_config.offload_optimizer_nvme_path", "deepspeed_config.offload_param_nvme_path",
    "deepspeed_config.deepspeed_moe_layer_cls_names", "dynamo_config.dynamo_mode",
    "dynamo_config.dynamo_use_dynamic", "dynamo_config.dynamo_use_fullgraph",
)  # fmt: skip
_SIGNS = frozenset({"distributed_type", "compute_environment"})
_RANKS = {"dp_shard_size": "", "tp_size": "tp", "cp_size": "cp"}


def read(document: Document) -> Config:
    """Return what an Accelerate YAML says of a job."""
    reading = Reading(document, "accelerate", "Accelerate 1.15")
    kind = reading.one_of("distributed_type", _TYPES, "trainer")
    reading.say("accelerated", True, "distributed_type")
    _ranks(reading, kind)
    mixed = reading.one_of("mixed_precision", _DTYPES, "fp16" if reading.flag("fp16") else "no")
    if mixed == "fp8":
        reading.not_modelled({"mixed_precision": "float8 matmuls; here they count as bf16"})
        mixed = "bf16"
    if mixed != "no" or reading.has("mixed_precision"):  # a Trainer's bf16 goes before `no` (training_args.py)
        reading.say("mixed", mixed, "mixed_precision", default=mixed == "no")
    if kind == "deepspeed":
        _deepspeed(reading)
    elif kind == "fsdp":
        read_options(reading, "fsdp_config", said_version(reading, "fsdp_config", 1), wraps="no_wrap")
    elif kind == "megatron":
        reading.not_modelled({"distributed_type": "Megatron-LM runs the model; give its own flags as a FILE"}, ())
    else:
        reading.say("engine", kind, "distributed_type")
    _parallelism(reading)
    _compile(reading)
    reading.harmless(*_HARMLESS, *(f"{table}." for name, table in _TABLES.items() if name != kind))
    reading.not_modelled({"fp8_config": "float8 matmuls", "megatron_lm_config": "Megatron-LM's own options"})
    return reading.finish()


_TABLES = {"deepspeed": "deepspeed_config", "fsdp": "fsdp_config"}
"""A table counts only where `distributed_type` calls for it."""


def _ranks(reading: Reading, kind: str) -> None:
    """Without a distributed type one process runs, whatever `num_processes` says (launch.py, simple_launcher)."""
    ranks, nodes = reading.whole("num_processes", low=-1), reading.whole("num_machines", 1, low=1)
    if kind == "trainer":
        reading.say("gpus", 1, "distributed_type")
        return
    if ranks is not None and ranks > 0:
        reading.say("gpus", ranks, "num_processes")
        reading.say("gpus_per_node", max(ranks // (nodes or 1), 1), "num_processes")
    if reading.has("num_processes") or reading.has("num_machines"):
        reading.say("nodes", nodes, "num_machines")


def _deepspeed(reading: Reading) -> None:
    """A file of its own, or a few settings of which the rest is DeepSpeed's default (DeepSpeedPlugin)."""
    table = "deepspeed_config"
    reading.say("engine", "deepspeed", "distributed_type")
    if reading.has(key := f"{table}.deepspeed_config_file"):
        reading.refer("deepspeed", key, path=reading.text(key))
        return
    reading.say("zero", _stage(reading, f"{table}.zero_stage"), f"{table}.zero_stage")
    steps = reading.whole(f"{table}.gradient_accumulation_steps", low=1)
    if steps is not None:
        reading.say("accumulation", steps, f"{table}.gradient_accumulation_steps")
    devices = {"none": "", "cpu": "cpu", "nvme": "nvme"}
    found = {}
    for part, name in (("optimizer", "offload_optimizer_device"), ("params", "offload_param_device")):
        if device := reading.one_of(f"{table}.{name}", devices, ""):
            found[part] = (f"{table}.{name}", device)
    if found:
        key, _ = next(iter(found.values()))
        reading.say("offload", tuple(found), key)
        reading.say("offload_to", "nvme" if "nvme" in {device for _, device in found.values()} else "cpu", key)


def _stage(reading: Reading, key: str) -> int:
    stage: int = reading.one_of(key, {str(stage): stage for stage in range(4)}, 2)
    return stage


def _parallelism(reading: Reading) -> None:
    """Degrees of a device mesh, which FSDP 2 alone has (commands/launch.py)."""
    table = "parallelism_config"
    lead = f"{table}.{table}_"
    for name, word in _RANKS.items():
        ranks = reading.whole(f"{lead}{name}", 1, low=1)
        if word and ranks is not None and ranks > 1:
            reading.say(word, ranks, f"{lead}{name}")
    if (reading.whole(f"{lead}cp_size", 1) or 1) > 1:
        # torch.distributed.tensor.experimental: alltoall passes blocks of keys and values round a ring
        kinds = {"allgather": "allgather", "alltoall": "ring"}
        reading.say("cp_kind", reading.one_of(f"{lead}cp_comm_strategy", kinds, "allgather"), f"{lead}cp_comm_strategy")
    reading.not_modelled(
        {
            f"{lead}dp_replicate_size": "shards are kept within a part of the ranks; here they count as kept over all",
            f"{lead}sp_size": "attention is shared out over ranks (Ulysses)",
        },
        unless=(1, None),
    )
    reading.harmless(f"{table}.")


def _compile(reading: Reading) -> None:
    name = "dynamo_config.dynamo_backend" if reading.has("dynamo_config.dynamo_backend") else "dynamo_backend"
    backend = reading.text(name, "no").lower()
    regions = reading.flag("dynamo_config.dynamo_use_regional_compilation")
    if backend == "inductor":
        reading.say("compile", "blocks" if regions else "model", name)
    elif backend != "no":
        reading.not_modelled({name: "it is counted as running without a compiler"})


def write(job: Job) -> dict[str, Any]:
    """Return the config that launches a job. What the YAML cannot say stands in the training script's arguments."""
    plan = job.strategy
    engine = _engine(job)
    job.must(
        bool(engine),
        "framework",
        job.framework,
        "Accelerate runs hf (alone or sharded), fsdp1, fsdp2, deepspeed, and ddp on several GPUs",
    )
    fields: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"fsdp1": "FSDP", "fsdp2": "FSDP"}.get(engine, engine),
        "mixed_precision": _mixed(job),
        "num_machines": job.nodes,
        "num_processes": job.gpus,
    }
    if engine.startswith("fsdp"):
        fields |= _fsdp(job, engine)
    elif engine == "DEEPSPEED":
        fields |= _zero(job)
    if plan.compile != "none":
        job.must(plan.compile in {"model", "blocks"}, "compile", plan.compile, "Accelerate compiles model or blocks")
        fields["dynamo_config.dynamo_backend"] = "INDUCTOR"
        fields["dynamo_config.dynamo_use_regional_compilation"] = plan.compile == "blocks"
    return fields | _mesh(job, engine)


def _engine(job: Job) -> str:
    plan = job.strategy
    if job.framework in {"hf", "plain"} and job.gpus == 1 and plan.zero == 0:
        return "NO"
    if job.framework == "hf":
        return "fsdp1" if plan.zero else ""
    if job.framework == "ddp" and job.gpus == 1:
        return ""
    return {"fsdp1": "fsdp1", "fsdp2": "fsdp2", "ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED"}.get(job.framework, "")


def _mixed(job: Job) -> str:
    plan = job.strategy
    dtype, _, kind = plan.precision.partition("-")
    job.must(dtype in {"fp32", "bf16", "fp16"}, "precision", plan.precision, "Accelerate's fp8 is not modelled")
    master = kind == "mixed" and plan.zero == 0 and job.framework != "deepspeed"
    job.must(not master, "precision", plan.precision, "without sharding Accelerate has autocast: bf16-autocast")
    return dtype if kind or plan.autocast else "no"


def _fsdp(job: Job, engine: str) -> dict[str, Any]:
    plan, table = job.strategy, "fsdp_config"
    job.must("optimizer" not in plan.offload, "offload", "optimizer", "FSDP moves states with the parameters: params")
    fields: dict[str, Any] = {
        f"{table}.fsdp_version": int(engine[-1]),
        f"{table}.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{table}.fsdp_offload_params": "params" in plan.offload,
        f"{table}.fsdp_activation_checkpointing": plan.recompute == "full",
    }
    if engine == "fsdp2":
        fields[f"{table}.fsdp_reshard_after_forward"] = plan.zero == 3
        fields[f"{table}.fsdp_activation_checkpointing_offload"] = True if "activations" in plan.offload else None
        return fields
    job.must("activations" not in plan.offload, "offload", "activations", "FSDP 1 does not offload them")
    return {
        **fields,
        f"{table}.fsdp_sharding_strategy": "FULL_SHARD" if plan.zero == 3 else "SHARD_GRAD_OP",
        f"{table}.fsdp_backward_prefetch": "BACKWARD_PRE",
        f"{table}.fsdp_use_orig_params": True,
    }


def _zero(job: Job) -> dict[str, Any]:
    plan, table = job.strategy, "deepspeed_config"
    job.must("activations" not in plan.offload, "offload", "activations", "it stands in a DeepSpeed JSON")
    devices = {part: plan.offload_to if part in plan.offload else "none" for part in ("optimizer", "params")}
    return {
        f"{table}.zero_stage": plan.zero,
        f"{table}.gradient_accumulation_steps": job.accumulation,
        f"{table}.offload_optimizer_device": devices["optimizer"],
        f"{table}.offload_param_device": devices["params"],
        f"{table}.zero3_init_flag": plan.zero == 3,
    }


def _mesh(job: Job, engine: str) -> dict[str, Any]:
    plan, lead = job.strategy, "parallelism_config.parallelism_config_"
    job.must(plan.pp == 1 and plan.ep == 1, "pp", plan.pp, "Accelerate has no pipeline and no expert parallelism")
    if plan.tp == 1 and plan.cp == 1:
        return {}
    job.must(engine == "fsdp2", "tp", plan.tp, "Accelerate has tensor and context parallelism with fsdp2 alone")
    fields: dict[str, Any] = {f"{lead}dp_shard_size": plan.dp, f"{lead}tp_size": plan.tp, f"{lead}cp_size": plan.cp}
    if plan.cp > 1:
        job.must(plan.cp_kind != "a2a", "cp-kind", plan.cp_kind, "Accelerate has allgather and ring")
        fields[f"{lead}cp_comm_strategy"] = {"allgather": "allgather", "ring": "alltoall"}[plan.cp_kind]
    return fields


FORMAT = Format(
    name="accelerate",
    title="Accelerate YAML",
    software="Accelerate 1.15",
    recognise=lambda document: document.kind in {"yaml", "json"} and bool(_SIGNS & set(document.data)),
    read=read,
    write=write,
    kind="yaml",
    filename="accelerate.yaml",
    choices={"zero": (0, 1, 2, 3), "offload": ("none", "optimizer", "optimizer,params", "params")},
)
"""The launcher's file: what runs the ranks, and in which precision."""
