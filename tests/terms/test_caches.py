"""What is computed once lies in an object that is handed along: nothing outlives its job, nothing is written behind."""

from __future__ import annotations

import ast
import gc
import weakref
from dataclasses import replace
from pathlib import Path

from memcalc import catalog
from memcalc.grid import Grid, Layout
from memcalc.planner.job import PlanJob
from memcalc.planner.request import check_words
from memcalc.planner.search import search
from memcalc.specs.options import SharedSettings
from memcalc.terms.activations import groups_of
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.trace.template import TraceCache, trace

PACKAGE = Path(__file__).resolve().parents[2] / "memcalc"
OF_A_JOB = {"Grid", "ModelOnGrid", "GroupActivations", "Setting", "Template", "Tape", "Ledger", "PlanJob", "Array"}
"""What belongs to one job: a function that remembers these would keep their arrays when the job has gone."""
LAYOUTS = (Layout(dp=8), Layout(dp=4, tp=2), Layout(dp=2, tp=2, pp=2), Layout(dp=4, pp=2))


def space(offloads: tuple[tuple[str, ...], ...] = ((), ("activations",))) -> Grid:
    """Return eight GPUs' layouts, under three policies."""
    fixed = SharedSettings(framework="fsdp2", seq_len=2048, global_batch=64)
    return Grid(fixed, LAYOUTS, ("bf16-mixed",), ("none", "full", "every-2"), (2, 3), offloads, (1, 2))


def remembering() -> list[tuple[str, set[str]]]:
    """Return the functions that a decorator keeps the results of, with the names of their parameters' types."""
    functions = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                marks = [part for mark in node.decorator_list for part in ast.walk(mark)]
                if {part.id for part in marks if isinstance(part, ast.Name)} & {"cache", "lru_cache"}:
                    types = {part.id for part in ast.walk(node.args) if isinstance(part, ast.Name)}
                    functions.append((node.name, types))
    return functions


def test_a_module_remembers_nothing_of_a_job() -> None:
    """Functions of names, numbers and of files that come with the package may keep their results; there are some."""
    functions = remembering()
    assert {"habits_of", "peak_stages"} <= {name for name, _ in functions}
    assert not [name for name, types in functions if types & OF_A_JOB]


def test_nobody_writes_into_the_attributes_of_a_record() -> None:
    """``vars(x)[name] = …`` and ``vars(x).update(…)`` would put a result where its own function could not find out."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.value, ast.Call):
                is_vars = isinstance(node.value.func, ast.Name) and node.value.func.id == "vars"
                writes = isinstance(node.ctx, ast.Store) or getattr(node, "attr", "") in {"update", "setdefault", "pop"}
                assert not (is_vars and writes), f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_what_a_job_traced_goes_with_it() -> None:
    """A library call leaves nothing of its blocks behind."""
    gpu = catalog.gpu("a100-80g")
    request = check_words({"gpus": 8}, None, several=True)
    job = PlanJob(request, catalog.model("llama-2-7b"), gpu, catalog.node_for(gpu))
    groups_of(job.on(space()))[0].kept  # noqa: B018 -- computes it
    traces, grid = weakref.ref(job.traces), weakref.ref(groups_of(job.on(space()))[0].grid)
    assert traces() is not None
    del job
    gc.collect()
    assert traces() is None
    assert grid() is None


def test_a_block_is_traced_once_in_a_job() -> None:
    """A second grid of the same model asks the cache that it was given."""
    model, traces = catalog.model("llama-2-7b"), TraceCache()
    first = ModelOnGrid(model, space(), traces)
    setting = first.settings[0]
    template = traces.get(trace, model.main.block, setting, "full")
    second = ModelOnGrid(model, replace(space(), micro_batches=(4,)), traces)
    assert second.traces.get(trace, model.main.block, setting, "full") is template
    assert ModelOnGrid(model, space()).traces.get(trace, model.main.block, setting, "full") is not template


def test_parts_of_a_space_agree_with_grids_of_their_own() -> None:
    """A part shares the arrays over ways of sharding, another offload axis those of blocks."""
    model = catalog.model("llama-2-7b")
    whole = ModelOnGrid(model, space())
    groups_of(whole)[0].kept  # noqa: B018 -- fills what the parts share
    for chosen in (slice(0, 2), slice(2, 4), slice(1, 2)):
        part = whole.with_layouts(whole.grid.with_layouts(LAYOUTS[chosen]))
        fresh = ModelOnGrid(model, replace(space(), layouts=LAYOUTS[chosen]))
        for name in ("kept", "last", "first", "forward"):
            shared, own = (getattr(groups_of(census)[0], name) for census in (part, fresh))
            assert (shared == own).all()
        moved = part.with_offloads((("activations",),))
        assert groups_of(moved) is groups_of(part)
        assert moved.grid.rows == fresh.grid.rows
        assert moved.grid.shape == replace(fresh.grid, offloads=(("activations",),)).shape


def test_a_search_finds_the_same_whatever_was_traced_before() -> None:
    """Templates of another search of the job change no answer."""
    model, gpu, traces = catalog.model("llama-2-7b"), catalog.gpu("a100-80g"), TraceCache()
    node = catalog.node_for(gpu)
    search(model, (replace(space(), recomputes=("full",)),), gpu, node, traces=traces)
    again, alone = (search(model, (space(),), gpu, node, traces=each)[8] for each in (traces, None))
    assert [found.index for found in again.best] == [found.index for found in alone.best]
    assert [found.reserved for found in again.best] == [found.reserved for found in alone.best]
    assert again.best
