"""What holds of the answer to any job: sums, orders, growth with the work, its JSON, its record, its verdict.

Two thousand jobs are drawn: random words that are mostly possible together, and for each job those that differ from it
in one size. What is compared is what a user sees; no figure of the program stands here.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from published import departures

import memcalc
from memcalc import catalog
from memcalc.api import load_model
from memcalc.errors import MemcalcError
from memcalc.results.estimates import Estimate
from memcalc.specs.model import Model

JOBS, SEED = 2000, 20
PARTS = 8
"""Parts that the jobs are drawn in, each from its own seed."""
SHALLOW = (
    *("gpt2", "llama-3.2-1b", "smollm2-135m", "qwen3-0.6b", "gemma-3-1b", "bert-base", "t5-base", "olmo-1b"),
    *("pythia-160m", "opt-125m", "deepseek-v2-lite", "qwen2-vl-2b", "phi-2", "bloom-560m"),
)
"""Models that take little time; a twentieth of the jobs is of any."""
GPUS = ("a100-40g", "a100-80g", "h100", "h200", "rtx-4090", "v100-32g", "mi300x", "b200", "l40s", "h20")
STAGES = {
    "fsdp2": (2, 3), "fsdp1": (2, 3), "torchtitan": (2, 3), "deepspeed": (0, 1, 2, 3), "megatron": (0, 1),
    "hf": (0, 2, 3), "ddp": (0,), "plain": (0,), "torchtune": (3,), "litgpt": (2, 3),
}  # fmt: skip
SOMETIMES: dict[str, tuple[float, tuple[Any, ...]]] = {
    "precision": (0.5, ("fp32", "bf16-mixed", "bf16", "bf16-autocast", "fp16-mixed")),
    "recompute": (0.6, ("none", "full", "every-2", "sqrt", "attention", "mlp", "selective-ops", "block-2", "uniform-2",
        "selective-core-attn")),
    "optimizer": (0.3, ("adamw", "adamw-8bit", "adafactor", "lion", "sgd", "sgd-momentum", "muon")),
    "optimizer_impl": (0.2, ("fused", "foreach", "loop")),
    "attention": (0.2, ("flash", "efficient", "math", "cudnn")),
    "loss": (0.2, ("standard", "chunked", "fused-kernel", "fused-linear")),
    "compile": (0.15, ("blocks", "model")),
    "offload": (0.15, ("optimizer", "params", "activations", "optimizer,params")),
    "lora": (0.12, ("8", "64:all-linear")),
}  # fmt: skip
"""Options that some jobs have: how often, and their values."""


@cache
def loaded(name: str) -> Model:
    return load_model(name)


@cache
def models() -> tuple[str, ...]:
    return tuple(catalog.names("model"))


def drawn(rng: random.Random) -> dict[str, Any]:
    """The words of a job."""
    framework = rng.choice(tuple(STAGES))
    gpus = rng.choice([1, 2, 4, 8, 8, 16, 32, 64, 256])
    words: dict[str, Any] = {
        "model": rng.choice(SHALLOW if rng.random() < 0.95 else models()), "gpu": rng.choice(GPUS), "gpus": gpus,
        "framework": framework, "zero": rng.choice(STAGES[framework]), "seq_len": rng.choice([128, 500, 1024, 4096]),
        "micro_batch": rng.choice([1, 1, 2, 3, 4, 8]),
    }  # fmt: skip
    if framework in {"megatron", "torchtitan", "fsdp2"}:
        degrees = {"tp": rng.choice([1, 1, 2, 4]), "cp": rng.choice([1, 1, 2])}
        degrees["pp"] = rng.choice([1, 1, 2, 4]) if framework != "fsdp2" else 1
        ranks = degrees["tp"] * degrees["pp"] * degrees["cp"]
        words |= degrees if gpus % ranks == 0 else {}
    for name, (chance, values) in SOMETIMES.items():
        if rng.random() < chance:
            words[name] = rng.choice(values)
    ranks = words.get("tp", 1) * words.get("pp", 1) * words.get("cp", 1)
    # always accumulated: a job of one micro-batch a step has no gradients beside its first backward pass
    words["global_batch"] = gpus // ranks * words["micro_batch"] * 2 * words.get("pp", 1)
    return words


def related(words: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield jobs that differ in one size: its name, 1 where they need at least as much and -1 where at most, the words.

    With twice the data-parallel ranks each has as many micro-batches as before; a second one would bring what replicas
    need to speak to each other, such as DDP's buckets.
    """
    batch, gpus = words["global_batch"], words["gpus"]
    several = gpus > words.get("tp", 1) * words.get("pp", 1) * words.get("cp", 1)
    yield "micro_batch", 1, {**words, "micro_batch": 2 * words["micro_batch"], "global_batch": 2 * batch}
    yield "seq_len", 1, {**words, "seq_len": 2 * words["seq_len"]}
    if several:
        yield "ranks", -1, {**words, "gpus": 2 * gpus, "global_batch": 2 * batch}
    model = loaded(words["model"])
    last = model.groups[-1]
    groups = (*model.groups[:-1], last.model_copy(update={"count": max(1, last.count // 2)}))
    yield "layers", -1, {**words, "model": model.model_copy(update={"groups": groups})}


def answered(words: dict[str, Any]) -> Estimate | None:
    """The answer to a job; None where it is refused."""
    try:
        return memcalc.estimate(advice=False, **words)
    except MemcalcError:
        return None


# ------------------------------------------------------------------------------------------------------ one answer


CORRECTIONS = ("blocks that keep everything, before the first checkpointed one", "first block's input, which is 16-bit")
"""Terms that take back what no moment needs of a larger one, and are negative then."""


def sums(answer: Estimate) -> Iterator[str]:
    """What is the sum of what."""
    peak, budget, room = answer.peak, answer.budget, answer.activation_budget
    if sum(answer.components.model_dump().values()) != peak.reserved:
        yield "components are not what is reserved"
    if sum(term.bytes for term in answer.outside) != peak.device - peak.reserved:
        yield "what is outside of the allocator is not device less reserved"
    for phase, total in answer.phases.items():
        if sum(term.bytes for term in answer.terms if phase in term.phases and term.component != "reserve") != total:
            yield f"terms of {phase} are not the phase"
    alive = Counter[str]()
    for term in answer.terms:
        alive[term.component] += term.bytes * (peak.phase in term.phases)
    if any(value != alive[name] for name, value in answer.components.model_dump().items() if name != "reserve"):
        yield "components are not the terms of the peak's phase"
    if budget.usable != budget.capacity - budget.context - budget.libraries - budget.reserve:
        yield "the budget does not add up"
    held = ("parameters", "gradients", "optimizer", "buffers", "cache", "margin")
    if room is not None and room.available != room.usable - sum(getattr(room, name) for name in held):
        yield "the budget of activations does not add up"
    if (step := answer.time) is not None and sum(step.parts.values()) != pytest.approx(step.step, rel=1e-6):
        yield "parts of the step's time are not the step"


def batches(answer: Estimate) -> Iterator[str]:
    """Ranks, sequences, tokens."""
    work, s = answer.workload, answer.strategy
    if s.dp * s.tp * s.pp * s.cp != answer.hardware.gpus:
        yield "degrees do not multiply to the GPUs"
    if work.micro_batch * work.accumulation_steps * s.dp != work.global_batch:
        yield "micro-batches do not multiply to the batch"
    if work.tokens_per_step != work.global_batch * work.seq_len:
        yield "tokens are not sequences by their length"
    tokens = answer.time and answer.time.tokens_per_second_per_gpu * answer.time.step * answer.hardware.gpus
    if tokens is not None and tokens != pytest.approx(work.tokens_per_step, rel=1e-6):
        yield "the speed is not tokens over time"


def orders(answer: Estimate) -> Iterator[str]:
    """What is at most what."""
    peak, step = answer.peak, answer.time
    if not 0 < peak.allocated <= peak.reserved <= peak.device:
        yield "allocated, reserved and device are not in order"
    if not answer.interval.low <= peak.device <= answer.interval.high:
        yield "the range does not hold the prediction"
    if step is not None and not (0 < step.low <= step.step <= step.high and step.mfu > 0 and 0 < step.hfu <= 1):
        yield "times are not in order"
    parts = (*answer.terms, *answer.outside, *answer.off_gpu)
    if any(term.bytes == 0 or (term.bytes < 0 and term.name not in CORRECTIONS) for term in parts):
        yield "a term is not positive"
    if min(answer.host_memory, answer.tier_memory, *answer.phases.values()) < 0:
        yield "a figure is below zero"


def stages(answer: Estimate) -> Iterator[str]:
    """Peak, phases and components speak of the stage of the peak, which is that which reserves most."""
    peak = answer.peak
    stage = next(one for one in answer.stages if one.stage == peak.stage)
    if [one.stage for one in answer.stages] != list(range(answer.strategy.pp)):
        yield "not every stage is there"
    for name in ("allocated", "reserved", "device", "phase"):
        if getattr(stage, name) != getattr(peak, name):
            yield f"{name} of the peak is not that of its stage"
    if {phase: sum(parts.values()) for phase, parts in stage.phases.items()} != answer.phases:
        yield "phases are not those of the stage of the peak"
    if not max(answer.phases.values()) == answer.phases[peak.phase] == peak.allocated:
        yield "the largest phase is not what is allocated"
    if peak.reserved != max(one.reserved for one in answer.stages):
        yield "another stage reserves more"
    for one in answer.stages:
        if sum(one.phases[one.phase].values()) != one.allocated:
            yield "a stage's phase is not what it allocates"


def verdicts(answer: Estimate) -> Iterator[str]:
    """A verdict follows from the figures, and has a reason where it says no."""
    if (answer.verdict == "does-not-fit") != bool(answer.reason):
        yield f"{answer.verdict} with the reason {answer.reason!r}"
    if answer.verdict != "does-not-fit" and answer.peak.device > answer.budget.capacity:
        yield f"{answer.verdict} beyond the capacity"
    if answer.verdict == "fits" and (answer.flushes or answer.peak.reserved > answer.budget.usable):
        yield "fits beyond what is usable"


def _no_number(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def written(answer: Estimate) -> Iterator[str]:
    """JSON is what the reference says, and reads back as the same answer."""
    text = answer.model_dump_json(by_alias=True)
    yield from departures(json.loads(text, parse_constant=_no_number), "[Estimate](#estimate)")
    if Estimate.model_validate_json(text) != answer:
        yield "JSON reads back as another answer"


INVARIANTS: tuple[Callable[[Estimate], Iterator[str]], ...] = (sums, batches, orders, stages, verdicts, written)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_answer_holds_together(part: int) -> None:
    """And none falls where the work grows, none grows where ranks are added."""
    rng, count, refused, broken = random.Random(f"{SEED} {part}"), 0, 0, []  # noqa: S311
    while count < JOBS / PARTS:
        words = drawn(rng)
        base = answered(words)
        if base is None:
            refused += 1
            assert refused < JOBS, "nearly all jobs are refused"
            continue
        for name, sign, changed in (("", 0, words), *related(words)):
            answer = answered(changed) if name else base
            if answer is None:
                continue
            count += 1
            shown = {**words, "and": name}
            broken += [(wrong, shown) for check in INVARIANTS for wrong in check(answer)]
            before, after = (max(stage.allocated for stage in each.stages) for each in (base, answer))
            grown = after - before
            if grown * sign < 0:
                broken.append((f"{name}: allocated changes by {grown / before:+.4%}", shown))
        if words["gpus"] <= 8 and rng.random() < 0.2 and memcalc.estimate(advice=False, **base.job.keywords()) != base:
            broken.append(("the record of a job does not give its answer", words))
    assert broken == []


# -------------------------------------------------------------------------------------------- searches and limits


def pinned(rng: random.Random) -> dict[str, Any]:
    """The words of a small search: a job with little left open."""
    words = drawn(rng)
    kept = ("model", "gpu", "framework", "zero", "precision", "recompute", "optimizer", "seq_len")
    return {
        **{name: words[name] for name in kept if name in words}, "model": rng.choice(SHALLOW),
        "gpus": rng.choice([1, 2, 4, 8]), "offload": "none", "pp": 1, "cp": 1,
    }  # fmt: skip


def until(count: int, ask: Callable[[], Any]) -> Iterator[Any]:
    """Yield so many answers; questions that are refused are asked anew."""
    for _ in range(50 * count):
        try:
            answer = ask()
        except MemcalcError:
            continue
        yield answer
        count -= 1
        if not count:
            return
    raise AssertionError("nearly all questions are refused")


@pytest.mark.slow
def test_a_plan_is_the_estimate_of_its_record() -> None:
    rng, plans = random.Random(SEED), 0  # noqa: S311
    for answer in until(20, lambda: memcalc.plan(**pinned(rng), top=3)):
        written = json.loads(answer.model_dump_json(by_alias=True), parse_constant=_no_number)
        assert list(departures(written, "[Plans](#plans)")) == []
        for plan in answer.plans:
            asked = memcalc.estimate(**plan.job.keywords())
            assert (asked.strategy, asked.verdict) == (plan.strategy, plan.verdict), plan.command
            assert asked.peak.model_dump() == plan.peak.model_dump(), plan.command
            assert asked.verdict != "does-not-fit"
            plans += 1
    assert plans > 20


@pytest.mark.slow
@pytest.mark.parametrize("what", ["seq-len", "micro-batch"])
def test_the_largest_fits_and_one_step_more_does_not(what: Any) -> None:
    rng, word, asked = random.Random(f"{SEED} {what}"), what.replace("-", "_"), 0  # noqa: S311

    def ask() -> Any:
        words = {**pinned(rng), "tp": 1}
        words.update({"micro_batch": rng.choice([1, 2])} if what == "seq-len" else {})
        if what == "seq-len":
            del words["seq_len"]
        return memcalc.largest(what, **words, tight=True)

    for found in until(12, ask):
        if found.best is None:
            continue
        there = memcalc.estimate(**found.best.job.keywords())
        assert there.verdict != "does-not-fit", found.command
        assert there.peak.device == found.best.peak.device, found.command
        if not found.beyond:
            continue  # the model's positions end there, or the bound of what is asked
        keywords = {**found.best.job.keywords(), word: found.answer + 1}
        if what == "micro-batch":
            keywords.pop("global_batch", None)
        assert memcalc.estimate(**keywords).verdict == "does-not-fit", found.command
        asked += 1
    assert asked > 3


@pytest.mark.slow
def test_the_fewest_gpus_fit_and_half_of_them_do_not() -> None:
    rng, asked = random.Random(SEED + 1), 0  # noqa: S311

    def ask() -> tuple[dict[str, Any], Any]:
        words = {name: value for name, value in pinned(rng).items() if name != "gpus"}
        words["model"] = rng.choice(["llama-2-7b", "mistral-7b-v0.1", "llama-2-13b", "qwen2.5-1.5b"])
        return words, memcalc.smallest("gpus", **words, up_to=32, tight=True)

    for words, found in until(6, ask):
        if found.best is None:
            continue
        assert memcalc.estimate(**found.best.job.keywords()).verdict != "does-not-fit", found.command
        if found.answer > 1:
            fewer = memcalc.plan(**words, gpus=found.answer // 2, top=1, advice=False)
            assert not fewer.plans, found.command
            asked += 1
    assert asked > 1
