"""How the blocks of a model are shared out over the stages of a pipeline, and which stages can carry the peak."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from memcalc.formulas import Array


class Split(NamedTuple):
    """What is not an equal share of the blocks."""

    first: int = 0
    """Blocks of the first stage; an equal share where 0."""
    last: int = 0
    """Blocks of the first and last stage; an equal share where 0."""
    embedding: bool = False
    """Whether the embedding counts as a block."""
    loss: bool = False
    """Embedding and loss count as a block each."""
    predictors: int = 0
    """Blocks that predict further tokens, behind all others."""

    def span(self, part: Array, parts: Array, chunks: Array, total: int) -> tuple[Array, Array]:
        """The first block of a part of the model, and the one after its last.

        A remainder goes to the earlier parts, one block each; the first and last part may have a number of their own,
        and the last has the blocks that predict further tokens besides.
        """
        all_blocks, total, outside = total, total - self.predictors, int(self.embedding)
        first, last = self.first // chunks, self.last // chunks
        inner = np.maximum(parts - (first > 0) - (last > 0), 1)
        shared = total + outside + self.loss - first - last
        base, extra, position = shared // inner, shared % inner, part - (first > 0)
        start = first + position * base + np.minimum(position, extra) - outside
        end = np.where((last > 0) & (part == parts - 1), total, start + base + (position < extra))
        pinned = (first > 0) & (part == 0)
        start, end = np.where(pinned, 0, start), np.where(pinned, first, end)
        return np.maximum(start, 0), np.where(part == parts - 1, all_blocks, np.minimum(end, total))


class Chunks(NamedTuple):
    """The model chunks of stages: columns that broadcast against one another."""

    stage: Array
    """The stage, counted from 0."""
    stages: Array
    """Stages of the pipeline."""
    count: Array
    """Chunks of a stage; 1 where the schedule has no virtual stages."""
    turned: Array
    """Whether the second half of the parts runs back over the stages, from the last to the first (the V of ZB-V)."""

    def parts(self) -> Iterator[tuple[Array, Array]]:
        """Each chunk's part of the model, counted from 0, and whether the stage has that chunk."""
        for chunk in range(int(np.max(self.count))):
            ahead = chunk * self.stages + self.stage
            back = (chunk + 1) * self.stages - 1 - self.stage
            yield np.where(self.turned & (chunk % 2 == 1), back, ahead), self.count > chunk

    def spans(self, split: Split, total: int) -> list[tuple[Array, Array]]:
        """The first of a model's ``total`` blocks that each chunk holds, and the one after its last."""
        spans = []
        for part, there in self.parts():
            begin, end = split.span(part, self.stages * self.count, self.count, total)
            begin = np.minimum(begin, total)
            spans.append((begin, np.where(there, np.maximum(end, begin), begin)))
        return spans


def blocks_in(spans: Sequence[tuple[Array, Array]], members: Sequence[bool]) -> list[Array]:
    """Blocks in each of the chunks that stages hold that are ``members``: of each block whether it is one."""
    before = np.cumsum([0, *members], dtype=np.int64)
    return [before[end] - before[begin] for begin, end in spans]


class Rows(NamedTuple):
    """The kinds of the blocks that stages hold, in the order in which they run."""

    distinct: tuple[tuple[int, ...], ...]
    """Each row of blocks that some stage holds, as indices of their groups."""
    index: Array
    """Which of them a stage holds, along layout and stage."""
    chunks: tuple[tuple[int, ...], ...]
    """Blocks of each model chunk of a row, in their order."""

    def count(self, of: Callable[[tuple[int, ...]], int]) -> Array:
        """A whole number that depends on the row alone, along layout and stage."""
        return np.asarray([of(row) for row in self.distinct], dtype=np.int64)[self.index]

    def only(self, groups: Collection[int]) -> Rows:
        """The same without the blocks of other groups."""
        rows, chunks = [], []
        for row, sizes in zip(self.distinct, self.chunks, strict=True):
            ends = list(accumulate(sizes))
            left = [[index in groups for index in row[end - size : end]] for end, size in zip(ends, sizes, strict=True)]
            rows.append(tuple(index for index in row if index in groups))
            chunks.append(tuple(map(sum, left)))
        return Rows(tuple(rows), self.index, tuple(chunks))


