"""A part of a model whose allocations were recorded, not derived: what any ``nn.Module`` shows when it runs.

The record is that of a symbolic execution (:mod:`memcalc.trace`): storages with a size by unit, and the order in which
forward and backward allocate and free them. It has no tensor in it and needs no torch.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from memcalc.specs.strict import Frozen

Mode = Literal["fp32", "half", "autocast"]
"""Weights and arithmetic of 32 bits, of 16 bits, or weights of 32 bits under ``torch.autocast``."""
Treatment = Literal["none", "full"]
"""Whether blocks run as they are, or each under a (non-reentrant) checkpoint."""
Unit = Literal["token", "pair", "row", "square", "sample", "once"]
"""Of the units of :mod:`memcalc.trace.tape` those that micro-batch and sequence length make: b·s, b·s², s, s², b, 1."""
Kind = Literal["activation", "gradient", "weight copy", "external"]
Count = Annotated[int, Field(ge=0, le=2**48)]
Index = Annotated[int, Field(ge=-(2**20), lt=2**20)]


@dataclass(frozen=True)
class Source:
    """A module that is to be recorded, in the user's words."""

    module: str
    """The factory, as ``package.module:function``."""
    inputs: str = ""
    """The function that makes a batch."""
    loss: str = ""
    """The function that makes the loss of the output; the output's own where empty."""
    block_class: str = ""
    """The class of its blocks; detected where empty."""
    seq_len: int = 0
    """The length around which sizes are fitted; 0 for the usual one."""

    @property
    def words(self) -> tuple[tuple[str, str], ...]:
        """The further options, as typed."""
        named = (("inputs", self.inputs), ("loss-fn", self.loss), ("block-class", self.block_class))
        return tuple((name, value) for name, value in named if value)


class Storage(NamedTuple):
    """One storage; that of a weight's gradient is counted in elements of width 1, whatever its dtype."""

    name: Annotated[str, Field(max_length=400)]
    """What made it."""
    kind: Kind
    """What it is: an activation, a gradient, a weight's copy."""
    elements: Count
    """For each of ``unit`` [-]."""
    width: Annotated[int, Field(ge=0, le=16)]
    """Bytes of an element."""
    unit: Unit
    """What its size grows with: tokens, samples, or nothing."""


class Execution(Frozen):
    """One part's forward and backward, as :class:`memcalc.trace.template.Template` has it."""

    mode: Mode
    """Widths in which it ran."""
    treatment: Treatment
    """What of it is computed again."""
    records: tuple[Storage, ...] = Field(min_length=1, max_length=100_000)
    """Its storages; the first is its input."""
    forward: tuple[Index, ...]
    """Storages in the order in which forward allocates (n) and frees (~n) them."""
    backward: tuple[Index, ...]
    """The same of backward."""
    kept: tuple[Index, ...]
    """What autograd keeps from forward to backward."""
    passing: tuple[Index, ...] = ()
    """What a local variable holds until the whole forward ends, while later parts run; here it is freed at once."""
    output: Index
    """The storage of its output."""
    incoming: Index
    """The gradient of its output."""
    outgoing: Index | None = None
    """The gradient of its input; none where nothing before it is trained."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Every event names a storage, which is freed after it was allocated, and once."""
        ends = (self.output, self.incoming, 0 if self.outgoing is None else self.outgoing, *self.kept, *self.passing)
        named = chain(ends, (event if event >= 0 else ~event for event in (*self.forward, *self.backward)))
        if not all(0 <= index < len(self.records) for index in named):
            raise ValueError("an event names a storage that is not listed")
        alive = {0}
        for event in (*self.forward, None, *self.backward):
            if event is None:
                alive.add(self.incoming)
            elif event >= 0:
                alive.add(event)
            elif ~event in alive:
                alive.discard(~event)
            else:
                raise ValueError("a storage is freed that is not there")
        return self


class Segment(Frozen):
    """A block, or what stands before or after the blocks."""

    name: str = Field(max_length=400)
    """The class of the module."""
    tensors: tuple[Count, ...] = Field(default=(), max_length=1_000_000)
    """Elements of each trained parameter, in the order of the modules."""
    flops: dict[Unit, Count] = Field(default_factory=dict)
    """Operations of one forward, by what they grow with [FLOP]."""
    runs: tuple[Execution, ...] = Field(min_length=1)
    """Its execution in each mode and treatment."""

    def __hash__(self) -> int:
        """Cheap: a segment is a part of the keys of caches, and its records are many."""
        return hash((self.name, self.tensors[:4], len(self.runs)))

    @cached_property
    def parameters(self) -> int:
        """Its trained parameters [elements]."""
        return sum(self.tensors)


class Recording(Frozen):
    """What a recorded model has beside its blocks."""

    origin: str = Field(max_length=400)
    """The factory that made the module."""
    words: tuple[tuple[str, str], ...] = ()
    """Further options of the recording, so that its command line can be said again."""
    entry: Segment
    """Before the first block."""
    head: Segment
    """After the last block, the loss included."""
    loss: str = ""
    """What was taken as the loss."""
    per_sequence: bool = True
    """False where nothing depends on a sequence length: a sample is an image, or a row."""
    buffers: Count = 0
    """What the module keeps beside its trained parameters: buffers and frozen weights [bytes]."""
    notes: tuple[str, ...] = ()
    """What the user should know of the figures."""
    torch: str = ""
    """The version of PyTorch that recorded it."""

    def __hash__(self) -> int:
        """As cheap as that of its segments."""
        return hash((self.origin, self.entry, self.head))
