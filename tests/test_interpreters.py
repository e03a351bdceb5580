"""The script that is run under each interpreter has a figure for every model that has one."""

from __future__ import annotations

import pytest
from interpreters import JOBS, estimated

from memcalc import catalog

LLAVA_NEXT = ("llava-next-video-7b", "llava-v1.6-mistral-7b")
"""Whose rule of tiles is not modelled."""
IMAGES = [
    model.name
    for model in catalog.models(())
    if ("-vl" in model.name or "llava" in model.name) and not model.counted_parts and model.name not in LLAVA_NEXT
]


@pytest.mark.parametrize("name", IMAGES)
def test_models_of_images_are_compared_too(name: str) -> None:
    assert estimated(name, JOBS[1])["peak"]["allocated"] > 0
