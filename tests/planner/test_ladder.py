"""The staged reduction: each stage is an estimate, states are bytes a parameter, and both readings say what they are.

Run as a script, this file writes the tables of docs/ladder.md anew.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import CombinationError, InputError, UnknownNameError
from memcalc.report import render
from memcalc.report.charts.changes import ladder_chart
from memcalc.report.ladder import bars_of, end_of, parts_of, report
from memcalc.report.tables import Document, Report
from memcalc.report.terminal import draw
from memcalc.results.changes import Ladder, LadderReading, LadderStage
from memcalc.units import GIB

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ladder.md"
TABLE = re.compile(r"(<!-- (\w+): written by tests/planner/test_ladder.py -->\n).*?(<!-- end of \w+ -->)", re.DOTALL)
LLAMA_2_7B = 6_738_415_616
"""Parameters, as Meta's checkpoint has them."""
ONE_GPU: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-80g", "framework": "plain"}
SMALL: dict[str, Any] = {"model": "gpt2-medium", "gpu": "rtx-3090", "framework": "plain", "seq_len": 512}
VISION: dict[str, Any] = {
    "gpu": "rtx-3090",
    "framework": "plain",
    "micro_batch": 16,
    "global_batch": 16,
    "stages": ["precision=16-bit", "optimizer=adamw-8bit", "recompute=full", "micro-batch=2"],
}


@functools.cache
def known(name: str) -> Ladder:
    """The ladders that several tests look at."""
    if name == "vision":
        return memcalc.ladder(**VISION, model=str(vision_model()))
    return memcalc.ladder(**{"7b": ONE_GPU, "small": SMALL}[name])


