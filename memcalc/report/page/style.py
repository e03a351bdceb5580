"""What a page looks like and does: its style sheet with the palette put in, and its script."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from memcalc.report.palette import COMPONENTS, INK, MOODS, SERIES

__all__ = ["policy", "script", "style"]

_NAMED = {
    **{f"c-{name}": shade for name, shade in COMPONENTS.items()},
    **INK,
    **MOODS,
    "accent": SERIES[0],
}


@cache
def style() -> str:
    """Return the style sheet, light, and dark on screens that ask for it."""
    light, dark = (
        "".join(f"--{name}:{getattr(shade, side)};" for name, shade in _NAMED.items()) for side in ("light", "dark")
    )
    parts = "".join(f".c-{name}{{--colour:var(--c-{name})}}\n" for name in COMPONENTS)
    screens = f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f":root{{{light}}}\n{screens}\n{parts}{_read('page.css')}"


@cache
def script() -> str:
    """Return what the page does beyond showing: copying, sorting, choosing a plan in a chart."""
    return _read("page.js")


@cache
def policy() -> str:
    """Return the content security policy: nothing from anywhere, and no script but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    return (files("memcalc.report.page") / name).read_text(encoding="utf-8")
