"""One job has the same numbers wherever they are read: terminal, text, tables, JSON, chart and page."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest

import memcalc
from memcalc import report
from memcalc.handoff.review import review_of
from memcalc.report import charts
from memcalc.report.page import markup, page_of
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plans

GIB = 1 << 30
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "reserve", "context")
FIGURES = ("allocated", "reserved", "device")
ROWS = {
    "rich": r"^ *{} +(\d+\.\d\d)\b",
    "plain": r"^{}: size (\d+\.\d\d) GiB",
    "markdown": r"^\| {} *\| *(\d+\.\d\d) \|",
    "latex": r"^ {} *& *(\d+\.\d\d) ",
    "html": r"^<tr><td>{} *</td><td[^>]*> *(\d+\.\d\d)</td>",
}
"""A row that begins with a name, in each format, up to its size in GiB."""


@pytest.fixture(scope="module")
def found() -> Estimate:
    return memcalc.estimate(model="gpt2", gpu="rtx-4090", gpus=4, zero=3, micro_batch=4)


@pytest.fixture(scope="module")
def plans() -> Plans:
    pinned = {"precision": "bf16-mixed", "recompute": "none/full", "offload": "none", "tp": 1, "cp": 1, "pp": 1}
    found = memcalc.plan(model="gpt2", gpu="rtx-4090", gpus=4, global_batch=512, top=3, **pinned)
    assert len(found.plans) == 3
    return found


def pages(answer: Estimate | Plans, patched: pytest.MonkeyPatch) -> str:
    """Return the page without its charts, which are drawn apart."""
    patched.setattr(markup, "draws", lambda: False)
    return page_of(review_of(answer))


def expected(found: Estimate) -> dict[str, str]:
    """Return what is to be printed, from the JSON's bytes."""
    data = json.loads(report.render(report.of_estimate(found), "json"))
    sizes = data["components"] | {name: data["peak"][name] for name in FIGURES}
    sizes["context"] = data["peak"]["device"] - data["peak"]["reserved"]
    return {name: f"{size / GIB:.2f}" for name, size in sizes.items()}


@pytest.mark.parametrize("form", ROWS)
def test_an_estimate_in_text(found: Estimate, form: str) -> None:
    text = report.render(report.of_estimate(found), form, width=100)
    for name, size in expected(found).items():
        assert size in re.findall(ROWS[form].format(name), text, re.MULTILINE), name
    for size in (found.peak.device, found.budget.capacity, found.interval.low, found.interval.high):
        assert re.search(rf"(?<![\d.]){size / GIB:.1f}(?![\d.])", text.splitlines()[form == "html"])


def test_the_terms_of_csv_add_up_to_the_components(found: Estimate) -> None:
    rows = csv.DictReader(io.StringIO(report.render(report.of_estimate(found), "csv")))
    alive = [row for row in rows if found.peak.phase in row["phases"].split()]
    data = found.components.model_dump()
    for name in COMPONENTS[:5]:
        assert sum(int(row["size [bytes]"]) for row in alive if row["component"] == name) == data[name], name
    assert sum(int(row["size [bytes]"]) for row in alive) == found.peak.allocated


