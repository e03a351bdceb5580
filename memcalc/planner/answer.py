"""From arrays to answers: the typed results, every number taken from the same ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import __version__, results
from memcalc.formulas.census import model_count
from memcalc.formulas.flops import model_flops_utilization
from memcalc.grid import Grid
from memcalc.ledger import COMPONENTS, PHASES, Ledger, Term, add_up
from memcalc.planner import time as clock
from memcalc.specs.strategy import Strategy
from memcalc.terms import build_ledger, host_bytes, overhead_of
from memcalc.terms.activations import groups_of
from memcalc.terms.census import Census

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.planner.request import Request
    from memcalc.planner.search import Found, Outcome
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.terms import Overhead


def scalar(value: object, stage: int = 0) -> Any:
    """The one value of a column of a grid of one strategy, on a stage."""
    if not isinstance(value, np.ndarray):
        return value
    column = value.reshape(-1)
    return column[min(stage, column.size - 1)].item()


def at_stage(array: Array, stage: int, stages: int) -> int:
    """A grid array of one strategy, on a stage [bytes]."""
    return int(np.broadcast_to(array, (1, stages, 1, 1, 1, 1, 1))[0, stage].item())


def strategy_of(grid: Grid, index: tuple[int, ...] = (0,) * 7) -> Strategy:
    """The strategy at an index of the grid, every field resolved."""
    layout, fixed = grid.layouts[index[0]], grid.fixed
    return Strategy.model_validate(
        {
            "framework": fixed.framework,
            "precision": grid.precisions[index[2]],
            "optimizer": fixed.optimizer,
            "optimizer_impl": fixed.optimizer_impl,
            "optimizer_in_backward": fixed.optimizer_in_backward,
            "zero": grid.zeros[index[4]],
            "dp": layout.dp,
            "tp": layout.tp,
            "sp": layout.sp,
            "pp": layout.pp,
            "pp_schedule": fixed.pp_schedule,
            "vpp": fixed.vpp,
            "cp": layout.cp,
            "ep": layout.ep,
            "recompute": grid.recomputes[index[3]],
            "offload": grid.offloads[index[5]],
            "offload_to": fixed.offload_to,
            "attention": fixed.attention,
            "loss": fixed.loss,
            "kernels": fixed.kernels,
            "reduce_dtype": fixed.reduce_dtype,
            "micro_batch": grid.micro_batches[index[6]],
        }
    )


def verdict_of(allocated: int, overhead: Overhead) -> results.Verdict:
    """Fits; tight where the upper end of the range does not fit; or does not."""
    if overhead.device(allocated) > overhead.capacity:
        return "does-not-fit"
    return "fits" if overhead.range(allocated)[1] <= overhead.capacity else "tight"


def model_facts(model: Model) -> results.ModelFacts:
    """Name and size."""
    count = model_count(model)
    return results.ModelFacts(name=model.name, parameters=count.total, active_parameters=count.active)


def hardware_facts(gpu: GPU, node: Node, gpus: int) -> results.HardwareFacts:
    """The hardware by name."""
    return results.HardwareFacts(
        gpu=gpu.name, gpus=gpus, node=node.name, nodes=-(-gpus // node.gpus), gpus_per_node=node.gpus
    )


def estimate_of(
    model: Model, grid: Grid, gpu: GPU, node: Node, overhead: Overhead, request: Request, command: str
) -> results.Estimate:
    """The answer for a grid of one strategy."""
    ledger = build_ledger(Census(model, grid), overhead.workspace)
    stages = stage_peaks(model, ledger, grid, overhead)
    top = max(stages, key=lambda s: s.allocated)
    layout, strategy = grid.layouts[0], strategy_of(grid)
    low, high = overhead.range(top.allocated)
    host = at_stage(host_bytes(Census(model, grid)), top.stage, grid.num_stages) * min(layout.gpus, node.gpus)
    accumulation = scalar(grid.accumulation)
    return results.Estimate(
        version=__version__,
        model=model_facts(model),
        workload=results.WorkloadFacts(
            seq_len=grid.fixed.seq_len,
            micro_batch=strategy.micro_batch,
            global_batch=grid.fixed.global_batch,
            accumulation_steps=accumulation,
            tokens_per_step=grid.fixed.global_batch * grid.fixed.seq_len,
        ),
        hardware=hardware_facts(gpu, node, layout.gpus),
        strategy=strategy,
        peak=results.Peak(
            allocated=top.allocated, reserved=top.reserved, device=top.device, phase=top.phase, stage=top.stage
        ),
        interval=results.Interval(low=low, high=high, coverage=None),
        budget=budget_of(overhead),
        verdict=verdict_of(top.allocated, overhead),
        components=components_of(ledger, grid, overhead, top),
        saved=saved_of(model, grid),
        phases={phase: at_stage(ledger.phase(phase), top.stage, grid.num_stages) for phase in PHASES},
        stages=tuple(stages),
        terms=tuple(fact for fact in (term_fact(term, top.stage, grid) for term in ledger.terms) if fact.bytes),
        host_memory=host,
        warnings=tuple(warnings_for(model, gpu, node, overhead, host, strategy)),
        assumptions=request.assumptions,
        command=command,
    )


def stage_peak(ledger: Ledger, grid: Grid, overhead: Overhead, stage: int, layers: int) -> results.StagePeak:
    """One stage's three figures and the phase of its peak."""
    by_phase = {phase: at_stage(ledger.phase(phase), stage, grid.num_stages) for phase in PHASES}
    phase = max(by_phase, key=lambda name: by_phase[name])
    allocated = by_phase[phase]
    return results.StagePeak(
        stage=stage,
        allocated=allocated,
        reserved=allocated + overhead.reserve(allocated),
        device=overhead.device(allocated),
        phase=phase,
        layers=layers,
    )


