"""The script that export --to fsdp2 writes: it runs, it allocates what the plan says, and it is read back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from shallow import shallow

import memcalc
from memcalc import catalog
from memcalc.api import load_model
from memcalc.convert.document import read_document
from memcalc.convert.formats import get_format, recognise, render_config
from memcalc.convert.formats.base import ConfigJob
from memcalc.errors import CombinationError, FileError, InputError, MissingError
from memcalc.frameworks.support import SCRIPT, TENSOR_PARALLEL, WITH_PARTS
from memcalc.preflight import check
from memcalc.results.estimates import Estimate
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model

FSDP2 = get_format("fsdp2")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 176,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
FOREACH, FUSED = {"foreach": True, "fused": False}, {"foreach": False, "fused": True}
BASE: dict[str, Any] = {
    "gpus": 8,
    "seq_len": 2048,
    "global_batch": 8,
    "precision": "bf16-mixed",
    "zero": 3,
    "optimizer_impl": "foreach",
}


def script(found: Estimate, model: str = "", spec: Model | None = None) -> str:
    """Return the script of an estimate."""
    name = model or found.model.name
    return render_config(FSDP2, replace(ConfigJob.of(found, spec or load_model(name)), model=name))


def of(**words: Any) -> Estimate:
    """Estimate FSDP2 on H100s."""
    return memcalc.estimate(gpu="h100", framework="fsdp2", **{"model": "llama-3.2-1b", **BASE, **words})


# ------------------------------------------------------------------------------------------------------ what it says


def test_the_script_is_short_and_needs_no_memcalc() -> None:
    text = script(of(recompute="full"))
    assert len(text.splitlines()) < 225
    assert max(map(len, text.splitlines())) <= 120
    assert not re.search(r"^\s*(import|from) memcalc", text, re.MULTILINE)
    compile(text, "script", "exec")


SAID = [
    # words of the plan, constants of the script
    ({}, {"RESHARD": True, "CHECKPOINTED_BLOCKS": (0, 0, 1), "OFFLOAD": False, "ATTENTION": "FLASH_ATTENTION"}),
    ({"zero": 2, "recompute": "full"}, {"RESHARD": False, "CHECKPOINTED_BLOCKS": (0, None, 1)}),
    ({"settings": {"strategy.reshard": "always"}}, {"RESHARD": True, "RESHARD_ROOT": True}),
    ({"recompute": "every-4"}, {"CHECKPOINTED_BLOCKS": (3, None, 4), "CHECKPOINTED_PART": ""}),
    ({"recompute": "block-5"}, {"CHECKPOINTED_BLOCKS": (0, 5, 1)}),
    ({"recompute": "attention"}, {"CHECKPOINTED_BLOCKS": (0, None, 1), "CHECKPOINTED_PART": "self_attn"}),
    ({"precision": "bf16"}, {"WEIGHTS": "bfloat16", "COMPUTE": "bfloat16", "REDUCE": "bfloat16", "AUTOCAST": False}),
    ({"precision": "bf16-autocast"}, {"WEIGHTS": "float32", "COMPUTE": "float32", "AUTOCAST": True}),
    ({"precision": "fp16-mixed"}, {"WEIGHTS": "float32", "COMPUTE": "float16", "REDUCE": "float32"}),
    ({"settings": {"strategy.reduce_dtype": "bf16"}}, {"WEIGHTS": "float32", "REDUCE": "bfloat16"}),
    ({"micro_batch": 2, "global_batch": 64}, {"MICRO_BATCH": 2, "ACCUMULATION": 4, "GPUS": 8, "SEQ_LEN": 2048}),
    ({"optimizer": "sgd-momentum"}, {"OPTIMIZER": "SGD", "OPTIMIZER_OPTIONS": {"momentum": 0.9, **FOREACH}}),
    ({"offload": "params", "optimizer_impl": "fused"}, {"OFFLOAD": True, "OPTIMIZER_OPTIONS": FUSED}),
    ({"offload": "params,activations"}, {"OFFLOAD": True, "OFFLOAD_ACTIVATIONS": True}),
    ({"recompute": "selective-ops"}, {"CHECKPOINTED_BLOCKS": (0, None, 1), "CHECKPOINTS_KEEP": "operators"}),
    ({"compile": "blocks"}, {"COMPILE": True}),
    ({"dp_replicate": 2}, {"GPUS": 8, "REPLICAS": 2}),
    ({"tp": 4, "global_batch": 32}, {"GPUS": 8, "TP": 4, "ACCUMULATION": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "constants"), SAID)
def test_constants_say_the_plan(words: dict[str, Any], constants: dict[str, Any], tmp_path: Path) -> None:
    found = of(**words)
    text = script(found)
    said: dict[str, Any] = {}
    exec(text.partition("\nimport ")[0], said)  # noqa: S102
    assert {name: said[name] for name in constants} == constants
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    again = check([str(path)], gpu="h100").estimate
    fields = {} if found.strategy.precision.endswith("-mixed") else {"reduce_dtype": "fp32"}
    assert again.strategy.model_copy(update=fields) == found.strategy
    assert (again.peak, again.workload) == (found.peak, found.workload)


EDITS = [
    ("MICRO_BATCH = 1", "MICRO_BATCH = 2", "micro_batch", 2),
    ("CHECKPOINTED_BLOCKS = (0, 0, 1)", "CHECKPOINTED_BLOCKS = (1, None, 2)", "recompute", "every-2"),
    ("RESHARD = True", "RESHARD = False", "zero", 2),
    ('REDUCE = "float32"', 'REDUCE = "bfloat16"', "reduce_dtype", "bf16"),
    ('OPTIMIZER = "AdamW"', 'OPTIMIZER = "SGD"', "optimizer", "sgd"),
    ("TP = 1", "TP = 2", "dp", 4),
]


@pytest.mark.parametrize(("old", "new", "field", "value"), EDITS)
def test_an_edited_constant_is_what_is_checked(old: str, new: str, field: str, value: Any, tmp_path: Path) -> None:
    """The code follows the constants, so that an edit of one changes what the script does and what check says."""
    text = script(of())
    assert text.count(old) == 1
    path = tmp_path / "train.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert getattr(check([str(path)], gpu="h100").estimate.strategy, field) == value


def test_other_sizes_than_the_presets_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(of()).replace('"num_hidden_layers": 16', '"num_hidden_layers": 12'), encoding="utf-8")
    (file,) = check([str(path)], gpu="h100").files
    unknown = [one for one in file.findings if one.code == "MC002"]
    assert [(one.field, one.line) for one in unknown] == [("CONFIG", 9)]


WRONG = [
    ('COMPUTE = "bfloat16"', 'COMPUTE = "float8"', InputError, "bfloat16"),
    ('REDUCE = "float32"', 'REDUCE = "float16"', InputError, "float32"),
    ("MICRO_BATCH = 1", "MICRO_BATCH = 0", InputError, "from 1"),
    ("CHECKPOINTED_BLOCKS = (0, 0, 1)", "CHECKPOINTED_BLOCKS = (2, 7, 3)", InputError, "CHECKPOINTED_BLOCKS"),
    ("GPUS = 8", "GPUS = len(MODEL)", FileError, "plain values"),
    ("GPUS = 8", "GPUS = " + "(" * 500 + ")" * 500, FileError, "plain values"),
    ('WEIGHTS = "float32"', 'WEIGHTS = "bfloat16"', InputError, "REDUCE"),
]


@pytest.mark.parametrize(("old", "new", "error", "said"), WRONG)
def test_a_wrong_constant_is_refused_by_name(old: str, new: str, error: type, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(of()).replace(old, new), encoding="utf-8")
    with pytest.raises(error, match=said):
        check([str(path)], gpu="h100")


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    told = f"GPUS = __import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    path.write_text(script(of()).replace("GPUS = 8", told), encoding="utf-8")
    with pytest.raises(FileError):
        check([str(path)], gpu="h100")
    assert not (tmp_path / "ran").exists()


def test_only_its_own_script_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(of()), encoding="utf-8")
    assert recognise(read_document(path)).name == "fsdp2"
    path.write_text(script(of()).partition("\n")[2], encoding="utf-8")
    assert not FSDP2.recognise(read_document(path))


def test_a_launch_script_leads_to_its_own_script_and_to_no_other(tmp_path: Path) -> None:
    (tmp_path / "train_fsdp2.py").write_text(script(of()), encoding="utf-8")
    start = tmp_path / "launch.sh"
    start.write_text("torchrun --nproc-per-node 8 train_fsdp2.py\n", encoding="utf-8")
    told = check([str(start)], gpu="h100")
    assert [file.kind for file in told.files] == ["launch script", "FSDP2 script"]
    assert told.estimate.peak == check([str(tmp_path / "train_fsdp2.py")], gpu="h100").estimate.peak
    assert not [finding for file in told.files for finding in file.findings if finding.code in ("MC001", "MC003")]
    (tmp_path / "train_fsdp2.py").write_text("import torch\n", encoding="utf-8")
    with pytest.raises(MissingError, match="arguments of its own"):
        check([str(start)], gpu="h100")


REFUSED = [
    ({"tp": 2, "sp": True}, "tp"),
    ({"tp": 2, "sp": False, "model": "gpt2", "seq_len": 1024}, "tp"),
    ({"tp": 2, "sp": False, "model": "phi-3-mini"}, "tp"),
    ({"tp": 2, "offload": "activations"}, "offload"),
    ({"cp": 2}, "cp"),
    ({"pp": 2, "recompute": "full"}, "pp"),
    ({"recompute": "sqrt"}, "recompute"),
    ({"loss": "chunked"}, "loss"),
    ({"kernels": "fused"}, "kernels"),
    ({"compile": "model"}, "compile"),
    ({"compile": "blocks", "offload": "activations"}, "compile"),
    ({"optimizer": "adamw-8bit"}, "optimizer"),
    ({"offload": "optimizer"}, "offload"),
    ({"precision": "fp16-autocast"}, "precision"),
    ({"lora": "16"}, "lora"),
    ({"optimizer_in_backward": True}, "optimizer-in-backward"),
    ({"optimizer": "sgd", "optimizer_impl": "fused"}, "optimizer"),
    ({"settings": {"strategy.sgd_weight_decay": True}}, "strategy.sgd_weight_decay"),
    ({"model": "mixtral-8x7b"}, "model"),
    ({"model": "bert-large", "seq_len": 512}, "model"),
    ({"model": "gpt2", "seq_len": 1024, "recompute": "mlp"}, "recompute"),
]


@pytest.mark.parametrize(("words", "field"), REFUSED)
def test_what_the_script_does_not_do_is_refused_by_name(words: dict[str, Any], field: str) -> None:
    with pytest.raises(CombinationError) as refused:
        script(of(**words))
    assert str(refused.value).startswith(f"{field} ")


# ------------------------------------------------------------------------------------------------------- what it does


def llama(*, layers: int = 6, hidden: int = 1024, ffn: int = 2816, vocab: int = 32_000, tied: bool = False) -> Model:
    """Return a Llama whose sizes Transformers is given too."""
    sizes = {"n_layers": layers, "hidden": hidden, "heads": 8, "kv_heads": 8, "ffn": ffn, "vocab": vocab, "tied": tied}
    kinds = {"gated": True, "norm": "rmsnorm", "positions": "rope", "family": "llama", "hf_class": "LlamaForCausalLM"}
    config = {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": tied,
    }  # fmt: skip
    return from_flat({"name": "small", "max_positions": 4096, "hf_config": config, **sizes, **kinds})


HYBRID: list[dict[str, Any]] = [
    {"gpus": 16, "global_batch": 16},
    {"gpus": 16, "global_batch": 64},
    {"gpus": 8, "global_batch": 32},
    {"gpus": 16, "global_batch": 64, "settings": {"strategy.reduce_dtype": "bf16"}},
]
"""Two replicas of short sequences, so that the peak is where backward ends and what was reduced is still kept."""
ALLOCATED: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"zero": 2},
    {"zero": 2, "recompute": "full", "optimizer_impl": "fused", "gpus": 64, "global_batch": 64, "seq_len": 512},
    {"settings": {"strategy.reshard": "always"}, "recompute": "full", "micro_batch": 8, "global_batch": 64},
    {"recompute": "every-2"},
    {"recompute": "block-3"},
    {"recompute": "mlp"},
    {"recompute": "attention"},
    {"recompute": "selective-ops"},
    {"global_batch": 32},
    {"micro_batch": 2, "global_batch": 32, "recompute": "full", "optimizer_impl": "fused"},
    {"precision": "bf16"},
    {"precision": "bf16-autocast"},
    {"precision": "bf16-autocast", "zero": 2, "recompute": "mlp"},
    {"precision": "fp32", "attention": "efficient"},
    {"precision": "fp16-mixed", "recompute": "full"},
    {"settings": {"strategy.reduce_dtype": "bf16"}, "seq_len": 512},
    {"optimizer": "sgd-momentum"},
    {"optimizer": "sgd-momentum", "settings": {"strategy.sgd_weight_decay": True}},
    {"optimizer": "sgd", "optimizer_impl": "loop"},
    *({"dp_replicate": 2, "seq_len": 128, "recompute": "full", "optimizer_impl": "fused", **job} for job in HYBRID),
    {"tp": 2},
    {"tp": 4, "recompute": "full", "zero": 2, "global_batch": 2},
    {"tp": 2, "precision": "fp32", "attention": "efficient"},
    {"tp": 2, "precision": "bf16-autocast"},
    {"tp": 2, "precision": "bf16-autocast", "recompute": "selective-ops"},
    {"tp": 2, "seq_len": 128, "recompute": "full"},
    {"tp": 2, "dp_replicate": 2, "gpus": 16, "recompute": "full"},
]


@pytest.mark.slow
@pytest.mark.parametrize("words", ALLOCATED, ids=str)
def test_the_script_allocates_what_the_plan_says(words: dict[str, Any]) -> None:
    """PyTorch's own count of the script's second step beside the figure of the plan, less the BLAS workspaces."""
    pytest.importorskip("transformers")
    from autograd.exported import steps_of

    spec = llama()
    found = of(model=spec, **words)
    workspaces = sum(term.bytes for term in found.terms if term.name == "BLAS workspaces")
    peak = steps_of(script(found, spec=spec), found.hardware.gpus, found.strategy.attention).peak()
    assert found.peak.allocated - workspaces == pytest.approx(peak.live, rel=2e-4)


RUNS = [
    (1, {"recompute": "full"}),
    (2, {"recompute": "full", "settings": {"strategy.reshard": "always"}}),
    (2, {"recompute": "every-2", "zero": 2}),
    (2, {"offload": "params", "optimizer_impl": "fused", "recompute": "mlp"}),
    (2, {"precision": "bf16-autocast", "attention": "math", "optimizer": "sgd-momentum", "optimizer_impl": "loop"}),
    (1, {"recompute": "selective-ops"}),
    (1, {"recompute": "block-1", "offload": "activations"}),
    (2, {"recompute": "full", "offload": "params,activations"}),
    (1, {"compile": "blocks"}),
    (2, {"precision": "fp16-mixed", "offload": "params"}),
    (4, {"precision": "fp16-mixed", "tp": 2, "optimizer_impl": "fused"}),
    (4, {"dp_replicate": 2, "recompute": "full"}),
    (2, {"tp": 2, "recompute": "full"}),
    (8, {"tp": 2, "dp_replicate": 2, "recompute": "full"}),
    (4, {"tp": 2, "compile": "blocks", "zero": 2}),
    (4, {"tp": 2, "offload": "params", "optimizer_impl": "fused", "recompute": "attention"}),
    (4, {"tp": 2, "precision": "bf16-autocast", "attention": "math", "recompute": "selective-ops"}),
]


Launcher = Callable[[int, Path], str]
"""Runs a script as so many ranks, which end well; returns what they say."""


@pytest.fixture(scope="module")
def forked() -> Iterator[Launcher]:
    """Ranks forked from one process for all tests, which imports what each rank would."""
    pytest.importorskip("transformers")
    command = [sys.executable, str(Path(__file__).parents[2] / "forked_ranks.py")]
    # Inductor's kernels without vector instructions, made in the rank itself: half the time of a compiler
    plain = {**os.environ, "TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain) as ready:
        assert ready.stdin is not None
        assert ready.stdout is not None

        def run(ranks: int, path: Path) -> str:
            said = path.with_suffix(".said")
            print(json.dumps([ranks, str(path), str(said)]), file=ready.stdin, flush=True)
            code, text = ready.stdout.readline(), said.read_text(encoding="utf-8")
            assert code == "0\n", text
            return text

        yield run
        ready.stdin.close()


def torchrun(ranks: int, path: Path) -> str:
    """Run a script with PyTorch's own launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def launched(text: str, ranks: int, folder: Path, launcher: Launcher) -> str:
    """Run four steps of a script on the CPU, with one token as its data; return what it prints."""
    for old, new in (
        ("STEPS = 10", "STEPS = 4"),
        ("torch.randint(vocabulary, (MICRO_BATCH, SEQ_LEN)", "torch.full((MICRO_BATCH, SEQ_LEN), 7"),
        ("lr=3e-4", "lr=1e-2"),  # three times as much overshoots in bf16 for some initial weights
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    if ranks > 1:  # of one rank Inductor's kernels run: elsewhere what is compiled is asked, which AOT autograd shows
        text = text.replace("torch.compile(blocks[index])", 'torch.compile(blocks[index], backend="aot_eager")')
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return launcher(ranks, path)


def check_output(said: str, found: Estimate) -> None:
    """It learns to repeat a token, which it does only if the weights that it uses are those of its optimizer."""
    steps = re.findall(r"step (\d): loss ([\d.]+), (\d+) sequences", said)
    batch = str(found.workload.global_batch)
    assert [(step, sequences) for step, _, sequences in steps] == [(str(step), batch) for step in range(4)]
    losses = [float(loss) for _, loss, _ in steps]
    assert losses[-1] < max(losses) - 1  # a scaled loss skips a step
    assert f"allocated: not measured, predicted {found.peak.allocated / 2**30:.2f} GiB" in said


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), RUNS, ids=str)
def test_the_script_runs(ranks: int, words: dict[str, Any], forked: Launcher, tmp_path: Path) -> None:
    tiny = llama(layers=2, hidden=64, ffn=176, vocab=512, tied=True)
    batch = {"seq_len": 32, "micro_batch": 2, "global_batch": 8 * ranks // words.get("tp", 1), "gpus": ranks}
    found = of(model=tiny, **batch, **words)
    assert found.workload.accumulation_steps == 4
    check_output(launched(script(found, spec=tiny), ranks, tmp_path, forked), found)


@pytest.mark.slow
def test_the_script_of_a_config_json_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY), encoding="utf-8")
    found = of(model=str(config), seq_len=32, micro_batch=2, global_batch=8, gpus=2, recompute="full")
    check_output(launched(script(found, str(config)), 2, tmp_path, torchrun), found)


