"""torchtitan's TOML, as 0.2.2 reads it, the last release that does (config/job_config.py), and as earlier ones did.

Its overrides, such as ``--training.local_batch_size 4``, are the same keys as flags. Which month's torchtitan takes a
file follows from keys that were removed later (:mod:`memcalc.convert.formats.torchtitan_keys`); what follows from the
settings was read in distributed/pipeline_parallel.py, models/llama3/infra/parallelize.py, components/loss.py and
distributed/activation_checkpoint.py of 0.2.2, and in their ancestors at 9dec370 of December 2024.
"""

from __future__ import annotations

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.torchtitan_batch import degree, key_of, say_batch, say_pipeline
from memcalc.convert.formats.torchtitan_keys import KEYS, spelling, until
from memcalc.convert.formats.torchtitan_models import FLEXIBLE, model_of
from memcalc.convert.formats.torchtitan_write import write

_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_FLOAT8 = ("float8", "quantize.linear.float8", "quantize.dense.float8")
_MX = ("mx", "quantize.linear.mx", "quantize.dense.mx")
_IMPLEMENTATION = "2025-02-24"
"""Until then ``optimizer.fused`` was off by default; since, the implementation is fused."""
_LOSS_COMPILED, _LOSS_NOT_COMPILED, _LOSS_COMPILED_AGAIN = "2024-10-22", "2024-12-18", "2025-04-02"
"""``training.compile`` took in the loss (e10cb9494), then not (e8977b007), then again (bbb1b616e)."""
_HARMLESS = (
    "job.", "profiling.", "metrics.", "lr_scheduler.", "checkpoint.", "comm.", "memory_estimation.", "debug.",
    "validation.", "model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion",
    "training.dataset", "training.dataset_path", "training.dataloader.", "training.max_norm", "training.steps",
    "training.gc_freq", "training.gc_debug", "training.warmup_steps", "training.warmup_pct", "training.seed",
    "training.deterministic", "training.debug_moe_force_load_balance", "training.checkpoint_folder",
    "training.checkpoint_interval", "training.checkpoint_interval_type", "optimizer.lr", "optimizer.beta1",
    "optimizer.beta2", "optimizer.eps", "optimizer.weight_decay", "activation_checkpoint.early_stop",
    "activation_checkpoint.preserve_rng_state", "activation_checkpoint.determinism_check",
    "activation_checkpoint.debug", "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "activation_checkpoint.visualize_memory_budget_pareto", "activation_checkpoint.memory_budget", "compile.backend",
    "quantize.linear.float8.filter_fqns", "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    "quantize.dense.float8.filter_fqns", "quantize.dense.float8.precompute_float8_dynamic_scale_for_fsdp",
    "float8.filter_fqns", "float8.precompute_float8_dynamic_scale_for_fsdp", "float8.scaling_type_input",
    "float8.scaling_type_weight", "float8.scaling_type_grad_output", "quantize.linear.mx.", "quantize.dense.mx.", "mx.",
    "quantize.grouped_mm.mx.recipe_name", "parallelism.context_parallel_load_balancer",
    "parallelism.pipeline_parallel_expert_parallel_overlap", "fault_tolerance.", "experimental.custom_import",
    "experimental.custom_model_path",
)  # fmt: skip
_NOT_MODELLED = {
    "fault_tolerance.enable": "replicas keep buffers of their own (TorchFT)",
    "comm.mode": "communication is simulated",
    "parallelism.expert_parallel_comm_backend": "DeepEP has communication buffers of its own",
    "parallelism.pipeline_parallel_schedule_csv": "the schedule is read from a file",
    "parallelism.module_fqns_per_model_part": "blocks are shared out over stages by name",
    "parallelism.enable_compiled_autograd": "the backward is compiled as a whole",
    "quantize.grouped_mm.float8.fqns": "experts are computed in float8",
    "quantize.grouped_mm.mx.fqns": "experts are computed in MXFP8",
    "quantize.moe.float8.fqns": "experts are computed in float8",
    "quantize.moe.mx.fqns": "experts are computed in MXFP8",
    "float8.moe_fqns_prototype": "experts are computed in float8",
    "mx.moe_fqns_prototype": "experts are computed in MXFP8",
    "float8.force_recompute_fp8_weight_in_bwd": "float8 weights are made again in backward",
    "job.custom_config_module": "the settings are extended by a module",
    "experimental.custom_args_module": "the settings are extended by a module",
    "model.use_flex_attn": "FlexAttention is counted as flash attention",
    "model.attn_mask_type": "FlexAttention is counted as flash attention",
}


