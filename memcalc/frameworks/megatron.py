"""Megatron-LM, from the local DDP of 2021 to Megatron core with TransformerEngine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.formulas.optimizer_states import STATE_BYTES
from memcalc.frameworks import losses, megatron_support
from memcalc.frameworks.float8 import RECIPES
from memcalc.frameworks.habits import Bucket, Habits, Widths, like
from memcalc.specs.adapters import release

if TYPE_CHECKING:
    from memcalc.specs.options import SharedSettings


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
    capabilities=megatron_support.MEGATRON,
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
    adds_gradients=True,
    kernels="te",
    attention_library="te",
    communicators=GROUPS,
    engine=True,
    packed_weights=True,
    layer_wise=True,
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
CORE_11 = like(CORE, "megatron", own_main_weights=False, capabilities=megatron_support.MEGATRON_CORE_11)
CORE_10 = like(CORE_11, "megatron", capabilities=megatron_support.MEGATRON_CORE_10)
CORE_05 = like(CORE_10, "megatron", capabilities=megatron_support.MEGATRON_CORE_05)
THEN = Habits.communicators
"""What was counted of the time before the core, whose groups were not read."""
CONTIGUOUS = like(
    CORE,
    "megatron",
    zero=(0,),
    capabilities=megatron_support.MEGATRON_2021,
    fork_schedules=(),
    communicators=THEN,
    widths=WIDTHS,
    float8=(),
    narrow_gradients=False,
    own_main_weights=False,
    makes_masks=True,
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


REMAINDERS = (2, 1)
"""The release of TransformerEngine from which Adam stores the low 16 bits of a main weight beside its bf16 weight."""
FUSED = (2, 14)
"""The release from which its kernel updates moments that are both bf16 as they are (459e7cf49; v2.13 lacks it)."""
HELD_IN_8_BITS = ("", "delayed", "nvfp4")
"""Recipes under which TransformerEngine holds fp32 main weights: ``fp8_recipe`` stays ``delayed`` beside 4 bits."""


def holds_main_weights(fixed: SharedSettings, precision: str, habits: Habits) -> bool:
    """Whether TransformerEngine's Adam holds the main weights, and reads gradients as they lie in their buffer."""
    if not fixed.precision_aware:
        return False
    elsewhere = habits.own_main_weights and precision.startswith("fp8") and fixed.float8 not in HELD_IN_8_BITS
    return not elsewhere or fixed.main_params_dtype != "fp32"


def stores_remainders(fixed: SharedSettings, precision: str, habits: Habits) -> bool:
    """Whether a main weight is the low 16 bits that its bf16 weight lacks."""
    bf16 = precision.partition("-")[0] in ("bf16", "fp8") and fixed.main_params_dtype == "fp32"
    return holds_main_weights(fixed, precision, habits) and bf16 and release(fixed.te) >= REMAINDERS


def narrowed(widths: Widths, fixed: SharedSettings, precision: str, habits: Habits) -> Widths:
    """The widths of a precision, with main weights, moments and gradients as the optimizer has them."""
    if not fixed.precision_aware:
        return widths
    moments = {"moment": STATE_BYTES[fixed.exp_avg_dtype], "second_moment": STATE_BYTES[fixed.exp_avg_sq_dtype]}
    if not holds_main_weights(fixed, precision, habits):
        return replace(widths, **moments)
    halved = stores_remainders(fixed, precision, habits) or fixed.main_params_dtype == "fp16"
    master = min(widths.master, 2) if halved else widths.master
    return replace(widths, master=master, step_gradient=0, **moments)


def widened(fixed: SharedSettings, precision: str, habits: Habits) -> tuple[str, ...]:
    """The dtype of each state of which an update makes an fp32 copy."""
    if not fixed.precision_aware:
        return ()
    moments = (fixed.exp_avg_dtype, fixed.exp_avg_sq_dtype)
    fused = moments == ("bf16", "bf16") and release(fixed.te) >= FUSED
    main = holds_main_weights(fixed, precision, habits)
    states = (*(() if fused else moments), *((fixed.main_params_dtype,) if main else ()))
    return tuple(dtype for dtype in states if dtype != "fp32")


RELEASED = {"core-0.5": "2024-03", "core-0.10": "2025-01", "core-0.11": "2025-02", "core-0.13": "2025-06"}
"""The months in which Megatron-LM's main branch went on to the next version (core/package_info.py), for an era given as
a month."""
BETWEEN = ("2022-06", "2024-03")
"""After the sequence parallelism of May 2022 and until core 0.5 nothing was read: no era has that time's habits."""
