"""The answer of a search for a layout of post-training: the jobs that fit, each as ``memcalc rl`` asks for it."""

from __future__ import annotations

from typing import Literal

from memcalc.results.estimates import Answer, HardwareFacts, ModelFacts, Verdict, schema
from memcalc.specs.job import JobRecord
from memcalc.specs.strict import Frozen


class UpdateTime(Frozen):
    """The time of the updates of one step, as memcalc predicts steps of training."""

    seconds: float
    """Of all trained models, one after the other [s]."""
    low: float
    """The shortest of the range [s]."""
    high: float
    """The longest of the range [s]."""
    validated: bool
    """Whether published runs of this kind of training support it."""
    basis: str
    """What the range stands on."""


class RlPlan(Frozen):
    """One job that fits."""

    rank: int
    """From 1, the best."""
    choices: dict[str, str]
    """What the search decided, by the option that says it."""
    changes: dict[str, str]
    """Of these what is not the framework's default."""
    trainer_gpus: int
    """GPUs that the trained models are on, [1]."""
    engine_gpus: int
    """GPUs that engines have to themselves; 0 where they share those of the trainer, [1]."""
    verdict: Verdict
    """Of ``memcalc rl``: ``fits`` or ``tight``."""
    binding: str
    """The phase that holds most."""
    headroom: int
    """What is free of a GPU in it [bytes]."""
    host: int
    """Host memory of a node [bytes]."""
    engines: int
    """How many there are; 0 where nothing is generated, [1]."""
    at_once: int
    """Samples of the longest length that all engines generate at once, [1]."""
    rounds: int | None
    """How often an engine fills its cache for its samples of a step; ``None`` where nothing is generated."""
    rollout_guess: float | None
    """A guess, the time to read weights and cached tokens at the full speed of the memory [s]; no run supports it."""
    update: UpdateTime | None
    """Predicted; ``None`` where the GPU's preset has no peak for the precision."""
    job: JobRecord
    """The job of ``memcalc rl`` that gives the same figures, phase by phase."""
    command: str
    """The command line of ``job``."""


class RlRemedy(Frozen):
    """One change with which the nearest job fits."""

    change: str
    """The option and its value."""
    verdict: Verdict
    """With it."""
    device: int
    """The binding phase then [bytes]."""
    job: JobRecord
    """The job with it."""
    command: str
    """The command line of ``job``."""


class Nearest(Frozen):
    """The job that lacks least where none fits."""

    reason: str
    """Why it does not fit."""
    job: JobRecord
    """The job itself."""
    command: str
    """The command line of ``job``."""
    remedies: tuple[RlRemedy, ...]
    """Single changes with which it fits, those that cost least first."""


class RlPlans(Answer):
    """The answer of ``memcalc plan --algorithm``."""

    schema_: Literal["memcalc.rl-plans/1"] = schema("memcalc.rl-plans/1")
    model: ModelFacts
    """The policy."""
    hardware: HardwareFacts
    """What it runs on."""
    algorithm: str
    """What is optimized."""
    framework: str
    """Whose options were searched, with its release."""
    capacity: int
    """Of one GPU [bytes]."""
    samples: int
    """Samples, or pairs, that times are of: the responses of a step, [1]."""
    searched: int
    """Jobs that were computed, [1]."""
    fitting: int
    """How many of them fit, [1]."""
    plans: tuple[RlPlan, ...]
    """The best of each idea, the best first."""
    nearest: Nearest | None
    """Where none fits, the job that lacks least."""
    grounds: dict[str, str]
    """What is known, predicted or guessed, by figure."""
    warnings: tuple[str, ...]
    """What the figures do not know."""
    assumptions: dict[str, str]
    """Defaults that were taken and not searched."""
    command: str
    """The line that asks this again."""
