"""The command line: a command parses, makes one library call, and renders the answer."""

from __future__ import annotations

import gc
import os
import sys

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_OBJECTS = 1_000_000
"""New objects after which cycles are looked for: a replay makes many tuples and no cycle, and waits for the search."""


def main() -> None:
    """Run the command line that the process was given."""
    # pydantic looks through all installed packages for plugins, and none has a say in these records
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # importing NumPy starts a thread of OpenBLAS for each core, and nothing here multiplies matrices
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_OBJECTS)
    try:
        from memcalc.cli.app import app

        app()
    except KeyboardInterrupt:  # while importing; typer answers a later one
        sys.exit(_INTERRUPTED)
    finally:
        gc.freeze()  # the process ends, and need not look for cycles in all that it goes with
