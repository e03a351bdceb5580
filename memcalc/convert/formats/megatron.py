"""Megatron-LM's flags and YAML, with the defaults of d98e8a64 (August 2026, core 0.20).

Read in megatron/training/arguments.py (what is taken, what follows from what in ``validate_args``),
megatron/training/yaml_arguments.py, megatron/core/transformer/transformer_config.py and
megatron/core/distributed/distributed_data_parallel.py.
"""

from __future__ import annotations

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.convert.formats.megatron_flags import NOT_MODELLED
from memcalc.convert.formats.megatron_keys import Flags, key_in
from memcalc.convert.formats.megatron_model import say_model
from memcalc.convert.formats.megatron_write import write

_SOFTWARE = "Megatron-LM d98e8a64 (core 0.20)"
_OPTIMIZERS = {
    "adam": "adamw", "sgd": "sgd-momentum", "lion": "lion", "muon": "muon", "dist_muon": "muon",
    "adaptive_muon": "muon", "soap": "adamw",
}  # fmt: skip
_ATTENTION = {"flash": "flash", "fused": "cudnn", "unfused": "eager", "local": "eager", "auto": ""}
_RING = {"p2p": "ring", "a2a": "a2a", "allgather": "allgather", "all_gather": "allgather", "a2a+p2p": "ring"}
_MODULES = ("core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj")


def read(document: Document) -> Config:
    """Return what flags of Megatron-LM, or its YAML, say of a job."""
    reading = Reading(document, "megatron", _SOFTWARE)
    path = reading.raw("yaml_cfg") if document.kind == "flags" else None
    if path is not None:  # the other flags are then ignored (yaml_arguments.py, load_yaml)
        reading.refer("megatron", "yaml_cfg", path=str(path))
        return Config(document, "megatron", (), (), tuple(reading.references))
    flags = Flags(reading)
    flags.say("framework", "megatron", "num_layers")
    say_model(flags)
    _precision(flags)
    _optimizer(flags)
    _parallelism(flags)
    _pipeline(flags)
    _batch(flags)
    _recompute(flags)
    _kernels(flags)
    _experts(flags)
    flags.not_modelled(NOT_MODELLED)
    reading.harmless(*flags.rest())
    return reading.finish(known=flags.rest())


def _precision(flags: Flags) -> None:
    narrow = [name for name in ("bf16", "fp16") if flags.on(name)]
    if len(narrow) > 1:
        raise flags.reading.wrong(flags.key("fp16"), True, "bf16 is on too, and Megatron-LM takes one")
    flags.say("precision", f"{narrow[0]}-mixed" if narrow else "fp32", narrow[0] if narrow else "bf16")
    if narrow == ["fp16"] and flags.on("accumulate_allreduce_grads_in_fp32"):
        flags.warn("accumulate_allreduce_grads_in_fp32", "gradients are kept in fp32; counted as fp16, which is less")
    unfused = "no_gradient_accumulation_fusion"
    flags.say("strategy.wgrad_fusion", not flags.on(unfused), unfused)


def _optimizer(flags: Flags) -> None:
    name = flags.text("optimizer") or "adam"
    flags.say("optimizer", flags.one_of("optimizer", _OPTIMIZERS, "adamw"), "optimizer")
    if name in ("soap", "adaptive_muon"):
        flags.warn("optimizer", "it keeps more states than are counted")
    if name == "sgd" and flags.number("sgd_momentum", 0.9) == 0:
        flags.warn("sgd_momentum", "the momentum is counted all the same")
    flags.say("zero", int(flags.on("use_distributed_optimizer")), "use_distributed_optimizer")
    if flags.on("optimizer_cpu_offload"):
        flags.say("offload", ("optimizer",), "optimizer_cpu_offload")
        if flags.number("optimizer_offload_fraction", 1.0) < 1:
            flags.warn("optimizer_offload_fraction", "only a part of the states leaves the GPU; counted as all")


