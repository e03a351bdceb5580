"""torchtitan's TOML, as 0.2.2 reads it, the last release that does (config/job_config.py), and as earlier ones did.

Its overrides, such as ``--training.local_batch_size 4``, are the same keys as flags. Which month's torchtitan takes a
file follows from keys that were removed later (:mod:`memcalc.convert.formats.torchtitan_keys`); what follows from the
settings was read in distributed/pipeline_parallel.py, models/llama3/infra/parallelize.py, components/loss.py and
distributed/activation_checkpoint.py of 0.2.2, and in their ancestors at 9dec370 of December 2024.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import ConfigJob, Format
from memcalc.convert.formats.torchtitan_keys import (
    CURRENT,
    FLEXIBLE,
    KEYS,
    batch_fields,
    degree,
    flavor_of,
    key_of,
    model_of,
    of_idle_converters,
    overrides,
    set_batch,
    set_pipeline,
    spelling,
    until,
)
from memcalc.convert.objectives import refuse_pictures
from memcalc.errors import ObjectiveError
from memcalc.frameworks.fsdp import TORCHTITAN

_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_FLOAT8 = ("float8", "quantize.linear.float8", "quantize.dense.float8")
_MX = ("mx", "quantize.linear.mx", "quantize.dense.mx")
_DISPATCHERS = {"standard": "alltoall", "deepep": "deepep", "hybridep": "deepep"}
_PIPELINED = _SIMPLE = ("llama3", "deepseek_v3")
"""Models that a pipeline takes, and those that SimpleFSDP's experiment has."""
_FLEX_ALONE = FLEXIBLE | {"gpt_oss"}
"""Models whose every flavor runs FlexAttention, which has no context parallelism."""
_VOCABULARIES = ("training.vocab_size", "model.vocab_size")
"""Keys of forks: in torchtitan itself the tokenizer says how many rows the embedding has (train.py)."""
_IMPLEMENTATION = "2025-02-24"
"""Until then ``optimizer.fused`` was off by default; since, the implementation is fused."""
_LOSS_COMPILED, _LOSS_NOT_COMPILED, _LOSS_COMPILED_AGAIN = "2024-10-22", "2024-12-18", "2025-04-02"
"""``training.compile`` took in the loss (e10cb9494), then not (e8977b007), then again (bbb1b616e)."""


def read(document: Document) -> Config:
    """Return what a torchtitan TOML says of a job, or flags of its command over the file that they name."""
    if document.kind == "flags":
        document = overrides(document)
        reader = ConfigReader(document, "torchtitan", "torchtitan 0.2.2")
        named = reader.text("job.config_file")
        if named:
            reader.refer("torchtitan", "job.config_file", path=named, over=document)
            return Config(document, "torchtitan", (), (), tuple(reader.references))
    reader = ConfigReader(document, "torchtitan", "torchtitan 0.2.2")
    day, decisive = until(document)  # the last day on which torchtitan took all keys; its month is the era
    reader.set("framework", f"torchtitan@{day[:7]}", decisive or "job")
    _model(reader)
    _precision(reader)
    _optimizer(reader, day)
    _parallelism(reader)
    set_batch(reader)
    set_pipeline(reader, day)
    _recompute(reader)
    _compile(reader, day)
    _validation(reader)
    _checkpointing(reader)
    idle = of_idle_converters(reader)
    reader.harmless(*idle)
    reader.not_counted({key: row for key, row in KEYS.not_counted.items() if key not in idle})
    unmodelled = {key: says for key, says in KEYS.not_modelled.items() if key not in idle}
    reader.not_modelled(unmodelled, unless=(False, None, "", "none", "default", "standard", "causal"))
    reader.harmless(*KEYS.harmless)
    return reader.finish(known=CURRENT)


