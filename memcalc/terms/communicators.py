"""NCCL's communicators of one process: which groups of a layout have one, and to whom it sends inside a node.

Each process group has a communicator, even where another has the same ranks; it is made at the first collective.

Sources: Megatron-LM d98e8a64 ``core/parallel_state.py``, and what uses its groups: ``training/training.py``
(``train_step``: mp, dp_cp), ``core/optimizer/__init__.py`` (intra_dist_opt_group), ``core/distributed``,
``core/transformer/moe/token_dispatcher.py`` (ep, tp_ep, expt_tp) and ``router.py`` (tp_cp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from memcalc.formulas.communication import peer_buffer_bytes

if TYPE_CHECKING:
    from memcalc.grid import Grid, Layout
    from memcalc.specs.hardware import GPU


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


@dataclass(frozen=True)
class Groups:
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
