"""Sequences that differ in length: the longest micro-batch, the allocator over others, the share of steps that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc.allocator import replay
from memcalc.api import single
from memcalc.batches import parse_lengths
from memcalc.errors import CombinationError
from memcalc.events import step_events
from memcalc.planner.varying import on_shape, varying_events
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces

JOB: dict[str, Any] = {
    "model": "pythia-70m", "gpu": "a100-80g", "gpus": 2, "framework": "deepspeed", "zero": 2, "recompute": "full",
    "micro_batch": 4, "global_batch": 16,
}  # fmt: skip
MIB = 2**20


def estimate(**words: Any) -> memcalc.Estimate:
    return memcalc.estimate(**{**JOB, **words})


def test_equal_lengths_are_a_job_without_lengths() -> None:
    """Every figure to the byte: a log-normal without spread, and a step of steps that are all alike."""
    plain, equal = estimate(seq_len=2048), estimate(lengths="2048:2048:2048")
    left_out = {"lengths", "assumptions", "job", "command"}
    assert equal.model_dump(exclude=left_out) == plain.model_dump(exclude=left_out)
    assert plain.lengths is None
    assert equal.lengths is not None
    assert (equal.lengths.shapes, equal.lengths.fitting, equal.lengths.tokens) == (1, 1.0, 2048)


@pytest.mark.parametrize("framework", ["hf", "fsdp2", "fsdp1", "megatron"])
def test_equal_shapes_write_the_events_of_two_steps(framework: str) -> None:
    """The writer that turns between shapes writes what the other one writes where there is nothing to turn to."""
    words = {**JOB, "framework": framework, "seq_len": 512, "global_batch": 8}
    words.pop("zero")
    job = single(**words)
    census = ModelOnGrid(job.job.model, job.grid)
    ledger = build_ledger(census, Workspaces(MIB, 0))
    steps = [["shape"] * 1, ["shape"] * 1]
    assert list(varying_events({"shape": (census, ledger)}, steps, "shape", 0)) == list(step_events(census, ledger, 0))


@pytest.mark.parametrize("settings", [{}, {"strategy.expandable_segments": True}])
@pytest.mark.parametrize("offload", ["none", "activations"])
def test_all_that_steps_of_many_shapes_take_they_give_back(settings: dict[str, Any], offload: str) -> None:
    words = {**JOB, "framework": "fsdp2", "zero": 3, "seq_len": 2048, "offload": offload, "settings": settings}
    job = single(**words)
    shapes = [(4, 2048), (4, 333), (4, 1100), (2, 64)]
    ledgers = {}
    for shape in shapes:
        census = job.job.on(on_shape(job.grid, shape))
        ledgers[shape] = census, build_ledger(census, Workspaces(MIB, 0))
    steps = [[shapes[0]], [shapes[1], shapes[2]], [shapes[3], shapes[0]], shapes]
    events = list(varying_events(ledgers, steps, shapes[0], 0))
    alone = list(step_events(*ledgers[shapes[0]], 0))
    assert live_at_end(events) == live_at_end(alone)
    assert replay(events).peak_allocated >= replay(alone).peak_allocated


def live_at_end(events: list[tuple[str, int, int, int, str]]) -> int:
    living: dict[int, int] = {}
    for kind, key, size, *_ in events:
        if kind == "alloc":
            living[key] = size
        elif kind == "free":
            del living[key]
    return sum(living.values())


@pytest.mark.parametrize("batching", ["pad", "grouped", "flatten", "bfd", "multipack"])
def test_more_is_reserved_than_by_the_longest_alone(batching: str) -> None:
    answer, plain = estimate(lengths="300:1500:2k", batching=batching), estimate(seq_len=2048)
    assert answer.lengths is not None
    assert (answer.lengths.rows, answer.lengths.tokens) == (4, 2048)
    assert answer.peak.allocated == plain.peak.allocated
    assert answer.lengths.alone == plain.peak.reserved
    assert answer.peak.reserved == answer.lengths.in_sequence >= plain.peak.reserved
    assert answer.lengths.shapes > 1


def test_varying_shapes_leave_holes() -> None:
    """What padding to one length avoids: the freed blocks of one shape do not fit the next one's."""
    words = {"model": "pythia-160m", "gpu": "b200", "gpus": 1, "framework": "hf", "micro_batch": 2, "global_batch": 2}
    varying = memcalc.estimate(**words, lengths="300:1500:2k")
    equal = memcalc.estimate(**words, lengths="300:1500:2k", batching="pad-max")
    assert varying.lengths is not None
    assert equal.lengths is not None
    assert varying.peak.reserved > equal.peak.reserved + 64 * MIB
    assert equal.peak.reserved == equal.lengths.alone
    grown = memcalc.estimate(**words, lengths="300:1500:2k", settings={"strategy.expandable_segments": True})
    assert grown.peak.reserved < varying.peak.reserved


