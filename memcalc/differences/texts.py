"""Strategies in words, ``zero=3,recompute=full``, and what of a text is a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memcalc.errors import InputError, UnknownNameError
from memcalc.files import there
from memcalc.planner.request import FLAGS, SETTINGS, WORDS, boolean, flag
from memcalc.planner.settings import FIELDS

__all__ = ["PLACES", "flat_words", "is_words", "parts_of", "split", "text_of", "words_in"]

PLACES = ("model", "gpu", "node")
"""Words that name a preset or a file."""
KNOWN = (*PLACES, *WORDS, *FIELDS, *SETTINGS)


def is_words(text: str) -> bool:
    """Whether a side is a strategy in words, and no file.

    >>> is_words("zero=3,recompute=full"), is_words(""), is_words("ds_config.json")
    (True, True, False)
    """
    return not text or ("=" in text and not there(Path(text)) and not there(Path(text.partition(",")[0])))


def words_in(text: str, side: str) -> dict[str, Any]:
    """Return the words of a strategy; a part without a name belongs to the list before it.

    >>> words_in("zero=3,offload=optimizer,params,sp=false", "A")
    {'zero': '3', 'offload': 'optimizer,params', 'sp': False}
    """
    found: dict[str, Any] = {}
    name = ""
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if equals:
            name = _named(key, side)
            if name in found:
                raise InputError(f"{flag(name)} of {side}", value, "is said twice")
            found[name] = value.strip()
        elif name:
            found[name] += f",{part.strip()}"
        else:
            raise InputError(side, text, "must be a file, or words with values, such as zero=3,recompute=full")
    return {name: boolean(value, name) if name in FLAGS else value for name, value in found.items()}


def _named(key: str, side: str) -> str:
    """Return a word by the name of the library, or a dotted field."""
    plain = key.strip().removeprefix("--")
    for name in (plain, plain.replace("-", "_")):
        if name in KNOWN:
            return SETTINGS.get(name, name)
    raise UnknownNameError(
        f"word of {side}", plain, "must be a word of the options, such as zero or micro-batch", KNOWN
    )


def parts_of(text: str, side: str) -> tuple[str, ...]:
    """Return the files that a text names, joined by commas; one whose name has commas is itself."""
    if there(Path(text)):
        return (text,)
    paths = tuple(part.strip() for part in text.split(","))
    absent = next((path for path in paths if not there(Path(path))), None)
    if absent is not None:
        raise InputError(
            side, absent, "must be a file that is there, or words with values, such as zero=3,recompute=full"
        )
    return paths


def flat_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return words and ``settings`` in one table: a field that is a word under that word, and nothing that is None.

    >>> flat_words({"zero": None, "settings": {"strategy.tp": "2", "strategy.reduce_dtype": "bf16"}})
    {'tp': '2', 'strategy.reduce_dtype': 'bf16'}
    """
    merged = {**words, **(words.get("settings") or {})}
    return {
        SETTINGS.get(name, name): value for name, value in merged.items() if name != "settings" and value is not None
    }


def split(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat table as the keywords of :func:`memcalc.estimate`.

    >>> split({"zero": 3, "strategy.reduce_dtype": "bf16"})
    {'zero': 3, 'settings': {'strategy.reduce_dtype': 'bf16'}}
    """
    own = {name: value for name, value in words.items() if name not in FIELDS}
    return {**own, "settings": {name: value for name, value in words.items() if name in FIELDS}}


def text_of(words: Mapping[str, Any]) -> str:
    """Return words as one text.

    >>> text_of({"zero": 3, "offload": ("optimizer", "params")})
    'zero=3,offload=optimizer,params'
    """
    return ",".join(f"{name}={_typed(value)}" for name, value in words.items())


def _typed(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
