"""The guard as it is asked for: around a loop, or as a callback of a trainer."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from memcalc.errors import MissingError, UnknownNameError
from memcalc.probe.guard.options import Options

if TYPE_CHECKING:
    from memcalc.probe.guard.ladder import Given
    from memcalc.probe.guard.watch import Watch

__all__ = ["guard", "lightning_callback", "trainer_callback"]


def guard(plan: Given, **asked: Any) -> Watch:
    """Return a context manager that watches a run against its plan.

    ``plan`` is a saved plan, its path, or what :func:`memcalc.plan` returned. Within the block the loop calls
    ``step_done()`` after each optimizer step, and takes its micro-batches from ``split(batch)``, or their size and
    number from ``micro_batch`` and ``accumulation_steps``. Every ``every`` steps the peaks, the time of recomputation
    and the accumulation are reported beside the plan's figures: to the logger ``memcalc.guard``, to ``jsonl``, and to
    Prometheus (``prometheus=True``, ``port=``, ``textfile=`` or ``registry=``).

    Where more is reserved than ``threshold`` (a size, or a share of what is usable; 0.95 unless given), or the
    allocator had to give its cache back, ``on_pressure`` is followed: ``"report"`` says what would be next, ``"step"``
    goes over to the plan's next safer step in the running job, and asks for a restart once none is left, ``"restart"``
    asks for one at once. A restart's files are written to ``restart_dir`` in the format ``to``, and
    :class:`memcalc.errors.RestartNeeded` is raised, or with ``stop="flag"`` kept in ``watch.restart``. With ``relax`` a
    step is taken back where memory stays free. ``model`` is what recomputation is switched in, ``blocks`` names its
    blocks where they are not found. All ranks must call ``step_done`` alike; they decide together.
    """
    from memcalc.probe.guard.watch import Watch

    return Watch(plan, _options(asked, "torch"))


def trainer_callback(plan: Given, **asked: Any) -> Any:
    """Return a ``TrainerCallback`` of Transformers that watches a run against its plan; see :func:`guard`.

    Recomputation is switched in the running job; another micro-batch needs a restart, for which the trainer saves a
    checkpoint and stops (``stop="flag"``, here the default).
    """
    options = _options({"stop": "flag", **asked}, "torch", "transformers")
    from memcalc.probe.live.guard_trainer import GuardCallback

    return GuardCallback(plan, options)


def lightning_callback(plan: Given, **asked: Any) -> Any:
    """Return a ``Callback`` of Lightning that watches a run against its plan; see :func:`guard`.

    Recomputation is switched in the running job; another micro-batch needs a restart, for which the trainer stops after
    saving a checkpoint to ``restart_dir`` (``stop="flag"``, here the default).
    """
    options = _options({"stop": "flag", **asked}, "torch", "lightning")
    from memcalc.probe.live.guard_lightning import GuardCallback

    return GuardCallback(plan, options)


def _options(asked: dict[str, Any], *needed: str) -> Options:
    """Return the options, checked."""
    for name in needed:
        if find_spec(name) is None:
            raise MissingError(f"{name} is needed to guard a run: pip install {name}.")
    known = [one.name for one in fields(Options)]
    for name in asked:
        if name not in known:
            raise UnknownNameError("option", name, f"must be one of {', '.join(known)}", known)
    return Options(**asked)
