"""Megatron-LM's flags for 8-bit and 4-bit products (d98e8a64 megatron/core/transformer/transformer_config.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.convert.formats.megatron_flags import Flags
    from memcalc.specs.strategy import Strategy

_RECIPES = {name: name for name in ("delayed", "tensorwise", "blockwise", "mxfp8")}
_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "hybrid", "mxfp8": "e4m3"}
"""The usual format of each recipe: that of NVIDIA's own (Megatron-Bridge 05097809 ``training/mixed_precision.py``)."""

_SHARES = "reuse_grad_buf_for_mxfp8_param_ag"
"""Without it weights in MXFP8 are gathered into a buffer that stays (core/distributed/param_and_grad_buffer.py)."""


def set_float8(flags: Flags, narrow: list[str]) -> None:
    """Set what the flags say over 16-bit weights; ``narrow`` names their width."""
    formats = {name: name for name in ("e4m3", "hybrid")}
    eight, four = flags.one_of("fp8_format", formats), flags.one_of("fp4_format", {"e2m1": "e2m1"})
    gathers = [flags.on(name) for name in ("fp8_param_gather", "fp4_param_gather")]
    recipe = flags.one_of("fp8_recipe", {**_RECIPES, "custom": "custom"}, "delayed")
    custom = flags.one_of("fp4_recipe", {"nvfp4": "nvfp4", "custom": "custom"}, "nvfp4") == "custom"
    if eight and four:
        raise flags.reader.error(flags.key("fp4_format"), four, "fp8_format is given too, and Megatron-LM takes one")
    name = "fp4_format" if four else "fp8_format"
    if not (eight or four):
        if flags.on("use_precision_aware_optimizer") and recipe in _RECIPES and recipe != "delayed":
            flags.set("strategy.float8", recipe, "fp8_recipe")  # the optimizer's config has it all the same
        return
    if narrow != ["bf16"]:
        flags.warn(name, "quantized copies of weights that are not bf16; counted without them")
        return
    if custom if four else recipe == "custom":
        flags.warn("fp4_recipe" if four else "fp8_recipe", f"counted as {'nvfp4' if four else 'tensorwise'}")
    flags.set("precision", "fp8-mixed", name)
    source = "fp8_recipe" if not four and flags.has("fp8_recipe") else name
    flags.set("strategy.float8", "nvfp4" if four else _RECIPES.get(recipe, "tensorwise"), source)
    if gathers[bool(four)]:
        flags.set("strategy.float8_all_gather", True, "fp4_param_gather" if four else "fp8_param_gather")
    shares = flags.on(_SHARES)
    if gathers[0] and recipe == "mxfp8" and not four and not shares:
        flags.warn(_SHARES, "without it what is gathered has a buffer of its own, which is not counted")


def float8_flags(plan: Strategy) -> dict[str, Any]:
    """The flags of a strategy."""
    if plan.precision != "fp8-mixed":
        return {"fp8_recipe": _RECIPES.get(plan.float8)}
    recipe, gathers = plan.float8 or "delayed", plan.float8_all_gather or None
    if recipe == "nvfp4":
        return {"fp4_format": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": gathers}
    return {
        "fp8_format": _FORMATS[recipe],
        "fp8_recipe": recipe,
        "fp8_param_gather": gathers,
        _SHARES: (gathers and recipe == "mxfp8") or None,
    }
