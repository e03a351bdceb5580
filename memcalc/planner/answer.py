"""The answer to one strategy: the typed results, every number taken from the same ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import __version__, results
from memcalc.formulas.census import model_count
from memcalc.frameworks import habits_of
from memcalc.ledger import COMPONENTS, PHASES, Ledger, Term
from memcalc.planner.peaks import Peaks, at_stage, peaks_of
from memcalc.planner.recorded import notes_of
from memcalc.planner.rooms import NO_SWAPPER, Need, has_no_swapper, need_of, shortages
from memcalc.specs.strategy import Strategy
from memcalc.sums import add_up
from memcalc.terms import build_ledger, off_gpu_terms
from memcalc.terms.activations import groups_of
from memcalc.terms.census import Census
from memcalc.terms.head import head_kept
from memcalc.terms.pipeline import in_flight

if TYPE_CHECKING:
    from memcalc.grid import Grid
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.terms import Overhead


EXTRA = (
    "compile",
    "cp_kind",
    "etp",
    "mtp",
    "microbatch_group",
    "first_stage_layers",
    "last_stage_layers",
    "embedding_in_split",
    "loss_in_split",
    "wgrad_fusion",
    "float8",
    "float8_all_gather",
    "async_tp",
    "fsdp_schedule",
    "reshard",
    "expandable_segments",
    "adapter_dtype",
    "autocast",
    "also_train",
    "quantize",
    "lora_dropout",
    "lora_kernels",
    "gptq_group",
    "prepare_kbit",
    "wide_embedding_moments",
    "bucket_view",
    "whole_accumulation",
    "partition_activations",
    "grad_accum_dtype",
    "reduce_bucket_size",
    "overlap_comm",
    "zero_prefetch_bucket",
    "persistence_threshold",
    "max_live_parameters",
    "sub_group_size",
)
"""Fields of the strategy that are the same in a whole grid, beyond those named one by one."""


def scalar(value: object, stage: int = 0) -> Any:
    """The one value of a column of a grid of one strategy, on a stage."""
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    column = value.reshape(-1)
    number = column[min(stage, column.size - 1)].item()
    return int(number) if isinstance(number, float) and number.is_integer() else number


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
            "pp_schedule": layout.schedule,
            "vpp": layout.vpp,
            "cp": layout.cp,
            "ep": layout.ep,
            "recompute": grid.recomputes[index[3]],
            "offload": grid.offloads[index[5]],
            "offload_to": fixed.offload_to,
            "attention": fixed.attention,
            "loss": fixed.loss,
            "kernels": fixed.kernels,
            "reduce_dtype": fixed.reduce_dtype,
            "checkpoint": fixed.checkpoint,
            **{name: getattr(fixed, name) for name in EXTRA},
            "lora": str(fixed.lora or ""),
            "micro_batch": grid.micro_batches[index[6]],
        }
    )


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
    model: Model,
    grid: Grid,
    gpu: GPU,
    node: Node,
    overhead: Overhead,
    request: Request,
    command: str,
    *,
    timeline: bool = False,
) -> results.Estimate:
    """The answer for a grid of one strategy; with ``timeline`` also one step, allocation by allocation."""
    census = Census(model, grid)
    ledger = build_ledger(census, overhead.workspaces)
    peaks = peaks_of(census, ledger, overhead)
    top, layout, strategy = peaks.top, grid.layouts[0], strategy_of(grid)
    need = need_of(census, node)
    return results.Estimate(
        version=__version__,
        model=model_facts(model),
        workload=_workload_facts(grid),
        hardware=hardware_facts(gpu, node, layout.gpus),
        strategy=strategy,
        peak=results.Peak(
            allocated=peaks.allocated,
            reserved=top.reserved,
            device=top.device,
            phase=top.phase,
            stage=top.stage,
        ),
        interval=peaks.interval,
        budget=budget_of(overhead),
        verdict=peaks.verdict,
        components=components_of(ledger, grid, top),
        saved=saved_of(census),
        phases={phase: at_stage(ledger.phase(phase), top.stage, grid.num_stages) for phase in PHASES},
        stages=staged(census, ledger, peaks),
        timeline=_timeline(census, ledger, overhead, top.stage) if timeline else (),
        terms=tuple(fact for fact in (term_fact(term, top.stage, grid) for term in ledger.terms) if fact.bytes),
        off_gpu=off_gpu_of(census),
        host_memory=need.host,
        tier_memory=need.tier,
        warnings=(*warnings_for(model, gpu, node, overhead, need, strategy), *retry_warnings(peaks)),
        assumptions=request.assumptions,
        command=command,
    )


def _workload_facts(grid: Grid) -> results.WorkloadFacts:
    """What is fed to a grid of one strategy."""
    seq_len, global_batch = grid.fixed.seq_len, grid.fixed.global_batch
    return results.WorkloadFacts(
        seq_len=seq_len,
        micro_batch=grid.micro_batches[0],
        global_batch=global_batch,
        accumulation_steps=scalar(grid.accumulation),
        tokens_per_step=global_batch * seq_len,
    )


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


def components_of(ledger: Ledger, grid: Grid, top: results.StagePeak) -> results.Components:
    """Bytes by component at the peak phase of the peak stage; the reserve is all that is reserved beyond them."""
    named = {
        name: at_stage(ledger.component(name, top.phase), top.stage, grid.num_stages)
        for name in COMPONENTS
        if name != "reserve"
    }
    return results.Components(**named, reserve=top.reserved - top.allocated)


def staged(census: Census, ledger: Ledger, peaks: Peaks) -> tuple[results.StagePeak, ...]:
    """Every stage with its allocated bytes by phase and component."""
    count, held = census.grid.num_stages, in_flight(census.grid)
    phases: list[dict[str, dict[str, int]]] = [{phase: {} for phase in PHASES} for _ in range(count)]
    for phase in PHASES:
        for name in COMPONENTS[:-1]:
            column = np.broadcast_to(ledger.component(name, phase), (1, count, 1, 1, 1, 1, 1)).reshape(-1).tolist()
            for stage, size in zip(phases, column, strict=True):
                stage[phase][name] = int(size)
    return tuple(
        peak.model_copy(update={"phases": phases[peak.stage], "in_flight": at_stage(held, peak.stage, count)})
        for peak in peaks.stages
    )


def _timeline(census: Census, ledger: Ledger, overhead: Overhead, top: int) -> tuple[results.Timeline, ...]:
    from memcalc.planner.timeline import timelines

    return timelines(census, ledger, overhead, top)


def saved_of(census: Census) -> results.Saved:
    """What one micro-batch keeps for backward: one block of the main group, outside the blocks, the fullest stage."""
    groups = groups_of(census)
    main = next(g for g in groups if g.group is census.model.main)
    kept, blocks = main.kept, main.layers
    per_block = int(np.max(kept // np.maximum(blocks, 1)))
    outside = head_kept(census)
    total = add_up([*(np.asarray(g.kept) for g in groups), outside])
    return results.Saved(per_block=per_block, outside_blocks=int(np.max(outside)), total=int(np.max(total)))


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


def off_gpu_of(census: Census) -> tuple[results.OffGpuTerm, ...]:
    """What a rank keeps off the GPU, on the stage that keeps most there."""
    grid, terms = census.grid, off_gpu_terms(census)
    sizes = [sum(at_stage(term.bytes, stage, grid.num_stages) for term in terms) for stage in range(grid.num_stages)]
    stage = sizes.index(max(sizes))
    facts = [(term_fact(term, stage, grid), term.tier) for term in terms]
    return tuple(results.OffGpuTerm(**fact.model_dump(), tier=tier) for fact, tier in facts if fact.bytes)


def warnings_for(model: Model, gpu: GPU, node: Node, overhead: Overhead, need: Need, strategy: Strategy) -> list[str]:
    """What the figure does not know."""
    said = []
    if overhead.context_assumed:
        said.append(f"no measured context size of {gpu.name} is known: 0.5 GiB assumed (published: 0.13 to 0.70 GiB).")
    said += shortages(need, node)
    if has_no_swapper(strategy):
        said.append(NO_SWAPPER)
    forked = habits_of(strategy.framework)
    if strategy.pp_schedule in forked.fork_schedules:
        said.append(f"{strategy.pp_schedule} is not in {forked.name} itself but in a fork of it, {forked.fork}.")
    for wrong in gpu.calibration.residual if gpu.calibration else ():
        if wrong.speaks_of(strategy.model_dump()):
            less = f"{abs(wrong.error):.1%} {'less' if wrong.error > 0 else 'more'}"
            where = f"runs of the calibration with {wrong.where}" if wrong.shared else "the calibration's runs"
            said.append(f"{where} allocated {less} than predicted ({len(wrong.rows)} rows): no figure here has that.")
    said += notes_of(model, strategy.precision, strategy.recompute, strategy.micro_batch)
    if model.is_moe:
        said.append("experts are assumed to be balanced; buffers of the token exchange are not modelled.")
    return said


def retry_warnings(peaks: Peaks) -> tuple[str, ...]:
    """What a full card does to the allocator."""
    played = peaks.replayed
    if played is None or not played.retries or peaks.verdict == "does-not-fit":
        return ()
    low, high = peaks.allocated / 2**30, played.most / 2**30
    slow = f"fits with retries: in two steps the allocator gave its cache back {played.retries} times, which is slow"
    return (f"{slow}; reserved is between {low:.1f} and {high:.1f} GiB.",)
