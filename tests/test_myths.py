"""The page of claims is what memcalc computes now, and its figures are those of sums done by hand."""

from __future__ import annotations

import math
from collections import Counter

import myths
import pytest

TEXT = myths.PAGE.read_text(encoding="utf-8")
SECTIONS = {section.name: section for section in myths.sections(TEXT)}


def test_the_page_is_current() -> None:
    """`python tests/myths.py` writes it."""
    assert myths.written(TEXT) == TEXT


def test_each_figure_stands_once_beneath_its_claim() -> None:
    """No figure is left over, none is missing, and none belongs to another claim."""
    found = myths.computed(TEXT)
    assert found.keys() == myths.CLAIMS.keys() == SECTIONS.keys()
    for name, figures in found.items():
        assert Counter(match[0] for match in myths.FIGURE.findall(SECTIONS[name].body)) == dict.fromkeys(figures, 1)
    assert len(SECTIONS) == TEXT.count("\n### ")


@pytest.mark.parametrize("name", myths.CLAIMS)
def test_figures_are_those_done_by_hand(name: str) -> None:
    for key, figure in myths.computed(TEXT)[name].items():
        if figure.hand is not None:
            assert figure.value == pytest.approx(figure.hand, rel=figure.within or 1e-12, abs=1e-9), key


def test_most_claims_have_a_sum_by_hand() -> None:
    found = myths.computed(TEXT)
    by_hand = [name for name, figures in found.items() if any(figure.hand is not None for figure in figures.values())]
    assert len(by_hand) >= 3 * len(found) // 4


def test_each_claim_has_a_verdict_and_says_where_it_is_met() -> None:
    for section in SECTIONS.values():
        assert section.verdict in myths.VERDICTS
        assert section.body.startswith("\n*Met in* "), section.name


def test_verdicts_follow_from_the_figures() -> None:
    """A claim that is said to be right is near its figure; one that is said to be wrong by a factor is off by it."""
    found = {key: figure.value for figures in myths.computed(TEXT).values() for key, figure in figures.items()}
    assert found["optimizer-twice-factor"] > 2
    assert found["half-pure-by"] < -0.4 < found["half-mixed-by"] < 0 < found["half-autocast-by"]
    assert found["vision-pure"] < 22e9 < 30e9 < found["vision-autocast"]
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
    assert found["off-left"] == 0
    assert found["exp-on"] < found["exp-off"]
    assert not any(math.isnan(value) for key, value in found.items() if key not in {"one-8k-verdict", "logits-phase"})
