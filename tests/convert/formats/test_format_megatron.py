"""Megatron-LM's flags and YAML: what is read of its own examples, the model they describe, what is written."""

from __future__ import annotations

import argparse
import contextlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

import memcalc
from memcalc import catalog
from memcalc.api import load_model
from memcalc.convert.argument_source import flag_document
from memcalc.convert.config import Config
from memcalc.convert.document import Document, Kind, parse_document, read_document
from memcalc.convert.edits import edit_document
from memcalc.convert.formats.base import ConfigJob, config_changes, render_config
from memcalc.convert.formats.megatron import FORMAT, read
from memcalc.convert.formats.megatron_flags import KEYS, KNOWN
from memcalc.convert.shell import read_script
from memcalc.errors import CombinationError, InputError, MemcalcError, MissingError
from memcalc.handoff import exported
from memcalc.handoff.saved import saved_plan
from memcalc.handoff.written import start
from memcalc.preflight import check
from memcalc.preflight.job import estimate_merged, read_files
from memcalc.preflight.merge import merge
from memcalc.preflight.names import preset_like
from memcalc.results.estimates import Estimate
from memcalc.specs.flat import from_flat
from memcalc.specs.runs import Run
from memcalc.validation import predict

HERE = Path(__file__).parents[2]
CONFIGS = HERE / "configs" / "megatron"
FLAGS: dict[str, dict[str, Any]] = json.loads((HERE / "schemas" / "megatron-d98e8a64.json").read_text())["flags"]
ONE = {"tp": 1, "sp": False, "pp": 1, "cp": 1, "ep": 1}
CI = {**ONE, "micro_batch": 4, "global_batch": 32, "seq_len": 1024, "precision": "bf16-mixed", "optimizer": "adamw",
      "strategy.wgrad_fusion": False, "workload.attention_mask": True, "loss": "standard", "recompute": "none",
      "zero": 0}  # fmt: skip

EXPECTED: dict[str, dict[str, Any]] = {
    "ci_7b_pp4_vp8.sh": {
        **CI, "micro_batch": 1, "global_batch": 8, "seq_len": 8192, "pp": 4, "pp_schedule": "interleaved", "vpp": 8,
        "zero": 1, "attention_library": "te",
    },
    "ci_full_recompute.sh": {**CI, "recompute": "full", "attention_library": "te"},
    "ci_tp2_cp2.sh": {**CI, "tp": 2, "sp": True, "cp": 2, "cp_kind": "ring", "attention": "flash"},
    "ci_tp2_pp2_loss_fusion.sh": {**CI, "tp": 2, "pp": 2, "pp_schedule": "1f1b", "loss": "fused-kernel"},
    "ci_uneven_pipeline.sh": {
        **CI, "pp": 4, "pp_schedule": "1f1b", "attention": "eager", "strategy.first_stage_layers": 2,
        "strategy.last_stage_layers": 2,
    },
    "ci_embedding_in_split.sh": {
        **CI, "pp": 4, "pp_schedule": "interleaved", "vpp": 2, "strategy.embedding_in_split": True,
        "strategy.loss_in_split": True,
    },
    "ci_swiglu.sh": {**CI, "pp": 4, "pp_schedule": "1f1b"},
    "gpt3_175b.sh": {
        **ONE, "tp": 8, "pp": 16, "micro_batch": 1, "global_batch": 1536, "seq_len": 2048, "precision": "fp16-mixed",
        "zero": 0, "strategy.wgrad_fusion": True, "attention_library": "te",
    },
    "llama3_8b_fp8.sh": {
        **ONE, "precision": "fp8-mixed", "strategy.float8": "delayed", "strategy.float8_all_gather": True,
        "strategy.reduce_dtype": "bf16", "zero": 1, "loss": "fused-kernel", "attention": "cudnn",
        "workload.attention_mask": False, "micro_batch": 1, "global_batch": 128, "seq_len": 8192,
    },
    "mixtral_8x7b.sh": {**ONE, "pp": 4, "ep": 8, "zero": 1, "precision": "bf16-mixed", "seq_len": 4096},
    "simumax_llama3_70b_pp2.sh": {
        **ONE, "pp": 2, "zero": 1, "loss": "triton", "recompute": "none", "workload.attention_mask": False,
    },
    "deepseek_v3_mla.sh": {**ONE, "ep": 8, "zero": 1, "recompute": "modules:mla_up_proj,moe_act", "loss": "triton"},
    "gpt_config.yaml": {
        **ONE, "micro_batch": 2, "global_batch": 128, "seq_len": 4096, "precision": "bf16-mixed", "zero": 0,
        "strategy.wgrad_fusion": True, "recompute": "none",
    },
    "llama3_8b.yaml": {
        **ONE, "tp": 4, "sp": True, "pp": 4, "pp_schedule": "interleaved", "vpp": 2, "zero": 1,
        "recompute": "selective-core-attn", "micro_batch": 2, "global_batch": 128,
    },
}  # fmt: skip
"""By hand from the file and megatron/training/arguments.py, validate_args."""

MODELS: dict[str, dict[str, Any]] = {
    "ci_7b_pp4_vp8.sh": {"n_layers": 32, "hidden": 4096, "kv_heads": 8, "ffn": 16384, "vocab": 131073, "tied": False},
    "ci_swiglu.sh": {"n_layers": 12, "hidden": 512, "ffn": 1344, "gated": True, "norm": "layernorm", "tied": True},
    "gpt3_175b.sh": {"n_layers": 96, "heads": 96, "ffn": 49152, "gated": False, "positions": "learned",
                     "bias": {"qkv": True, "o": True, "mlp": True},
                     "dropout": {"attention": 0.1, "block": 0.1, "embedding": 0.1}},
    "llama3_8b_fp8.sh": {"kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256, "norm": "rmsnorm",
                         "bias": {"qkv": False, "o": False, "mlp": False}, "positions": "rope"},
    "mixtral_8x7b.sh": {"moe": {"experts": 8, "topk": 2, "ffn": 14336, "first_dense": 0}},
    "deepseek_v3_mla.sh": {
        "moe": {"experts": 256, "topk": 8, "ffn": 2048, "first_dense": 1, "shared": 1, "shared_ffn": 2048,
                "scores": "sigmoid"},
        "mla": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                "v_head_dim": 128},
    },
    "gpt_config.yaml": {"n_layers": 24, "hidden": 1024, "ffn": 2688, "gated": True, "rotary_fraction": 0.5,
                        "bias": {"qkv": False, "o": False, "mlp": False}, "tied": False, "positions": "rope"},
}  # fmt: skip

