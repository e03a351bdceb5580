"""Elements of HTML from text: whatever is not an element already is escaped, so that no name can become markup."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from memcalc.report.palette import BIDIRECTIONAL, COMPONENTS, INK, MOODS, ROLES, SERIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.report.tables import Column
    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import Plans
    from memcalc.results.posttraining import Rl

_UNPRINTABLE = {code: "�" for code in (*range(32), *range(127, 160), *BIDIRECTIONAL) if chr(code) not in "\n\r\t\x85"}
_VOID = {"meta", "wbr", "input", "link"}


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
    text = el("p", intro, class_="intro") if intro else ""
    body = [el("h2", heading, id=f"{name}-title"), text, *children]
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
    label = [part if index == 0 else f"--{part}" for index, part in enumerate(text.split(" --"))]
    total = Html(" ".join(el("span", word, class_="word") for word in label))  # a line breaks between options alone
    return el(
        "div",
        el("pre", el("code", total, id=name), tabindex="0", role="region", aria_label="command line"),
        el("button", "Copy", type="button", class_="copy", data_copies=name, hidden=True),
        class_="code",
    )


def cell(text: str, *, right: bool = False, head: bool = False, sort: str | None = None) -> Html:
    """Return a cell of a table."""
    if head:
        return el("th", text, scope="row", class_="number" if right else None, data_sort=sort)
    return el("td", text, class_="number" if right else None, data_sort=sort)


def table(caption: str, columns: Iterable[Column], rows: list[Html], *, name: str, sortable: bool = False) -> Html:
    """Return a table below what is said of it; it scrolls by itself where there is little room."""
    cells = (
        el(
            "th", column.title, el("span", column.unit, class_="unit") if column.unit else "", scope="col",
            class_="number" if column.right else None,
        )
        for column in columns
    )  # fmt: skip
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


def head(title: str) -> Html:
    """Return the head of a page that stands alone."""
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy()),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(style())),
        el("style", Html(rules())),
    )


# ---------------------------------------------------------------------------------------------------------------- style


_PARTS = {
    **{f"c-{name}": shade for name, shade in COMPONENTS.items()},
    **{f"r-{name.replace(' ', '-')}": shade for name, shade in ROLES.items()},
}
"""Classes of what bars are made of: components, and roles of post-training."""
_NAMED = {**_PARTS, **INK, **MOODS, "accent": SERIES[0]}


@cache
def style() -> str:
    """Return the style sheet, light, and dark on screens that ask for it."""
    screens = f"@media screen and (prefers-color-scheme:dark){{:root{{{colours('dark')}}}}}"
    return f":root{{{colours('light')}}}\n{screens}\n{bar_style()}{read('page.css')}"


def colours(side: Literal["light", "dark"]) -> str:
    """Return the declarations of all colours, on paper or on a dark page."""
    return "".join(f"--{name}:{getattr(shade, side)};" for name, shade in _NAMED.items())


@cache
def bar_style() -> str:
    """Return the rules of a GPU as a bar, whatever page it stands on."""
    return "".join(f".{name}{{--colour:var(--{name})}}\n" for name in _PARTS) + read("bar.css")


@cache
def script() -> str:
    """Return what the page does beyond showing: copying, sorting, choosing a plan in a chart."""
    return read("page.js")


@cache
def policy() -> str:
    """Return the content security policy: nothing from anywhere, and no script but the page's own."""
    return policy_of(script())


def policy_of(text: str) -> str:
    """Return the policy of a page whose one script is `text`."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def read(name: str) -> str:
    """Return a file that stands beside this one."""
    return (files(__package__) / name).read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- charts


UNDRAWN = "No charts: pip install 'memcalc[charts]'. The tables have the same numbers."
_PATH = re.compile(r'(?<= d=")[^"]*(?=")')
_STRAIGHT = re.compile(r"(?:[ML] [-\d.]+ [-\d.]+\s*|z\s*)+")


def draws() -> bool:
    """Return whether there is something to draw with."""
    return find_spec("matplotlib") is not None


def rules() -> str:
    """Return the style rules of charts; none without something to draw with."""
    if not draws():
        return ""
    from memcalc.report import charts

    return charts.rules()


def chart(name: str, answer: Estimate | Plans | Rl) -> Html:
    """Return the chart of a kind of answer in a frame; nothing without something to draw with."""
    if not draws():
        return Html("")
    from memcalc.report.charts import chart_of, responsive

    drawn = responsive(chart_of(name, answer))
    return el("figure", Html(_PATH.sub(lambda path: shortened(path[0]), drawn)), class_="chart")


def shortened(path: str) -> str:
    """Return a path of straight lines in steps of a tenth of a point; any other as it is.

    >>> shortened("M 0 12.34 L 10.26 12.34 L 10.26 7.1 z")
    'm0 12.3h10.3v-5.2z'
    """
    if not _STRAIGHT.fullmatch(path):
        return path
    parts, at = [], (0, 0)
    for command, x, y in re.findall(r"([MLz])(?: ([-\d.]+) ([-\d.]+))?", path):
        if command == "z":
            parts.append("z")
            continue
        to = (round(10 * float(x)), round(10 * float(y)))
        parts.append(_step(command, to[0] - at[0], to[1] - at[1]))
        at = to
    return "".join(parts)


def _step(command: str, right: int, down: int) -> str:
    """Return one line, tenths of a point from where the last one ended."""
    if command == "M":
        return f"m{right / 10:g} {down / 10:g}"
    if not down:
        return f"h{right / 10:g}" if right else ""
    return f"l{right / 10:g} {down / 10:g}" if right else f"v{down / 10:g}"
