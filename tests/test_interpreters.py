"""The script that is run under each interpreter has a figure for every model that has one."""

from __future__ import annotations

import pytest
from interpreters import JOBS, estimated

from memcalc import catalog


@pytest.mark.parametrize("name", [name for name in catalog.names("model") if "-vl" in name or "llava" in name])
def test_models_of_images_are_compared_too(name: str) -> None:
    assert estimated(name, JOBS[1])["peak"]["allocated"] > 0
