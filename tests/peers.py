"""What other calculators say of a run: their published formulas, in our own words, for comparison alone.

Each function takes a `Job` and gives bytes on one GPU, or `None` where the calculator has no answer for such a job.
None of them says which of the three figures it means (allocated, reserved, device), so it is held against whichever a
run has. Settings that they leave to their user keep their published defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memcalc.specs.block import Attention, LatentAttention, MixtureOfExperts, Mlp
from memcalc.specs.model import Model
from memcalc.specs.runs import Run
from memcalc.validation import job_of

ADAM = {"adamw"}
MIXED = {"bf16-mixed", "fp16-mixed"}
ATTENTION_ONLY = {"selective-core-attn", "modules:core_attn"}


@dataclass(frozen=True)
class Job:
    """The sizes that the calculators ask for."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of a dense MLP, 0 where every block is routed."""
    gated: bool
    rms: bool
    tied: bool
    vocab: int
    seq_len: int
    micro_batch: int = 1
    gpus: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    zero: int = 0
    micro_batches: int | None = None
    """Micro-batches a step, where it is known."""
    mixed: bool = True
    """16-bit weights with an fp32 master; else fp32."""
    recompute: str = "none"
    offload: frozenset[str] = frozenset()
    framework: str = ""
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    first_dense: int = 0
    latent: LatentAttention | None = None
    flash: bool = True

    @property
    def dp(self) -> int:
        """Data-parallel ranks [-]."""
        return self.gpus // (self.tp * self.pp)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch [-]."""
        return self.seq_len * self.micro_batch


# ------------------------------------------------------------------------------------- EleutherAI's transformer memory


def eleuther(job: Job) -> float | None:
    """EleutherAI/cookbook@069ae2e calc/calc_transformer_mem.py, with its defaults for the ZeRO buffers.

    Weights, gradients of 4 bytes, 12 bytes of optimizer, ZeRO's buckets, and activations after Table 2 of
    arXiv:1910.02054. States are divided by all GPUs; gradients and optimizer are not divided by TP or PP, and the
    scores of the attention count as stored unless all is recomputed: so it stands in the source.
    """
    if job.latent is not None:
        return None
    low = 2 if job.mixed else 4
    total = _eleuther_parameters(job)
    weights = total * low / (job.tp * job.pp) / (job.gpus if job.zero == 3 else 1)
    gradients = total * 4 / (job.gpus if job.zero >= 2 else 1)
    optimizer = total * 12 / (job.gpus if job.zero >= 1 else 1)
    buffers = 0.0
    if job.gpus > 1:
        buffers = (5e8 * (job.zero >= 1) + 1e9 * (job.zero == 3)) * low
    return weights + gradients + optimizer + buffers + _eleuther_activations(job)


def _eleuther_parameters(job: Job) -> float:
    """Two embeddings, learned positions, two norms with biases a block, and the matrices of the blocks held."""
    attention = 2 * (1 + job.kv_heads / job.heads) * job.layers * job.hidden**2
    mlp = (3 if job.gated else 2) * job.layers * job.hidden * (job.expert_ffn or job.ffn)
    rest = job.hidden * (2 * job.vocab + job.seq_len + 8 * job.layers + 2)
    return rest + attention + mlp * (job.experts / job.ep if job.experts else 1)


def _eleuther_activations(job: Job) -> float:
    """34 bytes an element of the residual stream in 16 bits, and 5 a score where not all is recomputed."""
    scores = 0.0 if job.recompute == "full" else 5 * job.heads * job.seq_len / job.hidden
    return job.tokens * job.hidden * job.layers * (34 + scores)


# ------------------------------------------------------------------------------------------ DeepSpeed's ZeRO estimators


