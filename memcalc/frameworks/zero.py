"""What the eras of DeepSpeed's ZeRO optimizers differ in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Zero:
    """The habits of one era; sizes are DeepSpeed's own defaults [elements], where a job's configuration names none."""

    contiguous_from: int = 2
    """The lowest stage whose gradients are copied into a contiguous bucket that is allocated whole."""
    flat_gradients: bool = False
    """Stage 1 makes a flat copy of all gradients before it reduces them (until 0.3)."""
    flat_partitions: bool = True
    """Stage 3 keeps its bucket and the shares of the gradients in buffers that live all the time (since 0.6)."""
    fp32_accumulation: bool = True
    """bf16 gradients can be accumulated in fp32: at stage 1 by an optimizer of its own (``BF16_Optimizer``)."""
    bucket: int = 500_000_000
    """``reduce_bucket_size``."""
    gather_bucket: int = 500_000_000
    """``allgather_bucket_size``."""
    overlap_from: int = 3
    """The lowest stage at which ``overlap_comm`` is on by default."""
    prefetch_bucket: int = 50_000_000
    """``stage3_prefetch_bucket_size``."""
    persistence: int = 100_000
    """``stage3_param_persistence_threshold``: smaller parameters stay whole."""
    max_live: int = 1_000_000_000
    """``stage3_max_live_parameters``: no prefetch beyond it."""
    max_reuse: int = 1_000_000_000
    """``stage3_max_reuse_distance``: parameters used again within it are not released."""
    sub_group: int = 1_000_000_000
    """``sub_group_size``: elements of a shard that stage 3 updates at a time."""
    staged_weights: bool = True
    """With an offloaded optimizer, stages 1 and 2 have a copy of their new weights on the host (since 0.16.10)."""
    swap_buffers: int = 4
    """``offload_optimizer.buffer_count``: each as large as a sub-group in fp32."""
    weight_buffers: int = 5
    """``offload_param.buffer_count``."""
    weight_buffer: int = 100_000_000
    """``offload_param.buffer_size``."""
    weights_in_host: int = 1_000_000_000
    """``offload_param.max_in_cpu``: of weights whose place is NVMe, what host memory keeps."""
