"""torchtitan's TOML: what is read of its own shapes of every age, what is written, and what its own parser says."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from drawing import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

import memcalc
from memcalc import catalog
from memcalc.convert.argument_source import flag_document
from memcalc.convert.config import Config
from memcalc.convert.document import Document, parse_document, read_document
from memcalc.convert.formats.base import ConfigJob, get_format, nested, render_config
from memcalc.convert.formats.torchtitan import FORMAT, read
from memcalc.convert.formats.torchtitan_keys import CURRENT, FLAVORS, REMOVED, SPELLED, flavor_of, model_of
from memcalc.convert.shell import read_script
from memcalc.errors import CombinationError, InputError, MemcalcError, MissingError, ObjectiveError
from memcalc.preflight import check
from memcalc.preflight.job import estimate_merged, read_files
from memcalc.preflight.merge import merge
from memcalc.results.estimates import Estimate
from memcalc.specs.runs import Run
from memcalc.validation import Presets, card_of, predict

HERE = Path(__file__).parents[2]
CONFIGS = HERE / "configs" / "torchtitan"
DEFAULTS: dict[str, Any] = json.loads((HERE / "schemas" / "torchtitan-0.2.2.json").read_text())["defaults"]
NEWEST = "torchtitan@2026-02"
AFTER = "torchtitan@2026-05"
"""Of main after that release, where FSDP takes in a single data-parallel rank too."""
PLAIN = {
    "zero": 3,
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "loss": "standard",
    "precision": "bf16-mixed",
    "optimizer": "adamw",
}

EXPECTED: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        **PLAIN, "framework": NEWEST, "model": "llama-3.1-8b", "micro_batch": 1, "accumulation": 1, "seq_len": 8192,
        "recompute": "selective-ops", "compile": "none", "optimizer_impl": "fused",
    },
    "llama3_70b": {
        **PLAIN, "framework": NEWEST, "model": "llama-3.1-70b", "micro_batch": 8, "accumulation": 1, "seq_len": 8192,
        "tp": 8, "sp": True, "loss": "parallel", "recompute": "full", "compile": "none",
    },
    "llama3_405b": {
        **PLAIN, "framework": NEWEST, "model": "llama-3.1-405b", "micro_batch": 2, "tp": 8, "sp": True,
        "loss": "parallel", "recompute": "full", "compile": "blocks+loss", "precision": "fp8-mixed",
        "strategy.float8": "tensorwise", "strategy.float8_all_gather": True,
    },
    "debug_model": {**PLAIN, "framework": NEWEST, "micro_batch": 8, "seq_len": 2048, "recompute": "every-2"},
    "deepseek_v3_16b": {
        **PLAIN, "framework": NEWEST, "model": "deepseek-v2-lite", "micro_batch": 4, "ep": 8, "strategy.etp": 1,
        "recompute": "selective-ops", "compile": "loss", "seq_len": 4096,
    },
    "deepseek_v3_671b": {
        **PLAIN, "framework": NEWEST, "model": "deepseek-v3", "micro_batch": 1, "accumulation": 16, "pp": 8, "zero": 2,
        "ep": 32, "pp_schedule": "interleaved", "vpp": 2, "recompute": "full", "compile": "blocks+loss",
        "strategy.embedding_in_split": True, "strategy.loss_in_split": True,
    },
    "qwen3_0.6b": {**PLAIN, "framework": NEWEST, "model": "qwen3-0.6b", "micro_batch": 4, "seq_len": 4096},
    "qwen3_32b": {**PLAIN, "framework": NEWEST, "model": "qwen3-32b", "micro_batch": 2, "gpus": 32, "dp_replicate": 2},
    "llama4_17bx16e": {**PLAIN, "framework": NEWEST, "micro_batch": 8, "tp": 8, "sp": True, "loss": "parallel"},
    "llama3_8b_offload": {
        **PLAIN, "framework": NEWEST, "model": "llama-3.1-8b", "micro_batch": 2, "train_batch": 64, "gpus": 8,
        "offload": ("optimizer", "params"), "strategy.reshard": "always", "recompute": "every-2", "compile": "blocks",
    },
    "llama3_8b_2025_06": {
        **PLAIN, "framework": "torchtitan@2025-07", "micro_batch": 2, "precision": "fp8-mixed",
        "strategy.float8": "tensorwise", "strategy.float8_all_gather": True, "compile": "blocks+loss",
        "optimizer_impl": "fused", "recompute": "selective-ops",
    },
    "llama3_8b_2024_12": {
        **PLAIN, "framework": "torchtitan@2025-02", "micro_batch": 2, "compile": "blocks", "optimizer_impl": "foreach",
        "recompute": "selective-ops",
    },
    "llama3_8b_cp8_2024_12": {
        **PLAIN, "framework": "torchtitan@2025-02", "cp": 8, "cp_kind": "allgather", "seq_len": 262144,
        "recompute": "full", "precision": "fp8-mixed", "compile": "blocks",
    },
    "llama3_405b_3d_2024_12": {
        **PLAIN, "framework": "torchtitan@2025-02", "tp": 8, "sp": True, "pp": 8, "zero": 2, "pp_schedule": "1f1b",
        "micro_batch": 4, "accumulation": 8, "loss": "parallel", "strategy.first_stage_layers": 15,
        "precision": "fp8-mixed",
    },
}  # fmt: skip
"""By hand from the file and the sources of its age: 0.2.2 parallelize.py, pipeline_parallel.py, loss.py; 9dec370."""

RUNS = {
    "titan1d8-002": "llama3_8b_2024_12",
    "titancp-004": "llama3_8b_cp8_2024_12",
    "titan3d-001": "llama3_405b_3d_2024_12",
    "titanh200-001": "llama3_8b_2025_06",
}
"""Published runs, and the file of each in the form of its own month."""


def config(name: str) -> Config:
    """One of the files."""
    return read(read_document(CONFIGS / f"{name}.toml"))


def of(text: str) -> Config:
    """A file with some text."""
    return read(parse_document(Path("train.toml"), text, "toml"))


def flags(line: str) -> Config:
    """The flags of a command."""
    return read(flag_document(Path("run.sh"), line, read_script(line).commands[0].tokens))


def published(name: str) -> Run:
    """A run of the shipped ones."""
    rows = tomllib.loads((HERE.parent / "presets" / "runs" / "torchtitan.toml").read_text())["run"]
    return Run.model_validate(next(row for row in rows if row["id"] == name))


def test_every_file_has_its_words() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_words(name: str) -> None:
    found = {said.name: said.value for said in config(name).settings}
    assert {word: found.get(word) for word in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_of_its_own_files_is_unknown(name: str) -> None:
    assert not [finding for finding in config(name).findings if finding.code == "MC001"]


@pytest.mark.parametrize(("name", "field"), [
    ("deepseek_v3_16b", "model.flavor"),
    ("llama3_405b", "parallelism.enable_async_tensor_parallel"),
])  # fmt: skip
def test_what_is_not_modelled_is_named(name: str, field: str) -> None:
    assert field in {finding.field for finding in config(name).findings if finding.code == "MC002"}


@pytest.mark.parametrize("converter", ["quantize.linear.float8", "quantize.grouped_mm.float8"])
def test_a_table_counts_where_its_converter_is_listed(converter: str) -> None:
    """model/__init__ of 0.2.2 builds those of ``model.converters`` alone; their tables stand in every shipped file."""
    table = '[quantize.linear.float8]\nfilter_fqns = ["output"]\n[quantize.grouped_mm.float8]\nfqns = ["experts"]\n'
    for listed in ((), (converter,)):
        found = of(f'[model]\nflavor = "8B"\nconverters = {list(listed)}\n{table}')
        named = {finding.field.rpartition(".")[0] for finding in found.findings if "fqns" in finding.field}
        assert named == {*listed}


@pytest.mark.parametrize("line", ["--module llama3 --config llama3_8b", "--module llama3 --config $WHICH"])
def test_a_function_that_has_the_settings_is_declined(tmp_path: Path, line: str) -> None:
    """From 9810191bb on both flags are needed, and the function's settings are no file's; a TOML was looked for."""
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 8 -m torchtitan.train {line} --compile.enable")
    with pytest.raises(ObjectiveError, match="a Python function"):
        check([str(tmp_path / "run.sh")], gpu="h100", model="llama-3.1-8b")


@pytest.mark.parametrize(("run", "name"), RUNS.items())
def test_a_published_run_in_its_own_form_is_predicted_as_the_run(run: str, name: str) -> None:
    row = published(run)
    chip = card_of(row, Presets())
    stated = chip if row.gpu_memory is None else chip.model_copy(update={"memory_bytes": row.gpu_memory})
    told = {key: value for key, value in row.strategy.items() if key == "expandable_segments"}
    answer = check(
        [str(CONFIGS / f"{name}.toml")],
        gpu=stated,
        gpus=row.gpus,
        settings={f"strategy.{key}": value for key, value in told.items()},
    )
    expected = predict(row)
    assert answer.estimate.peak == expected.peak
    assert answer.estimate.workload == expected.workload


def test_what_a_file_leaves_out_is_the_default_of_the_release() -> None:
    """Each default that is stated, beside that of the dataclass."""
    found = {
        said.name: (said.field, said.value)
        for said in of("[training]\n[model]\nflavor = '8B'\n").settings
        if said.default
    }
    names = {
        "fused": "fused",
        "AdamW": "adamw",
        "bfloat16": "bf16-mixed",
        "2": "every-2",
        "1F1B": "1f1b",
        "default": "default",
    }
    plain = {"micro_batch", "seq_len", "tp", "pp", "cp", "ep", "optimizer", "optimizer_impl", "precision", "recompute",
             "strategy.reshard"}  # fmt: skip
    assert plain <= set(found)
    for word in plain:
        field, value = found[word]
        default = DEFAULTS[field]
        assert value == names.get(str(default), default), word
    assert found["strategy.reduce_dtype"] == (
        "training.mixed_precision_reduce",
        {"float32": "fp32"}[DEFAULTS["training.mixed_precision_reduce"]],
    )
    assert found["compile"] == ("compile.enable", "none" if not DEFAULTS["compile.enable"] else "?")


def test_the_keys_are_those_of_the_release() -> None:
    assert set(DEFAULTS) == CURRENT


def test_no_key_is_removed_and_there() -> None:
    assert not CURRENT & set(REMOVED)


def test_every_name_of_a_setting_is_one_that_torchtitan_had() -> None:
    assert {name for names in SPELLED.values() for _, name in names} <= CURRENT | set(REMOVED)


KINDS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**16), st.floats(), st.text(max_size=8),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.sampled_from(("none", "full", "op", "8B", "llama3")),
)  # fmt: skip


@drawn(150)
@given(values=st.dictionaries(st.sampled_from(sorted(CURRENT | set(REMOVED))), KINDS, max_size=6))
def test_whatever_stands_in_a_file_it_is_read_or_refused(values: dict[str, Any]) -> None:
    data = nested(values)
    with contextlib.suppress(MemcalcError):
        read(Document(Path("train.toml"), "toml", "", data))


PIPED = "[model]\nflavor = '8B'\n[parallelism]\npipeline_parallel_degree = "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nlocal_batch_size = '8'", {"micro_batch": 8}),
        ("[training]\ndtype = 'bfloat16'", {"precision": "bf16"}),
        ("[training]\nmixed_precision_param = 'float32'", {"precision": "fp32"}),
        ("[activation_checkpoint]\nmode = 'none'\n[training]", {"recompute": "none"}),
        ("[activation_checkpoint]\nselective_ac_option = '4'\n[training]", {"recompute": "every-4"}),
        ("[activation_checkpoint]\nselective_ac_option = '0'\n[training]", {"recompute": "full"}),
        ("[parallelism]\nfsdp_reshard_after_forward = 'never'\n[training]", {"zero": 2, "strategy.reshard": "never"}),
        ("[parallelism]\ntensor_parallel_degree = 4\ndisable_loss_parallel = true\n[training]", {"loss": "standard"}),
        (
            "[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = 'alltoall'",
            {"cp_kind": "ring"},
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 4\nexpert_parallel_comm_backend = 'deepep'\n[training]",
            {"moe_dispatcher": "deepep", "framework": NEWEST},
        ),
        ("[parallelism]\nexpert_parallel_degree = 4\n[training]", {"moe_dispatcher": "alltoall"}),
        ("[parallelism]\nexpert_parallel_comm_backend = 'deepep'\n[training]", {"moe_dispatcher": None}),
        (
            "[parallelism]\nexpert_parallel_degree = 4\n[debug]\nmoe_force_load_balance = true\n[training]",
            {"expert_imbalance": 1.0},
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 4\n[training]\ndebug_moe_force_load_balance = true",
            {"expert_imbalance": 1.0},
        ),
        (
            "[parallelism]\ntensor_parallel_degree = 4\nenable_async_tensor_parallel = true\n[training]",
            {"tp_comm_overlap": True},
        ),
        ("[parallelism]\nenable_async_tensor_parallel = true\n[training]", {"tp_comm_overlap": None}),
        (
            "[optimizer]\nimplementation = 'for-loop'\nearly_step_in_backward = true",
            {"optimizer_impl": "loop", "optimizer_in_backward": True},
        ),
        (
            "[quantize.linear.float8]\nrecipe_name = 'rowwise'\n[model]\nconverters = ['quantize.linear.float8']",
            {"strategy.float8": "rowwise"},
        ),
        ("[model]\nconverters = ['quantize.linear.mx']", {"strategy.float8": "mxfp8", "precision": "fp8-mixed"}),
        (
            "[model]\nname = 'simple_fsdp.llama3'\nflavor = '8B'\n[compile]\nenable = true",
            {"compile": "model", "strategy.fsdp_schedule": "simple", "model": "llama-3.1-8b"},
        ),
        (
            PIPED + "4\npipeline_parallel_layers_per_stage = 3\npipeline_parallel_schedule = 'Interleaved1F1B'",
            {"vpp": 3},
        ),
        (
            PIPED + "2\npipeline_parallel_first_stage_less_layers = 2",
            {"strategy.first_stage_layers": 16, "strategy.last_stage_layers": 16},
        ),
        (
            PIPED + "2\npipeline_parallel_split_points = ['layers.20']",
            {"strategy.first_stage_layers": 20, "strategy.last_stage_layers": 12},
        ),
        ("[training]\nenable_selective_ac = true", {"recompute": "every-2", "framework": "torchtitan@2024-03"}),
        ("[validation]\nenable = true\n[training]", {"evaluates": True, "eval_micro_batch": 8}),
        (
            "[training]\ncompile = true\nwarmup_steps = 3\n[metrics]\nenable_color_printing = true",
            {"compile": "blocks", "framework": "torchtitan@2024-12"},
        ),
    ],
)
def test_one_setting(text: str, words: dict[str, Any]) -> None:
    found = {said.name: said.value for said in of(text).settings}
    assert {word: found.get(word) for word in words} == words


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nlocal_batch_size = 'many'", "line 2: training.local_batch_size"),
        ("[training]\nlocal_batch_size = true", "must be a whole number from 1"),
        ("[activation_checkpoint]\nmode = 'selectiv'", "did you mean 'selective'"),
        ("[activation_checkpoint]\nselective_ac_option = 'ops'", "must be op or a whole number"),
        ("[parallelism]\ndata_parallel_shard_degree = 0", "must be -1 or a whole number from 1"),
        (PIPED + "2\npipeline_parallel_microbatch_size = 3\n[training]\nlocal_batch_size = 8", "must be a multiple of"),
        (PIPED + "2\npipeline_parallel_layers_per_stage = 9", "must give one stages on each of 2 ranks"),
        (PIPED + "2\npipeline_parallel_split_points = ['layers.40']", "must be rising numbers of blocks below 32"),
        (PIPED + "2\npipeline_parallel_last_stage_less_layers = 40", "must leave blocks"),
        ("[training]\nlocal_batch_size = 1\nbatch_size = 1", "one setting, by its new and its old name"),
        ("[optimizer]\nname = 'Muon'", "must be one of AdamW, Adam"),
        ("[parallelism]\npipeline_parallel_schedule = '2F2B'", "must be one of 1F1B"),
    ],
)
def test_wrong_values(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        of(text)


def test_an_unknown_key_is_a_warning_with_the_nearest_one() -> None:
    (finding,) = of("[training]\nlocal_batchsize = 4").findings
    assert (finding.code, finding.field, finding.suggestion) == (
        "MC001", "training.local_batchsize", "did you mean training.local_batch_size?"
    )  # fmt: skip


def test_a_flavor_without_a_preset_is_asked_for() -> None:
    with pytest.raises(MissingError, match="--model"):
        check([str(CONFIGS / "llama4_17bx16e.toml")], gpu="h100", gpus=64)


def test_the_debug_model_has_its_own_sizes() -> None:
    answer = check([str(CONFIGS / "debug_model.toml")], gpu="h100", gpus=8)
    # torch.nn of 0.2.2's Transformer on meta: embedding and head, six blocks of four products 256 x 256, three
    # of 256 x 768 and two norms, and the last norm
    assert answer.estimate.model.parameters == 2 * 2048 * 256 + 6 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 256


def test_gpus_are_asked_for_where_the_sharding_degree_is_open() -> None:
    with pytest.raises(MissingError, match="--gpus"):
        check([str(CONFIGS / "llama3_8b.toml")], gpu="h100")


@pytest.mark.parametrize(("gpus", "warned"), [(1, True), (8, False)])
def test_one_rank_without_fsdp_is_a_warning(gpus: int, warned: bool) -> None:
    answer = check([str(CONFIGS / "qwen3_0.6b.toml")], gpu="h100", gpus=gpus)
    assert any("one data-parallel rank" in finding.message for finding in answer.files[0].findings) is warned


@pytest.mark.parametrize(("gpus", "precision"), [(2, "fp32"), (4, "bf16-mixed")])
def test_precision_is_mixed_by_fsdp_alone(tmp_path: Path, gpus: int, precision: str) -> None:
    """distributed/utils.py, maybe_enable_amp: "Mixed precision training is disabled" under TP or PP without FSDP."""
    tables = ("[job]", "description = 'x'", "[training]", "local_batch_size = 1", "[model]", "name = 'llama3'",
              "flavor = '8B'", "[parallelism]", "tensor_parallel_degree = 2")  # fmt: skip
    (tmp_path / "train.toml").write_text("\n".join(tables))
    answer = check([str(tmp_path / "train.toml")], gpu="h100", gpus=gpus)
    assert answer.estimate is not None
    assert answer.estimate.strategy.precision == precision
    assert any("it trains in fp32" in finding.message for finding in answer.files[0].findings) is (gpus == 2)


# ------------------------------------------------------------------------------------------------------------- flags


def launched(tmp_path: Path, line: str) -> dict[str, Any]:
    """The words of a TOML under flags of the command that names it."""
    (tmp_path / "train.toml").write_text((CONFIGS / "llama3_8b.toml").read_text())
    script = tmp_path / "run.sh"
    script.write_text(line)
    found = flag_document(script, line, read_script(line).commands[0].tokens)
    config = read(found)
    from memcalc.preflight.job import _References

    reader = _References({}, (), set())
    reader.take(found, "torchtitan")
    assert config.references[0].path == "train.toml"
    return {said.name: said for taken in reader.configs for said in taken.settings}


def test_flags_have_their_way_over_the_file_and_what_follows_from_it(tmp_path: Path) -> None:
    line = (
        "torchtitan --job.config_file train.toml --training.local_batch_size 4 --parallelism.tensor-parallel-degree=8 "
        "--activation_checkpoint.mode full --compile.enable"
    )
    found = {word: said.value for word, said in launched(tmp_path, line).items()}
    expected = {"micro_batch": 4, "tp": 8, "sp": True, "loss": "parallel", "recompute": "full", "seq_len": 8192,
                "compile": "blocks+loss", "model": "llama-3.1-8b"}  # fmt: skip
    assert {word: found[word] for word in expected} == expected


def test_a_flag_that_only_a_run_could_tell_is_unknown(tmp_path: Path) -> None:
    line = "torchtitan --job.config_file train.toml --training.local_batch_size $SIZE"
    assert launched(tmp_path, line)["micro_batch"].unknown == "SIZE"


def test_a_flag_can_say_no() -> None:
    assert flags("torchtitan --compile.no-enable --training.local_batch_size 2").get("compile") == "none"


def test_flags_apply_to_a_file_that_was_given_before(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text((CONFIGS / "llama3_8b.toml").read_text())
    line = "torchtitan --job.config_file train.toml --training.local_batch_size 4"
    from memcalc.preflight.job import _References

    reader = _References({}, (), set())
    reader.read(path, None)
    reader.take(flag_document(tmp_path / "run.sh", line, read_script(line).commands[0].tokens), "torchtitan")
    assert [config.get("micro_batch") for config in reader.configs if config.settings] == [4]


# ----------------------------------------------------------------------------------------------------------- editing


def test_the_smallest_edit_keeps_the_global_batch(tmp_path: Path) -> None:
    """Gradient accumulation stands in for the larger batch: `global_batch_size` is added."""
    path = tmp_path / "train.toml"
    path.write_text((CONFIGS / "llama3_8b.toml").read_text().replace("local_batch_size = 1", "local_batch_size = 12"))
    answer = check([str(path)], gpu="h100", gpus=8)
    assert answer.verdict == "does-not-fit"
    assert answer.fix is not None
    after = tomllib.loads(answer.fix.edits[0].text)["training"]
    assert after["global_batch_size"] == 96
    assert 96 % (8 * after["local_batch_size"]) == 0
    again = check([str(path)], gpu="h100", gpus=8, micro_batch=after["local_batch_size"], global_batch=96)
    assert again.verdict != "does-not-fit"


@pytest.mark.parametrize(("key", "name"), [
    ("training.local_batch_size", "training.batch_size"),
    ("training.global_batch_size", ""),  # it could not accumulate
    ("parallelism.fsdp_reshard_after_forward", "training.fsdp_reshard_after_forward"),
    ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
    ("parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
    ("activation_checkpoint.mode", "activation_checkpoint.mode"),
    ("compile.enable", "training.compile"),
])  # fmt: skip
def test_an_edit_uses_the_names_of_the_files_own_month(key: str, name: str) -> None:
    assert FORMAT.spelling(read_document(CONFIGS / "llama3_8b_2024_12.toml"), key) == name
    assert FORMAT.spelling(read_document(CONFIGS / "llama3_8b.toml"), key) == key


def test_an_older_file_is_made_to_fit_by_what_its_month_has(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    text = (CONFIGS / "llama3_8b_2024_12.toml").read_text()
    path.write_text(text.replace("batch_size = 2", "batch_size = 4").replace('mode = "selective"', 'mode = "none"'))
    answer = check([str(path)], gpu="h100", gpus=8)
    assert answer.fix is not None
    changed = answer.fix.edits[0].text
    assert tomllib.loads(changed)["training"]["batch_size"] == 4
    assert 'mode = "none"' not in changed or "fsdp_reshard_after_forward" in changed or "enable_cpu_offload" in changed


# ----------------------------------------------------------------------------------------------------------- writing

COMPILED = ("none", "blocks", "loss", "blocks+loss")
WORDS = st.fixed_dictionaries({
    "precision": st.sampled_from(("bf16-mixed", "fp32", "bf16", "fp8-mixed")),
    "optimizer_impl": st.sampled_from(("fused", "foreach", "loop")),
    "optimizer_in_backward": st.booleans(),
    "zero": st.sampled_from((2, 3)),
    "layout": st.sampled_from(((1, 1, 1), (2, 1, 1), (4, 1, 2), (1, 2, 1), (2, 2, 1), (1, 1, 4), (1, 4, 2))),
    "schedule": st.sampled_from(
        (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved-zb", 2), ("zb-v", 2), ("dualpipe-v", 2))
    ),
    "recompute": st.sampled_from(("none", "full", "selective-ops", "every-2", "every-3")),
    "offload": st.sampled_from(("none", "optimizer,params")),
    "compile": st.sampled_from(COMPILED),
    "micro_batch": st.sampled_from((1, 2)),
    "parallel_loss": st.booleans(),
    "split": st.booleans(),
})  # fmt: skip


def job_words(drawn: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Words and settings of a job that torchtitan can run."""
    tp, pp, cp = drawn["layout"]
    words = {key: drawn[key] for key in ("precision", "optimizer_impl", "optimizer_in_backward", "recompute", "offload",
                                         "compile", "micro_batch")}  # fmt: skip
    words |= {"tp": tp, "pp": pp, "cp": cp, "zero": 2 if pp > 1 else drawn["zero"], "gpus": 16}
    words["loss"] = "parallel" if tp > 1 and drawn["parallel_loss"] else "standard"
    words["optimizer_in_backward"] &= pp == 1  # it cannot accumulate
    steps = 1 if words["optimizer_in_backward"] else 8
    words["global_batch"] = 16 // (tp * pp * cp) * words["micro_batch"] * steps
    settings: dict[str, Any] = {"strategy.reshard": "never" if pp == 1 and drawn["zero"] == 2 else "default"}
    if cp > 1:
        words["cp_kind"] = "allgather"
    if pp > 1:
        words["pp_schedule"], vpp = drawn["schedule"]
        settings |= {"strategy.embedding_in_split": drawn["split"], "strategy.loss_in_split": drawn["split"]}
        if vpp > 1:
            words["vpp"] = vpp
    if words["precision"] == "fp8-mixed":
        settings["strategy.float8"] = "tensorwise"
    return words, settings


