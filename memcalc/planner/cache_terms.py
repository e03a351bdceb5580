"""What is reserved beside the tensors and held outside of the allocator, as explained terms like all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.ledger import ALWAYS
from memcalc.results.estimates import TermFacts

if TYPE_CHECKING:
    from memcalc.planner.stage_peaks import Peaks
    from memcalc.terms.overhead import Overhead

REPLAYED = "PyTorch c10/cuda/CUDACachingAllocator.cpp, two steps replayed"
SUMMED = "the largest sum of each stream's pool, since pools give each other nothing"
GROUPS = {
    "world": "all ranks", "tp": "tensor parallelism", "pp": "pipeline stages", "cp": "context parallelism",
    "ep": "expert parallelism", "dp_replicate": "replicas", "dp": "data parallelism", "mp": "tensor and pipeline ranks",
    "dist_opt": "distributed optimizer", "tp_ep": "tensor and expert ranks", "etp": "tensor ranks of experts",
    "edp": "data-parallel ranks of experts", "tp_cp": "tensor and context ranks",
}  # fmt: skip
"""What a communicator joins."""


def reserve_terms(peaks: Peaks) -> Iterator[TermFacts]:
    """What makes up the reserve of the stage where the peak stands."""
    top = peaks.top
    predicted = min(peaks.predicted, top.reserved) if peaks.is_flushed else peaks.predicted
    played = peaks.replayed is not None and peaks.replayed.runs
    yield TermFacts(
        component="reserve",
        name="cached and unused",
        bytes=predicted - top.allocated,
        phases=(top.phase,),
        formula="R - A: reserved less allocated",
        inputs={"R": predicted, "A": top.allocated},
        source=REPLAYED if played else SUMMED,
    )
    known = peaks.overhead.unexplained
    yield TermFacts(
        component="reserve",
        name="reserved beyond what is predicted",
        bytes=top.reserved - predicted,
        phases=(top.phase,),
        formula="m · R",
        inputs={"m": known.middle, "R": predicted},
        source=known.source,
    )


def outside_terms(overhead: Overhead) -> Iterator[TermFacts]:
    """The context and each communicator of one process."""
    yield TermFacts(
        component="context",
        name="context",
        bytes=overhead.context,
        phases=ALWAYS,
        formula="context of one process",
        inputs={},
        source=overhead.context_source,
    )
    for each in overhead.communicators:
        inputs: dict[str, int | str] = {"group": each.name, "ranks": each.ranks}
        if each.peers:
            inputs = {"between": each.name, "peers": each.peers}
        what = "buffers to other ranks of" if each.peers else "communicator of"
        yield TermFacts(
            component="context",
            name=f"{what} {GROUPS[each.name]}",
            bytes=each.bytes,
            phases=ALWAYS,
            formula="12 MiB · c · p" if each.peers else "one communicator's buffers",
            inputs=inputs,
            source=each.source,
        )
