"""Command lines taken apart by the program's own parser."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from memcalc.cli.app import app
from memcalc.cli.options import DESTINATION, given

SHOWN = {option.name for option in DESTINATION} | {"chart", "timeline", "fix", "edit", "brief"}


def keywords(line: str) -> dict[str, Any]:
    """Return what a line gives the library's function."""
    _, name, *arguments = shlex.split(line)
    group: Any = typer.main.get_command(app)
    with group.commands[name].make_context(name, arguments) as context:
        return given({name: value for name, value in context.params.items() if name not in SHOWN})
