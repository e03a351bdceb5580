"""Decoders of Transformers with other mixers of tokens beside attention, in flat form.

Defaults of absent keys are those of the config class (Transformers 5.24, models/*/configuration_*.py); biases, norms
and projections are those of the model class (models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_keys import Flat, Keys, Sizes, activation, attention_bias, decoder, rotary_fraction
from memcalc.errors import InputError


def lfm2(c: Keys) -> Flat:
    """LFM2: gated short convolutions in most blocks, attention in the others."""
    c.only("block_use_swiglu", True)
    c.get(_LFM2_UNREAD)
    flat = _lfm2(c, (65536, 2560, 12288, 32, 32, 8, None, 128000))
    return {**flat, "ffn": _lfm2_ffn(c)}


def lfm2_moe(c: Keys) -> Flat:
    """LFM2 with experts behind a few dense blocks."""
    flat = _lfm2(c, (65536, 2048, 7168, 32, 32, 8, None, 128000))
    c.flag("use_expert_bias", True)
    moe = {
        "experts": c.size("num_experts", 32),
        "topk": c.size("num_experts_per_tok", 4),
        "ffn": c.size("moe_intermediate_size", 1792),
        "first_dense": c.size("num_dense_layers", 2, low=0),
        "scores": "sigmoid",
        "normalised": c.flag("norm_topk_prob", True),
        "scaled": True,
    }
    return {**flat, "moe": moe}


_LFM2_UNREAD = """
    block_dim block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_dim conv_dim_out
    conv_use_xavier_init num_heads theta use_pos_enc
"""
"""Keys of LFM2's checkpoints that its class does not read, or that move no size."""


def _lfm2(c: Keys, sizes: Sizes) -> Flat:
    flat = decoder(c, sizes, tied=True, qk_norm="head")
    taps, bias = c.size("conv_L_cache", 3), c.flag("conv_bias")
    mixer = {"kind": "short convolution", "taps": taps, "bias": bias}
    tied = c.flag("tie_embedding tie_word_embeddings", True)  # the class lets the first win
    return {**flat, "tied": tied, **_mixing(mixer, _mixed(c, flat["n_layers"], "conv"))}


def lfm3(c: Keys) -> Flat:
    """LFM3: short convolutions, attention in windows and of all tokens, with a gate for each head and norms around."""
    flat = decoder(c, (128000, 2048, 7680, 24, 16, 4, 128, 128000), tied=True, **attention_bias(c), qk_norm="head")
    c.get("rope_parameters")
    layers, around = flat["n_layers"], c.flag("use_sandwich_norm", True)
    usual = [
        "full_attention" if n % 4 == 2 else "sliding_attention" if n % 4 == 0 and n else "conv" for n in range(layers)
    ]
    kinds = c.words("layer_types") or usual
    if len(kinds) != layers or not {*kinds} <= {"full_attention", "sliding_attention", "conv"}:
        allowed = f"must call each of the {layers} layers full_attention, sliding_attention or conv"
        raise InputError("config key layer_types", kinds, allowed)
    width, tables = c.maybe("sliding_window", 256), len({*kinds} - {"conv"})
    mixer = {"kind": "short convolution", "taps": c.size("conv_L_cache", 7), "bias": c.flag("conv_bias")}
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    flat |= {"norm_place": "both", "norms": 4} if around else {}
    flat |= {"window": width, "full_layers": full} if width and "sliding_attention" in kinds else {}
    flat |= {"rotary_fraction": 1.0, "wide_rotary": True, "rotary_tables": tables or 1}
    flat |= {"head_gate": c.flag("use_attention_gate", True)}
    return {**flat, **_mixing(mixer, [index for index, kind in enumerate(kinds) if kind == "conv"])}


