"""Models of several parts of which the parameters are known: a text model, and what stands beside it.

Each is a row of ``counted_parts.toml``, with the words of :mod:`memcalc.convert.counted`. The text model is read as it
is by itself; each other part has a table of keys, and its blocks are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from memcalc.catalog import read_toml
from memcalc.convert.counted import COUNTED, Row, blocks_of, outside_of, taken
from memcalc.convert.huggingface_keys import Flat, Keys, architecture
from memcalc.convert.vision_language import DECODERS
from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model, patterns

_TEXT_MODELS = tuple(sorted({*DECODERS, *COUNTED}))


def read(c: Keys, about: Flat, row: Row) -> Model:
    """Return the model that a row of ``counted_parts.toml`` makes of a config."""
    architecture(about, *row.get("classes", ("ForConditionalGeneration",)))
    values: dict[str, Any] = {}
    for name, part in row["parts"].items():
        table = c.table(part["table"]) or Keys({}, f"{part['table']}.")
        values[name] = taken(table, part, {})
        table.get("tie_word_embeddings")
        table.refuse_rest()
    values = taken(c, row, values)
    text, inner = _text(c, row, about)
    values["text"] = {"hidden_size": text.hidden, "intermediate_size": inner}
    try:
        groups, order = blocks_of(row, values, text.hidden, "vision")
        outside = outside_of(row, values, "vision")
    except (ArithmeticError, IndexError, TypeError, ValueError):
        raise InputError("config", about["name"], "its sizes do not go together") from None
    tied = c.flag("tie_word_embeddings", row.get("tied", False))
    sequence = (*order, *(len(groups) + index for index in text.sequence))
    return text.model_copy(
        update={
            "tied": tied if (fixed := row.get("ties")) is None else fixed == "always",
            "groups": (*groups, *text.groups),
            "order": () if list(sequence) == sorted(sequence) else patterns(sequence),
            "outside": (*outside, *text.outside),
        }
    )


def _text(c: Keys, row: Row, about: Flat) -> tuple[Model, int]:
    """Return the text model, by its own `model_type` or the family's usual one, and the inner width of its MLPs."""
    key, usual = row["text"]
    data = c.get(key)
    if not isinstance(data, Mapping):
        raise InputError(f"config key {key}", data, "must be given: the text model's sizes")
    kind, keys = data.get("model_type", usual), Keys(data, f"{key}.")
    if not isinstance(kind, str) or kind not in _TEXT_MODELS:
        allowed = f"the text model of this {about['family']} is none of those that are read"
        raise UnknownNameError(f"config key {key}.model_type", kind, allowed, _TEXT_MODELS)
    model = from_flat({**DECODERS[kind](keys), **about}) if kind in DECODERS else COUNTED[kind](keys, dict(about))
    inner = keys.get("intermediate_size")
    keys.get("tie_word_embeddings")
    keys.refuse_rest()
    return model, inner if isinstance(inner, int) else 0


def _reader(row: Row) -> Callable[[Keys, Flat], Model]:
    return lambda c, about: read(c, about, row)


COUNTED_PARTS: dict[str, Callable[[Keys, Flat], Model]] = {
    kind: _reader(row) for kind, row in read_toml(files("memcalc.convert") / "counted_parts.toml").items()
}
"""Readers by `model_type`."""
