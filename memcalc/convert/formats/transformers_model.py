"""A model as a script of Transformers makes it, from sizes or a config.json, and what its classes call their layers."""

from __future__ import annotations

import textwrap
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from memcalc.catalog import read_toml
from memcalc.preset_names import key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.convert.formats.base import ConfigJob
    from memcalc.specs.model import Model


def hub_name(job: ConfigJob) -> str:
    """The name by which the Hub has a preset, where it is known; else the model as the user named it, as a path is."""
    return hub_named(job.model, job.spec)


def hub_named(model: str, spec: Model | None) -> str:
    """The same of a model as the user named it, and the model whose sizes it has.

    Another name than the preset's own and its aliases may be that of other weights (-Instruct, -Coder).
    """
    names: dict[str, str] = read_toml(files("memcalc.convert.formats") / "hub.toml")["names"]
    is_path = "/" in model or model.endswith((".json", ".toml"))
    exact = names.get(key(model))
    if is_path or exact is not None or spec is None:
        return exact or model
    return names.get(spec.name, model) if key(model) in {spec.name, *spec.aliases} else model


def sizes(spec: Model) -> dict[str, Any]:
    """The sizes that the model's class in Transformers takes; TOML has no null, and `null` stands for it."""
    return {key: _with_null(value) for key, value in spec.hf_config.items()}


def _with_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_null(inner) for key, inner in value.items()}
    return None if value == "null" else value


def configuration(spec: Model, name: str) -> str:
    """Return the expression that makes the configuration; ``name`` is that of its path or name on the Hub."""
    if not spec.hf_class or not spec.hf_config:
        return f"transformers.AutoConfig.from_pretrained({name})"
    pairs = ", ".join(f"{key}={value!r}" for key, value in sizes(spec).items())
    filled = textwrap.indent(textwrap.fill(pairs, 106), " " * 8)
    return f"transformers.{spec.hf_class}.config_class(\n{filled}\n    )"


def layer_names(job: ConfigJob, word: str, targets: Iterable[str]) -> list[str]:
    """The names of layers by memcalc's words for them, as the option ``word`` has them.

    Refuses one whose name is not known: a list of names would go without it, and nobody would be told.
    """
    tables = _tables()
    names = {**tables["usual"], **tables.get(job.spec.architecture if job.spec else "", {})}
    listed = list(targets)
    for target in listed:
        job.require(target in names, word, f"names of layers are known of {', '.join(names)}")
    return list(dict.fromkeys(names.get(target, target) for target in listed))


@cache
def _tables() -> dict[str, dict[str, str]]:
    tables: dict[str, dict[str, str]] = read_toml(files("memcalc.convert.formats") / "layers.toml")
    return tables