def read_again(text: str, kept: Estimate) -> Estimate:
    """The estimate of a written text; beside it stand the words that it cannot say."""
    said = of(text)
    beside = {"framework": NEWEST, "gpu": "h100", "gpus": 16, "attention": kept.strategy.attention}
    return estimate_merged(merge([said], {**beside, "settings": {}}), ())


@pytest.mark.parametrize(
    ("fields", "table"),
    [
        ({"strategy.float8": "rowwise"}, {"recipe_name": "rowwise"}),
        ({"strategy.float8_all_gather": True}, {"enable_fsdp_float8_all_gather": True}),
    ],
)
def test_float8_is_written_under_a_heading_of_its_own(fields: dict[str, Any], table: dict[str, Any]) -> None:
    words = {"framework": NEWEST, "precision": "fp8-mixed", "gpus": 8, "settings": fields}
    before = memcalc.estimate(model="qwen3-8b", gpu="h100", **words)
    text = render_config(FORMAT, ConfigJob.of(before))
    assert tomllib.loads(text)["quantize"]["linear"]["float8"] == table
    found = {setting.name: setting.value for setting in of(text).settings}
    assert {name: found[name] for name in fields} == fields


@drawn(25)
@given(drawn=WORDS)
def test_what_is_written_reads_as_the_same_job(drawn: dict[str, Any]) -> None:
    words, fields = job_words(drawn)
    before = memcalc.estimate(
        model="llama-3.1-8b", gpu="h100", framework=NEWEST, seq_len=2048, settings=fields, **words
    )
    after = read_again(render_config(FORMAT, ConfigJob.of(before)), before)
    assert after.strategy == before.strategy
    assert after.workload == before.workload
    assert after.peak == before.peak


