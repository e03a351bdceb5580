"""Saved plans and what is written from them: whole files, read back with every check, and plans to go back to."""

from __future__ import annotations

import json
import re
import shlex
from ast import literal_eval
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_lines import keywords
from drawing import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.convert.formats.base import WRITABLE, ConfigJob
from memcalc.errors import CombinationError, FileError, InputError, MemcalcError, MissingError, UnknownNameError
from memcalc.handoff import exported, plan_to
from memcalc.handoff.saved import estimate_of, saved_plan, steps
from memcalc.handoff.written import launch
from memcalc.planner.job import pinned
from memcalc.preflight import check
from memcalc.results.plans import Plans, SavedPlan

pytestmark = pytest.mark.usefixtures("answers_once")

LAYOUT = {"tp": 1, "pp": 1, "cp": 1}
JOB: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-40g", "gpus": 8, "global_batch": 128}
SIMPLE = {"recompute": "none/every-2/full"}


def plans(**words: Any) -> Plans:
    """Search once for each set of words: plans are frozen."""
    return _plans(repr(words))


@cache
def _plans(words: str) -> Plans:
    return memcalc.plan(**{**JOB, **LAYOUT, "top": 3, **literal_eval(words)})


def kept_plan(**words: Any) -> SavedPlan:
    """The first of the plans, saved."""
    return _kept_plan(repr(words))


@cache
def _kept_plan(words: str) -> SavedPlan:
    return saved_plan(_plans(words))


@pytest.fixture(scope="module")
def simple() -> SavedPlan:
    """Return a saved plan that both formats of FSDP can say."""
    return kept_plan(**SIMPLE)


def run(*parts: str) -> Any:
    return CliRunner().invoke(app, [*parts], prog_name="memcalc")


# ------------------------------------------------------------------------------------------------------ save and load


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = plans(**SIMPLE)
    kept = memcalc.save(found, str(path), rank=2)
    assert memcalc.load(str(path)) == kept
    assert kept.plan == found.plans[1]
    assert (kept.asked, kept.job.model, kept.job.gpu, kept.job.node) == (found.command, "llama-2-7b", "a100-40g", None)
    assert json.loads(path.read_text())["schema"] == "memcalc.saved-plan/2"


def test_words_that_a_search_does_not_choose_are_kept() -> None:
    """The saved words come to the very estimate of the plan's own line."""
    kept = saved_plan(
        plans(attention="efficient", node="dgx-a100-40g", settings={"strategy.reduce_dtype": "bf16"}, kernels="fused")
    )
    assert pinned(kept.job).options == {"attention": "efficient", "kernels": "fused"}
    assert (kept.job.node, kept.job.settings) == ("dgx-a100-40g", {"strategy.reduce_dtype": "bf16"})
    again = estimate_of(kept)
    assert (again.job, again.command) == (kept.plan.job, kept.plan.command)
    assert (again.peak.device, again.strategy) == (kept.plan.peak.device, kept.plan.strategy)


