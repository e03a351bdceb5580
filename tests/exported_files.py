"""The files that `memcalc export` prints one after another, apart."""

from __future__ import annotations

import re
from pathlib import Path

FILE = re.compile(r"^==> (\S+) <==\n(.*?)(?=^==> |\Z)", re.MULTILINE | re.DOTALL)


def write_exported(text: str, folder: Path) -> dict[str, str]:
    """Write the files of a printed export into a folder; returned by name."""
    files = dict(FILE.findall(text))
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return files
