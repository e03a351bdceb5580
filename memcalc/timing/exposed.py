"""Who sends the messages that a step waits for: a strategy's communication by the ranks that it goes between."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.timing.rates import hardware_of
from memcalc.timing.times import seconds
from memcalc.timing.work import work_of

if TYPE_CHECKING:
    from memcalc.specs.hardware import GPU, Node
    from memcalc.terms import ModelOnGrid
    from memcalc.timing.messages import Messages
    from memcalc.timing.rates import Rates
    from memcalc.timing.work import Work

KINDS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor", "tensor_beside"),
    "context": ("context", "context_waited"),
    "expert": ("expert",),
    "pipeline": ("pipeline",),
    "data": ("gather", "reduction", "between", "gradients", "gradients_between", "parameters", "broadcasts"),
}
"""Messages by the ranks that they go between. Those of data-parallel ranks come last: what they hide behind lasts as
long as the others make it."""


def exposed_by_kind(census: ModelOnGrid, gpu: GPU, node: Node, rates: Rates) -> dict[str, float]:
    """What each kind of message adds to the step of a grid's one strategy [s]; the sum is its communication.

    Kinds share what hides them, so each is what is added where it joins those before it.
    """
    work, hardware = work_of(census, node), hardware_of(gpu, node, census.grid)
    present = [kind for kind, names in KINDS.items() if any(_sent(getattr(work.messages, name)) for name in names)]
    taken, before = dict.fromkeys(KINDS, 0.0), 0.0
    for index, kind in enumerate(present):
        silent = [name for later in present[index + 1 :] for name in KINDS[later]]
        total = float(np.max(seconds(_without(work, silent), hardware, rates).communication))
        taken[kind], before = max(total - before, 0.0), total
    return taken


def _without(work: Work, names: list[str]) -> Work:
    """The same work where some messages are not sent."""
    messages: Messages = work.messages
    return replace(work, messages=replace(messages, **{name: _silent(getattr(messages, name)) for name in names}))


def _silent(message: Any) -> Any:
    """A message, an exchange of tokens or a number of broadcasts, with nothing sent."""
    if isinstance(message, np.ndarray):
        return 0 * message
    sent = {field.name: 0 * getattr(message, field.name) for field in fields(message) if field.name in _SENT}
    return replace(message, **sent)


_SENT = ("volume", "calls", "inside", "outside")
"""What is sent of a message or an exchange, beside the ranks and the way."""


def _sent(message: Any) -> bool:
    if isinstance(message, np.ndarray):
        return bool(np.any(message))
    return any(np.any(getattr(message, field.name)) for field in fields(message) if field.name in _SENT)
