"""The page of claims is what memcalc computes now, and its figures are those of sums done by hand."""

from __future__ import annotations

import math
import re
from collections import Counter

import myths
import pytest

TEXT = myths.PAGE.read_text(encoding="utf-8")
SECTIONS = {section.name: section for section in myths.sections(TEXT)}
QUICK = ("optimizer-twice", "vision-3b", "ddp-free", "accumulation-double", "four-bytes", "lora-states", "a100-usable")
"""One claim of nearly each theme; the others take seconds together and are tried with the slow tests."""
CLAIMS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in myths.CLAIMS]


@pytest.mark.parametrize("name", CLAIMS)
def test_figures_are_current_and_those_done_by_hand(name: str) -> None:
    """`python tests/myths.py` writes them."""
    said = dict(myths.FIGURE.findall(SECTIONS[name].body))
    found = myths.figures_of(SECTIONS[name])
    shown = myths.verdict(SECTIONS[name], found).capitalize()
    assert said == {f"{name}-verdict": shown, **{key: figure.text for key, figure in found.items()}}
    for key, figure in found.items():
        if figure.hand is not None:
            assert figure.value == pytest.approx(figure.hand, rel=figure.within or 1e-12, abs=1e-9), key


def test_each_claim_is_computed_and_each_figure_stands_once() -> None:
    assert SECTIONS.keys() == myths.CLAIMS.keys()
    assert len(SECTIONS) == TEXT.count("\n### ")
    counts = Counter(name for name, _ in myths.FIGURE.findall(TEXT))
    assert set(counts.values()) == {1}


def test_each_claim_has_a_verdict_and_says_where_it_is_met() -> None:
    for section in SECTIONS.values():
        assert section.verdict in myths.VERDICTS
        assert re.match(
            rf'\n<b id="{section.name}-verdict">{section.verdict}[^<]*</b> · \*met in\* ', section.body, re.IGNORECASE
        )
        assert section.commands, section.name


@pytest.mark.slow
def test_the_table_of_contents_is_current() -> None:
    assert myths.written(TEXT) == TEXT


@pytest.mark.slow
def test_most_claims_have_a_sum_by_hand() -> None:
    found = myths.computed(TEXT)
    by_hand = [name for name, figures in found.items() if any(figure.hand is not None for figure in figures.values())]
    assert len(by_hand) >= 3 * len(found) // 4


@pytest.mark.slow
def test_verdicts_follow_from_the_figures() -> None:
    """A claim that is said to be right is near its figure; one that is said to be wrong is off by what it says."""
    found = {key: figure.value for figures in myths.computed(TEXT).values() for key, figure in figures.items()}
    assert found["optimizer-twice-factor"] > 2
    assert found["half-pure-by"] < -0.4 < found["half-mixed-by"] < 0 < found["half-autocast-by"]
    assert found["vision-pure"] < 22e9
    assert found["vision-autocast"] > 30e9
    assert found["adam8-pure"] < found["adam8-mixed"] < 0.5
    assert found["zero-peak-by"] < 64 / 8
    assert found["ddp-view"] == 0 < found["ddp-copy"]
    assert found["tp-8-by"] < 8 / 2
    assert 0.4 <= found["sp-kept"] <= 0.6
    assert found["keep-flash-mlp"] < found["keep-flash-att"] < found["keep-flash"]
    assert found["keep-eager-att"] < found["keep-eager-mlp"] < found["keep-eager"]
    assert 0.2 <= found["slower-by"] <= 0.35
    assert found["short-time"] > found["short-saved"]
    assert found["log-full"] > found["log-sqrt"] > found["log-sqrt-formula"]
    assert found["sqrt-full"] < found["sqrt-sqrt"]
    assert found["65b-every2"] > found["65b-none"] / 2
    assert found["host-7b"] < found["host-13b"] < 512e9
    assert found["off-left"] == 0
    assert found["exp-on"] < found["exp-off"]
    assert sorted(key for key, value in found.items() if math.isnan(value)) == ["logits-phase", "one-8k-verdict"]


def test_no_figure_is_typed_beside_its_mark() -> None:
    """A mark without a figure would pass unseen on the page."""
    assert not re.search(r'<b id="[^"]*">\??</b>', TEXT)
