"""The reference: records of the Markdown pages as Python objects, docstrings in the form of numpydoc."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, NumpyDocstring

RECORD = re.compile(r"memcalc\.[a-z_.]+\.[A-Z]\w+")


def note_records(app: Sphinx, doctree: nodes.document) -> None:
    """Let types in signatures lead to the section of a record: the name stands in its first paragraph."""
    if not app.env.docname.startswith("reference/"):
        return
    for section in doctree.findall(nodes.section):
        literal = next((node for node in section[1].findall(nodes.literal)), None) if len(section) > 1 else None
        if literal is not None and RECORD.fullmatch(literal.astext()):
            app.env.domains.python_domain.note_object(literal.astext(), "class", section["ids"][0], location=section)


def numpydoc(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Read the sections of a docstring; not of an attribute, whose words before a colon would be taken for a type."""
    if what in {"function", "method", "class", "exception"}:
        lines[:] = str(NumpyDocstring(lines, Config(), app, what, name, thing, options)).splitlines()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("doctree-read", note_records)
    app.connect("autodoc-process-docstring", numpydoc)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
