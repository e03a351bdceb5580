"""The step-time model: published throughput, published step times, and what must hold for any strategy."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fits import networks, ranges, step_time
from fits.throughput import built, job_of, layout_runs

from memcalc import api, catalog, validation
from memcalc.grid import Grid, Layout
from memcalc.runs import read_runs
from memcalc.specs.options import SharedSettings
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.timing import Times, rates_for, step_times
from memcalc.timing.forecast import forecast

if TYPE_CHECKING:
    from memcalc.formulas import Array

LEFT_OUT = {
    "Hagemann 2023": 0.05, "NVIDIA DGX Cloud": 0.06, "Megatron-Bridge": 0.10, "fms-fsdp": 0.08, "InternEvo": 0.04,
    "nanotron": 0.10, "MLPerf Training": 0.07,
}  # fmt: skip
"""What the median error on a source may be by constants that were fitted without it."""
NARROW, OWN = 0.10, 0.081
"""What it may be in 8 or 4 bits, and on the sources that are no sweep over layouts."""
ROOT = Path(__file__).resolve().parents[2]


@cache
def measured() -> tuple[step_time.Fit, Array]:
    """The published runs, and ln(predicted / measured) of each by the constants that are shipped."""
    fit = step_time.Fit(step_time.jobs()[0])
    return fit, fit.residuals(step_time.shipped())


def times_of(model: str, gpu: str, node: str | None = None, **words: Any) -> dict[str, float]:
    """Parts of the step of one strategy [s]."""
    single = api.single(model=model, gpu=gpu, node=node, **words)
    job, grid = single.job, single.grid
    times = step_times(ModelOnGrid(job.model, grid), job.gpu, job.node, rates_for(job.gpu, grid))
    return {name: float(part.max()) for name, part in times._asdict().items()}


# ------------------------------------------------------------------------------------------------- published throughput


def test_errors_on_published_runs() -> None:
    """Median 6% and 90% within 15%, each run counted once; the probes' own are told apart."""
    fit, residuals = measured()
    sizes = np.abs(np.expm1(residuals[~fit.probes]))
    assert len(sizes) > 300
    assert np.median(sizes) <= 0.06
    assert np.quantile(sizes, 0.9) <= 0.15


def test_order_of_published_runs() -> None:
    """Pairs of the same source, model and GPU more than 3% apart."""
    (right, pairs), (right_layout, layouts) = step_time.ordered(*measured())
    assert pairs > 1000
    assert right / pairs >= 0.92
    assert layouts > 150
    assert right_layout / layouts >= 0.84


def _same(table: str, old: float | str, new: float | str) -> bool:
    """Whether two fits say the same; their last digits are the processor's, and decide a tie or two in 5,000 pairs."""
    if isinstance(old, float):
        return new == pytest.approx(old, rel=2e-3, abs=0 if table == "constant" else 1e-3)
    if isinstance(old, int) and table in ("constant", "order", "sweeps"):
        return new == pytest.approx(old, abs=2, rel=0)
    return new == old


