"""The keys of a config.json, each taken with its type checked, and what the families of Transformers have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from memcalc.catalog import read_toml
from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.block import MOST_LAYERS

LARGEST = 2**31 - 1
_TABLES = read_toml(files("memcalc.convert") / "huggingface.toml")
_HARMLESS = frozenset(key for text in _TABLES["harmless"].values() for key in text.split())
_HARMLESS_STARTS = ("_", "init_std", "initializer", "summary_", "output_", "mask_time", "mask_feature", "router_jitter")
_HARMLESS_ENDS = ("_token_id", "_token_index", "_eps", "_epsilon", "_jitter_noise", "_scaling_factor", "_layerdrop",
                  "_loss_coef")  # fmt: skip
_HARMLESS_FALSE = ("add_cross_attention",)
ACTIVATIONS: dict[str, str] = _TABLES["activations"]
"""Names of Transformers, and how the class behind each computes."""
Flat = dict[str, Any]
Sizes = tuple[int, int, int, int, int, int | None, int | None, int]
"""Defaults of vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
head_dim, max_position_embeddings; None for what follows from the others."""


def harmless(key: str) -> bool:
    """Return whether `key` changes neither parameters nor activations of the model itself.

    >>> harmless("bos_token_id"), harmless("extra_layers")
    (True, False)
    """
    return key in _HARMLESS or key.startswith(_HARMLESS_STARTS) or key.endswith(_HARMLESS_ENDS)


class Keys:
    """A table of a config.json; every key that is asked for counts as understood.

    A key may have several names, as Transformers takes `hidden_size` for GPT-2's `n_embd`; the first one that is there
    wins. A key that is there with the value null is null, not its default: so does Transformers read it.
    """

    def __init__(self, data: Mapping[str, object], where: str = "") -> None:
        self._data = data
        self._where = where
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._data

    @property
    def taken(self) -> frozenset[str]:
        """The keys that were asked for."""
        return frozenset(self._taken)

    def get(self, names: str, default: object = None) -> object:
        """Return the value of the first of the space-separated `names` that is there, unchecked."""
        value: object = default
        for name in reversed(names.split()):
            self._taken.add(name)
            value = self._data.get(name, value)
        return value

    def size(self, names: str, default: int | None = None, low: int = 1) -> int:
        """Return a whole number of at least `low`; one without default must be there."""
        value = self.maybe(names, default, low)
        if value is None:
            raise self._wrong(names, None, "must be given, as a whole number")
        return value

    def maybe(self, names: str, default: int | None = None, low: int = 1) -> int | None:
        """Return a whole number of at least `low`, or None where the key is null or absent without default."""
        value = self.get(names, default)
        if value is None:
            return None
        # a block takes time and memory by itself, so that their number has a bound of its own
        most = MOST_LAYERS if names.endswith(("layers", "n_layer")) else LARGEST
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
            raise self._wrong(names, value, f"must be a whole number from {low} to {most}")
        return value

    def flag(self, names: str, default: bool = False) -> bool:
        """Return a truth value; null is false."""
        value = self.get(names, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._wrong(names, value, "must be true or false")
        return value

    def rate(self, names: str, default: float = 0.0) -> float:
        """Return a probability below 1; null is 0."""
        value = self.get(names, default)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:  # NaN fails here
            raise self._wrong(names, value, "must be a number from 0 to below 1")
        return float(value)

    def fraction(self, names: str, default: float) -> float:
        """Return a number above 0 and up to 1."""
        value = self.get(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self._wrong(names, value, "must be a number above 0, at most 1")
        return float(value)

    def number(self, names: str, default: float) -> float:
        """Return a number above 0 that need not be whole; null is the default."""
        value = self.get(names, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:  # NaN fails here
            raise self._wrong(names, value, f"must be a number above 0, at most {LARGEST}")
        return float(value)

    def text(self, names: str, default: str) -> str:
        """Return a text; null is the default."""
        value = self.get(names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(names, value, "must be a text")
        return value

    def words(self, name: str) -> list[str] | None:
        """Return a list of texts, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._wrong(name, value, "must be a list of texts")
        return list(value)

    def sizes(self, name: str) -> list[int]:
        """Return a list of whole numbers; null is an empty one."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= LARGEST for item in value):
            raise self._wrong(name, value, "must be a list of whole numbers from 0")
        return list(value)

    def table(self, name: str) -> Keys | None:
        """Return a nested table, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self._wrong(name, value, "must be an object")
        return Keys(value, f"{self._where}{name}.")

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a key whose value changes the model in a way that is not modelled; null and absence are fine."""
        value = self.get(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in allowed):
            listed = " or ".join(str(item).lower() if isinstance(item, bool) else str(item) for item in allowed)
            raise self._wrong(name, value, f"only {listed or 'null'} is modelled")

    def activation(self, names: str, default: str) -> str:
        """Return how the activation is computed: its kernel's name, or `…_python` where it is written op by op."""
        name = self.text(names, default)
        if name not in ACTIVATIONS:
            allowed = f"must be one of {', '.join(ACTIVATIONS)}"
            raise UnknownNameError(f"config key {self._where}{names.split(maxsplit=1)[0]}", name, allowed, ACTIVATIONS)
        return ACTIVATIONS[name]

    def refuse_rest(self) -> None:
        """Refuse the first key that nobody took and that is not known to be harmless."""
        for key, value in self._data.items():
            unsaid = value is None or (value is False and key in _HARMLESS_FALSE)
            if key not in self._taken and not harmless(key) and not unsaid:
                allowed = "it may change the memory, and is not understood for this model_type"
                raise UnknownNameError("config key", self._where + key, allowed, self._taken)

    def _wrong(self, names: str, value: object, allowed: str) -> InputError:
        present = [name for name in names.split() if name in self._data] or names.split()
        return InputError(f"config key {self._where}{present[0]}", value, allowed)


