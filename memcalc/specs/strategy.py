"""One candidate way to train, as the table of its options.

A field's type, default and annotation say all there is to say of an option. The command line, ``--set``, the library's
keywords, the grid, the references and ``diff`` are computed from them (:mod:`memcalc.specs.options`).
"""

from typing import Annotated, Literal, get_args

from pydantic import Field

from memcalc.specs.adapters import AdapterDtype, AlsoTrained, Lora, Quantization, lora_of
from memcalc.specs.strict import ADAPTERS, JOB, MEMORY, PARALLELISM, STEP_TIME, Frozen, Option

FrameworkName = Literal[
    "fsdp2", "fsdp1", "ddp", "deepspeed", "megatron", "hf", "torchtitan", "torchtune", "litgpt", "plain"
]
Precision = Literal["fp32", "fp16-mixed", "bf16-mixed", "fp16-autocast", "bf16-autocast", "bf16", "fp8-mixed"]
MomentType = Literal["fp32", "bf16", "fp16", "fp8"]
Optimizer = Literal[
    "adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit", "adafactor", "lion", "lion-8bit", "sgd", "sgd-momentum",
    "muon", "soap", "galore-adamw",
]  # fmt: skip
OptimizerImpl = Literal["fused", "foreach", "loop"]
Schedule = Literal[
    "1f1b", "interleaved", "gpipe", "interleaved-zb", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe-v"
]  # fmt: skip
AttentionImpl = Literal["flash", "efficient", "cudnn", "math", "eager", "sdpa"]
Loss = Literal["standard", "chunked", "fused-kernel", "fused-linear", "parallel", "triton"]
Kernels = Literal["model", "fused", "te"]
Packing = Literal["none", "int8", "int4"]
Compile = Literal["none", "blocks", "blocks+loss", "model", "loss"]
ContextParallel = Literal["ring", "allgather", "a2a"]
Dispatcher = Literal["alltoall", "deepep", "allgather"]
CudaGraphs = Literal["none", "partial", "full"]
ZeroGather = Literal["allgather", "broadcast"]
Vision = Literal["trained", "projector", "frozen"]
Offload = Literal["optimizer", "params", "activations"]
Tier = Literal["cpu", "nvme", "cxl"]

FRAMEWORKS: tuple[str, ...] = get_args(FrameworkName)
PRECISIONS: tuple[str, ...] = get_args(Precision)
SCHEDULES: tuple[str, ...] = get_args(Schedule)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
_ELEMENTS = Field(ge=0, le=10**18)  # DeepSpeed's files say 1e14 for no bound


