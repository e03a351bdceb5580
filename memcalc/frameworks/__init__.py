"""Each runtime's habits as data: which terms exist, in which dtype, alive in which phase; and the table of eras."""

from __future__ import annotations

import re
from functools import lru_cache

from memcalc.errors import InputError, UnknownNameError
from memcalc.frameworks import deepspeed, fsdp, litgpt, megatron, torchtune
from memcalc.frameworks.habits import Habits, Widths

__all__ = [
    "FRAMEWORKS", "Habits", "Widths", "checkpoints_modules", "defers_reductions", "grows_segments", "habits_of",
]  # fmt: skip


FRAMEWORKS: dict[str, tuple[tuple[str, Habits], ...]] = {
    **fsdp.ERAS,
    **fsdp.HF_ERAS,
    **litgpt.ERAS,
    **torchtune.ERAS,
    **fsdp.PLAIN_ERAS,
    **deepspeed.ERAS,
    **megatron.ERAS,
}
"""By name: the eras, oldest first, each with the version or month in which its habits began."""
RELEASED = {"torchtitan": "2026-02"}
"""The era of a name alone where the newest is of no release: torchtitan 0.2.2 is the last that there is, and is what
its files are written for."""
LAST_VERSION = 1900
"""What is above this is a year."""
SEGMENTS_GROW = (2023, 10)
"""The month of PyTorch 2.1, the first with expandable segments (``c10/cuda/CUDAAllocatorConfig.cpp`` of v2.1.0)."""
GROWING_FROM = {"hf": "4.34", "deepspeed": "0.11", "fsdp1": "2.1"}
"""Releases of that month, of frameworks that have older ones by version; the version of FSDP 1 is PyTorch's own."""
DEFERRED = {True: (2025, 10), False: (2, 9)}
"""By whether it is a month: that of Accelerate 1.11, the first whose ``no_sync`` holds back FSDP 2 (accelerator.py), or
PyTorch's release of that month. FSDP 1 has a ``no_sync`` of its own from the beginning."""
BY_MODULE = {True: ((2025, 6), (2026, 9)), False: ((2, 8), (2, 14))}
"""Likewise from Accelerate 1.8 until before 1.15, where FSDP 2 checkpoints each module of a block: utils/fsdp_utils.py,
``fsdp2_apply_ac``, wraps modules whose parent the policy names (d2e6b031), since 1.15 those that it names (#4172)."""
CHUNKS_LOGITS = {True: (2026, 7), False: (5, 13)}
"""Likewise after TRL 1.7 (2026-06-25), whose ``loss_type`` is chunked_nll by default and was nll before
(trainer/sft_config.py); the version is Transformers'."""
_ERA = re.compile(r"(core-)?v?(\d+)(?:[.-](\d+))?(?:[.-](\d+))?")


@lru_cache(maxsize=256)
def habits_of(framework: str) -> Habits:
    """The habits of ``name`` or ``name@era``: the newest that had begun by then; of a name alone, the last release's.

    An era is a version (``hf@4.46``, ``megatron@core-0.12``) or a month (``torchtitan@2024-12``, ``megatron@2021-05``).

    >>> habits_of("hf@4.45").losses["standard"].upcast
    'model'
    """
    name, at, era = framework.partition("@")
    if name not in FRAMEWORKS:
        raise UnknownNameError("framework", name, f"must be one of {', '.join(FRAMEWORKS)}", FRAMEWORKS)
    if at and not era:
        raise InputError("framework", framework, "must name a version or a month after its @, such as hf@4.46")
    eras = FRAMEWORKS[name]
    if name == "deepspeed" and era in deepspeed.NAMED:
        return deepspeed.NAMED[era]
    if not at and name not in RELEASED:
        return eras[-1][1]
    requested = _order(framework, era or RELEASED[name])
    if name == "megatron" and not requested[0] and requested[1] < LAST_VERSION:
        allowed = f"versions of Megatron-LM are those of its core: megatron@core-{era.removeprefix('v')}"
        raise InputError("framework", framework, allowed)
    begun = [habits for known, habits in eras if _order(framework, _like(known, requested)) <= requested]
    if not begun:
        raise InputError("framework", framework, f"the oldest era modelled is {name}@{eras[0][0]}")
    if name == "megatron":
        _check_megatron(framework, requested)
    return begun[-1]


