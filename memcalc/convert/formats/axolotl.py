"""axolotl's YAML, as axolotl 0.18.0 reads it.

Sources at 067b021c8: utils/schemas/*.py, loaders/model.py, loaders/adapter.py, core/builders/base.py,
utils/config/__init__.py (normalize_config, resolve_dtype), utils/trainer.py (setup_fsdp_envs), utils/__init__.py.
"""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats import axolotl_keys as keys
from memcalc.convert.formats.axolotl_write import write
from memcalc.convert.formats.base import Format, inner_document
from memcalc.convert.formats.optimizers import say_optimizer
from memcalc.convert.formats.tuning import fsdp_keys, say_fsdp, say_lora, say_stored, say_trained_besides

_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "sdpa": "", "eager": "eager", "flex_attention": "flash",
    "xformers": "efficient", "sage": "flash", "fp8": "flash",
}  # fmt: skip
"""``attn_implementation``; PyTorch's own choice (``sdpa``) follows from the model's class."""
_OLD_ATTENTION = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
"""Deprecated truth values (utils/schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL), the one that has its way first."""
_REFERENCES = ("dpo", "ipo", "kto", "gdpo", "grpo")


def read(document: Document) -> Config:
    """Return what an axolotl config says of a job."""
    reading = Reading(document, "axolotl", "axolotl 0.18")
    reading.say("engine", "trainer", "base_model")
    reading.say("model", reading.text("base_model"), "base_model")
    reading.say("strategy.expandable_segments", True, "PYTORCH_ALLOC_CONF")
    _batch(reading)
    adapter = _adapter(reading)
    _precision(reading, adapter)
    sharded = _engine(reading)
    _checkpointing(reading, adapter)
    _attention(reading, adapter, sharded)
    _kernels(reading, adapter)
    say_optimizer(reading, "optimizer", "adamw_torch_fused", keys.OPTIMIZERS)
    _degrees(reading)
    _objective(reading)
    reading.harmless(*keys.HARMLESS, *(() if adapter else keys.WITHOUT_ADAPTER))
    reading.not_modelled(keys.NOT_MODELLED)
    return reading.finish(known=keys.KNOWN)


def _batch(reading: Reading) -> None:
    reading.say("seq_len", reading.whole("sequence_len", 512, low=1), "sequence_len")
    micro = reading.whole("micro_batch_size", 1, low=1)
    reading.say("micro_batch", micro, "micro_batch_size")
    reading.say("accumulation", reading.whole("gradient_accumulation_steps", 1, low=1), "gradient_accumulation_steps")
    if reading.has("batch_size"):
        said = "batch_size has no effect: gradient_accumulation_steps, 1 where it is left out, has its way"
        reading.note("note", "MC004", "batch_size", said)
    packed = bool(reading.flag("sample_packing"))
    reading.say("varying_lengths", not reading.flag("pad_to_sequence_len", packed), "pad_to_sequence_len")
    reading.say("eval_micro_batch", reading.whole("eval_batch_size", micro, low=1), "eval_batch_size")
    share = reading.number("val_set_size", 0.0) or 0.0
    tests = bool(reading.raw("test_datasets"))
    reading.harmless("test_datasets")
    reading.say("evaluates", share > 0 or tests, "test_datasets" if tests else "val_set_size")


