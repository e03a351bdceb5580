"""What one execution of a block shows: the tensors kept for backward and the working sets of forward and backward."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from memcalc.errors import CombinationError
from memcalc.trace import ops
from memcalc.trace.block import run_block
from memcalc.trace.checkpoint import PackedTape, checkpoint, selective
from memcalc.trace.entry import run_entry, run_exit
from memcalc.trace.head import run_head
from memcalc.trace.partition import ObservedTape, PartitionedTape, kept_operator, operators_of, partition
from memcalc.trace.tape import Record, Shard, Size, Tape, Tensor
from memcalc.trace.working_sets import Sum, alive, given_back, hole, peaks, total

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec

    from memcalc.frameworks.losses import Loss
    from memcalc.specs.block import Block, Norm
    from memcalc.specs.model import Tail, TowerEnds
    from memcalc.specs.recorded import Segment
    from memcalc.trace.layers import BlockConfig

    Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Template:
    """One block's forward and backward as allocations, whatever the number of tokens."""

    records: tuple[Record, ...]
    forward: tuple[int, ...]
    """Events of forward (see :class:`memcalc.trace.tape.Tape`); the block's input is allocated before the first."""
    backward: tuple[int, ...]
    """Events of backward; the gradient of the block's output is allocated before the first."""
    at_start: frozenset[int]
    """Storages alive when forward starts: the block's input."""
    kept: frozenset[int]
    """Storages kept from forward to backward, the other tower's output left out: all blocks share it."""
    held: frozenset[int]
    """Storages that stay after backward, until the loss is bound anew (see :meth:`memcalc.trace.tape.Tape.hold`)."""
    shared: frozenset[int]
    """Storages that a table of the model keeps until the graph goes, whose checkpoints refer to it."""
    keeps_context: bool
    """Whether the other tower's output is kept for backward."""
    output: int
    """The block's output: the next block's input."""
    incoming: int
    """The gradient of the block's output."""
    outgoing: int | None
    """The gradient of the block's input; None where it needs none."""
    passing: tuple[int, ...] = ()
    """What is freed with the whole forward; for the block's own order it is gone when the block ends."""
    crossings: tuple[int, ...] = ()
    """Events of forward until the logits leave the model, and of backward until their gradient comes back to it; empty
    where the loss is a part of the model or uses the head's weights."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What each storage is called."""
        return tuple(record.name for record in self.records)

    @cached_property
    def is_gradient(self) -> tuple[bool, ...]:
        """Whether each storage is the gradient of a weight."""
        return tuple(record.kind == "gradient" for record in self.records)

    @cached_property
    def is_exchanged(self) -> tuple[bool, ...]:
        """Whether a stream of context parallelism allocates each storage, where there are ranks to exchange it with."""
        return tuple(record.kind == "exchanged" for record in self.records)

    @cached_property
    def kept_records(self) -> tuple[Record, ...]:
        """Tensors kept for backward, in the order of their allocation."""
        return tuple(self.records[index] for index in sorted(self.kept))

    @cached_property
    def kept_sum(self) -> Sum:
        """Bytes kept for backward."""
        return total(self.kept_records)

    @cached_property
    def held_sum(self) -> Sum:
        """Bytes that stay after backward."""
        return total(self.records[index] for index in self.held)

    @cached_property
    def shared_sum(self) -> Sum:
        """Bytes that a table of the model keeps."""
        return total(self.records[index] for index in self.shared)

    @cached_property
    def input_sum(self) -> Sum:
        """Bytes of the block's input where it is among the kept."""
        return total(self.records[index] for index in self.kept & self.at_start)

    @cached_property
    def hole_sum(self) -> Sum:
        """Bytes of dead large tensors that no later one fits into: reserved beyond the peak."""
        size, shard = hole(self.records, (*self.forward, *self.backward))
        return {("token", shard, False): size}

    @cached_property
    def written_sum(self) -> Sum:
        """Bytes of the tensors that forward and backward make: what their kernels write.

        Left out are dequantisation, what an operator takes for itself, and sums, new or in place.
        """
        made = (self.records[index] for index in (*self.forward, *self.backward) if index >= 0)
        return total(record for record in made if record.kind not in ("dequantised", "workspace", "sum"))

    @cached_property
    def launches(self) -> tuple[int, int]:
        """Tensors that forward and backward make: about as many kernels of each.

        What one operator takes for itself is none, and a sum counts as little as one in place.
        """
        forward, backward = (
            sum(index >= 0 and self.records[index].kind not in ("workspace", "sum") for index in events)
            for events in (self.forward, self.backward)
        )
        return forward, backward

    @cached_property
    def observed_sum(self) -> Sum:
        """Bytes that measured runs reserve without a known cause."""
        return total(record for record in self.records if record.kind == "observed")

    @cached_property
    def forward_peaks(self) -> tuple[Sum, ...]:
        """Working sets of forward, of which one is the largest, the block's input included."""
        return peaks(self.records, self.forward, self.at_start)

    @cached_property
    def backward_peaks(self) -> tuple[Sum, ...]:
        """Working sets of backward, of which one is the largest, all that the block keeps included."""
        return peaks(self.records, self.backward, self.kept | {self.incoming})

    @cached_property
    def added_peaks(self) -> tuple[Sum, ...]:
        """The same where each weight's gradient is added to one that is there, and freed."""
        events = given_back(self.backward, self.is_gradient)
        return peaks(self.records, events, self.kept | {self.incoming})

    @cached_property
    def handed_over(self) -> int:
        """The logits that leave the model."""
        return max(alive(self.forward[: self.crossings[0]], self.at_start))

    @cached_property
    def forward_peaks_in_model(self) -> tuple[Sum, ...]:
        """Working sets of forward until the logits leave the model."""
        return peaks(self.records, self.forward[: self.crossings[0]], self.at_start)

    @cached_property
    def forward_peaks_in_loss(self) -> tuple[Sum, ...]:
        """Working sets of the loss's forward."""
        start = alive(self.forward[: self.crossings[0]], self.at_start)
        return peaks(self.records, self.forward[self.crossings[0] :], start)

    @cached_property
    def backward_peaks_in_loss(self) -> tuple[Sum, ...]:
        """Working sets of the loss's backward."""
        return peaks(self.records, self.backward[: self.crossings[1]], self.kept | {self.incoming})

    @cached_property
    def crossing_sum(self) -> Sum:
        """Bytes alive when the logits' gradient comes back to the model."""
        return total(self.records[index] for index in self._at_crossing)

    @cached_property
    def backward_peaks_in_model(self) -> tuple[Sum, ...]:
        """Working sets of backward from then on."""
        return peaks(self.records, self.backward[self.crossings[1] :], self._at_crossing)

    @cached_property
    def _at_crossing(self) -> frozenset[int]:
        return alive(self.backward[: self.crossings[1]], self.kept | {self.incoming})


