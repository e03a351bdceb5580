"""Megatron-LM's flags and YAML, with the defaults of d98e8a64 (August 2026, core 0.20).

Read in megatron/training/arguments.py (what is taken, what follows from what in ``validate_args``),
megatron/training/yaml_arguments.py, megatron/core/transformer/transformer_config.py and
megatron/core/distributed/distributed_data_parallel.py.
"""

from __future__ import annotations

import re
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import ConfigJob, Format
from memcalc.convert.formats.manifest import MODEL_ARGS, tested_script
from memcalc.convert.formats.megatron_flags import (
    KEYS,
    WHOLE_BLOCKS,
    Flags,
    finished,
    key_in,
    note_older,
    own_attention,
    set_model,
)
from memcalc.convert.formats.megatron_strategy import run_flags, set_float8, set_saving, set_states, set_time
from memcalc.specs.block import MixtureOfExperts
from memcalc.specs.model import BlockGroup, Model

_SOFTWARE = "Megatron-LM d98e8a64 (core 0.20)"
_OPTIMIZERS = {
    "adam": "adamw", "sgd": "sgd-momentum", "lion": "lion", "muon": "muon", "dist_muon": "muon",
    "adaptive_muon": "muon", "soap": "soap",
}  # fmt: skip
_ATTENTION = {"flash": "flash", "fused": "cudnn", "unfused": "eager", "local": "eager", "auto": ""}
_RING = {"p2p": "ring", "a2a": "a2a", "allgather": "allgather", "all_gather": "allgather", "a2a+p2p": "ring"}
_MODULES = ("core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj")


def read(document: Document) -> Config:
    """Return what flags of Megatron-LM, or its YAML, say of a job."""
    reader = ConfigReader(document, "megatron", _SOFTWARE)
    if isinstance(document.data.get(MODEL_ARGS), dict):
        reader.refer("launch", MODEL_ARGS, document=tested_script(document))
        return Config(document, "megatron", (), (), tuple(reader.references))
    path = reader.raw("yaml_cfg") if document.kind == "flags" else None
    if path is not None:  # the other flags are then ignored (yaml_arguments.py, load_yaml)
        reader.refer("megatron", "yaml_cfg", path=str(path))
        return Config(document, "megatron", (), (), tuple(reader.references))
    flags = Flags(reader)
    reader.fact("framework", "megatron", "num_layers")
    set_model(flags)
    _precision(flags)
    set_optimizer(flags)
    set_parallelism(flags)
    set_pipeline(flags)
    _batch(flags)
    set_recompute(flags)
    set_kernels(flags)
    _experts(flags)
    set_time(flags)
    set_saving(flags)
    note_older(flags)
    flags.not_modelled(KEYS.not_modelled)
    written_out = flags.text("attention_backend") in ("unfused", "local") or own_attention(flags)[0] == "eager"
    fused = () if written_out else (flags.key("no_masked_softmax_fusion"),)  # other kernels have no such softmax
    reader.not_counted({flags.key(name): row for name, row in KEYS.not_counted.items()}, counted=fused)
    return finished(flags)


def _precision(flags: Flags) -> None:
    narrow = [name for name in ("bf16", "fp16") if flags.on(name)]
    if len(narrow) > 1:
        raise flags.reader.error(flags.key("fp16"), True, "bf16 is on too, and Megatron-LM takes one")
    if narrow != ["bf16"] or not (flags.has("fp8_format") or flags.has("fp4_format")):
        flags.set("precision", f"{narrow[0]}-mixed" if narrow else "fp32", narrow[0] if narrow else "bf16")
    set_float8(flags, narrow)
    set_states(flags, narrow)
    if narrow == ["fp16"] and flags.on("accumulate_allreduce_grads_in_fp32"):
        flags.warn("accumulate_allreduce_grads_in_fp32", "gradients are kept in fp32; counted as fp16, which is less")
    unfused = "no_gradient_accumulation_fusion"
    flags.set("strategy.wgrad_fusion", not flags.on(unfused), unfused)


def set_optimizer(flags: Flags) -> None:
    """Set the optimizer, and where its states are."""
    name = flags.text("optimizer") or "adam"
    flags.set("optimizer", flags.one_of("optimizer", _OPTIMIZERS, "adamw"), "optimizer")
    if name == "adaptive_muon":
        flags.warn("optimizer", "it keeps more states than are counted")
    if name == "sgd" and flags.number("sgd_momentum", 0.9) == 0:
        flags.warn("sgd_momentum", "the momentum is counted all the same")
    flags.set("zero", int(flags.on("use_distributed_optimizer")), "use_distributed_optimizer")
    if flags.on("optimizer_cpu_offload"):
        flags.set("offload", ("optimizer",), "optimizer_cpu_offload")
        if flags.number("optimizer_offload_fraction", 1.0) < 1:
            flags.warn("optimizer_offload_fraction", "only a part of the states leaves the GPU; counted as all")


