"""Ladders and differences of post-training: each step is a job of ``memcalc rl``, and steps add up to the whole."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import InputError
from memcalc.report.charts.posttraining import chart
from memcalc.results.posttraining import RlDiff, RlStep
from memcalc.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from memcalc.results.posttraining import Rl

JOB: dict[str, Any] = {
    "algorithm": "grpo", "framework": "trl@1.14", "model": "qwen2.5-7b", "gpu": "h100", "gpus": 4, "prompt": 1024,
    "response": 4096, "prompts": 32, "samples": 8,
}  # fmt: skip
VERL = JOB | {"framework": "verl", "micro_tokens": 16384}


def again(command: str) -> Rl:
    """What `memcalc rl` says to a line that was shown."""
    typed = shlex.split(command)[2:]
    return memcalc.rl(**{flag[2:].replace("-", "_"): text for flag, text in zip(typed[::2], typed[1::2], strict=True)})


def held(answer: Rl) -> int:
    return answer.capacity - answer.headroom


def compared(a: Any, b: Any, **options: Any) -> RlDiff:
    result = memcalc.diff(a, b, **options)
    assert isinstance(result, RlDiff)
    return result


def run(command: str, *arguments: str, **words: Any) -> Any:
    typed = [part for name, value in words.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return CliRunner().invoke(app, [command, *arguments, *typed])


# ---------------------------------------------------------------- ladders


def test_each_stage_is_what_its_command_answers() -> None:
    answer = memcalc.ladder_rl(**JOB)
    assert [step.name for step in answer.steps][:3] == ["", "sleep=2", "logits=fused"]
    assert answer.steps[-1].name == "lora=16"
    for before, step in zip((answer.steps[0], *answer.steps), answer.steps, strict=False):
        rl = again(step.command)
        assert (rl.verdict, rl.binding, held(rl)) == (step.after.verdict, step.after.binding, step.after.allocated)
        assert step.change == step.after.allocated - before.after.allocated
    verdicts = [step.after.verdict for step in answer.steps]
    assert answer.first == next(at for at, verdict in enumerate(verdicts) if verdict != "does-not-fit") == 2


def test_alone_is_the_stage_on_the_start() -> None:
    answer = memcalc.ladder_rl(**JOB, stages=["sleep=2", "logits=fused"])
    start, fused = held(memcalc.rl(**JOB)), held(memcalc.rl(**JOB, logits="fused"))
    assert answer.steps[2].alone == fused - start
    assert answer.steps[2].change == answer.steps[2].after.allocated - answer.steps[1].after.allocated


def test_a_recipe_ends_where_the_job_fits() -> None:
    answer = memcalc.ladder_rl(**JOB, recipe=True)
    assert answer.first == len(answer.steps) - 1
    fitting = memcalc.ladder_rl(**VERL, recipe=True)
    assert [step.name for step in fitting.steps] == [""]


def test_the_share_of_an_engine_that_is_refused_becomes_the_largest_that_is_not() -> None:
    """The largest share is that of the stage before, at which a tenth of a GPU more would be refused."""
    answer = memcalc.ladder_rl(**JOB, utilization=0.95)
    assert answer.steps[0].after.verdict == "does-not-fit"
    step = next(step for step in answer.steps if step.name.startswith("utilization="))
    before = answer.steps[answer.steps.index(step) - 1]
    share = float(step.name.partition("=")[2])
    assert step.after.verdict != "does-not-fit"
    options = {**before.job.options, "utilization": min(1.0, share + 0.1)}
    assert memcalc.rl(model=before.job.model, gpu=before.job.gpu, **options).verdict == "does-not-fit"


def test_stages_are_checked() -> None:
    for stage, sentence in (
        ("seq-len=4k", "word is one of"),
        ("sleep=9", "sleep"),
        ("engine-tp=3", "must divide the 4 GPUs"),
        ("zero", "words with values"),
    ):
        with pytest.raises(InputError, match=sentence):
            memcalc.ladder_rl(**JOB, stages=[stage])
    assert run("ladder", "--reading", "autocast", **JOB).exit_code == 2
    assert run("ladder", "--seq-len", "4k", **JOB).exit_code == 2
    assert run("ladder", "--recipe", "--stage", "sleep=2", **JOB).exit_code == 2
    assert run("ladder", "--sleep", "2", "--model", "gpt2", "--gpu", "h100").exit_code == 2
    assert run("ladder", **{name: value for name, value in JOB.items() if name != "gpus"}).exit_code == 3


# ---------------------------------------------------------------- differences


def names(steps: tuple[RlStep, ...]) -> list[str]:
    return [step.name for step in steps]


def test_steps_add_up_and_end_at_the_other_job() -> None:
    answer = compared("", "sleep=2,logits=fused,utilization=0.5", **JOB)
    assert names(answer.steps) == ["logits plain → fused", "utilization 0.3 → 0.5", "sleep 0 → 2"]
    assert sum(step.change for step in answer.steps) == held(answer.b) - held(answer.a)
    assert held(answer.a) == held(memcalc.rl(**JOB))
    assert answer.steps[-1].after.allocated == held(memcalc.rl(**JOB, sleep=2, logits="fused", utilization=0.5))
    alone = held(memcalc.rl(**JOB, utilization=0.5)) - held(answer.a)
    assert answer.steps[1].alone == alone


def test_what_is_impossible_without_the_other_is_one_step() -> None:
    """Both ways of saying a micro-batch at once are refused, and verl has no default for either."""
    answer = compared("micro_batch=4", "micro_tokens=16k", **{**VERL, "micro_tokens": None})
    assert names(answer.steps) == ["micro-batch 4 → none, micro-tokens none → 16384"]


def test_defaults_of_the_other_framework_follow() -> None:
    answer = compared("framework=verl,micro_batch=8", "framework=trl,micro_batch=8", **{**JOB, "framework": None})
    fields = {field.field: (field.before, field.after, field.follows) for field in answer.fields}
    assert fields["framework"] == ("verl@0.10", "trl@1.15", False)
    assert fields["utilization"] == (0.5, 0.3, True)
    assert len(answer.steps) == 1


def test_a_side_may_be_an_answer_a_file_of_one_or_a_job_s_own_files(tmp_path: Path) -> None:
    saved, script, plans = tmp_path / "rl.json", tmp_path / "train.sh", tmp_path / "plans.json"
    assert run("rl", "--format", "json", "--output", str(saved), "--write", str(script), **VERL).exit_code == 0
    listed = memcalc.plan_rl(**{**VERL, "recompute": "full", "engine_gpus": 0}, top=2)
    plans.write_text(json.dumps(listed.model_dump(mode="json", by_alias=True)), encoding="utf-8")
    answer = memcalc.rl(**VERL)
    for side in (answer, str(saved), str(script)):
        result = compared(side, "utilization=0.7")
        assert held(result.a) == held(answer)
        assert names(result.steps) == ["utilization 0.5 → 0.7"]
    first = compared(f"{plans}#2", str(saved))
    assert first.a.command == listed.plans[1].command
    assert run("diff", str(saved), "utilization=0.7", "--format", "csv").stdout.startswith("step,change,verdict,")


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ("sleep=2", "seq_len=4k", "word of B 'seq_len'"),
        ("sleep=2", "engine_tp=3", "B: engine-tp 3"),
        ("sleep=2", "no-such-file.json", "no-such-file.json"),
        ("sleep=2", "utilization=1.5", "utilization"),
        ("sleep=2", "engine=vllm@77", "77"),
    ],
)
def test_a_side_that_is_none_is_refused(a: str, b: str, sentence: str) -> None:
    result = run("diff", a, b, **JOB)
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_training_beside_post_training_is_refused() -> None:
    estimate = memcalc.estimate(model="gpt2", gpu="h100")
    with pytest.raises(InputError, match="must be post-training"):
        memcalc.diff(memcalc.rl(**VERL), estimate)
    assert run("diff", "", "sleep=2", model="gpt2", gpu="h100").exit_code == 2
    assert run("diff", "", "zero=3", "--sleep", "2", model="gpt2", gpu="h100").exit_code == 2
    assert run("diff", "", "sleep=2", "--terms", "all", **JOB).exit_code == 2


def test_the_same_job_has_no_difference() -> None:
    assert compared("", "sleep=0", **JOB).fields == ()
    assert "No difference" in run("diff", "", "sleep=0", **JOB).stdout


# ---------------------------------------------------------------- pictures


def test_bars_are_as_long_as_the_phase_that_holds_most(tmp_path: Path) -> None:
    ladder = memcalc.ladder_rl(**JOB, stages=["sleep=2", "logits=fused"])
    difference = compared("", "sleep=2,logits=fused", **JOB)
    for answer, points in (
        (ladder, [step.after for step in ladder.steps]),
        (difference, [difference.start, *(step.after for step in difference.steps)]),
    ):
        picture = chart(answer)
        figure = Figure(figsize=picture.size)
        picture.draw(figure)
        (axes,) = figure.axes
        drawn = {patch.get_gid(): patch for patch in axes.patches if patch.get_gid()}
        assert set(drawn) == set(picture.tips)
        for at, point in enumerate(points):
            ends = [part.get_x() + part.get_width() for gid, part in drawn.items() if gid.startswith(f"job-{at}-")]
            assert max(ends) == pytest.approx(point.allocated / GIB)
            assert f"{point.allocated / GIB:.2f} in {point.binding}" in picture.alt
    target = tmp_path / "ladder.svg"
    assert run("ladder", "--stage", "sleep=2", "--chart", str(target), **JOB).exit_code == 1
    assert "sleep=2" in target.read_text(encoding="utf-8")
