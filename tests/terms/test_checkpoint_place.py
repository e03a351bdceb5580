"""Where a reentrant checkpoint stands under FSDP 1: around a unit, or inside of it."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.specs.flat import from_flat

LAYERS, HIDDEN, TOKENS = 8, 1024, 2048
ALIVE = {
    # hidden states that live when each block is computed again, the last block first: block inputs, their gradients
    # and the incoming one. Counted in PyTorch 2.13's FSDP 1 on two ranks, 8 blocks, BACKWARD_PRE, frozen base
    "reentrant": (9, 9, 10, 11, 12, 13, 14, 15),
    "reentrant-inside": (9, 8, 7, 6, 5, 4, 3, 2),
    "non-reentrant": (9, 8, 7, 6, 5, 4, 3, 2),
}


def estimate(form: str, **words: Any) -> Any:
    """Return the estimate of eight blocks on two ranks, each recomputed."""
    sizes = {"n_layers": LAYERS, "hidden": HIDDEN, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 32_000}
    job: dict[str, Any] = {
        "model": from_flat({"name": "eight", "max_positions": 4096} | sizes), "gpu": "h100", "gpus": 2, "zero": 3,
        "framework": "fsdp1", "precision": "bf16", "seq_len": TOKENS, "micro_batch": 1, "global_batch": 2,
        "recompute": "full",
    }  # fmt: skip
    return memcalc.estimate(**(job | words), settings={"strategy.checkpoint": form})


def kept(answer: Any) -> int:
    """Return the bytes of blocks' inputs and their gradients that hooks hold at the first block."""
    return sum(term.bytes for term in answer.terms if term.name.startswith("inputs of blocks and their gradients"))


@pytest.mark.parametrize("form", ALIVE)
def test_hidden_states_that_hooks_hold(form: str) -> None:
    """Beyond those of a checkpoint that is not reentrant, as counted at the first block."""
    answer = estimate(form, lora="8:q,v")
    more = ALIVE[form][-1] - ALIVE["non-reentrant"][-1]
    assert kept(answer) == more * 2 * HIDDEN * TOKENS


@pytest.mark.parametrize(("form", "blocks"), [("reentrant", 1), ("reentrant-inside", 2), ("non-reentrant", 2)])
def test_gathered_blocks_in_backward(form: str, blocks: int) -> None:
    """With all weights trained the next block is gathered ahead, but around a unit no hook says that it is needed."""
    weights = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 2816 + 2 * HIDDEN
    terms = {term.name: term.bytes for term in estimate(form).terms if term.phases == ("backward-last",)}
    assert terms["gathered block and the prefetched one"] == blocks * 2 * weights
    assert kept(estimate(form)) == 0


def test_only_units_have_an_inside() -> None:
    with pytest.raises(memcalc.errors.CombinationError, match="FSDP 1"):
        estimate("reentrant-inside", framework="fsdp2")
