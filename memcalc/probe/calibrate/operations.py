"""Timed operations: efficiency by size, and from those of the sizes that jobs have the constants of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc import catalog
from memcalc.probe.calibrate.times import Prior, rounded
from memcalc.specs.calibration import FittedConstant
from memcalc.timing.rates import links, peak_flops
from memcalc.units import MIB

if TYPE_CHECKING:
    from memcalc.specs.hardware import GPU
    from memcalc.specs.runs import Rate, RunsFile

FEWEST = 3
"""Sizes that must have been timed."""
LARGE_PRODUCT = 1024
"""Least dimension of a product that counts: rows, columns and inner dimension of a job's linear layers."""
LONG = 2048
"""Least sequence of attention that counts [tokens]."""
LARGE_MESSAGE = 16 * MIB
"""Least message that counts: below it latency and not the rate is seen [bytes]."""
SPREAD = 0.1
"""Standard deviation of the logarithm of a constant from timed operations: in a job a kernel's rate differs."""
WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8": 1}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
READ = ("matmul", "attention", "attention-backward", *COLLECTIVES)


def constants_of(runs: RunsFile, gpu: GPU) -> list[FittedConstant]:
    """The constants that timed operations give: medians over the sizes that jobs have."""
    probes = {probe.id for probe in runs.probe if probe.gpu == gpu.name}
    rates = [rate for rate in runs.rate if rate.probe in probes]
    node = catalog.node_for(gpu)
    inside, between = links(gpu, node)
    messages = [rate for rate in rates if rate.kind in COLLECTIVES and rate.work >= LARGE_MESSAGE]
    shares = {
        ("matmul", gpu.name): list(_matmul_shares(rates, gpu)),
        ("attention", gpu.name): list(_attention_shares(rates, gpu)),
        ("inside", "any"): [_speed(rate) / inside for rate in messages if 1 < rate.gpus <= node.gpus],
        ("between", "any"): [_speed(rate) / between for rate in messages if rate.gpus > node.gpus],
    }
    return [_constant(name, of, values) for (name, of), values in shares.items() if len(values) >= FEWEST]


def _constant(name: str, of: str, shares: Sequence[float]) -> FittedConstant:
    values = np.array(shares)
    return FittedConstant(
        name=name,
        of=of,
        value=rounded(float(np.median(values))),
        unit="-",
        low=rounded(float(values.min())),
        high=rounded(float(values.max())),
        source=f"median of {len(values)} timed operations",
        rows=len(values),
    )


def _speed(rate: Rate) -> float:
    return rate.work / rate.seconds


def _matmul_shares(rates: Iterable[Rate], gpu: GPU) -> Iterator[float]:
    """The share of the peak that products reach, without their operands' traffic, as the model counts both."""
    passes = catalog.step_time().value("operand_passes", "any")
    for rate in rates:
        sizes = [rate.shape.get(name, 0) for name in ("m", "n", "k")]
        if rate.kind != "matmul" or min(sizes) < LARGE_PRODUCT or rate.dtype not in {"bf16", "fp16"}:
            continue
        m, n, k = sizes
        operands = WIDTH[rate.dtype] * (m * n + n * k + m * k)
        compute_seconds = rate.seconds - passes * operands / gpu.bandwidth_bytes_per_s
        yield rate.work / max(compute_seconds, rate.seconds / 2) / peak_flops(gpu, rate.dtype)


def _attention_shares(rates: Iterable[Rate], gpu: GPU) -> Iterator[float]:
    """The share of the peak that attention reaches, forward and backward together, as a step runs it."""
    pairs: dict[tuple[str, tuple[tuple[str, int], ...]], dict[str, Rate]] = defaultdict(dict)
    for rate in rates:
        if rate.kind in {"attention", "attention-backward"} and rate.shape.get("seq", 0) >= LONG:
            pairs[rate.dtype, tuple(sorted(rate.shape.items()))][rate.kind] = rate
    for (dtype, _), both in sorted(pairs.items()):
        if len(both) == 2 and dtype in {"bf16", "fp16"}:
            yield (
                sum(rate.work for rate in both.values())
                / sum(rate.seconds for rate in both.values())
                / peak_flops(gpu, dtype)
            )


def priors_with(priors: Iterable[Prior], constants: Iterable[FittedConstant]) -> list[Prior]:
    """The priors, moved to where operations were timed."""
    known = {(constant.name, constant.of): constant for constant in constants}
    return [
        replace(prior, value=constant.value, spread=SPREAD, source=constant.source, rows=constant.rows)
        if (constant := known.get(prior.key))
        else prior
        for prior in priors
    ]


def unused(runs: RunsFile, gpu: GPU) -> list[str]:
    """Name the timed operations that no constant of the model uses."""
    probes = {probe.id for probe in runs.probe if probe.gpu == gpu.name}
    kinds = sorted({rate.kind for rate in runs.rate if rate.probe in probes and rate.kind not in READ})
    if not kinds:
        return []
    return [f"rates of {', '.join(kinds)} were read and not used: the model takes them from the data sheet."]
