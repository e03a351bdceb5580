"""The page of accuracy is what the program says now, and the other calculators are held against the same figures."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from memcalc.results.comparison import RunScore
from memcalc.specs.runs import Run, RunsFile

_spec = spec_from_file_location("accuracy", Path(__file__).with_name("accuracy.py"))
assert _spec is not None
assert _spec.loader is not None
accuracy: Any = sys.modules.setdefault("accuracy", module_from_spec(_spec))
_spec.loader.exec_module(accuracy)


@pytest.mark.slow
def test_page_and_readme_are_current() -> None:
    """`python tests/accuracy.py` writes them."""
    for path, text in accuracy.written().items():
        assert path.read_text(encoding="utf-8") == text


def score(name: str, measured: int, predicted: int) -> RunScore:
    return RunScore(
        id=name, figure="allocated", measured=measured, predicted=predicted, error=predicted / measured - 1,
        within=True, group="g", grade="A", framework="deepspeed", gpu="a100-80g", gpus=8, rank="max", source="a log",
        software="",
    )  # fmt: skip


def test_both_are_held_against_the_same_figures() -> None:
    """DeepSpeed's estimator has an answer under ZeRO-3 alone: 4 bytes of the embedding and 18 P / 8 for Llama 2 7B."""
    shared = {
        "source": "a log", "grade": "A", "model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8,
        "strategy": {"framework": "deepspeed", "precision": "bf16-mixed", "zero": 3},
    }  # fmt: skip
    plain = {**shared, "strategy": {"framework": "deepspeed", "precision": "bf16-mixed", "zero": 0}}
    runs = RunsFile(run=(Run.model_validate({**shared, "id": "a"}), Run.model_validate({**plain, "id": "b"})))
    states = 4 * 32000 * 4096 + 18 * (6_738_415_616 - 65 * 4096) // 8
    scores = [score("a", 2 * states, 3 * states), score("b", 100, 90)]
    theirs, ours = accuracy.against("DeepSpeed estimator", scores, runs)
    assert theirs == [(pytest.approx(-0.5), "a")]
    assert ours == [(0.5, "a")]