@pytest.mark.parametrize("words", [
    {"model": "deepseek-v2-lite", "ep": 8, "moe_dispatcher": "deepep"},
    {"model": "deepseek-v2-lite", "ep": 8},
    {"tp": 2, "tp_comm_overlap": True, "compile": "blocks"},
], ids=str)  # fmt: skip
def test_what_changes_time_alone_is_written_and_read_back(words: dict[str, Any]) -> None:
    job = {"model": "qwen3-8b", "gpu": "h100", "gpus": 16, "framework": NEWEST, "seq_len": 2048, "recompute": "none"}
    before = memcalc.estimate(**{**job, **words}, settings={"strategy.etp": 1} if "ep" in words else {})
    after = read_again(render_config(FORMAT, ConfigJob.of(before)), before)
    assert after.strategy == before.strategy
    assert after.time == before.time


def test_deepep_is_written_of_experts_that_tensor_parallelism_does_not_split() -> None:
    """parallelize.py refuses it beside expert tensor parallelism."""
    estimate = memcalc.estimate(
        model="deepseek-v2-lite", gpu="h100", gpus=16, framework=NEWEST, ep=4, tp=2, moe_dispatcher="deepep"
    )
    with pytest.raises(CombinationError, match=r"strategy\.etp 1"):
        render_config(FORMAT, ConfigJob.of(estimate))


