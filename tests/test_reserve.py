"""The range that measured runs support: fitted by a script, cross-validated, and what the verdict asks for."""

import math
from functools import cache

import pytest
from fits import offload_reports, reserve

import memcalc
from memcalc import catalog, validation
from memcalc.probe.calibrate import reserves
from memcalc.runs import read_runs
from memcalc.specs.runs import Run
from memcalc.specs.step_time import Reserve
from memcalc.terms.overhead import GROWING, KINDS, REPORTED, UNITS_AWAY, WEIGHTS_AWAY
from memcalc.validation import Presets


@cache
def residuals() -> list[reserves.ReserveSample]:
    """The figures of all runs, each with what is predicted of it."""
    return reserve.residuals()


@pytest.mark.slow
def test_the_shipped_range_is_a_fresh_fit() -> None:
    assert reserve.FILE.read_text() == reserve.fit(residuals())


@pytest.mark.slow
def test_coverage_is_within_three_points_of_its_claim() -> None:
    """Ranges fitted without a source hold that source's figures as often as is claimed, counted here by hand."""
    for name in reserve.CLASSES:
        known = catalog.reserve(name)
        rows = [r for r in residuals() if r.allocator == name]
        rows = [r for r in rows if r.strict] if sum(r.strict for r in rows) >= reserves.FEWEST else rows
        inside = [known.low <= r.error(known.middle) <= known.high for r in rows]
        assert known.figures == len(rows)
        assert known.sources == len({r.source for r in rows})
        assert sum(inside) / len(rows) >= known.coverage - 0.03
        assert abs(known.crossed - known.coverage) <= 0.03


@pytest.mark.slow
def test_each_kind_has_its_own_range() -> None:
    """One with enough figures holds 95% of those of documents left out; all of them together do too."""
    held, counted = 0.0, 0
    for kind in (kind for kind in KINDS if kind not in REPORTED):
        rows = of_kind(kind, residuals())
        if len(rows) < reserve.FEW:
            assert catalog.reserve("caching", kind) == catalog.reserve("caching")
            continue
        known = holds_its_own(kind, rows)
        if all(row.strict for row in rows):
            held, counted = held + known.crossed * len(rows), counted + len(rows)
    assert held / counted >= 0.95


@pytest.mark.slow
def test_a_kind_with_few_runs_has_its_own_range() -> None:
    """The same of the one kind whose runs are told from the others before they are predicted."""
    rows = of_kind(GROWING, reserve.residuals(may_grow))
    assert len(rows) >= reserve.FEW
    holds_its_own(GROWING, rows)


def may_grow(run: Run) -> bool:
    """Whether it was told that segments grow, or is of the framework whose launcher tells it so."""
    return bool(run.strategy.get("expandable_segments")) or str(run.strategy["framework"]).startswith("torchtitan")


def of_kind(kind: str, found: list[reserves.ReserveSample]) -> list[reserves.ReserveSample]:
    """The figures that the range of a kind is fitted to."""
    own = [r for r in found if r.allocator == "caching" and r.kind == kind]
    strict = [r for r in own if r.strict]
    return strict if len(strict) >= reserve.FEW else own


def holds_its_own(kind: str, rows: list[reserves.ReserveSample]) -> Reserve:
    """The range of a kind, which holds the figures that it was fitted to."""
    known = catalog.reserve("caching", kind)
    assert (known.kind, known.figures) == (kind, len(rows))
    assert known.low <= 0 <= known.limit <= known.high
    assert sum(known.low <= r.error(0.0) <= known.high for r in rows) >= 0.95 * len(rows) - 1
    if len(rows) >= reserves.FEWEST:
        assert known.crossed >= known.coverage
    return known


def sample(kind: str, source: str, error: float) -> reserves.ReserveSample:
    size = 1 << 40
    return reserves.ReserveSample("", source, "caching", round(size * (1 + error)), size, 0, strict=True, kind=kind)


