"""Fit of presets/step_time.json: the constants of the step-time model, on the published throughput of presets/runs.

Run ``python -m fits.step_time`` in this folder's parent after a change of the model or of the runs. What is
minimised is the sum over runs of |ln(predicted / measured)|, rounded off below 3%, where each source weighs as the
square root of its runs; a prior holds each constant near what is published or plausible. Every constant is fitted
again without each source in turn: that gives its spread, the error on a source that was left out, and, with the errors
on speeds that nothing was fitted on, the ranges that are shown beside every time (tests/fits/ranges.py).
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fits.orders import FIRST, LEAST, Order
from fits.ranges import Ranges, Sample, table, unfitted
from fits.throughput import Job, comparable, jobs, layout_only, layout_runs
from memcalc import catalog
from memcalc.probe.calibrate.times import Stack, along
from memcalc.runs import read_runs
from memcalc.specs.step_time import StepTimeTable
from memcalc.timing.rates import GIVEN as BY_STACK
from memcalc.timing.rates import VIRTUAL, Rates, attention_share, factors_of, given_by, scopes_of
from memcalc.timing.times import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.formulas import Array

FILE = Path(__file__).resolve().parents[2] / "presets" / "step_time.json"
WRITTEN_BY = "python -m fits.step_time in tests, from presets/runs; do not edit"
ROUNDING = 0.03
"""|ln(predicted / measured)| below which errors count as squares."""
TYPICAL = 0.08
"""What the priors are weighed against."""


@dataclass(frozen=True)
class Prior:
    """Where a constant is expected, before any run is looked at."""

    name: str
    of: str
    value: float
    spread: float
    """Standard deviation of its logarithm; 0 where it is given."""
    unit: str
    source: str = "fitted"


MAMF = "fitted; prior: best matmul measured on the card, stas00/ml-engineering compute/accelerator/README.md"
CUDNN = "fitted; prior: cuDNN beside FlashAttention-3, arXiv:2407.08608, figures 5 and 6, head size 128"
FLASH2 = "fitted; prior: FlashAttention-2, arXiv:2307.08691, figure 6 and README"
FLASH2_BLACKWELL = (
    "fitted; prior: FlashAttention-2 on a B200, 352 to 362 TFLOP/s at head size 128 (meta-pytorch/tritonbench PR #171) "
    "and 259 to 346 at 64 (Dao-AILab/flash-attention issue #1589), of 2,250"
)
FLEX = (
    "fitted; prior: FlashAttention-4 reaches 1,418 TFLOP/s forward and 1,209 backward (Dao-AILab/flash-attention PR "
    "#2280: B200, causal, 8,192 tokens), and is 1.6 to 3.2 and 1.85 to 2.3 times as fast as FlexAttention in Triton "
    "(pytorch.org, FlexAttention + FlashAttention-4)"
)
DEQUANTISED = (
    "fitted; prior: between a profile of Llama 3 8B on an L40S (kDequantizeBlockwise, 59.8 ms a micro-batch for 3 x "
    "6.98e9 weights of 2.56 bytes: all of the bandwidth) and fixed costs of A100 runs"
)
ENGINE = "fitted; prior: autograd's engine is C++ (csrc/autograd/engine.cpp): a quarter of Python's time"
HOOKS = (
    "fitted; prior: torch/utils/checkpoint.py packs and unpacks each kept tensor in Python: 3.3 ms more a block of "
    "Qwen2.5-0.5B on an H200, of 2 ms for its forward"
)
FOREACH = "fitted; prior: torch 2.13 torch/optim/adam.py, _multi_tensor_adam: 20 passes where 7 are needed"
PRIORS = (
    Prior("matmul", "Ampere", 0.86, 0.1, "-", MAMF),
    Prior("matmul", "Hopper", 0.80, 0.1, "-", MAMF),
    Prior("matmul", "Hopper, TransformerEngine", 0.82, 0.05, "-", MAMF),
    Prior("matmul", "h100-96g", 0.72, 0.1, "-"),
    Prior("matmul", "Volta", 0.75, 0.1, "-"),
    Prior("matmul", "Blackwell", 0.775, 0.1, "-", MAMF),
    Prior("matmul", "Blackwell, TransformerEngine", 0.775, 0.1, "-", MAMF),
    Prior("matmul", "CDNA3", 0.60, 0.1, "-", MAMF),
    Prior("attention", "Ampere", 0.58, 0.15, "-", FLASH2),
    Prior("attention", "Hopper", 0.34, 0.15, "-", FLASH2),
    Prior("attention", "Hopper, cuDNN", 0.52, 0.1, "-", CUDNN),
    Prior("attention", "h100-96g, FlashAttention", 0.34, 0.15, "-"),
    Prior("attention", "h100-96g, cuDNN", 0.46, 0.15, "-", CUDNN),
    Prior("attention", "Blackwell", 0.155, 0.15, "-", FLASH2_BLACKWELL),
    Prior("attention", "Blackwell, FlexAttention", 0.26, 0.2, "-", FLEX),
    Prior("attention", "Blackwell, cuDNN", 0.50, 0.15, "-"),
    Prior("attention", "CDNA3", 0.25, 0.3, "-"),
    Prior("attention_half", "any", 300, 0.3, "tokens"),
    Prior("operand_passes", "any", 1.0, 0.5, "-"),
    Prior("passes", "model", 2.5, 0.4, "-"),
    Prior("passes", "compiled", 1.5, 0.4, "-"),
    Prior("passes", "fused", 2.0, 0.4, "-"),
    Prior("passes", "te", 2.0, 0.2, "-"),
    Prior("launch", "any", 25e-6, 0.4, "s"),
    Prior("launch", VIRTUAL, 50e-6, 0.4, "s"),
    Prior("launch_backward", "any", 0.25, 0.1, "-", ENGINE),
    Prior("relaunch", "any", 1.6, 0.1, "-", HOOKS),
    Prior("dispatch", "any", 1.0, 0.5, "-"),
    Prior("visit", "any", 2.5, 0.4, "-"),
    Prior("loop", "any", 150, 0.5, "-"),
    Prior("step_passes", "fused", 1.0, 0.2, "-"),
    Prior("step_passes", "foreach", 20 / 7, 0.1, "-", FOREACH),
    Prior("inside", "any", 0.7, 0.3, "-"),
    Prior("between", "any", 0.8, 0.3, "-"),
    Prior("inside_tensor", "Ampere, Megatron", 0.7, 0.3, "-"),
    Prior("inside_tensor", "Ampere", 0.5, 0.4, "-"),
    Prior("broadcast", "any", 3e-3, 0.7, "s"),
    Prior("inside_tensor", "any", 0.7, 0.3, "-"),
    Prior("between_tensor", "any", 0.7, 0.3, "-"),
    Prior("call", "any", 30e-6, 0.7, "s"),
    Prior("latency", "any", 2e-6, 0.7, "s"),
    Prior("latency_between", "any", 4e-6, 0.4, "s"),
    Prior("hidden", "any", 0.2, 0.4, "-"),
    Prior("hidden_between", "any", 0.2, 0.4, "-"),
    Prior("window", "any", 0.7, 0.4, "-"),
    Prior("fixed", "any", 30e-3, 0.5, "s"),
    Prior("fixed", "graph", 30e-3, 0.5, "s"),
    Prior("dequantisation", "any", 0.6, 0.5, "-", DEQUANTISED),
    Prior("casts", "any", 0.45, 0.4, "-"),
    Prior("float8", "tensorwise", 0.8, 0.2, "-"),
    Prior("float8", "rowwise", 0.6, 0.2, "-"),
    Prior("float8", "TransformerEngine delayed", 0.95, 0.1, "-"),
    Prior("float8", "TransformerEngine tensorwise", 0.95, 0.1, "-"),
    Prior("float8", "TransformerEngine delayed, Blackwell", 0.95, 0.1, "-"),
    Prior("float8", "TransformerEngine tensorwise, Blackwell", 0.95, 0.1, "-"),
    Prior("float8", "blockwise", 0.7, 0.2, "-"),
    Prior("float8", "mxfp8", 0.75, 0.2, "-"),
    Prior("float8", "nvfp4", 0.55, 0.3, "-"),
)
MOE = "Megatron-Core MoE report, arXiv:2603.07685, table 7; DeepEP README"
GIVEN = (
    Prior("exposed_tensor", "any", 0.28, 0, "-", "not identified without NVIDIA's recipes, which set it"),
    Prior("exposed_exchange", "any", 0.12, 0, "-", "Megatron-Core MoE report, arXiv:2603.07685: 93% hidden"),
    Prior("hook", "any", 5.8, 0, "-",
          "between two of DeepSpeed's stage 3: 46 ms more than stage 2 for 130 passes on an A100 whose launches take "
          "69 us (canghaiX/MiniTrainBench 8869d23 results/zero_repeat3): 5.1; Llama 3.2 1B on an H200, 0.32 s more "
          "than stage 1 for 642 passes at 63 us a launch: 6.7"),
    Prior("wait", "any", 3e-3, 0, "s", "no run isolates it: host-bound dropless blocks, 3 to 5 ms"),
    Prior("exchange_inside", "alltoall", 0.72 / 1.05, 0, "-", MOE),
    Prior("exchange_inside", "alltoall, Blackwell", 0.58 / 1.05, 0, "-", MOE),
    Prior("exchange_inside", "deepep", 0.90 / 1.05, 0, "-", MOE),
    Prior("exchange_inside", "deepep, Blackwell", 0.75 / 1.05, 0, "-", MOE),
    Prior("exchange_inside", "allgather", 0.70, 0, "-", "as large gathers"),
    Prior("exchange_between", "alltoall", 0.90 / 1.10, 0, "-", MOE),
    Prior("exchange_between", "deepep", 0.82 / 1.10, 0, "-", MOE),
    Prior("exchange_between", "allgather", 0.80, 0, "-", "as large gathers"),
    Prior("exchange_call", "alltoall", 30e-6, 0, "s", MOE),
    Prior("exchange_call", "deepep", 40e-6, 0, "s", MOE),
    Prior("exchange_call", "allgather", 30e-6, 0, "s", MOE),
    Prior("host_memory", "any", 0.45, 0, "-",
          "ZeRO-Offload, arXiv:2101.06840, table 4, as recalled: CPU-Adam updates 10^9 parameters in 0.24 s, 28 bytes "
          "each, where 12 channels of DDR4-2666 have 256 GB/s (DGX-2, two Xeon Platinum 8168)"),
)  # fmt: skip
REFERENCE, REFERENCE_BEST = "a100-80g", 264.53e12
"""The card on which Ampere's constants are fitted, and the best 16-bit product that PyTorch reached on one [FLOP/s]."""
BESTS = {
    "a100-pcie-40g": (234.14e12, 1), "a10": (56e12, 1), "l4": (70.89e12, 1), "l40s": (269.15e12, 1),
    "rtx-3090": (76.58e12, 3), "rtx-4090": (164.81e12, 9), "rtx-5090": (238.04e12, 4), "rtx-a6000": (123.34e12, 1),
    "rtx-6000-ada": (269.15e12, 1),
}  # fmt: skip
"""The same of other cards that run Ampere's kernels, at the clocks that they hold: in bf16, the median of so many.

A data sheet's peak is that of one clock. A GeForce, whose fp32 sums run at half rate, holds a higher one; a card of
little power a lower one: 45% of the A10's peak, 108% of the RTX 3090's.
"""
BEST_SOURCE = "zzc0721/torch-performance-test-data 9d82827 database.md"
BEST_SOURCES = {
    "a10": "chsasank/device-benchmarks 7ccc883 README.md",
    "rtx-6000-ada": f"an L40S, the same chip at 350 W in place of 300 W, {BEST_SOURCE}",
}
DEPTHS = (1, 16)
"""Stages up to which pipelines are computed together."""
HOST = ("launch", "launch_backward", "relaunch", "dispatch", "visit", "loop")
"""Constants of a host: fitted on steps of one process.

The steps of the probe's suite, narrow models and such of a few blocks, fit no other: their products and passes are
smaller than those of which rates are told.
"""
SHARES = ("hidden", "hidden_between", "window", "between", "between_tensor", "inside", "inside_tensor")
"""Constants between 0 and 1: their odds are fitted."""


