"""What trained models and engines hold and take, each computed once for the jobs that share it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from memcalc.api import estimate, load_model, single
from memcalc.errors import MissingError, UnmodelledError
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
OF_LOSS = ("logits and their gradients", "loss in chunks of rows")
"""Terms of a loss itself, which stand beside what is kept where logits are alive."""
OF_LOGITS = (
    "loss in chunks of rows", "autocast's 16-bit copy of the head",
    "gradient of the head, which waits for the embedding's",
)  # fmt: skip
"""Terms that a model without logits has not, whose loss is that of a score a sequence."""
_Figure = TypeVar("_Figure")


@dataclass(frozen=True)
class Trained:
    """One model on one GPU [bytes]."""

    weights: int
    optimizer: int
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
        """Weights, optimizer states and what its runtime keeps [bytes]."""
        return self.weights + self.optimizer + self.buffers

    def idle(self, parks: tuple[str, ...]) -> int:
        """What stays on the GPU between phases [bytes]."""
        stays = self.weights * ("params" not in parks) + self.optimizer * ("optimizer" not in parks)
        return stays + self.buffers


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
    budget = figures.budget
    return Trained(
        weights=weights,
        optimizer=optimizer,
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


def trainer_options(job: RlJob) -> dict[str, Any]:
    """How the trained models are trained, in the words of ``memcalc estimate``; their batches left out."""
    toolkit = job.toolkit
    precision = str(job.training.get("precision", toolkit.precision))
    apart = job.inputs.whole_gradients and not job.one_micro_batch
    wide = toolkit.frozen_fp32 and job.lora and precision.endswith("mixed") and not job.training.get("quantize")
    fields = {"strategy.frozen_fp32": "true"} if wide else {}
    fields |= {"strategy.whole_accumulation": "true"} if apart else {}
    return {
        **({"settings": fields} if fields else {}),
        "framework": job.trainer,
        **({"precision": toolkit.precision} if toolkit.precision else {}),
        "recompute": toolkit.recompute,
        "gpus": job.trainer_gpus,
        **({"zero": toolkit.zero} if job.trainer == job.usual_trainer and job.trainer_gpus > 1 else {}),
        **job.training,
    }


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
            options["global_batch"] = f"{2 * rows * job.trainer_gpus} sequences"  # more micro-batches than one
        if images is None:  # of a reward model or critic without a tower
            options.pop("images", None)
        if job.recipe.log_probs:
            options.setdefault("loss", WITHOUT_LOGITS)
        batch = -(-read_rows * read_tokens // tokens)
        options["settings"] = {**options.get("settings", {}), "workload.eval_micro_batch": str(batch)}
        logits = job.recipe.head or inputs.algorithm in job.toolkit.widths
        question = _question(job, model)
        if not logits:  # a score has a vector in the head's place: no matrix beside the embedding
            question["model"] = load_model(model, job.dirs).model_copy(update={"tied": True})
        key = ("trained", model, logits, *sorted((name, str(value)) for name, value in options.items()))
        return self._once(key, lambda: _trained(estimate(**question, advice=False, **options), logits=logits))

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
        count = -(-samples * recipe.rows // (rows * job.trainer_gpus))
        options = trainer_options(job) | {
            "seq_len": job.length, "micro_batch": rows,
            "global_batch": f"{count * rows * job.trainer_gpus} sequences",
        }  # fmt: skip
        if job.inputs.logits == "fused" and recipe.log_probs:
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


def _question(job: RlJob, model: str) -> dict[str, Any]:
    return {"model": model, "gpu": job.gpu, "node": job.node, "preset_dirs": job.dirs}


def _time(job: RlJob, model: str, options: dict[str, Any]) -> StepTime | None:
    try:
        return single(**_question(job, model), **options).time()
    except MissingError:  # the preset has no peak for this precision
        return None
