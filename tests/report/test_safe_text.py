"""Names that a user did not write come out as what they are: no link, no formula, no text turned around."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import memcalc
from memcalc.files import plain_cell
from memcalc.report import of_estimate, render
from memcalc.report.palette import printable

TURNED = "a\u202egpj.exe\u2066b\u200f"


def test_text_that_turns_the_text_around_it_reaches_no_page() -> None:
    assert not set(printable(TURNED)) & set("\u202e\u2066\u200f")


@pytest.mark.parametrize("form", ["rich", "plain", "markdown", "html", "latex", "svg"])
def test_the_name_of_a_model_is_text_in_every_format(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(
        f'name = "[x](javascript:alert) {TURNED}"\nn_layers = 2\nhidden = 64\nheads = 4\nffn = 128\nvocab = 512\n'
        'max_positions = 4096\nsource = "[x](javascript:alert)"\n',
        encoding="utf-8",
    )
    answer = memcalc.estimate(model=str(path), gpu="a100-40g")
    text = render(of_estimate(answer), form)
    assert not set(text) & set("\u202e\u2066\u200f")
    if form == "markdown":
        assert "](" not in text.replace(r"]\(", "")


@pytest.mark.parametrize("text", ["=1+2", "@SUM(A1)", "+1+2", "-1+2", "\t=1", "-cmd|' /C calc'!A0"])
def test_no_cell_is_a_formula(text: str) -> None:
    stream = io.StringIO()
    csv.writer(stream).writerow([plain_cell(text)])
    assert next(csv.reader(io.StringIO(stream.getvalue())))[0][0] == "'"


@pytest.mark.parametrize("text", ["-3.5", "+2", "-1,024", "-", "1e-5", "-2%", "llama", ""])
def test_numbers_and_names_stay_as_they_are(text: str) -> None:
    assert plain_cell(text) == text