def test_a_file_that_exists_is_not_replaced(tmp_path: Path, simple: SavedPlan) -> None:
    path = tmp_path / "plan.json"
    path.write_text("mine", encoding="utf-8")
    found = plans(**SIMPLE)
    with pytest.raises(FileError, match="--force"):
        memcalc.save(found, str(path))
    assert path.read_text(encoding="utf-8") == "mine"
    memcalc.save(found, str(path), force=True)
    assert memcalc.load(str(path)) == simple
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_its_job_does_not_come_to_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the resolved words tell: no figure is computed again for it."""
    found = plans(**SIMPLE)
    other = found.plans[0].strategy.model_copy(update={"recompute": "mlp"})
    wrong = found.model_copy(update={"plans": (found.plans[0].model_copy(update={"strategy": other}),)})

    def estimate(**_: Any) -> Any:
        raise AssertionError("an estimate")

    monkeypatch.setattr(memcalc.api, "estimate", estimate)
    assert saved_plan(found).plan == found.plans[0]
    with pytest.raises(InputError, match=r"strategy.recompute of the saved plan .*'?mlp"):
        saved_plan(wrong)


def test_nothing_that_fits_is_nothing_to_save(tmp_path: Path) -> None:
    none = plans(gpus=1, offload="none", micro_batch=1, advice=False)
    assert not none.plans
    with pytest.raises(MissingError, match="Nothing fits"):
        memcalc.save(none, str(tmp_path / "plan.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 4, -1, "x"])
def test_a_rank_that_is_not_listed_is_refused(rank: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rank"):
        memcalc.save(plans(**SIMPLE), str(tmp_path / "plan.json"), rank=rank)
    assert not list(tmp_path.iterdir())


def test_a_list_of_plans_in_json_is_a_plan_too(tmp_path: Path) -> None:
    found = plans(**SIMPLE)
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(found.model_dump(mode="json", by_alias=True)), encoding="utf-8")
    assert memcalc.load(str(path), rank=2) == saved_plan(found, 2)


def text_of(saved: SavedPlan, **changes: Any) -> str:
    return json.dumps({**saved.model_dump(mode="json", by_alias=True), **changes})


WRONG = [
    ("", "JSON"),
    ("[]", "must be a table"),
    ('{"schema": "memcalc.estimate/1"}', "not 'memcalc.estimate/1'"),
    ('{"schema": "memcalc.saved-plan/3"}', "not 'memcalc.saved-plan/3'"),
    ('{"schema": "memcalc.saved-plan/2"}', "version is missing"),
    ('{"schema": "memcalc.saved-plan/1"}', "older schema memcalc.saved-plan/1.* with --save and --force"),
    ('{"schema": "memcalc.saved-plan/2", "schema": "memcalc.saved-plan/2"}', "twice"),
    ("[" * 5000, "JSON"),
    (" " * (1 << 20) + "{}", "1 MiB"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_saved_plan_is_refused_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said) as refused:
        memcalc.load(str(path))
    assert "\n" not in str(refused.value)


CHANGED = [
    (("fallbak",), [], "'fallback'"),
    (("plan", "strategi"), {}, "'strategy'"),
    (("plan", "job", "options", "sequence_length"), 5, "sequence_length"),
    (("plan", "strategy", "zero"), 7, "zero"),
    (("plan", "gpus"), "8", "gpus"),
    (("plan", "peak", "device"), 1.5, "device"),
    (("plan", "time", "step"), float("nan"), "finite"),
    (("plan", "job", "options", "seq_len"), 0, "seq-len"),
    (("fallback",), [{}], "fallback.0"),
    (("plan", "strategy", "dp"), 4, "strategy.dp"),
    (("plan", "strategy", "attention"), "math", "'flash'"),
    (("plan", "job", "gpu"), "a100", "a100-40g"),
    (("plan", "job", "model"), None, "must name its model"),
    (("job", "command"), "train", "job.command"),
]


@pytest.mark.parametrize(("place", "value", "said"), CHANGED, ids=lambda value: str(value)[:30])
def test_a_changed_file_is_refused_by_name(
    place: tuple[str, ...], value: Any, said: str, simple: SavedPlan, tmp_path: Path
) -> None:
    data = json.loads(text_of(simple))
    table = data
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InputError, match=said):
        memcalc.export(memcalc.load(str(path)), to="fsdp2")


@drawn(60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_changed_the_answer_is_a_sentence(data: st.DataObject, simple: SavedPlan, tmp_path: Path) -> None:
    """A value anywhere in the file, replaced: the file is exported or refused, without any other error."""
    content = json.loads(text_of(simple))
    table = content
    while True:
        key = data.draw(st.sampled_from(list(table) if isinstance(table, dict) else list(range(len(table)))))
        if not isinstance(table[key], dict | list) or not table[key] or data.draw(st.booleans()):
            break
        table = table[key]
    table[key] = data.draw(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.just({}), st.just([]))
    )
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        memcalc.export(memcalc.load(str(path)), to="fsdp2")
        said = ""
    except MemcalcError as error:
        said = str(error)
    assert "\n" not in said


def test_another_version_and_other_figures_are_said(simple: SavedPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    moved = simple.plan.model_copy(update={"peak": simple.plan.peak.model_copy(update={"device": 2**30})})
    path.write_text(text_of(simple, version="0.0.7", plan=moved.model_dump(mode="json")), encoding="utf-8")
    found = memcalc.load(str(path))
    assert found.notes[-1] == f"saved by memcalc 0.0.7, read by {memcalc.__version__}."
    now = f"{estimate_of(found).peak.device / 2**30:.2f} GiB"
    notes = exported(found, "fsdp2").notes
    assert any("1.00 GiB per GPU when saved" in said and now in said for said in notes)
    assert not exported(simple, "fsdp2").notes


def test_what_the_file_does_not_carry_is_said(tmp_path: Path) -> None:
    preset = (Path(memcalc.__file__).parents[1] / "presets" / "models" / "llama-3.2-1b.toml").read_text(
        encoding="utf-8"
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.toml").write_text(preset, encoding="utf-8")
    found = memcalc.plan(model="mine", gpu="h100", gpus=2, top=1, preset_dirs=(str(tmp_path),), **LAYOUT, **SIMPLE)
    kept = memcalc.save(found, str(tmp_path / "plan.json"), preset_dirs=(str(tmp_path),))
    assert any("--preset-dir" in said for said in kept.notes)
    assert memcalc.export(kept, to="fsdp2") == memcalc.export(kept, to="fsdp2", preset_dirs=[str(tmp_path)])
    (tmp_path / "other" / "gpus").mkdir(parents=True)
    with pytest.raises(UnknownNameError, match="mine"):
        memcalc.export(kept, to="fsdp2", preset_dirs=[str(tmp_path / "other")])
    done = exported(kept, "fsdp2", preset_dirs=(str(tmp_path),))
    assert done.check.endswith(f"--preset-dir {tmp_path}")


# ----------------------------------------------------------------------------------------------------------- fallback

LADDERS: list[dict[str, Any]] = [
    {},
    {"framework": "deepspeed"},
    {"framework": "torchtitan", "tp": 2},
    {"framework": "megatron", "tp": 2, "pp": 2},
    {"framework": "ddp", "model": "gpt2"},
    {"framework": "hf", "model": "llama-3.2-1b"},
    {"model": "llama-3.2-1b", "gpus": 16},
    {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 1, "framework": "plain"},
]


@pytest.mark.slow
@pytest.mark.parametrize("words", LADDERS, ids=str)
def test_fallbacks_are_safer_plans_of_the_same_job(words: dict[str, Any]) -> None:
    """Each fits and needs a tenth less than the one before; its own line says so, and what a restart keeps is kept."""
    kept = kept_plan(**words)
    assert len(kept.fallback) <= 5
    assert bool(kept.fallback) != bool(kept.no_fallback)
    last = kept.plan
    for place, one in enumerate(kept.fallback, 1):
        found = estimate_of(kept, place)
        assert (found.peak.device, found.verdict) == (one.peak.device, "fits")
        assert one.peak.device <= 0.9 * last.peak.device
        assert (one.rank, one.global_batch, one.gpus) == (place, kept.plan.global_batch, kept.plan.gpus)
        assert found.workload.global_batch == kept.plan.global_batch
        changed = {
            name
            for name in type(one.strategy).model_fields
            if getattr(one.strategy, name) != getattr(kept.plan.strategy, name)
        }
        assert changed
        assert changed <= {"micro_batch", "recompute", "zero", "offload"}
        assert set(kept.plan.strategy.offload) <= set(one.strategy.offload) or one.strategy.offload == ()
        last = one


@pytest.mark.slow
@pytest.mark.parametrize("words", LADDERS, ids=str)
def test_steps_of_a_running_job_change_what_it_can(words: dict[str, Any]) -> None:
    """Recomputation and micro-batch alone; the fastest first, each with the figures of its own line."""
    kept = kept_plan(**words)
    found = steps(kept.plan, kept.job.options)
    speeds = [one.time.tokens_per_second_per_gpu for one in found]
    assert speeds == sorted(speeds, reverse=True)
    assert "full" in {one.strategy.recompute for one in found}
    free = {"micro_batch": None, "recompute": None}
    for one in found:
        assert one.strategy.model_dump() | free == kept.plan.strategy.model_dump() | free
        assert one.strategy.micro_batch * one.accumulation_steps * one.data_parallel == kept.plan.global_batch
        again = memcalc.estimate(**keywords(one.command))
        assert (again.strategy, again.peak.device) == (one.strategy, one.peak.device)


def test_every_second_block_stands_between_none_and_all() -> None:
    """Where the framework can be told so; Megatron-LM cannot."""
    pinned = {"recompute": "none", "micro_batch": 1, "offload": "none", "model": "llama-3.2-1b", "top": 1}
    for framework, between in (("fsdp2", ["every-2"]), ("megatron", [])):
        kept = kept_plan(framework=framework, **pinned)
        assert [one.strategy.recompute for one in steps(kept.plan, {})] == [*between, "full"]
        assert not steps(kept.plan, kept.job.options)


def test_there_is_a_fallback_where_there_is_room_for_one() -> None:
    assert len(kept_plan(**SIMPLE).fallback) == 3


def test_deepspeed_takes_the_learning_rate_and_the_clipping_of_the_trainers_arguments() -> None:
    """Transformers puts them where the JSON says auto; where it says nothing DeepSpeed's own 1e-3 and 0 hold."""
    kept = saved_plan(memcalc.plan(**JOB, framework="deepspeed", zero=3, recompute="full", top=1))
    written = json.loads(memcalc.export(kept)["ds_config.json"])
    assert written["optimizer"]["params"]["lr"] == written["gradient_clipping"] == "auto"