@functools.cache
def vision_model() -> Path:
    """The 3B vision model of the page, as a file."""
    import tempfile

    text = re.search(
        r"^```toml file=vit-3b.toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert text is not None
    path = Path(tempfile.mkdtemp()) / "vit-3b.toml"
    path.write_text(text[1], encoding="utf-8")
    return path


def reading(found: Ladder, name: str) -> LadderReading:
    return next(one for one in found.readings if one.name == name)


def run(line: str) -> Any:
    return CliRunner().invoke(app, shlex.split(line)[1:], env={"COLUMNS": "80", "NO_COLOR": "1"}, prog_name="memcalc")


# ------------------------------------------------------------------------------------------------------- the figures


def test_every_stage_is_what_estimate_says_of_its_command() -> None:
    """Component by component, with interval, verdict, phases and host memory, through the command line."""
    stages = [stage for one in known("small").readings for stage in one.stages]
    assert len(stages) == 12
    for stage in stages:
        said = json.loads(run(f"{stage.command} --format json").output)
        ours = stage.model_dump(mode="json")
        for name in ("components", "peak", "interval", "verdict", "phases", "host_memory", "tier_memory", "strategy"):
            assert ours[name] == said[name], (stage.command, name)
        assert sum(size for _, size in parts_of(stage)) == said["peak"]["device"]


@pytest.mark.parametrize(
    ("name", "weight", "master"), [("pure-16-bit", 2, 0), ("fp32-master", 2, 4), ("autocast", 4, 0)]
)
def test_states_are_bytes_a_parameter(name: str, weight: int, master: int) -> None:
    """AdamW, unsharded, to the byte: fp32 is 4 + 4 + 8, pure 16-bit 2 + 2 + 4, a master copy 2 + 2 + 4 + 8."""
    start, half = (at_loss(stage) for stage in reading(known("7b"), name).stages[:2])
    assert (start["parameters"], start["gradients"], start["optimizer"]) == tuple(
        width * LLAMA_2_7B for width in (4, 4, 8)
    )
    moments = 4 if name == "pure-16-bit" else 8
    assert half["parameters"] == half["gradients"] == weight * LLAMA_2_7B
    assert half["optimizer"] == (master + moments) * LLAMA_2_7B


def at_loss(stage: LadderStage) -> dict[str, int]:
    """Components where backward begins: all states are there, and nothing of the step."""
    found = json.loads(run(f"{stage.command} --format json").output)
    return dict(found["stages"][0]["phases"]["loss"])


def test_autocast_keeps_fp32_weights_and_copies_them() -> None:
    """torch.autocast saves nothing of the states, and holds a 16-bit copy of each linear layer's weight on top."""
    start, cast = (at_loss(stage) for stage in reading(known("7b"), "autocast").stages[:2])
    assert {name: start[name] for name in ("parameters", "gradients", "optimizer")} == {
        name: cast[name] for name in ("parameters", "gradients", "optimizer")
    }
    table = 32_000 * 4096  # the embedding is looked up, not multiplied
    assert cast["buffers"] - start["buffers"] == pytest.approx(2 * (LLAMA_2_7B - table), rel=1e-3)


def test_eight_bit_adam_takes_a_byte_for_each_moment() -> None:
    """The way of the 3B vision model: blockwise scales come on top, one fp32 number for 256 elements."""
    stage = reading(known("vision"), "pure-16-bit").stages[4]
    parameters = known("vision").model.parameters
    assert stage.components.parameters == 2 * parameters
    assert 2 * parameters < stage.components.optimizer < 2.05 * parameters


def test_the_vision_models_way_fits_with_16_bit_weights_alone() -> None:
    """The working note's table holds where weights are 16-bit; under autocast the same stages need over 30 GB."""
    found = known("vision")
    assert {one.name: one.first for one in found.readings} == {"pure-16-bit": 3, "fp32-master": None, "autocast": None}
    assert reading(found, "pure-16-bit").stages[-1].peak.device < 22e9
    assert reading(found, "autocast").stages[-1].peak.device > 30e9


def test_savings_and_speeds_are_beside_the_stage_before() -> None:
    for one in known("7b").readings:
        for before, stage in zip(one.stages, one.stages[1:], strict=False):
            assert stage.saved == before.peak.device - stage.peak.device
            assert stage.time is not None
            assert before.time is not None
            ratio = stage.time.tokens_per_second_per_gpu / before.time.tokens_per_second_per_gpu
            assert stage.speed == pytest.approx(ratio)
        assert (one.stages[0].saved, one.stages[0].speed) == (0, None)
        assert any("stage 3 are not validated: offload" in said for said in one.warnings)


# ------------------------------------------------------------------------------------------------------ the readings


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ({"framework": "fsdp2", "gpus": 2}, ["pure-16-bit", "fp32-shards"]),
        ({"framework": "deepspeed", "gpus": 2}, ["pure-16-bit", "fp32-master"]),
        ({"framework": "megatron", "gpus": 2}, ["fp32-master"]),
        ({"framework": "hf"}, ["pure-16-bit", "autocast"]),
        ({"framework": "hf", "gpus": 2, "zero": 3}, ["pure-16-bit", "fp32-shards"]),
        ({"framework": "plain", "gpu": "v100-32g"}, ["fp32-master", "autocast"]),
        ({"framework": "plain", "precision": "bf16-autocast"}, ["autocast"]),
        ({"framework": "plain", "reading": "autocast"}, ["autocast"]),
        ({"framework": "deepspeed", "stages": ["precision=bf16-mixed"]}, ["fp32-master"]),
    ],
    ids=str,
)
def test_a_reading_is_named_for_what_the_framework_keeps(words: dict[str, Any], kinds: list[str]) -> None:
    """The same word bf16-mixed is fp32 shards under FSDP, and 16-bit weights with a master under ZeRO and Megatron."""
    found = memcalc.ladder(**{"model": "gpt2", "gpu": "rtx-3090", **words})
    assert [one.storage.kind for one in found.readings] == kinds
    dtype = "fp16" if "gpu" in words else "bf16"
    assert all(one.precision.startswith(dtype) for one in found.readings)


