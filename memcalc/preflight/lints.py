"""Lints: what a configuration does that its author may not mean, each with a stable code.

A lint is a function of the merged job and its estimate. What proposes another batch, stage or layout has estimated it:
it fits and is faster by more than a plan gives up to be simple, or is smaller, so that no lint speaks against a plan.
Sources stand in docs/traps.md, one section a code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from memcalc import api, catalog
from memcalc.convert.config import Config, Finding, Severity
from memcalc.errors import MemcalcError
from memcalc.formulas.activations import joined_outputs_bytes
from memcalc.frameworks import habits_of
from memcalc.planner.budget import capacity
from memcalc.planner.defaults import NEARLY
from memcalc.planner.finalists import One
from memcalc.preflight.job import MergedJob
from memcalc.results.details import Occasion
from memcalc.results.estimates import Estimate
from memcalc.specs.strategy import Strategy
from memcalc.units import GIB

LARGE_VOCABULARY = 100_000
MANY_STEPS = 8
"""Accumulated micro-batches from which gathering all parameters for each is worth a word."""
ROOM = 0.9
"""Share of the usable memory up to which a larger micro-batch is worth a word."""


@dataclass(frozen=True)
class LintContext:
    """A job as a lint takes it."""

    job: MergedJob
    configs: tuple[Config, ...]
    estimate: Estimate
    dirs: tuple[str, ...] = ()

    @property
    def strategy(self) -> Strategy:
        """The strategy, every field resolved."""
        return self.estimate.strategy

    @property
    def framework(self) -> str:
        """The framework's name without its era."""
        return self.strategy.framework.partition("@")[0]

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded between their uses."""
        return self.strategy.zero == 3 and self.strategy.dp * self.strategy.cp > 1

    def occasion(self, name: str) -> Occasion | None:
        """What the job does beside its steps, by name."""
        return next((occasion for occasion in self.estimate.occasions if occasion.name == name), None)

    def size(self, *names: str) -> int:
        """Bytes of the terms whose names contain one of the texts."""
        return sum(term.bytes for term in self.estimate.terms if any(name in term.name for name in names))

    @cached_property
    def larger_batch(self) -> str:
        """What a micro-batch of twice the size brings, where it is worth a word."""
        work = self.estimate.workload
        gain = self.gain(micro_batch=2 * work.micro_batch)
        return f"micro-batch {2 * work.micro_batch} × {work.accumulation_steps // 2} fits and is {gain}" if gain else ""

    @cached_property
    def stage_2(self) -> str:
        """What keeping the gathered parameters brings, where it is worth a word."""
        return f"stage 2 fits and is {gain}" if (gain := self.gain(zero=2)) else ""

    def gain(self, **changed: Any) -> str:
        """How much faster the job is with some options changed; empty where that does not fit, or hardly is faster."""
        now = self.estimate.time
        with suppress(MemcalcError):  # a batch that does not come out even, a stage that the framework does not have
            other = self.other(**changed)
            times = other.time().tokens_per_second_per_gpu / now.tokens_per_second_per_gpu if now else 0.0
            if times > NEARLY and other.figures().verdict == "fits":  # which takes longer to tell
                return f"{times - 1:.0%} faster"
        return ""

    def other(self, **changed: Any) -> One:
        """The job of the same global batch with some options changed."""
        batch = {"global_batch": self.estimate.workload.global_batch}
        return api.single(**self.job.keywords | batch | changed, preset_dirs=self.dirs)

    def finding(
        self, severity: Severity, code: str, option: str, message: str, hint: str = ""
    ) -> tuple[Config, Finding]:
        """Return a finding where an option is set; on the first file where the user typed it or nobody set it."""
        origin = self.job.origins.get(option)
        if origin is None:
            return self.configs[0], Finding(severity, code, option.replace("_", "-"), message, hint)
        config, setting = origin
        return config, Finding(severity, code, setting.field, message, hint, setting.key_path)


Findings = Iterator[tuple[Config, Finding]]


def lints(ctx: LintContext) -> Findings:
    """Yield what the lints find in a job."""
    for lint in LINTS.values():
        yield from lint(ctx)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def autocast_keeps_fp32(ctx: LintContext) -> Findings:
    """Autocast over fp32 weights: their author often counts 16-bit ones."""
    plan = ctx.strategy
    if not plan.precision.endswith("-autocast") or plan.lora:
        return
    fp32 = ctx.size("weights") + max(ctx.estimate.components.gradients, ctx.size("gradients at the end"))
    copies = ctx.size("16-bit weight copies")
    message = (
        f"autocast keeps fp32 weights and gradients ({_gib(fp32)}) and caches 16-bit copies ({_gib(copies)}); "
        "a 16-bit model needs half and no copies"
    )
    severity: Severity = "warning" if ctx.estimate.verdict == "does-not-fit" else "note"
    hint = "load the weights in 16 bits"
    if plan.precision.startswith("fp16"):  # whose gradients GradScaler refuses (MC119)
        if not catalog.gpu(ctx.estimate.hardware.gpu, ctx.dirs).supports("bf16"):
            return
        hint = "bf16, with the weights loaded in it"
    yield ctx.finding(severity, "MC101", _first(ctx, "mixed", "precision"), message, hint)


def _first(ctx: LintContext, *options: str) -> str:
    return next((option for option in options if option in ctx.job.origins), options[-1])


def shards_are_fp32(ctx: LintContext) -> Findings:
    """FSDP's mixed precision keeps fp32 shards, whatever the weights were loaded in."""
    weights = ctx.job.facts.get("weights")
    fsdp = ctx.framework in {"fsdp1", "fsdp2"} or (ctx.framework == "hf" and ctx.strategy.zero > 0)
    if fsdp and ctx.strategy.precision.endswith("-mixed") and weights in {"bf16", "fp16"} and not ctx.strategy.lora:
        message = f"FSDP mixed precision casts {weights} weights up to fp32: 16 bytes per parameter instead of 8"
        yield ctx.finding("warning", "MC102", "weights", message, "mixed_precision: no trains the 16-bit weights")


