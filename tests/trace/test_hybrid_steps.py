"""Whole steps of models that mix tokens by more than attention: the replayed peak against the real classes'.

The kernels that these classes take in training are built for GPUs: stand-ins save and make what the real ones do
(:mod:`autograd.mixer_kernels`).
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from autograd import mixer_kernels
from differential import Job, outcome

WITHIN = 0.006
LAYERS = dict.fromkeys(
    ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba", "granitemoehybrid", "falcon_h1"), 4
)
FAMILIES: dict[str, int | None] = {**LAYERS, "nemotron_h": None}
"""By how many blocks; Nemotron-H's config lists them."""
OFTEN = ("qwen3_5_text", "falcon_h1")


def error(family: str, precision: str, recompute: str, *, layers: int | None) -> float:
    """Return by what part of the real peak the replayed one is off."""
    job = Job(family, {}, layers, 2, 256, precision, recompute, "adamw", "foreach", "standard", "flash", "plain")
    with mixer_kernels.installed(family):
        return outcome(job).error


@pytest.mark.parametrize("family", OFTEN)
def test_a_checkpointed_step_takes_what_the_class_takes(family: str) -> None:
    assert abs(error(family, "bf16", "full", layers=FAMILIES[family])) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32+autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_so_does_each_family_however_it_is_trained(family: str, precision: str, recompute: str) -> None:
    assert abs(error(family, precision, recompute, layers=FAMILIES[family])) <= WITHIN
