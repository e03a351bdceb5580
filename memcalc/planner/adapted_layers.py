"""Which layers of a model get adapters: those that are named, and all that PEFT, Megatron-LM or a framework finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError, UncountedError
from memcalc.frameworks import habits_of
from memcalc.specs.adapters import EVERY, JOINED, ON_STACKS, in_class, release
from memcalc.specs.block import MixtureOfExperts
from memcalc.terms.adapted_layers import adaptable_targets, adapted_tensors
from memcalc.terms.tensors import linear_layers, outside_matrices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.frameworks import Habits
    from memcalc.grid import Layout
    from memcalc.planner.request import Request
    from memcalc.specs.adapters import Lora
    from memcalc.specs.block import Block
    from memcalc.specs.model import Model
    from memcalc.specs.options import SharedSettings


PACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""The packed layer of which a layer is a part."""
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


_QUANTISING = ": --framework fsdp2, hf, ddp or deepspeed, or --to trainer, accelerate, axolotl or deepspeed"
"""Who has a quantised base under adapters, and what is written of it."""


def parallel_fields(request: Request, lora: Lora, precisions: Sequence[str]) -> dict[str, Any]:
    """Fields of adapters beside Megatron-LM's layers, once what is not modelled with them is refused."""
    given, fields, classes = request.given, request.given["fields"], classes_of(request)
    fused = fields.get("lora_kernels") == "fused"
    stated = {
        "quantize": given.get("quantize", "none") != "none",
        "autocast": bool(given.get("autocast")),
        "also-train": bool(given.get("also_train")),
        "strategy.mtp": bool(fields.get("mtp")),
        "strategy.lora_kernels": fields.get("lora_kernels") == "dora" or (fused and classes != "bridge"),
        "strategy.precision_aware": bool(fields.get("precision_aware")),
        "kernels": given.get("kernels", "te") != "te",
    }
    for name in (name for name, differs in stated.items() if differs):
        value = given.get(name.replace("-", "_"), fields.get(name.rpartition(".")[2], precisions[0]))
        other = _QUANTISING if name == "quantize" else f" (--lora {lora})"
        raise UncountedError(name, value, f"it is not modelled beside adapters of Megatron-LM's layers{other}")
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
    if fixed.lora_kernels == "fused" and layout.tp > 1:
        allowed = "TransformerEngine fuses adapters on one tensor-parallel rank alone: give --tp 1"
        raise CombinationError("strategy.lora_kernels", "fused", allowed)
    ranks = max(layout.tp, expert_tp)
    if fixed.lora_classes != "swift" and lora.rank % ranks:
        allowed = f"Megatron-Bridge splits its rank over {ranks} tensor-parallel ranks, which must divide it"
        raise CombinationError("lora", str(lora), allowed)


def splitting(layouts: list[Layout], fixed: SharedSettings, model: Model) -> list[Layout]:
    """Those of some layouts that split the adapters; the first one's error where none does."""
    if fixed.adapters is None:
        return layouts
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


# -------------------------------------------------------------------------- adapters of PEFT, and of frameworks over it


NEWEST = "0.21"
"""The version of PEFT where none is said."""
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
WITHOUT_OUT_PROJ = ("falconh1", "mamba2", "nemotronh")
"""Classes with Mamba-2 mixers of which PEFT refuses ``out_proj``."""
OF_EXPERTS = ("gate", "up", "down")
"""Layers of an expert, whose names stand for the stacked ones there."""
MIXERS_FROM = (0, 16)
"""The release of PEFT that began to refuse them."""
LISTED_FROM, STRING_FROM = (0, 19), (0, 20)
"""Releases of PEFT from which a list of names is converted so, and ``all-linear`` with it; 0.19 fails on the latter."""


