"""Recipes of 8-bit and 4-bit products: what a quantised tensor takes, and which GPUs multiply it.

Sources: NVIDIA/TransformerEngine d0067d0d ``pytorch/quantization.py`` (which compute capabilities have a recipe),
``pytorch/csrc/quantizer.cpp`` and ``pytorch/tensor`` (data and scales of each direction),
``common/transformer_engine.cpp`` (``nvte_is_non_tn_fp8_gemm_supported``), ``common/recipe/__init__.py``;
NVIDIA/Megatron-LM d98e8a64 ``core/fp8_utils.py``, ``core/fp4_utils.py``. PyTorch's own float8 (torchao) quantises
inside a product and keeps its inputs in 16 bits: of those recipes nothing but the names stands here.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from memcalc.errors import CombinationError

if TYPE_CHECKING:
    from memcalc.frameworks.habits import Habits
    from memcalc.specs.hardware import GPU
    from memcalc.specs.options import SharedSettings


TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
"""Recipes of torchao, the one of a config that names none first."""


class Recipe(NamedTuple):
    """How TransformerEngine quantises the operands of a product."""

    scope: str
    """Of the constants of the step-time model."""
    direction: Fraction
    """Bytes an element of an activation or gradient, quantised along one direction, with its scales."""
    weight: Fraction
    """The same of a weight."""
    per_tensor: bool
    """One scale a tensor: where any layout can be multiplied, one copy serves both directions."""
    keeps_original: bool
    """The attention projection keeps the attention output, which attention keeps anyway, and no quantised copy
    (``set_save_original_input`` in Megatron-LM's ``core/transformer/attention.py``)."""
    capabilities: tuple[float, float]
    """Compute capabilities that have it: from the first on, below the second."""
    dtype: str = "fp8"
    """In which matrix units multiply."""
    gathered: float = 0.5
    """Bytes of a gathered weight that is quantised itself, over those of 16 bits. MXFP8's travel in 16 bits, through
    the gradient buffer (``reuse_grad_buf_for_mxfp8_param_ag``)."""

    @property
    def operand_share(self) -> float:
        """Bytes that a product reads and writes over those of 16 bits: two operands are narrow, the result is not.

        >>> RECIPES["delayed"].operand_share
        0.6666666666666666
        """
        return float(2 * self.direction + 2) / 6

    def stored(self, *, transposes: bool) -> int:
        """Copies of an operand that is read along both directions: the second one is transposed.

        >>> RECIPES["delayed"].stored(transposes=False), RECIPES["mxfp8"].stored(transposes=False)
        (1, 2)
        """
        return 2 if transposes or not self.per_tensor else 1

    def weight_bytes(self, *, transposes: bool) -> Fraction:
        """Bytes an element of a weight in the directions of forward and backward.

        >>> [float(RECIPES[name].weight_bytes(transposes=True)) for name in ("delayed", "nvfp4")]
        [2.0, 1.125]
        """
        return self.weight * self.stored(transposes=transposes)


_MX, _NVFP4 = Fraction(33, 32), Fraction(9, 16)
RECIPES = {
    "delayed": Recipe("TransformerEngine delayed", Fraction(1), Fraction(1), True, False, (8.9, 99)),
    "tensorwise": Recipe("TransformerEngine tensorwise", Fraction(1), Fraction(1), True, True, (8.9, 99)),
    # 32-bit scales of 1 x 128 elements of an activation, and of 128 x 128 of a weight
    "blockwise": Recipe("blockwise", 1 + Fraction(4, 128), 1 + Fraction(4, 128**2), False, True, (9, 10)),
    # 8-bit scales of 32 elements
    "mxfp8": Recipe("mxfp8", _MX, _MX, False, True, (10, 12), gathered=1),
    # 4-bit data, and an 8-bit scale of 16 elements
    "nvfp4": Recipe("nvfp4", _NVFP4, _NVFP4, False, True, (10, 99), "fp4", gathered=0.25),
}  # fmt: skip
"""By the name of ``strategy.float8``; Megatron-LM's own default first."""


def needs_transposes(capability: float) -> bool:
    """Whether a GPU's matrix units take 8-bit operands in one layout alone.

    >>> needs_transposes(9.0), needs_transposes(10.0), needs_transposes(12.0)
    (True, False, True)
    """
    return not (10 <= capability < 12 or capability >= 13)


# -------------------------------------------------------------------------------------- what a framework and a GPU have


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


def check_narrow(fixed: SharedSettings, precisions: list[str]) -> None:
    """Refuse what is said of 8-bit products where no precision has any."""
    flags = [name for name in ("float8_all_gather", "float8_attention") if getattr(fixed, name)]
    stated = ["float8", *flags] if fixed.float8 else flags
    if stated and "fp8-mixed" not in precisions and not optimizer_alone(fixed):
        allowed = f"needs precision fp8-mixed, not {', '.join(precisions)}"
        raise CombinationError(f"strategy.{stated[0]}", getattr(fixed, stated[0]), allowed)
    if not (fixed.float8_transpose_cache or (fixed.float8_all_gather and fixed.adapters)):
        allowed = "is modelled for frozen weights that are 8-bit themselves: --lora and strategy.float8_all_gather=true"
        raise CombinationError("strategy.float8_transpose_cache", False, allowed)


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
