"""Activation checkpoints: a function run without a graph in forward and again, with one, in backward.

Source: ``torch/utils/checkpoint.py`` of PyTorch 2.13.

A checkpoint whose outputs are dropped as well, once the operator that read them is done.

Source: Megatron-LM 23e00ed ``core/tensor_parallel/random.py``, ``CheckpointWithoutOutput``: the gradient of a later
tensor triggers the recomputation, whose results are copied into the storages that were emptied and kept beside them.

Saved tensors that hooks pack into 8-bit or 4-bit integers with a scale for each group, and unpack for backward.

``torch.autograd.graph.saved_tensors_hooks`` are called for each save: an operator that saves what another has saved
already gets a packed copy of its own, and all that a node saved is unpacked at once where the node runs. Integers,
masks, weights, tables that all blocks share, and what is small (statistics, logsumexp) stay as they are.

Source: PyTorch 2.13 ``torch/csrc/autograd/saved_variable.cpp`` (one pack a save, one unpack a read) and
``torch/utils/checkpoint.py`` (inner hooks replace outer ones, and what is computed again runs without them; the inputs
of a checkpoint are saved under the outer ones).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from memcalc.trace.tape import Grads, Leaf, Record, Size, Storage, Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.trace.tape import Edge, Grads, Rule


Function = Callable[..., Tensor]


class Rerun(NamedTuple):
    """How a checkpoint runs its function again."""

    reentrant: bool
    """As a function of its own, with a backward inside of backward."""
    placeholders: bool
    """The graph of forward has saved placeholders, the first of which that is read runs the function again."""
    stops_early: bool
    """It ends with the last tensor that is saved."""


class Recorder:
    """A selective checkpoint's memory: keeps the outputs of chosen operators in forward, gives them back later."""

    def __init__(self, choose: Callable[[str, int], bool]) -> None:
        self.choose = choose
        """Takes the operator's kind and its number among its kind, from zero."""
        self.kept: list[Tensor] = []
        self.replaying = False
        self._numbers: dict[str, int] = {}

    def restart(self) -> None:
        """Begin to give back."""
        self.replaying, self._numbers = True, {}
        self.kept.reverse()

    def run(self, kind: str, make: Callable[[], Tensor]) -> Tensor:
        """Keep the operator's output, or give back the one that was kept."""
        number = self._numbers.get(kind, 0)
        self._numbers[kind] = number + 1
        if not self.choose(kind, number):
            return make()
        if self.replaying:
            return self.kept.pop()
        out = make()
        self.kept.append(Tensor(out.storage, out.size))
        return out


def checkpoint(
    tape: Tape, function: Function, inputs: list[Tensor], how: Rerun, *, partitioned: bool = False
) -> Tensor:
    """Run ``function`` so that only its inputs are kept.

    A reentrant checkpoint (``CheckpointFunction``) holds the recomputed output and the incoming gradient through its
    backward; the other kind recomputes into the original graph and holds neither. ``partitioned``: each rank of a
    tensor-parallel group keeps a part of the inputs, and gathers them again (DeepSpeed's ``partition_activations``).
    """
    return _checkpoint(tape, function, inputs, None, how, partitioned=partitioned)


def region(
    tape: Tape, checkpointed: frozenset[str], name: str, function: Function, inputs: list[Tensor], how: Rerun
) -> Tensor:
    """Run a part of a block, under a checkpoint of its own where the policy names it."""
    if name in checkpointed:
        return _checkpoint(tape, function, inputs, None, how._replace(reentrant=False))
    return function(*inputs)


def selective(
    tape: Tape, function: Function, inputs: list[Tensor], how: Rerun, choose: Callable[[str, int], bool]
) -> Tensor:
    """``create_selective_checkpoint_contexts``: the outputs of the chosen operators are kept beside the inputs."""
    return _checkpoint(tape, function, inputs, Recorder(choose), how._replace(reentrant=False))