RUNS = {
    "megatron-002": ("ci_7b_pp4_vp8.sh", None),
    "megatron-012": ("ci_full_recompute.sh", 50257),
    "megatron-014": ("ci_swiglu.sh", 50257),
    "megatron-017": ("ci_tp2_cp2.sh", 50257),
    "megatron-019": ("ci_tp2_pp2_loss_fusion.sh", 50257),
    "MGV-046": ("ci_uneven_pipeline.sh", 50257),
    "MGV-050": ("ci_embedding_in_split.sh", 50257),
    "SMX-001": ("simumax_llama3_70b_pp2.sh", 128257),
}
"""Published runs, the file of each, and the tokenizer's vocabulary where no flag has it as the job had: NullTokenizer
added a token until April 2026."""


def read_flags(text: str) -> Config:
    """The flags of a script's launch, as the reader of launches hands them over."""
    commands = read_script(text).commands
    words = next(
        command.tokens for command in commands if any(word.text.endswith("pretrain_gpt.py") for word in command.tokens)
    )
    at = next(place for place, word in enumerate(words) if word.text.endswith("pretrain_gpt.py"))
    return read(flag_document(Path("run.sh"), text, words[at + 1 :]))


def config(name: str) -> Config:
    """One of the files."""
    path = CONFIGS / name
    return read(read_document(path)) if name.endswith("yaml") else read_flags(path.read_text())


def of(flags: str) -> Config:
    """Some flags."""
    return read_flags(f"pretrain_gpt.py {flags}")


def estimate_of(read_config: Config, **words: Any) -> Estimate:
    """The estimate of flags and what is told besides."""
    fields = {key: words.pop(key) for key in list(words) if "." in key}
    return estimate_merged(merge([read_config], {**words, "settings": fields}), ())


def published(name: str) -> Run:
    """A run of the shipped ones."""
    files = (HERE.parent / "presets" / "runs").glob("*.toml")
    rows = [row for file in files for row in tomllib.loads(file.read_text()).get("run", [])]
    return Run.model_validate(next(row for row in rows if row["id"] == name))


SIZES = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 1000 --max-position-embeddings 512 "
SPREAD = "--num-experts 4 --moe-grouped-gemm --expert-model-parallel-size 2 "
PIPED = "--pipeline-model-parallel-size 2 "
AWARE = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer "
JOB = SIZES + "--seq-length 512 --micro-batch-size 1 --bf16 "


