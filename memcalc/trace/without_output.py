"""A checkpoint whose outputs are dropped as well, once the operator that read them is done.

Source: Megatron-LM 23e00ed ``core/tensor_parallel/random.py``, ``CheckpointWithoutOutput``: the gradient of a later
tensor triggers the recomputation, whose results are copied into the storages that were emptied and kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memcalc.trace.tape import Grads, Leaf, Size, Storage, Tape, Tensor

Function = Callable[..., list[Tensor]]


@dataclass
class WithoutOutput:
    """A function run without a graph, whose outputs can be discarded and made again."""

    tape: Tape
    function: Function
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
