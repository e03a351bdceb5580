"""Lengths of a data set: quantiles of a log-normal, files in four forms, and plain refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc.batches import parse_lengths
from memcalc.batches.lengths import LONGEST, MOST_LENGTHS
from memcalc.errors import FileError, InputError


@drawn(20)
@given(st.integers(1, 4000), st.integers(0, 20_000), st.integers(0, 40_000))
def test_a_distribution_has_the_quantiles_that_were_typed(median: int, spread: int, more: int) -> None:
    high, most = median + spread, median + spread + more
    lengths = parse_lengths(f"{median}:{high}:{most}")
    assert lengths.quantile(0.5) == pytest.approx(median, rel=0.002, abs=1)
    assert lengths.quantile(0.99) == pytest.approx(high, rel=0.002, abs=1)
    assert lengths.most <= most
    assert lengths.tokens.min() >= 1


def test_it_is_log_normal_between_the_quantiles() -> None:
    """By its own formula: the 90th percentile of a log-normal with median 300 and 99th percentile 1800."""
    deviation = np.log(6) / NormalDist().inv_cdf(0.99)
    assert parse_lengths("300:1800:4k").quantile(0.9) == pytest.approx(300 * np.exp(1.2815516 * deviation), rel=0.002)


def test_what_is_longer_than_the_largest_is_cut_there() -> None:
    lengths = parse_lengths("100:200:250")
    beyond = 1 - NormalDist().cdf(NormalDist().inv_cdf(0.99) * np.log(2.5) / np.log(2))
    assert np.mean(lengths.tokens == 250) == pytest.approx(beyond, rel=0.2)


def array(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("lengths.txt", b"5\n17\n\n3\n"),
        ("lengths", b"\xef\xbb\xbf5\r\n17\r\n3"),
        ("lengths.json", b"[5, 17, 3]"),
        ("lengths.csv", b"length\n5\n17\n3\n"),
        ("lengths.csv", b"5\n17\n3\n"),
        ("lengths.csv", b"id,num_tokens\nb,5\na,17\nc,3\n"),
        ("lengths.npy", array(np.array([5, 17, 3], dtype=np.int32))),
        ("lengths.npy", array(np.array([5, 17, 3], dtype=">u2"))),
    ],
)
def test_a_file_is_read_in_its_order(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    lengths = parse_lengths(str(tmp_path / name))
    assert lengths.tokens.tolist() == [5, 17, 3]
    assert (lengths.most, lengths.quantile(0.5), lengths.quantile(0.99)) == (17, 5, 17)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.txt", b"", "at least one"),
        ("a.txt", b"5\nseven\n", "line 2 is 'seven'"),
        ("a.txt", b"5\n-7\n", "line 2 is '-7'"),
        ("a.txt", b"0\n", "a length is 0"),
        ("a.txt", b"5\n1e3\n", "line 2"),
        ("a.txt", b"\xff\xfe5", "UTF-8"),
        ("a.json", b'{"lengths": [5]}', "JSON list"),
        ("a.json", b"[5, true]", "entry 2 is True"),
        ("a.json", b"[5, 6.5]", "entry 2 is 6.5"),
        ("a.json", b"[5, [6]]", "entry 2 is list"),
        ("a.json", b"[5,", "must be JSON"),
        ("a.json", b"[" * 100_000, "must be JSON"),
        ("a.csv", b"id,words\n1,5\n", "one named length"),
        ("a.csv", b"id,length\n1\n", "row 2 is ''"),
        ("a.npy", b"5\n", "numpy.save"),
        ("a.npy", b"\x93NUMPY\x01\x00\x16\x00{\x27\x5c\x93NUMPY\x01\x00\x16\x00{'1", "numpy.save"),
        ("a.npy", array(np.array([[5, 6]])), "one axis"),
        ("a.npy", array(np.array([5.0])), "whole numbers"),
        ("a.npy", array(np.array([5, 6]))[:-3], "as long as its header says"),
        ("a.npy", array(np.array([2**63 + 1], dtype=np.uint64)), "a length is 9223372036854775809"),
        ("a.npy", array(np.array([5, -6])), "a length is -6"),
    ],
)
def test_what_is_no_list_of_lengths_is_refused(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FileError, match=why) as error:
        parse_lengths(str(tmp_path / name))
    assert error.value.field == "lengths"
    assert error.value.exit_code == 2


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with path.open("wb") as stream:
        np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(FileError, match="whole numbers"):
        parse_lengths(str(path))


def test_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([1] * (MOST_LENGTHS + 1)), encoding="utf-8")
    with pytest.raises(FileError, match="take a sample"):
        parse_lengths(str(path))


@pytest.mark.parametrize("text", ["", "3:2:1", "0:1:2", f"1:2:{LONGEST + 1}", "1:x:2", "nowhere.txt", "a:b", "\0", 7])
def test_quantiles_ascend_and_files_are_there(text: Any) -> None:
    with pytest.raises(InputError) as error:
        parse_lengths(text)
    assert error.value.field == "lengths"
