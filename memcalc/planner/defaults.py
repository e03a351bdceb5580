"""The defaults that fill what a request leaves out, and the refusals of what framework, GPU and model do not have."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError, MissingError, UncountedError
from memcalc.frameworks import Habits, habits_of
from memcalc.frameworks.capability import SPLITS
from memcalc.frameworks.losses import check_uncast
from memcalc.planner.as_is import check_kernel
from memcalc.planner.idle import refuse_lacking
from memcalc.planner.images import check_length
from memcalc.planner.optimizers import runs_on
from memcalc.specs.options import BY_NAME, DEGREES, NEEDING
from memcalc.timing.rates import SLOWEST_NETWORK
from memcalc.trace.scores import LARGEST_FLASH_HEAD

if TYPE_CHECKING:
    from memcalc.grid import Layout
    from memcalc.planner.request import Request
    from memcalc.specs.block import Attention
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

NEARLY = 1.05
"""Among plans up to so much slower than the fastest the simplest is chosen."""


def precisions_for(gpu: GPU, habits: Habits, zero: int = 3, *, frozen: bool = False, split: bool = False) -> list[str]:
    """Precisions with fp32 accuracy of the update that the GPU and the framework have, the usual one first.

    What the framework can be told goes before what needs code of one's own, and where none of it computes in 16 bits,
    16-bit weights do. Autocast that stands in for FSDP on a single GPU is not that of several (``split``).
    A ``frozen`` base has 16 bits, since nothing is added to it: adapters have a width of their own, or where the engine
    casts them too an fp32 master.
    """
    dtype = "bf16" if gpu.supports("bf16") else "fp16"
    frozen_in = (f"{dtype}-mixed", dtype) if habits.casts_adapters else (dtype, f"{dtype}-mixed")
    narrow = next((name for name in frozen_in if name in habits.widths), "")
    if frozen and narrow:
        return [narrow]
    unsharded = habits.full_shard and zero == 0
    direct = habits.capabilities.precision.direct
    wanted = [f"{dtype}-mixed", f"{dtype}-autocast", "fp32"]
    wanted = wanted if {*wanted[:2]} & {*direct} else [dtype, *wanted]
    known = [name for name in wanted if name in habits.widths and gpu.supports(name.split("-")[0])]
    known = [name for name in known if not (unsharded and name.endswith("-mixed"))]
    if habits.unsharded_alone:
        known = [name for name in known if not name.endswith("-autocast") or (name in direct and not split)]
    return sorted(known, key=lambda name: name not in direct)


def check_precision(name: str, gpu: GPU, habits: Habits, zero: int, *, frozen: bool = False) -> None:
    """Refuse a precision that the GPU or the framework does not have; over a ``frozen`` base none needs shards."""
    dtype = name.split("-", maxsplit=1)[0]
    if dtype in {"bf16", "fp8"} and not gpu.supports(dtype):
        able = [p for p in habits.widths if gpu.supports(p.split("-")[0])]
        raise CombinationError("precision", name, f"{gpu.name} has no {dtype} arithmetic; it can run {', '.join(able)}")
    if name not in habits.widths:
        raise CombinationError("precision", name, f"{habits.name} is modelled with {', '.join(habits.widths)}")
    if habits.full_shard and zero == 0 and name.endswith("-mixed") and not frozen:
        autocast = name.replace("-mixed", "-autocast")
        if habits.unsharded_alone:
            allowed = f"{habits.name} mixes it by FSDP, which needs two data-parallel ranks"
            raise CombinationError("precision", name, f"{allowed}; use fp32 or bf16, or bf16-autocast on a single GPU")
        raise CombinationError(
            "precision", name, f"{habits.name} supports it with --zero 2 or 3 only; use {autocast} or bf16"
        )


def grouped(model: Model) -> bool:
    """Whether several query heads share a key-value head; in fp32 PyTorch then has the math kernel alone."""
    return any(attention.kv_heads < attention.heads for attention in model.attentions)


def classes_kernel(model: Model, seq_len: int) -> str:
    """The kernel that the model's own class in Transformers gets where none is asked for.

    Some classes have none of PyTorch's (Gemma 2, gpt-oss, BLOOM, MPT); a mask, which a window needs as soon as
    sequences reach its width, leaves the memory-efficient one to the blocks that have it, and so do wide heads.
    """
    kinds = model.attentions
    if not all(kind.fused and kind.sdpa for kind in kinds):
        return "eager"
    without = [is_wide(kind) or kind.explicit_mask or (kind.window or seq_len + 1) <= seq_len for kind in kinds]
    return "efficient" if all(without or [False]) else "sdpa" if any(without) else "flash"


def is_wide(attention: Attention) -> bool:
    """Whether its heads are wider than flash attention's kernels take, PyTorch's and those of flash-attn 2.8."""
    return attention.head_dim > LARGEST_FLASH_HEAD


def attention_for(request: Request, habits: Habits, model: Model, gpu: GPU, precisions: list[str], seq_len: int) -> str:
    """The attention kernel: flash where GPU, precision and model have it, else memory-efficient, math or eager."""
    able = gpu.flash_attention
    query = request.given.get("attention")
    if query in {"flash", "cudnn", "sdpa"} and not able:
        raise CombinationError(
            "attention", query, f"{gpu.name} ({gpu.arch}) has no flash attention 2; use efficient, math or eager"
        )
    if query in {"flash", "cudnn"} and precisions == ["fp32"]:
        raise CombinationError("attention", query, "flash attention has no fp32 kernel; use efficient, math or eager")
    if query in {"flash", "cudnn"} and any(map(is_wide, model.attentions)):
        allowed = f"{model.name} has heads of more than {LARGEST_FLASH_HEAD} elements; use sdpa, math or eager"
        raise CombinationError("attention", query, allowed)
    if query == "efficient" and precisions == ["fp32"] and grouped(model):
        raise CombinationError("attention", query, "in fp32 it has no grouped-query kernel; use math or eager")
    fallback = "math" if precisions == ["fp32"] and grouped(model) else "efficient"
    if habits.engine:  # Megatron-LM d98e8a64 transformer/enums.py, AttnBackend: flash, fused, unfused
        fallback = "eager"
    default = (te_kernel(gpu) if habits.attention_library == "te" else "flash") if able else fallback
    if precisions == ["fp32"]:  # Megatron's own attention, where Transformer Engine has no kernel
        default = "eager" if habits.kernels == "te" else fallback
    if habits.kernels == "model" and habits.own_code is None and default in ("flash", "efficient", "math"):
        usual = classes_kernel(model, seq_len) if habits.calls_sdpa else "eager"
        check_kernel(query, model)
        default = default if usual == "flash" or (usual == "sdpa" and default == "efficient") else usual
    note = "as the module calls it" if model.recording is not None else ""
    kernel = str(request.get("attention", default, note))
    generation = request.given.get("fields", {}).get("flash_version", 2)
    if generation != 2 and kernel != "flash":
        raise CombinationError("strategy.flash_version", generation, f"attention is {kernel}; use --attention flash")
    return kernel


def te_kernel(gpu: GPU) -> str:
    """Transformer Engine's choice: cuDNN from Hopper on, flash attention on Ampere; it has no fused kernel for fp32.

    Its release 2.11, attention/dot_product_attention/utils.py, get_attention_backend.
    """
    capability = gpu.compute_capability
    return "cudnn" if capability is not None and float(capability) >= 9 else "flash"


def is_sharded(habits: Habits, zero: int, dp: int) -> bool:
    """Whether the framework's launcher wraps the model in its sharding, and decides what comes with it.

    Accelerate prepares a single rank for FSDP as it does several (1.15, accelerator.py, prepare_model).
    """
    return zero > 0 and (dp > 1 or habits.autocast_over_shards)


def runtime_fields(request: Request, habits: Habits, precisions: list[str], *, sharded: bool) -> dict[str, Any]:
    """Fields that the framework's own launcher decides where nothing is said, as its reader fills them."""
    fields: dict[str, Any] = {}
    if "cp_kind" not in request.given:
        fields["cp_kind"] = habits.cp_kind
    kinds = {name if name == "fp32" else name.partition("-")[2] for name in precisions}
    narrow = {"compute": {"", "mixed", "autocast"}, "weights": {""}}.get(habits.reduces_as, set())
    if sharded and kinds <= narrow:
        fields["reduce_dtype"] = "bf16"
    stated = {"autocast", "lora"} & request.given.keys()
    if sharded and habits.autocast_over_shards and kinds <= {"mixed", "autocast"} and not stated:
        fields["autocast"] = True
    if is_frozen(request) and "autocast" not in request.given and casts_frozen(habits, precisions):
        fields["autocast"] = True
        if not request.several:
            request.assumptions["autocast"] = "on"
    return fields


