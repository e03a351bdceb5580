"""The report: the same figures in six formats, at any width, with everything that a format gives meaning to escaped."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.cells import cell_len

from memcalc import report, results
from memcalc.errors import UnknownNameError
from memcalc.report.tables import Column, Table
from memcalc.report.terminal import fitted
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB

HOSTILE = "x\x1b[31m|`*_<script>&%$#{}\\end{verbatim}"
FORMATS = ("rich", "markdown", "csv", "json", "latex", "html")
MODEL = results.ModelFacts(name="llama-2-7b", parameters=6738415616, active_parameters=6738415616)
HARDWARE = results.HardwareFacts(gpu="a100-40g", gpus=8, node="8x a100-40g", nodes=1, gpus_per_node=8)
STRATEGY = Strategy(zero=3, dp=8, recompute="full")


def term(component: str, name: str, size: float, *phases: str) -> results.TermFacts:
    inputs = {"parameters": 6738415616, "bytes": 4, "ranks": 8}
    formula = "parameters * bytes / ranks"
    return results.TermFacts(
        component=component, name=name, bytes=int(size * GIB), phases=phases, formula=formula, inputs=inputs,
        source="arXiv:1910.02054",
    )  # fmt: skip


def make_estimate(**changes: Any) -> results.Estimate:
    sizes = {"parameters": 3.2, "gradients": 3.1, "optimizer": 6.3, "activations": 9.5, "buffers": 1.75, "reserve": 0.5}
    reserved = sum(int(size * GIB) for size in sizes.values())
    peak = results.Peak(
        allocated=reserved - GIB, reserved=reserved, device=reserved + GIB, phase="backward_first", stage=0
    )
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "model": MODEL,
        "workload": results.WorkloadFacts(
            seq_len=4096, micro_batch=1, global_batch=8, accumulation_steps=1, tokens_per_step=32768
        ),
        "hardware": HARDWARE,
        "strategy": STRATEGY,
        "peak": peak,
        "interval": results.Interval(low=reserved, high=reserved + 2 * GIB, coverage=None),
        "budget": results.Budget(capacity=40 * GIB, context=GIB // 2, libraries=0, reserve=GIB, usable=38 * GIB),
        "verdict": "fits",
        "components": results.Components(**{name: int(size * GIB) for name, size in sizes.items()}),
        "saved": results.Saved(per_block=33554432, outside_blocks=1048576000, total=2122317824),
        "phases": {"forward_end": 12 * GIB, "backward_first": 23 * GIB, "optimizer_step": 15 * GIB},
        "stages": (),
        "terms": (
            term("parameters", "shards", 3.2),
            term("optimizer", "exp_avg | sq", 6.3),
            term("activations", "block inputs", 9.5, "forward_end", "backward_first"),
        ),
        "off_gpu": (),
        "host_memory": 0,
        "tier_memory": 0,
        "warnings": ("the context is not measured on this GPU.",),
        "assumptions": {"framework": "fsdp2", "seq_len": "4096"},
        "command": "memcalc estimate --model llama-2-7b --gpu a100-40g --gpus 8 --zero 3 --recompute full",
    }
    return results.Estimate(**{**fields, **changes})


def make_plan(rank: int, peak: float, rate: float, **strategy: Any) -> results.Plan:
    device = int(peak * GIB)
    chosen = STRATEGY.model_copy(update=strategy)
    return results.Plan(
        rank=rank, gpus=8, strategy=chosen, accumulation_steps=64 // chosen.micro_batch, global_batch=512,
        data_parallel=chosen.dp, verdict="fits", host_memory=0, tier_memory=0, gpu_hours=95.9,
        statistical_efficiency=1.0, why="it recomputes least among those that fit.",
        peak=results.PlanPeak(allocated=device - GIB, reserved=device - GIB // 2, device=device, phase="loss", stage=0),
        time=results.StepTime(step=8.0, tokens_per_second_per_gpu=rate, mfu=0.415, compute=6.5, recompute=1.1,
                              communication=0.3, offload=0.0, optimizer=0.1,
                              bubble=0.1, hfu=0.6, low=7.5, high=9.0, validated=True, basis="validated on 3 runs"),
        command=f"memcalc estimate --model llama-2-7b --gpu a100-40g --gpus 8 --micro-batch {chosen.micro_batch}",
    )  # fmt: skip


def make_plans(**changes: Any) -> results.Plans:
    fields: dict[str, Any] = {
        "version": "0.1.0", "model": MODEL, "hardware": HARDWARE, "seq_len": 4096, "searched": 14208, "feasible": 3120,
        "objective": "throughput", "token_budget": 10**9, "recipe": (), "remedies": (), "asked": "",
        "elapsed": 0.0123, "pareto": (1, 3), "nearest": (), "too_large": "", "capacity": 40 * GIB, "warnings": (),
        "assumptions": {"framework": "fsdp2", "precision": "bf16-mixed"},
        "command": "memcalc plan --model llama-2-7b --gpu a100-40g --gpus 8 --global-batch 512",
        "plans": (
            make_plan(1, 33.96, 2896.4),
            make_plan(2, 30.21, 2851.2, recompute="modules:core_attn,mlp", micro_batch=2),
            make_plan(3, 21.77, 2410.0, tp=2, dp=4, offload=("optimizer", "activations")),
        ),
    }  # fmt: skip
    return results.Plans(**{**fields, **changes})


NOTHING_FITS = {
    "plans": (),
    "pareto": (),
    "feasible": 0,
    "too_large": "the optimizer states need 78.4 GiB a GPU where 38.0 are usable.",
    "nearest": (
        results.Nearest(change="--optimizer adamw-8bit", device=36 * GIB, tokens_per_second_per_gpu=1, throughput=0.9),
    ),
}
REPORTS = {
    "estimate": report.of_estimate(make_estimate()),
    "explain": report.of_terms(make_estimate()),
    "plan": report.of_plans(make_plans()),
    "nothing": report.of_plans(make_plans(**NOTHING_FITS)),
}


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
    text = report.render(REPORTS[name], form)
    assert [figure for figure in figures if figure not in text] == []


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


def test_terminal_says_which_columns_are_left_out() -> None:
    narrow, wide = (report.render(REPORTS["plan"], "rich", width=width) for width in (60, 160))
    assert "Left out at this width: " in narrow
    assert "Left out at this width: " not in wide


@pytest.mark.parametrize("kept", ["#", "peak", "tok/s/GPU"])
def test_terminal_always_keeps(kept: str) -> None:
    assert kept in report.render(REPORTS["plan"], "rich", width=40)


def test_columns_go_by_priority() -> None:
    columns = (Column("first"), Column("second", priority=2), Column("third", priority=1))
    table = Table("", columns, (("aaaaaaaa", "bbbbbbbb", "cccccccc"),))
    assert fitted(table, 24) == (table.keep([0, 2]), table.keep([1]))
    assert fitted(table, 5) == (table.keep([0]), table.keep([1, 2]))


def test_estimate_says_the_verdict_first_then_the_bar() -> None:
    first, *rest = report.render(REPORTS["estimate"], "rich", width=80).splitlines()
    assert first == "fits · 25.3 of 40.0 GiB (63%) · between 24.3 and 26.3 GiB"
    assert any(line.startswith("PPPPPP") and line.endswith("··╱╱┃") and len(line) == 80 for line in rest)


def test_bar_over_capacity_still_fills_the_width() -> None:
    made = make_estimate(budget=make_estimate().budget.model_copy(update={"capacity": 10 * GIB}))
    assert any(
        re.fullmatch(r"P+G+O+┃O+A+B+RC+", line)
        for line in report.render(report.of_estimate(made), "rich", width=80).splitlines()
    )


def test_stages_and_host_memory_are_shown_where_there_are_any() -> None:
    stage = results.StagePeak(stage=0, allocated=GIB, reserved=GIB, device=2 * GIB, phase="loss", layers=16)
    made = make_estimate(stages=(stage, stage.model_copy(update={"stage": 1})), host_memory=100 * GIB)
    text = report.render(report.of_estimate(made), "rich", width=200)
    assert "Pipeline stages" in text
    assert "A node needs 100.00 GiB of host memory off its GPUs" in text


def test_what_lies_off_the_gpu_is_a_section_of_its_own() -> None:
    chosen = make_estimate().strategy.model_copy(update={"offload": ("optimizer",), "offload_to": "nvme"})
    fields = {"component": "optimizer", "phases": ("step",), "formula": "n · w", "inputs": {"n": 2}, "source": "here"}
    terms = tuple(
        results.OffGpuTerm(name=name, bytes=size * GIB, tier=tier, **fields)
        for name, size, tier in (("buffers", 5, "host"), ("moments", 7, "nvme"))
    )
    made = make_estimate(strategy=chosen, off_gpu=terms, host_memory=40 * GIB, tier_memory=56 * GIB)
    text = report.render(report.of_estimate(made), "rich", width=200)
    assert "Off the GPU, one rank" in text
    assert "A node needs 40.00 GiB of host memory and 56.00 GiB of NVMe" in text
    told = report.render(report.of_terms(made), "rich", width=200)
    assert "off the GPU: nvme" in told
    assert re.search(r"off the GPU: nvme  of one rank; 56.00 GiB a node +7.00 GiB$", told, re.MULTILINE)
    assert "offload optimizer to nvme" in told


def test_plan_shows_degrees_only_where_one_is_above_one() -> None:
    text = report.render(REPORTS["plan"], "markdown")
    assert "| TP" in text.replace("  ", "")
    assert " PP" not in text


def test_nothing_fits_says_what_is_too_large_and_the_nearest_change() -> None:
    text = report.render(REPORTS["nothing"], "rich", width=80)
    assert "does not fit · the optimizer states need 78.4 GiB" in text
    assert "--optimizer adamw-8bit" in text


@pytest.mark.parametrize(("path", "form"), [("a.md", "markdown"), ("a.TEX", "latex"), ("a.txt", "rich"), ("a", "rich")])
def test_format_follows_the_ending(path: str, form: str) -> None:
    assert report.format_for(path) == form
