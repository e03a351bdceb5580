"""Answers as a notebook shows them: the same bar, the same table, the same figures."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc import report
from memcalc.cli.app import app
from memcalc.report.tables import gib

JOB = {"model": "llama-2-7b", "gpu": "a100-40g", "gpus": 8}


class Balance(HTMLParser):
    """Elements that are still open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Note an element."""
        assert attrs is not None
        self.open += [tag] if tag != "wbr" else []

    def handle_endtag(self, tag: str) -> None:
        """Take it off again."""
        assert self.open.pop() == tag


def test_an_estimate_shows_its_bar() -> None:
    result = memcalc.estimate(**JOB, zero=3)
    html = result._repr_html_()
    assert html is not None
    widths = [float(width) for width in re.findall(r'<span class="c-\w+" style="width:([\d.]+)%"', html)]
    total = max(result.budget.capacity, result.peak.device, result.interval.high)
    assert sum(widths) == pytest.approx(100 * result.peak.device / total, abs=0.01)
    assert all(gib(size) in html for size in result.components.model_dump().values())
    assert "<script" not in html


def test_plans_show_their_table() -> None:
    plans = memcalc.plan(**JOB)
    html = plans._repr_html_()
    assert html is not None
    assert html.count("<tr>") == len(plans.plans) + 1
    verdict = next(line for line in report.of_plans(plans).document.blocks if getattr(line, "role", "") == "verdict")
    assert verdict.text in html


def test_where_nothing_fits_the_verdict_is_shown() -> None:
    plans = memcalc.plan(model="llama-2-70b", gpu="rtx-4090", gpus=1, advice=False, offload="none")
    assert "does not fit" in str(plans._repr_html_())


def test_a_difference_shows_both_bars() -> None:
    result = memcalc.diff("recompute=none", "recompute=full", **JOB, zero=3)
    html = result._repr_html_()
    assert html is not None
    assert html.count('class="stack"') == 2
    assert "recompute" in html


def test_a_cell_is_whole_and_names_of_users_stay_text() -> None:
    config = memcalc.api.load_model("llama-2-7b").model_copy(update={"name": "<b>mine</b>"})
    html = memcalc.estimate(model=config, gpu="a100-40g")._repr_html_()
    plans = memcalc.plan(model="llama-2-7b", gpu="a100-80g", gpus=8)._repr_html_()
    for text in (html, plans):
        balance = Balance()
        balance.feed(str(text))
        assert balance.open == []
    assert "<b>mine" not in str(html)


def test_what_has_no_picture_keeps_its_text() -> None:
    assert memcalc.largest("seq-len", **JOB, tp=1, pp=1, cp=1, zero=3, offload="none")._repr_html_() is None


def test_what_is_printed_is_the_screen_of_the_command() -> None:
    """Not the record, which is 20,000 letters; `repr` has that."""
    words = ["estimate", "--model", "llama-2-7b", "--gpu", "a100-40g", "--gpus", "8", "--zero", "3"]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "100"}).stdout
    result = memcalc.estimate(**JOB, zero=3)
    assert str(result).splitlines() == shown.rstrip("\n").splitlines()
    assert repr(result).startswith("Estimate(")
    for answer in (memcalc.plan(**JOB), memcalc.diff("recompute=none", "recompute=full", **JOB, zero=3)):
        assert len(str(answer).splitlines()) <= 20
