"""Megatron-LM, from the local DDP of 2021 to Megatron core with TransformerEngine.

What Megatron-LM can be told, by its version: flags of training/arguments.py, and what validate_args refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.formulas.optimizer_states import STATE_BYTES
from memcalc.frameworks import losses, needs
from memcalc.frameworks.capability import EITHER, NEVER, SPLITS, Capabilities, Clash, Support, offloads, support_of
from memcalc.frameworks.float8 import RECIPES
from memcalc.frameworks.habits import Bucket, Habits, Widths, like
from memcalc.frameworks.support import FORMS
from memcalc.specs.adapters import release
from memcalc.specs.strategy import OPTIMIZERS

if TYPE_CHECKING:
    from memcalc.specs.options import SharedSettings


REMAINDERS = (2, 1)
"""The release of TransformerEngine from which Adam stores the low 16 bits of a main weight beside its bf16 weight."""
FUSED = (2, 14)
"""The release from which its kernel updates moments that are both bf16 as they are (459e7cf49; v2.13 lacks it)."""
HELD_IN_8_BITS = ("", "delayed", "nvfp4")
"""Recipes under which TransformerEngine holds fp32 main weights: ``fp8_recipe`` stays ``delayed`` beside 4 bits. The
recipe of the optimizer's config counts in 16 bits too: that of Megatron-Bridge 067f987d (``MixedPrecisionConfig``) is
``tensorwise``."""


def holds_main_weights(fixed: SharedSettings, habits: Habits) -> bool:
    """Whether TransformerEngine's Adam holds the main weights, and reads gradients as they lie in their buffer."""
    if not fixed.precision_aware:
        return False
    elsewhere = habits.own_main_weights and fixed.float8 not in HELD_IN_8_BITS
    return not elsewhere or fixed.main_params_dtype != "fp32"


def stores_remainders(fixed: SharedSettings, precision: str, habits: Habits) -> bool:
    """Whether a main weight is the low 16 bits that its bf16 weight lacks."""
    bf16 = precision.partition("-")[0] in ("bf16", "fp8") and fixed.main_params_dtype == "fp32"
    return holds_main_weights(fixed, habits) and bf16 and release(fixed.te) >= REMAINDERS


def narrowed(widths: Widths, fixed: SharedSettings, precision: str, habits: Habits) -> Widths:
    """The widths of a precision, with main weights, moments and gradients as the optimizer has them."""
    if not fixed.precision_aware:
        return widths
    moments = {"moment": STATE_BYTES[fixed.exp_avg_dtype], "second_moment": STATE_BYTES[fixed.exp_avg_sq_dtype]}
    if not holds_main_weights(fixed, habits):
        return widths._replace(**moments)
    halved = stores_remainders(fixed, precision, habits) or fixed.main_params_dtype == "fp16"
    master = min(widths.master, 2) if halved else widths.master
    return widths._replace(master=master, step_gradient=0, **moments)


def widened(fixed: SharedSettings, habits: Habits) -> tuple[str, ...]:
    """The dtype of each state of which an update makes an fp32 copy."""
    if not fixed.precision_aware:
        return ()
    moments = (fixed.exp_avg_dtype, fixed.exp_avg_sq_dtype)
    fused = moments == ("bf16", "bf16") and release(fixed.te) >= FUSED
    main = holds_main_weights(fixed, habits)
    states = (*(() if fused else moments), *((fixed.main_params_dtype,) if main else ()))
    return tuple(dtype for dtype in states if dtype != "fp32")


RELEASED = {"core-0.5": "2024-03", "core-0.10": "2025-01", "core-0.11": "2025-02", "core-0.13": "2025-06"}
"""The months in which Megatron-LM's main branch went on to the next version (core/package_info.py), for an era given as
a month."""
BETWEEN = ("2022-06", "2024-03")
"""After the sequence parallelism of May 2022 and until core 0.5 nothing was read: no era has that time's habits."""