def _raised(prior: Prior) -> float:
    return float(np.log(prior.value / (1 - prior.value)) if prior.name in SHARES else np.log(prior.value))


def _lowered(name: str, x: Array) -> Array:
    return 1 / (1 + np.exp(-x)) if name in SHARES else np.exp(x)


def _host_of(job: Job) -> dict[str, tuple[str, ...]]:
    return {"launch": (VIRTUAL,)} if job.source.startswith("memcalc probe") else {}


class Part:
    """Some of the jobs, along the first axis of one grid; guesses of the constants are along its last."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.stack = Stack.of(jobs)
        self.places = self._places(jobs)
        self.lengths = along(job.grid.fixed.seq_len for job in jobs)
        self.factors = {
            name: along(np.asarray(factors_of(job.gpu, job.grid)[name]).item() for job in jobs)
            for name in factors_of(jobs[0].gpu, jobs[0].grid)
        }
        self.by_stack = {name: along(given_by(job.grid).get(name, np.nan) for job in jobs) for name in BY_STACK}
        self.narrow = along(job.grid.precisions[0].startswith("fp8") for job in jobs) == 1

    def rates(self, guesses: Array) -> Rates:
        """The rates of every job by each row of ``guesses``."""
        fitted = [_lowered(prior.name, column) for prior, column in zip(PRIORS, guesses.T, strict=True)]
        values = np.array([*fitted, *(np.full(len(guesses), prior.value) for prior in GIVEN)])
        found = {name: values[places].reshape(-1, 1, 1, 1, 1, 1, len(guesses)) for name, places in self.places.items()}
        found |= {name: found[name] * factor for name, factor in self.factors.items()}
        found |= {name: np.where(np.isnan(whole), found[name], whole) for name, whole in self.by_stack.items()}
        found["attention"] = found["attention"] * attention_share(self.lengths, found.pop("attention_half"))
        found["float8"] = np.where(self.narrow, found["float8"], 1.0)
        found["casts"] = 1.0 + self.narrow * found["casts"]
        return Rates(**found)

    @staticmethod
    def _places(jobs: Sequence[Job]) -> dict[str, list[int]]:
        """Of each job the place of each of its constants among the priors."""
        known = {(prior.name, prior.of): place for place, prior in enumerate((*PRIORS, *GIVEN))}
        known[("attention", "Volta")] = known[("attention", "Ampere")]
        scopes = [scopes_of(job.gpu, job.grid) | _host_of(job) for job in jobs]
        return {
            name: [next(known[name, one] for one in each[name] if (name, one) in known) for each in scopes]
            for name in scopes[0]
        }

    def steps(self, guesses: Array) -> Array:
        """The step of every job by each of the guesses [s]: guesses by jobs."""
        times = seconds(self.stack.work, self.stack.hardware, self.rates(guesses))
        return times.step.reshape(-1, len(guesses)).T


class Fit:
    """All jobs, and the constants that fit them."""

    start = np.array([_raised(prior) for prior in PRIORS])
    spread = np.array([prior.spread for prior in PRIORS])
    of_host = np.array([prior.name in HOST for prior in PRIORS])

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self.measured = np.array([job.measured for job in jobs])
        self.sources = np.array([job.source for job in jobs])
        self.probes = np.array([job.source.startswith("memcalc probe") for job in jobs])
        self.alone = np.array([bool(np.all(job.work.alone)) for job in jobs])
        self.gpus = [job.gpu.name for job in jobs]
        # A job has the stages of the deepest pipeline of its part: most have one
        depths = [sum(job.work.once.linear.shape[1] > depth for depth in DEPTHS) for job in jobs]
        kinds = list(zip(depths, self.probes.tolist(), self.alone.tolist(), strict=True))
        chosen = [[place for place, kind in enumerate(kinds) if kind == each] for each in sorted(set(kinds))]
        self.parts = [(np.array(places), Part([self.jobs[place] for place in places])) for places in chosen]
        self.reached = np.zeros((len(PRIORS), len(self.jobs)), dtype=bool)
        """Which constants a job has."""
        for places, part in self.parts:
            for of_jobs in part.places.values():
                fitted = np.array(of_jobs) < len(PRIORS)
                self.reached[np.array(of_jobs)[fitted], places[fitted]] = True
        self.begun: tuple[Array, Array, Array] | None = None
        """Where several fits begin: the constants, the residuals and their slopes."""

    def steps(self, guesses: Array, used: Array | None = None) -> Array:
        """The step of every job by each of the guesses [s]: guesses by jobs; of parts without ``used``, as measured."""
        found = np.tile(self.measured, (len(guesses), 1))
        for places, part in self.parts:
            if used is None or used[places].any():
                found[:, places] = part.steps(guesses)
        return found

    def residuals(self, x: Array, used: Array | None = None) -> Array:
        """ln(predicted / measured)."""
        return np.log(self.steps(x[None], used)[0] / self.measured)

    def moved(self, x: Array, step: float, own: Array | None = None, used: Array | None = None) -> Array:
        """Residuals where one constant of ``own`` after the other is larger by a step: constants by jobs.

        No job has two constants of a name, so that those move together.
        """
        own = np.ones(len(x), dtype=bool) if own is None else own
        names = sorted({prior.name for prior, chosen in zip(PRIORS, own, strict=True) if chosen})
        together = np.array([[prior.name == name for prior in PRIORS] for name in names])
        guesses = np.concatenate([x[None], x + step * (together & own)])
        still, *pushed = np.log(self.steps(guesses, used) / self.measured)
        of_name = dict(zip(names, pushed, strict=True))
        return np.array(
            [np.where(self.reached[place], of_name[PRIORS[place].name], still) for place in np.flatnonzero(own)]
        )

    def weights(self, used: Array) -> Array:
        """Each source weighs as the square root of its runs."""
        counts = Counter(self.sources[used])
        each = np.array([counts[s] ** -0.5 if counts[s] else 0.0 for s in self.sources]) * used
        return each * used.sum() / each.sum()

    def solve(self, used: Array | None = None, x: Array | None = None) -> Array:
        """The constants of the jobs that are ``used``: a host's on steps of one process, others on all but the probes'.

        Twice, as a few jobs of clusters wait for their hosts.
        """
        used = np.ones(len(self.jobs), dtype=bool) if used is None else used
        x = self.start if x is None else x
        for _ in range(2):
            x = self._descend(~self.of_host, used & ~self.probes, x)
            x = self._descend(self.of_host, used & self.alone, x)
        return x

    def _descend(self, own: Array, used: Array, x: Array) -> Array:
        """The constants with some of them, ``own``, fitted: damped Gauss-Newton steps on reweighted squares."""
        if not used.any():
            return x
        weights, damping = self.weights(used), 1e-2
        start, spread = self.start[own], self.spread[own]
        cost, r = self._cost(x, weights)
        for _ in range(30):
            jacobian = self._slopes(x, r, own, used)
            w = weights / np.hypot(r, ROUNDING) / TYPICAL
            curvature = (jacobian.T * w) @ jacobian + np.diag(spread**-2.0)
            slope = (jacobian.T * w) @ r + (x[own] - start) / spread**2
            while damping < 1e6:
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope)
                tried = x.copy()
                tried[own] += np.clip(step, -0.5, 0.5)
                new, r_new = self._cost(tried, weights)
                if new < cost:
                    break
                damping *= 4
            else:
                return x
            gain, x, cost, r, damping = cost - new, tried, new, r_new, max(damping / 5, 1e-6)
            if gain < 1e-4:
                return x
        return x

    def _slopes(self, x: Array, r: Array, own: Array, used: Array) -> Array:
        """How the residuals change with each constant of ``own``: jobs by constants."""
        if self.begun is not None and self.begun[0] is x and not (own & self.of_host).any():
            return self.begun[2]
        return (self.moved(x, 1e-4, own, used) - r).T / 1e-4

    def _cost(self, x: Array, weights: Array) -> tuple[float, Array]:
        r = self.begun[1] if self.begun is not None and self.begun[0] is x else self.residuals(x, weights > 0)
        data = float(np.sum(weights * (np.hypot(r, ROUNDING) - ROUNDING))) / TYPICAL
        return data + float(np.sum(((x - self.start) / self.spread) ** 2)) / 2, r

    def left_out(self, groups: Array, x: Array) -> tuple[Array, Array]:
        """Residuals of each group by constants that were fitted without it, and those constants."""
        r, found = np.empty(len(self.jobs)), []
        now = self.residuals(x)
        self.begun = x, now, self._slopes(x, now, ~self.of_host, ~self.probes)
        for group in sorted(set(groups)):
            own = groups == group
            found.append(self.solve(~own, x))
            r[own] = self.residuals(found[-1], own)[own]
        self.begun = None
        return r, np.array(found)


# -------------------------------------------------------------------------------------------- ordering


def ordered(fit: Fit, residuals: Array) -> tuple[tuple[int, int], tuple[int, int]]:
    """Pairs in the right order and pairs in all: of all that compare, and of those that differ in layout alone."""
    right, layout = [], []
    predicted = [job.speed / np.exp(r) for job, r in zip(fit.jobs, residuals, strict=True)]
    for i, a in enumerate(fit.jobs):
        for j, b in enumerate(fit.jobs[:i]):
            if comparable(a, b):
                right.append((predicted[i] > predicted[j]) == (a.speed > b.speed))
                layout += [right[-1]] if layout_only(a, b) else []
    return (int(sum(right)), len(right)), (int(sum(layout)), len(layout))


# -------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True)
class Fitted:
    """A finished fit."""

    fit: Fit
    x: Array
    """The constants."""
    crossed: Array
    """Residuals of each run by constants fitted without its source."""
    refits: Array
    """Those constants."""
    experts: Fit
    """Mixtures of experts, none of which was fitted on."""
    left: Counter[str]


def fitted() -> Fitted:
    """Fit everything."""
    kept, experts, left = jobs((*read_runs().run, *layout_runs()))
    fit = Fit(kept)
    x = fit.solve()
    crossed, refits = fit.left_out(fit.sources, x)
    return Fitted(fit, x, crossed, refits, Fit(experts), left)


def residuals_of_experts(found: Fitted) -> Array:
    """Residuals of mixtures of experts by constants that no such run was fitted for; a source left out all the same."""
    names = sorted(set(found.fit.sources))
    r = found.experts.residuals(found.x)
    for name, x in zip(names, found.refits, strict=True):
        own = found.experts.sources == name
        r[own] = found.experts.residuals(x)[own]
    return r


def shipped() -> Array:
    """The constants of presets/step_time.json."""
    table = catalog.step_time()
    return np.array([_raised(replace(prior, value=table.value(prior.name, prior.of))) for prior in PRIORS])


MOVES = 0.01
"""A constant moves a run whose step changes by this part of the change of the constant, both as logarithms."""


def moved(found: Fitted) -> list[tuple[int, int]]:
    """Runs and sources that each constant of :data:`PRIORS` moves."""
    r, step = found.fit.residuals(found.x), 1e-3
    hits = np.abs(found.fit.moved(found.x, step) - r) / step >= MOVES
    return [(int(hit.sum()), len(set(found.fit.sources[hit]))) for hit in hits]


def expected(prior: Prior) -> dict[str, float]:
    """What was expected of a constant, and 19 of 20 cases of it."""
    raised, spread = _raised(prior), 2 * prior.spread
    ends = (_lowered(prior.name, raised - spread), _lowered(prior.name, raised + spread))
    return dict(zip(("prior", "prior_low", "prior_high"), (prior.value, *ends), strict=True))


def constants(found: Fitted) -> list[str]:
    """The constants as TOML."""
    parts = []
    for prior, x, refits, (runs, sources) in zip(PRIORS, found.x, found.refits.T, moved(found), strict=True):
        ends = sorted(_lowered(prior.name, each) for each in refits)
        known = (
            replace(prior, source="; ".join(["a prior: no run moves it", *prior.source.split("; ")[1:]]))
            if not runs
            else prior
        )
        before = {name: float(f"{each:.4g}") for name, each in expected(prior).items()}
        parts.append(_constant(known, _lowered(prior.name, x), ends[0], ends[-1], **before, runs=runs, sources=sources))
    parts += [_constant(prior, *(3 * (prior.value,))) for prior in GIVEN]
    parts += [row for name in BESTS for row in _of_card(name, found)]
    for name in ("matmul", "attention"):
        values = [(v, p) for v, p in zip(found.x, PRIORS, strict=True) if p.name == name]
        each = [_lowered(name, v) for v, _ in values]
        middle = Prior(name, "any", 0, 0, "-", "the median of the architectures")
        parts.append(_constant(middle, float(np.median(each)), min(each), max(each)))
    return parts


def _of_card(name: str, found: Fitted) -> Iterator[str]:
    """Rates of a card that none is fitted on: Ampere's, as its best product compares with that of an A100."""
    best, cards = BESTS[name]
    share = best / catalog.gpu(name).peak_flops["bf16"]
    ratio = share / (REFERENCE_BEST / catalog.gpu(REFERENCE).peak_flops["bf16"])
    many = f"the median of {cards} cards" if cards > 1 else "one card"
    source = f"Ampere's, times best product over that of an A100: {many}, {BEST_SOURCES.get(name, BEST_SOURCE)}"
    for place, prior in enumerate(PRIORS):
        if prior.of == "Ampere" and prior.name in ("matmul", "attention"):
            ends = sorted(_lowered(prior.name, each) for each in found.refits.T[place])
            values = [ratio * each for each in (_lowered(prior.name, found.x[place]), ends[0], ends[-1])]
            yield _constant(replace(prior, of=name, source=source), *values)


