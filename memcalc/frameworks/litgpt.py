"""litgpt (lit-gpt until March 2024): its own model code, on Lightning Fabric.

Sources: Lightning-AI/litgpt ``model.py``, ``lora.py``, ``finetune/*.py`` and ``utils.py`` at the commits named below;
Lightning 2.1 ``fabric/wrappers.py`` (``_FabricModule.forward`` converts what a module returns to fp32, also where
weights and compute are 16-bit), ``fabric/strategies/fsdp.py`` (``no_backward_sync``; checkpoints are not reentrant) and
``fabric/plugins/precision/bitsandbytes.py`` (every ``nn.Linear`` is quantised, from fp16).
"""

from __future__ import annotations

from dataclasses import replace

from memcalc.frameworks import support
from memcalc.frameworks.fsdp import FSDP1
from memcalc.frameworks.habits import OwnCode, like
from memcalc.frameworks.losses import Loss

_CHUNKED_HEAD = Loss(
    "log-softmax",
    upcast="model",
    rows=128,
    head_in_parts=True,
    held=True,
    source="litgpt finetune/lora.py: lm_head_chunk_size=128; utils.py: chunked_cross_entropy",
)
_FULL = Loss(
    "log-softmax",
    upcast="model",
    shifted_copy=True,
    rows=128,
    held=True,
    frozen=_CHUNKED_HEAD,
    source="litgpt c81800f4 finetune/full.py and pretrain.py; utils.py: chunked_cross_entropy",
)
_FULL_2023 = _FULL._replace(rows=0, source="litgpt 069f6584 finetune/full.py: chunk_size=0")

ATTENTION = {
    "packed_qkv": True,
    "kv_form": "broadcast",
    "rotary_joined": True,
    "wide_rotary": True,
    "fused": True,
    "explicit_mask": False,
    "returns_weights": False,
    "scores_bias": "none",
    "dropout": 0.0,
}
"""q, k and v come out of one projection, heads interleaved; keys and values are expanded before the rotary embedding,
whose cosine and sine are fp32 and whose result is concatenated even with nothing."""
CODE = OwnCode(
    attention=ATTENTION,
    mlp={"packed": False, "dropout": 0.0},
    norm={"scale": "wide"},
    block={"dropout": 0.0, "summed_branches": False, "weight_views": False},
    model={"tied": False, "embedding_dropout": 0.0},
)
CODE_NARROW = replace(CODE, norm={"scale": "narrow"})
"""From 7c157492 on the norm is cast back before it is scaled, until 916a84ca."""

LITGPT_2023 = like(
    FSDP1,
    "litgpt",
    zero=(0, 3, 2),
    capabilities=support.LITGPT,
    whole_accumulation=True,
    wraps_replicas=True,  # Lightning fabric/strategies/ddp.py: DistributedDataParallel with its own defaults
    mixed_units=True,
    adapters_follow_base=True,
    lora_rank=8,  # litgpt finetune/lora.py: lora_r
    splits_packed=True,
    quantised_head=True,
    quantises_half=True,
    loss="chunked",  # utils.py: chunked_cross_entropy, of every command
    sharded_recompute="full",  # finetune/full.py: activation_checkpointing_policy={Block}
    shards_over_ranks=True,
    reduces_as="weights",
    expert_modules=True,
    own_code=CODE,
    losses={"standard": _FULL_2023, "chunked": _FULL_2023},
    source=_FULL_2023.source,
)
LITGPT_GEMMA = like(
    LITGPT_2023, "litgpt", own_code=CODE_NARROW, losses={"standard": _FULL, "chunked": _FULL}, source=_FULL.source
)
LITGPT = like(LITGPT_GEMMA, "litgpt", own_code=CODE)

ERAS = {"litgpt": (("2023-09", LITGPT_2023), ("2024-02-23", LITGPT_GEMMA), ("2024-07-23", LITGPT))}