class TraceCache:
    """Executions that were traced before: whoever traces hands it along, and it goes with the job that made it."""

    def __init__(self) -> None:
        self._templates: dict[tuple[Any, ...], Template] = {}

    def get(
        self, function: Callable[Arguments, Template], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Template:
        """The template of one of the functions below for these arguments, traced once."""
        key = function, args, *kwargs.items()
        if key not in self._templates:
            self._templates[key] = _undisturbed(lambda: function(*args, **kwargs))
        return self._templates[key]


_WITHOUT_SWITCH = 0.5
"""Longer than an execution takes [s]."""
_ALONE = threading.RLock()
"""One thread at a time changes the interval: another would take the changed one for what it has to restore."""


def _undisturbed(run: Callable[[], Template]) -> Template:
    """The template that two executions in a row give, where another thread could have changed one.

    A storage is freed with its last reference, and a thread that samples the frames of others (a profiler; each worker
    of Dask has one) holds all that stands in a frame for a moment longer. Other threads wait meanwhile: one that
    sampled at the same line of both would change both alike.
    """
    template = run()
    if threading.active_count() == 1:
        return template
    with _ALONE:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_WITHOUT_SWITCH)
        try:
            before = None
            while before != template:
                before, template = template, run()
        finally:
            sys.setswitchinterval(interval + 5e-7)  # whole microseconds are kept, and it is cut to them
    return template


