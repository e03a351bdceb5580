"""The rates of one GPU in one cluster: its peaks and links, and the fractions of them that published runs reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from memcalc import catalog
from memcalc.errors import MissingError
from memcalc.grid import column
from memcalc.terms.moments import kind_of
from memcalc.terms.settings import COMPILED_BLOCKS

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.frameworks.float8 import Recipe
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.step_time import StepTimeTable

SLOWEST_LINK = 16e9
"""Of a GPU whose preset has no link [bytes/s]: PCIe 3.0 x16."""
SLOWEST_NETWORK = 12.5e9
"""Of a node whose preset has no network [bytes/s a GPU]: one port of 100 Gb/s."""
ANY = "any"
"""What a constant speaks of where nothing closer is known."""
VIRTUAL = "virtual machine"
"""Where the probe's suite ran: it launches half as fast as the host of Qwen's A100, on which nothing is fitted."""


GRAPHS = {"none": 1.0, "partial": 0.5, "full": 0.1}
"""Share of the host's time that is left with CUDA graphs; assumed, since no public run states them."""
FLASH = {1: 0.5, 2: 1.0, 3: 1.6}
"""Rate of each generation of FlashAttention over the second's: "around 2x" from 1 to 2 (arXiv:2307.08691, abstract);
from 2 to 3, on Hopper, 1.5 to 2 times in forward and 1.5 to 1.75 in backward (arXiv:2407.08608, section 4.1); of the
third no run is known."""
PADDED = 0.4
"""Share of a dropless block's wait that is left where experts are padded to a capacity, so that the host knows their
rows (Megatron-LM d98e8a64 ``core/transformer/moe/token_dispatcher.py``: ``drop_and_pad``); no run isolates it.
The value is of a fit in which published layouts with such experts took part: of them it is no forecast."""
WARP_WIDE = ("8", "12")
"""Major compute capabilities whose matrix units are driven by ``mma.sync`` alone, so that cuBLAS and FlashAttention run
Ampere's kernels on them (flash-attention 2.8 ``csrc/flash_attn/src``: ``flash_fwd_*_sm80.cu`` for 8.x and 12.x)."""
SINGLE = (
    "exposed_tensor",
    "exposed_exchange",
    "wait",
    "launch_backward",
    "dispatch",
    "visit",
    "relaunch",
    "hook",
    "loop",
    "operand_passes",
    "latency",
    "latency_between",
    "call",
    "hidden",
    "hidden_between",
    "fixed",
    "casts",
    "broadcast",
    "dequantisation",
)
"""Constants with one value for all."""


class Constants(Protocol):
    """Constants of the step-time model by name."""

    def value(self, name: str, *of: str) -> float:
        """The value of the first of the things named that has one of its own."""


class Hardware(NamedTuple):
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
    adapters: float | Array
    """Network adapters that each GPU of the node has, at most 1 [-]."""


class Rates(NamedTuple):
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
    """Host time of a kernel that Python launches [s]."""
    launch_backward: float | Array
    """Share of that which a kernel takes that the engine of autograd launches [-]."""
    dispatch: float | Array
    """What an operator takes more that passes a mode in Python, over that [-]."""
    hook: float | Array
    """What the hooks around one pass of a module take, over a launch in forward [-]."""
    relaunch: float | Array
    """What a launch takes where a checkpoint computes again, over one in forward [-]."""
    visit: float | Array
    """What an update of one tensor takes where one follows the other, over a launch in forward [-]."""
    loop: float | Array
    """What a step of one process takes beside its launches, over one [-]."""
    step_passes: float | Array
    """Traffic of the optimizer step over the bytes that it must move [-]."""
    inside: float | Array
    """Share of the link within a node that collectives reach [-]."""
    between: float | Array
    """Share of the network between nodes [-]."""
    latency: float | Array
    """Of a collective, for each rank of its group [s]."""
    latency_between: float | Array
    """The same where the group spans nodes [s]."""
    call: float | Array
    """Of a collective, whatever its ranks [s]."""
    inside_tensor: float | Array
    """Share of the link that messages reach which kernels wait for [-]."""
    between_tensor: float | Array
    """Share of the network that they reach [-]."""
    exposed_tensor: float | Array
    """Share of tensor-parallel messages that split products do not hide [-]."""
    exchange_inside: float | Array
    """Share of the link in the node that tokens reach on their way to experts [-]."""
    exchange_between: float | Array
    """Share of the rank's own network adapter that they reach [-]."""
    exchange_call: float | Array
    """Of one exchange of tokens, whatever it sends [s]."""
    exposed_exchange: float | Array
    """Share of it that another micro-batch's computation does not hide [-]."""
    wait: float | Array
    """What a block of routed experts waits for the numbers of tokens on their way [s]."""
    hidden: float | Array
    """Share of hidden traffic's time by which it slows the kernels beside it [-]."""
    hidden_between: float | Array
    """The same of traffic over ranks of several nodes, with an adapter a GPU [-]."""
    window: float | Array
    """Share of a pass of one micro-batch that a step's traffic may hide behind [-]."""
    broadcast: float | Array
    """Of one rank's broadcast of its updated weights [s]."""
    fixed: float | Array
    """Time of a step of several processes for clipping, data and the loop itself [s]."""
    dequantisation: float | Array
    """Share of the memory's bandwidth that dequantisation reaches [-]."""
    casts: float | Array
    """Traffic of 8-bit products with their casts over that of 16-bit ones [-]."""
    float8: float | Array
    """Share of the 16-bit products' fraction that 8-bit ones reach [-]."""


