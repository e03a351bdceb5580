"""What to go back to if a plan does not run: safer plans of the same job, layout and global batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memcalc import api
from memcalc.errors import MemcalcError
from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks import habits_of
from memcalc.frameworks.capabilities import capabilities_of
from memcalc.planner.choice import SMALLER
from memcalc.planner.record import pinned
from memcalc.results.plans import Plan
from memcalc.specs.job import Value
from memcalc.specs.options import DEGREES
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB

MOST = 5
"""Plans to go back to, one after another."""
LISTED = 48
"""Plans of the search among which they are looked for, the fastest first."""


def fallbacks(plan: Plan, options: Mapping[str, Value], dirs: Iterable[str] = ()) -> tuple[Plan, ...]:
    """Return safer plans, each at least a tenth smaller than the one before; the fastest first, then what offloads.

    They keep the GPUs, the parallel layout, precision, optimizer and global batch, so that going back is one command:
    a smaller micro-batch with more accumulation, recomputation of every second block and then of all, resharding after
    forward, and what the framework can offload, last because its time is not fitted on measured runs. ``options`` are
    those of the search that found the plan; what was given there stays as it was given.
    """
    stays = set(plan.strategy.offload)
    plans = _searched(plan, _open(plan, options), dirs)
    ladder = _ladder(plan, sorted(plans, key=lambda other: bool(set(other.strategy.offload) - stays)))
    return tuple(itertools.islice(ladder, MOST))


def steps(plan: Plan, options: Mapping[str, Value], dirs: Iterable[str] = ()) -> tuple[Plan, ...]:
    """Return the plans that a running job can go over to: what recomputation and a smaller micro-batch alone give.

    All of them, the fastest first, whichever are smaller; sharding and offload stay, since they are fixed when a job
    starts, and the global batch is the same. ``options`` are those of the search, as for :func:`fallbacks`.
    """
    strategy = plan.strategy
    fixed = {"zero": str(strategy.zero), "offload": ",".join(strategy.offload) or "none"}
    plans = _searched(plan, {**_open(plan, options), **fixed}, dirs)
    others = [other for other in plans if other.verdict == "fits" and other.strategy != strategy]
    return tuple(_ranked(plan, rank, other) for rank, other in enumerate(others, 1))


def _searched(plan: Plan, options: Mapping[str, Any], dirs: Iterable[str]) -> tuple[Plan, ...]:
    """Plans of a search, the fastest first."""
    keywords = pinned(plan.job).keywords()
    try:
        job = {**keywords, **_unchanged(plan), **options, "preset_dirs": dirs, "advice": False}
        return api.plan(**job, objective="throughput", rank_all=True, top=LISTED).plans
    except MemcalcError:  # the options leave no other plan
        return ()


def _unchanged(plan: Plan) -> dict[str, Any]:
    """The choices of a search that a restart cannot change."""
    strategy = plan.strategy
    layout = {name: getattr(strategy, name) for name in DEGREES}
    pipeline = {"pp_schedule": strategy.pp_schedule, "vpp": strategy.vpp} if strategy.pp > 1 else {}
    return {
        "seq_len": plan.job.options["seq_len"],
        "framework": strategy.framework,
        "gpus": plan.gpus,
        "global_batch": plan.global_batch,
        "precision": strategy.precision,
        "optimizer": strategy.optimizer,
        **layout,
        **({"sp": strategy.sp} if strategy.tp > 1 else {}),
        **pipeline,
        **({"offload_to": strategy.offload_to} if strategy.offload else {}),
    }


def _open(plan: Plan, options: Mapping[str, Value]) -> dict[str, Any]:
    """What may change, with the values that are tried; an option that was given keeps its own."""
    strategy = plan.strategy
    habits = habits_of(strategy.framework)
    share = plan.accumulation_steps * strategy.micro_batch
    sizes = [size for size in range(1, strategy.micro_batch + 1) if share % size == 0]
    tried: dict[str, list[Any]] = {
        "micro_batch": sizes,
        "recompute": [strategy.recompute, *(["every-2"] if _keeps_more(strategy) else []), "full"],
        "zero": [2, 3] if habits.full_shard and strategy.zero == 2 else [strategy.zero],
        "offload": [",".join(strategy.offload) or "none", "none", *_offloads(strategy)],
    }
    texts = {name: "/".join(dict.fromkeys(map(str, values))) for name, values in tried.items()}
    return {name: options.get(name, text) for name, text in texts.items()}


def _keeps_more(strategy: Strategy) -> bool:
    """Whether checkpoints of every second block, which the framework can be told, stand between a policy and full."""
    policy = parse_policy(strategy.recompute)
    more = policy.kind == "none" or (policy.kind == "every" and policy.count > 2)
    return more and capabilities_of(strategy.framework).recompute.needs("every") == ""


def _offloads(strategy: Strategy) -> list[str]:
    """What the framework can be told to move of the states, at this sharding."""
    direct = capabilities_of(strategy.framework).offload.direct
    states = [value for value in direct if value in {"optimizer", "params", "optimizer,params"}]
    habits = habits_of(strategy.framework)
    unsharded = habits.zero_optimizer is not None and strategy.zero == 0  # DeepSpeed moves what it divides
    if habits.full_shard or unsharded:  # there states go with the parameters
        states = [value for value in states if "optimizer" not in value]
    return [value for value in states if "params" not in value or strategy.zero in {2, 3}]


def _ladder(plan: Plan, plans: Iterable[Plan]) -> Iterator[Plan]:
    """Yield of plans in their order those that are clearly smaller than all before."""
    last, rank = plan, 0
    for other in plans:
        if other.verdict == "fits" and is_smaller(other, last):
            rank += 1
            yield _ranked(plan, rank, other)
            last = other


def is_smaller(plan: Plan, than: Plan) -> bool:
    """Whether a plan needs clearly less than another."""
    return plan.peak.device <= SMALLER * than.peak.device


def _ranked(plan: Plan, rank: int, other: Plan) -> Plan:
    """A plan at its rank, with what is different from the plan that it stands in for."""
    return other.model_copy(update={"rank": rank, "why": _why(plan, other)})


def _why(plan: Plan, other: Plan) -> str:
    """What is different, and what it brings and costs."""
    changed = [
        f"{name.replace('_', '-')} {_shown(before)} → {_shown(after)}"
        for name in ("micro_batch", "recompute", "zero", "offload")
        if (before := getattr(plan.strategy, name)) != (after := getattr(other.strategy, name))
    ]
    less = (plan.peak.device - other.peak.device) / GIB
    slower = 1 - other.time.tokens_per_second_per_gpu / plan.time.tokens_per_second_per_gpu
    speed = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
    return f"{', '.join(changed)}: −{less:.1f} GiB per GPU, {speed}."


def _shown(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
