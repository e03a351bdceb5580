"""Megatron-LM's settings by the names of its flags, and the model that they describe.

A flag is a name; YAML has tables, and says yes where flags say no. The model follows megatron/training/arguments.py
(validate_args).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import key_table
from memcalc.convert.objectives import refuse_forks, refuse_megatron
from memcalc.errors import ObjectiveError

KEYS = key_table("megatron")
_PLAIN = frozenset(name.removeprefix("no_").removeprefix("disable_") for name in KEYS.names("flags", "harmless"))
KNOWN = frozenset((*KEYS.names("flags", "harmless", "older", "yaml"), *_PLAIN))
"""Every name that flags or YAML have."""
RENAMED = {
    "tensor_model_parallel_size": ("model_parallel_size",),
    "micro_batch_size": ("batch_size",),
    "recompute_method": ("activations_checkpoint_method",),
    "recompute_num_layers": ("activations_checkpoint_num_layers", "checkpoint_num_layers"),
}
"""Names that flags had in Megatron-LM of 2019 to 2022 (b4bc51b, e156d2fe megatron/arguments.py)."""
WHOLE_BLOCKS = ("checkpoint_activations", "activations_checkpoint_method")
"""Flags of those years that checkpoint whole blocks."""
_BEFORE_ENGINE = frozenset((
    *(old for names in RENAMED.values() for old in names), *WHOLE_BLOCKS, "data_impl", "DDP_impl",
    "no_query_key_layer_scaling", "zero_stage", "train_tokens", "lr_decay_tokens", "lr_warmup_tokens",
    "deepspeed_activation_checkpointing", "no_pipeline_parallel",
))  # fmt: skip
"""Flags that went before --transformer-impl was transformer_engine by default (e7b74a4b, April 2024), and those of
Megatron-DeepSpeed, where it is local still (megatron/arguments.py)."""
_FLASH = ("use_flash_attn", *(f"use_flash_attn_{name}" for name in ("v1", "v2", "triton", "builder")))
_TABLES = ("language_model", "model_parallel")
_OPPOSITES = {
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
    "no_create_attention_mask_in_dataloader": "create_attention_mask_in_dataloader",
    "no_position_embedding": "add_position_embedding",
    "disable_bias_linear": "add_bias_linear",
}
"""Flags that turn something off, and the setting itself, which YAML states."""
_POSITIONS = {
    "learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope", "none": "none",
    "relative": "relative",
}  # fmt: skip
_LEARNED_MULTIPLE = 128
"""What memcalc pads Megatron-LM's vocabulary to, times TP: its default."""
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels")
_PATTERN = re.compile(r"\(?\[0\](?:\*(\d+))?\+\[1\]\*(\d+)\)?")


def key_in(document: Document, name: str) -> str:
    """The dotted key of a flag's setting in a document.

    Where YAML does not state it, it goes into the table of its kind: sizes of the model stand in ``language_model``,
    degrees in ``model_parallel``.
    """
    if document.kind != "yaml":
        return name
    plain: str = KEYS.tables["yaml_names"].get(name, _OPPOSITES.get(name, name))
    for table in _TABLES:
        inner = document.data.get(table)
        if isinstance(inner, dict) and plain in inner:
            return f"{table}.{plain}"
    return plain


