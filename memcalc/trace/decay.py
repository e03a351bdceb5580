"""The decays of a recurrence, ``-exp(A)`` in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace.layers import WIDE
from memcalc.trace.tape import Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.trace.layers import BlockConfig


def decay_rates(tape: Tape, elements: int, setting: BlockConfig, label: str = "H") -> Tensor:
    """One number a head, or a channel and place of its state: a trained exponent's exponential is kept for backward."""
    vector = Size(elements, WIDE, "once", "none", label)
    leaf = Leaf("decay", keep=True) if setting.trainable else None
    exponential = tape.new("decay, exponential", vector)
    exponential = tape.record(
        exponential, [leaf], lambda _: [tape.new("gradient of decay", vector.wide(1), "gradient")],
        [exponential.storage],
    )  # fmt: skip
    return tape.record(tape.new("decay", vector), [exponential], lambda grads: [grads[0]])