def test_every_file_has_its_words() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_words(name: str) -> None:
    found = {said.name: said.value for said in config(name).settings}
    assert {word: found.get(word) for word in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model = config(name).get("model")
    assert {key: model.get(key) for key in MODELS[name]} == MODELS[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_of_its_own_files_is_unknown(name: str) -> None:
    assert not [finding for finding in config(name).findings if finding.code == "MC001"]


@pytest.mark.parametrize(("name", "fields"), [
    ("llama3_8b_fp8.sh", {"empty_unused_memory_level"}),
    ("gpt_config.yaml", {"transformer_impl"}),
    ("mixtral_8x7b.sh", set()),
    ("ci_tp2_cp2.sh", set()),
])  # fmt: skip
def test_what_is_not_modelled_is_named(name: str, fields: set[str]) -> None:
    assert {finding.field for finding in config(name).findings if finding.code == "MC002"} == fields


@pytest.mark.parametrize(("run", "file"), RUNS.items())
def test_a_published_run_as_flags_is_predicted_as_the_run(run: str, file: tuple[str, int | None]) -> None:
    """The attention kernel of `auto` among them; what the environment sets is told: no flag has it."""
    row, (name, vocab) = published(run), file
    told = {
        f"strategy.{key}": row.strategy[key] for key in ("blas_workspace", "expandable_segments") if key in row.strategy
    }
    told |= {"model.vocab": vocab} if vocab else {}
    found = estimate_of(config(name), gpu=row.gpu, gpus=row.gpus, **told)
    assert found.peak == predict(row).peak


# ------------------------------------------------------------------------------------------------- one flag at a time


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", {"precision": "fp32", "optimizer": "adamw", "zero": 0, "recompute": "none", "accumulation": 1}),
        ("--fp16", {"precision": "fp16-mixed"}),
        ("--optimizer sgd", {"optimizer": "sgd-momentum"}),
        ("--optimizer lion", {"optimizer": "lion"}),
        ("--use-distributed-optimizer --optimizer-cpu-offload", {"zero": 1, "offload": ("optimizer",)}),
        ("--sequence-parallel", {"sp": False}),
        ("--sequence-parallel --tensor-model-parallel-size 2", {"sp": True, "tp": 2}),
        ("--tensor-model-parallel-size=4", {"tp": 4, "sp": False}),
        ("--recompute-activations", {"recompute": "selective-core-attn"}),
        ("--recompute-granularity selective --recompute-modules mlp layernorm", {"recompute": "modules:mlp,layernorm"}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            {"recompute": "uniform-2"},
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", {"recompute": "block-3"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", {"recompute": "none"}),
        (  # of each TransformerBlock, as which a model chunk is built (core/recompute.py)
            (
                "--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
                "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4"
            ),
            {"recompute": "block-12"},
        ),
        ("--attention-backend unfused", {"attention": "eager"}),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"loss": "triton"}),
        ("--cross-entropy-fusion-impl te", {"loss": "standard"}),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"cp_kind": "a2a"}),
        ("--expert-tensor-parallel-size 1", {"strategy.etp": 1}),
        (SPREAD, {"moe_dispatcher": "allgather", "ep_overlap": None, "expert_imbalance": None}),
        (SPREAD + "--moe-token-dispatcher-type alltoall", {"moe_dispatcher": "alltoall"}),
        (SPREAD + "--moe-token-dispatcher-type alltoall_seq", {"moe_dispatcher": "alltoall"}),
        (SPREAD + "--moe-token-dispatcher-type flex --moe-enable-deepep", {"moe_dispatcher": "deepep"}),
        (
            SPREAD + "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            {"moe_dispatcher": "deepep"},
        ),
        ("--num-experts 4 --moe-token-dispatcher-type flex", {"moe_dispatcher": None}),
        ("--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2", {"moe_dispatcher": None}),
        (SPREAD + "--overlap-moe-expert-parallel-comm", {"ep_overlap": True}),
        ("--num-experts 4 --overlap-moe-expert-parallel-comm", {"ep_overlap": None}),
        (SPREAD + "--moe-router-force-load-balancing", {"expert_imbalance": 1.0}),
        ("--moe-router-force-load-balancing", {"expert_imbalance": None}),
        (
            SPREAD + "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
            {"strategy.expert_overload": 1.5, "strategy.experts_padded": True},
        ),
        (SPREAD + "--moe-expert-capacity-factor 1.5", {"strategy.expert_overload": None}),
        ("--tp-comm-overlap", {"tp_comm_overlap": None}),
        ("--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel", {"tp_comm_overlap": True}),
        ("", {"cuda_graphs": None}),
        ("--enable-cuda-graph", {"cuda_graphs": "full"}),
        ("--enable-cuda-graph --cuda-graph-scope attn", {"cuda_graphs": "partial"}),
        ("--external-cuda-graph --cuda-graph-scope full", {"cuda_graphs": "full"}),
        ("--cuda-graph-impl none --cuda-graph-modules attn", {"cuda_graphs": None}),
        ("--cuda-graph-impl local", {"cuda_graphs": "full"}),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", {"cuda_graphs": "full"}),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration_inference", {"cuda_graphs": None}),
        ("--cuda-graph-impl full_iteration", {"cuda_graphs": "full"}),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn", {"cuda_graphs": "partial"}),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp", {"cuda_graphs": "full"}),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess",
            {"cuda_graphs": "partial"},
        ),
        (PIPED + "--num-layers-per-virtual-pipeline-stage 1", {"vpp": 2, "pp_schedule": "interleaved"}),
        (PIPED + "--num-layers-per-virtual-pipeline-stage 2", {"vpp": None, "pp_schedule": "1f1b"}),
        (
            PIPED + "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3",
            {"vpp": 2, "strategy.microbatch_group": 3},
        ),
        ("--step-batch-size-schedule '0:16 2.4B:320'", {"global_batch": 320}),
        ("--eval-interval 100", {"evaluates": True}),
        # transformer_config.py: delayed scaling where no recipe is named
        ("--bf16 --fp8-format hybrid", {"precision": "fp8-mixed", "strategy.float8": "delayed"}),
        (
            "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
            {"precision": "fp8-mixed", "strategy.float8": "mxfp8", "strategy.float8_all_gather": True},
        ),
        (
            "--bf16 --fp4-format e2m1 --fp8-param-gather",
            {"precision": "fp8-mixed", "strategy.float8": "nvfp4", "strategy.float8_all_gather": None},
        ),
        ("--fp16 --fp8-format hybrid", {"precision": "fp16-mixed", "strategy.float8": None}),
        (AWARE + "--fp8-recipe blockwise", {"precision": "bf16-mixed", "strategy.float8": "blockwise"}),
        ("--bf16 --fp8-recipe blockwise", {"precision": "bf16-mixed", "strategy.float8": None}),
        ("--bf16 --grad-reduce-in-bf16", {"strategy.reduce_dtype": "bf16"}),
        ("--fp16 --grad-reduce-in-bf16", {"strategy.reduce_dtype": None}),
        (
            AWARE + "--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
            {
                "strategy.precision_aware": True,
                "strategy.reduce_dtype": "bf16",
                "strategy.exp_avg_dtype": "bf16",
                "strategy.exp_avg_sq_dtype": "fp8",
                "strategy.main_params_dtype": None,
            },
        ),
        (AWARE + "--main-params-dtype fp16", {"strategy.main_params_dtype": "fp16", "strategy.reduce_dtype": None}),
        (AWARE + "--grad-reduce-in-bf16", {"strategy.precision_aware": True, "strategy.reduce_dtype": "bf16"}),
        # HybridDeviceOptimizer has fp32 states, and a gradient buffer of the same width
        (
            AWARE + "--optimizer-cpu-offload --exp-avg-dtype bf16 --main-grads-dtype bf16",
            {"strategy.precision_aware": None, "strategy.exp_avg_dtype": None, "strategy.reduce_dtype": "bf16"},
        ),
        ("--eval-interval 100 --eval-iters 0", {"evaluates": False}),
    ],
)
def test_one_setting(flags: str, words: dict[str, Any]) -> None:
    found = {said.name: said.value for said in of(SIZES + flags).settings}
    assert {word: found.get(word) for word in words} == words


@pytest.mark.parametrize(("flags", "sizes"), [
    ("--swiglu", {"gated": True, "ffn": 640, "activation": "silu"}),  # 4 x 256 x 2/3 = 682, down to a multiple of 64
    ("", {"gated": False, "ffn": 1024, "activation": "gelu", "kv_heads": 8, "head_dim": 32, "positions": "learned"}),
    ("--squared-relu", {"activation": "relu2"}),
    ("--num-query-groups 2", {"kv_heads": 8}),
    ("--group-query-attention --num-query-groups 2", {"kv_heads": 2}),
    ("--num-key-value-heads 2", {"kv_heads": 2}),  # Megatron-DeepSpeed's, epfLLM's and BigCode's words for it
    ("--num_attention_heads_kv 4", {"kv_heads": 4}),
    ("--attention-head-type multiquery", {"kv_heads": 1}),
    ("--disable-bias-linear --add-qkv-bias", {"bias": {"qkv": True, "o": False, "mlp": False}}),
    ("--use-rotary-position-embeddings", {"positions": "rope"}),
    ("--qk-layernorm", {"qk_norm": "head"}),
    ("--kv-channels 64", {"head_dim": 64}),
    ("--padded-vocab-size 50304", {"vocab": 50304}),
    ("--make-vocab-size-divisible-by 256", {"vocab": 1024}),
    ("--num-experts 4 --moe-layer-freq ([0]*1+[1]*3)",
     {"moe": {"experts": 4, "topk": 2, "ffn": 1024, "first_dense": 1}}),
    ("--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 1",
     {"moe": {"experts": 4, "topk": 2, "ffn": 1024, "first_dense": 0, "n_group": 2, "topk_group": 1}}),
    ("--num-experts 4 --moe-router-num-groups 2",  # it limits nothing alone (transformer_config.py, __post_init__)
     {"moe": {"experts": 4, "topk": 2, "ffn": 1024, "first_dense": 0}}),
    ("--hidden-dropout 0 --attention-dropout 0", {"dropout": {"attention": 0.0, "block": 0.0, "embedding": 0.0}}),
])  # fmt: skip
def test_sizes(flags: str, sizes: dict[str, Any]) -> None:
    quoted = flags.replace("([0]*1+[1]*3)", "'([0]*1+[1]*3)'")
    model = of(SIZES + quoted).get("model")
    assert {key: model.get(key) for key in sizes} == sizes


