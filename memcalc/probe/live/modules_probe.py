"""Two training steps of a module on fake tensors, and everything that its forward saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memcalc import __version__
from memcalc.errors import CombinationError, InputError
from memcalc.probe.live.checkpoints import wrap_blocks
from memcalc.probe.live.modules import Built, blocks_of, build, functions, takes_length, tensors
from memcalc.probe.live.saved import Kept, node_names, recording
from memcalc.probe.live.timeline import Steps, adamw, train
from memcalc.results.module import ModuleComponents, ModulePart, ModuleProbe, SavedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memcalc.probe.live.timeline import Event
    from memcalc.probe.module import Source
    from memcalc.specs.recorded import Mode

OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
PHASES = ("forward", "loss", "backward", "step")
KINDS = {"parameter": "parameters", "buffer": "buffers", "input": "inputs", "grad": "gradients", "state": "optimizer"}


def probe_module(
    source: Source,
    *,
    precision: str,
    mode: Mode,
    recompute: str,
    optimizer: str,
    implementation: str,
    micro_batch: int,
    seq_len: int,
    fake: bool = True,
) -> ModuleProbe:
    """Train a module for two steps, and list what its forward saves; ``fake`` tensors, or real ones on the CPU."""
    called = functions(source)
    seq_len = seq_len if takes_length(called) else 1

    def make() -> tuple[Built, dict[str, nn.Module]]:
        built = build(source, called, mode, micro_batch, seq_len)
        blocks = blocks_of(built.model, source.block_class or None)
        wrap_blocks(blocks, recompute)
        return built, blocks

    with tensors(fake=fake):
        built, blocks = make()
        kept = _saved(built, blocks)
    with tensors(fake=fake):
        built, blocks = make()
        leaves = [leaf for leaf in tree_leaves((built.args, built.kwargs)) if isinstance(leaf, torch.Tensor)]
        chosen = optimizer_of(built.model, optimizer, implementation)
        steps = _guarded(built, lambda: train(built.model, blocks, built.run, chosen, inputs=leaves))
        parameters = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
        parts = _parts(built.model, blocks, kept)
    peak = steps.peak()
    return ModuleProbe(
        version=__version__,
        module=source.module,
        torch=str(torch.__version__),
        loss=built.taken,
        precision=precision,
        recompute=recompute,
        optimizer=optimizer,
        micro_batch=micro_batch,
        seq_len=seq_len,
        parameters=parameters,
        peak=peak.live,
        peak_phase=phase_of(peak),
        peak_at=f"{peak.place or 'the optimizer'}: {peak.op}",
        components=_components(steps, peak),
        phases=phases_of(steps, 2),
        first_phases=phases_of(steps, 1),
        saved=sum(one.nbytes for one in kept if one.weight is None),
        parts=parts,
        tensors=tuple(_tensor(one) for one in kept),
        file="",
        notes=(),
    )


def optimizer_of(model: nn.Module, name: str, implementation: str) -> torch.optim.Optimizer:
    """An optimizer of torch over what is trained."""
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise CombinationError("optimizer", name, f"steps on fake tensors are made by {known}; plan knows the others")
    if name == "adamw":
        return adamw(model, implementation)
    trained = [p for p in model.parameters() if p.requires_grad]
    momentum = 0.9 if name == "sgd-momentum" else 0.0
    choice: dict[str, Any] = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    return torch.optim.SGD(trained, lr=1e-3, momentum=momentum, **choice)


def _guarded(built: Built, act: Callable[[], Any]) -> Any:
    """Do something with a user's module, whose errors are the user's."""
    try:
        return act()
    except InputError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        said = f"a step of it failed: {type(error).__name__}: {text}"
        raise InputError("module", type(built.model).__name__, said) from error


def _saved(built: Built, blocks: Mapping[str, nn.Module]) -> list[Kept]:
    def run() -> list[Kept]:
        with recording(built.model, blocks) as recorder:
            loss = built.run()
        return recorder.result(node_names(loss.grad_fn))

    found: list[Kept] = _guarded(built, run)
    return found


def phase_of(event: Event) -> str:
    """The phase of an event: the loss is what runs after the last block, forward and backward."""
    if event.phase == "optimizer":
        return "step"
    return "loss" if event.place == "head" else event.phase


def phases_of(steps: Steps, step: int) -> dict[str, int]:
    """The largest live sum of each phase of a step."""
    tops = dict.fromkeys(PHASES, 0)
    for event in steps.events:
        if event.step == step:
            tops[phase_of(event)] = max(tops[phase_of(event)], event.live)
    return tops


def _components(steps: Steps, peak: Event) -> ModuleComponents:
    """What is alive at the peak, by kind."""
    sums = dict.fromkeys(ModuleComponents.model_fields, 0)
    for kind, size in steps.by_kind(peak).items():
        sums[KINDS.get(kind, "activations")] += size
    return ModuleComponents(**sums)


def _parts(model: nn.Module, blocks: Mapping[str, nn.Module], kept: list[Kept]) -> tuple[ModulePart, ...]:
    """The blocks with their sizes, and what stands around them."""
    inside = {id(p) for block in blocks.values() for p in block.parameters()}
    outside = sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in inside)

    def saved(place: str) -> int:
        return sum(one.nbytes for one in kept if one.place == place and one.weight is None)

    rows = [("outside the blocks", "", outside, sum(saved(place) for place in ("embedding", "between", "head")))]
    for path, block in blocks.items():
        size = sum(p.numel() for p in block.parameters() if p.requires_grad)
        rows.append((path or "the module", type(block).__name__, size, saved(path)))
    return tuple(ModulePart(path=a, name=b, parameters=c, saved=d) for a, b, c, d in rows)


def _tensor(kept: Kept) -> SavedTensor:
    return SavedTensor(
        part=kept.place, module=kept.module, node=kept.node, shape=kept.shape, dtype=str(kept.dtype)[6:],
        bytes=kept.nbytes, weight=kept.weight or "",
    )  # fmt: skip
