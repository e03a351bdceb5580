"""A search that rules out by a bound what cannot fit finds what one finds that evaluates everything."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.spaces import SPACES, counted, whole

from memcalc import catalog
from memcalc.frameworks import habits_of
from memcalc.grid import Grid
from memcalc.planner import search as searching
from memcalc.planner.costs import may_count, may_fit
from memcalc.planner.pipelines import layouts_for
from memcalc.planner.ranking import Objective
from memcalc.planner.search import Candidate, SearchResult, Wanted, search
from memcalc.specs.options import SharedSettings
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.timing import rates_for, step_times
from memcalc.trace.template import TraceCache
from memcalc.units import GIB

ROOT = Path(__file__).parents[2]
MODELS = ("llama-3.2-1b", "gpt2-xl", "llama-2-7b", "qwen1.5-moe-a2.7b")
FRAMEWORKS = ("fsdp2", "megatron", "deepspeed", "fsdp1", "ddp", "torchtitan")
RECOMPUTES = ("none", "full", "selective-core-attn", "every-2", "block-4", "mlp")
OFFLOADS = ((), ("optimizer",), ("params",), ("activations",), ("optimizer", "activations"))
TRACES = {name: TraceCache() for name in MODELS}
"""Blocks that were traced before, by the model."""


def some(rng: random.Random, values: tuple[Any, ...], most: int = 3) -> tuple[Any, ...]:
    """Return a few of some values, in their order."""
    chosen = set(rng.sample(range(len(values)), rng.randint(1, min(most, len(values)))))
    return tuple(value for index, value in enumerate(values) if index in chosen)


def random_grid(rng: random.Random, name: str) -> Grid:
    """Return a small space of a model, of one or two numbers of GPUs."""
    framework, model = rng.choice(FRAMEWORKS), catalog.model(name)
    habits = habits_of(framework)
    counts = some(rng, (2, 8, 32), 2) if rng.random() < 0.8 else (1,)
    degrees = ([1, 2, 4], [1, 2, 4], [1, 2], [1, 2]) if habits.tensor_parallel else ([1], [1], [1], [1])
    sp = rng.choice((None, False))
    layouts = [layout for gpus in counts for layout in layouts_for(model, gpus, degrees, 2048, sp=sp)]
    return Grid(
        SharedSettings(framework=framework, seq_len=2048, global_batch=rng.choice((8, 64, 256))),
        tuple(rng.sample(layouts, min(len(layouts), 12))),
        some(rng, tuple(p for p in habits.widths if not p.startswith("fp8")), 2),
        some(rng, RECOMPUTES),
        some(rng, tuple(habits.zero)),
        some(rng, OFFLOADS),
        tuple(1 << k for k in range(rng.randint(1, 7))),
        sequence=model.sequence,
    )


def figures(candidate: Candidate | None) -> tuple[object, ...] | None:
    """Return what tells a strategy from others, and its figures."""
    return candidate and (candidate.axes, candidate.reserved, candidate.step, candidate.key, candidate.idea)


def told(result: SearchResult) -> dict[str, object]:
    """Return all that an answer takes from a search."""
    by_idea = {
        name: {idea: [*map(figures, known)] for idea, known in getattr(result, name).items() if known}
        for name in ("ideas", "least")
    }
    fronts = {name: [*map(figures, getattr(result, name))] for name in ("front", "resident")}
    single = {name: figures(getattr(result, name)) for name in ("smallest", "host_limited")}
    plain = ("cut", "searched", "feasible", "hopeful", "resident_hopeful")
    return by_idea | fronts | single | {name: getattr(result, name) for name in plain}


def ruled_out(seeds: range, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare both searches on the spaces of some seeds; return in how many something was ruled out and some fits."""
    partly = 0
    for seed in seeds:
        rng = random.Random(seed)  # noqa: S311
        name = rng.choice(MODELS)
        grid, model, gpu = random_grid(rng, name), catalog.model(name), catalog.gpu(rng.choice(("a100-80g", "h100")))
        gpu = gpu.model_copy(update={"memory_bytes": int(GIB * 2 ** rng.uniform(1, 6.5))})
        wanted, node = Wanted(tight=rng.random() < 0.3, trusting=rng.random() < 0.3), catalog.node_for(gpu)
        found = []
        for least in (0, 1 << 60):
            monkeypatch.setattr(searching, "BOUNDED", least)
            found.append(search(model, (grid,), gpu, node, wanted, traces=TRACES[name]))
        bounded, exhaustive = found
        assert bounded.keys() == exhaustive.keys()
        for gpus, result in bounded.items():
            assert told(result) == told(exhaustive[gpus]), (seed, gpus)
            assert exhaustive[gpus].bounded == 0
            partly += result.bounded > 0 and result.feasible > 0
    return partly


