"""The answer about post-training: each phase, what every role holds in it, and which phase binds."""

from __future__ import annotations

from typing import Literal

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
