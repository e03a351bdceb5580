"""What optimizers and adapters can be asked: shards, widths and layers, GaLore's settings, quantisation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from memcalc.errors import CombinationError, UncountedError
from memcalc.formulas.optimizer import OptimizerKind
from memcalc.formulas.optimizer_states import FULL, GALORE_RANK
from memcalc.frameworks.megatron import holds_main_weights
from memcalc.planner.adapted_layers import UNCOUNTED, parallel_fields, targets_in
from memcalc.specs.adapters import PARTS_OF_A_BLOCK, AlsoTrained, Lora, release
from memcalc.specs.options import OPTIONS, SharedSettings
from memcalc.terms.moments import form_of, layout_of, optimizer_of
from memcalc.terms.tensors import block_tensors, end_tensors, outside_matrices

if TYPE_CHECKING:
    from memcalc.frameworks import Habits
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model

GALORE = "galore-adamw"
FIELDS_OF_GALORE = ("galore_rank", "galore_targets")
SHARDS = {"flat": "vectors", "zero": "vectors", "rows": "DTensors", "layers": "whole tensors"}
"""What each form of shards is."""


def named_in(request: Request, option: str) -> list[str]:
    """The values of an option that are named."""
    choice = request.choices.get(option)
    named: list[Any] = [request.given.get(option), *(choice.listed if choice is not None else ())]
    return [str(name) for name in named if name is not None]


def _kind(name: str, habits: Habits) -> OptimizerKind:
    return optimizer_of(name, habits.optimizer_impl, habits)


def runs_on(name: str, habits: Habits, stage: int) -> bool:
    """Whether an optimizer runs at a sharding stage of a framework."""
    kind = _kind(name, habits)
    return stage == 0 or form_of(habits, kind) in kind.shards


def check_optimizer(request: Request, habits: Habits, stages: tuple[int, ...]) -> None:
    """Refuse an optimizer that does not run on a framework's shards, and settings of one that is not asked for."""
    named = named_in(request, "optimizer")
    stray = next((name for name in FIELDS_OF_GALORE if name in request.given["fields"]), None)
    if stray is not None and GALORE not in named:
        value = request.given["fields"][stray]
        shown = ",".join(value) if isinstance(value, tuple) else value
        raise CombinationError(f"strategy.{stray}", shown, f"needs --optimizer {GALORE}")
    name = str(request.given.get("optimizer", "adamw"))
    pinned = request.given.get("zero")
    tried = stages if pinned is None else (pinned,)
    alone = not habits.unsharded_alone or pinned == 0 or request.given.get("gpus") == 1
    if not any(runs_on(name, habits, stage) for stage in tried if stage or alone):
        kind = _kind(name, habits)
        shards = f"the shards of {habits.name} are {SHARDS[form_of(habits, kind)]}, and {kind.refusal}"
        unsharded = "--zero 0" if 0 in habits.zero and alone else "--framework ddp, hf or plain"
        raise CombinationError("optimizer", name, f"{shards}; use {unsharded}")
    if name == GALORE:
        _check_galore(request, habits)
    if name in UNCOUNTED and habits.engine and request.given.get("lora") is not None:
        raise UncountedError("optimizer", name, "it is not modelled for adapters of Megatron-LM's layers: adamw")


def _check_galore(request: Request, habits: Habits) -> None:
    if habits.layer_wise:
        raise CombinationError("optimizer", GALORE, f"{habits.name} has adam, sgd, lion, muon and soap")
    if request.given.get("lora") is not None:
        raise CombinationError("optimizer", GALORE, "it projects gradients of the model's own weights: no --lora")
    if request.given.get("tp", 1) > 1:
        raise CombinationError("optimizer", GALORE, "it is modelled without tensor parallelism")


def check_widths(name: str, habits: Habits, precisions: list[str]) -> None:
    """Refuse 16-bit gradients for an optimizer that fails on them."""
    if not _kind(name, habits).wide:
        return
    for precision in precisions:
        if habits.widths[precision].moment < FULL:
            allowed = f"{name} multiplies gradients by fp32 preconditioners, and stops where they have 16 bits"
            raise CombinationError("precision", precision, f"{allowed}; use bf16-autocast or fp32")


