"""Micro-batches against bins worked out by hand, and against Transformers' own sampler and collator."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memcalc import batches
from memcalc.batches import (
    BUDGETED,
    RULES,
    Lengths,
    Sampling,
    length_grouped,
    longest_of,
    make,
    padded,
    sorted_by_length,
)
from memcalc.batches.lengths import balanced, best_fit_decreasing, first_fit, micro_batches_of, parts_of, workload
from memcalc.errors import CombinationError

DATA = st.lists(st.integers(1, 300), min_size=1, max_size=80)


def lengths(*tokens: int) -> Lengths:
    return Lengths("by hand", np.array(tokens, dtype=np.int64))


def test_first_fit_by_hand() -> None:
    """7 and 6 open bins of 10; 3 fills the first, 4 the second; 5, 5 share a third; 1 finds nothing before a fourth."""
    assert first_fit([7, 6, 3, 4, 5, 5, 1], 10, 200) == [[0, 2], [1, 3], [4, 5], [6]]


def test_first_fit_leaves_a_bin_with_enough_sequences() -> None:
    """Two a bin (axolotl's sample_packing_bin_size): the third 1 goes on although there is room."""
    assert first_fit([1, 1, 1, 8], 10, 2) == [[0, 1], [2, 3]]


def test_best_fit_by_hand() -> None:
    """In TRL's own example of four tokens a pack: 5 cut to 4, 3 with 1, and 2."""
    assert best_fit_decreasing([4, 2, 3, 1], 4) == [[0], [2, 3], [1]]


def test_best_fit_takes_the_tightest_space() -> None:
    """7 leaves 3 of 10, and 4 + 4 leave 2: the last 2 goes there, where first fit takes the older bin of 7."""
    assert best_fit_decreasing([7, 4, 4, 2], 10) == [[0], [1, 2, 3]]
    assert first_fit([7, 4, 4, 2], 10, 9) == [[0, 3], [1, 2]]


def test_wrapped_and_split_sequences_lose_nothing() -> None:
    assert parts_of([9, 4, 1], 4) == [4, 4, 1, 4, 1]
    packs = RULES["wrapped"](np.array([9, 4, 1]), Sampling("wrapped", 1, 4))
    assert sorted(packs[:, 1].tolist()) == [2, 4, 4, 4]


@given(DATA, st.integers(300, 900), st.integers(1, 9))
def test_bins_hold_each_sequence_once_and_no_more_than_they_can(data: list[int], capacity: int, most: int) -> None:
    for bins, limit in ((first_fit(data, capacity, most), most), (best_fit_decreasing(data, capacity), len(data))):
        assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(data)))
        assert max(sum(data[i] for i in indices) for indices in bins) <= capacity
        assert max(map(len, bins)) <= limit


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=200), st.integers(1, 9))
def test_like_lengths_come_together_as_in_transformers(data: list[int], batch: int) -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.trainer_pt_utils")
    theirs = utils.get_length_grouped_indices(data, batch, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3)).numpy()
    ours = order[length_grouped(np.array(data)[order], batch)]
    assert ours.tolist() == theirs


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_rows_are_padded_as_transformers_pads_them(multiple: int) -> None:
    collators = pytest.importorskip("transformers.data.data_collator")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1})), pad_token="b")  # noqa: S106 - no password
    collate = collators.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple, return_tensors="np")
    data = [5, 70, 64, 12, 3, 3]
    theirs = [
        collate([{"input_ids": [0] * length} for length in data[first : first + 2]])["input_ids"].shape
        for first in range(0, 6, 2)
    ]
    ours = padded(np.array(data), Sampling("pad", 2, 100, multiple))
    assert [tuple(shape) for shape in ours.tolist()] == theirs


def test_a_budget_of_tokens_by_hand() -> None:
    """fairseq: sorted, rows times the longest stay within 40, from eight rows on in eights.

    3, 3, 3, 3, 3, 3, 3, 3, 3, 4 take 10 rows of 4; the next would be 11 of 4; cut to eight. Of 3, 4, 4, 9 all four
    take 36; then 10, 10, 10, 10 take 40, and 41 was refused.
    """
    data = [3] * 9 + [4, 4] + [9] + [10] * 4
    shapes = sorted_by_length(np.array(data), Sampling("max-tokens", 1, 100, budget=40))
    assert sorted(map(tuple, shapes.tolist())) == [(4, 9), (4, 10), (8, 3)]