def _checkpoint(
    tape: Tape,
    function: Function,
    inputs: list[Tensor],
    recorder: Recorder | None,
    how: Rerun,
    *,
    partitioned: bool = False,
) -> Tensor:
    with tape.no_grad(), tape.recording(recorder.run) if recorder else nullcontext():
        out = function(*(Tensor(i.storage, i.size) for i in inputs))
    out = Tensor(out.storage, out.size)
    packed = [tape.pack(i.storage, i.size) if isinstance(tape, PackedTape) and tape.packs else None for i in inputs]
    apart = [partitioned or narrow is not None for narrow in packed]
    inputs_saved: list[tuple[Storage, Size]] = [
        (narrow or (_part(tape, i) if partitioned else i.storage), i.size)
        for narrow, i in zip(packed, inputs, strict=True)
    ]
    packed.clear()
    wanted = [i.requires_grad for i in inputs]

    def rule(grads: Grads) -> Grads:
        grad = [Tensor(g.storage, g.size) for g in grads if g is not None]
        if not how.reentrant:
            grads.clear()
        full = [
            (_whole(tape, size) if again else storage, size)
            for (storage, size), again in zip(inputs_saved, apart, strict=True)
        ]
        begin = len(tape.events)
        out = _recompute(tape, function, full, wanted, recorder, lends=not how.reentrant)
        edge, needed = out.edge, tape.needed if how.stops_early else len(tape.events)
        if not how.reentrant:
            del out
        made, reads = len(tape.events), list[int]()
        ended = tape.backward(edge, grad, reads)
        if how.reentrant and tape.shared:  # the graph of a tensor ends with its function's input, which has a gradient
            tape.shared += [*(storage for storage, _ in full), *(tensor.storage for tensor in ended.values())]
        if how.placeholders:
            read = reads[0] if reads else len(tape.events)
            tape.events[begin:] = unpacked(tape.events[begin:], needed - begin, made - begin, read - begin)
        inputs_saved.clear()
        full.clear()
        return [ended.get(str(index)) for index in range(len(wanted))]

    return tape.record(out, inputs, rule, reads=True)


def unpacked(events: list[int], needed: int, made: int, read: int) -> list[int]:
    """A checkpoint's recomputation and backward in the order in which a graph that saved placeholders brings them.

    The first node that unpacks a saved tensor, at ``read``, runs the function again: gradients that nodes before it
    made are there by then. It ends with the last tensor that is saved, at ``needed``; what the function made after
    that, up to ``made``, is not. Source: ``_checkpoint_hook`` and ``_StopRecomputationError`` of torch 2.13.
    """
    spared = {event for event in events[needed:made] if event >= 0}
    again = [event for event in events[:made] if max(event, ~event) not in spared]
    return [*events[made:read], *again, *(event for event in events[read:] if ~event not in spared)]


def _part(tape: Tape, x: Tensor) -> Storage:
    return tape.new("part of the checkpoint's input", x.size._replace(shard="tp")).storage


def _whole(tape: Tape, size: Size) -> Storage:
    return tape.new("checkpoint's input, gathered", size).storage


def _recompute(
    tape: Tape,
    function: Function,
    inputs_saved: list[tuple[Storage, Size]],
    wanted: list[bool],
    recorder: Recorder | None,
    *,
    lends: bool,
) -> Tensor:
    """Run the function again with a graph that ends at its inputs."""
    leaves = [
        Tensor(storage, size, Leaf(str(index), keep=False) if need else None)
        for index, ((storage, size), need) in enumerate(zip(inputs_saved, wanted, strict=True))
    ]
    if recorder is None:
        with tape.enable_grad(lends=lends):
            return function(*leaves)
    recorder.restart()
    with tape.enable_grad(lends=lends), tape.recording(recorder.run):
        return function(*leaves)


def discarding(tape: Tape, out: Tensor, after: Tensor) -> Tensor:
    """Megatron's ``CheckpointWithoutOutput``: ``out`` is dropped now and made again when ``after``'s gradient comes.

    Source: Megatron-LM core/tensor_parallel/random.py (core 0.14), ``discard_output_and_register_recompute``.
    """
    storage, size = out.storage, after.size
    tape.events.append(~storage.index)

    def rule(grads: Grads) -> Grads:
        tape.events.append(storage.index)
        return grads

    return tape.record(Tensor(after.storage, size), [after], rule)


Functions = Callable[..., list[Tensor]]


