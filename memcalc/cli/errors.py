"""The one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from memcalc.errors import MemcalcError, UnknownNameError

__all__ = ["Group", "fail"]

_USAGE = 2
# the common class of typer's usage errors has no public name
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Group(TyperGroup):
    """The command group; it answers errors with one line instead of a usage text or a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; what it returns is the exit code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except MemcalcError as error:
            code = fail(str(error), error.exit_code)
        except (_UsageError, typer.Abort) as error:
            code = fail(_usage(error), _USAGE)
        return sys.exit(code or 0) if standalone_mode else code


def fail(said: str, code: int) -> int:
    """Print one line on stderr; return `code`."""
    line = " ".join(said.split())
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    typer.echo(f"memcalc: {line}".encode(encoding, "backslashreplace").decode(encoding), err=True)
    return code


def _usage(error: Exception) -> str:
    """Return the sentence for a wrong command line."""
    if isinstance(error, typer.Abort):
        return "aborted."
    if hasattr(error, "possibilities"):
        name = str(getattr(error, "option_name", ""))
        return str(UnknownNameError("option", name, "must be one that --help lists", error.possibilities or ()))
    said = _UNPRINTABLE.sub("?", str(getattr(error, "format_message", error.__str__)()))
    return said if said.endswith("?") else f"{said.rstrip('.')}; --help shows an example."
