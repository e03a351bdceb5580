"""The navigation, from the table in conf.py: pages stay free of directives."""

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from sphinx.application import Sphinx


def entries(wanted: list[str], pages: set[str]) -> Iterator[str]:
    """Yield the pages of each entry: a name or a pattern, with a title in ``Title <name>``; self is the page itself."""
    left = set(pages)
    for entry in wanted:
        title, _, pattern = entry.removesuffix(">").rpartition("<")
        if pattern == "self":
            yield entry
        for page in sorted(page for page in left if fnmatch(page, pattern)):
            left.remove(page)
            yield f"{title}</{page}>" if title else f"/{page}"


def append_toctrees(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append what stands below a page, hidden: the sidebar shows it."""
    for caption, wanted in app.config.navigation.get(docname, {}).items():
        lines = [":hidden:", *([f":caption: {caption}"] if caption else []), "", *entries(wanted, app.env.found_docs)]
        source[0] += "\n".join(["", "", "```{toctree}", *lines, "```", ""])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_config_value("navigation", {}, "env", dict)
    app.connect("source-read", append_toctrees)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
