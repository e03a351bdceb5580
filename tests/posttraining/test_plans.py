"""Plans of post-training: each is a job of ``memcalc rl``, the best are not missed, and guesses are called so."""

from __future__ import annotations

import json
import shlex
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import InputError, MissingError
from memcalc.posttraining.frameworks import TOOLKITS

pytestmark = pytest.mark.usefixtures("answers_once")

if TYPE_CHECKING:
    from memcalc.results.posttraining import Rl, RlPlans

GRPO: dict[str, Any] = {
    "algorithm": "grpo", "framework": "verl", "model": "qwen2.5-7b", "gpu": "h100", "gpus": 4, "prompt": 1024,
    "response": 2048, "prompts": 64, "samples": 8, "recompute": "full", "micro_tokens": 16384,
}  # fmt: skip
DPO: dict[str, Any] = {
    "algorithm": "dpo", "framework": "trl", "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 2, "prompt": 512,
    "response": 512,
}  # fmt: skip


def found(words: dict[str, Any], **changes: Any) -> RlPlans:
    return _found(tuple(sorted((words | changes).items())))


@cache
def _found(words: tuple[tuple[str, Any], ...]) -> RlPlans:
    return memcalc.plan_rl(**{name: value for name, value in words if value is not None})


def options_of(command: str) -> dict[str, Any]:
    typed = shlex.split(command)[2:]
    return {flag[2:].replace("-", "_"): value for flag, value in zip(typed[::2], typed[1::2], strict=True)}


def again(command: str) -> Rl:
    """What `memcalc rl` says to a line that was shown."""
    assert command.startswith("memcalc rl ")
    return memcalc.rl(**options_of(command), advice=False)


# ---------------------------------------------------------------- each plan is a job of memcalc rl


@pytest.mark.parametrize("words", [GRPO, DPO], ids=["grpo", "dpo"])
def test_each_plan_is_what_its_command_answers(words: dict[str, Any]) -> None:
    plans = found(words).plans
    assert len(plans) > 1
    for plan in plans:
        answer = again(plan.command)
        figures = (answer.verdict, answer.binding, answer.headroom, answer.host)
        assert figures == (plan.verdict, plan.binding, plan.headroom, plan.host)
        assert answer.verdict != "does-not-fit"
        if answer.rollout is not None:
            assert answer.rollout.rounds == plan.rounds
            seqs = options_of(plan.command).get("max_seqs", 256)
            assert plan.at_once == plan.engines * int(min(answer.rollout.concurrency, int(seqs)))


def test_plans_differ_and_what_fits_with_room_goes_first() -> None:
    plans = found(GRPO).plans
    assert [plan.rank for plan in plans] == list(range(1, len(plans) + 1))
    assert len({plan.command for plan in plans}) == len(plans)
    assert {plan.engine_gpus for plan in plans} > {0}
    verdicts = [plan.verdict for plan in plans]
    assert verdicts == sorted(verdicts, key=["fits", "tight"].index)


def test_no_share_of_a_gpu_takes_fewer_rounds() -> None:
    """By brute force, beside engines of one rank, of all shares with which the job fits."""
    pinned = GRPO | {"engine_tp": 1, "engine_gpus": 0, "max_seqs": 1024, "park": "none"}
    pinned |= {"model": "qwen2.5-3b", "prompts": 1024}
    (plan,) = found(pinned).plans
    answers = [memcalc.rl(**pinned, utilization=share / 10, advice=False) for share in range(3, 10)]
    rounds = [answer.rollout.rounds for answer in answers if answer.verdict == "fits" and answer.rollout is not None]
    assert 1 < len(rounds) < len(answers)
    assert plan.rounds == min(filter(None, rounds))


def test_what_is_typed_is_not_searched() -> None:
    answer = found(GRPO, engine_tp=2, utilization=0.5)
    typed = {"recompute", "micro_tokens", "engine_tp", "utilization"}
    assert answer.plans
    assert not any(typed & set(plan.choices) for plan in answer.plans)
    assert all("--engine-tp 2" in plan.command for plan in answer.plans)


@pytest.mark.parametrize("framework", ["trl", "openrlhf"])
def test_no_plan_says_what_the_framework_cannot_be_told(framework: str) -> None:
    words = GRPO | {"framework": framework, "micro_tokens": None, "micro_batch": 1, "model": "qwen2.5-1.5b"}
    choices = TOOLKITS[framework][0].choices
    for plan in found(words).plans:
        assert plan.choices.get("park", "none") in choices.park
        assert plan.choices.get("offload", "none") in choices.offload
        assert int(plan.choices["zero"]) in choices.zero


# ---------------------------------------------------------------- times


def test_the_update_is_the_time_of_a_training_step() -> None:
    """Five samples of 3,072 tokens are a micro-batch of 16,384; 512 samples take 26 of them on each of 4 GPUs."""
    plan = next(plan for plan in found(GRPO).plans if plan.engine_gpus == 0)
    step = memcalc.estimate(
        model="qwen2.5-7b", gpu="h100", gpus=4, framework="fsdp1", zero=3, precision="bf16-mixed", recompute="full",
        seq_len=3072, micro_batch=5, global_batch=26 * 5 * 4, advice=False,
        settings={"strategy.reduce_dtype": "fp32"},  # of verl's MixedPrecision
    ).time  # fmt: skip
    assert step is not None
    assert plan.update is not None
    assert (plan.update.seconds, plan.update.low, plan.update.high) == (step.step, step.low, step.high)
    assert (plan.update.validated, plan.update.basis) == (step.validated, step.basis)