def read(document: Document) -> Config:
    """Return what a torchtitan TOML says of a job, or flags of its command over the file that they name."""
    if document.kind == "flags":
        document = _plain_flags(document)
        reading = Reading(document, "torchtitan", "torchtitan 0.2.2")
        named = reading.text("job.config_file")
        if named:
            reading.refer("torchtitan", "job.config_file", path=named, over=document)
            return Config(document, "torchtitan", (), (), tuple(reading.references))
    reading = Reading(document, "torchtitan", "torchtitan 0.2.2")
    day = _era(reading)
    _model(reading)
    _precision(reading)
    _optimizer(reading, day)
    _parallelism(reading)
    say_batch(reading)
    say_pipeline(reading, day)
    _recompute(reading)
    _compile(reading, day)
    _validation(reading)
    reading.not_modelled(_NOT_MODELLED, unless=(False, None, "", "none", "default", "standard", "causal"))
    reading.harmless(*_HARMLESS)
    return reading.finish(known=KEYS)


def _plain_flags(document: Document) -> Document:
    """``--compile.no-enable`` is ``compile.enable`` false (tyro's form of a truth value)."""
    from dataclasses import replace

    data = {
        table: {
            (name.removeprefix("no_") if name.startswith("no_") and value is True else name): (
                False if name.startswith("no_") and value is True else value
            )
            for name, value in inner.items()
        }
        if isinstance(inner, dict)
        else inner
        for table, inner in document.data.items()
    }
    return replace(document, data=data)


def _era(reading: Reading) -> str:
    """The last day on which torchtitan took all keys of the file; its month is the era."""
    day, key = until(reading.document)
    reading.say("framework", f"torchtitan@{day[:7]}", key or "job")
    return day


def _model(reading: Reading) -> None:
    name, flavor = reading.text("model.name", "llama3"), reading.text("model.flavor", "debugmodel")
    simple = name.startswith("simple_fsdp.")
    plain = name.removeprefix("simple_fsdp.")
    if simple:
        reading.say("strategy.fsdp_schedule", "simple", "model.name")
    reading.say("model", model_of(plain, flavor), "model.flavor")
    if reading.text("model.norm_type", "rmsnorm") not in {"rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"}:
        reading.not_modelled({"model.norm_type": "the norms of the preset are counted"})
    if plain in FLEXIBLE or "flex" in flavor or "varlen" in flavor:
        says = "its flavor runs FlexAttention or variable lengths, which are counted as flash attention"
        reading.note("warning", "MC002", "model.flavor", f"model.flavor {flavor} changes memory: {says}")


