"""Micro-batches that a sampler and its collator make of a data set: a seeded run of them, and the longest there can be.

Each rule follows the source that it names. Ranks take micro-batches in turn (accelerate 1.x, ``BatchSamplerShard``),
and those of all ranks and accumulation steps are one optimizer step. Where a collator joins sequences to one row
(padding-free), a micro-batch of n rows stands for as many tokens: attention without a mask keeps no more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.batches.lengths import Lengths, best_fit_decreasing, first_fit, micro_batches_of, parse_lengths, parts_of
from memcalc.errors import CombinationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BUDGETED", "SEED", "Lengths", "MicroBatches", "Sampling", "Shape", "longest_of", "make", "parse_lengths"]

Shape = tuple[int, int]
"""Rows of a micro-batch, and tokens of each."""
SEED = 0
"""Of the order in which sequences come."""
STEPS = 1000
"""Optimizer steps that are made, where the sequences are enough."""
MOST_SEQUENCES = {"token-budget": 1 << 14, "bfd": 1 << 17, "bfd-split": 1 << 17, "multipack": 1 << 17}
"""Sequences that are drawn at most, of rules whose bins are filled one by one."""
USUAL_MOST = 1 << 20
BUDGETED = ("max-tokens", "token-budget")
"""Rules whose micro-batches have a budget of tokens, and as many sequences as that holds."""
PACKING = ("bfd", "bfd-split", "wrapped", "multipack")
"""Rules that fill a row with several sequences."""
SPLITTING = ("bfd-split", "wrapped")
"""Rules that cut a long sequence into parts and lose none."""
EXAMPLES = 1000
"""Examples that TRL packs at a time: the batch of ``Dataset.map`` (datasets), which TRL leaves as it is."""
GROUP, MOST_IN_A_BIN = 100_000, 200
"""axolotl's sample_packing_group_size and sample_packing_bin_size [sequences] (0.18.0, utils/schemas/config.py)."""
BATCH_MULTIPLE = 8
"""fairseq's --required-batch-size-multiple [sequences]."""