def _model(reader: ConfigReader) -> None:
    if reader.has("model.config"):
        raise ObjectiveError(
            f"{reader.document.path.name} is a config of flame (model.config), whose models are those of flash-linear-"
            "attention: give memcalc estimate what it trains."
        )
    if not reader.has("model.name") and not reader.has("model.flavor"):
        reader.ask(
            "model", "model.flavor", "debugmodel", "is not said, and torchtitan's default is a model to debug it"
        )
        return
    name, flavor = reader.text("model.name", "llama3"), reader.text("model.flavor", "debugmodel")
    refuse_pictures(reader.document.path.name, name)
    plain = name.removeprefix("simple_fsdp.")
    if plain != name:
        reader.set("strategy.fsdp_schedule", "simple", "model.name")
    sized = next((key for key in _VOCABULARIES if reader.has(key)), "")
    if sized:
        says = f"gives {name} {flavor} another vocabulary, in a fork of torchtitan: it is a model of its own"
        reader.ask("model", sized, reader.text(sized), says)
    else:
        reader.set("model", model_of(plain, flavor), "model.flavor")
    if reader.text("model.norm_type", "rmsnorm") not in {"rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"}:
        reader.not_modelled({"model.norm_type": "the norms of the preset are counted"})
    if plain in FLEXIBLE or "flex" in flavor or "varlen" in flavor:
        says = "its flavor runs FlexAttention or variable lengths, which are counted as flash attention"
        reader.note("warning", "MC002", "model.flavor", f"model.flavor {flavor} changes memory: {says}")


