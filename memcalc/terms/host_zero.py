"""What DeepSpeed's ZeRO keeps off the GPU.

Read at edaa722 (0.19.5). Stages 1 and 2 know host memory alone, whatever device they are told; stage 3 swaps sub-groups
of the optimizer's states, gradients and weights to NVMe, through pinned buffers in host memory. Buffers of PyTorch are
rounded up to powers of two where they are pinned (``pin_memory``, the default since 0.19.5), those of the swapper are
not (``csrc/pin_memory/page_alloc.cpp``). What is freed before the first step is not counted, such as the buffer of
gradients with which stage 3 initialises its states.

What the caching host allocator rounds up, and what is large enough to swap, follows from a rank's tensors one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.offload import pinned_bytes
from memcalc.ledger import ALWAYS, Term
from memcalc.terms.adapters import trained, trained_parts
from memcalc.terms.moments import kind_of, optimizer_moments
from memcalc.terms.states import weight_terms
from memcalc.terms.tensors import tensors
from memcalc.terms.zero import adds_in_fp32, era, largest_part, share, sub_group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid


STAGES = "DeepSpeed edaa722 runtime/zero/stage_1_and_2.py"
STAGE3 = "DeepSpeed edaa722 runtime/zero/stage3.py"
SWAPPER = "DeepSpeed edaa722 runtime/swap_tensor"
SWAPPED = f"{SWAPPER}/partitioned_param_swapper.py"
PINNED = "torch 2.13 ATen/core/CachingHostAllocator.h: allocate"
ALIGNMENT = 1024
"""Bytes of one aligned request (``AIO_ALIGNED_BYTES``), with one thread for each."""
SHARE, PART = "w · ⌈P / N⌉", "w · min(⌈P / N⌉, G)"


@dataclass(frozen=True, eq=False)
class Parts:
    """Where the parts of a rank's states lie, and in which pieces."""

    census: ModelOnGrid

    @cached_property
    def grid(self) -> Grid:
        """The grid of the census."""
        return self.census.grid

    @cached_property
    def own(self) -> Array:
        """Elements whose states a rank holds."""
        return share(self.census, 1)

    @cached_property
    def below(self) -> Array:
        """1 where stage 1 or 2 has its optimizer on the host."""
        return self.grid.offloaded("optimizer") * ((self.grid.zero == 1) | (self.grid.zero == 2))

    @cached_property
    def third(self) -> Array:
        """1 where stage 3 has."""
        return self.grid.offloaded("optimizer") * (self.grid.zero == 3)

    @cached_property
    def weights(self) -> Array:
        """1 where stage 3 has its weights off the GPU."""
        return self.grid.offloaded("params") * (self.grid.zero == 3)

    @cached_property
    def swaps(self) -> bool:
        """Whether the tier is NVMe."""
        return self.grid.fixed.offload_to == "nvme"

    @cached_property
    def swapped(self) -> Array:
        """1 where stage 3 swaps the optimizer's states: sub-groups that are large enough."""
        return self.third * (4 * self.own >= SMALLEST_SWAP) * self.swaps

    @cached_property
    def part(self) -> Array:
        """Elements of the largest sub-group."""
        return largest_part(self.census, self.own)

    @cached_property
    def inputs(self) -> dict[str, object]:
        """What the formulas are of."""
        return {"P": self.census.parameters, "N": self.grid.ranks}

    def in_parts(self, width: int) -> Array:
        """What sub-groups that are pinned one by one take beyond their bytes."""
        if not sub_group(self.grid):  # each tensor is a group of its own
            return sum((count * beyond(width * size) for count, size in tensors(self.census, where=True)), np.int64(0))
        full, rest = self.own // sub_group(self.grid), self.own % sub_group(self.grid)
        return full * beyond(width * np.int64(sub_group(self.grid))) + beyond(width * rest)


def zero_states(census: ModelOnGrid) -> Iterator[Term]:
    """All terms of the states off the GPU."""
    unsharded = Parts(trained(census))
    near = "cxl" if census.grid.fixed.offload_to == "cxl" else "host"
    for updated in trained_parts(census):
        parts = Parts(updated)
        for term in (*_states(parts), *_gradients(parts)):
            yield replace(term, name=f"{term.name}{updated.suffix}", tier=near if term.tier == "gpu" else term.tier)
    terms = (*_weights(census, unsharded), *_buffers(unsharded), _rounded(unsharded))
    for term in terms:
        yield replace(term, tier=near if term.tier == "gpu" else term.tier)


def _placed(term: Term, swapped: Array) -> Iterator[Term]:
    """A term, on NVMe where ``swapped`` is 1 and else in host memory."""
    yield replace(term, bytes=term.bytes * (1 - swapped))
    yield replace(term, bytes=term.bytes * swapped, tier="nvme")


