"""FSDP 1 and 2, torchtitan and the Hugging Face Trainer, which stand on them, and PyTorch without them.

The Trainer runs on one GPU or on FSDP 1, the default of Accelerate 1.15 (``fsdp_version``); PyTorch without FSDP on one
GPU, or under DistributedDataParallel.
"""

from __future__ import annotations

from memcalc.frameworks import losses, support
from memcalc.frameworks.float8 import TORCHAO
from memcalc.frameworks.habits import Habits, OwnCode, Widths, like

SHARDED = {
    "fp32": Widths(4, 4, 0, 4, 4, 0),
    "bf16-mixed": Widths(4, 4, 0, 4, 2, 0),
    "fp16-mixed": Widths(4, 4, 0, 4, 2, 0),
    "bf16-autocast": Widths(4, 4, 0, 4, 4, 2),
    "fp16-autocast": Widths(4, 4, 0, 4, 4, 2),
    "bf16": Widths(2, 2, 0, 2, 2, 0),
}
FLOAT8 = {**SHARDED, "fp8-mixed": SHARDED["bf16-mixed"]}
LOSSES = {
    "standard": losses.TITAN,
    "chunked": losses.CHUNKED,
    "fused-kernel": losses.IN_PLACE,
    "parallel": losses.LOSS_PARALLEL,
}

OWN_SCRIPT = {**losses.HUGGING_FACE, "fused-kernel": losses.IN_PLACE}
"""A class of Transformers in a loop of the user's own, whose fused kernel is given the logits as they are."""

