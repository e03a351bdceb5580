"""The answer of a search: the best strategies that a replay lets run, ranked, each with the reason it is listed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from memcalc import __version__, results
from memcalc.grid import Grid
from memcalc.planner.answer import components_of, hardware_facts, model_facts, scalar, strategy_of
from memcalc.planner.peaks import Peaks, peaks_of, stage_peaks
from memcalc.terms import build_ledger, overhead_of
from memcalc.terms.census import Census
from memcalc.timing import forecast

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.planner.search import Found, Outcome
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.specs.strategy import Strategy
    from memcalc.terms import Overhead


def plans_of(
    model: Model,
    gpu: GPU,
    node: Node,
    outcomes: Mapping[int, Outcome],
    nearest: list[tuple[str, int]],
    request: Request,
    command: str,
    base: str,
    wanted: int,
    started: float,
) -> results.Plans:
    """The answer of a search over one or several GPU counts: the ``wanted`` best of each that a replay lets run."""
    found = [
        (ready[0].found, one)
        for outcome in outcomes.values()
        if (ready := finalists(model, gpu, outcome, wanted))
        for one in ready
    ]
    plans = tuple(plan_of(rank, model, gpu, node, one, fastest, base) for rank, (fastest, one) in enumerate(found, 1))
    last = max(outcomes)
    return results.Plans(
        version=__version__,
        model=model_facts(model),
        hardware=hardware_facts(gpu, node, last),
        seq_len=outcomes[last].smallest.grid.fixed.seq_len,
        searched=sum(o.searched for o in outcomes.values()),
        feasible=sum(o.feasible for o in outcomes.values()),
        elapsed=round(time.perf_counter() - started, 4),
        plans=plans,
        pareto=pareto_ranks(plans),
        nearest=tuple(results.Nearest(change=change, device=device) for change, device in nearest),
        too_large="" if plans else too_large(model, gpu, outcomes[last], overhead_for(gpu, outcomes[last].smallest)),
        capacity=gpu.memory_bytes,
        warnings=tuple(plan_warnings(node, plans, outcomes)),
        assumptions=request.assumptions,
        command=command,
    )


@dataclass(frozen=True)
class Finalist:
    """A strategy that the search found, with its replayed figures."""

    found: Found
    single: Grid
    peaks: Peaks


def finalists(model: Model, gpu: GPU, outcome: Outcome, wanted: int) -> list[Finalist]:
    """The best strategies of a search that a replay lets run; tight ones come last, and only where too few fit."""
    safe: list[Finalist] = []
    tight: list[Finalist] = []
    for found in outcome.best:
        if len(safe) == wanted:
            break
        one = _finalist(model, gpu, found)
        if one.peaks.verdict != "does-not-fit":
            (tight if one.peaks.verdict == "tight" else safe).append(one)
    by_time = [sorted(kind, key=lambda one: one.found.step) for kind in (safe, tight)]
    return [*by_time[0], *by_time[1]][:wanted]


def _finalist(model: Model, gpu: GPU, found: Found) -> Finalist:
    """One found strategy, replayed."""
    single, overhead = single_grid(found), overhead_for(gpu, found)
    census = Census(model, single)
    ledger = build_ledger(census, overhead.workspaces, detail=False)
    return Finalist(found, single, peaks_of(census, ledger, overhead))


def plan_of(rank: int, model: Model, gpu: GPU, node: Node, one: Finalist, fastest: Found, base: str) -> results.Plan:
    """One ranked plan, with the same figures that ``estimate`` gives for it."""
    found, single, peaks = one.found, one.single, one.peaks
    top, verdict = peaks.top, peaks.verdict
    strategy = strategy_of(found.grid, found.index)
    return results.Plan(
        rank=rank,
        gpus=found.layout.gpus,
        strategy=strategy,
        accumulation_steps=scalar(single.accumulation),
        global_batch=found.grid.fixed.global_batch,
        data_parallel=found.layout.dp,
        peak=results.PlanPeak(
            allocated=peaks.allocated,
            reserved=top.reserved,
            device=top.device,
            phase=top.phase,
            stage=top.stage,
        ),
        verdict=verdict,
        time=results.StepTime(
            step=found.step, **found.times, **asdict(forecast(Census(model, single), gpu, node, found.step))
        ),
        host_memory=found.host * min(found.layout.gpus, node.gpus),
        why=why(found, top, peaks.overhead, fastest, tight=verdict == "tight"),
        command=command_of(base, found, strategy),
    )


def overhead_for(gpu: GPU, found: Found) -> Overhead:
    """The overhead of a found strategy's process."""
    return overhead_of(gpu, found.grid, found.layout)


def single_grid(found: Found) -> Grid:
    """The grid of one found strategy alone, with all its pipeline stages."""
    grid, i = found.grid, found.index
    return Grid(
        grid.fixed,
        (grid.layouts[i[0]],),
        (grid.precisions[i[2]],),
        (grid.recomputes[i[3]],),
        (grid.zeros[i[4]],),
        (grid.offloads[i[5]],),
        (grid.micro_batches[i[6]],),
        every_stage=True,
    )