def _delta(c: Keys, sizes: Sizes, *, packed: bool) -> Flat:
    """Return what Qwen3-Next and Qwen 3.5 have in common."""
    c.only("attn_output_gate", True)
    c.only("hidden_act", "silu")
    c.get(_DELTA_UNREAD)
    fraction = rotary_fraction(c, 0.25)
    flat = decoder(c, sizes, **attention_bias(c), qk_norm="head", norm_scale="plus-one", output_gate=True)
    mixer = {
        "kind": "gated delta net",
        "key_heads": c.size("linear_num_key_heads", 16),
        "value_heads": c.size("linear_num_value_heads", 32),
        "key_dim": c.size("linear_key_head_dim", 128),
        "value_dim": c.size("linear_value_head_dim", 128),
        "taps": c.size("linear_conv_kernel_dim", 4),
        "packed": packed,
    }
    step, layers = c.size("full_attention_interval", 4), flat["n_layers"]
    usual = ["full_attention" if (index + 1) % step == 0 else "linear_attention" for index in range(layers)]
    mixed = _listed(c, usual, "linear_attention")
    return {**flat, "rotary_fraction": fraction, **_mixing(mixer, mixed)}


_DELTA_UNREAD = "mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype mlp_only_layers"
"""Keys of their checkpoints that move no size of the class; the last is read by Qwen3-Next alone."""


def _delta_experts(c: Keys, experts: int, topk: int, layers: int, *, normalised: bool) -> Flat:
    step, listed = c.size("decoder_sparse_step", 1), c.sizes("mlp_only_layers")
    dense = [index for index in range(layers) if index in listed or (index + 1) % step]
    return {
        "experts": c.size("num_experts", experts),
        "topk": c.size("num_experts_per_tok", topk),
        "ffn": c.size("moe_intermediate_size", 512),
        "shared_ffn": c.size("shared_expert_intermediate_size", 512),
        "shared_gate": True,
        "normalised": normalised,
        "narrow_weights": True,
        **({"dense_layers": dense} if dense else {}),
    }