def _precision(reader: ConfigReader) -> None:
    """Shards in fp32 computed in 16 bits; with ``training.dtype`` bfloat16 everything is 16-bit."""
    dtype = reader.one_of("training.dtype", _DTYPES, "fp32")
    narrow = reader.one_of("training.mixed_precision_param", _DTYPES, "bf16")
    reduced = reader.one_of("training.mixed_precision_reduce", _DTYPES, "fp32")
    converters = reader.items("model.converters")
    old = "float8.enable_float8_linear"
    eight = next((name for name in converters if name in _FLOAT8), "") or (old if reader.flag(old) else "")
    mx = next((name for name in converters if name in _MX), "")
    key = "model.converters" if converters else old if reader.flag(old) else "training.mixed_precision_param"
    if eight or mx:
        recipe = key_of(reader, "quantize.linear.float8.recipe_name")
        scaling = reader.one_of(recipe, {name: name for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")})
        gather = key_of(reader, "quantize.linear.float8.enable_fsdp_float8_all_gather")
        reader.set("precision", "fp8-mixed", key)
        reader.set("strategy.float8", "mxfp8" if mx else scaling or "tensorwise", key if mx else recipe)
        if reader.flag(gather) and not mx:
            reader.set("strategy.float8_all_gather", True, gather)
        emulate = key_of(reader, "quantize.linear.float8.emulate")
        reader.not_modelled({emulate: "float8 products are computed in 16 bits"})
        if dtype == "bf16":
            reader.not_modelled({"training.dtype": "float8 products over 16-bit weights are counted over fp32 ones"})
    elif dtype == "bf16":
        reader.set("precision", "bf16", "training.dtype")
    else:
        reader.set("precision", "fp32" if narrow == "fp32" else "bf16-mixed", "training.mixed_precision_param")
    reader.set("strategy.reduce_dtype", reduced, "training.mixed_precision_reduce")
    if others := [name for name in converters if name not in (*_FLOAT8, *_MX)]:
        message = f"model.converters changes memory: the converter {others[0]} is not modelled"
        reader.note("warning", "MC002", "model.converters", message)
    reader.harmless("quantize.linear.", "quantize.dense.", "float8.enable_fsdp_float8_all_gather", "float8.emulate",
                     "float8.recipe_name")  # fmt: skip


def _optimizer(reader: ConfigReader, day: str) -> None:
    optimizer = reader.one_of("optimizer.name", {"AdamW": "adamw", "Adam": "adamw"}, "adamw")
    reader.set("optimizer", optimizer, "optimizer.name")
    if reader.has("optimizer.fused") or day <= _IMPLEMENTATION:
        key, kernels = "optimizer.fused", "fused" if reader.flag("optimizer.fused") else "foreach"
    else:
        key, names = "optimizer.implementation", {"for-loop": "loop", "foreach": "foreach", "fused": "fused"}
        kernels = reader.one_of(key, names, "fused")
    reader.set("optimizer_impl", kernels, key)
    if reader.flag(key := "optimizer.early_step_in_backward"):
        reader.set("optimizer_in_backward", True, key)
    if reader.flag(key := "training.enable_cpu_offload"):
        reader.set("offload", ("optimizer", "params"), key)


def _parallelism(reader: ConfigReader) -> None:
    degrees = {}
    for word, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        key, degrees[word] = degree(reader, f"parallelism.{name}_parallel_degree")
        reader.set(word, degrees[word], key)
    tp_key = key_of(reader, "parallelism.tensor_parallel_degree")
    off = key_of(reader, "parallelism.disable_loss_parallel")
    unsharded = reader.flag(off) or reader.flag("training.enable_loss_parallel", True) is False
    loss = TORCHTITAN.tensor_loss if degrees["tp"] > 1 and not unsharded else TORCHTITAN.loss
    reader.set("loss", loss, off if reader.has(off) else tp_key)
    if degrees["tp"] > 1:
        reader.set("sp", True, tp_key)
    parts = key_of(reader, "parallelism.enable_async_tensor_parallel")
    if reader.flag(parts) and degrees["tp"] > 1:
        reader.set("tp_comm_overlap", True, parts)
    reader.not_modelled({parts: "products and messages run in parts, in symmetric memory of their own"})
    ring = key_of(reader, "parallelism.context_parallel_rotate_method")
    kind = reader.one_of(ring, {"allgather": "allgather", "alltoall": "ring"}, TORCHTITAN.cp_kind)
    if degrees["cp"] > 1:
        reader.set("cp_kind", kind, ring)
    expert = reader.integer("parallelism.expert_parallel_degree", 1, low=1) or 1
    reader.set("ep", expert, "parallelism.expert_parallel_degree")
    part = reader.integer("parallelism.expert_tensor_parallel_degree", 1, low=1)
    if expert > 1:
        reader.set("strategy.etp", part, "parallelism.expert_tensor_parallel_degree")
        backend = "parallelism.expert_parallel_comm_backend"
        reader.set("moe_dispatcher", reader.one_of(backend, _DISPATCHERS, "alltoall"), backend)
        if reader.flag(balanced := key_of(reader, "debug.moe_force_load_balance")):
            reader.set("expert_imbalance", 1.0, balanced)
    _sharding(reader, degrees)


def _sharding(reader: ConfigReader, degrees: dict[str, int]) -> None:
    """FSDP shards over ``data_parallel_shard_degree`` times CP; -1 is what the other degrees leave."""
    key = key_of(reader, "parallelism.fsdp_reshard_after_forward")
    policy = reader.one_of(key, {name: name for name in ("default", "always", "never")}, "default")
    unsharded = policy == "never" or (policy == "default" and degrees["pp"] > 1)
    why = key if reader.has(key) else key_of(reader, "parallelism.pipeline_parallel_degree") if unsharded else key
    reader.set("zero", 2 if unsharded else 3, why)
    reader.set("strategy.reshard", policy, key)
    shard_key = key_of(reader, "parallelism.data_parallel_shard_degree")
    shards = reader.number(shard_key, -1)
    if shards is None or shards != int(shards) or (shards < 1 and shards != -1):
        raise reader.error(shard_key, reader.raw(shard_key), "must be -1 or a whole number from 1")
    copies_key, copies = degree(reader, "parallelism.data_parallel_replicate_degree")
    if shards > 0:
        gpus = int(shards) * copies * degrees["tp"] * degrees["pp"] * degrees["cp"]
        reader.set("gpus", gpus, shard_key)
    if copies > 1 and shards == 1 and degrees["cp"] == 1:
        says = "weights are whole on each rank; counted as sharded over all data-parallel ranks, which is less"
        reader.note("warning", "MC002", copies_key, f"{copies_key} {copies} changes memory but is not counted: {says}")
    elif copies > 1:
        reader.set("dp_replicate", copies, copies_key)
    kind = reader.text("training.data_parallel_type", "fsdp")
    if kind != "fsdp":
        reader.not_modelled({"training.data_parallel_type": "weights are whole on every rank; counted as FSDP"})


def _recompute(reader: ConfigReader) -> None:
    key = "activation_checkpoint.mode"
    mode = reader.one_of(key, {name: name for name in ("selective", "full", "none", "memory_budget")}, "selective")
    option = reader.text("activation_checkpoint.selective_ac_option", TORCHTITAN.recompute.removeprefix("every-"))
    if reader.has("training.enable_selective_ac"):  # one flag, until March 2024
        key = "training.enable_selective_ac"
        mode = "selective" if reader.flag(key) else "full"
    if mode == "memory_budget":
        says = "the compiler decides what is kept; counted as everything"
        reader.note("warning", "MC002", key, f"{key} memory_budget changes memory but is not counted: {says}")
    if mode == "selective" and option != "op":
        if not option.isdecimal():
            raise reader.error("activation_checkpoint.selective_ac_option", option, "must be op or a whole number")
        policy = f"every-{option}" if int(option) else "full"
    else:
        policy = {"selective": "selective-ops", "full": "full"}.get(mode, "none")
    reader.set("recompute", policy, "activation_checkpoint.selective_ac_option" if mode == "selective" else key)


def _compile(reader: ConfigReader, day: str) -> None:
    """What ``components`` names; before it was there blocks, and the loss in some months."""
    key = key_of(reader, "compile.enable")
    parts = set(map(str, reader.items("compile.components"))) or {"model", "loss"}
    if key != "compile.enable":
        loss = _LOSS_COMPILED < day <= _LOSS_NOT_COMPILED or day > _LOSS_COMPILED_AGAIN
        parts = {"model", "loss"} if loss else {"model"}
    if not reader.flag(key):
        parts = set()
    names = {"model": "blocks", "loss": "loss"}
    compiled = "+".join(name for part, name in names.items() if part in parts) or "none"
    simple = any(setting.name == "strategy.fsdp_schedule" for setting in reader.settings)
    reader.set("compile", "model" if simple and "model" in parts else compiled, key)


def _validation(reader: ConfigReader) -> None:
    key = "validation.enable" if reader.has("validation.enable") else "validation.enabled"
    if reader.flag(key):
        reader.set("evaluates", True, key)
        reader.set_integer("eval_micro_batch", "validation.local_batch_size", 8)
        length, trained = reader.integer("validation.seq_len", 2048), reader.integer("training.seq_len", 2048)
        if length != trained:
            says = f"validation has sequences of {length} tokens; it is counted with those of training, {trained}"
            reader.note("warning", "MC002", "validation.seq_len", says, f"validation.seq_len {trained}")


def _checkpointing(reader: ConfigReader) -> None:
    """DCP writes what each rank has (components/checkpoint.py)."""
    key = "checkpoint.enable" if reader.has("checkpoint.enable") else "checkpoint.enable_checkpoint"
    if reader.flag(key):
        reader.set("strategy.state_dict", "sharded", key)
        says = "a copy of the shards on the host, pinned or not, while they are written"
        reader.not_modelled({"checkpoint.async_mode": says}, unless=(None, "", "disabled"))


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the keys of 0.2.2 that run a job."""
    plan = job.strategy
    job.require(job.framework == "torchtitan", "framework", "torchtitan TOML is for --framework torchtitan")
    named = flavor_of(job.model)
    job.require(named is not None, "model", "torchtitan 0.2.2 has no flavor of these sizes")
    name, flavor = named or ("", "")
    simple = plan.fsdp_schedule == "simple"
    _require_started(job, name)
    return {
        "model.name": f"simple_fsdp.{name}" if simple else name,
        "model.flavor": flavor,
        **_optimizer_fields(job),
        "training.seq_len": job.seq_len,
        **_precision_fields(job),
        # FSDP's policy takes weights, gradients and optimizer states to the host together
        "training.enable_cpu_offload": True if plan.offload else None,
        **_parallel_fields(job),
        **_recompute_fields(job),
        "compile.enable": plan.compile != "none",
        "compile.components": _components(job),
    }


def _require_started(job: ConfigJob, name: str) -> None:
    """Refuse what 0.2.2 does not start or starts otherwise.

    models/*/__init__.py (``pipelining_fn``), models/*/model/args.py (CP), experiments/__init__.py (SimpleFSDP),
    distributed/utils.py (``maybe_enable_amp``).
    """
    plan = job.strategy
    job.require(plan.pp == 1 or name in _PIPELINED, "pp", f"torchtitan 0.2.2 has no pipeline of {name}: --pp 1")
    job.require(plan.cp == 1 or name not in _FLEX_ALONE, "cp", f"torchtitan 0.2.2 splits no sequence of {name}: --cp 1")
    simple = plan.fsdp_schedule != "simple" or name in _SIMPLE
    job.require(simple, "strategy.fsdp_schedule", f"torchtitan 0.2.2 has SimpleFSDP of {', '.join(_SIMPLE)} alone")
    sharded = plan.dp * plan.cp > 1
    alone = "by FSDP alone, which needs two data-parallel ranks"
    job.require(sharded or not plan.offload, "offload", f"torchtitan offloads {alone}: drop --offload")
    single = plan.tp * plan.pp == 1 and plan.precision == "bf16-autocast"  # the amp of one GPU
    even = sharded or single or plan.precision in ("bf16", "fp32")
    job.require(even, "precision", f"torchtitan mixes precision {alone}: --precision bf16 or fp32")


def _optimizer_fields(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    return {
        "optimizer.name": "AdamW",
        "optimizer.implementation": "for-loop" if plan.optimizer_impl == "loop" else plan.optimizer_impl,
        "optimizer.early_step_in_backward": plan.optimizer_in_backward or None,
    }


def _precision_fields(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    eight, mx = plan.precision == "fp8-mixed", plan.float8 == "mxfp8"
    recipe = plan.float8 if eight and plan.float8 not in ("", "tensorwise", "mxfp8") else None
    gather = plan.float8_all_gather
    job.require(not (gather and recipe), "strategy.float8_all_gather", "torchtitan has it under tensorwise scaling")
    return {
        "model.converters": [f"quantize.linear.{'mx' if mx else 'float8'}"] if eight else None,
        "training.dtype": "bfloat16" if plan.precision == "bf16" else "float32",
        "training.mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
        "quantize.linear.float8.recipe_name": recipe,
        "quantize.linear.float8.enable_fsdp_float8_all_gather": gather or None,
    }


def _parallel_fields(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    job.require(plan.loss != "parallel" or plan.tp > 1, "loss", "needs tp above 1")
    job.require(plan.cp == 1 or plan.cp_kind != "a2a", "cp-kind", "torchtitan has ring and allgather")
    unsplit = plan.moe_dispatcher != "deepep" or (plan.etp or plan.tp) == 1
    job.require(unsplit, "moe-dispatcher", "torchtitan runs DeepEP over experts that TP does not split: strategy.etp 1")
    usual = plan.zero != 2 or plan.pp > 1
    policy = plan.reshard if plan.reshard != "default" else "default" if usual else "never"
    job.require(plan.zero == 3 or policy != "always", "zero", "always resharding is --zero 3")
    policy = "always" if plan.zero == 3 and plan.pp > 1 and policy == "default" else policy
    rotation, prefix = "alltoall" if plan.cp_kind == "ring" else "allgather", "parallelism"
    return {
        f"{prefix}.data_parallel_shard_degree": plan.dp // plan.dp_replicate,
        f"{prefix}.data_parallel_replicate_degree": plan.dp_replicate if plan.dp_replicate > 1 else None,
        f"{prefix}.fsdp_reshard_after_forward": policy,
        f"{prefix}.tensor_parallel_degree": plan.tp,
        f"{prefix}.pipeline_parallel_degree": plan.pp,
        f"{prefix}.context_parallel_degree": plan.cp,
        f"{prefix}.disable_loss_parallel": True if plan.tp > 1 and plan.loss == "standard" else None,
        f"{prefix}.context_parallel_rotate_method": rotation if plan.cp > 1 else None,
        f"{prefix}.enable_async_tensor_parallel": plan.tp_comm_overlap or None,
        f"{prefix}.expert_parallel_degree": plan.ep,
        f"{prefix}.expert_parallel_comm_backend": "deepep" if plan.moe_dispatcher == "deepep" else None,
        f"{prefix}.expert_tensor_parallel_degree": (plan.etp or plan.tp) if plan.ep > 1 else None,
        **batch_fields(job),
    }


def _recompute_fields(job: ConfigJob) -> dict[str, Any]:
    policy = job.strategy.recompute
    if policy in ("none", "full"):
        return {"activation_checkpoint.mode": policy}
    option = "op" if policy == "selective-ops" else policy.removeprefix("every-")
    return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": option}


def _components(job: ConfigJob) -> list[str] | None:
    named = {"blocks": ["model"], "loss": ["loss"], "blocks+loss": ["model", "loss"], "model": ["model"]}
    return named.get(job.strategy.compile)


def _recognise(document: Document) -> bool:
    table = document.kind == "toml" and bool({"model", "parallelism", "job"} & set(document.data))
    return table and isinstance(document.data.get("training"), dict)


FORMAT = Format(
    "torchtitan", "torchtitan TOML", "torchtitan 0.2.2", _recognise, read, write,
    kind="toml", filename="train.toml", spelling=spelling, era="torchtitan@2026-02", decided=("framework", "reshard"),
    choices={
        "micro_batch": (), "recompute": ("none", "selective-ops", "full"), "zero": (2, 3),
        "offload": ("none", "optimizer,params"), "compile": ("blocks",),
    },
)  # fmt: skip
"""The job's own TOML; flags of the command have their way over it."""