def stage_peaks(model: Model, ledger: Ledger, grid: Grid, overhead: Overhead) -> list[results.StagePeak]:
    """Every stage's own peak."""
    layers = add_up(list(Census(model, grid).layers))
    stages = grid.num_stages
    return [stage_peak(ledger, grid, overhead, stage, at_stage(layers, stage, stages)) for stage in range(stages)]


def budget_of(overhead: Overhead) -> results.Budget:
    """What the GPU has for tensors."""
    usable = overhead.usable
    return results.Budget(
        capacity=overhead.capacity,
        context=overhead.context,
        libraries=overhead.libraries,
        reserve=overhead.room - usable,
        usable=usable,
    )


def components_of(ledger: Ledger, grid: Grid, overhead: Overhead, top: results.StagePeak) -> results.Components:
    """Bytes by component at the peak phase of the peak stage."""
    named = {
        name: at_stage(ledger.component(name, top.phase), top.stage, grid.num_stages)
        for name in COMPONENTS
        if name != "reserve"
    }
    return results.Components(**named, reserve=overhead.reserve(top.allocated))


def saved_of(model: Model, grid: Grid) -> results.Saved:
    """What one micro-batch keeps for backward: one block of the main group, outside the blocks, the fullest stage."""
    census = Census(model, grid)
    groups = groups_of(census)
    main = next(g for g in groups if g.group is model.main)
    kept, blocks = main.kept, main.layers
    per_block = int(np.max(kept // np.maximum(blocks, 1)))
    ledger = {term.name: term for term in build_ledger(census, 0).terms}
    outside = scalar(ledger["final norm"].bytes, grid.num_stages - 1) if "final norm" in ledger else 0
    logits = scalar(ledger["logits and loss"].bytes, grid.num_stages - 1) if "logits and loss" in ledger else 0
    total = sum((g.kept for g in groups), np.int64(0)) + (outside + logits) * grid.is_last
    return results.Saved(per_block=per_block, outside_blocks=outside + logits, total=int(np.max(total)))


def term_fact(term: Term, stage: int, grid: Grid) -> results.TermFacts:
    """A term of a grid of one strategy."""
    return results.TermFacts(
        component=term.component,
        name=term.name,
        bytes=at_stage(term.bytes, stage, grid.num_stages),
        phases=term.phases,
        formula=term.formula,
        inputs={name: scalar(value, stage) for name, value in term.inputs.items()},
        source=term.source,
    )


def warnings_for(model: Model, gpu: GPU, node: Node, overhead: Overhead, host: int, strategy: Strategy) -> list[str]:
    """What the figure does not know."""
    said = []
    if overhead.context_assumed:
        said.append(f"no measured context size of {gpu.name} is known: 0.5 GiB assumed (published: 0.13 to 0.70 GiB).")
    if host and node.host_memory_bytes is None:
        said.append(f"host memory of node {node.name} is unknown: this strategy needs {host / 2**30:.1f} GiB of it.")
    elif node.host_memory_bytes is not None and host > node.host_memory_bytes and strategy.offload_to == "cpu":
        said.append(
            f"host memory: {host / 2**30:.1f} GiB needed, {node.host_memory_bytes / 2**30:.1f} GiB in node {node.name}."
        )
    if model.is_moe:
        said.append("experts are assumed to be balanced; buffers of the token exchange are not modelled.")
    return said


def plans_of(
    model: Model,
    gpu: GPU,
    node: Node,
    outcomes: Mapping[int, Outcome],
    nearest: list[tuple[str, int]],
    request: Request,
    command: str,
    base: str,
    started: float,
) -> results.Plans:
    """The answer of a search over one or several GPU counts."""
    found = [(outcome.best[0], f) for outcome in outcomes.values() for f in outcome.best]
    plans = tuple(plan_of(rank, model, gpu, node, f, fastest, base) for rank, (fastest, f) in enumerate(found, 1))
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
        too_large="" if plans else too_large(model, gpu, outcomes[last], overhead_of(gpu, last)),
        capacity=gpu.memory_bytes,
        warnings=tuple(plan_warnings(gpu, node, plans, outcomes)),
        assumptions=request.assumptions,
        command=command,
    )


def plan_of(rank: int, model: Model, gpu: GPU, node: Node, found: Found, fastest: Found, base: str) -> results.Plan:
    """One ranked plan, with the same figures that ``estimate`` gives for it."""
    single, overhead = single_grid(found), overhead_of(gpu, found.layout.gpus)
    ledger = build_ledger(Census(model, single), overhead.workspace, detail=False)
    top = max(stage_peaks(model, ledger, single, overhead), key=lambda s: s.allocated)
    strategy = strategy_of(found.grid, found.index)
    speed = found.tokens_per_second_per_gpu
    flops = clock.model_flops_per_token(model, found.grid.fixed.seq_len)
    usage = float(model_flops_utilization(speed, flops, clock.peak_flops(gpu, strategy.precision)))
    return results.Plan(
        rank=rank,
        gpus=found.layout.gpus,
        strategy=strategy,
        accumulation_steps=scalar(single.accumulation),
        global_batch=found.grid.fixed.global_batch,
        data_parallel=found.layout.dp,
        peak=results.PlanPeak(
            allocated=top.allocated, reserved=top.reserved, device=top.device, phase=top.phase, stage=top.stage
        ),
        verdict=verdict_of(top.allocated, overhead),
        time=results.StepTime(step=found.step, tokens_per_second_per_gpu=speed, mfu=usage, **found.times),
        host_memory=found.host * min(found.layout.gpus, node.gpus),
        why=why(found, top, overhead, fastest),
        command=command_of(base, found, strategy),
    )


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


def why(found: Found, top: results.StagePeak, overhead: Overhead, fastest: Found) -> str:
    """One sentence on why a plan is listed, what its time is spent on and where its peak stands."""
    gpus, times = found.layout.gpus, found.times
    largest = max(("recompute", "communication", "offload", "bubble"), key=lambda name: times[name])
    share = times[largest] / found.step
    spent = f"{largest} takes {share:.0%} of the step" if share >= 0.01 else "nearly all of the step is compute"
    free = f"the peak stands at {top.phase}, {(overhead.capacity - top.device) / 2**30:.1f} GiB stay free"
    slower = found.step / fastest.step - 1
    rank = "fastest that fits" if found is fastest else f"{abs(slower):.1%} {_than(slower)} than the first"
    tight = verdict_of(top.allocated, overhead) == "tight"
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
    ledger = build_ledger(Census(model, grid), overhead.workspace, detail=False)
    top = max(stage_peaks(model, ledger, grid, overhead), key=lambda s: s.allocated)
    parts = components_of(ledger, grid, overhead, top).model_dump()
    name = max(parts, key=lambda key: parts[key])
    return (
        f"nothing fits on {outcome.smallest.layout.gpus} x {gpu.name}: even the smallest strategy "
        f"({short(outcome.smallest)}) needs {top.device / 2**30:.1f} of {overhead.capacity / 2**30:.1f} GiB, "
        f"of which {name} {parts[name] / 2**30:.1f} GiB."
    )


def plan_warnings(gpu: GPU, node: Node, plans: tuple[results.Plan, ...], outcomes: Mapping[int, Outcome]) -> list[str]:
    """What the ranking does not know."""
    said = []
    if not clock.is_validated(gpu):
        said.append(f"times on {gpu.name} are not validated by any published run.")
    if any(plan.strategy.offload for plan in plans):
        said.append(
            "offload times are PCIe traffic alone and not validated; the CPU's own optimizer time comes on top."
        )
    if any(plan.host_memory for plan in plans) and node.host_memory_bytes is None:
        said.append(f"host memory of node {node.name} is unknown: offloaded plans assume that it suffices.")
    missing = [gpus for gpus, outcome in outcomes.items() if not outcome.best]
    if missing and plans:
        said.append(f"nothing fits on {', '.join(map(str, missing))} GPU{'s' * (len(missing) > 1 or missing[0] > 1)}.")
    return said
