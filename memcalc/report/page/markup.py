"""Elements of HTML from text: whatever is not an element already is escaped, so that no name can become markup."""

from __future__ import annotations

import html

from memcalc.report.tables import gib, percent

__all__ = [
    "Head",
    "Html",
    "begun",
    "cell",
    "code",
    "el",
    "facts",
    "gib",
    "join",
    "percent",
    "section",
    "swatch",
    "table",
]

_UNPRINTABLE = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\r\t\x85"}
Head = tuple[str, str, bool]
"""The heading of a column: title, unit, and whether its figures stand to the right."""
_VOID = {"meta", "wbr"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(text: str) -> str:
    """Return text as it stands in an element or an attribute; a carriage return stays one.

    >>> escaped('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    if isinstance(text, Html):
        return text
    return html.escape(text.translate(_UNPRINTABLE)).replace("\r", "&#13;")


def join(*parts: str) -> Html:
    """Return parts one after another, what is no markup escaped."""
    return Html("".join(map(escaped, parts)))


def el(name: str, /, *children: str, **attributes: str | bool | None) -> Html:
    """Return an element; attributes that are None or False are left out, and underscores stand for hyphens.

    >>> el("a", "1 < 2", href="#x", class_="far")
    '<a href="#x" class="far">1 &lt; 2</a>'
    """
    written = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Html(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{join(*children)}</{name}>")


def _attribute(name: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escaped(value)}"'


def section(name: str, heading: str, *children: str, intro: str = "", class_: str | None = None) -> Html:
    """Return a part of the page under its heading, which names it for a screen reader."""
    said = el("p", intro, class_="intro") if intro else ""
    body = [el("h2", heading, id=f"{name}-title"), said, *children]
    return el("section", *body, id=name, aria_labelledby=f"{name}-title", class_=class_)


def swatch(component: str) -> Html:
    """Return the small square in a component's colour; the name beside it says the same."""
    return el("span", class_=f"swatch c-{component}", aria_hidden="true")


def facts(values: dict[str, str], class_: str = "facts") -> Html:
    """Return names with their values."""
    rows = (el("div", el("dt", name), el("dd", value)) for name, value in values.items())
    return el("dl", *rows, class_=class_)


def code(text: str, name: str) -> Html:
    """Return a command line with a button that copies it; `name` is the id of its text."""
    words = [part if place == 0 else f"--{part}" for place, part in enumerate(text.split(" --"))]
    whole = Html(" ".join(el("span", word, class_="word") for word in words))  # a line breaks between options alone
    return el(
        "div",
        el("pre", el("code", whole, id=name), tabindex="0", role="region", aria_label="command line"),
        el("button", "Copy", type="button", class_="copy", data_copies=name, hidden=True),
        class_="code",
    )


def cell(text: str, *, right: bool = False, head: bool = False, sort: str | None = None) -> Html:
    """Return a cell of a table."""
    if head:
        return el("th", text, scope="row", class_="number" if right else None, data_sort=sort)
    return el("td", text, class_="number" if right else None, data_sort=sort)


def table(caption: str, heads: list[Head], rows: list[Html], *, name: str, sortable: bool = False) -> Html:
    """Return a table below what is said of it; it scrolls by itself where there is little room."""
    cells = (
        el(
            "th",
            title,
            el("span", unit, class_="unit") if unit else "",
            scope="col",
            class_="number" if right else None,
        )
        for title, unit, right in heads
    )
    body = el(
        "table",
        el("thead", el("tr", *cells)),
        el("tbody", *rows),
        id=name,
        class_="sortable" if sortable else None,
        aria_labelledby=f"{name}-caption",
    )
    return join(
        el("p", caption, id=f"{name}-caption", class_="caption"),
        el("div", body, class_="scroll", tabindex="0", role="region", aria_labelledby=f"{name}-caption"),
    )


def begun(sentence: str) -> str:
    """Return a sentence with a capital at its beginning.

    >>> begun("nothing fits."), begun("#1 is tight.")
    ('Nothing fits.', '#1 is tight.')
    """
    return sentence[:1].upper() + sentence[1:]