def test_whole_states_of_deepspeed_have_fallbacks_though_none_of_them_is_offloaded() -> None:
    """DeepSpeed moves only what it divides, and a smaller micro-batch still is a plan to go back to."""
    kept = saved_plan(memcalc.plan(model="vit-large-16", gpu="v100-32g", gpus=8, framework="deepspeed", zero=0, top=1))
    assert kept.plan.strategy.zero == 0
    assert kept.fallback[0].strategy.micro_batch == kept.plan.strategy.micro_batch // 2


def test_what_is_offloaded_comes_last() -> None:
    """Its time is not fitted on measured runs, so that no figure says that it costs less than recomputation."""
    for words in LADDERS[:3]:
        offloads = [bool(one.strategy.offload) for one in kept_plan(offload="none/params", **words).fallback]
        assert offloads == sorted(offloads)


def test_what_was_typed_stays() -> None:
    kept = kept_plan(micro_batch=1, recompute="none", offload="optimizer")
    assert kept.fallback == ()
    assert "your options leave no plan" in kept.no_fallback
    with pytest.raises(InputError, match="your options leave no plan"):
        memcalc.export(kept, to="fsdp2", fallback=1)
    some = kept_plan(micro_batch="1/2", recompute="none", offload="none", model="llama-3.2-1b")
    assert {one.strategy.recompute for one in some.fallback} == {"none"}


