"""From a grid of strategies to its ledger: the only caller of the memory formulas."""

from memcalc.terms.build import build_ledger, host_bytes
from memcalc.terms.census import Census
from memcalc.terms.overhead import Overhead, overhead_of

__all__ = ["Census", "Overhead", "build_ledger", "host_bytes", "overhead_of"]