def set_parallelism(flags: Flags) -> None:
    """Set the degrees of all kinds of parallelism but the pipeline's."""
    tensor = flags.count("tensor_model_parallel_size")
    flags.set("tp", tensor, "tensor_model_parallel_size")
    flags.set("sp", flags.on("sequence_parallel") and tensor > 1, "sequence_parallel")
    ring = flags.count("context_parallel_size")
    flags.set("cp", ring, "context_parallel_size")
    several = isinstance(flags.reader.raw(flags.key("cp_comm_type")), list)
    kind = "ring" if several else flags.one_of("cp_comm_type", _RING, "ring")
    if ring > 1:
        flags.set("cp_kind", kind, "cp_comm_type")
        if several or flags.text("cp_comm_type") == "a2a+p2p":
            flags.warn("cp_comm_type", "counted as a ring")
    instances = "num_distributed_optimizer_instances"
    if flags.count(instances) > 1:
        flags.set("dp_replicate", flags.count(instances), instances)
    flags.set("ep", flags.count("expert_model_parallel_size"), "expert_model_parallel_size")
    if flags.has("expert_tensor_parallel_size"):
        flags.set("strategy.etp", flags.count("expert_tensor_parallel_size"), "expert_tensor_parallel_size")
    if flags.has("mtp_num_layers"):
        flags.set("strategy.mtp", flags.integer("mtp_num_layers"), "mtp_num_layers")


_ENDS = {
    "account_for_embedding_in_pipeline_split": "strategy.embedding_in_split",
    "account_for_loss_in_pipeline_split": "strategy.loss_in_split",
}


def _chunks(flags: Flags) -> int:
    """Model chunks of a stage."""
    stages = flags.count("pipeline_model_parallel_size")
    each = flags.integer("num_layers_per_virtual_pipeline_stage", low=1)
    layers = flags.integer("num_layers", 0) or 0
    if stages == 1 or not (each and layers):
        return (stages > 1 and flags.integer("num_virtual_stages_per_pipeline_rank", low=1)) or 1
    parts = layers + sum(flags.on(name) for name in _ENDS)
    if parts % (stages * each):
        key = flags.key("num_layers_per_virtual_pipeline_stage")
        raise flags.reader.error(key, each, f"must part {parts} blocks over {stages} stages")
    return parts // (stages * each)


def set_pipeline(flags: Flags) -> None:
    """Set stages, their chunks, and which blocks stand on the first and last."""
    stages = flags.count("pipeline_model_parallel_size")
    flags.set("pp", stages, "pipeline_model_parallel_size")
    for name, word in _ENDS.items():
        if flags.on(name):
            flags.set(word, True, name)
    for end in ("first", "last"):
        name = f"decoder_{end}_pipeline_num_layers"
        if flags.has(name):
            flags.set(f"strategy.{end}_stage_layers", flags.integer(name, low=1), name)
    group, chunks = flags.integer("microbatch_group_size_per_virtual_pipeline_stage", low=1), _chunks(flags)
    each = flags.has("num_layers_per_virtual_pipeline_stage")
    if stages == 1:
        return
    name = "num_layers_per_virtual_pipeline_stage" if each else "num_virtual_stages_per_pipeline_rank"
    flags.set("pp_schedule", "interleaved" if chunks > 1 else "1f1b", name)
    if chunks > 1:
        flags.set("vpp", chunks, name)
        if group:
            flags.set("strategy.microbatch_group", group, "microbatch_group_size_per_virtual_pipeline_stage")


def _batch(flags: Flags) -> None:
    """Without --global-batch-size a step is one micro-batch on each rank."""
    name = "seq_length" if flags.has("seq_length") or not flags.has("encoder_seq_length") else "encoder_seq_length"
    flags.reader.set_integer("seq_len", flags.key(name))
    flags.reader.set_integer("micro_batch", flags.key("micro_batch_size"))
    global_batch = flags.integer("global_batch_size", low=1)
    steps = [str(part).strip("'\"").partition(":")[2] for part in flags.items("step_batch_size_schedule")]
    if global_batch is None and steps and steps[-1].isdecimal():
        flags.set("global_batch", max(int(step) for step in steps if step.isdecimal()), "step_batch_size_schedule")
    elif global_batch is None:
        flags.set("accumulation", 1, "global_batch_size")
    else:
        flags.set("global_batch", global_batch, "global_batch_size")
    if flags.has("eval_interval"):
        flags.set("evaluates", not flags.on("skip_train") and flags.integer("eval_iters", 100) != 0, "eval_interval")
    flags.reader.set_integer("eval_micro_batch", flags.key("eval_micro_batch_size"))


