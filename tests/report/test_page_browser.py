"""The page in a real browser: hover, focus, tap, click, copy, dark, narrow, printed, without a script, off the net."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc import report
from memcalc.handoff.review import review_of
from memcalc.report.page import page_of
from memcalc.report.palette import INK
from memcalc.results.plans import Review

pytestmark = pytest.mark.slow

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
WIDTHS = (360, 800, 1600)


@pytest.fixture(scope="module")
def review() -> Review:
    """A pipeline, so that there is a chart of several stages; all else is open, so that plans differ in much."""
    plans = memcalc.plan(
        model="llama-3-8b", gpu="a100-80g", gpus=16, global_batch=256, framework="megatron", pp=2, top=4
    )
    return review_of(plans)


@pytest.fixture(scope="module")
def place(review: Review, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(review), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def tab(browser: Any, place: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page in a window of its own; whatever it asked the net for, or complained of, fails the test."""
    words = {"viewport": {"width": 1200, "height": 900}, **getattr(request, "param", {})}
    context = browser.new_context(**words)
    context.set_default_timeout(180_000)  # a machine may be busy
    page, asked, said = context.new_page(), [], []
    page.on("request", lambda made: asked.append(made.url))
    page.on("console", lambda line: said.append(line.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(place)
    yield page
    context.close()
    assert asked == [place]
    assert said == []


def shown(page: Any, query: str) -> bool:
    return bool(page.locator(query).first.is_visible())


def test_a_term_is_explained_where_the_pointer_rests_and_where_the_keyboard_is(tab: Any) -> None:
    first, second = tab.locator(".terms .term-name").nth(0), tab.locator(".terms .term-name").nth(1)
    why = tab.locator(".terms .why")
    assert not why.nth(0).is_visible()
    first.hover()
    assert why.nth(0).is_visible()
    assert "formula" in why.nth(0).inner_text()
    box = why.nth(0).bounding_box()
    tab.mouse.move(box["x"] + 20, box["y"] + box["height"] - 8)
    assert why.nth(0).is_visible(), "what explains a term stays while the pointer is on it"
    tab.mouse.move(5, 5)
    assert not why.nth(0).is_visible()
    first.focus()
    tab.keyboard.press("Tab")
    assert second.evaluate("element => element === document.activeElement")
    assert why.nth(1).is_visible()
    tab.keyboard.press("Escape")
    assert not why.nth(1).is_visible()


@pytest.mark.parametrize("tab", [{"has_touch": True, "viewport": {"width": 360, "height": 740}}], indirect=True)
def test_a_term_is_explained_by_a_tap(tab: Any) -> None:
    first, why = tab.locator(".terms .term-name").first, tab.locator(".terms .why").first
    first.tap()
    assert why.is_visible()
    box = why.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    tab.locator("h1").tap()
    assert not why.is_visible()


def test_plans_are_chosen_in_the_chart_and_in_the_table(tab: Any, review: Review) -> None:
    assert shown(tab, "#plan-1")
    assert not shown(tab, "#plan-2")
    tab.locator('.memcalc-wide [data-part="plan-2"]').click(force=True)
    assert shown(tab, "#plan-2")
    assert not shown(tab, "#plan-1")
    assert review.plans is not None
    assert review.plans.plans[1].command in tab.locator("#plan-2").inner_text().replace("\n", " ")
    part = tab.locator('.memcalc-wide [data-part="plan-3"]')
    part.focus()
    assert part.get_attribute("role") == "link"
    assert "#3" in str(part.get_attribute("aria-label"))
    tab.keyboard.press("Enter")
    assert shown(tab, "#plan-3")
    assert tab.evaluate("document.activeElement.parentElement.dataset.plan") == "3"
    tab.locator("#plan-table .plan-link").nth(3).focus()
    tab.keyboard.press("Enter")
    assert shown(tab, "#plan-4")
    tab.locator('#plan-table tr[data-plan="1"] td').nth(2).click()
    assert shown(tab, "#plan-1")
    assert tab.locator('tr[data-plan="1"]').get_attribute("class") == "chosen"


def test_the_table_of_plans_is_sorted(tab: Any, review: Review) -> None:
    assert review.plans is not None
    known = {str(plan.rank): plan.peak.device for plan in review.plans.plans}
    head = tab.locator("#plan-table thead th", has_text="peak")
    head.locator("button").click()
    ranks = tab.eval_on_selector_all("#plan-table tbody tr", "rows => rows.map(row => row.dataset.plan)")
    assert [round(known[rank] / 2**30, 2) for rank in ranks] == sorted(
        round(size / 2**30, 2) for size in known.values()
    )
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").focus()
    tab.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    ranks = tab.eval_on_selector_all("#plan-table tbody tr", "rows => rows.map(row => row.dataset.plan)")
    assert known[ranks[0]] == max(known.values())


def pasted(page: Any) -> str:
    """Return what the clipboard holds, as a field gets it by the keyboard."""
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('textarea'), {id: 'paste'}));"
        "document.getElementById('paste').focus()"
    )
    page.keyboard.press("Control+V")
    return str(page.eval_on_selector("#paste", "field => { const text = field.value; field.remove(); return text }"))


