"""The inverse questions: what is answered fits, what lies beyond does not, whatever is pinned or open."""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from command_lines import keywords
from typer.testing import CliRunner

import memcalc
from memcalc import api, catalog
from memcalc.api import load_model
from memcalc.cli.app import app
from memcalc.errors import CombinationError, InputError, MissingError, UnknownNameError
from memcalc.planner import axes
from memcalc.planner.direct import policies
from memcalc.planner.limits import counts_up_to
from memcalc.report import FORMATS, render
from memcalc.report.inverse import report
from memcalc.results.estimates import Estimate
from memcalc.terms.build import build_ledger
from memcalc.terms.head import loss_of
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import group_bytes, overhead_of
from memcalc.terms.settings import MIXED, runs
from memcalc.units import GIB

RUN = CliRunner()
GPU = "a100-40g"
SMALL: dict[str, Any] = {
    "model": "gpt2",
    "gpu": "a100-40g",
    "gpus": 1,
    "framework": "plain",
    "zero": 0,
    "offload": "none",
}


def estimated(command: str, **changed: object) -> Estimate:
    """Run an ``estimate`` line as it was printed, with some options changed."""
    return memcalc.estimate(**{**keywords(command), **changed})


PINNED: list[tuple[str, dict[str, Any]]] = [
    ("llama-2-7b", {"gpus": 1, "framework": "hf", "precision": "bf16", "zero": 0, "recompute": "full", "lora": "16"}),
    ("llama-2-7b", {"gpus": 8, "framework": "fsdp2", "precision": "bf16-mixed", "zero": 3, "recompute": "none"}),
    ("llama-2-7b", {"gpus": 8, "framework": "fsdp1", "precision": "bf16-mixed", "zero": 3, "recompute": "full"}),
    ("llama-3-8b", {"gpus": 8, "framework": "megatron", "precision": "bf16-mixed", "zero": 1, "tp": 4,
                    "recompute": "full"}),
    ("qwen2.5-1.5b", {"gpus": 2, "framework": "deepspeed", "precision": "bf16-mixed", "zero": 2, "recompute": "full"}),
    ("qwen2.5-1.5b", {"gpus": 4, "framework": "ddp", "precision": "fp32", "zero": 0, "recompute": "attention"}),
    ("mistral-7b-v0.1", {"gpus": 8, "framework": "hf", "precision": "bf16", "zero": 3, "recompute": "full"}),
    ("gemma-2-2b", {"gpus": 8, "framework": "fsdp2", "precision": "bf16-mixed", "zero": 3, "recompute": "full"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "words"),
    [*PINNED[::3], *(pytest.param(*one, marks=pytest.mark.slow) for one in (*PINNED[1::3], *PINNED[2::3]))],
)
def test_the_longest_sequence_fits_and_one_more_token_does_not(model: str, words: dict[str, Any]) -> None:
    words = {**words, "offload": "none", "micro_batch": 1}
    found = memcalc.largest("seq-len", model=model, gpu=GPU, **words, tight=True)
    assert found.best is not None
    assert isinstance(found.answer, int)
    there = estimated(found.best.command)
    assert there.workload.seq_len == found.answer
    assert there.verdict == found.best.verdict != "does-not-fit"
    assert there.peak.device == found.best.peak.device == found.capacity - found.best.free
    further = found.answer + (1 if "tp" not in words else 4)  # two parts for each of two context-parallel ranks
    assert found.beyond[0].value == further
    beyond = estimated(found.best.command, seq_len=further)
    assert beyond.verdict == found.beyond[0].verdict == "does-not-fit"
    assert beyond.peak.device == found.beyond[0].device
    assert found.beyond[0].missing > 0


def test_every_length_up_to_the_answer_fits_and_none_beyond() -> None:
    """Brute force over a thousand micro-batches of a small model, one estimate each."""
    words: dict[str, Any] = {**SMALL, "precision": "fp32", "recompute": "none", "seq_len": 1024}
    found = memcalc.largest("micro-batch", **words, tight=True)
    fits = [
        n for n in range(1, 60) if memcalc.estimate(**words, micro_batch=n, global_batch=n).verdict != "does-not-fit"
    ]
    assert fits == list(range(1, fits[-1] + 1))
    assert found.answer == fits[-1] < 59


def test_a_safe_answer_is_safe_and_the_next_is_not() -> None:
    words: dict[str, Any] = {"model": "llama-2-7b", "gpu": GPU, "gpus": 8, "zero": 3, "offload": "none", "tp": 1}
    words |= {"precision": "bf16-mixed", "recompute": "full"}
    safe, all_ = (memcalc.largest("seq-len", **words, tight=only) for only in (False, True))
    assert safe.best is not None
    assert isinstance(safe.answer, int)
    assert isinstance(all_.answer, int)
    assert safe.best.verdict == "fits"
    assert safe.answer < all_.answer
    following = estimated(safe.best.command, seq_len=safe.answer + 1)
    assert following.verdict == safe.beyond[0].verdict == "tight"
    # what is missing came with that one token, and its part of the margin: without it nothing is
    grown = following.peak.device - estimated(safe.best.command).peak.device
    assert 0 < safe.beyond[0].missing <= grown * following.interval.high / following.peak.device
    assert following.interval.high > following.budget.capacity
    beyond = all_.beyond[0]
    assert beyond.verdict == "does-not-fit"
    assert beyond.missing == beyond.device - all_.capacity > 0


def test_no_open_strategy_fits_one_step_beyond() -> None:
    """Every strategy of a small open space is estimated at the next length."""
    words: dict[str, Any] = {"model": "qwen2.5-1.5b", "gpu": "v100-16g", "gpus": 4, "framework": "fsdp2", "step": 512}
    words |= {"offload": "none", "precision": "fp16-mixed", "pp": 1, "cp": 1, "sp": False, "tp": 2}
    found = memcalc.largest("seq-len", **words, beyond=True, tight=True)
    assert found.best is not None
    assert isinstance(found.answer, int)
    assert found.answer % 512 == 0
    assert estimated(found.best.command).verdict != "does-not-fit"
    del words["step"]
    tried = policies(load_model("qwen2.5-1.5b"))
    for zero in (2, 3):
        for recompute in tried:
            one = {**words, "zero": zero, "recompute": recompute, "micro_batch": 1}
            beyond = memcalc.estimate(**one, seq_len=found.answer + 512, global_batch=2)
            assert beyond.verdict == "does-not-fit", one
    assert len(tried) > 10


def test_a_given_batch_leaves_its_divisors() -> None:
    words: dict[str, Any] = {"model": "llama-3-8b", "gpu": GPU, "gpus": 8, "zero": 3, "tp": 1, "seq_len": 2048}
    words |= {"pp": 1, "cp": 1}
    found = memcalc.largest("micro-batch", **words, global_batch=48, recompute="full", precision="bf16-mixed")
    assert found.answer in {1, 2, 3, 6}
    assert found.best is not None
    assert found.best.global_batch == 48
    assert found.best.accumulation_steps * 8 * int(found.answer) == 48


def test_a_batch_in_tokens_is_whole_steps_of_the_ranks() -> None:
    words: dict[str, Any] = {"model": "llama-2-7b", "gpu": GPU, "gpus": 8, "zero": 3, "tp": 1, "recompute": "full"}
    words |= {"pp": 1, "cp": 1}
    found = memcalc.largest("seq-len", **words, precision="bf16-mixed", global_batch="1M tokens", step=1000)
    assert found.best is not None
    assert isinstance(found.answer, int)
    assert found.best.global_batch % 8 == 0
    assert 0 <= 2**20 - found.best.global_batch * found.answer < 8 * found.answer


def test_learned_positions_are_the_limit_where_memory_is_not() -> None:
    found = memcalc.largest("seq-len", **SMALL, precision="fp32")
    assert found.answer == 1024
    assert found.beyond == ()
    assert "learned positions" in found.limit


@pytest.mark.parametrize("what", ["seq-len", "micro-batch"])
def test_more_memory_never_gives_less(what: str) -> None:
    gpu = catalog.gpu(GPU)
    answers: list[int] = []
    for size in (24, 32, 40, 64, 80):
        card = gpu.model_copy(update={"memory_bytes": size * GIB})
        words: dict[str, Any] = {"model": "qwen2.5-1.5b", "gpu": card, "gpus": 4, "zero": 3, "recompute": "full"}
        found = memcalc.largest(what, **words, precision="bf16-mixed", offload="none", tp=1)
        answers.append(int(found.answer or 0))
    assert answers == sorted(answers)
    assert answers[0] < answers[-1]


def test_fewest_gpus_as_a_loop_of_plans_finds_them() -> None:
    words: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-80g", "global_batch": 64, "offload": "none"}
    found = memcalc.smallest("gpus", **words, precision="bf16-mixed", tight=True)
    planned = next(
        n for n in (1, 2, 4, 8) if memcalc.plan(**words, precision="bf16-mixed", gpus=n, top=1, advice=False).plans
    )
    assert found.answer == planned
    assert found.best is not None
    assert estimated(found.best.command).verdict == found.best.verdict
    assert [miss.value for miss in found.beyond] == [planned // 2]


@pytest.mark.slow
def test_a_count_below_the_fewest_has_no_strategy_that_fits() -> None:
    """A search lists what the closed form lets fit; here a replay with retries counts, as ``estimate`` says it."""
    words: dict[str, Any] = {"model": "qwen2.5-1.5b", "gpu": "v100-16g", "global_batch": 8, "offload": "none"}
    words |= {"precision": "fp16-mixed", "seq_len": 2048, "pp": 1, "cp": 1}
    found = memcalc.smallest("gpus", **words, tight=True)
    assert found.answer == 4
    assert found.best is not None
    assert estimated(found.best.command).verdict == found.best.verdict != "does-not-fit"
    for tp in (1, 2):
        for zero in (2, 3):
            for recompute in policies(load_model("qwen2.5-1.5b")):
                one = {**words, "tp": tp, "zero": zero, "recompute": recompute, "micro_batch": 1, "gpus": 2}
                assert memcalc.estimate(**one).verdict == "does-not-fit", one


def test_one_grid_of_all_counts_gives_the_figures_of_each() -> None:
    """A layout of 1 GPU has no communicator, one of 8 the world's: the same bytes as in a grid of its own."""
    job = api.resolve("llama-2-7b", GPU, {"zero": 3})
    gpu, grids = job.gpu, {n: axes.space(job.request, job.model, job.gpu, job.node, n)[0] for n in (1, 8)}
    both = replace(grids[8], layouts=(*grids[1].layouts, *grids[8].layouts))
    usable = overhead_of(gpu, both).usable
    assert usable == overhead_of(gpu, grids[1], grids[1].layouts[0]).usable
    beside = group_bytes(gpu, both).reshape(-1)
    assert beside[0] == 0
    assert overhead_of(gpu, grids[8], grids[8].layouts[0]).usable == usable - beside[1]


def test_counts_are_powers_of_two_then_whole_nodes() -> None:
    assert counts_up_to(40, 8, any_count=False) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert counts_up_to(12, 4, any_count=False) == [1, 2, 4, 8, 12]
    assert counts_up_to(12, 6, any_count=False) == [1, 2, 4, 6, 12]
    assert counts_up_to(5, 8, any_count=True) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_largest_model_as_a_loop_of_plans_finds_it() -> None:
    words: dict[str, Any] = {"gpu": GPU, "gpus": 2, "precision": "bf16-mixed", "offload": "none", "seq_len": 2048}
    found = memcalc.largest("model", **words, search="qwen2.5", tight=True)
    named = [m for m in catalog.models() if "qwen2.5" in m.name.casefold()]
    models = [m for m in named if m.images is None and not m.counted_parts]
    fitting = {}
    for model in models:
        plans = memcalc.plan(model=model.name, **words, micro_batch=1, global_batch=2, top=1, advice=False).plans
        if plans:
            fitting[model.name] = memcalc.estimate(model=model.name, gpu=GPU).model.parameters
    assert found.answer == max(fitting, key=lambda name: fitting[name])
    assert found.best is not None
    assert estimated(found.best.command).verdict == found.best.verdict
    sizes = [miss.parameters for miss in found.beyond]
    assert sizes == sorted(sizes)  # type: ignore[type-var]
    assert all(size > fitting[str(found.answer)] for size in sizes if size)
    assert all(miss.missing > 0 for miss in found.beyond)


def test_models_for_which_an_option_is_refused_are_left_out_of_the_largest() -> None:
    """The kernel of Mamba-2 reads a weight itself, which then has no nf4: that leaves out most of the Nemotrons."""
    words: dict[str, Any] = {"gpu": "a100-80g", "gpus": 1, "lora": 16, "quantize": "nf4", "offload": "none"}
    found = memcalc.largest("model", **words, search="nemotron")
    assert found.answer == "nemotron-mini-4b"
    (said,) = (text for text in found.warnings if "left out" in text)
    assert "Mamba-2" in said


@pytest.mark.parametrize(("seq_len", "offloaded"), [(2048, False), (1024, True)])
def test_the_answer_is_offloaded_only_where_no_other_strategy_reaches_it(seq_len: int, offloaded: bool) -> None:
    """On a T4 as many sequences of 2,048 tokens fit as they are (`--offload none` says so), of 1,024 one less."""
    words: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "t4", "gpus": 1, "lora": 16, "quantize": "nf4"}
    found = memcalc.largest("micro-batch", **words, seq_len=seq_len)
    kept = memcalc.largest("micro-batch", **words, seq_len=seq_len, offload="none")
    assert found.best is not None
    assert isinstance(found.answer, int)
    assert isinstance(kept.answer, int)
    assert found.answer == kept.answer + offloaded
    assert bool(found.best.strategy.offload) == offloaded


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "memcalc min gpus --model llama-3.1-8b --gpu t4 --lora usual --quantize nf4 --tight"),
        (["--seq-len", "64k"], "--seq-len 64k --lora usual --quantize nf4 --up-to 256"),
        (["--seq-len", "64k", "--up-to", "8"], "memcalc plan --model llama-3.1-8b --gpu t4 --seq-len 64k --lora usual"),
    ],
)
def test_where_no_number_of_gpus_suffices_the_next_line_is_another_question(more: list[str], line: str) -> None:
    words = ["min", "gpus", "--model", "llama-3.1-8b", "--gpu", "t4", "--lora", "--quantize", "nf4", *more]
    screen = RUN.invoke(app, words, env={"COLUMNS": "200"}).output
    assert line in " ".join(screen.split())


