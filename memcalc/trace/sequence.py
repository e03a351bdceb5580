"""Sequence parallelism as DTensor runs it: gathers before a branch, reduce-scatters after it.

Source: ``torch/distributed/tensor/parallel/style.py`` (PrepareModuleInput, RowwiseParallel) of PyTorch 2.13, with the
plan of torchtitan ``parallelize_llama.py`` (9dec370): each branch of a block gathers its input once, and its matmuls
keep that.
"""

from __future__ import annotations

from memcalc.trace.layers import Setting
from memcalc.trace.tape import Size, Tape, Tensor


def gathered(tape: Tape, x: Tensor, setting: Setting) -> Tensor:
    """The whole sequence on each rank; x itself without sequence parallelism."""
    if not setting.gathered_input_saved:
        return x
    back = x.size
    out = tape.new("gathered sequence", back._replace(shard="none"))
    return tape.record(out, [x], lambda _: [tape.new("gradient before the gather", back)])


def scattered(tape: Tape, x: Tensor, size: Size, setting: Setting, *, last: bool = False) -> Tensor:
    """The sum over ranks of partial outputs, each rank its part of the sequence, of ``size``.

    ``last``: it ends the block.
    """
    if not setting.gathered_input_saved:
        return x
    back = x.size
    with tape.unread(active=last and setting.compiled):
        out = tape.operator("reduce-scatter", lambda: tape.new("reduced branch output", size))
    return tape.record(out, [x], lambda _: [tape.new("gradient of the branch output, gathered", back)])
