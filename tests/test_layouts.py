"""The published sweeps over layouts: what is shipped, what becomes a job, and that rows are what their sources say."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fits import throughput
from fits.layouts import Order
from fits.throughput import Job

import memcalc
from memcalc import catalog, validation
from memcalc.errors import InputError, MemcalcError
from memcalc.runs import read_layouts, read_runs, runs_text
from memcalc.specs.runs import Run, RunsFile
from memcalc.terms.parameters import model_count

# Rows of each source, and those that ran, counted in the tables and figures that were read
ROWS = {
    "Hagemann 2023": (783, 303),
    "nanotron": (914, 505),
    "NVIDIA DGX Cloud": (62, 62),
    "Megatron-Bridge": (56, 56),
    "InternEvo": (30, 30),
    "fms-fsdp": (22, 22),
    "MoE Parallel Folding": (79, 79),
    "xtuner on H800": (10, 10),
    "Pai-Megatron-Patch": (2, 2),
    "torchtitan on B200": (7, 7),
    "MLPerf Training": (48, 48),
    "MLPerf fine-tuning": (113, 113),
}


@cache
def layouts() -> RunsFile:
    return read_layouts()


def row(name: str) -> Run:
    return next(run for run in layouts().run if run.id == name)


@cache
def built() -> tuple[dict[str, Job], dict[str, MemcalcError]]:
    """Every row as a job, whether it ran or not, and the errors of those that have none."""
    presets, jobs, errors = validation.Presets(), {}, {}
    for run in layouts().run:
        try:
            jobs[run.id] = throughput.job_of(run, presets)
        except MemcalcError as error:
            errors[run.id] = error
    return jobs, errors


# ------------------------------------------------------------------------------------------------------ what is shipped


def test_every_row_is_there_once() -> None:
    runs = layouts().run
    counts = Counter(run.group for run in runs)
    ran = Counter(run.group for run in runs if run.outcome == "fits")
    assert {name: (counts[name], ran[name]) for name in counts} == ROWS
    assert len({run.id for run in runs}) == len(runs) == 2126


def test_each_source_says_who_published_it() -> None:
    published = {source.group: source for source in layouts().publication}
    assert set(published) == set(ROWS)
    assert all(source.address.startswith("https://") and source.caveats for source in published.values())


def test_what_ran_has_a_speed_and_nothing_else_has() -> None:
    for run in layouts().run:
        assert (run.outcome == "fits") == (run.tokens_per_second_per_gpu is not None), run.id
        assert not run.measured.figures, f"{run.id}: no source says which figure of memory it printed"
        assert not (run.not_fitted and run.outcome != "fits"), run.id


def test_they_stand_apart_from_the_runs_of_memory() -> None:
    """Nothing that scores memory, or that is fitted without being asked for them, reads these rows."""
    known = {run.id for run in read_runs().run}
    assert not known & {run.id for run in layouts().run}
    assert not any(run.sweep for run in read_runs().run)


def test_the_families_of_nanotron_that_are_not_physics() -> None:
    """Each by its rule: ZeRO-0 under a pipeline, TP beside one, TP over nodes, a full card."""
    for run in layouts().run:
        if run.group != "nanotron" or run.outcome != "fits":
            continue
        degrees, several = run.strategy, run.gpus > 8
        full = (run.measured.unknown or 0) >= 70e9
        pipeline = several and degrees["pp"] > 1 and (degrees["zero"] == 0 or degrees["tp"] > 1)
        assert bool(run.not_fitted) == (full or pipeline or degrees["tp"] > 8), run.id
    rows = Counter(run.not_fitted[:6] for run in layouts().run if run.group == "nanotron" and run.not_fitted)
    assert rows["ZeRO-0"] == 99


STEPS = {
    # train_step_time in the logs of three runs, their median: batch, length, seconds, GPUs
    "MLP-003": (2048, 2048, 1.6084, 4096), "MLP-010": (2048, 2048, 9.4963, 512), "MLP-014": (1152, 8192, 55.143, 512),
    "MLP-018": (1536, 8192, 5.1807, 8192), "MLP-024": (768, 8192, 8.4484, 1024), "MLP-030": (16, 8192, 0.5437, 8),
    "MLP-044": (64, 8192, 0.0854, 512),
    "MLL-042": (8, 8192, 2.9749, 4), "MLL-051": (9, 8192, 0.23855, 72), "MLL-056": (8, 8192, 1.5127, 8),
    "MLL-107": (8, 8192, 0.74736, 8),
    # and the batch over the samples of a second that older logs have
    "MLL-003": (8, 8192, 8 / 2.154798, 8), "MLL-015": (48, 8192, 48 / 16.425823, 384),
    "MLL-026": (128, 8192, 128 / 234.82727, 1024), "MLL-038": (8, 8192, 8 / 2.4756863, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_speeds_of_mlperf_are_those_of_the_steps_in_its_logs(name: str) -> None:
    batch, length, seconds, gpus = STEPS[name]
    run = row(name)
    assert (run.workload["global_batch"], run.workload["seq_len"], run.gpus) == (batch, length, gpus)
    assert run.tokens_per_second_per_gpu == pytest.approx(batch * length / seconds / gpus, abs=0.06)


# ----------------------------------------------------------------------------------------------------------------- jobs


def test_what_ran_in_mlperf_s_fine_tuning_fits() -> None:
    """The two of L40S by 0.2% of the card."""
    jobs = [job for job in built()[0].values() if job.source == "MLPerf fine-tuning"]
    shares = {job.run.id: throughput.share_of_card(job) for job in jobs}
    assert len(shares) == 113
    assert {name for name, share in shares.items() if share > 1} == {"MLL-014", "MLL-015"}
    assert max(shares.values()) < 1.003


def test_each_row_is_a_job_or_says_why_not() -> None:
    jobs, errors = built()
    assert len(jobs) + len(errors) == 2126
    reasons = Counter((row(name).group, throughput.skipped(row(name), error)) for name, error in errors.items())
    assert {reason for _, reason in reasons} <= set(throughput.SKIPPED.values())
    assert not any(group in {"Hagemann 2023", "NVIDIA DGX Cloud"} for group, _ in reasons)
    assert len(jobs) > 1700


def test_a_job_has_the_layout_of_its_row() -> None:
    jobs, _ = built()
    for job in jobs.values():
        (layout,), strategy, work = job.grid.layouts, job.run.strategy, job.run.workload
        assert (layout.tp, layout.pp, layout.cp) == tuple(strategy.get(name, 1) for name in ("tp", "pp", "cp"))
        assert layout.dp * layout.tp * layout.pp * layout.cp == job.run.gpus
        assert job.grid.fixed.global_batch == work["global_batch"]
        ran = catalog.node("hgx-a100-80g") if job.source == "Hagemann 2023" else catalog.node_for(job.gpu)
        assert job.node.internode_bytes_per_s_per_gpu == (job.run.network or ran.internode_bytes_per_s_per_gpu)


@pytest.mark.parametrize(
    ("name", "gigabits", "ports"), [("FSF-0009", 400, 8), ("FSF-0010", 800, 8), ("IEV-0001", 4 * 100, 8)]
)
def test_the_network_that_the_source_names(name: str, gigabits: float, ports: int) -> None:
    """A node's adapters together, shared by its eight GPUs."""
    assert built()[0][name].node.internode_bytes_per_s_per_gpu == gigabits * 1e9 / 8 / ports