def set_recompute(flags: Flags) -> None:
    """Set what is computed again."""
    kind = flags.one_of("recompute_granularity", {"full": "full", "selective": "selective"}, "none")
    name = "recompute_granularity"
    if flags.on("recompute_activations"):
        kind, name = "selective", "recompute_activations"
    method = flags.one_of("recompute_method", {"uniform": "uniform", "block": "block"}, "uniform")
    count = flags.integer("recompute_num_layers", 1)
    for older in WHOLE_BLOCKS:
        if kind == "none" and flags.has(older) and flags.reader.raw(older) is not False:
            kind, name = "full", older
    modules = [str(module) for module in flags.items("recompute_modules")] or ["core_attn"]
    if flags.on("moe_layer_recompute"):
        kind, modules = "selective", [*(modules if kind == "selective" else []), "moe"]
    if kind != "selective":
        # Of `block` so many of each chunk are meant, which is a TransformerBlock of its own (core/recompute.py)
        each = (count or 0) * (_chunks(flags) if method == "block" else 1)
        policy = "full" if (method, count) == ("uniform", 1) else f"{method}-{each}"
        flags.set("recompute", policy if kind == "full" and count else "none", name)
        return
    if others := [module for module in modules if module not in _MODULES]:
        flags.warn("recompute_modules", f"{', '.join(others)} is estimated as kept")
    known = [module for module in dict.fromkeys(modules) if module in _MODULES]
    policy = "selective-core-attn" if known == ["core_attn"] else f"modules:{','.join(known)}" if known else "none"
    flags.set("recompute", policy, "recompute_modules" if flags.has("recompute_modules") else name)


AMPERE = 8.0
"""Its compute capability, from which on Megatron-LM has grouped products."""
_REFUSED = "Megatron-LM refuses its fusion `te` since June 2026 (168cb15d)"


def set_kernels(flags: Flags) -> None:
    """Set attention and loss; what decides the attention kernel under `auto` is Transformer Engine, by the GPU."""
    local, sign = own_attention(flags)
    if attention := flags.one_of("attention_backend", _ATTENTION, ""):
        flags.set("attention", attention, "attention_backend")
    elif local:
        flags.set("attention", local, sign)
    else:
        flags.set("attention_library", "te", "attention_backend")
    names = {"native": "fused-kernel", "te": "triton"}
    implementation = flags.one_of("cross_entropy_fusion_impl", names, "fused-kernel")
    flags.set("loss", implementation if flags.on(name := "cross_entropy_loss_fusion") else "standard", name)
    if implementation == "triton" and flags.on(name):
        flags.reader.note("note", "MC004", flags.key("cross_entropy_fusion_impl"), _REFUSED)
    mask = not flags.on("no_create_attention_mask_in_dataloader")
    flags.set("workload.attention_mask", mask, "no_create_attention_mask_in_dataloader")
    if local:
        runs = f"its own modules run ({flags.key(sign)}): {local} attention counts, else those of Transformer Engine"
        flags.reader.note("warning", "MC002", flags.key(sign), runs)


