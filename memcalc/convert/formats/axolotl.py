"""axolotl's YAML, as axolotl 0.18.0 reads it.

Sources at 067b021c8: utils/schemas/*.py, loaders/model.py, loaders/adapter.py, core/builders/base.py,
utils/config/__init__.py (normalize_config, resolve_dtype), utils/trainer.py (setup_fsdp_envs), utils/__init__.py.
"""

from __future__ import annotations

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.axolotl_write import write
from memcalc.convert.formats.base import Format, key_table
from memcalc.convert.formats.fsdp_config import ACCELERATED, STATE_DICTS, set_reductions, set_resumes, set_state_dict
from memcalc.convert.formats.preferences import read_axolotl
from memcalc.convert.formats.tuning import (
    fsdp_keys,
    optimizers_of,
    refer_deepspeed,
    set_also_trained,
    set_fsdp,
    set_kernel,
    set_lora,
    set_optimizer,
    set_prepared,
    set_stored,
)
from memcalc.convert.objectives import refuse_task
from memcalc.errors import cut

KEYS = key_table("axolotl")
KNOWN = ("harmless", "not_modelled", "not_counted", "degrees", "lora_kernels", "liger")
"""What of the keys is offered as the nearest name of one that is unknown."""
_OPTIMIZERS = optimizers_of(KEYS)
_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash3", "sdpa": "", "eager": "eager",
    "flex_attention": "flash", "xformers": "efficient", "sage": "flash", "fp8": "flash",
}  # fmt: skip
"""``attn_implementation``; PyTorch's own choice (``sdpa``) follows from the model's class."""
_OLD_ATTENTION = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
"""Deprecated truth values (utils/schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL), the one that has its way first."""


def read(document: Document) -> Config:
    """Return what an axolotl config says of a job."""
    reader = ConfigReader(document, "axolotl", "axolotl 0.18")
    kind = reader.text("model_type")  # loaders/model.py: the class of Transformers that loads it
    if kind.endswith("Classification") and not (reader.has("reward_model") or reader.has("process_reward_model")):
        refuse_task(document.path.name, "seq_cls", f"model_type {cut(kind)}")
    reader.set("engine", "trainer", "base_model")
    reader.set("model", reader.text("base_model"), "base_model")
    reader.set("strategy.expandable_segments", True, "PYTORCH_ALLOC_CONF")
    _batch(reader)
    adapter = _adapter(reader)
    _precision(reader, adapter)
    sharded = _engine(reader)
    if adapter and not sharded:  # FSDP and ZeRO-3 prepare nothing
        set_prepared(reader)
    _checkpointing(reader, adapter)
    _attention(reader, adapter, sharded)
    _kernels(reader, adapter)
    set_optimizer(reader, "optimizer", "adamw_torch_fused", _OPTIMIZERS)
    _degrees(reader)
    read_axolotl(reader, KEYS, adapter)
    reader.harmless(*KEYS.harmless, *(() if adapter else KEYS.names("of_adapters", "lora_kernels")))
    reader.not_counted(KEYS.not_counted)
    reader.not_modelled(KEYS.not_modelled)
    return reader.finish(known=KEYS.names(*KNOWN))


def _batch(reader: ConfigReader) -> None:
    reader.set_integer("seq_len", "sequence_len", 512)
    micro = reader.integer("micro_batch_size", 1, low=1)
    reader.set("micro_batch", micro, "micro_batch_size")
    reader.set_integer("accumulation", "gradient_accumulation_steps", 1)
    set_reductions(reader)  # core/builders/base.py, _configure_accelerator_config
    if reader.has("batch_size"):
        message = "batch_size has no effect: gradient_accumulation_steps, 1 where it is left out, takes precedence"
        reader.note("note", "MC004", "batch_size", message)
    packed = bool(reader.flag("sample_packing"))
    reader.set("varying_lengths", not reader.flag("pad_to_sequence_len", packed), "pad_to_sequence_len")
    _batching(reader, packed=packed)
    reader.set_integer("eval_micro_batch", "eval_batch_size", micro)
    share = reader.number("val_set_size", 0.0) or 0.0
    tests = bool(reader.raw("test_datasets"))
    reader.harmless("test_datasets")
    stated = "evals_per_epoch" if reader.has("evals_per_epoch") else "eval_steps"
    off = reader.text("eval_strategy").lower() in ("no", "false") and not reader.has(stated)
    key = "eval_strategy" if off else "test_datasets" if tests else "val_set_size"
    reader.set("evaluates", (share > 0 or tests) and not off, key)
    metrics = next((key for key in ("do_causal_lm_eval", "do_bench_eval") if reader.flag(key)), "")
    reader.set("eval_keeps", "nothing", "do_causal_lm_eval")
    if metrics:
        reader.not_modelled({metrics: "samples are generated and compared after an evaluation"})
    reader.not_modelled({"eval_table_size": "samples are generated for a table of predictions"})
    set_resumes(reader, "resume_from_checkpoint", "auto_resume_from_checkpoints")
    if reader.flag("freeze_mm_modules"):
        reader.set("vision", "frozen", "freeze_mm_modules")