def casts_frozen(habits: Habits, precisions: list[str]) -> bool:
    """Whether the Trainer's recipes set its switch of the same name, which is autocast, over a frozen base of each.

    TRL sets ``bf16`` where nothing is said (1.10 trainer/base_config.py).
    """
    return habits.autocasts_half and {*precisions} <= {"bf16", "fp16-mixed"}


def switches(request: Request, habits: Habits, precision: str) -> tuple[dict[str, Any], ...]:
    """What a search tries of the launcher's switches: ``bf16`` of the Trainer over a frozen base, where it is open.

    Under autocast, the default, adapters multiply in 16 bits, which is faster; without it logits take less.
    """
    open_ = request.several and is_frozen(request) and "autocast" not in request.given
    return ({}, {"autocast": False}) if open_ and habits.autocasts_half and precision == "bf16" else ({},)


ENDS_IN_SPLIT = {"embedding_in_split": True, "loss_in_split": True}


def fields_by_layout(request: Request, habits: Habits, layout: Layout) -> dict[str, Any]:
    """Fields whose default is another one under tensor parallelism, or under a pipeline."""
    fields: dict[str, Any] = {}
    if layout.tp > 1 and habits.tensor_loss and request.given.get("loss") is None:
        fields["loss"] = request.assumptions["loss"] = habits.tensor_loss
    return fields | (ENDS_IN_SPLIT if ends_weigh(request, habits, layout.pp) else {})


