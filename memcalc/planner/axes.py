"""From a checked request to a grid: what was given is pinned, the rest is searched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError
from memcalc.frameworks import Habits
from memcalc.grid import Fixed, Grid, Layout, check_layout, check_split, layouts_for
from memcalc.planner import pipelines as pipes
from memcalc.planner import request as rq
from memcalc.planner.adapters import adapter_fields

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

RECOMPUTES = (
    "none",
    "selective-core-attn",
    "selective-ops",
    "attention",
    "mlp",
    "every-4",
    "every-2",
    "sqrt",
    "uniform-2",
    "full",
)
"""Policies that a search tries, the cheapest first."""
OFFLOADS: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer",),
    ("params",),
    ("activations",),
    ("optimizer", "activations"),
    ("params", "activations"),
)
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def fixed_part(
    request: Request, habits: Habits, model: Model, gpu: GPU, precisions: list[str], micro_steps: int
) -> Fixed:
    """What all strategies of the request share."""
    seq_len = rq.sequence_length(request, model)
    return Fixed(
        framework=request.given.get("framework", habits.name),
        seq_len=seq_len,
        global_batch=rq.batch_of(request, seq_len, micro_steps),
        optimizer=request.get("optimizer", "adamw"),
        optimizer_impl=request.get("optimizer_impl", habits.optimizer_impl),
        optimizer_in_backward=bool(request.given.get("optimizer_in_backward", False)),
        attention=rq.attention_for(request, habits, model, gpu, precisions, seq_len),
        loss=str(request.get("loss", "standard")),
        kernels=request.get("kernels", habits.kernels),
        offload_to=request.given.get("offload_to", "cpu"),
        compile=request.given.get("compile", "none"),
        cp_kind=request.given.get("cp_kind", "ring"),
        **adapter_fields(request, model, habits, precisions),
        **{"expandable_segments": habits.expandable_segments and gpu.vendor == "nvidia", **request.given["fields"]},
    )


def check_fsdp(fixed: Fixed, precision: str, zero: int) -> None:
    """Refuse fields of FSDP that contradict the precision or the sharding stage."""
    if (fixed.float8 or fixed.float8_all_gather) and precision != "fp8-mixed":
        name = "strategy.float8" if fixed.float8 else "strategy.float8_all_gather"
        raise CombinationError(name, fixed.float8 or True, f"needs precision fp8-mixed, not {precision}")
    if (fixed.reshard == "never") != (zero == 2) and fixed.reshard != "default":
        stage = 2 if fixed.reshard == "never" else 3
        raise CombinationError("strategy.reshard", fixed.reshard, f"is zero {stage}, not {zero}")


def one_strategy(request: Request, model: Model, gpu: GPU, node: Node) -> Grid:
    """The grid of the one strategy of ``estimate``: every default resolved, every impossibility refused."""
    _, habits = rq.habits_for(request)
    rq.check_framework(request, habits)
    rq.check_offload(request, habits, node)
    zero = int(request.get("zero", rq.zero_stages(request, habits)[0]))
    precision = str(request.get("precision", rq.precisions_for(gpu, habits, zero)[0]))
    rq.check_precision(precision, gpu, habits, zero)
    layout = one_layout(request, habits)
    micro_batch = int(request.get("micro_batch", 1))
    fixed = fixed_part(request, habits, model, gpu, [precision], layout.dp * micro_batch)
    check_layout(model, layout, fixed.seq_len, fixed.etp)
    check_split(model, fixed, layout.pp)
    pipes.check_chunks(model, fixed, layout, habits)
    check_fsdp(fixed, precision, zero)
    if fixed.global_batch % (layout.dp * micro_batch):
        product = f"{micro_batch} x {layout.dp} = {layout.dp * micro_batch}"
        allowed = f"micro-batch x data-parallel ranks = {product} must divide it"
        raise CombinationError("global-batch", fixed.global_batch, allowed)
    if fixed.optimizer_in_backward and fixed.global_batch > layout.dp * micro_batch:
        raise CombinationError(
            "optimizer-in-backward",
            True,
            f"gradients cannot accumulate, so global-batch must be {layout.dp * micro_batch}",
        )
    grid = Grid(
        fixed,
        (layout,),
        (precision,),
        (request.get("recompute", "none"),),
        (zero,),
        (request.given.get("offload", ()),),
        (micro_batch,),
        every_stage=True,
    )
    pipes.check_rounds(grid)
    return grid


def one_layout(request: Request, habits: Habits) -> Layout:
    """The layout that the degrees leave for data parallelism."""
    tp, pp, cp, ep = (request.given.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    ranks = tp * pp * cp
    gpus = int(request.get("gpus", ranks))
    if gpus % ranks:
        raise CombinationError("gpus", gpus, f"must be a multiple of tp x pp x cp = {ranks}")
    if str(request.given.get("framework")).partition("@")[0] == "plain" and gpus > 1:
        raise CombinationError("gpus", gpus, "plain trains on one GPU; use ddp, fsdp2, deepspeed or megatron")
    sp = _sequence(request, habits)
    schedule, chunks = pipes.one_pipeline(request, habits)
    return Layout(gpus // ranks, tp, tp > 1 if sp is None else sp, pp, cp, ep, schedule, chunks)


def _sequence(request: Request, habits: Habits) -> bool | None:
    """Sequence parallelism as told, off where the framework lacks it, or None where it follows TP."""
    return False if "sp" in habits.lacks else request.given.get("sp")


def space(request: Request, model: Model, gpu: GPU, node: Node, gpus: int) -> Grid | None:
    """The grid of everything that the request leaves open on a number of GPUs, or None where no layout is legal."""
    _, habits = rq.habits_for(request)
    rq.check_framework(request, habits)
    rq.check_offload(request, habits, node)
    able = [name for name in rq.precisions_for(gpu, habits) if name != "fp32" or not rq.grouped(model)]
    precisions = _open(request, "precision", able, "searched: {}")
    for precision in precisions:
        rq.check_precision(precision, gpu, habits, request.given.get("zero", 3))
    fixed = fixed_part(request, habits, model, gpu, precisions, gpus)
    degrees = [_degrees(request, name, gpus, node, habits) for name in ("tp", "pp", "cp", "ep")]
    pipelines = pipes.pipelines_for(request, habits)
    layouts = layouts_for(model, gpus, degrees, fixed.seq_len, sp=_sequence(request, habits), pipelines=pipelines)
    fitting = [layout for layout in layouts if pipes.can_part(model, fixed, layout, habits)]
    if layouts and not fitting:
        pipes.check_chunks(model, fixed, layouts[0], habits)
    micro = [
        m for m in MICRO_BATCHES if fixed.global_batch % m == 0 and m * max(gpus // node.gpus, 1) <= fixed.global_batch
    ]
    if not fitting:
        return None
    return Grid(
        fixed,
        tuple(fitting),
        tuple(precisions),
        tuple(_open(request, "recompute", list(RECOMPUTES))),
        tuple(_open(request, "zero", list(rq.zero_stages(request, habits)))),
        tuple(_open(request, "offload", [choice for choice in OFFLOADS if "params" not in choice or 3 in habits.zero])),
        tuple(_open(request, "micro_batch", micro or [1])),
        model_groups=tuple(group.count for group in model.groups),
    )


def _open(request: Request, name: str, values: list[Any], said: str = "") -> list[Any]:
    """The pinned value, or all that a search tries."""
    if request.given.get(name) is not None:
        return [request.given[name]]
    if said:
        request.assumptions[name] = said.format(", ".join(map(str, values)))
    return values


def _degrees(request: Request, name: str, gpus: int, node: Node, habits: Habits) -> list[int]:
    """Pinned, or for TP the powers of two within a node; PP, CP and EP are searched only when pinned."""
    if request.given.get(name) is not None:
        return [request.given[name]]
    if name != "tp" or not habits.tensor_parallel or habits.lacks or request.given.get("lora"):
        return [1]
    return [1 << k for k in range(min(gpus, node.gpus).bit_length())]