FSDP2 = Habits(
    name="fsdp2",
    zero=(3, 2),
    capabilities=support.FSDP2,
    widths=SHARDED,
    tensor_parallel=True,
    full_shard=True,
    gather="blocks",
    reshards_root=True,
    gathers_inputs=True,
    # _fsdp_api.py of torch 2.13, MixedPrecisionPolicy
    casts_inputs=True,
    # _fsdp_param.py of torch 2.13, _init_sharded_param: Shard(0), chunks padded to the first rank's; Transformers 5 and
    # gpt-oss have all experts of a block in one tensor
    fills_experts=True,
    # torch 2.13 distributed/pipelining/schedules.py, get_schedule_class
    schedules=support.PYTORCH_SCHEDULES,
    equal_rounds=True,
    pipeline_accumulates_whole=True,
    losses=LOSSES,
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13",
)
FSDP1 = like(
    FSDP2,
    "fsdp1",
    capabilities=support.FSDP1,
    widths=FLOAT8,
    float8=TORCHAO,
    tensor_parallel=False,
    reshards_root=False,
    casts_inputs=False,  # fsdp/api.py, MixedPrecision: cast_forward_inputs
    fills_experts=False,
    schedules=("1f1b",),
    flat_units=True,
    reduces_as="compute",  # fsdp/api.py, MixedPrecision: reduce_dtype
    # Transformers 5.23 modeling_utils.py, _set_gradient_checkpointing: layer_index % every_n_layers == 0
    checkpoints_first=True,
    losses=OWN_SCRIPT,
    source="torch/distributed/fsdp/api.py, torch 2.13",
)
_TITAN = "torchtitan {} parallelize_llama.py, model.py, components/loss.py, run_train.sh"
TITAN_2024_03 = like(
    FSDP2,
    "torchtitan",
    zero=(3, 2, 0),
    capabilities=support.TITAN_2024,
    # distributed/utils.py, maybe_enable_amp, and parallelize_llama.py until 00b7f5693 of April 2026
    unsharded_alone=True,
    widths=FLOAT8,
    float8=TORCHAO,
    schedules=("1f1b", "gpipe"),
    # parallelize_llama.py, apply_fsdp: no resharding per micro-batch
    pipeline_keeps_weights=True,
    pipeline_keeps_outputs=True,
    keeps_last_block=True,
    reshards_root=False,  # torch before 2.8 keeps a root whatever it is told
    fills_experts=False,  # models/llama4/infra/parallelize.py, apply_fsdp: Shard(1) where ranks outnumber experts
    repeats_keys=True,
    rotary="fused",
    # config/job_config.py: loss parallel unless it is disabled, selective "2", allgather
    tensor_loss="parallel",
    recompute="every-2",
    cp_kind="allgather",
    own_code=OwnCode(),
    losses={**LOSSES, "standard": losses.TITAN_2024_03, "parallel": losses.LOSS_PARALLEL_2024_03},
    source=_TITAN.format("83c879f18"),
)
TITAN_2024_06 = like(
    TITAN_2024_03,
    "torchtitan",
    schedules=("1f1b", "gpipe", "interleaved"),  # 04661a6c2 of June 2024
    losses=LOSSES,
    source=_TITAN.format("e29b6b4d4"),
)
TITAN_2024_09 = like(TITAN_2024_06, "torchtitan", capabilities=support.TITAN, source=_TITAN.format("db6b39acd"))
TITAN_2024_11 = like(
    TITAN_2024_09,
    "torchtitan",
    schedules=(*TITAN_2024_06.schedules, "interleaved-zb"),  # a88dc4125 of October 2024: get_schedule_class
    expandable_segments=True,
    source=_TITAN.format("9dec370"),
)
TITAN_2025_08 = like(
    TITAN_2024_11,
    "torchtitan",
    capabilities=support.TITAN_AMP,  # 0b44d4c43 of June 2025
    schedules=FSDP2.schedules,  # 3996b634a of February 2025: ScheduleZBVZeroBubble; 803906b8f of August: DualPipeV
    kernels="fused",
    optimizer_impl="fused",
    keeps_last_block=False,
    split_root=True,
    reshards_root=True,
    # July 2025, distributed/pipeline_parallel.py: first_stage_less_layers and last_stage_less_layers are 1
    ends_in_split=True,
    # models/moe.py (MoE.forward), distributed/expert_parallel.py (ExpertParallel, expert_parallel)
    exchanges_rows=True,
    # 9a8cb98f1 of July 2025: per_op_sac_force_recompute_mm_shapes_by_fqns is ["moe.router.gate"]
    leaves_router=True,
    source=_TITAN.format("83e694105"),
)
TITAN_2025_09 = like(
    TITAN_2025_08,
    "torchtitan",
    stops_early=False,  # 25413d224 of 29 August 2025: activation_checkpoint.early_stop, which is off
    # c4e229115 of 6 September 2025: all_to_all_single is in _op_sac_save_list, but not in that of models/qwen3
    keeps_exchange=("deepseekv2", "deepseekv3", "llama4", "gptoss"),
    source=_TITAN.format("c4e229115"),
)
TITAN_2025_11 = like(
    TITAN_2025_09,
    "torchtitan",
    pipeline_keeps_outputs=False,
    attention_library="cuDNN",  # 6a3a9da95 of 9 October 2025: models/attention.py, sdpa_backends
    compiles_parts=True,  # 2a7a14841 of 29 October 2025: apply_compile of models/llama4, until 5242bdf71 of April 2026
    source="torchtitan e5ef99aab: step(return_outputs=False)",
)
TITAN_2025_12 = like(
    TITAN_2025_11,
    "torchtitan",
    capabilities=support.TITAN_DEEPEP,
    saved_attention=(*FSDP2.saved_attention, "cudnn"),
    source=_TITAN.format("b39377f9f"),
)
TITAN_2026_02 = like(TITAN_2025_12, "torchtitan", repeats_keys=False, source=_TITAN.format("ff0829c10"))
TITAN_2026_05 = like(
    TITAN_2026_02,
    "torchtitan",
    zero=(3, 2),
    unsharded_alone=False,
    capabilities=support.TITAN_CHUNKED,
    own_code=OwnCode(attention={"packed_qkv": True}),
    compiles_parts=False,
    keeps_exchange=(*TITAN_2026_02.keeps_exchange, "qwen3moe"),  # 114151ad4 of March 2026: one list for all models
    keeps_biased=True,  # the same list: get_default_op_list().compute_intensive_ops, with aten.addmm
    # experiments/graph_trainer/memory_policy.py of 27aa49077
    graph_keeps_matmuls=True,
    losses={**LOSSES, "chunked": losses.CHUNKED_HIDDEN},
    source=_TITAN.format("786e26f8e"),
)
# 169545712 of 9 June 2026: FlexAttention by default, a kernel that Triton compiles
TORCHTITAN = like(TITAN_2026_05, "torchtitan", attention_library="FlexAttention", source=_TITAN.format("169545712"))

ERAS = {
    "fsdp2": (("2.4", like(FSDP2, "fsdp2", widths=FLOAT8, float8=TORCHAO)),),
    "fsdp1": (("2.0", FSDP1),),
    "torchtitan": (
        ("2024-03", TITAN_2024_03),
        ("2024-06", TITAN_2024_06),
        ("2024-09", TITAN_2024_09),
        ("2024-11", TITAN_2024_11),
        ("2025-08", TITAN_2025_08),
        ("2025-09", TITAN_2025_09),
        ("2025-11", TITAN_2025_11),
        ("2025-12", TITAN_2025_12),
        ("2026-02", TITAN_2026_02),
        ("2026-05", TITAN_2026_05),
        ("2026-07", TORCHTITAN),
    ),
}


