"""Sizes and counts as people write them: parsed into integers, printed back.

Binary units (KiB, MiB, GiB, TiB) are powers of 1024; decimal units (KB, MB, GB, TB) are powers of 1000;
counts (k, M, B, T) are powers of 1000, but k and M of a sequence's tokens are powers of 1024, as in a context of 128k.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal

from memcalc.errors import InputError

KB, MB, GB, TB = 1000, 1000**2, 1000**3, 1000**4
KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_LONGEST_TEXT = 64
_LARGEST = 2**63 - 1  # what a signed 64-bit column of the grid can hold

_BYTE_UNITS = {
    "": 1, "b": 1, "byte": 1, "bytes": 1,
    "kb": KB, "mb": MB, "gb": GB, "tb": TB, "pb": 1000**5,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "pib": 1024**5,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_COUNT_NOUNS = {"", "token", "tokens", "sequence", "sequences", "parameter", "parameters", "params"}
_PRINTED_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "KB": KB, "MB": MB, "GB": GB, "TB": TB}

_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+"  # commas only between groups of three, so that "1,5" is refused, not read as 15
_SIZE = re.compile(
    rf"((?:{_GROUPED}|[0-9]+(?:_[0-9]+)*)(?:\.[0-9]+)?(?:e\+?[0-9]{{1,2}})?)\s*([a-z]*)\s*([a-z]*)", re.ASCII
)
_BYTES_ALLOWED = "must be a size such as '79.15 GiB', '80 GB' or a number of bytes, from 0 to 2^63 - 1"
_COUNT_ALLOWED = "must be a whole number such as 4096, '4k', '4_000_000' or '4M tokens', from 0 to 2^63 - 1"

_TOKENS_ALLOWED = "must be a whole number of tokens such as 4096, '4k' (4 x 1024) or '128k'"


def parse_bytes(value: object, field: str = "size") -> int:
    """Return the size `value` [bytes]; text carries a unit, a bare number is bytes, K/M/G alone are binary.

    >>> parse_bytes("79.15 GiB"), parse_bytes("80GB"), parse_bytes("512")
    (84986665370, 80000000000, 512)
    """
    if isinstance(value, str):
        number, unit, noun = _split(value, field, _BYTES_ALLOWED)
        if unit in _BYTE_UNITS and not noun:
            return _whole(number * _BYTE_UNITS[unit], value, field, _BYTES_ALLOWED)
        raise InputError(field, value, _BYTES_ALLOWED)
    return _number(value, field, _BYTES_ALLOWED)


def parse_count(value: object, field: str = "count") -> int:
    """Return the count `value` [1]; k, M, B and T are powers of 1000, and a noun such as "tokens" may follow.

    >>> parse_count("4M tokens"), parse_count("4_000_000"), parse_count("4k"), parse_count("1.5M")
    (4000000, 4000000, 4000, 1500000)
    """
    return _counted(value, field, _COUNT_UNITS, _COUNT_ALLOWED)


def parse_tokens(value: object, field: str = "seq-len") -> int:
    """Return the tokens `value` [tokens] of a sequence; k and M are powers of 1024, as in a context of 128k.

    >>> parse_tokens("4k"), parse_tokens("128k tokens"), parse_tokens("1M"), parse_tokens("4000")
    (4096, 131072, 1048576, 4000)
    """
    return _counted(value, field, _TOKEN_UNITS, _TOKENS_ALLOWED)


def parse_token_batch(value: object, field: str, *, binary: bool) -> int:
    """Return tokens of a batch [tokens]; k and M are powers of 1024 where ``binary``, else of 1000.

    >>> parse_token_batch("4M tokens", "batch", binary=True), parse_token_batch("4M tokens", "batch", binary=False)
    (4194304, 4000000)
    """
    return _counted(value, field, _COUNT_UNITS | _TOKEN_UNITS if binary else _COUNT_UNITS, _COUNT_ALLOWED)


def _counted(value: object, field: str, units: Mapping[str, int], allowed: str) -> int:
    if not isinstance(value, str):
        return _number(value, field, allowed)
    number, unit, noun = _split(value, field, allowed)
    if unit in _COUNT_NOUNS and not noun:
        unit = ""
    if unit not in units or noun not in _COUNT_NOUNS:
        raise InputError(field, value, allowed)
    exact = number * units[unit]
    if exact != exact.to_integral_value():
        raise InputError(field, value, allowed)
    return _whole(exact, value, field, allowed)


def _split(text: str, field: str, allowed: str) -> tuple[Decimal, str, str]:
    matched = _SIZE.fullmatch(text.strip().lower()) if len(text) <= _LONGEST_TEXT else None
    if matched is None:
        raise InputError(field, text, allowed)
    digits, unit, noun = matched.groups()
    return Decimal(digits.replace("_", "").replace(",", "")), unit, noun


def _whole(exact: Decimal, value: object, field: str, allowed: str) -> int:
    if exact > _LARGEST:
        raise InputError(field, value, allowed)
    return int(exact.to_integral_value(ROUND_HALF_EVEN))


def _number(value: object, field: str, allowed: str) -> int:
    """Accept an int, or a float that is a whole number; True is an int to Python, never to a user."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(field, value, allowed)
    if not 0 <= value <= _LARGEST or value != int(value):  # NaN fails the first comparison
        raise InputError(field, value, allowed)
    return int(value)


def format_bytes(size: float, unit: str = "GiB", digits: int = 2) -> str:
    """Return `size` [bytes] in `unit`.

    >>> format_bytes(85899345920), format_bytes(1536, "KiB"), format_bytes(512, "B")
    ('80.00 GiB', '1.50 KiB', '512 B')
    """
    if unit not in _PRINTED_UNITS:
        raise InputError("unit", unit, f"must be one of {', '.join(_PRINTED_UNITS)}", _PRINTED_UNITS)
    return f"{size:,.0f} B" if unit == "B" else f"{size / _PRINTED_UNITS[unit]:,.{digits}f} {unit}"


def format_count(count: float) -> str:
    """Return `count` [1] with at most three significant digits and a letter.

    >>> format_count(6738415616), format_count(124439808), format_count(4096), format_count(512)
    ('6.74B', '124M', '4.1k', '512')
    """
    size = abs(count)
    for scale, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if size >= scale * 0.9995:  # 999,500 rounds to three digits as 1M, not as 1000k
            return f"{_three_digits(count / scale)}{letter}"
    return _three_digits(count)


def _three_digits(value: float) -> str:
    whole_digits = len(str(int(abs(value))))
    text = f"{value:.{max(0, 3 - whole_digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign, of which the minus is no hyphen; what rounds to nothing has none.

    Files for other programs take the hyphen of ASCII in its place.

    >>> signed(1.5), signed(-0.25), signed(-0.001), signed(38.04, 0)
    ('+1.50', '−0.25', '0.00', '+38')
    """
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if text.strip("+-0.") else text[1:]


def format_seconds(seconds: float) -> str:
    """Return a duration `seconds` [s] in the unit that suits it.

    >>> format_seconds(0.0123), format_seconds(4.2), format_seconds(0.0000021)
    ('12.3 ms', '4.2 s', '2.1 µs')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"
