"""What a file sets and no figure has is said: by format, values that its framework's source gives a meaning.

Each row is a key, a value that changes bytes or seconds, and the framework's own default, with where both were read.
The first must change the job or be a finding; the default must say nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.convert.config import Config
from memcalc.convert.document import Document
from memcalc.convert.formats import get_format
from memcalc.convert.formats.base import key_table

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepspeed": ("json", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_batch_size": 8}),
    "accelerate": ("yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}),
    "trainer": ("json", {"output_dir": "x", "learning_rate": 1e-5, "bf16": True}),
    "llamafactory": ("yaml", {"model_name_or_path": "meta-llama/Llama-2-7b-hf", "finetuning_type": "full"}),
    "axolotl": ("yaml", {"base_model": "meta-llama/Llama-2-7b-hf", "datasets": [], "plugins": ["x.LigerPlugin"]}),
    "litgpt": ("yaml", {"command": "finetune_full", "checkpoint_dir": "x", "optimizer": {"class_path": "AdamW"}}),
    "torchtune": (
        "yaml",
        {
            "model": {"_component_": "torchtune.models.llama2.llama2_7b"},
            "optimizer": {"_component_": "torch.optim.AdamW"},
        },
    ),
    "torchtitan": ("toml", {"model": {"name": "llama3", "flavor": "8B"}, "job": {"description": "x"}}),
    "megatron": (
        "flags",
        {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "bf16": True, "attention_backend": "unfused"},
    ),
}
"""By format a job that is read without a finding about its values."""
OFFLOADED = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}

# DeepSpeed edaa7221: runtime/zero/config.py, runtime/zero/offload_config.py, runtime/constants.py, precision_config.py,
# swap_tensor/constants.py, activation_checkpointing/config.py; sys.maxsize is 2 ** 63 - 1.
DEEPSPEED = [
    ("zero_optimization.contiguous_gradients", False, True),
    ("zero_optimization.allgather_bucket_size", 200_000_000, 500_000_000),
    ("zero_optimization.allgather_bucket_size", "2e8", "5e8"),
    ("zero_optimization.use_multi_rank_bucket_allreduce", False, True),
    ("zero_optimization.reduce_scatter", False, True),
    ("zero_optimization.round_robin_gradients", True, False),
    ("zero_optimization.stage3_max_reuse_distance", 0, 1e9),
    ("zero_optimization.stage3_model_persistence_threshold", 10**6, 2**63 - 1),
    ("zero_optimization.memory_efficient_linear", False, True),
    ("zero_optimization.stage3_use_all_reduce_for_fetch_params", True, False),
    ("zero_optimization.enable_sanity_checks", True, False),
    ("zero_optimization.leaf_module", {"names": ["experts"]}, {}),
    ("gradient_predivide_factor", 2.0, 1.0),
    ("communication_data_type", "fp32", "bf16"),
    ("wall_clock_breakdown", True, False),
    ("comms_logger.enabled", True, False),
    ("bf16.immediate_grad_update", True, False),
    ("bf16.bf16_master_weights_and_grads", True, False),
    ("optimizer.legacy_fusion", True, False),
    ("activation_checkpointing.contiguous_memory_optimization", True, False),
    ("activation_checkpointing.synchronize_checkpoint_boundary", True, False),
    ("aio.block_size", 131_072, 1_048_576),
    ("aio.overlap_events", False, True),
    ("zero_optimization.offload_param.pin_memory", False, True),
    ("zero_optimization.offload_param.buffer_size", 10**9, 1e8),
    ("zero_optimization.offload_optimizer.pipeline_write", True, False),
]
# Accelerate 1.15: commands/config/config_args.py, utils/dataclasses.py.
ACCELERATE = [
    ("use_cpu", True, False),
    ("enable_cpu_affinity", True, False),
    ("dynamo_config.dynamo_mode", "reduce-overhead", "default"),
    ("deepspeed_config.deepspeed_moe_layer_cls_names", "MixtralSparseMoeBlock", None),
    ("deepspeed_config.zero3_init_flag", False, True),
]
# Transformers 5.23 training_args.py; TRL 1.16 model_config.py; torch's DDP has buckets of 25 MiB.
TRAINER = [
    ("torch_empty_cache_steps", 4, None),
    ("torch_compile_mode", "reduce-overhead", None),
    ("use_cache", True, False),
    ("full_determinism", True, False),
    ("optim_args", "use_kahan_summation=True", None),
    ("bf16_full_eval", True, False),
    ("ddp_bucket_cap_mb", 100, 25),
    ("ddp_find_unused_parameters", True, False),
    ("use_cpu", True, False),
]
SCRIPT = [("lora_bias", "all", "none"), ("bnb_4bit_compute_dtype", "float32", "bfloat16")]
# LLaMA-Factory ff6d4d12e: hparams/finetuning_args.py, hparams/data_args.py.
LLAMAFACTORY = [
    ("torch_empty_cache_steps", 4, None),
    ("ddp_bucket_cap_mb", 100, 25),
    ("use_dft_loss", True, False),
    ("pref_ftx", 0.5, 0.0),
]
# axolotl 067b021c8: utils/schemas/config.py, utils/callbacks, integrations/liger/args.py.
AXOLOTL = [
    ("gc_steps", 10, None),
    ("gc_collect_steps", 10, -1),
    ("torch_compile_mode", "max-autotune", None),
    ("liger_glu_activation", True, False),
    ("liger_layer_norm", True, False),
    ("heads_k_stride", 4, 1),
    ("chunked_cross_entropy_num_chunks", 4, 8),
    ("peft_layer_replication", [[0, 4], [2, 6]], None),
    ("large_head_attention", "triton_flash", "sdpa"),
    ("noisy_embedding_alpha", 5.0, None),
]
# PyTorch 2.13 torch/optim/adamw.py, which litgpt and torchtune hand their arguments to.
LITGPT = [("optimizer.init_args.amsgrad", True, False), ("optimizer.init_args.foreach", False, None)]
# torchtune bd2a0fc7c: recipes/lora_finetune_single_device.py.
TORCHTUNE = [
    ("optimizer.amsgrad", True, False),
    ("activation_offloading_use_streams", False, True),
    ("profiler.enabled", True, False),
]
# torchtitan 0.2.2: config/job_config.py.
TORCHTITAN = [
    ("activation_checkpoint.early_stop", True, False),
    ("activation_checkpoint.preserve_rng_state", False, True),
    (
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        ["moe.router.gate", "output"],
        ["moe.router.gate"],
    ),
    ("compile.backend", "aot_eager", "inductor"),
    ("quantize.linear.float8.filter_fqns", ["attention.wq"], []),
    ("quantize.linear.mx.filter_fqns", ["attention.wq"], ["output"]),
    ("debug.deterministic", True, False),
    ("parallelism.context_parallel_load_balancer", "ptrr", "headtail"),
]
# Megatron-LM d98e8a64: megatron/training/arguments.py, core/transformer/transformer_config.py.
MEGATRON = [
    ("empty_unused_memory_level", 2, 0),
    ("softmax_type", "learnable", "vanilla"),
    ("window_size", "128,0", None),
    ("no_bias_swiglu_fusion", True, False),
    ("no_masked_softmax_fusion", True, False),
    ("ddp_bucket_size", 40_000_000, None),
    ("moe_router_dtype", "fp32", None),
    ("moe_z_loss_coeff", 1e-3, None),
    ("timing_log_level", 2, 0),
]
ROWS = {
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "trainer": TRAINER + SCRIPT,
    "llamafactory": LLAMAFACTORY,
    "axolotl": AXOLOTL,
    "litgpt": LITGPT,
    "torchtune": TORCHTUNE,
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
}
CASES = [(name, key, changed, default) for name, rows in ROWS.items() for key, changed, default in rows]


def config_with(name: str, key: str, value: Any) -> Config:
    """Return the config of a format's base with one key more."""
    kind, base = BASES[name]
    data = {part: dict(inner) if isinstance(inner, dict) else inner for part, inner in base.items()}
    if key.startswith("aio.") or ".offload_" in key:
        data["zero_optimization"] |= {part: dict(inner) for part, inner in OFFLOADED.items()}
    if name == "torchtitan" and key.startswith(("quantize.", "float8.", "mx.")):
        data["model"] |= {"converters": [key.rpartition(".")[0]]}
    *tables, last = key.split(".")
    table = data
    for part in tables:
        table = table.setdefault(part, {})
    if value is not None:
        table[last] = value
    form = get_format(name)
    return form.read(Document(Path("job"), kind, "", data, dict))  # type: ignore[arg-type]


