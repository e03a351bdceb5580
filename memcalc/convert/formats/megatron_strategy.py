"""Megatron-LM's flags of a strategy, without the model: read where a mechanism has many of them, and written.

Megatron-LM at d98e8a64 (core 0.20), and the names that core 0.11 to 0.18 have for the same: 8-bit and 4-bit products
and what changes a step's time (megatron/core/transformer/transformer_config.py), gradients and optimizer states below
fp32 (megatron/training/arguments.py), checkpoints (megatron/training/checkpointing.py, config/training_config.py). What
is written is passed on by other launchers by the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.convert.formats.base import ConfigJob
from memcalc.formulas.optimizer_states import STATE_BYTES

if TYPE_CHECKING:
    from memcalc.convert.formats.megatron_flags import Flags
    from memcalc.specs.strategy import Strategy


_RECIPES = {name: name for name in ("delayed", "tensorwise", "blockwise", "mxfp8")}
_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "hybrid", "mxfp8": "e4m3"}
"""The usual format of each recipe: that of NVIDIA's own (Megatron-Bridge 05097809 ``training/mixed_precision.py``)."""

_SHARES = "reuse_grad_buf_for_mxfp8_param_ag"
"""Without it weights in MXFP8 are gathered into a buffer that stays (core/distributed/param_and_grad_buffer.py)."""


def set_float8(flags: Flags, narrow: list[str]) -> None:
    """Set what the flags say over 16-bit weights; ``narrow`` names their width."""
    formats = {name: name for name in ("e4m3", "hybrid")}
    eight, four = flags.one_of("fp8_format", formats), flags.one_of("fp4_format", {"e2m1": "e2m1"})
    gathers = [flags.on(name) for name in ("fp8_param_gather", "fp4_param_gather")]
    recipe = flags.one_of("fp8_recipe", {**_RECIPES, "custom": "custom"}, "delayed")
    custom = flags.one_of("fp4_recipe", {"nvfp4": "nvfp4", "custom": "custom"}, "nvfp4") == "custom"
    if eight and four:
        raise flags.reader.error(flags.key("fp4_format"), four, "fp8_format is given too, and Megatron-LM takes one")
    name = "fp4_format" if four else "fp8_format"
    if not (eight or four):
        if flags.on("use_precision_aware_optimizer") and recipe in _RECIPES and recipe != "delayed":
            flags.set("strategy.float8", recipe, "fp8_recipe")  # the optimizer's config has it all the same
        return
    if narrow != ["bf16"]:
        flags.warn(name, "quantized copies of weights that are not bf16; counted without them")
        return
    if custom if four else recipe == "custom":
        flags.warn("fp4_recipe" if four else "fp8_recipe", f"counted as {'nvfp4' if four else 'tensorwise'}")
    flags.set("precision", "fp8-mixed", name)
    source = "fp8_recipe" if not four and flags.has("fp8_recipe") else name
    flags.set("strategy.float8", "nvfp4" if four else _RECIPES.get(recipe, "tensorwise"), source)
    if gathers[bool(four)]:
        flags.set("strategy.float8_all_gather", True, "fp4_param_gather" if four else "fp8_param_gather")
    if flags.on("fp8_dot_product_attention"):
        flags.set("strategy.float8_attention", True, "fp8_dot_product_attention")
    shares = flags.on(_SHARES)
    if gathers[0] and recipe == "mxfp8" and not four and not shares:
        flags.warn(_SHARES, "without it what is gathered has a buffer of its own, which is not counted")


def float8_flags(plan: Strategy) -> dict[str, Any]:
    """The flags of a strategy."""
    if plan.precision != "fp8-mixed":
        return {"fp8_recipe": _RECIPES.get(plan.float8)}
    recipe, gathers = plan.float8 or "delayed", plan.float8_all_gather or None
    if recipe == "nvfp4":
        return {"fp4_format": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": gathers}
    return {
        "fp8_format": _FORMATS[recipe],
        "fp8_recipe": recipe,
        "fp8_param_gather": gathers,
        _SHARES: (gathers and recipe == "mxfp8") or None,
    }


_AWARE = "use_precision_aware_optimizer"
_GRADIENTS = "main_grads_dtype"
_MOMENTS = {name: name for name in STATE_BYTES}
_DTYPES = {
    "main_params_dtype": {"fp32": "fp32", "fp16": "fp16"},
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), _MOMENTS),
}
"""Dtypes of what the precision-aware optimizer holds; fields of a strategy have the same names."""


