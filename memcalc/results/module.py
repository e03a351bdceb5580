"""The answer of ``memcalc probe --device fake``: what a module's own steps keep and hold, by part, module and phase."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.specs.model import Frozen


class ModulePart(Frozen):
    """A block, or what stands before or after the blocks."""

    path: str
    """Of the block within the module; ``outside the blocks`` for all else."""
    name: str
    """The class of the module."""
    parameters: int
    """Trained elements, [1]."""
    saved: int
    """Bytes that it keeps for backward."""


class SavedTensor(Frozen):
    """One storage that autograd keeps for backward."""

    part: str
    """Path of the block; ``embedding``, ``between`` or ``head`` outside the blocks."""
    module: str
    """Path of the innermost module that ran when it was kept."""
    node: str
    """Who keeps it, as ``MmBackward0.self``."""
    shape: tuple[int, ...]
    """As the first that keeps it sees it."""
    dtype: str
    """As torch calls it, such as ``bfloat16``."""
    bytes: int
    """Of the whole storage."""
    weight: str
    """The parameter that it is a 16-bit copy of, if it is one."""


class ModuleComponents(Frozen):
    """Bytes alive at the peak; their sum is the peak."""

    parameters: int
    """Weights."""
    gradients: int
    """Of the parameters."""
    optimizer: int
    """States of the optimizer."""
    activations: int
    """All that is none of the others: what is kept for backward, and temporaries."""
    buffers: int
    """Of the module: no memory of an allocator or a framework is in it."""
    inputs: int
    """What the module is called with."""


class ModuleProbe(Frozen):
    """The answer."""

    schema_: Literal["memcalc.probe-module/1"] = Field(
        default="memcalc.probe-module/1", alias="schema", serialization_alias="schema"
    )
    """The name and version of this record."""
    version: str
    """Of memcalc."""
    module: str
    """As it was named."""
    torch: str
    """The version that ran the steps."""
    loss: str
    """What was taken as the loss."""
    precision: str
    """In which the steps were run."""
    recompute: str
    """Which blocks are computed again in backward."""
    optimizer: str
    """Whose steps were run."""
    micro_batch: int
    """Sequences of one forward, [1]."""
    seq_len: int
    """Tokens a sequence; 1 where the module's inputs take no length."""
    parameters: int
    """Trained elements, [1]."""
    peak: int
    """The largest sum of live tensors in the second step [bytes]."""
    peak_phase: str
    """forward, loss, backward or step."""
    peak_at: str
    """The part and operator at which it stands."""
    components: ModuleComponents
    """At the peak [bytes]."""
    phases: dict[str, int]
    """Largest sums of live tensors in forward, loss, backward and step of the second step [bytes]."""
    first_phases: dict[str, int]
    """Those of the first step, before which the optimizer has no states."""
    saved: int
    """Bytes that one micro-batch keeps for backward, weights and their copies left out."""
    parts: tuple[ModulePart, ...]
    """What is outside the blocks, then block by block."""
    tensors: tuple[SavedTensor, ...]
    """Every storage that one micro-batch keeps for backward."""
    file: str
    """Where the recorded model was written, if it was."""
    notes: tuple[str, ...]
    """What was noted while the model was recorded; empty where none was."""