def test_fp16_weights_alone_are_refused_with_the_reason() -> None:
    found = memcalc.ladder(model="gpt2", gpu="v100-32g", framework="plain")
    assert any("GradScaler refuses gradients in fp16" in said for said in found.left_out)
    with pytest.raises(CombinationError, match="no bf16 arithmetic"):
        memcalc.ladder(model="gpt2", gpu="v100-32g", framework="plain", reading="pure-16-bit")


# -------------------------------------------------------------------------------------------------------- the stages


def test_the_recipes_ladder_has_the_recipes_steps() -> None:
    job: dict[str, Any] = {"model": "llama-3-8b", "gpu": "a100-40g", "gpus": 4, "micro_batch": 1}
    steps = memcalc.plan(**job, recipe=True, top=1).recipe
    found = reading(memcalc.ladder(**job, recipe=True, reading="fp32-master"), "fp32-master")
    assert [stage.strategy for stage in found.stages] == [step.strategy for step in steps]
    assert [stage.verdict != "does-not-fit" for stage in found.stages] == [step.fits for step in steps]
    assert found.first == next(place for place, step in enumerate(steps) if step.fits)
    for stage, step in zip(found.stages, steps, strict=True):
        assert not step.fits or stage.peak.device == step.device
        assert stage.time is not None
        assert stage.time.tokens_per_second_per_gpu == pytest.approx(step.tokens_per_second_per_gpu)


def test_own_stages_are_cumulative() -> None:
    found = memcalc.ladder(**SMALL, stages=["recompute=full", "micro-batch=2,optimizer=adamw-8bit", "precision=bf16"])
    (one,) = found.readings
    strategies = [stage.strategy for stage in one.stages]
    assert [(s.precision, s.recompute, s.micro_batch, s.optimizer) for s in strategies] == [
        ("fp32", "none", 1, "adamw"),
        ("fp32", "full", 1, "adamw"),
        ("fp32", "full", 2, "adamw-8bit"),
        ("bf16", "full", 2, "adamw-8bit"),
    ]
    assert one.stages[3].also == {"attention": "flash"}, "fp32 has no flash attention, so the kernel changes too"
    assert "attention" not in found.assumptions


def test_stages_that_the_job_already_has_are_not_made() -> None:
    found = memcalc.ladder(**SMALL, recompute="full", offload="none", reading="pure-16-bit")
    assert [stage.change for stage in found.readings[0].stages] == ["", "precision=bf16"]


