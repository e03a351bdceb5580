"""Frameworks with model code of their own: every architecture is then written in the framework's operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    attention = block.attention.model_copy(
        update={**code.attention, "qk_norm_kind": _norm(block.attention.qk_norm_kind, code)}
    )
    changed = {"attention": attention, "mlp": _mlp(block.mlp, code), "norm": _norm(block.norm, code)}
    return block.model_copy(update={**code.block, **changed})


def _mlp(mlp: Mlp | MixtureOfExperts, code: OwnCode) -> Mlp | MixtureOfExperts:
    fields = code.mlp if hasattr(mlp, "packed") else {}
    return mlp.model_copy(update={**fields, "activation": ONE_KERNEL.get(mlp.activation, mlp.activation)})


def _norm(norm: Norm, code: OwnCode) -> Norm:
    return norm.model_copy(update=code.norm) if norm.kind == "rmsnorm" else norm
