"""torchtune's YAML: what is read from configs in the shape of its own, against its source at bd2a0fc7c (0.7.0).

Expected words are derived from recipes/*.py, models/*/_model_builders.py, training/_compile.py and config/_utils.py;
OmegaConf itself resolves the interpolations.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import finetuning
import pytest
import yaml
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc.convert.document import parse_document
from memcalc.convert.formats.torchtune import MODELS, resolve_interpolations
from memcalc.errors import FileError, InputError, MissingError

HERE = finetuning.CONFIGS / "torchtune"
ALL = "q,v,o,gate,up,down"
PLAIN = {
    "framework": "torchtune", "loss": "chunked", "precision": "bf16", "compile": "none", "optimizer": "adamw",
    "optimizer_impl": "fused", "recompute": "full", "strategy.checkpoint": "non-reentrant", "sharded": 3,
    "varying_lengths": True, "seq_len": None, "lora": None, "quantize": None, "offload": None,
}  # fmt: skip
"""Of most: LinearCrossEntropyLoss, a fused AdamW, checkpoints, samples as long as they are."""

EXPECTED: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "llama3_1-8b-full": (
        {"model": "llama-3.1-8b", "micro_batch": 2, "accumulation": 1, "eval_micro_batch": 2},  # ${batch_size}
        [("MC002", "custom_sharded_layers")],
    ),
    "llama3_1-8b-lora-single": (
        {"model": "llama-3.1-8b", "lora": f"8:{ALL}", "quantize": "none", "workload.lora_dropout": 0.0,
         "accumulation": 8},
        [],
    ),
    "llama3_1-8b-qlora-single": ({"model": "llama-3.1-8b", "lora": f"8:{ALL}", "quantize": "nf4-dq"}, []),
    # the recipe reads fsdp_cpu_offload, not fsdp.cpu_offload
    "llama3_1-405b-qlora": (
        {"model": "llama-3.1-405b", "lora": f"16:{ALL}", "quantize": "nf4-dq"}, [("MC001", "fsdp.cpu_offload")],
    ),
    "llama2-7b-full-single": (
        {"model": "llama-2-7b", "optimizer": "paged-adamw", "optimizer_impl": "loop", "optimizer_in_backward": True,
         "offload": ("activations",)},
        [],
    ),
    "llama3_2-3b-full-single": (
        {"model": "llama-3.2-3b", "optimizer": "paged-adamw-8bit", "optimizer_impl": "loop",
         "optimizer_in_backward": True},
        [],
    ),
    "mistral-7b-lora": ({"model": "mistral-7b-v0.1", "lora": f"64:{ALL},head", "quantize": "none"}, []),
    "qwen2_5-7b-lora": (
        {"model": "qwen2.5-7b", "lora": f"8:{ALL}", "quantize": "none", "recompute": "none",
         "strategy.checkpoint": None},
        [],
    ),
    "gemma2-9b-full": ({"model": "gemma-2-9b", "micro_batch": 1}, []),
    "phi3-mini-full": ({"model": "phi-3-mini-3.8b", "accumulation": 8}, []),
    "qat-8b": ({"model": "llama-3.1-8b"}, [("MC002", "custom_sharded_layers"), ("MC002", "quantizer")]),
    "llama3_3-70b-multinode": (
        {"model": "llama-3.1-70b", "tp": 8, "compile": "blocks+loss", "seq_len": 1024},
        [("MC002", "custom_sharded_layers")],
    ),
}  # fmt: skip


def test_every_example_has_its_expectation() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_examples_are_read_as_torchtune_reads_them(name: str) -> None:
    words, findings = EXPECTED[name]
    config = finetuning.read(HERE / f"{name}.yaml")
    found = finetuning.said(config)
    expected = {**PLAIN, **words}
    assert {word: found.get(word) for word in expected} == expected
    assert finetuning.codes(config) == findings


BASE = """
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {max_seq_len: 2048}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 4
dtype: bf16
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("dataset: {packed: true}", {"varying_lengths": False, "seq_len": 2048}),
        ("compile: {model: true, loss: false}", {"compile": "blocks"}),
        ("compile: true", {"compile": "blocks+loss"}),
        ("ac_mode: selective\nac_option: 2", {"recompute": "every-2"}),
        ("ac_mode: selective\nac_option: op", {"recompute": "selective-ops"}),
        ("ac_mode: full\nenable_activation_checkpointing: true", {"recompute": "none"}),
        ("fsdp_reshard_after_forward: false", {"sharded": 2}),
        ("recipe: full_finetune_single_device", {"zero": 0}),  # as a launch line hands it over
        ("recipe: lora_finetune_distributed", {"zero": 3}),
        ("fsdp_cpu_offload: true", {"offload": ("params",)}),
        ("run_val_every_n_steps: 10\nbatch_size_val: ${batch_size}", {"evaluates": True, "eval_micro_batch": 4}),
        ("optimizer: {_component_: torch.optim.AdamW}", {"optimizer_impl": "foreach"}),
        ("optimizer: {_component_: torch.optim.SGD, momentum: 0.9}", {"optimizer": "sgd-momentum"}),
        (
            "optimizer: {_component_: torch.optim.SGD, weight_decay: 0.1}",
            {"optimizer": "sgd", "strategy.sgd_weight_decay": True},
        ),
        ("optimizer: {_component_: torchao.optim.AdamW8bit}", {"optimizer": "adamw-8bit"}),
    ],
)
def test_settings_one_by_one(lines: str, words: dict[str, Any]) -> None:
    found = finetuning.said(finetuning.read_text(f"{BASE}{lines}\n"))
    assert {word: found.get(word) for word in words} == words


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("optimizer: {_component_: torch.optim.AdamWW}", "torch.optim.AdamW"),
        ("gradient_accumulation_steps: few", "gradient_accumulation_steps"),
        ("ac_mode: selective\nac_option: some", "ac_option"),
    ],
)
def test_wrong_values_are_refused_by_name(lines: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        finetuning.read_text(f"{BASE}{lines}\n")


@pytest.mark.parametrize("dtype", ["fp16", "float8"])
def test_dtypes_that_no_recipe_trains_are_refused(dtype: str) -> None:
    with pytest.raises(InputError, match="dtype"):
        finetuning.read_text(BASE.replace("bf16", dtype))


def test_lengths_and_environment_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(BASE.replace("2048", "null").replace("batch_size: 4", "batch_size: ${oc.env:BATCH}"))
    with pytest.raises(MissingError, match=r"--micro-batch .*oc\.env:BATCH.*--seq-len"):
        finetuning.checked([path], gpu="h100", gpus=1)


def test_one_gpu_shards_nothing_and_several_shard_in_16_bits(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(BASE)
    one, four = (finetuning.checked([path], gpu="h100", gpus=gpus).strategy for gpus in (1, 4))
    assert (one.zero, one.reduce_dtype) == (0, "fp32")
    assert (four.zero, four.reduce_dtype) == (3, "bf16")


# ----------------------------------------------------------------------------------------------------- interpolation

LOOPS = ("a: ${b}\nb: ${a}", "a: ${a}", "a: x${b}\nb: y${a}")


@pytest.mark.parametrize("text", LOOPS)
def test_interpolations_that_go_round_are_refused(text: str) -> None:
    with pytest.raises(FileError, match="must not refer to itself"):
        resolve_interpolations(parse_document(Path("x.yaml"), text, "yaml"))


def test_a_value_that_doubles_itself_is_refused() -> None:
    lines = ["a0: " + "x" * 64, *(f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}" for n in range(1, 16))]
    with pytest.raises(FileError, match="usual length"):
        resolve_interpolations(parse_document(Path("x.yaml"), "\n".join(lines), "yaml"))


TEXTS = st.sampled_from(["1", "true", "text", "2.5", "${a}", "${b.c}", "x-${a}-${b.c}", "${ a }", "${..a}", "${b.d.0}"])


@pytest.mark.parser
@given(st.dictionaries(st.sampled_from(["k", "l", "m"]), TEXTS, max_size=3), TEXTS)
@drawn(60)
def test_interpolations_are_omegaconfs(table: dict[str, str], inner: str) -> None:
    """What OmegaConf resolves, we resolve to the same; what it cannot, we leave open."""
    omegaconf = pytest.importorskip("omegaconf", reason="pip install --no-deps omegaconf antlr4-python3-runtime==4.9.3")
    data: dict[str, Any] = {"a": 7, "b": {"c": "see", "d": [3]}, **table, "t": {"inner": inner}}
    document = parse_document(Path("x.yaml"), yaml.safe_dump(data), "yaml")
    ours = resolve_interpolations(document)
    theirs = omegaconf.OmegaConf.create(document.data)
    for place in [(key,) for key in table] + [("t", "inner")]:
        value: Any = ours.data
        for key in place:
            value = value[key]
        try:
            node = omegaconf.OmegaConf.select(theirs, ".".join(place), throw_on_missing=True)
        except omegaconf.errors.OmegaConfBaseException:
            assert place in ours.unknown
        else:
            assert place not in ours.unknown
            assert value == node


# ------------------------------------------------------------------------------------------------------- public runs

README = """
model: {{_component_: torchtune.models.llama3_2.llama3_2_3b}}
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}}
dataset: {{_component_: torchtune.datasets.alpaca_dataset, packed: true}}
batch_size: 2
gradient_accumulation_steps: 1
dtype: bf16
optimizer: {{_component_: {optimizer}}}
optimizer_in_bwd: {early}
enable_activation_checkpointing: {early}
enable_activation_offloading: {offloaded}
compile: true
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
"""
"""Its README's table of optimisation flags, at 1814feb17."""


@pytest.mark.parametrize(
    ("run_id", "optimizer", "early", "offloaded", "typed"),
    [
        ("tune3b-004", "torch.optim.AdamW", "false", "false", {}),
        ("tune3b-006", "torch.optim.AdamW", "true", "false", {}),
        ("tune3b-008", "torchao.prototype.low_bit_optim.AdamW8bit", "true", "true", {"optimizer_impl": "foreach"}),
    ],
)
def test_public_runs_in_its_form(
    run_id: str, optimizer: str, early: str, offloaded: str, typed: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(README.format(optimizer=optimizer, early=early, offloaded=offloaded))
    fields = {"strategy.checkpoint": "non-reentrant"} if early == "true" else {}
    finetuning.same_as_run(run_id, path, settings=fields, **typed)


# ------------------------------------------------------------------------------------------------------------ its names


@pytest.mark.parser
def test_builders_are_torchtunes() -> None:
    """Each builder that we know is defined there; those of 0.6.1, the newest release on PyPI."""
    import importlib.util

    spec = importlib.util.find_spec("torchtune")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps torchtune")
    sources = Path(spec.submodule_search_locations[0]).glob("models/*/_model_builders.py")
    text = "\n".join(path.read_text() for path in sources)
    newer = {name for name in MODELS if name.startswith(("qwen3_", "smollm2_"))}
    for name in set(MODELS) - newer:
        assert re.search(rf"^(def )?{name}(_base|_instruct)?( =|\()", text, re.MULTILINE), name
