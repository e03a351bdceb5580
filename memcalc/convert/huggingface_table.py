"""Models of Transformers that a row of data describes: which keys their config.json has, and what each means.

The rows and the words in them are those of ``huggingface_families.toml``; a family with a rule that no row can tell has
a function of its own in the modules beside this one. Encoders in the shape of BERT have ``huggingface_encoders.toml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from memcalc.catalog import read_toml
from memcalc.convert.huggingface_keys import (
    Flat,
    Keys,
    activation,
    architecture,
    biases,
    expert_groups,
    rotary_fraction,
    window,
)
from memcalc.errors import InputError
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model

Row = Mapping[str, Any]
_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
}
"""The fields of ``sizes`` in a row, and the key of each where the row's ``names`` have no other."""
_OPTIONAL = ("kv_heads", "head_dim")
_DROPOUT = {"attention": ["attention_dropout", 0.0]}
_ACTIVATION = ["hidden_act", "silu"]


def read(c: Keys, row: Row) -> Flat:
    """Return the flat form of a config by the row of its family."""
    for key, allowed in row.get("only", {}).items():
        c.only(key, *allowed)
    c.get(row.get("ignored", ""))
    flat = _sizes(c, row)
    flat |= {
        "tied": c.flag("tie_word_embeddings", row.get("tied", False)),
        "activation": c.activation(*row.get("activation", _ACTIVATION)),
        "bias": {layer: c.flag(*key) if isinstance(key, list) else key for layer, key in _bias(row)},
        "dropout": {layer: c.rate(*key) for layer, key in row.get("dropout", _DROPOUT).items()},
        "rotary_fraction": _turned(c, row, flat),
        **{field: yes if c.flag(key, on) else no for field, (key, on, yes, no) in row.get("flags", {}).items()},
        **{field: c.get(*key) is not None for field, key in row.get("given", {}).items()},
        **_window(c, row, flat["n_layers"]),
    }
    if "latent" in row:
        flat |= {"kv_heads": None, "head_dim": None, "mla": _latent(c, row["latent"])}
    if "moe" in row:
        flat["moe"] = _experts(c, row["moe"], flat["n_layers"])
    return {**flat, **row.get("fixed", {})}


