"""The Hugging Face Trainer, on one GPU or on FSDP 1, the default of Accelerate 1.15 (``fsdp_version``)."""

from __future__ import annotations

from memcalc.frameworks import losses, support
from memcalc.frameworks.fsdp import FSDP1
from memcalc.frameworks.habits import like

HF = like(
    FSDP1,
    "hf",
    zero=(0, 3, 2),
    capabilities=support.HF,
    in_place_kernels=True,
    optimizer_impl="fused",  # training_args.py: adamw_torch_fused
    # Accelerate 1.15, utils/dataclasses.py (set_mixed_precision) and accelerator.py (prepare_model, no_sync)
    reduces_as="compute",
    autocast_over_shards=True,
    whole_accumulation=True,
    wraps_replicas=True,  # trainer.py passes no gradient_as_bucket_view on; False in Accelerate's own default
    losses=losses.HUGGING_FACE,
    source="transformers 5.23 loss/loss_utils.py, integrations/moe.py; 5.0 modeling_utils.py: use_reentrant is False",
)
HF_449 = like(
    HF,
    "hf",
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
    losses={**losses.HUGGING_FACE, "standard": losses.HF_446, "fused-kernel": losses.HF_446_IN_PLACE},
    source=losses.HF_446.source,
)
HF_445 = like(
    HF_446,
    "hf",
    losses={**losses.HUGGING_FACE, "standard": losses.HF_445, "fused-kernel": losses.HF_445_IN_PLACE},
    source=losses.HF_445.source,
)

HF_40 = like(
    HF_445, "hf", zeroes_gradients=True, source="transformers 4.26 trainer.py: model.zero_grad(), before torch 2.0"
)

ERAS = {"hf": (("4.0", HF_40), ("4.27", HF_445), ("4.46", HF_446), ("4.49", HF_449), ("5.0", HF))}
RELEASED = {"4.0": "2020-11", "4.27": "2023-03", "4.46": "2024-10", "4.49": "2025-02", "5.0": "2026-01"}
"""The months of the releases with which the eras begin (pypi.org/project/transformers), for an era given as a month."""
