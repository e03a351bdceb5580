"""One job has the same numbers wherever they are read: terminal, text, tables, JSON, chart and page."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc import report
from memcalc.handoff.review import review_of
from memcalc.report import charts, diff, ladder
from memcalc.report.page import markup, page_of
from memcalc.results.estimates import Estimate
from memcalc.results.names import component_name, phase_name
from memcalc.results.plans import Plans

GIB = 1 << 30
JOB = {"model": "gpt2", "gpu": "rtx-4090"}
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
    text = report.render(report.of_estimate(found), form, width=100, details=True)
    outside = {"context": found.budget.context, "communicator, all 4 ranks": found.budget.libraries}
    sizes = expected(found) | {name: f"{size / GIB:.2f}" for name, size in outside.items()}
    for name, size in sizes.items():
        shown = name if name in outside else component_name(name)
        assert size in re.findall(ROWS[form].format(shown), text, re.MULTILINE), name
    for size in (found.peak.device, found.budget.capacity, found.interval.low, found.interval.high):
        assert re.search(rf"(?<![\d.]){size / GIB:.1f}(?![\d.])", text.splitlines()[form == "html"])


@pytest.mark.parametrize("form", ROWS)
def test_of_a_pipeline_every_view_names_the_stage_that_it_speaks_of(form: str) -> None:
    found = memcalc.estimate(model="gpt2", gpu="rtx-4090", gpus=4, framework="megatron", pp=4, global_batch=16)
    fullest = max(found.stages, key=lambda stage: stage.device)
    place = f"{phase_name(fullest.phase)}, stage {fullest.stage} of 4"
    for view in (report.of_estimate(found), report.of_terms(found)):
        assert place in report.render(view, form, width=100, details=True), form
    assert place in report.render(report.of_terms(found), "rich", width=100)


def test_the_terms_of_csv_add_up_to_the_components(found: Estimate) -> None:
    rows = csv.DictReader(io.StringIO(report.render(report.of_estimate(found), "csv")))
    alive = [row for row in rows if found.peak.phase in row["phases"].split()]
    data = {**found.components.model_dump(), "context": found.peak.device - found.peak.reserved}
    for name in COMPONENTS:
        assert sum(int(row["size [bytes]"]) for row in alive if row["component"] == name) == data[name], name
    assert sum(int(row["size [bytes]"]) for row in alive) == found.peak.device


def test_an_estimate_as_a_page(found: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    text, known = pages(found, monkeypatch), expected(found)
    named = {component_name(name): known[name] for name in COMPONENTS}
    assert dict(re.findall(r"</span>([\w, ]+) <b>([\d.]+)</b>", text)).items() >= named.items()
    tiles = dict(re.findall(r'<dt>(\w+)</dt><dd class="figure"><span class="value">([^<]*)</span>', text))
    assert {name: tiles[component_name(name)] for name in FIGURES} == {name: known[name] for name in FIGURES}
    low, high, capacity = (f"{size / GIB:.2f}" for size in (*ends(found), found.budget.capacity))
    assert tiles["range"] == f"{low} – {high}"
    assert f"<strong>{known['device']} of {capacity} GiB</strong>" in text
    groups = re.findall(r'class="name"><span[^>]*></span>([\w, ]+)</span><span class="number">([\d.]+)<', text)
    assert dict(groups) == named
    phases = re.findall(r'<th scope="row">([\w, ]+)</th><td class="number">([\d.]+)</td>', text)
    assert (
        dict(phases).items() >= {phase_name(name): f"{size / GIB:.2f}" for name, size in found.phases.items()}.items()
    )


def ends(found: Estimate) -> tuple[int, int]:
    return found.interval.low, found.interval.high


def chart_of(name: str, answer: Any) -> tuple[Any, str, dict[str, str]]:
    """Return a chart's figure as it was drawn, its SVG, and the tips of its parts."""
    figures: list[Any] = []
    chart = charts.chart_of(name, answer)

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
        assert f"{component_name(name)} {known[name]} GiB" in tips[f"part-{name}"]
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
        starts = {"rich": rf"^ *{rank}[.* ]", "markdown": rf"^\| #{rank}\b", "latex": rf"^ *\\#{rank}\b"}
        start = starts.get(form, rf"^<tr><td[^>]*>#{rank}\b")
        (row,) = (line for line in text.splitlines() if re.match(start, line))
        assert set(figures) <= set(re.findall(r"\d+(?:\.\d+)?", row))


def test_plans_as_lines_and_csv(plans: Plans) -> None:
    spoken = report.render(report.of_plans(plans), "plain")
    known = rows_of(plans)
    patterns = (r"^GiB \(per GPU\): ([\d.]+)", r"^tok/s/GPU \(90% range\): (\d+)")
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
        assert f"<dt>total</dt><dd>{peak} GiB</dd>" in panel
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
        assert alone.time == plan.time
        assert alone.command == plan.command


# ------------------------------------------------------------------------------------------------------ time of a step


def speed_of(answer: Plans | Estimate) -> str:
    """Return what is to be printed of a throughput, from the JSON: the rate, and those at the ends of the range."""
    data = json.loads(report.render(made_of(answer), "json"))
    time = data["plans"][0]["time"] if "plans" in data else data["time"]
    tokens = time["tokens_per_second_per_gpu"] * time["step"]
    low, high = (f"{10 * round(tokens / time[end] / 10)}" for end in ("high", "low"))
    return f"{tokens / time['step']:.0f} ({low}–{high})"


