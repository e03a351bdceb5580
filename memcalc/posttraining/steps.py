"""From one job of post-training to another: what is different, and what each change costs or saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcalc.posttraining import answered
from memcalc.posttraining.figures import Figures, trainer_options
from memcalc.posttraining.words import RlJob, check_engines, completed
from memcalc.results.diff import DiffField, Value
from memcalc.results.posttraining import RlFigures, RlStep
from memcalc.serving.engines import number
from memcalc.specs.posttraining import TRAINING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.results.posttraining import Rl

PLACES = ("model", "gpu", "gpus", "node")
"""Words that say what is trained, and on what."""
_OPEN = {
    "micro_batch": "none",
    "micro_tokens": "none",
    "prompts": "none",
    "logprob_batch": "default",
    "logprob_tokens": "default",
    "critic_micro_batch": "the policy's",
    "critic_micro_tokens": "the policy's",
    "max_seqs": "default",
}
"""What is said of counts that are 0."""


@dataclass(frozen=True)
class State:
    """A job with its answer."""

    typed: Mapping[str, Any]
    """As typed, those of :data:`PLACES` among them."""
    job: RlJob
    answer: Rl
    figures: RlFigures


def job_of(typed: Mapping[str, Any], dirs: tuple[str, ...], assumptions: dict[str, str]) -> RlJob:
    """The job that ``memcalc rl`` makes of these words."""
    options = {name: value for name, value in typed.items() if name not in PLACES}
    gpus = number(typed["gpus"], "gpus")
    job = completed(typed["model"], typed["gpu"], gpus, typed.get("node"), options, dirs, assumptions)
    if job.recipe.online:
        check_engines(job)
    return job


def step_samples(job: RlJob) -> int:
    """Samples, or pairs, of a step where it is told, else of one micro-batch on each rank, [1]."""
    inputs = job.inputs
    if job.recipe.online and inputs.prompts:
        return inputs.prompts * max(1, inputs.samples)
    rows, tokens = job.batch(gradients=True)
    return max(1, rows * tokens // (job.length * job.recipe.rows)) * job.trainer_gpus


def state_of(typed: Mapping[str, Any], dirs: tuple[str, ...], figures: Figures, samples: int = 0) -> State:
    """A job with what is compared of it; ``samples`` are those that its update is timed for, else its own."""
    assumptions: dict[str, str] = {}
    job = job_of(typed, dirs, assumptions)
    options = {name: value for name, value in typed.items() if name not in PLACES}
    answer = answered(job, options, assumptions, figures, advice=False)
    compared = RlFigures(
        verdict=answer.verdict,
        reason=answer.reason,
        phases=answer.phases,
        binding=answer.binding,
        allocated=answer.capacity - answer.headroom,
        capacity=answer.capacity,
        host=answer.host,
        concurrency=answer.rollout.concurrency if answer.rollout else None,
        rounds=answer.rollout.rounds if answer.rollout else None,
        update=figures.updates(job, samples or step_samples(job)),
    )
    return State(typed, job, answer, compared)


def facts_of(job: RlJob) -> dict[str, Value]:
    """Every word of a job with its value, the framework's defaults among them."""
    trains = trainer_options(job)
    facts: dict[str, Any] = {"model": job.model, "gpu": job.gpu, "gpus": job.gpus, "node": job.node or "default"}
    facts |= job.inputs.model_dump()
    facts |= {"framework": job.toolkit.name, "trainer": job.trainer, "reference": job.reference}
    facts |= {"park": ",".join(job.parks) or "none"}
    facts |= {name: text for name, text in _OPEN.items() if not facts[name]}
    facts |= {name: trains[name] for name in TRAINING if name in trains}
    return {name: ",".join(map(str, value)) if isinstance(value, tuple) else value for name, value in facts.items()}


def fields_between(before: RlJob, after: RlJob, stated: frozenset[str] | set[str]) -> tuple[DiffField, ...]:
    """What is different; first what is among the words that are stated, then what follows from them."""
    was, now = facts_of(before), facts_of(after)
    fields = [
        DiffField(
            field=name, before=was.get(name, "default"), after=now.get(name, "default"), follows=name not in stated
        )
        for name in dict.fromkeys((*was, *now))
        if was.get(name, "default") != now.get(name, "default")
    ]
    return tuple(sorted(fields, key=lambda field: field.follows))


def step_of(
    name: str, before: State, after: State, fields: tuple[DiffField, ...], *, alone: int | None, impossible: str = ""
) -> RlStep:
    """One change, with what it costs beside the state before it."""
    return RlStep(
        name=name,
        fields=fields,
        change=after.figures.allocated - before.figures.allocated,
        alone=alone,
        impossible=impossible,
        after=after.figures,
        job=after.answer.job,
        command=after.answer.command,
    )
