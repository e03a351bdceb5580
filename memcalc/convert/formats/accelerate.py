"""Accelerate's YAML, as `accelerate launch --config_file` of Accelerate 1.15 reads it.

Sources: commands/config/config_args.py (ClusterConfig), commands/launch.py (defaults of the flags that the file fills
in), utils/launch.py, utils/dataclasses.py (the plugins).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import ConfigJob, Format, key_table
from memcalc.convert.formats.deepspeed import stays
from memcalc.convert.formats.fsdp_config import ACCELERATED, LOSS_INSIDE, PLACED, fsdp_version, read_options
from memcalc.convert.formats.trainer_writer import checkpoints_itself

_KEYS = key_table("accelerate")
_TYPES = {
    "no": "trainer", "multi_gpu": "ddp", "fsdp": "fsdp", "deepspeed": "deepspeed", "megatron_lm": "megatron",
}  # fmt: skip
"""`distributed_type`, and what runs the ranks."""
_DTYPES = {name: name for name in ("no", "fp16", "bf16", "fp8")}
_WORDS = ("distributed_type", "mixed_precision")
"""Keys whose `no` without quotes YAML takes for false, as Accelerate itself then does."""
_SIGNS = frozenset({"distributed_type", "compute_environment"})
_RANKS = {"dp_shard_size": "", "dp_replicate_size": "dp_replicate", "tp_size": "tp", "cp_size": "cp"}


def read(document: Document) -> Config:
    """Return what an Accelerate YAML says of a job."""
    data = {key: "no" if value is False and key in _WORDS else value for key, value in document.data.items()}
    reader = ConfigReader(replace(document, data=data), "accelerate", "Accelerate 1.15")
    kind = reader.one_of("distributed_type", _TYPES, "trainer")
    reader.fact("accelerated", True, "accelerate")
    _ranks(reader, kind)
    mixed = reader.one_of("mixed_precision", _DTYPES, "fp16" if reader.flag("fp16") else "no")
    if mixed == "fp8":
        reader.not_modelled({"mixed_precision": "float8 matmuls; here they count as bf16"})
        mixed = "bf16"
    if mixed != "no" or reader.has("mixed_precision"):  # a Trainer's bf16 goes before `no` (training_args.py)
        reader.set("mixed", mixed, "mixed_precision", default=mixed == "no")
    if kind == "deepspeed":
        _deepspeed(reader)
    elif kind == "fsdp":
        read_options(reader, "fsdp_config", fsdp_version(reader, "fsdp_config", 1), wraps="no_wrap")
    elif kind == "megatron":
        reader.not_modelled({"distributed_type": "Megatron-LM runs the model; give its own flags as a FILE"}, ())
    else:
        reader.set("engine", kind, "distributed_type")
    _parallelism(reader)
    _compile(reader)
    idle = tuple(f"{table}." for name, table in _TABLES.items() if name != kind)
    reader.not_counted({key: row for key, row in _KEYS.not_counted.items() if not key.startswith(idle)})
    reader.harmless(*_KEYS.harmless, *idle)
    reader.not_modelled({"fp8_config": "float8 matmuls", "megatron_lm_config": "Megatron-LM's own options"})
    return reader.finish()


_TABLES = {"deepspeed": "deepspeed_config", "fsdp": "fsdp_config"}
"""A table counts only where `distributed_type` calls for it."""


def _ranks(reader: ConfigReader, kind: str) -> None:
    """Without a distributed type one process runs, whatever `num_processes` says (launch.py, simple_launcher)."""
    ranks, nodes = reader.integer("num_processes", low=-1), reader.integer("num_machines", 1, low=1)
    if kind == "trainer":
        reader.set("gpus", 1, "distributed_type")
        return
    if ranks is not None and ranks > 0:
        reader.set("gpus", ranks, "num_processes")
        reader.set("gpus_per_node", max(ranks // (nodes or 1), 1), "num_processes")
    if reader.has("num_processes") or reader.has("num_machines"):
        reader.set("nodes", nodes, "num_machines")


def _deepspeed(reader: ConfigReader) -> None:
    """A file of its own, or a few settings of which the rest is DeepSpeed's default (DeepSpeedPlugin)."""
    table = "deepspeed_config"
    reader.set("engine", "deepspeed", "distributed_type")
    if reader.has(key := f"{table}.deepspeed_config_file"):
        reader.refer("deepspeed", key, path=reader.text(key))
        reader.harmless(*(f"{table}.{name}" for name in ("zero3_save_16bit_model", "zero3_init_flag")))
        return
    stages = {str(stage): stage for stage in range(4)}
    stage = reader.one_of(f"{table}.zero_stage", stages, 2)
    reader.set("zero", stage, f"{table}.zero_stage")
    gathers, init = (reader.flag(f"{table}.{key}", None) for key in ("zero3_save_16bit_model", "zero3_init_flag"))
    if stage == 3 and gathers is not None:
        reader.set("strategy.state_dict", "full" if gathers else "sharded", f"{table}.zero3_save_16bit_model")
    if stage == 3 and init is False:
        says = "each rank loads the whole model onto its GPU before it is sharded; counted as under zero.Init"
        reader.not_modelled({f"{table}.zero3_init_flag": says}, unless=())
    reader.set_integer("accumulation", f"{table}.gradient_accumulation_steps")
    devices = {"none": "", "cpu": "cpu", "nvme": "nvme"}
    offloads = {}
    for part, name in (("optimizer", "offload_optimizer_device"), ("params", "offload_param_device")):
        device = reader.one_of(key := f"{table}.{name}", devices, "")
        if device and not (part == "params" and stays(reader, key, stage)):
            offloads[part] = (key, device)
    if offloads:
        key, _ = next(iter(offloads.values()))
        reader.set("offload", tuple(offloads), key)
        reader.set("offload_to", "nvme" if "nvme" in {device for _, device in offloads.values()} else "cpu", key)


