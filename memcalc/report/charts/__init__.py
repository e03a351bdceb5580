"""Charts: an answer in, a picture out; the formats are here, the modules draw."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from memcalc.errors import InputError
from memcalc.files import output_path, replacing
from memcalc.report.charts.parts import legible
from memcalc.report.palette import COMPONENTS, INK, MOODS, ROLES, SERIES, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ENDINGS = (".svg", ".png", ".pdf", ".html")
_ABSENT = "drawing needs Matplotlib: pip install 'memcalc[charts]'"
_SVG = "http://www.w3.org/2000/svg"
_DPI = 160
_NARROW = "40rem"
_LIGHT = {name: shade.light for name, shade in INK.items()}
_LOOK = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _LIGHT["muted"],
    "axes.labelcolor": _LIGHT["text"],
    "axes.titlecolor": _LIGHT["text"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": _LIGHT["page"],
    "figure.facecolor": _LIGHT["page"],
    "figure.constrained_layout.use": True,
    "grid.color": _LIGHT["rule"],
    "grid.linewidth": 0.8,
    "text.color": _LIGHT["text"],
    "text.parse_math": False,
    "xtick.color": _LIGHT["muted"],
    "ytick.color": _LIGHT["muted"],
    "xtick.labelcolor": _LIGHT["text"],
    "ytick.labelcolor": _LIGHT["text"],
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "patch.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "memcalc",
    "pdf.fonttype": 42,
}
_APART = {"diff": "changes:diff_chart", "ladder": "changes:ladder_chart", "timeline": "estimate:timeline_chart"}
"""Module and function of the charts that have no module of their own name."""
_FONTS = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"


@dataclass(frozen=True)
class Chart:
    """What a picture shows: ``draw`` fills a figure of ``size`` inches, or of ``narrow``."""

    name: str
    """A word of letters and hyphens, for the ids of its parts."""
    alt: str
    """What it shows, in words with the figures, for who does not see it."""
    draw: Callable[[Figure], None]
    size: tuple[float, float]
    narrow: tuple[float, float]
    """Inches on a narrow screen, which gets a drawing of its own: words that shrink with a picture cannot be read."""
    tips: Mapping[str, str] = field(default_factory=dict)
    """By the id that ``draw`` gave a part with ``set_gid``, what is shown where a pointer rests on it."""


def chart_of(name: str, answer: Any) -> Chart:
    """Return the chart of an answer that is called so; only what draws it is imported."""
    module, _, function = _APART.get(name, f"{name}:chart").partition(":")
    chart: Chart = getattr(import_module(f"memcalc.report.charts.{module}"), function)(answer)
    return chart


def target_of(option: str, name: str, force: bool) -> Path:
    """Return the file that a chart goes to, checked before anything is computed."""
    if Path(name).suffix.lower() not in ENDINGS:
        raise InputError(option, name, f"must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    path = output_path(name, force, option)
    if find_spec("matplotlib") is None:
        raise InputError(option, name, _ABSENT)
    return path


def save(chart: Chart, path: Path) -> None:
    """Write a chart in the format of the file's ending, whole or not at all."""
    kind = path.suffix.lower()
    if kind == ".svg":
        data = _standalone(chart).encode()
    elif kind == ".html":
        data = page(chart).encode()
    else:
        data = _drawn(chart, kind[1:])
    with replacing(path) as stream:
        stream.write(data)


def responsive(chart: Chart) -> str:
    """Return a chart for a page of HTML: one drawing for wide screens and paper, one for narrow screens."""
    wide, narrow = inline(chart), inline(chart, narrow=True)
    return f'<div class="memcalc-wide">{wide}</div>\n<div class="memcalc-narrow">{narrow}</div>'


