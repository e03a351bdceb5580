"""Recomputation switched on and off in a model between two steps: whole blocks, all of them or every k-th."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memcalc.errors import CombinationError, MemcalcError
from memcalc.formulas.recompute import parse_policy, unit_sizes
from memcalc.frameworks import habits_of
from memcalc.specs.strategy import Strategy

_OWN = {"megatron": "Megatron-LM's recomputation is its own", "deepspeed": "DeepSpeed's engine was not tried"}
"""Frameworks in which nothing is switched, and why."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is the device's allocator running out."""
    return isinstance(error, torch.cuda.OutOfMemoryError)


class Switch:
    """Which blocks of a model are checkpointed.

    The blocks of a Transformers model are its ``GradientCheckpointingLayer``; of another model those that were named,
    or the largest list of modules of one class. ``refusal`` says why nothing can be switched; empty where it can.

    Raises :class:`memcalc.errors.CombinationError` where a model is seen to checkpoint other blocks than its plan says.
    """

    def __init__(self, model: Any, blocks: Any, strategy: Strategy) -> None:
        self._blocks: list[_Block] = []
        self._first = habits_of(strategy.framework).checkpoints_first
        self.refusal = _refusal(model, strategy)
        if self.refusal:
            return
        self._blocks = list(_blocks_of(model, blocks))
        if not self._blocks:
            self.refusal = "no list of blocks was found in the model: name them by blocks="
            return
        planned = self._chosen(strategy.recompute)
        on = [block.on for block in self._blocks]
        if planned is None:
            self.refusal = f"recompute {strategy.recompute} is not made of whole blocks"
        elif on != planned and (any(on) or any(isinstance(block, _Layer) for block in self._blocks)):
            allowed = f"the model checkpoints {sum(on)} of its {len(on)} blocks, the plan {sum(planned)}"
            raise CombinationError("recompute", strategy.recompute, allowed)
        elif on != planned:
            self.refusal = "the model's checkpoints are in its own code"

    def can(self, policy: str) -> bool:
        """Whether a policy can be switched to."""
        try:
            return not self.refusal and self._chosen(policy) is not None
        except MemcalcError:
            return False

    def apply(self, policy: str) -> None:
        """Checkpoint the blocks of a policy from the next forward on."""
        planned = self._chosen(policy) or []
        for block, on in zip(self._blocks, planned, strict=True):
            block.turn(on=on)

    def _chosen(self, policy: str) -> list[bool] | None:
        """Which blocks a policy checkpoints, every k-th as the framework counts; None where not whole blocks."""
        parsed = parse_policy(policy)
        if parsed.kind not in {"none", "full", "every"}:
            return None
        parsed = replace(parsed, skipped=0) if self._first else parsed
        return [size > 0 for size in unit_sizes(parsed, len(self._blocks))]


def _refusal(model: Any, strategy: Strategy) -> str:
    """Why nothing may be switched in a model."""
    if not isinstance(model, nn.Module):
        return "no model was given: model="
    framework = strategy.framework.partition("@")[0]
    if framework in _OWN:
        return _OWN[framework]
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        return "the model is compiled, and another policy would compile it again"
    if getattr(model, "static_graph", False):
        return "DistributedDataParallel has static_graph=True"
    return ""


class _Block:
    """A block that a wrapper of its own forward checkpoints; state dict, parameters and hooks are untouched."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.on = False
        self._own = vars(module).get("forward")
        """A forward of the module's own, not of its class, as some libraries set it."""

    def turn(self, *, on: bool) -> None:
        """Checkpoint the block, or no longer."""
        if on and not self.on:
            self.module.forward = _checkpointed(self.module, self.module.forward)
        elif self.on and not on:
            del self.module.forward
            if self._own is not None:
                self.module.forward = self._own
        self.on = on


class _Wrapped:
    """A block under torch's own checkpoint wrapper, which is on and stays on."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.on = True

    def turn(self, *, on: bool) -> None:
        """Leave it on."""


class _Layer:
    """A block of Transformers, which asks a flag at each forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def on(self) -> bool:
        """Whether the block is checkpointed."""
        return bool(self.module.gradient_checkpointing)

    def turn(self, *, on: bool) -> None:
        """Set the flag, with the function beside it where the model has none yet."""
        if on and not hasattr(self.module, "_gradient_checkpointing_func"):
            self.module._gradient_checkpointing_func = _not_reentrant
        self.module.gradient_checkpointing = on


def _not_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def _checkpointed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that is checkpointed in training."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)

    return run


def _blocks_of(model: nn.Module, named: Any) -> Iterator[Any]:
    """Yield the blocks of a model."""
    wrapped = {id(module._checkpoint_wrapped_module) for module in model.modules() if _is_wrapped(module)}
    layers = [module for module in model.modules() if _is_layer(module)]
    for module in named if named is not None else layers or _largest_list(model):
        if _is_wrapped(module) or id(module) in wrapped:
            yield _Wrapped(module)
        else:
            yield _Layer(module) if _is_layer(module) else _Block(module)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a block of Transformers, by the class that it gives them (without importing it)."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _is_wrapped(module: nn.Module) -> bool:
    return any(kind.__name__ == "CheckpointWrapper" for kind in type(module).__mro__)


def _largest_list(model: nn.Module) -> Sequence[nn.Module]:
    """The list of modules of one class that holds most parameters."""
    lists: list[Sequence[nn.Module]] = []
    for module in model.modules():
        children = list(module.children())
        kinds = {type(getattr(m, "_checkpoint_wrapped_module", m)) for m in children}
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) and len(kinds) == 1:
            lists.append(children)
    return max(lists, key=lambda some: sum(p.numel() for m in some for p in m.parameters()), default=())