@pytest.mark.parametrize(("words", "says"), [
    ({"framework": "fsdp2"}, "framework"),
    ({"framework": NEWEST, "optimizer": "lion"}, "optimizer"),
    ({"framework": NEWEST, "precision": "bf16-autocast"}, "precision"),
    ({"framework": NEWEST, "recompute": "sqrt"}, "recompute"),
    ({"framework": NEWEST, "loss": "chunked"}, "loss"),
    ({"framework": NEWEST, "offload": "optimizer"}, "offload"),
    ({"framework": NEWEST, "compile": "model"}, "compile"),
    ({"framework": NEWEST, "model": "mistral-7b-v0.1"}, "model"),
])  # fmt: skip
def test_what_the_form_cannot_say_is_refused(words: dict[str, Any], says: str) -> None:
    estimate = memcalc.estimate(
        **{"model": "qwen3-8b", "gpu": "h100", "gpus": 8, "seq_len": 2048, "micro_batch": 1, **words}
    )
    with pytest.raises(CombinationError, match=says):
        render_config(FORMAT, ConfigJob.of(estimate))


@pytest.mark.parametrize(("words", "says"), [
    ({"pp": 2, "global_batch": 16}, "no pipeline of qwen3"),
    ({"model": "gpt-oss-20b", "pp": 2, "global_batch": 16}, "no pipeline of gpt_oss"),
    ({"model": "gpt-oss-20b", "cp": 2}, "splits no sequence"),
    ({"model": "deepseek-v2-lite", "cp": 2}, "splits no sequence"),
    ({"settings": {"strategy.fsdp_schedule": "simple"}, "compile": "model"}, "SimpleFSDP"),
    ({"framework": AFTER, "tp": 8, "precision": "bf16-mixed"}, "precision.*bf16 or fp32"),
    ({"framework": AFTER, "gpus": 1, "precision": "bf16-mixed"}, "precision.*bf16 or fp32"),
    ({"framework": AFTER, "tp": 8, "precision": "bf16", "offload": "params"}, "offload.*FSDP alone"),
])  # fmt: skip
def test_what_the_release_does_not_start_is_refused(words: dict[str, Any], says: str) -> None:
    """0.2.2: models/*/__init__.py and args.py, experiments/__init__.py, distributed/utils.py (maybe_enable_amp)."""
    job = {"model": "qwen3-8b", "gpu": "h100", "gpus": 8, "framework": NEWEST, "seq_len": 2048, "micro_batch": 1}
    with pytest.raises(CombinationError, match=says):
        render_config(FORMAT, ConfigJob.of(memcalc.estimate(**{**job, **words})))


