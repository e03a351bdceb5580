"""One forward and backward of a module, followed storage by storage and part by part."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memcalc._version import __version__
from memcalc.errors import CombinationError, InputError
from memcalc.probe.live.modules import Built, blocks_of, build, functions, running, takes_length, tensors
from memcalc.probe.live.saved import SavedStorage, Where, node_names, recording
from memcalc.probe.live.step_models import wrap_blocks
from memcalc.probe.live.timeline import Steps, Timeline, adamw, resizing, train
from memcalc.probe.module_parts import Life, Raw
from memcalc.results.probe import ModuleComponents, ModulePart, ModuleProbe, SavedTensor

if TYPE_CHECKING:
    from memcalc.probe.live.timeline import Event
    from memcalc.specs.recorded import Mode, Source


BEFORE, AFTER = "embedding", "head"


class Follower(Timeline):
    """A timeline with the module of each allocation, autocast's copies of weights, and the operations of each part."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        self.modules: dict[int, str] = {}
        self.flops: dict[str, int] = {}
        self.order: list[str] = []
        self.given: dict[str, int] = {}
        """Storage of what each block was given."""
        self.made: dict[str, int] = {}
        """Storage of what each block gave."""
        self.coming: dict[str, int] = {}
        """Storage of the gradient with which each part's backward begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._to_copy.default and self.kind_of(args[0]) == "parameter":
            self.mark(out, "weight copy")
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None and self.phase == "forward":
            self.flops[self.part] = self.flops.get(self.part, 0) + int(count(*args, **(kwargs or {}), out_val=out))
        return out

    @property
    def part(self) -> str:
        """In forward the block that runs; in backward the part that it has reached, also where a checkpoint reruns."""
        return self.backward_part if self.phase == "backward" else self.where.part

    def add(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Note the module that makes it."""
        super().add(tensor, kind)
        self.modules.setdefault(self.number(tensor), self.where.module)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, 0 if it is not followed."""
        return self.ids.get(tensor.untyped_storage()._cdata, 0)

    def kind_of(self, tensor: torch.Tensor) -> str:
        """What is known of a tensor."""
        return self.kinds.get(self.number(tensor), "")


def _first(things: Any) -> torch.Tensor | None:
    """The tensor that carries a gradient on."""
    return next((t for t in tree_leaves(things) if isinstance(t, torch.Tensor) and t.requires_grad), None)


def _watch(line: Follower, path: str, block: nn.Module) -> None:
    """Record a block's input and output, and when backward reaches it and leaves it."""

    def arrive(part: str) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            line.backward_part = part
            line.coming.setdefault(part, line.number(grad))

        return hook

    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if line.phase != "forward":
            return
        line.order.append(path)
        tensor = _first((args, kwargs))
        floats = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point())
        tensor = tensor if tensor is not None else next(floats, None)
        if tensor is None:
            return
        line.given[path] = line.number(tensor)
        if tensor.requires_grad and len(line.order) == 1:
            tensor.register_hook(arrive(BEFORE))

    def after(_module: nn.Module, _args: Any, out: Any) -> None:
        tensor = _first(out)
        if tensor is not None and line.phase == "forward":
            line.made[path] = line.number(tensor)
            tensor.register_hook(arrive(path))

    block.register_forward_pre_hook(before, with_kwargs=True)
    block.register_forward_hook(after)


@dataclass
class Run:
    """What a run showed, and what the model has."""

    raw: Raw
    tensors: dict[str, list[int]]
    """Elements of the trained parameters of each block, before and after them."""
    classes: dict[str, str]
    taken: str
    tied: tuple[int, int] | None
    """Rows and columns of a weight that parts before and after the blocks share."""
    buffers: int
    """Bytes of buffers and frozen weights."""


def follow(build: Callable[[], Built], class_name: str | None, treatment: str) -> Run:
    """Build a module and run it forward and backward once; ``treatment`` none, or full: each block checkpointed."""
    built = build()
    model, blocks = built.model, blocks_of(built.model, class_name)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("module", type(model).__name__, "it has no parameter that is trained")
    wrap_blocks(blocks, treatment)
    line = Follower(Where(model, blocks))
    for path, block in blocks.items():
        _watch(line, path, block)
    for kind, kind_tensors in (("parameter", model.parameters()), ("buffer", model.buffers())):
        for tensor in kind_tensors:
            line.add(tensor, kind)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: _grown(line, grown, p))
    grown: dict[int, Grown] = {}
    line.phase = "forward"
    _step(line, built)
    _once_each(line, blocks)
    raw = Raw(line.order, _lives(line), dict(line.given), dict(line.made), dict(line.coming), line.flops)
    classes = {path: type(blocks[path]).__name__ for path in line.order}
    frozen = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    buffer_bytes = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in frozen}.values())
    return Run(raw, _parameters(model, line.order, grown), classes, built.taken, _tied(model, raw, grown), buffer_bytes)


