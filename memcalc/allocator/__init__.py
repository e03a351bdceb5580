"""A replay of PyTorch's CUDA caching allocator over a list of allocations and frees, without torch.

`replay` answers what a sum of live tensors cannot: how many bytes stay reserved in the holes between them, whether a
full card can be saved by giving cached segments back, and what each stream's pool holds. The rules are those of
`DeviceCachingAllocator` in PyTorch's `c10/cuda/CUDACachingAllocator.cpp` (commit 001074d; the constants are those of
`c10/core/AllocatorConfig.h` in PyTorch 2.13), and each function names the one that it follows.

What is left out: garbage collection and rounding to divisions of a power of two (both off by default), the pools of
CUDA graphs, and time: a block that another stream uses comes back at an explicit ``sync`` event. Addresses grow in the
order of the requests to the driver, which decides only between free blocks of one size.
"""

from memcalc.allocator.caching import Event, OutOfMemory, Replay, replay
from memcalc.allocator.growth import mapped_up_to, reserved_up_to
from memcalc.allocator.pools import LARGE_SEGMENT

__all__ = ["LARGE_SEGMENT", "Event", "OutOfMemory", "Replay", "mapped_up_to", "replay", "reserved_up_to"]
