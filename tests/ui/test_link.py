"""The link: it holds the whole job, and leads to no file of the machine that serves the page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc.errors import InputError, MissingError, UnknownNameError
from memcalc.specs.options import COMMAND_LINE
from memcalc.ui.link import LinkedJob, link_of, parse_link

TEXTS = st.text("aé&=#%+ 4/,:{}", min_size=1, max_size=20).filter(lambda text: not text.startswith("/"))


def test_an_option_keeps_its_name_of_the_command_line() -> None:
    job = parse_link("model=llama-2-7b&gpu=a100-40g&seq-len=4k&sp=false&set=strategy.reduce_dtype%3Dbf16")
    assert job.options == {"model": "llama-2-7b", "gpu": "a100-40g", "seq_len": "4k", "sp": "false"}
    assert job.settings == {"strategy.reduce_dtype": "bf16"}


@given(st.dictionaries(st.sampled_from(["seq_len", "recompute", "zero"]), TEXTS), TEXTS)
def test_a_job_comes_back_from_its_link(options: dict[str, str], config: str) -> None:
    job = LinkedJob(options, {"strategy.reduce_dtype": "bf16"}, config)
    assert parse_link(job.text()) == job


def test_the_record_of_an_answer_makes_a_link_to_the_same_answer() -> None:
    options = {"gpus": 8, "zero": 3, "recompute": "full", "settings": {"strategy.reduce_dtype": "bf16"}}
    before = memcalc.estimate(model="llama-2-7b", gpu="a100-40g", **options)
    after = memcalc.estimate(**parse_link(link_of(before.job)).keywords())
    assert after.peak == before.peak
    assert after.command == before.command


def test_every_option_can_stand_in_a_link() -> None:
    for row in COMMAND_LINE:
        if row.name not in {"set", "calibration"}:
            assert row.name in parse_link(f"{row.name.replace('_', '-')}=x").options


@pytest.mark.parametrize(
    "text",
    [
        "model=/etc/passwd",
        "model=~/config.json",
        "model=../model",
        "model=my.toml",
        "gpu=mine.toml",
        "node=/n.toml",
        "calibration=a.toml",
        "lengths=/data/lengths.txt",
        "model=a/../../b",
    ],
)
def test_a_link_leads_to_no_file(text: str) -> None:
    with pytest.raises(InputError, match="reads no files"):
        parse_link(text)


def test_an_unknown_option_is_named_with_its_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'seq-len'"):
        parse_link("seqlen=4096")


def test_too_many_options_are_refused() -> None:
    with pytest.raises(InputError, match="at most"):
        parse_link("&".join(["tp=1"] * 500))


@pytest.mark.parametrize(("text", "name"), [("gpu=h100", "model"), ("model=gpt2", "gpu"), ("", "model")])
def test_what_is_missing_is_named(text: str, name: str) -> None:
    with pytest.raises(MissingError, match=name):
        parse_link(text).keywords()
