"""What a search leaves out because it cannot change an answer: it is searched here, and there is nothing in it."""

from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc import api
from memcalc.errors import InputError
from memcalc.events import step_events
from memcalc.ledger import Ledger
from memcalc.planner import axes, sentences, stage_peaks
from memcalc.planner.job import PlanJob
from memcalc.planner.limit_grid import Chunk, LimitCandidate, LimitJob, SimulationCache, evaluate, number_of, ordered
from memcalc.planner.search import Wanted
from memcalc.planner.stage_peaks import UnsafeError, peaks_of
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Overhead, overhead_of

JOBS = [
    ("llama-2-7b", "a100-40g", 1, {"offload": "none"}, False),
    ("llama-2-13b", "rtx-4090", 2, {"offload": "none"}, False),
    ("mixtral-8x7b", "a100-40g", 2, {"offload": "none", "framework": "megatron"}, False),
    ("llama-3.2-1b", "a100-40g", 2, {}, True),
]
"""Model, GPU, how many of them, options, and whether anything comes near to fitting."""


@pytest.mark.parametrize(("model", "gpu", "gpus", "options", "hopeful"), JOBS)
def test_where_nothing_comes_near_no_search_that_wants_less_has_anything(
    model: str, gpu: str, gpus: int, options: dict[str, str], hopeful: bool
) -> None:
    job = api.resolve(model, gpu, {"gpus": gpus, "seq_len": 4096, **options}, several=True)
    assert job.search([gpus])[gpus].hopeful == hopeful
    assert job.is_hopeful(gpus) == hopeful
    wider = [job.search([gpus], Wanted(tight=True, trusting=trusting))[gpus] for trusting in (False, True)]
    assert any(outcome.ideas for outcome in wider) == hopeful


@pytest.mark.parametrize(("gpus", "near"), [(2, False), (4, True)])
def test_where_nothing_without_offload_comes_near_no_search_that_wants_less_has_such_a_strategy(
    gpus: int, near: bool
) -> None:
    """On 4 GPUs a 7B model is tight without offload, on 2 only what offloads fits at all."""
    job = api.resolve("llama-2-7b", "a100-40g", {"seq_len": 4096}, several=True)
    assert job.search([gpus])[gpus].feasible > 0
    assert job.is_hopeful(gpus)
    assert job.is_hopeful(gpus, resident=True) == near
    wider = job.search([gpus], Wanted(tight=True, trusting=True))[gpus]
    assert any(not idea.offload for idea, known in wider.ideas.items() if known) == near


def test_strategies_that_are_passed_over_are_counted_as_if_they_were_evaluated() -> None:
    job = api.resolve("llama-3.2-1b", "a100-40g", {"seq_len": 2048}, several=True)
    limit = LimitJob(job.request, job.model, job.gpu, job.node)
    grids, pairs = limit.open([1, 2, 4, 8], 2048), [(1, 2048), (2, 2048)]
    for gpus in ((1,), (2, 8), (1, 2, 4, 8)):
        evaluated = evaluate(limit, grids, pairs, gpus)
        assert number_of(limit, grids, pairs, gpus) == sum(part.reserved.size for part in evaluated) > 0
    everything = evaluate(limit, grids, pairs)
    assert sum(part.reserved.size for part in everything) == number_of(limit, grids, pairs, (1, 2, 4, 8))


PLAIN: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "l4", "gpus": 1, "framework": "plain"}
"""Of 32 strategies none fits; with code of one's own there are 1,024. Megatron-LM has fewer, and some of them fit."""


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, int]]:
    """Framework, whether it goes beyond that, and size of each space that is searched."""
    found: list[tuple[str, bool, int]] = []
    search = PlanJob.search

    def noted(self: PlanJob, counts: Any, wanted: Wanted | None = None) -> Any:
        counts = list(counts)
        size = sum(map(self.size, counts))
        found.append((self.request.given.get("framework", ""), self.request.beyond, size))
        return search(self, counts, wanted)

    monkeypatch.setattr(PlanJob, "search", noted)
    return found


def test_another_framework_is_looked_at_in_place_of_a_space_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch, searched: list[tuple[str, bool, int]]
) -> None:
    monkeypatch.setattr(sentences, "MOST_UNASKED", 900)
    answer = memcalc.plan(**PLAIN)
    assert not answer.plans
    assert not any(wider for _, wider, _ in searched)
    assert max(size for *_, size in searched) <= 900
    assert "was not searched: --beyond searches it too (1,024 strategies)" in answer.too_large
    (other,) = (remedy for remedy in answer.nearest if remedy.group == "another framework")
    assert other.job is not None
    assert other.job.options["framework"] == "megatron"
    first = memcalc.plan(**other.job.keywords(), top=1, advice=False).plans[0]
    assert (first.verdict, first.peak.device, first.own_code) == (other.verdict, other.device, ())


def test_a_small_space_beyond_the_framework_is_searched(searched: list[tuple[str, bool, int]]) -> None:
    job = api.resolve(PLAIN["model"], PLAIN["gpu"], {"gpus": 1, "framework": "plain"}, several=True)
    assert sentences.unopened(job, 1) == 0
    assert "With code of your own it fits" in sentences.fits_beyond(job, 1, unopened=0)
    assert set(searched) == {("plain", True, 1024)}


