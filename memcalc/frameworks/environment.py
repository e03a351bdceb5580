"""Environment variables that change what a job keeps on the GPU (PyTorch 2.13, NCCL 2.27)."""

from __future__ import annotations

import re
from collections.abc import Mapping

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
ALLOCATOR_OPTIONS = {
    "garbage_collection_threshold": "the allocator frees cached blocks early",
    "max_split_size_mb": "large cached blocks are not split, and serve only requests of about their size",
    "roundup_power2_divisions": "sizes are rounded up to parts of a power of two",
    "backend": "another allocator than the one that is replayed",
    "max_non_split_rounding_mb": "cached blocks serve requests that are this much smaller",
    "graph_capture_record_stream_reuse": "CUDA graphs use memory again",
}
"""Of the caching allocator (docs.pytorch.org, CUDA semantics, memory management)."""
HARMLESS_OPTIONS = frozenset(
    ("expandable_segments", "pinned_use_cuda_host_register", "pinned_num_register_threads",
     "pinned_use_background_threads", "release_lock_on_cudamalloc", "pinned_reserve_segment_size_mb")
)  # fmt: skip
NOT_MODELLED = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "nothing is cached: reserved memory is what is allocated",
    "CUDA_LAUNCH_BLOCKING": "streams no longer overlap: freed blocks are reusable sooner",
    "NCCL_BUFFSIZE": "the buffers of each channel of NCCL have another size",
    "NCCL_LL_BUFFSIZE": "the buffers of each channel of NCCL have another size",
    "NCCL_LL128_BUFFSIZE": "the buffers of each channel of NCCL have another size",
    "NCCL_MAX_NCHANNELS": "NCCL uses a different number of channels, each with buffers",
    "NCCL_MIN_NCHANNELS": "NCCL uses a different number of channels, each with buffers",
    "NCCL_MAX_CTAS": "NCCL uses a different number of channels, each with buffers",
    "NCCL_MIN_CTAS": "NCCL uses a different number of channels, each with buffers",
    "NCCL_NVLS_ENABLE": "NVLink SHARP has buffers of its own",
    "NCCL_CUMEM_ENABLE": "NCCL takes its buffers by another call, in other sizes",
    "NVTE_FLASH_ATTN": "Transformer Engine chooses another attention kernel, which keeps other tensors",
    "NVTE_FUSED_ATTN": "Transformer Engine chooses another attention kernel, which keeps other tensors",
    "CUBLASLT_WORKSPACE_SIZE": "cuBLASLt's workspace has another size",
}
"""With what each does; NCCL's in its manual, Environment Variables. TORCH_NCCL_AVOID_RECORD_STREAMS is not among them:
what it asked for is done always (pytorch/pytorch#194701)."""
VARIABLES = (*ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", *NOT_MODELLED)
"""Variables that are looked at; all others change nothing that is counted, or are not known to."""


def workspace_bytes(text: str) -> int | None:
    """Workspace of one cuBLAS handle [bytes] that CUBLAS_WORKSPACE_CONFIG asks for; None where it is no such text.

    >>> workspace_bytes(":4096:2:16:8") // 1024
    8320
    """
    pairs = re.findall(r":(\d{1,9}):(\d{1,9})", text)
    if not pairs or "".join(f":{size}:{count}" for size, count in pairs) != text:
        return None
    return sum(int(size) * int(count) for size, count in pairs) * 1024


def visible_gpus(variables: Mapping[str, str]) -> int | None:
    """GPUs that CUDA_VISIBLE_DEVICES lets a process see; None where it is not set.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    4
    """
    text = variables.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else len([part for part in text.split(",") if part.strip()])
