"""The time that checkpoints take to compute again in backward, measured where torch.utils.checkpoint does it.

Both kinds of checkpoint are measured: a non-reentrant one calls the function that its frame (``_CheckpointFrame``)
was made with when the first of its tensors is needed; a reentrant one calls its function in ``backward``. Recomputation
that is compiled into a graph, or is another library's own, is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

__all__ = ["RecomputeTimer"]

Span = Callable[[], float | None]
"""A span of time [ms], or None as long as the device has not come to its end."""


class RecomputeTimer:
    """Times recomputation while it is armed: by CUDA events that are read once they have passed, or by the clock."""

    def __init__(self) -> None:
        self.armed = False
        self._inside = self._on_device = False
        self._samples: list[list[Span]] = []
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Stand where checkpoints recompute, until :meth:`remove`."""
        frame, function, timer = checkpoints._CheckpointFrame, checkpoints.CheckpointFunction, self
        backward = function.backward

        class _CheckpointFrame(frame):  # type: ignore[valid-type, misc]
            """torch's own frame, with a function to recompute that can be timed."""

            def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
                super().__init__(timer.timed(recompute_fn), *args, **kwargs)

        def timed_backward(ctx: Any, *grads: Any) -> Any:
            if timer.armed:
                ctx.run_function = timer.timed(ctx.run_function)
            return backward(ctx, *grads)

        checkpoints._CheckpointFrame = _CheckpointFrame
        function.backward = staticmethod(timed_backward)
        self._undo = [
            lambda: setattr(checkpoints, "_CheckpointFrame", frame),
            lambda: setattr(function, "backward", staticmethod(backward)),
        ]

    def remove(self) -> None:
        """Leave torch as it was; frames that are still alive go on without being timed."""
        self.armed = False
        while self._undo:
            self._undo.pop()()

    def timed(self, again: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is timed while the timer is armed; one inside another counts once."""

        def run(*args: Any) -> Any:
            if not self.armed or self._inside:
                return again(*args)
            self._inside = True
            end = _begin_on_device() if self._on_device else _begin()
            try:
                return again(*args)
            finally:  # torch stops a recomputation early by an exception of its own
                self._samples[-1].append(end())
                self._inside = False

        return run

    def arm(self) -> None:
        """Begin a sample: time from here on."""
        self.armed = True
        self._on_device = torch.cuda.is_initialized()
        self._samples.append([])

    def disarm(self) -> None:
        """Time no more."""
        self.armed = False

    def collect(self) -> float | None:
        """Return the time of the last sample that the device has come to the end of [ms]; None where there is none.

        It never waits for the device: what is not known yet is looked at again in the next window.
        """
        for place in range(len(self._samples) - 1, -1, -1):
            found = [span() for span in self._samples[place]]
            known = [one for one in found if one is not None]
            if len(known) == len(found):
                del self._samples[: place + 1]
                return sum(known, 0.0)
        return None


def _begin_on_device() -> Callable[[], Span]:
    """Begin a span of the device's stream; what is returned ends it."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def end() -> Span:
        last.record()
        return lambda: first.elapsed_time(last) if last.query() else None

    return end


def _begin() -> Callable[[], Span]:
    """Begin a span of the clock."""
    started = time.perf_counter()

    def end() -> Span:
        took = 1e3 * (time.perf_counter() - started)
        return lambda: took

    return end