@dataclass(frozen=True)
class Sampling:
    """How a job makes its micro-batches."""

    rule: str
    """A value of ``--batching``."""
    micro_batch: int
    """Sequences, or packs, of a micro-batch [sequences]."""
    length: int
    """Where sequences are cut, or the size of a pack [tokens]."""
    multiple: int = 1
    """What lengths are rounded up to a multiple of [tokens]."""
    budget: int = 0
    """Tokens of a micro-batch under :data:`BUDGETED`; 0 elsewhere [tokens]."""
    accumulation: int = 1
    """Micro-batches of a rank in a step; under token-budget a rank's sequences [1]."""
    ranks: int = 1
    """Data-parallel ranks [1]."""

    def rounded(self, tokens: int) -> int:
        """A length as it is padded [tokens]."""
        return -(-tokens // self.multiple) * self.multiple

    def epochs(self, tokens: NDArray[np.int64]) -> int:
        """Times that so few sequences are taken at once, for a few steps to come of them [1].

        `tokens` are the lengths of the sequences [tokens]; a pack has several of them.
        """
        several = 4 * min(self.micro_batch * self.accumulation * self.ranks, EXAMPLES)
        if self.rule in PACKING:
            several *= min(max(self.length * len(tokens) // int(tokens.sum()), 1), EXAMPLES)
            several = min(several, MOST_SEQUENCES.get(self.rule, USUAL_MOST))
        return max(-(-several // len(tokens)), 1)


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Micro-batches in the order in which they are made."""

    rows: NDArray[np.int64]
    """Of each [sequences]."""
    tokens: NDArray[np.int64]
    """Of each row [tokens]."""
    step: NDArray[np.int64]
    """The optimizer step that each belongs to [1]."""
    rank: NDArray[np.int64]
    """The data-parallel rank that passes it [1]."""

    @property
    def steps(self) -> int:
        """Optimizer steps [1]."""
        return int(self.step[-1]) + 1 if len(self.step) else 0

    def of_rank(self, rank: int = 0) -> list[list[Shape]]:
        """What one rank passes, step by step."""
        steps: list[list[Shape]] = [[] for _ in range(self.steps)]
        mine = self.rank == rank
        for step, rows, tokens in zip(self.step[mine], self.rows[mine], self.tokens[mine], strict=True):
            steps[step].append((int(rows), int(tokens)))
        return steps

    def largest(self) -> Shape:
        """The micro-batch of most tokens, and of these that with the longest rows."""
        rows, tokens = max(zip(self.rows.tolist(), self.tokens.tolist(), strict=True), key=order_of)
        return rows, tokens


def order_of(shape: Shape) -> tuple[int, int]:
    """Where a micro-batch stands among others, the smallest first."""
    return shape[0] * shape[1], shape[1]


def longest_of(lengths: Lengths, sampling: Sampling) -> Shape:
    """The longest micro-batch that the rule can make, whether or not a run of it has one.

    Of rules with a budget it is that of the run: what fits into a budget depends on which sequences meet.
    """
    rule, rows = sampling.rule, sampling.micro_batch
    if rule in BUDGETED:
        return make(lengths, sampling).largest()
    if rule in {"pad", "grouped"}:
        return rows, sampling.rounded(min(lengths.most, sampling.length))
    if rule == "flatten":
        most = lengths.cut(sampling.length)
        again = sampling.epochs(most) > 1
        total = rows * int(most.max()) if again else int(np.sort(most)[-rows:].sum())
        return rows, -(-sampling.rounded(total) // rows)
    return rows, sampling.rounded(sampling.length)


def make(lengths: Lengths, sampling: Sampling) -> MicroBatches:
    """A seeded run of micro-batches over as many epochs as it needs, each in an order of its own."""
    check(lengths, sampling)
    tokens = lengths.tokens if sampling.rule in SPLITTING else lengths.cut(sampling.length)
    if sampling.rule == "multipack":  # axolotl leaves out what is longer (excess_length_strategy, drop)
        tokens = tokens[lengths.tokens <= sampling.length]
    if not len(tokens):
        allowed = f"no sequence of {lengths.text} is that short"
        raise CombinationError("seq-len", sampling.length, allowed)
    tokens = np.tile(tokens, sampling.epochs(tokens))
    rng = random.Random(SEED)  # noqa: S311 - a sequence that is the same each time
    if sampling.rule == "token-budget":
        return _budgeted(tokens, sampling, rng)
    per_step, drawn = sampling.accumulation * sampling.ranks, 0
    rows, cells, count = [], [], 0
    while count < STEPS * per_step and drawn < MOST_SEQUENCES.get(sampling.rule, USUAL_MOST):
        epoch = RULES[sampling.rule](tokens[shuffled(len(tokens), rng)], sampling)
        if not count + len(epoch):
            allowed = f"{len(tokens):,} sequences of {lengths.text} do not make one"
            raise CombinationError("micro-batch", sampling.micro_batch, allowed)
        rows.append(epoch[:, 0])
        cells.append(epoch[:, 1])
        drawn, count = drawn + len(tokens), count + len(epoch)
    index = np.arange(min(count, STEPS * per_step))
    return MicroBatches(
        np.concatenate(rows)[: len(index)],
        np.concatenate(cells)[: len(index)],
        index // per_step,
        index % sampling.ranks,
    )


def check(lengths: Lengths, sampling: Sampling) -> None:
    """Refuse a budget that the longest sequence does not fit, as fairseq and verl do."""
    most = min(lengths.most, sampling.length)
    if sampling.rule in BUDGETED and sampling.budget < most:
        raise CombinationError("token-budget", sampling.budget, f"the longest sequence has {most:,} tokens")


def shuffled(count: int, rng: random.Random) -> NDArray[np.int64]:
    """An order of so many, by the one method of Python's generator that stays the same from release to release."""
    return np.argsort(np.array([rng.random() for _ in range(count)]), kind="stable")


Made = Callable[["NDArray[np.int64]", Sampling], "NDArray[np.int64]"]
"""From the lengths of an epoch in their order to rows and tokens of each micro-batch."""


def padded(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """To the longest of the micro-batch (``DataCollatorWithPadding`` and its kin, with pad_to_multiple_of).

    Source: Transformers 5.23.0, data/data_collator.py.
    """
    rows = sampling.micro_batch
    count = len(tokens) // rows
    longest = tokens[: count * rows].reshape(count, rows).max(axis=1)
    return _shapes(rows, -(-longest // sampling.multiple) * sampling.multiple)


def to_the_end(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """Each sequence to the same length."""
    count = len(tokens) // sampling.micro_batch
    return _shapes(sampling.micro_batch, np.full(count, sampling.rounded(sampling.length)))


def grouped(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """Like lengths together, the longest of all first, padded to the longest of the micro-batch.

    Source: Transformers 5.23.0, trainer.py (``LengthGroupedSampler`` gets the sequences of an accumulated batch) and
    trainer_pt_utils.py (``get_length_grouped_indices``).
    """
    order = length_grouped(tokens, sampling.micro_batch * sampling.accumulation)
    return padded(tokens[order], sampling)


def length_grouped(tokens: NDArray[np.int64], batch: int) -> NDArray[np.int64]:
    """Places of sequences that come in random order, each mega-batch of up to fifty batches sorted, longest first.

    The longest of all changes places with the first.

    >>> length_grouped(np.array([3, 9, 4, 8, 1, 7, 2, 6]), 2).tolist()
    [1, 0, 3, 2, 5, 4, 7, 6]
    """
    size = max(min(len(tokens) // (batch * 4), 50), 1) * batch
    parts = [np.arange(first, min(first + size, len(tokens))) for first in range(0, len(tokens), size)]
    parts = [part[np.argsort(-tokens[part], kind="stable")] for part in parts]
    longest = int(np.argmax([tokens[part[0]] for part in parts]))
    parts[0][0], parts[longest][0] = int(parts[longest][0]), int(parts[0][0])
    return np.concatenate(parts)


def flattened(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """Sequences of a micro-batch behind one another, without padding.

    Source: Transformers 5.23.0, data/data_collator.py (``DataCollatorWithFlattening``); TRL's padding_free.
    """
    rows = sampling.micro_batch
    count = len(tokens) // rows
    return _joined(tokens[: count * rows].reshape(count, rows).sum(axis=1), sampling)


def best_fit(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """Packs of a thousand sequences at a time, best fit in descending order, joined without padding (TRL, ``bfd``).

    Long sequences were cut, or are split first (``bfd_split``).
    """
    totals: list[int] = []
    for first in range(0, len(tokens), EXAMPLES):
        lengths = parts_of(tokens[first : first + EXAMPLES].tolist(), sampling.length)
        bins = best_fit_decreasing(lengths, sampling.length)
        totals += [sum(lengths[index] for index in indices) for indices in bins]
    order = shuffled(len(totals), random.Random(SEED))  # noqa: S311 - TRL shuffles packs by a fixed seed as well
    return flattened(np.array(totals)[order], sampling)


def wrapped(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """A thousand sequences behind one another, cut where a pack is full (TRL, ``wrapped``); the last pack is short."""
    packs: list[int] = []
    for first in range(0, len(tokens), EXAMPLES):
        packs += parts_of([int(tokens[first : first + EXAMPLES].sum())], sampling.length)
    order = shuffled(len(packs), random.Random(SEED))  # noqa: S311 - TRL shuffles packs by a fixed seed as well
    return padded(np.array(packs)[order], sampling)


def multipacked(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """One bin a micro-batch, of as many tokens as its rows have, filled by first fit in random order (axolotl)."""
    totals: list[int] = []
    capacity = sampling.micro_batch * sampling.length
    for first in range(0, len(tokens), GROUP):
        lengths = tokens[first : first + GROUP].tolist()
        bins = first_fit(lengths, capacity, MOST_IN_A_BIN)
        totals += [sum(lengths[index] for index in indices) for indices in bins]
    return _joined(np.array(totals), sampling)


def sorted_by_length(tokens: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """Sequences by length, as many as stay within the budget when padded, a multiple of eight where there are more.

    The batches are then shuffled. Source: fairseq 0.12.2 at 3d262bb, fairseq/data/data_utils_fast.pyx
    (batch_by_size_vec) and language_pair_dataset.py (ordered_indices).
    """
    ascending, shapes, first = np.sort(tokens).tolist(), list[Shape](), 0
    while first < len(ascending):
        end = first + 1
        while end < len(ascending) and (end + 1 - first) * ascending[end] <= sampling.budget:
            end += 1
        rows = end - first
        if rows > BATCH_MULTIPLE and end < len(ascending):
            rows -= rows % BATCH_MULTIPLE
        shapes.append((rows, ascending[first + rows - 1]))
        first += rows
    order = shuffled(len(shapes), random.Random(SEED))  # noqa: S311 - a sequence that is the same each time
    return np.array(shapes, dtype=np.int64)[order]


RULES: dict[str, Made] = {
    "pad": padded,
    "pad-max": to_the_end,
    "grouped": grouped,
    "flatten": flattened,
    "bfd": best_fit,
    "bfd-split": best_fit,
    "wrapped": wrapped,
    "multipack": multipacked,
    "max-tokens": sorted_by_length,
}


def _budgeted(tokens: NDArray[np.int64], sampling: Sampling, rng: random.Random) -> MicroBatches:
    """Micro-batches as verl makes them: all ranks have as many as the one that needs most."""
    each, ranks = min(sampling.accumulation, len(tokens)), sampling.ranks
    cells: list[tuple[int, int, int]] = []
    drawn = step = 0
    pool: list[int] = []
    while step < STEPS and (drawn < MOST_SEQUENCES["token-budget"] or not step):
        while len(pool) < each * ranks:
            pool += tokens[shuffled(len(tokens), rng)].tolist()
        parts = [pool[rank * each : (rank + 1) * each] for rank in range(ranks)]
        pool = pool[each * ranks :]
        count = max(min(each, -(-sum(part) // sampling.budget)) for part in parts)
        for rank, part in enumerate(parts):
            cells += [(sampling.rounded(total), step, rank) for total in micro_batches_of(part, sampling.budget, count)]
        drawn, step = drawn + each * ranks, step + 1
    table = np.array(cells, dtype=np.int64)
    return MicroBatches(np.ones(len(table), dtype=np.int64), table[:, 0], table[:, 1], table[:, 2])


def _shapes(rows: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([np.full(len(tokens), rows), tokens], axis=1).astype(np.int64)


def _joined(totals: NDArray[np.int64], sampling: Sampling) -> NDArray[np.int64]:
    """Rows of equal length that hold as many tokens as one long one."""
    totals = -(-totals // sampling.multiple) * sampling.multiple
    return _shapes(sampling.micro_batch, -(-totals // sampling.micro_batch))