def test_a_fallback_is_exported_like_a_plan(simple: SavedPlan) -> None:
    for place, one in enumerate(simple.fallback, 1):
        (text,) = memcalc.export(simple, to="fsdp2", fallback=place).values()
        assert f"MICRO_BATCH = {one.strategy.micro_batch} " in text
        assert f"ACCUMULATION = {one.accumulation_steps} " in text
    with pytest.raises(InputError, match="from 1 to 3"):
        memcalc.export(simple, to="fsdp2", fallback=4)


@pytest.mark.parametrize("lora", [None, "16"], ids=["weights", "adapters"])
@pytest.mark.parametrize("form", ["trainer", "axolotl"])
def test_every_fallback_of_a_plan_for_a_launcher_is_written_by_it(form: str, lora: str | None) -> None:
    """Accelerate wraps each block in a checkpoint or none (1.15, utils/fsdp_utils.py): no block in two."""
    kept = saved_plan(plan_to(form, model="llama-3.1-8b", gpu="h100", gpus=8, lora=lora, top=1))
    assert kept.plan.strategy.recompute == "none"
    assert len(kept.fallback) > 1
    for number in range(1, len(kept.fallback) + 1):
        assert memcalc.export(kept, to=form, fallback=number)


def test_the_fallbacks_of_a_model_of_images_are_what_its_launcher_has() -> None:
    """No script of memcalc's trains it, and what wraps it in FSDP 2 checkpoints all blocks or none."""
    found = memcalc.plan(model="qwen2.5-vl-7b", image_size="1024x1024", gpu="h100", gpus=8, top=1, advice=False)
    assert found.plans[0].strategy.recompute == "none"
    assert {plan.strategy.recompute for plan in saved_plan(found).fallback} == {"full"}


