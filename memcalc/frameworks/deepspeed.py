"""DeepSpeed: the ZeRO stages, and with Megatron-DeepSpeed tensor parallelism and the pipeline engine.

Read at v0.3.16, v0.4.5, v0.5.10, v0.6.0, v0.12.3 and edaa722 (0.19). Its releases of 2021 are those with which
Megatron-DeepSpeed trained, so their blocks and losses are Megatron's; later ones serve models of Transformers. Which
optimizer runs without ZeRO (engine.py, ``get_data_types`` and ``_do_optimizer_sanity_check``) was read at v0.7.7 to
v0.19.5 too: it changed in v0.17.6; where the bucket is made (``setup_buckets``) at v0.18.2 to 0.19.8, and when moments
appear (``initialize_optimizer_states``) at v0.13.1 to 0.19.8.
"""

from __future__ import annotations

from memcalc.frameworks import losses, support
from memcalc.frameworks.fsdp import MASTER
from memcalc.frameworks.habits import Bucket, Habits, Widths, Zero, like
from memcalc.frameworks.megatron import VOCAB_MULTIPLE

WIDTHS = {**MASTER, "bf16-mixed": Widths(2, 2, 4, 4, 2, 0), "fp16-mixed": Widths(2, 2, 4, 4, 2, 0)}

DEEPSPEED = Habits(
    name="deepspeed",
    zero=(3, 2, 1, 0),
    capabilities=support.DEEPSPEED,
    widths=WIDTHS,
    gather="live",
    overlaps_gather=False,
    bucket=Bucket(elements=500_000_000),  # reduce_bucket_size
    tensor_parallel=True,
    lacks=("sp", "ep"),
    cp_kind="a2a",  # runtime/sequence_parallel/ulysses_sp.py
    zero_optimizer=Zero(contiguous_from=1, late_bucket=True, late_moments=True, masters_cloned=True),
    pipeline_engine="pipelines",
    gradients_follow_optimizer=True,
    optimizer_impl="fused",
    checkpoints_first=True,  # the Trainer's own
    casts_adapters=True,  # runtime/engine.py, _configure_distributed_model: module.bfloat16(), module.half()
    reentrant=True,
    in_place_kernels=("norms", "mlp"),  # with a Trainer that has Liger's
    losses={**losses.HUGGING_FACE, "parallel": losses.MEGATRON_PIPE},
    source="deepspeed/runtime/zero/config.py edaa722: reduce_bucket_size, overlap_comm, max_live_parameters",
)
DEEPSPEED_17_6 = like(DEEPSPEED, "deepspeed", zero_optimizer=Zero(contiguous_from=1, late_moments=True))
DEEPSPEED_17 = like(
    DEEPSPEED_17_6,
    "deepspeed",
    capabilities=support.DEEPSPEED_17,
    lacks=("sp", "cp", "ep"),  # Accelerate asks for 0.18.1
    zero_optimizer=Zero(contiguous_from=1, wide_without_zero=True, late_moments=True),
    evaluation_logits=True,  # with the Trainer of that time
)
DEEPSPEED_13 = like(
    DEEPSPEED_17,
    "deepspeed",
    zero_optimizer=Zero(contiguous_from=1, wide_without_zero=True, late_moments=True, staged_weights=False),
    in_place_kernels=(),
)
DEEPSPEED_06 = like(
    DEEPSPEED_17,
    "deepspeed",
    zero_optimizer=Zero(overflow_at_once=False, wide_without_zero=True, staged_weights=False),
    in_place_kernels=(),
    losses={**DEEPSPEED.losses, "standard": losses.HF_445},
    calls_sdpa=False,  # with Transformers before 4.36
    source="deepspeed/runtime/engine.py v0.12.3, _configure_zero_optimizer: stage 1 ignores contiguous_gradients",
)
MEGATRON_DEEPSPEED = like(
    DEEPSPEED_06,
    "deepspeed",
    capabilities=support.MEGATRON_DEEPSPEED,
    zero_optimizer=Zero(flat_partitions=False, overflow_at_once=False, fp32_accumulation=False, staged_weights=False),
    pipeline_engine="always",
    overlaps_reduction=False,
    vocab_parallel=True,
    kernels="te",
    vocab_multiple=VOCAB_MULTIPLE,
    allocator="2021",
    lazy_kernels=False,
    losses={"standard": losses.MEGATRON_PIPE, "parallel": losses.MEGATRON_PIPE},
    source="DeepSpeed v0.5.10 runtime/zero/stage_1_and_2.py; Megatron-DeepSpeed 541b967 megatron/model/gpt_model.py",
)
LEGACY = like(
    MEGATRON_DEEPSPEED,
    "deepspeed",
    zero_optimizer=Zero(
        flat_gradients=True,
        flat_partitions=False,
        overflow_at_once=False,
        fp32_accumulation=False,
        staged_weights=False,
    ),
    source="DeepSpeed v0.3.16 runtime/zero/stage1.py",
)

SCALING = like(
    DEEPSPEED_06,
    "deepspeed",
    capabilities=support.SCALING,
    zero=(1, 0),
    lacks=("cp", "ep"),
    zero_optimizer=Zero(fp32_accumulation=False, late_moments=True, staged_weights=False),
    overlaps_reduction=False,
    reduces_each_input=True,
    reduces_whole=True,
    reduction_width=4,
    reentrant=False,
    stops_early=False,
    optimizer_impl="foreach",
    calls_sdpa=True,
    losses={"standard": DEEPSPEED.losses["standard"]},
    source="Aleph-Alpha/scaling 737f855 core/optimizer/optimizer.py, allreduce.py; core/nn/linear, core/nn/mlp.py",
)
"""Aleph Alpha's own code, whose pipeline and ZeRO optimizer come from DeepSpeed."""

BEFORE_FUSED = (LEGACY, MEGATRON_DEEPSPEED, DEEPSPEED_06, DEEPSPEED_13)
"""Eras in which the Trainer's default optimizer was adamw_torch: Transformers before 4.54, PyTorch before 2.8."""

ERAS = {
    "deepspeed": (
        ("0.3", LEGACY),
        ("0.4", MEGATRON_DEEPSPEED),
        ("0.6", DEEPSPEED_06),
        ("0.13", DEEPSPEED_13),
        ("0.17", DEEPSPEED_17),
        ("0.17.6", DEEPSPEED_17_6),
        ("0.18.3", DEEPSPEED),
        ("2021-01", MEGATRON_DEEPSPEED),
        ("2022-03", DEEPSPEED_06),
        ("2024-01", DEEPSPEED_13),
        ("2025-06", DEEPSPEED_17),
        ("2025-10", DEEPSPEED_17_6),
        ("2026-01", DEEPSPEED),
    )
}
"""By version, and for those who know only the month of a run by that."""
NAMED = {"scaling": SCALING}
"""What is no release of DeepSpeed, by its name."""