def test_a_start_that_is_not_possible_is_left_out_and_said() -> None:
    found = memcalc.ladder(**SMALL, lora="8:qkv", quantize="nf4")
    assert [one.name for one in found.readings] == ["pure-16-bit"], "a frozen base has no fp32 master"
    one = found.readings[0]
    assert [stage.strategy.precision for stage in one.stages] == ["bf16"] * len(one.stages)
    assert one.storage.said == "a frozen nf4 base; adapters, their gradients and states in fp32"
    assert one.left_out[0].startswith("the start, fp32: quantize 'nf4':")


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ({"stages": ["recompte=full"]}, InputError, "stage 'recompte': .*did you mean 'recompute'"),
        ({"stages": ["precision=bf15"]}, InputError, "stage 'precision=bf15'.*did you mean 'bf16'"),
        ({"stages": ["full"]}, InputError, "must be words with values"),
        ({"stages": ["zero=2,zero=3"]}, InputError, "stage .zero.: given twice"),
        ({"stages": ["zero=3"]}, CombinationError, "stage 'zero=3': zero 3: "),
        ({"stages": ["strategy.reduce_dtyp=bf16"]}, InputError, "did you mean 'strategy.reduce_dtype'"),
        ({"reading": "pure16"}, InputError, "did you mean 'pure-16-bit'"),
        ({"reading": "autocast", "precision": "bf16"}, CombinationError, "precision bf16 is given"),
        ({"recipe": True, "stages": ["recompute=full"]}, CombinationError, "chooses the stages"),
        ({"recompte": "full"}, UnknownNameError, "did you mean 'recompute'"),
    ],
    ids=str,
)
def test_wrong_words_are_refused_by_name(words: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        memcalc.ladder(**SMALL, **words)


def test_exit_codes() -> None:
    line = "memcalc ladder --model gpt2 --gpu t4 --framework plain --reading autocast --stage "
    assert run(line + "recompute=full").exit_code == 0
    assert run(line + "micro-batch=256 --micro-batch 256 --global-batch 256").exit_code == 1
    assert run(line + "recompute=ful").exit_code == 2


# ---------------------------------------------------------------------------------------------- what is to be looked at


def whole(shown: Report) -> Document:
    """All of an answer, as -v shows it."""
    return shown.document._replace(screen=())


@pytest.mark.parametrize("width", [80, 160])
def test_a_screen_has_a_bar_in_a_row_of_one_reading(width: int) -> None:
    lines = draw(report(known("7b")).document, width, colour=False).splitlines()
    bars = [line for line in lines if re.match(r"\d  (\+ |start)", line) and "┃" in line]
    stages = next(mode for mode in known("7b").readings if mode.name == "fp32-master").stages
    assert [float(line.split()[-1]) for line in bars] == [round(stage.peak.device / GIB, 1) for stage in stages]
    assert len({line.index("┃") for line in bars}) == 1
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_bars_have_one_scale_with_the_capacity_at_one_place(width: int) -> None:
    text = draw(whole(report(known("7b"))), width, colour=False)
    commands = text.index("Reproduce with:")
    assert max(map(len, text[:commands].splitlines())) <= width
    lines = text.splitlines()
    bars = [line for line in lines if re.fullmatch(r"[PA][PGOABCX┃·»]+", line)]
    stages = [stage for one in known("7b").readings for stage in one.stages]
    assert len(bars) == len(stages)
    assert len({line.index("┃") for line in bars}) == 1
    end = end_of(known("7b"))
    for line, stage in zip(bars, stages, strict=True):
        filled = len(re.findall("[PGOABCX]", line))
        assert filled == pytest.approx(stage.peak.device / end * (width - 1), abs=1.5)
        parts = sum(size > 0 for _, size in parts_of(stage))
        assert line.count("P") == pytest.approx(stage.components.parameters / end * (width - 1), abs=parts)


def test_a_bar_that_dwarfs_the_others_is_cut_and_says_so() -> None:
    found = memcalc.ladder(model="llama-3-8b", gpu="a100-80g", gpus=8, seq_len=8192)
    sizes = [stage.peak.device for one in found.readings for stage in one.stages]
    assert end_of(found) < max(sizes)
    assert end_of(found) >= found.capacity
    text = draw(whole(report(found)), 80, colour=False)
    assert sum(line.endswith("»") for line in text.splitlines()) == sum(size > end_of(found) for size in sizes)
    assert "» bar truncated" in text
    assert "bar truncated" in render(report(found), "html")


def test_a_screen_reader_and_ascii_get_all_stages_in_words() -> None:
    document = report(known("small"))
    plain, ascii_ = render(document, "plain"), draw(document.document, 80, colour=False, ascii_only=True)
    assert ascii_.isascii()
    for one in known("small").readings:
        for stage in one.stages:
            assert f"{stage.peak.device / GIB:.1f} GiB, {stage.verdict.replace('-', ' ')}" in plain
    assert not re.search(r"(.)\1{6}", plain), "no bar is read aloud"
    coloured = draw(document.document, 80, colour=True)
    assert all(name in coloured for name in ("parameters", "gradients", "optimizer", "activations"))


def test_every_format_has_the_same_figures() -> None:
    found = known("small")
    shown = {
        form: render(report(found), form, width=200, details=True) for form in ("rich", "markdown", "latex", "html")
    }
    rows = list(csv.DictReader(io.StringIO(render(report(found), "csv"))))
    payload = json.loads(render(report(found), "json"))
    assert payload["schema"] == "memcalc.ladder/1"
    stages = [(one.name, stage) for one in found.readings for stage in one.stages]
    for (name, stage), row in zip(stages, rows, strict=True):
        assert (row["reading"], row["stage"], row["command"]) == (name, str(stage.stage), stage.command)
        assert int(row["device [bytes]"]) == stage.peak.device
        for form, text in shown.items():
            assert f"{stage.peak.device / GIB:.2f}" in text, form
    assert Ladder.model_validate(payload) == found


def test_the_chart_draws_the_components_from_zero() -> None:
    found = known("small")
    picture = ladder_chart(found)
    for size in (picture.size, picture.narrow):
        figure = Figure(figsize=size)
        picture.draw(figure)
        check_axes(figure, found)
        assert set(picture.tips) == {patch.get_gid() for axes in figure.axes for patch in axes.patches}
    assert all(bars_of(found, one).end == end_of(found) for one in found.readings)


def check_axes(figure: Figure, found: Ladder) -> None:
    """Every part has its figure, the scale begins at zero, and the line stands at the capacity."""
    assert len(figure.axes) == len(found.readings)
    for axes, one in zip(figure.axes, found.readings, strict=True):
        assert axes.get_xlim()[0] == 0
        drawn = {patch.get_gid(): patch.get_width() for patch in axes.patches}
        for stage in one.stages:
            for name, size in parts_of(stage):
                assert drawn[f"{one.name}-{stage.stage}-{name}"] == pytest.approx(size / GIB)
        (x, _), _ = axes.collections[0].get_segments()[0]
        assert x == pytest.approx(found.capacity / GIB)
    assert figure.axes[-1].get_xlabel().endswith("[GiB]")


def test_a_chart_is_written_beside_the_table(tmp_path: Path) -> None:
    path = tmp_path / "ladder.svg"
    line = f"memcalc ladder --model gpt2 --gpu t4 --framework plain --chart {path}"
    assert run(line).exit_code == 0
    assert "memory of one GPU [GiB]" in path.read_text(encoding="utf-8")
    assert run(line).exit_code == 2, "an existing file is kept"


# -------------------------------------------------------------------------------------------------------- the page


NOTED_7B = ((56, 28, 28, 40), (28, 14, 14, 20), (28, 14, 14, 4), (2, 14, 14, 4))
"""Optimizer, gradients, parameters and activations [GB] of the working note's ladder, batch 1."""
ORDER = ("optimizer", "gradients", "parameters", "activations")


def table_7b() -> str:
    """The working note's ladder of a 7B beside ours."""
    head = "| stage | the note | pure 16-bit | fp32 master |\n| --- | --- | --- | --- |\n"
    pure, master = (reading(known("7b"), name).stages for name in ("pure-16-bit", "fp32-master"))
    rows = [
        f"| {one.change or 'fp32'} | {' / '.join(map(str, noted))} | {gigabytes(one)} | {gigabytes(other)} |\n"
        for noted, one, other in zip(NOTED_7B, pure, master, strict=True)
    ]
    return (head + "".join(rows)).replace("precision=bf16", "16 bits")


def gigabytes(stage: LadderStage) -> str:
    found = at_loss(stage)
    return " / ".join(f"{found[name] / 1e9:.1f}" for name in ORDER)


def table_3b() -> str:
    """The working note's way of a 3B vision model beside ours."""
    head = "| | the note | pure 16-bit | autocast |\n| --- | --- | --- | --- |\n"
    pure, cast = (reading(known("vision"), name).stages for name in ("pure-16-bit", "autocast"))
    rows = [
        f"| {said} | {noted} | {sized(pure[place])} | {sized(cast[place])} |\n"
        for said, noted, place in (
            ("fp32, batch 16", "24 / 12 / 12 / 30, 78 in all", 0),
            ("16 bits, 8-bit Adam, checkpointing, batch 2", "6 / 6 / 6 / 4, 22 in all", 4),
        )
    ]
    return head + "".join(rows)


def sized(stage: LadderStage) -> str:
    parts = " / ".join(f"{getattr(stage.components, name) / 1e9:.1f}" for name in ORDER)
    copies = stage.components.buffers / 1e9
    listed = f"{parts} and {copies:.1f} of copies" if copies > 1 else parts
    return f"{listed}, {stage.peak.device / 1e9:.1f} in all"


def filled(page: str) -> str:
    tables = {"seven": table_7b, "vision": table_3b}
    return TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", page)


def test_several_gpus_of_the_trainer_share_the_states() -> None:
    """What `plan --framework hf` finds on these GPUs is a stage, with 16 bytes a parameter over four ranks."""
    job: dict[str, Any] = {"model": "qwen3-8b", "gpu": "a100-80g", "gpus": 4, "framework": "hf"}
    result = memcalc.ladder(**job)
    assert result.assumptions["zero"] == "3"
    (mixed,) = (mode for mode in result.readings if mode.name == "fp32-master")
    stage = mixed.stages[2]
    assert (stage.change, stage.verdict) == ("recompute=full", "fits")
    assert stage.components.optimizer == pytest.approx(8 * 8_190_735_360 / 4, rel=1e-3)
    assert any(plan.peak.device == stage.peak.device for plan in memcalc.plan(**job, advice=False).plans)
    alone = memcalc.ladder(**{**job, "gpus": 1})
    assert alone.assumptions["zero"] == "0"


def test_where_weights_are_split_by_model_parallelism_alone_its_degrees_double_until_a_stage_fits() -> None:
    """Megatron-LM shards no weights over ranks: 6 bytes of weights and gradients of 8B are 45 GiB before TP."""
    job = {"model": "llama-3.1-8b", "gpu": "a100-40g", "gpus": 8, "framework": "megatron"}
    (reading,) = memcalc.ladder(**job).readings
    verdicts = {stage.change: stage.verdict for stage in reading.stages}
    doubled = [change for change in verdicts if change.startswith(("tp", "pp"))]
    assert doubled == [f"tp={2**power}" for power in range(1, len(doubled) + 1)]
    assert [verdicts[change] for change in doubled] == ["does-not-fit"] * (len(doubled) - 1) + ["fits"]
    assert not any("tp=" in stage.change for stage in memcalc.ladder(**job, tp=2).readings[0].stages)


def test_blocks_that_no_pipeline_divides_are_split_with_embedding_and_head() -> None:
    """126 blocks and the two ends are 128 parts: 4 stages take 32 of them each."""
    (reading,) = memcalc.ladder(model="llama-3.1-405b", gpu="h200", gpus=64, tp=8, framework="megatron").readings
    (stage,) = (stage for stage in reading.stages if stage.change == "pp=4")
    assert stage.strategy.embedding_in_split
    assert stage.strategy.loss_in_split


@pytest.mark.parametrize(("gpus", "leads"), [(8, True), (512, False)])
def test_where_no_stage_fits_the_search_is_named(gpus: int, *, leads: bool) -> None:
    """Weights and gradients of 405B, 6 bytes each, are 283 GiB on each of 8 GPUs."""
    model = "llama-3.1-405b" if leads else "llama-3.2-1b"
    words = ["ladder", "--model", model, "--gpu", "h100", "--gpus", str(gpus), "--framework", "megatron"]
    screen = " ".join(CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output.split())
    line = f"memcalc plan --model {model} --gpu h100 --gpus {gpus} --framework megatron"
    assert (f"Next, what would fit: {line}" in screen) is leads


def test_the_pages_tables_are_current() -> None:
    """`python tests/planner/test_ladder.py` writes them."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
