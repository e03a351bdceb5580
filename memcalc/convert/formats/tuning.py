"""What the fine-tuning frameworks have in common: layers by name, and questions that only the model answers.

Names: transformers 5.14 ``models/*/modeling_*.py``; PEFT 0.19 ``tuners/tuners_utils.py``: a listed name is the last
part of a layer's path.
"""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.convert.config import Reading, Said

__all__ = ["ask", "say_lora", "say_trained_besides", "targets_of"]

LAYERS: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "o_proj": ("o",), "out_proj": ("o",), "wo": ("o",),
    "query_key_value": ("qkv",), "qkv_proj": ("qkv",), "W_pack": ("qkv",), "c_attn": ("qkv",), "wqkv": ("qkv",),
    "Wqkv": ("qkv",), "dense": ("o",), "c_proj": ("o", "down"),
    "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",), "gate_up_proj": ("gate_up",),
    "fc1": ("up",), "fc2": ("down",), "c_fc": ("up",), "dense_h_to_4h": ("up",), "dense_4h_to_h": ("down",),
    "w1": ("gate",), "w2": ("down",), "w3": ("up",), "q_a_proj": ("q_a",), "q_b_proj": ("q_b",),
    "kv_a_proj_with_mqa": ("kv_a",), "kv_b_proj": ("kv_b",), "lm_head": ("head",), "embed_out": ("head",),
    "embed_tokens": ("embedding",), "wte": ("embedding",), "word_embeddings": ("embedding",),
}  # fmt: skip
"""By the name of a layer: which of memcalc's targets it is. GPT-2's ``c_proj`` is in attention and in the MLP."""
_ALL = ("all", "all-linear")


def targets_of(names: Iterable[object]) -> tuple[str, ...] | None:
    """The targets of some layer names; None where one is unknown, or a pattern.

    >>> targets_of(["q_proj", "v_proj"])
    ('q', 'v')
    """
    found: dict[str, None] = {}
    for name in names:
        if str(name) not in LAYERS:
            return None
        found |= dict.fromkeys(LAYERS[str(name)])
    return tuple(found)


def ask(reading: Reading, word: str, key: str, why: str) -> None:
    """Have a word asked for, since the file says it in a way that only the model itself can tell."""
    place = tuple(key.split("."))
    reading.said.append(Said(word, None, key, False, place, why))


def say_lora(reading: Reading, rank: int, key: str, every: bool = False) -> None:
    """Say the adapters whose layers a key lists; `every` where all linear layers have one, the head apart."""
    names = reading.items(key)
    if every or [str(name) for name in names] in ([one] for one in _ALL):
        reading.say("lora", f"{rank}:all-linear", key)
        return
    targets = targets_of(names)
    if targets:
        reading.say("lora", f"{rank}:{','.join(targets)}", key)
    else:
        ask(reading, "lora", key, ",".join(map(str, names))[:60] or "no layer at all")


def say_trained_besides(reading: Reading, key: str) -> None:
    """Say which layers are trained whole beside the adapters."""
    names = reading.items(key)
    known = [LAYERS.get(str(name), ("",))[0] for name in names]
    found = tuple(target for target in ("embedding", "head") if target in known)
    if found:
        reading.say("also_train", found, key)
    if len(known) > len(found):
        reading.not_modelled({key: "of layers trained whole beside adapters, embedding and head are modelled"})
