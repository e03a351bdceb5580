"""llm-foundry's YAML for `composer train.py`, as 0.22 reads it with Composer 0.33.

Sources: llm-foundry 8c8dd48f, command_utils/train.py, utils/config_utils.py (TrainConfig, calculate_batch_size_info,
process_init_device), models/mpt/configuration_mpt.py and modeling_mpt.py, models/hf/hf_base.py; Composer 64051888,
distributed/dist_strategy.py (prepare_fsdp_module, ddp_sync_context), distributed/mosaic_parallelism.py
(get_mixed_precision) and optim/decoupled_weight_decay.py. Interpolations are OmegaConf's, as torchtune's are.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.fsdp_config import ALONE, NODE
from memcalc.convert.formats.torchtune import resolve_interpolations
from memcalc.convert.formats.tuning import set_lora
from memcalc.convert.objectives import refuse_idle
from memcalc.errors import ObjectiveError, cut

_SOFTWARE = "llm-foundry 0.22"
_KEYS = key_table("foundry")
_SIGNS = ("train_loader", "model", "optimizer", "max_duration")
_SHARDED = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 3, "hybrid_shard": 3, "_hybrid_shard_zero2": 2}
_PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "no", "amp_fp8": "bf16"}
_POLICIES = {name: name for name in ("FULL", "DEFAULT", "PURE")}
_NARROW = ("bf16", "bfloat16", "amp_bf16", "fp16", "float16", "amp_fp16")
_OPTIMIZERS = {"decoupled_adamw": "adamw", "decoupled_lionw": "lion", "adalr_lion": "lion", "clip_lion": "lion"}
"""All step one tensor after another."""
_NORMS = {
    "low_precision_layernorm": "layernorm", "layernorm": "layernorm", "low_precision_rmsnorm": "rmsnorm",
    "rmsnorm": "rmsnorm", "triton_rmsnorm": "rmsnorm",
}  # fmt: skip
_KERNELS = {"flash": "flash", "torch": "eager"}
_HUB_KERNELS = {"flash_attention_2": "flash", "eager": "eager", "sdpa": "sdpa"}
_LOSSES = {"fused_crossentropy": "fused-kernel", "torch_crossentropy": "standard"}
_HUGGING_FACE = ("hf_causal_lm", "hf_t5")
_HELD = (
    "Composer holds a micro-batch's logits until the next forward, and flash-attention's loss makes their gradient "
    "beside them: two 16-bit copies, of which one is counted"
)


def read(document: Document) -> Config:
    """Return what a config of llm-foundry says of a job."""
    reader = ConfigReader(resolve_interpolations(document), "foundry", _SOFTWARE)
    if idle := [key for key in ("only_hf_checkpoint", "only_composer_checkpoint") if reader.flag(key)]:
        refuse_idle(document.path.name, idle)
    casts = _model(reader)
    _batch(reader)
    _sharding(reader, casts=casts)
    _optimizer(reader)
    _evaluation(reader)
    if reader.flag("expandable_segments", True):
        reader.set("strategy.expandable_segments", True, "expandable_segments")
    reader.harmless(*_KEYS.harmless)
    reader.not_counted(_KEYS.not_counted)
    says = "it changes the model or its data, and is counted as left out"
    named = [f"algorithms.{name}" for name in reader.table("algorithms") if name != "gradient_clipping"]
    reader.not_modelled(dict.fromkeys(named, says))
    reader.harmless("algorithms.")
    return reader.finish(known=_KEYS.names("harmless", "not_counted", "read"))


def _model(reader: ConfigReader) -> bool:
    """Set the model and its kernels; return whether autocast has something to cast over 16-bit units."""
    key = "model.name"
    name = reader.text(key)
    if name in _HUGGING_FACE:
        _hub_model(reader)
        return True
    if name == "mpt_causal_lm":
        return _mpt(reader)
    if name:
        raise ObjectiveError(
            f"{reader.document.path.name} trains {cut(name)} ({key}), which is neither MPT nor a language model of "
            "Transformers: give memcalc estimate what it trains."
        )
    return True


def _hub_model(reader: ConfigReader) -> None:
    """A repository's model; its attention is eager where nothing is said (hf_base.py, build_inner_model)."""
    key = "model.pretrained_model_name_or_path"
    if reader.has(key):
        reader.set("model", reader.text(key), key)
    flash, named = "model.use_flash_attention_2", "model.attn_implementation"
    inner = "model.config_overrides.attn_config.attn_impl"
    if reader.flag(flash):
        reader.set("attention", "flash", flash)
    elif reader.has(inner) and "mpt" in reader.text(key).lower():
        reader.set("attention", reader.one_of(inner, _KERNELS), inner)
    else:
        reader.set("attention", reader.one_of(named, _HUB_KERNELS, "eager"), named)
        stops = "it is a setting of MPT alone, at which llm-foundry stops; counted as if it were not there"
        reader.not_modelled({inner: stops})
    for name in reader.table("model.config_overrides"):
        if f"model.config_overrides.{name}" not in _KEYS.harmless and name != "attn_config":
            reader.not_modelled({f"model.config_overrides.{name}": "the model is counted as its own config says"})
    if reader.table("model.peft_config"):
        _adapters(reader)


