"""The suite of training steps: rows as data, the most telling ones first, since a time budget cuts the tail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memcalc.errors import UnknownNameError

__all__ = ["CPU", "CUDA", "SMALL", "SUITES", "TELLING", "Row", "rows_of"]

SUITES = ("full", "small", "steps", "machine")
"""Everything; a quick look; training steps alone; the machine alone."""
SMALL = 6
"""Rows of the quick look."""


@dataclass(frozen=True)
class Row:
    """One training step to measure."""

    model: str
    """A name of :data:`memcalc.probe.measure.shapes.SHAPES`."""
    precision: str
    recompute: str
    attention: str
    optimizer_impl: str
    micro_batch: int
    seq_len: int
    accumulation: int = 1
    """Micro-batches of one optimizer step."""
    lora: str = ""
    lora_dropout: float = 0.0
    autocast: bool = False
    """Over 16-bit weights."""
    grows: Literal["", "layers", "micro_batch"] = ""
    """What is chosen so that the row fills the GPU."""
    fill: float = 0.0
    """To which share of its capacity; above 1 the row is meant to run out of memory."""

    @property
    def id(self) -> str:
        """The row in words.

        >>> Row("gpt2", "bf16", "none", "flash", "fused", 4, 1024, lora="16:q,v").id
        'gpt2/bf16/none/flash/fused/4x1024/lora-16-qv'
        """
        parts = [self.model, self.precision, self.recompute, self.attention, self.optimizer_impl]
        parts.append(f"{self.micro_batch}x{self.seq_len}" + f"x{self.accumulation}" * (self.accumulation > 1))
        if self.lora:
            rank, _, targets = self.lora.partition(":")
            parts.append(f"lora-{rank}-{targets.replace(',', '')}" + "-autocast" * self.autocast)
        if self.grows:
            parts.append(f"{self.grows.replace('_', '-')}-to-{self.fill:.0%}")
        return "/".join(parts)

    @property
    def group(self) -> str:
        """How a comparison groups it: by the kind of model."""
        return "probe LoRA" if self.lora else f"probe {self.model.partition('-')[0]}"

    @property
    def meant_to_fail(self) -> bool:
        """Whether it shall run out of memory."""
        return self.fill > 1

    def strategy(self, framework: str) -> dict[str, Any]:
        """Return the strategy of a run."""
        words = {
            "framework": framework,
            "precision": self.precision,
            "zero": 0,
            "recompute": self.recompute,
            "attention": self.attention,
            "optimizer": "adamw",
            "optimizer_impl": self.optimizer_impl,
        }
        adapters = {"lora": self.lora, "adapter_dtype": "fp32", "autocast": self.autocast} if self.lora else {}
        return words | adapters

    def workload(self) -> dict[str, Any]:
        """Return the workload of a run."""
        fed = {
            "seq_len": self.seq_len,
            "micro_batch": self.micro_batch,
            "global_batch": self.micro_batch * self.accumulation,
        }
        return fed | ({"lora_dropout": self.lora_dropout} if self.lora_dropout else {})


TELLING = (
    Row("llama-1b", "bf16", "none", "flash", "foreach", 1, 2048),
    Row("llama-130m", "bf16-autocast", "none", "flash", "fused", 8, 1024),
    Row("gpt2", "bf16-autocast", "none", "flash", "foreach", 8, 1024),
    Row("mixtral-blocks", "bf16", "none", "flash", "foreach", 4, 1024),
    Row("llama-8b-blocks", "bf16", "full", "flash", "fused", 4, 2048),
    Row("llama-130m", "bf16", "none", "eager", "foreach", 4, 1024),
    Row("llama-wide-vocab", "bf16", "full", "flash", "fused", 2, 2048),
    Row("llama-7b-blocks", "bf16", "none", "flash", "fused", 2, 2048, lora="16:q,k,v,o"),
    Row("qwen2-0.5b", "bf16", "every-2", "flash", "foreach", 2, 2048),
    Row("llama-8b-blocks", "bf16", "selective-ops", "flash", "fused", 2, 2048),
    Row("llama-130m", "fp32", "none", "efficient", "loop", 4, 1024),
    Row("llama-8b-blocks", "bf16", "full", "flash", "fused", 1, 4096, grows="layers", fill=0.8),
    Row("llama-1b", "bf16", "none", "flash", "fused", 1, 512, grows="micro_batch", fill=0.85),
    Row("llama-1b", "bf16", "none", "flash", "fused", 1, 512, grows="micro_batch", fill=1.2),
    Row("qwen3-0.6b", "bf16-autocast", "full", "flash", "foreach", 2, 2048),
    Row("olmoe-blocks", "bf16-autocast", "none", "flash", "fused", 2, 1024),
)
"""Each factor of the suite at least once; these come first."""

_LLAMA = tuple(
    Row("llama-130m", precision, recompute, attention, impl, micro_batch, 1024)
    for precision, recompute, attention, impl, micro_batch in (
        ("bf16", "none", "flash", "foreach", 8),
        ("bf16", "full", "flash", "foreach", 8),
        ("bf16", "every-2", "flash", "fused", 16),
        ("bf16", "selective-ops", "flash", "foreach", 8),
        ("bf16-autocast", "full", "flash", "loop", 16),
        ("bf16-autocast", "every-2", "flash", "foreach", 8),
        ("bf16-autocast", "none", "eager", "fused", 4),
        ("bf16-autocast", "full", "eager", "foreach", 4),
        ("bf16", "full", "eager", "loop", 8),
        ("fp32", "full", "efficient", "fused", 8),
        ("fp32", "every-2", "math", "foreach", 2),
        ("fp32", "none", "eager", "fused", 2),
    )
)
_LARGER = (
    Row("llama-1b", "bf16", "full", "flash", "fused", 4, 2048),
    Row("llama-1b", "bf16", "every-2", "flash", "foreach", 1, 4096),
    Row("llama-1b", "bf16", "selective-ops", "flash", "loop", 1, 2048),
    Row("llama-1b", "bf16", "full", "flash", "loop", 1, 8192),
    Row("llama-1b", "bf16", "none", "flash", "fused", 1, 1024, accumulation=2),
    Row("llama-8b-blocks", "bf16", "none", "flash", "foreach", 1, 4096),
    Row("llama-8b-blocks", "bf16", "every-2", "flash", "loop", 2, 2048),
    Row("llama-8b-blocks", "bf16-autocast", "none", "flash", "fused", 1, 1024),
    Row("llama-8b-blocks", "bf16", "full", "eager", "fused", 1, 2048),
    Row("llama-7b-blocks", "bf16", "none", "flash", "loop", 2, 2048),
    Row("llama-7b-blocks", "bf16", "full", "flash", "foreach", 1, 8192),
    Row("llama-7b-blocks", "fp32", "full", "efficient", "fused", 1, 2048),
)
_LOGITS = (
    Row("llama-wide-vocab", "bf16", "none", "flash", "foreach", 4, 1024),
    Row("llama-wide-vocab", "bf16-autocast", "full", "flash", "fused", 1, 2048),
    Row("llama-wide-vocab", "bf16", "none", "flash", "fused", 1, 1024, accumulation=4),
    Row("qwen2-0.5b", "bf16-autocast", "none", "flash", "fused", 2, 1024),
    Row("qwen2-0.5b", "bf16", "full", "flash", "foreach", 4, 1024),
    Row("qwen2-0.5b", "bf16", "none", "eager", "loop", 2, 1024),
    Row("qwen3-0.6b", "bf16", "none", "flash", "fused", 2, 1024),
    Row("qwen3-0.6b", "bf16", "selective-ops", "flash", "foreach", 2, 1024),
    Row("qwen3-0.6b", "bf16", "every-2", "flash", "loop", 4, 1024),
)
_GPT2 = (
    Row("gpt2", "bf16", "none", "flash", "fused", 8, 1024),
    Row("gpt2", "bf16", "full", "flash", "foreach", 16, 1024),
    Row("gpt2", "bf16-autocast", "none", "eager", "fused", 4, 1024),
    Row("gpt2", "fp32", "none", "efficient", "foreach", 4, 1024),
    Row("gpt2-medium", "bf16-autocast", "full", "flash", "fused", 8, 1024),
    Row("gpt2-medium", "bf16", "every-2", "flash", "foreach", 8, 1024),
    Row("gpt2-medium", "bf16", "none", "eager", "loop", 2, 1024),
)
_EXPERTS = (
    Row("mixtral-blocks", "bf16", "full", "flash", "fused", 8, 1024),
    Row("mixtral-blocks", "bf16-autocast", "every-2", "flash", "foreach", 2, 1024),
    Row("olmoe-blocks", "bf16", "none", "flash", "foreach", 4, 1024),
    Row("olmoe-blocks", "bf16", "full", "flash", "loop", 4, 2048),
    Row("qwen3-moe-blocks", "bf16", "none", "flash", "fused", 2, 1024),
    Row("qwen3-moe-blocks", "bf16", "full", "flash", "foreach", 4, 1024),
    Row("qwen3-moe-blocks", "bf16-autocast", "none", "flash", "fused", 1, 2048),
)
_ADAPTERS = (
    Row("llama-7b-blocks", "bf16", "full", "flash", "fused", 4, 2048, lora="16:all-linear", lora_dropout=0.05),
    Row("llama-7b-blocks", "bf16", "none", "flash", "foreach", 1, 2048, lora="64:all-linear", autocast=True),
    Row("llama-130m", "bf16", "none", "flash", "fused", 8, 1024, lora="8:q,v", lora_dropout=0.05),
)
_FILLING = (
    Row("llama-8b-blocks", "bf16", "full", "flash", "fused", 1, 4096, grows="layers", fill=1.15),
    Row("llama-wide-vocab", "bf16", "full", "flash", "fused", 1, 512, grows="micro_batch", fill=0.8),
    Row("gpt2-medium", "bf16-autocast", "none", "flash", "foreach", 1, 1024, grows="micro_batch", fill=0.85),
    Row("mixtral-blocks", "bf16", "full", "flash", "fused", 4, 1024, grows="layers", fill=0.85),
)


def _in_turn(*lists: tuple[Row, ...]) -> Iterator[Row]:
    """Yield the first of each list, then the second of each, so that what a budget cuts is of every kind."""
    for place in range(max(map(len, lists))):
        for rows in lists:
            yield from rows[place : place + 1]


CUDA = (*TELLING, *_in_turn(_LLAMA, _LARGER, _LOGITS, _GPT2, _EXPERTS, _ADAPTERS, _FILLING))

CPU = (
    Row("tiny-llama", "fp32", "none", "eager", "foreach", 2, 128),
    Row("tiny-gpt2", "bf16", "none", "eager", "fused", 2, 128),
    Row("tiny-wide-vocab", "bf16", "full", "eager", "loop", 2, 128),
    Row("tiny-qwen2", "fp32", "every-2", "eager", "fused", 2, 128),
    Row("tiny-llama", "bf16", "full", "eager", "foreach", 4, 128),
    Row("tiny-llama", "bf16", "selective-ops", "eager", "loop", 2, 128),
    Row("tiny-gpt2", "fp32", "full", "eager", "foreach", 2, 128),
    Row("tiny-llama", "fp32", "none", "eager", "fused", 2, 128, accumulation=2),
)
"""Tiny, and with materialised scores: the fused kernels of a CPU keep other tensors than those of a GPU."""


def rows_of(suite: str, device: str) -> tuple[Row, ...]:
    """Return the training steps of a suite."""
    if suite not in SUITES:
        raise UnknownNameError("suite", suite, f"must be one of {', '.join(SUITES)}", SUITES)
    if suite == "machine":
        return ()
    rows = CUDA if device == "cuda" else CPU
    return rows[:SMALL] if suite == "small" else rows
