"""The range of a step: what it is made of, where it counts as validated, and what it holds of a source left out."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from fits import ranges
from fits.ranges import Errors, Ranges, Sample

from memcalc import api, catalog, validation
from memcalc.runs import read_layouts, read_runs, read_unfitted
from memcalc.specs.runs import Run

ROWS = {
    "FlagPerf": 27, "GPT-NeoX-20B": 1, "HF: DeepSpeed and FSDP": 2,
    "KempnerForge": 5, "Lambda GPT-NeoX": 1, "Megatron-LM examples": 3, "NeMo 24.05 and 24.07": 14,
    "NeMo 25.02 to 25.07": 18, "NeMo Automodel": 1,
    "NeMo fine-tuning": 6, "Open-Llama": 1, "Qwen": 55, "Romero, GPT-2 speedrun": 1, "Scicom": 3,
    "Smol training playbook": 1,
    "TinyLlama": 1, "VectorLM": 12, "XTuner": 8, "flash-attention training": 5, "fsdp_qlora": 28,
    "lit-llama PR 217": 1, "llm.c baseline": 2, "ms-swift benchmark": 3, "nanoGPT": 3, "pith-train issue 79": 1,
    "torchtitan PR 1196": 2, "torchtitan PR 1690": 4, "torchtitan PR 481": 1, "whyNLP/tinyllama": 8,
}  # fmt: skip
"""Rows of each source, counted in the tables that were read."""


@cache
def unfitted() -> list[Sample]:
    """The speeds that no constant is fitted on, by the shipped constants."""
    return ranges.unfitted(catalog.step_time())


# ------------------------------------------------------------------------------------------------------ what is shipped


def test_every_unfitted_speed_has_a_job_and_a_publication() -> None:
    runs = read_unfitted()
    assert Counter(run.group for run in runs.run) == ROWS
    assert {source.group for source in runs.publication} == set(ROWS)
    assert all(source.address.startswith("https://") and source.caveats for source in runs.publication)
    assert len(unfitted()) == len(runs.run)
    assert not {run.id for run in runs.run} & {run.id for run in (*read_runs().run, *read_layouts().run)}


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        ("qwen-001-s", 2048.0),  # LoRA of 1.8B at 256 tokens: 8 sequences in 1.0 s
        ("qwen-070-s", 116.4),  # 72B on 4 GPUs at 256 tokens: 32 sequences in 17.6 s
        ("fql-005", 767.6),  # 1,024 samples of 2,048 tokens in 1,366 s on two RTX 3090
        ("why-005", 9162.5),  # 73.3 k tokens/s of 8 GPUs
        ("nng-003", 109320.0),  # 40 micro-batches of 12 x 1,024 tokens in 562 ms on 8 GPUs
        ("vec-006", 2865.9),  # 11,463.46 tokens/s of four GPUs
        ("msb-002", 1551.5),  # 16 packs of 8,192 tokens in 10.56 s on 8 GPUs
        ("mlx-003", 315.0),
        ("llc-001", 463000.0),  # 10e9 tokens in 45 minutes on 8 GPUs
        ("nmb-002", 26006.0),
    ],
)
def test_speeds_are_those_of_their_tables(name: str, speed: float) -> None:
    run = next(run for run in read_unfitted().run if run.id == name)
    assert run.tokens_per_second_per_gpu == pytest.approx(speed, rel=2e-3)


def test_no_constant_is_fitted_on_them() -> None:
    groups = {row.name for row in catalog.step_time().error} | {row.name for row in catalog.step_time().experts}
    assert not groups & set(ROWS)


# --------------------------------------------------------------------------------------------------- what it claims


def test_each_range_holds_what_it_claims_of_a_source_that_it_was_made_without() -> None:
    spans = {row.name: row for row in catalog.step_time().span}
    assert set(spans) == {*ranges.KINDS, "offload"}
    for name in ranges.KINDS:
        row = spans[name]
        assert (row.crossed or 0.0) >= row.coverage == 0.9, name
        assert (row.by_source or 0.0) >= 0.89, name
        assert row.low < 0 < row.high, name
    assert spans["offload"].coverage == 0
    validated = [spans[name] for name in ranges.KINDS if name not in ("outside", "MoE")]
    for row in (spans["outside"], spans["MoE"]):
        assert row.low < min(each.low for each in validated)
        assert row.high > max(each.high for each in validated)


def test_the_ranges_hold_unfitted_speeds() -> None:
    """90% of the runs of a source in the mean, also of those whose time is validated."""
    held: dict[bool, dict[str, list[bool]]] = {True: {}, False: {}}
    for sample in unfitted():
        run = sample.job.run
        said = api.single(model=sample.job.model, gpu=sample.job.gpu, **options(run)).time()
        inside = said.low / said.step <= np.exp(sample.error) <= said.high / said.step
        held[said.validated].setdefault(run.group, []).append(inside)
    for each in held.values():
        assert np.mean([np.mean(inside) for inside in each.values()]) >= 0.9


def options(run: Run) -> dict[str, Any]:
    """A run as options of one strategy."""
    given, settings = validation.job_of(run)
    return {**given, "settings": settings}


def test_the_range_of_one_process_holds_a_host_that_launches_half_as_fast() -> None:
    """Where its launches decide; a step that kernels fill is as long on any."""
    one: dict[str, Any] = {"gpu": "h100", "gpus": 1, "framework": "hf", "zero": 0, "global_batch": 16}
    small = api.single(model="gpt2", seq_len=512, micro_batch=1, **one).time()
    large = api.single(model="llama-3.2-1b", seq_len=4096, micro_batch=8, recompute="full", **one).time()
    span = catalog.step_time().span_of("one GPU")
    assert large.high / large.step == pytest.approx(1 + span.high, rel=0.01)
    assert small.high / small.step > 1.6 * (1 + span.high)


# ------------------------------------------------------------------------------------------------ where it is validated


@pytest.mark.parametrize(
    ("job", "doubts"),
    [
        ({"gpu": "h100", "framework": "torchtitan"}, ""),
        ({"gpu": "a100-80g", "framework": "fsdp2"}, ""),
        ({"gpu": "h100", "framework": "megatron", "zero": 1}, ""),
        ({"gpu": "h100", "framework": "hf"}, "hf on Hopper"),
        ({"gpu": "h100", "framework": "hf", "gpus": 1, "zero": 0}, ""),
        ({"gpu": "b200", "framework": "fsdp2"}, "FSDP on Blackwell"),
        ({"gpu": "rtx-4090", "framework": "hf"}, "too few runs on rtx-4090"),
        ({"gpu": "v100-32g", "framework": "hf", "precision": "fp16-mixed"}, "too few runs on v100-32g"),
        ({"gpu": "a100-80g", "framework": "fsdp2", "seq_len": 1024}, "short micro-batches"),
        ({"gpu": "a100-80g", "framework": "fsdp2", "gpus": 16}, ""),
        ({"gpu": "a100-80g", "framework": "deepspeed"}, ""),
        ({"gpu": "a100-80g", "framework": "deepspeed", "gpus": 16}, "ZeRO-3 over nodes"),
        ({"gpu": "a100-80g", "framework": "deepspeed", "gpus": 16, "zero": 1}, ""),
        ({"gpu": "a100-80g", "framework": "hf", "lora": "16", "zero": 0}, ""),
        ({"gpu": "a100-80g", "framework": "hf", "lora": "16", "quantize": "nf4", "zero": 0}, "nf4 adapters on Ampere"),
        ({"gpu": "rtx-3090", "framework": "hf", "seq_len": 512}, "too few runs on rtx-3090, short micro-batches"),
    ],
)
def test_a_time_is_validated_where_ten_runs_of_three_sources_are(job: dict[str, Any], doubts: str) -> None:
    words = {"gpus": 8, "zero": 3, "seq_len": 4096, "micro_batch": 1, "global_batch": 64, "recompute": "full"} | job
    said = api.single(model="llama-3-8b", **words).time()
    assert said.validated == (not doubts)
    assert said.basis == f"not validated: {doubts}" if doubts else said.basis.startswith("validated on ")
    widest = catalog.step_time().span_of("outside")
    if doubts:
        assert (said.low / said.step, said.high / said.step) == pytest.approx((1 + widest.low, 1 + widest.high))


# ---------------------------------------------------------------------------------------------------- by hand


def test_runs_of_one_source_weigh_as_much_as_they_tell() -> None:
    """Three runs of one source with a correlation of a half count 1 / (1 + 2 / 2) each."""
    own = Errors(np.array([0.1, 0.2, 0.3, 0.4]), np.array(["a", "a", "a", "b"]), 0.5)
    assert own.weights.tolist() == [0.5, 0.5, 0.5, 1.0]
    assert own.at(0.6) == 0.3
    assert own.at(0.61) == 0.4
    assert own.mean(np.array([1, 1, 1, 0])) == pytest.approx(0.6)
    assert own.without("a").errors.tolist() == [0.4]


def test_a_kind_of_few_sources_is_no_narrower_than_the_whole() -> None:
    scores = Errors(np.array([0.1, 0.2, 0.3]), np.array(["a", "b", "c"]), 0.0)
    assert Ranges.factor(scores, 0.9, 3) == 1.0
    assert Ranges.factor(scores, 0.9, ranges.TOLD) == 0.3
    assert Ranges.factor(Errors(np.array([2.0]), np.array(["a"]), 0.0), 0.9, 1) == 2.0