@pytest.mark.slow
def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "train.py"
    path.write_text(script(of()), encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "The plan is for 8 GPUs" in done.stderr


def dense_decoders() -> dict[str, str]:
    """Return a preset of each class that a script may be written for."""
    return {
        str(model.hf_class): model.name
        for model in catalog.models(())
        if model.hf_class
        and not model.is_moe
        and all(group.tower == "decoder" for group in model.groups)
        and not model.counted_parts
    }


@pytest.mark.parametrize("name", dense_decoders().values())
def test_each_block_of_each_class_is_sharded_and_then_the_root(name: str) -> None:
    """The real class with its real sizes, on the meta device."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    spec = shallow(load_model(name))
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script(of(model=spec, seq_len=512, recompute="full"), spec=spec), "script", "exec"), names)  # noqa: S102
    units: list[tuple[Any, bool]] = []
    names["fully_shard"] = lambda unit, **words: units.append((unit, words["reshard_after_forward"]))
    config = getattr(transformers, str(spec.hf_class)).config_class(**names["CONFIG"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names["shard"](model, None)
    assert [reshard for _, reshard in units] == [True] * spec.num_layers + [False]
    assert units[-1][0] is model
    assert {type(unit).__name__ for unit, _ in units[:-1]} == {"CheckpointWrapper"}


def test_the_parts_of_a_block_have_the_names_that_are_checkpointed() -> None:
    """Transformers' own classes, without weights."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    for name in WITH_PARTS:
        kind = getattr(transformers, name)
        small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = kind.config_class(**small, intermediate_size=64, vocab_size=128, head_dim=16, pad_token_id=0)
        with torch.device("meta"):
            model = kind(config)
        blocks = [one for one in model.modules() if type(one).__name__ in model._no_split_modules]
        assert blocks, name
        assert all(hasattr(blocks[0], part) for part in ("mlp", "self_attn")), name


# ------------------------------------------------------------------------------------------------- tensor parallelism


LATER = {"GPTJForCausalLM": "5.24"}
"""Versions with which plans came to classes: earlier ones of Transformers 5 would divide nothing of them."""


UNMODELLED = ("Gemma4UnifiedForCausalLM",)
"""Classes with such a plan of which no tensor parallelism is modelled."""


def in_full(plan: dict[str, str]) -> bool:
    """Whether a plan divides each branch from its first product to its last; embeddings are the script's own affair."""
    middle = set(plan.values()) - {"replicated_with_grad_allreduce", "embedding_rowwise"}
    return middle == {"colwise", "rowwise"}


@pytest.mark.parametrize("kind", dense_decoders())
def test_tensor_parallelism_is_told_for_classes_whose_plan_divides_whole_branches(kind: str) -> None:
    """Transformers' own plans; the head's logits are gathered, and queries' and keys' norms are alike on all ranks."""
    transformers = pytest.importorskip("transformers")
    plan = getattr(transformers, kind).config_class.base_model_tp_plan or {}
    came = kind in LATER and Version(transformers.__version__) >= Version(LATER[kind])
    assert in_full(plan) == (kind in (*TENSOR_PARALLEL, *UNMODELLED) or came)
    assert kind not in LATER or kind not in TENSOR_PARALLEL
    if kind in TENSOR_PARALLEL:
        assert getattr(transformers, kind)._tp_plan == {"lm_head": "colwise_gather_output"}


@contextlib.contextmanager
def divided(name: str, ranks: int, tp: int) -> Iterator[tuple[Any, Estimate]]:
    """Yield the model of a preset's script on the meta device once it is divided as on rank 0, and its estimate."""
    import torch
    import transformers
    from autograd import parallel

    spec = shallow(load_model(name))
    found = of(model=spec, seq_len=512, tp=tp, gpus=ranks, global_batch=ranks)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script(found, spec=spec), "script", "exec"), names)  # noqa: S102
    config = getattr(transformers, str(spec.hf_class)).config_class(**names["CONFIG"])
    with parallel.fake_ranks(ranks):
        data, tensor = names["meshes"]("cpu")
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        names["split"](model, tensor)
        names["shard"](model, data)
        yield model, found


