"""The page `docs/myths.md`: claims met in the field, and the figures that memcalc puts beside them.

Each claim's figures come from the commands that the page shows beneath it, run in that order. Beside a figure stands,
where there is one, the same by hand: a sum that uses nothing of memcalc. Run as a script, this file writes the figures
and the table of contents anew.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typer.testing import CliRunner

from memcalc.cli.app import app
from memcalc.runs import read_runs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "myths.md"
GIB, GB = 2**30, 1e9
SECTION = re.compile(
    r"^### (?P<title>[^\n]+)\n<!-- claim: (?P<name>\S+) (?P<verdict>\w+) -->\n(?P<body>.*?)(?=^##|\Z)",
    re.MULTILINE | re.DOTALL,
)
FIGURE = re.compile(r'<b id="([\w-]+)">([^<]*)</b>')
COMMAND = re.compile(r"^memcalc [^\n]+$", re.MULTILINE)
CONTINUED = re.compile(r" \\\n +")
FILE = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONTENTS = re.compile(r"(<!-- contents -->\n).*?(<!-- end -->)", re.DOTALL)

LLAMA_7B = 6_738_415_616
"""Parameters of the published checkpoint, as is every count below."""
LLAMA_1B, LLAMA_3B, LLAMA_13B = 1_235_814_400, 3_212_749_824, 13_015_864_320
GPT3 = 174_604_259_328
VIT = 60 * (12 * 2048**2 + 13 * 2048) + 257 * 2048 + 2 * 2048 + 2048 + 1206272 + 2049000
"""40 blocks with biases and two norms, positions, the last norm, and what stands outside the blocks."""


@dataclass(frozen=True)
class Figure:
    """A number of the page: as computed, as it is written, and by hand."""

    value: float
    text: str
    hand: float | None = None
    within: float = 0.01
    """Relative difference from the sum by hand that the sum leaves out."""


def gib(size: float, hand: float | None = None, within: float = 0.01) -> Figure:
    return _sized(size, GIB, hand, within)


def gb(size: float, hand: float | None = None, within: float = 0.01) -> Figure:
    return _sized(size, GB, hand, within)


def mib(size: float, hand: float | None = None, within: float = 0.01) -> Figure:
    return _sized(size, 2**20, hand, within)


def _sized(size: float, unit: float, hand: float | None, within: float) -> Figure:
    """Three digits, and no more than two decimals."""
    scaled = size / unit
    places = 0 if round(scaled) >= 100 else 1 if abs(scaled) >= 9.995 else 2
    return Figure(size, f"{scaled:.{places}f}", hand, within)


def number(value: float, places: int = 1, hand: float | None = None, within: float = 0.01) -> Figure:
    return Figure(value, f"{value:,.{places}f}", hand, within)


def percent(share: float, hand: float | None = None, within: float = 0.01) -> Figure:
    return Figure(share, f"{100 * share:.0f}%", hand, within)


def change(after: float, before: float, hand: float | None = None, within: float = 0.01) -> Figure:
    share = after / before - 1
    return Figure(share, f"{100 * share:+.0f}%".replace("-", "−"), hand, within)


def word(text: str) -> Figure:
    return Figure(math.nan, text)


Figures = dict[str, Figure]
CLAIMS: dict[str, Callable[..., Figures]] = {}


def claim(name: str) -> Callable[[Callable[..., Figures]], Callable[..., Figures]]:
    """Register the figures of a claim; the function is given the answers of its commands, in their order."""

    def register(function: Callable[..., Figures]) -> Callable[..., Figures]:
        CLAIMS[name] = function
        return function

    return register


def terms(answer: Any, *names: str) -> int:
    """Bytes of the named terms of an estimate; each of them must exist."""
    known = {term.name: term.bytes for term in answer.terms}
    return sum(known[name] for name in names)


def phases(answer: Any) -> dict[str, int]:
    return vars(answer.phases)


def states(answer: Any) -> int:
    """Bytes of weights, gradients and optimizer that stand at the step; those that a step makes are left out."""
    at_step = [
        t for t in answer.terms if t.component in {"parameters", "gradients", "optimizer"} and "step" in t.phases
    ]
    return sum(t.bytes for t in at_step if t.name != "temporaries of the step")


def held(answer: Any, component: str) -> int:
    """Bytes of one component at the step, temporaries left out."""
    at_step = [term for term in answer.terms if term.component == component and "step" in term.phases]
    return sum(term.bytes for term in at_step if term.name != "temporaries of the step")


# --------------------------------------------------------------------------------------------------- bytes a parameter


@claim("sixteen-bytes")
def sixteen(*jobs: Any) -> Figures:
    by_hand = {"ds": (2, 2, 12), "mg": (2, 4, 12), "fs": (4, 4, 8), "16": (2, 2, 4)}
    found: Figures = {}
    for (short, each), job in zip(by_hand.items(), jobs, strict=False):
        parts = {"w": "parameters", "g": "gradients", "o": "optimizer"}
        for (letter, component), hand in zip(parts.items(), each, strict=True):
            found[f"sixteen-{short}-{letter}"] = number(held(job, component) / LLAMA_7B, 0, hand, 1e-3)
        found[f"sixteen-{short}"] = number(states(job) / LLAMA_7B, 0, sum(each), 1e-3)
    copies = terms(jobs[4], "autocast's cache of 16-bit weight copies", "autocast's 16-bit copy of the head")
    cached = 2 * (LLAMA_7B - 32000 * 4096 - 65 * 4096)  # neither the embedding nor the norms are cast
    return found | {"sixteen-cache": number(copies / LLAMA_7B, 2, cached / LLAMA_7B, 1e-3)}


@claim("optimizer-twice")
def optimizer_twice(job: Any) -> Figures:
    optimizer = job.components.optimizer
    return {
        "twice-whole": gb(2 * job.model.parameters, 2 * GPT3, 0),
        "twice-weights": gb(job.components.parameters, 2 * GPT3 / 16),
        "twice-optimizer": gb(optimizer, 12 * GPT3 / 16),
        "twice-gradients": gb(job.components.gradients, 2 * GPT3 / 16),
        "optimizer-twice-factor": number(optimizer / 43.8e9, 1, 12 * GPT3 / 16 / 43.8e9),
    }


@claim("fp32-7b")
def fp32_7b(job: Any) -> Figures:
    kept = 32 * 2048 * 4096 * 83.033  # bytes an element that a block keeps in fp32: autograd on the real class
    return {
        "fp32-states": gb(states(job), 16 * LLAMA_7B / 8, 1e-3),
        "fp32-activations": gb(job.components.activations, kept, 0.02),
        "fp32-peak": gb(job.peak.allocated),
    }


@claim("bf16-halves")
def bf16_halves(fp32: Any, pure: Any, mixed: Any, autocast: Any) -> Figures:
    before = fp32.peak.allocated
    found = {"half-fp32": gib(before)}
    for name, job in {"pure": pure, "mixed": mixed, "autocast": autocast}.items():
        found[f"half-{name}"] = gib(job.peak.allocated)
        found[f"half-{name}-by"] = change(job.peak.allocated, before)
    return found


@claim("vision-3b")
def vision_3b(pure: Any, autocast: Any) -> Figures:
    return {
        "vision-pure": gb(pure.peak.device, 6 * VIT, 0.15),
        "vision-weights": gb(autocast.components.parameters, 4 * VIT, 1e-3),
        "vision-cache": gb(terms(autocast, "autocast's cache of 16-bit weight copies"), 2 * VIT),
        "vision-autocast": gb(autocast.peak.device, (4 + 4 + 2 + 2) * VIT, 0.02),
    }


@claim("vision-phases")
def vision_phases(job: Any) -> Figures:
    return {
        "phases-weights": gb(job.components.parameters, 4 * VIT, 1e-3),
        "phases-step": gb(phases(job)["step"], 20 * VIT, 1e-2),
        "phases-foreach": gb(terms(job, "temporaries of the step"), 4 * VIT, 1e-2),
    }


@claim("adam-8bit")
def adam_8bit(cast: Any, cast_8: Any, pure: Any, pure_8: Any) -> Figures:
    return {
        "adam8-states": gib(held(cast, "optimizer"), 8 * LLAMA_3B, 1e-3),
        "adam8-states-8": gib(held(cast_8, "optimizer"), 2 * (1 + 4 / 256) * LLAMA_3B),
        "adam8-mixed": percent(1 - cast_8.peak.allocated / cast.peak.allocated),
        "adam8-pure": percent(1 - pure_8.peak.allocated / pure.peak.allocated),
    }


@claim("shares")
def shares(none: Any, full: Any) -> Figures:
    letters = {"p": "parameters", "g": "gradients", "o": "optimizer", "a": "activations", "b": "buffers"}
    jobs = {"none": none, "full": full}
    return {
        f"shares-{name}-{letter}": percent(getattr(job.components, part) / job.peak.allocated)
        for name, job in jobs.items()
        for letter, part in letters.items()
    }


@claim("gpt3-shares")
def gpt3_shares(job: Any) -> Figures:
    parts = {"a": "activations", "o": "optimizer", "g": "gradients", "p": "parameters"}
    return {f"gpt3-{k}": percent(getattr(job.components, part) / job.peak.allocated) for k, part in parts.items()}


# --------------------------------------------------------------------------------------------- sharding and parallelism


@claim("zero-3-by-n")
def zero_3(small: Any, large: Any) -> Figures:
    return {
        "zero-states-8": gib(states(small), 16 * LLAMA_7B / 8, 1e-3),
        "zero-states-512": gib(states(large), 16 * LLAMA_7B / 512, 2e-3),
        "zero-peak-8": gib(small.peak.allocated),
        "zero-peak-512": gib(large.peak.allocated),
        "zero-peak-by": number(small.peak.allocated / large.peak.allocated),
        "zero-3-by-n-factor": number(64 * large.peak.allocated / small.peak.allocated),
        "zero-rest": percent(1 - states(large) / large.peak.allocated),
    }


@claim("ddp-free")
def ddp_free(plain_ddp: Any, view: Any, one: Any) -> Figures:
    alone = one.peak.allocated
    return {
        "ddp-copy": gib(plain_ddp.peak.allocated - alone, 4 * LLAMA_1B, 1e-3),
        "ddp-view": gib(view.peak.allocated - alone, 0, 0),
    }


@claim("pp-divides")
def pp_divides(one: Any, eight: Any) -> Figures:
    whole, first = one.saved.total - one.saved.outside_blocks, eight.components.activations
    stages = [stage.allocated for stage in eight.stages]
    return {
        "pp-1": gib(one.components.activations),
        "pp-8": gib(first, whole, 0.02),  # 8 micro-batches of an eighth of the blocks
        "pp-divides-factor": number(first / (one.components.activations / 8), 1, 8, 0.05),
        "pp-last": gib(stages[0] - stages[-2], 6 * whole / 8, 0.2),  # 2 in flight and not 8,
    }


@claim("tp-divides")
def tp_divides(one: Any, eight: Any, with_sp: Any) -> Figures:
    kept = one.saved.total
    return {
        "tp-1": gib(kept),
        "tp-8": gib(eight.saved.total),
        "tp-8-by": number(kept / eight.saved.total),
        "tp-8-sp": gib(with_sp.saved.total),
        "tp-8-sp-by": number(kept / with_sp.saved.total, 1, 8, 0.02),
    }


@claim("sp-half")
def sp_half(without: Any, with_sp: Any) -> Figures:
    return {
        "sp-kept": percent(1 - with_sp.saved.total / without.saved.total),
        "sp-peak": percent(1 - with_sp.peak.allocated / without.peak.allocated),
    }


@claim("cp-divides")
def cp_divides(one: Any, eight: Any) -> Figures:
    return {
        "cp-kept-1": gib(one.saved.total),
        "cp-kept-8": gib(eight.saved.total, one.saved.total / 8),
        "cp-peak-1": gib(one.peak.allocated),
        "cp-peak-8": gib(eight.peak.allocated),
        "cp-by": number(one.peak.allocated / eight.peak.allocated),
    }


# ---------------------------------------------------------------------------------------------- batch and accumulation


@claim("batch-one")
def batch_one(seven: Any, eight: Any) -> Figures:
    kept = 32 * 4096 * 4096 * 45.533  # bytes an element that a block of Llama-2-7B keeps: autograd on the real class
    verdicts = {"fits": "said to fit", "tight": "tight", "does-not-fit": "too large"}
    return {
        "one-activations": gib(seven.components.activations, kept + 4096 * 32000 * 12, 0.03),
        "one-share": percent(seven.components.activations / seven.peak.allocated),
        "one-8k": gib(eight.components.activations, 32 * 8192 * 4096 * 49.033 + 8192 * 128256 * 12, 0.05),
        "one-8k-verdict": word(verdicts[eight.verdict]),
    }


@claim("accumulation-16")
def accumulation(sequences: Any, tokens: Any) -> Figures:
    return {
        "acc-16": number(sequences.workload.accumulation_steps, 0, 16, 0),
        "acc-125": number(tokens.workload.accumulation_steps, 0, 4_000_000 / 8 / 4000, 0),
    }


@claim("accumulation-double")
def accumulation_double(before: Any, after: Any) -> Figures:
    return {
        "double-batch": number(2 * before.workload.accumulation_steps * 8, 0, 256, 0),
        "double-peak": gib(after.peak.allocated - before.peak.allocated, 0, 0),
    }


@claim("accumulation-free")
def accumulation_free(none: Any, sharded: Any, whole: Any) -> Figures:
    base = none.peak.allocated
    return {
        "accfree-shard": gib(sharded.peak.allocated - base, 4 * LLAMA_1B / 8),
        "accfree-whole": gib(whole.peak.allocated - base, 4 * LLAMA_1B),
    }


# --------------------------------------------------------------------------------------------------------- activations


@claim("four-bytes")
def four_bytes(flash: Any, eager: Any) -> Figures:
    product = 2 * 2048 * 12288 * 80 * 2
    element = 2048 * 12288 * 80
    kept = {name: job.saved.per_block * 80 for name, job in {"flash": flash, "eager": eager}.items()}
    scores = 6 * 96 * 2048 / 12288  # softmax in fp32 and in 16 bits; no dropped copy, no mask
    return {
        "four-product": gb(product, 8_053_063_680, 0),
        "four-flash": gb(kept["flash"], 32 * element),
        "four-bytes-factor": number(kept["flash"] / product, 1, 8, 0.01),
        "four-eager": gb(kept["eager"], (32 + scores) * element),
        "four-eager-by": number(kept["eager"] / product, 0, (32 + scores) / 4),
    }


@claim("segments-four")
def segments_four(none: Any, four: Any, full: Any) -> Figures:
    head = none.saved.total - 80 * none.saved.per_block
    checkpoint = 2 * 2048 * 12288
    kept = {name: job.saved.total - head for name, job in {"none": none, "four": four, "full": full}.items()}
    return {
        "seg-4": gb(kept["four"], 20 * none.saved.per_block + 3 * checkpoint),
        "seg-none": gb(kept["none"], 80 * 32 * 2048 * 12288),
        "seg-by": number(kept["none"] / kept["four"]),
        "seg-factor": number(kept["four"] / 1.95e9),
        "seg-full": gb(kept["full"], 80 * checkpoint),
    }


@claim("product-92")
def product_92(job: Any) -> Figures:
    product = 1024 * 2048 * 12288 * 4 * 96
    return {
        "product": number(product / 1e12, 1, 9.895604649984),
        "product-92-factor": number(product / 92e9, 0, 9895.6 / 92, 1e-4),
        "product-layer": gb(product / 96, 103.079215104e9),
        "product-saved": gb(12 * job.saved.per_block, 12 * 2 * 2048 * 12288 / 8),
    }


@claim("log-n")
def log_n(none: Any, sqrt: Any, full: Any) -> Figures:
    blocks = 24 * none.saved.per_block
    outside = none.saved.total - blocks

    def saved(job: Any) -> float:
        return 1 - (job.saved.total - outside) / blocks

    checkpoint = 2 / (none.saved.per_block / (8 * 2048 * 1024))
    return {
        "log-formula": percent(1 - math.log(24) / 24, 0.8676, 1e-3),
        "log-sqrt-formula": percent(1 - 2 / math.sqrt(24), 0.5918, 1e-3),
        "log-sqrt": percent(saved(sqrt)),
        "log-full": percent(saved(full), 1 - checkpoint, 1e-3),
    }


@claim("sqrt-n")
def sqrt_n(none: Any, full: Any, sqrt: Any) -> Figures:
    head = none.saved.total - 32 * none.saved.per_block
    checkpoint = 2 * 4096 * 4096
    block = none.saved.per_block
    return {
        "sqrt-block": mib(block, 45.533 * 4096 * 4096, 1e-3),
        "sqrt-checkpoint": mib(full.saved.per_block, checkpoint, 0),
        "sqrt-ratio": number(block / full.saved.per_block, 0, 45.533 / 2, 1e-3),
        "sqrt-full": gib(full.saved.total - head + block, 32 * checkpoint + 45.533 * 4096 * 4096, 1e-3),
        "sqrt-sqrt": gib(sqrt.saved.total - head, 5 * checkpoint + 7 * 45.533 * 4096 * 4096, 1e-3),
    }


@claim("every-two")
def every_two(none: Any, every: Any, uniform: Any, full: Any) -> Figures:
    def blocks(job: Any) -> float:
        return job.saved.total - job.saved.outside_blocks

    checkpoint = 2 * 4096 * 4096
    return {
        "two-none": gib(blocks(none), 32 * 45.533 * 4096 * 4096, 0.03),
        "two-every": gib(blocks(every), (blocks(none) + blocks(full)) / 2, 0.05),
        "two-uniform": gib(blocks(uniform), 16 * checkpoint, 0.05),
        "two-full": gib(blocks(full), 32 * checkpoint, 0.05),
    }


@claim("llama-65b")
def llama_65b(none: Any, every: Any, full: Any) -> Figures:
    jobs = {"none": none, "every2": every, "full": full}
    return {f"65b-{name}": gb(job.peak.allocated) for name, job in jobs.items()}


@claim("keep-attention")
def keep_attention(*jobs: Any) -> Figures:
    names = ("flash", "flash-mlp", "flash-att", "eager", "eager-mlp", "eager-att")
    return {f"keep-{name}": gib(job.peak.allocated) for name, job in zip(names, jobs, strict=True)}


@claim("flash-linear")
def flash_linear(none: Any, full: Any, core: Any) -> Figures:
    return {
        "flash-none": gib(none.components.activations),
        "flash-full": gib(full.components.activations),
        "flash-core": gib(none.peak.allocated - core.peak.allocated, 32 * 4 * 32 * 4096, 0.05),  # log-sum-exp alone
    }


@claim("logits-small")
def logits_small(standard: Any, fused: Any) -> Figures:
    logits = terms(standard, "logits and their gradients")
    return {
        "logits-phase": word(standard.peak.phase),
        "logits-bytes": gib(logits, (12 * 128256 + 8 * 4096) * 16384, 1e-3),
        "logits-share": percent(logits / standard.peak.allocated),
        "logits-peak": gib(standard.peak.allocated),
        "logits-fused": gib(fused.peak.allocated),
    }


def _times(plans: Any) -> tuple[Any, Any]:
    """The plan without recomputation, and with it all."""
    by_policy = {plan.strategy.recompute: plan for plan in plans.plans}
    return by_policy["none"], by_policy["full"]


@claim("recompute-slower")
def recompute_slower(plans: Any) -> Figures:
    none, full = _times(plans)
    return {
        "slower-none": number(none.time.step, 2),
        "slower-full": number(full.time.step, 2),
        "slower-by": percent(full.time.step / none.time.step - 1),
    }


@claim("short-sequences")
def short_sequences(short: Any, long: Any) -> Figures:
    none, full = _times(short)
    long_none, long_full = _times(long)
    return {
        "short-time": percent(full.time.step / none.time.step - 1),
        "short-saved": percent(1 - full.peak.device / none.peak.device),
        "short-saved-4k": percent(1 - long_full.peak.device / long_none.peak.device),
    }


@claim("compile-saves")
def compile_saves(eager: Any, blocks: Any, loss: Any, full: Any, compiled: Any) -> Figures:
    units, keys, ffn = 32 * 8192 * 4096, 1024 / 4096, 14336 / 4096
    return {
        "compile-eager": gib(32 * eager.saved.per_block),
        "compile-kept": gib(32 * blocks.saved.per_block, units * (12 + 4 * keys + 6 * ffn + 4 * 32 / 4096), 0.02),
        "compile-peak": gib(eager.peak.allocated),
        "compile-loss": gib(loss.peak.allocated),
        "compile-full": gib(full.peak.allocated - compiled.peak.allocated, 0, 0),
    }


@claim("packed-quarter")
def packed_quarter(plain: Any, eight: Any, four: Any, fused: Any) -> Figures:
    hidden, ffn, keys, heads = 4096, 14336, 1024, 32
    plain_kept = 20 + 4 * keys / hidden + 8 * ffn / hidden + 4 * heads / hidden + 8 / hidden
    units = 8192 * hidden
    # in 16 bits: norm outputs 3 + 2 times, what the norms scale 2, attention 3.5, gate, its SiLU, up and their product
    # 3.5 each; in fp32 each norm's input as a power and as a factor
    packed = (5 + 2 + 3.5 + 4 * 3.5) + 4
    return {
        "packed-plain": number(plain.saved.per_block / units, 1, plain_kept, 1e-3),
        "packed-8": number(eight.saved.per_block / units, 1, packed * 1.03125 + 4 * heads / hidden, 1e-3),
        "packed-8-by": change(eight.saved.per_block, plain.saved.per_block),
        "packed-4-by": change(four.saved.per_block, plain.saved.per_block),
        "packed-peak": change(four.peak.allocated, plain.peak.allocated),
        "packed-full": gib(32 * fused.saved.per_block, 32 * 2 * units),
    }


# ---------------------------------------------------------------------------------------- adapters and quantised bases

RANK_16 = 32 * 16 * 2 * (4096 + 4096)
"""Adapters of rank 16 on the projections of queries and values, PEFT's choice for Llama-2-7B."""


