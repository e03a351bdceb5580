"""Models of the suite, as configs of Transformers: sizes of known models, cut to few blocks where they are large."""

from __future__ import annotations

from typing import Any

__all__ = ["LAYERS", "SHAPES", "config_of"]

Config = dict[str, Any]


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, model_type: str = "llama", **more: Any
) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        **more,
    }


def _gpt2(hidden: int, layers: int, heads: int, vocab: int = 50257, dropout: float = 0.1) -> Config:
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    return {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": vocab,
        "n_positions": 1024, **rates,
    }  # fmt: skip


def _experts(model_type: str, number: int, topk: int, ffn: int, **more: Any) -> Config:
    key = "num_local_experts" if model_type == "mixtral" else "num_experts"
    return {"model_type": model_type, key: number, "num_experts_per_tok": topk, **more} | (
        {"intermediate_size": ffn} if model_type in {"mixtral", "olmoe"} else {"moe_intermediate_size": ffn}
    )


SHAPES: dict[str, Config] = {
    "llama-130m": _llama(768, 12, 12, 12, 2048, 32000),
    "llama-1b": _llama(2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-7b-blocks": _llama(4096, 4, 32, 32, 11008, 32000),
    "llama-8b-blocks": _llama(4096, 4, 32, 8, 14336, 32000),
    "llama-wide-vocab": _llama(1024, 4, 16, 16, 2816, 256000),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "qwen2-0.5b": _llama(896, 24, 14, 2, 4864, 151936, "qwen2", tie_word_embeddings=True),
    "qwen3-0.6b": _llama(1024, 28, 16, 8, 3072, 151936, "qwen3", head_dim=128, tie_word_embeddings=True),
    "mixtral-blocks": _llama(1024, 8, 16, 8, 2048, 32000) | _experts("mixtral", 8, 2, 2048),
    "olmoe-blocks": _llama(1024, 8, 16, 16, 512, 50304) | _experts("olmoe", 32, 4, 512, pad_token_id=1),
    "qwen3-moe-blocks": _llama(1024, 8, 16, 4, 3072, 151936) | _experts("qwen3_moe", 32, 4, 384, head_dim=128),
    "tiny-llama": _llama(256, 4, 4, 2, 704, 1088),
    "tiny-gpt2": _gpt2(256, 4, 4, 1088, 0.0),
    "tiny-qwen2": _llama(256, 4, 4, 2, 704, 1088, "qwen2", tie_word_embeddings=True),
    "tiny-wide-vocab": _llama(128, 2, 4, 4, 352, 16000),
}
"""By name. Those called tiny are for a CPU; GPT-2's has no dropout there, whose masks a CPU keeps at full width."""

LAYERS = {"gpt2": "n_layer"}
"""The key of the number of blocks where a model type has one of its own."""


def config_of(name: str, layers: int | None = None) -> Config:
    """Return the config of a model, with another number of blocks where one is given.

    >>> config_of("gpt2", 3)["n_layer"]
    3
    """
    config = dict(SHAPES[name])
    if layers is not None:
        config[LAYERS.get(config["model_type"], "num_hidden_layers")] = layers
    return config
