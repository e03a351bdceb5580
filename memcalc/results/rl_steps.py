"""Jobs of post-training beside one another: the changes that lead from one to another, and what each costs or saves."""

from __future__ import annotations

from typing import Literal

from memcalc.results.diff import DiffField
from memcalc.results.estimates import Answer, HardwareFacts, ModelFacts, Verdict, schema
from memcalc.results.posttraining import Rl, RlPhase
from memcalc.results.rl_plans import UpdateTime
from memcalc.specs.job import JobRecord
from memcalc.specs.strict import Frozen


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
