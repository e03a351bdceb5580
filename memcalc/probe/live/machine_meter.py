"""Device memory as the driver counts it, and a reading that notices when another process moves it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memcalc.probe.live.steps import own_uuid
from memcalc.probe.measure import smi

__all__ = ["Meter", "UnsteadyError", "outside", "steady"]

_READINGS = 3
_PAUSE_S = 0.1


class UnsteadyError(RuntimeError):
    """Two readings differ although this process did nothing in between."""


def steady(read: Callable[[], int], *, pause: float = _PAUSE_S, readings: int = _READINGS) -> int:
    """Return what `read` says, if it says the same several times in a row; else raise :class:`UnsteadyError`."""
    first = read()
    for _ in range(readings - 1):
        time.sleep(pause)
        again = read()
        if again != first:
            raise UnsteadyError(
                f"device memory changed by {again - first} bytes while nothing ran here: another process uses the GPU"
            )
    return first


def outside(cuda: Any = torch.cuda, *, pause: float = _PAUSE_S) -> int:
    """Return what is in use on the device beside this process's allocator, whoever uses it [bytes]."""
    cuda.synchronize()
    return steady(lambda: _in_use(cuda), pause=pause) - int(cuda.memory_reserved())


def _in_use(cuda: Any) -> int:
    free, total = cuda.mem_get_info()
    return int(total - free)


@dataclass
class Meter:
    """What nvidia-smi shows of this process, the context included; it makes no context by looking."""

    cuda: Any = torch.cuda
    pause: float = _PAUSE_S
    before: dict[str, int] = field(default_factory=dict)
    """By GPU, before this process had a context [bytes]."""
    source: str = ""
    """How the last figure was read."""

    def begin(self) -> None:
        """Note what each GPU holds before."""
        self.before = {card.uuid: card.used for card in smi.cards()}

    def held(self) -> int | None:
        """Return what this process has on its GPU, all kernels done [bytes]; None where nvidia-smi does not show it.

        Where it does not list the process, as in many containers, the growth of the whole GPU stands for it.
        """
        self.cuda.synchronize()
        uuid = own_uuid(list(self.before))
        if uuid is None:
            return None
        if smi.used_by_process(os.getpid(), uuid) is not None:
            self.source = "nvidia-smi's figure of the process"
            return steady(lambda: smi.used_by_process(os.getpid(), uuid) or 0, pause=self.pause)
        self.source = "growth of nvidia-smi's figure of the GPU"
        grown = steady(lambda: self._used(uuid), pause=self.pause) - self.before[uuid]
        return grown if grown > 0 else None

    @staticmethod
    def _used(uuid: str) -> int:
        return next((card.used for card in smi.cards() if card.uuid == uuid), 0)