def decoder(c: Keys, defaults: Sizes, *, tied: bool = False, **fixed: Any) -> Flat:
    """Return the sizes under the names that most families share, and what is `fixed` for the family."""
    vocab, hidden, ffn, layers, heads, kv_heads, head_dim, positions = defaults
    flat = {
        "vocab": c.size("vocab_size", vocab),
        "hidden": c.size("hidden_size", hidden),
        "ffn": c.size("intermediate_size", ffn),
        "n_layers": c.size("num_hidden_layers", layers),
        "heads": c.size("num_attention_heads", heads),
        "kv_heads": c.maybe("num_key_value_heads", kv_heads),
        "head_dim": c.maybe("head_dim", head_dim),
        "max_positions": c.size("max_position_embeddings", positions),
        "tied": c.flag("tie_word_embeddings", tied),
        "rotary_fraction": rotary_fraction(c),
    }
    dropout = {"attention": c.rate("attention_dropout attn_pdrop")}
    return {**flat, "activation": "silu", "dropout": dropout, **fixed}


def family(c: Keys, name: str) -> Flat:
    """Return the sizes, flags, rates of dropout and fixed traits of a family with keys of its own."""
    table = _TABLES["families"][name]
    sizes = {part: c.size(*key) for part, key in table["sizes"].items()}
    flags = {part: c.flag(*key) for part, key in table.get("flags", {}).items()}
    dropout = {part: c.rate(*key) for part, key in table["dropout"].items()}
    return {**sizes, **flags, **table["fixed"], "dropout": dropout}


def architecture(about: Flat, *known: str, default: str = "") -> str:
    """Return which of the ``known`` endings the class has; the default, or the first, where the config does not say."""
    stated = about.pop("architecture", None)
    if stated is None:
        return default or known[0]
    ending = next((ending for ending in known if stated.endswith(ending)), None)
    if ending is None:
        raise InputError("config key architectures", stated, f"must end with {' or '.join(known)}")
    return ending


def rotary_fraction(c: Keys, default: float = 1.0) -> float:
    """Return the part of a head that is turned; the key has moved between versions."""
    rope = c.table("rope_parameters")
    if rope is not None and "partial_rotary_factor" in rope:
        return rope.fraction("partial_rotary_factor", default)
    return c.fraction("partial_rotary_factor rotary_pct", default)


def window(c: Keys, default: int | None, full: Callable[[int], bool] | None = None, layers: int = 0) -> Flat:
    """Return the sliding window and the blocks without it: those that the config lists, else those that ``full`` names.

    ``layers`` is how many blocks there are; 0 for a family without a rule of its own.
    """
    width, types = c.maybe("sliding_window", default), c.words("layer_types")
    if width is None or (types is not None and set(types) == {"full_attention"}):
        return {}
    if types is None:
        is_full = [full is not None and full(index) for index in range(layers)]
        types = ["full_attention" if each else "sliding_attention" for each in is_full]
    elif layers and len(types) != layers:
        raise InputError("config key layer_types", types, f"must name the kind of each of the {layers} layers")
    unknown = next((kind for kind in types if kind not in {"full_attention", "sliding_attention"}), None)
    if unknown is not None:
        allowed = "must be full_attention or sliding_attention to be modelled"
        raise InputError("config key layer_types", unknown, allowed)
    full_layers = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if not full_layers:
        return {"window": width}
    return {"window": width, "full_layers": full_layers} if len(full_layers) < len(types) else {}


def expert_groups(c: Keys, groups: int, chosen: int) -> Flat:
    """Return the groups of experts, and of how many of them one token's experts are; null is no limit."""
    sizes = c.maybe("n_group", groups), c.maybe("topk_group", chosen)
    return dict(zip(("n_group", "topk_group"), sizes, strict=True)) if None not in sizes else {}


def each_nth(step: int) -> Callable[[int], bool]:
    """Return whether a block, counted from 0, is the last of each ``step``."""
    return lambda index: (index + 1) % step == 0


def activation(c: Keys, default: str = "silu", names: str = "hidden_act") -> Flat:
    """Return the activation under its key in this family."""
    return {"activation": c.activation(names, default)}


def biases(qkv: bool = False, o: bool = False, mlp: bool = False, lm_head: bool = False) -> Flat:
    """Return which linear layers of the family have a bias."""
    return {"bias": {"qkv": qkv, "o": o, "mlp": mlp, "lm_head": lm_head}}


def attention_bias(c: Keys, default: bool = False, mlp: bool = False) -> Flat:
    """Return the biases of a family whose `attention_bias` holds for all four projections."""
    biased = c.flag("attention_bias", default)
    return biases(qkv=biased, o=biased, mlp=c.flag("mlp_bias") if mlp else False)