def _adapter(reading: Reading) -> str:
    """Adapters, and how the frozen base is stored; empty where the weights themselves are trained."""
    adapter = reading.text("adapter")
    if adapter and adapter not in ("lora", "qlora"):
        raise reading.wrong("adapter", adapter, "must be lora or qlora to be modelled")
    narrow = {bits: bool(reading.flag(f"load_in_{bits}bit")) for bits in (4, 8)}
    gptq = bool(reading.flag("gptq"))
    if not adapter:
        if any(narrow.values()):
            key = f"load_in_{4 if narrow[4] else 8}bit"
            raise reading.wrong(key, True, "must be false where adapter is not set")
        return ""
    if adapter == "qlora" and not narrow[4]:
        raise reading.wrong("load_in_4bit", False, "must be true with adapter: qlora")
    rank = reading.whole("lora_r", low=1)
    if rank is None and not reading.has("lora_model_dir"):
        raise reading.wrong("lora_r", None, f"must be the rank of the adapters of adapter: {adapter}")
    every = bool(reading.flag("lora_target_linear"))
    if rank is None:
        reading.ask("lora", "lora_model_dir", reading.text("lora_model_dir"))
    else:
        say_lora(reading, rank, "lora_target_linear" if every else "lora_target_modules", every)
    reading.say("workload.lora_dropout", reading.number("lora_dropout", 0.0), "lora_dropout")
    if reading.flag("peft_autocast_adapter_dtype", True) is False:
        reading.say("adapter_dtype", "bf16", "peft_autocast_adapter_dtype")
    if reading.has("lora_modules_to_save"):
        say_trained_besides(reading, "lora_modules_to_save")
    _quantised(reading, adapter, narrow, gptq)
    return adapter


def _quantised(reading: Reading, adapter: str, narrow: dict[int, bool], gptq: bool) -> None:
    """What bitsandbytes stores (loaders/model.py); norms are cast back afterwards, so that none stays in fp32."""
    doubled = reading.flag("bnb_config_kwargs.bnb_4bit_use_double_quant", True)
    kind = reading.text("bnb_config_kwargs.bnb_4bit_quant_type", "nf4")
    reading.raw("bnb_config_kwargs.bnb_4bit_quant_storage")
    if kind not in ("nf4", "fp4"):
        raise reading.wrong("bnb_config_kwargs.bnb_4bit_quant_type", kind, "must be nf4 or fp4")
    if say_stored(reading, "base_model") or gptq:
        if gptq and not any(one.word == "quantize" for one in reading.said):
            reading.ask("quantize", "gptq", "the checkpoint's own bits")
    elif adapter == "qlora":
        reading.say("quantize", "nf4-dq" if doubled else "nf4", "load_in_4bit")
    elif narrow[8]:
        reading.say("quantize", "int8", "load_in_8bit")
    elif narrow[4]:
        reading.note("note", "MC004", "load_in_4bit", "load_in_4bit quantises nothing with adapter: lora; qlora does")


def _precision(reading: Reading, adapter: str) -> None:
    """resolve_dtype: bf16 unless it is false, or fp16 is true and bf16 is left to itself; weights are loaded so."""
    asked = reading.raw("bf16", "auto")
    narrow = bool(reading.flag("fp16"))
    bf16 = not narrow if asked == "auto" else bool(reading.flag("bf16"))
    bfloat16, half = bool(reading.flag("bfloat16")), bool(reading.flag("float16"))
    if bf16 or bfloat16:
        weights, mixed, key = "bf16", "bf16", "bf16" if bf16 else "bfloat16"
    elif narrow:
        weights, mixed, key = "fp16", "fp16", "fp16"
    elif half or (adapter and bool(reading.flag("load_in_8bit"))):
        weights, mixed, key = "fp16", "no", "float16" if half else "load_in_8bit"
    else:
        weights, mixed, key = "fp32", "no", "bf16"
    reading.say("weights", weights, key)
    reading.say("mixed", mixed, key)
    reading.harmless("float32", "tf32")


def _engine(reading: Reading) -> bool:
    """Who shares out the states: FSDP, DeepSpeed, or nobody; true where somebody does."""
    listed = [str(item).lower() for item in reading.items("fsdp") if str(item).lower() not in ("false", "")]
    if listed or reading.raw("fsdp_config"):
        _fsdp(reading, listed)
        return True
    reading.harmless("fsdp_version")
    reading.say("zero", 0, "fsdp")
    found = reading.raw("deepspeed")
    if isinstance(found, dict):
        reading.refer("deepspeed", "deepspeed", document=inner_document(reading.document, ("deepspeed",)))
        reading.harmless("deepspeed.")
    elif found:
        reading.refer("deepspeed", "deepspeed", path=reading.text("deepspeed"))
    return bool(found)