@pytest.mark.slow
def test_the_shipped_constants_are_a_fresh_fit_and_hold_for_a_source_left_out() -> None:
    found = step_time.fitted()
    shipped, fresh = (json.loads(text) for text in (step_time.FILE.read_text(), step_time.text(found)))
    assert shipped.keys() == fresh.keys()
    assert shipped.pop("written_by") == fresh.pop("written_by")
    for name, rows in shipped.items():
        for old, new in zip(*([each] if isinstance(each, dict) else each for each in (rows, fresh[name])), strict=True):
            assert old.keys() == new.keys(), name
            assert all(_same(name, old[key], new[key]) for key in old), (name, old, new)
    assert np.median(np.abs(np.expm1(found.crossed))) <= 0.09
    timed = [run for run in (*read_runs().run, *layout_runs()) if run.tokens_per_second_per_gpu is not None]
    assert sum(found.left.values()) + len(found.fit.jobs) == len(timed) > 1200
    crossed = {row.name: row for row in catalog.step_time().error}
    for source, most in LEFT_OUT.items():
        assert crossed[source].crossed_median <= most, source
    assert crossed["all"].crossed_p90 <= 0.18
    spans = {row.name: row for row in catalog.step_time().span}
    assert all(row.crossed >= row.coverage and row.low <= 0 <= row.high for row in spans.values() if row.coverage)
    assert spans["fp8"].median <= NARROW
    assert next(row for row in catalog.step_time().experts if row.name == "all").median <= 0.20
    sources = {job.source for job in measured()[0].jobs}
    own = [abs(np.expm1(r)) for r, job in zip(found.crossed, found.fit.jobs, strict=True) if job.source in sources]
    assert np.median(own) <= OWN
    assert all(row.runs or row.value == row.prior for row in catalog.step_time().constant if row.prior is not None)
    assert _shares(found) in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def _shares(found: step_time.Fitted) -> str:
    """How many runs lie in a range made without their source, as docs/evidence.md says it."""
    held, kinds, inside = ranges.Ranges(step_time.samples(found, step_time.constants(found))).held()
    fresh = np.array([sample.fresh for sample in held])
    validated = fresh & (kinds != ranges.OUTSIDE)
    new, known, every = (100 * np.mean(inside[of]) for of in (fresh, validated, slice(None)))
    return (
        f"{new:.0f}% of these without offload ({known:.0f}% of the validated) and {every:.0f}% of all {len(held):,}\n"
        "lie in one made without their source"
    )


def test_how_the_layouts_of_published_sweeps_are_put_in_order() -> None:
    """By constants that were fitted without their source; what is not reached stands in docs/evidence.md."""
    found = {row.name: row for row in catalog.step_time().sweeps}
    hagemann, nanotron = found["Hagemann 2023"], found["nanotron"]
    assert hagemann.right / hagemann.pairs >= 0.90
    assert hagemann.regret <= 0.03
    assert hagemann.first / hagemann.sweeps >= 0.90
    assert nanotron.regret <= 0.05


@pytest.mark.slow
def test_the_network_of_hagemanns_nodes_is_the_one_that_their_own_steps_ask_for() -> None:
    """What of a layout's step does not shrink with its micro-batches; no model of time takes part."""
    jobs = list(built((run for run in layout_runs() if run.group == "Hagemann 2023"), Counter()))
    found = list(networks.pairs(jobs))
    (node,) = {job.node.name: job.node for job in jobs}.values()
    reached = catalog.step_time().value("between", "any") * (node.internode_bytes_per_s_per_gpu or 0) * node.gpus
    assert node.name == "hgx-a100-80g"
    assert len(found) > 20
    low, high = networks.interval(found)
    assert low < networks.node_rate(found) < high
    assert low < reached < high < 4 * reached  # eight adapters, as a DGX A100 has, are out of the question


SCALED = {
    "IEV-0002": (3842, 3752, 3690, 3571, 3209, 2861, 2271),  # tp=1, zero1=-1
    "IEV-0010": (3939, 3919, 3944, 3928, 3920, 3835, 3625),  # tp=1, zero1=8
    "IEV-0018": (3595, 3475, 3438, 3308, 3094, 2992, 2785),  # tp=2, zero1=-1
    "IEV-0026": (3658, 3655, 3650, 3651, 3653, 3589, 3486),  # tp=2, zero1=4
}
"""Tokens/s a GPU of a 7B model on 16, 32, ... 1,024 A100, InternLM/InternEvo@3a665e88 doc/en/train_performance.md; no
row beyond 128 GPUs is in the fit."""


@pytest.mark.parametrize("name", SCALED)
def test_the_fall_from_16_to_1024_gpus_is_followed(name: str) -> None:
    """Each speed over that on 16 GPUs, within 8%; micro-batches a rank and ZeRO groups are those of there."""
    small = next(run for run in layout_runs() if run.id == name)
    presets, jobs = validation.Presets(), []
    for place, speed in enumerate(SCALED[name]):
        times = 2**place
        replicas = small.strategy.get("dp_replicate")
        strategy = small.strategy | ({"dp_replicate": replicas * times} if replicas else {})
        workload = small.workload | {"global_batch": small.workload["global_batch"] * times}
        more = {"gpus": 16 * times, "strategy": strategy, "workload": workload, "tokens_per_second_per_gpu": speed}
        jobs.append(job_of(small.model_copy(update=more), presets))
    steps = step_time.Fit(jobs).steps(step_time.shipped()[None])[0]
    measured = np.array(SCALED[name])
    assert steps[0] / steps == pytest.approx(measured / measured[0], rel=0.08)


