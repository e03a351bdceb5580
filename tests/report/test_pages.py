"""Tables for documents: at most eight columns, what they leave out in text; and the same rows as a workbook."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from report_records import REPORTS, make_plan, make_plans
from typer.testing import CliRunner, Result

from memcalc import report
from memcalc.cli.app import app
from memcalc.files import OutputError
from memcalc.report import workbook
from memcalc.report.tables import Column, Document, Report, Table, header, pages

MOST = 8
SPREAD = make_plans(
    plans=(
        make_plan(1, 33.96, 2896.4, framework="megatron", zero=1, dp=4, tp=8, sp=True, pp=4, attention="sdpa"),
        make_plan(2, 21.77, 2410.0, framework="megatron", zero=1, dp=4, tp=8, sp=True, pp=4, loss="chunked"),
    )
)
SHEET = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
pytest.importorskip("xlsxwriter")
pytestmark = pytest.mark.usefixtures("answers_once")


class Rows(HTMLParser):
    """The rows of all tables, each the list of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Begin a row or a cell."""
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.inside = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        """End a cell."""
        self.inside = self.inside and tag not in {"td", "th"}

    def handle_data(self, data: str) -> None:
        """Take the text of a cell."""
        if self.inside:
            self.rows[-1][-1] += data.strip()


def rows_of(text: str, form: str) -> list[list[str]]:
    if form == "html":
        parser = Rows()
        parser.feed(text)
        return parser.rows
    mark, end = (r"(?<!\\)\|", "|") if form == "markdown" else (r"(?<!\\)&", r"\\")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line.removesuffix(end).removeprefix("|") for line in lines if line.endswith(end)]
    return [[cell.strip() for cell in re.split(mark, line)] for line in lines]


@pytest.mark.parametrize("form", ["markdown", "latex", "html"])
@pytest.mark.parametrize("name", ["spread", *REPORTS])
def test_no_table_of_a_document_has_more_than_eight_columns(name: str, form: str) -> None:
    rows = rows_of(report.render(report.of_plans(SPREAD) if name == "spread" else REPORTS[name], form), form)
    assert rows
    assert max(map(len, rows)) <= MOST


@pytest.mark.parametrize("form", ["markdown", "latex", "html"])
def test_plan_says_its_parallelism_whole_and_what_differs_below(form: str) -> None:
    text = report.render(report.of_plans(SPREAD), form)
    (row,) = (row for row in rows_of(text, form) if row[0].lstrip("\\") == "#2")
    assert row[1].replace(r"\allowbreak{}", "") == "dist-opt TP8+SP PP4 1f1b"
    assert row[5:7] == ["21.77", "2410 (2140–2570)"]
    assert row[7].endswith("16.8")  # 2410.0 / 2896.4 - 1
    below = text.replace("\\", "")
    assert "attention: sdpa (#1) · flash (#2)" in below
    assert "loss: standard (#1) · chunked (#2)" in below


def test_wide_table_is_told_in_parts_without_loss() -> None:
    rows = tuple(tuple(f"r{row}c{column}" for column in range(20)) for row in range(2))
    table = Table("Wide", tuple(Column(f"c{index}") for index in range(20)), rows)
    parts = [part for part in pages(Document((table,), table)) if isinstance(part, Table)]
    assert [len(part.columns) for part in parts] == [8, 8, 6]
    assert all(part.columns[0].title == "c0" for part in parts)
    cells = [cell for row in range(2) for part in parts for cell in part.rows[row][1:]]
    assert cells == [cell for row in rows for cell in row[1:]]


def cells_of(path: Path) -> list[list[tuple[str, str]]]:
    """Return the cells of the first sheet: kind, and text or number."""
    with zipfile.ZipFile(path) as file:
        texts, sheet = (
            ET.fromstring(file.read(f"xl/{name}.xml"))  # noqa: S314 just written
            for name in ("sharedStrings", "worksheets/sheet1")
        )
    strings = ["".join(item.itertext()) for item in texts]
    pane = sheet.find(f".//{SHEET}pane")
    assert pane is not None
    assert (pane.get("state"), pane.get("ySplit")) == ("frozen", "1")
    assert sheet.find(f".//{SHEET}f") is None
    rows = []
    for row in sheet.iter(f"{SHEET}row"):
        values = [(cell.get("t", "n"), cell.findtext(f"{SHEET}v", "")) for cell in row]
        rows.append([(kind, strings[int(value)] if kind == "s" else value) for kind, value in values])
    return rows


def test_workbook_has_the_columns_of_csv_and_figures_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "plans.xlsx"
    path.write_bytes(workbook.workbook(REPORTS["plan"], "plans.xlsx"))
    first, second, *_ = cells_of(path)
    assert [text for _, text in first] == REPORTS["plan"].document.data.headings
    headings = [text for _, text in first]
    assert second[0] == ("n", "1")
    assert second[headings.index("peak [GiB]")] == ("n", "33.96")
    assert second[headings.index("framework")][0] == "s"


def test_no_name_becomes_a_formula_a_link_or_a_number(tmp_path: Path) -> None:
    names = ("=1+2", "@SUM(A1)", "{=1}", "http://example.org", "007", "\x1b[31m\ud800")
    table = Table("T", header("name | size >"), tuple((name, "1e3") for name in names))
    path = tmp_path / "names.xlsx"
    path.write_bytes(workbook.workbook(Report(Document((), table), {}), "names.xlsx"))
    cells = cells_of(path)
    assert [row[0] for row in cells[1:6]] == [("s", name) for name in names[:5]]
    assert all(row[1] == ("n", "1000") for row in cells[1:])


def test_what_a_cell_does_not_hold_is_refused_or_stays_text(tmp_path: Path) -> None:
    table = Table("T", header("name | size >"), (("x", "12345678901234567"),))
    path = tmp_path / "digits.xlsx"
    path.write_bytes(workbook.workbook(Report(Document((), table), {}), "digits.xlsx"))
    assert cells_of(path)[1][1] == ("s", "12345678901234567")
    long = Table("T", header("name"), (("x" * 32_768,),))
    with pytest.raises(OutputError, match="32,767 letters"):
        workbook.workbook(Report(Document((), long), {}), "long.xlsx")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words, prog_name="memcalc")


def test_command_writes_a_workbook_whole_and_the_same_twice(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.xlsx", "b.xlsx")]
    assert [run("gpus", "--output", str(file)).exit_code for file in files] == [0, 0]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"a.xlsx", "b.xlsx"}
    assert run("gpus", "--output", str(files[0])).exit_code == 2  # there already


def test_workbook_is_refused_on_a_screen() -> None:
    found = run("gpus", "--format", "xlsx")
    assert found.exit_code == 2
    assert "give --output FILE.xlsx" in found.stderr


def test_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "find_spec", lambda _: None)
    found = run("gpus", "--output", str(tmp_path / "gpus.xlsx"))
    assert found.exit_code == 2
    assert "pip install 'memcalc[excel]'" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_counts_of_gpus_come_first() -> None:
    counts = [make_plan(rank, 30 + rank, 2000).model_copy(update={"gpus": 4 * rank}) for rank in (1, 2)]
    rows = rows_of(report.render(report.of_plans(make_plans(plans=tuple(counts))), "markdown"), "markdown")
    assert [row[0] for row in rows[:4] if not row[0].startswith("-")] == ["GPUs", "4", "8"]


def test_library_is_imported_for_a_workbook_alone() -> None:
    code = "import sys, memcalc.report.workbook, memcalc.cli.output; sys.exit('xlsxwriter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Latex:
    """A small reader of what stands in a LaTeX document: environments in pairs, braces in pairs, tables in cells."""

    def __init__(self, text: str) -> None:
        self.tables: list[tuple[str, list[list[str]]]] = []
        verbatim = re.compile(r"\\begin\{verbatim\}\n.*?\n\\end\{verbatim\}", re.DOTALL)
        self.prose = verbatim.sub("", text)
        self._pairs()
        for columns, body in re.findall(r"\\begin\{tabular\}\{(.*?)\}\n(.*?)\\end\{tabular\}", self.prose, re.DOTALL):
            rules = re.sub(r"\\(top|mid|bottom)rule\b|\\hline\b", "", body)
            rows = [row for row in re.split(r"(?<!\\)\\\\(?=\n)", rules) if row.strip()]
            kinds = re.sub(r">\{\\raggedright\\arraybackslash\}p\{[\d.]+em\}", "l", columns)
            self.tables.append((re.sub(r"@\{\}|\|| ", "", kinds), [re.split(r"(?<!\\)&", row) for row in rows]))

    def _pairs(self) -> None:
        """Refuse an environment or a brace that is opened and not closed, or the other way round."""
        open_names: list[str] = []
        for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", self.prose):
            if kind == "begin":
                open_names.append(name)
            else:
                assert open_names.pop() == name
        assert open_names == []
        depth = 0
        for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", self.prose):
            depth += 1 if brace == "{" else -1
            assert depth >= 0
        assert depth == 0


def latex_of(line: str) -> tuple[Latex, list[list[str]]]:
    """A command's LaTeX, and the cells of the same tables in Markdown."""
    texts = [run(*line.split(), "--format", form).stdout for form in ("latex", "markdown")]
    return Latex(texts[0]), rows_of(texts[1], "markdown")