def _batching(reader: ConfigReader, *, packed: bool) -> None:
    """What becomes of sequences of several lengths.

    Padding is to multiples of 64, the end of a row among them, and packed rows are padded to the end unless the file
    says no (0.18.0, core/builders/causal.py and utils/schemas/validation.py).
    """
    if reader.flag("pad_to_sequence_len", packed):
        rule = "pad-max"
    elif packed:
        rule = "multipack"
    else:
        rule = "grouped" if reader.flag("group_by_length") else "pad"
    stated = {"multipack": "sample_packing", "grouped": "group_by_length"}.get(rule, "pad_to_sequence_len")
    reader.set("batch_rule", rule, stated)
    if reader.flag("pad_to_sequence_len", True):
        reader.set("padded_to", reader.integer("pad_to_multiple_of", 64, low=1), "pad_to_multiple_of")


def _adapter(reader: ConfigReader) -> str:
    """Adapters, and how the frozen base is stored; empty where the weights themselves are trained."""
    adapter = reader.text("adapter")
    if adapter and adapter not in ("lora", "qlora"):
        raise reader.error("adapter", adapter, "must be lora or qlora to be modelled")
    narrow = {bits: bool(reader.flag(f"load_in_{bits}bit")) for bits in (4, 8)}
    gptq = bool(reader.flag("gptq"))
    if not adapter and any(narrow.values()):
        raise reader.error(f"load_in_{4 if narrow[4] else 8}bit", True, "must be false where adapter is not set")
    if not adapter:
        return ""
    if adapter == "qlora" and not narrow[4]:
        raise reader.error("load_in_4bit", False, "must be true with adapter: qlora")
    rank = reader.integer("lora_r", low=1)
    if rank is None and not reader.has("lora_model_dir"):
        raise reader.error("lora_r", None, f"must be the rank of the adapters of adapter: {adapter}")
    all_linear = bool(reader.flag("lora_target_linear"))
    if rank is None:
        reader.ask("lora", "lora_model_dir", "rank", "has adapters whose rank is in another file")
    else:
        listed = "lora_target_linear" if all_linear else "lora_target_modules"
        set_lora(reader, rank, listed, all_linear, "lora_target_parameters")
        reader.harmless(*(("lora_target_modules",) if all_linear else ()))  # they are among all (loaders/adapter.py)
    reader.set("workload.lora_dropout", reader.number("lora_dropout", 0.0), "lora_dropout")
    if reader.flag("peft_autocast_adapter_dtype", True) is False:
        reader.set("adapter_dtype", "bf16", "peft_autocast_adapter_dtype")
    if reader.has("lora_modules_to_save"):
        set_also_trained(reader, "lora_modules_to_save")
    _quantised(reader, adapter, narrow, gptq)
    return adapter


def _quantised(reader: ConfigReader, adapter: str, narrow: dict[int, bool], gptq: bool) -> None:
    """What bitsandbytes stores (loaders/model.py); norms are cast back afterwards, so that none stays in fp32."""
    doubled = reader.flag("bnb_config_kwargs.bnb_4bit_use_double_quant", True)
    kind = reader.text("bnb_config_kwargs.bnb_4bit_quant_type", "nf4")
    reader.raw("bnb_config_kwargs.bnb_4bit_quant_storage")
    if kind not in ("nf4", "fp4"):
        raise reader.error("bnb_config_kwargs.bnb_4bit_quant_type", kind, "must be nf4 or fp4")
    if set_stored(reader, "base_model") or gptq:
        if gptq and not any(setting.name == "quantize" for setting in reader.settings):
            reader.ask("quantize", "gptq", "bits", "leaves the bits to the checkpoint")
    elif adapter == "qlora":
        reader.set("quantize", "nf4-dq" if doubled else "nf4", "load_in_4bit")
    elif narrow[8]:
        reader.set("quantize", "int8", "load_in_8bit")
    elif narrow[4]:
        allowed = "must be beside adapter: qlora, which quantizes; with lora PEFT casts the whole base to fp32"
        raise reader.error("load_in_4bit", True, allowed)
    if reader.flag("quantize_moe_experts"):
        _experts(reader, narrow)


