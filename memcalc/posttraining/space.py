"""What a search of post-training decides: options that were not typed, with the values that a framework can be told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from memcalc.posttraining.frameworks import Recipe, Toolkit

Values = dict[str, Any]
"""Options of ``memcalc rl`` by name."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of a GPU that an engine may take beside a trainer."""
RANKS = (1, 2, 4, 8)
"""Ranks of one engine: as far as a host has GPUs."""
PARTS = (0.25, 0.5, 0.75)
"""Shares of all GPUs that engines may have to themselves."""
SAMPLES, FEW_SAMPLES = (1, 2, 4, 8), (1, 4)
"""Samples of a micro-batch, and those that are tried beside engines."""
BUDGETS = (8192, 32768)
"""Tokens of a micro-batch of packed samples, beside the one sample that it must hold."""
MOST_SEQS = 1024
"""Sequences that an engine is let run at once at the most: vLLM's own default on large cards."""


@dataclass(frozen=True)
class Space:
    """The options that are open."""

    typed: Mapping[str, Any]
    toolkit: Toolkit
    recipe: Recipe
    gpus: int
    length: int
    """The longest prompt with the longest response [tokens]."""

    def _open(self, name: str, values: Iterable[Any]) -> list[Values]:
        """Each value of an option that was not typed, else nothing to add."""
        return [{}] if name in self.typed else [{name: value} for value in values]

    def splits(self) -> list[Values]:
        """Engines beside the trainer, then on GPUs to themselves."""
        if not self.recipe.online:
            return [{}]
        sizes = {int(self.gpus * part) for part in PARTS} - {0, self.gpus}
        return [{}] if "engine_gpus" in self.typed else [{}, *({"engine_gpus": size} for size in sorted(sizes))]

    def trainers(self, gpus: int) -> Iterator[Values]:
        """How models are trained on so many GPUs, what is simplest and fastest first; micro-batches left out."""
        choices = self.toolkit.choices
        zero = choices.zero if gpus > 1 else ()
        axes = (
            self._open("offload", choices.offload),
            self._open("zero", zero) if zero else [{}],
            self._open("recompute", ("none", "full")),
        )
        for parts in product(*axes):
            yield {name: value for part in parts for name, value in part.items()}

    def batches(self) -> list[Values]:
        """Sizes of a micro-batch, the smallest first."""
        if {"micro_batch", "micro_tokens"} & set(self.typed):
            return [{}]
        if not (self.toolkit.choices.packs and self.recipe.online):
            return [{"micro_batch": size} for size in (FEW_SAMPLES if self.recipe.online else SAMPLES)]
        return [{"micro_tokens": size} for size in (self.length, *(size for size in BUDGETS if size > self.length))]

    def rests(self, *, apart: bool) -> Iterator[Values]:
        """What leaves a GPU between phases: trained models, and engines on the same GPUs."""
        choices = self.toolkit.choices
        if not self.recipe.online or apart:
            yield {}
            return
        for park, sleep in product(self._open("park", choices.park), self._open("sleep", choices.sleep)):
            yield {**park, **sleep}

    def engines(self, gpus: int, samples: int, *, apart: bool) -> Iterator[Values]:
        """Engines on so many GPUs for so many samples of a step; their share is left out."""
        decided = self.toolkit.at_once and not apart
        ranks = [rank for rank in RANKS if gpus % rank == 0]
        for tp in self._open("engine_tp", ranks):
            share = -(-samples * tp.get("engine_tp", 1) // gpus)
            sizes = sorted({self.toolkit.max_seqs or 256, min(share, MOST_SEQS)})
            yield from [tp] if decided else [{**tp, **seqs} for seqs in self._open("max_seqs", sizes)]

    def shares(self, *, apart: bool) -> list[Values]:
        """Shares of a GPU that an engine may take, the smallest first."""
        return [{}] if apart else self._open("utilization", SHARES)