def _lfm2_ffn(c: Keys) -> int:
    """Return the MLP's width, which the class takes two thirds of, scales and rounds up where it is told to."""
    ffn, multiple = c.size("block_ff_dim intermediate_size", 12288), c.size("block_multiple_of", 256)
    unscaled = c.get("block_ffn_dim_multiplier", 1.0) is None
    times = c.number("block_ffn_dim_multiplier", 1.0)
    if not c.flag("block_auto_adjust_ff_dim", True):
        return ffn
    if unscaled:
        return int(2 * ffn / 3)
    return multiple * -(-int(times * int(2 * ffn / 3)) // multiple)


def _mixed(c: Keys, layers: int, kind: str) -> list[int]:
    """Return the blocks of a kind, by ``layer_types``, or by ``full_attn_idxs`` where it is absent."""
    attending = c.get("full_attn_idxs")
    full = c.sizes("full_attn_idxs") if attending is not None else list(range(layers))
    return _listed(c, ["full_attention" if index in full else kind for index in range(layers)], kind)


OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""What older configs call kinds of blocks."""


def _listed(c: Keys, usual: list[str], kind: str) -> list[int]:
    """Return the blocks that ``layer_types`` calls by a kind, the others having attention; ``usual`` where absent."""
    kinds = [OLD_KINDS.get(kind, kind) for kind in c.words("layer_types layers_block_type") or usual]
    if len(kinds) != len(usual) or not {*kinds} <= {"full_attention", kind}:
        allowed = f"must call each of the {len(usual)} layers full_attention or {kind}"
        raise InputError("config key layer_types", kinds, allowed)
    return [index for index, listed in enumerate(kinds) if listed == kind]


def _mixing(mixer: Flat, layers: list[int]) -> Flat:
    return {"mixer": mixer, "mixer_layers": layers} if layers else {}


def qwen3_next(c: Keys) -> Flat:
    """Qwen3-Next: gated delta nets in three blocks of four, attention with a gate in the others, experts."""
    flat = _delta(c, (151936, 2048, 5632, 48, 16, 2, 256, 32768), packed=True)
    return {**flat, "moe": _delta_experts(c, 512, 10, flat["n_layers"], normalised=c.flag("norm_topk_prob", True))}


def qwen3_5_text(c: Keys) -> Flat:
    """The text model of Qwen 3.5."""
    return _delta(c, (248320, 4096, 12288, 32, 16, 4, 256, 32768), packed=False)


def qwen3_5_moe_text(c: Keys) -> Flat:
    """The text model of Qwen 3.5 with experts."""
    flat = _delta(c, (248320, 2048, 512, 40, 16, 2, 256, 32768), packed=False)
    return {**flat, "moe": {**_delta_experts(c, 256, 8, flat["n_layers"], normalised=True), "dense_layers": ()}}


def bamba(c: Keys) -> Flat:
    """Bamba: Mamba-2 mixers in all blocks but those that are listed."""
    flat = decoder(c, (128000, 4096, 14336, 32, 32, 8, None, 262144), **activation(c), **attention_bias(c))
    c.get("num_logits_to_keep time_step_limit z_loss_coefficient")
    attending, layers = c.sizes("attn_layer_indices"), flat["n_layers"]
    mixed = [index for index in range(layers) if index not in attending]
    bias = {**flat.get("bias", {}), "mlp": c.flag("mlp_bias")}
    return {**flat, "bias": bias, "rotary_fraction": rotary_fraction(c, 0.5), **_mixing(_mamba2(c, flat), mixed)}


def granitemoehybrid(c: Keys) -> Flat:
    """Granite 4: Mamba-2 mixers in most blocks; experts beside a shared MLP, or that MLP alone."""
    flat = decoder(c, (32000, 4096, 11008, 32, 32, 32, None, 2048), **activation(c), **attention_bias(c))
    c.only("normalization_function", "rmsnorm")
    c.get("time_step_limit")
    mixed = _listed(c, ["linear_attention"] * flat["n_layers"], "linear_attention")
    shared, experts = c.size("shared_intermediate_size", 1024), c.maybe("num_local_experts", 8, low=0)
    topk = c.maybe("num_experts_per_tok", 2, low=0)
    flat |= {"positions": "rope" if c.get("position_embedding_type") == "rope" else "none", "packed_mlp": True,
             "embedding_scaled": True, "head_scaled": True}  # fmt: skip
    mlp = {"moe": {"experts": experts, "topk": topk, "shared_ffn": shared, "scores": "chosen", "narrow_weights": True,
                   "shared_packed": True}}  # fmt: skip
    return {**flat, **(mlp if experts else {"ffn": shared}), **_mixing(_mamba2(c, flat), mixed)}


def _mamba2(c: Keys, flat: Flat) -> Flat:
    """Return the mixer of Bamba and those after it, whose keys begin with ``mamba_``."""
    inner = int(c.number("mamba_expand", 2) * flat["hidden"])
    heads = c.size("mamba_n_heads", 128)
    c.get("mamba_d_head")
    return {
        "kind": "Mamba-2 mixer",
        "heads": heads,
        "head_dim": inner // heads,
        "state": c.size("mamba_d_state", 256),
        "groups": c.size("mamba_n_groups", 1),
        "taps": c.size("mamba_d_conv", 4),
        "chunk": c.size("mamba_chunk_size", 256),
        "conv_bias": c.flag("mamba_conv_bias", True),
        "bias": c.flag("mamba_proj_bias"),
    }


_FALCON_H1_SCALES = """
    num_logits_to_keep mamba_norm_before_gate time_step_limit lm_head_multiplier mlp_multipliers key_multiplier
    attention_out_multiplier attention_in_multiplier ssm_multipliers ssm_in_multiplier ssm_out_multiplier
"""


def falcon_h1(c: Keys) -> Flat:
    """Falcon-H1: attention and a Mamba-2 mixer side by side in each block, with constants before and after."""
    flat = decoder(c, (128000, 4096, 14336, 32, 32, 8, None, 8192), **activation(c), **attention_bias(c))
    c.only("mamba_use_mlp", True)
    c.get(_FALCON_H1_SCALES)
    mixer = _mamba2(c, flat)
    inner = c.maybe("mamba_d_ssm") or mixer["heads"] * mixer["head_dim"]
    c.only("projectors_bias", mixer["bias"])
    mixer |= {"head_dim": inner // mixer["heads"], "normed": c.flag("mamba_rms_norm"), "scaled": True}
    bias = {**flat.get("bias", {}), "mlp": c.flag("mlp_bias")}
    return {**flat, "bias": bias, "embedding_scaled": True, "head_scaled": True, "mixer": mixer, "mixer_beside": True}


def jamba(c: Keys) -> Flat:
    """Jamba: Mamba mixers with learned norms in most blocks, attention without positions in the others; experts."""
    c.only("hidden_act", "silu")
    c.get(_JAMBA_UNREAD)
    flat = decoder(c, (65536, 4096, 14336, 32, 32, 8, None, 262144), positions="none")
    layers, hidden = range(flat["n_layers"]), flat["hidden"]
    attending, routed = _every(c, "attn_layer", 8, 4), _every(c, "expert_layer", 2, 1)
    inner = c.size("mamba_expand", 2) * hidden
    mixer = mamba_mixer(c, hidden, inner, "mamba_dt_rank", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias")
    mixer |= {"bias": c.flag("mamba_proj_bias"), "norms": "learned"}
    flat |= _mixing(mixer, [index for index in layers if not attending(index)])
    experts, topk = c.size("num_experts num_local_experts", 16), c.size("num_experts_per_tok", 2)
    dense = [index for index in layers if not routed(index)]
    if experts == 1 or len(dense) == len(layers):
        return flat
    return {**flat, "moe": {"experts": experts, "topk": topk, "narrow_weights": True, "dense_layers": dense}}


_JAMBA_UNREAD = """
    num_logits_to_keep calc_logits_for_entire_prompt use_mamba_kernels use_mambapy use_associative_scan
    mamba_inner_layernorms
"""
"""Keys of its checkpoints that the class does not read, or that move no size."""


def _every(c: Keys, name: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return whether a block, counted from 0, is the one of each period that an offset names."""
    step, start = c.size(f"{name}_period", period), c.size(f"{name}_offset", offset, low=0)
    if start >= step:
        raise InputError(f"config key {name}_offset", start, f"must be below {name}_period {step}")
    return lambda index: index % step == start


def olmo_hybrid(c: Keys) -> Flat:
    """OLMo Hybrid: gated delta nets behind their norms, and attention with norms on its branches."""
    c.only("hidden_act", "silu")
    c.get("linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor")
    rope = c.table("rope_parameters")
    turned = rope is not None and rope.get("rope_theta") is not None
    sizes = (100352, 3840, 11008, 32, 30, None, None, 65536)
    flat = decoder(c, sizes, **attention_bias(c), qk_norm="full", norm_scale="wide", norm_place="branch")
    heads = flat["heads"]
    key_heads, value_heads = c.maybe("linear_num_key_heads") or heads, c.maybe("linear_num_value_heads") or heads
    key_dim = c.maybe("linear_key_head_dim") or int(0.75 * flat["hidden"] / key_heads)
    mixer = {
        "kind": "gated delta net",
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": c.maybe("linear_value_head_dim") or 2 * key_dim,
        "taps": c.size("linear_conv_kernel_dim", 4),
        "apart": True,
        "doubled": c.flag("linear_allow_neg_eigval", True),
    }
    usual = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(flat["n_layers"])]
    usual = usual if "full_attention" in usual else [*usual[:-1], "full_attention"]
    positions = {"wide_rotary": True} if turned else {"positions": "none"}
    mixed = _listed(c, usual, "linear_attention")
    return {**flat, **positions, "mixer_norm_place": "pre", **_mixing(mixer, mixed)}