TABLES = (
    "plan --model 7b --gpu a100-40g --gpus 8",
    "plan --model 7b --gpu a100-40g --gpus 1 --offload none",
    "ladder --model 7b --gpu a100-80g --gpus 8",
    "diff recompute=none recompute=full,micro_batch=2 --model 7b --gpu a100-80g --gpus 8",
    "max seq-len --model llama-3-8b --gpu h100 --gpus 8",
    "explain --model 7b --gpu a100-40g --gpus 8",
)


@pytest.mark.parametrize("line", TABLES, ids=lambda line: line.partition(" ")[0])
def test_a_latex_table_is_whole(line: str) -> None:
    """Each row has a cell for each declared column, and the figures of Markdown; nothing special stands bare."""
    found, rows = latex_of(line)
    assert found.tables
    for columns, cells in found.tables:
        assert set(columns) <= set("lrc")
        assert {len(row) for row in cells} == {len(columns)}
    bare = re.search(r"(?<!\\)[#%$_]|(?<!\\)\^|~", re.sub(r"\\textbackslash\{\}", "", found.prose))
    assert bare is None, found.prose[max(0, bare.start() - 40) : bare.end() + 20]
    figures = re.compile(r"\d+\.\d+")
    ours = sorted(figures.findall(" ".join(cell for _, cells in found.tables for row in cells for cell in row)))
    theirs = sorted(figures.findall(" ".join(cell for row in rows for cell in row)))
    assert set(ours) == set(theirs)
    assert ours == theirs or line.startswith("explain")  # which has each source once, by number


