"""What stands beside the tensors on a device: context, libraries, and what the allocator reserves unexplained.

Each process group has a communicator of NCCL, even where another has the same ranks, from its first collective on.
Sources: Megatron-LM d98e8a64 ``core/parallel_state.py``, and what uses its groups: ``training/training.py``
(``train_step``: mp, dp_cp), ``core/optimizer/__init__.py`` (intra_dist_opt_group), ``core/distributed``,
``core/transformer/moe/token_dispatcher.py`` (ep, tp_ep, expt_tp) and ``router.py`` (tp_cp).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc import catalog
from memcalc.formulas.communication import peer_buffer_bytes
from memcalc.grid import column
from memcalc.specs.hardware import VendorFigure

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.frameworks import Habits
    from memcalc.grid import Grid, Layout
    from memcalc.specs.calibration import Measure
    from memcalc.specs.hardware import GPU, Part
    from memcalc.specs.step_time import Reserve


class Communicator(NamedTuple):
    """A communicator of a process, or what it keeps to send to other ranks and to receive from them."""

    name: str
    """``world``, or the parallelism whose ranks it joins."""
    ranks: int
    bytes: int
    source: str
    """Who says how large it is."""
    peers: int = 0
    """Ranks that are sent to directly, where these buffers are meant and not the communicator itself."""


SENDING = "NVIDIA/nccl 5067397 src/transport/p2p.cc, src/graph/paths.cc; 12 MiB a channel and peer: NVIDIA/nccl#1685"
MESH = 8
"""GPUs a node from which all of them reach each other over NVLink."""
AMPERE, BLACKWELL = 8.0, 10.0
LINK, BLACKWELL_LINK = 25_000_000_000, 50_000_000_000
"""One direction of one NVLink [bytes/s]."""


class Groups(NamedTuple):
    """The groups of ranks that a framework communicates in, for the layouts of one grid."""

    names: tuple[str, ...]
    """Those that have a communicator (:attr:`memcalc.frameworks.habits.Habits.communicators`)."""
    etp: int = 0
    """Tensor-parallel ranks of an expert; as many as of the rest where 0."""
    dispatcher: str = "alltoall"
    cp_kind: str = "ring"
    sharded: bool = False
    """Whether every strategy has a distributed optimizer."""

    def ranks(self, layout: Layout) -> dict[str, int]:
        """Ranks of each communicator of a layout beside the world's."""
        if "dp" not in self.names:
            degrees = {name: getattr(layout, name) for name in self.names}
            return {name: degree for name, degree in degrees.items() if 1 < degree < layout.gpus}
        degrees = self._of_megatron(layout)
        return {name: degrees[name] for name in self.names if degrees.get(name, 1) > 1}

    def _of_megatron(self, layout: Layout) -> dict[str, int]:
        tp, data = layout.tp, layout.dp * layout.cp
        degrees = {"tp": tp, "pp": layout.pp, "cp": layout.cp, "dp": data, "mp": tp * layout.pp}
        if self.sharded:
            degrees["dist_opt"] = layout.gpus // layout.dp_replicate
        if layout.ep == 1:
            return degrees
        etp = self.etp or tp
        experts = {"ep": layout.ep, "tp_ep": etp * layout.ep, "etp": etp, "tp_cp": tp * layout.cp}
        return degrees | experts | {"edp": data * tp // (etp * layout.ep)}

    def peers(self, layout: Layout, node: int) -> dict[str, int]:
        """Ranks of a group inside a node that each rank sends to directly, and receives from."""
        neighbours = {"pp": min(layout.pp - 1, 2), "cp": self._peers_of_context(layout.cp)}
        neighbours["ep"] = (layout.ep - 1) * (self.dispatcher == "alltoall")
        reach = {"pp": layout.gpus, "cp": layout.tp * layout.cp, "ep": layout.ep * (self.etp or layout.tp)}
        return {name: many for name, many in neighbours.items() if many and reach[name] <= node}

    def _peers_of_context(self, ranks: int) -> int:
        return {"ring": min(ranks - 1, 2), "a2a": ranks - 1}.get(self.cp_kind, 0)


def groups_of(grid: Grid) -> Groups:
    """The groups of a grid's framework."""
    fixed = grid.fixed
    return Groups(
        grid.habits.communicators, fixed.etp, fixed.moe_dispatcher, fixed.cp_kind, sharded=0 not in grid.zeros
    )


def buffers_to(gpu: GPU, peers: int) -> int:
    """Bytes that a process keeps to exchange tensors with so many GPUs of its node; 0 where they have no NVSwitch."""
    capability = float(gpu.compute_capability or 0)
    if capability < AMPERE or not gpu.nvlink_bytes_per_s or gpu.gpus_per_node < MESH:
        return 0
    link = BLACKWELL_LINK if capability >= BLACKWELL else LINK
    return int(peer_buffer_bytes(peers, gpu.nvlink_bytes_per_s // link))


# The kinds of jobs whose predictions are known unequally well, and which of them a strategy is.


ONE_GPU = "one GPU"
FSDP1 = "FSDP 1"
FSDP2 = "FSDP 2"
GROWING = "FSDP 2, expandable segments"
ENGINE = "TransformerEngine"
EARLY = "PyTorch before 1.13"
BLOCKS = "compiled blocks"
GRAPH = "compiled graph"
OFFLOADED = "offloaded"
WEIGHTS_AWAY = "ZeRO-3, weights offloaded"
UNITS_AWAY = "FSDP 1, weights offloaded"
OTHERS = "others"
REPORTED = (WEIGHTS_AWAY, UNITS_AWAY)
"""Kinds that have reports in place of measured runs."""
KINDS = (ONE_GPU, FSDP1, FSDP2, GROWING, ENGINE, EARLY, BLOCKS, GRAPH, OFFLOADED, *REPORTED, OTHERS)
"""Kinds of jobs whose allocator is replayed; those of 2021 whose is not are one by themselves, without a name here."""
SHARDED = 2
"""The stage of ZeRO from which FSDP shards."""


class Choice(NamedTuple):
    """What of a strategy decides its kind."""

    gpus: int
    zero: int
    offload: tuple[str, ...]
    compile: str
    expandable_segments: bool


def kind_of(habits: Habits, choice: Choice) -> str:
    """The kind of a strategy: what its mechanisms are least known for comes first; empty where nothing is replayed.

    >>> from memcalc.frameworks import habits_of
    >>> [kind_of(habits_of("hf"), Choice(2, zero, (), "none", False)) for zero in (3, 0)]
    ['FSDP 1', 'others']
    """
    if habits.allocator != "caching":
        return ""
    if not habits.lazy_kernels:
        return EARLY
    if choice.offload:
        flat = habits.flat_units and habits.full_shard and choice.zero >= SHARDED
        reported = WEIGHTS_AWAY if habits.zero_optimizer is not None else UNITS_AWAY if flat else OFFLOADED
        return reported if "params" in choice.offload else OFFLOADED
    if choice.compile != "none":
        return GRAPH if choice.compile == "model" else BLOCKS
    if choice.gpus == 1:
        return ONE_GPU
    if habits.engine:
        return ENGINE
    if not habits.full_shard or choice.zero < SHARDED:
        return OTHERS
    if habits.flat_units:
        return FSDP1
    return GROWING if choice.expandable_segments else FSDP2


def kinds_of(grid: Grid) -> dict[tuple[bool, int, tuple[str, ...]], str]:
    """The kinds of a grid's strategies: by whether they have one GPU, by sharding stage and by what is offloaded."""
    fixed = grid.fixed
    return {
        (alone, zero, offload): kind_of(
            grid.habits, Choice(2 - alone, zero, offload, fixed.compile, fixed.expandable_segments)
        )
        for alone in sorted(set((grid.degree("gpus") == 1).ravel().tolist()))
        for zero in grid.zeros
        for offload in grid.offloads
    }


STAND_IN = "nvidia"
"""Whose figures stand for those that another vendor lacks."""
CALIBRATED = "measured on this GPU (memcalc calibrate)"
NAMES = {
    "context": "the context",
    "world": "communicators",
    "group": "communicators",
    "handle": "BLAS workspaces",
    "engine": "TransformerEngine's workspace",
}


class Workspaces(NamedTuple):
    """Bytes that a library keeps for its matrix products, inside the caching allocator."""

    handle: int
    """Of one of PyTorch's cuBLAS handles."""
    engine: int
    """Of TransformerEngine."""


class Sizes(NamedTuple):
    """Bytes of one process for a communicator, and the most that was seen."""

    world: int
    group: int
    world_high: int
    group_high: int
    world_source: str
    group_source: str


class Libraries(NamedTuple):
    """The communicators of one process, for the layouts of a grid."""

    gpu: GPU
    sizes: Sizes
    groups: Groups

    def of(self, layout: Layout) -> tuple[int, int]:
        """Bytes that the communicators of a layout take, and the most that was seen."""
        each, sizes = self.each(layout), self.sizes
        more, less = sizes.world_high - sizes.world, sizes.group_high - sizes.group
        usual = sum(c.bytes for c in each)
        return usual, usual + sum(more if c.ranks == layout.gpus else less for c in each if not c.peers)

    def each(self, layout: Layout) -> tuple[Communicator, ...]:
        """The communicators of a layout one by one, the world's first, then what is kept to send to single ranks.

        One that joins all ranks, as the world's does, is as large.
        """
        if layout.gpus == 1:
            return ()
        sizes, peers = self.sizes, self.groups.peers(layout, self.gpu.gpus_per_node)
        all_ranks, some = (sizes.world, sizes.world_source), (sizes.group, sizes.group_source)
        ranks = {"world": layout.gpus} | self.groups.ranks(layout)
        groups = (Communicator(name, n, *(all_ranks if n == layout.gpus else some)) for name, n in ranks.items())
        sending = (
            Communicator(name, getattr(layout, name), buffers_to(self.gpu, many), SENDING, many)
            for name, many in peers.items()
        )
        return (*groups, *(each for each in sending if each.bytes))


class Overhead(NamedTuple):
    """Bytes of one process beside its tensors."""

    capacity: int
    context: int
    libraries: int
    libraries_high: int
    workspaces: Workspaces
    context_assumed: bool
    unexplained: Reserve
    borrowed: tuple[str, ...] = ()
    """Parts whose figures are another vendor's."""
    communicators: tuple[Communicator, ...] = ()
    """What ``libraries`` is made of."""
    context_source: str = ""
    """Who says how large the context is."""

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

    def of_kind(self, gpu: GPU, kind: str) -> Overhead:
        """The same with the range of one kind of job on its allocator."""
        return self._replace(unexplained=reserve_of(gpu, self.unexplained.name, kind))

    def reserved(self, predicted: int) -> int:
        """Reserved bytes with what no mechanism predicts."""
        return predicted + int(predicted * self.unexplained.middle)

    def beside(self, allocated: int) -> int:
        """What nvidia-smi shows where nothing is reserved beyond so many bytes."""
        return allocated + self.context + self.libraries

    def device(self, predicted: int) -> int:
        """What nvidia-smi shows for a reserved prediction."""
        return self.reserved(predicted) + self.context + self.libraries

    def limit(self, predicted: int) -> int:
        """The device figure that one measured run of twenty exceeds, for a reserved prediction."""
        by_libraries = self.reserved(predicted) + self.context + self.libraries_high
        return int(max(self.device(predicted) * (1 + self.unexplained.limit), by_libraries))

    @property
    def most_safe(self) -> int:
        """The largest reserved prediction whose limit is not above the capacity; -1 where none is [bytes]."""
        return bisect_right(range(self.capacity + 1), self.capacity, key=self.limit) - 1

    def range(self, predicted: int) -> tuple[int, int]:
        """The lowest and highest device figure that measured runs support for a reserved prediction."""
        device = self.device(predicted)
        high = max(device * (1 + self.unexplained.high), self.reserved(predicted) + self.context + self.libraries_high)
        return int(device * (1 + self.unexplained.low)), int(high)


def figure_of(gpu: GPU, part: Part) -> VendorFigure:
    """The size of a part on a GPU: its vendor's, or that of :data:`STAND_IN` where none is known."""
    figure = catalog.vendor(gpu.vendor).figure(part, gpu) or catalog.vendor(STAND_IN).figure(part, gpu)
    if figure is None:
        raise KeyError(part)
    return figure


def workspaces_of(gpu: GPU) -> Workspaces:
    """As measured on the GPU, or as the libraries' sources have them."""
    known = gpu.calibration and gpu.calibration.workspace
    return Workspaces(known.bytes if known else figure_of(gpu, "handle").bytes, figure_of(gpu, "engine").bytes)


def sizes_of(gpu: GPU) -> Sizes:
    """As measured on the GPU, or as published."""
    known = gpu.calibration
    world = (known and known.world) or figure_of(gpu, "world")
    group = (known and known.group) or figure_of(gpu, "group")
    high = world.high or world.bytes, group.high or group.bytes
    return Sizes(world.bytes, group.bytes, *high, _source_of(world), _source_of(group))


def libraries_of(gpu: GPU, grid: Grid) -> Libraries:
    """The communicators of a process on a GPU, for the layouts of a grid."""
    return Libraries(gpu, sizes_of(gpu), groups_of(grid))


def _source_of(figure: VendorFigure | Measure) -> str:
    return figure.source if isinstance(figure, VendorFigure) else CALIBRATED


def borrowed_of(gpu: GPU, habits: Habits, layout: Layout, *, handle: bool = True) -> tuple[str, ...]:
    """What counts in a layout's overhead and is another vendor's figure; ``handle`` where PyTorch sizes workspaces."""
    sizes = gpu.calibration
    counted: dict[Part, bool] = {
        "context": gpu.context_bytes is None,
        "world": layout.gpus > 1 and not (sizes and sizes.world),
        "group": bool(Groups(habits.communicators).ranks(layout)) and not (sizes and sizes.group),
        "handle": handle and habits.handle_workspaces and not (sizes and sizes.workspace),
        "engine": habits.engine,
    }
    vendor = catalog.vendor(gpu.vendor)
    borrowed = (NAMES[part] for part, counts in counted.items() if counts and vendor.figure(part, gpu) is None)
    return tuple(dict.fromkeys(borrowed))


def reserve_of(gpu: GPU, allocator: str, kind: str = "") -> Reserve:
    """What no mechanism predicts under an allocator: as measured on the GPU, or as shipped for a kind of job."""
    return (gpu.calibration and gpu.calibration.reserve_of(allocator)) or catalog.reserve(allocator, kind)


def group_bytes(gpu: GPU, grid: Grid) -> Array:
    """Bytes of the communicators, over the layouts, as a part of what an overhead without a layout compares."""
    middle, libraries = reserve_of(gpu, grid.habits.allocator).middle, libraries_of(gpu, grid)
    return column([int(libraries.of(layout)[0] / (1 + middle)) for layout in grid.layouts], "layout")


def overhead_of(gpu: GPU, grid: Grid, layout: Layout | None = None) -> Overhead:
    """The overhead of one process of a layout; without one, that of a search, which adds :func:`group_bytes`.

    The layouts of a search may have several numbers of GPUs; what is known of all of them stays with the overhead. Its
    range is that of its kind of job, where all its strategies are of one kind.
    """
    kinds, everywhere = set(kinds_of(grid).values()), bool(np.all(grid.degree("gpus") > 1))
    libraries = libraries_of(gpu, grid)
    sizes = libraries.sizes
    usual, high = libraries.of(layout) if layout else (0, everywhere * (sizes.world_high - sizes.world))
    context, standing = gpu.context_bytes, figure_of(gpu, "context")
    measured = gpu.calibration and gpu.calibration.context
    source = CALIBRATED if measured else gpu.source.get("context", f"GPU preset {gpu.name}")
    if not grid.habits.lazy_kernels:
        context = gpu.eager_context_bytes or context
    return Overhead(
        capacity=gpu.memory_bytes,
        context=context or standing.bytes,
        libraries=usual,
        libraries_high=high,
        workspaces=workspaces_of(gpu),
        context_assumed=context is None,
        unexplained=reserve_of(gpu, grid.habits.allocator, kinds.pop() if len(kinds) == 1 else ""),
        borrowed=borrowed_of(gpu, grid.habits, layout or grid.layouts[0], handle=grid.fixed.blas_workspace is None),
        communicators=libraries.each(layout) if layout else (),
        context_source=source if context else standing.source,
    )
