"""Values of a config that name other values, as OmegaConf 2.3 reads `${policy.precision}` and `${mul:${a}, ${b}}`.

The resolvers `add`, `mul`, `div` and `max` are those of NeMo-RL (utils/config.py at 7ea279ab).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memcalc.convert.document import Document
from memcalc.convert.text import KeyPath

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MOST = 64
"""Replacements in one value: a circle ends there."""
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}


def resolved(document: Document) -> Document:
    """Return a document with each such value in place of its name; what cannot be told without a run is unknown."""
    unknown = dict(document.unknown)
    return replace(document, data=_filled(document.data, document.data, (), unknown), unknown=unknown)


def _filled(data: Any, root: Any, at: KeyPath, unknown: dict[KeyPath, str]) -> Any:
    if isinstance(data, list):
        return [_filled(value, root, (*at, index), unknown) for index, value in enumerate(data)]
    if isinstance(data, dict):
        inner = {key: _filled(value, root, (*at, key), unknown) for key, value in data.items()}
        return {key: value for key, value in inner.items() if (*at, key) not in unknown}
    if not isinstance(data, str) or "${" not in data:
        return data
    value = _value(data, root, at)
    if isinstance(value, str) and "${" in value:
        unknown[at] = value
    return value


def _value(text: str, root: Any, at: KeyPath) -> Any:
    """What a text with names in it comes to; itself, or as far as it could be read, where one leads nowhere."""
    value: Any = text
    for _ in range(_MOST):
        match = _INNERMOST.search(value) if isinstance(value, str) else None
        if match is None:
            return value
        target = _named(match[1], root, at)
        if target is None or isinstance(target, dict | list):
            return value
        alone = match.span() == (0, len(value))
        value = target if alone else value[: match.start()] + str(target) + value[match.end() :]
    return text


def _named(name: str, root: Any, at: KeyPath) -> Any:
    """The value of a name or of a resolver; None where there is none."""
    resolver, colon, arguments = name.partition(":")
    if colon:
        return _computed(resolver.strip(), arguments.split(","))
    names = name.strip()
    dots = len(names) - len(names.lstrip("."))
    parts = [*(at[:-dots] if dots else ()), *names[dots:].split(".")]
    value = root
    for part in parts:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _computed(resolver: str, arguments: list[str]) -> Any:
    if resolver not in _ARITHMETIC or len(arguments) != 2:
        return None
    try:
        number = _ARITHMETIC[resolver](*(float(part) for part in arguments))
        return int(number) if number == int(number) else number
    except (ValueError, ArithmeticError):
        return None