def test_it_is_recognised_by_its_tables() -> None:
    assert [config.format for config in read_files([str(CONFIGS / "llama3_8b.toml")])] == ["torchtitan"]
    assert get_format("torchtitan") is FORMAT


# -------------------------------------------------------------------------------------------------- its own release


@pytest.fixture(scope="module")
def titan() -> Any:
    """The config module of torchtitan itself, without the models, which need Triton."""
    reason = "pip install --no-deps torchtitan==0.2.2 && pip install tyro"
    found = importlib.util.find_spec("torchtitan")
    if found is None or importlib.util.find_spec("tyro") is None:
        pytest.skip(reason)
    bare = types.ModuleType("torchtitan")
    bare.__path__ = list(found.submodule_search_locations or [])
    sys.modules.setdefault("torchtitan", bare)
    return pytest.importorskip("torchtitan.config", reason=reason)


@pytest.mark.parser
def test_the_defaults_are_those_of_its_dataclasses(titan: Any) -> None:
    from dataclasses import asdict

    def flat(table: dict[str, Any], begin: str = "") -> dict[str, Any]:
        pairs = [(f"{begin}{key}", value) for key, value in table.items()]
        return {
            name: one
            for key, value in pairs
            for name, one in (flat(value, f"{key}.") if isinstance(value, dict) else {key: value}).items()
        }

    assert flat(asdict(titan.JobConfig())) == DEFAULTS