def _experts(reader: ConfigReader, narrow: dict[int, bool]) -> None:
    """What check_quantize_moe_experts of utils/schemas/config.py asks; a model without experts has nothing of it."""
    key, bits = "quantize_moe_experts", any(narrow.values())
    if not bits or reader.flag("lora_target_linear"):
        needs = "lora_target_linear false" if bits else "load_in_4bit or load_in_8bit true"
        raise reader.error(key, True, f"needs {needs}: axolotl stops otherwise")
    reader.set("strategy.quantize_experts", True, key)


def _precision(reader: ConfigReader, adapter: str) -> None:
    """resolve_dtype: bf16 unless it is false, or fp16 is true and bf16 is left to itself; weights are loaded so."""
    requested = reader.raw("bf16", "auto")
    narrow = bool(reader.flag("fp16"))
    bf16 = not narrow if requested == "auto" else bool(reader.flag("bf16"))
    bfloat16, half = bool(reader.flag("bfloat16")), bool(reader.flag("float16"))
    if bf16 or bfloat16:
        weights, mixed, key = "bf16", "bf16", "bf16" if bf16 else "bfloat16"
    elif narrow:
        weights, mixed, key = "fp16", "fp16", "fp16"
    elif half or (adapter and bool(reader.flag("load_in_8bit"))):
        weights, mixed, key = "fp16", "no", "float16" if half else "load_in_8bit"
    else:
        weights, mixed, key = "fp32", "no", "bf16"
    reader.set("weights", weights, key)
    reader.set("mixed", mixed, key)
    reader.harmless("float32", "tf32")


def _engine(reader: ConfigReader) -> bool:
    """Who shares out the states: FSDP, DeepSpeed, or nobody; true where somebody does."""
    listed = [str(item).lower() for item in reader.items("fsdp") if str(item).lower() not in ("false", "")]
    if listed or reader.raw("fsdp_config"):
        _fsdp(reader, listed)
        return True
    reader.harmless("fsdp_version", "fsdp_final_state_dict_type")
    reader.set("zero", 0, "fsdp")
    return refer_deepspeed(reader)


def _fsdp(reader: ConfigReader, listed: list[str]) -> None:
    """``fsdp_config`` with or without the old prefix of its keys; ``fsdp`` lists what Transformers took before 5.0."""
    where = fsdp_keys(reader)
    version_key = "fsdp_version" if reader.has("fsdp_version") else where["version"]
    reader.raw(where["version"])
    set_fsdp(reader, version_key, 1, listed, where, "offload_params")
    if reader.integer(version_key, 1) == 2:
        # fsdp2_prepare_model of monkeypatch/accelerate/fsdp2.py, in place of Accelerate's, casts no weights to fp32
        reader.fact("casts_shards", False, version_key)
    dropped = where["sharding_strategy"]
    if str(reader.raw(dropped, "FULL_SHARD")).upper() not in ("FULL_SHARD", "1"):
        message = f"{dropped} has no effect: axolotl 0.18 drops it, and shards in full"
        reader.note("warning", "MC004", dropped, message, "reshard_after_forward: false")
    _saved(reader, where)
    reader.not_modelled({where["mixed_precision_policy"]: "FSDP computes in that dtype; counted as bf16 says"})


def _saved(reader: ConfigReader, where: dict[str, str]) -> None:
    """Checkpoints are of one type, the final model of another (train.py, save_trained_model); the larger one counts."""
    older = "fsdp_final_state_dict_type"
    last = where["final_state_dict_type"] if reader.has(where["final_state_dict_type"]) else older
    reader.harmless(older)
    kinds = {key: reader.one_of(key, STATE_DICTS) for key in (where["state_dict_type"], last)}
    gathering = [key for key, kind in kinds.items() if kind == "full"]
    stated = gathering or [key for key, kind in kinds.items() if kind]
    if stated:
        set_state_dict(reader, stated[0])


