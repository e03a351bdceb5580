"""A module of the user's own, recorded on fake tensors: equal to the inventory, and to real steps on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from autograd import models
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.convert.huggingface import from_huggingface
from memcalc.convert.named_model import SCHEMA, read_recorded, recorded_text
from memcalc.errors import CombinationError, InputError, MemcalcError
from memcalc.planner.as_is import mode_of
from memcalc.probe.live.modules_run import probe_module
from memcalc.probe.module import modes_for, record_model
from memcalc.results.estimates import Estimate
from memcalc.specs.model import Model
from memcalc.specs.recorded import Mode, Source

HERE = Path(__file__).parents[1]
ZOO, MIXER = HERE / "module_zoo.py", HERE.parent / "docs" / "examples" / "mixer.py"
SEQ, BATCH, LAYERS = 128, 2, 2
TRANSFORMERS = {"llama": "llama-3", "tied": "smollm2", "gpt2": "gpt2", "qwen3": "qwen3", "experts": "qwen3-moe"}
SOURCES = {
    "mixer": Source(f"{MIXER}:small", inputs=f"{MIXER}:small_inputs"),
    "unet": Source(f"{ZOO}:unet", inputs=f"{ZOO}:image", loss=f"{ZOO}:distance"),
    "convnet": Source(f"{ZOO}:convnet", inputs=f"{ZOO}:image"),
    **{name: Source(f"{ZOO}:{name}", seq_len=SEQ) for name in TRANSFORMERS},
}
COUNTERS = 4096
"""Bytes of AdamW's step counters, one of 4 bytes for each tensor, and of losses: no term counts them."""


@cache
def recorded(name: str, mode: Mode) -> Model:
    return record_model(SOURCES[name], (mode,))


def estimate(model: Model | str, precision: str, recompute: str, **words: Any) -> Estimate:
    own = {"framework": "plain", "micro_batch": BATCH, "global_batch": BATCH, **words}
    return memcalc.estimate(model=model, gpu="a100-80g", precision=precision, recompute=recompute, **own)


def without_workspaces(found: Estimate) -> int:
    return found.peak.allocated - sum(t.bytes for t in found.terms if t.name == "BLAS workspaces")


def as_the_inventory(name: str, precision: str, recompute: str, **words: Any) -> None:
    """A block keeps the same to the byte (random states apart), and the peaks are 1% apart at most."""
    ours = estimate(recorded(name, mode_of(precision)), precision, recompute, seq_len=SEQ, **words)
    config = models.hf_config(TRANSFORMERS[name], layers=LAYERS)
    derived = estimate(from_huggingface(config.to_dict()), precision, recompute, seq_len=SEQ, **words)
    assert ours.model.parameters == derived.model.parameters
    states = 24 if recompute != "full" else 0  # of an attention kernel, in each block that keeps what it made
    assert 0 <= ours.saved.per_block - derived.saved.per_block <= states
    assert without_workspaces(ours) == pytest.approx(without_workspaces(derived), rel=0.01)
    assert ours.peak.reserved == pytest.approx(derived.peak.reserved, abs=2 << 20)


@pytest.mark.parametrize("recompute", ["none", "full", "every-2"])
def test_a_recorded_llama_is_the_preset(recompute: str) -> None:
    as_the_inventory("llama", "bf16", recompute)


def test_a_recorded_llama_is_sharded_like_the_preset() -> None:
    as_the_inventory("llama", "bf16-mixed", "full", framework="fsdp2", gpus=8, zero=3, global_batch=8 * BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama", "bf16-autocast"),
        ("llama", "fp32"),
        ("tied", "fp32"),
        ("gpt2", "bf16"),
        ("tied", "bf16-autocast"),
        ("qwen3", "bf16"),
        ("experts", "bf16"),
    ],
)
def test_recorded_transformers_are_the_presets(name: str, precision: str) -> None:
    for recompute in ("none", "full", "every-2"):
        as_the_inventory(name, precision, recompute)