def _adapters(reader: ConfigReader) -> None:
    lead = "model.peft_config"
    kind = reader.text(f"{lead}.peft_type", "LORA")
    if kind.upper() != "LORA":
        reader.ask("lora", f"{lead}.peft_type", kind, f"is {kind[:20]}, and LoRA alone is modelled")
        reader.harmless(f"{lead}.")
        return
    set_lora(reader, reader.integer(f"{lead}.r", 8, low=1) or 8, f"{lead}.target_modules")
    reader.set("workload.lora_dropout", reader.number(f"{lead}.lora_dropout", 0.0), f"{lead}.lora_dropout")


def _mpt(reader: ConfigReader) -> bool:
    """MPT by its sizes, with the defaults of MPTConfig; False where its norms compute in 16 bits as all the rest."""
    kernel = reader.one_of("model.attn_config.attn_impl", _KERNELS, "flash")
    norm = reader.one_of("model.norm_type", _NORMS, "layernorm")
    reader.set("attention", kernel, "model.attn_config.attn_impl")
    loss = "model.loss_fn"
    reader.set("loss", reader.one_of(loss, _LOSSES, "fused-kernel"), loss)
    reader.note("note", "MC002", loss, _HELD)
    mlp = reader.text("model.ffn_config.ffn_type", "mptmlp")
    if mlp not in ("mptmlp", "mptglu"):
        key = "model.ffn_config.ffn_type"
        reader.ask("model", key, mlp, f"is {mlp[:20]}, whose experts or kernels are not read")
        reader.harmless("model.ffn_config.", "model.")
        return True
    width = reader.integer("model.d_model", 2048, low=1) or 2048
    heads = reader.integer("model.n_heads", 16, low=1) or 16
    reader.set("model", _sizes(reader, width, heads, norm, kernel, gated=mlp == "mptglu"), "model.n_layers")
    return not reader.text("model.norm_type", "low_precision_layernorm").startswith("low_precision")


