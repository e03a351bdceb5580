"""Whole steps of models that mix tokens by more than attention: the replayed peak against the real classes'.

The kernels that these classes take in training are built for GPUs: stand-ins save and make what the real ones do
(:mod:`autograd.mixer_kernels`).
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from autograd import mixer_kernels
from covering import covering
from differential import Job, outcome

WITHIN = 0.006
LAYERS = dict.fromkeys(
    (
        "lfm2",
        "lfm2_moe",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "bamba",
        "granitemoehybrid",
        "falcon_h1",
        "olmo_hybrid",
        "kimi_linear",
    ),
    4,
)
STATE_SPACES = dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), 4)
FAMILIES: dict[str, int | None] = {**LAYERS, **STATE_SPACES, "jamba": 6, "nemotron_h": None}
"""By how many blocks; Nemotron-H's config lists them."""
NO_AUTOCAST = ("jamba",)
"""Whose scan refuses what autocast gives it (:func:`memcalc.planner.as_is.scannable`)."""


def error(
    family: str, precision: str, recompute: str, *, layers: int | None, framework: str = "plain", **sizes: object
) -> float:
    """Return by what part of the real peak the replayed one is off."""
    attention, ranks = "eager" if family in STATE_SPACES else "flash", 2 if framework == "fsdp2" else 1
    common = 2, 256, precision, recompute, "adamw", "foreach", "standard", attention, framework, ranks
    job = Job(family, sizes, layers, *common)
    with mixer_kernels.installed(family):
        return outcome(job).error


def test_a_checkpointed_step_takes_what_the_class_takes() -> None:
    assert abs(error("falcon_h1", "bf16", "full", layers=FAMILIES["falcon_h1"])) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "recompute"),
    [
        *covering(2, sorted(FAMILIES.keys() - NO_AUTOCAST), ["bf16", "fp32+autocast"], ["none", "full"]),
        *covering(2, NO_AUTOCAST, ["bf16"], ["none", "full"]),
    ],
)
def test_so_does_each_family_however_it_is_trained(family: str, precision: str, recompute: str) -> None:
    assert abs(error(family, precision, recompute, layers=FAMILIES[family])) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", STATE_SPACES)
def test_fsdp_2_casts_an_fp32_residual_stream_for_each_block(family: str, recompute: str) -> None:
    sizes = {"framework": "fsdp2", "vocab_size": 616}
    assert abs(error(family, "fp32", recompute, layers=6, **sizes)) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("family", STATE_SPACES)
def test_a_residual_stream_may_be_as_wide_as_the_weights(family: str) -> None:
    assert abs(error(family, "bf16", "full", layers=4, residual_in_fp32=False)) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32+autocast"])
def test_rotary_tables_of_two_kinds_are_taken_to_live_as_long_as_one_another(precision: str, recompute: str) -> None:
    """LFM3's tables of windows go before those of the first attention: at this size 0.7% of a step."""
    assert -WITHIN <= error("lfm3", precision, recompute, layers=6, sliding_window=512) <= 0.008
