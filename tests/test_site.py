"""The documentation as a site: it builds without a warning, every link in it leads somewhere, nothing is fetched.

Whether other people's addresses still answer is not asked here, because tests use no network: that they are whole, and
https, is. `sphinx-build -b linkcheck docs build/links` asks them.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import memcalc
from memcalc import errors

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[1] / "docs"
TAG = re.compile(r"<([a-z]\w*)\b([^>]*)>")
ATTRIBUTE = re.compile(r'\s(id|href|src|srcset|poster|data)="([^"]*)"')
FETCHING = {"script", "link", "img", "iframe", "source", "video", "audio", "object", "embed"}
OUTSIDE = ("https:", "http:", "mailto:", "//", "data:", "javascript:")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CONTRIBUTING.md tells; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(folder / "doctrees")]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder / "html")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder / "html"


@cache
def page(path: Path) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """Return a page's ids, and each address in it with the tag that has it."""
    ids, addresses = set(), []
    for tag, rest in TAG.findall(path.read_text(encoding="utf-8")):
        for name, value in ATTRIBUTE.findall(rest):
            if name == "id":
                ids.add(html.unescape(value))
            else:
                addresses.append((tag, html.unescape(value)))
    return frozenset(ids), tuple(dict.fromkeys(addresses))


def addresses(site: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield page, tag and address, of the whole site."""
    for path in sorted(site.rglob("*.html")):
        for tag, address in page(path)[1]:
            yield path, tag, address


def lost(path: Path, address: str) -> str:
    """Return why an address of the site leads nowhere; empty where it leads somewhere."""
    name, _, anchor = address.partition("#")
    target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return f"{path.name} → {address}: no such file"
    if anchor and target.suffix == ".html" and unquote(anchor) not in page(target)[0]:
        return f"{path.name} → {address}: no such anchor"
    return ""


def test_every_link_and_image_leads_somewhere(site: Path) -> None:
    """Pages, anchors, images, downloads, scripts and styles."""
    inside = [(path, address) for path, _, address in addresses(site) if not address.startswith(OUTSIDE)]
    assert len(inside) > 1000
    assert [why for path, address in inside if (why := lost(path, address))] == []


def test_nothing_is_fetched_from_a_network(site: Path) -> None:
    """No script, style, font or picture of another site, in pages and in style sheets."""
    assert [(path.name, a) for path, tag, a in addresses(site) if tag in FETCHING and a.startswith(OUTSIDE[:4])] == []
    sheets = [sheet.read_text(encoding="utf-8") for sheet in site.rglob("*.css")]
    assert len(sheets) > 3
    assert [
        found for sheet in sheets for found in re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//\S+)", sheet)
    ] == []


def test_other_sites_are_named_whole(site: Path) -> None:
    """By https, a host with a dot, and no sign that the sentence around it got into the address."""
    outside = {address for _, tag, address in addresses(site) if tag == "a" and address.startswith(("http", "//"))}
    assert outside
    for address in outside:
        parts = urlsplit(address)
        assert parts.scheme == "https", address
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), address
        assert not re.search(r"[\s<>\"`|\\^{}]|[.,;:]$", address), address


def test_every_page_is_in_the_navigation(site: Path) -> None:
    sidebar = (site / "index.html").read_text(encoding="utf-8").partition('class="sidebar-tree"')[2]
    linked = set(re.findall(r'href="([^"#]+)"', sidebar.partition("</div>")[0])) | {"index.html"}
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert pages <= linked | {path.replace("#", "index.html") for path in linked}


def test_every_page_can_be_searched(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert [name for name in names if f'"{name}"' not in index] == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    ids, _ = page(site / "reference" / "functions.html")
    assert [name for name in memcalc.__all__ if f"memcalc.{name}" not in ids] == []


def test_the_reference_has_every_error(site: Path) -> None:
    ids, _ = page(site / "reference" / "errors.html")
    named = [name for name in vars(errors) if name.endswith("Error")]
    assert [name for name in named if f"memcalc.errors.{name}" not in ids] == []


def test_types_of_the_reference_are_links(site: Path) -> None:
    """What a function returns leads to the fields of that record."""
    links = {address for _, address in page(site / "reference" / "functions.html")[1]}
    for record in ("Estimate", "Plans", "Inverse", "Check", "SavedPlan", "Swept", "Calibrated", "Triage"):
        assert f"answers.html#{record.lower()}" in links


def test_formulas_are_drawn_by_the_browser(site: Path) -> None:
    """Each formula of the page is MathML: none is left as source, and no script is needed."""
    source = (DOCS / "formulas.md").read_text(encoding="utf-8")
    built = (site / "formulas.html").read_text(encoding="utf-8")
    assert built.count("<math ") == source.count("$`") > 50
    assert "$<code" not in built
    assert "mathjax" not in built.lower()