@pytest.mark.parametrize(("flags", "says"), [
    ("--bf16 --fp16", "bf16 is on too"),
    ("--bf16 --exp-avg-dtype bf16", "needs use_precision_aware_optimizer, as Megatron-LM does"),
    (AWARE + "--exp-avg-sq-dtype int8", "must be one of fp32, bf16, fp16, fp8"),
    (AWARE + "--main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32", "must be fp32 with accumulate"),
    ("--bf16 --fp8-format hybrid --fp4-format e2m1", "Megatron-LM takes one"),
    ("--bf16 --fp8-format hybrid --fp8-recipe tensor", "must be one of delayed, tensorwise"),
    ("--micro-batch-size many", "micro_batch_size 'many': must be a whole number from 1"),
    ("--optimizer adamw", "must be one of adam, sgd"),
    ("--attention-backend flesh", "did you mean 'flash'"),
    (PIPED + "--num-layers-per-virtual-pipeline-stage 3", "must part 4 blocks over 2 stages"),
    ("--position-embedding-type sinus", "must be one of learned_absolute"),
    ("--bf16 maybe", "must be true or false"),
    ("--num-experts 4 --moe-token-dispatcher-type ring", "must be one of allgather, alltoall, alltoall_seq, flex"),
    ("--cuda-graph-impl global", "must be one of none, local, transformer_engine, full_iteration"),
])  # fmt: skip
def test_wrong_values(flags: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        of(SIZES + flags)


def test_an_unknown_flag_is_a_warning_with_the_nearest_one() -> None:
    (finding,) = of(SIZES + "--use-distributed-optimiser").findings
    assert (finding.code, finding.suggestion) == ("MC001", "did you mean use_distributed_optimizer?")


@pytest.mark.parametrize("flag", [
    "--use-torch-fsdp2",
    "--cpu-offloading-num-layers 2",
    "--tp-comm-overlap",
    "--fp8-format hybrid",
    "--first-last-layers-bf16",
    "--num-experts 4",
    "--cp-comm-type p2p a2a --context-parallel-size 2",
    "--transformer-impl local",
    "--moe-expert-capacity-factor 2.0 --num-experts 4",
])  # fmt: skip
def test_a_flag_that_is_not_modelled_is_a_warning(flag: str) -> None:
    name = flag.split(maxsplit=1)[0].lstrip("-").replace("-", "_")
    assert name in {finding.field for finding in of(SIZES + flag).findings if finding.code == "MC002"}


@pytest.mark.parametrize(("flags", "kernel"), [
    ("--data-impl mmap", "eager"),
    ("--data-impl mmap --use-flash-attn", "flash"),
    ("--train-tokens 300000000000 --use-flash-attn-v2", "flash"),
    ("--data-impl mmap --transformer-impl transformer_engine", None),
    ("--transformer-impl local", "eager"),
    ("--transformer-impl local --use-flash-attn --use-mcore-models", "eager"),
    ("--transformer-impl local --attention-backend unfused", "eager"),
    ("--use-flash-attn", None),
])  # fmt: skip
def test_own_modules_write_scores_out_where_no_flag_says_otherwise(flags: str, kernel: str | None) -> None:
    """--transformer-impl was local by default until e7b74a4b (April 2024), and is in Megatron-DeepSpeed still."""
    found = {setting.name: setting.value for setting in of(SIZES + flags).settings}
    assert (found.get("attention"), "attention_library" in found) == (kernel, kernel is None)


@pytest.mark.parametrize("flag", ["--exp-avg-dtype fp32", "--cpu-offloading-num-layers 0", "--cuda-graph-impl none",
                                  "--num-distributed-optimizer-instances 1"])  # fmt: skip
def test_a_flag_at_its_default_is_none(flag: str) -> None:
    assert not of(SIZES + flag).findings


def test_instances_of_the_distributed_optimizer_are_replicas_of_its_shards() -> None:
    found = {said.name: said.value for said in of(SIZES + "--num-distributed-optimizer-instances 2").settings}
    assert found["dp_replicate"] == 2


KINDS = st.one_of(
    st.booleans(), st.integers(-3, 10**16), st.floats(), st.text(max_size=8), st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.sampled_from(("full", "selective", "1", "auto", "p2p")),
)  # fmt: skip


@drawn(60)
@given(
    values=st.dictionaries(st.sampled_from(sorted(KNOWN)), KINDS, max_size=6), kind=st.sampled_from(("flags", "yaml"))
)
def test_whatever_stands_in_a_file_it_is_read_or_refused(values: dict[str, Any], kind: Kind) -> None:
    sizes = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1000, "seq_length": 64}
    with contextlib.suppress(MemcalcError):
        found = read(Document(Path("x"), kind, "", {**sizes, "micro_batch_size": 1, "language_model": {}, **values}))
        merge([found], {"gpu": "h100", "gpus": 8, "settings": {}})


# --------------------------------------------------------------------------------------------------------- the model


def test_the_vocabulary_of_a_tokenizer_is_asked_for() -> None:
    flags = JOB.replace("--vocab-size 1000", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x")
    with pytest.raises(MissingError, match=r"--set model\.vocab"):
        estimate_of(of(flags), gpu="h100", gpus=1)
    told = estimate_of(of(flags), gpu="h100", gpus=1, **{"model.vocab": "1000"})
    assert told.peak == estimate_of(of(JOB), gpu="h100", gpus=1).peak


def test_a_model_that_is_typed_goes_before_the_sizes() -> None:
    assert estimate_of(of(JOB), gpu="h100", gpus=8, model="gpt2").model.name == "gpt2"


def test_sizes_of_a_preset_are_called_by_its_name() -> None:
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048 --bf16 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --swiglu --normalization RMSNorm --attention-dropout 0 "
        "--hidden-dropout 0 --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 32000 "
        "--position-embedding-type rope "
    )
    assert estimate_of(of(flags), gpu="h100", gpus=8).model.name == "llama-2-7b"
    assert estimate_of(of(flags + "--qk-layernorm"), gpu="h100", gpus=8).model.name == "GPT of 32 x 4096"


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2", "qwen2.5-7b", "mixtral-8x7b", "deepseek-v3"])
def test_a_preset_is_found_by_itself(name: str) -> None:
    found = preset_like(catalog.model(name).model_copy(update={"name": "x", "source": "y"}))
    assert isinstance(found, str)
    assert catalog.model(found).groups == catalog.model(name).groups


