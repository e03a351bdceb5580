"""What the guard does to torch: reads the caching allocator, and switches recomputation between two steps.

Whole blocks are recomputed, all of them or every k-th.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from memcalc.errors import CombinationError, MemcalcError
from memcalc.formulas.recompute import parse_policy, unit_sizes
from memcalc.frameworks import habits_of
from memcalc.probe.guard.options import Meter, NoMeter, Reading
from memcalc.specs.strategy import Strategy


class CudaMeter:
    """``torch.cuda``'s own statistics of the current device: one call of its C++ code, which does not synchronise.

    A reset of the peaks is torch's own, so that ``torch.cuda.max_memory_allocated`` begins anew with each window;
    without ``resets`` they are left alone, and are those since the user's own last reset.
    """

    def __init__(self, *, resets: bool = True) -> None:
        self._resets = resets

    def read(self) -> Reading | None:
        """Return the figures of ``torch.cuda.memory_stats``; None before CUDA is used."""
        stats = torch.cuda.memory_stats_as_nested_dict()
        if not stats:
            return None
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Reading(
            allocated=allocated["current"],
            allocated_peak=allocated["peak"],
            reserved=reserved["current"],
            reserved_peak=reserved["peak"],
            retries=stats["num_alloc_retries"],
            ooms=stats["num_ooms"],
        )

    def reset_peaks(self) -> None:
        """Begin a new window."""
        if self._resets and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def release(self) -> None:
        """Give cached memory back to the driver."""
        torch.cuda.empty_cache()


def device_bytes() -> int | None:
    """Return the memory of this rank's GPU [bytes]; None where there is none."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def wide_buffer_bytes(model: Any) -> int:
    """Return the bytes of a model's fp32 buffers, such as tables of angles; 0 where it is no module."""
    buffers = model.buffers() if isinstance(model, torch.nn.Module) else ()
    return sum(each.untyped_storage().nbytes() for each in buffers if each.dtype == torch.float32)


def usual_meter(*, resets: bool = True) -> Meter:
    """Return the meter of this machine."""
    return CudaMeter(resets=resets) if torch.cuda.is_available() else NoMeter()


class Ranks:
    """The ranks of the run, one where torch.distributed is not initialised.

    What is agreed goes over a group of its own on gloo, so that the device's stream is neither used nor waited for;
    without gloo it goes over the run's own group, which waits for the device at reporting steps.
    """

    def __init__(self) -> None:
        self.many = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if self.many else int(os.environ.get("RANK", "0"))
        self.world = distributed.get_world_size() if self.many else int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", str(self.rank)))
        has_gloo = self.many and distributed.is_gloo_available()
        self._group = distributed.new_group(backend="gloo") if has_gloo else None
        self._device = "cpu" if has_gloo or not torch.cuda.is_available() else "cuda"

    def check(self, gpus: int) -> None:
        """Refuse a run on other ranks than the plan's, on which its global batch would be another."""
        if self.world != gpus:
            raise CombinationError("ranks", self.world, f"the plan is for {gpus}, and its global batch depends on them")
        if self.world > 1 and not self.many:
            allowed = "torch.distributed must be initialised first, so that all ranks take the same step"
            raise CombinationError("ranks", self.world, allowed)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return for each number the largest of all ranks, which must all call this at the same step."""
        if not self.many:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.int64, device=self._device)
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX, group=self._group)
        return [int(value) for value in agreed.tolist()]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None
        self.many = False


Span = Callable[[], float | None]
"""A span of time [ms], or None until the device has reached its end."""


class RecomputeTimer:
    """Times recomputation while it is armed: by CUDA events that are read once they have passed, or by the clock."""

    def __init__(self) -> None:
        self.armed = False
        self._inside = self._on_device = False
        self._samples: list[list[Span]] = []
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Patch torch's checkpoints to be timed, until :meth:`remove`."""
        frame, function, timer = checkpoints._CheckpointFrame, checkpoints.CheckpointFunction, self
        backward = function.backward

        class _CheckpointFrame(frame):  # type: ignore[valid-type, misc]
            """torch's own frame, with a function to recompute that can be timed."""

            def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
                super().__init__(timer.timed(recompute_fn), *args, **kwargs)

        def timed_backward(ctx: Any, *grads: Any) -> Any:
            if timer.armed:
                ctx.run_function = timer.timed(ctx.run_function)
            return backward(ctx, *grads)

        checkpoints._CheckpointFrame = _CheckpointFrame
        function.backward = staticmethod(timed_backward)
        self._undo = [
            lambda: setattr(checkpoints, "_CheckpointFrame", frame),
            lambda: setattr(function, "backward", staticmethod(backward)),
        ]

    def remove(self) -> None:
        """Leave torch as it was; frames that are still alive go on without being timed."""
        self.armed = False
        while self._undo:
            self._undo.pop()()

    def timed(self, again: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is timed while the timer is armed; one inside another counts once."""

        def run(*args: Any) -> Any:
            if not self.armed or self._inside:
                return again(*args)
            self._inside = True
            end = _begin_on_device() if self._on_device else _begin()
            try:
                return again(*args)
            finally:  # torch stops a recomputation early by an exception of its own
                self._samples[-1].append(end())
                self._inside = False

        return run

    def arm(self) -> None:
        """Begin a sample: time from here on."""
        self.armed = True
        self._on_device = torch.cuda.is_initialized()
        self._samples.append([])

    def disarm(self) -> None:
        """Time no more."""
        self.armed = False

    def collect(self) -> float | None:
        """Return the time of the last sample that the device has finished [ms]; None where there is none.

        It never waits for the device: what is not known yet is looked at again in the next window.
        """
        for index in range(len(self._samples) - 1, -1, -1):
            times = [span() for span in self._samples[index]]
            ready = [ms for ms in times if ms is not None]
            if len(ready) == len(times):
                del self._samples[: index + 1]
                return sum(ready, 0.0)
        return None


def _begin_on_device() -> Callable[[], Span]:
    """Begin a span of the device's stream; what is returned ends it."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def end() -> Span:
        last.record()
        return lambda: first.elapsed_time(last) if last.query() else None

    return end


def _begin() -> Callable[[], Span]:
    """Begin a span of the clock."""
    started = time.perf_counter()

    def end() -> Span:
        took = 1e3 * (time.perf_counter() - started)
        return lambda: took

    return end


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
