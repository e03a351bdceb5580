"""Trains a row of the suite for a few steps and reads its memory phase by phase."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from memcalc.probe.live.saved import Where
from memcalc.probe.live.step_models import Training, build
from memcalc.probe.live.timeline import Timeline
from memcalc.probe.measure import smi

FORWARD, LOSS, BACKWARD, STEP = "forward", "loss", "backward", "step"
_KINDS = {FORWARD: "forward", LOSS: "forward", BACKWARD: "backward", STEP: "optimizer"}
"""How a timeline calls the phases."""
COUNTED_STEPS = 2
TIMED_AT_LEAST, TIMED_AT_MOST, TIMED_S = 3, 10, 2.0
"""Steps that are timed: at least so many, and no further one after so many seconds [s]."""


class Meter(Protocol):
    """Peaks of live memory since the last `begin`."""

    def begin(self, phase: str) -> None:
        """Forget the peaks so far; what is live counts on."""

    def peaks(self) -> dict[str, int]:
        """Return the peaks by figure [bytes]."""

    def __enter__(self) -> Self:
        """Begin to count."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count no longer."""


class CudaMeter:
    """The allocator's own peaks; they follow the host's calls, so that nothing has to wait for the device."""

    def begin(self, phase: str) -> None:  # noqa: ARG002 - a phase is like another to the allocator
        """Reset both peaks to what is allocated and reserved now."""
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        """Return both figures; what is reserved stays so, and only ever grows from phase to phase."""
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class CountingMeter:
    """Counts storages after every operator, on real or fake CPU tensors; what a kernel takes inside is not seen."""

    def __init__(self, training: Training, line: type[Timeline] = Timeline) -> None:
        self._line = line(Where(training.model, training.blocks))
        for kind, tensors in (("parameter", training.model.parameters()), ("buffer", training.model.buffers())):
            for tensor in tensors:
                self._line.add(tensor, kind)
        self._first, self._live = 0, 0

    def begin(self, phase: str) -> None:
        """Count from here on."""
        self._line.phase = _KINDS[phase]
        self._first, self._live = len(self._line.events), self._line.live

    def peaks(self) -> dict[str, int]:
        """Return the largest count."""
        return {"allocated": max([self._live, *(event.live for event in self._line.events[self._first :])])}

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.__exit__(kind, error, trace)


class Phases:
    """Reads a meter at the borders between the phases of a step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._now: str | None = None
        self.steps: list[dict[str, dict[str, int]]] = []
        """For each step the peaks of its phases, by figure."""

    def enter(self, phase: str) -> None:
        """End the phase before, and begin one; a phase that comes again in a step has the larger of its peaks."""
        self.leave()
        self._now = phase
        self._meter.begin(phase)

    def leave(self) -> None:
        """End the phase."""
        if self._now is None:
            return
        mine = self.steps[-1].setdefault(self._now, {})
        for figure, size in self._meter.peaks().items():
            mine[figure] = max(size, mine.get(figure, 0))
        self._now = None

    def head_begins(self) -> None:
        """End the forward of the blocks; what a checkpoint computes again in backward is none."""
        if self._now == FORWARD:
            self.enter(LOSS)

    def of(self, step: int, figure: str) -> dict[str, int]:
        """Return the peaks of a figure in a step, counted from 1 [bytes]."""
        return {phase: peaks[figure] for phase, peaks in self.steps[step - 1].items() if figure in peaks}

    def largest(self, figure: str) -> int | None:
        """Return the largest peak of all steps [bytes]."""
        largest = [peaks[figure] for step in self.steps for peaks in step.values() if figure in peaks]
        return max(largest, default=None)


def run_step(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one row: the figures, the phases of the first two steps, and the time of those after."""
    return {"run": _on_cuda(job) if job["device"] == "cuda" else _on_cpu(job)}