def test_the_space_of_a_large_model_on_many_gpus_is_too_large_and_nothing_else_is() -> None:
    large = api.resolve("deepseek-v3", "h100", {"gpus": 2048}, several=True)
    assert sentences.unopened(large, 2048) > 30 * sentences.MOST_UNASKED
    assert sentences.is_soon_searched(large, 2048)
    assert sentences.is_soon_searched(large.pinned(framework="megatron"), 2048)
    assert not sentences.unopened(api.resolve("gpt-3-175b", "a100-40g", {"gpus": 8}, several=True), 8)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_replay_that_ends_early_refuses_what_a_whole_one_refuses(*, expandable: bool) -> None:
    options, settings = {"framework": "plain", "offload": "none"}, {"strategy.expandable_segments": expandable}
    job = api.resolve("gpt2", "rtx-3090", options, settings=settings, several=True)
    limit = LimitJob(job.request, job.model, job.gpu, job.node)
    parts = evaluate(limit, limit.open([1], 1024), [(micro_batch, 1024) for micro_batch in (8, 12, 16, 20, 24)])
    cache = SimulationCache(limit)
    verdicts = []
    for candidate in ordered(parts, lambda part: part.fitting(safe=False, closed=False)):
        whole = cache.reported(candidate)
        assert whole is not None
        verdicts.append(whole.peaks.verdict)
        assert cache.fits(candidate) == (whole.peaks.verdict == "fits")
    assert {"fits", "tight"} <= set(verdicts)


def figures(**words: Any) -> tuple[ModelOnGrid, Ledger, Overhead]:
    """Return what the figures of one strategy on an A100 of 40 GB are read from."""
    single = api.single(model="llama-3.2-1b", gpu="a100-40g", gpus=1, framework="hf", zero=0, **words)
    overhead = overhead_of(single.job.gpu, single.grid, single.grid.layouts[0])
    census = ModelOnGrid(single.job.model, single.grid)
    return census, build_ledger(census, overhead.workspaces, detail=False), overhead


@pytest.mark.parametrize("micro_batch", [1, 4, 16, 64])
def test_what_is_refused_as_unsafe_is_what_does_not_fit_safely(micro_batch: int) -> None:
    parts = figures(micro_batch=micro_batch, global_batch=micro_batch, seq_len=1024, recompute="full")
    whole = peaks_of(*parts)
    if whole.verdict == "fits":
        assert peaks_of(*parts, only_safe=True).verdict == "fits"
    else:
        with pytest.raises(UnsafeError):
            peaks_of(*parts, only_safe=True)


def test_what_allocates_more_than_is_safe_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = figures(micro_batch=64, global_batch=64, seq_len=4096)
    assert max(stage.allocated for stage in stage_peaks.stage_peaks(*parts)) > parts[2].most_safe
    monkeypatch.setattr(stage_peaks, "replayed", None)
    with pytest.raises(UnsafeError):
        peaks_of(*parts, only_safe=True)


@pytest.mark.parametrize("micro_batch", [1, 16, 64])
def test_only_what_is_allocated_beyond_the_card_is_not_replayed_where_what_is_tight_counts(
    micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = figures(micro_batch=micro_batch, global_batch=micro_batch, seq_len=2048)
    whole = peaks_of(*parts)
    if whole.allocated <= parts[2].room:
        assert peaks_of(*parts, only_running=True) == whole
    else:
        assert whole.verdict == "does-not-fit"
        monkeypatch.setattr(stage_peaks, "replayed", None)
        with pytest.raises(UnsafeError):
            peaks_of(*parts, only_running=True)


PIPELINES = [("llama-3.2-1b", "fsdp2", 4), ("gemma-2-9b", "fsdp2", 2), ("mixtral-8x7b", "fsdp2", 2)]


def searched_pipelines(model: str, framework: str, pp: int) -> tuple[LimitJob, list[Chunk]]:
    """Return all strategies of some pipelines, over their schedules, on 8 GPUs."""
    words = {"framework": framework, "pp": pp, "offload": "none", "tp": 1, "seq_len": 512, "global_batch": 16}
    job = api.resolve(model, "h100", {"gpus": 8, **words}, several=True)
    limit = LimitJob(job.request, job.model, job.gpu, job.node)
    return limit, evaluate(limit, limit.open([8], 512), [(1, 512), (4, 512)])


def alone(job: LimitJob, candidate: LimitCandidate) -> tuple[ModelOnGrid, Ledger] | None:
    """Return a strategy and its ledger as ``estimate`` has them; None where it refuses it."""
    request = job.with_words(dict(candidate.split), **candidate.words)
    try:
        grid = axes.single_strategy(request, job.model, job.gpu, job.node)
    except InputError:
        return None
    census = job.on(grid)
    return census, build_ledger(census, overhead_of(job.gpu, grid).workspaces, detail=False)


@pytest.mark.parametrize(("model", "framework", "pp"), PIPELINES)
def test_stages_with_equal_footprints_have_equal_events(model: str, framework: str, pp: int) -> None:
    """What one schedule is refused for on a stage, another one is refused for without a replay."""
    job, parts = searched_pipelines(model, framework, pp)
    first: dict[object, LimitCandidate] = {}
    compared = 0
    for candidate in ordered(parts, lambda part: np.broadcast_to(part.allowed, part.shape)):
        assert candidate.origin is not None
        part, index = candidate.origin
        for stage, footprint in part.footprints(index).items():
            other = first.setdefault(footprint, candidate)
            if other is candidate or compared > 20:
                continue
            pair = [built for built in (alone(job, candidate), alone(job, other)) if built is not None]
            if len(pair) == 2:
                assert candidate.layout.schedule != other.layout.schedule or candidate.layout.vpp != other.layout.vpp
                assert list(step_events(*pair[0], stage)) == list(step_events(*pair[1], stage)), candidate
                compared += 1
    assert compared > 3
