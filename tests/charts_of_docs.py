"""The pictures of docs/charts.md; run as a script, this file draws them anew.

Each is what a command of that page writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

from typer.testing import CliRunner

from memcalc.cli.app import app

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PAGE = IMAGES.parent / "charts.md"
_OPTIONS = ("--chart", "--timeline")


def _draw(command: list[str], option: str, path: Path) -> None:
    result = CliRunner().invoke(app, [*command[1:], option, str(path), "--force"], prog_name="memcalc")
    if not path.exists():
        raise RuntimeError(result.stderr)


def _pictures() -> dict[str, Callable[[Path], None]]:
    """Return what draws each picture: the page's commands, in order, each with the file that it names."""
    found: dict[str, Callable[[Path], None]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        words = shlex.split(line) if line.startswith("memcalc ") else []
        for option in _OPTIONS:
            if option in words:
                name = words.pop(words.index(option) + 1)
                words.remove(option)
                if name.endswith(".svg"):
                    found[name] = partial(_draw, [*words], option)
    return found


PICTURES = _pictures()


def words_of(path: Path) -> tuple[list[str], list[str]]:
    """Return what a picture says whatever Matplotlib drew it: its alternative text and tips, and its phrases.

    Ticks, and which parts of a bar have room for a figure, differ between releases.
    """
    space = "{http://www.w3.org/2000/svg}"
    root = ET.parse(path).getroot()  # noqa: S314 the program's own
    titles, texts = (["".join(part.itertext()) for part in root.iter(f"{space}{kind}")] for kind in ("title", "text"))
    return titles, sorted({text for text in texts if " " in text.strip()})


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw(IMAGES / name)
