"""Gemma 4's text model: heads of two widths, norms of values too, values that are keys on blocks that see all tokens.

Defaults of absent keys are those of the config class (Transformers 5.24 models/gemma4/configuration_gemma4.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_keys import Flat, Keys, activation, attention_bias, decoder
from memcalc.errors import InputError

KINDS = ("sliding_attention", "full_attention")


def gemma4_text(c: Keys) -> Flat:
    """Gemma 4 without embeddings of each layer."""
    return _gemma4(c, 131072, 512, 256)


def gemma4_unified_text(c: Keys) -> Flat:
    """The text model of Gemma 4 without a vision tower, whose blocks are the same."""
    return _gemma4(c, 262144, 1024, 0)


def _gemma4(c: Keys, positions: int, window: int, embeddings: int) -> Flat:
    for key, usual, part in (
        ("hidden_size_per_layer_input", embeddings, "embeddings of each layer are"),
        ("num_kv_shared_layers", 0, "layers that read the keys of another one are"),
    ):
        count = c.maybe(key, usual, low=0)
        if count:
            raise InputError(f"config key {key}", count, f"only 0 is modelled: {part} not")
    c.only("use_bidirectional_attention", "vision")  # images alone are seen both ways
    c.get("vocab_size_per_layer_input use_double_wide_mlp")
    flat = decoder(c, (262144, 2304, 9216, 30, 8, 4, 256, positions), tied=True, **attention_bias(c))
    kinds = _kinds(c, flat["n_layers"])
    return {
        **flat,
        **activation(c, "gelu_pytorch_tanh", "hidden_activation hidden_act"),
        **_attention(c, kinds, window, flat),
        "embedding_scaled": True,
        "head_softcap": c.get("final_logit_softcapping") is not None,
        **_experts(c, flat["ffn"]),
        "norm_place": "both",
        "norm_scale": "wide",
        "norm_written_out": True,
        "norm_powered": True,
        "scaled_blocks": True,
        "qk_norm": "head",
        "value_norm": True,
        "shares_keys": True,
    }


def _kinds(c: Keys, layers: int) -> list[str]:
    """Return what each block sees; the class has the last one see all tokens whatever its config says."""
    kinds = c.words("layer_types") or [KINDS[(index + 1) % 6 == 0] for index in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {*KINDS}:
        allowed = f"must call each of the {layers} layers {' or '.join(KINDS)}"
        raise InputError("config key layer_types", kinds, allowed)
    return [*kinds[:-1], KINDS[1]]


def _attention(c: Keys, kinds: list[str], usual: int, near: Flat) -> Flat:
    """Return the window of the blocks that have one, and the sizes of those that have none."""
    full = [index for index, kind in enumerate(kinds) if kind == KINDS[1]]
    keyed = c.flag("attention_k_eq_v")
    width, kv_heads = c.size("global_head_dim", 512), c.maybe("num_global_key_value_heads")
    kv_heads = (kv_heads if keyed else None) or near["kv_heads"]
    if c.get("per_layer_config") is not None:
        width, kv_heads = _listed(c.get("per_layer_config"), full, near)
    far = {"head_dim": width, "kv_heads": kv_heads, "values_of_keys": keyed}
    windowed = len(full) < len(kinds)
    bounded = {"window": c.size("sliding_window", usual), "full_layers": full, "wider_tables": width}
    return {"far": far, **(bounded if windowed else {})}


def _experts(c: Keys, dense: int) -> Flat:
    """Return the norms of a block, and the experts beside its MLP."""
    if not c.flag("enable_moe_block"):
        c.get("num_experts top_k_experts moe_intermediate_size")
        return {"norms": 4}
    moe = {"experts": c.size("num_experts"), "topk": c.size("top_k_experts"), "ffn": c.size("moe_intermediate_size")}
    return {"norms": 7, "moe": {**moe, "shared_ffn": dense, "own_norms": True}}


def _listed(listed: object, full: list[int], near: Flat) -> tuple[int, int]:
    """Return the same sizes where the config lists what layers have of their own, as the class writes it."""
    if not isinstance(listed, dict) or not all(isinstance(table, dict) for table in listed.values()):
        raise InputError("config key per_layer_config", listed, "must be a table of each layer's own keys")
    if {str(key).lstrip("0") or "0" for key in listed} != {str(index) for index in full}:
        allowed = "must list the layers that see all tokens, and no others"
        raise InputError("config key per_layer_config", sorted(map(str, listed)), allowed)
    tables = [Keys(table, f"per_layer_config.{key}.") for key, table in listed.items()]
    usual = near["head_dim"], near["kv_heads"]
    sizes = [(t.size("head_dim", usual[0]), t.size("num_key_value_heads", usual[1])) for t in tables]
    for table in tables:
        table.refuse_rest()
    if len({*sizes}) > 1:
        raise InputError("config key per_layer_config", sorted(map(str, listed)), "must be the same for each of them")
    return sizes[0]


GEMMA4: dict[str, Callable[[Keys], Flat]] = {"gemma4_text": gemma4_text, "gemma4_unified_text": gemma4_unified_text}
