"""What is fed (workload) and one candidate way to train (strategy)."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from memcalc.specs.model import Frozen

FrameworkName = Literal[
    "fsdp2", "fsdp1", "ddp", "deepspeed", "megatron", "hf", "torchtitan", "torchtune", "litgpt", "plain"
]
Precision = Literal["fp32", "fp16-mixed", "bf16-mixed", "fp16-autocast", "bf16-autocast", "bf16", "fp8-mixed"]
Optimizer = Literal[
    "adamw",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "adafactor",
    "lion",
    "lion-8bit",
    "sgd",
    "sgd-momentum",
    "muon",
]
OptimizerImpl = Literal["fused", "foreach", "loop"]
Schedule = Literal["1f1b", "interleaved", "gpipe"]
AttentionImpl = Literal["flash", "efficient", "cudnn", "math", "eager"]
Loss = Literal["standard", "chunked", "fused-kernel", "fused-linear", "parallel", "triton"]
Kernels = Literal["model", "fused"]
Offload = Literal["optimizer", "params", "activations"]
Tier = Literal["cpu", "nvme", "cxl"]

FRAMEWORKS: tuple[str, ...] = get_args(FrameworkName)
PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)


class Workload(Frozen):
    """What one optimizer step is fed."""

    seq_len: int = Field(gt=0)
    """Tokens a sequence."""
    global_batch: int = Field(gt=0)
    """Sequences an optimizer step, over all ranks."""


class Strategy(Frozen):
    """One way to train, every field resolved. Degrees are numbers of ranks; ``dp`` follows from the rest."""

    framework: FrameworkName = "fsdp2"
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    optimizer_impl: OptimizerImpl = "foreach"
    optimizer_in_backward: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    dp: int = Field(default=1, gt=0)
    """Data-parallel ranks, context parallelism left out."""
    tp: int = Field(default=1, gt=0)
    sp: bool = False
    pp: int = Field(default=1, gt=0)
    pp_schedule: Schedule = "1f1b"
    vpp: int = Field(default=1, gt=0)
    cp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    recompute: str = "none"
    """A policy of :mod:`memcalc.formulas.recompute`, such as ``full``, ``every-2`` or ``modules:mlp``."""
    offload: tuple[Offload, ...] = ()
    offload_to: Tier = "cpu"
    attention: AttentionImpl = "flash"
    loss: Loss = "standard"
    kernels: Kernels = "model"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    micro_batch: int = Field(default=1, gt=0)
    """Sequences a forward pass on one data-parallel rank."""

    @property
    def gpus(self) -> int:
        """Ranks in all [-]."""
        return self.dp * self.tp * self.pp * self.cp