def test_pages_say_what_the_fit_found() -> None:
    """Runs, sources and errors in the prose are those of presets/step_time.json."""
    rows = [row for row in catalog.step_time().error if not row.name.startswith("memcalc probe")]
    *sources, every = sorted(rows, key=lambda row: row.name == "all")
    counted = f"{every.runs} published runs of {len(sources)} sources"
    for name in ("evidence", "planning"):
        assert counted in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    errors = f"median error {100 * every.crossed_median:.1f}%, 9 of\n10 within {100 * every.crossed_p90:.0f}%"
    assert errors in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    unfitted = ranges.unfitted_jobs()
    more = f"[{len(unfitted)} more](../presets/runs/unfitted) of {len({job.source for job in unfitted})} sources"
    assert more in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def test_no_run_is_left_out_for_its_error() -> None:
    """The rules look at what a source says; what they leave out is said and counted."""
    left = step_time.jobs()[2]
    with_speed = sum(run.tokens_per_second_per_gpu is not None for run in read_runs().run)
    assert sum(left.values()) == with_speed - len(measured()[0].jobs)
    assert all(reason for reason in left)


@pytest.mark.parametrize(
    ("model", "layout", "full", "selective"),
    [
        ("megatron-22b", {"gpus": 8, "tp": 8, "micro_batch": 4, "global_batch": 4}, 1.42, 1.10),
        ("gpt3-175b", {"gpus": 64, "tp": 8, "pp": 8, "vpp": 3, "global_batch": 64}, 18.13, 13.75),
        ("megatron-530b", {"gpus": 280, "tp": 8, "pp": 35, "vpp": 3, "global_batch": 280}, 49.05, 37.83),
        ("megatron-1t", {"gpus": 512, "tp": 8, "pp": 64, "global_batch": 512}, 94.42, 71.49),
    ],
)
def test_iteration_times_of_table_5(model: str, layout: dict[str, Any], full: float, selective: float) -> None:
    """Seconds of arXiv:2205.05198, table 5: full recomputation, and selective with sequence parallelism."""
    schedule = {"pp_schedule": "interleaved"} if "vpp" in layout else {}
    words = {"framework": "megatron@2022-05", "precision": "fp16-mixed", "attention": "eager", "seq_len": 2048}
    for recompute, sp, published in (("full", False, full), ("selective-core-attn", True, selective)):
        found = times_of(model, "a100-80g", recompute=recompute, sp=sp, **words, **schedule, **layout)
        assert sum(found.values()) == pytest.approx(published, rel=0.10)


def test_iteration_times_of_korthikanti() -> None:
    """Table 5 of arXiv:2205.05198 (22B, 175B, 530B and 1T parameters), within 10%."""
    fit, residuals = measured()
    errors = np.expm1(residuals[fit.sources == "Korthikanti et al."])
    assert len(errors) == 6
    assert np.abs(errors).max() <= 0.10


@pytest.mark.parametrize(("recompute", "published"), [("full", 0.39), ("selective-core-attn", 0.07)])
def test_overhead_of_recomputation_in_a_layer_of_22b(recompute: str, published: float) -> None:
    """Table 4 of arXiv:2205.05198: 39% for full recomputation of a layer, 7% for the core of attention.

    Its backward hides none of the messages, ours one of its two.
    """
    words = {"gpus": 8, "tp": 8, "sp": False, "seq_len": 2048, "micro_batch": 4, "global_batch": 4, "zero": 0,
             "framework": "megatron@2022-05", "precision": "fp16-mixed", "attention": "eager"}  # fmt: skip
    plain = times_of("megatron-22b", "a100-80g", recompute="none", **words)
    again = times_of("megatron-22b", "a100-80g", recompute=recompute, **words)
    work = plain["compute"] + plain["communication"]
    assert again["recompute"] / work == pytest.approx(published, abs=0.06)


# ----------------------------------------------------------------------------------------------------- what must hold