def ends_weigh(request: Request, habits: Habits, pp: int) -> bool:
    """Whether embedding and head count as a block each in the split over stages, where nothing is said of it."""
    return habits.ends_in_split and pp > 1 and not any(name in request.given["fields"] for name in SPLITS)


def stage_for(request: Request, habits: Habits, gpus: int) -> int:
    """The sharding stage, as given or the usual one; shards of a rank that has none are refused."""
    stages, alone = zero_stages(request, habits, gpus), _is_alone(request, habits, gpus)
    usual = 3 if habits.shards_over_ranks and gpus > 1 and 3 in stages else stages[0]
    zero = int(request.get("zero", usual))
    lacks = f"{habits.name} has no FSDP on one data-parallel rank"
    if alone and zero:
        raise CombinationError("zero", zero, f"{lacks}: --zero 0")
    if alone and request.given.get("offload"):
        raise CombinationError("offload", ",".join(request.given["offload"]), f"{lacks}, which offloads")
    if alone and gpus > 1 and "precision" not in request.given:
        request.assumptions["mixed precision"] = "none (by FSDP, which needs two data-parallel ranks)"
    return zero


def searched_stage(request: Request, habits: Habits, gpus: int) -> int:
    """The sharding stage that a search's precisions stand beside: as given, else 3, or 0 where no rank can share."""
    return stage_for(request, habits, gpus) if _is_alone(request, habits, gpus) else int(request.given.get("zero", 3))


def _is_alone(request: Request, habits: Habits, gpus: int) -> bool:
    """Whether the degrees that are given leave a single data-parallel rank, which the framework does not shard."""
    return habits.unsharded_alone and gpus == prod(request.given.get(name) or 1 for name in ("tp", "pp"))


def usual_recompute(habits: Habits, model: Model, gpus: int, zero: int) -> str:
    """The recompute policy where none is given; a recorded module runs as it was recorded."""
    if model.recording is not None:
        return "none"
    return habits.sharded_recompute if habits.sharded_recompute and gpus > 1 and zero >= 2 else habits.recompute


