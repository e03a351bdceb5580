"""Flags of Megatron-LM that change a step's time: how tokens travel, what overlaps, what is a CUDA graph.

megatron/training/arguments.py and megatron/core/transformer/transformer_config.py of d98e8a64 (core 0.20), and the
names that core 0.11 to 0.18 have for the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.convert.formats.megatron_flags import Flags
    from memcalc.convert.job import ConfigJob

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
    if flags.on("tp_comm_overlap") and tensor > 1:
        flags.set("tp_comm_overlap", True, "tp_comm_overlap")
    _set_graphs(flags)
    if routed or (flags.integer("num_experts", 0) or 0) > 1:
        _set_exchange(flags)


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
    return {
        "moe_token_dispatcher_type": _TYPES[plan.moe_dispatcher] if routed else None,
        "moe_flex_dispatcher_backend": "deepep" if plan.moe_dispatcher == "deepep" else None,
        "overlap_moe_expert_parallel_comm": plan.ep_overlap or None,
        "tp_comm_overlap": plan.tp_comm_overlap or None,
        "cuda_graph_impl": {"full": "full_iteration", "partial": "transformer_engine"}.get(plan.cuda_graphs),
        "cuda_graph_modules": parts if plan.cuda_graphs == "partial" else None,
        "no_check_for_nan_in_loss_and_grad": full or None,  # validate_args asks for it beside a graph of the whole pass
    }
