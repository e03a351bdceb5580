"""Published runs that carry throughput, as jobs for the step-time model: sources, hardware, and what is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from memcalc import validation
from memcalc.errors import InputError, MemcalcError
from memcalc.planner.stage_peaks import stage_peaks
from memcalc.probe.calibrate.times import TimedJob, timed_job
from memcalc.runs import read_layouts, read_runs
from memcalc.specs.runs import Run
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import overhead_of
from memcalc.terms.parameters import model_count

SOURCES = {
    "llm-foundry": "llm-foundry", "foundation-model-stack": "fms-acceleration", "SimuMax": "SimuMax",
    "Korthikanti": "Korthikanti et al.", "chronicles-prequel": "BLOOM", "bigscience": "bigscience on V100",
    "Megatron-LM": "Megatron-LM tests", "pytorch/ao": "torchao", "torchtune": "torchtune", "litgpt": "litgpt",
    "transformers": "transformers", "docs/performance.md": "torchtitan on A100", "202412": "torchtitan 2024-12",
    "nvfp4": "torchtitan on GB200", "asyncTP": "torchtitan TP", "h200": "torchtitan on H200",
}  # fmt: skip
"""What tells a run's source, and what that is called; the first that its text has counts."""
LATER_TITAN = ("d9bdfbb20", "27aa49077", "6a74d747c", "fca8ab7be", "36a4b6942", "f738a03bf")


def source_of(run: Run) -> str:
    """The source that a run counts with; torchtitan's commit messages are two, by their stack."""
    if run.sweep:
        return run.group
    if run.source.startswith("memcalc probe"):
        return f"memcalc probe on {str(run.gpu).upper()}"
    for word, name in SOURCES.items():
        if word in run.source:
            return name
    return "torchtitan 2025-26" if any(commit in run.source for commit in LATER_TITAN) else "torchtitan 2024-25"