def states_stay_wide(ctx: LintContext) -> Findings:
    """An 8-bit optimizer that is not 8-bit for all it updates, or not the one that runs."""
    stated = [
        (config, setting)
        for config in ctx.configs
        for setting in config.settings
        if setting.name == "optimizer" and str(setting.value).endswith("8bit") and not setting.default
    ]
    if stated and not ctx.strategy.optimizer.endswith("8bit"):
        config, setting = stated[0]
        message = f"{setting.value} is set here, but another file selects {ctx.strategy.optimizer} (32-bit states)"
        yield (
            config,
            Finding("warning", "MC103", setting.field, message, "set the optimizer in one place", setting.key_path),
        )
    elif ctx.strategy.wide_embedding_moments and ctx.strategy.optimizer.endswith("8bit") and not ctx.strategy.zero:
        message = "the Trainer keeps 32-bit moments for embedding tables under an 8-bit optimizer; they are counted"
        yield ctx.finding("note", "MC103", "optimizer", message)


def checkpoints_reentrant(ctx: LintContext) -> Findings:
    """Reentrant checkpoints, and checkpointing applied to what FSDP has wrapped."""
    plan = ctx.strategy
    if plan.recompute == "none":
        return
    origin = ctx.job.origins.get("strategy.checkpoint")
    reentrant = plan.checkpoint == "reentrant" or (origin is not None and origin[1].value == "reentrant")
    if reentrant and not habits_of(plan.framework).reentrant:
        message = "reentrant checkpointing holds outputs and gradients through backward"
        if "trainer" not in ctx.job.engines:  # which calls enable_input_require_grads (5.24 modeling_utils.py)
            message += ", and breaks the graph for frozen embeddings"
        yield ctx.finding("note", "MC104", "strategy.checkpoint", message, "use_reentrant: false")
    if ctx.job.facts.get("checkpoints_wrapped") and "activations" not in plan.offload:  # which axolotl moves so alone
        message = "checkpointing is inside the FSDP wrap, so each block is gathered again to recompute it"
        yield ctx.finding(
            "warning", "MC104", "checkpoints_wrapped", message, "fsdp_config activation_checkpointing: true"
        )


