"""What a search tries of what is left open: what the framework can be told, unless more is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.errors import CombinationError
from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks import habits_of
from memcalc.frameworks.capabilities import OFFLOADS, OPTIONS, Clash, fitting, kinds_of, policy_kind, text_of
from memcalc.grid import column
from memcalc.planner.optimizers import named_in
from memcalc.planner.pipelines import can_replicate

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.frameworks import Habits
    from memcalc.frameworks.capabilities import Capabilities
    from memcalc.grid import Grid, Layout
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import Node
    from memcalc.specs.model import Model
    from memcalc.specs.options import SharedSettings


KEYS: dict[str, Callable[[Any], str]] = {"recompute": policy_kind, "offload": lambda parts: ",".join(parts) or "none"}
"""How the table of frameworks names a value, where that is not its text."""
OWN_CODE = "code of your own"
"""In every warning of what a framework cannot be told."""
SMALLER_LOSSES = ("fused-linear", "chunked", "fused-kernel")
"""Losses that need less memory than the standard one, the least first."""
_ELSEWHERE = ("precision", "parallel", "uneven")
"""What :mod:`memcalc.planner.defaults` and the layouts check."""
_SEARCHED = ("zero", "precision", "recompute", "offload", "parallel")
"""Options that are axes of a grid; the others are the same for all its strategies."""
_PINNED_BY = {"tp+sp": ("tp", "sp"), "dp": ("gpus",), "hsdp": ("dp_replicate",)}
"""The options that say whether there is a kind of parallelism, where they are not the one of its name."""


def capabilities_for(request: Request, habits: Habits, model: Model) -> Capabilities:
    """What the framework of a request can be told for a model, in the way that tells all that is given."""
    able = fitting(habits.capabilities, model, adapters=request.given.get("lora") is not None)
    ways = [way for way in (able, able.tuned) if way is not None and _tells(way, request, model)]
    return ways[0] if ways else able


def is_launched(request: Request, model: Model) -> bool:
    """Whether FSDP 2, where nobody names a framework, is a launcher's: what is given is none of the script's."""
    if {"framework", "lora"} & request.given.keys() or model.recording is not None:
        return False
    habits = habits_of("fsdp2")
    return capabilities_for(request, habits, model) is habits.capabilities.tuned


def _tells(able: Capabilities, request: Request, model: Model) -> bool:
    """Whether what is given needs no code."""
    given = {**request.given.get("fields", {}), **request.given}
    stated = {name: given[name] for name in OPTIONS if given.get(name) is not None}
    values = [(name, KEYS.get(name, text_of)(value)) for name, value in stated.items() if name not in _ELSEWHERE]
    values += [("parallel", name) for name in ("tp", "pp", "cp", "ep") if (given.get(name) or 1) > 1]
    return all(getattr(able, name).needs(value, model) == "" for name, value in values)


def usual(request: Request, habits: Habits, model: Model, option: str, values: Iterable[Any]) -> list[Any]:
    """Of the values that a search would try those that need no code, or all where it may go beyond.

    Where none is left, as of a framework whose only value of an option needs some, all are tried.
    """
    values = list(values)
    able, key = getattr(capabilities_for(request, habits, model), option), KEYS.get(option, str)
    direct = values if request.beyond else [value for value in values if able.needs(key(value), model) == ""]
    return direct or values


def kinds(request: Request, habits: Habits, model: Model) -> frozenset[str]:
    """The kinds of parallelism that a search may try by itself."""
    able = capabilities_for(request, habits, model).parallel
    return frozenset(able.values if request.beyond else (kind for kind in able.direct if able.needs(kind, model) == ""))


def clashes_for(request: Request, habits: Habits, model: Model) -> tuple[Clash, ...]:
    """What a search leaves out because the framework cannot be told both, unless both are asked for."""
    clashes = capabilities_for(request, habits, model).apart
    return tuple(
        clash
        for clash in clashes
        if not clash.code
        or not (request.beyond or all(_pinned(request, *side) for side in (clash.first, clash.second)))
    )


def _pinned(request: Request, option: str, values: tuple[str, ...]) -> bool:
    """Whether the request decides if an option has such values, which what all strategies share is in any case."""
    if option not in _SEARCHED:
        return True
    names = [name for kind in values for name in _PINNED_BY.get(kind, (kind,))] if option == "parallel" else [option]
    return any(request.given.get(name) is not None or name in request.choices for name in names)


def check_direct(request: Request, habits: Habits, model: Model) -> None:
    """Refuse what is asked for and does not exist in the framework."""
    able = capabilities_for(request, habits, model)
    fields = request.given.get("fields", {})
    for option in (name for name in OPTIONS if name not in _ELSEWHERE):
        value, support = request.given.get(option, fields.get(option)), getattr(able, option)
        value = habits.moved(value) if option == "offload" and value is not None else value
        if value is not None and support.needs(KEYS.get(option, text_of)(value), model) is None:
            shown = ",".join(value) if isinstance(value, tuple) else value
            name, framework = option.replace("_", "-"), habits.name
            if option in fields:
                name, framework = f"strategy.{option}", str(request.given.get("framework", habits.name))
            raise CombinationError(name, shown, support.said_by(framework), support.values)


def free_of(grid: Grid) -> Array:
    """Strategies in which nothing meets that the framework cannot be told together."""
    able: Array = np.ones((1,) * len(grid.shape), dtype=np.bool_)
    parallel = [frozenset(kinds_of(layout)) for layout in grid.layouts] if grid.clashes else []
    for clash in grid.clashes:
        able = able & ~(_side(grid, parallel, *clash.first) & _side(grid, parallel, *clash.second))
    return able


def _side(grid: Grid, parallel: list[frozenset[str]], option: str, values: tuple[str, ...]) -> Array:
    """Whether a strategy has one of some values of an option, along the option's axis.

    ``parallel`` are the kinds of parallelism of each layout.
    """
    if option == "parallel":
        return column([not here.isdisjoint(values) for here in parallel], "layout", np.bool_)
    key = KEYS.get(option, str)
    if option not in _SEARCHED:
        return np.full((1,) * len(grid.shape), text_of(getattr(grid.fixed, option)) in values)
    return column([key(value) in values for value in getattr(grid, f"{option}s")], option, np.bool_)


def smaller_losses(request: Request, habits: Habits, model: Model) -> dict[str, str]:
    """Losses that need less than the standard one, the least first, with the code for each; none where one is given.

    Megatron-LM's own fusion is none of them: out of place, it has a further copy of the logits in fp32
    (core/fusions/fused_cross_entropy.py).
    """
    known = {}
    for loss in SMALLER_LOSSES if "loss" not in request.given else ():
        if loss == "fused-kernel" and habits.engine:
            continue
        with_it = replace(request, given={**request.given, "loss": loss})
        known[loss] = capabilities_for(with_it, habits, model).loss.needs(loss, model)
    return {loss: code for loss, code in known.items() if code is not None}


def is_told(request: Request, habits: Habits, model: Model, option: str, value: str) -> bool:
    """Whether the framework can be told a value of an option beside all that is given, or more than that is asked for.

    Of options that are not told in a word, such as kinds of parallelism, it says nothing.
    """
    with_it = replace(request, given={**request.given, option: value})
    return request.beyond or getattr(capabilities_for(with_it, habits, model), option).needs(value, model) == ""


def offload_of(request: Request, habits: Habits, model: Model) -> str:
    """What a framework can be told to move to host memory, the parts that training misses least first; or nothing."""
    able = capabilities_for(request, habits, model).offload
    sharded = int(request.given.get("zero", habits.zero[0])) in (2, 3)
    parts = [part for part in OFFLOADS if part != "params" or sharded]
    return next((part for part in parts if able.needs(part, model) == ""), "")


# Replicas of the shards (HSDP): how many a search tries, and what they need.


KIND = "hsdp"
"""What the table of frameworks calls it among the kinds of parallelism."""


def with_replicas(
    layouts: Iterable[Layout], request: Request, habits: Habits, model: Model, node: Node
) -> list[Layout]:
    """Layouts, each with the numbers of replicas that are wanted; by itself a search tries :func:`usual_replicas`."""
    given, choice = request.given.get("dp_replicate"), request.choices.get("dp_replicate")
    searched = given is None and KIND in kinds(request, habits, model)
    result = []
    for layout in layouts:
        counts = usual_replicas(layout, node.gpus, one_node=habits.flat_units) if searched else [given or 1]
        if searched and habits.fills_experts and layout.ep == 1:
            counts = list(dict.fromkeys([*counts, _without_filling(layout, model)]))
        if choice is not None:
            counts = choice.of(counts, [n for n in range(1, layout.dp + 1) if layout.dp % n == 0])
        result += [layout if n == 1 else layout.replicated(n) for n in counts if can_replicate(layout, n)]
    return result


def _without_filling(layout: Layout, model: Model) -> int:
    """Replicas whose ranks divide the stacked experts, which FSDP 2 fills up to a multiple of those (MC117)."""
    ranks = layout.dp * layout.cp
    return ranks // gcd(ranks, *(getattr(group.block.mlp, "experts", 0) for group in model.groups))


def usual_replicas(layout: Layout, node_gpus: int, *, one_node: bool = False) -> list[int]:
    """One, and so many that each shares its states within a node, or within 2, 4, 8, … of several.

    FSDP 1 knows the ranks of ``one_node`` and all ranks alone (torch/distributed/fsdp/_init_utils.py).

    >>> from memcalc.grid import Layout
    >>> usual_replicas(Layout(dp=32), 8), usual_replicas(Layout(dp=8, tp=4), 8), usual_replicas(Layout(dp=8), 8)
    ([1, 4, 2], [1, 4, 2], [1])
    """
    ranks = layout.dp * layout.cp * layout.tp
    sizes = [node_gpus << power for power in range(1 if one_node else ranks.bit_length())]
    return [1, *(ranks // size for size in sizes if size < ranks and ranks % size == 0)]


def check_replicated(replicas: int, zero: int, habits: Habits) -> None:
    """Refuse replicas of what is not sharded."""
    least = 2 if habits.full_shard else 1
    if replicas > 1 and zero < least:
        allowed = f"needs --zero {least} or more: without shards all data-parallel ranks are replicas"
        raise CombinationError("dp-replicate", replicas, allowed)


# --------------------------------------------------------------------------------------------------- recompute policies


OUTPUTS = frozenset({"layernorm", "moe_act"})
"""Modules whose outputs alone are dropped and computed again, which TransformerEngine's delayed scaling forbids
(Megatron-LM d98e8a64 core/transformer/transformer_config.py, ``__post_init__``)."""


def policies(model: Model) -> list[str]:
    """Recompute policies that a search tries, the cheapest first, with the counts that make sense for so many blocks.

    Of ``block-N`` a quarter, a half and three quarters of the blocks: between no block and all of them. Where attention
    is latent, Megatron-LM's modules that cost next to nothing are tried together: DeepSeek-V3 recomputes its norms and
    the up projections of its latents (arXiv:2412.19437, section 3.2.3).
    """
    layers = model.num_layers
    parts = ["none", *_modules(model), "selective-core-attn", "selective-ops", "attention", "mlp"]
    blocks = some_blocks(layers)
    some = [f"every-{k}" for k in (8, 4, 3, 2) if k < layers]
    return [*parts, *some, *blocks, "sqrt", *(f"uniform-{k}" for k in (4, 2) if k < layers), "full"]


def exists_in(policy: str, blocks: int) -> bool:
    """Whether a model chunk of so many blocks has units of blocks as large as a policy's name says.

    >>> exists_in("uniform-4", 4), exists_in("uniform-2", 1), exists_in("full", 1)
    (True, False, True)
    """
    parsed = parse_policy(policy)
    return parsed.kind != "uniform" or parsed.count <= blocks


def some_blocks(layers: int) -> list[str]:
    """The policies that compute a quarter, a half and three quarters of so many blocks again."""
    return list(dict.fromkeys(f"block-{layers * k // 4}" for k in (1, 2, 3) if layers * k // 4))


def _modules(model: Model) -> list[str]:
    if not _has_latents(model):
        return []
    first = "modules:layernorm,mla_up_proj"
    return [first, f"{first},moe_act"] if model.is_moe else [first]


def allowed(names: list[str], fixed: SharedSettings, precisions: list[str], habits: Habits) -> list[str]:
    """Of some policies those that the recipe of 8-bit products allows."""
    return [name for name in names if not _forbidden(name, fixed, precisions, habits)]


def check_modules(request: Request, model: Model, fixed: SharedSettings, precisions: list[str], habits: Habits) -> None:
    """Refuse modules that the model has not, and those whose recomputation the recipe of 8-bit products forbids."""
    for name in named_in(request, "recompute"):
        listed = parse_policy(name).parts if name.startswith("modules:") else frozenset()
        lacks = [("mla_up_proj", "latent attention", _has_latents(model)), *_routed(model)]
        for module, what, there in lacks:
            if module in listed and not there:
                raise CombinationError("recompute", name, f"{model.name} has no {what}, of which {module} is a part")
        if _forbidden(name, fixed, precisions, habits):
            reason = "TransformerEngine's delayed scaling has no layernorm and moe_act: another strategy.float8"
            raise CombinationError("recompute", name, reason)


def _routed(model: Model) -> list[tuple[str, str, bool]]:
    return [(module, "routed experts", model.is_moe) for module in ("moe", "moe_act")]


def _has_latents(model: Model) -> bool:
    return any(attention.latent is not None for attention in model.attentions)


def _forbidden(name: str, fixed: SharedSettings, precisions: list[str], habits: Habits) -> bool:
    if not (name.startswith("modules:") and OUTPUTS & parse_policy(name).parts and habits.engine):
        return False
    return any(p.startswith("fp8") for p in precisions) and (fixed.float8 or habits.float8[0]) == "delayed"