def _precision(reading: Reading) -> None:
    """Shards in fp32 computed in 16 bits; with ``training.dtype`` bfloat16 everything is 16-bit."""
    whole = reading.one_of("training.dtype", _DTYPES, "fp32")
    narrow = reading.one_of("training.mixed_precision_param", _DTYPES, "bf16")
    reduced = reading.one_of("training.mixed_precision_reduce", {"float32": "fp32", "bfloat16": "bf16"}, "fp32")
    converters = reading.items("model.converters")
    old = "float8.enable_float8_linear"
    eight = next((name for name in converters if name in _FLOAT8), "") or (old if reading.flag(old) else "")
    mx = next((name for name in converters if name in _MX), "")
    key = "model.converters" if converters else old if reading.flag(old) else "training.mixed_precision_param"
    if eight or mx:
        recipe = key_of(reading, "quantize.linear.float8.recipe_name")
        scaling = reading.one_of(recipe, {name: name for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")})
        gather = key_of(reading, "quantize.linear.float8.enable_fsdp_float8_all_gather")
        reading.say("precision", "fp8-mixed", key)
        reading.say("strategy.float8", "mxfp8" if mx else scaling or "tensorwise", key if mx else recipe)
        if reading.flag(gather) and not mx:
            reading.say("strategy.float8_all_gather", True, gather)
        emulate = key_of(reading, "quantize.linear.float8.emulate")
        reading.not_modelled({emulate: "float8 products are computed in 16 bits"})
    elif whole == "bf16":
        reading.say("precision", "bf16", "training.dtype")
    else:
        reading.say("precision", "fp32" if narrow == "fp32" else "bf16-mixed", "training.mixed_precision_param")
    if whole == "bf16" and (eight or mx):
        reading.not_modelled({"training.dtype": "float8 products over 16-bit weights are counted over fp32 ones"})
    reading.say("strategy.reduce_dtype", reduced, "training.mixed_precision_reduce")
    others = [name for name in converters if name not in (*_FLOAT8, *_MX)]
    if others:
        says = f"the converter {others[0]} is not modelled"
        reading.note("warning", "MC002", "model.converters", f"model.converters changes memory: {says}")
    reading.harmless("quantize.linear.", "quantize.dense.", "float8.enable_fsdp_float8_all_gather", "float8.emulate",
                     "float8.recipe_name")  # fmt: skip


def _optimizer(reading: Reading, day: str) -> None:
    reading.say(
        "optimizer", reading.one_of("optimizer.name", {"AdamW": "adamw", "Adam": "adamw"}, "adamw"), "optimizer.name"
    )
    names = {"for-loop": "loop", "foreach": "foreach", "fused": "fused"}
    if reading.has("optimizer.fused") or day <= _IMPLEMENTATION:
        way = "fused" if reading.flag("optimizer.fused") else "foreach"
        reading.say("optimizer_impl", way, "optimizer.fused")
    else:
        reading.say(
            "optimizer_impl", reading.one_of("optimizer.implementation", names, "fused"), "optimizer.implementation"
        )
    if reading.flag("optimizer.early_step_in_backward"):
        reading.say("optimizer_in_backward", True, "optimizer.early_step_in_backward")
    if reading.flag("training.enable_cpu_offload"):
        reading.say("offload", ("optimizer", "params"), "training.enable_cpu_offload")


def _parallelism(reading: Reading) -> None:
    degrees = {}
    for word, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        key, degrees[word] = degree(reading, f"parallelism.{name}_parallel_degree")
        reading.say(word, degrees[word], key)
    tp_key = key_of(reading, "parallelism.tensor_parallel_degree")
    off = key_of(reading, "parallelism.disable_loss_parallel")
    whole = reading.flag(off) or reading.flag("training.enable_loss_parallel", True) is False
    reading.say(
        "loss", "parallel" if degrees["tp"] > 1 and not whole else "standard", off if reading.has(off) else tp_key
    )
    if degrees["tp"] > 1:
        reading.say("sp", True, tp_key)
    wait = key_of(reading, "parallelism.enable_async_tensor_parallel")
    if reading.flag(wait):
        reading.say("strategy.async_tp", True, wait)
    ring = key_of(reading, "parallelism.context_parallel_rotate_method")
    kind = reading.one_of(ring, {"allgather": "allgather", "alltoall": "ring"}, "allgather")
    if degrees["cp"] > 1:
        reading.say("cp_kind", kind, ring)
    expert = reading.whole("parallelism.expert_parallel_degree", 1, low=1) or 1
    reading.say("ep", expert, "parallelism.expert_parallel_degree")
    part = reading.whole("parallelism.expert_tensor_parallel_degree", 1, low=1)
    if expert > 1:
        reading.say("strategy.etp", part, "parallelism.expert_tensor_parallel_degree")
    _sharding(reading, degrees)


def _sharding(reading: Reading, degrees: dict[str, int]) -> None:
    """FSDP shards over ``data_parallel_shard_degree`` times CP; -1 is what the other degrees leave."""
    key = key_of(reading, "parallelism.fsdp_reshard_after_forward")
    policy = reading.one_of(key, {name: name for name in ("default", "always", "never")}, "default")
    kept = policy == "never" or (policy == "default" and degrees["pp"] > 1)
    why = key if reading.has(key) else key_of(reading, "parallelism.pipeline_parallel_degree") if kept else key
    reading.say("zero", 2 if kept else 3, why)
    reading.say("strategy.reshard", policy, key)
    shard_key = key_of(reading, "parallelism.data_parallel_shard_degree")
    shards = reading.number(shard_key, -1)
    if shards is None or shards != int(shards) or (shards < 1 and shards != -1):
        raise reading.wrong(shard_key, reading.raw(shard_key), "must be -1 or a whole number from 1")
    copies_key, copies = degree(reading, "parallelism.data_parallel_replicate_degree")
    if shards > 0:
        gpus = int(shards) * copies * degrees["tp"] * degrees["pp"] * degrees["cp"]
        reading.say("gpus", gpus, shard_key)
    if copies > 1:
        less = "counted as sharded over all data-parallel ranks, which is less"
        says = f"weights are whole on each rank; {less}" if shards == 1 else f"shards are kept {copies} times; {less}"
        reading.note(
            "warning", "MC002", copies_key, f"{copies_key} {copies} changes memory and is not modelled: {says}"
        )
    kind = reading.text("training.data_parallel_type", "fsdp")
    if kind != "fsdp":
        reading.not_modelled({"training.data_parallel_type": "weights are whole on every rank; counted as FSDP"})


def _recompute(reading: Reading) -> None:
    key = "activation_checkpoint.mode"
    mode = reading.one_of(key, {name: name for name in ("selective", "full", "none", "memory_budget")}, "selective")
    option = reading.text("activation_checkpoint.selective_ac_option", "2")
    if reading.has("training.enable_selective_ac"):  # one flag, until March 2024
        key = "training.enable_selective_ac"
        mode = "selective" if reading.flag(key) else "full"
    if mode == "memory_budget":
        says = "the compiler decides what is kept; counted as everything"
        reading.note("warning", "MC002", key, f"{key} memory_budget changes memory and is not modelled: {says}")
    if mode == "selective" and option != "op":
        if not option.isdecimal():
            raise reading.wrong("activation_checkpoint.selective_ac_option", option, "must be op or a whole number")
        policy = f"every-{option}" if int(option) else "full"
        reading.say("recompute", policy, "activation_checkpoint.selective_ac_option")
        return
    policy = {"selective": "selective-ops", "full": "full"}.get(mode, "none")
    reading.say("recompute", policy, "activation_checkpoint.selective_ac_option" if mode == "selective" else key)


def _compile(reading: Reading, day: str) -> None:
    """What ``components`` names; before it was there blocks, and the loss in some months."""
    key = key_of(reading, "compile.enable")
    parts = set(map(str, reading.items("compile.components"))) or {"model", "loss"}
    if key != "compile.enable":
        loss = _LOSS_COMPILED < day <= _LOSS_NOT_COMPILED or day > _LOSS_COMPILED_AGAIN
        parts = {"model", "loss"} if loss else {"model"}
    if not reading.flag(key):
        parts = set()
    names = {frozenset({"model", "loss"}): "blocks+loss", frozenset({"model"}): "blocks", frozenset({"loss"}): "loss"}
    way = names.get(frozenset(parts & {"model", "loss"}), "none")
    simple = any(one.word == "strategy.fsdp_schedule" for one in reading.said)
    reading.say("compile", "model" if simple and "model" in parts else way, key)


def _validation(reading: Reading) -> None:
    key = "validation.enable" if reading.has("validation.enable") else "validation.enabled"
    if reading.flag(key):
        reading.say("evaluates", True, key)
        batch = reading.whole("validation.local_batch_size", 8, low=1)
        reading.say("eval_micro_batch", batch, "validation.local_batch_size")


FORMAT = Format(
    name="torchtitan",
    title="torchtitan TOML",
    software="torchtitan 0.2.2",
    recognise=lambda document: (
        document.kind == "toml"
        and bool({"model", "parallelism", "job"} & set(document.data))
        and isinstance(document.data.get("training"), dict)
    ),
    read=read,
    write=write,
    kind="toml",
    filename="train.toml",
    choices={
        "micro_batch": (),
        "recompute": ("none", "selective-ops", "full"),
        "zero": (2, 3),
        "offload": ("none", "optimizer,params"),
    },
    spelling=spelling,
)
"""The job's own TOML; flags of the command have their way over it."""