@claim("lora-states")
def lora_states(full: Any, lora: Any) -> Figures:
    return {
        "lora-g": gib(held(full, "gradients"), 2 * LLAMA_7B, 1e-3),
        "lora-g-16": gib(held(lora, "gradients"), 4 * RANK_16),
        "lora-o": gib(held(full, "optimizer"), 4 * LLAMA_7B, 1e-3),
        "lora-o-16": gib(held(lora, "optimizer"), 8 * RANK_16),
        "lora-w": gib(lora.components.parameters, 2 * LLAMA_7B + 4 * RANK_16, 1e-3),
    }


@claim("lora-activations")
def lora_activations(full: Any, lora: Any, recomputed: Any) -> Figures:
    return {
        "loraact-full": gib(full.saved.total),
        "loraact-lora": gib(lora.saved.total),
        "loraact-ratio": percent(lora.saved.total / full.saved.total),
        "loraact-rec": gib(recomputed.saved.total),
    }


@claim("qlora-65b")
def qlora_65b(short: Any, adam: Any, long: Any) -> Figures:
    hidden, ffn, layers, vocab = 8192, 22016, 80, 32000
    linear = layers * (4 * hidden**2 + 3 * hidden * ffn)
    adapters = 64 * layers * (4 * 2 * hidden + 3 * (hidden + ffn))
    rest = 2 * vocab * hidden + (2 * layers + 1) * hidden
    base = linear * (0.5 + 1 / 64 + 4 / (64 * 256)) + 2 * rest + 4 * adapters
    return {
        "q-512": gib(short.peak.device),
        "q-adam": gib(adam.peak.device),
        "q-4k": gib(long.peak.device),
        "q-base": gib(short.components.parameters, base, 1e-3),
    }


