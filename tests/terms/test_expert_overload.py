"""Rows of experts on the fullest rank: uneven routing, and capacities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc import catalog
from memcalc.errors import CombinationError, InputError
from memcalc.terms.model_on_grid import routed_rows

JOB: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "gpu": "h200", "gpus": 16, "framework": "megatron", "ep": 8, "seq_len": 4096,
}  # fmt: skip


def estimate(overload: object = None, **words: Any) -> memcalc.Estimate:
    settings = {} if overload is None else {"strategy.expert_overload": overload}
    return memcalc.estimate(**{**JOB, **words}, settings=settings)


def test_a_capacity_by_hand() -> None:
    """128 experts, 8 a token: 1000 tokens make 8000 rows, 62.5 an expert; 1.5 times is 93.75, so 94 of each."""
    block = catalog.model("qwen3-30b-a3b").main.block
    assert int(routed_rows(np.int64(1000), block)) == 128 * 63
    assert int(routed_rows(np.int64(1000), block, 1.5)) == 128 * 94
    assert int(routed_rows(np.int64(4096), block, 2.0)) == 2 * 4096 * 8


def test_what_experts_keep_doubles_and_nothing_else() -> None:
    """4096 tokens x 8 / 128 experts are 256 whole rows, so that twice the share is twice the bytes to the last one."""
    before, after = ({term.name: term.bytes for term in estimate(x).terms} for x in (1, 2))
    moved = {name: after[name] / size for name, size in before.items() if after[name] != size}
    assert moved
    kept = {name: ratio for name, ratio in moved.items() if "working" not in name}
    doubled = [name for name, ratio in moved.items() if ratio == 2]
    assert len(doubled) >= 4
    assert all(1 < ratio <= 2 for ratio in kept.values())
    assert not [name for name in moved if "attention" in name or "logits" in name]


def test_an_equal_share_is_the_default() -> None:
    plain, equal = estimate(), estimate(1)
    assert (plain.peak, plain.terms, plain.warnings) == (equal.peak, equal.terms, equal.warnings)


def test_more_rows_need_more() -> None:
    peaks = [estimate(overload).peak.allocated for overload in (1, 1.1, 1.5, 2, 4)]
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize("wrong", [0.5, "much", 1001])
def test_a_share_below_an_equal_one_is_refused(wrong: object) -> None:
    with pytest.raises(InputError, match="must be a number from 1 to"):
        estimate(wrong)


@pytest.mark.parametrize(
    "words", [{"model": "llama-3.1-8b", "ep": 1}, {"framework": "torchtitan", "gpus": 16}], ids=["dense", "torchtitan"]
)
def test_where_no_rows_are_counted_it_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(CombinationError) as error:
        estimate(2, **words)
    assert error.value.field == "strategy.expert_overload"


@pytest.mark.parametrize(
    "words", [{"model": "llama-3.1-8b", "ep": 1}, {"framework": "torchtitan", "gpus": 16}], ids=["dense", "torchtitan"]
)
def test_experts_that_nothing_pads_are_not_said_to_be_padded(words: dict[str, Any]) -> None:
    with pytest.raises(CombinationError) as error:
        memcalc.estimate(**{**JOB, **words}, settings={"strategy.experts_padded": True})
    assert error.value.field == "strategy.experts_padded"


def test_padding_alone_changes_no_byte() -> None:
    plain, padded = estimate(), memcalc.estimate(**JOB, settings={"strategy.experts_padded": True})
    assert (plain.peak, plain.terms) == (padded.peak, padded.terms)