@dataclass
class Flags:
    """A reading by the names of the flags."""

    reader: ConfigReader

    def key(self, name: str) -> str:
        """Where the setting stands, under the name that it had before where that one is there."""
        key = key_in(self.reader.document, name)
        older = next((old for old in RENAMED.get(name, ()) if self.reader.has(old)), "")
        return older if older and not self.reader.has(key) else key

    def has(self, name: str) -> bool:
        """Whether the config states it."""
        return self.reader.has(self.key(name))

    def integer(self, name: str, default: int | None = None, low: int = 0) -> int | None:
        """A whole number."""
        return self.reader.integer(self.key(name), default, low)

    def count(self, name: str, default: int = 1) -> int:
        """A whole number from 1 that has a default."""
        return self.integer(name, default, low=1) or default

    def number(self, name: str, default: float) -> float:
        """A number that has a default."""
        value = self.reader.number(self.key(name), default)
        return default if value is None else value

    def on(self, name: str) -> bool:
        """Whether a flag is there; for one that turns something off, whether YAML says no."""
        key = self.key(name)
        if self.reader.document.kind == "yaml" and name in _OPPOSITES:
            return self.reader.flag(key, True) is False
        return bool(self.reader.flag(key))

    def one_of(self, name: str, names: dict[str, Any], default: Any = None) -> Any:
        """What one of the known names stands for."""
        return self.reader.one_of(self.key(name), names, default)

    def text(self, name: str) -> str:
        """A text; empty where it is absent."""
        return self.reader.text(self.key(name))

    def items(self, name: str) -> list[Any]:
        """A list."""
        return self.reader.items(self.key(name))

    def set(self, word: str, value: Any, name: str) -> None:
        """State a word under the flag that says it."""
        self.reader.set(word, value, self.key(name))

    def warn(self, name: str, says: str) -> None:
        """Warn that a setting changes memory in a way that is not modelled."""
        key = self.key(name)
        value = self.reader.raw(key)
        stated = "" if value in (None, True) else f" {value}"
        self.reader.note("warning", "MC002", key, f"{key}{stated} changes memory but is not counted: {says}")

    def not_modelled(self, names: dict[str, str]) -> None:
        """Warn of all that are on."""
        off: tuple[Any, ...] = (False, None, 0, 1, "", "none", "fp32", [])
        self.reader.not_modelled({self.key(name): says for name, says in names.items()}, unless=off)

    def rest(self) -> tuple[str, ...]:
        """Every known name, in each table where it may stand."""
        tables = ("", *(f"{table}." for table in _TABLES)) if self.reader.document.kind == "yaml" else ("",)
        return tuple(f"{table}{name}" for table in tables for name in KNOWN)


def finished(flags: Flags) -> Config:
    """The record of all flags that were read; those of a fork that move memory are refused."""
    flags.reader.harmless(*flags.rest())
    refuse_forks(flags.reader.document.path.name, flags.reader.unread())
    return flags.reader.finish(known=flags.rest())


def note_older(flags: Flags) -> None:
    """Say which flags are of earlier years, at which today's Megatron-LM stops; other layers are not what is read."""
    names = dict.fromkeys((*(old for names in RENAMED.values() for old in names), *WHOLE_BLOCKS))
    if older := [old for old in names if flags.has(old)]:
        message = f"flags of Megatron-LM before 2023, counted as then; a newer one stops at them: {', '.join(older)}"
        flags.reader.note("note", "MC004", older[0], message)
    if flags.text("DDP_impl") == "torch":
        flags.warn("DDP_impl", "gradients are reduced by PyTorch's DDP; they are counted in Megatron-LM's own buffer")
    spec = " ".join(map(str, flags.items("spec")))
    if re.search("mamba|hybrid", spec):
        refuse_megatron(flags.reader.document.path.name, "pretrain_mamba.py")
    if spec and "gpt_layer_specs" not in spec:
        flags.warn("spec", "its layers are counted as those of GPT")


def own_attention(flags: Flags) -> tuple[str, str]:
    """Attention where Megatron-LM's own modules run, and the flag that tells; both empty for Transformer Engine.

    Scores are written out, but where its layers before core 0.8 had flash attention by a flag (d693034e).
    """
    stated, older = flags.text("transformer_impl"), sorted(_BEFORE_ENGINE & {*flags.reader.document.data})
    if stated not in ("", "local") or not (stated or older):
        return "", ""
    flash = [name for name in _FLASH if flags.on(name)] and not flags.on("use_mcore_models")
    return "flash" if flash else "eager", "transformer_impl" if stated else older[0]


def set_model(flags: Flags) -> None:
    """Set the model; without sizes the config is not one of a whole job, and it is asked for."""
    flat = flat_model(flags)
    unknown = [name for name in _SIZES if (flags.key(name),) in flags.reader.document.unknown]
    if flat is not None or unknown:
        flags.set("model", flat, unknown[0] if unknown else "num_layers")