def _experts(flags: Flags) -> None:
    if (flags.integer("num_experts", 0) or 0) < 2:
        return
    if not flags.on("moe_grouped_gemm"):
        flags.warn("num_experts", "without --moe-grouped-gemm experts run one after another; counted as grouped")
    capacity = flags.number("moe_expert_capacity_factor", 1.0) or 1.0
    if flags.on("moe_pad_expert_input_to_capacity") and capacity >= 1:
        flags.set("strategy.expert_overload", capacity, "moe_expert_capacity_factor")
    elif capacity != 1.0:
        flags.warn("moe_expert_capacity_factor", "every expert is counted with its equal share of the tokens")


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the flags, with underscores as their documents have them."""
    plan = job.strategy
    job.require(job.framework == "megatron", "framework", "Megatron-LM's flags are for --framework megatron")
    plain = not (plan.lora or plan.quantize != "none" or plan.optimizer_in_backward)
    allowed = "Megatron-LM's flags train all weights; ms-swift's have adapters: --set strategy.lora_classes=swift"
    job.require(plain, "lora", allowed, value=plan.lora or plan.quantize)
    job.require(plan.loss != "triton", "loss", f"{_REFUSED}: fused-kernel")
    refused = plan.float8_all_gather and plan.float8 != "delayed" and "optimizer" in plan.offload
    job.require(not refused, "offload", "beside --fp8-param-gather Megatron-LM takes no other recipe than delayed")
    return {
        # a model that came from flags keeps its own
        **({} if job.editing or " " in job.model else model_flags(job, job.sized())),
        "seq_length": job.seq_len,
        **run_flags(job),
    }


def model_flags(job: ConfigJob, model: Model) -> dict[str, Any]:
    """Return the flags that describe a decoder of equal blocks, after a few dense ones where the rest is routed."""
    group = next((group for group in reversed(model.groups) if group.block.is_moe), model.groups[-1])
    job.require(not model.mixers, "model", "Megatron-LM's flags describe decoders of attention alone", model.name)
    block, attention = group.block, group.block.own_attention
    fine = (
        len(model.groups) <= 2
        and all(group.tower == "decoder" and group.block.attention == attention for group in model.groups)
        and not (attention.sinks or attention.output_gate or attention.head_gate)
        and block.norms == 2
        and block.norm_place == "pre"
        and not block.parallel
        and model.positions in ("rope", "learned", "none")
        and attention.qk_norm in ("none", "head")
    )
    allowed = "memcalc writes its flags for equal blocks with norms before attention and MLP, without sinks or gates"
    job.require(fine, "model", allowed, model.name)
    dense = next((group.block.mlp for group in model.groups if not isinstance(group.block.mlp, MixtureOfExperts)), None)
    mlp = block.mlp or block.own_mlp
    biased, grouped = attention.o_bias, attention.kv_heads != attention.heads
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "num_attention_heads": attention.heads,
        "ffn_hidden_size": dense.ffn if dense is not None else mlp.ffn,
        "kv_channels": None if attention.latent else attention.head_dim,
        "group_query_attention": grouped or None,
        "num_query_groups": attention.kv_heads if grouped else None,
        "max_position_embeddings": max(model.max_positions, job.seq_len),
        "swiglu": mlp.gated or None,
        "squared_relu": mlp.activation == "relu2" or None,
        "normalization": "RMSNorm" if block.norm.kind == "rmsnorm" else "LayerNorm",
        "position_embedding_type": "learned_absolute" if model.positions == "learned" else model.positions,
        "untie_embeddings_and_output_weights": not model.tied or None,
        "disable_bias_linear": not biased or None,
        "add_qkv_bias": True if attention.q_bias and not biased else None,
        # Latents have their norms in the up projections, with the flag alone (core/models/gpt/gpt_layer_specs.py)
        "qk_layernorm": attention.qk_norm == "head" or attention.latent is not None or None,
        "attention_dropout": attention.dropout,
        "hidden_dropout": block.dropout,
        "vocab_size": model.vocab,
        "make_vocab_size_divisible_by": 128,
        **_expert_flags(job, model, mlp),
        **_latent_flags(group),
    }


def _expert_flags(job: ConfigJob, model: Model, mlp: Any) -> dict[str, Any]:
    if not isinstance(mlp, MixtureOfExperts):
        return {}
    routed = [model.groups[index].block.is_moe for index in model.sequence]
    dense, listed = routed.count(False), ",".join(str(int(count)) for count in routed)
    leading = f"([0]*{dense}+[1]*{len(routed) - dense})" if dense else None
    groups = {"moe_router_num_groups": mlp.n_group, "moe_router_group_topk": mlp.topk_group}
    return {
        "num_experts": mlp.experts,
        "moe_router_topk": mlp.topk,
        "moe_ffn_hidden_size": mlp.ffn,
        "moe_shared_expert_intermediate_size": mlp.shared_ffn or None,
        "moe_shared_expert_gate": mlp.shared_gate or None,
        "moe_router_score_function": mlp.scores,
        **(groups if mlp.topk_group < mlp.n_group else {}),
        "moe_layer_freq": f"[{listed}]" if model.order else leading,
        "moe_grouped_gemm": True
        if job.capability >= AMPERE or not job.capability
        else None,  # arguments.py asks for it
    }


def _latent_flags(group: BlockGroup) -> dict[str, Any]:
    latent = group.block.own_attention.latent
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
    }


def _recognise(document: Document) -> bool:
    data = document.data if document.kind == "yaml" and isinstance(document.data, dict) else {}
    arguments = data.get(MODEL_ARGS)
    if isinstance(arguments, dict) and arguments:
        return all(re.fullmatch(r"--[\w.-]+", str(flag)) for flag in arguments)
    return {"language_model", "model_parallel"} <= set(data)


FORMAT = Format(
    "megatron", "Megatron-LM arguments", _SOFTWARE, _recognise, read, write,
    kind="flags", hyphens=True, filename="pretrain_gpt.flags", spelling=key_in,
    choices={
        "micro_batch": (), "recompute": ("none", "selective-core-attn", "full"), "zero": (0, 1),
        "offload": ("none", "optimizer"),
    },
)  # fmt: skip
"""Flags of ``pretrain_gpt.py``, which a launch script names, or the YAML of --yaml-cfg."""
