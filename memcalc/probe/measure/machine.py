"""The jobs of a probe that are no training steps on one GPU: the machine itself, and what several ranks do together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memcalc.probe.measure.process import START_S, ProbeJob
from memcalc.probe.measure.suite import SHARDED, config_of
from memcalc.units import GIB

RATES_S = 45.0
"""Time in which rates are measured [s]."""


@dataclass(frozen=True)
class ShardedRow:
    """One training step on several ranks."""

    model: str
    """A name of :data:`memcalc.probe.measure.suite.SHAPES`."""
    framework: str
    zero: int
    precision: str
    recompute: str
    optimizer_impl: str
    micro_batch: int
    seq_len: int

    def job(self, device: str, ranks: int) -> ProbeJob:
        """Return the job of the row; `ranks` is the number of GPUs."""
        from memcalc.convert.huggingface import flat_table

        config = config_of(self.model)
        run = {
            "model": flat_table(config),
            "gpus": ranks,
            "workload": {
                "seq_len": self.seq_len,
                "micro_batch": self.micro_batch,
                "global_batch": self.micro_batch * ranks,
            },
            "strategy": self.strategy(device),
            "group": f"probe {self.framework}" if device == "cuda" else "cpu steps",
        }
        return ProbeJob("sharded", self.id(ranks), {"config": config, "run": run}, ranks)

    def id(self, ranks: int) -> str:
        """The row in words.

        >>> CPU[0].id(2)
        'tiny-llama/fsdp2-3/bf16-mixed/full/foreach/2x128/2-ranks'
        """
        parts = (self.model, f"{self.framework}-{self.zero}", self.precision, self.recompute, self.optimizer_impl)
        return "/".join((*parts, f"{self.micro_batch}x{self.seq_len}", f"{ranks}-ranks"))

    def strategy(self, device: str) -> dict[str, Any]:
        """Return the strategy of a run; checkpoints are those that are not reentrant."""
        fields: dict[str, Any] = {
            "framework": self.framework,
            "zero": self.zero,
            "precision": self.precision,
            "recompute": self.recompute,
            "attention": "flash" if device == "cuda" else "eager",
            "optimizer": "adamw",
            "optimizer_impl": self.optimizer_impl,
            "kernels": "model",
        }
        fields |= {"checkpoint": "non-reentrant"} if self.recompute != "none" else {}
        fields |= {"reduce_dtype": "fp32"} if self.framework == "fsdp2" else {}
        return fields | ({"blas_workspace": 0} if device == "cpu" else {})


CUDA, CPU = (tuple(ShardedRow(*values) for values in SHARDED[device]) for device in ("cuda", "cpu"))


def machine_jobs(device: str, gpus: int) -> list[ProbeJob]:
    """Return them in their order; those of several ranks only where there are several GPUs.

    >>> [job.kind for job in machine_jobs("cuda", 1)]
    ['machine', 'rates']
    """
    return [*_single_process_jobs(device), *(_collective_jobs(device, gpus) if gpus > 1 else ())]


def _single_process_jobs(device: str) -> Iterator[ProbeJob]:
    """Yield what one process measures; the needs of memory are those of the largest operands."""
    on_gpu = device == "cuda"
    yield ProbeJob("machine", "machine", {}, seconds=START_S + 10, memory=2 * GIB if on_gpu else 0)
    yield ProbeJob("rates", "rates", {"seconds": RATES_S}, seconds=START_S + RATES_S, memory=6 * GIB if on_gpu else 0)


def _collective_jobs(device: str, ranks: int) -> Iterator[ProbeJob]:
    memory = 4 * GIB if device == "cuda" else 0
    yield ProbeJob("collectives", f"collectives/{ranks}-ranks", {}, ranks, seconds=START_S + 30, memory=memory)
    for row in CUDA if device == "cuda" else CPU:
        yield row.job(device, ranks)