def _parallelism(flags: Flags) -> None:
    tensor = flags.count("tensor_model_parallel_size")
    flags.say("tp", tensor, "tensor_model_parallel_size")
    flags.say("sp", flags.on("sequence_parallel") and tensor > 1, "sequence_parallel")
    ring = flags.count("context_parallel_size")
    flags.say("cp", ring, "context_parallel_size")
    kinds = [flags.reading.one_of(flags.key("cp_comm_type"), _RING, "ring")] if not _several(flags) else ["ring"]
    if ring > 1:
        flags.say("cp_kind", kinds[0], "cp_comm_type")
        if _several(flags) or flags.text("cp_comm_type") == "a2a+p2p":
            flags.warn("cp_comm_type", "counted as a ring")
    flags.say("ep", flags.count("expert_model_parallel_size"), "expert_model_parallel_size")
    if flags.has("expert_tensor_parallel_size"):
        flags.say("strategy.etp", flags.count("expert_tensor_parallel_size"), "expert_tensor_parallel_size")
    if flags.has("mtp_num_layers"):
        flags.say("strategy.mtp", flags.whole("mtp_num_layers"), "mtp_num_layers")


def _several(flags: Flags) -> bool:
    return isinstance(flags.reading.raw(flags.key("cp_comm_type")), list)


def _pipeline(flags: Flags) -> None:
    stages = flags.count("pipeline_model_parallel_size")
    flags.say("pp", stages, "pipeline_model_parallel_size")
    each = flags.whole("num_layers_per_virtual_pipeline_stage", low=1)
    chunks = flags.whole("num_virtual_stages_per_pipeline_rank", low=1)
    layers = flags.whole("num_layers", 0) or 0
    ends = {}
    for end, word in (("embedding", "strategy.embedding_in_split"), ("loss", "strategy.loss_in_split")):
        name = f"account_for_{end}_in_pipeline_split"
        ends[end] = flags.on(name)
        if ends[end]:
            flags.say(word, True, name)
    for end in ("first", "last"):
        name = f"decoder_{end}_pipeline_num_layers"
        if flags.has(name):
            flags.say(f"strategy.{end}_stage_layers", flags.whole(name, low=1), name)
    group = flags.whole("microbatch_group_size_per_virtual_pipeline_stage", low=1)
    if each and layers:
        whole = layers + ends["embedding"] + ends["loss"]
        if whole % (stages * each):
            raise flags.reading.wrong(
                flags.key("num_layers_per_virtual_pipeline_stage"),
                each,
                f"must part {whole} blocks over {stages} stages",
            )
        chunks = whole // (stages * each)
    if stages == 1:
        return
    name = "num_layers_per_virtual_pipeline_stage" if each else "num_virtual_stages_per_pipeline_rank"
    flags.say("pp_schedule", "interleaved" if (chunks or 1) > 1 else "1f1b", name)
    if (chunks or 1) > 1:
        flags.say("vpp", chunks, name)
        if group:
            flags.say("strategy.microbatch_group", group, "microbatch_group_size_per_virtual_pipeline_stage")


def _batch(flags: Flags) -> None:
    """Without --global-batch-size a step is one micro-batch on each rank."""
    name = "seq_length" if flags.has("seq_length") or not flags.has("encoder_seq_length") else "encoder_seq_length"
    length = flags.whole(name, low=1)
    if length is not None:
        flags.say("seq_len", length, name)
    micro = flags.whole("micro_batch_size", low=1)
    if micro is not None:
        flags.say("micro_batch", micro, "micro_batch_size")
    whole = flags.whole("global_batch_size", low=1)
    steps = [part.partition(":")[2] for part in flags.text("step_batch_size_schedule").strip("'\"").split()]
    if whole is None and steps and steps[-1].isdecimal():
        flags.say("global_batch", max(int(step) for step in steps if step.isdecimal()), "step_batch_size_schedule")
    elif whole is None:
        flags.say("accumulation", 1, "global_batch_size")
    else:
        flags.say("global_batch", whole, "global_batch_size")
    if flags.has("eval_interval"):
        flags.say("evaluates", not flags.on("skip_train") and flags.whole("eval_iters", 100) != 0, "eval_interval")
    batch = flags.whole("eval_micro_batch_size", low=1)
    if batch:
        flags.say("eval_micro_batch", batch, "eval_micro_batch_size")


