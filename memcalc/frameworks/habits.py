"""The columns by which frameworks differ. A formula never asks which framework it serves: it reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from memcalc.frameworks.capability import Capabilities
from memcalc.frameworks.losses import Loss

if TYPE_CHECKING:
    from memcalc.specs.block import Block, MixtureOfExperts, Mlp, Norm
    from memcalc.specs.model import BlockGroup, Model

ONE_KERNEL = {"gelu_new": "gelu_tanh", "gelu_python": "gelu", "gelu_fast": "gelu_tanh", "gelu_bloom": "gelu",
              "quick_gelu": "gelu"}  # fmt: skip
"""Activations that Transformers writes out, as the kernel that computes the same function."""


@dataclass(frozen=True)
class OwnCode:
    """Fields of the model's records that the framework's code decides, whatever the architecture."""

    attention: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`memcalc.specs.block.Attention`."""
    mlp: dict[str, Any] = field(default_factory=dict)
    """Of a dense MLP."""
    norm: dict[str, Any] = field(default_factory=dict)
    """Of a norm."""
    block: dict[str, Any] = field(default_factory=dict)
    """Of a block."""
    model: dict[str, Any] = field(default_factory=dict)
    """Of the model."""


def rewritten(model: Model, code: OwnCode | None) -> Model:
    """The architecture as the framework writes it; itself where the framework runs the model's own class."""
    if code is None:
        return model
    groups = tuple(_group(group, code) for group in model.groups)
    final = model.final_norm and _norm(model.final_norm, code)
    return model.model_copy(update={**code.model, "groups": groups, "final_norm": final})


def _group(group: BlockGroup, code: OwnCode) -> BlockGroup:
    return group.model_copy(update={"block": _block(group.block, code)})


def _block(block: Block, code: OwnCode) -> Block:
    attention = block.attention
    if attention is not None:
        norms = _norm(attention.qk_norm_kind, code)
        attention = attention.model_copy(update={**code.attention, "qk_norm_kind": norms})
    changed = {"attention": attention, "mlp": block.mlp and _mlp(block.mlp, code), "norm": _norm(block.norm, code)}
    return block.model_copy(update={**code.block, **changed})


def _mlp(mlp: Mlp | MixtureOfExperts, code: OwnCode) -> Mlp | MixtureOfExperts:
    fields = code.mlp if hasattr(mlp, "packed") else {}
    return mlp.model_copy(update={**fields, "activation": ONE_KERNEL.get(mlp.activation, mlp.activation)})


def _norm(norm: Norm, code: OwnCode) -> Norm:
    return norm.model_copy(update=code.norm) if norm.kind == "rmsnorm" else norm


class Widths(NamedTuple):
    """Bytes an element of each copy of a parameter."""

    parameter: int
    """The persistent weight (the shard, under FSDP)."""
    gradient: int
    """What backward leaves for the optimizer; of a shard, under FSDP."""
    master: int
    """A second, fp32 weight held by the optimizer; 0 where the parameter itself is fp32 or there is none."""
    moment: int
    """Each of the optimizer's moments; the first where the second has a width of its own."""
    compute: int
    """The weight that takes part in a matmul; what FSDP and ZeRO-3 gather."""
    cached: int
    """16-bit copies that autocast keeps from forward to backward."""
    step_gradient: int = 0
    """An fp32 copy of the gradient shard that the step makes."""
    second_moment: int = 0
    """Adam's second moment where it may differ from the first; else 0."""


class Bucket(NamedTuple):
    """How large a part of the gradients is that is reduced at once: the largest that is given."""

    elements: int = 0
    """However many ranks take part."""
    elements_per_rank: int = 0
    """For each rank that takes part."""
    bytes: int = 0
    """Where the framework states it so."""


TORCH_BUCKET = Bucket(bytes=25 * 2**20)
"""Of torch's DDP: ``bucket_cap_mb``."""


