"""The answer to one strategy: the typed results, every number taken from the same ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import catalog
from memcalc._version import __version__
from memcalc.frameworks import habits_of
from memcalc.frameworks.capabilities import own_code
from memcalc.grid import layout_of
from memcalc.ledger import COMPONENTS, PHASES, Ledger, Term, add_up
from memcalc.planner.as_is import notes_of
from memcalc.planner.budget import (
    NO_SWAPPER,
    OffloadNeed,
    activation_budget_of,
    lacking,
    lacks_nvme_swap,
    offload_need,
    outside_terms,
    recompute_warnings,
    reserve_terms,
    shortages,
)
from memcalc.planner.direct import OWN_CODE
from memcalc.planner.idle import idle_warnings
from memcalc.planner.stage_peaks import Peaks, at_stage, peaks_of
from memcalc.results.estimates import (
    Budget,
    Components,
    Estimate,
    HardwareFacts,
    ModelFacts,
    OffGpuTerm,
    Peak,
    Saved,
    StagePeak,
    TermFacts,
    WorkloadFacts,
)
from memcalc.specs.adapters import ON_STACKS
from memcalc.specs.job import command_line
from memcalc.specs.options import NEEDING, OPTIONS
from memcalc.specs.strategy import Strategy
from memcalc.terms.activations import groups_of
from memcalc.terms.build import build_ledger
from memcalc.terms.head import head_kept
from memcalc.terms.host import off_gpu_terms
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import NAMES, REPORTED, STAND_IN, borrowed_of
from memcalc.terms.parameters import model_count
from memcalc.terms.pipeline import in_flight
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.grid import Grid
    from memcalc.planner.request import Request
    from memcalc.planner.varying import Sequence
    from memcalc.results.details import LengthFacts, Timeline
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.job import JobRecord
    from memcalc.specs.model import Model
    from memcalc.terms.overhead import Overhead


NEARLY_ALL = 0.98
"""Share of the longest micro-batch's tokens from which the mean one takes as long."""


def scalar(value: object, stage: int = 0) -> Any:
    """The one value of a column of a grid of one strategy, on a stage."""
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    column = value.reshape(-1)
    number = column[min(stage, column.size - 1)].item()
    return int(number) if isinstance(number, float) and number.is_integer() else number


def strategy_of(grid: Grid, index: tuple[int, ...] = (0,) * 7) -> Strategy:
    """The strategy at an index of the grid, every field resolved."""
    layout = vars(grid.layouts[index[0]])
    axes = {
        **{name: layout[name] for name in layout.keys() & Strategy.model_fields.keys()},
        "pp_schedule": layout["schedule"],
        "precision": grid.precisions[index[2]],
        "recompute": grid.recomputes[index[3]],
        "zero": grid.zeros[index[4]],
        "offload": grid.offloads[index[5]],
        "micro_batch": grid.micro_batches[index[6]],
        **{row.name: row.default for row in NEEDING if layout.get(row.needs) == 1},
    }
    return Strategy.model_validate({name: getattr(grid.fixed, name) for name in Strategy.model_fields} | axes)


def model_facts(model: Model) -> ModelFacts:
    """Name and size."""
    count = model_count(model)
    return ModelFacts(name=model.name, parameters=count.total, active_parameters=count.active)