class Strategy(Frozen):
    """One way to train, every field resolved. Degrees are numbers of ranks; ``dp`` follows from the rest."""

    # fmt: off
    framework: Annotated[
        str,
        Option("A name of :data:`FRAMEWORKS`, also with an era (``hf@4.46``).", panel=JOB, metavar="NAME[@ERA]",
            help="{values}; an era is a version or a month.", kind="framework", values=FRAMEWORKS, step=15),
    ] = "fsdp2"
    precision: Annotated[
        Precision,
        Option("Widths of weights, master copies and arithmetic; autocast where the name says so.", panel=JOB,
            metavar="NAME", help="{values}.", axis=True, searched=True, step=16, remedy=10),
    ] = "bf16-mixed"
    optimizer: Annotated[
        Optimizer,
        Option("Optimizer: the states of each trained parameter.", panel=MEMORY, metavar="NAME", help="{values}.",
            searched=True, step=25),
    ] = "adamw"
    optimizer_impl: Annotated[
        OptimizerImpl,
        Option("One kernel for all tensors, one for each list of them, or one for each tensor.", panel=MEMORY,
            metavar="NAME", help="{values}.", step=26),
    ] = "foreach"
    optimizer_in_backward: Annotated[
        bool, Option("Update weights during backward (frees gradients).", panel=MEMORY, step=27)
    ] = False
    zero: Annotated[
        Literal[0, 1, 2, 3],
        Option("ZeRO stage, 0 to 3; FSDP's 3 reshards after forward, 2 not.", panel=PARALLELISM, metavar="0|1|2|3",
            kind="stage", axis=True, searched=True, step=40, remedy=3),
    ] = 0
    dp: Annotated[
        int, Option("Data-parallel ranks, context parallelism left out.", "ranks", derived=True, axis=True), Field(gt=0)
    ] = 1
    tp: Annotated[
        int,
        Option("Tensor-parallel ranks.", "ranks", PARALLELISM, "N",
            axis=True, searched=True, degree="ranks", step=31, remedy=4),
        Field(gt=0),
    ] = 1
    sp: Annotated[
        bool,
        Option("Sequence parallelism with TP.", panel=PARALLELISM,
            axis=True, searched=True, negative=True, step=32, remedy=5),
    ] = False
    pp: Annotated[
        int,
        Option("Pipeline stages.", "ranks", PARALLELISM, "N",
            axis=True, searched=True, degree="ranks", step=33, remedy=6),
        Field(gt=0),
    ] = 1
    pp_schedule: Annotated[
        Schedule,
        Option("In which order a pipeline runs its passes.", panel=PARALLELISM, metavar="NAME",
            help="{values}; what the framework runs.", axis=True, searched=True, step=34, remedy=11),
    ] = "1f1b"
    vpp: Annotated[
        int,
        Option("Virtual stages per pipeline stage.", "chunks", PARALLELISM, "N",
            axis=True, searched=True, step=35, remedy=12),
        Field(gt=0),
    ] = 1
    cp: Annotated[
        int,
        Option("Context-parallel ranks.", "ranks", PARALLELISM, "N",
            axis=True, searched=True, degree="ranks", step=36, remedy=7),
        Field(gt=0),
    ] = 1
    ep: Annotated[
        int,
        Option("Expert-parallel ranks.", "ranks", PARALLELISM, "N",
            axis=True, searched=True, degree="experts", step=38, remedy=8),
        Field(gt=0),
    ] = 1
    dp_replicate: Annotated[
        int,
        Option("Replicas of the shards (HSDP): ZeRO and FSDP shard over dp / dp-replicate ranks, and all-reduce "
            "between the replicas.", "replicas", PARALLELISM, "N",
            axis=True, searched=True, degree="replicas", step=43, remedy=13),
        Field(gt=0),
    ] = 1
    recompute: Annotated[
        str,
        Option("A policy of :mod:`memcalc.formulas.recompute`, such as ``full``, ``every-2`` or ``modules:mlp``.",
            panel=MEMORY, metavar="POLICY", kind="policy", axis=True, searched=True, step=50, remedy=1,
            help="none, full, every-K, segments-K, sqrt, attention, mlp, submodules, selective-ops, "
            "selective-core-attn, modules:A,B, block-N or uniform-N."),
    ] = "none"
    offload: Annotated[
        tuple[Offload, ...],
        Option("What leaves the GPU while it is not needed.", panel=MEMORY, metavar="LIST", kind="offload",
            help="none, or any of {list}, with commas.", axis=True, searched=True, step=41, remedy=9),
    ] = ()
    offload_to: Annotated[
        Tier,
        Option("Where what is offloaded goes: host memory, NVMe or CXL memory.", panel=MEMORY, metavar="TIER",
            help="{values}.", searched=True, step=42),
    ] = "cpu"
    compress_activations: Annotated[
        Packing,
        Option("What hooks pack the saved tensors of blocks into, with an fp32 scale for each 128 elements.",
            panel=MEMORY, metavar="NAME", help="{values}: what hooks pack the saved tensors of blocks into.", step=51),
    ] = "none"
    attention: Annotated[
        AttentionImpl,
        Option("The attention kernel; `sdpa` is what PyTorch picks for each block.", panel=MEMORY, metavar="NAME",
            help="{values}.", step=51),
    ] = "flash"
    loss: Annotated[
        Loss, Option("How the loss is computed from the last hidden states.", panel=MEMORY, metavar="NAME",
            help="{values}.", step=52),
    ] = "standard"
    kernels: Annotated[
        Kernels,
        Option("Norm and activation kernels: model, fused or te.", panel=MEMORY, metavar="NAME", step=53),
    ] = "model"
    reduce_dtype: Annotated[
        Literal["fp32", "bf16"],
        Option("Width in which FSDP and Megatron-LM reduce gradients; Megatron-LM also keeps them so."),
    ] = "fp32"
    precision_aware: Annotated[
        bool, Option("TransformerEngine's Adam holds the main weights and narrow states (Megatron-LM).")
    ] = False
    main_params_dtype: Annotated[
        Literal["fp32", "fp16"], Option("Width of its main weights; beside bf16 weights fp32 is their low 16 bits.")
    ] = "fp32"
    exp_avg_dtype: Annotated[MomentType, Option("Width of its first moment.")] = "fp32"
    exp_avg_sq_dtype: Annotated[MomentType, Option("Width of its second moment.")] = "fp32"
    checkpoint: Annotated[
        Literal["", "reentrant", "reentrant-inside", "non-reentrant"],
        Option("How checkpoints run; as the framework does it where empty. Reentrant ones stand around FSDP 1's units, "
            "as Transformers calls them, or inside of these (reentrant-inside)."),
    ] = ""
    compile: Annotated[
        Compile,
        Option("What ``torch.compile`` compiles.", panel=MEMORY, metavar="NAME", help="{values}.", step=54),
    ] = "none"
    cp_kind: Annotated[
        ContextParallel,
        Option("How context-parallel ranks share keys and values.", panel=PARALLELISM, metavar="NAME",
            help="{values}.", after="cp", step=37),
    ] = "ring"
    etp: Annotated[int, Option("Tensor-parallel ranks of an expert; as TP where 0.", "ranks"), Field(ge=0)] = 0
    moe_dispatcher: Annotated[
        Dispatcher,
        Option("How tokens reach their experts: one copy for each expert (alltoall), one for each node and from there "
            "for each rank (deepep: DeepEP, HybridEP), or all tokens to all ranks (allgather).", panel=STEP_TIME,
            metavar="NAME", needs="ep"),
    ] = "alltoall"
    expert_imbalance: Annotated[
        float,
        Option("Tokens of the busiest expert-parallel rank over the mean of all.", "-", STEP_TIME, "X",
            "Tokens of the busiest expert-parallel rank over the mean: {default}, or 1 where balance is forced.",
            kind="factor", most=1000, needs="experts"),
        Field(ge=1),
    ] = 1.1
    ep_overlap: Annotated[
        bool,
        Option("Tokens of one micro-batch travel while another computes (Megatron-LM's "
            "``--overlap-moe-expert-parallel-comm``, DualPipe).", panel=STEP_TIME, needs="ep",
            uncounted="tensors of the micro-batch whose tokens travel",
            help="Tokens of one micro-batch travel while another computes (Megatron-LM)."),
    ] = False
    tp_comm_overlap: Annotated[
        bool,
        Option("Products are cut into parts that overlap with their tensor-parallel messages (Megatron-LM's "
            "``--tp-comm-overlap``, torchtitan's async TP).", panel=STEP_TIME, needs="tp",
            uncounted="buffers for the messages of split products",
            help="Products are cut into parts that overlap with their tensor-parallel messages (Megatron-LM, "
            "torchtitan's async TP)."),
    ] = False
    cuda_graphs: Annotated[
        CudaGraphs,
        Option("How much of a block is launched as a CUDA graph.", panel=STEP_TIME, metavar="NAME",
            uncounted="pools of CUDA graphs",
            help="How much of a block is launched as a CUDA graph: {values}."),
    ] = "none"
    zero_gather: Annotated[
        ZeroGather,
        Option("How updated weights reach all ranks under ZeRO-1 and 2.", panel=STEP_TIME, metavar="NAME",
            help="How updated weights reach all ranks under ZeRO-1 and 2: {values} (rank by rank, as in InternEvo)."),
    ] = "allgather"
    expert_overload: Annotated[
        float,
        Option("Rows of the experts on the fullest rank over an equal share: uneven routing, or the capacity to which "
            "Megatron-LM pads each expert.", "-", kind="factor", most=1000),
        Field(ge=1),
    ] = 1.0
    flash_version: Annotated[int, Option("Generation of FlashAttention: 1, 2 or 3.", "-"), Field(ge=1, le=3)] = 2
    experts_padded: Annotated[bool, Option("Experts are padded to a capacity: the host waits for no count.")] = False
    mtp: Annotated[int, Option("Blocks that predict further tokens.", "blocks"), Field(ge=0, le=64)] = 0
    microbatch_group: Annotated[
        int,
        Option("Micro-batches that pass one model chunk before the next chunk's turn; as many as stages where 0.",
            "micro-batches"),
        Field(ge=0),
    ] = 0
    first_stage_layers: Annotated[
        int, Option("Blocks of the first pipeline stage; an equal share where 0.", "blocks"), Field(ge=0)
    ] = 0
    last_stage_layers: Annotated[
        int, Option("Blocks of the last pipeline stage; an equal share where 0.", "blocks"), Field(ge=0)
    ] = 0
    embedding_in_split: Annotated[bool, Option("The embedding counts as a block in the split over stages.")] = False
    loss_in_split: Annotated[bool, Option("The loss counts as a block in the split over stages.")] = False
    wgrad_fusion: Annotated[
        bool, Option("Weight gradients are added to the gradient buffer by the matmul itself (Megatron-LM).")
    ] = True
    float8: Annotated[
        Literal["", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8", "nvfp4"],
        Option("How products in 8 bits (under nvfp4 in 4) scale their inputs; as the framework does it where empty. "
            "torchao keeps those inputs in 16 bits, TransformerEngine as it multiplies them. Without such products, "
            "what the precision-aware optimizer is told: tensorwise by Megatron-Bridge."),
    ] = ""
    float8_all_gather: Annotated[bool, Option("FSDP gathers blocks in float8; Megatron-LM's weights are 8-bit "
        "themselves (``--fp8-param-gather``)."),
    ] = False
    float8_attention: Annotated[bool, Option("Attention runs in 8 bits (``fp8_dot_product_attention``).")] = False
    float8_activation: Annotated[bool, Option("Gated activations keep 8-bit inputs (``fp8_input_store``).")] = False
    float8_transpose_cache: Annotated[bool, Option("8-bit weights stay transposed too, where products need it.")] = True
    fsdp_schedule: Annotated[
        Literal["default", "simple"],
        Option("`simple`: gathers and reductions are part of the compiled graph, on the compute stream (SimpleFSDP)."),
    ] = "default"
    reshard: Annotated[
        Literal["default", "always", "never"],
        Option("Which blocks FSDP shards again after forward; by default as the framework does it. `always` takes in "
            "the unit of the head (FSDP 2 from PyTorch 2.8 on), so that a loss outside of the model runs without it."),
    ] = "default"
    expandable_segments: Annotated[
        bool, Option("The caching allocator grows its segments (``PYTORCH_CUDA_ALLOC_CONF``).")
    ] = False
    lora: Annotated[
        str,
        Option("Rank and targets of the adapters, as in ``16:q,k,v,o``; empty where the weights are trained.",
            panel=ADAPTERS, metavar="R[:TARGETS]", alone="usual", kind="lora", step=21,
            help="LoRA rank: train adapters instead of the weights; without R the usual rank."),
    ] = ""
    adapter_dtype: Annotated[
        AdapterDtype,
        Option("Width of the adapters and their states.", panel=ADAPTERS, metavar="DTYPE",
            help="{values}: the adapters and their states.", needs_lora=True, step=22),
    ] = "fp32"
    autocast: Annotated[
        bool,
        Option("Autocast over 16-bit weights.", panel=ADAPTERS, help="Autocast over a 16-bit base.", negative=True,
            step=24),
    ] = False
    also_train: Annotated[
        tuple[AlsoTrained, ...],
        Option("Layers trained in full.", panel=ADAPTERS, metavar="LIST", kind="parts",
            help="Layers trained in full: {list}.", needs_lora=True, step=23),
    ] = ()
    quantize: Annotated[
        Quantization,
        Option("How the frozen base is stored.", panel=ADAPTERS, metavar="NAME", help="Base weights: {values}.",
            needs_lora=True, step=20),
    ] = "none"
    lora_dropout: Annotated[
        float,
        Option("Probability of the dropout before an adapter.", "probability", group="workload", needs_lora=True),
        Field(ge=0.0, lt=1.0),
    ] = 0.0
    lora_kernels: Annotated[
        Literal["model", "fused", "dora"], Option("Op by op, one fused function each, or PEFT's DoRA.", needs_lora=True)
    ] = "model"
    lora_classes: Annotated[
        Literal["", "bridge", "bridge-each", "swift"],
        Option("Whose adapters stand beside Megatron-LM's layers: Megatron-Bridge's and NeMo's, one for all experts of "
            "a rank (bridge, also where empty) or one for each (bridge-each), or ms-swift's.", needs_lora=True),
    ] = ""
    gptq_group: Annotated[
        int, Option("Inputs that share a scale under GPTQ; 0 for all.", "elements", needs_lora=True), Field(ge=0)] = 128
    quantize_experts: Annotated[
        bool, Option("Stacked experts are quantized too, and made whole in each forward (axolotl).", needs_lora=True)
    ] = False
    frozen_fp32: Annotated[bool, Option("Frozen weights stay in fp32 under FSDP.", needs_lora=True)] = False
    prepare_kbit: Annotated[bool,
        Option("Norms and the residual stream are fp32 over a quantized base (PEFT, TRL).", needs_lora=True)] = False
    kbit_ends: Annotated[bool, Option("prepare_kbit casts embedding and head too (PEFT).", needs_lora=True)] = False
    kbit_experts: Annotated[bool,
        Option("Stacked experts are fp32 where the rest of the base is quantized (PEFT).", needs_lora=True)] = False
    tiled_loss: Annotated[bool, Option("fused-linear is TRL's loss in tiles, since its 1.15; else Liger's.")] = False
    uncast_loss: Annotated[bool,
        Option("The loop's own cross entropy takes 16-bit logits, and no autocast widens them.")] = False
    sgd_weight_decay: Annotated[
        bool, Option("SGD has a weight decay, which PyTorch adds to a copy of all gradients, or of one after another.")
    ] = False
    wide_embedding_moments: Annotated[
        bool, Option("Embedding tables keep 32-bit moments under an 8-bit optimizer (Transformers' Trainer).")
    ] = False
    vision: Annotated[
        Vision,
        Option("What is trained of a model's vision part: all of it, its projector only, or nothing.", panel=MEMORY,
            metavar="NAME", help="What is trained of the vision part: {values}; default {default}.", step=24),
    ] = "trained"
    galore_rank: Annotated[
        int | None, Option("Rank of the gradients that GaLore projects; 128 where None.", "rows"), Field(gt=0)
    ] = None
    galore_targets: Annotated[
        tuple[str, ...],
        Option("Linear layers whose gradients GaLore projects, as in ``q,k,v,o`` or ``attention``; all in the blocks "
            "where empty.", kind="targets"),
    ] = ()
    bucket_view: Annotated[
        bool, Option("DDP's gradients are views of its buckets, not copied into them (``gradient_as_bucket_view``).")
    ] = False
    whole_accumulation: Annotated[
        bool | None,
        Option("FSDP adds up the gradients of all micro-batches but the last unsharded (``no_sync``); as the framework "
            "does it where None."),
    ] = None
    partition_activations: Annotated[
        bool, Option("Checkpointed inputs are kept in parts, one on each tensor-parallel rank (DeepSpeed).")
    ] = False
    grad_accum_dtype: Annotated[Literal["", "fp32", "bf16", "fp16"],
        Option("Width of DeepSpeed's sums of gradients; the weights' if empty.")] = ""
    reduce_bucket_size: Annotated[
        int | None, Option("A bucket of reductions; the framework's own where None.", "elements"), _ELEMENTS
    ] = None
    overlap_comm: Annotated[bool | None,
        Option("Gradients are reduced beside backward (DeepSpeed, Megatron-LM); its own way where None.")] = None
    overlap_param_gather: Annotated[bool | None,
        Option("Updated weights are gathered beside the next forward (Megatron-LM); so where None.")] = None
    overlap_p2p: Annotated[bool | None,
        Option("Interleaved stages send beside other chunks' passes (Megatron-LM); so where None.")] = None
    zero_prefetch_bucket: Annotated[int | None, Option("What ZeRO-3 gathers ahead.", "elements"), _ELEMENTS] = None
    persistence_threshold: Annotated[
        int | None, Option("Size below which ZeRO-3 keeps a parameter whole.", "elements"), _ELEMENTS
    ] = None
    max_live_parameters: Annotated[
        int | None, Option("Gathered parameters beyond which ZeRO-3 gathers nothing ahead.", "elements"), _ELEMENTS
    ] = None
    sub_group_size: Annotated[
        int | None, Option("Part of its shard that ZeRO-3 updates at a time.", "elements"), _ELEMENTS
    ] = None
    micro_batch: Annotated[
        int,
        Option("Sequences per forward pass on one rank.", "sequences", JOB, "N", axis=True, searched=True,
            after="seq_len", step=90, remedy=2),
        Field(gt=0),
    ] = 1
    # fmt: on

    @property
    def gpus(self) -> int:
        """Ranks in all [-]."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def adapters(self) -> Lora | None:
        """The adapters; None where the weights themselves are trained."""
        return lora_of(self.lora)
