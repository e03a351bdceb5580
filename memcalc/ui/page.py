"""The page itself: a control for each option of a job, made from the table of options, and room for the answer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from memcalc import catalog
from memcalc._version import __version__
from memcalc.formulas.recompute import NAMES
from memcalc.posttraining.frameworks import TOOLKITS
from memcalc.posttraining.steps import PLACES
from memcalc.report.page import markup
from memcalc.report.page.markup import Html, el, join
from memcalc.specs.options import BY_NAME, COMMAND_LINE
from memcalc.specs.posttraining import RL_OPTIONS, RL_WORDS, TRAINING
from memcalc.specs.strict import PANELS, Option
from memcalc.ui.answers import LEFT_OPEN, ROLES_OPEN

_GPUS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_LENGTHS = tuple(size for power in range(9, 20) for size in (1 << power, 3 << (power - 1)))
_MICRO = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SLIDERS = {"gpus": _GPUS, "seq_len": _LENGTHS, "micro_batch": _MICRO}
"""Steps of the options that are dragged; every other value is typed."""
LABELS = {
    "model": "Model",
    "gpu": "GPU",
    "gpus": "GPUs",
    "seq_len": "Sequence length",
    "global_batch": "Global batch",
    "framework": "Framework",
    "zero": "ZeRO stage",
    "recompute": "Recompute",
    "micro_batch": "Micro-batch",
    "offload": "Offload",
    "precision": "Precision",
}
"""The options that stand in front, in their order."""
ROLES = {row.name: row for row in RL_OPTIONS}
ROLES["framework"] = ROLES["framework"]._replace(values=tuple(TOOLKITS))
"""Options of post-training by name; the framework has names to choose from."""
_FILES = {"calibration", "lengths"}
"""Options that name a file, or a distribution that is typed with care: they have no control."""
ROLE_LABELS = {
    "framework": "Framework",
    "prompt": "Longest prompt",
    "response": "Longest response",
    "prompts": "Prompts per step",
    "samples": "Responses each",
    "micro_tokens": "Tokens per micro",
    "utilization": "Utilization",
    "engine_tp": "Engine TP",
    "sleep": "Sleep level",
    "park": "Park",
    "logits": "Logits",
}
"""The options of post-training that stand in front, in their order."""
PLAIN = "pre-training or SFT"
"""What is said of a job without an algorithm of post-training."""


@cache
def page() -> str:
    """Return the page."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", "memcalc"),
        el("link", rel="icon", href="data:,"),
        el("style", Html(_style())),
    )
    skip = el("a", "Skip to the answer", href="#", class_="skip", id="skip")
    main = el("main", _controls(), _answer(), id="main")
    status = el("p", id="status", role="status", class_="status")
    body = el("body", skip, _header(), main, _footer(), status, el("script", Html(_script())))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


@cache
def policy() -> str:
    """Return the content security policy: no script but the page's own, which asks this server alone."""
    images = "img-src data:; connect-src 'self'; frame-ancestors 'none'"
    return f"{markup.policy_of(_script())}; {images}"


@cache
def _style() -> str:
    dark = markup.colours("dark")
    themes = f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
    light = f":root[data-theme=light]{{{markup.colours('light')}color-scheme:light}}\n"
    dark_rules = f":root[data-theme=dark]{{{dark}color-scheme:dark}}\n"
    return f"{markup.style()}\n{themes}{light}{dark_rules}{_read('ui.css')}"


@cache
def _script() -> str:
    return _read("ui.js")


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _header() -> Html:
    themes = (el("option", name) for name in ("auto", "light", "dark"))
    return el(
        "header",
        el("h1", "memcalc"),
        el(
            "div",
            _button("compare", "Compare", aria_pressed="false"),
            _button("copy-link", "Copy link"),
            el("a", "Report", id="report", href="#", target="_blank", rel="noopener", class_="copy"),
            _button("export", "Export"),
            el("label", "Theme ", el("select", *themes, id="theme")),
            class_="buttons",
        ),
    )


def _button(name: str, text: str, **attributes: str | bool) -> Html:
    return el("button", text, type="button", id=name, class_="copy", **attributes)


def _controls() -> Html:
    front = [_control(BY_NAME[name], label, _kind(name)) for name, label in LABELS.items()]
    front[3:3] = [_algorithm(), *(_control(ROLES[name], label, "roles") for name, label in ROLE_LABELS.items())]
    opened = {"data_open": LEFT_OPEN, "data_roles_open": ROLES_OPEN}
    listed = {name: " ".join(word.replace("_", "-") for word in options) for name, options in opened.items()}
    return el("form", *front, _more(), id="controls", aria_label="The job", autocomplete="off", **listed)


def _kind(name: str) -> str:
    """The kind of job that alone has an option; empty where both have it."""
    return "" if name in {*PLACES, *RL_WORDS, *TRAINING} - {"framework"} else "training"


def _algorithm() -> Html:
    named = (el("option", value) for value in ROLES["algorithm"].values)
    chosen = el(
        "select",
        el("option", PLAIN, value=""),
        *named,
        id="o-algorithm",
        data_option="algorithm",
        aria_describedby="e-algorithm",
    )
    return el("div", el("label", "Algorithm", for_="o-algorithm"), chosen, _problem("algorithm"), class_="control")