def set_states(flags: Flags, narrow: list[str]) -> None:
    """Set what the flags say over 16-bit weights, of which ``narrow`` is the dtype.

    An optimizer on the host has fp32 states all the same: HybridDeviceOptimizer is given none of the dtypes
    (core/optimizer/cpu_offloading/hybrid_optimizer.py).
    """
    aware, away = flags.on(_AWARE), flags.on("optimizer_cpu_offload")
    dtypes = {name: flags.one_of(name, names, "fp32") for name, names in _DTYPES.items()}
    gradients = flags.one_of(_GRADIENTS, {"fp32": "fp32", "bf16": "bf16"}, "fp32")
    for name, dtype in {_GRADIENTS: gradients, **dtypes}.items():
        if dtype != "fp32" and not aware:
            raise flags.reader.error(flags.key(name), dtype, f"needs {flags.key(_AWARE)}, as Megatron-LM does")
    wide = "accumulate_allreduce_grads_in_fp32"
    if gradients == "bf16" and narrow == ["bf16"] and flags.on(wide):
        raise flags.reader.error(flags.key(_GRADIENTS), gradients, f"must be fp32 with {flags.key(wide)}")
    reduced = "grad_reduce_in_bf16"
    if narrow == ["bf16"] and (flags.on(reduced) or gradients == "bf16"):
        flags.set("strategy.reduce_dtype", "bf16", reduced if flags.on(reduced) else _GRADIENTS)
    if away or not aware:
        ignored = [name for name, dtype in dtypes.items() if dtype != "fp32"]
        for name in ignored:
            key = flags.key(name)
            flags.reader.note("note", "MC004", key, f"{key} is ignored with an optimizer on the host")
        return
    flags.set("strategy.precision_aware", True, _AWARE)
    for name, dtype in dtypes.items():
        if dtype != "fp32":
            flags.set(f"strategy.{name}", dtype, name)


def state_flags(plan: Strategy) -> dict[str, Any]:
    """The flags of a strategy; validate_args asks for the precision-aware optimizer beside one on the host."""
    bf16 = plan.reduce_dtype == "bf16" and plan.precision != "fp32"
    aware = plan.precision_aware
    stated = {name: getattr(plan, name) for name in _DTYPES}
    return {
        "grad_reduce_in_bf16": (bf16 and not aware) or None,
        _AWARE: aware or bool(plan.offload) or None,
        _GRADIENTS: "bf16" if bf16 and aware else None,
        **{name: dtype if aware and dtype != "fp32" else None for name, dtype in stated.items()},
    }


_DISPATCHERS = {"allgather": "allgather", "alltoall": "alltoall", "alltoall_seq": "alltoall", "flex": "deepep"}
_BACKENDS = {"deepep": "deepep", "hybridep": "deepep", "ncclep": "deepep"}
"""Of the flexible dispatcher: each sends a token once to a node, and from there on."""
_PER_LAYER = ("local", "transformer_engine")
_GRAPHS = {name: name for name in ("none", *_PER_LAYER, "full_iteration")}
_INFERENCE = "full_iteration_inference"
_WHOLE = ({"attn", "mlp"}, {"attn", "moe"})
"""Modules that are a whole block."""


def set_time(flags: Flags, routed: bool = False) -> None:
    """Set what says something of the job's layout; without experts or TP these flags change nothing.

    ``routed`` where the model has experts and no flag says so.
    """
    tensor = flags.count("tensor_model_parallel_size")
    _set_overlaps(flags)
    if flags.on("tp_comm_overlap") and tensor > 1:
        flags.set("tp_comm_overlap", True, "tp_comm_overlap")
    _set_graphs(flags)
    if routed or (flags.integer("num_experts", 0) or 0) > 1:
        _set_exchange(flags)
    flags.one_of("moe_token_dispatcher_type", _DISPATCHERS)  # nothing else asks for it beside a model that is named


_CHUNKED = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def _set_overlaps(flags: Flags) -> None:
    """What is reduced after backward, gathered before forward and sent between passes, where flags say so."""
    if not flags.on("overlap_grad_reduce"):
        flags.set("strategy.overlap_comm", False, "overlap_grad_reduce")
    if flags.on("use_distributed_optimizer") and not flags.on("overlap_param_gather"):
        flags.set("strategy.overlap_param_gather", False, "overlap_param_gather")
    woven = any(flags.integer(name, 0) for name in _CHUNKED) and flags.count("pipeline_model_parallel_size") > 1
    if woven and flags.on("no_overlap_p2p_communication"):
        flags.set("strategy.overlap_p2p", False, "no_overlap_p2p_communication")


