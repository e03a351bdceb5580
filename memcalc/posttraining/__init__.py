"""Post-training: :func:`rl` says what every role holds in each phase of a step, and whether it fits.

The longest response, and the largest micro-batch, with which all roles of a job fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, get_args

from memcalc import catalog
from memcalc._version import __version__
from memcalc.errors import CombinationError, InputError
from memcalc.planner.answer import hardware_facts, model_facts
from memcalc.planner.request import one_of
from memcalc.posttraining.figures import Figures, Trained
from memcalc.posttraining.phases import Cast, frozen_weights, is_pure, phases_of
from memcalc.posttraining.words import RlJob, check_engines, completed, gpus_of, parked
from memcalc.results.estimates import Verdict
from memcalc.results.posttraining import Rl, RlEdit, RlLimit, RlPhase, RlRollout
from memcalc.serving import last_that_works
from memcalc.specs.job import JobRecord, command_line
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable


def rl(
    *,
    model: str,
    gpu: str,
    gpus: int | str | None = None,
    node: str | None = None,
    preset_dirs: Iterable[str] = (),
    advice: bool = True,
    largest: str | None = None,
    **options: Any,
) -> Rl:
    """Say what every role of post-training holds in each phase of a step, which phase binds, and whether it fits.

    Parameters
    ----------
    model, gpu, node
        As for :func:`memcalc.estimate`, by name.
    gpus
        GPUs in all, those of engines included.
    preset_dirs
        Folders with presets of your own, looked up first.
    advice
        Whether the cheapest change is looked for where the job does not fit.
    largest
        What the largest value is looked for of: ``response``, ``micro-batch`` or ``micro-tokens``.
    **options
        ``algorithm``, ``framework``, ``prompt``, ``response`` [tokens] and the others of ``memcalc rl --help``.

    Raises
    ------
    memcalc.errors.InputError
        For a value that cannot be used; where only the user can tell it, :class:`memcalc.errors.MissingError`.
    """
    assumptions: dict[str, str] = {}
    job = completed(model, gpu, gpus_of(gpus, options), node, options, tuple(preset_dirs), assumptions)
    if job.recipe.online:
        check_engines(job)
    figures = Figures()
    answer = answered(job, options, assumptions, figures, advice=advice)
    if largest is None:
        return answer
    return answer.model_copy(update={"limit": limit_of(job, options, figures, largest)})


def rl_again(job: JobRecord, *, advice: bool = True) -> Rl:
    """Answer the job of an answer again."""
    typed: dict[str, Any] = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.options}
    return rl(**typed, preset_dirs=job.preset_dirs, advice=advice)


Largest = Literal["response", "micro-batch", "micro-tokens"]
"""What can be asked for."""
_STEPS = {"response": 128, "micro_batch": 1, "micro_tokens": 1024}
"""In which multiples values are tried [tokens, samples]."""
_MOST = {"micro_batch": 1024, "micro_tokens": 1 << 20}
"""The largest values that are tried [samples, tokens]."""


def limit_of(job: RlJob, options: Mapping[str, Any], figures: Figures, what: str) -> RlLimit:
    """The last value with which the job fits with the margin, all else as it is, and what stands against the next."""
    name = one_of(what, "largest", get_args(Largest)).replace("-", "_")
    unsaid = {"micro_batch": job.inputs.micro_tokens, "micro_tokens": job.inputs.micro_batch}
    if unsaid.get(name):
        raise CombinationError("largest", what, "the job says its micro-batch in the other way")
    step = _STEPS[name]
    most = _MOST.get(name) or figures.model(job).max_positions - job.inputs.prompt
    least = job.length if name == "micro_tokens" else 1
    low, high = -(-least // step), max(most, least) // step
    value = last_that_works(low, high, lambda count: _verdict(job, name, count * step, figures)[0] == "fits")
    reason, binding, command = "", "", ""
    if value is None or value < high:
        following = (value + 1 if value is not None else low) * step
        verdict, reason, binding = _verdict(job, name, following, figures)
        reason = reason or verdict
    if value is not None:
        size = value * step
        changed = {name: size, **_budget(job, name, size)}
        command = command_line(record_of(job, {**options, **changed}))
    return RlLimit(
        what=what, value=None if value is None else value * step, step=step, reason=reason, binding=binding,
        command=command,
    )  # fmt: skip


def _budget(job: RlJob, name: str, value: int) -> dict[str, int]:
    """The tokens of a micro-batch, and of log-probabilities, where they do not hold one prompt with such a response."""
    inputs, length = job.inputs, job.inputs.prompt + value
    tokens = {"micro_tokens": inputs.micro_tokens, "logprob_tokens": inputs.logprob_tokens}
    return {name: length for name, size in tokens.items() if 0 < size < length} if name == "response" else {}


def _verdict(job: RlJob, name: str, value: int, figures: Figures) -> tuple[str, str, str]:
    """The verdict with a value, why it is not that it fits, and the phase that binds."""
    try:
        cast = cast_of(job.changed(**{name: value, **_budget(job, name, value)}), figures, advice=False)
    except InputError as error:
        return "does-not-fit", str(error), ""
    phases = tuple(phases_of(cast))
    verdict, reason = judged(cast, phases, catalog.gpu(job.gpu, job.dirs).memory_bytes)
    return verdict, reason, max(phases, key=lambda phase: phase.allocated).name


# ----------------------------------------------------------------------------------------------------------- the answer


SWITCHES = ("rollout", "weight sync", "wake-up")
"""Phases in which the trainer holds states alone, whose size is no prediction."""


def answered(
    job: RlJob, options: Mapping[str, Any], assumptions: dict[str, str], figures: Figures, *, advice: bool
) -> Rl:
    """The answer for a job."""
    cast = cast_of(job, figures, advice=True)
    phases = tuple(phases_of(cast))
    chip = catalog.gpu(job.gpu, job.dirs)
    verdict, reason = judged(cast, phases, chip.memory_bytes)
    mean = longest_mean(job, figures, chip.memory_bytes) if verdict == "does-not-fit" else 0
    if mean:
        verdict, reason = "tight", f"{reason} where all samples have {job.length:,} tokens"
    host = catalog.node(job.node, job.dirs) if job.node else catalog.node_for(chip, job.dirs)
    binding = max(phases, key=lambda phase: phase.allocated)
    record = record_of(job, options)
    needed = host_bytes(cast, min(host.gpus_per_host, job.gpus))
    return Rl(
        version=__version__,
        model=model_facts(cast.model),
        hardware=hardware_facts(chip, host, job.gpus),
        algorithm=job.inputs.algorithm,
        framework=job.toolkit.name,
        trainer=job.trainer,
        capacity=chip.memory_bytes,
        phases=phases,
        binding=binding.name,
        headroom=chip.memory_bytes - binding.allocated,
        rollout=rollout_of(cast),
        host=needed,
        host_capacity=host.host_memory_bytes,
        verdict=verdict,
        reason=reason,
        longest_mean=mean or None,
        edit=_edit(job, figures) if advice and (mean or verdict == "does-not-fit") else None,
        warnings=tuple(_warnings(cast, needed, host.host_memory_bytes)),
        assumptions=assumptions,
        job=record,
        command=command_line(record),
    )


def record_of(job: RlJob, options: Mapping[str, Any]) -> JobRecord:
    """A job as it was asked for."""
    typed = {name: value for name, value in options.items() if value not in (None, "", [])}
    texts = {name: ",".join(map(str, value)) if isinstance(value, tuple) else value for name, value in typed.items()}
    return JobRecord(
        command="rl", model=job.model, gpu=job.gpu, node=job.node, options={"gpus": job.gpus, **texts},
        preset_dirs=job.dirs,
    )  # fmt: skip


def roles_of(job: RlJob, figures: Figures) -> Cast:
    """All roles but the engines."""
    spec = figures.model(job)
    if job.recipe.head and (not spec.head or not spec.vocab or spec.tail.classes):
        raise InputError("model", job.model, f"{job.inputs.algorithm} reads log-probabilities of a language model")
    policy = figures.trained(job, job.model)
    critic: Trained | None = None
    if job.recipe.critic:
        critic = figures.trained(job.critic, job.inputs.critic_model or job.model)
    name = job.inputs.reward_model
    reward = figures.trained(job, name) if name else None
    judge = frozen_weights(job, reward) if reward else 0
    apart = job.reference and not (job.lora or job.toolkit.swaps)
    width = 0 if job.megatron else job.toolkit.reference_on_host
    reference = 0
    if apart and not width:
        reference = policy.weights if job.megatron else frozen_weights(job, policy)
    away = frozen_weights(job, policy, width) if apart and width else 0
    return Cast(job, spec, policy, critic, reward, reference, away, judge)


def cast_of(job: RlJob, figures: Figures, *, advice: bool) -> Cast:
    """All roles, and the engines beside what they leave of a GPU; with ``advice`` also what can be set of these."""
    cast = roles_of(job, figures)
    if not job.recipe.online:
        return cast
    apart = bool(job.inputs.engine_gpus)
    served = figures.served(job, 0 if apart else cast.starting, advice=apart and advice)
    later = served if apart or not advice else figures.served(job, cast.resting, advice=True)
    largest = later.limits.largest_utilization if later.limits else None
    return replace(cast, served=served, largest_utilization=largest)


def judged(cast: Cast, phases: tuple[RlPhase, ...], capacity: int) -> tuple[Verdict, str]:
    """The verdict on GPUs of so much memory [bytes], and why it is not that it fits."""
    if cast.served is not None and cast.served.verdict == "does-not-fit":
        return "does-not-fit", f"rollout: {cast.served.reason}"
    worst = max(phases, key=lambda phase: phase.allocated)
    if worst.allocated > capacity:
        missing = (worst.allocated - capacity) / GIB
        needed = f"{worst.allocated / GIB:.1f} of {capacity / GIB:.1f} GiB"
        return "does-not-fit", f"{worst.name} needs {needed}, over by {missing:.1f}"
    if cast.served is not None and cast.served.verdict == "tight":
        return "tight", f"rollout: {cast.served.reason}"
    for phase in phases:
        trainer = phase.device - phase.roles.get("engine", 0)
        unsure = trainer * (cast.policy.limit - 1) if phase.name not in SWITCHES else 0
        if phase.device + unsure > capacity:
            needed = f"{(phase.device + unsure) / GIB:.1f} of {capacity / GIB:.1f} GiB"
            return "tight", f"{phase.name} needs {needed} with the 95% margin"
    return "fits", ""


_BUDGETS = ("logprob_tokens", "micro_tokens")
MEANS = 16
"""In which multiples means are tried [tokens]."""


def longest_mean(job: RlJob, figures: Figures, capacity: int) -> int:
    """The largest mean length of unpadded samples with which a job runs that cannot with all of the longest [tokens].

    0 where not one sample of the longest length fits, or where lengths are told.
    """
    if not job.unpadded or not job.recipe.online or job.inputs.mean_length:
        return 0

    def runs(steps: int) -> bool:
        cast = cast_of(job.changed(mean_length=steps * MEANS), figures, advice=False)
        return judged(cast, tuple(phases_of(cast)), capacity)[0] != "does-not-fit"

    return MEANS * (last_that_works(1, job.length // MEANS, runs) or 0)


def rollout_of(cast: Cast) -> RlRollout | None:
    """What the engines hold, and how often one fills its cache in a step."""
    served, inputs = cast.served, cast.job.inputs
    if served is None:
        return None
    engines = (inputs.engine_gpus or cast.job.gpus) // inputs.engine_tp
    rounds = None
    if inputs.prompts and served.concurrency >= 1:
        samples = ceil(inputs.prompts * max(1, inputs.samples) / engines)
        rounds = ceil(samples / min(served.concurrency, served.max_seqs))
    return RlRollout(
        engines=engines,
        utilization=inputs.utilization,
        largest_utilization=cast.largest_utilization,
        tokens=served.tokens,
        concurrency=served.concurrency,
        rounds=rounds,
        reason=served.reason if served.verdict == "does-not-fit" else "",
    )


def host_bytes(cast: Cast, ranks: int) -> int:
    """What a node's host memory holds [bytes]: parked states, frozen models, and weights of sleeping engines."""
    job = cast.job
    models = [model for model in (cast.policy, cast.critic) if model is not None]
    parked = sum(model.parked(job.parks) for model in models)
    away = (cast.reference + cast.judge) * ("params" in job.parks) + cast.reference_away
    # pinned copies of both while one is in the other's place (use_reference_model of dtensor_policy_worker_v2.py)
    swapped = 2 * cast.policy.weights * (job.reference and job.toolkit.swaps)
    total = min(ranks, job.trainer_gpus) * (parked + away + swapped) + sum(model.host for model in models)
    if cast.shares and cast.served is not None and job.inputs.sleep == "1":
        total += ranks * max(stage.size("weights") for stage in cast.served.stages)
    return total