@dataclass
class WithoutOutput:
    """A function run without a graph, whose outputs can be discarded and made again."""

    tape: Tape
    function: Functions
    held: list[tuple[Storage, Size]] = field(default_factory=list)
    made: list[Storage] = field(default_factory=list)
    again: list[Tensor] = field(default_factory=list)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs; only the inputs are kept for backward."""
        with self.tape.no_grad():
            made = self.function(*(Tensor(i.storage, i.size) for i in inputs))
        self.held = [(i.storage, i.size) for i in inputs]
        self.made = [out.storage for out in made]
        outs = [Tensor(out.storage, out.size) for out in made]
        return self.tape.record_many(outs, inputs, self._backward)

    def discard(self, after: Tensor) -> Tensor:
        """Drop the outputs; the gradient of ``after`` brings them back."""
        self.tape.events += [~storage.index for storage in self.made]
        return self.tape.record(Tensor(after.storage, after.size), [after], self._restore)

    def _restore(self, grads: Grads) -> Grads:
        leaves = [Tensor(storage, size, Leaf(str(i), keep=False)) for i, (storage, size) in enumerate(self.held)]
        with self.tape.enable_grad():
            self.again = self.function(*leaves)
        self.tape.events += [storage.index for storage in self.made]
        self.made = []
        return grads

    def _backward(self, grads: Grads) -> Grads:
        given, again = list(grads), self.again
        with self.tape.enable_grad():
            joined = self.tape.record(Tensor(again[0].storage, again[0].size), again, lambda _: given)
        ended = self.tape.backward(joined.edge, [Tensor(again[0].storage, again[0].size)])
        names, self.held, self.again = [str(i) for i in range(len(self.held))], [], []
        return [ended.get(name) for name in names]


GROUP, SCALE = 128, 4
"""Elements that share a scale, and its bytes."""
SHARED = ("row", "sample", "once")
"""Units of tensors that do not grow with a micro-batch's tokens, or are weights."""


def packed_size(size: Size, bits: int) -> Size:
    """The extent of a tensor as integers of so many bits with a scale for each group, in whole bytes a unit."""
    return size._replace(elements=-(-size.elements * (bits * GROUP + 8 * SCALE) // (8 * GROUP)), width=1)


def qualifies(record: Record, size: Size) -> bool:
    """Whether a saved tensor is packed."""
    narrow = size.width < 2 or record.kind not in ("activation", "exchanged", "external") or size.unit in SHARED
    return not narrow and (size.elements > GROUP or size.unit.endswith(("pair", "square")))


class PackedTape(Tape):
    """A tape on which operators of a first forward save packed tensors."""

    def __init__(self, bits: int, *, accumulating: bool = False) -> None:
        super().__init__(accumulating=accumulating)
        self.bits = bits

    def record_many(
        self,
        outs: list[Tensor],
        inputs: Sequence[Tensor | Edge | None],
        rule: Rule,
        saved: Sequence[Storage | None] = (),
    ) -> list[Tensor]:
        """Put an operator into the graph; a view is packed as a tensor of its own."""
        views = [tensor for tensor in (*inputs, *outs) if isinstance(tensor, Tensor)]
        needed = any(edge is not None for edge in (i.edge if isinstance(i, Tensor) else i for i in inputs))
        if not needed or not saved or not self.packs:
            return super().record_many(outs, inputs, rule, saved)
        stored: list[Storage | None] = []
        sizes: list[Size] = []
        for storage in saved:
            size = _size_of(storage, views) if storage else None
            packed = self.pack(storage, size) if storage and size else None
            stored.append(packed or storage)
            if packed and size:
                sizes.append(size)
        views.clear()

        def unpacking(grads: Grads) -> Sequence[Tensor | None]:
            unpacked = [self.new("saved tensor, unpacked", size) for size in sizes]
            results = rule(grads)
            del unpacked
            return results

        return super().record_many(outs, inputs, unpacking, stored)

    @property
    def packs(self) -> bool:
        """Whether hooks are on: in a forward that has a graph and is not run again."""
        return self._grad and not self.again

    def pack(self, storage: Storage, size: Size) -> Storage | None:
        """The packed copy of a tensor of ``size``; None where it stays as it is."""
        record = self.records[storage.index]
        if not qualifies(record, size):
            return None
        return self.new(f"{record.name}, {self.bits}-bit", packed_size(size, self.bits)).storage


def _size_of(storage: Storage, views: list[Tensor]) -> Size:
    """The extent of the next view of a storage, which goes from the list; that of the storage where there is none."""
    for index, view in enumerate(views):
        if view.storage is storage:
            return views.pop(index).size
    return storage.size