def test_an_estimate_as_a_page(found: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    text, known = pages(found, monkeypatch), expected(found)
    assert dict(re.findall(r"</span>(\w+) <b>([\d.]+)</b>", text)).items() >= {n: known[n] for n in COMPONENTS}.items()
    tiles = dict(re.findall(r'<dt>(\w+)</dt><dd class="figure"><span class="value">([^<]*)</span>', text))
    assert {name: tiles[name] for name in FIGURES} == {name: known[name] for name in FIGURES}
    low, high, capacity = (f"{size / GIB:.2f}" for size in (*ends(found), found.budget.capacity))
    assert tiles["range"] == f"{low} – {high}"
    assert f"<strong>{known['device']} of {capacity} GiB</strong>" in text
    groups = re.findall(r'class="name"><span[^>]*></span>(\w+)</span><span class="number">([\d.]+)<', text)
    assert dict(groups) == {name: known[name] for name in COMPONENTS}
    phases = re.findall(r'<th scope="row">([\w-]+)</th><td class="number">([\d.]+)</td>', text)
    assert dict(phases).items() >= {name: f"{size / GIB:.2f}" for name, size in found.phases.items()}.items()


def ends(found: Estimate) -> tuple[int, int]:
    return found.interval.low, found.interval.high


def chart_of(name: str, answer: Any) -> tuple[Any, str, dict[str, str]]:
    """Return a chart's figure as it was drawn, its SVG, and the tips of its parts."""
    from importlib import import_module

    figures: list[Any] = []
    chart = import_module(f"memcalc.report.charts.{name}").chart(answer)

    def draw(figure: Any) -> None:
        figures.append(figure)
        chart.draw(figure)

    svg = charts.inline(replace(chart, draw=draw))
    tips = dict(re.findall(r'data-part="([\w-]+)"[^>]*>\s*<title>([^<]*)</title>', svg))
    return figures[0], svg, tips


def test_an_estimate_as_a_chart(found: Estimate) -> None:
    figure, svg, tips = chart_of("estimate", found)
    known = expected(found)
    parts = {patch.get_gid(): patch for axes in figure.axes for patch in axes.patches}
    sizes = found.components.model_dump() | {"context": found.peak.device - found.peak.reserved}
    for name, size in sizes.items():
        assert parts[f"part-{name}"].get_width() * GIB == pytest.approx(size, abs=1)
        assert f"{name} {known[name]} GiB" in tips[f"part-{name}"]
    said = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    assert f"{found.budget.capacity / GIB:.2f} GiB" in said
    assert known["device"] in said


def rows_of(plans: Plans) -> dict[str, tuple[str, str]]:
    """Return peak and throughput of each plan as they are to be printed, from the JSON."""
    data = json.loads(report.render(report.of_plans(plans), "json"))["plans"]
    return {
        str(plan["rank"]): (f"{plan['peak']['device'] / GIB:.2f}", f"{plan['time']['tokens_per_second_per_gpu']:.0f}")
        for plan in data
    }


@pytest.mark.parametrize("form", ["rich", "markdown", "latex", "html"])
def test_plans_in_tables(plans: Plans, form: str) -> None:
    text = report.render(report.of_plans(plans), form, width=120)
    for rank, figures in rows_of(plans).items():
        starts = {"rich": rf"^ *{rank}[.* ]", "markdown": rf"^\| *{rank} \|", "latex": rf"^ *{rank} &"}
        start = starts.get(form, rf"^<tr><td[^>]*> *{rank}</td>")
        (row,) = (line for line in text.splitlines() if re.match(start, line))
        assert set(figures) <= set(re.findall(r"\d+(?:\.\d+)?", row))


def test_plans_as_lines_and_csv(plans: Plans) -> None:
    spoken = report.render(report.of_plans(plans), "plain")
    known = rows_of(plans)
    patterns = (r"^GiB \(per GPU\): ([\d.]+)", r"^tok/s/GPU \(95% range\): (\d+)")
    peaks, speeds = (re.findall(pattern, spoken, re.MULTILINE) for pattern in patterns)
    assert list(zip(peaks, speeds, strict=True)) == list(known.values())
    rows = csv.DictReader(io.StringIO(report.render(report.of_plans(plans), "csv")))
    assert {row["#"]: (row["peak [GiB]"], row["tok/s/GPU"]) for row in rows} == known


def test_plans_as_a_page(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    text, known = pages(plans, monkeypatch), rows_of(plans)
    rows = re.findall(r'<tr data-plan="(\d+)".*?</tr>', text)
    assert rows == list(known)
    for rank, (peak, speed) in known.items():
        (row,) = re.findall(rf'<tr data-plan="{rank}".*?</tr>', text)
        assert {peak, speed} <= set(re.findall(r">([\d.]+)</td>", row))
        (panel,) = re.findall(rf'<details class="plan" data-plan="{rank}".*?</details>', text, re.DOTALL)
        assert f"{peak} GiB · {speed} tok/s/GPU" in panel
        assert f"<dt>device</dt><dd>{peak} GiB</dd>" in panel
        assert f"<dd>{speed} tokens/s per GPU</dd>" in panel


def test_plans_as_a_chart(plans: Plans) -> None:
    figure, _, tips = chart_of("plan", plans)
    lines = {line.get_gid(): line for axes in figure.axes for line in axes.lines}
    for plan in plans.plans:
        (speed,), (size,) = lines[f"plan-{plan.rank}"].get_data()
        assert speed == pytest.approx(plan.time.tokens_per_second_per_gpu)
        assert size * GIB == pytest.approx(plan.peak.device, abs=1)
        peak, said = rows_of(plans)[str(plan.rank)]
        assert peak in tips[f"plan-{plan.rank}"]
        assert said in tips[f"plan-{plan.rank}"]


def test_a_plan_has_the_figures_of_its_own_estimate(plans: Plans) -> None:
    for plan in plans.plans:
        alone = review_of(plans, rank=plan.rank).estimate
        assert alone is not None
        assert alone.peak.model_dump() == plan.peak.model_dump()
        assert alone.command == plan.command
