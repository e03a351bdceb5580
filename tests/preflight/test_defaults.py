"""What a framework does where nothing is said is the same for a config that says nothing and for ``--framework``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.frameworks import FRAMEWORKS
from memcalc.preflight import check

GIB = 2**30
LLAMA = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 128256 "
    "--hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 8192 --seq-length 4096 --micro-batch-size 1 "
    "--bf16 --use-distributed-optimizer --sequence-parallel --no-create-attention-mask-in-dataloader "
)
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n[parallelism]\n'
SCRIPT = """# memcalc fsdp2 script 1
MODEL = "llama-3-8b"
GPUS = 8
SEQ_LEN = 4096
CHECKPOINTED_BLOCKS = (0, 0, 1)

import torch
"""
FSDP1 = '"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 1}'
HALF = {"precision": "bf16"}
MIXED = {"precision": "bf16-mixed"}
CASES: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("torchtitan", "job.toml", TITAN, {}, MIXED),
    ("torchtitan", "job.toml", f"{TITAN}pipeline_parallel_degree = 2\n", {}, {"pp": 2}),
    (
        "torchtitan",
        "job.toml",
        f"{TITAN}tensor_parallel_degree = 2\ncontext_parallel_degree = 2\n",
        {},
        {"tp": 2, "cp": 2},
    ),
    ("megatron", "train.sh", LLAMA, {}, {}),
    ("megatron", "train.sh", f"{LLAMA} --pipeline-model-parallel-size 2", {}, {"pp": 2}),
    ("fsdp2", "train_fsdp2.py", SCRIPT, {}, {}),
    (
        "megatron",
        "train.sh",
        f"{LLAMA} --tensor-model-parallel-size 2 --context-parallel-size 2",
        {},
        {"tp": 2, "cp": 2},
    ),
    (
        "hf",
        "args.json",
        f'{{"output_dir": "x", "learning_rate": 1e-5, "per_device_train_batch_size": 1, "bf16": true, {FSDP1}}}',
        {"model": "llama-3-8b", "seq_len": 4096},
        {"zero": 3, **MIXED},
    ),
    (
        "deepspeed",
        "ds.json",
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}',
        {"model": "llama-3-8b", "seq_len": 4096},
        {"zero": 3},
    ),
    (
        "torchtune",
        "tune.yaml",
        (
            "model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 1\ndtype: bf16\ntokenizer:\n"
            "  _component_: torchtune.models.llama3.llama3_tokenizer\n  max_seq_len: 4096\ncheckpointer: {}\n"
        ),
        {},
        HALF,
    ),
    (
        "litgpt",
        "lit.yaml",
        (
            "checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B\nprecision: bf16-true\ndevices: 8\nout_dir: out\n"
            "train:\n  micro_batch_size: 1\n  global_batch_size: 8\n  max_seq_length: 4096\n"
        ),
        {},
        HALF,
    ),
]


@pytest.mark.parametrize(("framework", "name", "text", "beside", "options"), CASES)
def test_a_config_that_says_nothing_is_the_framework_itself(
    tmp_path: Path, framework: str, name: str, text: str, beside: dict[str, Any], options: dict[str, Any]
) -> None:
    (tmp_path / name).write_text(text)
    read = check([str(tmp_path / name)], gpu="h100", gpus=8, **beside).estimate
    batch = read.workload.global_batch
    alone = memcalc.estimate(
        model="llama-3-8b", gpu="h100", gpus=8, framework=framework, seq_len=4096, global_batch=batch, **options
    )
    # plans for Megatron-LM write --overlap-grad-reduce and --overlap-param-gather, which are off by themselves
    named = {"framework": framework, "overlap_param_gather": None}
    named |= {"overlap_comm": None} if framework.startswith("megatron") else {}
    assert alone.strategy == read.strategy.model_copy(update=named)
    assert alone.peak == read.peak
    searched = ("zero", "tp", "pp", "cp", "precision", "recompute")
    searched += ("sp",) * (alone.strategy.tp > 1) + ("pp_schedule",) * (alone.strategy.pp > 1)
    found = memcalc.plan(
        model="llama-3-8b", gpu="gb300", gpus=8, framework=framework, seq_len=4096, global_batch=batch, micro_batch=1,
        offload="none", top=1, **{name: getattr(alone.strategy, name) for name in searched}, advice=False,
    )  # fmt: skip
    best, kernel = found.plans[0].strategy, {"attention": alone.strategy.attention}
    assert best.model_copy(update=kernel) == alone.strategy


def test_every_framework_with_a_config_of_its_own_is_among_these() -> None:
    """Accelerate's FSDP 1 is `hf`; torch's FSDP 1, its DDP and its loop on one GPU are code."""
    assert {case[0].partition("@")[0] for case in CASES} | {"fsdp1", "ddp", "plain"} == set(FRAMEWORKS)


def test_torchtitan_shards_the_loss_wherever_there_is_tensor_parallelism() -> None:
    """Its published run of this layout has about 72 GiB in use; whole logits alone would take three times the card."""
    words: dict[str, Any] = {"model": "llama-3.1-70b", "gpu": "h100", "gpus": 256, "framework": "torchtitan"}
    words |= {"seq_len": 8192, "micro_batch": 16, "global_batch": 512, "zero": 3, "recompute": "full"}
    found = memcalc.estimate(**words, tp=8)
    assert found.strategy.loss == "parallel"
    assert 60 * GIB < found.peak.device < 76 * GIB
    assert memcalc.estimate(**words, tp=8, loss="standard").peak.device > 200 * GIB
    assert memcalc.estimate(**{**words, "micro_batch": 1}).strategy.loss == "standard"


def test_a_search_takes_the_loss_of_each_layout() -> None:
    words: dict[str, Any] = {"model": "llama-3-8b", "gpu": "h100", "gpus": 8, "framework": "torchtitan"}
    words |= {"recompute": "full", "offload": "none", "pp": 1, "cp": 1, "zero": 3, "precision": "bf16-mixed"}
    found = memcalc.plan(**words, tp="1/2", global_batch=64, micro_batch="1/2", top=20, advice=False)
    losses = {(plan.strategy.tp > 1, plan.strategy.loss) for plan in found.plans}
    assert losses <= {(False, "standard"), (True, "parallel")}
    longest = memcalc.largest("seq-len", **words, tp=2, step=4096)
    assert longest.best is not None
    assert longest.best.strategy.loss == "parallel"
