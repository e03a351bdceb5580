"""Activation checkpoints: a function run without a graph in forward and again, with one, in backward.

Source: ``torch/utils/checkpoint.py`` of PyTorch 2.13.

A checkpoint whose outputs are dropped as well, once the operator that read them is done.

Source: Megatron-LM 23e00ed ``core/tensor_parallel/random.py``, ``CheckpointWithoutOutput``: the gradient of a later
tensor triggers the recomputation, whose results are copied into the storages that were emptied and kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from memcalc.trace.packing import PackedTape
from memcalc.trace.tape import Grads, Leaf, Recorder, Size, Storage, Tape, Tensor

Function = Callable[..., Tensor]


def checkpoint(
    tape: Tape, function: Function, inputs: list[Tensor], *, reentrant: bool, partitioned: bool = False
) -> Tensor:
    """Run ``function`` so that only its inputs are kept.

    A reentrant checkpoint (``CheckpointFunction``) holds the recomputed output and the incoming gradient through its
    backward; the other kind recomputes into the original graph and holds neither. ``partitioned``: each rank of a
    tensor-parallel group keeps a part of the inputs, and gathers them again (DeepSpeed's ``partition_activations``).
    """
    return _checkpoint(tape, function, inputs, None, reentrant=reentrant, partitioned=partitioned)


def region(tape: Tape, checkpointed: frozenset[str], name: str, function: Function, inputs: list[Tensor]) -> Tensor:
    """Run a part of a block, under a checkpoint of its own where the policy names it."""
    if name in checkpointed:
        return checkpoint(tape, function, inputs, reentrant=False)
    return function(*inputs)


def selective(tape: Tape, function: Function, inputs: list[Tensor], choose: Callable[[str, int], bool]) -> Tensor:
    """``create_selective_checkpoint_contexts``: the outputs of the chosen operators are kept beside the inputs."""
    return _checkpoint(tape, function, inputs, Recorder(choose), reentrant=False)


def _checkpoint(
    tape: Tape,
    function: Function,
    inputs: list[Tensor],
    recorder: Recorder | None,
    *,
    reentrant: bool,
    partitioned: bool = False,
) -> Tensor:
    with tape.no_grad(), tape.recording(recorder) if recorder else nullcontext():
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
        if not reentrant:
            grads.clear()
        full = [
            (_whole(tape, size) if again else storage, size)
            for (storage, size), again in zip(inputs_saved, apart, strict=True)
        ]
        out = _recompute(tape, function, full, wanted, recorder, lends=not reentrant)
        edge = out.edge
        if not reentrant:
            del out
        ended = tape.backward(edge, grad)
        inputs_saved.clear()
        full.clear()
        return [ended.get(str(index)) for index in range(len(wanted))]

    return tape.record(out, inputs, rule)


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
    with tape.enable_grad(lends=lends), tape.recording(recorder):
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
