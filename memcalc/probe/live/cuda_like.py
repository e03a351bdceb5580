"""A context in which fake CPU tensors take the paths that CUDA tensors take.

A CPU build of PyTorch has no device guard for CUDA, so autograd refuses fake CUDA tensors. Fake CPU tensors work, but
the CPU takes other paths where a composite operator asks for the device. Those operators get CUDA's choice here, at the
dispatcher, so that C++ callers see it too: dropout keeps a byte-wide mask, attention picks flash, memory-efficient or
math by the rules of ``sdp_utils.cpp``, layer norm keeps fp32 statistics, RMSNorm is one kernel, autocast has CUDA's
fp32 list.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)
ALIGN = 16
"""Last-dimension multiple of the memory-efficient kernel's bias (``preprocess_mask`` in attention.cpp)."""

AUTOCAST_TO_FP32 = (
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "exp", "expm1", "log", "rsqrt", "reciprocal",
    "softplus",
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "norm.Scalar", "norm.ScalarOpt_dim",
    "nll_loss", "nll_loss_nd", "cross_entropy_loss", "mse_loss", "cosine_similarity",
    "binary_cross_entropy_with_logits", "renorm", "cumsum", "cumprod", "prod",
)  # fmt: skip
"""AT_FORALL_FP32 of autocast_mode.h, as far as transformers use it."""
AUTOCAST_SET_DTYPE = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList")
"""Operators whose ``dtype`` argument autocast fills in with fp32 (AT_FORALL_FP32_SET_OPT_DTYPE)."""


WHOLE_STORAGE = (aten.mse_loss.default, aten.smooth_l1_loss.default)
"""Losses whose reduced result keeps the storage of the elements, on any device."""


class _CudaShapes(TorchDispatchMode):
    """Mends results whose fake form is the CPU's, or is missing.

    ``native_layer_norm`` returns fp32 statistics on CUDA, the input's dtype on the CPU. ``_grouped_mm`` takes fp32 on
    CUDA (a loop of matmuls), which its shape function refuses. The mean of some losses lies in the storage of all their
    elements: structured kernels build the output before they reduce it (``aten/src/ATen/native/BinaryOps.cpp`` and
    ``Loss.cpp``, TORCH_META_FUNC).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._grouped_mm.default and args[0].dtype is torch.float32:
            return _grouped(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in WHOLE_STORAGE and not out.dim():
            elements = out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
            return elements.as_strided((), ())
        if func is aten.native_layer_norm.default and out[1].dtype in HALF:
            return (
                out[0],
                out[1].new_empty(out[1].shape, dtype=torch.float32),
                out[1].new_empty(out[2].shape, dtype=torch.float32),
            )
        return out


def _grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    groups = (offs.shape[0],) if a.dim() == b.dim() == 2 else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


class _FusedRms(torch.autograd.Function):
    """``_fused_rms_norm`` of CUDA: keeps the input, the weight and one fp32 statistic a row (derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        stat = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, stat)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _rms_norm(
    x: torch.Tensor, _shape: Any, weight: torch.Tensor | None = None, _eps: float | None = None
) -> torch.Tensor:
    return _FusedRms.apply(x, weight)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``dropout`` in Dropout.cpp: the fused kernel, for inputs on CUDA in training."""
    if not train or p == 0 or x.numel() == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _bias(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``convert_boolean_attn_mask``."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask


def _padded_bias(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    mask = _bias(mask, q)
    short = -mask.shape[-1] % ALIGN
    if short:
        mask = torch.nn.functional.pad(mask, (0, short))[..., : mask.shape[-1]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, only: str) -> str:
    """Return the kernel that ``_fused_sdp_choice_cuda`` picks; ``only`` names one, or is ``auto``."""
    equal_dims = q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    if only in {"auto", "flash"} and q.dtype in HALF and mask is None and equal_dims:
        return "flash"
    if only in {"auto", "flash", "efficient"} and q.shape[1] == k.shape[1] == v.shape[1]:
        return "efficient"
    return "math"


def _attention(only: str) -> Callable[..., torch.Tensor]:
    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        choice = kernel(q, k, v, attn_mask, only)
        if choice == "math":
            bias = None if attn_mask is None else _bias(attn_mask, q)
            return aten._scaled_dot_product_attention_math(
                q, k, v, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        if choice == "efficient":
            bias = None if attn_mask is None else _padded_bias(attn_mask, q, k)
            keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
            return aten._scaled_dot_product_efficient_attention(q, k, v, bias, keep, dropout_p, is_causal, scale=scale)[
                0
            ]
        size = q.shape[-1]
        scale = size**-0.5 if scale is None else scale
        short = -size % 8  # pad_last_dim<8>
        if short:
            q, k, v = (torch.nn.functional.pad(t, (0, short)) for t in (q, k, v))
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :size] if short else out

    return attend


def _fp32(name: str, set_dtype: bool) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def up(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(up(y) for y in x)
        return x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            if not set_dtype:
                return op(*up(args), **{k: up(v) for k, v in kwargs.items()})
            if not args[0].is_floating_point() or kwargs.get("dtype") or any(isinstance(a, torch.dtype) for a in args):
                return op(*args, **kwargs)
            return op(*args, **{**kwargs, "dtype": torch.float32})

    return call


def _apply(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """``Module._apply`` by new parameters: fake ones can be neither swapped nor given data of another dtype.

    A weight that several modules share stays one.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules() if recurse else (module,):
        for name, old in part._parameters.items():
            if old is None:
                continue
            if old not in replaced:
                new = change(old.data)
                alike = (new.dtype, new.device) == (old.dtype, old.device)
                replaced[old] = old if alike else nn.Parameter(new, old.requires_grad)
            part._parameters[name] = replaced[old]
        part._buffers.update({name: change(old) for name, old in part._buffers.items() if old is not None})
    return module


def _register(attention: str) -> torch.library.Library:
    lib = torch.library.Library("aten", "IMPL")
    lib.impl("dropout", _dropout, "AutogradCPU")
    lib.impl("scaled_dot_product_attention", _attention(attention), "AutogradCPU")
    lib.impl("rms_norm", _rms_norm, "AutogradCPU")
    for name in AUTOCAST_TO_FP32:
        lib.impl(name, _fp32(name, set_dtype=False), "AutocastCPU")
    for name in AUTOCAST_SET_DTYPE:
        lib.impl(name, _fp32(name, set_dtype=True), "AutocastCPU")
    return lib


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Keep Transformers, if it is loaded, from building a mask: without values it takes sequences for packed ones."""
    masks = sys.modules.get("transformers.masking_utils")
    if hasattr(masks, "find_packed_sequence_indices"):
        with mock.patch.object(masks, "find_packed_sequence_indices", return_value=None):
            yield
    else:
        yield


@contextlib.contextmanager
def cuda_like(attention: str = "auto") -> Iterator[FakeTensorMode]:
    """Run the body on fake CPU tensors that take CUDA's paths; ``attention`` names a kernel, or is ``auto``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        lib = _register(attention)
        stack.callback(lib._destroy)
        stack.enter_context(unpacked())
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_CudaShapes())
        yield fake
