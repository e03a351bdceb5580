"""The allocations of two training steps in order, for a replay of the caching allocator.

Nothing here has a list of tensors of its own: blocks and head come from the templates of :mod:`memcalc.trace`, all
other memory from the ledger's terms.
"""

from memcalc.events.stage import Rank, telling_ranks
from memcalc.events.writer import step_events

__all__ = ["Rank", "step_events", "telling_ranks"]