@dataclass(frozen=True, eq=False, repr=False)
class Habits:
    """What one framework does, as columns for the formulas."""

    name: str
    """The word of ``--framework``."""
    zero: tuple[int, ...]
    """Sharding stages that exist; the first is the default of `estimate`."""
    widths: dict[str, Widths]
    """By precision; a precision that is absent does not exist in the framework."""
    source: str
    """The code that was read, with its version."""
    capabilities: Capabilities
    """What the framework can be told."""
    tensor_parallel: bool = False
    """Whether TP, SP, PP, CP and EP exist."""
    lacks: tuple[str, ...] = ()
    """Those of them that do not, all the same."""
    full_shard: bool = False
    """FSDP: stage 2 and 3 shard all states; stage 0, where it exists, is plain training of fp32 or 16-bit weights."""
    gather: str = "none"
    """`blocks`: units are gathered block by block with a prefetch (FSDP); `live`: up to 10^9 parameters (ZeRO-3)."""
    flat_units: bool = False
    """Units are flat parameters, gathered in a stream of their own (FSDP 1)."""
    casts_inputs: bool = False
    """Each unit casts what it is given to the width of its weights (``cast_forward_inputs`` of FSDP 2)."""
    unsharded_alone: bool = False
    """A single data-parallel rank has no FSDP: stage 0, which is for it alone (torchtitan until April 2026)."""
    split_root: bool = False
    """The embedding is a unit of its own, apart from final norm and head; else the three are one (FSDP)."""
    keeps_last_block: bool = False
    """Under default resharding the last block stays whole from forward to backward (FSDP)."""
    reshards_root: bool = False
    """Resharding ``always`` takes in the unit of the head (FSDP 2 since torch 2.8)."""
    schedules: tuple[str, ...] = ("1f1b",)
    """What its pipelines run."""
    fork_schedules: tuple[str, ...] = ()
    """What a public fork of it runs besides."""
    fork: str = ""
    """The name of that fork."""
    equal_rounds: bool = False
    """Interleaved micro-batches are shared out over equal rounds (PyTorch); else a group has one for each stage."""
    even_chunks: bool = False
    """Every model chunk must have as many blocks as the next (Megatron-LM)."""
    pipeline_accumulates_whole: bool = False
    """Under a pipeline, gradients of all micro-batches but the last are added unsharded (FSDP 2)."""
    pipeline_keeps_weights: bool = False
    """Under a pipeline, weights are not sharded again after forward unless that is asked for (torchtitan)."""
    ends_in_split: bool = False
    """Embedding and head count as a block each where blocks are shared out over stages, unless the job says else."""
    pipeline_keeps_outputs: bool = False
    """A pipeline stage keeps the outputs of all micro-batches until the step ends, the last one the logits."""
    expandable_segments: bool = False
    """The framework's own launcher turns expandable segments on."""
    zero_optimizer: Zero | None = None
    """DeepSpeed's ZeRO; None elsewhere."""
    pipeline_engine: str = "none"
    """DeepSpeed's pipeline engine: `pipelines`, if it has several stages; `always` (Megatron-DeepSpeed to 2022)."""
    gradients_follow_optimizer: bool = False
    """With an offloaded optimizer, gradient shards go to the host as they are reduced (DeepSpeed, stages 2 and 3)."""
    offload_streams: bool = False
    """Offloaded activations move on a stream of their own; else each copy is waited for (``save_on_cpu``)."""
    gradient_copy: bool = False
    """Bucket buffers hold a second copy of all gradients (DDP without ``gradient_as_bucket_view``)."""
    wraps_replicas: bool = False
    """Several ranks that share no state are wrapped in DDP, whose buckets are such a copy."""
    broadcasts_ahead: bool = False
    """DDP's first broadcast leaves a cache as large as the weights (PyTorch before 2.8)."""
    narrow_gradients: bool = False
    """Gradients are added up and reduced in 16 bits where ``reduce_dtype`` says so (Megatron)."""
    own_main_weights: bool = False
    """Under 8-bit recipes other than delayed, fp32 main weights stay with Megatron-LM's own optimizer (core 0.13)."""
    persistent_gradients: bool = False
    """One contiguous gradient buffer lives all the time (Megatron)."""
    adds_gradients: bool = False
    """Weight gradients are added to earlier ones, or to the buffer, as soon as they are made."""
    bucket: Bucket = TORCH_BUCKET
    """Gradients are reduced in parts of this size; by default that of torch's DDP."""
    overlaps_reduction: bool = True
    """Gradients are reduced over data-parallel ranks while backward still runs."""
    overlaps_gather: bool = True
    """Weights that were updated in parts are gathered while the next forward runs."""
    overlaps_input_gradients: bool = False
    """The reduction of a column-parallel layer's input gradient over TP ranks runs beside its weight gradient."""
    overlaps_stages: bool = False
    """What chunks of interleaved stages send, reduce and gather runs beside the passes of other chunks."""
    reduces_each_input: bool = False
    """Each column-parallel layer reduces the gradient of its input on its own, gate and up too; else layers that read
    the same tensor reduce it together. Under sequence parallelism the input is gathered, and reduced, once."""
    reduces_whole: bool = False
    """At stage 1 every rank has all reduced gradients before it takes its part; else a part is reduced to its rank."""
    reduction_width: int = 0
    """Bytes an element of gradients that are cast for their reduction; 0 where they go as they are."""
    flattened_gradients: bool = False
    """Gradients are flattened for their all-reduce; parameters refer to those until the next one (Megatron, 2021)."""
    main_gradients: int = 0
    """Bytes an element of gradients that the optimizer's own parameters keep from one step to the next."""
    vocab_multiple: int = 0
    """The vocabulary is padded to a multiple of this times TP; 0 where it is not padded."""
    schedule_variables: bool = False
    """The pipeline's loop refers to tensors that it sent or received before."""
    makes_masks: bool = False
    """Each micro-batch has an attention mask of its own, whatever the data loader does."""
    keeps_stage_outputs: bool = False
    """A stage's outputs wait for their backward whole, after they were sent."""
    handle_workspaces: bool = True
    """cuBLAS workspaces lie in the caching allocator (PyTorch 1.13 and later, ``CublasHandlePool.cpp``)."""
    float8: tuple[str, ...] = ()
    """How it scales the inputs of 8-bit products; the first is its default."""
    communicators: tuple[str, ...] = ("tp", "pp", "cp", "ep", "dp_replicate")
    """Groups of ranks with a communicator beside the world's; with `dp`, a group of all ranks has its own too."""
    engine: bool = False
    """TransformerEngine's modules run, with workspaces and dummy weight gradients of their own."""
    kernels: str = "model"
    """Who writes norms, rotary embedding and activations by default: `model`, `fused` or `te`."""
    rotary: str = ""
    """`fused`: the rotary embedding in one step whatever ``kernels`` says, as complex numbers (torchtitan)."""
    repeats_keys: bool = False
    """Keys and values are repeated to all query heads before a fused attention kernel."""
    gathers_inputs: bool = False
    """With sequence parallelism, a column-parallel layer keeps its gathered input (DTensor)."""
    saved_attention: tuple[str, ...] = ("flash", "efficient", "math", "eager", "sdpa")
    """Attention kernels whose outputs selective recomputation of operators keeps."""
    keeps_exchange: tuple[str, ...] = ()
    """Architectures of which the same keeps the outputs of all-to-all exchanges."""
    keeps_biased: bool = False
    """It keeps the outputs of all layers with a bias (``addmm``) too."""
    leaves_router: bool = False
    """It neither keeps nor counts a router's product."""
    compiles_parts: bool = False
    """Of a compiled block with experts each module is compiled apart, inside of the block's checkpoint (torchtitan)."""
    exchanges_rows: bool = False
    """Rows of experts are sorted again after their exchange, while the rows that were sent stay (torchtitan)."""
    graph_keeps_matmuls: bool = False
    """A captured step's selective recomputation keeps the outputs of all matmuls (torchtitan's graph trainer)."""
    packed_weights: bool = False
    """Queries, keys and values are one weight and so are gate and up, whatever the architecture (Megatron-LM)."""
    layer_wise: bool = False
    """Muon and SOAP of NVIDIA's Emerging-Optimizers update whole tensors: ranks of one state have different ones."""
    optimizer_impl: str = "foreach"
    """The form of the optimizer's step by default: `foreach`, `fused` or `loop`."""
    loss: str = "standard"
    """How its own configuration computes the loss where nothing is said."""
    tensor_loss: str = ""
    """The same under tensor parallelism; empty where it does not differ."""
    recompute: str = "none"
    """What its own configuration recomputes where nothing is said."""
    sharded_recompute: str = ""
    """The same where ranks share the states; empty where it does not differ."""
    shares_optimizer: bool = False
    """Its own recipes share the optimizer out over data-parallel ranks wherever all weights are trained."""
    shards_over_ranks: bool = False
    """Without a stage, several GPUs share all states and a single one trains plainly."""
    cp_kind: str = "ring"
    """How context parallelism exchanges keys and values where nothing is said."""
    attention_library: str = ""
    """`te`: Transformer Engine picks the kernel by the GPU; else whose time `flash` takes (empty: FlashAttention)."""
    calls_sdpa: bool = True
    """Classes of models call PyTorch's fused attention by themselves, where they can (Transformers from 4.36)."""
    reduces_as: str = ""
    """In which dtype FSDP reduces gradients by default: `compute` (FSDP 1), `weights` (no policy); else fp32."""
    autocast_over_shards: bool = False
    """Autocast runs over FSDP's own mixed precision (Accelerate)."""
    autocasts_half: bool = False
    """The loss is scaled for a frozen base in fp16 by the switch that turns autocast on (``fp16`` of the Trainer)."""
    vocab_parallel: bool = False
    """Logits are divided by TP whatever the loss."""
    reentrant: bool = False
    """Checkpoints are autograd functions of their own, which hold output and incoming gradient through backward."""
    stops_early: bool = True
    """Other checkpoints end with the last tensor that backward reads (torch 2.1, ``set_checkpoint_early_stop``)."""
    fills_experts: bool = False
    """Stacked experts are divided by their number, which is filled up to a multiple of the ranks (FSDP 2)."""
    checkpoints_first: bool = False
    """Of every K blocks the first is checkpointed, not the last (Transformers)."""
    zeroes_gradients: bool = False
    """Gradients are filled with zeros after a step, and so never go (``zero_grad`` before PyTorch 2.0)."""
    whole_accumulation: bool = False
    """Gradients of all micro-batches but the last are added up whole on each rank of FSDP (``no_sync``)."""
    mixed_units: bool = False
    """Adapters are in one flat parameter with the frozen weights of their block (FSDP 1, ``use_orig_params``)."""
    lora_rank: int = 16
    """Of adapters whose rank is not given (TRL ``ModelConfig.lora_r``)."""
    adapters_follow_base: bool = False
    """Adapters are made in the dtype of the model, whatever PEFT's version."""
    casts_adapters: bool = False
    """The engine casts the whole model to the 16 bits that it computes in, adapters too."""
    splits_packed: bool = False
    """Adapters can stand on the queries, keys or values of a packed projection alone."""
    quantised_head: bool = False
    """Quantisation takes in the head."""
    quantises_half: bool = False
    """Weights are quantised from fp16 whatever the precision (Lightning)."""
    expert_loop: bool = False
    """Routed experts run one after another (Transformers before 5.0)."""
    evaluation_cache: bool = False
    """An evaluation's forward returns keys and values of all layers (Transformers' Trainer before 5.0)."""
    evaluation_logits: bool = False
    """Liger's fused loss makes whole logits in an evaluation: nothing tells it to skip them (before April 2026)."""
    expert_modules: bool = False
    """Each routed expert is a module with weights of its own, not a part of stacked ones (litgpt)."""
    in_place_kernels: tuple[str, ...] = ()
    """Fused kernels that write over what they are given: norms (and rotary embeddings; Liger, unsloth), mlp (Liger)."""
    own_code: OwnCode | None = None
    """How the framework's own model code writes every architecture; None where it runs the model's own class."""
    allocator: str = "caching"
    """caching: PyTorch's, which is replayed; 2021: the same before PyTorch 1.13, its order of requests not known."""
    lazy_kernels: bool = True
    """CUDA 11.7 or later, which loads kernels when they are first used: before, the context holds all of them."""
    losses: dict[str, Loss] = field(default_factory=dict)
    """How each loss of the interface is computed."""

    @property
    def stacks_experts(self) -> bool:
        """Whether the weights of a block's routed experts are one tensor, not linear layers (Transformers from 5.0)."""
        return not (self.expert_loop or self.expert_modules)

    def moved(self, choice: tuple[str, ...]) -> tuple[str, ...]:
        """What leaves the GPU by one name: where states go with the parameters, the parameters alone are named."""
        with_states = self.full_shard and "params" in choice
        return tuple(part for part in choice if part != "optimizer") if with_states else choice


