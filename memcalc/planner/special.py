"""What is special about each of some ranked plans, in a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from memcalc.planner.reasons import words_of

if TYPE_CHECKING:
    from memcalc import results

__all__ = ["special"]

_NO_SP = "no sp"
_ALIKE = 2
"""Words by which a plan may differ from an earlier one and still be told by them."""


def special(plans: Sequence[results.Plan], front: Sequence[int]) -> tuple[results.Plan, ...]:
    """Return the plans, each with what it has before all others, or how it differs from an earlier one.

    `front` are the ranks of plans that none beats in everything.
    """
    tags: list[list[str]] = [["tight"] if plan.verdict == "tight" else [] for plan in plans]
    if len(plans) > 1:
        for place, tag in _firsts(plans):
            tags[place].append(tag)
    return tuple(
        plan.model_copy(
            update={"special": tuple(said or _alike(plan, plans[:place]) or ["front"] * (plan.rank in front))}
        )
        for place, (plan, said) in enumerate(zip(plans, tags, strict=True))
    )


def _firsts(plans: Sequence[results.Plan]) -> Iterator[tuple[int, str]]:
    """Yield the place of the plan that is first in something, with the words for it."""
    fastest = _best(plans, _speed)
    yield fastest, "fastest"
    yield _best(plans, lambda plan: -plan.peak.device), "smallest"
    if len({plan.gpus for plan in plans}) > 1:
        yield _best(plans, lambda plan: -plan.gpus), "fewest GPUs"
        yield _best(plans, lambda plan: plan.gpus * _speed(plan)), "soonest done"
    parts = [plan.parts for plan in plans]
    if parts.count(min(parts)) < len(parts):
        yield parts.index(min(parts)), "fewest parts"
    for tag, has in _WITHOUT.items():
        fit = [place for place, plan in enumerate(plans) if has(plan)]
        if fit and not has(plans[fastest]):
            yield max(fit, key=lambda place: (_speed(plans[place]), -place)), tag


_WITHOUT: dict[str, Callable[[results.Plan], bool]] = {
    "no offload": lambda plan: not plan.strategy.offload,
    "no recompute": lambda plan: plan.strategy.recompute == "none",
    "validated time": lambda plan: plan.time.validated,
}
"""What the fastest plan may lack: the fastest of those that have it is told."""


def _speed(plan: results.Plan) -> float:
    return plan.time.tokens_per_second_per_gpu


def _best(plans: Sequence[results.Plan], key: Callable[[results.Plan], float]) -> int:
    """Return the place of the first of those with the largest key."""
    return max(range(len(plans)), key=lambda place: (key(plans[place]), -place))


def _alike(plan: results.Plan, earlier: Sequence[results.Plan]) -> list[str]:
    """Return how a plan differs from the earlier one that it is most like, where a few words say it."""
    own = _words(plan)
    told = []
    for other in earlier:
        theirs = _words(other)
        more, less = [w for w in own if w not in theirs], [w for w in theirs if w not in own]
        gone = [word for word in less if not _answered(word, more)]
        words = [*more, *(f"without {word}" for word in gone if word != _NO_SP)]
        words += ["sp"] * (_NO_SP in gone and plan.strategy.sp)
        if 0 < len(words) <= _ALIKE:
            told.append((len(words), f"as #{other.rank} with {' and '.join(words)}".replace("with without", "without")))
    return [min(told, key=lambda one: one[0])[1]] if told else []


def _words(plan: results.Plan) -> list[str]:
    return [f"gpus {plan.gpus}", *words_of(plan.strategy)]


def _answered(word: str, more: Sequence[str]) -> bool:
    """Whether one of some words is about the same as a word, such as another policy of recomputation."""
    name, _, value = word.rpartition(" ")
    return any(one.rpartition(" ")[0] == name for one in more) if name and value else bool(more)