def _parallelism(reader: ConfigReader) -> None:
    """Degrees of a device mesh: FSDP 2's, or of DeepSpeed's Ulysses (commands/launch.py, parallelism_config.py)."""
    table = "parallelism_config"
    lead = f"{table}.{table}_"
    for name, word in _RANKS.items():
        ranks = reader.integer(f"{lead}{name}", 1, low=1)
        if word and ranks is not None and ranks > 1:
            reader.set(word, ranks, f"{lead}{name}")
    if (reader.integer(f"{lead}cp_size", 1) or 1) > 1:
        # torch.distributed.tensor.experimental: alltoall passes blocks of keys and values round a ring
        kinds = {"allgather": "allgather", "alltoall": "ring"}
        reader.set("cp_kind", reader.one_of(f"{lead}cp_comm_strategy", kinds, "allgather"), f"{lead}cp_comm_strategy")
    if (ranks := reader.integer(f"{lead}sp_size", 1, low=1) or 1) > 1:
        reader.set("cp", ranks, f"{lead}sp_size")
        reader.set("cp_kind", "a2a", f"{lead}sp_size")
    reader.harmless(f"{table}.")


def _compile(reader: ConfigReader) -> None:
    name = "dynamo_config.dynamo_backend" if reader.has("dynamo_config.dynamo_backend") else "dynamo_backend"
    backend = reader.text(name, "no").lower()
    regions = reader.flag("dynamo_config.dynamo_use_regional_compilation")
    if backend == "inductor":
        reader.set("compile", "blocks" if regions else "model", name)
    elif backend != "no":
        reader.not_modelled({name: "it is counted as running without a compiler"})


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the config that launches a job. What the YAML cannot say stands in the Trainer's arguments beside it."""
    plan = job.strategy
    engine = _engine(job)
    allowed = "Accelerate runs hf, fsdp1, fsdp2, deepspeed, and ddp on several GPUs"
    job.require(bool(engine), "framework", allowed)
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
        fields["dynamo_config.dynamo_backend"] = "INDUCTOR"
        fields["dynamo_config.dynamo_use_regional_compilation"] = plan.compile == "blocks"
    return fields | _mesh(job, engine)


def _engine(job: ConfigJob) -> str:
    plan = job.strategy
    if job.framework in {"hf", "plain"} and job.gpus == 1 and plan.zero == 0:
        return "NO"
    if job.framework == "hf":
        return "fsdp1" if plan.zero else "MULTI_GPU"
    if job.framework == "ddp" and job.gpus == 1:
        return ""
    return {"fsdp1": "fsdp1", "fsdp2": "fsdp2", "ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED"}.get(job.framework, "")


def _mixed(job: ConfigJob) -> str:
    plan = job.strategy
    dtype, _, kind = plan.precision.partition("-")
    return dtype if kind or plan.autocast else "no"


