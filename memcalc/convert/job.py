"""A job as the writers take it: one resolved strategy, what it is fed, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError
from memcalc.specs.strategy import Strategy

if TYPE_CHECKING:
    from memcalc.results import Estimate
    from memcalc.specs.model import Model

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """One strategy of one model on one kind of hardware, every field resolved."""

    model: str
    """As the user named it: a preset's name or a path."""
    gpu: str
    gpus: int
    nodes: int
    seq_len: int
    global_batch: int
    """Sequences an optimizer step."""
    accumulation: int
    strategy: Strategy
    check: str = ""
    """The command that checks what is written, for a comment at its head."""
    spec: Model | None = None
    """The model itself, where it is at hand."""
    predicted: Mapping[str, int] = field(default_factory=dict)
    """What memcalc predicts [bytes]: allocated and reserved."""

    editing: bool = False
    """What is written is only compared, to edit a file: what that file cannot say stands elsewhere and stays."""

    @classmethod
    def of(cls, estimate: Estimate, check: str = "") -> Job:
        """The job that an estimate is of."""
        hardware, workload = estimate.hardware, estimate.workload
        return cls(
            model=estimate.model.name,
            gpu=hardware.gpu,
            gpus=hardware.gpus,
            nodes=hardware.nodes,
            seq_len=workload.seq_len,
            global_batch=workload.global_batch,
            accumulation=workload.accumulation_steps,
            strategy=estimate.strategy,
            check=check,
            predicted={"allocated": estimate.peak.allocated, "reserved": estimate.peak.reserved},
        )

    @property
    def framework(self) -> str:
        """The framework's name, without its era."""
        return self.strategy.framework.partition("@")[0]

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each host [-]."""
        return -(-self.gpus // self.nodes)

    def must(self, fine: bool, word: str, value: Any, allowed: str) -> None:
        """Refuse what a format cannot say."""
        if not fine and not self.editing:
            raise CombinationError(word, value, allowed)