def width_without_zero(habits: Habits, precision: str) -> str:
    """The width in which DeepSpeed adds gradients up without ZeRO, and refuses another; empty where any is taken.

    ``_do_optimizer_sanity_check`` (runtime/engine.py of v0.12.3 and edaa722).
    """
    engine = habits.zero_optimizer
    if engine is None or not engine.fp32_accumulation:
        return ""
    wide = engine.wide_without_zero and precision == "bf16-mixed"
    return "fp32" if wide else precision.partition("-")[0]


def check_accumulation(width: str, habits: Habits, precision: str, zero: int) -> None:
    """Refuse a width of DeepSpeed's gradients that its engine refuses."""
    fixed = width_without_zero(habits, precision)
    if zero == 0 and width and fixed and width != fixed:
        allowed = f"is {fixed} without ZeRO, where DeepSpeed refuses another; use --zero 1"
        raise CombinationError("strategy.grad_accum_dtype", width, allowed)


def check_main_weights(fields: dict[str, Any], habits: Habits) -> None:
    """Refuse the precision-aware optimizer where it has no weights that it can hold.

    It stores the low 16 bits of a main weight, of which an 8-bit weight is not the rest (TransformerEngine d0067d0d
    fused_adam.py, ``store_param_remainders``; Megatron-LM's ``shard_model_param`` is None under other recipes).
    """
    if not fields.get("precision_aware"):
        return
    fixed = SharedSettings.model_construct(**fields)
    if fixed.float8_all_gather and holds_main_weights(fixed, habits):
        allowed = (
            "beside strategy.precision_aware 8-bit weights are modelled with main_params_dtype fp32, and "
            "float8 tensorwise, blockwise or mxfp8"
        )
        raise CombinationError("strategy.float8_all_gather", True, allowed)


def galore_fields(name: str, request: Request, model: Model, habits: Habits) -> dict[str, Any]:
    """Rank and targets of GaLore, resolved; nothing under another optimizer."""
    if name != GALORE:
        return {}
    layout, transformers = layout_of(habits), habits.own_code is None
    blocks = [t for group in model.groups for t in block_tensors(group.block, layout) if t.linear]
    if transformers and str(model.hf_class).startswith("GPT2"):
        raise CombinationError("optimizer", name, f"{model.name}'s layers are Conv1D, and it projects nn.Linear")
    inner = tuple(dict.fromkeys(t.target for t in blocks))
    names = tuple(dict.fromkeys((*inner, *(t.target for _, t in end_tensors(model) if t.linear))))
    fields = request.given["fields"]
    targets: tuple[str, ...] = fields.get("galore_targets", ())
    named = tuple(layer for target in targets for layer in _layers(target, inner))
    resolved = {(): inner, ("all-linear",): inner, ("all",): names}.get(targets, named)
    if not set(resolved) <= set(names):
        allowed = f"the linear layers of {model.name} are {', '.join(names)}"
        raise CombinationError("strategy.galore_targets", ",".join(targets), allowed)
    rank = fields.get("galore_rank", GALORE_RANK)
    if not rank:
        raise CombinationError("strategy.galore_rank", rank, "it must be at least 1")
    return {"galore_rank": rank, "galore_targets": resolved}


def _layers(target: str, inner: tuple[str, ...]) -> tuple[str, ...]:
    """The layers of a block that a name stands for: itself, or those of attention or of the MLP."""
    parts = PARTS_OF_A_BLOCK.get(target)
    return (target,) if parts is None else tuple(name for name in inner if name in parts)