def _states(parts: Parts) -> Iterator[Term]:
    """fp32 weights and moments."""
    kind = kind_of(parts.grid)
    away, inputs = parts.below + parts.third, {"w": 4, **parts.inputs}
    source = f"{STAGES}: single_partition_of_fp32_groups; {STAGE3}: _create_fp32_partitions"
    title = "fp32 master weights"
    yield from _placed(Term("optimizer", title, 4 * parts.own * away, ALWAYS, SHARE, source, inputs), parts.swapped)
    if not kind.paged:
        bytes_ = optimizer_moments(parts.census) * away
        inputs = {**inputs, "n": kind.moments, "w": parts.census.width("moment")}
        moments = Term("optimizer", f"{kind.name} moments", bytes_, ALWAYS, f"n · {SHARE}", kind.source, inputs)
        yield from _placed(moments, parts.swapped)


def _gradients(parts: Parts) -> Iterator[Term]:
    """Gradients in fp32 for the optimizer, and those that accumulate."""
    grid, local, inputs = parts.grid, parts.own, parts.inputs
    source = f"{STAGES}: initialize_optimizer_states; {STAGE3}: subgroup_gradient_buffer"
    title, read = "fp32 gradients of the optimizer", 4 * local * (parts.below + parts.third)
    if parts.swaps:
        written = np.minimum(swappable(parts.census, np.int64(4), parts.third == 1), local) * 4 * parts.swapped
        small = f"{SWAPPER}/optimizer_utils.py: unswapped_gradients"
        yield Term("gradients", title, read - written, ALWAYS, "4 · elements of tensors below 1 MiB", small, inputs)
        formula = "4 · elements of tensors from 1 MiB on"
        yield Term("gradients", title, written, ALWAYS, formula, f"{SWAPPER}/optimizer_utils.py", inputs, tier="nvme")
    else:
        yield Term("gradients", title, read, ALWAYS, SHARE, source, {"w": 4, **inputs})
    width = parts.census.width("gradient")
    several = width * local * parts.below * (grid.accumulation > 1)
    source = f"{STAGES}: accumulated_grads_in_cpu"
    yield Term("gradients", "accumulated gradients", several, ALWAYS, SHARE, source, {"w": width, **inputs})
    if era(grid).flat_partitions:
        wide = _share_width(parts)
        source = f"{STAGE3}: grad_partitions_flat_buffer"
        bytes_, inputs = wide * local * parts.third, {"w": wide, **inputs}
        yield Term("gradients", "shares of the gradients", bytes_, ALWAYS, SHARE, source, inputs)


def _share_width(parts: Parts) -> Array:
    """Bytes an element of stage 3's shares of the gradients."""
    return np.where(adds_in_fp32(parts.grid) == 1, 4, parts.census.width("gradient"))


def _weights(census: ModelOnGrid, parts: Parts) -> Iterator[Term]:
    """Weights: in one pinned buffer, or in swap files and, up to a number of elements, in host memory besides."""
    grid, source = census.grid, f"{STAGE3}: param_groups_fp16_flat_cpu_memory"
    if not parts.swaps:
        yield from (replace(term, source=source) for term in weight_terms(census, parts.weights))
        return
    yield from _swapped_weights(census, parts)
    width, zero = census.width("compute"), era(grid)
    part = share(census, 3)
    inputs = {"w": width, "P": census.parameters, "N": grid.ranks, "M": zero.weights_in_host}
    bytes_ = width * np.minimum(part, zero.weights_in_host) * parts.weights
    title = "buffer of weights that host memory keeps"
    yield Term("buffers", title, bytes_, ALWAYS, "w · min(⌈P / N⌉, M)", source, inputs)
    bytes_ = width * np.minimum(part, sub_group(grid)) * (part > zero.weights_in_host) * parts.weights
    title, inputs = "buffer of one sub-group's new weights", {**inputs, "G": sub_group(grid)}
    yield Term(
        "buffers",
        title,
        bytes_,
        ALWAYS,
        f"{PART} where ⌈P / N⌉ > M",
        f"{SWAPPED}: reserve_partitioned_swap_space",
        inputs,
    )
    bytes_ = width * zero.weight_buffers * _aligned(zero.weight_buffer, width) * parts.weights
    inputs = {"n": zero.weight_buffers, "w": width, "E": zero.weight_buffer}
    title = "buffers of the weights' swapper"
    yield Term("buffers", title, bytes_, ALWAYS, "n · w · E, in whole KiB", f"{SWAPPED}: _configure_aio", inputs)