def check_framework(request: Request, habits: Habits) -> None:
    """Refuse what the framework does not have."""
    for name in (name for name in DEGREES if request.given.get(name, 1) > 1):
        if name == "dp_replicate":
            check_hybrid(request, habits)
        elif not habits.tensor_parallel or name in habits.lacks:
            raise UncountedError(
                name, request.given[name], f"not modelled for {habits.name}; use fsdp2, torchtitan or megatron"
            )
    if request.given.get("sp") and "sp" in habits.lacks:
        raise CombinationError("sp", True, f"{habits.name} is modelled without sequence parallelism; use megatron")
    if habits.pipeline_engine != "none" and request.given.get("pp", 1) > 1:
        check_engine(request, habits)
    stage = request.given.get("zero")
    if stage is not None and stage not in habits.zero:
        instead = "; NO_SHARD is --dp-replicate with all ranks, DDP --framework ddp" * (habits.flat_units and not stage)
        raise CombinationError("zero", stage, f"{habits.name} has {', '.join(map(str, sorted(habits.zero)))}{instead}")
    loss = request.given.get("loss")
    if loss not in {None, "fused-linear"} and loss not in habits.losses:
        raise CombinationError(
            "loss", loss, f"{habits.name} is modelled with {', '.join([*habits.losses, 'fused-linear'])}"
        )
    check_uncast(request.given, habits.losses, habits.loss)
    if request.given.get("sp") and request.given.get("tp", 1) == 1:
        raise CombinationError("sp", True, "sequence parallelism needs tp above 1")
    refuse_lacking(request, habits)


EXCHANGED = "a2a"
"""The kind of context parallelism that exchanges the sequence for heads."""
PINNED = ("cp", EXCHANGED)
"""A degree that no search tries by itself where its usual kind is this."""


def check_exchange(request: Request, model: Model) -> None:
    """Refuse what cannot stand beside ranks that exchange the sequence for heads, and keep a search off it.

    DeepSpeed 0.18.2 runtime/sequence_parallel/ulysses_sp.py takes heads that divide into the ranks, or the reverse for
    those of keys; TransformerEngine 2.11 context_parallel.py likewise. A ring beside DeepSpeed is axolotl's.
    """
    ranks = request.given.get("cp") or 1
    habits = habits_for(request)[1]
    kind = request.given.get("cp_kind") or habits.cp_kind
    if ranks == 1 or EXCHANGED not in {kind, habits.cp_kind}:
        return
    if kind == "allgather":
        raise CombinationError("cp-kind", kind, f"{habits.name} exchanges the sequence for heads: {EXCHANGED}")
    for attention in model.attentions if kind == EXCHANGED else ():
        if attention.heads % (ranks * (request.given.get("tp") or 1)):
            allowed = f"ranks that exchange the sequence for heads must divide the {attention.heads} of {model.name}"
            raise CombinationError("cp", ranks, allowed)
    for name in ("tp", "pp") if habits.cp_kind == EXCHANGED else ():
        if (request.given.get(name) or 1) > 1:
            raise UncountedError(name, request.given[name], f"not modelled beside --cp {ranks} of {habits.name}")
        request.given[name] = 1


def check_needs(request: Request, model: Model, *, searched: bool) -> None:
    """Refuse an option that says nothing here: of experts for a model without, or of a degree that is 1.

    In a search a degree that nothing pins is open.
    """
    check_exchange(request, model)
    for name, usual in (("expert_overload", 1.0), ("experts_padded", False)):
        value = request.given.get("fields", {}).get(name, usual)
        kernels = request.given.get("kernels", habits_for(request)[1].kernels)
        if value != usual and (not model.is_moe or kernels != "te"):
            allowed = "needs Megatron-LM's grouped experts" if model.is_moe else f"{model.name} has no routed experts"
            raise CombinationError(f"strategy.{name}", value, allowed)
    for option in NEEDING:
        value, degree = request.given.get(option.name), option.needs
        if value is None or value == option.default:
            continue
        if degree != "tp" and not model.is_moe:
            raise CombinationError(option.name.replace("_", "-"), value, f"{model.name} has no routed experts")
        pinned = request.given.get(degree, None if searched or degree in request.choices else 1)
        if degree in DEGREES and pinned == 1:
            raise CombinationError(option.name.replace("_", "-"), value, f"needs {degree} above 1")


def check_hybrid(request: Request, habits: Habits) -> None:
    """Refuse replicas of the shards where the framework has none, and what DeepSpeed has in their place by its name."""
    if habits.capabilities.parallel.needs("hsdp") is not None:
        return
    allowed = f"not supported for {habits.name}; use fsdp2, torchtitan or megatron"
    if habits.zero_optimizer is not None:
        allowed = "DeepSpeed's MiCS (mics_shard_size) and hpZ (zero_hpz_partition_size) are not modelled; use fsdp2"
    raise CombinationError("dp-replicate", request.given["dp_replicate"], allowed)


