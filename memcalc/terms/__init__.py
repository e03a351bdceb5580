"""From a grid of strategies to its ledger: the only caller of the memory formulas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.terms.build import build_ledger
    from memcalc.terms.host import off_gpu_bytes, off_gpu_terms
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Overhead, overhead_of

__all__ = ["ModelOnGrid", "Overhead", "build_ledger", "off_gpu_bytes", "off_gpu_terms", "overhead_of"]

_HOMES = {
    **dict.fromkeys(("Overhead", "overhead_of"), "overhead"),
    **dict.fromkeys(("off_gpu_bytes", "off_gpu_terms"), "host"),
    "ModelOnGrid": "model_on_grid",
    "build_ledger": "build",
}
"""Where each name is defined."""


def __getattr__(name: str) -> Any:
    """Import a name on first use: who counts parameters alone, as a list of models does, needs no ledger."""
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"memcalc.terms.{_HOMES[name]}"), name)
