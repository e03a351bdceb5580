"""All commands: those about jobs and measurements, which register themselves, and the presets'."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memcalc.cli import jobs, ladder, measurements, presets  # noqa: F401 - importing registers commands
from memcalc.cli.options import DESTINATION, PRESETS
from memcalc.cli.registry import EXAMPLES, app, command

__all__ = ["EXAMPLES", "app"]

_Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Show this one in full, with its sources.")]
_Search = Annotated[str | None, typer.Option(metavar="TEXT", help="Only those with TEXT in a name, or the nearest.")]


@command("Presets", *PRESETS, *DESTINATION)
def models(name: _Name = None, search: _Search = None, **options: Any) -> int:
    """List the models, or show one with its sources."""
    return presets.show("models", name, search, options)


@command("Presets", *PRESETS, *DESTINATION)
def gpus(name: _Name = None, search: _Search = None, **options: Any) -> int:
    """List the GPUs, or show one with its sources."""
    return presets.show("gpus", name, search, options)


@command("Presets", *PRESETS, *DESTINATION)
def nodes(name: _Name = None, search: _Search = None, **options: Any) -> int:
    """List the nodes, or show one with its sources."""
    return presets.show("nodes", name, search, options)
