"""The inverse questions: what is asked, checked before a model is looked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import memcalc
from memcalc.cli.modules import with_model
from memcalc.cli.options import known_names
from memcalc.cli.output import destination, draw, picture_targets

__all__ = ["completion", "show"]


def completion(names: str) -> Callable[[str], list[str]]:
    """What completes the word after ``max`` or ``min``; ``names`` is a choice of :mod:`memcalc.specs.strategy`."""
    return lambda incomplete: [name for name in known_names(names) if name.startswith(incomplete)]


def show(command: str, what: str, options: dict[str, Any], **own: Any) -> int:
    """Ask, and show the answer; return the exit code."""
    from memcalc.report.inverse import report
    from memcalc.report.progress import waiting

    pictures = picture_targets(options, "chart")
    target = destination(options)
    curve: dict[str, Any] = {"curve": True} if pictures and command == "max" else {}
    ask = memcalc.largest if command == "max" else memcalc.smallest
    words = with_model(options, needed=command == "min")
    with waiting(f"{command} {what}", "models" if what == "model" else "strategies") as listen:
        found = ask(what, **words, **own, **curve, on_progress=listen)
    target.show(report(found))
    draw(pictures, {"chart": "inverse"}, found)
    return int(found.best is None)
