"""litgpt's YAML: what is read from configs in the shape of its config hub, against its source at 26857050 (0.5.13).

Expected words are derived from finetune/lora.py, finetune/full.py, pretrain.py, args.py and utils.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetuning
import pytest

from memcalc.errors import InputError, MissingError

HERE = finetuning.CONFIGS / "litgpt"
PLAIN = {
    "framework": "litgpt", "loss": "chunked", "precision": "bf16", "optimizer": "adamw", "optimizer_impl": "foreach",
    "recompute": "none", "compile": "none", "varying_lengths": True, "seq_len": 512, "lora": None, "quantize": None,
    "gpus_per_node": 1,
}  # fmt: skip
QLORA = {"quantize": "nf4", "optimizer": "paged-adamw", "optimizer_impl": None, "strategy.bnb": "0.42"}
MANY = {"recompute": "full"}  # FSDPStrategy checkpoints each block
PRETRAIN = {
    "precision": "bf16-mixed", "optimizer_impl": "fused", "compile": "model", "seq_len": 2048,
    "varying_lengths": False, "gpus_per_node": None,
}  # fmt: skip
"""devices is auto, which a run counts; the script compiles, and asks for the fused AdamW."""

EXPECTED: dict[str, dict[str, Any]] = {
    "llama-2-7b-qlora": {**QLORA, "lora": "32:q,v", "micro_batch": 2, "train_batch": 8, "workload.lora_dropout": 0.05},
    "llama-2-7b-lora": {"lora": "32:q,v", "micro_batch": 2},
    "llama-2-7b-full": {**MANY, "gpus_per_node": 4, "micro_batch": 4, "train_batch": 64},
    "phi-2-lora": {"lora": "8:q,k,v,o,gate,up,down,head", "micro_batch": 4},
    "phi-2-full": {**MANY, "gpus_per_node": 2, "micro_batch": 4},
    "gemma-2b-full": {**MANY, "gpus_per_node": 4, "train_batch": 16},
    "gemma2-9b-qlora": {**QLORA, "lora": "16:q,k,v,o,gate,up,down,head", "workload.lora_dropout": 0.1},
    "mistral-7b-lora": {"lora": "32:q,v"},
    "llama-3.2-1b-full": {"micro_batch": 4, "train_batch": 64},
    "falcon-7b-qlora": {**QLORA, "lora": "32:q,v", "micro_batch": 1},
    "tinyllama-pretrain": {**PRETRAIN, "micro_batch": 4, "train_batch": 512},
    "microllama-pretrain": {**PRETRAIN, "micro_batch": 12, "train_batch": 48},
}


def test_every_example_has_its_expectation() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_examples_are_read_as_litgpt_reads_them(name: str) -> None:
    config = finetuning.read(HERE / f"{name}.yaml")
    found = finetuning.said(config)
    expected = {**PLAIN, **EXPECTED[name]}
    assert {word: found.get(word) for word in expected} == expected
    assert not config.findings


BASE = "checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B\nout_dir: out\n"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("train: {}", {"micro_batch": 1, "train_batch": 16, "precision": "bf16-autocast", "gpus_per_node": 1}),
        ("train: {}\ndevices: 2", {"precision": "bf16-mixed", "recompute": "full"}),
        ("train: {}\nlora_r: 4", {"lora": "4:q,v", "workload.lora_dropout": 0.05}),
        ("train: {}\nlora_r: 4\nlora_mlp: true\nlora_query: false", {"lora": "4:v,gate,up,down"}),
        ("train: {}\nlora_r: 4\nquantize: bnb.nf4-dq", {"quantize": "nf4-dq", "optimizer": "paged-adamw"}),
        ("train: {}\noptimizer: SGD", {"optimizer": "sgd"}),
        (
            "train: {}\noptimizer: {class_path: torch.optim.SGD, init_args: {weight_decay: 0.1}}",
            {"optimizer": "sgd", "strategy.sgd_weight_decay": True},
        ),
        ("train: {}\noptimizer: {class_path: bitsandbytes.optim.PagedAdamW}", {"optimizer": "paged-adamw"}),
        ("train: {}\ncommand: finetune_lora", {"lora": "8:q,v"}),
        ("train: {}\nprecision: 32-true", {"precision": "fp32"}),
    ],
)
def test_settings_one_by_one(lines: str, words: dict[str, Any]) -> None:
    found = finetuning.said(finetuning.read_text(f"{BASE}{lines}\n"))
    assert {word: found.get(word) for word in words} == words


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("precision: bf16", "bf16-true"),
        ("quantize: bnb.nf5\nlora_r: 8", "bnb.nf4"),
        ("devices: some", "devices"),
        ("optimizer: AdamWW", "AdamW"),
        ("optimizer: SGD\nlora_r: 8\nquantize: bnb.nf4", "optimizer"),
    ],
)
def test_wrong_values_are_refused_by_name(lines: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        finetuning.read_text(f"{BASE}train: {{}}\n{lines}\n")


def test_what_a_run_counts_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(BASE + "train: {}\ndevices: auto\n")
    with pytest.raises(MissingError, match=r"--gpus, --seq-len"):
        finetuning.checked([path], gpu="h100")


def test_adapters_over_several_gpus_run_on_another_fsdp() -> None:
    config = finetuning.read_text(f"{BASE}train: {{}}\nlora_r: 8\ndevices: 2\n")
    assert finetuning.codes(config) == [("MC002", "devices")]


# ------------------------------------------------------------------------------------------------------- public runs

TABLE = """
checkpoint_dir: checkpoints/meta-llama/Llama-2-7b-hf
precision: bf16-true
{quantize}
devices: 1
lora_r: 8
lora_dropout: 0.05
train: {{global_batch_size: 128, micro_batch_size: {micro}, max_seq_length: 1304}}
"""
"""Of tutorials/resource-tables.md at 0cc02afa (2023-10-27)."""


@pytest.mark.parametrize(
    ("run_id", "micro", "quantize"),
    [("litres-011", 1, ""), ("litres-014", 2, ""), ("litres-012", 1, "quantize: bnb.nf4"),
     ("litres-013", 1, "quantize: bnb.nf4-dq")],
)  # fmt: skip
def test_public_runs_in_its_form(run_id: str, micro: int, quantize: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TABLE.format(micro=micro, quantize=quantize))
    fields = {"workload.longest_first": "true", **({"strategy.bnb": "0.41"} if quantize else {})}
    finetuning.same_as_run(run_id, path, framework="litgpt@2023-10", settings=fields)


# -------------------------------------------------------------------------------------------------------- its schema


@pytest.mark.parser
def test_stated_defaults_are_those_of_setup() -> None:
    """By the signature of each command's ``setup``, from the package's text: importing it needs Lightning."""
    import ast
    import importlib.util

    spec = importlib.util.find_spec("litgpt")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps litgpt")
    root = Path(spec.submodule_search_locations[0])
    for command, file in (
        ("finetune_lora", "finetune/lora.py"),
        ("finetune_full", "finetune/full.py"),
        ("pretrain", "pretrain.py"),
    ):
        tree = ast.parse((root / file).read_text())
        setup = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "setup")
        names = [argument.arg for argument in setup.args.args][-len(setup.args.defaults) :]
        given = dict(zip(names, setup.args.defaults, strict=True))
        train = {
            word.arg: ast.literal_eval(word.value)
            for word in given["train"].keywords
            if word.arg in ("micro_batch_size", "global_batch_size")
        }  # type: ignore[attr-defined]
        found = finetuning.said(finetuning.read_text(f"{BASE}command: {command}\nmodel_name: x\n"))
        assert found["micro_batch"] == train["micro_batch_size"]
        assert found["train_batch"] == train["global_batch_size"]
        assert found.get("gpus_per_node", "auto") == ast.literal_eval(given["devices"])
        if command == "finetune_lora":
            on = [
                key
                for key in ("query", "key", "value", "projection", "mlp", "head")
                if ast.literal_eval(given[f"lora_{key}"])
            ]
            assert on == ["query", "value"]
            assert found["lora"] == f"{ast.literal_eval(given['lora_r'])}:q,v"
            assert found["workload.lora_dropout"] == ast.literal_eval(given["lora_dropout"])


def test_what_whole_micro_batches_leave_over_is_left_out(tmp_path: Path) -> None:
    """Litgpt 0.5.13 args.py: 125 // 8 // 5 = 3 micro-batches of 5 on 8 ranks, as its pretrain/debug.yaml asks for."""
    (tmp_path / "debug.yaml").write_text(
        "model_name: pythia-14m\ndevices: 8\n"
        "train: {global_batch_size: 125, micro_batch_size: 5, max_seq_length: 512, max_tokens: 1000}\n"
    )
    assert finetuning.checked([tmp_path / "debug.yaml"], gpu="h100").workload.global_batch == 120


def test_adapters_of_an_mlp_without_a_gate_are_those_that_it_has() -> None:
    """lora.py: ``lora_mlp`` of phi-2's GptNeoxMLP is fc and proj, of a LLaMAMLP also its gate."""
    of_phi = finetuning.checked([HERE / "phi-2-lora.yaml"], gpu="h100", seq_len=512)
    assert of_phi.strategy.lora == "8:q,k,v,o,up,down,head"
    of_gemma = finetuning.checked([HERE / "gemma2-9b-qlora.yaml"], gpu="h100", seq_len=512)
    assert "gate" in of_gemma.strategy.lora