def test_kernels_of_one_sweep_are_told_apart() -> None:
    jobs = [job for job in built()[0].values() if job.source == "Hagemann 2023"]
    first = [job for job in jobs if job.grid.fixed.flash_version == 1]
    assert len(first) == 173, "rows of FlashAttention 1.0.8"
    other = next(job for job in jobs if job.run.sweep == first[0].run.sweep and job.grid.fixed.flash_version == 2)
    assert not throughput.comparable(first[0], other)


# ---------------------------------------------------------------------------------------------- against published MFUs


def decoder(layers: int, hidden: int, ffn: int, *, matrices: int = 3, kv: float = 1.0) -> int:
    """Parameters of the blocks' products: queries and output, keys and values over ``kv`` of the heads, the MLP."""
    return layers * round((2 + 2 * kv) * hidden**2 + matrices * hidden * ffn)


def flops(products: int, layers: int, hidden: int, length: int, share: float = 1.0) -> float:
    """Of a token, forward and backward; ``share`` of the full attention counts."""
    return 6 * products + share * 12 * layers * hidden * length


A100, H100 = 312e12, 989e12
BY_HAND = {
    # Hagemann: 6 N + 12 L h s with both embeddings
    "HAG-0068": (2469.4, flops(decoder(40, 5120, 13824) + 2 * 128000 * 5120, 40, 5120, 2048), 0.7057 * A100),
    "HAG-0277": (1779.9, flops(decoder(40, 5120, 13824) + 2 * 128000 * 5120, 40, 5120, 8192), 0.5941 * A100),
    "HAG-0527": (722.8, flops(decoder(60, 6656, 17920) + 2 * 128000 * 6656, 60, 6656, 2048), 0.4922 * A100),
    # nanotron: one embedding, tied
    "NAN-0001": (40150, flops(decoder(16, 2048, 8192) + 131072 * 2048, 16, 2048, 4096), 0.392 * H100),
    "NAN-0008": (37628, flops(decoder(16, 2048, 8192) + 131072 * 2048, 16, 2048, 4096), 0.367 * H100),
    "NAN-0809": (16341, flops(decoder(28, 3072, 8192) + 131072 * 3072, 28, 3072, 4096), 0.424 * H100),
    # dgxc-benchmarking: seconds a step and batch as printed; the notes of each page count FLOPs
    "DGX-0021": (128 * 8192 / 14.61 / 64, 3.94e15 / 8192, 0.5452 * H100),
    "DGX-0077": (256 * 2048 / 8.309 / 128, 2.20e15 / 2048, 0.5354 * H100),
    "DGX-0111": (256 * 4096 / 2.845 / 64, 434.5e12 / 4096, 0.6177 * H100),
    "DGX-0131": (1024 * 8192 / 21.01 / 512, 4.27e15 / 8192, 0.4109 * H100),
    # Megatron-Bridge: the head alone of the embeddings, half of attention
    "NMB-0256": (14451, flops(decoder(32, 4096, 14336, kv=0.25) + 128256 * 4096, 32, 4096, 8192, 0.5), 744e12),
    "NMB-0250": (30624, flops(decoder(32, 4096, 14336, kv=0.25) + 128256 * 4096, 32, 4096, 8192, 0.5), 1576e12),
    "NMB-0257": (1602, flops(decoder(80, 8192, 28672, kv=0.125) + 128256 * 8192, 80, 8192, 8192, 0.5), 719e12),
    # InternEvo: 72 L h^2 (1 + s / 6h + V / 12 L h) of Megatron-LM, 96 with checkpointing and V / 16 L h
    "IEV-0044": (4103, 72 * 32 * 4096**2 * (1 + 2048 / (6 * 4096) + 103168 / (12 * 32 * 4096)), 183e12),
    "IEV-0048": (3928, 72 * 32 * 4096**2 * (1 + 2048 / (6 * 4096) + 103168 / (12 * 32 * 4096)), 173e12),
    "IEV-0033": (3314, 96 * 32 * 4096**2 * (1 + 2048 / (6 * 4096) + 103168 / (16 * 32 * 4096)), 193e12),
    # torchtitan: the head alone of the embeddings, full attention of 32 heads of 128; its length follows from this
    "MOE-0228": (
        14796,
        flops(48 * (2 * 2048 * (4096 + 512) + 2048 * (128 + 8 * 3 * 768)) + 151936 * 2048, 48, 4096, 2048),
        341e12,
    ),
    # fms-fsdp: as PaLM counts, two digits
    "FSF-0015": (4550, flops(decoder(32, 4096, 11008) + 2 * 32000 * 4096, 32, 4096, 4096), 0.68 * A100),
    "FSF-0016": (9600, flops(decoder(32, 4096, 11008) + 2 * 32000 * 4096, 32, 4096, 4096), 0.46 * H100),
    "FSF-0017": (2150, flops(decoder(40, 5120, 13824) + 2 * 32000 * 5120, 40, 5120, 4096), 0.61 * A100),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_speed_and_mfu_of_rows_by_hand(name: str) -> None:
    speed, each, published = BY_HAND[name]
    run = row(name)
    assert run.tokens_per_second_per_gpu == pytest.approx(speed, rel=1e-3)
    assert speed * each == pytest.approx(published, rel=0.015)
    printed = run.tflops * 1e12 if run.tflops else (run.mfu or 0) * (A100 if run.gpu.startswith("a100") else H100)
    assert printed == pytest.approx(published)


COUNTED = {
    "Hagemann 2023": ("every embedding", 1.0, 0.001),
    "nanotron": ("every embedding", 1.0, 0.0006),
    "fms-fsdp": ("every embedding", 1.0, 0.006),
    "NVIDIA DGX Cloud": ("head", 1.0, 0.002),
    "Megatron-Bridge": ("head", 0.5, 0.002),
}
"""How a source counts FLOPs, and to what its MFU is printed."""
PEAKS = {"a100-80g": A100, "h100": H100}
"""Of the GPUs whose MFU the sources print."""


def mfu_of(job: Job) -> float:
    """Of a job as its source counts, by the model that the row names."""
    embedding, share, _ = COUNTED[job.source]
    count, (group,), fixed = model_count(job.model), job.model.groups, job.grid.fixed
    products = count.active
    if embedding == "head" and not job.model.tied:
        products -= count.embedding
    if job.source == "nanotron" and job.run.strategy["pp"] > 1:
        products += count.embedding  # the first and the last stage have one each
    each = flops(products, group.count, job.model.hidden, fixed.seq_len, share)
    return job.speed * each / PEAKS[job.gpu.name]


def test_mfu_of_every_dense_row() -> None:
    """Model, length, GPU and speed of each row together give the MFU that was printed."""
    checked = 0
    for job in built()[0].values():
        # Nemotron's pages count grouped keys and values as full ones, fms-fsdp prints 5% less for its larger models
        other = job.run.sweep.startswith(("nemotron", "34b", "70b"))
        other = other or job.gpu.name not in PEAKS or job.grid.fixed.adapters is not None
        if job.source not in COUNTED or job.model.is_moe or other or not (job.run.mfu or job.run.tflops):
            continue
        published = job.run.mfu or (job.run.tflops or 0) * 1e12 / PEAKS[job.gpu.name]
        # One row of Hagemann contradicts itself by 3%
        assert mfu_of(job) == pytest.approx(published, rel=0.035, abs=COUNTED[job.source][2]), job.run.id
        checked += 1
    assert checked > 750


# ----------------------------------------------------------------------------------------------- reading, and the order


SWEEP = """
[[sweep]]
source = "a page"
grade = "B"
model = "llama-2-7b"
gpu = "a100-80g"
gpus = 8
sweep = "one"
workload = { seq_len = 4096, global_batch = 64 }
strategy = { framework = "megatron", zero = 1 }
columns = ["id", "workload.micro_batch", "strategy.tp", "strategy.sp", "outcome", "tokens_per_second_per_gpu"]
rows = [
  ["a", 1, 1, "", "", 2000.0],
  ["b", 2, 2, true, "oom", ""],
  ["c", 4, 2, true, "failed", ""],
]
"""


def read(tmp_path: Path, text: str) -> RunsFile:
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    return read_runs([str(tmp_path)])


def test_rows_of_a_sweep_are_runs(tmp_path: Path) -> None:
    a, b, c = read(tmp_path, SWEEP).run
    assert (a.workload, a.strategy, a.tokens_per_second_per_gpu) == (
        {"seq_len": 4096, "global_batch": 64, "micro_batch": 1}, {"framework": "megatron", "zero": 1, "tp": 1}, 2000.0
    )  # fmt: skip
    assert (b.strategy["sp"], b.outcome, b.tokens_per_second_per_gpu) == (True, "oom", None)
    assert (c.id, c.outcome, c.sweep, c.gpus) == ("c", "failed", "one", 8)


def test_a_sweep_reads_back_as_its_runs(tmp_path: Path) -> None:
    runs = read(tmp_path, SWEEP)
    assert read(tmp_path, runs_text(runs)) == runs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('1, 1, "", "", 2000.0', "1, 1"), "row 1 must have 6 values"),
        (("strategy.sp", "stategy.sp"), "did you mean 'strategy'?"),
        (('sweep = "one"', 'sweeep = "one"'), "did you mean 'sweep'?"),
        (('"b", 2', '"a", 2'), "each run may occur once"),
        (('"c", 4', '"", 4'), "key 'id' is missing"),
        (('columns = ["id"', 'column = ["id"'), "key 'columns' is missing"),
    ],
)
def test_a_wrong_sweep_gets_one_sentence(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    assert change[0] in SWEEP
    with pytest.raises(InputError, match=re.escape(says)):
        read(tmp_path, SWEEP.replace(*change))


def test_what_failed_without_saying_why_has_no_verdict(tmp_path: Path) -> None:
    found = validation.validate(read(tmp_path, SWEEP))
    assert [verdict.id for verdict in found.verdicts] == ["a", "b"]
    assert (found.summary.ran, found.summary.ran_out, found.runs) == (1, 1, ())


def test_a_plan_reads_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = catalog.read_toml

    def read_toml(path: Any) -> dict[str, Any]:
        opened.append(str(path))
        return real(path)

    monkeypatch.setattr(catalog, "read_toml", read_toml)
    memcalc.plan(model="llama-3.2-1b", gpu="h100", gpus=2)
    read_runs()
    assert opened
    assert not any(Path(path).parent.name == "layouts" for path in opened)


def test_the_order_of_a_sweep_by_hand() -> None:
    """Steps of 1.00, 1.02, 2 and 4 s, said as 2, 1, 3 and 2.5: of six pairs four agree, of the five apart four."""
    order = Order.of(np.array([1.0, 1.02, 2.0, 4.0]), np.array([2.0, 1.0, 3.0, 2.5]))
    assert (order.layouts, order.right, order.pairs, order.place) == (4, 4, 5, 2)
    assert order.tau == pytest.approx((4 - 2) / 6)
    assert order.regret == pytest.approx(1 - 1 / 1.02)
