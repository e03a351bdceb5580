"""Out-of-memory messages of all forms as figures.

The forms were read in PyTorch's sources: ``c10/cuda/CUDACachingAllocator.cpp`` (up to 1.4 "cached"; then "reserved in
total"; from 2.1 "has a total capacity of", with processes and private pools) and ``CUDAMallocAsyncAllocator.cpp``, and
in messages of the allocators of HIP, XPU, NPU, MPS and the host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memcalc.units import GIB, KIB, MIB, TIB

__all__ = ["HOST_FORMS", "Figures", "figures_of", "size_of"]

_SIZE = r"(?<![\d.])(\d{1,16}(?:\.\d{1,6})?) ?(bytes|[KMGT]i?B)"
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "KB": KIB, "MB": MIB, "GB": GIB, "TB": TIB}
"""MPS writes KB, MB and GB and divides by powers of 1024 (``MPSAllocator.mm``, format_size)."""
_NONSENSE = 1 << 50
"""NVML's "not available" is printed as 17179869184 GiB; no device has a PiB."""
HOST_FORMS = ("host allocator", "killed", "data loader", "shared memory")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one message says; sizes in bytes, None where it does not say them."""

    form: str
    backend: str = "CUDA"
    device: int | None = None
    tried: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None
    reserved: int | None = None
    private_pools: int | None = None
    limit: int | None = None
    this_process: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    """Other entries of the driver's list: process id and bytes."""


_CACHING = re.compile(r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA|DPCPP|GCU|PrivateUse\w*) out of memory\b", re.IGNORECASE)
_CUT = re.compile(r"()[Tt]ried to allocate [\d.]+ [KMGT]?i?[Bb]\w*[. ]{1,2}\(?(?:GPU|NPU) \d")
"""The message without its first words."""
_FORMS = (
    ("caching", _CACHING),
    ("caching", _CUT),
    ("cudaMallocAsync", re.compile(r"Allocation on device\s*\d*\s*would exceed allowed memory")),
    ("MPS", re.compile(r"MPS backend out of memory")),
    ("host allocator", re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) mem|Unable to mmap \d+ byte")),
    ("NCCL", re.compile(r"Cuda failure (?:\d+ )?'?out of memory'?|Failed to CUDA (?:calloc|malloc|host alloc)")),
    ("driver", re.compile(
        r"CUDA(?: driver)? error: out of memory|cuda runtime error \(2\) ?: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|hipErrorOutOfMemory|HIP error: out of memory|cudaErrorMemoryAllocation|error=2 : out of memory"
    )),
    ("library", re.compile(r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED")),
    ("other framework", re.compile(r"RESOURCE_EXHAUSTED: Out of memory|ResourceExhaustedError")),
    ("shared memory", re.compile(r"killed by signal: Bus error|insufficient shared memory|\(shm\)")),
    ("data loader", re.compile(
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)"
    )),
    ("killed", re.compile(
        r"oom[-_]kill|Out of memory: Kill|OOMKilled|OUT_OF_MEMORY|^\S*\s*Killed\s*$|exitcode\s*:\s*-9\b|signal 9\b"
        r"|SIGKILL|exit (?:code|status) 137|Killed signal"
    )),
)  # fmt: skip
"""In the order in which one speaks before another."""


def figures_of(text: str, line: str) -> Figures | None:
    """Return the figures of a message that begins on `line`; `text` is it and what follows, as one line.

    >>> said = "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; 25.38 MiB free)"
    >>> figures_of(said, said).tried, figures_of(said, said).device
    (20971520, 0)
    """
    for form, sign in _FORMS:
        found = sign.search(line)
        if found is not None:
            return _read(form, found, text)
    return None


def _read(form: str, found: re.Match[str], text: str) -> Figures:
    if form == "caching":
        return _caching(found[1].upper() or "CUDA", text)
    if form == "cudaMallocAsync":
        return _malloc_async(text)
    if form == "MPS":
        held, other = _size(rf"MPS allocated: {_SIZE}", text), _size(rf"other allocations: {_SIZE}", text)
        own = None if held is None or other is None else held + other
        tried, limit = _size(rf"Tried to allocate {_SIZE}", text), _size(rf"max allowed: {_SIZE}", text)
        return Figures(form, "MPS", tried=tried, limit=limit, allocated=held, reserved=held, this_process=own)
    if form == "host allocator":
        asked = re.search(r"(?:tried to allocate|mmap) (\d+) bytes", text)
        return Figures(form, "host", tried=int(asked[1]) if asked else None)
    return Figures(form, "host" if form in HOST_FORMS else "HIP" if "hip" in found[0].lower() else "CUDA")


def _caching(backend: str, text: str) -> Figures:
    old = re.search(r"\([GNXM][PL]U \d+;", text) is not None
    reserved = _size(rf"{_SIZE} reserved in total", text)
    allocated = _size(rf"{_SIZE} already allocated", text) if old else _size(rf"{_SIZE} is allocated by PyTorch", text)
    cached = _size(rf"{_SIZE} cached", text)
    holes = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    if holes is None and allocated is not None:
        holes = cached if cached is not None else None if reserved is None else max(reserved - allocated, 0)
    if reserved is None and None not in (allocated, holes):
        reserved = (allocated or 0) + (holes or 0)
    own = _size(rf"this process has {_SIZE} memory in use", text)
    listed = (
        (int(pid), size_of(number, unit))
        for pid, number, unit in re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
    )
    return Figures(
        form="reserved" if old and "reserved in total" in text else "cached" if old else "capacity",
        backend=backend,
        device=_device(text),
        tried=_size(rf"[Tt]ried to allocate {_SIZE}", text),
        capacity=_size(rf"{_SIZE} total capacity", text) if old else _size(rf"total capaci?ty of {_SIZE}", text),
        free=_size(rf"{_SIZE} free", text) if old else _size(rf"of which {_SIZE} is free", text),
        allocated=allocated,
        unallocated=holes,
        reserved=reserved,
        private_pools=_size(rf"with {_SIZE} allocated in private pools", text),
        limit=_size(rf"{_SIZE} allowed", text),
        this_process=own or None,  # 0 is what NVML answers where it may not say
        processes=tuple((pid, size) for pid, size in listed if size < _NONSENSE),
    )


def _malloc_async(text: str) -> Figures:
    device = re.search(r"on device\s*(\d+)", text)
    limit = _size(rf"PyTorch limit \(set by user-supplied memory fraction\)\s*: {_SIZE}", text)
    return Figures(
        "cudaMallocAsync",
        device=int(device[1]) if device else None,
        tried=_size(rf"Requested\s*: {_SIZE}", text),
        capacity=_size(rf"Device limit\s*: {_SIZE}", text),
        free=_size(rf"Free \(according to CUDA\)\s*: {_SIZE}", text),
        allocated=_size(rf"Currently allocated\s*: {_SIZE}", text),
        limit=limit,
    )


def _device(text: str) -> int | None:
    found = re.search(r"\b(?:GPU|NPU|XPU|MLU|device)\s+(\d+)", text)
    return int(found[1]) if found else None


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    if found is None:
        return None
    size = size_of(found[1], found[2])
    return size if size < _NONSENSE else None


def size_of(number: str, unit: str) -> int:
    """Return a printed size [bytes].

    >>> size_of("2.00", "GiB")
    2147483648
    """
    return round(float(number) * _UNITS[unit])
