"""A change of a job that does not fit, as it is typed, and what the search says of the job with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import catalog
from memcalc.errors import MemcalcError
from memcalc.frameworks import grows_segments, habits_of
from memcalc.frameworks.habits import rewritten
from memcalc.planner import defaults
from memcalc.planner.as_is import check_class
from memcalc.planner.budget import offload_need, unknown_to
from memcalc.planner.choice import FASTEST_ONLY, best_plan
from memcalc.planner.costs import ROUNDING
from memcalc.planner.direct import is_launched, is_told, smaller_losses
from memcalc.planner.finalists import SimulatedPlan, finalist, in_sequence, single_ledger, time_of
from memcalc.planner.job import strategy_record, value_text
from memcalc.planner.request import check_words, flag
from memcalc.planner.search import Wanted
from memcalc.planner.shortlist import shortlists
from memcalc.results.plans import Nearest, RemedyGroup
from memcalc.specs.job import JobRecord, command_line

if TYPE_CHECKING:
    from memcalc.planner.job import PlanJob
    from memcalc.planner.search import Candidate

ADAPTED = 128
"""GPUs up to which adapters are proposed in the place of weights: who has more trains the whole model."""
NEARLY = 2.0
"""Times the capacity up to which a change that does not suffice is named."""
EXPANDABLE = {"strategy.expandable_segments": True}
"""The environment variable ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""