WHOLE_BLOCKS = ("full", "uniform", "block")
_MEGATRON_POLICIES = ("none", "full", "uniform", "block", "selective-core-attn", "modules")
_MEGATRON_CODE = "change the blocks' forward (core/transformer/transformer_block.py) yourself"
_UNDER_IT = "Megatron-LM supports it only with its precision-aware optimizer: strategy.precision_aware=true"
_NARROW = tuple(name for name in STATE_BYTES if name != "fp32")
_NARROW_STATES = (
    Clash(
        ("precision_aware", ("true",)),
        ("zero", ("0",)),
        why="Megatron-LM's precision-aware optimizer needs the distributed optimizer: zero 1",
    ),
    Clash(
        ("precision_aware", ("true",)),
        ("optimizer", ("sgd", "sgd-momentum", "lion", "muon", "soap")),
        why="Megatron-LM's precision-aware optimizer is Adam: --optimizer adamw",
    ),
    Clash(
        ("precision_aware", ("true",)),
        ("precision", ("fp32",)),
        why="it is modelled over 16-bit weights: precision bf16-mixed, fp16-mixed or fp8-mixed",
    ),
    Clash(
        ("precision_aware", ("true",)),
        ("offload", ("optimizer", "optimizer,activations")),
        why="Megatron-LM's optimizer on the host keeps fp32 states, whatever their flags say",
    ),
    Clash(("main_params_dtype", ("fp16",)), ("precision_aware", ("false",)), why=_UNDER_IT),
    *(
        Clash((option, _NARROW), ("precision_aware", ("false",)), why=_UNDER_IT)
        for option in ("exp_avg_dtype", "exp_avg_sq_dtype")
    ),
)
"""core/optimizer/optimizer_config.py, ``__post_init__``; core/optimizer/cpu_offloading/hybrid_optimizer.py."""
MEGATRON = Capabilities(
    zero=Support(("1", "0")),
    precision=Support(("bf16-mixed", "fp16-mixed", "fp32", "fp8-mixed")),
    recompute=support_of(_MEGATRON_POLICIES, needs.RECOMPUTE, _MEGATRON_CODE),
    offload=offloads(
        ("none", "optimizer"),
        {"activations": "run the blocks under torch.autograd.graph.save_on_cpu yourself (its own flags move parts)"},
    ),
    offload_to=Support(("cpu",), needs.TIER),
    optimizer=support_of(
        ("adamw", "sgd-momentum", "lion", "muon", "soap"), OPTIMIZERS, "add it to core/optimizer yourself"
    ),
    optimizer_impl=support_of(("fused",), FORMS, "change the optimizer's class in core/optimizer yourself"),
    loss=Support(("standard", "parallel", "fused-kernel", "triton"), {"fused-linear": needs.LOSS["fused-linear"]}),
    parallel=Support(("dp", "tp", "tp+sp", "pp", "cp", "ep", "hsdp")),
    uneven=Support(SPLITS),
    compress_activations=Support(("none",)),
    moe_dispatcher=Support(("alltoall", "deepep", "allgather")),
    ep_overlap=EITHER,
    tp_comm_overlap=EITHER,
    cuda_graphs=Support(("none", "partial", "full")),
    zero_gather=Support(("allgather",), {"broadcast": needs.BROADCAST}),
    precision_aware=EITHER,
    main_params_dtype=Support(("fp32", "fp16")),
    exp_avg_dtype=Support(tuple(STATE_BYTES)),
    exp_avg_sq_dtype=Support(tuple(STATE_BYTES)),
    clashes=(
        *_NARROW_STATES,
        Clash(
            ("tp_comm_overlap", ("true",)),
            ("parallel", ("tp",)),
            why="Megatron-LM overlaps tensor-parallel messages only with sequence parallelism: --sp",
        ),
        Clash(
            ("ep_overlap", ("true",)),
            ("moe_dispatcher", ("allgather",)),
            why="Megatron-LM overlaps the exchange of tokens only with alltoall and deepep",
        ),
        Clash(
            ("ep_overlap", ("true",)),
            ("recompute", WHOLE_BLOCKS),
            why="Megatron-LM overlaps the exchange of tokens only without full recomputation",
        ),
        Clash(
            ("ep_overlap", ("true",)),
            ("precision", ("fp32",)),
            why="Megatron-LM overlaps the exchange of tokens only in 16 bits",
        ),
        Clash(
            ("cuda_graphs", ("partial",)),
            ("recompute", WHOLE_BLOCKS),
            why="Megatron-LM recomputes whole blocks only in a CUDA graph of the whole pass: --cuda-graphs full",
        ),
        Clash(
            ("zero", ("0",)),
            ("offload", ("optimizer", "optimizer,activations")),
            why="--optimizer-cpu-offload needs the distributed optimizer: zero 1",
        ),
        Clash(
            ("optimizer", ("sgd-momentum", "lion", "muon", "soap")),
            ("offload", ("optimizer", "optimizer,activations")),
            # validate_args asks for the precision-aware optimizer beside it, which OptimizerConfig has of Adam alone
            why="--optimizer-cpu-offload is of Adam alone: --optimizer adamw",
        ),
        Clash(
            ("parallel", ("tp",)),
            ("parallel", ("ep",)),
            why="Megatron-LM trains experts with tensor parallelism only with sequence parallelism: --sp",
        ),
        Clash(
            ("parallel", ("hsdp",)),
            ("optimizer", ("muon", "soap")),
            why="Megatron-LM's layer-wise optimizers have one instance (core/optimizer/layer_wise_optimizer.py)",
        ),
    ),
)
"""Megatron-LM's flags at d98e8a64 (core 0.20): training/arguments.py, validate_args; core/optimizer/__init__.py."""
_MOMENTS_CORE_11 = Support(("fp32", "fp16", "fp8"))
MEGATRON_CORE_11 = MEGATRON._replace(exp_avg_dtype=_MOMENTS_CORE_11, exp_avg_sq_dtype=_MOMENTS_CORE_11)
"""Before moments in bf16 (9d509a03b4, core 0.13)."""
MEGATRON_CORE_10 = MEGATRON._replace(
    precision_aware=NEVER,
    main_params_dtype=Support(("fp32",)),
    exp_avg_dtype=Support(("fp32",)),
    exp_avg_sq_dtype=Support(("fp32",)),
    clashes=tuple(clash for clash in MEGATRON.clashes if clash not in _NARROW_STATES),
)
"""Before ``--use-precision-aware-optimizer`` and the dtypes of its states (47a175b4c4, core 0.11)."""
MEGATRON_CORE_05 = MEGATRON_CORE_10._replace(
    parallel=Support(MEGATRON.parallel.direct[:-1]),
    moe_dispatcher=Support(("alltoall", "allgather")),
    ep_overlap=NEVER,
    cuda_graphs=Support(("none",)),
    clashes=tuple(
        clash for clash in MEGATRON_CORE_10.clashes[:-1] if clash.first[0] not in ("ep_overlap", "cuda_graphs")
    ),
)
"""Before ``--num-distributed-optimizer-instances`` (bb84eb93fa, core 0.10).

Core 0.11 has CUDA graphs, core 0.12 DeepEP, core 0.14 ``--overlap-moe-expert-parallel-comm``.
"""
MEGATRON_2021 = MEGATRON_CORE_10._replace(
    zero=Support(("0",)),
    precision=Support(("bf16-mixed", "fp16-mixed", "fp32")),
    reduce_dtype=Support(("fp32",)),
    offload=offloads(("none",), {"optimizer": needs.OPTIMIZER_OFFLOAD, **MEGATRON.offload.code}),
    parallel=MEGATRON_CORE_05.parallel,
    moe_dispatcher=Support(("alltoall",)),
    ep_overlap=NEVER,
    tp_comm_overlap=NEVER,
    cuda_graphs=Support(("none",)),
    loss=Support(("standard", "parallel"), {"fused-linear": needs.LOSS["fused-linear"]}),
    optimizer=support_of(("adamw", "sgd-momentum"), OPTIMIZERS, "add it to megatron/optimizer yourself"),
    uneven=Support(),
    clashes=(),
)
"""Megatron-LM of 2021 and 2022, whose stages are alike."""