def kimi_linear(c: Keys) -> Flat:
    """Kimi Linear: delta attention in three blocks of four, latent attention without positions in the others."""
    c.only("hidden_act", "silu")
    about = c.table("linear_attn_config") or Keys({})
    flat = decoder(c, (163840, 2304, 9216, 27, 32, 32, None, 1048576), **attention_bias(c), positions="none")
    layers = flat["n_layers"]
    mla = {
        "q_lora_rank": c.maybe("q_lora_rank"),
        "kv_lora_rank": c.size("kv_lora_rank", 512),
        "qk_nope_head_dim": c.size("qk_nope_head_dim", 128),
        "qk_rope_head_dim": c.size("qk_rope_head_dim", 64),
        "v_head_dim": c.size("v_head_dim", 128),
    }
    mixer = {
        "kind": "delta attention",
        "heads": about.size("num_heads", c.size("linear_num_heads", 32)),
        "head_dim": about.size("head_dim", c.size("linear_head_dim", 128)),
        "taps": about.size("short_conv_kernel_size", c.size("linear_conv_kernel_dim", 4)),
    }
    attending = [index - 1 for index in about.sizes("full_attn_layers")] or range(4, layers, 4)
    about.get("kda_layers")
    about.refuse_rest()
    usual = ["full_attention" if index in attending else "linear_attention" for index in range(layers)]
    mixed = _listed(c, usual, "linear_attention")
    flat |= {"kv_heads": None, "head_dim": None, "tied": False, "mla": mla, "moe": _kimi_experts(c, layers)}
    flat["max_positions"] = c.size("model_max_length max_position_embeddings", 1048576)
    return {**flat, **_mixing(mixer, mixed)}