def _check_megatron(framework: str, requested: tuple[int, ...]) -> None:
    """Refuse a month, or a version, of the time that no era of Megatron-LM has."""
    first, after = (_order(framework, month) for month in megatron.BETWEEN)
    if first <= requested < (_order(framework, "core-0.5") if requested[0] else after):
        nearest = "the nearest are megatron@2022-01 and megatron@core-0.5"
        allowed = f"no era is modelled from {' until '.join(megatron.BETWEEN)}: {nearest}"
        raise InputError("framework", framework, allowed)


def grows_segments(framework: str) -> bool:
    """Whether the PyTorch of a framework's era can grow its segments (``expandable_segments``).

    >>> grows_segments("hf"), grows_segments("hf@4.30"), grows_segments("megatron@2021-05")
    (True, False, False)
    """
    name, at, era = framework.partition("@")
    if not at or era in deepspeed.NAMED:
        return True
    requested = _order(framework, era)
    if requested[1] > LAST_VERSION:
        return requested[1:3] >= SEGMENTS_GROW
    return requested >= _order(framework, GROWING_FROM.get(name, "0"))


def defers_reductions(framework: str) -> bool:
    """Whether Accelerate of a framework's era keeps FSDP's gradients whole until a step's last micro-batch.

    >>> defers_reductions("fsdp2"), defers_reductions("fsdp2@2025-08"), defers_reductions("fsdp1@2.4")
    (True, False, True)
    """
    name, at, era = framework.partition("@")
    if name != "fsdp2" or not at:
        return True
    requested = _order(framework, era)[1:3]
    return requested >= DEFERRED[requested[0] > LAST_VERSION]


def checkpoints_modules(framework: str) -> bool:
    """Whether Accelerate of a framework's era checkpoints each module of a block apart under FSDP 2.

    >>> checkpoints_modules("fsdp2"), checkpoints_modules("fsdp2@2026-06"), checkpoints_modules("fsdp2@2026-09")
    (False, True, False)
    """
    name, at, era = framework.partition("@")
    if name != "fsdp2" or not at:
        return False
    requested = _order(framework, era)[1:3]
    first, after = BY_MODULE[requested[0] > LAST_VERSION]
    return first <= requested < after


def holds_logits(framework: str) -> bool:
    """Whether SFT by TRL of a framework's era makes the logits of all tokens, unless Liger's loss takes its place.

    >>> holds_logits("hf"), holds_logits("hf@5.17"), holds_logits("hf@4.57"), holds_logits("fsdp2@2026-06")
    (False, False, True, True)
    """
    name, _, era = framework.partition("@")
    if not _ERA.fullmatch(era):
        return False
    requested = _order(framework, era)[1:3]
    by_month = requested[0] > LAST_VERSION
    return (by_month or name == "hf") and requested < CHUNKS_LOGITS[by_month]


def _like(known: str, requested: tuple[int, ...]) -> str:
    """The beginning of an era as a month where a month was asked for and the era is named for a release."""
    released = {**fsdp.HF_RELEASED, **fsdp.PLAIN_RELEASED, **megatron.RELEASED}
    return released.get(known, known) if requested[1] > LAST_VERSION else known


def _order(framework: str, era: str) -> tuple[int, ...]:
    """An era as numbers that sort by age."""
    match = _ERA.fullmatch(era)
    if match is None:
        allowed = "an era is a version or a month, such as hf@4.46, torchtitan@2024-12 or megatron@core-0.12"
        raise InputError("framework", framework, allowed)
    return (bool(match[1]), *(int(part or 0) for part in match.groups()[1:]))