WIDE = (
    "explain --model llama-3-70b --gpu h100 --gpus 64 --framework megatron --tp 8 --pp 2",
    "explain --model 8b --gpu a100-40g --gpus 2 --framework deepspeed --zero 3 --offload optimizer,params",
)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no TeX here")
@pytest.mark.parametrize("line", [*TABLES, *WIDE])
def test_latex_compiles_within_the_width_of_a_page(line: str, tmp_path: Path) -> None:
    """By pdflatex itself: no error, and nothing that it calls wider than article's line by more than a letter."""
    body = run(*line.split(), "--format", "latex").stdout
    head = r"\documentclass{article}\usepackage{booktabs,array}\usepackage[T1]{fontenc}\usepackage[utf8]{inputenc}"
    page = (head, r"\begin{document}", body, r"\end{document}", "")
    (tmp_path / "page.tex").write_text("\n".join(page))
    command = ["pdflatex", "-interaction=nonstopmode", "-no-shell-escape", "page.tex"]
    log = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout.decode("latin-1")
    assert re.findall(r"^!.*", log, re.MULTILINE) == []
    assert [float(points) for points in re.findall(r"hbox \(([\d.]+)pt too wide", log) if float(points) > 5] == []


@pytest.mark.parametrize("line", [*TABLES, *WIDE, "gpus"], ids=lambda line: line.partition(" ")[0])
def test_a_latex_table_is_no_wider_than_a_page(line: str) -> None:
    """By an em of cmr7 and cmr8 (7.97 and 8.5 pt, a digit has half): article's 345 pt, where no word alone is wider."""
    text = run(*line.split(), "--format", "latex").stdout
    begin = r"\\(footnotesize|scriptsize).*?\\begin\{tabular\}\{@\{\}(.*?)@\{\}\}"
    tables = re.findall(rf"{begin}\n(.*?)\\end", text, re.DOTALL)
    assert tables
    for size, columns, body in tables:
        point, em = {"footnotesize": (8.5, 0.5), "scriptsize": (7.97, 0.5)}[size]
        plain = re.sub(r"\\(?:top|mid|bottom)rule|\\allowbreak\{\}|\\ensuremath|[{}]", "", body)
        rows = [row.replace("\\", "").split("&") for row in plain.split("\\\\\n") if row.strip()]
        kinds = re.findall(r"p\{([\d.]+)em\}|[lr]", re.sub(r">\{.*?\}", "", columns))
        cells = [max(len(row[index].strip()) for row in rows) for index in range(len(kinds))]
        widths = [float(broken) if broken else em * most for broken, most in zip(kinds, cells, strict=True)]
        assert point * sum(widths) + 6 * (len(kinds) - 1) <= 360