@pytest.mark.parser
@settings(max_examples=10, deadline=None)
@given(drawn=WORDS)
def test_its_own_parser_takes_what_is_written(titan: Any, drawn: dict[str, Any]) -> None:
    words, fields = job_words(drawn)
    before = memcalc.estimate(
        model="llama-3.1-8b", gpu="h100", framework=NEWEST, seq_len=2048, settings=fields, **words
    )
    data = tomllib.loads(render_config(FORMAT, ConfigJob.of(before)))
    parsed_config = titan.ConfigManager()._dict_to_dataclass(titan.JobConfig, data)
    assert parsed_config.parallelism.tensor_parallel_degree == words["tp"]
    assert parsed_config.training.local_batch_size == words["micro_batch"] * (8 if words["pp"] > 1 else 1)
    assert parsed_config.compile.enable == (words["compile"] != "none")


@pytest.mark.parser
@pytest.mark.parametrize("name", [name for name, words in EXPECTED.items() if words["framework"] == NEWEST])
def test_its_own_parser_takes_the_files_of_its_age(titan: Any, name: str) -> None:
    data = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    titan.ConfigManager()._dict_to_dataclass(titan.JobConfig, data)


@pytest.mark.parser
@pytest.mark.parametrize("name", [name for name, words in EXPECTED.items() if words["framework"] != NEWEST])
def test_its_own_parser_refuses_files_of_an_earlier_age(titan: Any, name: str) -> None:
    data = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    with pytest.raises(ValueError, match="Invalid field names"):
        titan.ConfigManager()._dict_to_dataclass(titan.JobConfig, data)


