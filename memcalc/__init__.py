"""Memory budgets and training plans for large models, computed before a GPU is touched.

>>> import memcalc
>>> memcalc.__version__
'0.1.0'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memcalc._version import __version__

if TYPE_CHECKING:
    from memcalc.api import estimate, ladder, largest, plan, smallest
    from memcalc.differences import diff
    from memcalc.handoff import export, load, save
    from memcalc.posttraining import rl
    from memcalc.posttraining.plans import plan_rl
    from memcalc.posttraining.steps import ladder_rl
    from memcalc.preflight import check
    from memcalc.probe.calibrate import calibrate
    from memcalc.probe.guard import guard, lightning_callback, trainer_callback
    from memcalc.probe.triage import triage
    from memcalc.report.page import page
    from memcalc.serving import serve
    from memcalc.sweeps import sweep

__all__ = [
    "__version__",
    "calibrate",
    "check",
    "diff",
    "estimate",
    "export",
    "guard",
    "ladder",
    "ladder_rl",
    "largest",
    "lightning_callback",
    "load",
    "page",
    "plan",
    "plan_rl",
    "rl",
    "save",
    "serve",
    "smallest",
    "sweep",
    "trainer_callback",
    "triage",
]

_HOMES = {
    **dict.fromkeys(("export", "load", "save"), "handoff"),
    **dict.fromkeys(("guard", "lightning_callback", "trainer_callback"), "probe.guard"),
    "calibrate": "probe.calibrate",
    "check": "preflight",
    "diff": "differences",
    "page": "report.page",
    "ladder_rl": "posttraining.steps",
    "plan_rl": "posttraining.plans",
    "rl": "posttraining",
    "serve": "serving",
    "sweep": "sweeps",
    "triage": "probe.triage",
}
"""Where each public name is defined that :mod:`memcalc.api` does not define."""


def __getattr__(name: str) -> Any:
    """Import the library on first use, so that `import memcalc` and `memcalc --help` stay fast."""
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f"memcalc.{_HOMES.get(name, 'api')}"), name)
    base = import_module("memcalc.results.estimates").Answer
    base.drawing, base.telling = staticmethod(_drawn), staticmethod(_told)
    return value


def _drawn(answer: Any) -> str | None:
    """Draw an answer for a notebook."""
    from memcalc.report.page.live import cell_of

    return cell_of(answer)


def _told(answer: Any) -> str | None:
    """Write an answer as a terminal shows it."""
    from memcalc.report import screen_of

    return screen_of(answer)


def __dir__() -> list[str]:
    return sorted(__all__)