def possible(request: Request, model: Model, habits: Habits, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of several optimizers those that a search can take with all else that is pinned.

    A precision that the framework has not rules none of them out: it is refused for itself.
    """
    pinned = request.given.get("precision")
    able = []
    for name in names:
        alone = replace(request, given={**request.given, "optimizer": name}, assumptions={}, choices={})
        alone.given["fields"] = {
            k: v for k, v in alone.given["fields"].items() if name == GALORE or k not in FIELDS_OF_GALORE
        }
        try:
            check_optimizer(alone, habits, habits.zero)
            check_widths(name, habits, [pinned] if pinned in habits.widths else [])
            galore_fields(name, alone, model, habits)
        except CombinationError:
            continue
        able.append(name)
    return tuple(able)


NEED_LORA = tuple(option for option in OPTIONS if option.needs_lora)


def adapter_fields(request: Request, model: Model, habits: Habits, precisions: list[str]) -> dict[str, Any]:
    """The fields of :class:`memcalc.specs.options.SharedSettings` that speak of adapters, resolved."""
    fields: dict[str, Any] = {"autocast": _autocast(request, precisions)}
    lora = request.given.get("lora")
    if lora is None:
        _refuse_without_lora(request)
        return fields
    if not habits.engine and (request.given.get("tp", 1) > 1 or request.given.get("ep", 1) > 1):
        allowed = (
            "under tensor and expert parallelism adapters are modelled for Megatron-LM alone: --framework megatron"
        )
        raise CombinationError("lora", str(lora), allowed)
    beside = parallel_fields(request, lora, precisions) if habits.engine else {}
    quantize = str(request.given.get("quantize", "none"))
    if quantize != "none" and any(not name.startswith(("bf16", "fp16")) or "autocast" in name for name in precisions):
        raise CombinationError(
            "quantize", quantize, "a quantized base needs --precision bf16, bf16-mixed or fp16-mixed"
        )
    if quantize.startswith("gptq") and model.is_moe and habits.stacks_experts and habits.own_code is None:
        # optimum 05418739 gptq/quantizer.py (get_layers); Transformers 5.24 integrations/awq.py: nn.Linear layers
        allowed = (
            f"it replaces linear layers, and the experts of {model.name} are stacked parameters since Transformers "
            "5.0, which such a checkpoint does not fill: --framework hf@4.49 has a layer for each, and --quantize nf4 "
            "leaves them in 16 bits"
        )
        raise CombinationError("quantize", quantize, allowed)
    return {
        **fields,
        **beside,
        "lora": str(_resolved(request, lora, model, habits)),
        "adapter_dtype": _dtype(request, habits, precisions, quantize),
        "also_train": _also_train(request, model),
        "quantize": quantize,
    }


def _resolved(request: Request, lora: Lora, model: Model, habits: Habits) -> Lora:
    """Adapters with their rank and targets; what was left open is noted."""
    resolved = Lora(rank=lora.rank or habits.lora_rank, targets=targets_in(request, lora, model, habits))
    if resolved != lora:
        request.assumptions["lora"] = str(resolved)
    return resolved


def _dtype(request: Request, habits: Habits, precisions: list[str], quantize: str) -> str:
    """PEFT casts adapters to fp32 since 0.12 (``autocast_adapter_dtype``); before, they took a 16-bit base's dtype."""
    if habits.casts_adapters and all(name in ("bf16", "bf16-mixed", "fp16-mixed") for name in precisions):
        if request.get("adapter_dtype", "bf16") != "bf16":
            allowed = f"{habits.name} casts the whole model to {precisions[0].partition('-')[0]}; give --precision fp32"
            raise CombinationError("adapter-dtype", "fp32", allowed)
        return "bf16"
    old = release(request.given["fields"].get("peft", "0.13")) < (0, 12)
    narrow = all(name == "bf16" for name in precisions) if habits.adapters_follow_base else old and quantize == "none"
    return str(request.get("adapter_dtype", "bf16" if narrow else "fp32"))


def _refuse_without_lora(request: Request) -> None:
    for option in NEED_LORA:
        value = (request.given if option.panel else request.given["fields"]).get(option.name)
        if value is not None and (value != "none" or not option.panel):
            raise CombinationError(option.name.replace("_", "-"), value, "it needs --lora")


def _autocast(request: Request, precisions: list[str]) -> bool:
    """Whether autocast stands over a 16-bit base; where the precision's name says so it is on in any case."""
    requested = request.given.get("autocast")
    if requested is None:
        return False
    named = any(name.endswith("-autocast") for name in precisions)
    if requested is False and named:
        raise CombinationError("autocast", False, f"the precision {precisions[0]} is autocast")
    if requested and "fp32" in precisions:
        raise CombinationError("autocast", True, "over fp32 weights it is --precision bf16-autocast or fp16-autocast")
    return bool(requested) and not named


def _also_train(request: Request, model: Model) -> tuple[str, ...]:
    named: tuple[str, ...] = request.given.get("also_train", ())
    known = {m.target for m in outside_matrices(model)}
    for name in named:
        if name not in known:
            raise CombinationError(
                "also-train", name, f"{model.name} has no {name}; it takes {', '.join(known) or 'none'}"
            )
    return tuple(name for name in get_args(AlsoTrained) if name in named)
