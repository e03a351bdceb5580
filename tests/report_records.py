"""Answers made up for the tests of reports, and the reports of them."""

from __future__ import annotations

from typing import Any

from memcalc import report
from memcalc.results.estimates import (
    Budget,
    Components,
    Estimate,
    ExposedMessages,
    HardwareFacts,
    Interval,
    ModelFacts,
    Peak,
    Saved,
    TermFacts,
    WorkloadFacts,
)
from memcalc.results.plans import Nearest, Plan, PlanPeak, Plans, StepTime
from memcalc.specs.job import JobRecord
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB

MODEL = ModelFacts(name="llama-2-7b", parameters=6738415616, active_parameters=6738415616)
HARDWARE = HardwareFacts(gpu="a100-40g", gpus=8, node="8x a100-40g", nodes=1, gpus_per_node=8)
MESSAGES = ExposedMessages(tensor=0.0, context=0.0, expert=0.0, pipeline=0.0, data=0.3)
STRATEGY = Strategy(zero=3, dp=8, recompute="full")


def term(component: str, name: str, size: float, *phases: str) -> TermFacts:
    inputs = {"parameters": 6738415616, "bytes": 4, "ranks": 8}
    formula = "parameters * bytes / ranks"
    return TermFacts(
        component=component, name=name, bytes=int(size * GIB), phases=phases, formula=formula, inputs=inputs,
        source="arXiv:1910.02054",
    )  # fmt: skip


def make_estimate(**changes: Any) -> Estimate:
    sizes = {"parameters": 3.2, "gradients": 3.1, "optimizer": 6.3, "activations": 9.5, "buffers": 1.75, "reserve": 0.5}
    reserved = sum(int(size * GIB) for size in sizes.values())
    peak = Peak(allocated=reserved - GIB, reserved=reserved, device=reserved + GIB, phase="backward_first", stage=0)
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "model": MODEL,
        "workload": WorkloadFacts(
            seq_len=4096, micro_batch=1, global_batch=8, accumulation_steps=1, tokens_per_step=32768
        ),
        "hardware": HARDWARE,
        "strategy": STRATEGY,
        "peak": peak,
        "interval": Interval(low=reserved, high=reserved + 2 * GIB, coverage=None),
        "budget": Budget(capacity=40 * GIB, context=GIB // 2, libraries=0, reserve=GIB, usable=38 * GIB),
        "verdict": "fits",
        "components": Components(**{name: int(size * GIB) for name, size in sizes.items()}),
        "saved": Saved(per_block=33554432, outside_blocks=1048576000, total=2122317824),
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
        "job": JobRecord(
            command="estimate", model="llama-2-7b", gpu="a100-40g", options={"gpus": 8, "zero": 3, "recompute": "full"}
        ),
        "command": "memcalc estimate --model llama-2-7b --gpu a100-40g --gpus 8 --zero 3 --recompute full",
    }
    return Estimate(**{**fields, **changes})


def make_plan(rank: int, peak: float, rate: float, **strategy: Any) -> Plan:
    device = int(peak * GIB)
    chosen = STRATEGY.model_copy(update=strategy)
    return Plan(
        rank=rank, gpus=8, strategy=chosen, accumulation_steps=64 // chosen.micro_batch, global_batch=512,
        data_parallel=chosen.dp, verdict="fits", host_memory=0, tier_memory=0, gpu_hours=95.9,
        statistical_efficiency=1.0, why="it recomputes least among those that fit.",
        peak=PlanPeak(allocated=device - GIB, reserved=device - GIB // 2, device=device, phase="loss", stage=0),
        time=StepTime(step=8.0, tokens_per_second_per_gpu=rate, mfu=0.415, compute=6.5, recompute=1.1,
                              communication=0.3, host=0.0, messages=MESSAGES, offload=0.0, optimizer=0.1,
                              bubble=0.1, hfu=0.6, low=7.5, high=9.0, validated=True, basis="validated on 3 runs"),
        job=JobRecord(
            command="estimate", model="llama-2-7b", gpu="a100-40g",
            options={"gpus": 8, "micro_batch": chosen.micro_batch},
        ),
        command=f"memcalc estimate --model llama-2-7b --gpu a100-40g --gpus 8 --micro-batch {chosen.micro_batch}",
    )  # fmt: skip


def make_plans(**changes: Any) -> Plans:
    fields: dict[str, Any] = {
        "version": "0.1.0", "model": MODEL, "hardware": HARDWARE, "seq_len": 4096, "searched": 14208, "feasible": 3120,
        "objective": "throughput", "token_budget": 10**9, "recipe": (), "remedies": (), "asked": "",
        "elapsed": 0.0123, "pareto": (1, 3), "nearest": (), "too_large": "", "capacity": 40 * GIB, "warnings": (),
        "assumptions": {"framework": "fsdp2", "precision": "bf16-mixed"},
        "job": JobRecord(
            command="plan", model="llama-2-7b", gpu="a100-40g", options={"gpus": 8, "global_batch": 512}
        ),
        "command": "memcalc plan --model llama-2-7b --gpu a100-40g --gpus 8 --global-batch 512",
        "plans": (
            make_plan(1, 33.96, 2896.4),
            make_plan(2, 30.21, 2851.2, recompute="modules:core_attn,mlp", micro_batch=2),
            make_plan(3, 21.77, 2410.0, tp=2, dp=4, offload=("optimizer", "activations")),
        ),
    }  # fmt: skip
    return Plans(**{**fields, **changes})


NOTHING_FITS = {
    "plans": (),
    "pareto": (),
    "feasible": 0,
    "too_large": "the optimizer states need 78.4 GiB a GPU where 38.0 are usable.",
    "nearest": (
        Nearest(change="--optimizer adamw-8bit", device=36 * GIB, tokens_per_second_per_gpu=1, throughput=0.9),
    ),
}
REPORTS = {
    "estimate": report.of_estimate(make_estimate()),
    "explain": report.of_terms(make_estimate()),
    "plan": report.of_plans(make_plans()),
    "nothing": report.of_plans(make_plans(**NOTHING_FITS)),
}
