"""Links from a page to a file or folder of the repository lead to a page of the site that shows it."""

from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
LEXERS = {".py": "python", ".toml": "toml", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash",
          ".lua": "lua", ".md": "markdown", ".slurm": "bash"}  # fmt: skip
FOLDER = "source"
"""Of the site, in which those pages lie."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - {home}</title>
<link rel="stylesheet" href="{up}_static/pygments.css">
<link rel="stylesheet" href="{up}_static/source.css">
</head>
<body>
<script>document.body.dataset.theme = localStorage.getItem("theme") || "auto";</script>
<nav><a href="{up}index.html">{home}</a></nav>
<h1>{name}</h1>
{body}
</body>
</html>
"""


class RepositoryLinks(SphinxTransform):
    """Points links that leave docs/ to pages of this site, before MyST takes them for downloads."""

    default_priority = 800

    def apply(self, **_: Any) -> None:
        """Look at every link that MyST has found no page for."""
        for node in list(self.document.findall(nodes.Element)):
            if node.get("reftype") != "myst" or node["reftarget"].startswith("#"):
                continue
            if node.get("refdomain") is None:
                self.point(node, *node["reftarget"].partition("#")[::2])
            elif node["reftarget"] not in self.env.found_docs:  # a Markdown file outside docs/, by its whole path
                self.point(node, f"{node['reftarget']}.md", node["reftargetid"])

    def point(self, node: nodes.Element, name: str, heading: str | None) -> None:
        """Replace a link by one to a page: of the documentation, or one that shows the file or folder."""
        docname = self.env.docname
        base = ROOT if docname in self.config.repository_pages else Path(self.env.doc2path(docname)).parent
        path = (base / name).resolve()
        if not path.exists() or not path.is_relative_to(ROOT) or path.suffix == ".pickle":
            return
        page = self.page_of(path)
        if page:
            new: nodes.Element = addnodes.pending_xref(
                refdoc=docname, reftype="myst", refexplicit=True, refdomain="doc", reftarget=page,
                reftargetid=heading or None,
            )  # fmt: skip
        else:
            wanted(self.env).setdefault(docname, set()).add(path)
            new = nodes.reference(refuri=address(docname, path), internal=True)
        new += node.children
        node.replace_self(new)

    def page_of(self, path: Path) -> str | None:
        """Return the page that is made from a file, if one is."""
        included = {ROOT / file: page for page, file in self.config.repository_pages.items()}
        page = included.get(path) or self.env.path2doc(str(path))
        return page if page in self.env.found_docs else None


def address(docname: str, path: Path) -> str:
    """Return where the page of a file or folder is, as seen from a page."""
    return "../" * docname.count("/") + page_name(path) + ".html"


def page_name(path: Path) -> str:
    """Return the name, without its ending, of the page that shows a file or folder."""
    return f"{FOLDER}/{path.relative_to(ROOT).as_posix()}{'/index' if path.is_dir() else ''}"


def wanted(env: BuildEnvironment) -> dict[str, set[Path]]:
    """Return what each page links to."""
    if not hasattr(env, "repository_files"):
        env.repository_files = {}  # type: ignore[attr-defined]
    return env.repository_files  # type: ignore[attr-defined, no-any-return]


def forget(_app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """Drop what a page linked to, before it is read again."""
    wanted(env).pop(docname, None)


def files_in(folder: Path) -> list[Path]:
    """Return what a folder shows."""
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__" and not path.name.startswith("."))


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Write a page for each file and folder that is linked to, and for those within.

    Without the theme's navigation, which would take longer than all the rest: there are hundreds.
    """
    if error is not None or app.builder.format != "html":
        return
    left = sorted(set().union(*wanted(app.env).values()))
    done: set[Path] = set()
    while left:
        path = left.pop()
        if path not in done:
            done.add(path)
            left += files_in(path) if path.is_dir() else []
            place = app.outdir / f"{page_name(path)}.html"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(page(app, path), encoding="utf-8")


def page(app: Sphinx, path: Path) -> str:
    """Return the page of a file or folder."""
    name = path.relative_to(ROOT).as_posix()
    body = listing(path) if path.is_dir() else shown(app, path)
    up = "../" * page_name(path).count("/")
    return PAGE.format(name=escape(name), body=body, up=up, home=escape(app.config.html_title))


def listing(folder: Path) -> str:
    """Return links to what is in a folder."""
    ends = {path.name: "/index.html" if path.is_dir() else ".html" for path in files_in(folder)}
    return "<ul>" + "".join(f'<li><a href="{name}{end}">{name}</a></li>' for name, end in ends.items()) + "</ul>"


def shown(app: Sphinx, path: Path) -> str:
    """Return a file's text with its lines numbered; each can be linked to, as #L-12. Of a binary one, its size."""
    lexer = LEXERS.get(path.suffix, "text")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return f"<p>A binary file of {path.stat().st_size:,} bytes.</p>"
    return str(
        app.builder.highlighter.highlight_block(text, lexer, linenos="inline", anchorlinenos=True, lineanchors="L")
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_config_value("repository_pages", {}, "env", dict)
    app.add_transform(RepositoryLinks)
    app.connect("env-purge-doc", forget)
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
