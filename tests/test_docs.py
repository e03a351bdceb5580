"""What the documents show is what the program does: commands, outputs, options, Python examples, files and links.

Run as a script, this file writes the outputs and the tables of options anew.

A ``bash`` block is run line by line where a line begins with ``memcalc``. In a ``console`` block, ``$ memcalc …`` is
run and the text below it is compared, apart from the elapsed time. Words after the language say more: ``exit=1`` is the
expected exit code, ``lines=9`` shows the first nine lines alone, ``file=gpus/mine.toml`` writes the block to that file
of the folder in which the page's commands run.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner
from words import MOST, count, counts

from memcalc import catalog
from memcalc.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CLI_PAGE = ROOT / "docs" / "cli.md"
JOBS, PRESETS = ("plan", "estimate", "explain"), ("models", "gpus", "nodes")
PLAN_ALONE = tuple(
    f"| `--{name}`"
    for name in ("top", "objective", "critical-batch", "tokens", "why", "recipe", "save", "rank", "all", "to", "write")
)
SEARCHED = ("| `--beyond`",)
DRAWN = ("| `--chart`", "| `--timeline`")
FOLDED = ("| `--fold`", "| `--only`")
COMMANDS: Any = typer.main.get_command(app)
WIDTH = "100"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INVERSE = ("max", "min")
BOTH = ("plan", "diff", "ladder", "report", "ui")
ASKING = (*INVERSE, "check", "diff", "estimate", "explain", "ladder", "report", "triage", "ui")
ELAPSED = re.compile(r"(?:(?<= fit, )|(?<= replayed, ))[\d.,]+ (?:s|ms|µs)(?=;)")
TABLE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    marks: dict[str, str]
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines that run the program."""
        prefix = "$ memcalc " if self.language == "console" else "memcalc "
        lines = self.text.splitlines() if self.language in {"bash", "console"} else []
        return [line.removeprefix("$ ") for line in lines if line.startswith(prefix)]

    @property
    def code(self) -> int:
        """The exit code that the page states."""
        return int(self.marks.get("exit", 0))


def blocks(page: str) -> Iterator[Block]:
    for match in BLOCK.finditer(page):
        yield Block(match[1], dict(re.findall(r"(\w+)=(\S+)", match[2])), match[3])


def write_files(page: str, folder: Path) -> None:
    """Write the files that a page shows, and those examples that it links to: scripts, logs and snapshots."""
    for name in re.findall(r"\]\((examples/(?:[\w.]+|[\w/.-]+\.(?:log|pickle)))\)", page):
        (folder / Path(name).name).write_bytes((ROOT / "docs" / name).read_bytes())
    for block in blocks(page):
        if "file" in block.marks:
            path = folder / block.marks["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


KNOWN: dict[tuple[str, str], Any] = {}


def run(command: str, folder: Path, page: str = "") -> Any:
    """Run a command of a page once: two tests read what it says."""
    if (page, command) not in KNOWN or not page or "--output" in command or "--save" in command:
        KNOWN[page, command] = _run(command, folder)
    return KNOWN[page, command]


def _run(command: str, folder: Path) -> Any:
    env = {"COLUMNS": WIDTH, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config"), "NO_COLOR": "1",
           "LC_ALL": "C.UTF-8"}  # fmt: skip
    with mock.patch("memcalc.ui.app.serve", _served):
        return CliRunner().invoke(app, shlex.split(command)[1:], env=env, prog_name="memcalc")


def _served(link: str, *, port: int, opens: bool, announce: Callable[[str], None]) -> None:
    """Say what a server would, and stop at once."""
    assert isinstance(link, str)
    assert isinstance(opens, bool)
    announce(f"http://127.0.0.1:{port}/")


def shown(block: Block, folder: Path, page: str = "") -> str:
    """Return what a console block should say: each command, and the beginning of its output."""
    text = ""
    for command in block.commands:
        lines = [line.rstrip() for line in run(command, folder, page).output.rstrip().splitlines()]
        most = int(block.marks.get("lines", len(lines)))
        text += "\n".join([f"$ {command}", *lines[:most], *(["…"] if most < len(lines) else [])]) + "\n"
    return text


def masked(text: str) -> str:
    return ELAPSED.sub("TIME", text)


def row(option: Any) -> str:
    """Return the table's row of one option."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f"`{option.metavar}`"
    text = f"| {names} | {value} | {option.help} |".replace("N|", "N\\|").replace("NAME|FILE|", "NAME\\|FILE\\|")
    return text.replace("FILE|P50", "FILE\\|P50")


def options(command: str) -> list[Any]:
    """Return a command's options; those of post-training, which others have too, stand in the table of rl alone."""
    found = _options(command)
    roles = {o.name for o in _options("rl")} - {o.name for o in _options("estimate")} if command in BOTH else set()
    return [o for o in found if o.name not in roles]


def _options(command: str) -> list[Any]:
    return [o for o in COMMANDS.commands[command].params if o.param_type_name == "option" and not o.hidden]


def table(command: str) -> str:
    """Return the table of a command's options; of an inverse question's, those that plan does not have."""
    shared = {row(option) for option in options("plan")} if command in ASKING else set()
    new = [option for option in options(command) if row(option) not in shared]
    rows = [re.sub(r"(?<=\d)\|(?=\d)", r"\\|", row(option)) for option in new]
    return "\n".join(["| option | value | meaning |", "| --- | --- | --- |", *rows, ""])


def filled(page: str, folder: Path) -> str:
    """Return a page with its outputs and its tables of options made anew."""

    def block(match: re.Match[str], page: str = page) -> str:
        old = Block(match[1], dict(re.findall(r"(\w+)=(\S+)", match[2])), match[3])
        if old.language != "console" or not old.commands:
            return match[0]
        new = shown(old, folder, page.partition("\n")[0])
        return match[0] if masked(new) == masked(old.text) else f"```{match[1]}{match[2]}\n{new}```"

    page = BLOCK.sub(block, page)
    return TABLE.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", page)


RUN = pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.name, marks=[] if path.name == "README.md" else [pytest.mark.slow]) for path in PAGES],
)
"""Every page, the README's commands among the fast tests."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@RUN
def test_commands_run(path: Path, folder: Path) -> None:
    page = path.read_text(encoding="utf-8")
    write_files(page, folder)
    for block in blocks(page):
        for command in block.commands:
            result = run(command, folder, page.partition("\n")[0])
            assert result.exit_code == block.code, f"{command}\n{result.output}"


@RUN
def test_outputs_are_current(path: Path, folder: Path) -> None:
    """`python tests/test_docs.py` writes them."""
    page = path.read_text(encoding="utf-8")
    write_files(page, folder)
    assert masked(filled(page, folder)) == masked(page)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_examples_run(path: Path, folder: Path) -> None:
    page = path.read_text(encoding="utf-8")
    write_files(page, folder)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    examples = "\n".join(block.text for block in blocks(page) if block.language in {"python", "pycon"})
    parsed = doctest.DocTestParser().get_doctest(examples, {}, path.name, str(path), 0)
    assert doctest.DocTestRunner(optionflags=flags, verbose=False).run(parsed).failed == 0
    assert not any(block.language == "python" for block in blocks(page)), "an example is pycon, so that it runs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Links to files of the repository, and to headings of their pages."""
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", path.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://")):
            continue
        name, _, heading = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        assert not heading or heading in anchors(file), target


