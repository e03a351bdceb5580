"""The report: the same figures in six formats, at any width, with everything that a format gives meaning to escaped."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from report_records import MODEL, REPORTS, make_estimate, make_plan, make_plans, term
from rich.cells import cell_len

from memcalc import report
from memcalc.errors import UnknownNameError
from memcalc.report.tables import Column, Table
from memcalc.report.terminal import fitted
from memcalc.results.estimates import OffGpuTerm, StagePeak
from memcalc.units import GIB

HOSTILE = "x\x1b[31m|`*_<script>&%$#{}\\end{verbatim}"
FORMATS = ("rich", "markdown", "csv", "json", "latex", "html")


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_ends_in_one_newline(name: str, form: str) -> None:
    text = report.render(REPORTS[name], form)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'json'"):
        report.render(REPORTS["plan"], "jsn")


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "json"])
@pytest.mark.parametrize(
    ("name", "figures"), [("plan", ("33.96", "30.21", "2896", "41.5")), ("explain", ("3435973836", "10200547328"))]
)
def test_same_figures_in_every_format(form: str, name: str, figures: tuple[str, ...]) -> None:
    text = report.render(REPORTS[name], form, width=140, details=True)
    assert [figure for figure in figures if figure not in text.replace(",", "")] == []


def test_json_is_the_result() -> None:
    made = make_plans()
    assert json.loads(report.render(REPORTS["plan"], "json")) == made.model_dump(mode="json", by_alias=True)


def test_csv_has_one_row_a_plan_and_one_a_term() -> None:
    plans = list(csv.DictReader(io.StringIO(report.render(REPORTS["plan"], "csv"))))
    terms = list(csv.DictReader(io.StringIO(report.render(REPORTS["estimate"], "csv"))))
    assert [row["#"] for row in plans] == ["1", "2", "3"]
    assert plans[0]["peak [GiB]"] == "33.96"
    assert [row["size [bytes]"] for row in terms] == [str(term.bytes) for term in make_estimate().terms]


def test_csv_headings_differ() -> None:
    for shown in ("plan", "estimate"):
        headings = next(csv.reader(io.StringIO(report.render(REPORTS[shown], "csv"))))
        assert len(set(headings)) == len(headings)


@pytest.mark.parametrize("name", REPORTS)
def test_markdown_tables_have_as_many_cells_in_every_row(name: str) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", report.render(REPORTS[name], "markdown"), re.MULTILINE)
    counts = [{len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} for table in tables]
    assert counts
    assert all(len(count) == 1 for count in counts)


def test_markdown_fences_the_command() -> None:
    assert f"```sh\n{make_plans().command}\n```" in report.render(REPORTS["plan"], "markdown")


def test_html_is_balanced_and_loads_nothing() -> None:
    for shown in REPORTS.values():
        text = report.render(shown, "html")
        assert _Balance.of(text) == []
        assert not re.search(r"<(script|link|img|iframe)|https?:", text)


class _Balance(HTMLParser):
    """Tags that were opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    @classmethod
    def of(cls, text: str) -> list[str]:
        parser = cls()
        parser.feed(text)
        return parser.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_latex_has_booktabs_and_no_bare_special() -> None:
    text = report.render(REPORTS["plan"], "latex")
    assert r"\toprule" in text
    prose = re.sub(r"\\begin\{verbatim\}.*?\\end\{verbatim\}", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)[%$#_]", prose)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("colour", [False, True])
def test_hostile_names_are_escaped(form: str, colour: bool) -> None:
    hostile = MODEL.model_copy(update={"name": HOSTILE})
    made = make_estimate(model=hostile, command=HOSTILE, terms=(term("parameters", HOSTILE, 1),), warnings=(HOSTILE,))
    text = report.render(report.of_estimate(made), form, colour=colour)
    assert "x\x1b[31m" not in text
    if form == "html":
        assert "<script>" not in text
    if form == "latex":
        assert text.count(r"\begin{verbatim}") == text.count(r"\end{verbatim}")


def test_a_picture_of_what_is_no_text_is_xml_still() -> None:
    made = make_estimate(model=MODEL.model_copy(update={"name": "a\x00\uffff\udcff<b>"}))
    text = report.render(report.of_estimate(made), "svg")
    ET.fromstring(text.encode())  # noqa: S314 just written
    assert "a���&lt;b&gt;" in text


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("name", REPORTS)
def test_terminal_keeps_its_width(name: str, width: int) -> None:
    text = report.render(REPORTS[name], "rich", width=width)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if cell_len(line) > width and "  memcalc " not in line] == []