def test_a_variable_that_only_a_run_could_tell_is_asked_for() -> None:
    with pytest.raises(MissingError, match="--model"):
        estimate_of(of(JOB.replace("--num-layers 4", "--num-layers $LAYERS")), gpu="h100", gpus=8)


def test_transformer_engine_picks_the_attention_kernel_by_the_gpu() -> None:
    kernels = {gpu: estimate_of(of(JOB), gpu=gpu, gpus=8).strategy.attention for gpu in ("a100-80g", "h100", "b200")}
    assert kernels == {"a100-80g": "flash", "h100": "cudnn", "b200": "cudnn"}
    assert estimate_of(of(JOB + "--attention-backend flash"), gpu="h100", gpus=8).strategy.attention == "flash"


# -------------------------------------------------------------------------------------------------------------- YAML


def test_yaml_is_recognised_by_its_tables() -> None:
    assert [one.format for one in read_files([str(CONFIGS / "llama3_8b.yaml")])] == ["megatron"]


def test_yaml_is_checked_from_end_to_end() -> None:
    answer = check([str(CONFIGS / "llama3_8b.yaml")], gpu="h100", gpus=16)
    assert answer.estimate.strategy.tp == 4
    assert answer.estimate.model.parameters == 8_030_261_248  # Llama 3 8B's own
    assert answer.files[0].kind == "Megatron-LM arguments"


def test_flags_beside_yaml_are_ignored() -> None:
    """yaml_arguments.py, load_yaml: argparse arguments will be ignored."""
    found = of(f"--yaml-cfg {CONFIGS / 'llama3_8b.yaml'} --micro-batch-size 8")
    assert not found.settings
    assert found.references[0].path.endswith("llama3_8b.yaml")


def test_an_edit_of_yaml_goes_into_its_table() -> None:
    text = read_document(CONFIGS / "llama3_8b.yaml")
    assert FORMAT.spelling(text, "tensor_model_parallel_size") == "model_parallel.tensor_model_parallel_size"
    assert FORMAT.spelling(text, "recompute_granularity") == "language_model.recompute_granularity"
    assert FORMAT.spelling(text, "micro_batch_size") == "micro_batch_size"