def _checkpointing(reader: ConfigReader, adapter: str) -> None:
    """Recomputation and offloaded activations, which with adapters replace it (loaders/model.py)."""
    raw = reader.raw("gradient_checkpointing", False)
    offloading = reader.raw("activation_offloading", False)
    reader.harmless("gradient_checkpointing_kwargs.")
    if str(raw) in ("offload", "offload_disk"):
        raw, offloading = True, True
    on = str(raw).lower() == "true"
    if str(raw).lower() not in ("true", "false"):
        raise reader.error("gradient_checkpointing", raw, "must be true, false, offload or offload_disk")
    key = "activation_offloading" if reader.raw("activation_offloading") else "gradient_checkpointing"
    moved = str(offloading).lower() not in ("false", "none", "")
    if moved:
        reader.set("offload", ("activations",), key)
    replaced = moved and bool(adapter) and offloading != "hidden_states"
    if any(setting.name == "recompute" for setting in reader.settings) and not on:
        return  # FSDP's own checkpointing
    reader.set("recompute", "full" if on and not replaced else "none", "gradient_checkpointing")
    engines = {setting.value for setting in reader.settings if setting.name == "engine"}
    if on and not replaced and engines & {"fsdp1", "fsdp2"}:
        reader.set("checkpoints_wrapped", True, "gradient_checkpointing")
    if on and not replaced:
        reentrant = _reentrant(reader) and (not moved or offloading == "hidden_states")
        reader.set("strategy.checkpoint", "reentrant" if reentrant else "non-reentrant", "gradient_checkpointing")


def _reentrant(reader: ConfigReader) -> bool:
    """normalize_config: reentrant, unless a part is frozen, or a policy is learned, or it is said otherwise."""
    if reader.raw("gradient_checkpointing_kwargs") is not None:
        return bool(reader.flag("gradient_checkpointing_kwargs.use_reentrant", False))
    hidden = reader.raw("activation_offloading") == "hidden_states"
    return not hidden and not reader.has("rl") and not reader.has("unfrozen_parameters")


def _attention(reader: ConfigReader, adapter: str, sharded: bool) -> None:
    key, requested = "attn_implementation", reader.text("attn_implementation")
    for flag, name in _OLD_ATTENTION.items():
        if reader.flag(flag) and not requested:
            key, requested = flag, name
    if requested and requested not in _ATTENTION and "/" not in requested:
        reader.one_of(key, _ATTENTION, fold=False)
    kernel = "flash" if "/" in requested else _ATTENTION[requested or "sdpa"]
    if kernel:
        set_kernel(reader, kernel, key)
    if requested in ("sage", "fp8"):
        reader.not_modelled({key: "inputs of attention are quantized"})
    if not adapter and not sharded and requested in ("", "sdpa", "eager"):
        effect = "embedding, head and norms are cast to fp32 unless attention is flash attention (loaders/model.py)"
        where = key if requested else "adapter"
        reader.note("warning", "MC002", where, f"without {key}: flash_attention_2, {effect}, and counted in 16 bits")


def _kernels(reader: ConfigReader, adapter: str) -> None:
    """What plugins replace, and the adapters' own kernels, which axolotl turns on by itself."""
    plugins = " ".join(map(str, reader.items("plugins"))).lower()
    if "spectrumplugin" in plugins and not adapter:
        says = "layers below the share of the best are frozen; all are estimated as trained"
        key = "spectrum_top_fraction" if reader.has("spectrum_top_fraction") else "plugins"
        reader.note("warning", "MC002", key, f"{key} changes memory but is not counted: {says}")
    liger = "ligerplugin" in plugins
    fused = {key.removeprefix("liger_"): bool(reader.flag(key)) and liger for key in KEYS.lists["liger"]}
    if fused["rms_norm"] and fused["rope"]:
        reader.set("kernels", "fused", "liger_rms_norm")
    elif fused["rms_norm"] or fused["rope"]:
        alone = "liger_rms_norm" if fused["rms_norm"] else "liger_rope"
        reader.not_modelled({alone: "norms and rotary embeddings are modelled as both fused or both not"})
    else:
        reader.set("kernels", "model", "liger_rms_norm")
    _activation(reader, liger=liger, fused=fused["rms_norm"] and fused["rope"])
    if fused["fused_linear_cross_entropy"]:
        reader.set("loss", "fused-linear", "liger_fused_linear_cross_entropy")
    elif fused["cross_entropy"]:
        reader.set("loss", "fused-kernel", "liger_cross_entropy")
    elif reader.flag("cut_cross_entropy", "cutcrossentropy" in plugins) and "cutcrossentropy" in plugins:
        reader.set("loss", "fused-linear", "cut_cross_entropy" if reader.has("cut_cross_entropy") else "plugins")
    elif reader.flag("chunked_cross_entropy"):
        reader.set("loss", "chunked", "chunked_cross_entropy")
    else:
        reader.set("loss", "standard", "liger_fused_linear_cross_entropy")
    compiled = reader.raw("torch_compile") == "auto" or reader.flag("torch_compile")
    reader.set("compile", "model" if compiled else "none", "torch_compile")
    if adapter:
        _adapter_kernels(reader, adapter)


