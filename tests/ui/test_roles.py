"""Post-training on the page: its answers are those of the library, and a job becomes one of another kind and back."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest

import memcalc
from memcalc.posttraining.frameworks import RECIPES
from memcalc.report.palette import ROLES
from memcalc.results.posttraining import RlDiff
from memcalc.ui.answers import reply, words_of
from memcalc.ui.link import link_of, parse_link

JOB = (
    "model=qwen2.5-7b&gpu=h100&gpus=4&algorithm=grpo&framework=verl&prompt=1k&response=3k&micro-tokens=16k"
    "&prompts=32&samples=8&recompute=full"
)
TRL = JOB.replace("verl", "trl@1.14").replace("micro-tokens=16k", "micro-batch=4")


def answered(request: str, text: str) -> dict[str, Any]:
    answer = reply(request, text)
    assert answer.status == 200, answer.body
    result: dict[str, Any] = json.loads(answer.body)
    return result


def library(link: str, **more: Any) -> Any:
    return memcalc.rl(**words_of(parse_link(link)), **more)


def test_the_bars_are_those_of_the_library() -> None:
    answer, result = answered("estimate", JOB), library(JOB, advice=False)
    assert answer["verdict"] == result.verdict
    assert answer["command"] == result.command
    assert answer["device"] == max(phase.allocated for phase in result.phases)
    for phase in result.phases:
        row = answer["bar"].partition(f">{phase.name}</span>")[2].partition("</li>")[0]
        widths = [float(part.partition("%")[0]) for part in row.split("width:")[1:]]
        assert sum(widths) == pytest.approx(100 * phase.allocated / result.capacity, abs=0.01)
        for name in phase.roles:
            assert f'class="r-{name.replace(" ", "-")}"' in row


def test_every_role_has_its_colour_on_the_page() -> None:
    from memcalc.report.page.markup import style

    for name in ROLES:
        assert f".r-{name.replace(' ', '-')}{{--colour:" in style()


def test_terms_are_the_table_of_phases_and_roles() -> None:
    terms, result = answered("terms", JOB)["terms"], library(JOB, advice=False)
    for phase in result.phases:
        assert f"{phase.allocated / 2**30:.2f}" in terms


def test_plans_lead_to_their_jobs() -> None:
    answer = answered("plan", JOB)
    links = [part.partition('"')[0].replace("&amp;", "&") for part in answer["plans"].split('data-link="')[1:]]
    plans = memcalc.plan_rl(**words_of(parse_link(JOB).without("micro_tokens", "recompute"))).plans
    assert [library(link, advice=False).headroom for link in links] == [plan.headroom for plan in plans]


def test_make_it_fit_leads_to_a_job_that_does() -> None:
    before = library(TRL)
    answer = answered("fit", TRL)
    assert before.verdict == "does-not-fit"
    assert answer["changes"] == [before.edit.change]
    assert library(answer["link"]).verdict == before.edit.verdict


def test_two_jobs_are_compared() -> None:
    from urllib.parse import urlencode

    pinned = JOB + "&utilization=0.7"
    difference = answered("compare", urlencode({"a": JOB, "b": pinned}))["difference"]
    result = memcalc.diff(library(JOB), library(pinned))
    assert isinstance(result, RlDiff)
    assert "utilization" in difference
    assert f"{result.steps[-1].after.allocated / 2**30:.2f}" in difference
    other = reply("compare", urlencode({"a": JOB, "b": "model=gpt2&gpu=h100"}))
    assert other.status == 422


def test_report_and_script() -> None:
    page = reply("report", JOB).body.decode()
    assert "old log-probs" in page
    assert library(JOB).command.partition("--algorithm")[0] in page.replace('</span> <span class="word">', " ")
    with zipfile.ZipFile(io.BytesIO(reply("export", JOB).body)) as archive:
        assert "actor_rollout_ref" in archive.read("train.sh").decode()


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_job_of_training_becomes_post_training_and_back(algorithm: str) -> None:
    training = "model=qwen2.5-7b&gpu=h100&gpus=8&seq-len=4096&zero=3&recompute=full&framework=fsdp2&global-batch=64"
    link = answered("turn", f"{training}&algorithm={algorithm}")["link"]
    options = parse_link(link).options
    assert options["algorithm"] == algorithm
    assert (options["model"], options["gpus"], options["recompute"]) == ("qwen2.5-7b", "8", "full")
    assert answered("estimate", link)["verdict"]
    back = answered("turn", link + "&algorithm=")["link"]
    assert (
        "algorithm"
        not in parse_link(answered("turn", link.replace(f"algorithm={algorithm}", "algorithm="))["link"]).options
    )
    assert back


def test_another_algorithm_keeps_what_it_has() -> None:
    dpo = parse_link(answered("turn", TRL.replace("grpo", "dpo"))["link"]).options
    assert (dpo["framework"], dpo["prompt"], dpo["response"], dpo["micro_batch"]) == ("trl@1.14", "1k", "3k", "4")
    assert "prompts" not in dpo
    grpo = parse_link(answered("turn", TRL.replace("grpo", "rloo"))["link"])
    assert grpo.options == {**parse_link(TRL).options, "algorithm": "rloo"}


@pytest.mark.parametrize(
    ("link", "field"),
    [
        (JOB + "&engine-tp=3", "engine-tp"),
        (JOB + "&utilization=1.2", "utilization"),
        (JOB.replace("framework=verl", "framework=verl@7"), "framework"),
        (JOB + "&seq-len=4k", "word"),
        (JOB + "&set=strategy.zero%3D3", "set"),
        (JOB.replace("algorithm=grpo", "algorithm=gpro"), "algorithm"),
    ],
)
def test_what_is_wrong_is_a_sentence_with_its_field(link: str, field: str) -> None:
    answer = reply("estimate", link)
    assert answer.status == 422
    assert json.loads(answer.body)["field"] == field


def test_dropped_files_of_post_training_become_their_job() -> None:
    script = zipfile.ZipFile(io.BytesIO(reply("export", JOB).body)).read("train.sh").decode()
    answer = answered("check", json.dumps({"files": {"train.sh": script}, "job": "model=gpt2&gpu=h100"}))
    again = library(answer["link"], advice=False)
    assert [phase.allocated for phase in again.phases] == [phase.allocated for phase in library(JOB).phases]


def test_a_pasted_model_is_post_trained() -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 8192,
    }  # fmt: skip
    link = parse_link(JOB).without("model")
    text = type(link)(link.options, {}, json.dumps(config)).text()
    assert "--model config.json" in answered("estimate", text)["command"]


def test_a_record_makes_a_link_to_the_same_answer() -> None:
    result = library(JOB)
    assert library(link_of(result.job)).phases == result.phases
