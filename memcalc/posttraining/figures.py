"""What trained models and engines hold and take, each computed once for the jobs that share it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from memcalc.api import estimate, load_model, single
from memcalc.errors import MissingError, UnmodelledError
from memcalc.posttraining.words import split_fields
from memcalc.results.posttraining import UpdateTime
from memcalc.serving import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.posttraining.words import RlJob
    from memcalc.results.estimates import Estimate, StepTime
    from memcalc.results.serving import Served
    from memcalc.specs.model import Model

# What a trained model holds, from ``memcalc estimate``: between its phases, in a pass without gradients, in an
# update.
#
# The loss of an estimate is one that holds no logits, and what log-probabilities hold in its place is added: the
# rest, states, gathers, kept activations and their order, are the same terms as of any training job.

WITHOUT_LOGITS = "fused-linear"
TILES = "loss in tiles"
OF_LOSS = ("logits and their gradients", "loss in chunks of rows", TILES)
"""Terms of a loss itself, which stand beside what is kept where logits are alive."""
OF_LOGITS = (
    "loss in chunks of rows", TILES, "autocast's 16-bit copy of the head",
    "gradient of the head, which waits for the embedding's",
)  # fmt: skip
"""Terms that a model without logits has not, whose loss is that of a score a sequence."""
_Figure = TypeVar("_Figure")


@dataclass(frozen=True)
class Trained:
    """One model on one GPU [bytes]."""

    weights: int
    optimizer: int
    early: int
    """What of the optimizer's states is there before its first step: fp32 master weights beside 16-bit ones."""
    gradients: int
    """What stays of gradients between steps: Megatron-LM's buffer of them, which is freed where weights leave."""
    buffers: int
    """What its runtime keeps beside them for as long as it lives, such as DDP's buckets."""
    update: int
    """The height of an update without states, logits left out."""
    head: int
    """The same where logits are alive, without what the loss itself holds."""
    forward: int
    """The working set of a pass without gradients, logits left out."""
    beside: int
    """Context and communicators."""
    cached: int
    """What the allocator reserves beyond what is allocated at the height of an update."""
    limit: float
    """What one measured run of twenty exceeds, over the prediction, [1]."""
    host: int
    """Of a node, for what is offloaded."""
    largest: int
    """Elements of all weights, [1]."""
    stage: int
    """How far states are sharded (ZeRO), [1]."""

    @property
    def states(self) -> int:
        """Weights, optimizer states, gradients that stay, and what its runtime keeps [bytes]."""
        return self.weights + self.optimizer + self.gradients + self.buffers

    def idle(self, parks: tuple[str, ...]) -> int:
        """What stays on the GPU between phases [bytes]."""
        return self.resident(parks) - self.weights * ("params" in parks)

    def resident(self, parks: tuple[str, ...]) -> int:
        """What is on the GPU while weights are read and nothing is trained [bytes]."""
        stays = self.gradients * ("params" not in parks) + self.optimizer * ("optimizer" not in parks)
        return self.weights + stays + self.buffers

    def parked(self, parks: tuple[str, ...]) -> int:
        """What the host has of it between phases [bytes]."""
        return self.weights * ("params" in parks) + self.optimizer * ("optimizer" in parks)


def _trained(figures: Estimate, *, logits: bool) -> Trained:
    steady = [term for term in figures.terms if len(term.phases) == len(figures.phases)]
    weights, optimizer = (
        sum(term.bytes for term in steady if term.component == name) for name in ("parameters", "optimizer")
    )
    states = sum(term.bytes for term in steady)
    sizes = dict(figures.phases)
    for term in figures.terms if not logits else ():
        for name in term.phases if term.name in OF_LOGITS else ():
            sizes[name] -= term.bytes
    inference = next(occasion for occasion in figures.occasions if occasion.name == "evaluation")
    of_loss = sum(term.bytes for term in figures.terms if term.name in OF_LOSS and "loss" in term.phases)
    tiles = {name: term.bytes for term in figures.terms if term.name == TILES for name in term.phases}
    if tiles:  # of all tokens: those that are scored are added instead
        sizes["forward"] -= tiles["forward"]
        sizes["loss"] -= of_loss
    budget = figures.budget
    return Trained(
        weights=weights,
        optimizer=optimizer,
        early=0,
        gradients=0,
        buffers=states - weights - optimizer,
        update=max(sizes.values()) - states,
        head=figures.phases["loss"] - of_loss - states,
        forward=inference.allocated - states,
        beside=budget.context + budget.libraries,
        cached=figures.peak.reserved - figures.peak.allocated,
        limit=max(1.0, figures.interval.high / figures.peak.device),
        host=figures.host_memory,
        largest=figures.model.parameters,
        stage=figures.strategy.zero,
    )