def short(found: Found) -> str:
    """A strategy in a few words."""
    s = strategy_of(found.grid, found.index)
    parts = [s.precision, f"zero {s.zero}", *([f"tp {s.tp}"] if s.tp > 1 else []), f"recompute {s.recompute}"]
    return ", ".join(
        [*parts, *([f"offload {'+'.join(s.offload)}"] if s.offload else []), f"micro-batch {s.micro_batch}"]
    )


def why(found: Found, top: results.StagePeak, overhead: Overhead, fastest: Found, *, tight: bool) -> str:
    """One sentence on why a plan is listed, what its time is spent on and where its peak stands."""
    gpus, times = found.layout.gpus, found.times
    largest = max(("recompute", "communication", "offload", "optimizer", "bubble"), key=lambda name: times[name])
    share = times[largest] / found.step
    spent = f"{largest} takes {share:.0%} of the step" if share >= 0.01 else "nearly all of the step is compute"
    free = f"the peak stands at {top.phase}, {(overhead.capacity - top.device) / 2**30:.1f} GiB stay free"
    slower = found.step / fastest.step - 1
    rank = "fastest that fits" if found is fastest else f"{abs(slower):.1%} {_than(slower)} than the first"
    caution = "; tight, because the upper end of its range does not fit" if tight else ""
    return f"{rank} on {gpus} GPU{'s' * (gpus > 1)}: {spent}; {free}{caution}."


def _than(slower: float) -> str:
    return "slower" if slower >= 0 else "faster"


def command_of(base: str, found: Found, s: Strategy) -> str:
    """The ``memcalc estimate`` line of a found strategy: ``base`` with what the search chose."""
    chosen = {
        "gpus": found.layout.gpus,
        "seq-len": found.grid.fixed.seq_len,
        "global-batch": found.grid.fixed.global_batch,
        "micro-batch": s.micro_batch,
        "framework": s.framework,
        "precision": s.precision,
        "zero": s.zero,
        "recompute": s.recompute,
        **{name: degree for name, degree in (("tp", s.tp), ("pp", s.pp), ("cp", s.cp), ("ep", s.ep)) if degree > 1},
        **({"offload": ",".join(s.offload)} if s.offload else {}),
    }
    return " ".join([base, *(f"--{name} {value}" for name, value in chosen.items())])


def pareto_ranks(plans: tuple[results.Plan, ...]) -> tuple[int, ...]:
    """Ranks that no other plan beats in device memory, throughput and GPU count at once."""

    def beats(a: results.Plan, b: results.Plan) -> bool:
        ours = (a.peak.device, -a.time.tokens_per_second_per_gpu, a.gpus)
        theirs = (b.peak.device, -b.time.tokens_per_second_per_gpu, b.gpus)
        return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))

    return tuple(p.rank for p in plans if not any(beats(other, p) for other in plans))


def too_large(model: Model, gpu: GPU, outcome: Outcome, overhead: Overhead) -> str:
    """Which component is too large even in the smallest strategy."""
    grid = single_grid(outcome.smallest)
    census = Census(model, grid)
    ledger = build_ledger(census, overhead.workspaces, detail=False)
    top = max(stage_peaks(census, ledger, overhead), key=lambda s: s.reserved)
    parts = components_of(ledger, grid, top).model_dump()
    name = max(parts, key=lambda key: parts[key])
    return (
        f"nothing fits on {outcome.smallest.layout.gpus} x {gpu.name}: even the smallest strategy "
        f"({short(outcome.smallest)}) needs {top.device / 2**30:.1f} of {overhead.capacity / 2**30:.1f} GiB, "
        f"of which {name} {parts[name] / 2**30:.1f} GiB."
    )


def unvalidated(plans: tuple[results.Plan, ...]) -> list[str]:
    """Which plans' times no published run validates, and why."""
    found: dict[str, list[str]] = {}
    for plan in plans:
        if not plan.time.validated:
            low, high = (end / plan.time.step for end in (plan.time.low, plan.time.high))
            said = f"{plan.time.basis}; a step may take {low:.1f} to {high:.1f} times as long"
            found.setdefault(said, []).append(f"#{plan.rank}")
    return [f"{', '.join(ranks)} are {said}" for said, ranks in found.items()]


def plan_warnings(node: Node, plans: tuple[results.Plan, ...], outcomes: Mapping[int, Outcome]) -> list[str]:
    """What the ranking does not know."""
    said = []
    said += [f"times of {where}." for where in unvalidated(plans)]
    if any(plan.host_memory for plan in plans) and node.host_memory_bytes is None:
        said.append(f"host memory of node {node.name} is unknown: offloaded plans assume that it suffices.")
    missing = [gpus for gpus, outcome in outcomes.items() if not outcome.best]
    if missing and plans:
        said.append(f"nothing fits on {', '.join(map(str, missing))} GPU{'s' * (len(missing) > 1 or missing[0] > 1)}.")
    return said