# -------------------------------------------------------------------------------------------------------------- export


def test_the_files_of_a_list_of_plans_are_those_of_its_saved_plan(simple: SavedPlan) -> None:
    found = memcalc.export(plans(**SIMPLE), to="fsdp2")
    assert found == memcalc.export(simple, to="fsdp2")
    assert list(found) == ["train_fsdp2.py"]


def test_a_format_that_is_not_known_is_refused(simple: SavedPlan) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fsdp2'"):
        memcalc.export(simple, to="fsdp")
    with pytest.raises(CombinationError, match="framework 'fsdp2'"):
        memcalc.export(simple, to="deepspeed")


def checked(done: Any, folder: Path) -> Any:
    """Write what was exported, and check it by the printed line alone."""
    for path, text in done.files.items():
        (folder / path.name).write_text(text, encoding="utf-8")
    words = keywords(done.check)
    return check(**{**words, "files": [str(folder / Path(name).name) for name in words["files"]]}).estimate


JOB_ALONE = {"files", "model", "gpu", "gpus", "node", "seq_len", "settings", "preset_dirs"}
"""What a printed check line may have: never a part of the strategy."""


def test_the_command_that_checks_names_the_job_alone(tmp_path: Path) -> None:
    """A DeepSpeed JSON says neither model nor sequence length nor recomputation: the Trainer's arguments do."""
    kept = kept_plan(framework="deepspeed", recompute="full", pp=1)
    done = exported(kept, path=tmp_path / "my config.json")
    assert [path.name for path in done.files] == ["my config.json", "training_args.json", "train.py"]
    assert keywords(done.check) == {
        "files": [str(tmp_path / "training_args.json")], "gpu": "a100-40g", "settings": {}, "preset_dirs": (),
    }  # fmt: skip
    assert done.launch == f"cd {tmp_path} && deepspeed --num_gpus 8 train.py training_args.json"
    again = checked(done, tmp_path)
    assert (again.strategy.recompute, again.peak) == ("full", estimate_of(kept).peak)


CARRIED: list[dict[str, Any]] = [
    {"framework": "deepspeed", "zero": 2, "recompute": "every-2"},
    {"framework": "deepspeed", "zero": 3, "offload": "optimizer,params", "recompute": "full"},
    {"framework": "deepspeed", "precision": "bf16", "recompute": "none", "micro_batch": 1},
    {"framework": "ddp", "precision": "bf16-autocast", "recompute": "full", "model": "llama-3.2-1b", "offload": "none"},
    {"framework": "megatron", "recompute": "selective-core-attn", "model": "llama-3.2-1b"},
    {"framework": "hf", "lora": "64", "model": "llama-3-8b"},
    {"framework": "hf", "lora": "16:all-linear", "quantize": "nf4-dq", "model": "qwen2.5-7b", "also_train": "head"},
    {"framework": "ddp", "lora": "8:all-linear", "quantize": "int8", "model": "phi-3-mini-3.8b"},
    {"framework": "hf", "lora": "8", "quantize": "nf4", "adapter_dtype": "bf16", "model": "mistral-7b"},
    {"framework": "deepspeed", "lora": "16:all-linear", "model": "opt-6.7b", "zero": 3},
    {"framework": "deepspeed", "lora": "16", "quantize": "nf4", "model": "llama-3-8b", "zero": 2},
    {"framework": "fsdp2", "lora": "16:all-linear", "model": "gpt2-xl"},
]


