"""An answer's table as a workbook of Excel: figures as numbers, all else as text, so that no name becomes a formula."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime
from importlib.util import find_spec

from memcalc.files import OutputError
from memcalc.report.tables import Report, Table

FORM, LIBRARY = "xlsx", "xlsxwriter"
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII)
_DIGITS = 15
"""Digits that Excel keeps of a number (support.microsoft.com, Excel specifications and limits); more stay text."""
_ROWS, _COLUMNS, _LETTERS = 1_048_576, 16_384, 32_767
"""What a sheet and a cell hold, from the same page; beyond it XlsxWriter leaves out or cuts."""
_WIDEST = 40
"""Width of a column at the most, in letters."""
_MADE = datetime(2000, 1, 1, tzinfo=UTC)
"""The same date in all files, so that the same answer is the same file."""
_ALIGNED: dict[bool, dict[str, str | int]] = {True: {"align": "right"}, False: {"indent": 1}}
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "�")


def require(name: str | None) -> None:
    """Raise OutputError unless a workbook can be written to the file `name`."""
    if name is None:
        raise OutputError("format", FORM, "a workbook is no text for a screen: give --output FILE.xlsx")
    if find_spec(LIBRARY) is None:
        raise OutputError("output", name, "Excel needs XlsxWriter (pip install 'memcalc[excel]'); .csv does not")


def workbook(report: Report, name: str) -> bytes:
    """Return the table that stands for an answer as a workbook with one sheet; `name` is the file's, for refusals."""
    import xlsxwriter

    table, stream = report.document.data, io.BytesIO()
    _fits(table, name)
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
    with xlsxwriter.Workbook(stream, options) as book:
        book.set_properties({"created": _MADE.replace(tzinfo=None)})
        sheet, text = book.add_worksheet(), book.add_format({"indent": 1})  # apart from a number that ends before it
        heads = {right: book.add_format({"bold": True, **_ALIGNED[right]}) for right in _ALIGNED}
        sheet.freeze_panes(1, 0)
        sheet.set_landscape()
        sheet.repeat_rows(0)
        for index, heading in enumerate(table.headings):
            cells = [_text(row[index]) for row in table.rows]
            sheet.set_column(index, index, min(_WIDEST, max(map(len, [heading, *cells])) + 3))
            sheet.write_string(0, index, _text(heading), heads[table.columns[index].right])
            for line, cell in enumerate(cells, 1):
                if table.columns[index].right and _is_number(cell):
                    sheet.write_number(line, index, float(cell))
                elif cell:
                    sheet.write_string(line, index, cell, text)
    return stream.getvalue()


def _is_number(cell: str) -> bool:
    """Return whether a cell is a figure that Excel keeps whole.

    >>> [_is_number(cell) for cell in ("3.5", "+1e-05", "1 × 16", "", "1234567890123456")]
    [True, True, False, False, False]
    """
    return bool(_NUMBER.fullmatch(cell)) and sum(map(str.isdigit, cell.partition("e")[0])) <= _DIGITS


def _text(cell: str) -> str:
    return cell.translate(_CONTROL).encode(errors="backslashreplace").decode()


def _fits(table: Table, name: str) -> None:
    longest = max((len(_text(cell)) for row in table.rows for cell in row), default=0)
    counts = ((len(table.rows) + 1, _ROWS, "rows"), (len(table.columns), _COLUMNS, "columns"))
    for count, most, what in (*counts, (longest, _LETTERS, "letters in a cell")):
        if count > most:
            raise OutputError("output", name, f"a sheet of Excel holds {most:,} {what}, not {count:,}; .csv holds all")
