"""Recompute policies: those that a search tries, and which of Megatron-LM's modules a model and a recipe have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import CombinationError
from memcalc.formulas.recompute import parse_policy
from memcalc.planner.optimizers import named_in

if TYPE_CHECKING:
    from memcalc.frameworks import Habits
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model
    from memcalc.specs.options import SharedSettings

OUTPUTS = frozenset({"layernorm", "moe_act"})
"""Modules whose outputs alone are dropped and computed again, which TransformerEngine's delayed scaling forbids
(Megatron-LM d98e8a64 core/transformer/transformer_config.py, ``__post_init__``)."""


def policies(model: Model) -> list[str]:
    """Recompute policies that a search tries, the cheapest first, with the counts that make sense for so many blocks.

    Of ``block-N`` a quarter, a half and three quarters of the blocks: between no block and all of them. Where attention
    is latent, Megatron-LM's modules that cost next to nothing are tried together: DeepSeek-V3 recomputes its norms and
    the up projections of its latents (arXiv:2412.19437, section 3.2.3).
    """
    layers = model.num_layers
    parts = ["none", *_modules(model), "selective-core-attn", "selective-ops", "attention", "mlp"]
    blocks = dict.fromkeys(f"block-{layers * k // 4}" for k in (1, 2, 3) if layers * k // 4)
    some = [f"every-{k}" for k in (8, 4, 3, 2) if k < layers]
    return [*parts, *some, *blocks, "sqrt", *(f"uniform-{k}" for k in (4, 2) if k < layers), "full"]


def _modules(model: Model) -> list[str]:
    if not _has_latents(model):
        return []
    first = "modules:layernorm,mla_up_proj"
    return [first, f"{first},moe_act"] if model.is_moe else [first]


def allowed(names: list[str], fixed: SharedSettings, precisions: list[str], habits: Habits) -> list[str]:
    """Of some policies those that the recipe of 8-bit products allows."""
    return [name for name in names if not _forbidden(name, fixed, precisions, habits)]


def check_modules(request: Request, model: Model, fixed: SharedSettings, precisions: list[str], habits: Habits) -> None:
    """Refuse modules that the model has not, and those whose recomputation the recipe of 8-bit products forbids."""
    for name in named_in(request, "recompute"):
        listed = parse_policy(name).parts if name.startswith("modules:") else frozenset()
        lacks = [("mla_up_proj", "latent attention", _has_latents(model)), *_routed(model)]
        for module, what, there in lacks:
            if module in listed and not there:
                raise CombinationError("recompute", name, f"{model.name} has no {what}, of which {module} is a part")
        if _forbidden(name, fixed, precisions, habits):
            reason = "TransformerEngine's delayed scaling has no layernorm and moe_act: another strategy.float8"
            raise CombinationError("recompute", name, reason)


def _routed(model: Model) -> list[tuple[str, str, bool]]:
    return [(module, "routed experts", model.is_moe) for module in ("moe", "moe_act")]


def _has_latents(model: Model) -> bool:
    return any(attention.latent is not None for attention in model.attentions)


def _forbidden(name: str, fixed: SharedSettings, precisions: list[str], habits: Habits) -> bool:
    if not (name.startswith("modules:") and OUTPUTS & parse_policy(name).parts and habits.engine):
        return False
    return any(p.startswith("fp8") for p in precisions) and (fixed.float8 or habits.float8[0]) == "delayed"