def _set_exchange(flags: Flags) -> None:
    name = "moe_token_dispatcher_type"
    dispatcher = flags.one_of(name, _DISPATCHERS, "allgather")
    flags.one_of("moe_flex_dispatcher_backend", _BACKENDS)
    spread = flags.count("expert_model_parallel_size") > 1
    if spread:
        flags.set("moe_dispatcher", dispatcher, name)
    if flags.on("overlap_moe_expert_parallel_comm") and spread:
        flags.set("ep_overlap", True, "overlap_moe_expert_parallel_comm")
    if flags.on("moe_router_force_load_balancing"):
        flags.set("expert_imbalance", 1.0, "moe_router_force_load_balancing")
    if flags.on("moe_pad_expert_input_to_capacity"):
        flags.set("strategy.experts_padded", True, "moe_pad_expert_input_to_capacity")
    if dispatcher == "allgather":
        flags.warn(name, "tokens of all expert-parallel ranks are gathered; counted as those of alltoall")


def _set_graphs(flags: Flags) -> None:
    """One graph of the whole pass, or one for each block or for some of its modules; by default the whole block."""
    name = next((old for old in ("enable_cuda_graph", "external_cuda_graph") if flags.on(old)), "cuda_graph_impl")
    graphs = flags.one_of("cuda_graph_impl", _GRAPHS, "none")
    graphs = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}.get(name, graphs)
    renamed = "cuda_graph_modules" if flags.has("cuda_graph_modules") else "cuda_graph_scope"
    modules = {str(module) for module in flags.items(renamed)} - {"full"}
    if "full_iteration" in modules:
        graphs, name = "full_iteration", renamed
    if graphs == "none" or _INFERENCE in modules:
        return
    covers = graphs == "full_iteration" or not modules or any(modules >= parts for parts in _WHOLE)
    flags.set("cuda_graphs", "full" if covers else "partial", renamed if modules else name)


_TYPES = {"alltoall": "alltoall", "deepep": "flex", "allgather": "allgather"}


def time_flags(job: ConfigJob) -> dict[str, Any]:
    """Return the flags of a job; a graph of all there is takes in recomputation too, one of a block does not."""
    plan, routed = job.strategy, job.spec is not None and job.spec.is_moe
    full = plan.cuda_graphs == "full"
    allowed = "Megatron-LM has no whole CUDA graph of experts whose share of the tokens varies: partial"
    job.require(not (full and routed), "cuda-graphs", allowed)
    chunked = not plan.ep_overlap or plan.pp == 1 or plan.vpp > 1
    job.require(
        chunked, "ep-overlap", "under a pipeline Megatron-LM supports it only with several chunks per stage: vpp"
    )
    parts = ["attn", "moe_router", "moe_preprocess"] if routed else ["attn"]
    reduces = plan.overlap_comm is not False and plan.dp * plan.cp > 1
    gathers = reduces and plan.zero == 1 and plan.overlap_param_gather is not False
    return {
        "overlap_grad_reduce": reduces or None,
        "overlap_param_gather": gathers or None,
        "moe_token_dispatcher_type": _TYPES[plan.moe_dispatcher] if routed else None,
        "moe_flex_dispatcher_backend": "deepep" if plan.moe_dispatcher == "deepep" else None,
        "overlap_moe_expert_parallel_comm": plan.ep_overlap or None,
        "tp_comm_overlap": plan.tp_comm_overlap or None,
        "cuda_graph_impl": {"full": "full_iteration", "partial": "transformer_engine"}.get(plan.cuda_graphs),
        "cuda_graph_modules": parts if plan.cuda_graphs == "partial" else None,
        "no_check_for_nan_in_loss_and_grad": full or None,  # validate_args asks for it beside a graph of the whole pass
    }


_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
_BUCKETS = (
    "with --overlap-grad-reduce each bucket of the states is gathered on the GPU, at most max(40 million, a million a "
    "rank) elements and one weight, and each rank's host holds the states of all"
)
_LOADED = "what reading a checkpoint holds besides the states is not counted"


def set_saving(flags: Flags) -> None:
    """Set what is written of the distributed optimizer's states, and say what of it is not counted.

    Without one, or in shards (the format torch_dist), nothing is gathered; the format `torch` gathers on the host.
    """
    if flags.has("save") and flags.on("use_distributed_optimizer"):
        _set_form(flags)
    if flags.on("async_save"):
        flags.reader.note("note", "MC004", flags.key("async_save"), "copies on the host, while they are written, are "
                          "not counted")  # fmt: skip
    if flags.has("load") and not (flags.on("finetune") or flags.on("no_load_optim")):
        flags.reader.note("note", "MC004", flags.key("load"), _LOADED)


