"""Families of Transformers of which the parameters are known, and not what their blocks keep for backward.

Each is a row of ``counted.toml``: the keys of its config.json, and the parameters of each of its blocks as arithmetic
on them. What a row gives is a model that is counted and refused wherever bytes are asked for
(:func:`memcalc.terms.parameters.refuse_counted`), by the name of the part that is not modelled.

Models of several parts of which the parameters are known: a text model, and what stands beside it.

Each is a row of ``counted_parts.toml``, with the same words. The text model is read as it is
by itself; each other part has a table of keys, and its blocks are counted.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any

from memcalc.catalog import read_toml
from memcalc.convert.huggingface_keys import Flat, Keys, architecture
from memcalc.convert.vision_language import DECODERS
from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.block import MOST_LAYERS, Counted, bare_block
from memcalc.specs.flat import from_flat
from memcalc.specs.model import BlockGroup, Model, Outside, Tower, patterns

Row = Mapping[str, Any]
Values = Mapping[str, Any]
_SIGNS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group, ast.USub: operator.neg, ast.Not: operator.not_,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"max": max, "min": min, "int": int, "len": len, "sum": sum}
_CLASSES = ("ForCausalLM", "LMHeadModel")
"""Endings of the classes that a row counts where it does not say."""


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(" ".join(text.split()), mode="eval").body


def value_of(text: str, values: Values) -> Any:
    """Return what an arithmetic expression of a row comes to.

    >>> value_of("2 * h if kind in ('a', 'b') else h // 3", {"h": 9, "kind": "c"})
    3
    """
    return _value(_parsed(text), values)


def _value(node: ast.AST, values: Values) -> Any:
    def of(part: ast.AST) -> Any:
        return _value(part, values)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[node.id]
        case ast.Attribute():
            return of(node.value)[node.attr]
        case ast.Tuple():
            return tuple(of(part) for part in node.elts)
        case ast.BinOp():
            return _SIGNS[type(node.op)](of(node.left), of(node.right))
        case ast.UnaryOp():
            return _SIGNS[type(node.op)](of(node.operand))
        case ast.Compare(ops=[sign], comparators=[other]):
            return _SIGNS[type(sign)](of(node.left), of(other))
        case ast.BoolOp():
            parts = (of(part) for part in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.IfExp():
            return of(node.body) if of(node.test) else of(node.orelse)
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(of(part) for part in node.args))
    raise TypeError(f"no arithmetic of a row: {ast.dump(node)}")


def read(c: Keys, about: Flat, row: Row) -> Model:
    """Return the model that a row of ``counted.toml`` makes of a config."""
    ending = architecture(about, *row.get("classes", _CLASSES))
    values = taken(c, row, {"ending": ending})
    try:
        return _model(values, about, row)
    except (ArithmeticError, IndexError, TypeError, ValueError):
        raise InputError("config", about["name"], "its sizes do not go together") from None


def taken(c: Keys, row: Row, known: Values) -> dict[str, Any]:
    """Return what is known and the keys of a config under their own names, each with its type checked."""
    for key, allowed in row.get("only", {}).items():
        c.only(key, *allowed)
    c.get(row.get("ignored", ""))
    values = {
        **known,
        **{names.split()[0]: _typed(c, names, default) for names, default in row.get("keys", {}).items()},
    }
    for name, text in row.get("absent", {}).items():
        given = c.maybe(name, low=0)
        values[name] = value_of(text, values) if given is None else given
    for name, text in row.get("let", {}).items():
        values[name] = value_of(text, values)
    for name, text in row.get("refused", {}).items():
        if value_of(text, values):
            raise InputError(f"config key {name}", values[name], "is not counted with the other keys of this config")
    layers = value_of(row["stacks"][0]["layers"], values) if "each" in row else 0
    for name, text in row.get("each", {}).items():
        numbers = range(min(layers, MOST_LAYERS))
        usual = [value_of(text, {**values, "i": index}) if text else "" for index in numbers]
        values[name] = _listed(c, name, usual)
    return values


def _listed(c: Keys, name: str, usual: list[Any]) -> list[Any]:
    """Return what a config says of each block, or what is usual where it says nothing."""
    given: list[Any] | None = c.words(name) if isinstance(usual[0], str) else c.sizes(name) or None
    if given is not None and len(given) != len(usual):
        raise InputError(f"config key {name}", given, f"must say something of each of the {len(usual)} layers")
    if given is None and usual[0] == "":
        raise InputError(f"config key {name}", given, "must be given: the kind of each layer")
    return given or usual


def _typed(c: Keys, names: str, default: object) -> object:
    if isinstance(default, bool):
        return c.flag(names, default)
    if isinstance(default, int):
        return c.size(names, default, low=min(default, 1))  # some are -1 where they are not used
    if isinstance(default, str):
        return c.text(names, default)
    if isinstance(default, float):
        return c.number(names, default)
    if isinstance(default, list) and default and isinstance(default[0], str):
        value = c.get(names)
        return value.split("|") if isinstance(value, str) else c.words(names) or default
    return c.sizes(names) or default


def _model(values: dict[str, Any], about: Flat, row: Row) -> Model:
    groups, order = blocks_of(row, values, value_of(row.get("hidden", "hidden_size"), values))
    return Model(
        **about,
        hidden=value_of(row.get("hidden", "hidden_size"), values),
        vocab=value_of(row.get("vocab", "vocab_size"), values),
        embedding_dim=value_of(row["width"], values) if "width" in row else None,
        tied=bool(value_of(row.get("tied", "tie_word_embeddings"), values)),
        head_bias=bool(value_of(row.get("head_bias", "False"), values)),
        positions="none",
        max_positions=value_of(row.get("positions", "max_position_embeddings"), values),
        final_norm=None,
        groups=groups,
        order=() if list(order) == sorted(order) else patterns(order),
        outside=outside_of(row, values),
    )


def outside_of(row: Row, values: dict[str, Any], tower: Tower = "decoder") -> tuple[Outside, ...]:
    """Return what a row has outside of its blocks."""
    sizes = {name: int(value_of(text, values)) for name, text in row.get("outside", {}).items()}
    return tuple(Outside(name=name, parameters=size, tower=tower) for name, size in sizes.items() if size)


def blocks_of(
    row: Row, values: dict[str, Any], hidden: int, tower: Tower = "decoder"
) -> tuple[tuple[BlockGroup, ...], tuple[int, ...]]:
    """Return the blocks of a row by kind, and the kind of each."""
    blocks = [block for stack in row["stacks"] for block in _stack(stack, values, row["part"])]
    counts = Counter(blocks)
    indices = {block: index for index, block in enumerate(counts)}
    groups = tuple(
        BlockGroup(count=count, tower=tower, block=bare_block(hidden, counted=block)) for block, count in counts.items()
    )
    return groups, tuple(indices[block] for block in blocks)


def _stack(stack: Row, values: dict[str, Any], part: str) -> list[Counted]:
    """Return the blocks of one stack; their arithmetic may name a block's own number, ``i``."""
    layers = value_of(stack["layers"], values)
    if not 0 <= layers <= MOST_LAYERS:
        raise InputError("config key num_hidden_layers", layers, f"must be at most {MOST_LAYERS}")
    counted = []
    for index in range(layers):
        known = {**values, "i": index}
        for name, text in stack.get("let", {}).items():
            known[name] = value_of(text, known)
        idle = value_of(stack["idle"], known) if "idle" in stack else 0
        counted.append(Counted(part=part, parameters=int(value_of(stack["block"], known)), idle=int(idle)))
    return counted


COUNTED: dict[str, Callable[[Keys, Flat], Model]] = {
    kind: partial(read, row=row) for kind, row in read_toml(files("memcalc.convert") / "counted.toml").items()
}
"""Readers by `model_type`."""


_TEXT_MODELS = tuple(sorted({*DECODERS, *COUNTED}))


def read_parts(c: Keys, about: Flat, row: Row) -> Model:
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


COUNTED_PARTS: dict[str, Callable[[Keys, Flat], Model]] = {
    kind: partial(read_parts, row=row)
    for kind, row in read_toml(files("memcalc.convert") / "counted_parts.toml").items()
}
"""Readers by `model_type`."""
