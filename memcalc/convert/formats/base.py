"""What a format is, the list of them, and which one a document is of."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from memcalc.convert.config import Config
from memcalc.convert.document import Document, Kind, Place, Span
from memcalc.convert.job import Job
from memcalc.errors import FileError, UnknownNameError

__all__ = ["FORMATS", "Format", "format_named", "inner_document", "nested", "recognised", "written"]

FORMATS: dict[str, tuple[Kind, ...]] = {
    "fsdp2": ("shell",),
    "torchtitan": ("toml",),
    "megatron": ("yaml",),
    "axolotl": ("yaml",),
    "llamafactory": ("yaml", "json"),
    "torchtune": ("yaml", "flags"),
    "litgpt": ("yaml", "flags"),
    "deepspeed": ("json",),
    "accelerate": ("yaml", "json"),
    "trainer": ("json", "yaml", "flags"),
    "fsdp_config": ("json",),
    "launch": ("shell",),
}
"""Names of the formats, each a module of this package, and the kinds of document that it is known by; the most
particular first, since the first that knows a document reads it. A module is imported for its own kinds alone."""
WRITABLE = ("deepspeed", "accelerate", "trainer", "torchtitan", "megatron", "axolotl", "fsdp2")
"""Those that `memcalc export` writes."""


@dataclass(frozen=True)
class Format:
    """One framework's config."""

    name: str
    title: str
    """For people, such as `DeepSpeed JSON`."""
    software: str
    """The version whose schema and defaults these are."""
    recognise: Callable[[Document], bool]
    read: Callable[[Document], Config]
    write: Callable[[Job], dict[str, Any]] | None = None
    """Dotted keys and values of the config that runs a job; None where the format is only read."""
    text: Callable[[Job], str] | None = None
    """The whole text, where that is more than the fields."""
    kind: Kind = "json"
    """What is written."""
    hyphens: bool = False
    """Whether flags have hyphens between their words, not underscores."""
    filename: str = ""
    """As its framework's own examples call it."""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Words that the file can say, with the values that it can say of each: what an edit may change."""
    spelling: Callable[[Document, str], str] = lambda _, key: key
    """How a document calls a key of `write`, where versions or forms differ; empty where it has no name for it."""


def format_named(name: str) -> Format:
    """The format of a name."""
    if name not in FORMATS:
        raise UnknownNameError("format", name, f"must be one of {', '.join(FORMATS)}", FORMATS)
    found: Format = import_module(f"memcalc.convert.formats.{name}").FORMAT
    return found


def recognised(document: Document) -> Format:
    """The format that a document is of; refused by name where it is none that is known."""
    for name, kinds in FORMATS.items():
        if document.kind in kinds and (found := format_named(name)).recognise(document):
            return found
    titles = ", ".join(format_named(name).title for name in FORMATS)
    raise FileError("file", str(document.path), f"must be one of: {titles}")


def inner_document(document: Document, place: Place) -> Document:
    """A table of a document as a document of its own, which still knows where its values stand."""
    data: Any = document.data
    for key in place:
        data = data[key]

    def spans() -> dict[Place, Span]:
        return {at[len(place) :]: span for at, span in document.spans.items() if at[: len(place)] == place}

    return Document(document.path, document.kind, document.text, data, spans)


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables; what is None is left out.

    >>> nested({"a.b": 1, "a.c": None, "d": 2})
    {'a': {'b': 1}, 'd': 2}
    """
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if value is None:
            continue
        *tables, last = key.split(".")
        table = found
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return found


def written(form: Format, job: Job) -> str:
    """Return the text of the config that runs a job.

    Raises :class:`memcalc.errors.CombinationError` for what the format cannot say.
    """
    if form.write is None:
        raise UnknownNameError("to", form.name, f"must be one of {', '.join(WRITABLE)}", WRITABLE)
    if form.text is not None:
        return form.text(job)
    fields = form.write(job)
    head = f"Written by memcalc; check it with: {job.check}" if job.check else "Written by memcalc."
    if form.kind == "json":
        return json.dumps(nested(fields), indent=2) + "\n"
    if form.kind == "toml":
        return f"# {head}\n\n{_toml(nested(fields))}"
    if form.kind == "yaml":
        return f"# {head}\n{_yaml(nested(fields))}"
    return (
        f"# {head}\n"
        + " \\\n".join(
            f"--{key.replace('_', '-') if form.hyphens else key}{_flag_value(value)}"
            for key, value in fields.items()
            if value is not None and value is not False
        )
        + "\n"
    )


def changes(form: Format, before: Job, after: Job) -> dict[Place, Any]:
    """Return what a config must say differently for another job: None for what it must no longer say."""
    if form.write is None:
        return {}
    try:
        old, new = (form.write(replace(job, editing=True)) for job in (before, after))
    except KeyError:  # a value that the format has no name for
        return {}
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {tuple(key.split(".")): new.get(key) for key in keys}


def _flag_value(value: Any) -> str:
    if value is True:
        return ""
    parts = value if isinstance(value, list | tuple) else (value,)
    return "".join(f" {shlex.quote(str(part))}" for part in parts)


def _yaml(data: Mapping[str, Any]) -> str:
    from memcalc.convert.yaml_text import write_yaml

    return write_yaml(data)


def _toml(data: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for key, value in data.items():
        if not isinstance(value, dict):
            lines.append(f"{key} = {json.dumps(value)}")
    for key, value in data.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]"] if lines else [f"[{key}]"]
            lines += [f"{name} = {json.dumps(inner)}" for name, inner in value.items() if not isinstance(inner, dict)]
            for name, inner in value.items():
                if isinstance(inner, dict):
                    lines += ["", f"[{key}.{name}]", *(f"{k} = {json.dumps(v)}" for k, v in inner.items())]
    return "\n".join(lines) + "\n"