def _fsdp(reading: Reading, listed: list[str]) -> None:
    """``fsdp_config`` with or without the old prefix of its keys; ``fsdp`` lists what Transformers took before 5.0."""
    where = fsdp_keys(reading)
    version_key = "fsdp_version" if reading.has("fsdp_version") else where["version"]
    reading.raw(where["version"])
    say_fsdp(reading, version_key, 1, listed, where, "offload_params")
    dropped = where["sharding_strategy"]
    if str(reading.raw(dropped, "FULL_SHARD")).upper() not in ("FULL_SHARD", "1"):
        said = f"{dropped} has no effect: axolotl 0.18 drops it, and shards in full"
        reading.note("warning", "MC004", dropped, said, "reshard_after_forward: false")
    reading.not_modelled({where["mixed_precision_policy"]: "FSDP computes in that dtype; counted as bf16 says"})


def _checkpointing(reading: Reading, adapter: str) -> None:
    """Recomputation and offloaded activations, which with adapters replace it (loaders/model.py)."""
    raw = reading.raw("gradient_checkpointing", False)
    offloading = reading.raw("activation_offloading", False)
    reading.harmless("gradient_checkpointing_kwargs.")
    if str(raw) in ("offload", "offload_disk"):
        raw, offloading = True, True
    on = str(raw).lower() == "true"
    if str(raw).lower() not in ("true", "false"):
        raise reading.wrong("gradient_checkpointing", raw, "must be true, false, offload or offload_disk")
    key = "activation_offloading" if reading.raw("activation_offloading") else "gradient_checkpointing"
    moved = str(offloading).lower() not in ("false", "none", "")
    if moved:
        reading.say("offload", ("activations",), key)
    replaced = moved and bool(adapter) and offloading != "hidden_states"
    if any(said.word == "recompute" for said in reading.said) and not on:
        return  # FSDP's own checkpointing
    reading.say("recompute", "full" if on and not replaced else "none", "gradient_checkpointing")
    engines = {said.value for said in reading.said if said.word == "engine"}
    if on and not replaced and engines & {"fsdp1", "fsdp2"}:
        reading.say("checkpoints_wrapped", True, "gradient_checkpointing")
    if on and not replaced:
        reentrant = _reentrant(reading) and (not moved or offloading == "hidden_states")
        reading.say("strategy.checkpoint", "reentrant" if reentrant else "non-reentrant", "gradient_checkpointing")


def _reentrant(reading: Reading) -> bool:
    """normalize_config: reentrant, unless a part is frozen, or a policy is learned, or it is said otherwise."""
    if reading.raw("gradient_checkpointing_kwargs") is not None:
        return bool(reading.flag("gradient_checkpointing_kwargs.use_reentrant", False))
    hidden = reading.raw("activation_offloading") == "hidden_states"
    return not hidden and not reading.has("rl") and not reading.has("unfrozen_parameters")


def _attention(reading: Reading, adapter: str, sharded: bool) -> None:
    key, asked = "attn_implementation", reading.text("attn_implementation")
    for flag, name in _OLD_ATTENTION.items():
        if reading.flag(flag) and not asked:
            key, asked = flag, name
    if asked and asked not in _ATTENTION and "/" not in asked:
        reading.one_of(key, _ATTENTION)
    kernel = "flash" if "/" in asked else _ATTENTION[asked or "sdpa"]
    if kernel:
        reading.say("attention", kernel, key)
    if asked in ("sage", "fp8"):
        reading.not_modelled({key: "inputs of attention are quantised"})
    if not adapter and not sharded and asked in ("", "sdpa", "eager"):
        said = "embedding, head and norms are cast to fp32 unless attention is flash attention (loaders/model.py)"
        where = key if asked else "adapter"
        reading.note("warning", "MC002", where, f"without {key}: flash_attention_2, {said}, and counted in 16 bits")