def test_an_option_that_is_refused_for_every_model_is_refused() -> None:
    with pytest.raises(InputError, match="a quantized base needs"):
        memcalc.largest("model", gpu="a100-80g", gpus=1, search="qwen2.5", quantize="nf4", precision="fp32")


@pytest.mark.parametrize(("offload", "said"), [([], True), (["--offload", "params,activations"], False)])
def test_an_answer_that_rests_on_host_memory_says_how_to_ask_without(offload: list[str], *, said: bool) -> None:
    """Of 70B one GPU holds the blocks alone, with 1.1 TiB in host memory: its share is 256 GiB; who asks gets all."""
    words = ["min", "gpus", "--model", "llama-3.1-70b", "--gpu", "h100", "--up-to", "8", *offload]
    screen = RUN.invoke(app, words, env={"COLUMNS": "200"}).output
    assert f"{'8 GPUs' if said else '1 GPU'} · fits · offload params+activations" in screen
    assert ("host memory 256 GiB per GPU, its share of the node's" in screen) is said
    assert ("--offload none: GPU only" in screen) is said


LENGTHS = (1, 7, 127, 128, 129, 500, 1023, 1024, 2048, 4095, 4096, 4097, 10_007)


@pytest.mark.parametrize(
    ("model", "framework"),
    [("llama-2-7b", "fsdp2"), ("mistral-7b-v0.1", "hf"), ("gemma-2-2b", "hf"), ("llama-3-8b", "litgpt"),
     ("mixtral-8x7b", "megatron"), ("t5-base", "fsdp2")],
)  # fmt: skip
def test_a_column_of_lengths_gives_the_bytes_of_each_alone(model: str, framework: str) -> None:
    words = {"gpus": 8, "global_batch": 64, "framework": framework, "tp": 1, "pp": 1, "cp": 1}
    job = api.resolve(model, GPU, words)
    spec, gpu = job.model, job.gpu
    lengths = [n for n in LENGTHS if spec.positions != "learned" or n <= spec.max_positions]
    base = axes.space(job.request, spec, gpu, job.node, 8)[0]
    workspaces = overhead_of(gpu, base).workspaces
    for run in runs(spec, loss_of(base), lengths):
        grid = replace(base, micro_batches=(3,) * len(run), seq_lens=run)
        ledger = build_ledger(ModelOnGrid(spec, grid), workspaces, detail=False)
        for place, length in enumerate(run):
            alone = replace(base, micro_batches=(3,), fixed=base.fixed.model_copy(update={"seq_len": length}))
            other = build_ledger(ModelOnGrid(spec, alone), workspaces, detail=False)
            for mine, its in ((ledger.reserved(), other.reserved()), (ledger.peak(), other.peak())):
                column = np.broadcast_to(mine, grid.shape)[..., place : place + 1]
                assert np.array_equal(column, np.broadcast_to(its, alone.shape)), (length, place)


