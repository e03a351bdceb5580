"""The guard: a run watched against its plan, and moved to a safer one where memory is short.

The loop's own names are :func:`memcalc.guard`, :func:`memcalc.trainer_callback` and :func:`memcalc.lightning_callback`;
what needs torch is in :mod:`memcalc.probe.live`.
"""

from __future__ import annotations

from memcalc.probe.guard.meter import Meter, Reading
from memcalc.probe.guard.opening import guard, lightning_callback, trainer_callback

__all__ = ["Meter", "Reading", "guard", "lightning_callback", "trainer_callback"]