def test_the_smallest_edit_of_a_model_that_is_no_preset(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    text = (CONFIGS / "llama3_8b.yaml").read_text()
    changed = {
        "num_layers: 32": "num_layers: 24",
        "micro_batch_size: 2\n": "micro_batch_size: 32\n",
        "global_batch_size: 128": "global_batch_size: 1024",
        "num_layers_per_virtual_pipeline_stage: 4": "num_layers_per_virtual_pipeline_stage: 3",
    }
    for old, new in changed.items():
        text = text.replace(old, new, 1)
    path.write_text(text)
    answer = check([str(path)], gpu="a100-40g", gpus=16)
    assert answer.verdict == "does-not-fit"
    assert answer.fix is not None
    assert answer.fix.changes[0].startswith("micro-batch 32")
    assert "\n+micro_batch_size: " in answer.fix.edits[0].diff


def test_an_edit_of_flags_is_written_as_its_neighbours_are() -> None:
    text = f"torchrun pretrain_gpt.py {JOB}--micro-batch-size 8\n"
    words = read_script(text).commands[0].tokens
    before = flag_document(Path("run.sh"), text, words)
    changed = edit_document(
        before,
        {("micro_batch_size",): 2, ("recompute_granularity",): "selective", ("recompute_modules",): ["mlp", "moe"]},
    )
    again = read_flags(changed)
    assert "--recompute-modules mlp moe" in changed
    assert (again.get("micro_batch"), again.get("recompute")) == (2, "modules:mlp,moe")


# ----------------------------------------------------------------------------------------------------------- writing

POLICIES = ("none", "full", "uniform-2", "block-3", "selective-core-attn", "modules:mlp,layernorm")
WORDS = st.fixed_dictionaries({
    "precision": st.sampled_from(("bf16-mixed", "fp16-mixed", "fp32")),
    "optimizer": st.sampled_from(("adamw", "sgd-momentum", "lion", "muon", "soap")),
    "zero": st.sampled_from((0, 1)),
    "layout": st.sampled_from(((1, 1, 1, False), (2, 1, 1, True), (4, 2, 1, False), (1, 4, 1, False), (2, 2, 2, True))),
    "vpp": st.sampled_from((1, 2)),
    "cp_kind": st.sampled_from(("ring", "a2a", "allgather")),
    "recompute": st.sampled_from(POLICIES),
    "offload": st.sampled_from(("none", "optimizer")),
    "loss": st.sampled_from(("standard", "fused-kernel")),
    "attention": st.sampled_from(("flash", "cudnn", "eager")),
    "micro_batch": st.sampled_from((1, 2)),
    "cuda_graphs": st.sampled_from(("none", "partial", "full")),
    "tp_comm_overlap": st.booleans(),
    "eight": st.sampled_from((
        {}, {"strategy.reduce_dtype": "bf16"}, {"strategy.float8": "delayed"},
        {"strategy.float8": "tensorwise", "strategy.float8_all_gather": True}, {"strategy.float8": "blockwise"},
        {"strategy.float8": "mxfp8", "strategy.float8_all_gather": True}, {"strategy.float8": "mxfp8"},
        {"strategy.float8": "nvfp4", "strategy.reduce_dtype": "bf16"},
        {"strategy.float8": "nvfp4", "strategy.float8_all_gather": True},
    )),
    "states": st.sampled_from((
        {}, {"strategy.precision_aware": True},
        {"strategy.precision_aware": True, "strategy.exp_avg_dtype": "bf16", "strategy.exp_avg_sq_dtype": "bf16"},
        {"strategy.precision_aware": True, "strategy.main_params_dtype": "fp16", "strategy.exp_avg_dtype": "fp8"},
    )),
    "split": st.sampled_from(({}, {"strategy.wgrad_fusion": False}, {"strategy.first_stage_layers": 4})),
})  # fmt: skip


def gpu_of(fields: dict[str, Any]) -> str:
    """A GPU that has the recipe of 8-bit products."""
    return "b200" if fields.get("strategy.float8") in ("mxfp8", "nvfp4") else "h100"


def job_words(drawn: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Words and settings of a job that Megatron-LM can run."""
    tp, pp, cp, sp = drawn["layout"]
    words = {key: drawn[key] for key in ("precision", "optimizer", "zero", "recompute", "offload", "loss", "attention",
                                         "micro_batch", "cuda_graphs")}  # fmt: skip
    if drawn["cuda_graphs"] == "partial" and drawn["recompute"] in ("full", "uniform-2", "block-3"):
        words["cuda_graphs"] = "none"  # only a graph of the whole pass takes in full recomputation
    words |= {"tp_comm_overlap": True} if sp and drawn["tp_comm_overlap"] else {}
    words |= {"tp": tp, "pp": pp, "cp": cp, "sp": sp, "gpus": 16}
    words["global_batch"] = 16 // (tp * pp * cp) * words["micro_batch"] * 8
    if words["offload"] == "optimizer":  # it needs the distributed optimizer, and has Adam alone
        words |= {"zero": 1, "optimizer": "adamw"}
    words["attention"] = "eager" if words["precision"] == "fp32" else words["attention"]
    fields: dict[str, Any] = dict(drawn["split"])
    if "strategy.float8" in drawn["eight"]:
        words["precision"] = "fp8-mixed"
    if words["precision"] in ("bf16-mixed", "fp8-mixed"):
        fields |= drawn["eight"]
    distributed = (words["zero"], words["offload"], words["optimizer"]) == (1, "none", "adamw")
    if distributed and words["precision"] != "fp32" and "strategy.float8_all_gather" not in fields:
        fields |= drawn["states"]
    if "strategy.float8_all_gather" in fields:
        words["zero"] = 1
        words["offload"] = words["offload"] if fields["strategy.float8"] == "delayed" else "none"
    if cp > 1:
        words["cp_kind"] = drawn["cp_kind"]
    if pp == 1 or drawn["vpp"] > 1:
        fields.pop("strategy.first_stage_layers", None)
    if "strategy.first_stage_layers" in fields:
        fields["strategy.first_stage_layers"] = 32 // pp
    if pp > 1:
        words["pp_schedule"] = "1f1b" if drawn["vpp"] == 1 else "interleaved"
        words |= {"vpp": drawn["vpp"]} if drawn["vpp"] > 1 else {}
        if drawn["vpp"] > 1 and words["recompute"] == "block-3":
            words["recompute"] = "block-4"  # as many of each chunk
    return words, fields


@drawn(40)
@given(drawn=WORDS)
def test_what_is_written_reads_as_the_same_job(drawn: dict[str, Any]) -> None:
    words, fields = job_words(drawn)
    before = memcalc.estimate(
        model="llama-2-7b", gpu=gpu_of(fields), framework="megatron", seq_len=2048, settings=fields, **words
    )
    text = render_config(FORMAT, ConfigJob.of(before, load_model(before.model.name)))
    after = estimate_of(read_flags(f"pretrain_gpt.py {text.partition(chr(10))[2]}"), gpu=gpu_of(fields), gpus=16)
    assert after.strategy == before.strategy
    assert after.workload == before.workload
    assert after.model == before.model
    assert after.peak == before.peak


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "deepseek-v2-lite", "gpt2-xl", "qwen2.5-7b", "qwen3-8b", "nemotron-4-340b"]
)
def test_a_preset_written_as_flags_has_the_same_parameters(name: str) -> None:
    before = memcalc.estimate(model=name, gpu="h100", gpus=8, framework="megatron", seq_len=1024, zero=1)
    text = render_config(FORMAT, ConfigJob.of(before, load_model(before.model.name)))
    after = estimate_of(read_flags(f"pretrain_gpt.py {text.partition(chr(10))[2]}"), gpu="h100", gpus=8)
    assert after.model.parameters == before.model.parameters
    assert after.strategy == before.strategy


STATES: list[dict[str, Any]] = [
    {},
    {"strategy.exp_avg_dtype": "bf16", "strategy.exp_avg_sq_dtype": "bf16", "strategy.reduce_dtype": "bf16"},
    {"strategy.main_params_dtype": "fp16", "strategy.exp_avg_dtype": "fp8", "strategy.exp_avg_sq_dtype": "fp16"},
    {"strategy.float8": "tensorwise", "strategy.float8_all_gather": True, "strategy.exp_avg_sq_dtype": "bf16"},
    {"strategy.float8": "blockwise", "strategy.main_params_dtype": "fp16", "strategy.reduce_dtype": "bf16"},
]


@pytest.mark.parametrize("fields", STATES, ids=str)
def test_narrow_states_are_written_and_read_back(fields: dict[str, Any]) -> None:
    precision = "fp8-mixed" if "strategy.float8" in fields else "bf16-mixed"
    before = memcalc.estimate(
        model="llama-2-7b", gpu="h100", gpus=8, framework="megatron", seq_len=2048, precision=precision,
        settings={"strategy.precision_aware": True, **fields},
    )  # fmt: skip
    text = render_config(FORMAT, ConfigJob.of(before, load_model(before.model.name)))
    assert "--use-precision-aware-optimizer" in text
    assert ("--main-grads-dtype bf16" in text) == (fields.get("strategy.reduce_dtype") == "bf16")
    assert "--grad-reduce-in-bf16" not in text
    after = estimate_of(read_flags(f"pretrain_gpt.py {text.partition(chr(10))[2]}"), gpu="h100", gpus=8)
    assert (after.strategy, after.peak, after.time) == (before.strategy, before.peak, before.time)


def test_an_optimizer_on_the_host_counts_as_before_and_says_so() -> None:
    """Its states are fp32 (hybrid_optimizer.py), and the buffer of gradients is as wide as it is told."""
    flags = JOB + "--use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer "
    plain, narrow = of(flags), of(flags + "--exp-avg-dtype bf16 --main-params-dtype fp16")
    estimates = [estimate_of(config, gpu="h100", gpus=2) for config in (plain, narrow)]
    assert estimates[0].peak == estimates[1].peak
    assert [
        finding.code for finding in narrow.findings if "is ignored with an optimizer on the host" in finding.message
    ] == ["MC004"] * 2


EXPERTS: dict[str, Any] = {
    "model": "mixtral-8x7b", "gpu": "h100", "gpus": 16, "framework": "megatron", "seq_len": 2048, "ep": 8,
    "micro_batch": 1, "recompute": "none",
}  # fmt: skip
TIMED: list[dict[str, Any]] = [
    {"moe_dispatcher": "alltoall"},
    {"moe_dispatcher": "deepep"},
    {"moe_dispatcher": "allgather"},
    {"moe_dispatcher": "deepep", "ep_overlap": True},
    {"model": "deepseek-v2", "gpus": 64, "moe_dispatcher": "deepep", "ep": 32, "pp": 2},
    {"ep_overlap": True, "pp": 2, "pp_schedule": "interleaved", "vpp": 2, "ep": 4},
    {"cuda_graphs": "partial"},
    {"tp": 2, "sp": True, "tp_comm_overlap": True},
]
"""Options that change a step's time alone."""


@pytest.mark.parametrize("words", TIMED, ids=str)
def test_what_changes_time_alone_is_written_and_read_back(words: dict[str, Any]) -> None:
    before = memcalc.estimate(**{**EXPERTS, **words})
    text = render_config(FORMAT, ConfigJob.of(before, load_model(before.model.name)))
    gpus = words.get("gpus", 16)
    after = estimate_of(read_flags(f"pretrain_gpt.py {text.partition(chr(10))[2]}"), gpu="h100", gpus=gpus)
    told = {name: value for name, value in words.items() if name not in ("model", "gpus")}
    assert {name: getattr(after.strategy, name) for name in told} == told
    assert after.strategy == before.strategy
    assert after.time == before.time


def test_a_graph_of_the_whole_pass_is_written_as_megatron_asks_for_it() -> None:
    """validate_args refuses it with a check for NaN, and with modules of a block."""
    before = memcalc.estimate(model="llama-2-7b", gpu="h100", gpus=8, framework="megatron", cuda_graphs="full")
    flags = render_config(FORMAT, ConfigJob.of(before, load_model("llama-2-7b"))).split()
    assert "full_iteration" in flags
    assert "--no-check-for-nan-in-loss-and-grad" in flags
    assert "--cuda-graph-modules" not in flags


def test_what_is_assumed_of_the_experts_stands_beside_the_flags() -> None:
    """No flag says how uneven the tokens are, so the line that checks the flags does."""
    found = memcalc.plan(**{**EXPERTS, "expert_imbalance": 1.5}, top=1, advice=False)
    done = exported(saved_plan(found), "megatron")
    assert "--expert-imbalance 1.5" in done.check


@pytest.mark.parametrize(("words", "says"), [
    ({"framework": "megatron", **EXPERTS, "cuda_graphs": "full"}, "cuda-graphs"),
    ({"framework": "megatron", **EXPERTS, "ep": 4, "pp": 2, "ep_overlap": True}, "ep-overlap"),
    ({"framework": "fsdp2"}, "framework"),
    ({"framework": "megatron", "recompute": "every-2"}, "recompute"),
    ({"framework": "megatron", "pp": 2, "vpp": 2, "recompute": "block-3"}, "the blocks of each model chunk"),
    ({"framework": "megatron", "pp": 2, "pp_schedule": "zb-h1"}, "pp-schedule"),
    ({"framework": "megatron", "model": "gemma-2-9b"}, "model"),
    ({"framework": "megatron", "optimizer": "adafactor"}, "optimizer"),
    ({"framework": "megatron", "attention": "math"}, "attention"),
])  # fmt: skip
def test_what_the_flags_cannot_say_is_refused(words: dict[str, Any], says: str) -> None:
    job = {"model": "llama-2-7b", "gpu": "h100", "gpus": 8, "seq_len": 2048, "micro_batch": 1, "global_batch": 64}
    estimate = memcalc.estimate(**{**job, **words})
    with pytest.raises(CombinationError, match=says):
        render_config(FORMAT, ConfigJob.of(estimate, load_model(estimate.model.name)))


def test_an_edit_leaves_the_sizes_alone() -> None:
    before = ConfigJob.of(estimate_of(of(JOB + "--global-batch-size 8"), gpu="h100", gpus=1))
    after = ConfigJob.of(estimate_of(of(JOB + "--global-batch-size 8 --use-distributed-optimizer"), gpu="h100", gpus=1))
    assert config_changes(FORMAT, before, after) == {("use_distributed_optimizer",): True}


# -------------------------------------------------------------------------------------------------------- its parser


def parser() -> argparse.ArgumentParser:
    """A parser with the flags of Megatron-LM's own."""
    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag, row in FLAGS.items():
        if row["kind"] == "value":
            kind = {"int": int, "float": float}.get(row.get("type", ""), str)
            made.add_argument(flag, dest=row["dest"], type=kind, choices=row.get("choices"), nargs=row.get("nargs"))
        else:
            made.add_argument(flag, dest=row["dest"], action="store_const", const=row["kind"] != "off")
    return made


PARSER = parser()


def test_all_its_flags_are_known() -> None:
    assert {flag[2:].replace("-", "_") for flag in FLAGS} <= KNOWN
    assert set(KEYS.not_modelled) <= KNOWN


@drawn(20)
@given(drawn=WORDS)
def test_its_parser_takes_what_is_written(drawn: dict[str, Any]) -> None:
    words, fields = job_words(drawn)
    estimate = memcalc.estimate(
        model="llama-2-7b", gpu=gpu_of(fields), framework="megatron", seq_len=2048, settings=fields, **words
    )
    text = (
        render_config(FORMAT, ConfigJob.of(estimate, load_model(estimate.model.name)))
        .partition("\n")[2]
        .replace("\\\n", " ")
    )
    found = vars(PARSER.parse_args(text.split()))
    assert (found["tensor_model_parallel_size"], found["micro_batch_size"]) == (words["tp"], words["micro_batch"])
    assert bool(found["use_distributed_optimizer"]) == (words["zero"] == 1)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith(".sh")])
