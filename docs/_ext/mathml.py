r"""Formulas as MathML, which browsers show by themselves: no script, no font, nothing fetched.

A formula in a page is written as repository viewers want it, $`x^2`$, and becomes MyST's role.
"""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

INLINE = re.compile(r"\$(`+)([^`]+)\1\$")


def to_role(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Write each inline formula as the role of MyST."""
    source[0] = INLINE.sub(r"{math}\1\2\1", source[0])


def mathml(node: nodes.Element, *, block: bool) -> str:
    """Return a formula as MathML; one that cannot be read is a warning, and so an error of the build."""
    try:
        return str(tex2mathml(node.astext(), as_block=block))
    except MathError as error:
        logging.getLogger(__name__).warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{node.astext()}</code>"


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    translator.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def displayed(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on a line of its own."""
    translator.body.append(f'<div class="math">{mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", to_role)
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