def test_lengths_on_both_sides_of_a_window_are_not_one_grid() -> None:
    job = api.resolve("mistral-7b-v0.1", GPU, {"framework": "hf"})
    spec, gpu = job.model, job.gpu
    base = axes.space(job.request, spec, gpu, job.node, 1)[0]
    grid = replace(base, micro_batches=(1, 1), seq_lens=(4095, 4096))
    with pytest.raises(ValueError, match=MIXED):
        build_ledger(ModelOnGrid(spec, grid), overhead_of(gpu, grid).workspaces)


JOB: dict[str, Any] = {"model": "gpt2", "gpu": GPU}


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda: memcalc.largest("sequence-len", **JOB), UnknownNameError, "did you mean 'seq-len'"),
        (lambda: memcalc.largest("gpus", **JOB), UnknownNameError, "seq-len, micro-batch, model"),
        (lambda: memcalc.smallest("gpu", **JOB), UnknownNameError, "did you mean 'gpus'"),
        (lambda: memcalc.largest("seq-len", **JOB, seq_len=512), InputError, "leave it out"),
        (lambda: memcalc.smallest("gpus", **JOB, gpus=4), InputError, "leave it out"),
        (lambda: memcalc.largest("model", **JOB), InputError, "must be left out"),
        (lambda: memcalc.largest("seq-len", gpu=GPU), MissingError, "give --model"),
        (lambda: memcalc.largest("seq-len", **JOB, step=0), InputError, "whole number from 1"),
        (lambda: memcalc.largest("seq-len", **JOB, step="many"), InputError, "step"),
        (lambda: memcalc.largest("seq-len", **JOB, step=4096), InputError, "1,024 positions"),
        (lambda: memcalc.largest("seq-len", **JOB, gpus=8, tp=5), CombinationError, "no valid layout"),
        (lambda: memcalc.largest("seq-len", model="vit-base-16", gpu=GPU), InputError, "fixed number of tokens"),
        (lambda: memcalc.largest("micro-batch", **JOB, gpus=8, global_batch=3, tp=1, pp=1, cp=1), CombinationError,
         "global-batch"),
        (lambda: memcalc.largest("model", gpu=GPU, family="lama"), UnknownNameError, "did you mean"),
        (lambda: memcalc.largest("model", gpu=GPU, search="no such model"), UnknownNameError, "search"),
        (lambda: memcalc.smallest("gpus", **JOB, up_to=-1), InputError, "up-to"),
        (lambda: memcalc.largest("seq-len", **JOB, wibble=1), UnknownNameError, "wibble"),
    ],
)  # fmt: skip
def test_a_wrong_question_gets_a_sentence(ask: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ask()


def test_nothing_fits_says_what_is_missing_and_exits_with_one() -> None:
    line = ["max", "seq-len", "--model", "llama-3-70b", "--gpu", GPU, "--gpus", "1", "--offload", "none"]
    result = RUN.invoke(app, [*line, "--format", "json"])
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["schema"] == "memcalc.max/1"
    assert answer["answer"] is answer["best"] is None
    assert answer["beyond"][0]["value"] == 1
    # bf16 weights with fp32 master, moments and gradients are 16 bytes a parameter or more
    assert answer["beyond"][0]["device"] > 70.5e9 * 12


def test_commands_answer_in_every_format() -> None:
    found = memcalc.largest("micro-batch", **SMALL, precision="fp32", recompute="none", seq_len=1024, tight=True)
    assert found.best is not None
    for form in FORMATS:
        text = render(report(found), form)
        assert str(found.answer) in text, form
        words = ("does-not-fit", "over by", "out of memory")
        assert any(word in text.replace("&#160;", " ") for word in words), form
    answer = json.loads(render(report(found), "json"))
    assert answer["answer"] == answer["best"]["value"] == found.answer
    assert answer["beyond"][0]["value"] == found.beyond[0].value


def test_an_answer_of_one_is_in_the_singular() -> None:
    found = memcalc.largest(
        "micro-batch", gpu="rtx-4090", gpus=8, model="qwen2.5-7b", lora="16", quantize="nf4", autocast=False
    )
    assert found.answer == 1
    assert render(report(found), "plain", width=200).startswith("1 sequence per micro-batch,")


def test_an_answer_that_offloads_says_so_with_the_host_memory_that_it_needs() -> None:
    words = {"model": "llama-3.2-1b", "seq_len": 2048, "framework": "fsdp2", "offload": ("params",)}
    known = memcalc.largest("micro-batch", gpu="a100-40g", gpus=8, **words)
    unknown = memcalc.largest("micro-batch", gpu="rtx-3090", gpus=4, **words)
    plain = memcalc.largest("micro-batch", gpu="a100-40g", gpus=8, **{**words, "offload": "none"})
    heads = [render(report(found), "plain", width=200).splitlines()[0] for found in (known, unknown, plain)]
    assert known.best is not None
    gib = known.best.host_memory / 2**30
    assert heads[0].endswith(f", fits, offload params, {gib:.0f} GiB/node")
    assert ", fits if host memory suffices, offload params, " in heads[1]
    assert heads[2].endswith(", fits")


def test_the_printed_line_reproduces_the_answer() -> None:
    line = ["max", "micro-batch", "--model", "gpt2", "--gpu", GPU, "--gpus", "1", "--framework", "plain", "--tight"]
    first = json.loads(RUN.invoke(app, [*line, "--format", "json"]).stdout)
    again = json.loads(RUN.invoke(app, [*shlex.split(first["command"])[1:], "--format", "json"]).stdout)
    for name in ("answer", "best", "beyond", "command", "searched", "replayed"):
        assert first[name] == again[name], name


def test_what_is_completed_and_a_wrong_word_answered() -> None:
    result = RUN.invoke(app, ["max", "seqlen", "--model", "gpt2", "--gpu", GPU])
    assert result.exit_code == 2
    assert "did you mean 'seq-len'" in result.output
    assert RUN.invoke(app, ["min", "gpus", "--model", "gpt2", "--gpu", GPU, "--up-to", "2"]).exit_code == 0


@pytest.mark.slow
def test_random_questions_agree_with_estimate() -> None:
    """Whatever is drawn: the printed line gives the same figures, and the next value the verdict that is told."""
    draw, asked = random.Random(20_261_121), 0  # noqa: S311 - a seeded choice of test cases
    models, gpus = (
        [m.name for m in catalog.models() if not (m.images and m.images.depends_on_size)],
        [g.name for g in catalog.gpus()],
    )
    while asked < 40:
        words: dict[str, Any] = {
            "model": draw.choice(models),
            "gpu": draw.choice(gpus),
            "gpus": draw.choice([1, 4, 8]),
            "framework": draw.choice(["fsdp2", "fsdp1", "hf", "ddp", "deepspeed", "megatron", "torchtitan"]),
            "recompute": draw.choice(["full", "none"]),
            "offload": "none",
            "tight": draw.choice([True, False]),
            "step": draw.choice([1, 16]),
        }
        what, name = draw.choice([("seq-len", "seq_len"), ("micro-batch", "micro_batch")])
        try:
            found = memcalc.largest(what, **words)
        except InputError:
            continue
        asked += 1
        if found.best is None:
            continue
        there = estimated(found.best.command)
        assert (there.verdict, there.peak.device) == (found.best.verdict, found.best.peak.device), words
        assert there.verdict in ({"fits"} if not words["tight"] else {"fits", "tight"})
        for miss in found.beyond:
            batch = found.best.global_batch // found.best.strategy.micro_batch
            changed = {name: miss.value}
            if what == "micro-batch":
                changed["global_batch"] = batch * int(miss.value)
            beyond = estimated(found.best.command, **changed)
            assert (beyond.verdict, beyond.peak.device) == (miss.verdict, miss.device), words


def test_the_same_question_has_the_same_answer_to_the_byte() -> None:
    texts = {render(report(memcalc.largest("micro-batch", **SMALL, seq_len=256)), form) for form in ("json",) * 2}
    assert len(texts) == 1
    assert "elapsed" not in texts.pop()
    words = ["max", "micro-batch", "--model", "gpt2", "--gpu", GPU, "--gpus", "1", "--seq-len", "256", "-v"]
    shown = RUN.invoke(app, words)
    assert re.search(r", \d+ simulated", shown.stdout)


def test_unequal_stages_are_open_to_the_inverse_questions() -> None:
    """126 blocks: of the depths that divide 64 GPUs equal shares have 2 alone, with embedding and loss 4, 8 and 16."""
    words = {"model": "llama-3.1-405b", "gpu": "h200", "framework": "megatron", "tp": 8, "cp": 1, "gpus": 128}
    longest = memcalc.largest("seq-len", **words, recompute="full", offload="none", step=1024)
    assert longest.best is not None
    assert longest.best.strategy.pp > 2
    assert longest.best.strategy.embedding_in_split
    again = memcalc.estimate(**longest.best.job.keywords())
    assert (again.strategy, again.peak.device) == (longest.best.strategy, longest.best.peak.device)


def test_an_answer_computes_no_more_blocks_again_than_a_stage_has() -> None:
    """94 blocks, embedding and loss are 6 a stage over 16 and 3 over 32: Megatron-LM counts within each stage."""
    found = memcalc.smallest(
        "gpus", model="qwen3-235b-a22b", gpu="h200", framework="megatron", offload="none", micro_batch=1
    )
    assert found.best is not None
    strategy = found.best.strategy
    kind, _, count = strategy.recompute.partition("-")
    assert strategy.pp > 1
    assert kind != "block" or int(count) < 96 // strategy.pp


def test_stages_that_are_said_are_taken() -> None:
    words = {"model": "gpt2", "gpu": GPU, "framework": "megatron", "pp": 4, "gpus": 4, "seq_len": 512}
    fields = {"strategy.first_stage_layers": 2, "strategy.last_stage_layers": 4}
    found = memcalc.largest("micro-batch", **words, settings=fields)
    assert found.best is not None
    assert (found.best.strategy.first_stage_layers, found.best.strategy.last_stage_layers) == (2, 4)


def test_a_limit_that_is_logits_names_the_loss_that_makes_fewer() -> None:
    """Logits of 128,256 words end an 8B on 8 H100; without them the same search goes several times as far."""
    job: dict[str, Any] = {"model": "llama-3-8b", "gpu": "h100", "gpus": 8}
    result = memcalc.largest("seq-len", **job)
    assert result.limit.endswith("less with --loss fused-linear")
    fused = memcalc.largest("seq-len", **job, loss="fused-linear")
    assert fused.answer > 3 * result.answer
    assert "--loss" not in fused.limit
    assert memcalc.largest("seq-len", **job, lora=True).limit.endswith("less with --loss fused-linear")


def test_what_is_refused_of_each_strategy_is_refused_of_the_job() -> None:
    """Not tried on 100,000 strategies, which took a minute and said that none is valid."""
    with pytest.raises(CombinationError, match="'reentrant-inside': needs FSDP 1's units"):
        memcalc.smallest(
            "gpus", model="clip-vit-h-14", gpu="b200", framework="torchtitan", global_batch=8,
            settings={"strategy.checkpoint": "reentrant-inside"},
        )  # fmt: skip


def test_the_fewest_gpus_have_their_share_of_their_nodes_host_memory_alone() -> None:
    """13B with Adam keeps 16 bytes a weight on the host, 194 GiB: an eighth of a DGX A100 has 128."""
    words = {"model": "llama-2-13b", "gpu": "a100-40g", "framework": "fsdp2", "recompute": "full"}
    found = memcalc.smallest("gpus", **words, tight=True)
    assert found.best is not None
    assert found.best.value > 1
    assert found.best.host_memory <= found.best.value * 128 * 2**30
    assert "128 GiB per GPU" in found.assumptions["host memory"]
    assert re.match(r"host memory: on \d GPUs? offload needs \d+ GiB per GPU and has 128, its share", found.limit)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama-3-8b"])
def test_the_fewest_gpus_train_as_a_plan_on_them_does(model: str) -> None:
    """One sequence a step under TP 8 fits on as few, and trains at a twentieth of the speed of experts apart."""
    words: dict[str, Any] = {"model": model, "gpu": "h100", "framework": "megatron"}
    best = memcalc.smallest("gpus", **words).best
    assert best is not None
    (first,) = memcalc.plan(**words, gpus=best.value, top=1, advice=False).plans
    assert best.strategy == first.strategy
    assert best.time.tokens_per_second_per_gpu == pytest.approx(first.time.tokens_per_second_per_gpu)


def test_a_cache_that_grows_where_tensors_do_not_is_named_as_the_limit() -> None:
    """At 11,009 tokens fp32 activations are larger than the gradient of an MLP's weight, of 4096 × 11008."""
    words = {"model": "llama-2-7b", "gpu": "a100-80g", "gpus": 2, "recompute": "full", "zero": 3, "offload": "none"}
    words |= {"framework": "fsdp2", "precision": "bf16-mixed", "global_batch": 2}
    last, following = (memcalc.estimate(**words, micro_batch=1, seq_len=length).peak for length in (11008, 11009))
    assert last.allocated == following.allocated
    more = (following.reserved - last.reserved) / 2**30
    found = memcalc.largest("seq-len", **words, tp=1)
    assert found.answer == 11008
    assert found.limit.startswith(f"allocator cache: {more:.1f} GiB more at 11,009")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ({"framework": "megatron", "gpus": 24, "cp": 3}, True),
        ({"framework": "torchtitan", "gpus": 8, "cp": 4, "seq_len": 8196}, True),
        ({"framework": "megatron", "gpus": 8, "cp": 4, "cp_kind": "a2a", "seq_len": 8196}, True),
        ({"framework": "megatron", "gpus": 8, "cp": 4}, False),
        ({"framework": "deepspeed", "gpus": 8, "cp": 4, "zero": 3, "seq_len": 8196}, False),
    ],
    ids=str,
)
def test_context_parallel_ranks_have_two_equal_parts_of_a_sequence(words: dict[str, Any], refused: bool) -> None:
    """Megatron-LM d98e8a64 ``validate_args``; torchtitan ``ParallelDims.seq_len_divisor``. Ulysses needs one part."""
    job: dict[str, Any] = {"model": "llama-3-8b", "gpu": "h100", "seq_len": 8192, "recompute": "full", **words}
    if not refused:
        assert memcalc.estimate(**job).peak.device > 0
        return
    with pytest.raises(CombinationError, match=rf"cp {words['cp']}: 2 x cp must be a divisor of the sequence length"):
        memcalc.estimate(**job)


def test_an_inverse_question_is_asked_of_as_many_gpus_as_an_estimate() -> None:
    """One where nothing is said, and as many as degrees need."""
    words = {"model": "llama-3.2-1b", "gpu": "h100", "framework": "megatron"}
    for degrees, gpus in ({}, 1), ({"tp": 2}, 2):
        answer = memcalc.largest("micro-batch", **words, **degrees, offload="none")
        estimate = memcalc.estimate(**words, **degrees)
        assert answer.hardware.gpus == estimate.hardware.gpus == gpus
        assert answer.assumptions["gpus"] == estimate.assumptions["gpus"] == str(gpus)