def deepspeed(job: Job) -> float | None:
    """DeepSpeed's `estimate_zero2_…` and `estimate_zero3_model_states_mem_needs`: model states, no activations.

    docs/code-docs/source/memory.rst @0cca539: ZeRO-2 4P + 16P/n, ZeRO-3 18P/n and 4 bytes of the largest layer; with
    the optimizer on the CPU 2P, and 2P/n and the largest layer; with the parameters there too, the largest layer alone.
    """
    if job.zero != 3 and (job.zero, job.framework) != (2, "deepspeed"):  # FSDP's stage 2 is another thing
        return None
    if job.tp * job.pp * job.ep > 1 or not job.mixed:
        return None
    parameters = parameters_of(job)
    away = "optimizer" in job.offload or "params" in job.offload
    if job.zero == 2:
        return zero2(parameters, job.gpus, optimizer_on_cpu=away)
    largest = job.hidden * max(job.vocab, job.ffn, job.heads * job.head_dim)
    return zero3(parameters, largest, job.gpus, optimizer_on_cpu=away, parameters_on_cpu="params" in job.offload)


def zero2(parameters: int, gpus: int, *, optimizer_on_cpu: bool = False) -> int:
    """GPU bytes of the model states under ZeRO-2."""
    return 2 * parameters if optimizer_on_cpu else 4 * parameters + 16 * parameters // gpus


def zero3(
    parameters: int, largest: int, gpus: int, *, optimizer_on_cpu: bool = False, parameters_on_cpu: bool = False
) -> int:
    """GPU bytes of the model states under ZeRO-3."""
    if parameters_on_cpu:
        return 4 * largest
    return 4 * largest + (2 if optimizer_on_cpu else 18) * parameters // gpus


def parameters_of(job: Job) -> int:
    """Parameters by shape, norms and biases left out."""
    kv = job.kv_heads * job.head_dim
    attention = 2 * job.hidden * (job.heads * job.head_dim + kv)
    matrices = 3 if job.gated else 2
    routed = matrices * job.hidden * (job.experts * job.expert_ffn + job.shared_ffn)
    dense = job.first_dense if job.experts else job.layers
    mlp = dense * matrices * job.hidden * job.ffn + (job.layers - dense) * routed
    return job.layers * attention + mlp + (1 if job.tied else 2) * job.vocab * job.hidden


# --------------------------------------------------------------------------------------------- Megatron-LM's own report


def megatron(job: Job) -> float | None:
    """Megatron-LM@00caa53 megatron/training/theoretical_memory_usage.py, for Megatron's runs.

    18 bytes a parameter, or 6 + 12/d with the distributed optimizer, on the most loaded shard. Activations after
    Table 2 of arXiv:2205.05198 with sequence parallelism and selective recomputation, else 10 + 24/t bytes an element
    and 5% on top; no other recomputation is known to it.
    """
    if job.framework != "megatron" or not job.mixed:
        return None
    states = 6 + 12 / job.dp if job.zero >= 1 else 18
    tensor_sharded = job.sp and job.recompute in ATTENTION_ONLY
    activations = _megatron_with_sp(job) if tensor_sharded else _megatron_without_sp(job)
    return megatron_shard(job) * states + activations


def megatron_shard(job: Job) -> float:
    """Parameters of the most loaded shard: its share of the blocks, and the embedding (both without a pipeline)."""
    norm = 1 if job.rms else 2
    matrices = 3 / 2 if job.gated else 1
    attention = _megatron_attention(job, norm)
    dense = 2 * job.hidden * (job.ffn * matrices + norm) + attention
    widths = job.expert_ffn * job.experts + job.shared_ffn
    routed = 2 * job.hidden * (widths * matrices + norm) + attention
    first = job.first_dense if job.experts else job.layers
    blocks = dense * first + routed * (job.layers - first) + norm * job.hidden
    embedding = job.hidden * job.vocab
    second = embedding if not job.tied and job.pp == 1 else 0
    return (blocks / job.pp + embedding + second) / job.tp


def _megatron_attention(job: Job, norm: int) -> float:
    """Parameters of one attention, latent or grouped."""
    if job.latent is None:
        return 2 * job.hidden * job.heads * job.head_dim * (1 + job.kv_heads / job.heads)
    latent, rope = job.latent, job.latent.qk_rope_head_dim
    query = job.heads * (latent.qk_nope_head_dim + rope)
    rank = latent.q_lora_rank
    q = job.hidden * query if rank is None else rank * (job.hidden + query + norm)
    kv = latent.kv_lora_rank * (job.hidden + job.heads * (latent.qk_nope_head_dim + latent.v_head_dim) + norm)
    return q + kv + job.hidden * rope + job.heads * latent.v_head_dim * job.hidden