def real_step(name: str, recompute: str, batch: int, *, fake: bool = False) -> memcalc.results.probe.ModuleProbe:
    return probe_module(
        SOURCES[name], precision="fp32", mode="fp32", recompute=recompute, optimizer="adamw", implementation="foreach",
        micro_batch=batch, seq_len=SEQ, fake=fake,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unet", "convnet"))]
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_real_step_takes_what_was_planned(name: str, recompute: str) -> None:
    """None of these is a transformer: equal blocks, blocks that keep their outputs, and blocks of which none are alike.

    Planned at another micro-batch than those that were recorded.
    """
    real = real_step(name, recompute, 4)
    assert real.components.model_dump() == real_step(name, recompute, 4, fake=True).components.model_dump()
    planned = estimate(recorded(name, "fp32"), "fp32", recompute, micro_batch=4, global_batch=4)
    assert without_workspaces(planned) == pytest.approx(real.peak, abs=COUNTERS)
    assert planned.phases["step"] >= real.phases["step"] - COUNTERS


def test_the_answer_of_a_probe_adds_up() -> None:
    named = ["--module", SOURCES["mixer"].module, "--inputs", SOURCES["mixer"].inputs]
    words = ["--micro-batch", "2", "--precision", "bf16-autocast", "--format", "json"]
    result = CliRunner().invoke(app, ["probe", "--device", "fake", *named, *words])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["schema"] == "memcalc.probe-module/1"
    assert found["peak"] == sum(found["components"].values()) == max(found["phases"].values())
    assert found["saved"] == sum(part["saved"] for part in found["parts"])
    assert found["saved"] == sum(tensor["bytes"] for tensor in found["tensors"] if not tensor["weight"])
    blocks = [part for part in found["parts"] if part["name"] == "Mixing"]
    assert len(blocks) == 3
    assert found["parameters"] == sum(part["parameters"] for part in found["parts"])


def test_a_recorded_model_is_a_file_that_needs_no_torch(tmp_path: Path) -> None:
    model, path = recorded("mixer", "fp32"), tmp_path / "mixer.json"
    path.write_text(recorded_text(model), encoding="utf-8")
    assert read_recorded(path) == model
    program = (
        "import sys, memcalc\n"
        f"plans = memcalc.plan(model={str(path)!r}, gpu='a100-80g', gpus=2, global_batch=64)\n"
        "print(plans.plans[0].peak.allocated, {p.strategy.precision for p in plans.plans}, 'torch' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    best = memcalc.plan(model=model, gpu="a100-80g", gpus=2, global_batch=64, advice=False).plans[0]
    assert out.split("\n")[0] == f"{best.peak.allocated} {{'fp32'}} False"
    assert best.strategy.tp == best.strategy.pp == best.strategy.cp == 1


def changed(data: Any, *path: Any, to: Any) -> str:
    """Return the text of a file with one value replaced."""
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return json.dumps(data)


RUN = ("model", "recording", "head", "runs", 0)


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ((*RUN, "backward"), [10**5]),
        ((*RUN, "backward"), [-1, -1]),
        ((*RUN, "forward"), [10**30]),
        ((*RUN, "records", 0, 2), -5),
        ((*RUN, "records", 0, 4), "furlong"),
        ((*RUN, "mode"), "int3"),
        (("model", "groups", 0, "block", "recorded"), None),
        (("model", "recording"), None),
        (("model", "unheard"), 1),
        (("model",), []),
    ],
)
def test_hostile_files_are_refused(path: tuple[Any, ...], to: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(changed(json.loads(recorded_text(recorded("mixer", "fp32"))), *path, to=to), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        estimate(str(file), "fp32", "none")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [f'{{"schema": "{SCHEMA}"', f'{{"schema": "{SCHEMA}", "model": ' + "[" * 10**5])
def test_broken_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="no recorded model"):
        estimate(str(file), "fp32", "none")