@pytest.mark.parametrize(
    "words", [*CARRIED[::2], *(pytest.param(words, marks=pytest.mark.slow) for words in CARRIED[1::2])], ids=str
)
def test_files_alone_carry_the_whole_strategy(words: dict[str, Any], tmp_path: Path) -> None:
    kept = kept_plan(top=1, **words)
    done = exported(kept)
    assert {name for name, value in keywords(done.check).items() if value} <= JOB_ALONE
    again, plan = checked(done, tmp_path), estimate_of(kept)
    assert (again.peak, again.components, again.workload) == (plan.peak, plan.components, plan.workload)
    assert again.strategy.recompute == plan.strategy.recompute


def test_accelerate_has_the_trainers_arguments_beside_it(tmp_path: Path) -> None:
    words = {"framework": "deepspeed", "recompute": "every-2", "top": 1}
    kept = kept_plan(**words)
    done = exported(kept, "accelerate", path=tmp_path)
    assert [path.name for path in done.files] == ["accelerate.yaml", "training_args.json", "ds_config.json", "train.py"]
    assert checked(done, tmp_path).peak == estimate_of(kept).peak


def test_the_way_out_leaves_out_what_no_file_carries() -> None:
    """The kernel that torchtitan calls is PyTorch's own, of the second generation."""
    words = {"model": "llama-3-8b", "gpu": "a100-80g", "framework": "torchtitan", "attention": "flash", "top": 1}
    with pytest.raises(CombinationError, match=r"flash-version '3'.*plan what it can say") as refused:
        exported(kept_plan(**words, settings={"strategy.flash_version": 3}))
    assert "flash_version" not in refused.value.allowed
    exported(kept_plan(**words))


def test_what_no_file_carries_is_refused_with_a_plan_that_it_can() -> None:
    """DeepSpeed has no word for it, and the Trainer beside it neither; its fallback recomputes every block."""
    kept = kept_plan(framework="deepspeed", recompute="mlp", top=1)
    with pytest.raises(
        CombinationError, match=r"recompute 'mlp': .*plan what it can say: memcalc plan .*--to deepspeed"
    ):
        exported(kept)
    with pytest.raises(CombinationError) as refused:
        exported(kept)
    assert "--recompute" not in refused.value.allowed.partition("plan what it can say")[2]
    better = kept.model_copy(update={"fallback": kept_plan(framework="deepspeed", **SIMPLE).fallback})
    with pytest.raises(CombinationError, match="can be written: --fallback 1"):
        exported(better)
    with pytest.raises(CombinationError, match=r"--framework torchtitan@2026-02 .*--to torchtitan"):
        exported(kept_plan(model="llama-3.1-8b", gpu="h100", top=1), "torchtitan")


def test_the_way_out_is_open_where_no_framework_was_named() -> None:
    with pytest.raises(CombinationError, match=r"plan what it can say: memcalc plan .*--to trainer") as refused:
        exported(kept_plan(recompute="mlp", model="llama-3.2-1b", top=1), "trainer")
    assert "--recompute" not in refused.value.allowed


LED = {
    "megatron": {"model": "llama-3.2-1b", "framework": "megatron", "lora": "64"},
    "torchtitan": {"model": "llama-2-7b", "framework": "torchtitan"},
    "fsdp2": {"model": "llama-3.2-1b", "framework": "fsdp2", "lora": "16"},
}
"""By format a job that it cannot say: adapters, and sizes without a flavor."""