WIDTHS = {
    "fp32": Widths(4, 4, 0, 4, 4, 0),
    "bf16-mixed": Widths(2, 4, 4, 4, 2, 0),
    "fp16-mixed": Widths(2, 2, 4, 4, 2, 0, 4),
}
ENGINE_WIDTHS = {**WIDTHS, "fp8-mixed": WIDTHS["bf16-mixed"]}
"""TransformerEngine quantises 16-bit weights, of which it keeps copies (:mod:`memcalc.terms.states`)."""
LOSSES = {
    "standard": losses.MEGATRON,
    "parallel": losses.MEGATRON,
    "fused-kernel": losses.MEGATRON_FUSED,
    "triton": losses.TRITON,
}
# Schedules: core/pipeline_parallel/schedules.py; even chunks: training/arguments.py, validate_args. The fork's README
# has ZB-1p, ZB-2p (--zero-bubble-max-pending-backward) and ZB-V, and ZB-H1 as a patch.
VOCAB_MULTIPLE = 128
"""``--make-vocab-size-divisible-by``, times TP."""

GROUPS = ("tp", "pp", "cp", "dp", "mp", "dist_opt", "ep", "tp_ep", "etp", "edp", "tp_cp")
"""Of core 0.16 and later. In 0.11 and 0.12 norms go over the world's, and losses over data-parallel ranks that have
another one than gradients, so that there are as many."""

