"""The answer about post-training: each phase, what every role holds in it, and which phase binds.

The answer of a search for a layout of post-training: the jobs that fit, each as ``memcalc rl`` asks for it.

Jobs of post-training beside one another: the changes that lead from one to another, and what each costs or saves.
"""

from typing import Literal

from memcalc.results.changes import DiffField
from memcalc.results.estimates import Answer, HardwareFacts, ModelFacts, Verdict, schema
from memcalc.specs.job import JobRecord
from memcalc.specs.strict import Frozen


class RlPhase(Frozen):
    """One phase of a step on the GPUs that it runs on."""

    name: str
    """Such as rollout, old log-probs or update."""
    gpus: Literal["shared", "trainer", "engine"]
    """The GPUs: those of all, or of the trainer or the engines where they are apart."""
    roles: dict[str, int]
    """What each role holds on one GPU at the height of the phase [bytes]."""
    allocated: int
    """Their sum [bytes]."""
    device: int
    """The same with what allocators reserve beyond it [bytes]."""


class RlEdit(Frozen):
    """One change with which the job fits."""

    change: str
    """The option and its value."""
    verdict: Verdict
    """With it."""
    device: int
    """The binding phase then [bytes]."""


class RlRollout(Frozen):
    """What the engines hold."""

    engines: int
    """How many there are, [1]."""
    utilization: float
    """The share that each may take of a GPU, [1]."""
    largest_utilization: float | None
    """The largest, in hundredths, with which rollout and wake-up fit; ``None`` where none does."""
    tokens: int
    """Tokens that the cache of one holds."""
    concurrency: float
    """Samples of the longest length that one holds at once, [1]."""
    rounds: int | None
    """How often one fills its cache for its samples of a step; ``None`` where --prompts is not told."""
    reason: str
    """Why an engine does not start; empty where it does."""


class RlLimit(Frozen):
    """The largest value of one setting with which the job fits with the margin, all others as they are."""

    what: str
    """``response``, ``micro-batch`` or ``micro-tokens``."""
    value: int | None
    """The value [tokens, or samples of a micro-batch]; ``None`` where none fits."""
    step: int
    """Only multiples of it were tried [tokens, or samples of a micro-batch]."""
    reason: str
    """Why the next value does not fit; empty where all that were tried do."""
    binding: str
    """The phase that holds most with the next value; empty where all that were tried fit."""
    command: str
    """The line that shows the value; empty where none fits."""


class Rl(Answer):
    """The answer of ``memcalc rl``."""

    schema_: Literal["memcalc.rl/1"] = schema("memcalc.rl/1")
    model: ModelFacts
    """The policy."""
    hardware: HardwareFacts
    """What it runs on."""
    algorithm: str
    """What is optimized."""
    framework: str
    """Whose defaults were taken, with its release."""
    trainer: str
    """What shards and trains, as ``memcalc estimate`` calls it."""
    capacity: int
    """Of one GPU [bytes]."""
    phases: tuple[RlPhase, ...]
    """In their order."""
    binding: str
    """The phase that holds most."""
    headroom: int
    """What is free of a GPU in it [bytes]; below 0 where it does not fit."""
    rollout: RlRollout | None
    """The engines; ``None`` where nothing is generated."""
    host: int
    """Host memory of a node: what is parked, offloaded, and weights of engines that sleep at level 1 [bytes]."""
    host_capacity: int | None
    """That a node has [bytes]; ``None`` where it is its owner's choice."""
    verdict: Verdict
    """``tight`` where a measured run of twenty would not have fitted."""
    reason: str
    """Why it does not fit; empty where it does."""
    longest_mean: int | None
    """Mean length of samples up to which it fits where all of the longest do not [tokens]; ``None`` elsewhere."""
    edit: RlEdit | None
    """The first change, of those that cost least, with which it fits; ``None`` where it fits, or where none does."""
    limit: RlLimit | None = None
    """The largest value of the setting that was asked for; ``None`` where none was."""
    warnings: tuple[str, ...]
    """What the figures do not know."""
    assumptions: dict[str, str]
    """Defaults that were taken."""
    job: JobRecord
    """What was asked, to ask it again."""
    command: str
    """The command line of ``job``."""


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


class RlFigures(Frozen):
    """What is compared of one job."""

    verdict: Verdict
    """As ``memcalc rl`` gives it."""
    reason: str
    """Why it does not fit; empty where it does."""
    phases: tuple[RlPhase, ...]
    """In their order."""
    binding: str
    """The phase that holds most."""
    allocated: int
    """In it, on one GPU [bytes]."""
    capacity: int
    """Of the GPU [bytes]."""
    host: int
    """Host memory of a node [bytes]."""
    concurrency: float | None
    """Samples of the longest length that one engine holds at once, [1]; ``None`` where nothing is generated."""
    rounds: int | None
    """How often an engine fills its cache for its samples of a step; ``None`` where --prompts is not told."""
    update: UpdateTime | None
    """Of the samples of a step, predicted; ``None`` where the GPU's preset has no peak for the precision."""


class RlStep(Frozen):
    """One change, or several that are possible only together, applied to all that came before."""

    name: str
    """What changes, in a few words; empty at the start of a ladder."""
    fields: tuple[DiffField, ...]
    """What is different from the step before; first what was said, then what follows from it."""
    change: int
    """What the binding phase holds more than that of the step before, less where negative [bytes]."""
    alone: int | None
    """The same of the change applied to the start; ``None`` where that is impossible [bytes]."""
    impossible: str
    """Why it is impossible alone; empty where it is not."""
    after: RlFigures
    """With this step and all before it."""
    job: JobRecord
    """The job after this step."""
    command: str
    """The command line of ``job``."""


class RlDiff(Answer):
    """The answer of ``memcalc diff`` for two jobs of post-training."""

    schema_: Literal["memcalc.rl-diff/1"] = schema("memcalc.rl-diff/1")
    names: tuple[str, str]
    """A and B as they were given."""
    a: Rl
    """The job from which the changes start."""
    b: Rl
    """The job at which they end."""
    fields: tuple[DiffField, ...]
    """All that is different once every default is resolved; empty for two jobs that are the same."""
    samples: int
    """Samples, or pairs, that times of updates are of, [1]."""
    start: RlFigures
    """Of A."""
    steps: tuple[RlStep, ...]
    """In the order in which they are applied; the last one ends at B."""
    warnings: tuple[str, ...]
    """What the figures do not know; one that is of one job alone begins with A or B."""
    command: str
    """The line that reproduces the answer; empty where a side was no text."""


class RlLadder(Answer):
    """The answer of ``memcalc ladder --algorithm``."""

    schema_: Literal["memcalc.rl-ladder/1"] = schema("memcalc.rl-ladder/1")
    model: ModelFacts
    """The policy."""
    hardware: HardwareFacts
    """What it runs on."""
    algorithm: str
    """What is optimized."""
    framework: str
    """Whose defaults were taken, with its release."""
    samples: int
    """Samples, or pairs, that times of updates are of, [1]."""
    steps: tuple[RlStep, ...]
    """The start first, then one change after another."""
    first: int | None
    """The first step that fits, be it tight, from 0; ``None`` where none does."""
    left_out: tuple[str, ...]
    """Changes that are not possible here, and why."""
    warnings: tuple[str, ...]
    """What the figures do not know."""
    assumptions: dict[str, str]
    """Defaults that were taken at the start."""
    command: str
    """The line that asks this again."""
