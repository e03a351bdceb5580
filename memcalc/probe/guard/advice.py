"""Settings that change memory where it is short, and that exist in the run's framework."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.frameworks import habits_of
from memcalc.frameworks.environment import ALLOCATOR
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.probe.guard.pressure import Reading
    from memcalc.specs.strategy import Strategy

CACHED = 0.1
"""Share of what is reserved that may be unused before the allocator's settings are named: a choice."""


def settings_for(sample: Reading | None, strategy: Strategy | None, buffer_bytes: int = 0) -> Iterator[str]:
    """Yield what can be set: the allocator's rules, and under FSDP 1 the width of the model's own buffers.

    FSDP 1 has ``buffer_dtype`` (torch 2.13 distributed/fsdp/api.py, MixedPrecision); FSDP 2's policy has none
    (_fully_shard/_fsdp_api.py). ``buffer_bytes`` are those of fp32 buffers.
    """
    if sample is not None and sample.reserved_peak - sample.allocated_peak > CACHED * sample.reserved_peak:
        unused = (sample.reserved_peak - sample.allocated_peak) / GIB
        yield from (f"{unused:.2f} GiB are cached and unused: {text}" for text in _allocator(strategy))
    shards = strategy is not None and strategy.zero >= 2 and habits_of(strategy.framework).flat_units
    if shards and buffer_bytes:
        yield f"MixedPrecision(buffer_dtype=torch.bfloat16) halves {buffer_bytes / GIB:.2f} GiB of buffers"


def _allocator(strategy: Strategy | None) -> Iterator[str]:
    """Yield the setting of the allocator that is not in force yet."""
    configured = " ".join(os.environ.get(name, "") for name in ALLOCATOR).lower()
    expandable = "expandable_segments:true" in configured or bool(strategy and strategy.expandable_segments)
    if expandable or "cudamallocasync" in configured:
        return
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if "max_split_size_mb" not in configured:
        setting += ", or max_split_size_mb:512 where the driver has no virtual memory"
    yield setting
