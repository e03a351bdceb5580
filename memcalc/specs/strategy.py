"""What is fed (workload) and one candidate way to train (strategy)."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from memcalc.specs.adapters import AdapterDtype, AlsoTrained, Quantization
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
Schedule = Literal["1f1b", "interleaved", "gpipe", "interleaved-zb", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v"]
AttentionImpl = Literal["flash", "efficient", "cudnn", "math", "eager"]
Loss = Literal["standard", "chunked", "fused-kernel", "fused-linear", "parallel", "triton"]
Kernels = Literal["model", "fused", "te"]
Compile = Literal["none", "blocks", "blocks+loss", "model", "loss"]
ContextParallel = Literal["ring", "allgather", "a2a"]
Offload = Literal["optimizer", "params", "activations"]
Tier = Literal["cpu", "nvme", "cxl"]

FRAMEWORKS: tuple[str, ...] = get_args(FrameworkName)
PRECISIONS: tuple[str, ...] = get_args(Precision)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)


class Workload(Frozen):
    """What one optimizer step is fed."""

    seq_len: int = Field(gt=0)
    """Tokens a sequence."""
    global_batch: int = Field(gt=0)
    """Sequences an optimizer step, over all ranks."""


Largest = Literal["seq-len", "micro-batch", "model"]
"""What ``memcalc max`` is asked for."""
Smallest = Literal["gpus"]
"""What ``memcalc min`` is asked for."""


class Strategy(Frozen):
    """One way to train, every field resolved. Degrees are numbers of ranks; ``dp`` follows from the rest."""

    framework: str = "fsdp2"
    """A name of :data:`FRAMEWORKS`, with an era where one was given (``hf@4.46``)."""
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
    checkpoint: Literal["", "reentrant", "non-reentrant"] = ""
    """How checkpoints run; as the framework does it where empty."""
    compile: Compile = "none"
    cp_kind: ContextParallel = "ring"
    etp: int = Field(default=0, ge=0)
    """Tensor-parallel ranks of an expert; as many as of the rest where 0."""
    mtp: int = Field(default=0, ge=0)
    """Blocks that predict further tokens."""
    microbatch_group: int = Field(default=0, ge=0)
    """Micro-batches that pass one model chunk before the next chunk's turn; as many as stages where 0."""
    first_stage_layers: int = Field(default=0, ge=0)
    last_stage_layers: int = Field(default=0, ge=0)
    """Blocks of the first and last stage of a pipeline; an equal share where 0."""
    embedding_in_split: bool = False
    loss_in_split: bool = False
    wgrad_fusion: bool = True
    """Weight gradients are added to the gradient buffer by the matmul itself (Megatron-LM)."""
    float8: Literal["", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = ""
    """How float8 matmuls scale their inputs, which they keep in 16 bits; empty without float8."""
    float8_all_gather: bool = False
    async_tp: bool = False
    fsdp_schedule: Literal["default", "simple"] = "default"
    """`simple`: gathers and reductions are part of the compiled graph, on the compute stream (SimpleFSDP)."""
    reshard: Literal["default", "always", "never"] = "default"
    """Which blocks FSDP shards again after forward; by default as the framework does it."""
    expandable_segments: bool = False
    lora: str = ""
    """Rank and targets of the adapters, as in ``16:q,k,v,o``; empty where the weights themselves are trained."""
    adapter_dtype: AdapterDtype = "fp32"
    autocast: bool = False
    """Autocast over 16-bit weights."""
    also_train: tuple[AlsoTrained, ...] = ()
    quantize: Quantization = "none"
    """How the frozen base is stored."""
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    lora_kernels: Kernels = "model"
    gptq_group: int = Field(default=128, ge=0)
    prepare_kbit: bool = False
    """Norms are cast to fp32 over a quantised base, and with them the residual stream."""
    wide_embedding_moments: bool = False
    """Embedding tables keep 32-bit moments under an 8-bit optimizer (Transformers' Trainer)."""
    bucket_view: bool = False
    """DDP's gradients are views of its buckets, not copied into them (``gradient_as_bucket_view``)."""
    whole_accumulation: bool | None = None
    """FSDP adds up the gradients of all micro-batches but the last unsharded; as the framework does it where None."""
    partition_activations: bool = False
    """Checkpointed inputs are kept in parts, one on each tensor-parallel rank (DeepSpeed)."""
    grad_accum_dtype: Literal["", "fp32", "bf16", "fp16"] = ""
    """Width in which DeepSpeed adds gradients up; that of the weights where empty."""
    reduce_bucket_size: int | None = None
    """Elements; like the following, DeepSpeed's own default where absent."""
    overlap_comm: bool | None = None
    zero_prefetch_bucket: int | None = None
    persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    sub_group_size: int | None = None
    micro_batch: int = Field(default=1, gt=0)
    """Sequences a forward pass on one data-parallel rank."""

    @property
    def gpus(self) -> int:
        """Ranks in all [-]."""
        return self.dp * self.tp * self.pp * self.cp
