"""What a shell can work out by itself: sums of whole numbers, and the conditions of `[`, `[[` and `((`."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.convert.shell_values import Word

__all__ = ["held", "summed"]

_ALLOWED = re.compile(r"[0-9+\-*/%() <>=!&|]{1,300}")
_LARGEST = 10**13
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDERS = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def summed(text: str, variables: Mapping[str, Word]) -> int | None:
    """Return the value of a sum, product or comparison of whole numbers; None where it is not known.

    The shell divides towards zero, unlike Python; nothing here is negative, so that both agree.
    """

    def digits(match: re.Match[str]) -> str:
        found = variables.get(match[1])
        known = found and not found.unknown and re.fullmatch(r"\s*\d{1,12}\s*", found.text)
        return f"{int(found.text)}" if found and known else "?"

    filled = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", digits, text.replace("\n", " ").strip()[:1000])
    if not _ALLOWED.fullmatch(filled):
        return None
    plain = re.sub(r"\b0+(?=\d)", "", filled).replace("/", "//").replace("&&", " and ").replace("||", " or ")
    try:
        return _evaluated(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _evaluated(node: object) -> int:
    number = -1
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        number = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        number = int(_OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right)))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ORDERS:
        number = int(_ORDERS[type(node.ops[0])](_evaluated(node.left), _evaluated(node.comparators[0])))
    elif isinstance(node, ast.BoolOp):
        parts = [bool(_evaluated(part)) for part in node.values]
        number = int(all(parts) if isinstance(node.op, ast.And) else any(parts))
    if not 0 <= number < _LARGEST:
        raise ValueError
    return number


def held(words: Sequence[Word]) -> bool | None:
    """Return whether the words of a test hold; None where only a run can tell.

    A variable that is not set is empty for `-z` and `-n`, as it is for `${NAME:-…}`.
    """
    for mark, empty in (("||", False), ("&&", True)):
        parts = _parted(words, mark)
        if len(parts) > 1:
            found = [held(part) for part in parts]
            if (not empty) in found:
                return not empty
            return None if None in found else empty
    if len(words) > 1 and words[0].text == "!":
        inner = held(words[1:])
        return None if inner is None else not inner
    if len(words) > 2 and words[0].text == "(" and words[-1].text == ")":
        return held(words[1:-1])
    return _single(words)


def _parted(words: Sequence[Word], mark: str) -> list[Sequence[Word]]:
    """Cut words at a mark, `-o` and `-a` being the old names of the two."""
    names = {mark, {"||": "-o", "&&": "-a"}[mark]}
    parts: list[Sequence[Word]] = []
    depth = begin = 0
    for at, word in enumerate(words):
        depth += (word.text == "(") - (word.text == ")")
        if word.text in names and not depth and begin < at < len(words) - 1:
            parts.append(words[begin:at])
            begin = at + 1
    return [*parts, words[begin:]]


def _single(words: Sequence[Word]) -> bool | None:
    texts = [word.plain.text for word in words]
    if len(words) == 1:
        return _filled(words[0])
    if len(words) == 2 and texts[0] in ("-n", "-z", "-v"):
        filled = _filled(words[1])
        return None if filled is None or texts[0] == "-v" else filled == (texts[0] == "-n")
    if len(words) != 3 or any(word.unknown and not word.no_argument for word in words):
        return None
    left, how, right = texts
    if how in ("=", "==", "!="):
        if any(letter in right for letter in "*?[") and len(right) > 64:
            return None
        return fnmatch.fnmatchcase(left, right) == (how != "!=")
    if how in _NUMBERS:
        number = summed(f"{left}{_NUMBERS[how]}{right}", {})
        return None if number is None else bool(number)
    return None


def _filled(word: Word) -> bool | None:
    if word.unset:
        return False
    return bool(word.plain.text) or (None if word.unknown else False)