def _sizes(reader: ConfigReader, width: int, heads: int, norm: str, kernel: str, *, gated: bool) -> dict[str, Any]:
    layers = reader.integer("model.n_layers", 24, low=1)
    biased = not reader.flag("model.no_bias")
    of_attention = bool(reader.flag("model.attention_bias", biased))
    ratio = reader.number("model.expansion_ratio", 4.0) or 4.0
    ffn = reader.integer("model.ffn_config.ffn_hidden_size", int(width * ratio), low=1)
    block = reader.number("model.resid_pdrop", 0.0)
    return {
        "name": f"MPT of {layers} x {width}",
        "family": "mpt",
        "n_layers": layers,
        "hidden": width,
        "heads": heads,
        "kv_heads": _shared_heads(reader, heads),
        "head_dim": reader.integer("model.head_dim", width // heads, low=1),
        "ffn": ffn,
        "vocab": reader.integer("model.vocab_size", 50_368, low=1),
        "gated": gated,
        "activation": _activation(reader),
        "norm": norm,
        "norm_bias": biased and norm == "layernorm",
        "bias": {"qkv": of_attention, "o": biased, "mlp": biased},
        "tied": bool(reader.flag("model.tie_word_embeddings", True)),
        "positions": _positions(reader, kernel),
        "max_positions": reader.integer("model.max_seq_len", 2048, low=1),
        "packed_qkv": bool(reader.flag("model.attn_config.fused_qkv", True)),
        "dropout": {
            "attention": reader.number("model.attn_config.attn_pdrop", 0.0),
            "block": block,
            "embedding": reader.number("model.emb_pdrop", 0.0),
        },
        "source": "a config of llm-foundry",
    }


def _activation(reader: ConfigReader) -> str:
    key = "model.ffn_config.ffn_act_fn"
    if not isinstance(reader.raw(key), dict):
        return "gelu"
    known = {"gelu": "gelu", "silu": "silu", "relu": "relu"}
    tanh = reader.text(f"{key}.approximate") == "tanh"
    name: str = reader.one_of(f"{key}.name", known, "gelu")
    return "gelu_tanh" if tanh and name == "gelu" else name


def _shared_heads(reader: ConfigReader, heads: int) -> int:
    """Key-value heads by the kind of attention (layers/attention.py)."""
    kinds = {"multihead_attention": heads, "multiquery_attention": 1, "grouped_query_attention": 0}
    fewer: int = reader.one_of("model.attn_config.attn_type", kinds, heads)
    return fewer or reader.integer("model.attn_config.kv_n_heads", heads, low=1) or heads


def _positions(reader: ConfigReader, kernel: str) -> str:
    """ALiBi or rotary ones turn the learned ones off; flash attention adds ALiBi inside of its kernel."""
    if reader.flag("model.attn_config.alibi"):
        return "none" if kernel == "flash" else "alibi"
    if reader.flag("model.attn_config.rope"):
        return "rope"
    return "learned" if reader.flag("model.learned_pos_emb", True) else "none"


def _batch(reader: ConfigReader) -> None:
    """Padded to ``max_seq_len`` unless a loader of conversations may trim; `auto` tries what fits."""
    reader.set_integer("seq_len", "max_seq_len")
    reader.set_integer("train_batch", "global_train_batch_size")
    key = "device_train_microbatch_size"
    if reader.text(key, "auto") == "auto":
        reader.ask("micro_batch", key, "auto", "is auto: the trainer halves it until a step fits")
    else:
        reader.set_integer("micro_batch", key)
        reader.set("micro_capped", True, key)  # calculate_batch_size_info
    trims = bool(reader.flag("train_loader.dataset.allow_pad_trimming"))
    reader.set("varying_lengths", trims, "train_loader.dataset.allow_pad_trimming")


def _sharding(reader: ConfigReader, *, casts: bool) -> None:
    """FSDP 1 where there are several GPUs and ``fsdp_config``; DDP without it, and on one GPU neither."""
    fsdp = bool(reader.table("fsdp_config"))
    key = "fsdp_config.sharding_strategy"
    stage = reader.one_of(key, _SHARDED, 3) if fsdp else 0
    reader.set("engine", "fsdp1" if stage else "ddp", key)
    reader.set("sharded", stage, key)
    reader.set("alone_plain", True, "model")
    if stage:
        _replicas(reader, key)
    if stage and reader.has("save_folder"):
        kinds = {"full": "full", "sharded": "sharded"}
        state = "fsdp_config.state_dict_type"
        reader.set("strategy.state_dict", reader.one_of(state, kinds, "full"), state)
    if (degree := reader.integer("tp_config.tensor_parallel_degree", 1, low=1)) != 1:
        reader.set("tp", degree, "tp_config.tensor_parallel_degree")
    reader.harmless("tp_config.")
    _precision(reader, casts=casts, sharded=bool(stage))
    if reader.flag(wanted := "fsdp_config.activation_checkpointing"):
        reader.set("recompute", "full", wanted)
        how = "fsdp_config.activation_checkpointing_reentrant"
        reader.set("strategy.checkpoint", "reentrant-inside" if reader.flag(how, True) else "non-reentrant", how)
    else:
        reader.set("recompute", "none", wanted)
        reader.harmless("fsdp_config.activation_checkpointing_reentrant")
    if reader.flag(moved := "fsdp_config.activation_cpu_offload"):
        reader.set("offload", ("activations",), moved)


def _replicas(reader: ConfigReader, key: str) -> None:
    if "hybrid" in reader.text(key).lower():
        reader.set("dp_shard", NODE, key)
    elif reader.text(key).lower() == "no_shard":  # Composer 1b7ba478 distributed/mosaic_parallelism.py, SHARDING_MAP
        reader.set("dp_shard", ALONE, key)
    copies, part = (f"fsdp_config.data_parallel_{name}_degree" for name in ("replicate", "shard"))
    if (replicas := reader.integer(copies, 1, low=1)) != 1:
        reader.set("dp_replicate", replicas, copies)
    elif (ranks := reader.number(part, -1)) is not None and ranks > 0:
        reader.set("dp_shard", reader.integer(part, low=1), part)


def _precision(reader: ConfigReader, *, casts: bool, sharded: bool) -> None:
    """Widths by ``precision`` and FSDP's ``mixed_precision`` (get_mixed_precision); autocast runs over both."""
    key, inner = "precision", "fsdp_config.mixed_precision"
    narrow = reader.one_of(key, _PRECISIONS, "bf16")
    if reader.text(key) == "amp_fp8":
        reader.not_modelled({key: "products are computed in 8 bits by Transformer Engine; counted as amp_bf16"})
    if reader.text("model.master_weights_dtype").lower() in _NARROW:
        reader.set("precision", "bf16", "model.master_weights_dtype")
        reader.harmless(inner)
        return
    table = isinstance(reader.raw(inner), dict)
    policy = "DEFAULT" if table else reader.one_of(inner, _POLICIES, "DEFAULT")
    units = reader.text(f"{inner}.param_dtype") if table else policy != "FULL"
    reduced = reader.text(f"{inner}.reduce_dtype") if table else "bf16" if policy == "PURE" else ""
    if sharded and narrow != "no" and not units:
        reader.set("precision", f"{narrow}-autocast", inner)
    else:
        reader.set("mixed", narrow, key)
        reader.set("accelerated", casts, key)
        reader.set("sync_each_batch", True, key)
    if sharded:
        reader.set("strategy.reduce_dtype", "bf16" if reduced in _NARROW and narrow != "no" else "fp32", inner)
    reader.harmless(f"{inner}.")


def _optimizer(reader: ConfigReader) -> None:
    key = "optimizer.name"
    if reader.has(key):
        reader.set("optimizer", reader.one_of(key, _OPTIMIZERS), key)
        reader.set("optimizer_impl", "loop", key)


def _evaluation(reader: ConfigReader) -> None:
    """It evaluates where a loader or tasks are there, on as much as it trains at a time where no size is said."""
    wanted = next((key for key in ("eval_loader", "eval_loaders", "icl_tasks", "icl_tasks_str") if reader.has(key)), "")
    if wanted:
        reader.set("evaluates", True, wanted)
    reader.set_integer("eval_micro_batch", "device_eval_batch_size")


def _recognise(document: Document) -> bool:
    return isinstance(document.data, dict) and all(key in document.data for key in _SIGNS)


FORMAT = Format("foundry", "llm-foundry YAML", _SOFTWARE, _recognise, read, kind="yaml", filename="train.yaml")