# Megatron-LM's stages differ, and each figure is the largest of them: a phase ends with the slowest stage, and an
# engine starts beside the fullest. verl's loss is vocab_parallel_cross_entropy as in Megatron-LM's own training, on
# logits that Float16Module has cast to fp32 (core/transformer/module.py): the estimate of that loss has the heights.

OF_STANDARD = 6
"""Bytes of a logit in Megatron-LM's own loss, 16 bits and fp32 at once (core/tensor_parallel/cross_entropy.py)."""
_MASTERS = "fp32 master weights"


def _trained_stages(plain: Estimate, bare: Estimate, logits: int) -> Trained:
    """The figures of one GPU over all stages of Megatron-LM's pipeline [bytes].

    ``plain`` has logits, so many entries on the last stage, [1]; ``bare`` has none.
    """
    calm = "forward"
    stages = [stage.phases for stage in plain.stages]
    weights, optimizer, gradients = (
        max(phases[calm][part] for phases in stages) for part in ("parameters", "optimizer", "gradients")
    )
    buffers = max(min(parts["buffers"] for parts in phases.values()) for phases in stages)
    states = weights + optimizer + gradients + buffers
    last = {name: sum(parts.values()) for name, parts in stages[-1].items()}
    heights = [sum(parts.values()) for phases in stages[:-1] for parts in phases.values()]
    heights += [size for name, size in last.items() if name not in (calm, "loss")]
    inference = next(occasion for occasion in bare.occasions if occasion.name == "evaluation")
    steady = {term.name for term in bare.terms if len(term.phases) == len(bare.phases)}
    steady |= {term.name for term in bare.terms if term.component == "gradients"}
    passing = sum(part.bytes for part in inference.parts if part.name not in steady)
    early = max((term.bytes for term in plain.terms if term.name == _MASTERS), default=0)
    return Trained(
        weights=weights,
        optimizer=optimizer,
        early=min(early, optimizer),
        gradients=gradients,
        buffers=buffers,
        update=max(heights) - states,
        head=max(last[calm], last["loss"]) - OF_STANDARD * logits - states,
        forward=passing,
        beside=plain.budget.context + plain.budget.libraries,
        cached=max(stage.reserved - stage.allocated for stage in plain.stages),
        limit=max(1.0, plain.interval.high / plain.peak.device),
        host=plain.host_memory,
        largest=plain.model.parameters,
        stage=plain.strategy.zero,
    )


def trainer_options(job: RlJob) -> dict[str, Any]:
    """How the trained models are trained, in the words of ``memcalc estimate``; their batches left out."""
    toolkit = job.toolkit
    precision = str(job.training.get("precision", toolkit.precision))
    apart = job.inputs.whole_gradients and not job.one_micro_batch
    wide = toolkit.frozen_fp32 and job.lora and precision.endswith("mixed") and not job.training.get("quantize")
    fields = {"strategy.frozen_fp32": "true"} if wide else {}
    fields |= {"strategy.whole_accumulation": "true"} if apart else {}
    fields |= {"strategy.reduce_dtype": "fp32"} if toolkit.reduces_wide and job.trainer == "fsdp1" else {}
    fields |= {"strategy.tiled_loss": "true"} if job.tiled else {}
    fields |= split_fields(job.inputs.stage_split)
    fields |= {"strategy.etp": str(job.inputs.expert_tp)} if job.inputs.expert_tp else {}
    return {
        **({"settings": fields} if fields else {}),
        "framework": job.trainer,
        **({"precision": toolkit.precision} if toolkit.precision else {}),
        "recompute": "none" if job.megatron else toolkit.recompute,
        "gpus": job.trainer_gpus,
        **({"attention": "flash"} if job.megatron else {}),
        **({"zero": toolkit.zero} if job.trainer == job.usual_trainer and job.trainer_gpus > 1 else {}),
        **job.training,
    }