def test_its_parser_takes_the_files(name: str) -> None:
    text = (CONFIGS / name).read_text()
    words = next(
        one.tokens for one in read_script(text).commands if any("pretrain_gpt.py" in word.text for word in one.tokens)
    )
    at = next(place for place, word in enumerate(words) if "pretrain_gpt.py" in word.text)
    PARSER.parse_args([word.text or "x" for word in words[at + 1 :]])


def test_the_defaults_are_those_of_its_parser() -> None:
    """Each default that is stated is that of the flag it is stated under, in memcalc's words."""
    meaning: Mapping[str, Any] = {"adam": "adamw", "auto": "te", "LayerNorm": "layernorm", None: None}
    by_name = {flag[2:].replace("-", "_"): row for flag, row in FLAGS.items()}
    found = {said.name: said for said in of(SIZES).settings if said.default}
    same = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "sp": False, "zero": False, "optimizer": "adam",
            "attention_library": "auto",
            "loss": False, "precision": False, "recompute": None, "accumulation": None}  # fmt: skip
    assert set(same) <= set(found)
    for word, default in same.items():
        assert by_name[found[word].field]["default"] == default, word
    for word in ("tp", "pp", "cp", "ep", "sp", "zero", "optimizer", "attention_library"):
        default = same[word]
        assert found[word].value == meaning.get(default, default), word
    for flag, value in (("--no-gradient-accumulation-fusion", "strategy.wgrad_fusion"),
                        ("--no-create-attention-mask-in-dataloader", "workload.attention_mask")):  # fmt: skip
        assert found[value].value is FLAGS[flag]["default"] is True
    sizes = of(SIZES).get("model")
    assert sizes["dropout"] == {"attention": FLAGS["--attention-dropout"]["default"],
                                "block": FLAGS["--hidden-dropout"]["default"],
                                "embedding": FLAGS["--hidden-dropout"]["default"]}  # fmt: skip
    latent = of(SIZES + "--multi-latent-attention").get("model")["mla"]
    flags = {"kv_lora_rank": "kv-lora-rank", "qk_nope_head_dim": "qk-head-dim", "v_head_dim": "v-head-dim",
             "qk_rope_head_dim": "qk-pos-emb-head-dim"}  # fmt: skip
    assert latent == {name: FLAGS[f"--{flag}"]["default"] for name, flag in flags.items()}
    assert of(SIZES + "--num-experts 4").get("model")["moe"]["topk"] == FLAGS["--moe-router-topk"]["default"]
    assert from_flat(sizes).groups[0].count == 4
    assert parse_document(Path("x.yaml"), "a: 1", "yaml").kind == "yaml"