def _recompute(flags: Flags) -> None:
    kind = flags.one_of("recompute_granularity", {"full": "full", "selective": "selective"}, "none")
    name = "recompute_granularity"
    if flags.on("recompute_activations"):
        kind, name = "selective", "recompute_activations"
    method = flags.one_of("recompute_method", {"uniform": "uniform", "block": "block"}, "uniform")
    count = flags.whole("recompute_num_layers", 1)
    modules = [str(one) for one in flags.items("recompute_modules")] or ["core_attn"]
    if flags.on("moe_layer_recompute"):
        kind, modules = "selective", [*(modules if kind == "selective" else []), "moe"]
    if kind == "full":
        policy = "none" if not count else "full" if (method, count) == ("uniform", 1) else f"{method}-{count}"
        flags.say("recompute", policy, name)
        return
    if kind == "none":
        flags.say("recompute", "none", name)
        return
    others = [one for one in modules if one not in _MODULES]
    if others:
        flags.warn("recompute_modules", f"{', '.join(others)} is counted as kept")
    known = [one for one in dict.fromkeys(modules) if one in _MODULES]
    policy = "selective-core-attn" if known == ["core_attn"] else f"modules:{','.join(known)}" if known else "none"
    flags.say("recompute", policy, "recompute_modules" if flags.has("recompute_modules") else name)


def _kernels(flags: Flags) -> None:
    """What decides the attention kernel under `auto` is Transformer Engine, by the GPU."""
    attention = flags.one_of("attention_backend", _ATTENTION, "")
    if attention:
        flags.say("attention", attention, "attention_backend")
    else:
        flags.say("attention_library", "te", "attention_backend")
    names = {"native": "fused-kernel", "te": "triton"}
    implementation = flags.one_of("cross_entropy_fusion_impl", names, "fused-kernel")
    fused = flags.on("cross_entropy_loss_fusion")
    flags.say("loss", implementation if fused else "standard", "cross_entropy_loss_fusion")
    mask = not flags.on("no_create_attention_mask_in_dataloader")
    flags.say("workload.attention_mask", mask, "no_create_attention_mask_in_dataloader")
    if flags.text("transformer_impl") == "local":
        flags.warn("transformer_impl", "Megatron-LM's own modules; counted as Transformer Engine's")


def _experts(flags: Flags) -> None:
    if (flags.whole("num_experts", 0) or 0) < 2:
        return
    if not flags.on("moe_grouped_gemm"):
        flags.warn("num_experts", "without --moe-grouped-gemm experts run one after another; counted as grouped")
    if (
        flags.one_of("moe_token_dispatcher_type", {n: n for n in ("allgather", "alltoall", "flex")}, "allgather")
        != "alltoall"
    ):
        flags.warn("moe_token_dispatcher_type", "counted as alltoall")
    if flags.number("moe_expert_capacity_factor", 1.0) != 1.0:
        flags.warn("moe_expert_capacity_factor", "every expert is counted with its equal share of the tokens")


FORMAT = Format(
    name="megatron",
    title="Megatron-LM arguments",
    software=_SOFTWARE,
    recognise=lambda document: (
        document.kind == "yaml"
        and isinstance(document.data, dict)
        and {"language_model", "model_parallel"} <= set(document.data)
    ),
    read=read,
    write=write,
    kind="flags",
    hyphens=True,
    filename="pretrain_gpt.flags",
    choices={
        "micro_batch": (),
        "recompute": ("none", "selective-core-attn", "full"),
        "zero": (0, 1),
        "offload": ("none", "optimizer"),
    },
    spelling=key_in,
)
"""Flags of ``pretrain_gpt.py``, which a launch script names, or the YAML of --yaml-cfg."""
