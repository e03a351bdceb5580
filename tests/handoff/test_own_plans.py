"""What memcalc plans and writes, its own check has nothing against."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.convert.config import JOB_KEYS
from memcalc.handoff import plan_to, started, write_job

OPEN = {"MC004", "MC101", "MC104", "MC105", "MC108"}
"""About what a search leaves as it is unless it is asked: releases, precision, a script's own DDP, the loss."""
SMALL: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 4}
LARGE: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8}
JOBS: dict[str, dict[str, Any]] = {
    "deepspeed-lora": {
        **LARGE,
        "gpu": "a100-40g",
        "framework": "deepspeed",
        "lora": "64",
        "zero": 3,
        "recompute": "full",
    },
    "hf-lora": {**SMALL, "gpus": 1, "framework": "hf", "lora": "16"},
    "ddp": {**SMALL, "framework": "ddp"},
    "megatron-fp8": {**SMALL, "gpu": "h100", "framework": "megatron", "precision": "fp8-mixed"},
    "swift-experts": {**SMALL, "model": "deepseek-v2-lite", "gpus": 8, "to": "swift_megatron", "lora": "16"},
    "axolotl-offload": {**SMALL, "to": "axolotl", "offload": "activations", "loss": "fused-linear", "gpus": 8},
}
MORE = {
    "deepspeed-32b": {"model": "qwen2.5-32b", "gpu": "a100-80g", "gpus": 8, "framework": "deepspeed", "lora": "64"},
    "deepspeed-70b": {"model": "llama-3.1-70b", "gpu": "h100", "gpus": 32, "framework": "deepspeed"},
    "deepspeed-offload": {**LARGE, "gpu": "a100-40g", "gpus": 2, "framework": "deepspeed", "offload": "optimizer"},
    "hf-qlora": {**LARGE, "gpu": "rtx-4090", "gpus": 1, "framework": "hf", "lora": "16", "quantize": "nf4"},
    "hf": {**LARGE, "framework": "hf"},
    "fsdp2": {**LARGE, "framework": "fsdp2"},
    "fsdp2-moe": {"model": "mixtral-8x7b", "gpu": "h100", "gpus": 16, "framework": "fsdp2"},
    "torchtitan": {**LARGE, "framework": "torchtitan"},
    "megatron": {**LARGE, "framework": "megatron"},
    "trainer": {**LARGE, "to": "trainer"},
    "trainer-lora": {**LARGE, "to": "trainer", "lora": "16"},
    "accelerate": {**LARGE, "to": "accelerate"},
    "axolotl": {**LARGE, "to": "axolotl"},
    "axolotl-lora": {**LARGE, "to": "axolotl", "lora": "16"},
}


def against(folder: Path, to: str | None = None, **words: Any) -> set[str]:
    """Codes of findings, and notes of the export, that speak against the first plan of a job."""
    plans = plan_to(to, top=1, **words) if to else memcalc.plan(top=2, **words)
    result = started(plans, plans.plans[0], to)
    write_job(result, folder, force=True)
    line = shlex.split(result.check.partition("memcalc check ")[2])
    first = next((place for place, word in enumerate(line) if word.startswith("--")), len(line))
    pairs = dict(zip(line[first::2], line[first + 1 :: 2], strict=True))
    options = {name[2:].replace("-", "_"): value for name, value in pairs.items()}
    assert options.keys() <= {*JOB_KEYS, "gpus", "model", "gpu"}
    checked = memcalc.check([str(folder / name) for name in line[:first]], **options)
    findings = {finding.code for file in checked.files for finding in file.findings} - OPEN
    return {*findings, *(note for note in result.notes if to and "what runs has" in note)}


@pytest.mark.parametrize("job", JOBS)
def test_nothing_that_is_found_speaks_against_memcalcs_own_plan(job: str, tmp_path: Path) -> None:
    assert against(tmp_path / "job", **JOBS[job]) == set()


@pytest.mark.slow
@pytest.mark.parametrize("job", MORE)
def test_nothing_that_is_found_speaks_against_plans_of_many_frameworks(job: str, tmp_path: Path) -> None:
    assert against(tmp_path / "job", **MORE[job]) == set()
