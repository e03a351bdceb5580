"""The largest response and micro-batch: the value that is found fits, and the next one does not."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import InputError
from memcalc.results.posttraining import RlLimit

GRPO: dict[str, Any] = {
    "algorithm": "grpo", "framework": "verl", "model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "prompt": 1024,
    "response": 8192, "micro_tokens": 16384,
}  # fmt: skip
DPO: dict[str, Any] = {
    "algorithm": "dpo", "framework": "trl", "model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "prompt": 1024,
    "response": 1024, "micro_batch": 1,
}  # fmt: skip


def limit(words: dict[str, Any], what: str) -> RlLimit:
    result = memcalc.rl(**words, largest=what, advice=False).limit
    assert result is not None
    return result


def verdict(words: dict[str, Any], **changes: Any) -> str:
    return memcalc.rl(**words | changes, advice=False).verdict


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    found = limit(DPO, "micro-batch")
    assert found.value is not None
    assert found.value > 1
    assert verdict(DPO, micro_batch=found.value) == "fits"
    assert verdict(DPO, micro_batch=found.value + 1) != "fits"
    assert found.binding == "update"


def test_the_longest_response_fits_with_a_micro_batch_that_holds_it() -> None:
    found = limit(GRPO, "response")
    assert found.value is not None
    assert found.value % found.step == 0
    typed = shlex.split(found.command)[2:]
    words = {flag[2:].replace("-", "_"): text for flag, text in zip(typed[::2], typed[1::2], strict=True)}
    assert int(words["response"]) == found.value
    assert verdict(words) == "fits"
    longer = found.value + found.step
    assert verdict(GRPO, response=longer, micro_tokens=max(16384, 1024 + longer)) != "fits"


def test_tokens_that_hold_no_sample_are_not_tried() -> None:
    found = limit(GRPO, "micro-tokens")
    assert found.value is not None
    assert found.value >= 9216
    assert verdict(GRPO, micro_tokens=found.value) == "fits"
    assert verdict(GRPO, micro_tokens=found.value + 1024) != "fits"
    none = limit(GRPO | {"gpus": 1, "engine_tp": 1}, "micro-tokens")
    assert none.value is None
    assert none.reason


def test_what_cannot_be_asked_is_a_sentence() -> None:
    with pytest.raises(InputError, match="must be one of response, micro-batch, micro-tokens"):
        memcalc.rl(**GRPO, largest="prompt")
    with pytest.raises(InputError, match="the other way"):
        memcalc.rl(**GRPO, largest="micro-batch")


def test_the_command_says_it() -> None:
    typed = [part for name, value in DPO.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["rl", *typed, "--largest", "micro-batch", "--format", "json"])
    assert json.loads(result.stdout)["limit"]["value"] == limit(DPO, "micro-batch").value
    text = CliRunner().invoke(app, ["rl", *typed, "--largest", "micro-batch"]).stdout
    assert "Largest micro-batch that fits" in text
