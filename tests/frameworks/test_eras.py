"""Which habits an era has: a version, or a month of the releases; a time that nobody read has none."""

from __future__ import annotations

import pytest

from memcalc.errors import InputError
from memcalc.frameworks import habits_of, megatron


@pytest.mark.parametrize(
    ("era", "habits"),
    [
        ("2021-05", megatron.LOCAL), ("2022-05", megatron.CONTIGUOUS), ("2024-03", megatron.CORE_05),
        ("2024-12", megatron.CORE_05), ("2025-01", megatron.CORE_10), ("2025-05", megatron.CORE_11),
        ("2025-09", megatron.CORE), ("core-0.12", megatron.CORE_11), ("core-0.20", megatron.CORE),
    ],
)  # fmt: skip
def test_a_month_has_the_habits_of_the_core_of_that_time(era: str, habits: object) -> None:
    """Megatron-LM's core/package_info.py: 0.5 until 2024-03-21, 0.10 until 2025-01-20, 0.11 until 2025-02-13."""
    assert habits_of(f"megatron@{era}") is habits


@pytest.mark.parametrize("era", ["2022-06", "2023-06", "2024-02", "core-0.3"])
def test_a_time_that_nobody_read_is_refused(era: str) -> None:
    with pytest.raises(InputError, match="from 2022-06 until 2024-03: the nearest are megatron@2022-01 and"):
        habits_of(f"megatron@{era}")


@pytest.mark.parametrize("era", ["0.8.0", "v0.8.0", "3.0"])
def test_a_version_that_is_not_the_cores_leads_to_one_that_is(era: str) -> None:
    with pytest.raises(InputError, match=f"megatron@core-{era.removeprefix('v')}"):
        habits_of(f"megatron@{era}")