# ------------------------------------------------------------------------------------------------------------- offload


@claim("offload-optimizer")
def offload_optimizer(none: Any, away: Any) -> Figures:
    return {
        "off-none": gib(none.peak.allocated),
        "off-cpu": gib(away.peak.allocated),
        "off-left": gib(held(away, "optimizer"), 0, 0),
        "off-host": gib(away.host_memory / 8),
        "off-states": gib(held(none, "optimizer"), 12 * LLAMA_13B / 8, 1e-3),
    }


@claim("offload-host")
def offload_host(seven: Any, thirteen: Any) -> Figures:
    rounded = sum(term.bytes for term in thirteen.off_gpu if term.name == "pinned tensors rounded up")
    return {
        "host-7b": gb(seven.host_memory, 16 * LLAMA_7B, 0.2),
        "host-13b": gb(thirteen.host_memory, 16 * LLAMA_13B + 8 * rounded, 1e-3),
        "host-pinned": gb(8 * rounded),
    }


# ---------------------------------------------------------------------------------------------------- what tools show


@claim("a100-usable")
def a100_usable(job: Any) -> Figures:
    budget = job.budget
    return {
        "usable-capacity": gib(budget.capacity),
        "usable-context": gib(budget.context),
        "usable-free": gib(budget.capacity - budget.context, 38.5 * GIB, 0.02),
        "usable-libraries": gib(budget.libraries),
    }


