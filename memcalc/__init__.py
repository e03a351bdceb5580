"""Memory budgets and training plans for large models, computed before a GPU is touched.

>>> import memcalc
>>> memcalc.__version__
'0.1.0'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.api import estimate, largest, plan, smallest
    from memcalc.preflight import check
    from memcalc.sweeps import sweep

__all__ = ["__version__", "check", "estimate", "largest", "plan", "smallest", "sweep"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the library on first use, so that `import memcalc` and `memcalc --help` stay fast."""
    if name == "sweep":
        from memcalc import sweeps

        return sweeps.sweep
    if name == "check":
        from memcalc import preflight

        return preflight.check
    if name not in {"estimate", "largest", "plan", "smallest"}:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from memcalc import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
