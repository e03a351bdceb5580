"""Megatron-LM's precision-aware optimizer: who holds the main weights, and how wide each state is.

Sources: NVIDIA/Megatron-LM d98e8a64 ``core/optimizer/optimizer_config.py`` (``__post_init__``),
``core/optimizer/__init__.py`` and ``core/optimizer/distrib_optimizer.py``
(``_build_model_and_main_param_groups``, ``_copy_model_grads_to_main_grads``); NVIDIA/TransformerEngine d0067d0d
``pytorch/optimizers/fused_adam.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.formulas.narrow_states import STATE_BYTES
from memcalc.specs.adapters import release

if TYPE_CHECKING:
    from memcalc.frameworks.habits import Habits, Widths
    from memcalc.specs.options import SharedSettings

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
