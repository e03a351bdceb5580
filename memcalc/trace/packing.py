"""Saved tensors that hooks pack into 8-bit or 4-bit integers with a scale for each group, and unpack for backward.

``torch.autograd.graph.saved_tensors_hooks`` are called for each save: an operator that saves what another has saved
already gets a packed copy of its own, and all that a node saved is unpacked at once where the node runs. Integers,
masks, weights, tables that all blocks share, and what is small (statistics, logsumexp) stay as they are.

Source: PyTorch 2.13 ``torch/csrc/autograd/saved_variable.cpp`` (one pack a save, one unpack a read) and
``torch/utils/checkpoint.py`` (inner hooks replace outer ones, and what is computed again runs without them; the inputs
of a checkpoint are saved under the outer ones).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace.tape import Record, Size, Storage, Tape, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.trace.tape import Edge, Grads, Rule

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
        return self._grad and not self._again

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
