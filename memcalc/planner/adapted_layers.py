"""Which layers of a model get adapters: those that are named, and all that PEFT, or a framework over it, finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import CombinationError
from memcalc.frameworks import habits_of
from memcalc.specs.adapters import EVERY, release
from memcalc.terms.tensors import linear_layers, outside_matrices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.frameworks import Habits
    from memcalc.planner.request import Request
    from memcalc.specs.adapters import Lora
    from memcalc.specs.model import Model

NEWEST = "0.21"
"""The version of PEFT where none is said."""
PACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""The packed layer of which a layer is a part."""
PEFT_TARGETS = {"phi": ("q", "v", "up", "down"), "nemotronh": ("q", "k", "v", "o")}
"""Classes with more targets by default than queries and values (PEFT 0.21 ``utils/constants.py``)."""
LINEAR_ROUTERS = ("gemma4", "gemma4text")
"""Classes with a linear layer in their router; others' is a module with a weight of its own, or returns two tensors, on
which an adapter fails: Phi-3.5-MoE's (Transformers 5.24)."""
FOLDED = frozenset({
    "deepseekv2", "deepseekv3", "glm4moe", "glm4moelite", "glm4vmoe", "minimaxm2", "mixtral", "olmoe", "qwen3moe",
    "qwen3next", "afmoe", "cohere2moe", "dots1", "ernie45moe", "exaonemoe", "flexolmo", "hunyuanv1moe", "mellum",
    "minimax", "solaropen",
})  # fmt: skip
"""Classes whose stacked experts PEFT adapts in the place of layers with the names of an expert's: the conversions of
Transformers that are like Mixtral's or Qwen2-MoE's (0.21 utils/transformers_weight_conversion.py)."""
OF_EXPERTS = ("gate", "up", "down")
"""Layers of an expert, whose names stand for the stacked ones there."""
LISTED_FROM, STRING_FROM = (0, 19), (0, 20)
"""Releases of PEFT from which a list of names is converted so, and ``all-linear`` with it; 0.19 fails on the latter."""


def resolved_targets(lora: Lora, model: Model, habits: Habits, peft: str = NEWEST) -> tuple[str, ...]:
    """The layers of the model that get an adapter.

    Without targets: the queries and values, or the packed projection, as PEFT 0.13 ``utils/constants.py`` has it for
    nearly all architectures.
    """
    blocks = linear_targets(model, habits)
    outside = list(dict.fromkeys(m.target for m in outside_matrices(model)))
    known, converts = [*blocks, *outside], converts_names(model, habits, peft)
    if not lora.targets:
        if model.architecture in PEFT_TARGETS and not habits.adapters_follow_base:
            return PEFT_TARGETS[model.architecture]
        return ("qkv",) if "qkv" in blocks else tuple(name for name in ("q", "v", "q_a", "q_b") if name in blocks)
    if converts and {*OF_EXPERTS, "router", *EVERY} & {*lora.targets}:
        raise _folded(lora, model, peft)
    if lora.targets == ("all-linear",):
        return tuple(blocks)
    if lora.targets == ("all",):
        return tuple(name for name in known if name != "embedding")
    for name in lora.targets:
        if name not in known and not (habits.splits_packed and PACKED.get(name) in known):
            allowed = f"{model.name} has {', '.join(known)}"
            raise CombinationError("lora", str(lora), allowed)
    # LFM2 calls both out_proj, and PEFT goes by the last part of a layer's path (0.19 tuners/tuners_utils.py)
    alike = ("o", "mixer_out") if any(mixer.kind == "short convolution" for mixer in model.mixers) else ()
    return tuple(dict.fromkeys((*lora.targets, *alike))) if {*alike} & {*lora.targets} else lora.targets


def linear_targets(model: Model, habits: Habits) -> tuple[str, ...]:
    """The linear layers of the model's blocks that can have an adapter."""
    stacked = habits.stacks_experts
    blocks = dict.fromkeys(m.target for g in model.groups for m in linear_layers(g.block, stacked=stacked))
    if model.is_moe and stacked and model.architecture not in LINEAR_ROUTERS:
        blocks.pop("router", None)
    if any(mixer.kind == "Mamba-2 mixer" for mixer in model.mixers):
        # Its kernel reads that weight itself, so that PEFT refuses it (0.19 tuners/tuners_utils.py,
        # _check_lora_target_modules_mamba)
        blocks.pop("mixer_out", None)
    if model.runs_every_expert:
        # Llama 4's router is a linear layer that returns two tensors, on which an adapter fails (PEFT 0.21)
        blocks.pop("router", None)
    return tuple(blocks)


def converts_names(model: Model, habits: Habits, peft: str = NEWEST) -> bool:
    """Whether PEFT takes the names of an expert's layers, and of the router, for the stacked experts'."""
    stacked = model.is_moe and habits.stacks_experts
    return stacked and model.architecture in FOLDED and release(peft) >= LISTED_FROM


def adapter_warnings(request: Request, model: Model) -> Iterator[str]:
    """A sentence where all linear layers have adapters, and the experts are none."""
    lora: Lora | None = request.given.get("lora")
    habits, peft = habits_of(str(request.given.get("framework", "hf"))), _peft(request)
    if lora is None or lora.targets != ("all-linear",) or not model.is_moe or habits.own_code is not None:
        return
    if habits.stacks_experts and not converts_names(model, habits, peft):
        yield (
            f"the experts of {model.name} are stacked parameters, as since Transformers 5.0, and hold no adapter; "
            "--framework hf@4.49 counts a layer for each expert."
        )


def _peft(request: Request) -> str:
    """The version of PEFT that is told, or the newest."""
    return str(request.given["fields"].get("peft", NEWEST))


def targets_in(request: Request, lora: Lora, model: Model, habits: Habits) -> tuple[str, ...]:
    """The same under the PEFT of a request."""
    return resolved_targets(lora, model, habits, _peft(request))


def _folded(lora: Lora, model: Model, peft: str) -> CombinationError:
    """Adapters that PEFT folds into stacked experts.

    ``ParamWrapper`` (0.21 tuners/lora/layer.py) makes all experts of a block anew in each forward, and a gradient of
    their size in backward.
    """
    if LISTED_FROM <= release(peft) < STRING_FROM and lora.targets == ("all-linear",):
        made = f"PEFT {peft} finds none of its letters among the layers of {model.name} (from 0.20 on it does)"
    else:
        made = "PEFT folds adapters of stacked experts into a copy of all of a block's experts, which is not modelled"
    others = "name other layers, as in 16:q,k,v,o, PEFT 0.18, which leaves them alone (--set strategy.peft=0.18)"
    return CombinationError(
        "lora", str(lora), f"{made}; {others}, or a release with a layer for each expert (--framework hf@4.49)"
    )
