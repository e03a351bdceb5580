"""The answer of ``memcalc probe --device fake``: what a module's own steps keep and hold, by part, module and phase."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.specs.model import Frozen


class ModulePart(Frozen):
    """A block, or what stands before or after the blocks."""

    path: str
    name: str
    """The class of the module."""
    parameters: int
    saved: int
    """Bytes that it keeps for backward."""


class SavedTensor(Frozen):
    """One storage that autograd keeps for backward."""

    part: str
    module: str
    node: str
    """Who keeps it, as ``MmBackward0.self``."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    weight: str
    """The parameter that it is a 16-bit copy of, if it is one."""


class ModuleComponents(Frozen):
    """Bytes alive at the peak; their sum is the peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    """Of the module: no memory of an allocator or a framework is in it."""
    inputs: int


class ModuleProbe(Frozen):
    """The answer."""

    schema_: Literal["memcalc.probe-module/1"] = Field(
        default="memcalc.probe-module/1", alias="schema", serialization_alias="schema"
    )
    version: str
    module: str
    torch: str
    loss: str
    """What was taken as the loss."""
    precision: str
    recompute: str
    optimizer: str
    micro_batch: int
    seq_len: int
    parameters: int
    peak: int
    """The largest sum of live tensors in the second step [bytes]."""
    peak_phase: str
    peak_at: str
    """The part and operator at which it stands."""
    components: ModuleComponents
    phases: dict[str, int]
    """Largest sums of live tensors in forward, loss, backward and step of the second step [bytes]."""
    first_phases: dict[str, int]
    """Those of the first step, before which the optimizer has no states."""
    saved: int
    """Bytes that one micro-batch keeps for backward, weights and their copies left out."""
    parts: tuple[ModulePart, ...]
    tensors: tuple[SavedTensor, ...]
    file: str
    """Where the recorded model was written, if it was."""
    notes: tuple[str, ...]