@pytest.mark.slow
def test_a_longer_largest_needs_no_less() -> None:
    """On a card with room for all, so that the cache is never given back."""
    answers = [estimate(lengths=f"300:1500:{most}", gpu="b200") for most in (1500, 2048, 3072, 4096, 6144)]
    allocated, reserved = ([getattr(answer.peak, name) for answer in answers] for name in ("allocated", "reserved"))
    assert allocated == sorted(set(allocated))
    assert reserved == sorted(set(reserved))


def test_the_share_of_steps_is_that_of_steps_without_a_longer_sequence() -> None:
    """Padded micro-batches of independent sequences: a share F of short ones to the power of the sequences a step."""
    answer = estimate(lengths="300:6000:64k", framework="hf", zero=0, micro_batch=8, global_batch=32)
    facts = answer.lengths
    assert answer.verdict == "does-not-fit"
    assert facts is not None
    assert 0.05 < facts.fitting <= facts.running < 0.98
    tokens = parse_lengths("300:6000:64k").tokens
    expected = float(np.mean(tokens <= facts.fitting_tokens // 8)) ** 32
    assert facts.fitting == pytest.approx(expected, abs=4 * (expected * (1 - expected) / facts.steps) ** 0.5)
    longest = estimate(seq_len=facts.fitting_tokens // 8, framework="hf", zero=0, micro_batch=8, global_batch=32)
    assert longest.verdict == "fits"


def test_an_answer_is_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(100 + 37 * index % 1900) for index in range(500)), encoding="utf-8")
    assert estimate(lengths=str(path)) == estimate(lengths=str(path))


def test_a_cut_makes_the_longest_shorter() -> None:
    answer = estimate(lengths="300:1500:8k", seq_len=2048)
    assert answer.workload.seq_len == 2048
    assert estimate(lengths="300:1500:8k").workload.seq_len == 8192
    assert estimate(lengths="300:1500:2001", pad_multiple=64).workload.seq_len == 2048


@pytest.mark.parametrize("batching", ["max-tokens", "token-budget"])
def test_a_budget_decides_how_many_sequences_there_are(batching: str) -> None:
    words = {**JOB, "lengths": "300:1500:2k", "batching": batching, "token_budget": "8k"}
    del words["micro_batch"]
    answer = memcalc.estimate(**words)
    facts = answer.lengths
    assert facts is not None
    assert facts.rows * facts.tokens == answer.workload.micro_batch * answer.workload.seq_len
    assert facts.rows * facts.tokens > 4096
    assert batching != "max-tokens" or facts.rows * facts.tokens <= 8192


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"batching": "grouped"}, "batching"),
        ({"pad_multiple": 8}, "pad-multiple"),
        ({"lengths": "1:2:3", "token_budget": 8}, "token-budget"),
        ({"lengths": "1:2:3", "batching": "max-tokens"}, "batching"),
        ({"lengths": "1:2:3", "batching": "max-tokens", "token_budget": 8}, "micro-batch"),
        ({"lengths": "5:6:7", "batching": "max-tokens", "token_budget": 6, "micro_batch": None}, "token-budget"),
    ],
)
def test_what_says_nothing_is_refused(words: dict[str, Any], field: str) -> None:
    with pytest.raises(CombinationError) as error:
        estimate(**words)
    assert error.value.field == field


def test_searches_are_about_the_longest() -> None:
    words = {"model": "pythia-70m", "gpu": "a100-80g", "gpus": 1, "framework": "hf", "recompute": "full"}
    varying = memcalc.largest("micro-batch", **words, lengths="300:1500:2k")
    assert varying.answer == memcalc.largest("micro-batch", **words, seq_len=2048).answer
    with pytest.raises(CombinationError, match="answers the longest"):
        memcalc.largest("seq-len", **words, lengths="300:1500:2k")
    for search in (memcalc.plan, lambda **options: memcalc.smallest("gpus", **options)):
        with pytest.raises(CombinationError, match="budget"):
            search(**words, lengths="300:1500:2k", batching="token-budget", token_budget=8192)