def _step(line: Follower, built: Built) -> None:
    """Forward and backward, on the line."""
    gc.disable()  # nothing that was garbage before may go in between
    try:
        with running(built.model), line, resizing(line):
            for leaf in tree_leaves((built.args, built.kwargs)):
                if isinstance(leaf, torch.Tensor):
                    line.add(leaf, "input")
            loss = built.run()
            line.phase, line.backward_part = "backward", AFTER
            loss.backward()
            line.phase = "end"
            del loss
    finally:
        gc.enable()


def _once_each(line: Follower, blocks: Mapping[str, nn.Module]) -> None:
    again = next((path for path in line.order if line.order.count(path) > 1), None)
    if again is not None:
        raise InputError("block-class", again, "the block runs more than once in a forward; name blocks that run once")
    left = next((path for path in blocks if path not in line.order), None)
    if left is not None:
        raise InputError("block-class", left, "the block does not run in forward; name the class of those that do")


def _lives(line: Follower) -> list[Life]:
    """Each storage from birth to death, in the order of births."""
    lives: dict[int, Life] = {}
    for time, event in enumerate(line.events):
        life = lives.get(event.storage)
        if life is None:
            name = event.op.partition(" < ")[0]
            node = event.op.partition(" < ")[2]
            lives[event.storage] = Life(
                event.storage, event.delta, event.phase, event.part, time, None, line.modules.get(event.storage, ""),
                name, node, "", event.shape, event.dtype,
            )  # fmt: skip
        elif event.delta < 0 and line.sizes[event.storage] == 0:
            life.end, life.end_phase, life.end_part = time, event.phase, event.part
        else:
            life.bytes += event.delta
    for number, kind in line.kinds.items():
        if number in lives:
            lives[number].kind = kind
    return [life for life in lives.values() if life.kind not in {"parameter", "buffer"}]


@dataclass(frozen=True)
class Grown:
    """Where a parameter's gradient was completed, and its storage."""

    part: str
    storage: int


def _grown(line: Follower, grown: dict[int, Grown], parameter: torch.Tensor) -> None:
    """Note where a parameter's gradient was made."""
    line.mark(parameter.grad, "gradient")
    grown[id(parameter)] = Grown(line.backward_part, line.number(parameter.grad))


def _parameters(model: nn.Module, order: list[str], grown: Mapping[int, Grown]) -> dict[str, list[int]]:
    """Elements of the trained parameters by part: of a block its own, of the others those whose gradients it makes."""
    parts: dict[str, list[int]] = {path: [] for path in (BEFORE, *order, AFTER)}
    for path, parameter in model.named_parameters():
        block = next((name for name in order if not name or path.startswith(name + ".")), None)
        if parameter.requires_grad:
            outside = grown[id(parameter)].part if id(parameter) in grown else BEFORE
            parts[outside if block is None else block].append(parameter.numel())
    return parts


def _tied(model: nn.Module, raw: Raw, grown: Mapping[int, Grown]) -> tuple[int, int] | None:
    """Rows and columns of a weight that is used before and after the blocks: the first gradient waits for the other."""
    for parameter in model.parameters():
        gradient = grown.get(id(parameter))
        if parameter.dim() != 2 or gradient is None or gradient.part != BEFORE:
            continue
        size = parameter.untyped_storage().nbytes()
        alike = [life for life in raw.lives if life.phase == "backward" and life.bytes == size]
        # the engine adds the second gradient to the first, or both in a third
        first = [f for f in alike if f.part == AFTER and (f.number == gradient.storage or f.end_part == BEFORE)]
        if first:
            for life in (first[0], *(life for life in alike if life.part == BEFORE)):
                life.kind = "tied"
            return parameter.shape[0], parameter.shape[1]
    return None


# Two training steps of a module on fake tensors, and everything that its forward saves.


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