def _kimi_experts(c: Keys, layers: int) -> Flat:
    usual = ["dense" if index < c.size("first_k_dense_replace", 1, low=0) else "sparse" for index in range(layers)]
    kinds = c.words("mlp_layer_types") or usual
    if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise InputError("config key mlp_layer_types", kinds, f"must call each of the {layers} layers dense or sparse")
    groups = c.maybe("num_expert_group n_group", 1), c.maybe("topk_group", 1)
    return {
        "experts": c.size("num_experts num_local_experts", 256),
        "topk": c.size("num_experts_per_token num_experts_per_tok", 8),
        "ffn": c.size("moe_intermediate_size", 1024),
        "shared": c.size("num_shared_experts n_shared_experts", 1),
        "dense_layers": [index for index, kind in enumerate(kinds) if kind == "dense"],
        "scores": "sigmoid",
        "normalised": c.flag("moe_renormalize norm_topk_prob", True),
        "fp32_router": True,
        "scaled": True,
        **(dict(zip(("n_group", "topk_group"), groups, strict=True)) if None not in groups else {}),
    }


def mamba_mixer(c: Keys, hidden: int, inner: int, rank: str, state: str, taps: str, conv_bias: str) -> Flat:
    """Return a Mamba mixer by what its family calls the keys; the rank follows from the width where it is `auto`."""
    usual = -(-hidden // 16)
    return {
        "kind": "Mamba mixer",
        "inner": inner,
        "state": c.size(state, 16),
        "rank": usual if c.get(rank, "auto") == "auto" else c.size(rank),
        "taps": c.size(taps, 4),
        "conv_bias": c.flag(conv_bias, True),
    }


FAMILIES = (
    lfm2, lfm2_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text, bamba, granitemoehybrid, falcon_h1, jamba, olmo_hybrid,
    kimi_linear, lfm3,
)  # fmt: skip
HYBRIDS: dict[str, Callable[[Keys], Flat]] = {family.__name__: family for family in FAMILIES}