def hardware_facts(gpu: GPU, node: Node, gpus: int) -> HardwareFacts:
    """The hardware by name."""
    each = node.gpus_per_host
    return HardwareFacts(gpu=gpu.name, gpus=gpus, node=node.name, nodes=-(-gpus // each), gpus_per_node=each)


def _timelines(census: ModelOnGrid, ledger: Ledger, overhead: Overhead, top: int) -> tuple[Timeline, ...]:
    from memcalc.planner.timelines import timelines

    return timelines(census, ledger, overhead, top)


def estimate_of(
    census: ModelOnGrid,
    gpu: GPU,
    node: Node,
    overhead: Overhead,
    request: Request,
    record: JobRecord,
    *,
    timeline: bool = False,
    budget: bool = True,
    remarks: bool = True,
    sequence: Sequence | None = None,
) -> Estimate:
    """The answer for a grid of one strategy; with ``timeline`` also one step, allocation by allocation.

    With ``budget`` what the states leave for activations, and the micro-batch and segments that fit in there; with
    ``remarks`` whether recomputation is worth its time.

    ``sequence`` are micro-batches that differ in length, of which the grid has the longest.
    """
    model, grid = census.model, census.grid
    ledger = build_ledger(census, overhead.workspaces)
    alone = peaks = peaks_of(census, ledger, overhead)
    if sequence is not None and alone.verdict != "does-not-fit":
        peaks = peaks_of(census, ledger, overhead, also=sequence.played)
    facts = None if sequence is None else sequence.facts(alone, peaks)
    need = offload_need(census, node)
    peaks = replace(peaks, beside=lacking(need, node))
    top, layout, strategy = peaks.top, grid.layouts[0], strategy_of(grid)
    return Estimate(
        version=__version__,
        model=model_facts(model),
        workload=_workload_facts(grid),
        hardware=hardware_facts(gpu, node, layout.gpus),
        strategy=strategy,
        peak=peaks.at(Peak),
        interval=peaks.interval,
        budget=budget_of(overhead),
        activation_budget=activation_budget_of(census, gpu, ledger, peaks) if budget else None,
        verdict=peaks.verdict,
        flushes=peaks.flushes,
        reason=peaks.reason,
        components=components_of(ledger, grid, top),
        saved=saved_of(census),
        phases={phase: at_stage(ledger.phase(phase), top.stage, grid.num_stages) for phase in PHASES},
        stages=staged(census, ledger, peaks),
        timeline=_timelines(census, ledger, overhead, top.stage) if timeline else (),
        terms=terms_of(ledger, grid, peaks),
        outside=tuple(outside_terms(overhead)),
        off_gpu=off_gpu_of(census),
        host_memory=need.host,
        tier_memory=need.tier,
        lengths=facts,
        warnings=(
            *request.warnings,
            *idle_warnings(request, strategy, census),
            *warnings_for(model, gpu, node, overhead, need, strategy),
            *flush_warnings(peaks),
            *(recompute_warnings(census, gpu, node, overhead) if remarks else ()),
            *time_warnings(facts),
        ),
        assumptions=request.assumptions,
        job=record,
        command=command_line(record),
    )


def _workload_facts(grid: Grid) -> WorkloadFacts:
    seq_len, global_batch = grid.fixed.seq_len, grid.fixed.global_batch
    return WorkloadFacts(
        seq_len=seq_len,
        micro_batch=grid.micro_batches[0],
        global_batch=global_batch,
        accumulation_steps=scalar(grid.accumulation),
        tokens_per_step=global_batch * seq_len,
    )


def budget_of(overhead: Overhead) -> Budget:
    """What the GPU has for tensors."""
    usable = overhead.usable
    return Budget(
        capacity=overhead.capacity,
        context=overhead.context,
        libraries=overhead.libraries,
        reserve=overhead.room - usable,
        usable=usable,
    )


def components_of(ledger: Ledger, grid: Grid, top: StagePeak) -> Components:
    """Bytes by component at the peak phase of the peak stage; the reserve is all that is reserved beyond them."""
    named = {
        name: at_stage(ledger.component(name, top.phase), top.stage, grid.num_stages)
        for name in COMPONENTS
        if name != "reserve"
    }
    return Components(**named, reserve=top.reserved - top.allocated)


def staged(census: ModelOnGrid, ledger: Ledger, peaks: Peaks) -> tuple[StagePeak, ...]:
    """Every stage with its allocated bytes by phase and component."""
    count, live = census.grid.num_stages, in_flight(census.grid)
    phases: list[dict[str, dict[str, int]]] = [{phase: {} for phase in PHASES} for _ in range(count)]
    for phase in PHASES:
        for name in COMPONENTS[:-1]:
            column = np.broadcast_to(ledger.component(name, phase), (1, count, 1, 1, 1, 1, 1)).reshape(-1).tolist()
            for stage, size in zip(phases, column, strict=True):
                stage[phase][name] = int(size)
    return tuple(
        peak.model_copy(update={"phases": phases[peak.stage], "in_flight": at_stage(live, peak.stage, count)})
        for peak in peaks.stages
    )


def saved_of(census: ModelOnGrid) -> Saved:
    """What one micro-batch keeps for backward: one block of the main group, outside the blocks, the fullest stage."""
    groups = groups_of(census)
    main = next(g for g in groups if g.group is census.model.main)
    saved, blocks = main.kept, main.layers
    per_block = int(np.max(saved // np.maximum(blocks, 1)))
    outside = head_kept(census)
    total = add_up([*(np.asarray(g.kept) for g in groups), outside])
    return Saved(per_block=per_block, outside_blocks=int(np.max(outside)), total=int(np.max(total)))


def terms_of(ledger: Ledger, grid: Grid, peaks: Peaks) -> tuple[TermFacts, ...]:
    """The terms of the stage where the peak stands: those of tensors, and of the reserve."""
    facts = (*(term_fact(term, peaks.top.stage, grid) for term in ledger.terms), *reserve_terms(peaks))
    return tuple(fact for fact in facts if fact.bytes)


def term_fact(term: Term, stage: int, grid: Grid) -> TermFacts:
    """A term of a grid of one strategy."""
    return TermFacts(
        component=term.component,
        name=term.name,
        bytes=at_stage(term.bytes, stage, grid.num_stages),
        phases=term.phases,
        formula=term.formula,
        inputs={name: scalar(value, stage) for name, value in term.inputs.items()},
        source=term.source,
    )


def off_gpu_of(census: ModelOnGrid) -> tuple[OffGpuTerm, ...]:
    """What a rank keeps off the GPU, on the stage that keeps most there."""
    grid, terms = census.grid, off_gpu_terms(census)
    sizes = [sum(at_stage(term.bytes, stage, grid.num_stages) for term in terms) for stage in range(grid.num_stages)]
    stage = sizes.index(max(sizes))
    facts = [(term_fact(term, stage, grid), term.tier) for term in terms]
    return tuple(OffGpuTerm(**fact.model_dump(), tier=tier) for fact, tier in facts if fact.bytes)


LOWER_BOUND = "the prediction is a lower bound; its range ends at the highest of the few figures that were reported"


FSDP_1 = (
    "hf over several GPUs is FSDP 1, which Transformers 5 deprecates; its default is FSDP 2: --framework fsdp2 "
    "(plan: --to trainer)."
)


def is_deprecated(strategy: Strategy) -> bool:
    """Whether a job runs FSDP 1 under a Transformers that warns of it (5.24 training_args.py, _process_fsdp_args)."""
    return strategy.framework == "hf" and strategy.zero > 0 and strategy.dp * strategy.cp > 1


def warnings_for(
    model: Model, gpu: GPU, node: Node, overhead: Overhead, need: OffloadNeed, strategy: Strategy
) -> list[str]:
    """What the figure does not know."""
    text = []
    if overhead.context_assumed:
        text.append(f"CUDA context of {gpu.name} not measured; assuming 0.5 GiB (published: 0.13 to 0.70 GiB).")
    text += borrowed_warnings(gpu, overhead.borrowed)
    if overhead.unexplained.kind in REPORTED:
        text.append(f"{overhead.unexplained.kind}: {LOWER_BOUND} (+{overhead.unexplained.high:.0%}).")
    text += [f"{strategy.framework} needs {OWN_CODE}: {sentence}." for sentence in own_code(strategy, model)]
    text += shortages(need, node)
    if is_deprecated(strategy):
        text.append(FSDP_1)
    if lacks_nvme_swap(strategy):
        text.append(NO_SWAPPER)
    for wrong in gpu.calibration.residual if gpu.calibration else ():
        if wrong.speaks_of(strategy.model_dump()):
            less = f"{abs(wrong.error):.1%} {'less' if wrong.error > 0 else 'more'}"
            where = f"runs of the calibration with {wrong.where}" if wrong.shared else "the calibration's runs"
            text.append(
                f"calibration: {where} allocated {less} than predicted ({len(wrong.rows)} rows). Not corrected here."
            )
    text += notes_of(model, strategy.precision, strategy.recompute, strategy.micro_batch)
    if model.is_moe:
        rows = f"{strategy.expert_overload:g} times" if strategy.expert_overload > 1 else ""
        share = f"counted with {rows} an equal share of the tokens" if rows else "assumed balanced"
        sent = " counted within a node" if strategy.moe_dispatcher == "alltoall" else " are not modelled"
        text.append(f"experts are {share}; exchange buffers{sent}.")
    if strategy.zero == 3 and any(name in strategy.lora for name in ON_STACKS):
        text.append("adapters on stacked experts are compared with PEFT's where a rank has the weights whole.")
    filled = filled_experts(model, strategy)
    if filled is not None:
        text.append(
            f"{filled}; groups of ranks that divide the experts (--dp-replicate) have none of it, but more of all else."
        )
    extra = [row.uncounted for row in OPTIONS if row.uncounted and getattr(strategy, row.name) != row.default]
    if extra:
        text.append(f"not counted in memory: {', '.join(extra)}.")
    return text


def filled_experts(model: Model, strategy: Strategy) -> str | None:
    """What FSDP 2 does to experts that are fewer than the ranks of a group, or that these do not divide."""
    sharded = habits_of(strategy.framework).fills_experts and strategy.zero >= 2 and strategy.ep == 1
    if not (model.is_moe and sharded):
        return None
    experts = max(getattr(group.block.mlp, "experts", 0) for group in model.groups)
    ranks = strategy.dp * strategy.cp // strategy.dp_replicate
    filled = -(-experts // ranks) * ranks
    if filled == experts:
        return None
    return (
        f"a block's {experts} experts are one tensor, which FSDP 2 divides by experts: over {ranks} ranks it is filled "
        f"up to {filled}, {filled / experts:.3g} times their weights, gradients and states"
    )


def borrowed_warnings(gpu: GPU, parts: Iterable[str]) -> list[str]:
    """A warning where figures beside the tensors are another vendor's."""
    *most, last = dict.fromkeys(parts) or ("",)
    if not last:
        return []
    listed = f"{', '.join(most)} and {last}" if most else last
    theirs, vendor = catalog.vendor(STAND_IN).title, catalog.vendor(gpu.vendor).title
    return [f"{listed}: no figure measured on {vendor} is known; those of {theirs} are counted for {gpu.name}."]


def borrowed_by(gpu: GPU, strategies: Iterable[Strategy]) -> list[str]:
    """The same for what several strategies count."""
    layouts = [(s, layout_of(s)) for s in strategies]
    parts = [part for s, layout in layouts for part in borrowed_of(gpu, habits_of(s.framework), layout)]
    return borrowed_warnings(gpu, sorted(parts, key=list(NAMES.values()).index))


def time_warnings(facts: LengthFacts | None) -> tuple[str, ...]:
    """What the time of a step is not, where micro-batches differ in length."""
    if facts is None or facts.mean_tokens > NEARLY_ALL * facts.rows * facts.tokens:
        return ()
    share = facts.mean_tokens / (facts.rows * facts.tokens)
    return (f"the step's time is that of longest micro-batches; the mean one has {share:.0%} of their tokens.",)


def flush_warnings(peaks: Peaks) -> tuple[str, ...]:
    """What a full card does to the allocator."""
    if not peaks.is_flushed:
        return ()
    most = max((stage.most for stage in peaks.replays), default=peaks.overhead.room)
    low, high = peaks.allocated / GIB, most / GIB
    how = f"fits only because the allocator frees its cache {peaks.often}{', which is slow' * (peaks.flushes > 0)}"
    return (f"{how}; reserved is between {low:.1f} and {high:.1f} GiB.",)