def inline(chart: Chart, *, narrow: bool = False) -> str:
    """Return a chart as an ``svg`` element for a page of HTML; its ids begin with the chart's name."""
    name = f"{chart.name}-narrow" if narrow else chart.name
    for prefix, index in (("", _SVG), ("xlink", "http://www.w3.org/1999/xlink")):
        ET.register_namespace(prefix, index)
    root = ET.fromstring(_drawn(chart, "svg", narrow=narrow))  # noqa: S314 written by Matplotlib a moment ago
    for child in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(child)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-alt", "class": "memcalc-chart", "font-family": _FONTS}
    root.attrib.pop("width")
    root.attrib.pop("height")
    label = ET.Element(f"{{{_SVG}}}title", {"id": "alt"})
    label.text = printable(chart.alt)
    root.insert(0, label)
    _add_tips(root, chart.tips)
    for path in root.iter(f"{{{_SVG}}}path"):
        path.set("d", re.sub(r"(\.\d)\d+", r"\1", path.get("d", "")))
    text = ET.tostring(root, encoding="unicode")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    return re.sub(r"font: ([^;\"]*?) 'DejaVu Sans'[^;\"]*", rf"font: \1 {_FONTS}".replace('"', "'"), text)


def page(chart: Chart) -> str:
    """Return a chart as a page of HTML that needs no network."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(printable(chart.alt))}</title>\n<style>\n{_page_rules(chart)}\n{rules()}</style></head>\n"
        f"<body>\n{responsive(chart)}\n</body></html>\n"
    )


def rules() -> str:
    """Return the style rules of a page with charts: their size, the drawing for the screen's width, light and dark."""
    return (
        ".memcalc-chart { width: 100%; height: auto }\n.memcalc-narrow { display: none }\n"
        f"@media screen and (max-width: {_NARROW}) {{\n"
        ".memcalc-wide { display: none }\n.memcalc-narrow { display: block }\n}\n"
        f"{dark_rules()}"
    )


def dark_rules() -> str:
    """Return the style rules that turn a chart's colours into those for a dark page, on screens that ask for it."""
    shades = {*COMPONENTS.values(), *ROLES.values(), *SERIES, *INK.values(), *MOODS.values()}
    result = "".join(  # without an ancestor: markers are matched apart from the picture that uses them
        f'[style*="{kind}: {shade.light}"], [{kind}="{shade.light}"] {{ {kind}: {shade.dark} !important }}\n'
        for shade in sorted(shades)
        for kind in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme: dark) {{\n{result}}}\n"


def _standalone(chart: Chart) -> str:
    """Return the whole file, with its natural size and both sets of colours."""
    width, height = (round(96 * inches) for inches in chart.size)
    text = inline(chart).replace("<svg ", f'<svg width="{width}" height="{height}" ', 1)
    head, bracket, rest = text.partition("</title>")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}{bracket}<style>\n{dark_rules()}</style>{rest}\n'


def _page_rules(chart: Chart) -> str:
    page_, text = INK["page"], INK["text"]
    return (
        ":root { color-scheme: light dark }\n"
        f"body {{ margin: 2rem auto; max-width: {chart.size[0]:.4g}in; padding: 0 1rem; background: {page_.light}; "
        f"color: {text.light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ body {{ background: {page_.dark}; color: {text.dark} }} }}"
    )


def _drawn(chart: Chart, form: str, *, narrow: bool = False) -> bytes:
    """Let Matplotlib draw; without its state, so that a program's own figures stay as they are."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("chart", chart.name, _ABSENT) from None
    stream = io.BytesIO()
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    with mpl.rc_context(_LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ")  # SVG is read with the reader's fonts, which may well have it
        figure = Figure(figsize=chart.narrow if narrow else chart.size)
        chart.draw(figure)
        legible(figure)
        figure.savefig(stream, format=form, dpi=_DPI, metadata=undated[form])
    return stream.getvalue()


def _add_tips(root: ET.Element, tips: Mapping[str, str]) -> None:
    """Give parts their words: shown by a browser where the pointer rests, and read aloud."""
    for part in root.iter():
        text = tips.get(part.get("id", ""))
        if text is not None:
            title = ET.Element(f"{{{_SVG}}}title")
            title.text = printable(text)
            part.insert(0, title)
            part.set("class", "memcalc-part")
            part.set("data-part", part.get("id", ""))
