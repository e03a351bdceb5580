"""Environment variables of a job that change what it keeps on the GPU (PyTorch 2.13, NCCL 2.27)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memcalc.convert.config import Reading

__all__ = ["KNOWN", "read_environment", "visible", "workspace_bytes"]

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OPTIONS = {
    "garbage_collection_threshold": "cached blocks are given back before the memory is full",
    "max_split_size_mb": "large cached blocks are not split, and serve only requests of about their size",
    "roundup_power2_divisions": "sizes are rounded up to parts of a power of two",
    "backend": "another allocator than the one that is replayed",
    "max_non_split_rounding_mb": "cached blocks serve requests that are this much smaller",
    "graph_capture_record_stream_reuse": "CUDA graphs use memory again",
}
"""Of the caching allocator (docs.pytorch.org, CUDA semantics, memory management)."""
_HARMLESS_OPTIONS = frozenset(
    ("expandable_segments", "pinned_use_cuda_host_register", "pinned_num_register_threads",
     "pinned_use_background_threads", "release_lock_on_cudamalloc", "pinned_reserve_segment_size_mb")
)  # fmt: skip
_NOT_MODELLED = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "nothing is cached, so that reserved memory is what is allocated",
    "CUDA_LAUNCH_BLOCKING": "streams no longer overlap, so that freed blocks are at hand sooner",
    "NCCL_BUFFSIZE": "the buffers of each channel of NCCL have another size",
    "NCCL_LL_BUFFSIZE": "the buffers of each channel of NCCL have another size",
    "NCCL_LL128_BUFFSIZE": "the buffers of each channel of NCCL have another size",
    "NCCL_MAX_NCHANNELS": "NCCL has another number of channels, each with buffers",
    "NCCL_MIN_NCHANNELS": "NCCL has another number of channels, each with buffers",
    "NCCL_MAX_CTAS": "NCCL has another number of channels, each with buffers",
    "NCCL_MIN_CTAS": "NCCL has another number of channels, each with buffers",
    "NCCL_NVLS_ENABLE": "NVLink SHARP has buffers of its own",
    "NCCL_CUMEM_ENABLE": "NCCL takes its buffers by another call, in other sizes",
    "NVTE_FLASH_ATTN": "Transformer Engine chooses another attention kernel, which keeps other tensors",
    "NVTE_FUSED_ATTN": "Transformer Engine chooses another attention kernel, which keeps other tensors",
    "CUBLASLT_WORKSPACE_SIZE": "cuBLASLt's workspace has another size",
}
"""With what each does; NCCL's in its manual, Environment Variables. TORCH_NCCL_AVOID_RECORD_STREAMS is not among them:
what it asked for is done always (pytorch/pytorch#194701)."""
KNOWN = (*_ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", *_NOT_MODELLED)
"""Variables that are looked at; all others change nothing that is counted, or are not known to."""


def read_environment(reading: Reading) -> None:
    """State what the variables among a document's keys say."""
    for name in _ALLOCATOR:
        _allocator(reading, name)
    _workspace(reading)
    usual = {"CUDA_LAUNCH_BLOCKING": "0"}
    for name, says in _NOT_MODELLED.items():
        value = reading.raw(name)
        if value is not None and str(value) not in ("", usual.get(name, "0" if "ENABLE" in name else "")):
            message = f"{name} {value} changes memory and is not modelled: {says}"
            reading.note("warning", "MC002", name, message)
    if reading.text("CUDA_MODULE_LOADING").upper() == "EAGER":
        message = (
            "CUDA_MODULE_LOADING EAGER changes memory and is not modelled: all kernels are loaded into the context"
        )
        reading.note("warning", "MC002", "CUDA_MODULE_LOADING", message)
    reading.raw("CUDA_VISIBLE_DEVICES")


def _allocator(reading: Reading, name: str) -> None:
    text = reading.text(name)
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):
        option, value = part.partition(":")[0].strip(), part.partition(":")[2].strip()
        if option == "expandable_segments" and value.lower() in ("true", "false"):
            reading.say("strategy.expandable_segments", value.lower() == "true", name)
        elif option == "expandable_segments":
            raise reading.wrong(name, text, "expandable_segments must be True or False")
        elif option in _OPTIONS and (option, value) != ("backend", "native"):
            message = f"{option}:{value} of {name} changes memory and is not modelled: {_OPTIONS[option]}"
            reading.note("warning", "MC002", name, message)
        elif option not in _HARMLESS_OPTIONS and option != "backend":
            message = (
                f"{option[:60]} of {name} is not an option of PyTorch 2.13 that memcalc knows, and counts for nothing"
            )
            reading.note("warning", "MC001", name, message)


def _workspace(reading: Reading) -> None:
    """`:SIZE:COUNT` pairs, sizes in KiB (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    text = reading.text(name)
    size = workspace_bytes(text)
    if text and size is None:
        raise reading.wrong(name, text, "must be pairs of a size in KiB and a count, as in :4096:8")
    if size is not None:
        reading.say("strategy.blas_workspace", size, name)


def workspace_bytes(text: str) -> int | None:
    """Workspace of one cuBLAS handle [bytes] that CUBLAS_WORKSPACE_CONFIG asks for; None where it is no such text.

    >>> workspace_bytes(":4096:2:16:8") // 1024
    8320
    """
    pairs = re.findall(r":(\d{1,9}):(\d{1,9})", text)
    if not pairs or "".join(f":{size}:{count}" for size, count in pairs) != text:
        return None
    return sum(int(size) * int(count) for size, count in pairs) * 1024


def visible(variables: Mapping[str, str]) -> int | None:
    """GPUs that CUDA_VISIBLE_DEVICES lets a process see; None where it is not set.

    >>> visible({"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    4
    """
    text = variables.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else len([part for part in text.split(",") if part.strip()])
