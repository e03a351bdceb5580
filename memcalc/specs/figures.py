"""The three figures that are measured."""

from __future__ import annotations

from typing import Literal

Figure = Literal["allocated", "reserved", "device"]
"""What `torch.cuda.max_memory_allocated()`, `torch.cuda.max_memory_reserved()` and nvidia-smi read."""
FIGURES: tuple[Figure, ...] = ("allocated", "reserved", "device")