def _sizes(c: Keys, row: Row) -> Flat:
    names = row.get("names", {})
    sizes: Flat = {}
    for (field, key), default in zip(_SIZES.items(), row["sizes"], strict=True):
        known = names.get(field, key)
        sizes[field] = c.maybe(known, default or None) if field in _OPTIONAL else default and c.size(known, default)
    if "ffn_times_hidden" in row:
        inner = c.maybe(row.get("inner", "intermediate_size"))
        sizes["ffn"] = inner or row["ffn_times_hidden"] * sizes["hidden"]
    elif not sizes["ffn"]:
        sizes["ffn"] = c.maybe("intermediate_size")
    if "position_rows_over" in row:
        sizes["position_rows"] = sizes["max_positions"] + row["position_rows_over"]
    # The classes floor the width of a head where their config says none (``hidden_size // num_attention_heads``)
    return {**sizes, "head_dim": sizes["head_dim"] or max(1, sizes["hidden"] // sizes["heads"])}


def _bias(row: Row) -> list[tuple[str, Any]]:
    return list(row.get("bias", {}).items())


def _turned(c: Keys, row: Row, flat: Flat) -> float:
    if "turned_elements" not in row:
        return rotary_fraction(c, row.get("turned", 1.0))
    head_dim = flat["head_dim"]
    turned: int = c.maybe(*row["turned_elements"]) or head_dim
    return min(1.0, float(turned / head_dim))


def _window(c: Keys, row: Row, layers: int) -> Flat:
    """Return the window of the blocks that have one: by the row's pattern where the config lists no kinds."""
    if "local" in row:
        return _local(c, row["local"], layers)
    if "window" not in row:
        return {}
    rule = row["window"]
    width = rule["width"] or None
    if "late" in rule:
        first = c.maybe("max_window_layers", rule["late"], low=0) or 0
        return window(c, width, lambda index: index < first, layers)
    first, step = rule.get("full", (0, 0))
    if "step" in rule:
        step = _step(c, rule["step"], step)
        first = step - 1
    return window(c, width, lambda index: bool(step) and index % step == first, layers)


def _step(c: Keys, key: str, usual: int) -> int:
    """Return which blocks see all, each n-th: as a number, or as a letter for each block of a turn (EXAONE: LLLG)."""
    letters = c.get(key)
    if isinstance(letters, str) and letters == "L" * (len(letters) - 1) + "G":
        return len(letters)
    return c.maybe(key, usual, low=0) or 0


def _local(c: Keys, rule: Row, layers: int) -> Flat:
    """Return the window of the blocks called local (GPT-Neo), every second one where the config lists none."""
    width, kinds = c.size(*rule["width"]), c.words(rule["layers"])
    kinds = kinds or [("global", "local")[index % 2] for index in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {"global", "local"}:
        raise InputError(
            f"config key {rule['layers']}", kinds, f"must call each of the {layers} layers global or local"
        )
    full = [index for index, kind in enumerate(kinds) if kind == "global"]
    return {"window": width, "full_layers": full} if len(full) < layers else {}


def _latent(c: Keys, widths: Mapping[str, int]) -> Flat:
    c.get("num_key_value_heads head_dim qk_head_dim")
    latent: Flat = {key: c.size(key, width) for key, width in widths.items() if key != "q_lora_rank"}
    return {**latent, "q_lora_rank": c.maybe("q_lora_rank", widths["q_lora_rank"]), "rotation": "pairs"}


def _experts(c: Keys, rule: Row, layers: int) -> Flat:
    """Return the routed part, and which blocks are without it: those that the config lists, or the leading ones."""
    moe: Flat = {field: _number(c, field, *key) for field, key in rule["sizes"].items()}
    moe |= {field: c.flag(*key) for field, key in rule.get("flags", {}).items()}
    moe |= expert_groups(c, *rule["groups"]) if "groups" in rule else {}
    first = _number(c, "shared", *rule["first"]) if "first" in rule else rule.get("dense", 0)
    kinds = c.words("mlp_layer_types")
    if kinds is not None and (len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}):
        raise InputError("config key mlp_layer_types", kinds, f"must call each of the {layers} layers dense or sparse")
    dense = [i for i in range(layers) if (kinds[i] == "dense" if kinds else i < first)]
    return {**moe, **rule.get("fixed", {}), **({"dense_layers": dense} if dense else {})}


def _number(c: Keys, field: str, names: str, default: int | None = None) -> int:
    """Return a number of the routed part; of shared experts there may be none."""
    if field.startswith("shared"):
        return c.maybe(names, default, low=0) or 0
    return c.size(names, default)


TABLE: dict[str, Callable[[Keys], Flat]] = {
    kind: partial(read, row=row)
    for kind, row in read_toml(files("memcalc.convert") / "huggingface_families.toml").items()
}


_ENCODER_SIZES = {field: key for field, key in _SIZES.items() if field not in _OPTIONAL}
"""The fields of ``sizes`` in a row but the last, and the key of each where the row's ``names`` have no other."""
_ENCODER_DROPOUT = {"attention": ["attention_probs_dropout_prob", 0.1], "block": ["hidden_dropout_prob", 0.1]}
_CAUSAL = ("LMHeadModel", "ForCausalLM")


def read_encoder(c: Keys, about: Flat, row: Row) -> Model:
    """Return an encoder with its pooler, or with the head of language modelling, masked or shifted by a token."""
    for key, allowed in {"is_decoder": [False], "add_cross_attention": [False], **row.get("only", {})}.items():
        c.only(key, *allowed)
    c.get(row.get("ignored", ""))
    *defaults, types = row["sizes"]
    names, before = row.get("names", {}), row.get("first", False)
    flat: Flat = {
        field: c.size(names.get(field, key), default)
        for (field, key), default in zip(_ENCODER_SIZES.items(), defaults, strict=True)
    }
    rates = {layer: c.rate(*key) for layer, key in row.get("dropout", _ENCODER_DROPOUT).items()}
    ending = architecture(about, *_CAUSAL, "Model", "ForMaskedLM", default="Model")
    headed, act = ending != "Model", activation(c, "gelu", row.get("activation", "hidden_act"))
    transform = "gelu" if row.get("gelu_head", False) else act["activation"]
    types = types and c.size("type_vocab_size", types)
    tied = c.flag("tie_word_embeddings", True)
    biases_apart = headed and not tied and row.get("own_bias", True)
    flat |= {
        **biases(True, True, True, lm_head=headed),
        **act,
        "tied": tied,
        "dropout": {**rates, "embedding": rates["block"]},
        "causal": False,
        "final_norm": before,
        "fused": row.get("fused", True),
        "gated": False,
        "head": headed,
        "norm": "layernorm",
        "norm_place": "pre" if before else "post",
        "position_index": row.get("index", "buffer"),
        "positions": "learned",
        "tower": "encoder",
        "upcast_softmax": False,
        "outside": _outside(flat["hidden"], types, row, headed=headed, spare=flat["vocab"] * biases_apart),
        "tail": {"transform": transform if headed else None, "wide_loss": ending in _CAUSAL},
    }
    if flat["position_index"] == "token":  # numbered from behind the row of the padding's token
        rows = flat["max_positions"]
        flat |= {"position_rows": rows, "max_positions": max(1, rows - 1 - c.size("pad_token_id", 1, low=0))}
    return from_flat({**flat, **about})


def _outside(hidden: int, types: int, row: Row, *, headed: bool, spare: int) -> list[dict[str, Any]]:
    """Return what stands outside the blocks beside the embedding and its positions.

    ``spare`` is a head's second bias, which nothing reads (modeling_bert.py, ``BertLMPredictionHead``).
    """
    square = hidden * hidden
    listed = [
        ("token_types", types * hidden, "first"),
        ("embedding_norm", 2 * hidden if row.get("normed", True) else 0, "first"),
        ("head_transform", square + 3 * hidden if headed else 0, "last"),
        ("spare_head_bias", spare, "last"),
        ("pooler", square + hidden if row.get("pooler", True) and not headed else 0, "last"),
    ]
    return [{"name": name, "parameters": count, "place": stage} for name, count, stage in listed if count]


ENCODERS: dict[str, Callable[[Keys, Flat], Model]] = {
    kind: partial(read_encoder, row=row)
    for kind, row in read_toml(files("memcalc.convert") / "huggingface_encoders.toml").items()
}