HF = like(
    FSDP1,
    "hf",
    zero=(0, 3, 2),
    capabilities=support.HF,
    in_place_kernels=("norms", "mlp"),
    optimizer_impl="fused",  # training_args.py: adamw_torch_fused
    # Accelerate 1.15, utils/dataclasses.py (set_mixed_precision) and accelerator.py (prepare_model, no_sync)
    reduces_as="compute",
    autocast_over_shards=True,
    autocasts_half=True,
    whole_accumulation=True,
    wraps_replicas=True,  # trainer.py passes no gradient_as_bucket_view on; False in Accelerate's own default
    losses=losses.TRAINER,
    source="transformers 5.23 loss/loss_utils.py, integrations/moe.py; 5.0 modeling_utils.py: use_reentrant is False",
)
HF_50 = like(HF, "hf", losses=losses.TRAINER_50)
HF_449 = like(
    HF,
    "hf",
    losses=losses.TRAINER_449,
    optimizer_impl="foreach",  # adamw_torch
    reentrant=True,
    expert_loop=True,
    evaluation_logits=True,  # trainer.py passes skip_logits since April 2026 (#45273)
    evaluation_cache=True,  # the model's own use_cache counts; from 5.0 on TrainingArguments.use_cache, off by default
    source="transformers 4.49 loss/loss_utils.py, modeling_utils.py (gradient_checkpointing_enable)",
)
HF_446 = like(
    HF_449,
    "hf",
    broadcasts_ahead=True,  # PyTorch 2.5
    in_place_kernels=("norms",),  # as in its loss: fms-acceleration's, which leave the MLP to the class
    losses={**losses.HUGGING_FACE, "standard": losses.HF_446, "fused-kernel": losses.HF_446_IN_PLACE},
    source=losses.HF_446.source,
)
HF_445 = like(
    HF_446,
    "hf",
    losses={**losses.HUGGING_FACE, "standard": losses.HF_445, "fused-kernel": losses.HF_445_IN_PLACE},
    source=losses.HF_445.source,
)

HF_435 = like(
    HF_445, "hf", calls_sdpa=False, source="transformers 4.35 models/llama/modeling_llama.py: matmul and softmax"
)
HF_40 = like(
    HF_435, "hf", zeroes_gradients=True, source="transformers 4.26 trainer.py: model.zero_grad(), before torch 2.0"
)

HF_OLD = (("4.0", HF_40), ("4.27", HF_435), ("4.36", HF_445), ("4.46", HF_446), ("4.49", HF_449))
HF_ERAS = {"hf": (*HF_OLD, ("5.0", HF_50), ("5.17", HF))}
HF_RELEASED = {
    "4.0": "2020-11",
    "4.27": "2023-03",
    "4.36": "2023-12",
    "4.46": "2024-10",
    "4.49": "2025-02",
    "5.0": "2026-01",
    "5.17": "2026-09",
}
"""The months of the releases with which the eras begin (pypi.org/project/transformers), for an era given as a month."""


MASTER = {**SHARDED, "bf16-mixed": Widths(2, 2, 4, 4, 2, 0), "fp16-mixed": Widths(2, 2, 4, 4, 2, 0)}

PLAIN = Habits(
    name="plain",
    zero=(0,),
    capabilities=support.PLAIN,
    widths=MASTER,
    losses=OWN_SCRIPT,
    source="torch.optim and torch.autograd, torch 2.13",
)
DDP = like(
    PLAIN,
    "ddp",
    capabilities=support.TRAINER,
    checkpoints_first=True,  # the Trainer's own
    gradient_copy=True,
    autocasts_half=True,  # the Trainer's own, too
    losses=losses.TRAINER,
    source="torch/nn/parallel/distributed.py, torch 2.13",
)

DDP_24 = like(
    DDP, "ddp", broadcasts_ahead=True,
    source="torch/csrc/distributed/c10d/comm.cpp, ProcessGroupNCCL.cpp (recordStream), torch 2.4 to 2.7",
)  # fmt: skip
PLAIN_ERAS = {"plain": (("2.4", PLAIN),), "ddp": (("2.4", DDP_24), ("2.8", DDP))}
PLAIN_RELEASED = {"2.8": "2025-08"}
"""The month of PyTorch 2.8 (pypi.org/project/torch), likewise."""
