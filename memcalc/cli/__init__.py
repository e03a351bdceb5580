"""The command line: a command parses, makes one library call, and renders the answer."""

from __future__ import annotations

import gc
import os
import sys

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_OBJECTS = 1_000_000
"""New objects after which cycles are looked for: a replay makes many tuples and no cycle, and waits for the search."""
_CRASHED = 70
"""EX_SOFTWARE of sysexits.h: Python's own 1 would say that the job does not fit."""
_TRACEBACK = "MEMCALC_TRACEBACK"
"""The variable with which a crash shows where it happened."""


def _crashed(error: Exception) -> int:
    """Say in one line that memcalc itself is wrong, where, and what to do; return the exit code.

    Nothing is imported for it: what is missing or broken may be what would be.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}" if frame else "?"  # noqa: PTH119
    message = ascii(f"{type(error).__name__}: {error}"[:200])[1:-1] if str(error) else type(error).__name__
    line = (
        f"memcalc: this is a defect of memcalc, not of your input, and no verdict: {message} ({where}); please report "
        f"it to memcalc's maintainers with this command, its files and what {_TRACEBACK}=1 shows.\n"
    )
    try:
        sys.stderr.write(line)
    except OSError:  # nobody can read it, and the interpreter would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return _CRASHED


_COMPLETE = "_MEMCALC_COMPLETE"
"""The variable with which a shell asks for completions, or for the script that asks."""
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def _check_completion() -> None:
    """Refuse what no shell asks: typer would end with the exit code of "does not fit", or with a crash."""
    instruction, word = os.environ.get(_COMPLETE), os.environ.get("COMP_CWORD", "")
    fault = ""
    if instruction and instruction not in [f"{what}_{shell}" for what in ("complete", "source") for shell in _SHELLS]:
        fault = (
            f"{_COMPLETE} must be complete_SHELL or source_SHELL with one of {', '.join(_SHELLS)}, got {instruction!a}"
        )
    elif instruction == "complete_bash" and not ("COMP_WORDS" in os.environ and word.isascii() and word.isdecimal()):
        fault = f"COMP_WORDS must be a line and COMP_CWORD the number of a word in it, got {word!a}"
    if fault:
        sys.stderr.write(f"memcalc: {fault}.\n")
        sys.exit(2)


def main() -> None:
    """Run the command line that the process was given."""
    # pydantic looks through all installed packages for plugins, and none has a say in these records
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # importing NumPy starts a thread of OpenBLAS for each core, and nothing here multiplies matrices
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_OBJECTS)
    if sys.stderr is None:  # closed by who started the process
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for as long as the process lives
    _check_completion()
    try:
        from memcalc.cli.app import app

        app(prog_name="memcalc")  # python -m memcalc, too: its help, and its completion
    except KeyboardInterrupt:  # while importing; typer answers a later one
        sys.exit(_INTERRUPTED)
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            raise
        sys.exit(_crashed(error))
    finally:
        gc.freeze()  # the process ends, and need not look for cycles in all that it goes with