def trace(
    block: Block, setting: BlockConfig, policy: str = "none", *, accumulating: bool = False, wanted: bool = True,
    copies: bool = False, referred: bool = False,
) -> Template:  # fmt: skip
    """Run one block forward and backward; ``policy`` is none, full (checkpointed whole) or selective-ops.

    ``wanted`` says whether a gradient flows to the block's input, ``copies`` whether autocast's 16-bit weights are
    among its tensors where it is not computed again, ``referred`` whether checkpoints of other blocks refer to what
    this one puts into a table.
    """
    if block.recorded is not None:
        return recorded(block.recorded, setting, policy)
    accumulating = accumulating or setting.adds_gradients
    if setting.compiled and policy == "none" and not (setting.checkpointed or block.is_moe):
        return _compiled(block, setting, accumulating=accumulating, wanted=wanted)
    bits = setting.compressed
    tape = PackedTape(bits, accumulating=accumulating) if bits else Tape(accumulating=accumulating)
    tape.copies_weights, tape.referred = copies and setting.autocast, referred
    start = _inputs(tape, block, setting, wanted=wanted)
    return _execute(tape, start, lambda: _forward(tape, block, setting, policy, start))


def _inputs(tape: Tape, block: Block, setting: BlockConfig, *, wanted: bool) -> list[Tensor]:
    """What a block is given."""
    start = [tape.leaf("block input", Size(block.hidden, setting.residual, "token", "sp", "h"), requires_grad=wanted)]
    if block.cross_attention is not None:
        width = block.cross_hidden or block.hidden
        start.append(tape.leaf("encoder's output", Size(width, setting.residual, "cross", "sp", "h")))
    return start


def _compiled(block: Block, setting: BlockConfig, *, accumulating: bool, wanted: bool) -> Template:
    """Run one block twice: to find where the partitioner cuts, and so that the cut decides what is kept."""
    observed = ObservedTape(accumulating=accumulating)
    _forward(observed, block, setting, "none", _inputs(observed, block, setting, wanted=wanted))
    tape = PartitionedTape(partition(observed), accumulating=accumulating)
    start = _inputs(tape, block, setting, wanted=wanted)

    def run() -> Tensor:
        out = _forward(tape, block, setting, "none", start)
        tape.settle()
        return out

    return _execute(tape, start, run)


def recorded(segment: Segment, setting: BlockConfig, policy: str = "none") -> Template:
    """What was recorded of a part of a model, in the width of the setting; ``policy`` is none or full."""
    mode = "autocast" if setting.autocast else "fp32" if setting.weight == 4 else "half"
    run = next((run for run in segment.runs if (run.mode, run.treatment) == (mode, policy)), None)
    if run is None:
        known = sorted({f"{run.mode} arithmetic with recompute {run.treatment}" for run in segment.runs})
        raise CombinationError("module", f"{mode} arithmetic, recompute {policy}", f"recorded are {', '.join(known)}")
    records = [Record(r.name, Size(r.elements, r.width, r.unit, "none", str(r.elements)), r.kind) for r in run.records]
    return Template(
        records=tuple(records),
        forward=run.forward,
        backward=run.backward,
        at_start=frozenset((0,)),
        kept=frozenset(run.kept),
        held=frozenset(),
        shared=frozenset(),
        keeps_context=False,
        output=run.output,
        incoming=run.incoming,
        outgoing=run.outgoing,
        passing=run.passing,
    )