def _constant(of: Prior, value: float, low: float, high: float, **more: float) -> str:
    ends = {name: float(f"{each:.4g}") for name, each in (("value", value), ("low", low), ("high", high))}
    return table("constant", name=of.name, of=of.of, unit=of.unit, **ends, source=of.source, **more)


def samples(found: Fitted, made: Sequence[str]) -> list[Sample]:
    """What ranges are made of: every run by what was fitted without its source; ``made`` is the constants as TOML."""
    pairs = ((found.fit.jobs, found.crossed), (found.experts.jobs, residuals_of_experts(found)))
    known = StepTimeTable.model_validate({**tomllib.loads("\n".join(made)), "span": (), "gpus": {}})
    old = [Sample(job, -float(r)) for jobs, each in pairs for job, r in zip(jobs, each, strict=True)]
    return old + unfitted(known)


def errors(found: Fitted) -> Iterator[str]:
    """The errors by source as TOML, then those of all that are published: the probes' own are told apart."""
    r, every = found.fit.residuals(found.x), ~found.fit.probes
    for name in (*sorted(set(found.fit.sources)), "all"):
        own = every if name == "all" else found.fit.sources == name
        ends = [
            float(np.quantile(np.abs(np.expm1(e[own])), q).round(4)) for e in (r, found.crossed) for q in (0.5, 0.9)
        ]
        names = ("median", "p90", "crossed_median", "crossed_p90")
        yield table("error", name=name, runs=int(own.sum()), **dict(zip(names, ends, strict=True)))