@pytest.mark.parser
def test_the_flavors_have_the_sizes_of_their_presets(titan: Any) -> None:  # noqa: ARG001
    """Read from the source of its models, which cannot be imported without Triton."""
    root = Path(sys.modules["torchtitan"].__path__[0]) / "models"
    checked = 0
    for name, flavors in FLAVORS.items():
        path = root / name / "__init__.py"
        if not path.exists():  # Llama 2 went in February 2025
            continue
        listed = _calls(path)
        for flavor, preset in flavors.items():
            model = catalog.model(preset)
            attention = model.groups[-1].block.attention
            sizes = listed[flavor]
            assert sizes.get("n_layers") == model.num_layers
            assert sizes.get("dim", model.hidden) == model.hidden
            assert sizes.get("n_heads", attention.heads) == attention.heads
            if name != "deepseek_v3":
                assert sizes.get("n_kv_heads", attention.kv_heads) == attention.kv_heads
            assert sizes.get("vocab_size", model.vocab) == model.vocab
            assert flavor_of(preset) == (name, flavor)
            assert model_of(name, flavor) == preset
            checked += 1
    assert checked >= 15


def _calls(path: Path) -> dict[str, dict[str, Any]]:
    """The number arguments of each flavor in the table of a model's package."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Call):
                    pairs = [
                        (one.arg, one.value.value) for one in value.keywords if isinstance(one.value, ast.Constant)
                    ]
                    found[str(key.value)] = {str(name): size for name, size in pairs if isinstance(size, int)}
    return found


def test_a_file_that_names_no_model_is_asked_for_it(tmp_path: Path) -> None:
    """The default of torchtitan has 6 layers of 256, for debugging; flame's files have their models elsewhere."""
    path = tmp_path / "job.toml"
    path.write_text("[job]\n[optimizer]\n[training]\nlocal_batch_size = 4\nseq_len = 2048\n", encoding="utf-8")
    with pytest.raises(MissingError, match=r"--model \(line of job.toml: model.flavor is not said"):
        check([str(path)], gpu="h100", gpus=8)
    path.write_text('[model]\nconfig = "c.json"\n[training]\nbatch_size = 4\nseq_len = 2048\n', encoding="utf-8")
    with pytest.raises(ObjectiveError, match="is a config of flame"):
        check([str(path)], gpu="h100", gpus=8)