def planned() -> list[str]:
    """A preset of each class with a plan; Command R+ has a norm's weight for each head, which is in none."""
    names = {model.hf_class: model.name for model in catalog.models(()) if model.name != "command-r-plus-104b"}
    return [names[kind] for kind in dense_decoders() if kind in TENSOR_PARALLEL]


PLANNED = planned()


def test_a_norm_with_a_weight_for_each_head_is_not_divided() -> None:
    code = SCRIPT.parallel.needs("tp", load_model("command-r-plus-104b"))
    assert code
    assert not SCRIPT.parallel.needs("tp", load_model("command-r-35b"))


@pytest.mark.parametrize("name", PLANNED)
def test_a_rank_holds_what_the_term_of_the_weights_says(name: str) -> None:
    """The real class with its real sizes; each matrix is divided by TP, too."""
    pytest.importorskip("transformers")
    with divided(name, 8, 2) as (model, found):
        weights = list(model.parameters())
        assert {weight.device_mesh.mesh_dim_names for weight in weights} == {("shard", "tp")}
        assert all(weight.placements[1].is_shard() for weight in weights if weight.dim() > 1)
        held = sum(weight.to_local().numel() for weight in weights)
    (term,) = (term for term in found.terms if (term.component, term.name) == ("parameters", "weights"))
    assert term.bytes == pytest.approx(4 * held, rel=1e-4)