def test_the_rollout_is_a_guess_from_what_is_read() -> None:
    """Weights once for each token of a round, and of each sample the cache as it grows, at 3.35 TB/s."""
    plan = next(plan for plan in found(GRPO).plans if plan.choices["engine_tp"] == "1" and not plan.engine_gpus)
    weights = memcalc.serve(model="qwen2.5-7b", gpu="h100", tp=1, max_len=3072).stages[0].size("weights")
    token = 28 * 2 * 4 * 128 * 2  # layers, keys and values, heads, their width, bytes
    cached = sum(1024 + step for step in range(2048)) * token * 512 / 4
    assert plan.rounds == 1
    assert plan.rollout_guess == pytest.approx((2048 * weights + cached) / 3.35e12, rel=1e-3)
    assert "guess" in found(GRPO).grounds["rollout"]


def test_pairs_have_no_rollout() -> None:
    answer = found(DPO)
    assert "rollout" not in answer.grounds
    assert all(plan.rounds is None and plan.rollout_guess is None and plan.engines == 0 for plan in answer.plans)


# ---------------------------------------------------------------- where nothing fits


def test_changes_are_named_where_nothing_fits() -> None:
    answer = found(GRPO, utilization=0.9, park="none", gpus=2, engine_gpus=0)
    assert answer.plans == ()
    assert answer.nearest is not None
    assert again(answer.nearest.command).reason == answer.nearest.reason != ""
    assert answer.nearest.remedies
    for remedy in answer.nearest.remedies:
        fitting = again(remedy.command)
        assert fitting.verdict == remedy.verdict != "does-not-fit"
        assert fitting.capacity - fitting.headroom == remedy.device


# ---------------------------------------------------------------- the command line


def run(words: dict[str, Any], *more: str) -> Any:
    typed = [part for name, value in words.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return CliRunner().invoke(app, ["plan", *typed, *more])


def test_formats_and_exit_codes() -> None:
    text = run(DPO, "--format", "json")
    assert text.exit_code == 0
    assert json.loads(text.stdout)["schema"] == "memcalc.rl-plans/1"
    assert run(DPO, "--format", "csv").stdout.startswith("rank,verdict,GPUs to train,")
    assert run(DPO | {"gpus": 1, "model": "llama-3.1-8b", "recompute": "full", "micro_batch": 1}).exit_code == 1
    assert run({name: value for name, value in GRPO.items() if name != "prompts"}).exit_code == 3


@pytest.mark.parametrize(("columns", "most"), [(80, 22), (120, 20)])
def test_a_screen_is_short_and_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, most: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(GRPO).stdout.splitlines()
    assert len(lines) <= most
    assert max(map(len, lines)) <= columns
    assert "512 samples a step" in lines[-1]
    verbose = run(GRPO, "-v").stdout
    assert "rounds" in verbose
    assert "Update " in verbose


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--global-batch", "8"), "--global-batch '8': --algorithm searches post-training"),
        (("--seq-len", "2k"), "its lengths are --prompt and --response"),
        (("--objective", "memory"), "--objective 'memory':"),
        (("--engine-tp", "3"), "tp 3: must divide the 28 attention heads"),
        (("--algorithm", "gpro"), "did you mean 'grpo'?"),
    ],
)
def test_bad_input_is_one_sentence(more: tuple[str, ...], text: str) -> None:
    result = run(GRPO, *more)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_step_of_more_gpus_than_samples_is_counted_in_sequences() -> None:
    """A number of more than a million alone could be meant as tokens; nobody typed it here."""
    answer = memcalc.plan_rl(
        model="qwen2.5-1.5b", gpu="h100", gpus=720_720, algorithm="dpo", framework="trl", prompt=512, response=512,
        micro_batch=1,
    )  # fmt: skip
    assert answer.plans


def test_what_post_training_is_not_told_is_not_asked_for() -> None:
    with pytest.raises(InputError, match="its tokens depend on the size of its images"):
        memcalc.rl(model="qwen2-vl-7b", gpu="h100", gpus=8, algorithm="dpo", framework="trl", prompt=512, response=512)
    with pytest.raises(InputError, match="at most 100,000,000 responses in a step"):
        memcalc.rl(
            model="qwen2.5-1.5b", gpu="h100", gpus=8, algorithm="grpo", framework="trl", prompt=512, response=512,
            prompts=1_000_000, samples=101,
        )  # fmt: skip


def test_words_of_post_training_need_their_algorithm() -> None:
    result = CliRunner().invoke(app, ["plan", "--model", "7b", "--gpu", "h100", "--gpus", "8", "--prompt", "3"])
    assert result.exit_code == 2
    assert "--prompt '3': is said with --algorithm" in result.stderr


def test_what_only_the_user_knows_is_asked_for() -> None:
    for name in ("gpus", "prompts", "response", "framework"):
        with pytest.raises(MissingError, match="give --"):
            found(GRPO, **{name: None})


def test_a_plan_asks_for_lengths_and_the_size_of_a_step_at_once() -> None:
    bare = {name: value for name, value in GRPO.items() if name not in {"prompt", "response", "prompts", "samples"}}
    with pytest.raises(MissingError, match=r"--prompt and --response.*--prompts \(of a step"):
        memcalc.plan_rl(**bare)


def test_an_option_that_nothing_has_is_refused() -> None:
    with pytest.raises(InputError, match="sequences"):
        found(GRPO, sequences=3)