class Job(TimedJob):
    """One run as a grid of one strategy, on the hardware that its source names."""

    @property
    def source(self) -> str:
        """What it counts with."""
        return source_of(self.run)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for figures of the same run."""
        grid, run = self.grid, self.run
        shape = (grid.fixed, grid.layouts, grid.precisions, grid.recomputes, grid.zeros, grid.offloads)
        return self.source, self.model.name, self.gpu.name, *shape, grid.micro_batches, run.tokens_per_second_per_gpu


def job_of(run: Run, presets: validation.Presets) -> Job:
    """A run as a job."""
    job = timed_job(run, validation.card_of(run, presets), presets)
    return Job(run, job.model, job.grid, job.gpu, job.node)


def reason_out(job: Job) -> str:
    """Why a run is not fitted on; empty where it is. No rule looks at a prediction of time."""
    run, count = job.run, model_count(job.model)
    if run.not_fitted:
        return run.not_fitted
    least = 6 * (count.active - (0 if job.model.tied else count.embedding)) * job.speed
    if job.grid.offloads[0]:
        return "offloads"
    if job.model.is_moe:
        return "mixture of experts"
    if run.group == "Megatron CI":
        return "functional test: a model of 12 narrow blocks, deterministic kernels"
    if run.group.startswith("SMX"):  # configs/system/b200_bf16_ceperm.json: 0.488 of the peak on the median
        return "GPUs that reach half of their peak in plain products, by their source"
    if "pytorch/ao" in run.source and run.gpu == "b200":
        return "power-limited GPUs, by their source"
    narrow = job.grid.precisions[0].startswith("fp8")
    if least > max(peak for dtype, peak in job.gpu.peak_flops.items() if narrow or dtype in ("bf16", "fp16")):
        return "more than the peak of the GPU: its source contradicts itself about the global batch"
    if job.source == "Hagemann 2023" and share_of_card(job) > NEAR:
        return "said to take more than 95% of the card: slower than its neighbours"
    return ""


NEAR = 0.95
"""Share of a card beyond which runs of Hagemann et al. are 20 to 50% slower than their neighbours."""


def share_of_card(job: Job) -> float:
    """What the fullest stage takes of its GPU, by the closed form."""
    census = ModelOnGrid(job.model, job.grid)
    overhead = overhead_of(job.gpu, job.grid, job.grid.layouts[0])
    stages = stage_peaks(census, build_ledger(census, overhead.workspaces, detail=False), overhead)
    return max(stage.device for stage in stages) / job.gpu.memory_bytes


SKIPPED = {
    "strategy.float8": "an 8-bit or 4-bit recipe that the GPU does not have",
    "dp-replicate": "ZeRO-1 over a part of the ranks, with gradients in 16 bits",
    "zero": "FSDP of Megatron-LM",
    "model": "a model whose shape its source does not give",
    "pp": "pipeline stages without a block",
    "vpp": "stages that have blocks by a list of their own",
    "lora": "adapters beside tensor parallelism",
}
"""What a row of a sweep asks for that cannot be said, by the field that is refused."""


def skipped(run: Run, error: MemcalcError) -> str:
    """Why a run has no job; of a sweep one of :data:`SKIPPED`."""
    if not (run.sweep and isinstance(error, InputError)):
        return "a setting that is not modelled"
    return SKIPPED[error.field]


def built(runs: Iterable[Run], left: Counter[str]) -> Iterator[Job]:
    """The jobs of runs that carry throughput, each once; ``left`` counts why others have none."""
    presets, seen = validation.Presets(), set()
    for run in runs:
        if run.tokens_per_second_per_gpu is None:
            continue
        try:
            job = job_of(run, presets)
        except MemcalcError as error:
            left[skipped(run, error)] += 1
            continue
        if job.key in seen:
            left["the same run again"] += 1
            continue
        seen.add(job.key)
        yield job


def best_of_sweeps(runs: Iterable[Run]) -> dict[tuple[str, str, str], float]:
    """The fastest measured layout of each model in each sweep [tokens/s a GPU]."""
    fastest: dict[tuple[str, str, str], float] = {}
    for run in runs:
        if run.sweep:
            key = run.group, run.sweep, str(run.model)
            fastest[key] = max(fastest.get(key, 0.0), run.tokens_per_second_per_gpu or 0.0)
    return fastest


def slow(job: Job, fastest: dict[tuple[str, str, str], float]) -> str:
    """Why a run that is far from the best of its sweep is not fitted on: something else than its layout holds it up."""
    best = fastest.get((job.run.group, job.run.sweep, str(job.run.model)), 0.0)
    return "slower than half of the best of its sweep" if job.speed < best / 2 else ""


def jobs(runs: Iterable[Run] | None = None) -> tuple[list[Job], list[Job], Counter[str]]:
    """The jobs that are fitted on, those of mixtures of experts, and why others are left out.

    ``runs`` are the shipped ones where none are given; :func:`layout_runs` are those of the published sweeps.
    """
    kept, experts, left = [], [], Counter[str]()
    given = tuple(read_runs().run if runs is None else runs)
    fastest = best_of_sweeps(given)
    for job in built(given, left):
        reason = reason_out(job) or slow(job, fastest)
        if reason:
            left[reason] += 1
            experts += [job] if job.model.is_moe and not job.grid.offloads[0] else []
        else:
            kept.append(job)
    return kept, experts, left


def layout_runs() -> tuple[Run, ...]:
    """The runs of the published sweeps over layouts."""
    return read_layouts().run


APART = 0.03
"""Measured steps of a pair that counts are further apart than this."""


def comparable(a: Job, b: Job) -> bool:
    """Whether two runs are of the same source, model and GPU, of one sweep if of any, and measurably apart."""
    same = (a.source, a.model.name, a.gpu.name) == (b.source, b.model.name, b.gpu.name)
    generations = (job.grid.fixed.flash_version for job in (a, b))
    same = same and a.run.sweep == b.run.sweep and len({*generations}) == 1
    return same and abs(np.log(a.speed / b.speed)) > APART


def layout_only(a: Job, b: Job) -> bool:
    """Whether they differ in layout, micro-batch, sharding and batch alone."""
    layout = dict.fromkeys(("global_batch", "first_stage_layers", "last_stage_layers"), 0)
    plain = [job.grid.fixed.model_copy(update=layout) for job in (a, b)]
    return plain[0] == plain[1] and (a.grid.recomputes, a.grid.precisions) == (b.grid.recomputes, b.grid.precisions)