def check_engine(request: Request, habits: Habits) -> None:
    """Refuse what DeepSpeed's pipeline engine does not run (runtime/pipe/engine.py)."""
    stage = request.given.get("zero", 1)
    if stage > 1:
        raise CombinationError("zero", stage, f"{habits.name}'s pipeline engine has stages 0 and 1 only")


def zero_stages(request: Request, habits: Habits, gpus: int = 0) -> tuple[int, ...]:
    """The sharding stages that can be had with the pipeline and optimizer asked for, the default first.

    Without ``gpus`` those of the job: as many as are given, or the fewest.
    """
    ranks = (request.given.get(name) or 1 for name in DEGREES if name not in ("ep", "dp_replicate"))
    if _is_alone(request, habits, gpus or max(request.given.get("gpus") or 1, prod(ranks))):
        return (0,)
    piped = habits.pipeline_engine != "none" and request.given.get("pp", 1) > 1
    name = str(request.given.get("optimizer", BY_NAME["optimizer"].default))
    gathers = habits.engine and request.given.get("fields", {}).get("float8_all_gather", False)
    able = tuple(stage for stage in habits.zero if stage or not gathers)
    if habits.pipeline_keeps_weights and request.given.get("pp", 1) > 1:
        able = tuple(sorted(able, key=lambda stage: stage or max(able) + 1))
    return tuple(stage for stage in able if (stage <= 1 or not piped) and runs_on(name, habits, stage))


def check_offload(request: Request, habits: Habits, node: Node) -> None:
    """Refuse an offload that the framework or the node does not have."""
    choice, tier = request.given.get("offload", ()), request.given.get("offload_to", "cpu")
    if "params" in choice and 3 not in habits.zero:
        raise CombinationError("offload", "params", f"{habits.name} has no sharded parameters to offload")
    if "params" in choice and request.given.get("zero", 3) < (2 if habits.zero_optimizer is None else 3):
        raise CombinationError("offload", "params", "parameters are offloaded at --zero 3 (fsdp: 2 or 3)")
    if "optimizer" in choice and habits.zero_optimizer is not None and "zero" in request.given:
        lowest = 3 if tier == "nvme" else 1
        if request.given["zero"] < lowest:
            allowed = "DeepSpeed swaps to NVMe with --zero 3 only" if lowest == 3 else "needs --zero 1, 2 or 3"
            raise CombinationError("offload", "optimizer", allowed)
    if tier != "cpu" and not any(known.name == tier for known in node.tiers):
        raise MissingError(
            f"offload-to {tier!r} needs a node with that tier; node {node.name} lists "
            f"{', '.join(t.name for t in node.tiers) or 'none'}: give --node."
        )


def note_network(request: Request, node: Node, gpus: int) -> None:
    """Note the network that times take where a job spans nodes of which none is known."""
    if gpus > node.gpus and node.internode_bytes_per_s_per_gpu is None:
        request.assumptions["network"] = f"{SLOWEST_NETWORK / 1e9:g} GB/s per GPU (of {node.name} none is known)"


def is_frozen(request: Request) -> bool:
    """Whether the weights are frozen under adapters."""
    return request.given.get("lora") is not None


def habits_for(request: Request) -> tuple[str, Habits]:
    """The framework and its habits; by default FSDP 2, and for adapters the Trainer, beside which PEFT stands."""
    name = str(request.get("framework", "hf" if is_frozen(request) else "fsdp2"))
    return name, _launched() if request.launched and name == "fsdp2" else habits_of(name)


@cache
def _launched() -> Habits:
    """FSDP 2 as Accelerate prepares it: autocast over its mixed precision, and gradients reduced in 16 bits."""
    settled = habits_of("hf")
    return replace(habits_of("fsdp2"), reduces_as=settled.reduces_as, autocast_over_shards=settled.autocast_over_shards)


def sequence_length(request: Request, model: Model) -> int:
    """The sequence length of the text; by default the model's own, at most 4096. A vision model sees its patches."""
    fixed = model.fixed_length
    if fixed is not None:
        return int(request.get("seq_len", fixed, f"{fixed} (tokens that the model sees a sample)"))
    length = int(request.get("seq_len", min(model.max_positions, 4096)))
    check_length(model, length)
    if model.positions == "learned" and length > model.max_positions:
        raise CombinationError(
            "seq-len", length, f"{model.name} has learned positions for {model.max_positions} tokens"
        )
    return length
