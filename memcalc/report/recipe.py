"""The usual order of tuning and what remedies return, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.tables import Block, Line, Table, gib, header
from memcalc.results.plans import Plans, RecipeStep, Remedy

GOOD = 1.5
"""A return above which a remedy is said to be good."""


def recipe_blocks(result: Plans) -> Iterator[Block]:
    """Both tables, where they were asked for."""
    if result.recipe:
        columns = header("step | change | peak [GiB] > | fits | tok/s/GPU >")
        rows = tuple(
            (str(step.stage), step.change, gib(step.device), "yes" if step.fits else "no", _speed(step))
            for step in result.recipe
        )
        yield Table("Tuning steps, cheapest first", columns, rows)
        yield from _beside_the_best(result)
    if result.remedies:
        columns = header("remedy | saved [%] > | time added [%] > | ratio > | reserved [GiB] >")
        rows = tuple(
            (
                remedy.change,
                f"{100 * remedy.saved:.1f}",
                f"{100 * remedy.slower:.1f}",
                _roi(remedy),
                gib(remedy.reserved),
            )
            for remedy in result.remedies
        )
        yield Table("Remedies by memory saved per time added", columns, rows)
        yield Line(f"Baseline: 16-bit training, no remedies. Above {GOOD} is a good trade.", "faint")


def _speed(step: RecipeStep) -> str:
    return f"{step.tokens_per_second_per_gpu:.0f}"


def _roi(item: Remedy) -> str:
    if item.saved <= 0:
        return "saves nothing"
    return "no cost" if item.roi is None else f"{item.roi:.2f}"


def _beside_the_best(result: Plans) -> Iterator[Line]:
    last = result.recipe[-1]
    if not result.plans or not last.fits:
        return
    best = max(plan.time.tokens_per_second_per_gpu for plan in result.plans if plan.gpus == last.strategy.gpus)
    gain = best / last.tokens_per_second_per_gpu - 1
    if gain > 0.005:
        yield Line(f"The search's best plan is {gain:.0%} faster than the recipe's last step.")
