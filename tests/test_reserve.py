"""The range that measured runs support: fitted by a script, cross-validated, and what the verdict asks for."""

import math

from fits import reserve

import memcalc
from memcalc import catalog
from memcalc.probe.calibrate import reserves
from memcalc.validation import Presets

RESIDUALS = reserve.residuals()


def test_the_shipped_range_is_a_fresh_fit() -> None:
    assert reserve.FILE.read_text() == reserve.fit(RESIDUALS)


def test_coverage_is_within_three_points_of_its_claim() -> None:
    """Ranges fitted without a source hold that source's figures as often as is claimed, counted here by hand."""
    for name in reserve.CLASSES:
        known = catalog.reserve(name)
        rows = [r for r in RESIDUALS if r.allocator == name]
        rows = [r for r in rows if r.strict] if sum(r.strict for r in rows) >= reserves.FEWEST else rows
        inside = [known.low <= r.error(known.middle) <= known.high for r in rows]
        assert known.figures == len(rows)
        assert known.sources == len({r.source for r in rows})
        assert sum(inside) / len(rows) >= known.coverage - 0.03
        assert abs(known.crossed - known.coverage) <= 0.03


def test_a_range_holds_the_middle_of_its_errors() -> None:
    """Of the numbers 1 to 199, 2.5% of 200 are below 5 and above 195: ranks 5 and 195."""
    low, high = reserves.range_of([float(n) for n in range(1, 200)])
    assert (low, high) == (5.0, 195.0)
    assert reserves.limit_of([float(n) for n in range(1, 200)]) == (-math.inf, 190.0)


def test_documents_are_told_apart() -> None:
    repository = "pytorch/torchtitan"
    assert reserve.document(f"{repository} commit 5940ddeb5 message (PR #822)") == f"{repository} commit 5940ddeb5"
    assert reserve.document("a/b@123 docs/x.json case one") == "a/b docs/x.json"
    assert reserve.document("a/b@123 logs/run-1.out rank 4") == reserve.document("a/b@123 logs/run-2.out rank 0")


def test_the_verdict_asks_for_the_limit() -> None:
    """A card that holds the prediction, but not what one run of twenty reaches, is tight."""
    words = {"gpus": 1, "framework": "hf", "zero": 0, "precision": "bf16", "recompute": "full", "micro_batch": 1}
    chip = Presets().gpu("a100-80g")
    device = memcalc.estimate(model="llama-2-7b", gpu=chip, **words).peak.device
    limit = 1 + catalog.reserve("caching").limit
    verdicts = [
        memcalc.estimate(model="llama-2-7b", gpu=chip.model_copy(update={"memory_bytes": int(size)}), **words).verdict
        for size in (0.8 * device, 1.02 * device, 1.01 * limit * device)
    ]
    assert verdicts == ["does-not-fit", "tight", "fits"]