def trace_head(
    hidden: int, final_norm: Norm | None, vocab: int, setting: BlockConfig, loss: Loss, shard: Shard,
    tail: Tail | None = None, *, softcap: bool = False, scaled: bool = False, copies: bool = False,
) -> Template:  # fmt: skip
    """Run final norm, head and loss forward and backward; ``shard`` is that of the logits.

    ``copies`` says whether autocast's 16-bit weight is among its tensors.
    """
    tape = Tape(accumulating=setting.adds_gradients)
    tape.copies_weights = copies and setting.autocast
    start = [tape.leaf("last block's output", Size(hidden, setting.residual, "token", "sp", "h"))]
    # A direct call hands its arguments over; a partial would hold the block's output until the loss is known
    return _execute(
        tape,
        start,
        lambda: run_head(
            tape, start.pop(), final_norm, vocab, setting, loss, shard, tail, softcap=softcap, scaled=scaled
        ),
    )


def trace_entry(ends: TowerEnds, block: Block, setting: BlockConfig, policy: str = "none") -> Template:
    """Run a tower's inputs up to its first block, forward and backward, with what its blocks share."""
    tape = Tape()
    return _execute(tape, [], lambda: run_entry(tape, ends, block, setting, policy))


def trace_exit(ends: TowerEnds, hidden: int, setting: BlockConfig, *, read: bool, wanted: bool = True) -> Template:
    """Run the end of a tower that another reads; ``read`` says whether a block keeps its output.

    ``wanted`` says whether a gradient flows to the tower.
    """
    tape = Tape()
    start = [tape.leaf("last block's output", Size(hidden, setting.residual, "token", "sp", "h"), requires_grad=wanted)]
    return _execute(tape, start, lambda: run_exit(tape, start.pop(), ends, setting, read=read))


def _execute(tape: Tape, start: list[Tensor], forward: Callable[[], Tensor]) -> Template:
    """Run forward, drop what nothing keeps, and run backward; what follows the first of ``start`` others hold too."""
    at_start, shared = frozenset(range(len(start[:1]))), frozenset(range(1, len(start)))
    others = [weakref.ref(tensor.storage) for tensor in start[1:]]
    begin = len(tape.events)
    out = forward()
    end = len(tape.events)
    size, edge, output = out.size, out.edge, out.storage.index
    del out
    start.clear()
    context = [other() for other in others]
    saved = alive(tape.events) - shared
    grad = [tape.new("gradient of the block's output", size, "external")]
    incoming, middle = len(tape.records) - 1, len(tape.events)
    ended = tape.backward(edge, grad)
    live = frozenset(tape.let_go())
    stop = len(tape.events)
    outgoing = ended[tape.records[0].name].storage.index if tape.records[0].name in ended else None
    return Template(
        records=tuple(tape.records),
        forward=tuple(tape.events[begin:end]),
        backward=tuple(tape.events[middle:stop]),
        at_start=at_start,
        kept=saved,
        held=live,
        shared=frozenset(storage.index for storage in tape.shared),
        keeps_context=any(context),
        output=output,
        incoming=incoming,
        outgoing=outgoing,
        crossings=tuple(event - since for event, since in zip(tape.crossings, (begin, middle), strict=False)),
    )


def _forward(tape: Tape, block: Block, setting: BlockConfig, policy: str, start: list[Tensor]) -> Tensor:
    def run(*inputs: Tensor) -> Tensor:
        return run_block(tape, inputs[0], block, setting, *inputs[1:])

    if setting.casts_input:
        start = [ops.cast(tape, start[0], setting.weight, "block input, cast"), *start[1:]]
    if policy == "full":
        tape.copies_weights = setting.autocast
        return checkpoint(tape, run, start, setting.rerun, partitioned=setting.partitioned)
    if policy == "selective-ops":
        setting = setting._replace(operators=operators_of(block, setting))
        return selective(tape, run, start, setting.rerun, partial(kept_operator, block, setting))
    return run(*start)
