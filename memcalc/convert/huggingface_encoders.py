"""Encoders of Transformers in the shape of BERT, each described by a row of ``huggingface_encoders.toml``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from memcalc.catalog import read_toml
from memcalc.convert.huggingface_keys import Flat, Keys, activation, architecture, biases
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model

Row = Mapping[str, Any]
_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}
"""The fields of ``sizes`` in a row but the last, and the key of each where the row's ``names`` have no other."""
_DROPOUT = {"attention": ["attention_probs_dropout_prob", 0.1], "block": ["hidden_dropout_prob", 0.1]}
_CAUSAL = ("LMHeadModel", "ForCausalLM")


def read(c: Keys, about: Flat, row: Row) -> Model:
    """Return an encoder with its pooler, or with the head of language modelling, masked or shifted by a token."""
    for key, allowed in {"is_decoder": [False], "add_cross_attention": [False], **row.get("only", {})}.items():
        c.only(key, *allowed)
    c.get(row.get("ignored", ""))
    *defaults, types = row["sizes"]
    names, before = row.get("names", {}), row.get("first", False)
    flat: Flat = {
        field: c.size(names.get(field, key), default)
        for (field, key), default in zip(_SIZES.items(), defaults, strict=True)
    }
    rates = {layer: c.rate(*key) for layer, key in row.get("dropout", _DROPOUT).items()}
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


def _reader(row: Row) -> Callable[[Keys, Flat], Model]:
    return lambda c, about: read(c, about, row)


ENCODERS: dict[str, Callable[[Keys, Flat], Model]] = {
    kind: _reader(row) for kind, row in read_toml(files("memcalc.convert") / "huggingface_encoders.toml").items()
}
