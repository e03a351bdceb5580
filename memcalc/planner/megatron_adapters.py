"""What adapters beside Megatron-LM's layers can be asked: classes, layers, ranks and layouts that divide them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError, UncountedError
from memcalc.specs.adapters import EVERY
from memcalc.terms.parallel_adapters import adaptable_targets, adapted_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.frameworks import Habits
    from memcalc.grid import Layout
    from memcalc.planner.request import Request
    from memcalc.specs.adapters import Lora
    from memcalc.specs.block import Block
    from memcalc.specs.model import Model
    from memcalc.specs.options import SharedSettings

PACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""The layer of Megatron-LM that another's layer is a part of."""
USUAL = ("qkv", "o", "gate_up", "up", "down")
"""linear_qkv, linear_proj, linear_fc1 and linear_fc2 (Megatron-Bridge 067f987d peft/lora.py, ``target_modules``)."""
UNCOUNTED = ("muon", "soap")


def megatron_targets(request: Request, lora: Lora, model: Model, habits: Habits) -> tuple[str, ...]:
    """The layers of Megatron-LM's blocks that get an adapter.

    By default those that Megatron-Bridge lists, and under ms-swift all linear layers (3602360a swift/megatron/utils,
    ``find_all_linears``).
    """
    _check_written(lora, model, habits)
    known = adaptable_targets(group.block for group in model.groups)
    if {*lora.targets} & {*EVERY} or (not lora.targets and classes_of(request) == "swift"):
        if "all" in lora.targets:
            raise UncountedError("lora", str(lora), "adapters on the output layer are not modelled: give all-linear")
        return known
    if not lora.targets:
        return tuple(name for name in USUAL if name in known)
    ungated = "gate_up" not in known and "up" in known
    named = tuple("up" if ungated and name == "gate_up" else name for name in lora.targets)
    for name in (name for name in named if name not in known):
        packed = tuple(dict.fromkeys(PACKED.get(target, target) for target in lora.targets))
        able = f", as in {lora.rank or habits.lora_rank}:{','.join(packed)}" if {*packed} <= {*known} else ""
        allowed = f"Megatron-LM's layers of {model.name} are {', '.join(known)}{able}; {name} is none of them"
        raise CombinationError("lora", str(lora), allowed)
    return named


def classes_of(request: Request) -> str:
    """Whose adapters they are."""
    return str(request.given["fields"].get("lora_classes") or "bridge")


def _check_written(lora: Lora, model: Model, habits: Habits) -> None:
    """Refuse releases without adapters, and blocks that are not traced as Megatron-LM writes them."""
    if not habits.engine:
        raise CombinationError("lora", str(lora), "Megatron-LM has adapters from core 0.5 on: --framework megatron")
    if not all(_is_written(group.block) for group in model.groups):
        allowed = (
            f"beside Megatron-LM's layers adapters are not modelled for the blocks of {model.name}: --framework hf"
        )
        raise UncountedError("lora", str(lora), allowed)


def _is_written(block: Block) -> bool:
    plain = block.cross_attention is None and block.mixer is None and not block.parallel
    return plain and block.attention is not None and block.norm_place == "pre" and block.norms == 2


def parallel_fields(request: Request, lora: Lora, precisions: Sequence[str]) -> dict[str, Any]:
    """Fields of adapters beside Megatron-LM's layers, once what is not modelled with them is refused."""
    given, fields = request.given, request.given["fields"]
    stated = {
        "quantize": given.get("quantize", "none") != "none",
        "autocast": bool(given.get("autocast")),
        "also-train": bool(given.get("also_train")),
        "strategy.mtp": bool(fields.get("mtp")),
        "strategy.lora_kernels": fields.get("lora_kernels", "model") != "model",
        "strategy.precision_aware": bool(fields.get("precision_aware")),
        "precision": any(name.startswith("fp8") for name in precisions),
        "kernels": given.get("kernels", "te") != "te",
    }
    for name in (name for name, differs in stated.items() if differs):
        value = given.get(name.replace("-", "_"), fields.get(name.rpartition(".")[2], precisions[0]))
        raise UncountedError(name, value, f"it is not modelled beside adapters of Megatron-LM's layers (--lora {lora})")
    classes = classes_of(request)
    if "lora_classes" not in fields:
        request.assumptions["strategy.lora_classes"] = classes
    return {"lora_classes": classes}


def check_splits(fixed: SharedSettings, layout: Layout, model: Model) -> None:
    """Refuse a layout over whose ranks the adapters' ranks, or experts', cannot be split."""
    lora = fixed.adapters
    if lora is None or not fixed.lora_classes:
        return
    routed = any(t.routed for group in model.groups for t in adapted_tensors(group.block, lora.targets))
    expert_tp = (fixed.etp or layout.tp) if routed else 1
    if fixed.lora_classes == "swift" and expert_tp > 1:
        allowed = f"ms-swift has no adapters of experts that {expert_tp} ranks split: give strategy.etp=1"
        raise CombinationError("lora", str(lora), allowed)
    ranks = max(layout.tp, expert_tp)
    if fixed.lora_classes != "swift" and lora.rank % ranks:
        allowed = f"Megatron-Bridge splits its rank over {ranks} tensor-parallel ranks, which must divide it"
        raise CombinationError("lora", str(lora), allowed)


def splitting(layouts: list[Layout], fixed: SharedSettings, model: Model) -> list[Layout]:
    """Those of some layouts that split the adapters; the first one's error where none does."""
    able, error = [], None
    for layout in layouts:
        try:
            check_splits(fixed, layout, model)
        except CombinationError as raised:
            error = error or raised
        else:
            able.append(layout)
    if error is not None and not able:
        raise error
    return able
