"""The global batch as people say it: sequences, tokens, and what is most likely a slip."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.errors import InputError
from memcalc.planner.request import MOST_TOKENS, Request, batch_of, sequences_of


def batch(raw: object, seq_len: int, ranks: int = 1) -> int:
    return batch_of(Request({"global_batch": raw}), seq_len, ranks)


@pytest.mark.parametrize(
    ("raw", "seq_len", "ranks", "sequences"),
    [
        ("4M tokens", 4096, 8, 1024),  # Llama 2: a global batch size of 4M tokens, at 4096 of them a sequence
        ("4M tokens", 4000, 8, 1000),  # 4000 x 8 x 125 = 4M
        ("4_000_000 tokens", 4096, 8, 1024),
        ("16M tokens", 8192, 16, 2048),  # Llama 3.1: 16M tokens at 8192
        ("0.5M tokens", 2048, 8, 256),  # GPT-3 Small: 0.5M, at 2048 tokens a sequence
        ("512k tokens", 4096, 8, 128),
        ("500k tokens", 4096, 8, 128),  # 125 is no whole step of eight ranks
        ("1.5M tokens", 4096, 1, 384),
        ("4M tokens", 4096, 24, 1056),  # 24 x 44: of the multiples of 24 within 5% that with most twos
        ("4M sequences", 4096, 1, 4_000_000),
        (1024, 4096, 1, 1024),
    ],
)
def test_what_people_mean(raw: object, seq_len: int, ranks: int, sequences: int) -> None:
    assert batch(raw, seq_len, ranks) == sequences


def test_a_bare_number_of_tokens_is_asked_back() -> None:
    with pytest.raises(InputError, match=r"means 16,384,000,000 tokens per step.*'4M tokens' or '4M sequences'"):
        batch("4M", 4096)
    with pytest.raises(InputError, match="sequences"):
        memcalc.estimate(model="gpt2", gpu="a100-80g", global_batch=4_000_000)
    assert batch(MOST_TOKENS // 4096, 4096) == 2**17


def test_less_than_a_sequence_is_refused() -> None:
    with pytest.raises(InputError, match="from one sequence of 4,096 tokens"):
        batch("100 tokens", 4096)


@given(tokens=st.integers(1, 10**9), seq_len=st.integers(1, 200_000), ranks=st.sampled_from([1, 2, 3, 8, 24, 96, 1024]))
def test_tokens_become_sequences_within_a_twentieth(tokens: int, seq_len: int, ranks: int) -> None:
    sequences = sequences_of(tokens, seq_len, ranks)
    assert abs(sequences - tokens / seq_len) <= max(0.05 * tokens / seq_len, 1)
    if tokens % (seq_len * ranks) == 0:
        assert sequences * seq_len == tokens


def test_an_estimate_says_what_it_took() -> None:
    found = memcalc.estimate(model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len="4k", global_batch="4M tokens")
    assert (found.workload.seq_len, found.workload.global_batch, found.workload.accumulation_steps) == (4096, 1024, 128)
    assert found.assumptions["global_batch"] == "1024 sequences (4,194,304 tokens)"


def test_a_default_batch_that_leaves_a_pipeline_empty_is_said_with_the_one_that_fills_it() -> None:
    job: dict[str, Any] = {"model": "llama-2-7b", "gpu": "h100", "gpus": 64, "framework": "megatron", "pp": 16, "tp": 1}
    job |= {"cp": 1, "vpp": 1, "pp_schedule": "1f1b", "micro_batch": 1, "recompute": "none", "zero": 0, "top": 1}
    (text,) = (text for text in memcalc.plan(**job).warnings if "is a default" in text)
    named = int(re.search(r"--global-batch (\d+)", text)[1])
    times = [memcalc.plan(**job, global_batch=batch, advice=False).plans[0].time for batch in (named, named // 2)]
    filled, half = (time.bubble / time.step for time in times)
    assert filled < 0.1 < half
    assert not [text for text in memcalc.plan(**job, global_batch=128).warnings if "is a default" in text]


BATCH_OF_12 = {"model": "gpt2", "gpu": "h100", "gpus": 8, "tp": 1, "global_batch": 12}


@pytest.mark.parametrize(
    "ask",
    [
        memcalc.estimate,
        memcalc.plan,
        memcalc.ladder,
        partial(memcalc.largest, "seq-len"),
        partial(memcalc.largest, "micro-batch"),
    ],
    ids=["estimate", "plan", "ladder", "max seq-len", "max micro-batch"],
)
def test_a_batch_that_the_ranks_do_not_divide_is_a_wrong_input_everywhere_with_the_nearest_that_they_do(
    ask: Callable[..., object],
) -> None:
    """Eight ranks take eight sequences at once: 12 is between 8 and 16, and no memory is short."""
    said = r"global-batch 12: must be a multiple of 8 \(.*\), such as 8 or 16\."
    with pytest.raises(InputError, match=said) as caught:
        ask(**BATCH_OF_12)
    assert caught.value.exit_code == 2


def test_a_search_counts_the_ranks_of_every_layout_that_is_open() -> None:
    """Of six GPUs tensor parallelism over two leaves three ranks, which divide 15 and not 16."""
    words = {"model": "llama-3-8b", "gpu": "h100", "gpus": 6}
    with pytest.raises(InputError, match=r"must be a multiple of 3 \(.*on 6 GPUs\), such as 15 or 18\."):
        memcalc.plan(**words, global_batch=16)
    assert memcalc.plan(**words, global_batch=15, advice=False).plans[0].strategy.dp == 3


def test_a_rank_may_take_its_share_in_one_pass() -> None:
    """1,280 sequences over 128 ranks are 10 of each, in one pass where that fits (NousResearch/torchtitan pull 19)."""
    job = {"model": "qwen3-30b-a3b", "gpu": "b200", "gpus": 128, "seq_len": 2048, "framework": "torchtitan"}
    pinned = {"ep": 8, "zero": 3, "global_batch": 1280, "objective": "throughput", "top": 1, "advice": False}
    (plan,) = memcalc.plan(**job, **pinned).plans
    (asked,) = memcalc.plan(**job, **pinned, micro_batch=10).plans
    assert plan.time.tokens_per_second_per_gpu >= asked.time.tokens_per_second_per_gpu
    assert plan.strategy.micro_batch in {5, 10}


def test_a_card_is_filled_by_the_batch_that_is_asked_for() -> None:
    """Forty sequences over eight ranks go in one pass of 5: no power of two divides a rank's share."""
    recipe = memcalc.plan(model="gpt2", gpu="h100", gpus=8, global_batch=40, recipe=True, advice=False).recipe
    assert (recipe[-1].stage, recipe[-1].change) == ("fill the card", "micro-batch 5")
