"""The script that export --to fsdp2 writes, run for two steps on fake tensors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autograd import parallel, timeline
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.probe.live.saved import Where
from memcalc.probe.live.timeline import Steps, Timeline, resizing


def steps_of(text: str, ranks: int, kernel: str) -> Steps:
    """Run a second step of a script's own functions on fake tensors; return what lived when."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "script", "exec"), names)  # noqa: S102
    with parallel.fake_ranks(ranks):
        data, tensor = names["meshes"]("cpu")
        with cuda_like("auto" if kernel == "flash" else kernel):
            model = fake_model(names)
            with real_meshes():
                if names["TP"] > 1:
                    names["split"](model, tensor)
                names["shard"](model, data)
            optimizer = names["make_optimizer"](model)
            line = Timeline(Where(model, {}))
            states = timeline.stepped(model, optimizer)
            for kind, tensors in (("parameter", model.parameters()), ("buffer", model.buffers()), ("state", states)):
                for tensor in tensors:
                    line.add(tensor, kind)
            with waiting_in_place():
                unscaled = torch.amp.GradScaler("cpu", enabled=False)  # it looks at values, which fakes have not
                one_step(line, lambda: names["train_step"](model, optimizer, unscaled, fake_batches(names)))
            return Steps(line.events, line.kinds)


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Let meshes be put together from tensors with values: ranks are looked up in them."""
    real = DeviceMesh._concatenate

    def concatenate(meshes: Any) -> Any:
        with _disable_current_modes():
            return real(meshes)

    with mock.patch.object(DeviceMesh, "_concatenate", concatenate):
        yield


@contextlib.contextmanager
def waiting_in_place() -> Iterator[None]:
    """Return what is waited for, as on a GPU: the fake operator makes a copy (torch _functional_collectives.py)."""

    class Waiting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            alone = func is torch.ops._c10d_functional.wait_tensor.default
            return args[0] if alone else func(*args, **(kwargs or {}))

    with Waiting():
        yield


def fake_model(names: dict[str, Any]) -> Any:
    """Build the model as the script does, but for its meta device and its initial values."""
    config = transformers.LlamaForCausalLM.config_class(**names["CONFIG"])
    with mock.patch.object(transformers.PreTrainedModel, "initialize_weights", return_value=None):
        dtype = getattr(torch, names["WEIGHTS"])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.train()


def fake_batches(names: dict[str, Any]) -> Iterator[Any]:
    while True:
        yield torch.zeros(names["MICRO_BATCH"], names["SEQ_LEN"], dtype=torch.long)


def one_step(line: Any, step: Callable[[], Any]) -> None:
    """Count over a step, backward apart from the rest."""
    real = torch.Tensor.backward

    def backward(self: Any, *args: Any, **words: Any) -> None:
        line.phase = "backward"
        real(self, *args, **words)
        line.phase = "forward"

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(torch.Tensor, "backward", backward), line, resizing(line):
            line.step, line.phase = 2, "forward"
            step()
    finally:
        gc.enable()
