"""What an estimate says of sequences that differ in length."""

from __future__ import annotations

from memcalc.specs.strict import Frozen


class LengthFacts(Frozen):
    """Lengths of the data, the micro-batches made of them, and how many steps fit."""

    lengths: str
    """A file, or the quantiles of a log-normal."""
    batching: str
    """How they become micro-batches: a value of ``--batching``."""
    sequences: int
    """That the file has, or that stand for the distribution [1]."""
    median: int
    """Half of the sequences are no longer [tokens]."""
    p99: int
    """99% of the sequences are no longer [tokens]."""
    longest: int
    """The longest sequence [tokens]."""
    rows: int
    """Of the longest micro-batch that can be made, for which peak and components are said [sequences]."""
    tokens: int
    """Of each of its rows [tokens]."""
    mean_tokens: float
    """Of a micro-batch, padding included [tokens]."""
    replayed: int
    """Micro-batches that the allocator was simulated over, those of one rank in their order; 0 where it was not [1]."""
    shapes: int
    """Different ones among them [1]."""
    alone: int
    """Reserved where every micro-batch is the longest [bytes]."""
    in_sequence: int
    """Reserved after the others, when the longest comes [bytes]."""
    steps: int
    """Optimizer steps that were made, over all ranks [1]."""
    fitting: float
    """Share of them whose micro-batches all fit with the 95% margin, [1]."""
    running: float
    """Share of them whose micro-batches all fit as predicted, [1]."""
    fitting_tokens: int
    """Tokens of the largest micro-batch among them that fits with the margin; 0 for none [tokens]."""
    seed: int
    """Of the order in which sequences come."""
