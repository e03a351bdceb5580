"""The guard: a run watched against its plan, and moved to a safer one where memory is short.

The loop's own names are :func:`memcalc.guard`, :func:`memcalc.trainer_callback` and :func:`memcalc.lightning_callback`;
what needs torch is in :mod:`memcalc.probe.live`.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from memcalc.errors import MissingError, UnknownNameError
from memcalc.probe.guard.options import Meter, Options, Reading

if TYPE_CHECKING:
    from memcalc.probe.guard.ladder import Given
    from memcalc.probe.guard.watch import Watch


def guard(plan: Given | None = None, **options: Any) -> Watch:
    """Return a context manager that watches a run against its plan.

    Within the block the loop calls ``step_done()`` after each optimizer step, and takes its micro-batches from
    ``split(batch)``, or their size and number from ``micro_batch`` and ``accumulation_steps``. All ranks must call
    ``step_done`` alike; they decide together. The peaks, the time of recomputation and the accumulation are reported
    beside the plan's figures to the logger ``memcalc.guard``, and wherever else is asked for. Memory is short where
    more is reserved than ``threshold``, or where the allocator had to give its cache back. Without a plan the run is
    watched and nothing is changed.

    Parameters
    ----------
    plan
        A saved plan, its path, or what :func:`memcalc.plan` returned; None for a run without one.
    model
        The module in which recomputation is switched.
    blocks
        Its blocks, where they are not found.
    every : int
        Optimizer steps between reports, 10 when left out.
    threshold : float or str
        A size, or a share of what is usable (without a plan, of the GPU's memory), that may be reserved; 0.95 when
        left out.
    recompute_limit : float
        Milliseconds of an optimizer step that recomputation may take; above it nothing more is recomputed.
    accumulation_limit : int
        Micro-batches that an optimizer step may have; plans with more are left out.
    micro_batch, accumulation_steps : int
        What a run without a plan has of them.
    on_pressure : str
        Where memory is short, ``"report"`` says what would be next, ``"step"`` goes over to the plan's next safer step
        in the running job, and asks for a restart once none is left, ``"restart"`` asks for one at once.
    restart_dir : str
        Where a restart's files are written.
    to : str
        Their format; by the plan's framework when left out.
    stop : str
        ``"raise"`` for :class:`memcalc.errors.RestartNeeded`, ``"flag"`` to keep it in ``watch.restart``.
    relax : bool
        Whether a step is taken back where memory stays free.
    reset_peaks : bool
        Whether torch's peaks begin anew with each report.
    name : str
        What the run is called in reports; the model's name when left out.
    jsonl : str
        A file of JSON lines for the reports.
    prometheus : bool
        Whether there are gauges for Prometheus; with ``port``, ``textfile`` or ``registry``, where they are.
    address : str
        Where ``port`` listens: this machine alone when left out; ``"0.0.0.0"`` is every network, for whoever asks.
    preset_dirs
        Folders with presets of your own, looked up first.

    Returns
    -------
    Watch
        To be used in a ``with`` statement.

    Raises
    ------
    memcalc.errors.InputError
        For a plan or an option that cannot be used.
    memcalc.errors.MissingError
        Where torch is not installed.
    """
    from memcalc.probe.guard.watch import Watch

    return Watch(plan, _options(options, "torch"))


def trainer_callback(plan: Given | None = None, **options: Any) -> Any:
    """Return a ``TrainerCallback`` of Transformers that watches a run against its plan; see :func:`guard`.

    Recomputation is switched in the running job; another micro-batch needs a restart, for which the trainer saves a
    checkpoint and stops (``stop="flag"``, here the default).
    """
    checked = _options({"stop": "flag", **options}, "torch", "transformers")
    from memcalc.probe.live.guard_trainer import GuardCallback

    return GuardCallback(plan, checked)


def lightning_callback(plan: Given | None = None, **options: Any) -> Any:
    """Return a ``Callback`` of Lightning that watches a run against its plan; see :func:`guard`.

    Recomputation is switched in the running job; another micro-batch needs a restart, for which the trainer stops after
    saving a checkpoint to ``restart_dir`` (``stop="flag"``, here the default).
    """
    checked = _options({"stop": "flag", **options}, "torch", "lightning")
    from memcalc.probe.live.guard_lightning import GuardCallback

    return GuardCallback(plan, checked)


def _options(options: dict[str, Any], *packages: str) -> Options:
    """Return the options, checked."""
    for name in packages:
        if find_spec(name) is None:
            raise MissingError(f"{name} is needed to guard a run: pip install {name}.")
    names = [option.name for option in fields(Options)]
    for name in options:
        if name not in names:
            raise UnknownNameError("option", name, f"must be one of {', '.join(names)}", names)
    return Options(**options)


__all__ = ["Meter", "Reading", "guard", "lightning_callback", "trainer_callback"]