def resolved_targets(lora: Lora, model: Model, habits: Habits, peft: str = NEWEST) -> tuple[str, ...]:
    """The layers of the model that get an adapter.

    Without targets: the queries and values, or the packed projection, as PEFT 0.13 ``utils/constants.py`` has it for
    nearly all architectures. What the decoder calls them counts: Qwen2.5-VL packs its tower's alone.
    """
    blocks, converts = linear_targets(model, habits), converts_names(model, habits, peft)
    if not lora.targets:
        if model.architecture in PEFT_TARGETS and not habits.adapters_follow_base:
            return PEFT_TARGETS[model.architecture]
        usual = _usual(model, habits)
        if not usual:
            allowed = f"{model.name} has no attention for usual layers; name some, as in {_named(lora, blocks, habits)}"
            raise CombinationError("lora", str(lora), allowed)
        return usual
    if {*lora.targets} & {*EVERY}:
        _refuse_all(lora, model, habits, peft, converts=converts)
    added = ("router", *OF_EXPERTS) if converts else ()
    if lora.targets == ("all-linear",):
        return _moved(lora, (*blocks, *added), converts=converts)
    if lora.targets == ("all",):
        ends = tuple(dict.fromkeys(m.target for m in outside_matrices(model) if m.target != "embedding"))
        return _moved(lora, (*blocks, *ends, *added), converts=converts)
    known = adaptable(model, habits, peft)
    for name in lora.targets:
        if name not in known and not (habits.splits_packed and PACKED.get(name) in known):
            allowed = f"{model.name} has {', '.join(known)}"
            raise CombinationError("lora", str(lora), allowed)
    # LFM2 calls both out_proj, and PEFT goes by the last part of a layer's path (0.19 tuners/tuners_utils.py)
    alike = ("o", "mixer_out") if any(mixer.kind == "short convolution" for mixer in model.mixers) else ()
    named = (*lora.targets, *alike) if {*alike} & {*lora.targets} else lora.targets
    return _moved(lora, named, converts=converts)


def _usual(model: Model, habits: Habits) -> tuple[str, ...]:
    groups = [group for group in model.groups if group.tower == "decoder"] or model.groups
    names = {m.target for group in groups for m in linear_layers(group.block, stacked=habits.stacks_experts)}
    return ("qkv",) if "qkv" in names else tuple(name for name in ("q", "v", "q_a", "q_b") if name in names)


def adaptable(model: Model, habits: Habits, peft: str = NEWEST) -> tuple[str, ...]:
    """What can be named of a model: linear layers, stacked weights, and what PEFT converts to these."""
    converts = converts_names(model, habits, peft)
    outside = (matrix.target for matrix in outside_matrices(model))
    added = ("router", *OF_EXPERTS) if converts else ()
    stacks = _stacks(model, habits, converts=converts)
    return tuple(dict.fromkeys((*linear_targets(model, habits), *outside, *added, *stacks)))


def _moved(lora: Lora, names: tuple[str, ...], *, converts: bool) -> tuple[str, ...]:
    """Layers with an expert's layers moved to the stacked experts, where PEFT does so: other MLPs lose theirs."""
    moved = tuple(dict.fromkeys(f"experts_{name}" if converts and name in OF_EXPERTS else name for name in names))
    pair, joined = {*JOINED} & {*moved}, "experts_gate_up" in moved
    if (converts and len(pair) == 1) or (pair and joined):
        allowed = "gate and up of stacked experts are one weight: name both, or experts_gate_up for one adapter on it"
        raise CombinationError("lora", str(lora), allowed)
    return moved


def _stacks(model: Model, habits: Habits, *, converts: bool) -> tuple[str, ...]:
    """The stacked weights of a model's experts that can have adapters (``target_parameters``, since PEFT 0.17)."""
    mixtures = [g.block.mlp for g in model.groups if isinstance(g.block.mlp, MixtureOfExperts)]
    if not mixtures or not habits.stacks_experts or habits.own_code is not None:
        return ()
    if any(mixture.every_expert or mixture.unlisted for mixture in mixtures):
        return ()
    inner = ("experts_gate_up",) if mixtures[0].gated else ("experts_up",)
    return (*(JOINED if converts else ()), *inner, "experts_down")


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
    stacked = model.is_moe and habits.stacks_experts and habits.own_code is None
    return stacked and model.architecture in FOLDED and release(peft) >= LISTED_FROM


