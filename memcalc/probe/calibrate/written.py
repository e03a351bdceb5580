"""A calibration as the text of its file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.toml_text import array_of_tables, pairs

if TYPE_CHECKING:
    from memcalc.specs.calibration import Calibration

__all__ = ["text"]

_TABLES = ("reserve", "constant", "gain", "left", "residual")


def text(found: Calibration) -> str:
    """Return the file: it reads back as the same, and the same rows write it byte for byte."""
    dumped = found.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    tables = {name: dumped.pop(name, ()) for name in _TABLES}
    head = "# Written by `memcalc calibrate`; what is not here stays as it is shipped.\n"
    parts = [head + pairs(dumped), *(array_of_tables(name, rows) for name, rows in tables.items() if rows)]
    return "\n".join(parts)