def _set_form(flags: Flags) -> None:
    form = flags.text("ckpt_format") or "torch_dist"
    if form == "torch":
        flags.set("strategy.state_dict", "full", "ckpt_format")
    elif form != "torch_dist":
        flags.warn("ckpt_format", "what lies on the GPU while it is written is not known")
    elif not flags.on(_RESHARDABLE):
        flags.set("strategy.state_dict", "sharded", "save")
    elif flags.on("distrib_optim_fully_reshardable_mem_efficient"):
        flags.set("strategy.state_dict", "full", _RESHARDABLE)
    elif flags.on("overlap_grad_reduce"):
        flags.warn(_RESHARDABLE, _BUCKETS)
    else:
        flags.set("strategy.state_dict", "full-on-gpu", _RESHARDABLE)


_OPTIMIZER_NAMES = {"adamw": "adam", "sgd-momentum": "sgd", "lion": "lion", "muon": "muon", "soap": "soap"}
_ATTENTION_NAMES = {"flash": "flash", "cudnn": "fused", "eager": "unfused"}
_RING_NAMES = {"ring": "p2p", "a2a": "a2a", "allgather": "allgather"}


def run_flags(job: ConfigJob) -> dict[str, Any]:
    """Return the flags of a batch and a strategy, None where one is left at its default."""
    return {
        "micro_batch_size": job.strategy.micro_batch,
        "global_batch_size": job.global_batch,
        **_precision_flags(job),
        **_parallel_flags(job),
        **_pipeline_flags(job),
        **_recompute_flags(job),
        **_kernel_flags(job),
        **time_flags(job),
    }


def _precision_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    return {
        "bf16": plan.precision in ("bf16-mixed", "fp8-mixed") or None,
        "fp16": plan.precision == "fp16-mixed" or None,
        **float8_flags(plan),
        "no_gradient_accumulation_fusion": not plan.wgrad_fusion or None,
        "optimizer": _OPTIMIZER_NAMES[plan.optimizer],
        "use_distributed_optimizer": plan.zero == 1 or None,
        "optimizer_cpu_offload": True if plan.offload else None,
        **state_flags(plan),
    }


def _parallel_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    return {
        "tensor_model_parallel_size": plan.tp,
        "sequence_parallel": plan.sp or None,
        "context_parallel_size": plan.cp,
        "cp_comm_type": _RING_NAMES[plan.cp_kind] if plan.cp > 1 else None,
        "num_distributed_optimizer_instances": plan.dp_replicate if plan.dp_replicate > 1 else None,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": plan.etp or None,
        "mtp_num_layers": plan.mtp or None,
    }


def _pipeline_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    return {
        "pipeline_model_parallel_size": plan.pp,
        "num_virtual_stages_per_pipeline_rank": plan.vpp if plan.vpp > 1 else None,
        "no_overlap_p2p_communication": (plan.overlap_p2p is False and plan.vpp > 1) or None,
        "microbatch_group_size_per_virtual_pipeline_stage": plan.microbatch_group or None,
        "decoder_first_pipeline_num_layers": plan.first_stage_layers or None,
        "decoder_last_pipeline_num_layers": plan.last_stage_layers or None,
        "account_for_embedding_in_pipeline_split": plan.embedding_in_split or None,
        "account_for_loss_in_pipeline_split": plan.loss_in_split or None,
    }


def _recompute_flags(job: ConfigJob) -> dict[str, Any]:
    policy = job.strategy.recompute
    if policy == "none":
        return {}
    method, _, count = ("uniform-1" if policy == "full" else policy).rpartition("-")
    if method in ("uniform", "block"):
        chunks = job.strategy.vpp if method == "block" else 1
        says = f"Megatron-LM counts the blocks of each model chunk, of which a stage has {chunks}"
        job.require(int(count) % chunks == 0, "recompute", says)
        layers = -(-int(count) // chunks)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    modules = "core_attn" if policy == "selective-core-attn" else policy.removeprefix("modules:")
    return {"recompute_granularity": "selective", "recompute_modules": modules.split(",")}


def _kernel_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    job.require_one_of("attention", _ATTENTION_NAMES, "Megatron-LM's flags say")
    fused = plan.loss in ("fused-kernel", "triton")
    return {
        "attention_backend": _ATTENTION_NAMES[plan.attention],
        "cross_entropy_loss_fusion": fused or None,
        "cross_entropy_fusion_impl": ("te" if plan.loss == "triton" else "native") if fused else None,
        "no_create_attention_mask_in_dataloader": True,
    }