def _kernels(reading: Reading, adapter: str) -> None:
    """What plugins replace, and the adapters' own kernels, which axolotl turns on by itself."""
    plugins = " ".join(map(str, reading.items("plugins"))).lower()
    liger = "ligerplugin" in plugins
    fused = {name: bool(reading.flag(f"liger_{name}")) and liger for name in keys.LIGER}
    if fused["rms_norm"] and fused["rope"]:
        reading.say("kernels", "fused", "liger_rms_norm")
    elif fused["rms_norm"] or fused["rope"]:
        alone = "liger_rms_norm" if fused["rms_norm"] else "liger_rope"
        reading.not_modelled({alone: "norms and rotary embeddings are modelled as both fused or both not"})
    else:
        reading.say("kernels", "model", "liger_rms_norm")
    if fused["fused_linear_cross_entropy"]:
        reading.say("loss", "fused-linear", "liger_fused_linear_cross_entropy")
    elif fused["cross_entropy"]:
        reading.say("loss", "fused-kernel", "liger_cross_entropy")
    elif reading.flag("cut_cross_entropy", "cutcrossentropy" in plugins) and "cutcrossentropy" in plugins:
        reading.say("loss", "fused-linear", "cut_cross_entropy" if reading.has("cut_cross_entropy") else "plugins")
    elif reading.flag("chunked_cross_entropy"):
        reading.say("loss", "chunked", "chunked_cross_entropy")
    else:
        reading.say("loss", "standard", "liger_fused_linear_cross_entropy")
    compiled = reading.raw("torch_compile", False)
    if compiled != "auto":
        compiled = reading.flag("torch_compile")
    reading.say("compile", "model" if compiled else "none", "torch_compile")
    if adapter:
        _adapter_kernels(reading, adapter)


def _adapter_kernels(reading: Reading, adapter: str) -> None:
    """check_auto_enable_lora_kernels: on unless one is said, or 8 bits, foreign code, RL or FSDP 1 stand against it."""
    said = [key for key in keys.LORA_KERNELS if reading.raw(key) is not None]
    engines = {one.value for one in reading.said if one.word == "engine"}
    against = reading.has("rl") or reading.flag("trust_remote_code") or "fsdp1" in engines
    eight = adapter == "lora" and reading.flag("load_in_8bit")
    on = any(reading.flag(key) for key in said) if said else not (against or eight)
    where = next(iter(said), "lora_qkv_kernel")
    if "fsdp2" in engines and on:
        says = f"{where}: adapters run in fused kernels, which keep less than is counted here under FSDP 2"
        reading.note("warning", "MC002", where, says)
        on = False
    reading.say("strategy.lora_kernels", "fused" if on else "model", where)


def _degrees(reading: Reading) -> None:
    tensor = reading.whole("tensor_parallel_size", 1, low=1)
    context = "context_parallel_size"
    if not reading.has(context) and reading.has("sequence_parallel_degree"):
        context = "sequence_parallel_degree"
    ranks = reading.whole(context, 1, low=1)
    if tensor != 1:
        reading.say("tp", tensor, "tensor_parallel_size")
    if ranks != 1:
        reading.say("cp", ranks, context)
    if reading.flag("use_ray"):
        reading.say("gpus", reading.whole("ray_num_workers", 1, low=1), "ray_num_workers")
    if (reading.whole("dp_replicate_size", 1, low=1) or 1) > 1:
        reading.not_modelled({"dp_replicate_size": "states are shared out over a part of the ranks (hybrid sharding)"})
    reading.harmless("dp_shard_size")
    reading.not_modelled(keys.DEGREES, unless=(False, None, 0, 1, "", "none"))


def _objective(reading: Reading) -> None:
    """Anything but the next token needs memory of its own."""
    name = reading.text("rl").lower()
    if name:
        besides = "chosen and rejected samples pass together" + (", beside a frozen reference" * (name in _REFERENCES))
        reading.not_modelled({"rl": besides})
    reading.harmless("trl.", "vllm.", "ebft.", "rl_beta")


def _recognise(document: Document) -> bool:
    data: Any = document.data
    return document.kind == "yaml" and isinstance(data, dict) and "base_model" in data and bool(keys.SIGNS & set(data))


FORMAT = Format(
    name="axolotl",
    title="axolotl YAML",
    software="axolotl 0.18",
    recognise=_recognise,
    read=read,
    write=write,
    kind="yaml",
    filename="config.yaml",
    choices={"micro_batch": (), "recompute": ("none", "full"), "offload": ("none", "params,optimizer")},
)
"""axolotl's own file."""