def _megatron_in_flight(job: Job) -> float:
    """Share of all layers' activations that the first stage holds."""
    if job.vpp > 1:
        return 1 + (job.pp - 1) / (job.pp * job.vpp)
    if job.pp > 1 and job.micro_batches is not None:
        return min(1.0, job.micro_batches / job.pp)
    return 1.0


def _megatron_with_sp(job: Job) -> float:
    blocks = job.tokens * job.hidden * (18 + 4 * job.ffn / job.hidden) * job.layers
    inputs = job.tokens * job.pp * (8 + job.hidden)
    loss = 4 * job.tokens * (job.hidden + job.vocab) if job.pp == 1 else 0
    return ((blocks + inputs) * _megatron_in_flight(job) + loss) / job.tp


def _megatron_without_sp(job: Job) -> float:
    blocks = job.tokens * job.hidden * (10 + 24 / job.tp) * job.layers
    inputs = job.tokens * job.pp * (8 + job.hidden)
    loss = 2 * job.tokens * (job.vocab / job.tp + job.hidden) if job.pp == 1 else 0
    return 1.05 * ((blocks + inputs) * _megatron_in_flight(job) + loss)


# --------------------------------------------------------------------------------------------------------- llm-analysis


def llm_analysis(job: Job) -> float | None:
    """cli99/llm-analysis@d841e40 llm_analysis/analysis.py: its `estimated_peak_memory_per_gpu`.

    Weights and optimizer, the larger of activations and gradients, and the larger of prefetched weights and the
    gradient of the loss; embeddings count as tied, 16-bit weights, fp32 gradients and 12 bytes of optimizer. A router,
    which is small, is sharded here as the attention is.
    """
    known = {"none", "full", "attention"} | ATTENTION_ONLY
    if job.latent is not None or job.recompute not in known or not job.mixed or job.first_dense:
        return None
    weights, optimizer, gradients = llm_analysis_states(job)
    activations = job.layers * llm_analysis_block(job) + _llm_analysis_outside(job)
    loss = 2 * job.vocab * job.tokens / job.tp
    return weights + optimizer + max(activations, gradients) + max(2 * _llm_analysis_layer(job), loss)


def llm_analysis_states(job: Job) -> tuple[float, float, float]:
    """Bytes of weights, optimizer and gradients on one GPU."""
    layers = job.layers // job.pp
    attention, router, mlp = _llm_analysis_parts(job)
    others = job.hidden * (job.vocab + 1) + layers * (attention + router)
    norms = layers * 2 * job.hidden

    def held(size: float, stage: int, norm_tp: int) -> float:
        shards, routed_shards = (job.dp, job.dp / job.ep) if job.zero >= stage else (1, 1)
        routed = layers * mlp / job.ep / job.tp / routed_shards
        return size * (others / job.tp / shards + routed + norms / norm_tp / shards)

    return held(2, 3, 1), held(12, 1, 1), held(4, 2, job.tp)


def _llm_analysis_parts(job: Job) -> tuple[float, float, float]:
    """Parameters of one block: attention, router, MLP of all experts."""
    kv_heads = max(job.kv_heads / job.tp, 1) * job.tp
    attention = 2 * job.hidden**2 * (1 + kv_heads / job.heads)
    experts = job.experts or 1
    mlp = (3 if job.gated else 2) * job.hidden * (job.expert_ffn or job.ffn) * experts
    return attention, job.hidden * experts if experts > 1 else 0, mlp


def _llm_analysis_layer(job: Job) -> float:
    """Bytes of one block's weights, gathered."""
    attention, router, mlp = _llm_analysis_parts(job)
    return 2 * ((attention + router + mlp / job.ep) / job.tp + 2 * job.hidden)


def llm_analysis_block(job: Job) -> float:
    """Bytes that one block keeps for one micro-batch."""
    element, sp = job.tokens * job.hidden, job.tp if job.sp else 1
    if job.recompute == "full":
        return 2 * element / job.tp
    norms = 2 * 4 * element / sp
    if job.recompute == "attention":
        return 2 * element / sp + _llm_analysis_mlp(job, sp) + norms
    scores = 0.0
    if job.recompute == "none":
        flash = 2 * element + 4 * job.heads * job.tokens
        scores = 2 * (flash if job.flash else 2 * job.heads * job.seq_len * job.tokens) / job.tp
    attention = 2 * (element / sp + 4 * element / job.tp) + scores + element / sp
    return attention + _llm_analysis_mlp(job, sp) + norms