def anchors(path: Path) -> set[str]:
    """Return the names that a page's headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", COMMANDS.commands)
def test_every_command_has_its_part_and_an_example(command: str) -> None:
    page = CLI_PAGE.read_text(encoding="utf-8")
    assert f"## {command}\n" in page
    assert any(line.startswith(f"memcalc {command}") for block in blocks(page) for line in block.commands)


@pytest.mark.parametrize(("command", "like"), [*((c, JOBS[0]) for c in JOBS[1:]), *((c, PRESETS[0]) for c in PRESETS)])
def test_commands_that_share_a_table_have_the_same_options(command: str, like: str) -> None:
    """One table for jobs and one for presets; how plans are ranked and listed is for plan alone, pictures differ."""
    own, shared = ({row(option) for option in options(name)} for name in (command, like))
    assert all(extra.startswith((*DRAWN, *FOLDED)) for extra in own - shared)
    assert all(extra.startswith((*PLAN_ALONE, *SEARCHED, *DRAWN)) for extra in shared - own)


@pytest.mark.parametrize("command", INVERSE)
def test_inverse_questions_take_the_options_of_plan(command: str) -> None:
    own, shared = ({row(option) for option in options(name)} for name in (command, "plan"))
    assert all(extra.startswith(PLAN_ALONE) for extra in shared - own)


def test_every_page_can_be_found_from_the_tour() -> None:
    """By links alone, as a repository viewer shows the pages; the site's navigation is held by tests/test_site.py."""
    found, left = set(), {ROOT / "docs" / "index.md"}
    while left:
        path = left.pop()
        found.add(path)
        links = re.findall(r"\]\(([^)\s#:]+\.md)", BLOCK.sub("", path.read_text(encoding="utf-8")))
        left |= {(path.parent / link).resolve() for link in links} - found
    alone = {ROOT / "docs" / f"{page}.md" for page in ("changelog", "contributing", "readme")}
    assert {path for path in PAGES if path not in found} == alone, (
        "three pages are the site's, of files that are linked to"
    )


def test_the_tour_takes_five_minutes() -> None:
    """Words at 200 a minute; outputs are looked at, not read."""
    tour = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert len(BLOCK.sub("", tour.partition("## Next")[0]).split()) < 5 * 200


def test_few_enough_words_are_written_by_hand() -> None:
    """`python tests/words.py` counts them, page by page."""
    assert sum(count.by_hand for count in counts()) <= MOST


def test_what_is_written_by_hand_is_counted() -> None:
    """Prose and tables by hand count; what a script writes, fenced blocks, comments and addresses do not."""
    prose = "# Two words\n\nSee [this page](there.md). - `--tp 2`\n\n| a | table |\n| --- | --- |\n"
    rest = "<!-- options: plan -->\n| an | option |\n<!-- end -->\n```bash\nmemcalc plan\n```\n<!-- a remark -->\n"
    assert count("docs/a.md", prose + rest).by_hand == 9, "Two words See this page --tp 2 a table"
    assert count("docs/accuracy.md", prose + rest).by_hand == 7, "its tables are a script's"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_headings_begin_with_one_title_and_skip_no_level(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    levels = [
        len(marks)
        for marks in re.findall(
            r"^(#+) ", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
        )
    ]
    assert levels[1:].count(1) == 0
    assert levels[:1] == ([] if "```{include}" in text else [1])
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "docs/index.md"])
def test_presets_are_counted_right(name: str) -> None:
    counts = [len(catalog.names(kind)) for kind in ("model", "gpu", "node")]
    said = "{} models, {} GPUs and {} nodes".format(*counts)
    assert said in " ".join((ROOT / name).read_text(encoding="utf-8").split())


if __name__ == "__main__":
    for page_path in PAGES:
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            source = page_path.read_text(encoding="utf-8")
            write_files(source, Path(place))
            page_path.write_text(filled(source, Path(place)), encoding="utf-8")
            os.chdir(ROOT)