CORE = Habits(
    name="megatron",
    zero=(1, 0),
    capabilities=MEGATRON,
    widths=ENGINE_WIDTHS,
    float8=tuple(RECIPES),
    tensor_parallel=True,
    persistent_gradients=True,
    narrow_gradients=True,
    own_main_weights=True,
    # core/distributed/distributed_data_parallel.py: max(40000000, 1000000 * dp_size) where reductions overlap
    bucket=Bucket(elements=40_000_000, elements_per_rank=1_000_000),
    # core/tensor_parallel/layers.py, linear_with_grad_accumulation_and_async_allreduce; from early 2022 on
    overlaps_input_gradients=True,
    # core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving: overlap_p2p_comm, which
    # --no-overlap-p2p-communication turns off; filling and draining wait (overlap_p2p_comm_warmup_flush)
    overlaps_stages=True,
    adds_gradients=True,
    kernels="te",
    attention_library="te",
    communicators=GROUPS,
    engine=True,
    packed_weights=True,
    layer_wise=True,
    # Megatron-Bridge 067f987d recipes/utils/optimizer_utils.py; recipes/gemma/h100/gemma2.py: PEFT disables it
    shares_optimizer=True,
    casts_adapters=True,  # Megatron-Bridge's ParallelLinearAdapter: self.bfloat16(); core Float16Module casts all
    lora_rank=32,  # Megatron-Bridge 067f987d peft/lora.py, LoRA.dim
    optimizer_impl="fused",
    vocab_parallel=True,
    vocab_multiple=VOCAB_MULTIPLE,
    schedules=("1f1b", "interleaved"),
    fork_schedules=("zb-h1", "zb-1p", "zb-2p", "zb-v"),
    fork="sail-sg/zero-bubble-pipeline-parallelism 39f2c186",
    even_chunks=True,
    schedule_variables=True,
    reentrant=True,
    losses=LOSSES,
    source="Megatron-LM 23e00ed (core 0.14), d98e8a64 (core 0.20): core/distributed, core/optimizer",
)
CORE_11 = like(CORE, "megatron", own_main_weights=False, capabilities=MEGATRON_CORE_11)
CORE_10 = like(CORE_11, "megatron", capabilities=MEGATRON_CORE_10)
CORE_05 = like(CORE_10, "megatron", capabilities=MEGATRON_CORE_05)
THEN = Habits.communicators
"""What was counted of the time before the core, whose groups were not read."""
CONTIGUOUS = like(
    CORE,
    "megatron",
    zero=(0,),
    capabilities=MEGATRON_2021,
    fork_schedules=(),
    communicators=THEN,
    widths=WIDTHS,
    float8=(),
    narrow_gradients=False,
    own_main_weights=False,
    makes_masks=True,
    overlaps_stages=False,
    overlaps_reduction=False,
    engine=False,
    attention_library="",
    handle_workspaces=False,
    losses={"standard": losses.MEGATRON, "parallel": losses.MEGATRON},
    source="Megatron-LM of January 2022 (c1e4526): megatron/schedules.py frees outputs that were sent",
)
OUTPUTS_KEPT = like(
    CONTIGUOUS,
    "megatron",
    keeps_stage_outputs=True,
    overlaps_input_gradients=False,
    source="Megatron-LM of August 2021 (e8fb052): contiguous gradient buffers in the local DDP by default",
)
LOCAL = like(
    OUTPUTS_KEPT,
    "megatron",
    widths={**WIDTHS, "fp16-mixed": Widths(2, 2, 4, 4, 2, 0)},
    persistent_gradients=False,
    flattened_gradients=True,
    main_gradients=4,
    lazy_kernels=False,
    source="Megatron-LM b4bc51b megatron/model/distributed.py, megatron/optimizer/optimizer.py, megatron/schedules.py",
)

ERAS = {
    "megatron": (
        ("2021-03", LOCAL),
        ("2021-08", OUTPUTS_KEPT),
        ("2022-01", CONTIGUOUS),
        ("core-0.5", CORE_05),
        ("core-0.10", CORE_10),
        ("core-0.11", CORE_11),
        ("core-0.13", CORE),
    )
}


# Megatron-LM's precision-aware optimizer: who holds the main weights, and how wide each state is.
#
# Sources: NVIDIA/Megatron-LM d98e8a64 ``core/optimizer/optimizer_config.py`` (``__post_init__``),
# ``core/optimizer/__init__.py`` and ``core/optimizer/distrib_optimizer.py`` (``_build_model_and_main_param_groups``,
# ``_copy_model_grads_to_main_grads``); NVIDIA/TransformerEngine d0067d0d ``pytorch/optimizers/fused_adam.py``.
