"""The page of other tools: its table is computed, and each claim about a tool leads to what was read."""

from __future__ import annotations

import re

import comparison
import pytest
from peers import PEERS, Job, parameters_of

PAGE = comparison.PAGE.read_text(encoding="utf-8")
EVERY_RUN = comparison.EVERY_RUN.read_text(encoding="utf-8")


def test_the_table_of_errors_is_current() -> None:
    """`python tests/comparison.py` writes it."""
    assert comparison.written(PAGE) == PAGE


@pytest.mark.parametrize("name", PEERS)
def test_the_rows_are_those_of_the_page_of_accuracy(name: str) -> None:
    """The same figures by another way: there predictions are made anew, here errors are read one by one."""
    row = next(line for line in EVERY_RUN.splitlines() if line.startswith(f"| {name} "))
    count, median, p90, *_ = (float(cell) for cell in row.split("|")[3:6])
    theirs, _ours = comparison.errors(name)
    found = comparison.summary_of(theirs)
    assert found["count"] == count
    assert 100 * found["median_abs_error"] == pytest.approx(median, abs=0.006)
    assert 100 * found["p90_abs_error"] == pytest.approx(p90, abs=0.006)


def test_simumax_errors_are_those_that_it_publishes() -> None:
    """The column `alloc err` of its summary, from its predictions and our exact measured bytes."""
    published = {
        "SMX-001": -0.17,
        "SMX-004": -0.28,
        "SMX-008": -0.42,
        "SMX-012": -0.74,
        "SMX-015": -0.75,
        "SMX-041": -1.38,
    }
    theirs, _ = comparison.errors("SimuMax, as published by its authors")
    found = {run: 100 * error for error, run in theirs}
    assert {run: found[run] for run in published} == pytest.approx(published, abs=0.02)


def test_accelerate_as_documented() -> None:
    """Its guide prints 1.61 GB for bert-base-cased in float32, and half of it in float16."""
    run = comparison.Run.model_validate(
        {
            "id": "a", "source": "a log", "grade": "A", "model": "bert-base", "gpu": "a100-80g", "gpus": 1,
            "strategy": {"framework": "hf", "precision": "fp32"},
        }
    )  # fmt: skip
    assert comparison.accelerate(run) / 2**30 == pytest.approx(1.61, abs=0.03)
    half = run.model_copy(update={"strategy": {"framework": "hf", "precision": "bf16"}})
    assert comparison.accelerate(half) * 2 == comparison.accelerate(run)


def test_sixteen_bytes_by_hand() -> None:
    """ZeRO, arXiv:1910.02054, figure 1: 120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 devices."""
    shape = {"layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "ffn": 1, "gated": False, "rms": True}
    found = []
    for zero in range(4):
        job = Job(**shape, tied=True, vocab=7_500_000_000 - 6, seq_len=1, gpus=64, zero=zero)
        assert parameters_of(job) == 7_500_000_000
        found.append(round(comparison.sixteen(job) / 1e9, 1))
    assert found == [120.0, 31.4, 16.6, 1.9]


def test_each_tool_is_linked_at_what_was_read_and_said_to_be_better_at_something() -> None:
    tools = re.split(r"^### ", PAGE.partition("## Tool by tool")[2].partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert len(tools) >= 10
    for tool in tools:
        assert "*Better" in tool, tool
        assert re.search(r"https://\S+(/[0-9a-f]{9,40}|/v2\.13\.0)[/)]", tool), tool


def test_links_outside_are_https_and_pinned_where_they_are_source() -> None:
    links = re.findall(r"\]\((http[^)\s]+)\)", PAGE)
    assert all(link.startswith("https://") for link in links)
    sources = [link for link in links if re.match(r"https://github.com/[^/]+/[^/]+/(blob|tree)/", link)]
    assert all(re.search(r"/(blob|tree)/([0-9a-f]{40}|v\d[\d.]+)(/|$)", link) for link in sources)


def test_programs_are_counted_right() -> None:
    from memcalc.frameworks import FRAMEWORKS

    row = next(line for line in PAGE.splitlines() if line.startswith("| memcalc | states"))
    assert f"| {len(FRAMEWORKS)}, by version |" in row
