"""Two training steps of a module on fake tensors, and everything that its forward saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memcalc._version import __version__
from memcalc.errors import CombinationError
from memcalc.probe.live.modules import Built, blocks_of, build, functions, running, takes_length, tensors
from memcalc.probe.live.saved import SavedStorage, node_names, recording
from memcalc.probe.live.step_models import wrap_blocks
from memcalc.probe.live.timeline import Steps, adamw, train
from memcalc.results.probe import ModuleComponents, ModulePart, ModuleProbe, SavedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.probe.live.timeline import Event
    from memcalc.specs.recorded import Mode, Source

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
        saved = _saved(built, blocks)
    with tensors(fake=fake):
        built, blocks = make()
        leaves = [leaf for leaf in tree_leaves((built.args, built.kwargs)) if isinstance(leaf, torch.Tensor)]
        chosen = optimizer_of(built.model, optimizer, implementation)
        with running(built.model):
            steps = train(built.model, blocks, built.run, chosen, inputs=leaves)
        parameters = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
        parts = _parts(built.model, blocks, saved)
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
        peak_at=f"{peak.part or 'the optimizer'}: {peak.op}",
        components=_components(steps, peak),
        phases=phases_of(steps, 2),
        first_phases=phases_of(steps, 1),
        saved=sum(storage.nbytes for storage in saved if storage.weight is None),
        parts=parts,
        tensors=tuple(_tensor(storage) for storage in saved),
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


def _saved(built: Built, blocks: Mapping[str, nn.Module]) -> list[SavedStorage]:
    with running(built.model), recording(built.model, blocks) as recorder:
        loss = built.run()
    return recorder.result(node_names(loss.grad_fn))


def phase_of(event: Event) -> str:
    """The phase of an event: the loss is what runs after the last block, forward and backward."""
    if event.phase == "optimizer":
        return "step"
    return "loss" if event.part == "head" else event.phase


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


def _parts(model: nn.Module, blocks: Mapping[str, nn.Module], storages: list[SavedStorage]) -> tuple[ModulePart, ...]:
    """The blocks with their parameters and saved bytes, after the parts outside of them."""
    inside = {id(p) for block in blocks.values() for p in block.parameters()}
    outside = sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in inside)

    def saved(part: str) -> int:
        return sum(storage.nbytes for storage in storages if storage.part == part and storage.weight is None)

    rows = [("outside the blocks", "", outside, sum(saved(part) for part in ("embedding", "between", "head")))]
    for path, block in blocks.items():
        size = sum(p.numel() for p in block.parameters() if p.requires_grad)
        rows.append((path or "the module", type(block).__name__, size, saved(path)))
    return tuple(ModulePart(path=a, name=b, parameters=c, saved=d) for a, b, c, d in rows)


def _tensor(storage: SavedStorage) -> SavedTensor:
    return SavedTensor(
        part=storage.part, module=storage.module, node=storage.node, shape=storage.shape, dtype=str(storage.dtype)[6:],
        bytes=storage.nbytes, weight=storage.weight or "",
    )  # fmt: skip