@cache
def measured_ratios() -> tuple[float, ...]:
    """nvidia-smi over allocated, of the published runs that have both."""
    figures = [run.measured for run in read_runs().run]
    return tuple(f.device / f.allocated for f in figures if f.device is not None and f.allocated is not None)


@claim("nvidia-smi")
def nvidia_smi(job: Any) -> Figures:
    ratios = measured_ratios()
    return {
        "smi-allocated": gib(job.peak.allocated),
        "smi-reserved": gib(job.peak.reserved),
        "smi-device": gib(job.peak.device),
        "nvidia-smi-factor": number(job.peak.device / job.peak.allocated, 2, statistics.median(ratios), 0.2),
        "smi-runs": number(len(ratios), 0),
        "smi-median": number(statistics.median(ratios), 2),
        "smi-most": number(max(ratios), 2),
    }


@claim("expandable")
def expandable(off: Any, on: Any) -> Figures:
    return {
        "exp-off": gib(off.peak.reserved),
        "exp-on": gib(on.peak.reserved),
        "exp-allocated": gib(on.peak.allocated, off.peak.allocated, 0),
    }


@claim("empty-cache")
def empty_cache(job: Any) -> Figures:
    return {"empty-most": gib(job.peak.reserved - job.peak.allocated), "empty-rest": gib(job.peak.allocated)}


