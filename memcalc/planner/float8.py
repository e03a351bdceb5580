"""Which recipes of 8-bit and 4-bit products a framework and a GPU have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import CombinationError
from memcalc.frameworks.float8 import RECIPES, needs_transposes

if TYPE_CHECKING:
    from memcalc.frameworks import Habits
    from memcalc.specs.hardware import GPU
    from memcalc.specs.options import SharedSettings

FIELD = "strategy.float8"


def check_recipe(name: str, gpu: GPU, habits: Habits, kernels: str) -> None:
    """Refuse a recipe that the framework or the GPU lacks; empty is the framework's default."""
    recipe = name or habits.float8[0]
    if recipe not in habits.float8:
        raise CombinationError(FIELD, name, f"{habits.name} has {', '.join(habits.float8)}")
    if not habits.engine:
        return
    if kernels != "te":
        raise CombinationError(
            "kernels", kernels, "8-bit products of Megatron-LM are TransformerEngine's: --kernels te"
        )
    capability = capability_of(gpu)
    able = [known for known, each in RECIPES.items() if each.capabilities[0] <= capability < each.capabilities[1]]
    if not able:
        says = "has none" if gpu.vendor == "nvidia" else "may have them there, but they are not modelled"
        allowed = f"8-bit products on {gpu.name}: TransformerEngine {says}; use bf16-mixed"
        raise CombinationError("precision", "fp8-mixed", allowed)
    if recipe not in able:
        allowed = f"TransformerEngine has {', '.join(able)} on {gpu.name} ({gpu.arch}); the nearest is {nearest(able)}"
        raise CombinationError(FIELD, recipe, allowed)


def optimizer_alone(fixed: SharedSettings) -> bool:
    """Whether a recipe may stand beside 16-bit products: the precision-aware optimizer's config has one there too."""
    return fixed.precision_aware and fixed.float8 in RECIPES and not fixed.float8_all_gather


def nearest(able: list[str]) -> str:
    """The recipe with the smallest scales among those that a GPU has."""
    return next(name for name in ("mxfp8", "blockwise", "tensorwise") if name in able)


def transposes(gpu: GPU, habits: Habits, precisions: list[str]) -> bool:
    """Whether TransformerEngine keeps 8-bit weights transposed too."""
    narrow = habits.engine and any(name.startswith("fp8") for name in precisions)
    return narrow and needs_transposes(capability_of(gpu))


def capability_of(gpu: GPU) -> float:
    """The compute capability, 0 where the GPU has none: TransformerEngine's sources speak of NVIDIA's alone."""
    return float(gpu.compute_capability or 0) if gpu.vendor == "nvidia" else 0.0