def test_terminal_colours_only_when_told() -> None:
    assert "\x1b[" in report.render(REPORTS["plan"], "rich", colour=True)


@pytest.mark.parametrize("width", [72, 80, 100, 120, 160])
def test_offload_recomputation_and_batch_stand_in_every_table(width: int) -> None:
    """Also where all plans have the same."""
    plans = tuple(
        make_plan(rank, 30.0 + rank, 2900.0, offload=("optimizer",), recompute="full", micro_batch=2) for rank in (1, 2)
    )
    for shown in (make_plans(), make_plans(plans=plans)):
        text = report.render(report.of_plans(shown), "rich", width=width)
        heading = text.partition("llama")[2].partition("\n1  ")[0]
        titles = set(heading.split())
        assert {"recompute", "offload", "batch", "GiB", "tok/s/GPU"} <= titles
        assert titles & {"parallelism", "layout"}  # the narrow title


def test_columns_go_by_priority() -> None:
    columns = (Column("first"), Column("second", priority=2), Column("third", priority=1))
    table = Table("", columns, (("aaaaaaaa", "bbbbbbbb", "cccccccc"),))
    assert fitted(table, 24) == (table.keep([0, 2]), table.keep([1]))
    assert fitted(table, 5) == (table.keep([0]), table.keep([1, 2]))


def test_estimate_says_the_verdict_first_then_the_bar() -> None:
    first, *rest = report.render(REPORTS["estimate"], "rich", width=80).splitlines()
    assert first == "fits · 25.3 of 40.0 GiB per GPU (63%) · 95% range 24.3–26.3"
    assert any(line.startswith("PPPPPP") and line.endswith("··╱╱┃") and len(line) == 80 for line in rest)


def test_bar_over_capacity_still_fills_the_width() -> None:
    made = make_estimate(budget=make_estimate().budget.model_copy(update={"capacity": 10 * GIB}))
    assert any(
        re.fullmatch(r"P+G+O+┃O+A+B+CX+", line)
        for line in report.render(report.of_estimate(made), "rich", width=80).splitlines()
    )


def test_stages_and_host_memory_are_shown_where_there_are_any() -> None:
    stage = StagePeak(stage=0, allocated=GIB, reserved=GIB, device=2 * GIB, phase="loss", layers=16)
    made = make_estimate(stages=(stage, stage.model_copy(update={"stage": 1})), host_memory=100 * GIB)
    text = report.render(report.of_estimate(made), "rich", width=200, details=True)
    assert "Pipeline stages" in text
    assert "100.00 GiB of host memory per node" in text


def test_what_lies_off_the_gpu_is_a_section_of_its_own() -> None:
    chosen = make_estimate().strategy.model_copy(update={"offload": ("optimizer",), "offload_to": "nvme"})
    fields = {"component": "optimizer", "phases": ("step",), "formula": "n · w", "inputs": {"n": 2}, "source": "here"}
    terms = tuple(
        OffGpuTerm(name=name, bytes=size * GIB, tier=tier, **fields)
        for name, size, tier in (("buffers", 5, "host"), ("moments", 7, "nvme"))
    )
    made = make_estimate(strategy=chosen, off_gpu=terms, host_memory=40 * GIB, tier_memory=56 * GIB)
    text = report.render(report.of_estimate(made), "rich", width=200, details=True)
    assert "Offloaded, per rank" in text
    assert "40.00 GiB of host memory and 56.00 GiB of NVMe per node" in text
    told = report.render(report.of_terms(made), "rich", width=200, details=True)
    assert "off the GPU: nvme" in told
    assert re.search(r"off the GPU: nvme  per rank; 56.00 GiB per node +7.00 GiB$", told, re.MULTILINE)
    assert "offload optimizer to NVMe" in told