DENSE: dict[str, Any] = {"gpus": 8, "zero": 3, "seq_len": 4096, "micro_batch": 1, "global_batch": 64,
                         "recompute": "none"}  # fmt: skip


def test_parts_add_up_to_the_step_exactly() -> None:
    times = grid_times(wide_grid())
    shape = np.broadcast_shapes(*(part.shape for part in times))
    total: Array = np.zeros(shape)
    for name in ("optimizer", "host", "compute", "recompute", "communication", "bubble", "offload"):
        total = total + getattr(times, name)
    assert np.array_equal(times.step, total)


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-13b", "llama-3-70b"])
def test_full_recomputation_costs_about_a_third_of_compute(model: str) -> None:
    """A forward is a third of forward and backward; a checkpoint that stops early leaves out its last product."""
    parts = times_of(model, "h100", **{**DENSE, "gpus": 64, "recompute": "full"})
    assert 0.25 <= parts["recompute"] / parts["compute"] <= 0.40


def test_time_falls_with_the_peak_and_rises_with_layers() -> None:
    chip, model = catalog.gpu("h100"), api.load_model("llama-2-7b")
    faster = chip.model_copy(update={"peak_flops": {k: 2 * v for k, v in chip.peak_flops.items()}})
    group = model.groups[0]
    deeper = model.model_copy(update={"groups": (group.model_copy(update={"count": 2 * group.count}),)})
    grid, node = wide_grid(), catalog.node_for(chip)

    def step(spec: Any, gpu: Any) -> Array:
        return step_times(ModelOnGrid(spec, grid), gpu, node, rates_for(gpu, grid)).step

    plain, quick = step(model, chip), step(model, faster)
    # Where the host launches too slowly the device's peak counts for nothing
    assert np.all(quick <= plain * (1 + 1e-9))
    assert np.mean(quick < plain) > 0.9
    assert np.all(step(deeper, chip) > step(model, chip))


def test_the_bubble_is_that_of_the_schedule() -> None:
    """(p - 1) / m of the ideal time where stages are alike, and 1 / v of it interleaved (arXiv:2104.04473 2.2)."""
    words = {"gpus": 64, "tp": 8, "pp": 8, "seq_len": 2048, "micro_batch": 1, "global_batch": 64, "zero": 0,
             "framework": "megatron", "recompute": "full"}  # fmt: skip
    plain = times_of("gpt3-175b", "a100-80g", **words)
    woven = times_of("gpt3-175b", "a100-80g", pp_schedule="interleaved", vpp=3, **words)
    busy = plain["compute"] + plain["recompute"] + plain["communication"]
    assert plain["bubble"] / busy == pytest.approx(7 / 64, rel=0.08)
    assert woven["bubble"] / plain["bubble"] == pytest.approx(1 / 3, rel=0.03)


def test_a_slower_network_costs_time_between_nodes_alone() -> None:
    fast, chip = catalog.node("hgx-h100"), catalog.gpu("h100")
    slow = fast.model_copy(update={"internode_bytes_per_s_per_gpu": 5e9})
    for gpus, costs in ((8, False), (64, True)):
        grid = one(replace_layout(gpus))
        times = [
            step_times(ModelOnGrid(api.load_model("llama-2-7b"), grid), chip, node, rates_for(chip, grid))
            for node in (fast, slow)
        ]
        assert (times[1].step > times[0].step).all() == costs


def test_offload_is_never_faster_and_is_not_called_validated() -> None:
    chip, model = catalog.gpu("h100"), api.load_model("llama-2-7b")
    node = catalog.node_for(chip)
    choices: tuple[tuple[str, ...], ...] = ((), ("activations",), ("optimizer",), ("optimizer", "params"))
    steps = []
    for choice in choices:
        grid = replace(one(replace_layout(8)), offloads=(choice,))
        census = ModelOnGrid(model, grid)
        steps.append(float(step_times(census, chip, node, rates_for(chip, grid)).step.max()))
        said = forecast(census, chip, node, steps[-1])
        assert said.validated == (not choice)
        assert said.low < steps[-1] < said.high
        assert ("offload" in said.basis) == bool(choice)
    assert steps[0] <= min(steps[1:])