def _llm_analysis_mlp(job: Job, sp: int) -> float:
    """Bytes that the MLP keeps: its input, and two tensors of the inner width; routed inputs once more an expert."""
    element, topk = job.tokens * job.hidden, job.topk or 1
    inner = 4 * job.tokens * (job.expert_ffn or job.ffn) * topk / job.tp
    if not job.experts:
        return 2 * element / sp + inner
    return 4 * element / sp + 2 * topk * (element + job.tokens) + 2 * element * topk / sp + inner


def _llm_analysis_outside(job: Job) -> float:
    """Bytes kept outside the blocks: embedding, logits and the last norm."""
    sp = job.tp if job.sp else 1
    return 2 * job.tokens * (job.hidden + job.vocab) / job.tp + 4 * job.tokens * job.hidden / sp


# --------------------------------------------------------------------------------------------------------------- a run

PEERS: dict[str, Callable[[Job], float | None]] = {
    "EleutherAI cookbook": eleuther,
    "DeepSpeed estimator": deepspeed,
    "Megatron-LM report": megatron,
    "llm-analysis": llm_analysis,
}


def job_for(run: Run, model: Model) -> Job | None:
    """Return a run as the calculators see it, or None where all of them are made for something else.

    They know the training of all weights of one tower with Adam; no adapters, no quantisation, no context parallelism.
    """
    words, _ = job_of(run)
    if int(words.get("cp", 1)) > 1:
        return None
    foreign = {"lora", "quantize", "also_train", "optimizer_in_backward"} & {name for name in words if words[name]}
    if foreign or words.get("optimizer", "adamw") not in ADAM or len({group.tower for group in model.groups}) > 1:
        return None
    precision = str(words.get("precision", "bf16-mixed"))
    if precision not in {*MIXED, "fp32", "bf16-autocast", "fp16-autocast"}:
        return None
    return Job(**_model_part(model), **_strategy_part(words, model), mixed=precision in MIXED)


def _model_part(model: Model) -> dict[str, Any]:
    """Return the sizes of a model."""
    block = model.groups[-1].block
    attention: Attention = block.attention
    dense = [group for group in model.groups if isinstance(group.block.mlp, Mlp)]
    routed = [group.block.mlp for group in model.groups if isinstance(group.block.mlp, MixtureOfExperts)]
    first = dense[0].block.mlp if dense else None
    sizes: dict[str, Any] = {
        "layers": model.num_layers,
        "hidden": model.hidden,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "ffn": first.ffn if isinstance(first, Mlp) else 0,
        "gated": block.mlp.gated,
        "rms": block.norm.kind == "rmsnorm",
        "tied": model.tied,
        "vocab": model.vocab,
        "latent": attention.latent,
    }
    if routed:
        sizes |= {"experts": routed[0].experts, "topk": routed[0].topk, "expert_ffn": routed[0].ffn}
        sizes |= {"shared_ffn": routed[0].shared_ffn, "first_dense": sum(group.count for group in dense)}
    return sizes


def _strategy_part(words: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return the settings of a run."""
    degrees = {name: int(words.get(name, 1)) for name in ("gpus", "micro_batch", "tp", "pp", "vpp", "ep")}
    seq_len = int(words.get("seq_len", model.max_positions))
    batch = words.get("global_batch")
    per_step = degrees["micro_batch"] * (degrees["gpus"] // (degrees["tp"] * degrees["pp"]))
    return degrees | {
        "seq_len": seq_len,
        "sp": bool(words.get("sp", degrees["tp"] > 1)),
        "zero": int(words.get("zero", 0)),
        "micro_batches": batch // per_step if isinstance(batch, int) else None,
        "recompute": str(words.get("recompute", "none")),
        "offload": frozenset(str(words.get("offload", "none")).split(",")) - {"none"},
        "framework": str(words.get("framework", "")).partition("@")[0],
        "flash": str(words.get("attention", "flash")) in {"flash", "efficient", "cudnn"},
    }