def _fsdp(job: ConfigJob, engine: str) -> dict[str, Any]:
    plan, table = job.strategy, "fsdp_config"
    fields: dict[str, Any] = {
        f"{table}.fsdp_version": int(engine[-1]),
        f"{table}.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{table}.fsdp_offload_params": "params" in plan.offload,
        f"{table}.fsdp_activation_checkpointing": plan.recompute == "full" and not checkpoints_itself(job),
    }
    job.require(plan.checkpoint != "reentrant-inside", "strategy.checkpoint", PLACED)
    if engine == "fsdp2":
        job.require(plan.reshard != "always", "strategy.reshard", LOSS_INSIDE)
        fields[f"{table}.fsdp_reshard_after_forward"] = plan.zero == 3
        fields[f"{table}.fsdp_activation_checkpointing_offload"] = True if "activations" in plan.offload else None
        return fields
    return {
        **fields,
        f"{table}.fsdp_sharding_strategy": _strategy(job),
        f"{table}.fsdp_backward_prefetch": "BACKWARD_PRE",
        f"{table}.fsdp_use_orig_params": True,
    }


def _strategy(job: ConfigJob) -> str:
    """FSDP 1's sharding strategy; the hybrid ones shard within a node."""
    plan, resharded = job.strategy, job.strategy.zero == 3
    if plan.dp_replicate == 1:
        return "FULL_SHARD" if resharded else "SHARD_GRAD_OP"
    if plan.dp_replicate == plan.dp * plan.cp and resharded:
        return "NO_SHARD"
    job.require(plan.dp_replicate == job.nodes, "dp-replicate", f"FSDP 1 has one replica per node: {job.nodes}")
    return "HYBRID_SHARD" if resharded else "HYBRID_SHARD_ZERO2"


def _zero(job: ConfigJob) -> dict[str, Any]:
    plan, table = job.strategy, "deepspeed_config"
    if job.beside:
        return {f"{table}.deepspeed_config_file": "ds_config.json", f"{table}.zero3_init_flag": plan.zero == 3}
    devices = {part: plan.offload_to if part in plan.offload else "none" for part in ("optimizer", "params")}
    return {
        f"{table}.zero_stage": plan.zero,
        f"{table}.gradient_accumulation_steps": job.accumulation,
        f"{table}.offload_optimizer_device": devices["optimizer"],
        f"{table}.offload_param_device": devices["params"],
        f"{table}.zero3_init_flag": plan.zero == 3,
    }


def _mesh(job: ConfigJob, engine: str) -> dict[str, Any]:
    plan, lead = job.strategy, "parallelism_config.parallelism_config_"
    replicas = plan.dp_replicate
    if engine == "DEEPSPEED" and plan.cp > 1:
        job.require(plan.cp_kind == "a2a", "cp-kind", "Accelerate's DeepSpeed exchanges the sequence for heads: a2a")
        return {f"{lead}sp_size": plan.cp, f"{lead}sp_backend": "deepspeed"}
    if plan.tp == 1 and plan.cp == 1 and (replicas == 1 or engine == "fsdp1"):
        return {}
    fields: dict[str, Any] = {
        f"{lead}dp_replicate_size": replicas if replicas > 1 else None,
        f"{lead}dp_shard_size": plan.dp // replicas,
        f"{lead}tp_size": plan.tp,
        f"{lead}cp_size": plan.cp,
    }
    if plan.cp > 1:
        job.require(plan.cp_kind != "a2a", "cp-kind", "Accelerate has allgather and ring")
        fields[f"{lead}cp_comm_strategy"] = {"allgather": "allgather", "ring": "alltoall"}[plan.cp_kind]
    return fields


FORMAT = Format(
    "accelerate", "Accelerate YAML", "Accelerate 1.15",
    lambda document: document.kind in {"yaml", "json"} and bool(_SIGNS & set(document.data)),
    read, write, kind="yaml", filename="accelerate.yaml", beside=("trainer",),
    decided=(*ACCELERATED, "framework", "wide_embedding_moments"), launched=True,
    adds={"parallel": ("cp", "hsdp"), "zero": ("2",)},
    choices={
        "zero": (0, 1, 2, 3), "offload": ("none", "optimizer", "optimizer,params", "params"), "compile": ("blocks",),
    },
)  # fmt: skip
"""The launcher's file: what runs the ranks, and in which precision."""
