"""Activation checkpoints: a function run without a graph in forward and again, with one, in backward.

Source: ``torch/utils/checkpoint.py`` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

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
    held: list[tuple[Storage, Size]] = [(_part(tape, i) if partitioned else i.storage, i.size) for i in inputs]
    wanted = [i.requires_grad for i in inputs]

    def rule(grads: Grads) -> Grads:
        grad = [Tensor(g.storage, g.size) for g in grads if g is not None]
        if not reentrant:
            grads.clear()
        whole = [(_whole(tape, size), size) for _, size in held] if partitioned else held
        again = _recompute(tape, function, whole, wanted, recorder)
        edge = again.edge
        if not reentrant:
            del again
        ended = tape.backward(edge, grad)
        held.clear()
        whole.clear()
        return [ended.get(str(index)) for index in range(len(wanted))]

    return tape.record(out, inputs, rule)


def _part(tape: Tape, x: Tensor) -> Storage:
    return tape.new("part of the checkpoint's input", x.size._replace(shard="tp")).storage


def _whole(tape: Tape, size: Size) -> Storage:
    return tape.new("checkpoint's input, gathered", size).storage


def _recompute(
    tape: Tape, function: Function, held: list[tuple[Storage, Size]], wanted: list[bool], recorder: Recorder | None
) -> Tensor:
    """Run the function again with a graph that ends at its inputs."""
    leaves = [
        Tensor(storage, size, Leaf(str(index), keep=False) if need else None)
        for index, ((storage, size), need) in enumerate(zip(held, wanted, strict=True))
    ]
    if recorder is None:
        with tape.enable_grad():
            return function(*leaves)
    recorder.restart()
    with tape.enable_grad(), tape.recording(recorder):
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
