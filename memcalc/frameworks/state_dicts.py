"""How each framework reads and writes checkpoints where a job's configuration says nothing of it, as data.

A framework that is absent here leaves that to a script of its user, which nobody has read.
"""

from __future__ import annotations

from typing import Literal

StateDict = Literal["sharded", "full", "full-on-gpu"]
"""Each rank its shards; whole weights that leave the GPU as they are gathered; whole weights gathered on each GPU."""

WRITES: dict[str, tuple[StateDict, str]] = {
    "hf": ("full", "accelerate 1.15 utils/dataclasses.py: FSDP_STATE_DICT_TYPE of FSDP 1, offload_to_cpu, rank0_only"),
    "fsdp1": ("full-on-gpu", "torch 2.13 distributed/fsdp/api.py: FullStateDictConfig; _state_dict_utils.py: clone()"),
    "fsdp2": ("sharded", "torch 2.13 distributed/fsdp/_fully_shard: state_dict() has DTensors"),
    "deepspeed": ("sharded", "DeepSpeed 0.19.6 runtime/zero/config.py: stage3_gather_16bit_weights_on_model_save"),
    "megatron": ("sharded", "Megatron-LM d98e8a64 training/checkpointing.py: torch_dist, dp_reshardable"),
}
"""By framework: what it writes by default where ranks share the weights, and who says so."""
READS = {
    "hf": "transformers 5.23 modeling_utils.py: from_pretrained on the host, is_local_dist_rank_0 under FSDP",
    "deepspeed": "transformers 5.23 modeling_utils.py: zero.Init, map_location cpu on rank 0 and meta elsewhere",
}
"""By framework: who says how weights are loaded."""
EVALUATION_BATCH = {"hf": 8}
"""By framework: sequences a rank that evaluation takes by default (transformers 5.23 training_args.py,
``per_device_eval_batch_size``); elsewhere those of training are assumed."""
