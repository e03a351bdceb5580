"""Sizes and counts: what is read, what is refused, what is printed."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError, shown
from memcalc.units import (
    GB,
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_tokens,
)

REFUSED = [
    True,
    False,
    None,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -0.5,
    1.5,
    2**63,
    10**5000,
    "",
    " ",
    "-1",
    "-1 GiB",
    "+1",
    "nan",
    "inf",
    "infinity",
    "1e400",
    "1e99 TiB",
    "0x10",
    "1,5 GiB",
    "1_",
    "_1",
    "1__0",
    "1.",
    ".5",
    "GiB",
    "1 GiB GiB",
    "1 parsec",
    "९",
    "٣ GiB",
    "1\x00",
    "9" * 65,
    "1" + " " * 64,
    [],
    {},
    b"1",
]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("79.15 GiB", 84_986_665_370),
        ("80GB", 80 * GB),
        ("80 gb", 80 * GB),
        ("512", 512),
        ("512B", 512),
        ("1 KiB", KIB),
        ("24G", 24 * GIB),
        ("40339 MiB", 40_339 * MIB),
        ("2TiB", 2 * TIB),
        ("1.5e3 MB", 1_500_000_000),
        (" 1,024 MiB ", GIB),
        ("81_559MiB", 81_559 * MIB),
        ("0", 0),
        (512, 512),
        (512.0, 512),
    ],
)
def test_parse_bytes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4M tokens", 4_000_000),
        ("4m", 4_000_000),
        ("4_000_000", 4_000_000),
        ("4,000,000", 4_000_000),
        ("4k", 4000),
        ("1.5M", 1_500_000),
        ("7B parameters", 7_000_000_000),
        ("0.5T tokens", 500_000_000_000),
        ("512 tokens", 512),
        ("128 sequences", 128),
        ("1e6", 1_000_000),
        (4096, 4096),
        (4096.0, 4096),
    ],
)
def test_parse_count(text: object, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4k", 4096), ("128k", 131_072), ("8K tokens", 8192), ("1M", 2**20), ("4000", 4000), (2048, 2048), ("1.5k", 1536)],
)
def test_k_of_tokens_is_1024_as_in_a_context_of_128k(text: object, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("value", REFUSED, ids=shown)
@pytest.mark.parametrize("parse", [parse_bytes, parse_count])
def test_what_is_no_size_is_refused_by_name(parse: object, value: object) -> None:
    with pytest.raises(InputError, match=r"^gpu-memory .*: must be "):
        parse(value, "gpu-memory")  # type: ignore[operator]


def test_a_fraction_of_a_token_is_refused() -> None:
    with pytest.raises(InputError):
        parse_count("1.0005k")


@pytest.mark.parametrize("parse", [parse_bytes, parse_count])
@given(text=st.text(max_size=80))
def test_no_text_raises_anything_else(parse: object, text: str) -> None:
    with contextlib.suppress(InputError):
        assert 0 <= parse(text) < 2**63  # type: ignore[operator]


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_a_whole_number_survives_both_parsers(number: int) -> None:
    assert parse_bytes(str(number)) == parse_bytes(number) == number
    assert parse_count(f"{number:_}") == parse_count(f"{number:,}") == number


@given(st.integers(min_value=0, max_value=10**15))
def test_what_is_printed_can_be_read_back(size: int) -> None:
    assert parse_bytes(format_bytes(size, "B")) == size
    assert abs(parse_bytes(format_bytes(size)) - size) <= 0.005 * GIB + 1


@pytest.mark.parametrize(
    ("size", "unit", "printed"),
    [
        (80 * GIB, "GiB", "80.00 GiB"),
        (80 * GB, "GB", "80.00 GB"),
        (84_986_665_370, "GiB", "79.15 GiB"),
        (1_234_567, "B", "1,234,567 B"),
        (0, "GiB", "0.00 GiB"),
        (-GIB, "GiB", "-1.00 GiB"),
        (10_000 * GIB, "GiB", "10,000.00 GiB"),
    ],
)
def test_format_bytes(size: int, unit: str, printed: str) -> None:
    assert format_bytes(size, unit) == printed


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'GiB'"):
        format_bytes(1, "GIB")


@pytest.mark.parametrize(
    ("count", "printed"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1k"),
        (4096, "4.1k"),
        (999_400, "999k"),
        (999_600, "1M"),
        (124_439_808, "124M"),
        (6_738_415_616, "6.74B"),
        (70_553_706_496, "70.6B"),
        (1_026_000_000_000, "1.03T"),
    ],
)
def test_format_count(count: int, printed: str) -> None:
    assert format_count(count) == printed


@pytest.mark.parametrize(
    ("seconds", "printed"), [(0, "0 µs"), (2.1e-6, "2.1 µs"), (0.0123, "12.3 ms"), (4.2, "4.2 s"), (125, "125 s")]
)
def test_format_seconds(seconds: float, printed: str) -> None:
    assert format_seconds(seconds) == printed