def second_gradients(ctx: LintContext) -> Findings:
    """DDP's buckets hold a second copy of all gradients."""
    copy = ctx.size("all-reduce buckets")
    if ctx.framework == "ddp" and copy:
        message = f"DDP buckets copy all gradients: {_gib(copy)}"
        yield ctx.finding("note", "MC105", "strategy.bucket_view", message, "gradient_as_bucket_view=True")


def logits_stored(ctx: LintContext) -> Findings:
    """Logits of a large vocabulary with a loss that keeps them."""
    from memcalc.api import load_model

    model = ctx.job.facts["model"]
    vocab = (load_model(model) if isinstance(model, str) else model).vocab
    plan, without = ctx.strategy, {"fused-linear", "chunked"}
    if vocab < LARGE_VOCABULARY or plan.loss in without or without.isdisjoint(habits_of(plan.framework).losses):
        return
    size = ctx.size("logits and their gradients")
    at_peak = ctx.estimate.peak.phase in {"loss", "forward"}
    message = (
        f"logits (vocabulary {vocab:,}) and their gradients take {_gib(size)} with a loss that stores them"
        f"{', at the peak' if at_peak else ''}"
    )
    severity: Severity = "warning" if at_peak and ctx.estimate.verdict != "fits" else "note"
    yield ctx.finding(severity, "MC108", "loss", message, "a fused or chunked loss (Liger, cut cross-entropy)")


def whole_gradients(estimate: Estimate) -> int:
    """Bytes of gradients that stay whole between micro-batches, because a step's last one alone reduces them."""
    return sum(term.bytes for term in estimate.terms if term.name.startswith("unsharded gradients of"))


def gathers_again(ctx: LintContext) -> Findings:
    """Sharded parameters are gathered for every micro-batch, and gradients stay whole between them."""
    unreduced = whole_gradients(ctx.estimate) if "trainer" in ctx.job.engines and not ctx.strategy.lora else 0
    if unreduced and ctx.estimate.verdict != "fits":
        since = " (FSDP 2: since Accelerate 1.11)" if ctx.framework == "fsdp2" else ""
        message = f"no_sync keeps gradients whole between micro-batches{since}: {_gib(unreduced)} per GPU"
        hint = "accelerator_config gradient_accumulation_kwargs sync_each_batch: true"
        yield ctx.finding("warning", "MC109", "accumulation", message, hint)
    steps = ctx.estimate.workload.accumulation_steps
    alone = ctx.strategy.dp_replicate == ctx.strategy.dp * ctx.strategy.cp
    if ctx.sharded and steps >= MANY_STEPS and not alone and (hint := ctx.stage_2 or ctx.larger_batch):
        times = 3 if ctx.framework == "deepspeed" and ctx.strategy.recompute != "none" else 2
        message = f"stage 3 gathers the model {steps * times} times per step ({times} × {steps} accumulation steps)"
        yield ctx.finding("note", "MC109", "accumulation", message, hint)


def compiled_recompute(ctx: LintContext) -> Findings:
    """The compiler decides anew what is recomputed."""
    plan = ctx.strategy
    if plan.compile in {"model", "blocks+loss"} and plan.recompute != "none":
        message = (
            f"torch.compile of {plan.compile} decides what to recompute; memory may differ from "
            f"recompute {plan.recompute}"
        )
        yield ctx.finding("warning", "MC110", "compile", message, "measure one step, or compile block by block")
    elif plan.compile == "blocks" and plan.recompute == "selective-ops":
        message = (
            "compile blocks with recompute selective-ops: the partitioner obeys MUST_SAVE and the two RECOMPUTE tags, "
            "and takes PREFER_SAVE for no tag; a policy around a compiled block sees none of its operators"
        )
        hint = "wrap first, then compile, and return CheckpointPolicy.MUST_SAVE for what is to be kept"
        yield ctx.finding("note", "MC110", "compile", message, hint)