def test_a_search_for_what_is_fast_finds_all_that_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each idea all that has no larger key than what was said to be of use."""
    partly = 0
    for seed in range(8):
        rng = random.Random(seed)  # noqa: S311
        name = rng.choice(MODELS)
        grid, model, gpu = random_grid(rng, name), catalog.model(name), catalog.gpu("h100")
        gpu = gpu.model_copy(update={"memory_bytes": int(GIB * 2 ** rng.uniform(3, 6.5))})
        node, (fewest, *_) = catalog.node_for(gpu), sorted(layout.gpus for layout in grid.layouts)
        everything = search(model, (grid,), gpu, node, traces=TRACES[name])[fewest]
        keys = [candidate.key for candidate in everything.best] or [1e-9]
        monkeypatch.setattr(searching, "BOUNDED", 0)
        for most in (keys[0] * (1 - 1e-9), keys[len(keys) // 16]):
            fast = search(model, (grid,), gpu, node, Wanted(most=most), traces=TRACES[name])[fewest]
            found = [figures(candidate) for candidate in fast.best if candidate.key <= most]
            wanted = [figures(candidate) for candidate in everything.best if candidate.key <= most]
            assert found == wanted, (seed, most)
            partly += bool(wanted) and fast.bounded > everything.bounded
        monkeypatch.undo()
    assert partly > 2


def test_a_bounded_search_finds_what_an_exhaustive_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ruled_out(range(24), monkeypatch) > 4


@pytest.mark.slow
def test_hundreds_of_bounded_searches_find_what_exhaustive_ones_find(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ruled_out(range(24, 424), monkeypatch) > 80


def test_strategies_count_as_where_all_layouts_are_timed() -> None:
    model, gpu, goal = catalog.model("llama-2-7b"), catalog.gpu("a100-40g"), Objective()
    settings = SharedSettings(framework="megatron", seq_len=2048, global_batch=64)
    layouts = layouts_for(model, 8, ([1, 2, 4, 8], [1, 2], [1], [1]), 2048, sp=None)
    grid = Grid(settings, tuple(layouts), ("bf16-mixed",), ("none", "full"), (0, 1), ((),), (1, 2, 4))
    census, node = ModelOnGrid(model, grid), catalog.node_for(gpu)
    fits, step = may_fit(census, gpu), step_times(census, gpu, node, rates_for(gpu, grid)).step
    by_layout = np.any(fits, axis=(1, 2, 3, 4, 5, 6))
    assert 0 < np.count_nonzero(by_layout) < len(layouts)
    keys = goal.key(grid, 0, step)
    most = float(np.median(keys[by_layout]))
    counted = may_count(census, gpu, node, goal, most)
    assert 0 < np.count_nonzero(counted) < np.count_nonzero(np.broadcast_to(fits, counted.shape))
    assert np.array_equal(counted, fits & (keys <= most))


@pytest.mark.slow
def test_evidence_has_the_sizes_of_the_spaces_that_are_timed() -> None:
    """What a page says that a search goes through and evaluates, beside times that no test can hold."""
    text = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    sizes = {
        name: counted(model, whole(model, gpu, gpus, framework="megatron", **words), gpu)
        for name, model, gpu, gpus, words in SPACES
    }
    (small, _), (middle, _), dense, experts = sizes.values()
    assert f"a 22B model on 8 GPUs ({small:,} strategies) and of a 175B model on 64 ({middle:,})" in text
    assert f"{dense[0]:,} strategies (405B, 16,384 GPUs), {experts[0]:,} (DeepSeek-V3, 2,048)" in text
    assert f"{dense[1]:,} and {experts[1]:,} evaluated" in text