@pytest.mark.parametrize("batching", ["pad", "flatten"])
def test_a_plan_has_the_figures_of_its_estimate(batching: str) -> None:
    words = {**JOB, "offload": "none", "precision": "bf16-mixed", "lengths": "300:1500:2k", "batching": batching}
    plan = memcalc.plan(**words, top=1, advice=False).plans[0]
    answer = memcalc.estimate(**plan.job.keywords())
    assert answer.lengths is not None
    assert answer.lengths.in_sequence > answer.lengths.alone
    assert (plan.peak.device, plan.verdict) == (answer.peak.device, answer.verdict)


def test_a_pipeline_holds_micro_batches_of_several_shapes() -> None:
    words = {**JOB, "gpus": 3, "pp": 3, "framework": "megatron", "zero": 1, "global_batch": 32}
    answer = memcalc.estimate(**words, lengths="300:1500:2k")
    assert answer.lengths is not None
    assert answer.lengths.shapes > 8
    plain = memcalc.estimate(**words, seq_len=2048)
    assert [stage.allocated for stage in answer.stages] == [stage.allocated for stage in plain.stages]
    assert all(a.reserved >= b.reserved for a, b in zip(answer.stages, plain.stages, strict=True))


@pytest.mark.parametrize(
    ("lines", "batching"),
    [
        ("group_by_length: true", "grouped"),
        ("sample_packing: true", "pad-max"),
        ("sample_packing: true\npad_to_sequence_len: false", "multipack"),
        ("", "pad"),
    ],
)
def test_check_reads_how_batches_are_made(tmp_path: Path, lines: str, batching: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"base_model: EleutherAI/pythia-70m\nsequence_len: 1000\nmicro_batch_size: 2\nbf16: true\n{lines}\n",
        encoding="utf-8",
    )
    words = {"model": "pythia-70m", "gpu": "a100-80g", "gpus": 1}
    facts = memcalc.check([str(path)], **words, lengths="300:1500:4k").estimate.lengths
    assert facts is not None
    assert facts.batching == batching
    assert facts.tokens == (1000 if batching == "multipack" else 1024)  # 64 × 16
    assert memcalc.check([str(path)], **words).estimate.lengths is None
    typed = memcalc.check([str(path)], **words, lengths="300:1500:4k", batching="flatten").estimate.lengths
    assert typed is not None
    assert typed.batching == "flatten"


@pytest.mark.slow
def test_a_plan_with_lengths_is_exported() -> None:
    """The files have no lengths: they are proven with those of the plan, whatever batches the format itself makes."""
    plans = memcalc.plan(
        model="llama-3.2-1b", gpu="a100-80g", gpus=1, framework="fsdp2", micro_batch=2, recompute="full",
        offload="none", global_batch=4, lengths="300:1500:2k", top=1, advice=False,
    )  # fmt: skip
    assert list(memcalc.export(plans, to="fsdp2")) == ["train_fsdp2.py"]


@pytest.mark.slow
def test_the_range_has_what_another_order_of_the_same_data_reserves(tmp_path: Path) -> None:
    """Each new shape leaves holes of its own, so that a run over more data reserves more, up to the whole card."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(7.4, 0.8, 600).astype(int), 4096).tolist()
    answers = []
    for order in range(3):
        draw.shuffle(lengths)
        path = tmp_path / f"{order}.txt"
        path.write_text("\n".join(map(str, lengths)), encoding="utf-8")
        answers.append(
            memcalc.estimate(
                model="llama-3.2-1b", gpu="a100-40g", framework="hf@2024-01", precision="bf16", recompute="full",
                micro_batch=1, global_batch=8, lengths=str(path), batching="pad",
            )
        )  # fmt: skip
    for answer in answers:
        assert answer.lengths is not None
        assert answer.lengths.grows
        assert answer.interval.low <= min(other.peak.device for other in answers)
        assert answer.interval.high >= max(other.peak.device for other in answers)
    grown = memcalc.estimate(
        model="llama-3.2-1b", gpu="a100-40g", framework="hf", precision="bf16", recompute="full", micro_batch=1,
        global_batch=8, lengths=str(tmp_path / "0.txt"), batching="pad",
        settings={"strategy.expandable_segments": True},
    )  # fmt: skip
    assert grown.lengths is not None
    assert not grown.lengths.grows
    assert grown.interval.high < answers[0].interval.high
