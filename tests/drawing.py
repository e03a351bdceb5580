"""How many examples Hypothesis draws: a third in each run of the tests, and all of them in that of the slow ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

SHARE = 3
_all_of_them = False


def draw_all() -> None:
    """Draw all: it is the run of the slow tests."""
    global _all_of_them  # noqa: PLW0603 -- of the process, before a test is read
    _all_of_them = True


def drawn(most: int, **options: Any) -> Callable[[Any], Any]:
    """Decorate a test with the settings of its examples."""
    share = most if _all_of_them else -(-most // SHARE)
    chosen = settings(max_examples=share, deadline=None, **options)
    return lambda test: pytest.mark.drawn(chosen(test))