@claim("twenty-minutes")
def twenty_minutes(plans: Any) -> Figures:
    return {"search-count": number(plans.searched, 0)}


# ------------------------------------------------------------------------------------------------------------ the page


@dataclass(frozen=True)
class Section:
    """One claim as the page has it."""

    title: str
    name: str
    verdict: str
    body: str

    @property
    def commands(self) -> list[str]:
        """The commands that the page shows beneath the claim."""
        return COMMAND.findall(CONTINUED.sub(" ", self.body))

    @property
    def link(self) -> str:
        """The anchor of its heading."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


def sections(page: str) -> Iterator[Section]:
    for match in SECTION.finditer(page):
        yield Section(**match.groupdict())


@cache
def answer(command: str) -> Any:
    """Run a command of the page, in the folder with its files, and return what it says as JSON, by names."""
    found = CliRunner().invoke(app, [*shlex.split(command)[1:], "--format", "json"], env={"COLUMNS": "100"})
    if found.exit_code not in {0, 1}:
        message = f"{command}\n{found.output}"
        raise ValueError(message)
    return json.loads(found.stdout, object_hook=lambda table: SimpleNamespace(**table))


@cache
def figures_of(section: Section) -> Figures:
    """Return the figures of a claim, from its commands, run beside the files that the page shows."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        for name, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
            (Path(place) / name).write_text(text, encoding="utf-8")
        os.chdir(place)
        try:
            return CLAIMS[section.name](*map(answer, section.commands))
        finally:
            os.chdir(before)


