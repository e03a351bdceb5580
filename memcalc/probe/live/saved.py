"""Lists the storages that autograd saves for backward, by block and by the node that saved them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


@dataclasses.dataclass
class SavedStorage:
    """One storage saved for backward, as its first saver saw it."""

    part: str
    """Path of the block; ``embedding``, ``between`` or ``head`` outside the blocks."""
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    node: str = ""
    """Autograd nodes that hold it, as ``MmBackward0.self``; several if they share the storage."""
    weight: str | None = None
    """The parameter that it is a low-precision copy of (autocast)."""


class Where:
    """Follows which module runs, by hooks; ``part`` names the block or the part before, between or after blocks."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self.stack: list[str] = []
        self.blocks, self.seen = list(blocks), set[str]()
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: self._enter(path))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _enter(self, path: str) -> None:
        self.stack.append(path)
        if path in self.blocks:
            self.seen.add(path)

    def _leave(self) -> None:
        if self.stack:
            self.stack.pop()

    @property
    def module(self) -> str:
        """Path of the innermost module that runs."""
        return self.stack[-1] if self.stack else ""

    @property
    def part(self) -> str:
        """The block that runs, or the part outside the blocks."""
        inside = next((p for p in reversed(self.stack) if p in self.blocks), None)
        if inside is not None:
            return inside
        return "embedding" if not self.seen else "head" if len(self.seen) == len(self.blocks) else "between"


class _Token:
    """A packed tensor's placeholder, so that the nodes that save it can be found without unpacking."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class WeightCopies(TorchDispatchMode):
    """Notes which storages are casts of parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {p.untyped_storage()._cdata: n for n, p in model.named_parameters()}
        self.copies: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default:
            name = self.names.get(args[0].untyped_storage()._cdata)
            key = out.untyped_storage()._cdata
            if name:
                self.copies[key] = name
                weakref.finalize(out.untyped_storage(), self.copies.pop, key, None)
        return out


def node_names(root: Any) -> dict[int, list[str]]:
    """Return by id of the packed token the ``Node.attribute`` names that keep it, over the graph of ``root``."""
    names: dict[int, list[str]] = {}
    todo, seen = [root], {root}
    while todo:
        node = todo.pop()
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                _note(names, node, attribute)
        for follow, _ in node.next_functions:
            if follow is not None and follow not in seen:
                seen.add(follow)
                todo.append(follow)
    return names


def _note(names: dict[int, list[str]], node: Any, attribute: str) -> None:
    raw = getattr(node, attribute)
    for item in raw if isinstance(raw, (tuple, list)) else (raw,):
        data = None
        with contextlib.suppress(RuntimeError, AttributeError):
            data = item.data
        if isinstance(data, _Token):
            names.setdefault(id(data), []).append(f"{node.name()}.{attribute.removeprefix('_raw_saved_')}")


class Recorder:
    """Saved-tensor hooks that list unique storages in the order of saving."""

    def __init__(self, where: Where, skip: set[int], copies: WeightCopies) -> None:
        self.where, self.skip, self.copies = where, skip, copies
        self.by_storage: dict[int, SavedStorage] = {}
        self.tokens: dict[int, list[weakref.ref[_Token]]] = {}
        self.alive: list[Any] = []

    def pack(self, tensor: torch.Tensor) -> _Token:
        """Note the storage of ``tensor`` at its first save."""
        token, storage = _Token(tensor), tensor.untyped_storage()
        key = storage._cdata
        if key not in self.skip:
            if key not in self.by_storage:
                self.by_storage[key] = SavedStorage(
                    self.where.part,
                    self.where.module,
                    tuple(tensor.shape),
                    tensor.dtype,
                    storage.nbytes(),
                    weight=self.copies.copies.get(key),
                )
                self.alive.append(storage)
            self.tokens.setdefault(key, []).append(weakref.ref(token))
        return token

    @staticmethod
    def unpack(token: _Token) -> torch.Tensor:
        """Give the tensor back to backward."""
        return token.tensor

    def result(self, names: dict[int, list[str]]) -> list[SavedStorage]:
        """Return what is still saved, with its nodes; branches that do not reach the loss are freed by now."""
        alive = {key: [t for ref in refs if (t := ref()) is not None] for key, refs in self.tokens.items()}
        for key, saved in self.by_storage.items():
            nodes = [name for token in alive[key] for name in names.get(id(token), [])]
            saved.node = ", ".join(dict.fromkeys(nodes)) or "input of a checkpoint"
        return [saved for key, saved in self.by_storage.items() if alive[key]]


@contextlib.contextmanager
def recording(model: nn.Module, blocks: Iterable[str]) -> Iterator[Recorder]:
    """Record what the body's forward pass saves; ``blocks`` are the paths of the blocks."""
    skip = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    copies = WeightCopies(model)
    recorder = Recorder(Where(model, blocks), skip, copies)
    with copies, torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
        yield recorder
