"""Every reader, on broken configs: a few hundred cases each; tests/fuzz_readers.py runs for as long as one likes."""

from __future__ import annotations

import pytest
from fuzz_readers import fuzz

from memcalc.convert.formats.base import FORMATS


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_broken_configs_are_answered(name: str) -> None:
    assert fuzz(name, seed=7, cases=300) == 300