def computed(page: str) -> dict[str, Figures]:
    """Return the figures of each claim of the page."""
    return {section.name: figures_of(section) for section in sections(page)}


VERDICTS = ("right", "wrong", "depends")


def verdict(section: Section, figures: Figures) -> str:
    """Return the word of the table of contents, with the factor where the claim is off by one."""
    factor = figures.get(f"{section.name}-factor")
    by = f", by ×{factor.text}" if factor and section.verdict == "wrong" else ""
    return f"{section.verdict}{by}"


def contents(page: str, found: dict[str, Figures]) -> str:
    """Return the table of contents: by theme, each claim with its verdict."""
    rows = ["| claim | verdict |", "| --- | --- |"]
    for theme in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        claims = [f"| [{s.title}](#{s.link}) | {verdict(s, found[s.name])} |" for s in sections(f"## {theme}")]
        rows += [f"| **{theme.partition(chr(10))[0]}** | |", *claims] if claims else []
    return "\n".join([*rows, ""])


def written(page: str) -> str:
    """Return the page with its figures and its table of contents made anew."""
    found = computed(page)
    texts = {name: figure.text for figures in found.values() for name, figure in figures.items()}
    texts |= {f"{s.name}-verdict": verdict(s, found[s.name]).capitalize() for s in sections(page)}
    page = FIGURE.sub(lambda match: f'<b id="{match[1]}">{texts[match[1]]}</b>', page)
    return CONTENTS.sub(lambda match: f"{match[1]}{contents(page, found)}{match[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