@pytest.mark.slow
@pytest.mark.parametrize("to", LED)
def test_a_refusal_leads_to_a_plan_that_is_written(to: str) -> None:
    """The line of the refusal is run, and the first plan of its answer is exported."""
    job = {"gpu": "h100", "gpus": 2, "tp": 1, "pp": 1, "cp": 1, "top": 1, **LED[to]}
    refusals = []
    for refused in (lambda: plan_to(to, **job), lambda: exported(saved_plan(memcalc.plan(**job)), to)):
        with pytest.raises(CombinationError, match=r"; for .*: memcalc plan .*--to trainer") as caught:
            refused()
        refusals.append(caught.value.allowed)
    for refusal in refusals:
        words = keywords(refusal.rpartition(": ")[2])
        assert exported(saved_plan(plan_to(**words))).format == "trainer"


def test_what_no_format_says_is_refused_without_a_line() -> None:
    """Two towers and a loss between them: no class of Transformers trains CLIP on rows of one kind."""
    with pytest.raises(CombinationError, match=r"no training script for it: .* which memcalc check reads with --model"):
        plan_to("trainer", model="clip-vit-b-32", gpu="h100", gpus=2, top=1)


def test_a_format_of_text_alone_names_what_writes_the_model() -> None:
    with pytest.raises(CombinationError, match=r"axolotl trains decoders of text: write it with --to trainer"):
        plan_to("axolotl", model="t5-small", gpu="h100", gpus=2, top=1)


def test_a_framework_is_no_format(simple: SavedPlan) -> None:
    with pytest.raises(UnknownNameError, match="its formats are trainer, accelerate, axolotl"):
        exported(simple, "hf")