def rows_of(spans: Sequence[tuple[Array, Array]], sequence: tuple[int, ...]) -> Rows:
    """The rows of blocks of the chunks that stages hold, of a model whose blocks are of the groups in ``sequence``."""
    ends = np.broadcast_arrays(*(end for span in spans for end in span))
    table = np.stack([end.reshape(-1) for end in ends], axis=1)
    distinct, index = np.unique(table, axis=0, return_inverse=True)
    parts = [[sequence[b:e] for b, e in zip(row[::2], row[1::2], strict=True)] for row in distinct]
    rows = tuple(tuple(chain.from_iterable(chunks)) for chunks in parts)
    return Rows(rows, index.reshape(ends[0].shape), tuple(tuple(map(len, chunks)) for chunks in parts))


@lru_cache(maxsize=4096)
def peak_stages(
    stages: int, chunks: int, *, turned: bool, sequence: tuple[int, ...], split: Split, batches: frozenset[int]
) -> tuple[tuple[int, int], ...]:
    """The stages of one layout that can reserve most or compute longest, for any of the numbers of micro-batches.

    ``sequence`` has the group of each block of the model; all blocks are alike where it is empty. Each stage comes with
    the number of stages that compute as it does, which the first of them counts.

    Two stages with the same blocks in the same order in the same chunks, and alike in holding embedding or head,
    compute alike. They differ in the micro-batches in flight alone, and of these the earlier stage i never has fewer:

    - GPipe holds m on each stage; ZB-H1 and interleaved zero bubble min((v - 1) g + p, v m) chunks, ZB-H2
      min(2 p - 1, m), ZB-1p min(p, m), ZB-2p min(2 p, m): none depends on i;
    - 1F1B holds min(p - i, m), interleaved 1F1B min(2 (p - i - 1) + (v - 1) g + 1, v m), of each chunk no more: both
      fall with i.

    What a schedule's variables hold besides can appear where 1F1B has a micro-batch more than it has in flight, from
    stage p - m + 1 on. ZB-V holds min(2 p - i - k, m) of the first chunk and min(i + k, m) of the second, k = 0 or 1,
    DualPipeV 2 p - i and i + 1 of at least 2 p: a sum that is piecewise linear in i, whatever the chunks hold, and so
    is largest at an end or where a minimum changes sides. The first of the stages that are alike is kept, under these
    two the last too, and their neighbours of each such place.
    """
    stage = np.arange(stages)
    columns = Chunks(stage, np.int64(stages), np.int64(chunks), np.bool_(turned))
    spans = columns.spans(split, len(sequence))
    alike: dict[tuple[object, ...], list[int]] = {}
    for i in range(stages):
        key = (i == 0, i == stages - 1, *(sequence[begin[i] : end[i]] for begin, end in spans))
        alike.setdefault(key, []).append(i)
    places = {at for m in batches for at in _places(stages, m, turned=turned)}
    counts_of: dict[int, int] = {}
    for members in alike.values():
        here = {members[0], members[-1]} if turned else {members[0]}
        for position in places:
            here |= set([i for i in members if i <= position][-1:] + [i for i in members if i >= position][:1])
        counts_of |= dict.fromkeys(here, 0) | {members[0]: len(members)}
    return tuple(sorted(counts_of.items()))


def _places(stages: int, batches: int, *, turned: bool) -> tuple[int, ...]:
    """Where what a stage holds of the schedule changes its course."""
    if not turned:
        return (stages - batches + 1,) if 1 < batches <= stages else ()
    return (2 * stages - batches - 1, 2 * stages - batches, batches - 1, batches)