def test_the_reader_of_latex_refuses_what_is_not_whole() -> None:
    """A row short of a cell, and a brace or an environment left open, are seen."""
    body = "\\begin{{tabular}}{{lr}}\n\\toprule\na & b \\\\\n{} \\\\\n\\bottomrule\n\\end{{tabular}}"
    assert [len(row) for _, cells in Latex(body.format("c \\& d & e")).tables for row in cells] == [2, 2]
    assert [len(row) for _, cells in Latex(body.format("c \\& d")).tables for row in cells] == [2, 1]
    for text in (r"\textbf{x", r"x}", "\\begin{tabular}{l}\na \\\\\n"):
        with pytest.raises(AssertionError):
            Latex(text)


@pytest.mark.parametrize("line", TABLES, ids=lambda line: line.partition(" ")[0])
def test_a_workbook_has_each_cell_of_csv(line: str, tmp_path: Path) -> None:
    """Cell by cell, as a reader of the format's XML finds them; a figure is a number, and no cell is cut."""
    path = tmp_path / "table.xlsx"
    assert run(*line.split(), "--output", str(path)).exit_code in {0, 1}
    text = run(*line.split(), "--format", "csv").stdout
    wanted = list(csv.reader(io.StringIO(text)))
    sheet = grid_of(path)
    assert len(sheet) == len(wanted)
    for row, cells in zip(wanted, sheet, strict=True):
        for column, cell in enumerate(row):
            kind, value = cells.get(column, ("", ""))
            assert float(value) == float(cell) if kind == "n" else value == cell.removeprefix("'")
    for column, heading in enumerate(wanted[0]):
        filled = [row[column] for row in wanted[1:] if row[column]]
        if filled and all(re.fullmatch(r"[+-]?\d+(\.\d+)?(e-?\d+)?", cell) for cell in filled):
            kinds = {cells[column][0] for cells in sheet[1:] if column in cells}
            assert kinds == {"n"}, heading


def grid_of(path: Path) -> list[dict[int, tuple[str, str]]]:
    """Return the cells of each row of the first sheet by their columns: kind, and text or number."""
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        texts, sheet = (
            ET.fromstring(file.read(f"xl/{name}.xml"))  # noqa: S314 just written
            for name in ("sharedStrings", "worksheets/sheet1")
        )
    strings = ["".join(item.itertext()) for item in texts]
    rows = []
    for row in sheet.iter(f"{SHEET}row"):
        cells = {}
        for cell in row:
            letters = re.sub(r"\d", "", cell.get("r", ""))
            index = sum((ord(letter) - 64) * 26**power for power, letter in enumerate(reversed(letters))) - 1
            kind, value = cell.get("t", "n"), cell.findtext(f"{SHEET}v", "")
            cells[index] = (kind, strings[int(value)] if kind == "s" else value)
        rows.append(cells)
    return rows
