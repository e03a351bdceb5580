"""What to go back to if a plan does not run: safer plans of the same job, layout and global batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import memcalc
from memcalc.errors import MemcalcError
from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks import habits_of
from memcalc.planner.axes import DEGREES
from memcalc.planner.plans import SMALLER
from memcalc.results import Plan, SavedJob
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB

__all__ = ["fallbacks", "is_smaller", "steps"]

MOST = 5
"""Plans to go back to, one after another."""
LISTED = 24
"""Plans of the search among which they are looked for; a third of them are of its front of memory and speed."""


def fallbacks(job: SavedJob, plan: Plan, asked: dict[str, Any], dirs: Iterable[str] = ()) -> tuple[Plan, ...]:
    """Return safer plans, each at least a tenth smaller than the one before; the fastest first, then what offloads.

    They keep the GPUs, the parallel layout, precision, optimizer and global batch, so that going back is one command:
    a smaller micro-batch with more accumulation, recomputation of every second block and then of all, resharding after
    forward, and what the framework can offload, last because its time is not fitted on measured runs. ``asked`` are the
    words of the search; one that was typed stays as it was typed.
    """
    stays = set(plan.strategy.offload)
    found = _found(job, {**_kept(job, plan), **_open(plan, asked)}, dirs)
    ladder = _ladder(plan, sorted(found, key=lambda one: bool(set(one.strategy.offload) - stays)))
    return tuple(itertools.islice(ladder, MOST))


def steps(job: SavedJob, plan: Plan, asked: dict[str, Any], dirs: Iterable[str] = ()) -> tuple[Plan, ...]:
    """Return the plans that a running job can go over to: what recomputation and a smaller micro-batch alone give.

    All of them, the fastest first, whichever are smaller; sharding and offload stay, since they are fixed when a job
    starts, and the global batch is the same. A word that was typed stays as it was typed.
    """
    strategy = plan.strategy
    fixed = {"zero": str(strategy.zero), "offload": ",".join(strategy.offload) or "none"}
    found = _found(job, {**_kept(job, plan), **_open(plan, asked), **fixed}, dirs)
    others = [one for one in found if one.verdict == "fits" and one.strategy != strategy]
    return tuple(_named(plan, place, one) for place, one in enumerate(others, 1))


def _found(job: SavedJob, words: dict[str, Any], dirs: Iterable[str]) -> tuple[Plan, ...]:
    """Plans of a search, the fastest first."""
    try:
        found = memcalc.plan(
            model=job.model,
            gpu=job.gpu,
            node=job.node,
            settings=job.settings,
            preset_dirs=dirs,
            top=LISTED,
            **words,
        )
    except MemcalcError:  # what was typed leaves no other plan
        return ()
    return found.plans


def _kept(job: SavedJob, plan: Plan) -> dict[str, Any]:
    """What stays: all that a search does not choose, and of its choices those that a restart cannot change."""
    strategy = plan.strategy
    layout = {name: getattr(strategy, name) for name in DEGREES}
    pipeline = {"pp_schedule": strategy.pp_schedule, "vpp": strategy.vpp} if strategy.pp > 1 else {}
    return {
        **job.words,
        "seq_len": job.seq_len,
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


def _open(plan: Plan, asked: dict[str, Any]) -> dict[str, Any]:
    """What may change, with the values that are tried; a word that was typed keeps its own."""
    strategy = plan.strategy
    habits = habits_of(strategy.framework)
    share = plan.accumulation_steps * strategy.micro_batch
    sizes = [size for size in range(1, strategy.micro_batch + 1) if share % size == 0]
    offloads = ["none", *(["params"] if habits.full_shard else []), *_zero_offloads(strategy.framework)]
    tried: dict[str, list[Any]] = {
        "micro_batch": sizes,
        "recompute": [strategy.recompute, *(["every-2"] if _keeps_more(strategy) else []), "full"],
        "zero": [2, 3] if habits.full_shard and strategy.zero == 2 else [strategy.zero],
        "offload": [",".join(strategy.offload) or "none", *offloads],
    }
    texts = {name: "/".join(dict.fromkeys(map(str, values))) for name, values in tried.items()}
    return {name: asked.get(name, text) for name, text in texts.items()}


def _keeps_more(strategy: Strategy) -> bool:
    """Whether checkpoints of every second block stand between a policy and full; Megatron-LM cannot be told them."""
    policy = parse_policy(strategy.recompute)
    more = policy.kind == "none" or (policy.kind == "every" and policy.count > 2)
    return more and habits_of(strategy.framework).name != "megatron"


def _zero_offloads(framework: str) -> list[str]:
    return ["optimizer", "optimizer,params"] if habits_of(framework).zero_optimizer is not None else []


def _ladder(plan: Plan, found: Iterable[Plan]) -> Iterator[Plan]:
    """Yield of plans in their order those that are clearly smaller than all before."""
    last, place = plan, 0
    for one in found:
        if one.verdict == "fits" and is_smaller(one, last):
            place += 1
            yield _named(plan, place, one)
            last = one


def is_smaller(one: Plan, than: Plan) -> bool:
    """Whether a plan needs clearly less than another."""
    return one.peak.device <= SMALLER * than.peak.device


def _named(plan: Plan, place: int, one: Plan) -> Plan:
    """A plan at its place, with what is different from the plan that it stands in for."""
    return one.model_copy(update={"rank": place, "why": _why(plan, one)})


def _why(plan: Plan, one: Plan) -> str:
    """What is different, and what it brings and costs."""
    changed = [
        f"{name.replace('_', '-')} {_shown(before)} → {_shown(after)}"
        for name in ("micro_batch", "recompute", "zero", "offload")
        if (before := getattr(plan.strategy, name)) != (after := getattr(one.strategy, name))
    ]
    less = (plan.peak.device - one.peak.device) / GIB
    slower = 1 - one.time.tokens_per_second_per_gpu / plan.time.tokens_per_second_per_gpu
    speed = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
    return f"{', '.join(changed)}: {less:.1f} GiB less on each GPU, {speed}."


def _shown(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
