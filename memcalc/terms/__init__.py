"""From a grid of strategies to its ledger: the only caller of the memory formulas."""

from memcalc.terms.build import build_ledger
from memcalc.terms.host import off_gpu_bytes, off_gpu_terms
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Overhead, overhead_of

__all__ = ["ModelOnGrid", "Overhead", "build_ledger", "off_gpu_bytes", "off_gpu_terms", "overhead_of"]