def made_of(answer: Any) -> report.Report:
    return report.of_plans(answer) if isinstance(answer, Plans) else report.of_terms(answer)


@pytest.fixture(scope="module")
def first(plans: Plans) -> Estimate:
    """The first plan's own estimate."""
    options = {**plans.plans[0].job.keywords()}
    return memcalc.estimate(**options)


@pytest.mark.parametrize("form", ["rich", "plain", "markdown", "latex", "html"])
def test_the_speed_of_a_job_is_said_alike_by_every_command(plans: Plans, first: Estimate, form: str) -> None:
    """Every screen that speaks of one job has the throughput and the range that ``plan`` gives it."""
    words = first.job.options
    same = memcalc.diff(words | JOB, words | JOB | {"recompute": "full"})
    climbed = memcalc.ladder(**JOB, **{**words, "recompute": None}, stages=["recompute=none"])
    assert speed_of(plans) == speed_of(first)
    documents = [
        report.of_plans(plans), report.of_estimate(first), report.of_terms(first), diff.report(same),
        ladder.report(climbed),
    ]  # fmt: skip
    for document in documents:
        assert speed_of(first) in report.render(document, form, width=80)


def test_the_speed_of_a_job_that_files_make(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    )
    found = memcalc.check([str(config)], **JOB, gpus=4, seq_len=1024)
    alone = memcalc.estimate(**found.estimate.job.keywords())
    assert found.estimate.time == alone.time
    assert speed_of(alone) in report.render(report.of_check(found), "plain")


def seconds(text: str) -> float:
    """Return a duration with its unit in seconds."""
    value, unit = text.split()
    return float(value) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def test_the_parts_of_a_step_add_up_to_it(first: Estimate) -> None:
    """What ``explain`` lists is the whole step, and the same as ``plan`` and the page say."""
    text = report.render(report.of_terms(first), "plain")
    rows = re.findall(r"^([\w ]+): time ([\d.]+ \w+);", text, re.MULTILINE)
    *parts, (last, step) = [(name, seconds(value)) for name, value in rows]
    assert last == "step"
    assert sum(value for _, value in parts) == pytest.approx(step, rel=0.005)
    assert first.time is not None
    assert step == pytest.approx(first.time.step, rel=0.005)
    assert dict(parts)["DP messages"] == pytest.approx(first.time.communication, rel=0.005)


def test_the_step_on_a_page_is_that_of_the_plan(plans: Plans, first: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = speed_of(plans).partition(" ")[0]
    for answer in (plans, first):
        text = pages(answer, monkeypatch)
        tiles = dict(re.findall(r'<dt>(\w+)</dt><dd class="figure"><span class="value">([^<]*)</span>', text))
        assert tiles["throughput"] == rate
        panel = text.partition("<h3>Time of a step</h3>")[2]
        assert f"<dd>{rate} tokens/s per GPU</dd>" in panel


def test_a_change_of_the_step_is_that_of_its_parts() -> None:
    """From A to B across every step, in the JSON and in the table of seconds."""
    found = memcalc.diff({**JOB, "gpus": 8, "zero": 3}, {**JOB, "gpus": 8, "zero": 3, "recompute": "full", "tp": 2})
    ends = [memcalc.estimate(**side.estimate.job.keywords()).time for side in (found.a, found.b)]
    assert ends == [found.a.time, found.b.time]
    assert sum(step.cost.step for step in found.steps) == pytest.approx(found.total.step)
    for cost in (found.total, *(step.cost for step in found.steps)):
        assert sum(cost.parts.values()) == pytest.approx(cost.step)
    assert found.total.parts["recompute"] > 0
    assert found.total.parts["tensor"] > 0
    rows = list(csv.DictReader(io.StringIO(report.render(diff.report(found), "csv"))))
    assert float(rows[-1]["recompute_s"]) == pytest.approx(found.total.parts["recompute"], rel=1e-5)
    text = report.render(diff.report(found), "markdown")
    (row,) = re.findall(r"^\| step +\|(.*)\|$", text, re.MULTILINE)
    figures = [float(cell.replace("−", "-")) for cell in row.split("|")]
    assert figures[-1] == pytest.approx(found.total.step, abs=0.01)
    assert sum(figures[1:-2]) == pytest.approx(figures[-1], abs=0.01)


def test_nothing_is_said_of_a_time_that_is_not_known(found: Estimate) -> None:
    silent = found.model_copy(update={"time": None})
    for document in (report.of_estimate(silent), report.of_terms(silent)):
        text = report.render(document, "rich", width=80)
        assert "tok/s" not in text
        assert "Time of a step" not in text


def test_a_job_that_does_not_fit_would_have_its_speed_if_it_did() -> None:
    found = memcalc.estimate(model="llama-2-7b", gpu="rtx-4090")
    assert found.verdict == "does-not-fit"
    line = report.render(report.of_estimate(found), "rich", width=80).splitlines()[1]
    assert line.startswith("if it fit: ")


@pytest.mark.parametrize("gpus", [1, 64])
def test_an_estimate_says_its_time_in_two_lines(gpus: int) -> None:
    words = {"tp": 8, "pp": 2, "ep": 4, "framework": "megatron"} if gpus > 1 else {}
    found = memcalc.estimate(model="mixtral-8x7b", gpu="h100", gpus=gpus, **words)
    texts = [
        report.render(report.of_estimate(item), "rich", width=80)
        for item in (found, found.model_copy(update={"time": None}))
    ]
    timed, silent = (text[: text.index(found.model.name)].count("\n") for text in texts)
    assert 1 <= timed - silent <= 2