def adapter_warnings(request: Request, model: Model) -> Iterator[str]:
    """Sentences where a mixture has adapters: on its experts, or on all linear layers, which these are not."""
    lora: Lora | None = request.given.get("lora")
    habits = habits_of(str(request.given.get("framework", "hf")))
    if lora is None or not model.is_moe or not habits.stacks_experts or habits.own_code is not None:
        return
    if habits.packed_weights:
        return
    yield from _left_wide(request, model)
    if {*targets_in(request, lora, model, habits)} & {*ON_STACKS}:
        yield (
            f"PEFT ({_peft(request)} is taken) folds adapters of stacked experts into new weights of all experts of a "
            "block, which are kept for backward unless the block is computed again; 16:q,k,v,o has none of them."
        )
        dropout = float(request.given["fields"].get("lora_dropout") or 0)
        if dropout:
            yield (
                f"PEFT stops at workload.lora_dropout {dropout:g} where adapters are on stacked experts; axolotl goes "
                "on without it there, which is counted."
            )
    elif lora.targets == ("all-linear",):
        yield (
            f"the experts of {model.name} are stacked parameters, as since Transformers 5.0, and hold no adapter; "
            "--framework hf@4.49 counts a layer for each expert."
        )


def _left_wide(request: Request, model: Model) -> Iterator[str]:
    """A sentence where bitsandbytes leaves what most of the weights are."""
    fields, quantize = request.given["fields"], str(request.given.get("quantize", "none"))
    if not quantize.startswith(("nf4", "int8")) or fields.get("quantize_experts"):
        return
    left = f"the experts of {model.name} are stacked parameters, which bitsandbytes does not quantize: they are"
    if fields.get("kbit_experts"):
        yield (
            f"{left} cast to fp32 (PEFT's prepare_model_for_kbit_training), and what their products keep is counted "
            "in 16 bits; axolotl's quantize_moe_experts: true (--set strategy.quantize_experts=true) quantizes them."
        )
    else:
        yield (
            f"{left} counted in 16 bits; where PEFT's prepare_model_for_kbit_training runs, they take 32: "
            "--set strategy.kbit_experts=true."
        )


def _peft(request: Request) -> str:
    """The version of PEFT that is told, or the newest."""
    return str(request.given["fields"].get("peft", NEWEST))


def targets_in(request: Request, lora: Lora, model: Model, habits: Habits) -> tuple[str, ...]:
    """The same under the PEFT of a request, or of Megatron-LM's layers."""
    lora = lora.model_copy(update={"targets": in_class(lora.targets, model.architecture)})
    if habits.packed_weights:
        return megatron_targets(request, lora, model, habits)
    return resolved_targets(lora, model, habits, _peft(request))


def _named(lora: Lora, targets: tuple[str, ...], habits: Habits) -> str:
    """The same rank on layers that are named."""
    return str(lora.model_copy(update={"rank": lora.rank or habits.lora_rank, "targets": targets}))


def _refuse_all(lora: Lora, model: Model, habits: Habits, peft: str, *, converts: bool) -> None:
    """Refuse all linear layers where PEFT stops at them.

    0.19 makes a set of the letters of ``all-linear`` (c97e9c81, utils/transformers_weight_conversion.py); from
    0.16 on it refuses ``out_proj`` of classes with mixers (0.21 tuners/tuners_utils.py,
    ``_check_lora_target_modules_mamba``).
    """
    if converts and release(peft) < STRING_FROM:
        allowed = (
            f"PEFT {peft} finds none of its letters among the layers of {model.name}; name layers, as in 16:q,k,v,o, "
            "or another version: 0.18 leaves the experts alone and 0.20 adapts them (--set strategy.peft=0.20)"
        )
        raise CombinationError("lora", str(lora), allowed)
    if model.architecture in WITHOUT_OUT_PROJ and habits.own_code is None and release(peft) >= MIXERS_FROM:
        rest = _named(lora, linear_targets(model, habits), habits)
        allowed = f"PEFT refuses the output projection of {model.name}'s mixers, which is among them; give {rest}"
        raise CombinationError("lora", str(lora), allowed)