def errors_of_experts(found: Fitted) -> Iterator[str]:
    """The errors of mixtures of experts by source as TOML, then those of all; none was fitted on."""
    r, fit = residuals_of_experts(found), found.experts
    for name in (*sorted(set(fit.sources)), "all"):
        own = np.ones(len(r), dtype=bool) if name == "all" else fit.sources == name
        errors = np.expm1(r[own])
        sizes = [float(np.quantile(np.abs(errors), q).round(4)) for q in (0.5, 0.9)]
        middle = float(np.median(errors).round(4))
        yield table("experts", name=name, runs=int(own.sum()), median=sizes[0], p90=sizes[1], bias=middle)


def orders(found: Fitted) -> Iterator[str]:
    """Pairs in the right order as TOML."""
    fresh, crossed = (ordered(found.fit, r) for r in (found.fit.residuals(found.x), found.crossed))
    for name, own, other in zip(("all pairs", "layout alone"), fresh, crossed, strict=True):
        yield table("order", name=name, pairs=own[1], right=own[0], crossed_right=other[0])


def sweeps(found: Fitted) -> Iterator[str]:
    """How the layouts of each published sweep are put in order by constants fitted without its source, as TOML."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for index, job in enumerate(found.fit.jobs):
        if job.run.sweep:
            rows.setdefault((job.source, job.run.sweep, job.run.software), []).append(index)
    measured = found.fit.measured
    predicted = measured * np.exp(found.crossed)
    by_source: dict[str, list[Order]] = {}
    for (source, *_), own in rows.items():
        if len(own) >= LEAST:
            by_source.setdefault(source, []).append(Order.of(measured[own], predicted[own]))
    for name, orders_of in by_source.items():
        yield table(
            "sweeps",
            name=name,
            sweeps=len(orders_of),
            layouts=sum(order.layouts for order in orders_of),
            pairs=sum(order.pairs for order in orders_of),
            right=sum(order.right for order in orders_of),
            regret=round(float(np.mean([order.regret for order in orders_of])), 4),
            first=sum(order.place <= FIRST for order in orders_of),
        )


def text(found: Fitted) -> str:
    """The text of presets/step_time.json."""
    counts = Counter(found.fit.gpus)
    left = [table("left_out", runs=count, reason=reason) for reason, count in sorted(found.left.items())]
    gpus = [f"{name} = {counts[name]}" for name in sorted(counts)]
    made = constants(found)
    parts = [
        *made,
        *Ranges(samples(found, made)).tables(),
        *errors(found),
        *errors_of_experts(found),
        *orders(found),
        *sweeps(found),
        *left,
    ]
    rows = tomllib.loads("\n".join([*parts, "[gpus]", *gpus]))
    return json.dumps({"written_by": WRITTEN_BY, **rows}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(fitted()))