def table_for(gpu: GPU) -> StepTimeTable:
    """The constants that hold for a GPU: those measured on it before those shipped."""
    table, known = catalog.step_time(), gpu.calibration
    if known is None or not known.constant:
        return table
    return table.with_measured(known.constant, max(row.rows for row in known.constant))


def rates_for(gpu: GPU, grid: Grid) -> Rates:
    """The fractions that hold for a GPU and for what all strategies of a grid share."""
    return rates_by(table_for(gpu), gpu, grid)


def rates_by(table: Constants, gpu: GPU, grid: Grid) -> Rates:
    """The same by given constants."""
    scopes = scopes_of(gpu, grid)
    value: dict[str, Any] = {name: table.value(name, *of) for name, of in scopes.items()}
    value |= {name: value[name] * factor for name, factor in factors_of(gpu, grid).items()} | given_by(grid)
    float8 = value.pop("float8")
    value["attention"] *= attention_share(grid.fixed.seq_len, value.pop("attention_half"))
    narrow = column([name.startswith("fp8") for name in grid.precisions], "precision")
    value |= {"float8": np.where(narrow, float8, 1.0), "casts": 1.0 + narrow * value["casts"]}
    return Rates(**value)


def factors_of(gpu: GPU, grid: Grid) -> dict[str, Any]:
    """What the stack makes of some constants."""
    graphs, flash = GRAPHS[grid.fixed.cuda_graphs], grid.fixed.flash_version
    return {
        "window": overlaps(grid),
        "launch": graphs,
        "call": graphs if grid.fixed.cuda_graphs == "full" else 1.0,  # the graph of an iteration has its collectives
        "wait": graphs * (PADDED if grid.fixed.experts_padded else 1.0),
        "visit": float(grid.fixed.optimizer_impl == "loop" or kind_of(grid).waits),
        "attention": FLASH[flash if gpu.arch.split()[0] == "Hopper" else min(flash, 2)],
    }


def kernel_arch(gpu: GPU) -> str:
    """The architecture whose products a GPU runs."""
    wide = str(gpu.compute_capability).partition(".")[0] in WARP_WIDE
    return "Ampere" if wide else gpu.arch.split()[0]


def overlaps(grid: Grid) -> Array:
    """1 where a step's reductions run beside backward; DeepSpeed's stages 1 and 2 do so where they are asked to."""
    zero, engine = grid.zero, grid.habits.zero_optimizer
    able: Array = np.full(zero.shape, grid.habits.overlaps_reduction, dtype=np.int64)
    if engine is None or grid.fixed.overlap_comm is not None:
        return able * int(grid.fixed.overlap_comm is not False)
    return able * (zero >= engine.overlap_from)


GIVEN = ("exposed_tensor", "exposed_exchange", "casts", "launch_backward")
"""Constants that some stacks give themselves."""


def given_by(grid: Grid) -> dict[str, float]:
    """Constants that the stack gives: all of a message is exposed where nothing overlaps it.

    TransformerEngine's quantised operands are tensors of a block, and written with all others; its products read them.
    Layers with fused adapters are functions in Python, backward too (unsloth 0050c73e ``unsloth/kernels/fast_lora.py``;
    axolotl 067b021c ``src/axolotl/kernels/lora.py``).
    """
    overlapped = {"exposed_tensor": grid.fixed.tp_comm_overlap, "exposed_exchange": grid.fixed.ep_overlap}
    given = {name: 1.0 for name, hides in overlapped.items() if not hides}
    if grid.fixed.lora_kernels == "fused":
        given["launch_backward"] = 1.0
    return given if grid.recipe is None else given | {"casts": grid.recipe.operand_share - 1}


