"""The causes that triage knows: what each is called, and the smallest change that usually helps."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from memcalc.catalog import read_toml
from memcalc.results.triage import Confidence, TriageCause
from memcalc.units import format_bytes


@dataclass(frozen=True)
class Cause:
    """A cause: what it is called, and the smallest change that usually helps."""

    title: str
    remedy: str
    options: tuple[tuple[str, str], ...] = ()
    """Options of the estimate that are the remedy."""


CAUSES = {
    code: Cause(entry["title"], entry["remedy"], tuple(map(tuple, entry.get("options", ()))))
    for code, entry in read_toml(files("memcalc.probe") / "triage" / "causes.toml").items()
}
"""By code."""
_RANK = {"certain": 0, "likely": 1, "possible": 2}


def cause(code: str, confidence: Confidence, *evidence: str, size: int | None = None) -> TriageCause:
    """Return a cause of a code with what speaks for it."""
    entry = CAUSES[code]
    return TriageCause(
        code=code, title=entry.title, confidence=confidence, evidence=evidence, bytes=size, remedy=entry.remedy
    )


def ranked(causes: list[TriageCause]) -> tuple[TriageCause, ...]:
    """Order causes by how sure they are, then by what they account for; each code once, the surest.

    That the job fills the card comes after whatever says more; in an evaluation what it keeps for nothing comes first.
    """
    by_code: dict[str, TriageCause] = {}
    for item in sorted(causes, key=_order):
        by_code.setdefault(item.code, item)
    return tuple(by_code.values())


def _order(item: TriageCause) -> tuple[int, bool, bool, float]:
    size = float("inf") if item.bytes is None else item.bytes
    return _RANK[item.confidence], item.code == "too-large", not item.code.startswith("evaluation-"), -size


def shown(size: float) -> str:
    """Return a size as evidence has it.

    >>> shown(3 << 30), shown(20 << 20), shown(2048), shown(512)
    ('3.00 GiB', '20.0 MiB', '2.0 KiB', '512 B')
    """
    for unit, least, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if abs(size) >= least:
            return format_bytes(size, unit, digits)
    return format_bytes(size, "B", 0)
