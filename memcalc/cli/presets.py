"""Presets as rows: models, GPUs and nodes, listed, searched or shown in full."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from memcalc.cli.options import DESTINATION, PRESETS, completes
from memcalc.cli.output import destination
from memcalc.cli.registry import command
from memcalc.errors import InputError, UnknownNameError

Row = dict[str, Any]
_NEAREST = 5


def _name(presets: str) -> Any:
    complete = completes(presets=presets)
    return typer.Argument(metavar="NAME", help="Show this one in full, with its sources.", autocompletion=complete)


_Search = Annotated[str | None, typer.Option(metavar="TEXT", help="Only those with TEXT in a name, or the nearest.")]


@command("Presets", *PRESETS, *DESTINATION)
def models(name: Annotated[str | None, _name("models")] = None, search: _Search = None, **options: Any) -> int:
    """List the models, or show one with its sources."""
    return show("models", name, search, options)


@command("Presets", *PRESETS, *DESTINATION)
def gpus(name: Annotated[str | None, _name("gpus")] = None, search: _Search = None, **options: Any) -> int:
    """List the GPUs, or show one with its sources."""
    return show("gpus", name, search, options)


@command("Presets", *PRESETS, *DESTINATION)
def nodes(name: Annotated[str | None, _name("nodes")] = None, search: _Search = None, **options: Any) -> int:
    """List the nodes, or show one with its sources."""
    return show("nodes", name, search, options)


def show(kind: str, name: str | None, search: str | None, options: dict[str, Any]) -> int:
    """List the presets of a `kind`, or show the one called `name`; return the exit code."""
    from memcalc.report import rows as report

    target = destination(options)
    dirs = tuple(options["preset_dir"] or ())
    if name is not None and search is not None:
        raise InputError("search", search, f"must be left out where a name ({name}) is given")
    if name is not None:
        target.show(report.record(kind, _preset(kind, name, dirs)))
    else:
        rows = _all(kind, dirs)
        target.show(report.listing(kind, rows if search is None else _matching(kind, search, rows)))
    return 0


def _preset(kind: str, name: str, dirs: Sequence[str]) -> Row:
    from memcalc import catalog

    if kind == "models":
        from memcalc.convert.named_model import named_model

        return _row(kind, named_model(name, tuple(dirs)).model)
    return _row(kind, catalog.gpu(name, dirs) if kind == "gpus" else catalog.node(name, dirs))


def _all(kind: str, dirs: Sequence[str]) -> list[Row]:
    from memcalc import catalog

    loaders: Mapping[str, Any] = {"models": catalog.models, "gpus": catalog.gpus, "nodes": catalog.nodes}
    return [_row(kind, preset) for preset in loaders[kind](dirs)]


def _matching(kind: str, text: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with `text` in a name, or else those with the most similar names."""
    wanted = text.casefold()
    within = [row for row in rows if any(wanted in name.casefold() for name in _names(row))]
    if within:
        return within
    known = {name: row["name"] for row in rows for name in _names(row)}
    close = {known[name] for name in difflib.get_close_matches(wanted[:60], known, n=_NEAREST, cutoff=0.5)}
    if not close:
        raise UnknownNameError("search", text, f"must be part of a name that `memcalc {kind}` lists")
    return [row for row in rows if row["name"] in close]


def _names(row: Row) -> tuple[str, ...]:
    return (row["name"], *row["aliases"], row.get("family", ""))


def _row(kind: str, preset: Any) -> Row:
    """Return a preset as the published JSON has it."""
    if kind == "models":
        return _model(preset)
    row: Row = preset.model_dump(mode="json")
    if kind == "gpus":
        capacity, context = row.pop("memory_bytes"), row.pop("context_bytes")
        return {"name": row.pop("name"), "aliases": row.pop("aliases"), "capacity": capacity, "context": context, **row}
    return row


def _model(preset: Any) -> Row:
    from memcalc.terms.parameters import model_count

    count = model_count(preset)
    keys = ("hidden", "vocab", "max_positions", "positions", "tied", "source")
    unmodelled = f"no estimate is made: nothing models its {' and '.join(preset.counted_parts)}"
    return {
        "name": preset.name,
        "aliases": list(preset.aliases),
        "family": preset.family,
        "parameters": int(count.total),
        "active_parameters": int(count.active),
        "blocks": preset.num_layers,
        **{key: getattr(preset, key) for key in keys},
        "notes": "; ".join(filter(None, (preset.notes, unmodelled if preset.counted_parts else ""))),
        "groups": [group.model_dump(mode="json", exclude_defaults=True) for group in preset.groups],
    }
