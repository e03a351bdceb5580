"""What people see: bars that do not lie, widths that hold, colours that can be read, text that can be read aloud."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from colours import contrast
from report_records import REPORTS, make_estimate, make_plans, term
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from memcalc import report
from memcalc.cli import output as screen
from memcalc.cli.app import app
from memcalc.errors import InputError, UnknownNameError
from memcalc.report import check, palette, progress
from memcalc.report.explain import folding
from memcalc.report.palette import ASCII, FULL
from memcalc.report.progress_bar import Drawn
from memcalc.report.stacked_bar import bar_lines, letters, scale_of, spans
from memcalc.report.tables import Bar, Branch, Document, Leaf, Table, Tree
from memcalc.report.terminal import draw
from memcalc.results.check import CheckFinding, Severity
from memcalc.results.names import component_name
from memcalc.units import GIB

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
NAMES = tuple(palette.COMPONENTS)


def bar(*sizes: float, capacity: float = 40, **more: float) -> Bar:
    parts = tuple((name, int(size * GIB)) for name, size in zip(NAMES, sizes, strict=False))
    return Bar(parts, int(capacity * GIB), **{name: int(size * GIB) for name, size in more.items()})


def rows(made: Bar, width: int = 80, *, colour: bool = False, ascii_only: bool = False) -> list[str]:
    signs = ASCII if ascii_only else FULL
    return [line.plain for line in bar_lines(made, width, signs, colour=colour)]


# ----------------------------------------------------------------------------------------------------------------- bars


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("colour", [False, True])
def test_the_limit_stands_at_the_capacity(width: int, colour: bool) -> None:
    """79 cells of 80 are data: a GPU of 40 of 80 GiB ends after 39.5 of them, and one that holds all at the end."""
    fits = rows(bar(10, 5), width, colour=colour)[0]
    over = rows(bar(50, 30), width, colour=colour)[0]
    assert [len(fits), len(over)] == [width, width]
    assert fits.index("┃") == width - 1
    assert abs(over.index("┃") - 40 / 80 * (width - 1)) <= 0.5


def test_what_lies_beyond_the_limit_is_drawn_and_told() -> None:
    line, below, *legend = rows(bar(30, 30))
    before, beyond = line.split("┃")
    assert set(beyond) == {"G"}
    assert abs(len(beyond) / len(before) - 20 / 40) < 0.03
    assert "limit 40.00 GiB" in below
    assert "over by 20.00 GiB" in " ".join(legend)


def test_a_bar_that_fits_by_a_hair_ends_before_the_limit_and_one_byte_more_behind_it() -> None:
    capacity = 40 * GIB
    inside, outside = (rows(Bar((("parameters", capacity + more),), capacity))[0] for more in (0, 1))
    assert inside.endswith("P┃")
    assert outside.endswith("┃P")


def test_small_parts_are_at_least_a_cell_and_the_sum_stays() -> None:
    made = bar(20, 0.001, 0, 0.002, 0.001, 10)
    scale = scale_of(made, 80)
    for each in (1, 8):
        wide = spans(made, scale, each)
        assert [count >= each for count in wide] == [True, True, False, True, True, True]
        assert sum(wide) == round(30.004 / 40 * scale.cells * each)


def test_widths_follow_sizes_to_an_eighth_of_a_cell() -> None:
    made = bar(7.3, 11.1, 3.7, 9.9)
    scale = scale_of(made, 80)
    for count, (_, size) in zip(spans(made, scale, 8), made.parts, strict=True):
        assert abs(count / 8 / scale.cells - size / made.capacity) <= 1 / 8 / scale.cells


def test_the_range_is_a_bracket_with_its_figures() -> None:
    _, below, *_ = rows(bar(10, 10, low=16, high=30))
    assert re.fullmatch(r" +16\.0 ├─+┼─+┤ 30\.0 +(limit )?40\.00 GiB ┃", below)
    left, end, right = (below.index(sign) for sign in "├┼┤")
    assert [round(place / 79 * 40) for place in (left, end, right)] == [16, 20, 30]


@pytest.mark.parametrize("colour", [False, True])
def test_a_legend_names_every_part_and_holds_its_width(colour: bool) -> None:
    made = bar(5, 4, 3, 2, 1, 0.5, 0.25, margin=2, low=10, high=44)
    for width in (40, 80):
        _, _, *legend = rows(made, width, colour=colour)
        assert all(cell_len(line) <= width for line in legend)
        assert all(
            f"{name} " in " ".join(legend)
            for name in (*map(component_name, NAMES), "kept free 2.00", "headroom 22.25", "limit 40.00")
        )


def test_letters_are_unique() -> None:
    names = (*NAMES, "page cache", "pinned", "rest", "9", "…")
    assert len(set(letters(names))) == len(names)


def test_ascii_bars_are_ascii() -> None:
    for made in (bar(10, 5, low=9, high=20, margin=3), bar(50, 30, low=60, high=90)):
        assert "".join(rows(made, ascii_only=True)).isascii()


# ---------------------------------------------------------------------------------------------------- colours and width


@pytest.mark.parametrize("page", ["#ffffff", "#000000", palette.INK["page"].dark])
def test_moods_and_parts_are_seen_on_any_terminal(page: str) -> None:
    """3:1 is what WCAG 2.2 asks of bold text and of graphics; a light part has its letter besides."""
    assert [name for name, colour in palette.ANYWHERE.items() if contrast(colour, page) < 3] == []
    for shade in palette.COMPONENTS.values():
        assert contrast(palette.words_on(shade).light, shade.light) >= 4.5
    assert all(contrast("#ffffff", shade.light) >= 4.5 for shade in palette.MOODS.values())


@pytest.mark.parametrize("name", REPORTS)
def test_colour_changes_no_figure(name: str) -> None:
    plain, coloured = (report.render(REPORTS[name], "rich", width=80, colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    figures = [sorted(re.findall(r"\d+\.\d+", ESCAPE.sub("", text))) for text in (plain, coloured)]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("form", ["rich", "plain"])
def test_ascii_holds_its_width_and_says_products(name: str, form: str) -> None:
    text = report.render(REPORTS[name], form, width=80, ascii_only=True)
    assert text.isascii()
    if form == "rich":
        assert [line for line in text.splitlines() if len(line) > 80 and "  memcalc " not in line] == []


def test_a_dot_in_a_formula_is_a_product_and_never_a_minus() -> None:
    made = make_estimate(terms=(term("parameters", "shards", 3.2).model_copy(update={"formula": "w · ⌈P / N⌉"}),))
    shown = report.of_terms(made, folding("none"))
    assert "= w * ceil(P / N)" in report.render(shown, "rich", ascii_only=True)
    assert "formula: w times ceil(P / N)" in report.render(shown, "plain")


@pytest.mark.parametrize(
    ("env", "terminal", "wanted"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_when_there_is_colour(
    env: dict[str, str], terminal: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdout", stream)
    assert screen.coloured() is wanted


@pytest.mark.parametrize(
    ("env", "encoding", "wanted"),
    [
        ({"LC_ALL": "C"}, "utf-8", True),
        ({"LANG": "POSIX"}, "utf-8", True),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, "utf-8", False),
        ({"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}, "utf-8", False),
        ({}, "utf-8", False),
        ({}, "latin-1", True),
        ({}, "ascii", True),
    ],
)
def test_when_only_ascii_can_be_shown(
    env: dict[str, str], encoding: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert screen.ascii_only() is wanted


# ------------------------------------------------------------------------------------------------------ plans and trees


def test_narrow_plans_keep_the_speed_and_what_they_are_listed_for() -> None:
    tagged = tuple(plan.model_copy(update={"special": (f"tag {plan.rank}",)}) for plan in make_plans().plans)
    for width in (60, 80, 120):
        text = report.render(report.of_plans(make_plans(plans=tagged)), "rich", width=width)
        lines = [line for line in text.splitlines() if re.match(r" *\d  ", line)]
        assert [line.split()[0] for line in lines] == ["1", "2", "3"]
        assert all(re.search(r"\d\d\.\d{1,2}  +\d{4} \(\d{4}–\d{4}\)", line) for line in lines)
        assert all(f"tag {rank}" in " ".join(text.split()) for rank in (1, 2, 3))


def tree(**folded: bool) -> Tree:
    leaves = (
        Leaf("big", "3 GiB", ("= a · b", "a = 1", "9 bytes [1]"), share="30"),
        Leaf("odd", "2 GiB", ("= c",), aside=True),
    )
    return Tree(
        (Branch("first", "3 GiB", leaves, share="30", **folded),), Table("", (), ()), ("a paper",), aside="elsewhere"
    )


def test_a_folded_branch_says_its_total_and_the_number_of_its_terms() -> None:
    told = draw(Document((tree(folded=True),), Table("", (), ())), 60, False)
    assert re.match(r"first +2 terms +3 GiB +██▍····· +30%\n", told)
    assert "big" not in told
    opened = draw(Document((tree(),), Table("", (), ())), 60, False)
    assert opened.index("big") < opened.index("= a · b   a = 1") < opened.index("elsewhere") < opened.index("odd")
    assert "= c" not in opened
    assert "[1] a paper" in opened


def test_what_can_be_folded() -> None:
    others = term("activations", "block inputs", 9.5, "forward_end"), term("activations", "kept", 1, "backward_first")
    made = make_estimate(terms=(term("parameters", "shards", 3.2), *others))
    everything = report.render(report.of_terms(made, folding("none")), "rich", width=100)
    default = report.render(report.of_terms(made), "rich", width=100, details=True)
    nothing = report.render(report.of_terms(made, folding("all")), "rich", width=100)
    one = report.render(report.of_terms(made, folding(only="activations")), "rich", width=100)
    assert all("block inputs" in text for text in (everything, default, one))
    assert "block inputs" not in nothing
    assert everything.count("parameters * bytes / ranks") == 3
    assert default.count("parameters * bytes / ranks") == 2
    assert one.count("parameters * bytes / ranks") == 1
    assert "activations  2 terms " in nothing
    for words in ({"fold": "actvations"}, {"only": "all"}):
        with pytest.raises(UnknownNameError, match="one or several"):
            folding(**words)
    with pytest.raises(InputError, match="without other names"):
        folding("all,buffers")


def test_branches_come_to_the_device_figure() -> None:
    shown = next(block for block in report.of_terms(make_estimate()).document.blocks if isinstance(block, Tree))
    sizes = {branch.name: float(branch.figure.split()[0]) for branch in shown.branches}
    whole = sizes.pop("total")
    assert sizes["allocator cache"] == 0.5
    missing = 3.1 + 1.75  # gradients and buffers of the example have no terms
    assert whole == pytest.approx(sum(sizes.values()) + missing, abs=0.02)


def test_html_folds_and_markdown_has_every_branch() -> None:
    shown = report.of_terms(make_estimate(), folding("optimizer,others"))
    text = report.render(shown, "html")
    assert text.count("<details") == 3
    assert text.count('<details class="component" open>') == 2
    assert "exp_avg" in text.split("<details")[2] + text.split("<details")[3]
    assert "| allocator cache" in report.render(shown, "markdown")


# -------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("name", REPORTS)
def test_plain_text_says_every_figure_and_draws_nothing(name: str) -> None:
    text = report.render(REPORTS[name], "plain")
    shown = report.render(REPORTS[name], "rich", width=200, details=True)
    drawn = set("█▏▎▍▌▋▊▉░├└│┃┤┼·×→") & set(text)
    assert drawn == set()
    told = set(re.findall(r"\d+(?:\.\d+)?", text))
    assert [figure for figure in re.findall(r"\d+(?:\.\d+)?", shown) if figure not in told] == []
    assert "  " not in text.replace("  memcalc", "")


@pytest.mark.parametrize("name", REPORTS)
def test_a_picture_is_one_file_with_every_line(name: str) -> None:
    text = report.render(REPORTS[name], "svg", width=80)
    found = ET.fromstring(text)  # noqa: S314 - made a line before
    assert re.findall(r"https?:[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "@media screen and (prefers-color-scheme: dark)" in text
    assert "@" not in re.sub(r"@media|@font", "", re.sub(r"<text.*?</text>", "", text))
    said = " ".join("".join(found.itertext()).split()).replace("\xa0", " ")
    assert "6.74B" in said
    leads = {"estimate": "explain", "explain": "-v", "nothing": "what would fit"}
    assert leads.get(name, name) in said
    wide = float(found.attrib["viewBox"].split()[2])
    ends = [
        float(one.attrib["x"]) + float(one.attrib["textLength"])
        for one in found.iter()
        if "textLength" in one.attrib and (one.text or "").strip()
    ]
    assert max(ends) + 12 <= wide


def test_the_picture_of_the_readme_is_what_the_program_draws(tmp_path: Path) -> None:
    """`memcalc plan --model 7b --gpu a100-40g --force --output docs/images/plan-terminal.svg` draws it anew."""

    def words(path: Path) -> str:
        found = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - the program's own
        return re.sub(r"fit, [\d.]+ (s|ms);", "fit, TIME;", " ".join("".join(found.itertext()).split()))

    drawn = tmp_path / "plan.svg"
    result = CliRunner().invoke(app, ["plan", "--model", "7b", "--gpu", "a100-40g", "--output", str(drawn)])
    assert result.exit_code == 0, result.stderr
    root = Path(__file__).resolve().parents[2]
    assert words(root / "docs" / "images" / "plan-terminal.svg") == words(drawn)
    searched = re.search(r"of ([\d,]+) strategies fit", words(drawn))
    assert searched is not None
    for page in ("README.md", "docs/evidence.md"):
        assert searched[1] in (root / page).read_text(encoding="utf-8"), page


def test_the_variable_names_a_format_for_the_screen_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MEMCALC_FORMAT", "plain")
    said = CliRunner().invoke(app, ["gpus", "a100-80g"]).output
    assert "capacity: 79.15 GiB" in said
    CliRunner().invoke(app, ["gpus", "a100-80g", "--output", str(tmp_path / "gpu.md")])
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8").count("|") > 10


# ------------------------------------------------------------------------------------------------------------- progress


def test_quick_work_draws_no_bar_and_long_work_one_with_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Any, ...]] = []

    class Recorded(Drawn):
        def show(self, state: Any) -> None:
            drawn.append((state.done, state.jobs))

    monkeypatch.setattr("memcalc.report.progress_bar.Drawn", Recorded)
    now = iter([0.0, 0.1, 5.0, 5.0, 5.1, 5.2])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now, 6.0))
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress.bar(console, noun="plan", unit="strategies", patience=1.0) as listen:
        listen(progress._Counted(1, 9))
        assert drawn == []
        listen(progress._Counted(2, 9))
    assert drawn == [(2, 9)]


JOB = "--model 7b --gpu a100-80g --gpus 8"
FAILED = "triage docs/examples/train.log --model llama-3-8b --gpu h100 --gpus 8 --zero 3 --seq-len 8192"
SCREENS = (
    "ladder --model 7b --gpu a100-40g --gpus 8",
    "plan --model 7b --gpu a100-40g", "plan --model 7b --gpu h100 --gpus 8", "plan --model 70b --gpu h100 --gpus 64",
    f"estimate {JOB}", f"explain {JOB}", f"max micro-batch {JOB}", "min gpus --model 70b --gpu a100-80g",
    f"ladder {JOB}", f"diff recompute=none recompute=full {JOB}", f"{FAILED} --micro-batch 2 --recompute selective-ops",
)  # fmt: skip


@pytest.mark.usefixtures("answers_once")
@pytest.mark.parametrize("line", SCREENS)
def test_a_common_answer_fits_a_screen(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty lines of 80 columns; `-v` has all of it."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    shown = [
        CliRunner().invoke(app, [*line.split(), *more], env={"COLUMNS": "80"}).stdout.rstrip("\n").splitlines()
        for more in ((), ("-v",))
    ]
    assert len(shown[0]) <= 20
    assert max(map(len, shown[0])) <= 80
    assert len(shown[1]) > len(shown[0])


def test_notes_give_way_to_errors_and_warnings_on_a_screen() -> None:
    """A file with many findings: none that is an error or a warning is left out, and what is left out is counted."""

    def finding(severity: Severity, line: int) -> CheckFinding:
        return CheckFinding(severity=severity, code="MC001", field="", line=line, message="m", suggestion="")

    severities: tuple[Severity, ...] = ("note", "warning", "note", "error", "note")
    given = [finding(severity, line) for line, severity in enumerate(severities, 1)]
    assert [item.line for item in check.foremost(tuple(given))] == [1, 2, 4]
    warnings = [finding("warning", line) for line in range(1, 6)]
    assert [item.line for item in check.foremost((finding("note", 9), *warnings))] == [1, 2, 3, 4, 5]
