"""torchtune: its own model code, on plain PyTorch or FSDP 2.

Source: pytorch/torchtune at 1814feb17 (2024-11-18): modules/transformer.py, modules/attention.py, modules/rms_norm.py,
modules/loss/ce_chunked_output_loss.py, training/_compile.py and recipes/full_finetune_single_device.py.
"""

from __future__ import annotations

from memcalc.frameworks import support
from memcalc.frameworks.fsdp import FSDP2
from memcalc.frameworks.habits import OwnCode, like
from memcalc.frameworks.losses import Loss

WHOLE = Loss(
    "log-softmax",
    upcast="model",
    compiles=False,
    source="torchtune modules/transformer.py: output(h).float(); recipes drop what compile_loss returns for it",
)
CHUNKED = Loss(
    "log-softmax",
    chunks=8,
    head_in_parts=True,
    source="torchtune modules/loss/ce_chunked_output_loss.py: num_output_chunks=8; transformer.py: chunked_output",
)
LINEAR = Loss(
    "log-softmax",
    upcast="model",
    chunks=8,
    head_in_parts=True,
    source="torchtune c9861c94a (2025-05-07) modules/loss/cross_entropy_loss.py: logits.float() of a chunk",
)
CODE = OwnCode(
    attention={
        "packed_qkv": False,
        "kv_form": "views",
        "fused": True,
        "sdpa": True,
        "scores_bias": "none",
        "explicit_mask": False,
        "returns_weights": False,
    },
    mlp={"packed": False},
    norm={"scale": "narrow"},
    block={"weight_views": False},
)

TORCHTUNE = like(
    FSDP2,
    "torchtune",
    zero=(3, 2, 0),
    capabilities=support.TORCHTUNE_2024,
    tensor_parallel=False,
    repeats_keys=True,
    adapters_follow_base=True,
    offload_streams=True,  # training/_activation_offloading.py, OffloadActivations: use_streams where PyTorch has them
    lora_rank=8,  # recipes/configs/llama3/8B_lora.yaml, and most of the others
    rotary="fused",
    loss="chunked",  # of all full and LoRA recipes' configs
    reduces_as="weights",
    own_code=CODE,
    losses={"standard": WHOLE, "chunked": CHUNKED},
    source="torchtune 1814feb17, recipes/full_finetune_distributed.py",
)

TORCHTUNE_2025 = like(
    TORCHTUNE,
    "torchtune",
    capabilities=support.TORCHTUNE,
    losses={"standard": WHOLE, "chunked": LINEAR},
    source=f"torchtune bd2a0fc7c; {LINEAR.source}",
)

ERAS = {"torchtune": (("2024-04", TORCHTUNE), ("2025-05", TORCHTUNE_2025))}