def like(base: Habits, name: str, **changes: Any) -> Habits:
    """The habits of a framework that differs from another in a few columns."""
    return replace(base, name=name, **changes)


class Zero(NamedTuple):
    """The habits of one era; sizes are DeepSpeed's own defaults [elements], where a job's configuration names none."""

    contiguous_from: int = 2
    """The lowest stage whose gradients are copied into a contiguous bucket that is allocated whole."""
    flat_gradients: bool = False
    """Stage 1 makes a flat copy of all gradients before it reduces them (until 0.3)."""
    flat_partitions: bool = True
    """Stage 3 keeps its bucket and the shares of the gradients in buffers that live all the time (since 0.6)."""
    overflow_at_once: bool = True
    """In fp16 stage 3 looks for an overflow in its whole share of the gradients at once (since 0.9.4)."""
    fp32_accumulation: bool = True
    """bf16 gradients can be accumulated in fp32: at stage 1 by an optimizer of its own (``BF16_Optimizer``)."""
    wide_without_zero: bool = False
    """That optimizer trains bf16 without ZeRO too, adding up in fp32 (until 0.17.5); later it runs pipelines alone."""
    bucket: int = 500_000_000
    """``reduce_bucket_size``."""
    gather_bucket: int = 500_000_000
    """``allgather_bucket_size``."""
    late_bucket: bool = False
    """Stages 1 and 2 make it when backward has its first gradient (since 0.18.3), not before backward."""
    late_moments: bool = False
    """ZeRO's moments appear at the first step (since 0.13.2), not in one that the engine makes as it starts."""
    masters_cloned: bool = False
    """Stage 3 clones fp32 copies of its weights (since 0.18.3), which stay until the next sub-group's are there."""
    overlap_from: int = 3
    """The lowest stage at which ``overlap_comm`` is on by default."""
    prefetch_bucket: int = 50_000_000
    """``stage3_prefetch_bucket_size``."""
    persistence: int = 100_000
    """``stage3_param_persistence_threshold``: smaller parameters stay whole."""
    max_live: int = 1_000_000_000
    """``stage3_max_live_parameters``: no prefetch beyond it."""
    max_reuse: int = 1_000_000_000
    """``stage3_max_reuse_distance``: parameters used again within it are not released."""
    sub_group: int = 1_000_000_000
    """``sub_group_size``: elements of a shard that stage 3 updates at a time."""
    staged_weights: bool = True
    """With an offloaded optimizer, stages 1 and 2 have a copy of their new weights on the host (since 0.16.10)."""
    swap_buffers: int = 4
    """``offload_optimizer.buffer_count``: each as large as a sub-group in fp32."""
    weight_buffers: int = 5
    """``offload_param.buffer_count``."""
    weight_buffer: int = 100_000_000
    """``offload_param.buffer_size``."""
    weights_in_host: int = 1_000_000_000
    """``offload_param.max_in_cpu``: of weights whose place is NVMe, what host memory keeps."""


# How each framework reads and writes checkpoints where a job's configuration says nothing of it, as data.
# A framework that is absent here leaves that to a script of its user, which nobody has read.

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
"""By framework: sequences a rank that evaluation takes (transformers 5.23 training_args.py); else those of training."""
