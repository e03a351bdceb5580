"""Models that are trained as their class is: which frameworks do so, and the options that would change it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import UncountedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.planner.request import Request

FRAMEWORKS = ("hf", "fsdp2", "fsdp1", "ddp", "deepspeed", "plain")
"""Those that train any module as it is."""
DEGREES = ("tp", "pp", "cp", "ep")
USUAL = ("none", "model", None, False)


def refuse_told(request: Request, reasons: Mapping[str, str]) -> None:
    """Refuse the first option that is told anything but what it is by itself, with the reason."""
    for name, reason in reasons.items():
        choice = request.choices.get(name)
        value = choice.text if choice is not None else request.given.get(name)
        if value not in (*USUAL, *((1,) if name in DEGREES else ())):
            raise UncountedError(name.replace("_", "-"), value if isinstance(value, int) else str(value), reason)


def check_framework(request: Request, default: str, model: str) -> None:
    """Refuse a framework that has classes of its own for ``model``, a sentence's subject."""
    named = str(request.given.get("framework", default))
    if named.partition("@")[0] not in FRAMEWORKS:
        raise UncountedError("framework", named, f"{model} is modelled under {', '.join(FRAMEWORKS)}")
