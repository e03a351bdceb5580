"""How the documentation becomes a site: `sphinx-build -W -n docs build/site`. Nothing is fetched while it is built.

The pages are plain Markdown, which a repository viewer shows as well. What only the site needs stands here and in
``_ext``: the navigation, formulas as MathML, and pages for the source files that are linked to.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

from memcalc import __version__  # noqa: E402
from memcalc.report.palette import BLUE, INK  # noqa: E402

project = "memcalc"
version = release = __version__
project_copyright = "the authors of memcalc, Apache-2.0"
root_doc = "index"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "mathml",
    "navigation",
    "records",
    "repository",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_*", "examples"]

navigation = {
    "index": {
        "Start": ["The tour <self>", "README <readme>", "howto/fit-*", "howto/70b-*", "howto/[!a]*"],
        "Commands": [
            "planning",
            "preflight",
            "limits",
            "ladder",
            "diff",
            "export",
            "triage",
            "guard",
            "probe",
            "serving",
            "post-training",
            "ui",
            "report",
            "charts",
        ],
        "Trust": ["accuracy", "evidence", "myths", "comparison", "reliability"],
        "Reference": ["cli", "presets", "modules", "python", "reference/*", "formulas", "glossary", "schemas"],
        "Develop": ["architecture", "howto/add-*", "contributing", "changelog"],
    },
    "preflight": {"": ["integrations/README", "traps", "formats/*"]},
    "integrations/README": {"": ["integrations/*/README"]},
    "probe": {"": ["calibration"]},
}
"""For a page, what stands below it in the navigation, by caption; a name may be a pattern, and have a title."""
repository_pages = {"readme": "README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}
"""Pages that include a file of the repository's root, whose links start there."""

nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(collections\.abc|os|pathlib)\..*|Given|Listener|(memcalc\.(sweeps\.run|journal)\.)?Progress")
]
"""Types of the standard library, and names that a docstring explains."""
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True, "exclude-members": "model_config"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"memcalc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": BLUE.light,
        "color-brand-content": BLUE.light,
        "color-background-primary": INK["page"].light,
        "color-foreground-primary": INK["text"].light,
    },
    "dark_css_variables": {
        "color-brand-primary": BLUE.dark,
        "color-brand-content": BLUE.dark,
        "color-background-primary": INK["page"].dark,
        "color-foreground-primary": INK["text"].dark,
    },
}