def test_a_kind_is_shrunk_toward_all_by_its_credibility() -> None:
    """Figures that differ in each document count one each, so that n are n / (n + m) of the range (Buehlmann 1967)."""
    others = [sample("others", f"d{i // 2}", 0.2 * (-1) ** i * (i // 2 % 5) / 4) for i in range(40)]
    own = [sample("one GPU", f"o{i}", error) for i, error in enumerate((-0.01, 0.0, 0.0, 0.01, 0.02))]
    kinds = reserve.Kinds([*others, *own])
    assert kinds.correlation == 0
    known = kinds.range_of("one GPU", 5.0)
    low, high = reserves.range_of([row.error(0.0) for row in (*others, *own)])
    assert known.weight == 0.5
    assert math.isclose(known.low, (low - 0.01) / 2, abs_tol=1e-6)
    assert math.isclose(known.high, (high + 0.02) / 2, abs_tol=1e-6)


def test_figures_of_one_document_count_less_the_more_they_are_alike() -> None:
    """Two documents whose figures agree within each are two figures: the design effect is their number (Kish 1965)."""
    alike = [sample("FSDP 1", name, error) for name, error in (("a", 0.1), ("b", -0.1)) for _ in range(30)]
    assert reserve.correlation(alike) == 1
    kinds = reserve.Kinds(alike)
    assert math.isclose(kinds.range_of("FSDP 1", 2.0).weight, 2 / (2 + 2))


def test_a_kind_decides_what_is_tight() -> None:
    """Trained alone a job needs a narrower margin than the same with FSDP 1, which is known less well."""
    words = {"framework": "hf", "precision": "bf16", "recompute": "full", "micro_batch": 1}
    for kind, job in (("one GPU", {"gpus": 1, "zero": 0}), ("FSDP 1", {"gpus": 2, "zero": 3})):
        chip = Presets().gpu("a100-80g")
        found = memcalc.estimate(model="llama-2-7b", gpu=chip, **words, **job)
        assert found.interval.kind == kind
        known = catalog.reserve("caching", kind)
        assert found.interval.high >= int(found.peak.device * (1 + known.high))
        assert found.interval.low == int(found.peak.device * (1 + known.low))
        edge = (1 + known.limit) * found.peak.device
        verdicts = [
            memcalc.estimate(
                model="llama-2-7b", gpu=chip.model_copy(update={"memory_bytes": int(size)}), **words, **job
            ).verdict
            for size in (0.99 * edge, 1.02 * edge)
        ]
        assert verdicts == ["tight", "fits"]


def test_zero_3_with_weights_away_is_no_bare_fit_below_its_reports() -> None:
    """The range holds 13 GiB of Llama 3 8B and 27 of 70B; a card of the reported size is tight, and says why."""
    words = {"framework": "deepspeed", "gpus": 8, "zero": 3, "offload": ("optimizer", "params"), "recompute": "full"}
    for report in offload_reports.REPORTS:
        chip = Presets().gpu(report.job["gpu"]).model_copy(update={"memory_bytes": int(report.measured * 2**30)})
        found = memcalc.estimate(**words, micro_batch=1, **{**report.job, "gpu": chip})
        assert found.verdict == "tight"
        assert found.interval.high >= chip.memory_bytes
        assert any(f"+{catalog.reserve('caching', WEIGHTS_AWAY).high:.0%}" in text for text in found.warnings)
    assert not any("lower bound" in text for text in memcalc.estimate(model="llama-3-8b", gpu="h200").warnings)


def test_fsdp_1_with_weights_away_is_no_bare_fit_below_its_reports() -> None:
    """The range holds the 14 GB of Llama 2 70B over 4 bits, for which nobody knows a mechanism beyond 9 GiB."""
    run = next(run for run in read_runs().run if run.id == "axolotl-fsdp-qlora-llama-2")
    found = validation.predict(run.model_copy(update={"gpu_memory": run.measured.unknown}))
    assert (found.verdict, found.interval.kind) == ("tight", UNITS_AWAY)
    assert any(text.startswith(f"{UNITS_AWAY}: the prediction is a lower bound") for text in found.warnings)


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
    limit = 1 + catalog.reserve("caching", "one GPU").limit
    verdicts = [
        memcalc.estimate(model="llama-2-7b", gpu=chip.model_copy(update={"memory_bytes": int(size)}), **words).verdict
        for size in (0.8 * device, 1.02 * device, 1.01 * limit * device)
    ]
    assert verdicts == ["does-not-fit", "tight", "fits"]