def said_of(config: Config, key: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return the findings about a key, and what the config sets from anything that is stated."""
    findings = {(finding.code, finding.message) for finding in config.findings if finding.field == key}
    return findings, {(said.name, str(said.value)) for said in config.settings}


@pytest.mark.parametrize(("name", "key", "changed", "default"), CASES, ids=[f"{n}-{k}-{v}" for n, k, v, _ in CASES])
def test_a_changed_value_moves_the_job_or_is_named(name: str, key: str, changed: Any, default: Any) -> None:
    quiet, plain = said_of(config_with(name, key, default), key)
    found, job = said_of(config_with(name, key, changed), key)
    assert not quiet
    assert found or job != plain
    assert all(code != "MC001" for code, _ in found)


@pytest.mark.parametrize("name", ROWS)
def test_every_key_that_is_not_counted_is_named_once_it_is_set(name: str) -> None:
    """No key of the lists of a format is both said to change something and silently taken."""
    for key, row in key_table(name).not_counted.items():
        findings, _ = said_of(config_with(name, key, "17"), key)
        assert any(row["says"] in message and "MC002" in code for code, message in findings), key


def test_what_moves_only_time_is_a_note() -> None:
    (finding,) = config_with("deepspeed", "wall_clock_breakdown", True).findings
    assert (finding.severity, finding.code) == ("note", "MC002")
    (finding,) = config_with("deepspeed", "zero_optimization.contiguous_gradients", False).findings
    assert finding.severity == "warning"


def test_fp16_masters_are_named_in_their_own_words() -> None:
    """`fp16_master_weights_and_grads` halves masters and gradients (runtime/base_optimizer.py)."""
    data = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "train_batch_size": 8}
    config = get_format("deepspeed").read(Document(Path("ds.json"), "json", "", data, dict))
    assert {finding.field for finding in config.findings} == {"fp16.fp16_master_weights_and_grads"}


def test_masters_of_a_width_that_is_off_say_nothing() -> None:
    data = {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}, "train_batch_size": 8}
    assert not get_format("deepspeed").read(Document(Path("ds.json"), "json", "", data, dict)).findings


def test_requests_to_nvme_say_nothing_where_none_goes_there() -> None:
    data = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "aio": {"block_size": 131_072}}
    config = get_format("deepspeed").read(Document(Path("ds.json"), "json", "", data, dict))
    assert not config.findings