def train(training: Training, meter: Meter, after: Callable[[int], bool]) -> Phases:
    """Train until `after`, called with the number of steps, returns True; nothing runs before the first step."""
    phases = Phases(meter)
    last = list(training.blocks.values())[-1]
    border = last.register_forward_hook(lambda *_: phases.head_begins())
    # As long runs do it: a collection at a chance moment would make one step unlike another
    gc.collect()
    gc.disable()
    try:
        with meter:
            while not after(len(phases.steps)):
                _one_step(training, phases)
    finally:
        gc.enable()
        border.remove()
    return phases


def _one_step(training: Training, phases: Phases) -> None:
    phases.steps.append({})
    for _ in range(training.micro_batches):
        phases.enter(FORWARD)
        loss = training.loss()
        phases.enter(BACKWARD)
        training.scaler.scale(loss).backward()
    phases.enter(STEP)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    del loss
    training.optimizer.zero_grad(set_to_none=True)
    phases.leave()


# -------------------------------------------------------------------------------------------------------------- devices


def _on_cpu(job: Mapping[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    training = build(job, "cpu")
    phases = train(training, CountingMeter(training), lambda steps: steps >= COUNTED_STEPS)
    return figures_of(phases) | {"software": software()}


def _on_cuda(job: Mapping[str, Any]) -> dict[str, Any]:
    before = {card.uuid: card.used for card in smi.cards()}
    torch.manual_seed(0)
    training = build(job, "cuda")
    gc.collect()
    torch.cuda.empty_cache()  # what building left over is no part of training
    watch = _Watch()
    phases = train(training, CudaMeter(), watch)
    device, how = device_figure(before)
    figures = figures_of(phases)
    if device is not None:
        figures["measured"]["device"] = device
    retries = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    comment = [how, f"the allocator gave its cache back {retries} times" if retries else ""]
    return figures | {
        "seconds": statistics.median(watch.seconds),
        "software": software(),
        "comment": "; ".join(part for part in comment if part),
    }


class _Watch:
    """Waits for the device after each step, and times those after the first two."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def __call__(self, steps: int) -> bool:
        torch.cuda.synchronize()
        now = time.perf_counter()
        if steps > COUNTED_STEPS:
            self.seconds.append(now - self._last)
        self._last = now
        many = len(self.seconds)
        return many >= TIMED_AT_MOST or (many >= TIMED_AT_LEAST and sum(self.seconds) >= TIMED_S)


def figures_of(phases: Phases) -> dict[str, Any]:
    """Return the record of a run, as far as it was measured."""
    measured = {figure: phases.largest(figure) for figure in ("allocated", "reserved")}
    return {
        "measured": {figure: size for figure, size in measured.items() if size},
        "first_phases": phases.of(1, "allocated"),
        "phases": phases.of(2, "allocated"),
        "reserved_phases": phases.of(2, "reserved"),
    }


def device_figure(before: Mapping[str, int]) -> tuple[int | None, str]:
    """Return what this process has on its GPU [bytes], and how that was read."""
    uuid = own_uuid(list(before))
    if uuid is None:
        return None, "no device figure: nvidia-smi does not show this GPU"
    used = smi.used_by_process(os.getpid(), uuid)
    if used is not None:
        return used, "device: nvidia-smi's figure of the process"
    now = next((card.used for card in smi.cards() if card.uuid == uuid), 0)
    if now <= before[uuid]:
        return None, "no device figure: nvidia-smi shows no growth"
    return now - before[uuid], "device: growth of nvidia-smi's figure of the GPU since before the process"


def own_uuid(listed: list[str]) -> str | None:
    """Return which of nvidia-smi's GPUs torch uses; older releases of torch have no UUID."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    if uuid is None:
        return listed[0] if len(listed) == 1 else None
    return next((name for name in listed if name.removeprefix("GPU-") == str(uuid)), None)


def software() -> str:
    """Return the packages that decide what a step holds, with their versions."""
    versions = {name: version_of(name) for name in ("torch", "transformers", "peft")}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def version_of(package: str) -> str:
    """Return the version of a package, empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
