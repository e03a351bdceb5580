"""Small configs of the decoders that a row of data describes, with sizes that no two tensors share."""

from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 176,
    "vocab_size": 613,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 32}
WINDOW = {"sliding_window": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 72}
DEEPSEEK = ROUTED | {"n_routed_experts": 6, "n_shared_experts": 1, "topk_group": 1, "n_group": 2}
LATENT = SMALL | {
    "num_key_value_heads": 4, "q_lora_rank": 56, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
GPT = {"n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 613, "n_positions": 512}
NEO = {
    "hidden_size": 96, "num_layers": 3, "num_heads": 4, "intermediate_size": 176, "vocab_size": 613, "window_size": 16,
    "attention_types": [[["global", "local"], 1], [["global"], 1]], "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "full_attention"]}
DELTA = HEADS | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
NEMOTRON_H = {key: value for key, value in HEADS.items() if key != "num_hidden_layers"} | {
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "mlp", "full_attention"],
    "mamba_num_heads": 6, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
}  # fmt: skip
MAMBA = {
    "hidden_size": 96, "num_hidden_layers": 3, "vocab_size": 613, "state_size": 12, "time_step_rank": 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
JAMBA = GROUPED | {
    "num_hidden_layers": 6, "num_experts": 5, "num_experts_per_tok": 2, "attn_layer_period": 3,
    "attn_layer_offset": 2, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_dt_rank": 20, "mamba_d_state": 12,
}  # fmt: skip
KIMI = ROUTED | LATENT | {
    "num_hidden_layers": 4, "q_lora_rank": None, "num_experts": 6, "num_expert_group": 2, "linear_num_heads": 6,
    "linear_head_dim": 40, "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
}  # fmt: skip
MAMBA2_ALONE = {"num_heads": 6, "head_dim": 32, "n_groups": 2, "chunk_size": 8}
MAMBA2 = GROUPED | {
    "num_hidden_layers": 4, "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip

LLAMA4 = HEADS | {
    "num_hidden_layers": 6, "intermediate_size": 72, "intermediate_size_mlp": 176, "num_local_experts": 5,
    "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 16,
}  # fmt: skip

GEMMA4 = HEADS | WINDOW | {
    "num_hidden_layers": 9, "hidden_size_per_layer_input": 0, "global_head_dim": 48, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
}  # fmt: skip

ROWS: dict[str, dict[str, Any]] = {
    "arcee": GROUPED,
    "apertus": HEADS,
    "ministral": HEADS | WINDOW,
    "olmo3": GROUPED | WINDOW,
    "exaone4": GROUPED | WINDOW,
    "ernie4_5": HEADS,
    "helium": GROUPED | {"head_dim": 24},
    "cwm": HEADS | WINDOW,
    "internlm3": GROUPED,
    "cohere2": GROUPED | WINDOW,
    "jais2": HEADS,
    "iquestcoder": HEADS,
    "hyperclovax": HEADS,
    "vaultgemma": HEADS | WINDOW,
    "nanochat": GROUPED,
    "hunyuan_v1_dense": HEADS,
    "youtu": LATENT,
    "minicpm3": LATENT,
    "flex_olmo": GROUPED | {"num_experts": 5, "num_experts_per_tok": 2},
    "mellum": HEADS | WINDOW | ROUTED | {"num_local_experts": 5},
    "solar_open": HEADS | DEEPSEEK,
    "exaone_moe": GROUPED | WINDOW | ROUTED | {"num_experts": 5},
    "glm4_moe_lite": LATENT | DEEPSEEK,
    "dots1": GROUPED | DEEPSEEK | {"first_k_dense_replace": 1},
    "aria_text": GROUPED | {"moe_num_experts": 5},
    "gpt_neo": NEO,
    "codegen": GPT | {"n_inner": 176, "rotary_dim": 8},
    "persimmon": SMALL,
    "openai-gpt": GPT,
    "granitemoe": GROUPED | {"num_local_experts": 5},
    "granitemoeshared": GROUPED | {"num_local_experts": 5, "shared_intermediate_size": 48},
    "minimax_m2": HEADS | {"num_local_experts": 5, "num_experts_per_tok": 2},
    "hy_v3": HEADS | ROUTED | {"num_experts": 5},
    "ministral3": HEADS,
    "ernie4_5_moe": GROUPED | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 72},
    "biogpt": SMALL,
    "xglm": {"d_model": 96, "num_layers": 3, "attention_heads": 4, "ffn_dim": 176, "vocab_size": 613},
}
"""By model type; the config of each differs from its class's defaults in most of what a row tells."""
CODED: dict[str, dict[str, Any]] = {
    "glm": HEADS,
    "glm4": HEADS,
    "granite": GROUPED,
    "seed_oss": HEADS,
    "smollm3": GROUPED,
    "cohere": GROUPED,
    "stablelm": GROUPED,
    "phi": GROUPED,
    "nemotron": GROUPED | {"head_dim": 24},
    "gpt_bigcode": GPT | {"n_inner": 176},
    "gptj": GPT | {"n_inner": 176, "rotary_dim": 8},
    "mpt": {"d_model": 96, "n_layers": 3, "n_heads": 4, "vocab_size": 613},
    "olmo": GROUPED,
    "olmoe": GROUPED | {"num_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": GROUPED | ROUTED | {"num_experts": 5, "shared_expert_intermediate_size": 88},
    "glm4_moe": HEADS | DEEPSEEK | {"first_k_dense_replace": 1},
    "lfm2": GROUPED | LFM2 | {"block_auto_adjust_ff_dim": False},
    "bamba": MAMBA2 | {"attn_layer_indices": [2, 3]},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 192, "pad_token_id": 0},
    "nemotron_h": NEMOTRON_H,
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {key: MAMBA[key] for key in MAMBA if key != "time_step_rank"} | MAMBA2_ALONE,
    "jamba": JAMBA,
    "kimi_linear": KIMI,
    "lfm3": HEADS
    | WINDOW
    | {
        "num_hidden_layers": 6,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", *["full_attention", "sliding_attention"] * 2],
    },
    "olmo_hybrid": GROUPED
    | {key: DELTA[key] for key in DELTA if key not in HEADS}
    | {"num_hidden_layers": 4, "linear_num_key_heads": 6},
    "granitemoehybrid": MAMBA2
    | {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "layer_types": ["mamba", "mamba", "attention", "attention"],
    },
    "llama4_text": LLAMA4,
    "gemma4_text": GEMMA4,
    "gemma4-experts": GEMMA4
    | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 72},
    "gemma4_unified_text": GEMMA4 | {"global_head_dim": 272, "num_global_key_value_heads": 2},
    "qwen3_next": DELTA | ROUTED | {"num_experts": 5, "shared_expert_intermediate_size": 88},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | ROUTED | {"num_experts": 5, "shared_expert_intermediate_size": 88},
    "lfm2_moe": GROUPED | LFM2 | ROUTED | {"num_experts": 5, "num_dense_layers": 1},
}
"""Others that have a function of their own."""
TYPES = {"gemma4-experts": "gemma4_text"}
"""The model type of a config where its name is another."""
EAGER_ONLY = frozenset({
    "vaultgemma", "gpt_neo", "openai-gpt", "mpt", "xglm", "mamba", "falcon_mamba", "mamba2",
})  # fmt: skip
"""Classes without an SDPA path."""
OTHER_LAYERS = {"gpt_neo": "num_layers", "xglm": "num_layers", "mpt": "n_layers",
                **dict.fromkeys(("codegen", "openai-gpt", "gpt_bigcode", "gptj"), "n_layer")}  # fmt: skip
"""How a config calls its number of blocks where not ``num_hidden_layers``."""