def test_a_name_by_which_the_file_is_not_read_is_refused(simple: SavedPlan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.yaml"):
        exported(simple, "fsdp2", path=tmp_path / "train.yaml")


def test_settings_of_the_job_are_checked_too(tmp_path: Path) -> None:
    fields = {"strategy.blas_workspace": "64 MiB", "strategy.kernels": "model"}
    kept = kept_plan(settings=fields, **SIMPLE)
    done = exported(kept, "fsdp2")
    words = keywords(done.check)
    assert words["settings"]["strategy.blas_workspace"] == "64 MiB"
    path = tmp_path / "train_fsdp2.py"
    path.write_text(next(iter(done.files.values())), encoding="utf-8")
    again = check(**{**words, "files": [str(path)]}).estimate
    assert again.peak == estimate_of(kept).peak


@pytest.mark.slow
@pytest.mark.parametrize("form", WRITABLE)
@pytest.mark.parametrize("gpus", [8, 32])
def test_launch_lines_name_the_file_and_the_processes(form: str, gpus: int) -> None:
    made = ConfigJob.of(memcalc.estimate(**{**JOB, "gpus": gpus}))
    job = replace(made, beside={"trainer": "arguments.json"})
    line = launch(form, job, Path("a file"))
    parts = shlex.split(line)
    assert ("arguments.json" if form == "deepspeed" else "a file") in line  # DeepSpeed's is named in the arguments
    if parts[0] == "torchrun":
        distributed = pytest.importorskip("torch.distributed.run")
        told = distributed.get_args_parser().parse_args(parts[1:])
        assert (told.nproc_per_node, told.nnodes) == ("8", "1:1" if gpus == 8 else "4")
    assert "{" not in line.replace("${", "")


def test_lists_of_values_are_typed_as_a_search_takes_them() -> None:
    """A line that reproduces an answer can be typed: several values of a word stand between slashes."""
    found = memcalc.plan(**{**JOB, "tp": [1, 2], "offload": ["optimizer", "params"], "top": 1})
    assert "--tp 1/2" in found.command
    assert "--offload optimizer,params" in found.command


# -------------------------------------------------------------------------------------------------------- command line

SEARCH = ("plan", "--model", "llama-3.2-1b", "--gpu", "h100", "--gpus", "2", "--tp", "1", "--cp", "1", "--top", "2")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rich", "markdown", "csv", "json", "latex", "html"])
def test_a_plan_is_saved_beside_every_format(form: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plain = run(*SEARCH, "--format", form)
    told = run(*SEARCH, "--format", form, "--save", str(path), "--rank", "2")
    assert told.exit_code == 0
    times = re.compile(r"[\d.]+ (ms|s|µs);|\"elapsed\": [\d.]+")
    advice = re.compile(r"^Next      add --write .*\n", re.MULTILINE)  # which has been followed
    assert times.sub("", told.stdout) == advice.sub("", times.sub("", plain.stdout))
    assert told.stderr.startswith(f"Saved plan #2 to {path}.")
    assert memcalc.load(str(path)).plan.rank == 2


REFUSED = [
    (("--rank", "2"), "--rank '2': needs --save FILE"),
    (("--save", "old.json"), "exists; use --force"),
    (("--save", "no/such.json"), "must exist"),
    (("--save", "new.json", "--output", "new.json"), "must be another file"),
    (("--save", "new.json", "--rank", "9"), "must be from 1 to"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=str)
def test_a_save_that_cannot_be_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("mine", encoding="utf-8")
    told = run(*SEARCH, *words)
    assert told.exit_code == 2
    assert said in told.stderr
    assert (tmp_path / "old.json").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "new.json").exists()


def test_nothing_that_fits_is_said_and_not_saved(tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    told = run(
        "plan", "--model", "llama-3-70b", "--gpu", "a100-40g", "--gpus", "1", "--offload", "none", "--save", path
    )
    assert told.exit_code == 1
    assert "not written" in told.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simple: SavedPlan) -> Path:
    """Return a folder with a saved plan, in which commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(text_of(simple), encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("saved")
def test_the_screen_gets_the_file_and_stderr_what_is_said(simple: SavedPlan) -> None:
    told = run("export", "plan.json", "--to", "fsdp2")
    assert told.exit_code == 0
    assert told.stdout == next(iter(memcalc.export(simple, to="fsdp2").values()))
    assert told.stderr.splitlines() == [
        "Launch: torchrun --nproc-per-node 8 train_fsdp2.py",
        "Check:  memcalc check train_fsdp2.py --gpu a100-40g",
    ]


def test_a_file_or_a_directory_takes_what_is_exported(saved: Path) -> None:
    (saved / "job").mkdir()
    told = run("export", "plan.json", "--to", "fsdp2", "--output", "job", "--fallback", "1")
    assert told.exit_code == 0
    assert told.stdout.startswith("Launch: torchrun --nproc-per-node 8 job/train_fsdp2.py\n")
    again = run("export", "plan.json", "--to", "fsdp2", "--output", "job")
    assert (again.exit_code, "--force" in again.stderr) == (2, True)
    run("export", "plan.json", "--to", "fsdp2", "--output", "mine.py")
    forced = run("export", "plan.json", "--to", "fsdp2", "--output", "job", "--force")
    assert forced.exit_code == 0
    assert (saved / "job" / "train_fsdp2.py").read_text() == (saved / "mine.py").read_text()
    assert sorted(one.name for one in saved.iterdir()) == ["job", "mine.py", "plan.json"]


def test_a_refused_export_writes_nothing(saved: Path) -> None:
    told = run("export", "plan.json", "--to", "deepspeed", "--output", "ds.json")
    assert told.exit_code == 2
    assert [one.name for one in saved.iterdir()] == ["plan.json"]


def test_the_help_names_every_format() -> None:
    told = run("export", "--help").stdout
    assert [name for name in WRITABLE if name not in told] == []


def test_latent_attention_has_its_norms_in_megatron() -> None:
    """Under MLA the up projections have norms with the flag alone (core/models/gpt/gpt_layer_specs.py)."""
    words = {"gpu": "h100", "gpus": 8, "framework": "megatron", "tp": 1, "pp": 1, "cp": 1, "recompute": "full"}
    for model, ep in (("deepseek-v2-lite", 8), ("llama-3.2-1b", 1)):
        plans = memcalc.plan(model=model, **words, ep=ep, micro_batch=1, offload="none", top=1, advice=False)
        assert ("--qk-layernorm" in memcalc.export(plans)["pretrain_gpt.sh"]) is (ep == 8)
