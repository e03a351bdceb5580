"""Small real classes of Transformers, with sizes that no two tensors share, and a plain Llama in torchtitan's style."""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import torch
import transformers.masking_utils  # noqa: F401  # so that cuda_like finds it
from torch import nn

from autograd import row_families

TINY = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 176,
    "vocab_size": 613,
}
KV = {"num_key_value_heads": 2}
BATCH, SEQ = 2, 40


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of Transformers, its small config, and the auto class that trains it."""

    model_type: str
    config: dict[str, Any]
    kind: str = "CausalLM"
    """What follows ``AutoModelFor``."""
    layers_field: tuple[str, ...] = ("num_hidden_layers",)
    dropout: tuple[str, ...] = ()
    """Config fields that hold a dropout rate."""
    eager_only: bool = False
    """The class has no SDPA path."""


FALCON = {key: value for key, value in TINY.items() if key != "intermediate_size"} | {
    "ffn_hidden_size": 176,
    "bias": False,
    "alibi": False,
}
GPT_NAMES = {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_inner": 176, "vocab_size": 613, "n_positions": 512}
MOE = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
MLA = TINY | {
    "num_key_value_heads": 4, "q_lora_rank": 56, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 72,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "topk_group": 1, "n_group": 2,
}  # fmt: skip
T5_CONFIG = {
    "d_model": 96,
    "d_kv": 24,
    "d_ff": 176,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 613,
    "decoder_start_token_id": 0,
}
WHISPER = {
    "d_model": 96, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 176, "decoder_ffn_dim": 176, "vocab_size": 613, "num_mel_bins": 20, "max_source_positions": 40,
    "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
PAIRS = "images and their texts"
"""The kind of a model whose loss compares both, for which Transformers has no class of its own name."""
TOWER = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 176, "projection_dim": 64,
}  # fmt: skip
CLIP = {
    "projection_dim": 64,
    "text_config": TOWER | {"vocab_size": 613, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": TOWER | {"image_size": 48, "patch_size": 8},
}
HIDDEN_ATTENTION = ("hidden_dropout_prob", "attention_probs_dropout_prob")

FAMILIES: dict[str, Family] = {
    "gpt2": Family("gpt2", GPT_NAMES, layers_field=("n_layer",), dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "gpt-neox": Family("gpt_neox", TINY, dropout=("attention_dropout", "hidden_dropout")),
    "opt": Family(
        "opt",
        {
            "hidden_size": 96,
            "word_embed_proj_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 176,
            "vocab_size": 613,
        },
        dropout=("dropout", "attention_dropout"),
    ),
    "bloom": Family(
        "bloom",
        {"hidden_size": 96, "n_layer": 3, "n_head": 4, "vocab_size": 613},
        layers_field=("n_layer",),
        dropout=("hidden_dropout", "attention_dropout"),
        eager_only=True,
    ),
    "falcon-7b": Family(
        "falcon",
        FALCON | {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
        dropout=("hidden_dropout", "attention_dropout"),
    ),
    "falcon-40b": Family(
        "falcon",
        FALCON | {"num_kv_heads": 2, "parallel_attn": True, "new_decoder_architecture": True},
        dropout=("hidden_dropout", "attention_dropout"),
    ),
    "llama-2": Family("llama", TINY | {"num_key_value_heads": 4}, dropout=("attention_dropout",)),
    "llama-3": Family("llama", TINY | KV, dropout=("attention_dropout",)),
    "smollm2": Family("llama", TINY | KV | {"tie_word_embeddings": True}, dropout=("attention_dropout",)),
    "mistral": Family("mistral", TINY | KV | {"sliding_window": None}, dropout=("attention_dropout",)),
    "mistral-window": Family("mistral", TINY | KV | {"sliding_window": 16}, dropout=("attention_dropout",)),
    "qwen2": Family("qwen2", TINY | KV, dropout=("attention_dropout",)),
    "qwen3": Family("qwen3", TINY | KV | {"head_dim": 32}, dropout=("attention_dropout",)),
    "gemma": Family("gemma", TINY | {"num_key_value_heads": 1, "head_dim": 32}, dropout=("attention_dropout",)),
    "gemma2": Family(
        "gemma2", TINY | KV | {"head_dim": 32, "sliding_window": 16}, dropout=("attention_dropout",), eager_only=True
    ),
    "gemma3": Family("gemma3_text", TINY | KV | {"head_dim": 32, "sliding_window": 16}, dropout=("attention_dropout",)),
    "gemma3-wide": Family(
        "gemma3_text", TINY | KV | {"head_dim": 32, "sliding_window": 4096}, dropout=("attention_dropout",)
    ),
    "phi3": Family("phi3", TINY | KV | {"pad_token_id": 0}, dropout=("resid_pdrop", "embd_pdrop", "attention_dropout")),
    "olmo2": Family("olmo2", TINY | KV | {"pad_token_id": 0}, dropout=("attention_dropout",)),
    "starcoder2": Family(
        "starcoder2", TINY | KV, dropout=("attention_dropout", "residual_dropout", "embedding_dropout")
    ),
    "gpt-oss": Family(
        "gpt_oss",
        TINY
        | KV
        | {key: MOE[key] for key in ("num_local_experts", "num_experts_per_tok")}
        | {"head_dim": 32, "sliding_window": 16},
        dropout=("attention_dropout",),
        eager_only=True,
    ),
    "mixtral": Family("mixtral", TINY | KV | MOE, dropout=("attention_dropout",)),
    "qwen3-moe": Family("qwen3_moe", TINY | KV | MOE | {"head_dim": 32}, dropout=("attention_dropout",)),
    "deepseek-v2": Family("deepseek_v2", MLA | {"topk_method": "greedy"}, dropout=("attention_dropout",)),
    "deepseek-v3": Family("deepseek_v3", MLA, dropout=("attention_dropout",)),
    "bert": Family("bert", TINY, "MaskedLM", dropout=HIDDEN_ATTENTION),
    "t5": Family(
        "t5", T5_CONFIG, "Seq2SeqLM", layers_field=("num_layers", "num_decoder_layers"), dropout=("dropout_rate",)
    ),
    "t5-gated": Family(
        "t5",
        T5_CONFIG | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "Seq2SeqLM",
        layers_field=("num_layers", "num_decoder_layers"),
        dropout=("dropout_rate",),
    ),
    "vit": Family(
        "vit",
        {k: v for k, v in TINY.items() if k != "vocab_size"} | {"image_size": 48, "patch_size": 8, "num_labels": 11},
        "ImageClassification",
        dropout=HIDDEN_ATTENTION,
    ),
    "clip": Family("clip", CLIP, PAIRS, layers_field=()),
    "whisper": Family(
        "whisper",
        WHISPER,
        "SpeechSeq2Seq",
        layers_field=("encoder_layers", "decoder_layers"),
        dropout=("dropout", "attention_dropout", "activation_dropout"),
    ),
}
FAMILIES |= {
    name: Family(
        row_families.TYPES.get(name, name),
        config,
        layers_field=(row_families.OTHER_LAYERS.get(name, "num_hidden_layers"),),
        eager_only=name in row_families.EAGER_ONLY,
    )
    for name, config in (row_families.ROWS | row_families.CODED).items()
}


def hf_config(family: str, *, layers: int | None = None, dropout: bool | float | None = None, **changes: Any) -> Any:
    """Return the config object of ``family``; ``dropout`` None keeps the rates of the config, False sets all to 0."""
    from transformers import AutoConfig

    known = FAMILIES[family]
    fields = known.config | changes
    if layers is not None:
        fields |= dict.fromkeys(known.layers_field, layers)
    if dropout is not None:
        fields |= dict.fromkeys(known.dropout, float(dropout) if not isinstance(dropout, bool) else 0.1 * dropout)
    return AutoConfig.for_model(known.model_type, **fields)


def hf_model(family: str, config: Any, *, dtype: torch.dtype, eager: bool) -> nn.Module:
    """Build the real class in training mode, inside whatever tensor mode is on."""
    import transformers

    kind = FAMILIES[family].kind
    auto = transformers.AutoModel if kind == PAIRS else getattr(transformers, "AutoModelFor" + kind)
    config.use_cache = False
    # Initial values are of no use here, and truncated normals ask a tensor for its values
    with mock.patch.object(transformers.PreTrainedModel, "initialize_weights", return_value=None):
        model = auto.from_config(
            config, dtype=dtype, attn_implementation="eager" if eager or FAMILIES[family].eager_only else "sdpa"
        )
    with contextlib.suppress(AttributeError, ValueError):
        model.set_experts_implementation("grouped_mm")  # the loop over experts asks for values, which fake tensors lack
    model.train()
    return model


def hf_inputs(family: str, config: Any, batch: int, seq: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return one batch as a data collator gives it, without an attention mask (fixed lengths)."""
    kind = FAMILIES[family].kind
    if kind == "ImageClassification":
        size = config.image_size
        images = torch.empty(batch, config.num_channels, size, size, dtype=dtype)
        return {"pixel_values": images, "labels": torch.zeros(batch, dtype=torch.long)}
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    if kind == PAIRS:
        size = config.vision_config.image_size
        return {
            "input_ids": tokens,
            "pixel_values": torch.empty(batch, 3, size, size, dtype=dtype),
            "return_loss": True,
        }
    if kind == "SpeechSeq2Seq":
        frames = torch.empty(batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
        return {"input_features": frames, "labels": tokens}
    return {"input_ids": tokens, "labels": torch.zeros(batch, seq, dtype=torch.long)}


class TitanAttention(nn.Module):
    """Grouped-query attention with complex rotary embedding."""

    def __init__(self, dim: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, self.head_dim = heads, kv, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:  # noqa: D102
        b, s, _ = x.shape
        q = rotate(self.wq(x).view(b, s, self.heads, self.head_dim), turns)
        k = rotate(self.wk(x).view(b, s, self.kv, self.head_dim), turns)
        v = self.wv(x).view(b, s, self.kv, self.head_dim)
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.kv < self.heads
        )
        return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate pairs by complex multiplication in fp32, as torchtitan does."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1], None]).flatten(3).type_as(x)


class TitanBlock(nn.Module):
    """Pre-norm block: attention, then SwiGLU."""

    def __init__(self, dim: int, heads: int, kv: int, ffn: int) -> None:
        super().__init__()
        self.attention = TitanAttention(dim, heads, kv)
        self.w1, self.w3 = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:  # noqa: D102
        h = x + self.attention(self.attention_norm(x), turns)
        y = self.ffn_norm(h)
        return h + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


class TitanLlama(nn.Module):
    """Llama as torchtitan writes it; ``forward`` returns logits."""

    def __init__(
        self,
        *,
        dim: int = 96,
        heads: int = 4,
        kv: int = 2,
        ffn: int = 176,
        layers: int = 3,
        vocab: int = 613,
        longest: int = 4096,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(TitanBlock(dim, heads, kv, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        turns = torch.zeros(longest, dim // heads // 2, dtype=torch.complex64)
        torch.set_default_dtype(before)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # noqa: D102
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def titan_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy on fp32 logits, as torchtitan computes it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def chunked_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy on eight parts of the positions, each cast alone."""
    parts, wanted = logits.flatten(0, 1).chunk(8), labels.flatten(0, 1).chunk(8)
    total = torch.zeros(())
    for rows, targets in zip(parts, wanted, strict=True):
        total = total + nn.functional.cross_entropy(rows.float(), targets) / 8
    return total


LOSSES = {"standard": titan_loss, "chunked": chunked_loss}


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks by module path: the children of every outermost list of like modules."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(done + ".") for done in found)
        if isinstance(module, nn.ModuleList) and len(module) > 0 and not inside and _layered(module):
            found |= {f"{path}.{i}": child for i, child in enumerate(module)}
    return found


def _layered(blocks: nn.ModuleList) -> bool:
    return all(type(child).__name__.endswith(("Layer", "Block")) for child in blocks)
