"""Device memory as the driver counts it: of this process where NVML names it, else the growth of the whole device.

NVML is read through the library that comes with the driver, as PyTorch itself reads UUIDs, so that nothing else need be
installed and no CUDA context is made by looking.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Meter", "Nvml", "Unsteady", "steady"]

_UNAVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE: Windows, and what the driver may not tell
_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_MOST_PROCESSES = 4096
_READINGS = 3
_PAUSE = 0.1
"""Between two readings that must agree [s]."""


class Unsteady(Exception):  # noqa: N818  # no error of the program: the figure is left out and this says why
    """Two readings differ although this process did nothing in between."""


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_t` as nvmlDeviceGetComputeRunningProcesses_v3 fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """The driver's own counters of one GPU; raises OSError where they cannot be read."""

    def __init__(self, index: int, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))

    def used(self) -> int:
        """Return what all processes and the driver hold [bytes]."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return int(memory.used)

    def processes(self) -> dict[int, int | None]:
        """Return the bytes of each process with a context, by its number; None where the driver does not say.

        Inside a container the numbers may be those outside, or missing.
        """
        room = ctypes.c_uint(64)
        while True:
            listed = (_Process * room.value)()
            code = self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._handle, ctypes.byref(room), listed)
            if code != _TOO_SMALL or room.value > _MOST_PROCESSES:
                break
            room.value += 64  # the call wrote how many there were; more may have started since
        if code:
            raise OSError(f"nvmlDeviceGetComputeRunningProcesses_v3 answered {code}")
        found = listed[: room.value]
        return {one.pid: None if one.used in (0, _UNAVAILABLE) else int(one.used) for one in found}

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} answered {code}")


def steady(read: Callable[[], int], *, pause: float = _PAUSE, readings: int = _READINGS) -> int:
    """Return what `read` says, if it says the same several times in a row; else raise :class:`Unsteady`."""
    first = read()
    for _ in range(readings - 1):
        time.sleep(pause)
        again = read()
        if again != first:
            raise Unsteady(f"device memory changed by {again - first} bytes while nothing ran: another process uses it")
    return first


@dataclass
class Meter:
    """Device memory of this process on the current device.

    ``source`` says where the figure comes from: ``process`` (NVML lists this process: what nvidia-smi shows), ``device``
    (growth of the whole device by NVML since :meth:`begin`) or ``cuda`` (the same by ``cudaMemGetInfo``, which makes the
    context itself, so that the context is not in it).
    """

    nvml: Nvml | None
    cuda: Any = torch.cuda
    pause: float = _PAUSE
    source: str = ""
    start: int = 0
    others: set[int] = field(default_factory=set)

    @classmethod
    def here(cls, cuda: Any = torch.cuda) -> Meter:
        """Make one for the current device, without a context where NVML can be read."""
        try:
            # what CUDA_VISIBLE_DEVICES makes of device 0, or of the local rank under torchrun
            nvml = Nvml(cuda._get_nvml_device_index(int(os.environ.get("LOCAL_RANK", "0"))))  # noqa: SLF001
        except (OSError, RuntimeError, AttributeError):
            nvml = None
        return cls(nvml, cuda)

    @property
    def sees_context(self) -> bool:
        """Whether :meth:`held` counts the context."""
        return self.nvml is not None

    def begin(self) -> None:
        """Note what the device holds and which processes use it; this one must not have a context yet."""
        self.others = set(self._processes())
        self.start = steady(self._device, pause=self.pause)

    def held(self) -> int:
        """Return the bytes that this process has on the device, all kernels done."""
        self.cuda.synchronize()
        if self._own() is not None:
            self.source = "process"
            return steady(lambda: self._own() or 0, pause=self.pause)
        self.source = "device" if self.nvml else "cuda"
        return steady(self._device, pause=self.pause) - self.start

    def _own(self) -> int | None:
        """Return what NVML says of this process: in a container it may be listed under a number from outside."""
        listed = self._processes()
        new = [pid for pid in listed if pid not in self.others]
        own = os.getpid()
        return listed[own] if own in listed else listed[new[0]] if len(new) == 1 else None

    def _processes(self) -> dict[int, int | None]:
        try:
            return self.nvml.processes() if self.nvml else {}
        except (OSError, AttributeError):  # a driver older than the call, or one that does not tell
            return {}

    def _device(self) -> int:
        if self.nvml:
            return self.nvml.used()
        free, total = self.cuda.mem_get_info()
        return int(total - free)