def _more() -> Html:
    rows = [row for row in COMMAND_LINE if row.name not in {*LABELS, *_FILES}]
    groups = []
    for panel in PANELS:
        listed = [_control(row, row.name.replace("_", " "), _kind(row.name)) for row in rows if row.panel == panel]
        if listed:
            kinds = {_kind(row.name) for row in rows if row.panel == panel}
            groups.append(el("fieldset", el("legend", panel), *listed, class_=_class("", kinds)))
    there = {*LABELS, *ROLE_LABELS, "algorithm", *(row.name for row in COMMAND_LINE)}
    roles = [_control(row, name.replace("_", " "), "roles") for name, row in ROLES.items() if name not in there]
    groups.append(el("fieldset", el("legend", "Post-training"), *roles, class_="only-roles"))
    return el("details", el("summary", "More options"), *groups, class_="more-options")


def _class(name: str, kinds: set[str]) -> str | None:
    """The classes of a control, or of several, that one kind of job alone has."""
    return " ".join(filter(None, (name, f"only-{min(kinds)}" if kinds in ({"training"}, {"roles"}) else ""))) or None


def _control(row: Option, label: str, only: str = "") -> Html:
    name = row.name.replace("_", "-")
    mark = "r-" if only == "roles" and row.name in BY_NAME else ""
    field, shown = f"o-{mark}{name}", _class("control", {only})
    if row.name in {"zero", "offload"}:
        kind = "radio" if row.name == "zero" else "checkbox"
        title = el("span", label, id=f"t-{name}", class_="label")
        boxes = el("div", *_choices(row, kind), role="group", aria_labelledby=f"t-{name}", class_="choices")
        return el("div", title, boxes, _problem(name), class_=shown)
    body = [el("label", label, for_=field), *_input(row, name, field), _problem(f"{mark}{name}")]
    return el("div", *body, class_=shown)


def _problem(name: str) -> Html:
    return el("span", class_="problem", id=f"e-{name}")


def _choices(row: Option, kind: str) -> Iterator[Html]:
    values = ("", *row.values) if kind == "radio" else row.values
    for value in values:
        box = el("input", type=kind, name=row.name, value=value, data_option=row.name.replace("_", "-"))
        yield el("label", box, el("span", value or "auto"))


def _input(row: Option, name: str, field: str) -> Iterator[Html]:
    described = f"e-{field[2:]}"
    if row.name in SLIDERS:
        steps = SLIDERS[row.name]
        yield el(
            "input", type="range", min="0", max=str(len(steps) - 1), step="1", data_steps=",".join(map(str, steps)),
            data_slides=name, aria_label=f"{LABELS[row.name]}, slider",
        )  # fmt: skip
    if row.name == "gpu":
        yield el("select", *(el("option", gpu) for gpu in _names("gpu")), id=field, data_option=name)
    elif row.kind == "flag" or (row.values and row.name != "also_train"):
        values = ("true", "false") if row.kind == "flag" else [value for value in row.values if value]
        options = (el("option", value) for value in values)
        blank = el("option", "auto", value="")
        yield el("select", blank, *options, id=field, data_option=name, aria_describedby=described)
    else:
        known = _known(row)
        listed = f"l-{name}" if known else "l-model" if row.completed_by == "models" else None
        yield el(
            "input", type="text", id=field, data_option=name, list=listed, spellcheck="false",
            title=None if row.name in LABELS else row.text, aria_describedby=described,
        )  # fmt: skip
        if known:
            yield el("datalist", *(el("option", value) for value in known), id=f"l-{name}")
    if row.name == "model":
        yield _paste()


def _known(row: Option) -> tuple[str, ...]:
    if row.completed_by and row.name not in ROLES:
        return tuple(_names(row.completed_by.removesuffix("s")))
    return NAMES if row.name == "recompute" else ()


def _names(kind: str) -> list[str]:
    return catalog.names(kind)  # type: ignore[arg-type]


def _paste() -> Html:
    text = "Paste a config.json, or drop a config file anywhere on the page."
    area = el("textarea", id="paste", rows="4", spellcheck="false", aria_label="config.json", placeholder="{ … }")
    browse = el("label", "Choose files ", el("input", type="file", id="files", multiple=True))
    return el("details", el("summary", "Your own model or config file"), el("p", text), area, browse, id="own")


def _answer() -> Html:
    remedy = el(
        "p", _button("fit", "Make it fit", hidden=True), " ", el("span", id="fitted", class_="small"), id="remedy"
    )
    plans = el(
        "section",
        el("h2", el("span", "Best plans", id="listed"), " ", el("span", id="count", class_="small")),
        el("div", id="plans", aria_live="off"),
        aria_label="Best plans",
    )
    return el(
        "section",
        el("div", el("div", id="verdict"), el("div", id="bar"), el("div", id="speed"), remedy, class_="now"),
        el("p", id="message", role="alert"),
        el("p", id="live", class_="unseen", aria_live="polite"),
        el("div", id="notice"),
        el("div", id="warnings", class_="small"),
        el("section", id="difference", aria_label="Comparison", hidden=True),
        plans,
        el("details", el("summary", "Every term"), el("div", id="terms"), id="every-term"),
        el("details", el("summary", "Assumed"), el("dl", id="assumed", class_="facts")),
        id="answer",
        aria_label="The answer",
        tabindex="-1",
    )


def _footer() -> Html:
    text = join("Made by memcalc ", __version__, ". Figures are predictions.")
    command = el("code", id="command")
    shown = el("pre", command, tabindex="0", role="region", aria_label="command line")
    return el("footer", el("div", shown, _button("copy-command", "Copy"), class_="code"), el("p", text))
