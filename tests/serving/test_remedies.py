"""What an engine that does not start is told to try."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.serving import remedies


@pytest.mark.parametrize(
    "words", [{"model": "llama-2-70b"}, {"model": "llama-3.1-8b", "max_len": 131072, "gpu": "4090"}]
)
def test_each_remedy_is_a_command_that_starts(words: dict[str, object]) -> None:
    """The line of each, typed, ends with exit code 0, which says that the engine starts."""
    keywords = {"gpu": "h100", **words}
    ways = remedies(memcalc.serve(**keywords), keywords)  # type: ignore[arg-type]
    assert ways
    for _, way in ways:
        assert CliRunner().invoke(app, shlex.split(way.command)[1:]).exit_code == 0


def test_two_changes_where_none_suffices() -> None:
    """1,252 GiB of weights over 16 cards are 78 of each one's 80 GB; half of them on 16, or a quarter on 8, are 39."""
    keywords = {"model": "deepseek-v3", "gpu": "h100", "gpus": 8}
    ways = [options for options, _ in remedies(memcalc.serve(**keywords), keywords)]  # type: ignore[arg-type]
    assert ways == ["--quantization fp8 --tp 16 --gpus 16", "--quantization int4 --tp 8 --gpus 8"]


def test_a_model_of_69b_needs_two_gpus_or_quantised_weights() -> None:
    """128 GiB of weights are over one card of 80 GB whatever the sequence; 64 GiB in fp8 are not, nor half of them."""
    keywords = {"model": "llama-2-70b", "gpu": "h100"}
    ways = [options for options, _ in remedies(memcalc.serve(**keywords), keywords)]  # type: ignore[arg-type]
    assert ways == ["--quantization fp8", "--tp 2 --gpus 2"]