FILL = """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    state = {}
    for index, (name, weight) in enumerate(model.state_dict().items()):
        torch.manual_seed(index)
        state[name] = torch.randn(weight.shape) * 0.05 + (weight.dim() == 1)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
"""
CLIP = """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    print(f"norm {norm.full_tensor().item():.4f} of rank {dist.get_rank()}", flush=True)
"""


def trajectory(text: str, ranks: int, folder: Path, launcher: Launcher) -> tuple[list[float], set[float]]:
    """Run a script from weights that depend on their names alone; return losses, and norms of the gradients."""
    for old, new in (
        ("STEPS = 10", "STEPS = 3"),
        ("    for buffer in model.buffers():", f"{FILL}    for buffer in model.buffers():"),
        ("    scaler.step(optimizer)\n", f"{CLIP}    scaler.step(optimizer)\n"),
        ("loss.item():.3f", "loss.item():.5f"),
        ("lr=3e-4", "lr=2.0"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    folder.mkdir()
    (folder / "train.py").write_text(text, encoding="utf-8")
    said = launcher(ranks, folder / "train.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+),", said)]
    norms = re.findall(r"norm ([\d.]+) of rank", said)
    assert (len(losses), len(norms)) == (3, 3 * ranks)
    return losses, {float(norm) for norm in norms}


def with_head_norms() -> Model:
    """Return a Qwen 3, which normalises queries and keys head by head."""
    config = {**llama(layers=2, hidden=64, ffn=176, vocab=512).hf_config, "head_dim": 8}
    kinds = {"gated": True, "norm": "rmsnorm", "positions": "rope", "family": "qwen3", "hf_class": "Qwen3ForCausalLM"}
    sizes = {"n_layers": 2, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 176, "vocab": 512, "tied": False}
    return from_flat({"name": "small", "max_positions": 4096, "hf_config": config, "qk_norm": "head", **sizes, **kinds})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama, tied", "qwen3"])
def test_losses_and_norms_do_not_depend_on_tensor_parallelism(kind: str, forked: Launcher, tmp_path: Path) -> None:
    """The same data on two data-parallel ranks, in fp32: SGD shows a gradient that is scaled wrongly, the norm too."""
    spec = llama(layers=2, hidden=64, ffn=176, vocab=512, tied=True) if kind == "llama, tied" else with_head_norms()
    same = {"model": spec, "seq_len": 32, "micro_batch": 2, "global_batch": 8, "precision": "fp32", "optimizer": "sgd"}
    runs = []
    for tp in (1, 2):
        found = of(**same, attention="math", gpus=2 * tp, tp=tp)
        assert (found.strategy.dp, found.strategy.sp) == (2, False)
        runs.append(trajectory(script(found, spec=spec), 2 * tp, tmp_path / str(tp), forked))
    (alone, norms), (losses, other) = runs
    assert losses == pytest.approx(alone, abs=3e-5)
    assert sorted(other) == pytest.approx(sorted(norms), rel=1e-3)
    assert max(norms) > 0.5
