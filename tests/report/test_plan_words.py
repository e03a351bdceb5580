"""Words on the screen of plans that follow from figures."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.report.plan_words import open_order


@pytest.mark.parametrize(
    ("basis", "low", "high", "open_"),
    [("no runs", 0.5, 2.0, True), ("no runs", 0.99, 1.01, False), ("", 0.5, 2.0, False)],
)
def test_the_order_of_two_plans_is_open_where_one_has_no_runs_and_its_range_holds_the_other(
    basis: str, low: float, high: float, *, open_: bool
) -> None:
    """A tenth slower by the prediction, and half or double by its range; what rests on the same runs errs alike."""
    (plan,) = memcalc.plan(model="gpt2", gpu="rtx-3090", gpus=1, recompute="none", top=1, advice=False).plans
    first = plan.model_copy(update={"rank": 1, "special": ("best",)})
    step = 1.1 * plan.time.step
    speed = plan.time.tokens_per_second_per_gpu / 1.1
    changed = {"step": step, "low": low * step, "high": high * step, "tokens_per_second_per_gpu": speed}
    time = plan.time.model_copy(update={**changed, "validated": False, "basis": basis or plan.time.basis})
    first = first.model_copy(update={"time": plan.time.model_copy(update={"validated": bool(basis)})})
    second = plan.model_copy(update={"rank": 2, "special": ("smallest",), "time": time})
    assert ("#1 and #2 undecided: the speed of #2 is unmeasured" in open_order((first, second))) is open_
    both = first.model_copy(update={"time": first.time.model_copy(update={"validated": False})})
    assert ("#1 and #2 undecided: their speeds are unmeasured" in open_order((both, second))) is bool(basis)
