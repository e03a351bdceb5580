"""The table of frameworks. A formula never asks which framework it serves: it reads the columns below.

Sources read: PyTorch ``torch/distributed/fsdp/_fully_shard`` and ``fully_sharded_data_parallel.py``,
``nn/parallel/distributed.py``; DeepSpeed ``runtime/zero/{config,stage_1_and_2,stage3}.py``; Megatron-LM
``core/distributed`` and ``docs/user-guide/features/dist_optimizer.md``; Transformers ``loss/loss_utils.py``;
torchtitan ``components/loss.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

Ratio = Fraction
LossBytes = dict[str, tuple[Ratio, Ratio]]


@dataclass(frozen=True)
class Widths:
    """Bytes an element of each copy of a parameter."""

    parameter: int
    """The persistent weight (the shard, under FSDP)."""
    gradient: int
    master: int
    """A second, fp32 weight held by the optimizer; 0 where the parameter itself is fp32 or there is none."""
    moment: int
    """Each of the optimizer's moments."""
    compute: int
    """The weight that takes part in a matmul; what FSDP and ZeRO-3 gather."""
    cached: int
    """16-bit copies that autocast keeps from forward to backward."""
    step_gradient: int = 0
    """An fp32 copy of the gradient shard that the step makes."""


@dataclass(frozen=True)
class Habits:
    """What one framework does, as columns for the formulas."""

    name: str
    zero: tuple[int, ...]
    """Sharding stages that exist; the first is the default of `estimate`."""
    widths: dict[str, Widths]
    """By precision; a precision that is absent does not exist in the framework."""
    source: str
    tensor_parallel: bool = False
    """Whether TP, SP, PP, CP and EP exist."""
    full_shard: bool = False
    """FSDP: stage 2 and 3 shard all states; stage 0, where it exists, is plain training of fp32 or 16-bit weights."""
    gather: str = "none"
    """`blocks`: units are gathered block by block with a prefetch (FSDP); `live`: up to 10^9 parameters (ZeRO-3)."""
    bucket_elements: int = 0
    """Elements of one communication bucket kept beside the gradients."""
    buckets: int = 0
    gradients_follow_optimizer: bool = False
    """With an offloaded optimizer, gradient shards go to the host as they are reduced (DeepSpeed, stages 2 and 3)."""
    gradient_copy: bool = False
    """Bucket buffers hold a second copy of all gradients (DDP without ``gradient_as_bucket_view``)."""
    persistent_gradients: bool = False
    """One contiguous gradient buffer lives all the time (Megatron)."""
    kernels: str = "model"
    optimizer_impl: str = "foreach"
    vocab_parallel: bool = False
    """Logits are divided by TP whatever the loss."""
    loss: LossBytes = field(default_factory=dict)
    """Bytes a logit alive at the end of forward and in the loss's backward, with 16-bit logits."""


def _ratio(forward: str, backward: str) -> tuple[Ratio, Ratio]:
    return Fraction(forward), Fraction(backward)


_HF_LOSS: LossBytes = {
    "standard": _ratio("10", "12"),
    "fused-kernel": _ratio("2", "2"),
    "chunked": _ratio("13/2", "11/2"),
}
_TITAN_LOSS: LossBytes = {
    "standard": _ratio("8", "12"),
    "chunked": _ratio("13/2", "11/2"),
    "fused-kernel": _ratio("2", "2"),
    "parallel": _ratio("12", "16"),
}
# Megatron's native fusion is compiled out of place (2 + 4 + 4); Transformer Engine's Triton kernel writes in place.
_MEGATRON_LOSS: LossBytes = {
    "standard": _ratio("6", "6"),
    "parallel": _ratio("6", "6"),
    "fused-kernel": _ratio("10", "10"),
    "triton": _ratio("2", "2"),
}
FP32_LOGITS: tuple[Ratio, Ratio] = _ratio("8", "12")
"""With fp32 logits: the logits and the log-softmax, then the log-softmax and two gradients (PyTorch 2.13)."""