def logit_entries(job: RlJob, model: Model, *, gradients: bool) -> int:
    """Entries of the logits of a micro-batch on one GPU of Megatron-LM's last stage, [1]."""
    rows, tokens = job.batch(gradients=gradients)
    return -(-rows * tokens // job.degree("cp")) * -(-model.vocab // job.degree("tp"))


@dataclass(frozen=True)
class Figures:
    """Of trained models and engines, by what they follow from."""

    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def _once(self, key: tuple[Any, ...], make: Callable[[], _Figure]) -> _Figure:
        if key not in self.known:
            self.known[key] = make()
        result: _Figure = self.known[key]
        return result

    def model(self, job: RlJob) -> Model:
        """The policy."""
        return self._model(job, job.model)

    def _model(self, job: RlJob, model: str) -> Model:
        return self._once(("model", model), lambda: load_model(model, job.dirs))

    def trained(self, job: RlJob, model: str) -> Trained:
        """What one model needs where it is trained as the job says, by a loss that holds no logits."""
        inputs = job.inputs
        images = self._model(job, model).images
        if images is not None and images.depends_on_size and str(job.training.get("images")) != "0":
            alone = "" if job.recipe.online else ": --images 0 is text alone"
            allowed = f"its tokens depend on the size of its images, which memcalc rl does not take{alone}"
            raise UnmodelledError("model", model, allowed)
        rows, tokens = job.batch(gradients=True)
        read_rows, read_tokens = job.batch(gradients=False)
        options = trainer_options(job) | {"seq_len": tokens, "micro_batch": rows}
        if "strategy.whole_accumulation" in options.get("settings", {}):
            options["global_batch"] = f"{2 * rows * job.ranks} sequences"  # more micro-batches than one
        elif job.one_micro_batch and not job.megatron:
            options["global_batch"] = f"{rows * job.ranks} sequences"
        if images is None:  # of a reward model or critic without a tower
            options.pop("images", None)
        if (job.recipe.log_probs or job.tiled) and not job.megatron:
            options.setdefault("loss", WITHOUT_LOGITS)
        batch = -(-read_rows * read_tokens // tokens)
        options["settings"] = {**options.get("settings", {}), "workload.eval_micro_batch": str(batch)}
        logits = job.recipe.head or inputs.algorithm in job.toolkit.widths
        question = _question(job, model)
        if not logits:  # a score has a vector in the head's place: no matrix beside the embedding
            question["model"] = load_model(model, job.dirs).model_copy(update={"tied": True})
        key = ("trained", model, logits, *sorted((name, str(value)) for name, value in options.items()))
        if job.megatron:
            entries = logit_entries(job, self._model(job, model), gradients=True)
            bare = options | {"loss": WITHOUT_LOGITS}
            return self._once(key, lambda: _trained_stages(_asked(question, options), _asked(question, bare), entries))
        return self._once(key, lambda: _trained(_asked(question, options), logits=logits))

    def served(self, job: RlJob, other: int, *, advice: bool) -> Served:
        """One engine beside so much else on its GPUs [bytes]; with ``advice`` also what can be set."""
        inputs, toolkit = job.inputs, job.toolkit
        options: dict[str, Any] = {"engine": inputs.engine, "utilization": inputs.utilization, "max_len": job.length}
        if inputs.max_seqs:
            options["max_seqs"] = inputs.max_seqs
        batched = inputs.max_batched_tokens or (toolkit.batched and max(toolkit.batched, inputs.max_seqs))
        if batched:
            options["max_batched_tokens"] = batched
        if batched and not inputs.max_seqs:
            options["max_seqs"] = min(256, batched)
        if inputs.eager:
            options["eager"] = True
        options |= {"tp": inputs.engine_tp, "other": other, "advice": advice}
        question = _question(job, job.model)
        key = ("served", *sorted((name, str(value)) for name, value in options.items()))
        return self._once(key, lambda: serve(**question, **options))

    def update_time(self, job: RlJob, model: str, samples: int) -> StepTime | None:
        """The predicted time of one update of so many samples or pairs, each of the longest length, in micro-batches.

        None where the GPU's preset has no peak for the precision.
        """
        recipe = job.recipe
        rows, tokens = job.batch(gradients=True)
        rows = rows if tokens == job.length else tokens // job.length or 1
        count = -(-samples * recipe.rows // (rows * job.ranks))
        options = trainer_options(job) | {
            "seq_len": job.length, "micro_batch": rows,
            "global_batch": f"{count * rows * job.ranks} sequences",
        }  # fmt: skip
        if job.inputs.logits == "fused" and (recipe.log_probs or job.tiled):
            options.setdefault("loss", WITHOUT_LOGITS)
        key = ("time", model, *sorted((name, str(value)) for name, value in options.items()))
        return self._once(key, lambda: _time(job, model, options))

    def updates(self, job: RlJob, samples: int) -> UpdateTime | None:
        """The predicted time of the updates of all trained models, one after the other.

        None where the GPU's preset has no peak for the precision.
        """
        times = [self.update_time(job, job.model, samples)]
        if job.recipe.critic:
            times.append(self.update_time(job.critic, job.inputs.critic_model or job.model, samples))
        steps = [time for time in times if time is not None]
        if len(steps) < len(times):
            return None
        return UpdateTime(
            seconds=sum(time.step for time in steps),
            low=sum(time.low for time in steps),
            high=sum(time.high for time in steps),
            validated=all(time.validated for time in steps),
            basis=steps[0].basis,
        )


def _asked(question: dict[str, Any], options: dict[str, Any]) -> Estimate:
    return estimate(**question, advice=False, **options)


def _question(job: RlJob, model: str) -> dict[str, Any]:
    return {"model": model, "gpu": job.gpu, "node": job.node, "preset_dirs": job.dirs}


def _time(job: RlJob, model: str, options: dict[str, Any]) -> StepTime | None:
    try:
        return single(**_question(job, model), **options).time()
    except MissingError:  # the preset has no peak for this precision
        return None
