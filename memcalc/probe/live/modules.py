"""Any module from its factory: with its inputs, its loss and its blocks, on fake tensors or on real ones."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from memcalc.errors import InputError, MissingError
from memcalc.probe.live.cuda_like import cuda_like, unpacked
from memcalc.specs.recorded import Source

DTYPES = {"fp32": torch.float32, "half": torch.bfloat16, "autocast": torch.float32}
LISTS = (nn.ModuleList, nn.Sequential)
INPUTS = "example_inputs"
"""What a factory's own module may call the function that makes its inputs."""


@dataclass(frozen=True)
class Functions:
    """What a source names."""

    factory: Callable[..., Any]
    inputs: Callable[..., Any] | None
    loss: Callable[..., Any] | None


def functions(source: Source) -> Functions:
    """Import what a source names; the module of the factory may bring the inputs itself."""
    factory = _imported(source.module, "module")
    beside = sys.modules.get(getattr(factory, "__module__", ""))
    inputs = _imported(source.inputs, "inputs") if source.inputs else getattr(beside, INPUTS, None)
    return Functions(factory, inputs, _imported(source.loss, "loss-fn") if source.loss else None)


def _imported(name: str, field: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` or ``path/file.py:function`` names."""
    module_name, _, function = name.rpartition(":")
    if not module_name or not function.isidentifier():
        raise InputError(field, name, "must be package.module:function or path/to/file.py:function")
    try:
        module = _file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise InputError(field, name, f"importing {module_name} failed: {_one_line(error)}") from error
    value = getattr(module, function, None)
    if not callable(value):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise InputError(field, function, f"{module_name} has no function of that name", names)
    return value  # type: ignore[no-any-return]


def _file(path: Path) -> Any:
    """Import a Python file as a module; it can import the files in its folder."""
    name = f"memcalc_module_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.pop(0)
    return module


def _one_line(error: BaseException, most: int = 200) -> str:
    """An exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}" if text else type(error).__name__


@contextlib.contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Run steps of a user's module, whose errors are the user's."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError("module", type(model).__name__, f"a step of it failed: {_one_line(error, 300)}") from error


@dataclass
class Built:
    """A module in training mode with one batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None
    mode: str
    taken: str = ""
    """What was taken as the loss."""

    def run(self) -> torch.Tensor:
        """Forward and loss."""
        half = torch.autocast("cpu", torch.bfloat16) if self.mode == "autocast" else contextlib.nullcontext()
        with half, unpacked():
            out = self.model(*self.args, **self.kwargs)
            return self._loss_of(out)

    def _loss_of(self, out: Any) -> torch.Tensor:
        if self.loss is not None:
            value, self.taken = self.loss(out, *self.args, **self.kwargs), "the function given"
        elif isinstance(getattr(out, "loss", None), torch.Tensor):
            value, self.taken = out.loss, "the output's loss"
        elif isinstance(out, Mapping) and isinstance(out.get("loss"), torch.Tensor):
            value, self.taken = out["loss"], "the output's loss"
        elif isinstance(out, torch.Tensor) and out.numel() == 1:
            value, self.taken = out, "the output, a scalar"
        else:
            tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            if not tensors:
                raise InputError("module", type(out).__name__, "forward must return a tensor, or an output with a loss")
            value, self.taken = tensors[0].sum(), "the sum of the output"
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise InputError("loss-fn", type(value).__name__, "the loss must be a tensor of one element")
        if not value.requires_grad:
            raise InputError("module", type(self.model).__name__, "no gradient flows from its loss to any parameter")
        return value


def build(source: Source, called: Functions, mode: str, batch: int, seq: int) -> Built:
    """Make the module and one batch of ``batch`` sequences, in the tensor mode that is on."""
    made = _made(called.factory, source.module)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError("module", type(model).__name__, f"{source.module} must return a torch.nn.Module")
    _imitate(model)
    model = model.to(DTYPES[mode]).train()
    if called.inputs is not None:
        wanted = len(inspect.signature(called.inputs).parameters)
        example = _called(called.inputs, source.inputs or INPUTS, "inputs", *(batch, seq)[:wanted])
    elif example is not None:
        example = tree_map(lambda leaf: _widened(leaf, batch), example)
    else:
        raise MissingError(
            f"what {source.module} reads is not known: give --inputs package.module:function, or have it in "
            f"{INPUTS}(micro_batch, seq_len) beside the factory."
        )
    args, kwargs = _batch(tree_map(lambda leaf: _cast(leaf, DTYPES[mode]), example))
    return Built(model, args, kwargs, called.loss, mode)


def _made(factory: Callable[..., Any], name: str) -> Any:
    """What the factory makes: of fake tensors, or of real ones where it asks for values (as initialisers may)."""
    mode = torch._guards.detect_fake_mode()
    if mode is None:
        return _called(factory, name, "module")
    try:
        return factory()
    except Exception:  # noqa: BLE001  # whatever it was, the second call says it again
        with unset_fake_temporarily():
            return _called(factory, name, "module")


def _imitate(model: nn.Module) -> None:
    """Put fake tensors in the place of real ones, and tensors of the CPU in that of those on the meta device."""
    mode = torch._guards.detect_fake_mode()
    if mode is None:
        return
    replaced: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in replaced:
            like = mode.from_tensor(tensor.detach()) if not isinstance(tensor, FakeTensor) else tensor.detach()
            like = torch.empty_like(like, device="cpu") if like.device.type == "meta" else like
            replaced[tensor] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
        return replaced[tensor]

    for part in model.modules():
        for group in (part._parameters, part._buffers):
            real = {name: tensor for name, tensor in group.items() if tensor is not None and _needs(tensor)}
            group.update({name: fake(tensor) for name, tensor in real.items()})


def _needs(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def takes_length(called: Functions) -> bool:
    """Whether the inputs depend on a sequence length."""
    return called.inputs is not None and len(inspect.signature(called.inputs).parameters) > 1


def _called(function: Callable[..., Any], name: str, field: str, *values: int) -> Any:
    try:
        return function(*values)
    except InputError:
        raise
    except Exception as error:
        raise InputError(field, name, f"calling it failed: {_one_line(error)}") from error


def _batch(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def _widened(leaf: Any, batch: int) -> Any:
    """An example's first dimension is that of the batch."""
    return leaf.new_empty((batch, *leaf.shape[1:])) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def blocks_of(model: nn.Module, class_name: str | None) -> dict[str, nn.Module]:
    """The repeated blocks by path: those of a class, or the members of lists in which a class stands more than once.

    Only the outermost count; a module without any is a block as a whole.
    """
    blocks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path == done or path.startswith(done + ".") for done in blocks)
        if inside or not path:
            continue
        if class_name is None and isinstance(module, LISTS):
            blocks |= {f"{path}.{name}": child for name, child in _repeated(module)}
        elif type(module).__name__ == class_name:
            blocks[path] = module
    if class_name is not None and not blocks:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise InputError("block-class", class_name, "no module of the model is of that class", classes)
    if not blocks and isinstance(model, LISTS):
        blocks = dict(_repeated(model))
    return blocks or {"": model}


def _repeated(members: nn.Module) -> list[tuple[str, nn.Module]]:
    """Members with parameters and parts of their own, if the same class stands among them twice."""
    able = [(n, m) for n, m in members.named_children() if any(True for _ in m.children()) and _trained(m)]
    classes = [type(member) for _, member in able]
    return [(n, m) for n, m in able if classes.count(type(m)) > 1]


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@contextlib.contextmanager
def tensors(*, fake: bool) -> Iterator[None]:
    """Fake tensors that take CUDA's paths, or real ones."""
    if not fake:
        yield
        return
    shapes = logging.getLogger("torch._subclasses.fake_tensor")  # logs what is raised all the same
    before, shapes.disabled = shapes.disabled, True
    try:
        with cuda_like():
            yield
    finally:
        shapes.disabled = before