_SHARDED = {
    "fp32": Widths(4, 4, 0, 4, 4, 0),
    "bf16-mixed": Widths(4, 4, 0, 4, 2, 0),
    "fp16-mixed": Widths(4, 4, 0, 4, 2, 0),
    "bf16-autocast": Widths(4, 4, 0, 4, 4, 2),
    "fp16-autocast": Widths(4, 4, 0, 4, 4, 2),
    "bf16": Widths(2, 2, 0, 2, 2, 0),
}
_MASTER = {**_SHARDED, "bf16-mixed": Widths(2, 2, 4, 4, 2, 0), "fp16-mixed": Widths(2, 2, 4, 4, 2, 0)}
_DEEPSPEED = {**_MASTER, "bf16-mixed": Widths(2, 2, 4, 4, 2, 0, 4), "fp16-mixed": Widths(2, 2, 4, 4, 2, 0, 4)}
_MEGATRON = {
    "fp32": Widths(4, 4, 0, 4, 4, 0),
    "bf16-mixed": Widths(2, 4, 4, 4, 2, 0),
    "fp16-mixed": Widths(2, 2, 4, 4, 2, 0, 4),
}

_FSDP2 = Habits(
    name="fsdp2",
    zero=(3, 2),
    widths=_SHARDED,
    tensor_parallel=True,
    full_shard=True,
    gather="blocks",
    loss=_TITAN_LOSS,
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13",
)


def _like(base: Habits, name: str, **changes: object) -> Habits:
    return Habits(**{**base.__dict__, "name": name, **changes})


_PLAIN = Habits(
    name="plain",
    zero=(0,),
    widths=_MASTER,
    loss=_HF_LOSS,
    source="torch.optim and torch.autograd, torch 2.13",
)

FRAMEWORKS: dict[str, Habits] = {
    "fsdp2": _FSDP2,
    "torchtitan": _like(_FSDP2, "torchtitan", kernels="fused", optimizer_impl="fused", source="torchtitan b5bcd76"),
    "torchtune": _like(
        _FSDP2, "torchtune", tensor_parallel=False, source="torchtune ce_chunked_output_loss.py, _compile.py"
    ),
    "fsdp1": _like(
        _FSDP2, "fsdp1", tensor_parallel=False, loss=_HF_LOSS, source="torch/distributed/fsdp/api.py, torch 2.13"
    ),
    "hf": _like(
        _FSDP2,
        "hf",
        zero=(0, 3, 2),
        tensor_parallel=False,
        loss=_HF_LOSS,
        source="transformers loss/loss_utils.py 5.23, accelerate FSDP",
    ),
    "litgpt": _like(_FSDP2, "litgpt", tensor_parallel=False, loss=_HF_LOSS, source="litgpt finetune/full.py"),
    "plain": _PLAIN,
    "ddp": _like(_PLAIN, "ddp", gradient_copy=True, source="torch/nn/parallel/distributed.py, torch 2.13"),
    "deepspeed": Habits(
        name="deepspeed",
        zero=(3, 2, 1, 0),
        widths=_DEEPSPEED,
        gather="live",
        bucket_elements=500_000_000,
        buckets=2,
        gradients_follow_optimizer=True,
        optimizer_impl="fused",
        loss=_HF_LOSS,
        source="deepspeed/runtime/zero/config.py edaa722: reduce_bucket_size, overlap_comm, max_live_parameters",
    ),
    "megatron": Habits(
        name="megatron",
        zero=(1, 0),
        widths=_MEGATRON,
        tensor_parallel=True,
        persistent_gradients=True,
        kernels="fused",
        optimizer_impl="fused",
        vocab_parallel=True,
        loss=_MEGATRON_LOSS,
        source="Megatron-LM d98e8a64 docs/user-guide/features/dist_optimizer.md",
    ),
}


def habits_of(framework: str) -> Habits:
    """The habits of a framework by its name."""
    return FRAMEWORKS[framework]
