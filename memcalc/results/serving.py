"""The answer about an inference engine: what a GPU of each stage holds, the cache, and what can be set."""

from typing import Any, Literal

from memcalc.results.estimates import Answer, HardwareFacts, ModelFacts, Verdict, schema
from memcalc.specs.strict import Frozen

WAITING = "longer ones wait or are computed again, which is slow, not a failure"
"""What becomes of sequences for which a cache has no place."""


class EngineTerm(Frozen):
    """One part of a GPU's memory."""

    name: str
    """What it is."""
    bytes: int
    """Its size [bytes]."""
    within: bool
    """Whether it counts in what the engine may take."""
    formula: str
    """How it is computed."""
    inputs: dict[str, Any]
    """The symbols' values."""
    source: str
    """Where the formula was read or fitted."""


class CacheGroup(Frozen):
    """Layers that share one table of blocks."""

    kind: Literal["full", "window", "latent"]
    """What a layer caches: keys and values of all tokens, of a sliding window, or latents."""
    layers: int
    """Layers of the group, [1]."""
    window: int
    """Tokens that a token sees; 0 for all."""
    token_bytes: int
    """What one layer caches of one token on a rank [bytes]."""
    request_blocks: int
    """Blocks that a sequence of the longest length takes, [1]."""


class EngineStage(Frozen):
    """A GPU of one pipeline stage."""

    stage: int
    """Its number, from 0."""
    layers: int
    """Layers that it holds, [1]."""
    terms: tuple[EngineTerm, ...]
    """What it holds beside the cache."""
    cache: int
    """What is left for the cache [bytes]; below 0 where there is too little for the rest."""
    blocks: int
    """Blocks of the pool, [1]."""
    groups: tuple[CacheGroup, ...]
    """How its layers share the pool."""

    def size(self, name: str) -> int:
        """Return the size of a part [bytes]; 0 where there is none of that name."""
        return sum(term.bytes for term in self.terms if term.name == name)

    @property
    def outside(self) -> int:
        """What lies beside what the engine may take [bytes]."""
        return sum(term.bytes for term in self.terms if not term.within)


class EngineLimits(Frozen):
    """The furthest value of each setting, all others as they are; ``None`` where no value will do."""

    largest_utilization: float | None
    """The largest share, in hundredths, with which what lies beside it has room."""
    smallest_utilization: float | None
    """The smallest share, in hundredths, with which one sequence of the longest length fits the cache."""
    largest_max_len: int | None
    """The longest sequence with which the engine starts, [tokens]."""
    largest_max_seqs: int | None
    """The most sequences of the longest length that the cache holds at once, no more than ``max_seqs`` set, [1]."""


class Served(Answer):
    """The answer of ``memcalc serve``."""

    schema_: Literal["memcalc.serve/1"] = schema("memcalc.serve/1")
    model: ModelFacts
    """Name and size."""
    hardware: HardwareFacts
    """What it runs on."""
    engine: str
    """The engine, with its release."""
    era: str
    """The release in which the habits began that were taken."""
    utilization: float
    """Share of the GPU that the engine may take, [1]."""
    tp: int
    """Ranks of tensor parallelism, [1]."""
    pp: int
    """Pipeline stages, [1]."""
    replicas: int
    """Engines on these GPUs, [1]."""
    max_len: int
    """Longest sequence [tokens]."""
    max_seqs: int
    """Sequences that run at once, [1]."""
    max_batched_tokens: int
    """Tokens of one step."""
    capacity: int
    """Of one GPU [bytes]."""
    budget: int
    """What the engine may take of it [bytes]."""
    stages: tuple[EngineStage, ...]
    """Each pipeline stage; the smallest pool rules."""
    blocks: int
    """Blocks of the pool, [1]."""
    block_tokens: int
    """Tokens of one block."""
    tokens: int
    """Tokens that the engine logs for its pool."""
    concurrency: float
    """Sequences of the longest length that the pool holds at once, [1]."""
    device: int
    """The most that a GPU holds once the engine has started [bytes]."""
    verdict: Verdict
    """``tight`` where so little lies beside the budget that engines have run out after they took their pool."""
    reason: str
    """Why, in one sentence; empty where it fits."""
    limits: EngineLimits | None
    """What can be set; ``None`` where that was not asked for."""
    warnings: tuple[str, ...]
    """What the figures do not know."""
    assumptions: dict[str, str]
    """Defaults that were taken."""
    command: str
    """The line that asks this again."""


class LoggedTerm(Frozen):
    """One figure of a start-up log beside its prediction."""

    name: str
    """What it is."""
    logged: int
    """As the log prints it [bytes]; the cache's tokens in tokens."""
    predicted: int
    """As memcalc serve has it, in the same unit."""
    unit: Literal["bytes", "tokens"]
    """The unit of both."""
    agrees: bool
    """Whether they differ by no more than the start-up logs that predictions were compared with."""


class EngineLog(Answer):
    """The answer of ``memcalc triage`` about an inference engine's start-up log."""

    schema_: Literal["memcalc.engine-log/1"] = schema("memcalc.engine-log/1")
    source: str
    """What was read."""
    failure: str
    """What the log says of a failure, in a few words; empty where it started."""
    causes: tuple[str, ...]
    """What it follows from, a sentence each."""
    changes: tuple[str, ...]
    """What helps, a sentence each."""
    terms: tuple[LoggedTerm, ...]
    """The log's figures of one GPU, each beside its prediction."""
    differs: str
    """The term that differs most beyond what is usual; empty where none does."""
    served: Served
    """The prediction."""
    unknown: tuple[str, ...]
    """What the log does not say, and what stands in for it."""

    @property
    def answered(self) -> bool:
        """Whether the log says why it failed, or has a figure to compare."""
        return bool(self.failure or self.terms)
