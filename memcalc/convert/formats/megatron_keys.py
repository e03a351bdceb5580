"""Where a Megatron-LM config has a setting: a flag is a name, YAML has tables, and says yes where flags say no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memcalc.convert.config import Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.megatron_flags import KNOWN, YAML_NAMES

__all__ = ["Flags", "key_in"]

_TABLES = ("language_model", "model_parallel")
_OPPOSITES = {
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_create_attention_mask_in_dataloader": "create_attention_mask_in_dataloader",
    "no_position_embedding": "add_position_embedding",
    "disable_bias_linear": "add_bias_linear",
}
"""Flags that turn something off, and the setting itself, which YAML states."""


def key_in(document: Document, name: str) -> str:
    """The dotted key of a flag's setting in a document.

    Where YAML does not state it, it goes into the table of its kind: sizes of the model stand in ``language_model``,
    degrees in ``model_parallel``.
    """
    if document.kind != "yaml":
        return name
    plain = YAML_NAMES.get(name, _OPPOSITES.get(name, name))
    for table in _TABLES:
        inner = document.data.get(table)
        if isinstance(inner, dict) and plain in inner:
            return f"{table}.{plain}"
    return plain


@dataclass
class Flags:
    """A reading by the names of the flags."""

    reading: Reading

    def key(self, name: str) -> str:
        """Where the setting stands."""
        return key_in(self.reading.document, name)

    def has(self, name: str) -> bool:
        """Whether the config states it."""
        return self.reading.has(self.key(name))

    def whole(self, name: str, default: int | None = None, low: int = 0) -> int | None:
        """A whole number."""
        return self.reading.whole(self.key(name), default, low)

    def count(self, name: str, default: int = 1) -> int:
        """A whole number from 1 that has a default."""
        return self.whole(name, default, low=1) or default

    def number(self, name: str, default: float) -> float:
        """A number that has a default."""
        found = self.reading.number(self.key(name), default)
        return default if found is None else found

    def on(self, name: str) -> bool:
        """Whether a flag is there; for one that turns something off, whether YAML says no."""
        key = self.key(name)
        if self.reading.document.kind == "yaml" and name in _OPPOSITES:
            return self.reading.flag(key, True) is False
        return bool(self.reading.flag(key))

    def one_of(self, name: str, names: dict[str, Any], default: Any = None) -> Any:
        """What one of the known names stands for."""
        return self.reading.one_of(self.key(name), names, default)

    def text(self, name: str) -> str:
        """A text; empty where it is absent."""
        return self.reading.text(self.key(name))

    def items(self, name: str) -> list[Any]:
        """A list."""
        return self.reading.items(self.key(name))

    def say(self, word: str, value: Any, name: str) -> None:
        """State a word under the flag that says it."""
        self.reading.say(word, value, self.key(name))

    def warn(self, name: str, says: str) -> None:
        """Warn that a setting changes memory in a way that is not modelled."""
        key = self.key(name)
        value = self.reading.raw(key)
        stated = "" if value in (None, True) else f" {value}"
        self.reading.note("warning", "MC002", key, f"{key}{stated} changes memory and is not modelled: {says}")

    def not_modelled(self, names: dict[str, str]) -> None:
        """Warn of all that are on."""
        off: tuple[Any, ...] = (False, None, 0, 1, "", "none", "fp32", [])
        self.reading.not_modelled({self.key(name): says for name, says in names.items()}, unless=off)

    def rest(self) -> tuple[str, ...]:
        """Every known name, in each table where it may stand."""
        tables = ("", *(f"{table}." for table in _TABLES)) if self.reading.document.kind == "yaml" else ("",)
        return tuple(f"{table}{name}" for table in tables for name in KNOWN)