def test_plan_names_its_parallelism_as_the_framework_does() -> None:
    text = report.render(REPORTS["plan"], "markdown")
    assert "FSDP TP2" in text
    assert " PP" not in text
    alone = make_plan(1, 30.0, 2900.0, dp=1)
    text = report.render(report.of_plans(make_plans(plans=(alone,), pareto=())), "rich", width=100)
    assert text.startswith("fits: 8 × a100-40g · recompute full")
    assert not re.search(r"FSDP|Z3", text)


def test_a_plan_that_offloads_says_so_first_with_the_host_memory() -> None:
    plan = make_plan(1, 30.0, 2900.0, offload=("params",)).model_copy(update={"host_memory": 116 * GIB})
    made = report.of_plans(make_plans(plans=(plan,), pareto=()))
    text = report.render(made, "rich", width=120)
    first = text.splitlines()[0]
    assert "offload params" in first
    assert any(re.match(r"Offload +#1: 116 GiB host memory/node", row) for row in text.splitlines())
    assert "offload params (116 GiB of host memory per node)" in report.render(made, "markdown").splitlines()[0]
    unsure = plan.model_copy(update={"unknown": ("host memory",)})
    text = report.render(report.of_plans(make_plans(plans=(unsure,), pareto=())), "rich", width=120)
    assert text.startswith("fits if host memory suffices")


def test_several_numbers_of_gpus_say_from_which_it_fits_without_offload() -> None:
    small = make_plan(2, 30.0, 2900.0, offload=("params",)).model_copy(update={"gpus": 1, "host_memory": GIB})
    fields = {"plans": (make_plan(1, 33.0, 3000.0), small), "without_offload": 8, "tight_without_offload": (4,)}
    text = report.render(report.of_plans(make_plans(**fields)), "rich", width=120)
    assert text.splitlines()[0] == "fits: from 1 GPU with CPU offload · from 8 × a100-40g without (4: tight)"


def test_the_time_of_a_search_is_in_no_format() -> None:
    slow, fast = (report.of_plans(make_plans(elapsed=seconds)) for seconds in (123.45, 0.1))
    for form in (*FORMATS, "plain", "svg"):
        assert report.render(slow, form) == report.render(fast, form)


def test_nothing_fits_says_what_is_too_large_and_the_nearest_change() -> None:
    text = report.render(REPORTS["nothing"], "rich", width=80)
    assert "does not fit · the optimizer states need 78.4 GiB" in text
    assert "--optimizer adamw-8bit" in text


@pytest.mark.parametrize(("path", "form"), [("a.md", "markdown"), ("a.TEX", "latex"), ("a.txt", "rich"), ("a", "rich")])
def test_format_follows_the_ending(path: str, form: str) -> None:
    assert report.format_for(path) == form


@pytest.mark.parametrize("name", REPORTS)
def test_a_screen_is_shorter_than_all_of_the_answer(name: str) -> None:
    """What is left out of a screen is said to be there with -v."""
    brief, full = (report.render(REPORTS[name], "rich", width=80, details=details) for details in (False, True))
    assert len(brief.splitlines()) < len(full.splitlines())
    assert "-v" in brief or "--all" in brief
    assert brief.splitlines()[0] == full.splitlines()[0]


def test_on_one_gpu_nothing_is_sharded() -> None:
    made = make_estimate()
    alone = made.model_copy(
        update={
            "strategy": made.strategy.model_copy(update={"dp": 1}),
            "hardware": made.hardware.model_copy(update={"gpus": 1}),
            "assumptions": {"zero": "3", "framework": "fsdp2"},
        }
    )
    for details in (False, True):
        text = report.render(report.of_estimate(alone), "rich", width=200, details=details)
        assert re.search(r"(?<!--)zero 3", text) is None
        assert "FSDP" not in text