def edits_of(job: RlJob) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes in the order of what they cost, each with its option as typed."""
    inputs, choices = job.inputs, job.toolkit.choices
    if job.recipe.online and not inputs.engine_gpus and inputs.sleep == "0":
        yield f"--sleep {choices.sleep[-1]}", {"sleep": choices.sleep[-1]}
    if choices.fuses and inputs.logits == "plain" and job.recipe.log_probs and job.recipe.head:
        yield "--logits fused", {"logits": "fused"}
    if job.recipe.online and not inputs.engine_gpus:
        more = (park for park in choices.park if not {*parked(park)} <= {*job.parks})
        yield from ((f"--park {park}", {"park": park}) for park in more)
    yield "--recompute full", {"recompute": "full"}
    if inputs.micro_batch > 1:
        yield "--micro-batch 1", {"micro_batch": 1, "logprob_batch": 1}
    if max(inputs.logprob_tokens, inputs.micro_tokens) > job.length:
        sizes = {name: job.length for name in _BUDGETS if getattr(inputs, name)}
        yield from ((f"--{name.replace('_', '-')} {size}", {name: size}) for name, size in sizes.items())
    if job.recipe.online:
        yield from ((f"--utilization {share}", {"utilization": share}) for share in (0.6, 0.5, 0.4, 0.3))
    if job.trainer_gpus > 1 and 3 in choices.zero and not job.megatron:
        yield "--zero 3", {"zero": 3}
    yield from ((f"--offload {part}", {"offload": part}) for part in choices.offload if part != "none")


def _edit(job: RlJob, figures: Figures) -> RlEdit | None:
    """The first single change with which the job fits, else the fewest of them one after another."""
    listed = list(edits_of(job))
    for change, update in listed:
        if (edit := tried(job, change, update, figures)) is not None:
            return edit
    merged: dict[str, Any] = {}
    changes: dict[str, str] = {}
    for change, update in listed:
        merged |= update
        changes[change.split(" ")[0]] = change
        if len(changes) > 1 and (edit := tried(job, " ".join(changes.values()), merged, figures)) is not None:
            return edit
    return None


def tried(job: RlJob, change: str, update: dict[str, Any], figures: Figures) -> RlEdit | None:
    """The change, if the job fits with it."""
    try:
        cast = cast_of(job.changed(**update), figures, advice=False)
    except InputError:  # the trainer cannot be told so
        return None
    phases = tuple(phases_of(cast))
    verdict, _ = judged(cast, phases, catalog.gpu(job.gpu, job.dirs).memory_bytes)
    if verdict == "does-not-fit":
        return None
    return RlEdit(change=change, verdict=verdict, device=max(phase.allocated for phase in phases))


def _warnings(cast: Cast, host: int, capacity: int | None) -> Iterator[str]:
    job, rollout = cast.job, rollout_of(cast)
    if capacity is not None and host > capacity:
        yield f"a node's {capacity / GIB:.0f} GiB of host memory are fewer than the {host / GIB:.0f} that are needed."
    if rollout is not None and rollout.rounds is not None and rollout.rounds > 1:
        yield (
            f"an engine fills its cache {rollout.rounds} times for its samples of a step, at the longest length: slow, "
            "not a failure."
        )
    if cast.shares:
        yield "an engine asleep rests on one public measurement (1.15 GiB)."
    copies = job.toolkit.name.startswith("trl") and not is_pure(job)
    if copies and job.recipe.log_probs and job.inputs.logits == "plain":
        yield "TRL's logits have fp32 copies, as under bf16 autocast: a job that is bf16 throughout needs half of them."
    yield "phases were checked against outcomes of public runs; figures are rare."
