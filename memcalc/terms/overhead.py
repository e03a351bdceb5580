"""What stands beside the tensors on a device: context, libraries, and the allocator's slack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.units import MIB

if TYPE_CHECKING:
    from memcalc.specs.hardware import GPU

DEFAULT_CONTEXT = 512 * MIB
"""Context with lazy module loading where a preset has no measured figure: published ones span 0.13 to 0.70 GiB."""
NCCL = 819 * MIB
"""One world communicator: 0.8 GiB, as fitted on 34 FSDP1 runs; published figures span 0.5 to 2 GiB."""
RESERVE = (1, 20)
"""Reserved but unallocated share: 5%, the upper end of fixed-shape runs in out-of-memory messages (0.3 to 5%)."""
RESERVE_HIGH = (9, 100)
"""The upper end of published single-GPU fine-tuning runs on V100, 3090 and T4 (5 to 9%)."""
NCCL_HIGH = 2048 * MIB


@dataclass(frozen=True)
class Overhead:
    """Bytes of one process beside its tensors."""

    capacity: int
    context: int
    libraries: int
    libraries_high: int
    workspace: int
    """One BLAS handle's workspace; it lives in the caching allocator."""
    context_assumed: bool

    def reserve(self, allocated: int) -> int:
        """Reserved but unallocated bytes for a peak."""
        return allocated * RESERVE[0] // RESERVE[1]

    @property
    def room(self) -> int:
        """Bytes that the allocator can reserve."""
        return max(self.capacity - self.context - self.libraries, 0)

    @property
    def usable(self) -> int:
        """The largest allocated peak that fits, with its reserve."""
        allocated = self.room * RESERVE[1] // (RESERVE[0] + RESERVE[1])
        return allocated + (allocated + 1 + self.reserve(allocated + 1) <= self.room)

    @property
    def safe(self) -> int:
        """The largest allocated peak that fits at the upper end of its range."""
        room = max(self.capacity - self.context - self.libraries_high, 0)
        return room * RESERVE_HIGH[1] // (RESERVE_HIGH[0] + RESERVE_HIGH[1])

    def device(self, allocated: int) -> int:
        """What nvidia-smi shows for a peak."""
        return allocated + self.reserve(allocated) + self.context + self.libraries

    def range(self, allocated: int) -> tuple[int, int]:
        """The lowest and highest figure that published runs support for a peak."""
        high = allocated * RESERVE_HIGH[0] // RESERVE_HIGH[1]
        return allocated + self.context, allocated + high + self.context + self.libraries_high


def overhead_of(gpu: GPU, gpus: int) -> Overhead:
    """The overhead of one of ``gpus`` processes on a GPU."""
    hopper = gpu.compute_capability is not None and float(gpu.compute_capability) >= 9.0
    several = gpus > 1
    return Overhead(
        capacity=gpu.memory_bytes,
        context=gpu.context_bytes or DEFAULT_CONTEXT,
        libraries=NCCL * several,
        libraries_high=NCCL_HIGH * several,
        workspace=32 * MIB if hopper else 8320 * 1024,
        context_assumed=gpu.context_bytes is None,
    )
