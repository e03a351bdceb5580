"""The rates of one GPU in one cluster: its peaks and links, and the fractions of them that published runs reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from memcalc import catalog
from memcalc.errors import MissingError
from memcalc.grid import column
from memcalc.terms.settings import COMPILED_BLOCKS

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.step_time import StepTimeTable

SLOWEST_LINK = 16e9
"""Of a GPU whose preset has no link [bytes/s]: PCIe 3.0 x16."""
SLOWEST_NETWORK = 12.5e9
"""Of a node whose preset has no network [bytes/s a GPU]: one port of 100 Gb/s."""
ANY = "any"
"""What a constant speaks of where nothing closer is known."""


class Constants(Protocol):
    """Constants of the step-time model by name."""

    def value(self, name: str, *of: str) -> float:
        """The value of the first of the things named that has one of its own."""


@dataclass(frozen=True)
class Hardware:
    """The figures of the data sheets: numbers, or columns over precision or runs."""

    peak: float | Array
    """Dense peak of the precision [FLOP/s]."""
    plain_peak: float | Array
    """That of products which stay in 16 bits where the precision is narrower [FLOP/s]."""
    vector_peak: float | Array
    """That of the vector units in fp32 [FLOP/s]."""
    bandwidth: float | Array
    """Of the GPU's memory [bytes/s]."""
    inside: float | Array
    """Link of one GPU within the node, one direction [bytes/s]."""
    between: float | Array
    """Its share of the node's network, one direction [bytes/s]."""


@dataclass(frozen=True)
class Rates:
    """Fractions of those figures, and latencies: each a number, or a column over precision or runs."""

    matmul: float | Array
    """Share of the dense peak that large matrix products reach [-]."""
    attention: float | Array
    """Share that fused attention reaches [-]."""
    operand_passes: float | Array
    """Traffic of matrix products over their compulsory operand bytes [-]."""
    passes: float | Array
    """Traffic of all other kernels over the bytes that they write [-]."""
    launch: float | Array
    """Host time of one kernel [s]."""
    step_passes: float | Array
    """Traffic of the optimizer step over the bytes that it must move [-]."""
    inside: float | Array
    """Share of the link within a node that collectives reach [-]."""
    between: float | Array
    """Share of the network between nodes [-]."""
    latency: float | Array
    """Of a collective, for each rank of its group [s]."""
    overlap: float | Array
    """Share of the sharding traffic that compute can hide [-]."""
    overlap_step: float | Array
    """Share of the reduction of a step's gradients that compute can hide [-]."""
    float8: float | Array
    """Share of the 16-bit products' fraction that 8-bit ones reach [-]."""
    blocking: float | Array = 0.0
    """1 where the host waits for each kernel (``CUDA_LAUNCH_BLOCKING=1``) [-]."""


def table_for(gpu: GPU) -> StepTimeTable:
    """The constants that hold for a GPU: those measured on it before those shipped."""
    table, known = catalog.step_time(), gpu.calibration
    if known is None or not known.constant:
        return table
    return table.with_measured(gpu.name, known.constant, max(row.rows for row in known.constant))


def rates_for(gpu: GPU, grid: Grid) -> Rates:
    """The fractions that hold for a GPU and for what all strategies of a grid share."""
    return rates_by(table_for(gpu), gpu, grid)


def rates_by(table: Constants, gpu: GPU, grid: Grid) -> Rates:
    """The same by given constants."""
    fixed = grid.fixed
    values = {name: table.value(name, ANY) for name in ("operand_passes", "launch", "inside", "between", "latency")}
    return Rates(
        matmul=table.value("matmul", gpu.name, gpu.arch.split()[0], ANY),
        attention=table.value("attention", gpu.name, gpu.arch.split()[0], ANY),
        passes=table.value("passes", kernels_of(grid)),
        step_passes=table.value("step_passes", "fused" if fixed.optimizer_impl == "fused" else "foreach"),
        overlap=table.value("overlap", ANY),
        overlap_step=table.value("overlap_step", ANY) * grid.habits.overlaps_reduction,
        float8=_float8(table, grid),
        **values,
    )


def kernels_of(grid: Grid) -> str:
    """How elementwise work runs: compiled, in fused kernels, or operator by operator."""
    if grid.fixed.compile in COMPILED_BLOCKS:
        return "compiled"
    return "model" if grid.fixed.kernels == "model" else "fused"


def _float8(table: Constants, grid: Grid) -> Array:
    """By precision: 1 for products in 16 bits and more."""
    share = table.value("float8", "tensorwise" if grid.fixed.float8 == "tensorwise" else "rowwise")
    return column([share if name.startswith("fp8") else 1.0 for name in grid.precisions], "precision", dtype=float)


def hardware_of(gpu: GPU, node: Node, grid: Grid) -> Hardware:
    """The data sheet's figures for a grid's precisions."""
    peaks = column([peak_flops(gpu, name) for name in grid.precisions], "precision", dtype=float)
    half = gpu.peak_flops.get("bf16") or gpu.peak_flops.get("fp16")
    link, network = links(gpu, node)
    return Hardware(
        peak=peaks,
        plain_peak=peaks if half is None else np.minimum(peaks, half),
        vector_peak=gpu.peak_flops.get("fp32") or float(peaks.min()),
        bandwidth=gpu.bandwidth_bytes_per_s,
        inside=link,
        between=network,
    )


def peak_flops(gpu: GPU, precision: str) -> float:
    """Dense peak of the dtype in which a precision multiplies [FLOP/s]; an error where the preset has none."""
    peaks: dict[str, float] = {str(dtype): peak for dtype, peak in gpu.peak_flops.items()}
    dtype = precision.split("-", maxsplit=1)[0]
    if dtype not in peaks:
        raise MissingError(
            f"no {dtype} peak of {gpu.name} is known, which the time of {precision} needs: give a preset."
        )
    return peaks[dtype]


def links(gpu: GPU, node: Node) -> tuple[float, float]:
    """Rates of one GPU's link within the node and of its share of the network, one direction [bytes/s]."""
    inside = node.intra_link_bytes_per_s or gpu.peer_link_bytes_per_s or SLOWEST_LINK
    return inside, node.internode_bytes_per_s_per_gpu or SLOWEST_NETWORK
