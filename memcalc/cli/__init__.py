"""The command line: a command parses, makes one library call, and renders the answer."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line that the process was given."""
    from memcalc.cli.app import app

    app()
