"""What a job does beside its training steps, as it is answered."""

from __future__ import annotations

from typing import Any, Literal

from memcalc.specs.strict import Frozen


class OccasionPart(Frozen):
    """One named number of bytes of an occasion."""

    name: str
    """What it is."""
    bytes: int
    """Of one rank on the GPU; of all ranks of one node on the host."""
    tier: Literal["gpu", "host"]
    """The memory in which it lies."""
    formula: str
    """In the symbols of ``inputs``."""
    inputs: dict[str, Any]
    """What was put in, by symbol."""
    source: str
    """Who says so: a framework's file and version."""


class Occasion(Frozen):
    """Loading, resuming, evaluation, generation or saving, with its own peak."""

    name: Literal["loading", "resuming", "evaluation", "generation", "saving"]
    """Which of them."""
    when: str
    """What it does, in a few words."""
    certain: bool
    """Whether the job says that it does this; else it is what its framework does where nothing is said."""
    allocated: int
    """The most that one GPU holds, on the fullest stage of the pipeline [bytes]."""
    host: int
    """What one node's host memory holds, beside what is offloaded [bytes]."""
    fits: bool
    """Whether ``allocated`` is at most the ``usable`` memory of the budget."""
    batch_outputs: int = 0
    """Of an evaluation: the outputs of one batch of all ranks, which a loop with metrics keeps [bytes]."""
    parts: tuple[OccasionPart, ...]
    """What it is made of, the largest first."""
