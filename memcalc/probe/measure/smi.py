"""Queries of nvidia-smi: read only, and empty where there is none."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from memcalc.units import MIB

_TIMEOUT_S = 30
_FIELDS = "uuid,name,driver_version,memory.total,memory.used"


@dataclass(frozen=True)
class Card:
    """One GPU as the driver sees it, whatever this process is shown."""

    uuid: str
    name: str
    driver: str
    total: int
    """Capacity [bytes]."""
    used: int
    """By all processes together [bytes]."""


def cards() -> list[Card]:
    """Return every GPU of the machine."""
    rows = (_parse_card(row) for row in _query(f"--query-gpu={_FIELDS}"))
    return [card for card in rows if card is not None]


def used_by_process(pid: int, uuid: str) -> int | None:
    """Return what a process has on a GPU [bytes], or None where the driver does not show it (as in many containers)."""
    for row in _query("--query-compute-apps=pid,gpu_uuid,used_memory"):
        if len(row) == 3 and row[:2] == [str(pid), uuid] and row[2].isdigit():
            return int(row[2]) * MIB
    return None


def _parse_card(row: list[str]) -> Card | None:
    if len(row) != len(_FIELDS.split(",")) or not (row[3].isdigit() and row[4].isdigit()):
        return None
    return Card(row[0], row[1], row[2], int(row[3]) * MIB, int(row[4]) * MIB)


def _query(query: str) -> list[list[str]]:
    """Return the rows of an answer, one list of cells each."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        process = subprocess.run(  # noqa: S603 - found on the PATH, with fixed words
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in process.stdout.splitlines() if line.strip()]