def test_work_is_balanced_and_not_tokens() -> None:
    """verl: 10 tokens of budget need ceil(18/10) = 2 micro-batches; 6 + 3 and 5 + 4 are balanced."""
    assert sorted(micro_batches_of([6, 5, 4, 3], 10)) == [9, 9]
    assert workload(1000) == 24_576 * 1000 + 1_000_000
    # Largest differencing by hand: 8-7, then 6-5, then 4 against the first, then both
    assert sorted(sorted([8, 7, 6, 5, 4][i] for i in part) for part in balanced([8, 7, 6, 5, 4], 2)) == [
        [4, 5, 7],
        [6, 8],
    ]


def test_a_budget_may_be_exceeded_where_work_is_balanced() -> None:
    """One long sequence has the work of more short tokens than the budget: 24576 s + s^2 grows faster than s."""
    data = [100_000, *[100] * 1000]
    sizes = micro_batches_of(data, 100_000)
    assert len(sizes) == 2
    assert max(sizes) == 100_000  # the long one alone has more work than all others
    data = [60_000, *[100] * 1800]
    assert max(micro_batches_of(data, 120_000)) > 120_000


@pytest.mark.parametrize("budget", [99, 10])
def test_a_budget_below_the_longest_sequence_is_refused(budget: int) -> None:
    for rule in BUDGETED:
        with pytest.raises(CombinationError, match="the longest sequence has 100 tokens"):
            make(lengths(100, 3), Sampling(rule, 1, 100, budget=budget))


@pytest.mark.parametrize("rule", [*RULES, "token-budget"])
@settings(max_examples=15, deadline=None)
@example(data=[1], rows=2, cut=50, multiple=1, steps=1)  # hundreds of sequences a pack
@given(
    data=DATA,
    rows=st.integers(1, 5),
    cut=st.integers(50, 400),
    multiple=st.sampled_from([1, 8]),
    steps=st.integers(1, 4),
)
def test_no_micro_batch_is_longer_than_the_longest(
    rule: str, data: list[int], rows: int, cut: int, multiple: int, steps: int
) -> None:
    if rule == "multipack":
        cut = max(cut, min(data))
    budgeted = rule in BUDGETED
    sampling = Sampling(rule, 1 if budgeted else rows, cut, multiple, 400 * budgeted, steps, 2)
    with mock.patch.object(batches, "STEPS", 10):
        made, again = make(lengths(*data), sampling), make(lengths(*data), sampling)
        most_rows, most_tokens = longest_of(lengths(*data), sampling)
    assert (made.rows * made.tokens).max() <= most_rows * most_tokens
    assert made.tokens.min() >= 1
    assert np.array_equal(again.tokens, made.tokens)
    assert set(made.rank.tolist()) <= {0, 1}
    if not budgeted and made.steps > 1:
        first: Any = np.count_nonzero(made.step == 0)
        assert first == 2 * steps


@pytest.mark.parametrize("rule", ["bfd", "wrapped", "multipack"])
def test_sequences_much_shorter_than_a_pack_are_taken_again_until_packs_come_of_them(rule: str) -> None:
    """A thousand sequences of one token each are less than a pack of 4,096, whatever the rule."""
    made = make(lengths(*[1] * 1000), Sampling(rule, 8, 4096))
    assert made.steps >= 4
    assert (made.rows == 8).all()


def test_more_packs_than_the_sequences_fill_are_refused() -> None:
    with pytest.raises(CombinationError, match=r"micro-batch 1000000.* sequences of by hand do not make one"):
        make(lengths(1, 1), Sampling("bfd", 1_000_000, 4096))


def test_of_sequences_that_are_joined_the_longest_is_the_sum_of_the_longest() -> None:
    several = lengths(9, 2, 7, 1, 1, 1, 1, 1)
    assert longest_of(several, Sampling("flatten", 2, 100)) == (2, 8)
    assert longest_of(lengths(9, 2, 7, 1), Sampling("pad", 2, 100)) == (2, 9)
    assert longest_of(lengths(9, 2, 7, 1), Sampling("pad", 2, 8, 16)) == (2, 16)