def flat_model(flags: Flags) -> dict[str, Any] | None:
    """Return the sizes as a flat table, or None where number of blocks, width or heads are not stated.

    The vocabulary is left out where a tokenizer has it.
    """
    layers = flags.integer("num_layers", flags.integer("encoder_num_layers"), low=1)
    hidden, heads = flags.integer("hidden_size", low=1), flags.integer("num_attention_heads", low=1)
    gated = _gated(flags)
    if layers is None or hidden is None or heads is None:
        return None
    rounded = int((4 * hidden * 2 / 3) / 64) * 64
    ffn = flags.integer("ffn_hidden_size", rounded if flags.on("swiglu") or gated == "silu" else 4 * hidden, low=1)
    flat: dict[str, Any] = {
        "name": f"GPT of {layers} x {hidden}",
        "family": "megatron",
        "n_layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _groups(flags, heads),
        "head_dim": flags.integer("kv_channels", hidden // heads, low=1),
        "ffn": ffn,
        "gated": bool(gated),
        "norm": flags.one_of("normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "layernorm"),
        "tied": not flags.on("untie_embeddings_and_output_weights"),
        "max_positions": flags.count("max_position_embeddings", 1),
        "source": "flags of Megatron-LM",
        **_activation(flags, gated),
        **_biases(flags),
        **_positions(flags),
        **_dropout(flags),
        **_vocabulary(flags),
        **_experts(flags, layers, ffn or 1),
        **_latent(flags),
    }
    if flags.on("qk_layernorm") and "mla" not in flat:
        flat["qk_norm"] = "head"
    return flat


def _gated(flags: Flags) -> str:
    """The activation of a gated MLP; empty where it is not gated."""
    func = flags.one_of("activation_func", {"swiglu": "silu", "gelu": "", "squaredrelu": ""}, "")
    if flags.on("swiglu") or func:
        return "silu"
    return "gelu_tanh" if flags.on("quick_geglu") else ""


def _activation(flags: Flags, gated: str) -> dict[str, Any]:
    squared = flags.on("squared_relu") or flags.text("activation_func") == "squaredrelu"
    flags.on("openai_gelu")
    if gated:
        return {"activation": gated}
    return {"activation": "relu2" if squared else "gelu"}


_OF_FORKS = ("num_key_value_heads", "num_attention_heads_kv")
"""Key-value heads in Megatron-DeepSpeed (megatron/arguments.py) and in epfLLM's fork."""


def _groups(flags: Flags, heads: int) -> int:
    """Key-value heads: those of --num-query-groups count with --group-query-attention alone."""
    if flags.text("attention_head_type").lower() == "multiquery":  # BigCode's fork
        return 1
    if forked := next((name for name in _OF_FORKS if flags.has(name)), ""):
        return flags.integer(forked, heads, low=1) or heads
    groups = flags.count("num_query_groups")
    yaml = flags.reader.document.kind == "yaml"
    return groups if flags.on("group_query_attention") or (yaml and flags.has("num_query_groups")) else heads


def _biases(flags: Flags) -> dict[str, Any]:
    linear = not flags.on("disable_bias_linear")
    return {"bias": {"qkv": linear or flags.on("add_qkv_bias"), "o": linear, "mlp": linear}}


def _positions(flags: Flags) -> dict[str, Any]:
    kind = flags.one_of("position_embedding_type", _POSITIONS, "learned")
    if flags.on("use_rotary_position_embeddings"):
        kind = "rope"
    flags.on("no_position_embedding")
    fraction = flags.number("rotary_percent", 1.0)
    return {"positions": kind, **({"rotary_fraction": fraction} if kind == "rope" and 0 < fraction < 1 else {})}


def _dropout(flags: Flags) -> dict[str, Any]:
    block, attention = flags.number("hidden_dropout", 0.1), flags.number("attention_dropout", 0.1)
    return {"dropout": {"attention": attention, "block": block, "embedding": block}}


def _vocabulary(flags: Flags) -> dict[str, Any]:
    """Padded to a multiple of --make-vocab-size-divisible-by times TP (core/tokenizers/utils/build_tokenizer.py)."""
    padded, size = flags.integer("padded_vocab_size", low=1), flags.integer("vocab_size", low=1)
    multiple = flags.count("make_vocab_size_divisible_by", _LEARNED_MULTIPLE)
    tensor = flags.count("tensor_model_parallel_size")
    if padded is None and size is None and not (size := _of_gpt2(flags)):
        return {}
    rows = padded or -(-(size or 1) // (multiple * tensor)) * multiple * tensor
    if multiple == _LEARNED_MULTIPLE and padded is None:
        return {"vocab": size}
    if rows % (_LEARNED_MULTIPLE * tensor):
        counted = -(-rows // (_LEARNED_MULTIPLE * tensor)) * _LEARNED_MULTIPLE * tensor
        flags.warn("padded_vocab_size" if padded else "make_vocab_size_divisible_by", f"counted as {counted} rows")
    return {"vocab": rows}


def _of_gpt2(flags: Flags) -> int:
    """The tokens of GPT-2's files, where its tokenizer is named or, by default (pretrain_gpt.py), has merges."""
    named, merges = flags.text("tokenizer_type"), flags.text("merge_file")
    unknown = (flags.key("merge_file"),) in flags.reader.document.unknown
    if named not in ("", "GPT2BPETokenizer") or not ("gpt2" in merges.lower() or (not merges and (named or unknown))):
        return 0
    message = "GPT2BPETokenizer counts with the 50257 tokens of GPT-2's own files"
    flags.reader.note("note", "MC004", "tokenizer_type", message, "--set model.vocab=…")
    return 50257


def _experts(flags: Flags, layers: int, ffn: int) -> dict[str, Any]:
    if isinstance(flags.reader.raw(flags.key("num_experts")), list):  # of Megatron-DeepSpeed, one for each MoE layer
        raise ObjectiveError(
            f"{flags.reader.document.path.name} has a number of experts for each layer: memcalc has one."
        )
    experts = flags.integer("num_experts", 0)
    moe: dict[str, Any] = {
        "experts": experts,
        "topk": flags.count("moe_router_topk", 2),
        "ffn": flags.integer("moe_ffn_hidden_size", ffn, low=1),
        "first_dense": _first_dense(flags, layers),
    }
    shared = flags.integer("moe_shared_expert_intermediate_size", 0)
    if shared:
        moe |= {"shared": 1, "shared_ffn": shared}
    if flags.on("moe_shared_expert_gate"):
        moe["shared_gate"] = True
    if flags.one_of("moe_router_score_function", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax") == "sigmoid":
        moe["scores"] = "sigmoid"
    groups, chosen = flags.integer("moe_router_num_groups"), flags.integer("moe_router_group_topk")
    if groups and chosen:
        moe |= {"n_group": groups, "topk_group": chosen}
    return {"moe": moe} if experts and experts > 1 else {}


def _first_dense(flags: Flags, layers: int) -> int:
    """Leading dense blocks, from such as ``([0]*3+[1]*58)``; every block is routed where the frequency is 1."""
    text = flags.text("moe_layer_freq").replace(" ", "").strip("'\"")
    if text in ("", "1"):
        return 0
    match = _PATTERN.fullmatch(text)
    if match and int(match[1] or 1) + int(match[2]) == layers:
        return int(match[1] or 1)
    flags.warn("moe_layer_freq", "dense and routed blocks alternate; counted as all routed")
    return 0


def _latent(flags: Flags) -> dict[str, Any]:
    names = {
        "q_lora_rank": flags.integer("q_lora_rank", low=1),
        "kv_lora_rank": flags.integer("kv_lora_rank", 32, low=1),
        "qk_nope_head_dim": flags.integer("qk_head_dim", 128, low=1),
        "qk_rope_head_dim": flags.integer("qk_pos_emb_head_dim", 64, low=1),
        "v_head_dim": flags.integer("v_head_dim", 128, low=1),
    }
    if not flags.on("multi_latent_attention"):
        return {}
    return {"mla": {name: size for name, size in names.items() if size is not None}}
