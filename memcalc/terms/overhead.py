"""What stands beside the tensors on a device: context, libraries, and what the allocator reserves unexplained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from memcalc import catalog
from memcalc.grid import column
from memcalc.units import MIB

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid, Layout
    from memcalc.specs.hardware import GPU
    from memcalc.specs.reserve import Reserve

DEFAULT_CONTEXT = 512 * MIB
"""Context with lazy module loading where a preset has no measured figure: published ones span 0.13 to 0.70 GiB."""
NCCL = 819 * MIB
"""The world's communicator: 0.8 GiB, as fitted on 34 FSDP1 runs; published figures span 0.5 to 2 GiB."""
NCCL_GROUP = 512 * MIB
"""Each further communicator (TP, PP, CP, EP): 0.3 to 0.7 GiB on A100, up to 1 GiB with NVLS on H100 (NVIDIA/nccl#964,
#864; src/transport/nvls.cc at 5067397)."""
NCCL_HIGH = 2048 * MIB
NCCL_GROUP_HIGH = 1024 * MIB


class Workspaces(NamedTuple):
    """Bytes that a library keeps for its matrix products, inside the caching allocator."""

    handle: int
    """Of one of PyTorch's cuBLAS handles."""
    engine: int
    """Of TransformerEngine."""


class Libraries(NamedTuple):
    """Bytes of one process for its communicators, and the most that was seen."""

    world: int
    group: int
    world_high: int
    group_high: int

    def of(self, layout: Layout) -> tuple[int, int]:
        """Bytes that the communicators of a layout take, and the most that was seen."""
        several, groups = int(layout.gpus > 1), groups_of(layout)
        return several * self.world + groups * self.group, several * self.world_high + groups * self.group_high


@dataclass(frozen=True)
class Overhead:
    """Bytes of one process beside its tensors."""

    capacity: int
    context: int
    libraries: int
    libraries_high: int
    workspaces: Workspaces
    context_assumed: bool
    unexplained: Reserve

    @property
    def room(self) -> int:
        """Bytes that the allocator can reserve."""
        return max(self.capacity - self.context - self.libraries, 0)

    @property
    def usable(self) -> int:
        """The largest reserved prediction that fits."""
        return int(self.room / (1 + self.unexplained.middle))

    @property
    def safe(self) -> int:
        """The largest reserved prediction that stays below the capacity at its upper limit."""
        beside, limit = self.context + self.libraries, 1 + self.unexplained.limit
        by_share = self.capacity / limit - beside
        by_libraries = self.capacity - self.context - self.libraries_high
        return max(int(min(by_share, by_libraries) / (1 + self.unexplained.middle)), 0)

    def reserved(self, predicted: int) -> int:
        """Reserved bytes with what no mechanism predicts."""
        return predicted + int(predicted * self.unexplained.middle)

    def device(self, predicted: int) -> int:
        """What nvidia-smi shows for a reserved prediction."""
        return self.reserved(predicted) + self.context + self.libraries

    def limit(self, predicted: int) -> int:
        """The device figure that one measured run of twenty exceeds, for a reserved prediction."""
        by_libraries = self.reserved(predicted) + self.context + self.libraries_high
        return int(max(self.device(predicted) * (1 + self.unexplained.limit), by_libraries))

    def range(self, predicted: int) -> tuple[int, int]:
        """The lowest and highest device figure that measured runs support for a reserved prediction."""
        device = self.device(predicted)
        high = max(device * (1 + self.unexplained.high), self.reserved(predicted) + self.context + self.libraries_high)
        return int(device * (1 + self.unexplained.low)), int(high)


def workspaces_of(gpu: GPU) -> Workspaces:
    """By compute capability: PyTorch knows Hopper by its exact number, TransformerEngine all that came after it."""
    capability = float(gpu.compute_capability) if gpu.compute_capability is not None else 0.0
    handle, engine = 32 * MIB if capability == 9.0 else 8320 * 1024, 32 * MIB if capability >= 9.0 else 4 * MIB
    known = gpu.calibration and gpu.calibration.workspace
    return Workspaces(known.bytes if known else handle, engine)


def libraries_of(gpu: GPU) -> Libraries:
    """As measured on the GPU, or as published."""
    world = gpu.calibration and gpu.calibration.world
    group = gpu.calibration and gpu.calibration.group
    return Libraries(
        world.bytes if world else NCCL,
        group.bytes if group else NCCL_GROUP,
        world.high if world else NCCL_HIGH,
        group.high if group else NCCL_GROUP_HIGH,
    )


def reserve_of(gpu: GPU, grid: Grid) -> Reserve:
    """What no mechanism predicts under a grid's allocator: as measured on the GPU, or as shipped."""
    name = grid.habits.allocator
    return (gpu.calibration and gpu.calibration.reserve_of(name)) or catalog.reserve(name)


def groups_of(layout: Layout) -> int:
    """Communicators of a layout beside the world's."""
    return sum(1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep) if 1 < degree < layout.gpus)


def group_bytes(gpu: GPU, grid: Grid) -> Array:
    """Bytes of the communicators, over the layouts, as a part of what an overhead without a layout compares."""
    middle, libraries = reserve_of(gpu, grid).middle, libraries_of(gpu)
    return column([int(libraries.of(layout)[0] / (1 + middle)) for layout in grid.layouts], "layout")


def overhead_of(gpu: GPU, grid: Grid, layout: Layout | None = None) -> Overhead:
    """The overhead of one process of a layout; without one, that of a search, which adds :func:`group_bytes`.

    The layouts of a search may have several numbers of GPUs; what is known of all of them stays with the overhead.
    """
    everywhere = all(layout.gpus > 1 for layout in grid.layouts)
    libraries = libraries_of(gpu)
    usual, high = libraries.of(layout) if layout else (0, everywhere * (libraries.world_high - libraries.world))
    context = gpu.context_bytes
    if grid.habits.allocator == "2021":
        context = gpu.eager_context_bytes or context
    return Overhead(
        capacity=gpu.memory_bytes,
        context=context or DEFAULT_CONTEXT,
        libraries=usual,
        libraries_high=high,
        workspaces=workspaces_of(gpu),
        context_assumed=context is None,
        unexplained=reserve_of(gpu, grid),
    )
