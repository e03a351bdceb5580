"""Adapters and quantisation of a request: checked against the model, the framework and the precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from memcalc.errors import CombinationError
from memcalc.formulas.matrices import block_matrices, outside_matrices
from memcalc.specs.adapters import AlsoTrained, Lora, release

if TYPE_CHECKING:
    from memcalc.frameworks import Habits
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model

NEED_LORA = ("adapter_dtype", "also_train", "quantize")
FIELDS_OF_LORA = ("lora_dropout", "lora_kernels", "gptq_group", "prepare_kbit", "bnb", "peft")
PACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""The packed layer of which a layer is a part."""


def adapter_fields(request: Request, model: Model, habits: Habits, precisions: list[str]) -> dict[str, Any]:
    """The fields of :class:`memcalc.grid.Fixed` that speak of adapters, resolved."""
    fields: dict[str, Any] = {"autocast": _autocast(request, precisions)}
    lora = request.given.get("lora")
    if lora is None:
        _refuse_without_lora(request)
        return fields
    if request.given.get("tp", 1) > 1 or request.given.get("ep", 1) > 1:
        raise CombinationError("lora", str(lora), "adapters are modelled without tensor and expert parallelism")
    quantize = str(request.given.get("quantize", "none"))
    if quantize != "none" and any(not name.startswith(("bf16", "fp16")) or "autocast" in name for name in precisions):
        raise CombinationError(
            "quantize", quantize, "a quantised base needs --precision bf16, bf16-mixed or fp16-mixed"
        )
    return {
        **fields,
        "lora": Lora(rank=lora.rank, targets=resolved_targets(lora, model, habits)),
        "adapter_dtype": _dtype(request, habits, precisions, quantize),
        "also_train": _also_train(request, model),
        "quantize": quantize,
    }


def _dtype(request: Request, habits: Habits, precisions: list[str], quantize: str) -> str:
    """PEFT casts adapters to fp32 since 0.12 (``autocast_adapter_dtype``); before, they took a 16-bit base's dtype."""
    old = release(request.given["fields"].get("peft", "0.13")) < (0, 12)
    narrow = all(name == "bf16" for name in precisions) if habits.adapters_follow_base else old and quantize == "none"
    return str(request.get("adapter_dtype", "bf16" if narrow else "fp32"))


def _refuse_without_lora(request: Request) -> None:
    named = [name for name in NEED_LORA if request.given.get(name) not in {None, "none"}]
    named += [name for name in FIELDS_OF_LORA if name in request.given["fields"]]
    if named:
        raise CombinationError(named[0].replace("_", "-"), _said(request, named[0]), "it needs --lora")


def _said(request: Request, name: str) -> object:
    return request.given.get(name, request.given["fields"].get(name))


def _autocast(request: Request, precisions: list[str]) -> bool:
    """Whether autocast stands over a 16-bit base; where the precision's name says so it is on in any case."""
    asked = request.given.get("autocast")
    if asked is None:
        return False
    named = any(name.endswith("-autocast") for name in precisions)
    if asked is False and named:
        raise CombinationError("autocast", False, f"the precision {precisions[0]} is autocast")
    if asked and "fp32" in precisions:
        raise CombinationError("autocast", True, "over fp32 weights it is --precision bf16-autocast or fp16-autocast")
    return bool(asked) and not named


def resolved_targets(lora: Lora, model: Model, habits: Habits) -> tuple[str, ...]:
    """The layers of the model that get an adapter.

    Without targets: the queries and values, or the packed projection, as PEFT 0.13 ``utils/constants.py`` has it for
    nearly all architectures.
    """
    blocks = dict.fromkeys(m.target for group in model.groups for m in block_matrices(group.block))
    outside = dict.fromkeys(m.target for m in outside_matrices(model))
    known = [*blocks, *outside]
    if not lora.targets:
        return ("qkv",) if "qkv" in blocks else tuple(name for name in ("q", "v", "q_a", "q_b") if name in blocks)
    if lora.targets == ("all-linear",):
        return tuple(blocks)
    if lora.targets == ("all",):
        return tuple(name for name in known if name != "embedding")
    for name in lora.targets:
        if name not in known and not (habits.splits_packed and PACKED.get(name) in known):
            allowed = f"{model.name} has {', '.join(known)}"
            raise CombinationError("lora", str(lora), allowed)
    return lora.targets


def _also_train(request: Request, model: Model) -> tuple[str, ...]:
    named: tuple[str, ...] = request.given.get("also_train", ())
    known = {m.target for m in outside_matrices(model)}
    for name in named:
        if name not in known:
            raise CombinationError(
                "also-train", name, f"{model.name} has no {name}; it takes {', '.join(known) or 'none'}"
            )
    return tuple(name for name in get_args(AlsoTrained) if name in named)
