"""Position biases on the scores, as the mask that PyTorch's attention takes (T5).

Source: Transformers 5.23 ``integrations/sdpa_attention.py``, ``create_position_bias_mask``, and
``models/t5/modeling_t5.py``; PyTorch 2.13 ``attention.cpp``, ``preprocess_mask``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace.layers import Setting
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.model import Attention

BIASES = ("relative", "zeros")


def position_bias(tape: Tape, spec: Attention, setting: Setting, prefix: str) -> Tensor:
    """The bias of each head, without the batch, with its keys filled up as the memory-efficient kernel wants them.

    Each block makes its own, of the one that the first block looked up: a contiguous copy, or one with a causal mask in
    it. Zeros are shared by all blocks unless they must be filled up.
    """
    cross = spec.scores_bias == "zeros"
    size = Size(spec.heads, setting.compute, "filled_cross" if cross else "filled_square", "tp", "a·s")
    bias = tape.new(f"{prefix}attention bias", size)
    if cross:
        return bias
    mask = tape.new("causal mask", Size(1, 1, "square", "none", "1")) if spec.causal else None
    leaf = Leaf("position bias", keep=True) if setting.trainable else None

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of position bias", size._replace(unit="square"))]

    return tape.record(bias, [leaf], rule, [mask.storage if mask else None])