@dataclass(frozen=True)
class Change:
    """What is typed besides, or in the place of something."""

    group: RemedyGroup
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields by dotted name."""

    @property
    def text(self) -> str:
        """As it is typed.

        >>> Change("numerics", {"optimizer": "adamw-8bit"}, {"strategy.reshard": "never"}).text
        '--optimizer adamw-8bit --set strategy.reshard=never'
        """
        flags = [f"--{flag(name)} {value_text(value)}" for name, value in self.options.items()]
        return " ".join([*flags, *(f"--set {name}={value_text(value)}" for name, value in self.settings.items())])

    def has(self, other: Change) -> bool:
        """Whether it decides something that the other does."""
        return not {*self.options, *self.settings}.isdisjoint({*other.options, *other.settings})

    def beside(self, other: Change) -> Change:
        """Both, in the group of the other."""
        return Change(other.group, {**self.options, **other.options}, {**self.settings, **other.settings})

    def applied(self, job: PlanJob) -> PlanJob:
        """The job with the change; an error where an option is not possible."""
        options = {name: value for name, value in self.options.items() if name != "gpu"}
        given = check_words(options, self.settings).given
        fields = {**job.request.given["fields"], **given.pop("fields")}
        changed = job.pinned(**given, fields=fields)
        check_class(changed.request, job.model)
        changed.request.launched = is_launched(changed.request, job.model)
        if "framework" in options:
            changed = replace(changed, model=rewritten(job.model, habits_of(options["framework"]).own_code))
        if "gpu" not in self.options:
            return changed
        gpu = catalog.gpu(self.options["gpu"])
        return type(job)(changed.request, job.model, gpu, catalog.node_for(gpu))

    def recorded(self, record: JobRecord) -> JobRecord:
        """What is asked then."""
        options = {name: value for name, value in self.options.items() if name != "gpu"}
        settings = {**record.settings, **self.settings}
        moved = {"gpu": self.options["gpu"], "node": None} if "gpu" in self.options else {}
        return record.with_options(**options).model_copy(update={"settings": settings, **moved})


@dataclass(frozen=True)
class Search:
    """A job that does not fit, or not well, and the searches for what does."""

    job: PlanJob
    gpus: int
    record: JobRecord
    """What was asked."""
    opened: bool = True
    """Whether what is given may be left to the search."""
    elsewhere: bool = False
    """Whether other frameworks are looked at."""
    _changed: dict[str, PlanJob] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def baseline(self) -> float | None:
        """Throughput of the job as asked for [tokens/s per GPU], whatever its memory."""
        outcome = self.job.unlimited().search([self.gpus], FASTEST_ONLY).get(self.gpus)
        return outcome.best[0].tokens_per_second_per_gpu if outcome and outcome.best else None

    @property
    def given(self) -> Mapping[str, Any]:
        """What the user says."""
        return self.job.request.given

    def changed(self, change: Change) -> PlanJob:
        """The job with a change, which keeps what was found for it."""
        if change.text not in self._changed:
            self._changed[change.text] = change.applied(self.job)
        return self._changed[change.text]

    def fitting(self, change: Change) -> Iterator[Nearest]:
        """The change, where the job fits with it; a tight one also beside what is free, the first that fits."""
        return (self.answer(made, plan) for made, plan in self.plans(change))

    def plans(self, change: Change) -> Iterator[tuple[Change, SimulatedPlan]]:
        """The same, as the search finds it: nothing is compared with the job as asked for."""
        plan = self.plan(change)
        if plan is None:
            return
        yield change, plan
        for free in (*self.free, *self.unwrapped) if plan.is_tight else ():
            both = free.beside(change)
            relaxed = None if change.has(free) else self.plan(both)
            if relaxed is not None and not relaxed.is_tight:
                yield both, relaxed
                return

    def plan(self, change: Change) -> SimulatedPlan | None:
        """The plan that the search lists first with a change; None where nothing fits or it is not possible."""
        gpus, same_gpu = int(change.options.get("gpus", self.gpus)), "gpu" not in change.options
        try:
            return best_plan(self.changed(change), gpus, trusting=same_gpu)
        except MemcalcError:
            return None

    def may_reach(self, change: Change, speed: float) -> bool:
        """Whether a plan runs with a change that is as fast [tokens/s per GPU]: a search for no slower one."""
        most = 1 / (speed * self.gpus) * (1 + ROUNDING)
        try:
            lists = shortlists(self.changed(change), [self.gpus], Wanted(most=most))
        except MemcalcError:
            return False
        return any(short.first(limit=most) is not None for short in lists.values())

    def answer(self, change: Change, plan: SimulatedPlan) -> Nearest:
        """What is told of it, with what leaves the GPU."""
        if plan.strategy.offload and "offload" not in change.options and not self.given.get("offload"):
            change = change.beside(Change(change.group, {"offload": value_text(plan.strategy.offload)}))
        record = change.recorded(self.record)
        job, speed = change.applied(self.job), plan.candidate.tokens_per_second_per_gpu
        plan = in_sequence(job, plan) if plan.peaks.runs and change.group != "not enough" else plan
        time, need = time_of(plan.census, job.gpu, job.node), offload_need(plan.census, job.node)
        layout, fixed = plan.candidate.layout, plan.candidate.grid.fixed
        return Nearest(
            change=change.text,
            device=plan.peaks.top.device,
            tokens_per_second_per_gpu=speed,
            slowest=speed * time.step / time.high,
            fastest=speed * time.step / time.low,
            throughput=speed / self.baseline if self.baseline else None,
            verdict=plan.peaks.verdict,
            group=change.group,
            host_memory=need.host,
            unknown=unknown_to(need, job.node),
            job=record,
            command=command_line(record),
            estimate=strategy_record(record, plan.strategy, layout.gpus, fixed.seq_len, fixed.global_batch),
        )

    def offloaded(self, change: Change) -> Iterator[Nearest]:
        """The change with whatever offload the search finds best."""
        try:
            plan = best_plan(change.applied(self.job).freed("offload"), self.gpus, trusting=True)
        except MemcalcError:
            return
        if plan is not None:
            offload = Change(change.group, {"offload": value_text(plan.strategy.offload)})
            yield self.answer(change.beside(offload), plan)

    def least(self, change: Change) -> int | None:
        """What the GPU shows at least with a change, where the job comes near to fitting with it and does not."""
        smallest = self._smallest(change)
        if smallest is None:
            return None
        _, ledger, overhead = single_ledger(self.changed(change).unlimited(), smallest)
        least = overhead.beside(int(np.max(ledger.peak())))  # no replay reserves less than is allocated
        return least if least <= NEARLY * self.job.gpu.memory_bytes else None

    def short(self, change: Change) -> Iterator[Nearest]:
        """The change, if with it the device figure too is near."""
        smallest = self._smallest(change)
        if smallest is None:
            return
        job = self.changed(change).unlimited()
        answer = self.answer(replace(change, group="not enough"), finalist(job, smallest))
        if answer.device <= NEARLY * self.job.gpu.memory_bytes:
            yield answer.model_copy(update={"verdict": "does-not-fit"})

    def _smallest(self, change: Change) -> Candidate | None:
        """The smallest strategy with a change that is possible and does not suffice."""
        try:
            outcome = self.changed(change).known(self.gpus)
        except MemcalcError:
            return None
        return None if outcome is None or outcome.feasible else outcome.smallest

    # ------------------------------------------------------------------------------------------ what may be changed

    @cached_property
    def expandable(self) -> Change | None:
        """Expandable segments, where they are not on."""
        name, habits = defaults.habits_for(self.job.request)
        known = "expandable_segments" in self.given["fields"] or habits.expandable_segments
        able = self.job.gpu.vendor == "nvidia" and grows_segments(name)
        return Change("same training", {}, EXPANDABLE) if able and not known else None

    @cached_property
    def free(self) -> list[Change]:
        """What changes neither the update nor the hardware, and what the framework can be told."""
        _, habits = defaults.habits_for(self.job.request)
        changes = [self.expandable] if self.expandable else []
        if "optimizer_impl" not in self.given and habits.optimizer_impl != "fused" and self._is_adamw:
            changes.append(Change("same training", {"optimizer_impl": "fused"}))
        known = smaller_losses(self.job.request, habits, self.job.model)
        losses = [loss for loss, code in known.items() if not code]
        return changes + [Change("same training", {"loss": loss}) for loss in losses[:1]]

    @property
    def unwrapped(self) -> list[Change]:
        """On one GPU the Trainer, which has no copies of FSDP's, where no framework is given."""
        alone = self.gpus == 1 and "framework" not in self.given and not defaults.is_frozen(self.job.request)
        return [Change("another framework", {"framework": "hf"})] if alone else []

    @property
    def _is_adamw(self) -> bool:
        return "optimizer" not in self.job.request.choices and self.given.get("optimizer", "adamw") == "adamw"

    @cached_property
    def numerics(self) -> list[Change]:
        """Another update of the weights; last the one that has no fp32 copy of them."""
        frozen, precision = defaults.is_frozen(self.job.request), self.given.get("precision")
        sums = {"strategy.reduce_dtype": "bf16"} if self._may_sum_in_16_bits(precision) else {}
        summed = [Change("numerics", {}, sums)] if sums else []
        _, habits = defaults.habits_for(self.job.request)
        narrow = [Change("numerics", {"precision": "bf16"})] if precision != "bf16" else []
        is_eight = self._is_adamw and is_told(self.job.request, habits, self.job.model, "optimizer", "adamw-8bit")
        eight = [Change("numerics", {"optimizer": "adamw-8bit"})] if is_eight else []
        return [] if frozen else summed + eight + narrow

    @property
    def paged(self) -> list[Change]:
        """What trains all weights on one small GPU, the smallest change first: 8-bit states in unified memory.

        torchtune 02d70355 recipes/configs/llama3_1/8B_full_single_device.yaml: bf16, ``PagedAdamW8bit``, updated in
        backward, which takes one micro-batch a step, and logits in parts.
        """
        if self.gpus > 1 or not self._is_adamw or defaults.is_frozen(self.job.request):
            return []
        changes = [Change("numerics", {"precision": "bf16", "optimizer": "paged-adamw-8bit"})]
        if "global_batch" not in self.given and "global_batch" not in self.job.request.choices:
            changes.append(changes[0].beside(Change("numerics", {"optimizer_in_backward": True, "global_batch": 1})))
            changes += [
                changes[-1].beside(replace(loss, group="numerics")) for loss in self.free if "loss" in loss.options
            ]
        return changes

    def _may_sum_in_16_bits(self, precision: str | None) -> bool:
        """Whether gradients are in fp32 that Megatron-LM can keep in bf16, as NVIDIA's tuned recipes do.

        Megatron-Bridge 0.7 perf_recipes/_common.py, ``_perf_precision``: ``grad_reduce_in_fp32`` is off in all of them.
        """
        able = defaults.habits_for(self.job.request)[1].narrow_gradients and self.job.gpu.supports("bf16")
        return able and precision in (None, "bf16-mixed", "fp8-mixed") and "reduce_dtype" not in self.given["fields"]

    @cached_property
    def adapters(self) -> list[Change]:
        """Fewer trained parameters."""
        _, habits = defaults.habits_for(self.job.request)
        trains_all = not defaults.is_frozen(self.job.request)
        if trains_all and self.gpus > ADAPTED:
            return []
        frozen = {"lora": str(habits.lora_rank)} if trains_all else {}
        group: RemedyGroup = "fewer trained parameters"
        quantised = self.given.get("quantize", "none") != "none"
        return [Change(group, frozen)] * bool(frozen) + [Change(group, {**frozen, "quantize": "nf4"})] * (not quantised)
