"""How many parts of the rows a loss is traced in."""

import pytest

import memcalc
from memcalc.frameworks import losses
from memcalc.frameworks.litgpt import _FULL
from memcalc.frameworks.losses import MOST_PARTS

ROWS = 128


@pytest.mark.parametrize("length", [1, ROWS, ROWS + 1, 4096, MOST_PARTS * ROWS])
def test_parts_of_fixed_rows_are_as_many_as_the_length_has(length: int) -> None:
    assert _FULL.of(length, trainable=True).chunks == -(-length // ROWS)


def test_a_length_of_a_hundred_million_is_traced_in_no_more_parts_than_are_told_apart() -> None:
    assert _FULL.of(10**8, trainable=True).chunks == MOST_PARTS


def test_parts_that_are_taken_to_be_larger_move_less_than_a_two_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"model": "llama-3.2-1b", "gpu": "b300", "framework": "litgpt", "gpus": 1, "seq_len": 2 * MOST_PARTS * ROWS}
    larger = memcalc.estimate(**words).peak
    monkeypatch.setattr(losses, "MOST_PARTS", 2 * MOST_PARTS)
    exact = memcalc.estimate(**words).peak
    assert exact.allocated <= larger.allocated <= 1.005 * exact.allocated