def _activation(reader: ConfigReader, *, liger: bool, fused: bool) -> None:
    """Liger's activation, which ``kernels`` has together with its norms and rotary embeddings, and its LayerNorm."""
    if liger and not reader.flag("liger_rms_norm"):
        reader.not_modelled({"liger_layer_norm": "norms are one kernel"})
    reader.harmless("liger_layer_norm")
    key = "liger_swiglu" if reader.has("liger_swiglu") else "liger_glu_activation"
    if reader.has(key) and (bool(reader.flag(key)) and liger) != fused:
        reader.not_modelled({key: f"the MLP's activation is counted as {'' if fused else 'not '}fused"}, unless=())


def _adapter_kernels(reader: ConfigReader, adapter: str) -> None:
    """check_auto_enable_lora_kernels: on unless one is said, or 8 bits, foreign code, RL or FSDP 1 stand against it."""
    stated = [key for key in KEYS.lists["lora_kernels"] if reader.raw(key) is not None]
    engines = {setting.value for setting in reader.settings if setting.name == "engine"}
    against = reader.has("rl") or reader.flag("trust_remote_code") or "fsdp1" in engines
    eight = adapter == "lora" and reader.flag("load_in_8bit")
    on = any(reader.flag(key) for key in stated) if stated else not (against or eight)
    where = next(iter(stated), "lora_qkv_kernel")
    if "fsdp2" in engines and on:
        says = f"{where}: adapters run in fused kernels, which keep less than is counted here under FSDP 2"
        reader.note("warning", "MC002", where, says)
        on = False
    reader.set("strategy.lora_kernels", "fused" if on else "model", where)


def _degrees(reader: ConfigReader) -> None:
    tensor = reader.integer("tensor_parallel_size", 1, low=1)
    context = "context_parallel_size"
    if not reader.has(context) and reader.has("sequence_parallel_degree"):
        context = "sequence_parallel_degree"
    ranks = reader.integer(context, 1, low=1)
    if tensor != 1:
        reader.set("tp", tensor, "tensor_parallel_size")
    if ranks != 1:
        if reader.has("deepspeed"):  # monkeypatch/ring_attn/patch.py; Accelerate knows nothing of it there
            reader.set("cp_kind", "ring", context)
        reader.set("cp", ranks, context)
    if reader.flag("use_ray"):
        reader.set_integer("gpus", "ray_num_workers", 1)
    _replicas(reader)
    reader.not_modelled(KEYS.tables["degrees"], unless=(False, None, 0, 1, "", "none"))


def _replicas(reader: ConfigReader) -> None:
    """Replicas as stated, or those that the stated ranks of each leave (utils/distributed.py)."""
    replicas, shards = reader.integer("dp_replicate_size", 1, low=1), reader.integer("dp_shard_size", low=1)
    if (replicas or 1) > 1:
        reader.set("dp_replicate", replicas, "dp_replicate_size")
    elif (shards or 1) > 1:
        reader.set("dp_shard", shards, "dp_shard_size")


def _recognise(document: Document) -> bool:
    data = document.data
    return document.kind == "yaml" and "base_model" in data and not data.keys().isdisjoint(KEYS.lists["signs"])


FORMAT = Format(
    "axolotl", "axolotl YAML", "axolotl 0.18", _recognise, read, write, kind="yaml", filename="config.yaml",
    decided=(*ACCELERATED, "expandable_segments", "wide_embedding_moments", "kbit_experts", "kbit_passing"),
    launched=True, adds={
        "loss": ("chunked",), "optimizer": ("muon",), "parallel": ("tp", "cp"), "zero": ("2",),
        "offload": ("activations", "params,activations", "optimizer,params,activations"),
    },
    choices={
        "micro_batch": (), "recompute": ("none", "full"), "offload": ("none", "params,optimizer"),
        "whole_accumulation": (False,),
    },
    casts_shards=False,
    narrows={"recompute": "none/full"},
    settles={"strategy.expandable_segments": True},  # utils/__init__.py, set_pytorch_cuda_alloc_conf
    over_adapters={"autocast": True},  # bf16 is both the dtype of loading and autocast (loaders/model.py, base.py)
)  # fmt: skip