def _swapped_weights(census: ModelOnGrid, parts: Parts) -> Iterator[Term]:
    """Swap files of the weights, and the tensors that are too small for one."""
    if census.grid.fixed.adapters is not None:
        yield from (replace(term, tier="nvme", source=SWAPPED) for term in weight_terms(census, parts.weights))
        return
    width, part = census.width("parameter"), share(census, 3)
    files = np.minimum(swappable(census, width, parts.weights == 1), part)
    inputs = {"w": width, "P": census.parameters, "N": census.grid.ranks}
    bytes_, formula = width * files * parts.weights, "w · elements of tensors from 1 MiB on"
    yield Term("parameters", "weights", bytes_, ALWAYS, formula, SWAPPED, inputs, tier="nvme")
    alone = part > era(census.grid).weights_in_host  # else they lie in the buffer of what host memory keeps
    bytes_, formula = width * (part - files) * alone * parts.weights, "w · elements of tensors below 1 MiB"
    yield Term("parameters", "weights too small to swap", bytes_, ALWAYS, formula, SWAPPED, inputs)


def _buffers(parts: Parts) -> Iterator[Term]:
    """Room for one gradient and for new weights at stages 1 and 2, and the swapper's buffers at stage 3."""
    grid, inputs = parts.grid, parts.inputs
    width, zero = parts.census.width("gradient"), era(grid)
    largest = parts.census.largest_tensor
    bytes_, source = width * largest * parts.below, f"{STAGES}: temp_grad_buffer_for_cpu_offload"
    title = "gradient on its way from the GPU"
    yield Term("buffers", title, bytes_, ALWAYS, "w · P_max", source, {"w": width, "P_max": largest})
    if zero.staged_weights:
        narrow = parts.census.width("parameter")
        bytes_, source = narrow * parts.own * parts.below, f"{STAGES}: param_buffer_of_bit16_for_cpu_offload_groups"
        title = "new weights on their way to the GPU"
        yield Term("buffers", title, bytes_, ALWAYS, SHARE, source, {"w": narrow, **inputs})
    bytes_ = zero.swap_buffers * 4 * _aligned(parts.part, 4) * parts.swapped
    source, inputs = f"{SWAPPER}/utils.py: SwapBufferManager", {"n": zero.swap_buffers, "G": sub_group(grid), **inputs}
    formula = "n · 4 · min(⌈P / N⌉, G), in whole KiB"
    yield Term("buffers", "buffers of the optimizer's swapper", bytes_, ALWAYS, formula, source, inputs)


def _aligned(elements: Array, width: Array) -> Array:
    """Elements of a swapper's buffer, which is a whole number of aligned requests (``_io_aligned_numel``)."""
    return -(-elements * width // ALIGNMENT) * (ALIGNMENT // width)


def _rounded(parts: Parts) -> Term:
    """What PyTorch's pinned buffers take beyond their bytes.

    Gradients that accumulate below stage 3 have a buffer a tensor, and are left out.
    """
    census, part, zero = parts.census, parts.own, era(parts.grid)
    narrow, width = census.width("parameter"), census.width("gradient")
    flat = 2 * beyond(4 * part) + beyond(width * census.largest_tensor) + beyond(narrow * part) * zero.staged_weights
    third = parts.in_parts(4) * (1 - parts.swapped) + beyond(_share_width(parts) * part) * zero.flat_partitions
    in_host = np.minimum(part, zero.weights_in_host) if parts.swaps else part
    size = flat * parts.below + third * parts.third + beyond(narrow * in_host) * parts.weights
    return Term("buffers", "pinned buffers rounded up", size, ALWAYS, "2^⌈log₂ S⌉ - S of each", PINNED, {})


SMALLEST_SWAP = 1 << 20
"""Bytes below which DeepSpeed does not swap a tensor (``MIN_AIO_BYTES``, and the block size of its requests)."""


def units(census: ModelOnGrid, where: Array | bool) -> Iterator[tuple[Array, Array]]:
    """The same for FSDP 1, whose tensors are the flat parameters of blocks and root."""
    for layers, dense, experts in zip(census.layers, census.block_dense, census.block_experts, strict=True):
        yield layers, census.sharded(dense, experts if census.model.is_moe else np.int64(0), where)
    yield np.int64(1), census.sharded(census.root, np.int64(0), where)


def rounding(census: ModelOnGrid, width: Array, where: Array | bool) -> Array:
    """What one pinned copy of a rank's tensors takes beyond their bytes [bytes]."""
    if census.grid.fixed.adapters is not None:
        return np.int64(0)
    each = (units if census.grid.habits.flat_units else tensors)(census, where)
    return sum((count * beyond(width * size) for count, size in each), np.int64(0))


def beyond(size: Array) -> Array:
    """What one pinned tensor takes beyond its bytes [bytes]."""
    return pinned_bytes(size) - size


def swappable(census: ModelOnGrid, width: Array, where: Array | bool) -> Array:
    """Elements of a rank in tensors that are large enough to be swapped, of ``width`` bytes each."""
    each = tensors(census, where)
    return sum((count * size * (width * size >= SMALLEST_SWAP) for count, size in each), np.int64(0))
