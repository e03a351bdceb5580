"""From a checked request to a grid: what was given is pinned, the rest is searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError, InputError
from memcalc.frameworks import Habits
from memcalc.frameworks.capabilities import check_told, usual_form
from memcalc.frameworks.float8 import check_narrow, check_recipe, transposes
from memcalc.grid import Grid, Layout
from memcalc.planner import defaults, direct
from memcalc.planner import pipelines as pipes
from memcalc.planner.adapted_layers import check_splits, splitting
from memcalc.planner.answer import strategy_of
from memcalc.planner.as_is import known_precisions, policies_for, recorded_optimizers
from memcalc.planner.direct import check_direct, check_replicated, clashes_for, kinds, usual, with_replicas
from memcalc.planner.grid_parts import (
    by_defaults,
    by_loss,
    by_stages,
    check_countable,
    expert_ways,
    refuse_batch,
    repeats,
)
from memcalc.planner.optimizers import (
    GALORE,
    adapter_fields,
    check_accumulation,
    check_main_weights,
    check_optimizer,
    check_widths,
    galore_fields,
    possible,
)
from memcalc.planner.pipelines import check_layout, check_split, layouts_for, splits_for
from memcalc.planner.request import Request, batch_of, micro_batches_of
from memcalc.specs.options import BY_NAME, DEGREES, SHARED, SharedSettings
from memcalc.specs.strategy import OPTIMIZERS

if TYPE_CHECKING:
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

OFFLOADS: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer",),
    ("params",),
    ("activations",),
    ("optimizer", "params"),
    ("optimizer", "activations"),
    ("params", "activations"),
)
SHORTEST_PART = 1024
"""Tokens a rank below which a search does not cut sequences by itself."""


def fixed_part(
    request: Request,
    habits: Habits,
    model: Model,
    gpu: GPU,
    precisions: list[str],
    micro_steps: int,
    *,
    sharded: bool = True,
) -> SharedSettings:
    """What all strategies of the request share: options as given, and those whose default depends on others."""
    seq_len = defaults.sequence_length(request, model)

    def recorded(text: str) -> str:
        return "" if model.recording is None else text

    given = {name: request.given[name] for name in SHARED if name in request.given}
    optimizer = str(request.given.get("optimizer", BY_NAME["optimizer"].default))
    resolved = {
        "framework": request.given.get("framework", habits.name),
        "seq_len": seq_len,
        "global_batch": batch_of(request, seq_len, micro_steps),
        "optimizer": request.get("optimizer", optimizer),
        "optimizer_impl": request.get("optimizer_impl", usual_form(habits, optimizer)),
        "attention": defaults.attention_for(request, habits, model, gpu, precisions, seq_len),
        "loss": request.get("loss", habits.loss, recorded("as the module computes it")),
        "kernels": request.get("kernels", habits.kernels, recorded("as the module calls them")),
        **adapter_fields(request, model, habits, precisions),
        **defaults.runtime_fields(request, habits, precisions, sharded=sharded),
        "expandable_segments": habits.expandable_segments and gpu.vendor == "nvidia",
        "float8_transposes": transposes(gpu, habits, precisions),
        **request.given["fields"],
    }
    check_widths(resolved["optimizer"], habits, precisions)
    check_main_weights(resolved, habits)
    if any(name.startswith("fp8") for name in precisions):
        check_recipe(str(resolved.get("float8", "")), gpu, habits, resolved["kernels"])
    resolved |= galore_fields(resolved["optimizer"], request, model, habits)
    fixed = SharedSettings.model_construct(**{**given, **resolved})
    direct.check_modules(request, model, fixed, precisions, habits)
    return fixed


def check_stage(fixed: SharedSettings, habits: Habits, precision: str, zero: int) -> None:
    """Refuse fields that contradict the precision or the sharding stage."""
    if fixed.sgd_weight_decay and not fixed.optimizer.startswith("sgd"):
        raise CombinationError("strategy.sgd_weight_decay", True, f"needs sgd or sgd-momentum, not {fixed.optimizer}")
    if fixed.float8_all_gather and habits.engine and zero == 0:
        raise CombinationError("strategy.float8_all_gather", True, "Megatron-LM has it at --zero 1")
    check_narrow(fixed, [precision])
    check_accumulation(fixed.grad_accum_dtype, habits, precision, zero)
    if fixed.checkpoint == "reentrant-inside" and not habits.flat_units:
        raise CombinationError("strategy.checkpoint", fixed.checkpoint, f"needs FSDP 1's units, not {habits.name}")
    if (fixed.reshard == "never") != (zero == 2) and fixed.reshard != "default":
        stage = 2 if fixed.reshard == "never" else 3
        raise CombinationError("strategy.reshard", fixed.reshard, f"is zero {stage}, not {zero}")


def single_strategy(request: Request, model: Model, gpu: GPU, node: Node) -> Grid:
    """The grid of the one strategy of ``estimate``: every default resolved, every impossibility refused."""
    _, habits = defaults.habits_for(request)
    check_pinned(request, habits, node, model)
    defaults.check_needs(request, model, searched=False)
    layout = one_layout(request, habits, model)
    defaults.note_network(request, node, layout.gpus)
    zero = defaults.stage_for(request, habits, layout.gpus)
    frozen = defaults.is_frozen(request)
    able = defaults.precisions_for(gpu, habits, zero, frozen=frozen, split=layout.tp * layout.pp > 1)
    precision = str(request.get("precision", next(iter([*known_precisions(model, able), *able]), "bf16")))
    defaults.check_precision(precision, gpu, habits, zero, frozen=frozen)
    micro_batch = int(request.get("micro_batch", 1))
    sharded = defaults.is_sharded(habits, zero, layout.dp)
    fixed = fixed_part(request, habits, model, gpu, [precision], layout.dp * micro_batch, sharded=sharded)
    check_countable(model, fixed.seq_len, micro_batch, attention=fixed.attention)
    fixed = fixed.model_copy(update=defaults.fields_by_layout(request, habits, layout))
    check_layout(model, layout, fixed.seq_len, fixed.etp, alone=habits.flat_units, parts=2 - (habits.cp_kind == "a2a"))
    check_replicated(layout.dp_replicate, zero, habits)
    check_split(model, fixed, layout.pp)
    check_splits(fixed, layout, model)
    pipes.check_chunks(model, fixed, layout, habits)
    check_stage(fixed, habits, precision, zero)
    product = f"micro-batch x data-parallel ranks = {micro_batch} x {layout.dp}"
    refuse_batch(fixed.global_batch, [layout.dp * micro_batch], product)
    if fixed.optimizer_in_backward and fixed.global_batch > layout.dp * micro_batch:
        allowed = f"no accumulation is possible, so global-batch must be {layout.dp * micro_batch}"
        raise CombinationError("optimizer-in-backward", True, allowed)
    grid = Grid(
        fixed,
        (layout,),
        (precision,),
        (request.get("recompute", defaults.usual_recompute(habits, model, layout.gpus, zero)),),
        (zero,),
        (habits.moved(request.given.get("offload", ())),),
        (micro_batch,),
        every_stage=True,
    )
    pipes.check_rounds(grid)
    check_told(strategy_of(grid), model)
    return grid


def one_layout(request: Request, habits: Habits, model: Model) -> Layout:
    """The layout that the degrees leave for data parallelism; TP with sequence parallelism if that can be told."""
    tp, pp, cp, ep, replicas = (request.given.get(name, 1) for name in DEGREES)
    ranks = tp * pp * cp
    gpus = int(request.get("gpus", ranks))
    if gpus % ranks:
        alone = next((name for name in DEGREES[:3] if request.given.get(name, 1) == ranks), None)
        if alone is not None:
            raise CombinationError(alone, ranks, f"it does not divide {gpus} GPUs (--gpus)")
        raise CombinationError("gpus", gpus, f"must be a multiple of tp x pp x cp = {ranks}")
    if str(request.given.get("framework")).partition("@")[0] == "plain" and gpus > 1:
        raise CombinationError("gpus", gpus, "plain trains on one GPU; use ddp, fsdp2, deepspeed or megatron")
    sp = _sequence(request, habits)
    sp = _ways(request, habits, model)[0] if sp is None else sp
    schedule, chunks = pipes.one_pipeline(request, habits)
    return Layout(gpus // ranks, tp, sp and tp > 1, pp, cp, ep, schedule, chunks, replicas)


def _sequence(request: Request, habits: Habits) -> bool | None:
    """Sequence parallelism as told, off where the framework lacks it, or None where it follows TP."""
    return False if "sp" in habits.lacks else request.given.get("sp")


def space(request: Request, model: Model, gpu: GPU, node: Node, gpus: int) -> tuple[Grid, ...]:
    """The grids of everything that the request leaves open on a number of GPUs; none where no layout is legal.

    What all strategies of a grid share (optimizer, tier, global batch, loss, unequal stages) makes one grid for each
    of its values.
    """
    _, habits = defaults.habits_for(request)
    for name, value in ((n, v) for n, choice in request.choices.items() for v in choice.listed):
        check_pinned(Request({**request.given, name: value}), habits, node, model)
    check_pinned(request, habits, node, model)
    defaults.check_needs(request, model, searched=True)
    defaults.note_network(request, node, gpus)
    splits = splits_for(request, habits, model, _degrees(request, "pp", model, gpus, node, habits))
    grids = []
    able = possible(request, model, habits, recorded_optimizers(model, OPTIMIZERS))
    for optimizer in _values(request, "optimizer", ["adamw"], able):
        tiers = _values(request, "offload_to", ["cpu"], _tiers(node))
        for index, tier in enumerate(tiers):
            for batch in batches(request, model, gpus):
                pinned = {"optimizer": optimizer, "offload_to": tier, "global_batch": batch}
                options = {name: value for name, value in pinned.items() if value is not None}
                grids += [
                    replace(part, offloads=tuple(c for c in part.offloads if not repeats(c, tier, tiers[:index])))
                    for way, of_way in expert_ways(request, habits, model)
                    for grid in _grids(way, options, splits, model, gpu, node, gpus, habits)
                    for even in by_stages(of_way(grid), way, habits, model.num_layers)
                    for alike in by_loss(even, way, habits)
                    for part in by_defaults(alike, way, habits, model, gpu)
                ]
    return tuple(grid for grid in grids if grid.offloads)


def check_pinned(request: Request, habits: Habits, node: Node, model: Model) -> None:
    """Refuse what the framework or the node does not have."""
    defaults.check_framework(request, habits)
    check_direct(request, habits, model)
    check_optimizer(request, habits, habits.zero)
    defaults.check_offload(request, habits, node)


def batches(request: Request, model: Model, gpus: int) -> list[Any]:
    """Global batches as given, or None for the default; with ``any`` from a quarter of that to eight times it."""
    choice = request.choices.get("global_batch")
    if choice is None:
        return [request.given.get("global_batch")]
    if choice.listed:
        return list(choice.listed)
    seq_len = defaults.sequence_length(request, model)
    usual = batch_of(Request({}), seq_len, gpus)
    return [usual * factor // 4 for factor in (1, 2, 4, 8, 16, 32) if usual * factor % 4 == 0]


def _tiers(node: Node) -> list[str]:
    return ["cpu", *(tier.name for tier in node.tiers if tier.name != "host")]


def _grids(
    request: Request,
    pinned: dict[str, Any],
    splits: Sequence[tuple[dict[str, Any], tuple[int, ...]]],
    model: Model,
    gpu: GPU,
    node: Node,
    gpus: int,
    habits: Habits,
) -> Iterator[Grid]:
    """The grid whose stages are as the request says, and those of unequal stages for depths that need them."""
    grid = _grid(request, pinned, model, gpu, node, gpus, habits, refuses=not splits)
    legal = grid is not None
    if grid is not None:
        yield grid
    for fields, depths in splits:
        given = {**request.given, "fields": {**request.given["fields"], **fields}}
        grid = _grid(
            replace(request, given=given), pinned, model, gpu, node, gpus, habits, refuses=False, depths=depths
        )
        if grid is not None:
            legal = True
            yield grid
    if not legal and "pp" in request.given:
        _grid(request, pinned, model, gpu, node, gpus, habits, refuses=True)  # which says what no stages make possible


def _grid(
    request: Request,
    pinned: dict[str, Any],
    model: Model,
    gpu: GPU,
    node: Node,
    gpus: int,
    habits: Habits,
    depths: tuple[int, ...] = (),
    *,
    refuses: bool,
) -> Grid | None:
    """The grid of a request; with ``depths`` of pipelines that deep alone."""
    job_request = replace(request, given={**request.given, **pinned})
    for name in ("optimizer", "offload_to"):
        if name not in request.given and name not in request.choices:
            del job_request.given[name]
    frozen, zero = defaults.is_frozen(request), defaults.searched_stage(job_request, habits, gpus)
    able = defaults.precisions_for(gpu, habits, zero, frozen=frozen, split=gpus > 1)
    able = [name for name in able if name != "fp32" or not defaults.grouped(model)] or able
    able = usual(request, habits, model, "precision", known_precisions(model, able))
    runs = [name for name in habits.widths if gpu.supports(name.split("-")[0])]
    precisions = _values(job_request, "precision", able, runs, "searched: {}")
    for precision in precisions:
        defaults.check_precision(precision, gpu, habits, zero, frozen=frozen)
    fixed = fixed_part(job_request, habits, model, gpu, precisions, gpus, sharded=False)
    check_narrow(fixed, precisions)
    check_countable(model, fixed.seq_len, 1, attention=fixed.attention)
    deep = depths if fixed.adapters is None else ()  # of adapters it is said where no layout at all splits them
    layouts = splitting(layouts_of(job_request, model, node, gpus, fixed.seq_len, habits, deep), fixed, model)
    stages = {(layout.pp, layout.vpp, layout.schedule): layout for layout in layouts}
    parted = {key for key, layout in stages.items() if pipes.can_part(model, fixed, layout, habits)}
    fitting = [layout for layout in layouts if (layout.pp, layout.vpp, layout.schedule) in parted]
    if refuses and not fitting and with_replicas(layouts, job_request, habits, model, node):
        pipes.check_chunks(model, fixed, layouts[0], habits)
    wanted = (layout for layout in fitting if not depths or layout.pp in depths)
    replicated = with_replicas(wanted, job_request, habits, model, node)
    if not replicated:
        return None
    sizes = micro_batches_of(fixed.global_batch)
    divisors = [m for m in range(1, fixed.global_batch + 1) if fixed.global_batch % m == 0]
    recomputes = direct.allowed(policies_for(model, direct.policies(model)), fixed, precisions, habits)
    zeros = defaults.zero_stages(job_request, habits, gpus)
    offloads = usual(request, habits, model, "offload", offloads_of(habits))
    return Grid(
        fixed,
        tuple(replicated),
        tuple(precisions),
        tuple(_values(job_request, "recompute", usual(request, habits, model, "recompute", recomputes))),
        tuple(_values(job_request, "zero", usual(request, habits, model, "zero", zeros))),
        tuple(dict.fromkeys(habits.moved(value) for value in _values(job_request, "offload", offloads))),
        tuple(_values(job_request, "micro_batch", sizes, divisors)),
        sequence=model.sequence,
        clashes=clashes_for(request, habits, model),
    )


def offloads_of(habits: Habits) -> list[tuple[str, ...]]:
    """What a framework may move off the GPU, each once."""
    choices = [choice for choice in OFFLOADS if "params" not in choice or 3 in habits.zero]
    return list(dict.fromkeys(habits.moved(choice) for choice in choices))


def layouts_of(
    request: Request, model: Model, node: Node, gpus: int, seq_len: int, habits: Habits, depths: tuple[int, ...] = ()
) -> list[Layout]:
    """The legal layouts of all wanted degrees (``depths`` of pp), replicas apart; sequence parallelism both ways."""
    if gpus > 1 and habits.name == "plain":
        return []
    degrees = [_degrees(request, name, model, gpus, node, habits) for name in DEGREES if name != "dp_replicate"]
    degrees[1] = [pp for pp in degrees[1] if not depths or pp in depths]
    sp = _sequence(request, habits)
    ways: list[bool | None] = [sp]
    if sp is None:  # a framework that always has it beside TP has it nowhere else
        ways = [None if way else False for way in _values(request, "sp", _ways(request, habits, model))]
    pipelines = pipes.pipelines_for(request, habits, kinds(request, habits, model))
    split = int(request.given.get("fields", {}).get("etp", 0))
    common: dict[str, Any] = {"pipelines": pipelines, "expert_tp": split}
    layouts = chain(*(layouts_for(model, gpus, degrees, seq_len, sp=way, **common) for way in ways))
    return list(dict.fromkeys(layout for layout in layouts if layout.tp > 1 or not layout.sp))


def _ways(request: Request, habits: Habits, model: Model) -> list[bool]:
    """With sequence parallelism and without, as the framework can be told; both ways where it can be told neither."""
    able = kinds(request, habits, model)
    return [way for way, kind in ((True, "tp+sp"), (False, "tp")) if kind in able] or [True, False]


def _values(
    request: Request, name: str, usual: list[Any], allowed: Sequence[Any] | None = None, note: str = ""
) -> list[Any]:
    if request.given.get(name) is not None:
        return [request.given[name]]
    choice = request.choices.get(name)
    values = choice.of(usual, allowed) if choice is not None else usual
    if not values and name not in DEGREES:  # what is possible of these depends on the number of GPUs
        raise InputError(
            name.replace("_", "-"), choice.text if choice else "", f"nothing of {_listed(allowed or usual)} is left"
        )
    if note and choice is None:
        request.assumptions[name] = note.format(_listed(values)) if len(values) > 1 else _listed(values)
    return values


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _degrees(request: Request, name: str, model: Model, gpus: int, node: Node, habits: Habits) -> list[int]:
    """Pinned or chosen; else the divisors of the number of GPUs that can pay.

    TP within a node; no more stages than blocks; no sequence cut below :data:`SHORTEST_PART` tokens.
    """
    least = pipes.fewest_stages(request) if name == "pp" else 1
    divisors = [n for n in pipes.divisors(gpus) if n >= least]
    tried = [n for n in divisors if n <= _most(request, name, model, node)]
    peft = request.given.get("lora") is not None and not habits.engine
    alone = peft or (name == "tp" and request.given.get("optimizer") == GALORE)
    if name in habits.lacks or not habits.tensor_parallel or alone or (name, habits.cp_kind) == defaults.PINNED:
        divisors = [1]
    if divisors == [1] or not any(kind.partition("+")[0] == name for kind in kinds(request, habits, model)):
        tried = [1]
    return _values(request, name, tried, divisors)


def _most(request: Request, name: str, model: Model, node: Node) -> int:
    if name == "tp":
        return node.gpus
    if name == "cp":
        return max(defaults.sequence_length(request, model) // SHORTEST_PART, 1)
    experts = max(getattr(group.block.mlp, "experts", 1) for group in model.groups)
    return model.num_layers if name == "pp" else experts