@pytest.mark.parametrize(
    ("factory", "words", "said"),
    [
        ("raises", {}, "calling it failed: RuntimeError: no such weights"),
        ("no_module", {}, "must return a torch.nn.Module"),
        ("frozen", {}, "no parameter that is trained"),
        ("no_gradient", {}, "no gradient flows from its loss"),
        ("no_tensor", {}, "forward must return a tensor"),
        ("too_narrow", {}, "a step of it failed: "),
        ("twice", {"block_class": "Sequential"}, "runs more than once"),
        ("line", {"block_class": "Linaer"}, "did you mean 'Linear'?"),
        ("line", {"inputs": "bad_inputs"}, "calling it failed: ValueError: no data"),
        ("line", {"loss": "many_losses"}, "a tensor of one element"),
        ("lien", {}, "did you mean 'line'?"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_sentence(factory: str, words: dict[str, str], said: str) -> None:
    own = {name: value if name == "block_class" else f"{ZOO}:{value}" for name, value in words.items()}
    with pytest.raises(MemcalcError, match=re.escape(said)) as caught:
        record_model(Source(f"{ZOO}:{factory}", **{"inputs": f"{ZOO}:row", **own}), ("fp32",), ("none",))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("module", ["nowhere.at_all:factory", "nowhere.py:factory", f"{ZOO}", f"{ZOO}:not a name"])
def test_a_factory_that_is_not_there(module: str) -> None:
    result = CliRunner().invoke(app, ["estimate", "--gpu", "a100-80g", "--module", module])
    assert result.exit_code == 2
    assert result.stderr.startswith("memcalc: --module ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"tp": 2}, "tp 2: .*not supported for --module"),
        ({"pp": 2}, "pp 2: .*not supported for --module"),
        ({"lora": "8"}, "adapters"),
        ({"quantize": "nf4"}, "quantize inside the factory"),
        ({"attention": "eager"}, "as the module calls it"),
        ({"compile": "blocks"}, "torch.compile"),
        ({"framework": "megatron"}, "ddp, deepspeed, plain"),
        ({"recompute": "selective-ops"}, "as a whole"),
        ({"optimizer": "adafactor"}, "shapes"),
        ({"seq_len": 7}, "do not depend on a length"),
        ({"precision": "bf16"}, "recorded are fp32"),
    ],
)
def test_what_a_recording_cannot_know_is_refused_by_name(words: dict[str, Any], said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        memcalc.estimate(model=recorded("mixer", "fp32"), gpu="a100-80g", **{"precision": "fp32", **words})


def test_blocks_that_are_not_alike_are_all_computed_again_or_none() -> None:
    model = recorded("mixer", "fp32")
    several = model.model_copy(update={"groups": tuple(g.model_copy(update={"count": 1}) for g in model.groups * 3)})
    assert estimate(several, "fp32", "full").saved.total == estimate(model, "fp32", "full").saved.total
    with pytest.raises(CombinationError, match="not alike"):
        estimate(several, "fp32", "every-2")


@pytest.mark.slow
def test_the_example_s_file_is_what_is_recorded(tmp_path: Path) -> None:
    """Run as ``memcalc probe --device fake --module mixer.py:mixer --save mixer.json`` in its folder."""
    made = record_model(Source(f"{MIXER}:mixer"))
    kept = read_recorded(MIXER.with_suffix(".json"))
    (tmp_path / "mixer.json").write_text(recorded_text(made), encoding="utf-8")
    again = read_recorded(tmp_path / "mixer.json")
    assert again.groups == kept.groups
    assert [end.runs for end in (again.recording.entry, again.recording.head)] == [  # type: ignore[union-attr]
        end.runs
        for end in (kept.recording.entry, kept.recording.head)  # type: ignore[union-attr]
    ]


def test_one_sequence_alone_is_warned_of_where_it_differs() -> None:
    """At a micro-batch of one a transposed tensor is contiguous as it is, and the mixer copies none."""
    said = [estimate(recorded("mixer", "fp32"), "fp32", "none", micro_batch=b, global_batch=b).warnings for b in (1, 2)]
    assert [any("at micro-batch 1" in warning for warning in warnings) for warnings in said] == [True, False]


def test_a_factory_that_asks_for_values_is_called_on_real_tensors() -> None:
    model = record_model(Source(f"{ZOO}:with_values", inputs=f"{ZOO}:row"), modes_for("fp32"), ("none",))
    assert [group.block.recorded.parameters for group in model.groups if group.block.recorded] == [42, 42]


def test_the_command_line_says_the_module_again() -> None:
    command, source = estimate(recorded("mixer", "fp32"), "fp32", "none").command, SOURCES["mixer"]
    assert f"--module {source.module} --inputs {source.inputs}" in command