@pytest.mark.parametrize("refused", [False, True], ids=["clipboard", "fallback"])
def test_what_is_copied_can_be_pasted(tab: Any, review: Review, refused: bool) -> None:
    """Also where a browser keeps its clipboard from a page."""
    if refused:
        tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    assert review.plans is not None
    assert review.estimate is not None
    for form in ("markdown", "latex", "csv"):
        tab.locator(f'button[data-copies="plan-{form}"]').click()
        tab.locator("#status", has_text="Copied.").wait_for()
        assert pasted(tab) == report.render(report.of_plans(review.plans), form)
        tab.evaluate("document.getElementById('status').textContent = ''")
    tab.locator('button[data-copies="plan-1-command"]').click()
    tab.locator("#status", has_text="Copied.").wait_for()
    assert pasted(tab) == review.plans.plans[0].command


def ground(page: Any, query: str = "body") -> str:
    colours = page.eval_on_selector(query, "element => getComputedStyle(element).backgroundColor")
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colours)[:3])


def drawn_in(page: Any, query: str) -> set[str]:
    return set(page.eval_on_selector_all(query, "parts => parts.map(part => getComputedStyle(part).fill)"))


def test_dark_is_dark(tab: Any) -> None:
    seen = {}
    for side in ("light", "dark"):
        tab.emulate_media(color_scheme=side)
        assert ground(tab) == getattr(INK["page"], side)
        seen[side] = (ground(tab, ".stack .c-activations"), drawn_in(tab, ".memcalc-wide [data-part^=stage-0] path"))
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1]
    assert not seen["light"][1] & seen["dark"][1]
    tab.emulate_media(color_scheme="dark", media="print")
    assert ground(tab) == INK["page"].light


@pytest.mark.parametrize("tab", [{"viewport": {"width": width, "height": 900}} for width in WIDTHS], indirect=True)
def test_nothing_is_wider_than_the_screen(tab: Any) -> None:
    tab.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
    assert tab.evaluate(OVERFLOW) <= 0
    cut = tab.evaluate(
        """() => [...document.querySelectorAll('main *')].filter(element => {
            const box = element.getBoundingClientRect();
            return box.width && !element.closest('.scroll, pre, svg') && box.right > innerWidth + 1;
        }).map(element => element.outerHTML.slice(0, 120))"""
    )
    assert cut == []


@pytest.mark.parametrize("tab", [{"java_script_enabled": False}], indirect=True)
def test_without_a_script_everything_is_there(tab: Any) -> None:
    assert shown(tab, "#plan-1")
    assert tab.locator("details.plan").count() == 4
    assert all(tab.locator("details.plan summary").nth(place).is_visible() for place in range(4))
    assert not shown(tab, "button.copy")
    tab.locator("details.plan summary").nth(1).click()
    assert shown(tab, "#plan-2")
    tab.locator(".terms .term-name").first.hover()
    assert tab.locator(".terms .why").first.is_visible()


def test_printed_it_is_whole(tab: Any, review: Review, tmp_path: Path) -> None:
    """All plans and terms are on paper, nothing to press is, and no line is cut at the right."""
    path = tmp_path / "report.pdf"
    tab.pdf(path=path, prefer_css_page_size=True)
    assert path.read_bytes()[:5] == b"%PDF-"
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 688, "height": 1000})  # A4 less its margins
    assert not shown(tab, "button.copy")
    assert not shown(tab, "nav")
    cut = tab.evaluate(
        """() => [...document.querySelectorAll('td, th, svg, dd, pre')].filter(element =>
            element.getBoundingClientRect().right > innerWidth + 1).map(element => element.outerHTML.slice(0, 120))"""
    )
    assert cut == []
    assert tab.evaluate(OVERFLOW) <= 0
    if shutil.which("pdftotext") is None:
        return
    text = subprocess.run(["pdftotext", "-layout", path, "-"], capture_output=True, text=True, check=True).stdout
    words = " ".join(text.split())
    assert review.plans is not None
    assert review.estimate is not None
    assert "Copy" not in words
    assert all(f"#{plan.rank}" in words for plan in review.plans.plans)
    assert all(plan.why.split(":")[0][1:] in words for plan in review.plans.plans)
    assert all(f"{term.bytes:,}" in words for term in review.estimate.terms)