def evaluation_larger(ctx: LintContext) -> Findings:
    """Evaluation with more sequences at a time than training."""
    size, evaluates = ctx.job.facts.get("eval_micro_batch"), ctx.job.facts.get("evaluates")
    micro, evaluation = ctx.estimate.workload.micro_batch, ctx.occasion("evaluation")
    if evaluates and size and int(size) > micro:
        peak = f", {_gib(evaluation.allocated)} at their peak" if evaluation else ""
        message = (
            f"evaluation batch {size} vs. training {micro}: its logits are {int(size) / micro:.3g}× larger{peak}; "
            f"a training step has {_gib(ctx.estimate.peak.allocated)}"
        )
        yield ctx.finding("warning", "MC111", "eval_micro_batch", message, f"an evaluation batch of {micro}")


def evaluation_keeps_logits(ctx: LintContext) -> Findings:
    """Logits that the Trainer keeps of each batch where a script gives it ``compute_metrics``, which no file shows."""
    evaluation = ctx.occasion("evaluation")
    stated = ctx.job.settings.get("workload.eval_batches_kept") is not None
    if ctx.job.facts.get("eval_keeps") == "nothing":
        return
    if ctx.framework != "hf" or evaluation is None or not evaluation.certain or stated:
        return
    batches = int(ctx.job.facts.get("eval_accumulation") or 0)
    states = ctx.estimate.components.parameters + ctx.estimate.components.optimizer
    free = ctx.estimate.budget.usable - states
    if evaluation.batch_outputs and (not batches or joined_outputs_bytes(evaluation.batch_outputs, batches) > free):
        flushed = f"{batches} batches at once" if batches else "all of them, since eval_accumulation_steps is not set"
        message = (
            "with compute_metrics, which no file shows, the Trainer keeps the logits of each batch on the GPU, "
            f"{_gib(evaluation.batch_outputs)} of all ranks: {flushed}; they are counted as not kept"
        )
        hint = "preprocess_logits_for_metrics or eval_accumulation_steps; workload.eval_batches_kept counts them"
        yield ctx.finding("note", "MC116", "eval_micro_batch", message, hint)


def lengths_vary(ctx: LintContext) -> Findings:
    """Batches of varying length without expandable segments leave holes."""
    if ctx.job.facts.get("varying_lengths") and not ctx.strategy.expandable_segments:
        message = (
            "variable lengths without expandable_segments fragment the cache; the estimate is for the longest batch"
        )
        yield ctx.finding(
            "note", "MC112", "varying_lengths", message, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )


def host_too_small(ctx: LintContext) -> Findings:
    """Offload without the host memory for it."""
    need = ctx.estimate.host_memory
    if not ctx.strategy.offload or not need:
        return
    requested = ctx.job.facts.get("host_memory")
    if requested is not None and int(requested) < need:
        message = f"offload needs {_gib(need)} of host memory per node; the job requests {_gib(int(requested))}"
        yield ctx.finding("error", "MC113", "host_memory", message, f"request {_gib(need)} plus data loaders")
        return
    hardware = ctx.estimate.hardware
    usual = catalog.node_for(catalog.gpu(hardware.gpu))
    node = usual if usual.name == hardware.node else catalog.node(hardware.node)
    size = capacity(node, "host")
    if size is None:
        message = f"offload needs {_gib(need)} of host memory per node; the size of {node.name} is unknown"
        yield ctx.finding("note", "MC113", "offload", message)
    elif size < need:
        have = _gib(size)
        message = f"offload needs {_gib(need)} of host memory per node; {node.name} has {have}"
        yield ctx.finding("error", "MC113", "offload", message)


