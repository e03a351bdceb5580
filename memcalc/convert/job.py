"""A job as the writers take it: one resolved strategy, what it is fed, and where it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError
from memcalc.specs.strategy import Strategy

if TYPE_CHECKING:
    from memcalc.results.estimates import Estimate
    from memcalc.specs.model import Model


@dataclass(frozen=True)
class ConfigJob:
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
    """The model itself; a writer of its sizes needs it."""
    predicted: Mapping[str, int] = field(default_factory=dict)
    """What memcalc predicts [bytes]: allocated and reserved."""

    blas_workspace: int | None = None
    """Of one cuBLAS handle [bytes]; PyTorch's own where None."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Names of the files that are written for one job, by format: what another of them says need not stand twice."""
    editing: bool = False
    """What is written is only compared, to edit a file: what that file cannot say stands elsewhere and stays."""

    @classmethod
    def of(cls, estimate: Estimate, spec: Model | None = None) -> ConfigJob:
        """The job that an estimate is of; `spec` is its model."""
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
            spec=spec,
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

    def sized(self) -> Model:
        """The model, or a refusal where only its name was handed over."""
        if self.spec is None:
            raise CombinationError("model", self.model, "its sizes are not known here: give a preset or a config.json")
        return self.spec

    def require(self, fine: bool, word: str, allowed: str, value: Any = None) -> None:
        """Refuse what a format cannot say: the value of a word, which is the job's own where none is given."""
        if not fine and not self.editing:
            raise CombinationError(word, self.value(word) if value is None else value, allowed)

    def require_one_of(self, word: str, names: Iterable[str], lead: str) -> None:
        """Refuse a value that is not among those that a format can say; ``lead`` begins what is allowed."""
        names = tuple(names)
        self.require(self.value(word) in names, word, f"{lead} {', '.join(names)}")

    def value(self, word: str) -> Any:
        """The value of a word; a list as it is typed."""
        name = word.removeprefix("strategy.").replace("-", "_")
        value = getattr(self if name in ("framework", "model") else self.strategy, name)
        return ",".join(value) if isinstance(value, tuple) else value