def scopes_of(gpu: GPU, grid: Grid) -> dict[str, tuple[str, ...]]:
    """What each constant is looked up by for a GPU and a stack of kernels, the closest first."""
    arch, kernels = gpu.arch.split()[0], kernels_of(grid)
    engine = "TransformerEngine" if kernels == "te" else "PyTorch"
    dispatcher = grid.fixed.moe_dispatcher
    waits = "Megatron" if grid.habits.overlaps_input_gradients else "PyTorch"
    library = attention_library(grid)
    return {
        **dict.fromkeys(SINGLE, (ANY,)),
        "matmul": (gpu.name, f"{arch}, {engine}", kernel_arch(gpu), ANY),
        "attention": (gpu.name, f"{gpu.name}, {library}", f"{arch}, {library}", kernel_arch(gpu), ANY),
        "attention_half": (ANY,),
        "fixed": ("graph", ANY) if grid.fixed.cuda_graphs == "full" else (ANY,),
        "passes": (kernels,),
        "launch": (kernels, ANY),
        "step_passes": ("fused" if grid.fixed.optimizer_impl == "fused" else "foreach",),
        "inside": (ANY,),
        "between": (ANY,),
        "inside_tensor": (f"{arch}, {waits}", arch, ANY),
        "between_tensor": (ANY,),
        "window": (ANY,),
        "exchange_inside": (f"{dispatcher}, {arch}", dispatcher),
        "exchange_between": (dispatcher,),
        "exchange_call": (dispatcher,),
        "float8": tuple(name for kind in _float8_kind(grid) for name in (f"{kind}, {arch}", kind)),
    }


def attention_library(grid: Grid) -> str:
    """Whose kernel computes fused attention."""
    usual = grid.habits.attention_library
    return "cuDNN" if grid.fixed.attention == "cudnn" else "FlashAttention" if usual in ("", "te") else usual


def attention_share(seq_len: float | Array, half: float | Array) -> Any:
    """Share of its rate that fused attention reaches on short sequences: tiles on the diagonal are half empty."""
    return seq_len / (seq_len + half)


def _float8_kind(grid: Grid) -> tuple[str, ...]:
    if grid.recipe is not None:
        return (grid.recipe.scope,)
    return (grid.fixed.float8 if grid.fixed.float8 in {"tensorwise", "mxfp8"} else "rowwise",)


def kernels_of(grid: Grid) -> str:
    """How elementwise work runs: compiled, in fused kernels, in TransformerEngine's, or operator by operator."""
    if grid.fixed.compile in COMPILED_BLOCKS:
        return "compiled"
    return "fused" if grid.fixed.kernels == "te" and not grid.habits.engine else grid.fixed.kernels


STACKS = {
    "model": "operators one by one",
    "fused": "fused kernels",
    "compiled": "compiled blocks",
    "te": "TransformerEngine",
}
"""What kinds of kernels are called where ranges of times are told."""


def hardware_of(gpu: GPU, node: Node, grid: Grid) -> Hardware:
    """The data sheet's figures for a grid's precisions."""
    peaks = column([peak_flops(gpu, name, grid.recipe) for name in grid.precisions], "precision", dtype=float)
    half = gpu.peak_flops.get("bf16") or gpu.peak_flops.get("fp16")
    link, network = links(gpu, node)
    return Hardware(
        peak=peaks,
        plain_peak=peaks if half is None else np.minimum(peaks, half),
        vector_peak=gpu.peak_flops.get("fp32") or float(peaks.min()),
        bandwidth=gpu.bandwidth_bytes_per_s,
        inside=link,
        between=network,
        adapters=min(1.0, (node.adapters or node.gpus) / node.gpus),
    )


def peak_flops(gpu: GPU, precision: str, recipe: Recipe | None = None) -> float:
    """Dense peak of the dtype in which a precision multiplies [FLOP/s]; an error where the preset has none.

    Of a GPU whose 4-bit peak is not known the 8-bit one counts.
    """
    peaks: dict[str, float] = {str(dtype): peak for dtype, peak in gpu.peak_flops.items()}
    dtype = precision.split("-", maxsplit=1)[0]
    if recipe is not None and dtype == "fp8" and recipe.dtype in peaks:
        dtype = recipe.dtype
    if dtype not in peaks:
        raise MissingError(
            f"no {dtype} peak of {gpu.name} is known, which the time of {precision} needs: give a preset."
        )
    return peaks[dtype]


def links(gpu: GPU, node: Node) -> tuple[float, float]:
    """Rates of one GPU's link within the node and of its share of the network, one direction [bytes/s]."""
    inside = node.intra_link_bytes_per_s or gpu.peer_link_bytes_per_s or SLOWEST_LINK
    return inside, node.internode_bytes_per_s_per_gpu or SLOWEST_NETWORK