def test_gpus_without_flash_attention_run_megatrons_unfused_kernel() -> None:
    """core/transformer/enums.py, AttnBackend: flash, fused, unfused, whose scores are kept for backward."""
    job: dict[str, Any] = {"model": "llama-2-7b", "gpu": "v100-32g", "gpus": 8, "tp": 8, "recompute": "none"}
    found = memcalc.estimate(**job, framework="megatron", seq_len=2048, micro_batch=1)
    scores = 32 * 2048 * 2048 // 8 * 32  # heads of a rank, over all blocks
    assert found.strategy.attention == "eager"
    assert found.saved.total > 2 * scores


@pytest.mark.parametrize(
    ("words", "one_queue"),
    [
        ({"gpu": "h100", "tp": 2}, True),
        ({"gpu": "a100-80g", "cp": 2}, True),
        ({"gpu": "h100"}, False),
        ({"gpu": "b200", "tp": 2}, False),
        ({"gpu": "h100", "model": "mixtral-8x7b", "cp": 2, "ep": 8, "ep_overlap": True, "recompute": "none"}, False),
    ],
    ids=str,
)
def test_a_script_starts_where_tensors_or_sequences_are_split(words: dict[str, Any], one_queue: bool) -> None:
    """d98e8a64 training/arguments.py, validate_args: asserts CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell."""
    job = {"model": "llama-2-7b", "gpus": 32, "framework": "megatron", "seq_len": 2048, **words}
    text = start("megatron", ConfigJob.of(memcalc.estimate(**job)), "# a comment\n--num-layers 32\n")
    lines = text.splitlines()
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1" in lines) == one_queue
    assert lines[0] == "#!/bin/bash"
    if one_queue:
        assert lines.index("export CUDA_DEVICE_MAX_CONNECTIONS=1") + 1 == next(
            place for place, line in enumerate(lines) if line.startswith("torchrun")
        )


def test_experts_run_one_after_another_where_megatron_refuses_grouped_products() -> None:
    """d98e8a64 training/arguments.py: grouped products need compute capability 8."""
    model = load_model("mixtral-8x7b")
    texts = {
        gpu: render_config(FORMAT, ConfigJob.of(memcalc.estimate(
            model="mixtral-8x7b", gpu=gpu, gpus=64, framework="megatron", seq_len=1024, ep=8), model))
        for gpu in ("v100-32g", "a100-80g")
    }  # fmt: skip
    assert {gpu: "--moe-grouped-gemm" in text for gpu, text in texts.items()} == {"v100-32g": False, "a100-80g": True}


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"loss": "triton"}, "loss 'triton'.*since June 2026.*fused-kernel"),
        (
            {"precision": "fp8-mixed", "offload": "optimizer", "settings": {
                "strategy.float8": "tensorwise", "strategy.float8_all_gather": True}},
            "offload.*delayed",
        ),
    ],
)  # fmt: skip
def test_what_its_own_arguments_refuse_is_not_written(words: dict[str, Any], match: str) -> None:
    """168cb15d, and d98e8a64 training/arguments.py, validate_args, of --fp8-param-gather and the host's optimizer."""
    job = memcalc.estimate(model="llama-2-7b", gpu="h100", gpus=8, framework="megatron", seq_len=2048, **words)
    with pytest.raises(CombinationError, match=match):
        render_config(FORMAT, ConfigJob.of(job, load_model("llama-2-7b")))


def test_a_script_with_the_fusion_that_is_refused_says_since_when() -> None:
    """Older releases run it, so that the job is read all the same."""
    found = read_flags("pretrain_gpt.py --num-layers 2 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    assert any("168cb15d" in finding.message for finding in found.findings)