@pytest.mark.parametrize(
    ("model", "gpu", "word"), [("mixtral-8x7b", "h100", "MoE"), ("llama-2-7b", "rtx-4090", "too few runs on rtx-4090")]
)
def test_what_no_run_validates_is_said(model: str, gpu: str, word: str) -> None:
    chip, grid = catalog.gpu(gpu), one(replace_layout(8))
    said = forecast(ModelOnGrid(api.load_model(model), grid), chip, catalog.node_for(chip), 1.0)
    assert not said.validated
    assert said.basis == f"not validated: {word}"


def test_hardware_utilisation_counts_what_is_computed_again() -> None:
    """Three forwards' worth of products without recomputation, four with it; at the same step HFU grows by a third."""
    chip, model = catalog.gpu("a100-80g"), api.load_model("gpt3-175b")
    found = {}
    for recompute in ("none", "full"):
        grid = replace(
            one(replace_layout(64), framework="megatron"), recomputes=(recompute,), precisions=("bf16-mixed",)
        )
        found[recompute] = forecast(ModelOnGrid(model, replace(grid, zeros=(1,))), chip, catalog.node_for(chip), 40.0)
    assert found["full"].mfu == found["none"].mfu
    assert found["full"].hfu / found["none"].hfu == pytest.approx(4 / 3, rel=0.02)


# ---------------------------------------------------------------------------------------------- one strategy and many


def replace_layout(gpus: int) -> Layout:
    return Layout(dp=gpus)


def one(layout: Layout, framework: str = "fsdp2") -> Grid:
    """The grid of one strategy."""
    return Grid(
        SharedSettings(framework=framework, seq_len=4096, global_batch=64),
        (layout,),
        ("bf16-mixed",),
        ("none",),
        (3,),
        ((),),
        (1,),
    )


def wide_grid() -> Grid:
    """A grid with several values on each axis."""
    layouts = (Layout(8), Layout(4, 2, True), Layout(2, 2, False, 2), Layout(4, 1, False, 2), Layout(4, cp=2))
    return Grid(
        SharedSettings(framework="torchtitan", seq_len=4096, global_batch=64),
        layouts,
        ("bf16-mixed", "fp8-mixed"),
        ("none", "full", "selective-ops", "every-2", "sqrt"),
        (2, 3),
        ((), ("activations",), ("params",)),
        (1, 2, 4),
    )


def grid_times(grid: Grid) -> Times:
    chip = catalog.gpu("h100")
    census = ModelOnGrid(api.load_model("llama-2-7b"), grid)
    return step_times(census, chip, catalog.node_for(chip), rates_for(chip, grid))


def test_a_grid_of_many_gives_each_strategy_the_time_that_it_has_alone() -> None:
    grid = wide_grid()
    shape = (grid.shape[0], 1, *grid.shape[2:])
    step = np.broadcast_to(grid_times(grid).step, shape)
    chosen = np.random.default_rng(7).choice(step.size, 60, replace=False)
    for flat in chosen:
        i = tuple(int(n) for n in np.unravel_index(flat, shape))
        alone = Grid(
            grid.fixed, (grid.layouts[i[0]],), (grid.precisions[i[2]],), (grid.recomputes[i[3]],),
            (grid.zeros[i[4]],), (grid.offloads[i[5]],), (grid.micro_batches[i[6]],),
        )  # fmt: skip
        assert float(grid_times(alone).step.max()) == pytest.approx(float(step[i]), rel=1e-12)


def test_no_part_spans_an_axis_that_it_does_not_depend_on() -> None:
    """What keeps a search fast: only offload may span the whole space."""
    times = grid_times(replace(wide_grid(), offloads=((), ("optimizer",))))
    axis = {"precision": 2, "recompute": 3, "zero": 4, "offload": 5, "micro_batch": 6}
    free = {
        "compute": ("recompute", "zero", "offload"),
        "recompute": ("zero", "offload"),
        "communication": ("offload",),  # recomputation lengthens what hides reductions
        "optimizer": ("recompute", "micro_batch"),
        "bubble": ("zero", "offload"),
    }
    for name, names in free.items():
        part = getattr(times, name)
        assert part.shape[1] == 1
        assert all(part.shape[axis[each]] == 1 for each in names), name