def room_left(ctx: LintContext) -> Findings:
    """Micro-batch 1 with accumulation to spare, and room for more."""
    work, estimate = ctx.estimate.workload, ctx.estimate
    each = max(estimate.saved.total, estimate.components.activations)
    inside = estimate.peak.reserved + each <= ROOM * estimate.budget.usable
    many = work.micro_batch == 1 and work.accumulation_steps > 1
    if many and estimate.verdict == "fits" and inside and ctx.larger_batch:
        message = f"{_gib(estimate.budget.usable - estimate.peak.reserved)} headroom: {ctx.larger_batch}"
        yield ctx.finding("note", "MC114", "micro_batch", message, "memcalc max micro-batch")


def experts_filled(ctx: LintContext) -> Findings:
    """Fewer experts than ranks, or a number of them that the ranks do not divide, under FSDP 2."""
    from memcalc.api import load_model
    from memcalc.planner.answer import filled_experts

    model = ctx.job.facts["model"]
    checked = load_model(model) if isinstance(model, str) else model
    message = filled_experts(checked, ctx.strategy)
    if message is None or ctx.estimate.verdict == "fits":
        return
    ranks = ctx.strategy.dp * ctx.strategy.cp
    replicas = ranks // gcd(ranks, *(getattr(group.block.mlp, "experts", 0) for group in checked.groups))
    with suppress(MemcalcError):
        if (other := ctx.other(dp_replicate=replicas).figures().peak.device) < ctx.estimate.peak.device:
            hint = f"{replicas} replicas (HSDP, --dp-replicate) take {_gib(other)} per GPU"
            yield ctx.finding("warning", "MC117", "gpus", message, hint)


def sharing_unsaid(ctx: LintContext) -> Findings:
    """A recipe of the Trainer alone, whose ranks hold all of the model each, because no file says what launches it."""
    launched = any(config.document.kind in ("flags", "shell") for config in ctx.configs)
    unsaid = ctx.job.engines == {"trainer"} and "zero" not in ctx.job.origins and not launched
    if unsaid and ctx.framework == "ddp" and ctx.estimate.verdict != "fits":
        message = "no file says what ranks share: each is counted with all weights, gradients and states (DDP)"
        hint = "give the Accelerate or DeepSpeed config that launches it, or --zero, too"
        yield ctx.finding("warning", "MC118", "framework", message, hint)


_BESIDE = "--overlap-grad-reduce --overlap-param-gather"


def messages_waited_for(ctx: LintContext) -> Findings:
    """Gradients that are reduced after backward, and weights that are gathered before the next forward."""
    settings, beside = ctx.job.keywords["settings"], {"strategy.overlap_comm": True}
    hint = {"megatron": "--overlap-grad-reduce", "deepspeed": '"overlap_comm": true'}
    if ctx.framework == "megatron" and ctx.strategy.zero:
        beside, hint = {**beside, "strategy.overlap_param_gather": True}, {"megatron": _BESIDE}
    waits = any(settings.get(name) is not value for name, value in beside.items())
    if ctx.framework in hint and waits and (gain := ctx.gain(settings=settings | beside)):
        message = f"gradients are reduced, or weights gathered, while nothing is computed; at once it is {gain}"
        yield ctx.finding("note", "MC120", "strategy.overlap_comm", message, hint[ctx.framework])


LINTS: dict[str, Callable[[LintContext], Findings]] = {
    "MC101": autocast_keeps_fp32,
    "MC102": shards_are_fp32,
    "MC103": states_stay_wide,
    "MC104": checkpoints_reentrant,
    "MC105": second_gradients,
    "MC108": logits_stored,
    "MC109": gathers_again,
    "MC110": compiled_recompute,
    "MC111": evaluation_larger,
    "MC112": lengths_vary,
    "MC113": host_too_small,
    "MC114": room_left,
    "MC116": evaluation_keeps_logits,
    "MC117": experts_filled,
    "MC118": sharing_unsaid,
    "MC120": messages_waited_for,
}
"""By code; MC106 (a batch that is not the product of its parts) and MC107 (sequence parallelism without tensor
parallelism) are found while the files are merged."""
