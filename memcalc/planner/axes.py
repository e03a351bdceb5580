"""From a checked request to a grid: what was given is pinned, the rest is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from memcalc.errors import CombinationError, InputError
from memcalc.frameworks import Habits
from memcalc.grid import Fixed, Grid, Layout
from memcalc.layouts import check_layout, check_split, layouts_for
from memcalc.planner import pipelines as pipes
from memcalc.planner import request as rq
from memcalc.planner.adapters import adapter_fields
from memcalc.planner.recorded import policies_for, recorded_precisions
from memcalc.planner.request import Request
from memcalc.specs import strategy as words

if TYPE_CHECKING:
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

OFFLOADS: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer",),
    ("params",),
    ("activations",),
    ("optimizer", "activations"),
    ("params", "activations"),
)
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DEGREES = ("tp", "pp", "cp", "ep")
"""Of these, what is possible depends on the number of GPUs, so that one of several may leave nothing."""
SHORTEST_PART = 1024
"""Tokens a rank below which a search does not cut sequences by itself."""


def fixed_part(
    request: Request, habits: Habits, model: Model, gpu: GPU, precisions: list[str], micro_steps: int
) -> Fixed:
    """What all strategies of the request share."""
    seq_len = rq.sequence_length(request, model)

    def recorded(said: str) -> str:
        return "" if model.recording is None else said

    return Fixed(
        framework=request.given.get("framework", habits.name),
        seq_len=seq_len,
        global_batch=rq.batch_of(request, seq_len, micro_steps),
        optimizer=request.get("optimizer", "adamw"),
        optimizer_impl=request.get("optimizer_impl", habits.optimizer_impl),
        optimizer_in_backward=bool(request.given.get("optimizer_in_backward", False)),
        attention=rq.attention_for(request, habits, model, gpu, precisions, seq_len),
        loss=str(request.get("loss", "standard", recorded("as the module computes it"))),
        kernels=request.get("kernels", habits.kernels, recorded("as the module calls them")),
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
    check_pinned(request, habits, node)
    zero = int(request.get("zero", rq.zero_stages(request, habits)[0]))
    able = rq.precisions_for(gpu, habits, zero)
    precision = str(request.get("precision", [*recorded_precisions(model, able), *able][0]))
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


def space(request: Request, model: Model, gpu: GPU, node: Node, gpus: int) -> tuple[Grid, ...]:
    """The grids of everything that the request leaves open on a number of GPUs; none where no layout is legal.

    What all strategies of a grid share (optimizer, tier, global batch) makes one grid for each of its values.
    """
    _, habits = rq.habits_for(request)
    for name, value in ((n, v) for n, choice in request.choices.items() for v in choice.listed):
        check_pinned(Request({**request.given, name: value}), habits, node)
    check_pinned(request, habits, node)
    found = []
    for optimizer in _values(request, "optimizer", ["adamw"], get_args(words.Optimizer)):
        tiers = _values(request, "offload_to", ["cpu"], _tiers(node))
        for place, tier in enumerate(tiers):
            for batch in batches(request, model, gpus):
                pinned = {"optimizer": optimizer, "offload_to": tier, "global_batch": batch}
                kept = {name: value for name, value in pinned.items() if value is not None}
                grid = _grid(request, kept, model, gpu, node, gpus, habits)
                if grid is not None:
                    own = tuple(choice for choice in grid.offloads if not repeats(choice, tier, tiers[:place]))
                    found.append(replace(grid, offloads=own))
    return tuple(grid for grid in found if grid.offloads)


def repeats(choice: tuple[str, ...], tier: str, earlier: Sequence[str]) -> bool:
    """Whether an offload is the same on a tier as on one before it.

    Nothing offloaded has no tier, and activations do not leave host memory for NVMe.
    """
    by_host = {"cpu", "nvme"}
    alike = choice == ("activations",) and tier in by_host and bool(by_host & set(earlier))
    return bool(earlier) and (not choice or alike)


def check_pinned(request: Request, habits: Habits, node: Node) -> None:
    """Refuse what the framework or the node does not have."""
    rq.check_framework(request, habits)
    rq.check_offload(request, habits, node)


def batches(request: Request, model: Model, gpus: int) -> list[Any]:
    """Global batches as given, or None for the default; with ``any`` from a quarter of that to eight times it."""
    choice = request.choices.get("global_batch")
    if choice is None:
        return [request.given.get("global_batch")]
    if choice.listed:
        return list(choice.listed)
    seq_len = rq.sequence_length(request, model)
    usual = rq.batch_of(Request({}), seq_len, gpus)
    return [usual * factor // 4 for factor in (1, 2, 4, 8, 16, 32) if usual * factor % 4 == 0]


def _tiers(node: Node) -> list[str]:
    return ["cpu", *(tier.name for tier in node.tiers if tier.name != "host")]


def _grid(
    request: Request, pinned: dict[str, Any], model: Model, gpu: GPU, node: Node, gpus: int, habits: Habits
) -> Grid | None:
    """The grid of one optimizer, tier and global batch."""
    own = Request({**request.given, **pinned}, request.assumptions, request.choices)
    for name in ("optimizer", "offload_to"):
        if name not in request.given and name not in request.choices:
            del own.given[name]
    able = [name for name in rq.precisions_for(gpu, habits) if name != "fp32" or not rq.grouped(model)]
    able = recorded_precisions(model, able)
    precisions = _values(own, "precision", able, list(habits.widths), "searched: {}")
    for precision in precisions:
        rq.check_precision(precision, gpu, habits, own.given.get("zero", 3))
    fixed = fixed_part(own, habits, model, gpu, precisions, gpus)
    layouts = layouts_of(own, model, node, gpus, fixed.seq_len, habits)
    fitting = [layout for layout in layouts if pipes.can_part(model, fixed, layout, habits)]
    if layouts and not fitting:
        pipes.check_chunks(model, fixed, layouts[0], habits)
    if not fitting:
        return None
    sizes = [m for m in MICRO_BATCHES if fixed.global_batch % m == 0]
    every = [m for m in range(1, fixed.global_batch + 1) if fixed.global_batch % m == 0]
    offloads = [choice for choice in OFFLOADS if "params" not in choice or 3 in habits.zero]
    return Grid(
        fixed,
        tuple(fitting),
        tuple(precisions),
        tuple(_values(own, "recompute", policies_for(model, policies(model.num_layers)))),
        tuple(_values(own, "zero", list(rq.zero_stages(own, habits)))),
        tuple(_values(own, "offload", offloads)),
        tuple(_values(own, "micro_batch", sizes or [1], every)),
        model_groups=tuple(group.count for group in model.groups),
    )


def policies(layers: int) -> list[str]:
    """Recompute policies that a search tries, the cheapest first, with the counts that make sense for so many blocks.

    Of ``block-N`` a quarter, a half and three quarters of the blocks: between no block and all of them.
    """
    parts = ["none", "selective-core-attn", "selective-ops", "attention", "mlp"]
    blocks = dict.fromkeys(f"block-{layers * k // 4}" for k in (1, 2, 3) if layers * k // 4)
    some = [f"every-{k}" for k in (8, 4, 3, 2) if k < layers]
    return [*parts, *some, *blocks, "sqrt", *(f"uniform-{k}" for k in (4, 2) if k < layers), "full"]


def layouts_of(request: Request, model: Model, node: Node, gpus: int, seq_len: int, habits: Habits) -> list[Layout]:
    """The legal layouts over the degrees that are wanted; sequence parallelism both ways where it is open."""
    if gpus > 1 and habits.name == "plain":
        return []
    degrees = [_degrees(request, name, model, gpus, node, habits) for name in DEGREES]
    asked = _sequence(request, habits)
    ways = [asked] if asked is not None else _values(request, "sp", [True, False])
    pipelines = pipes.pipelines_for(request, habits)
    found = [layouts_for(model, gpus, degrees, seq_len, sp=way, pipelines=pipelines) for way in ways]
    return list(dict.fromkeys(layout for some in found for layout in some if layout.tp > 1 or not layout.sp))


def _values(
    request: Request, name: str, usual: list[Any], every: Sequence[Any] | None = None, said: str = ""
) -> list[Any]:
    """The pinned value, those that were chosen, or all that a search tries."""
    if request.given.get(name) is not None:
        return [request.given[name]]
    choice = request.choices.get(name)
    values = choice.of(usual, every) if choice is not None else usual
    if not values and name not in DEGREES:
        raise InputError(
            name.replace("_", "-"), choice.said if choice else "", f"nothing of {_listed(every or usual)} is left"
        )
    if said and choice is None:
        request.assumptions[name] = said.format(_listed(values))
    return values


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _degrees(request: Request, name: str, model: Model, gpus: int, node: Node, habits: Habits) -> list[int]:
    """Pinned or chosen; else the divisors of the number of GPUs that can pay.

    TP within a node; no more stages than blocks; no sequence cut below :data:`SHORTEST_PART` tokens.
    """
    every = [n for n in range(1, gpus + 1) if gpus % n == 0]
    usual = [n for n in every if n <= _most(request, name, model, node)]
    if name in habits.lacks or not habits.tensor_parallel or request.given.get("lora") is not None:
        usual = every = [1]
    return _values(request, name, usual, every)


def _most(request: Request, name: str, model: Model, node: Node) -> int:
    """The largest degree that a search tries by itself."""
    if name == "tp":
        return node.gpus
    if name == "cp":
        return max(rq.sequence_length(request, model) // SHORTEST_PART, 1)
    experts = max(getattr(group.block.mlp, "experts", 1) for group in model.groups)
    return model.num_layers if name == "pp" else experts
