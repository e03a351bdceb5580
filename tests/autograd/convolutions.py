"""A stand-in for causal-conv1d: an autograd function that saves and makes what the real one does.

Source: causal-conv1d 0d2252d ``causal_conv1d_interface.py``, ``cpp_functions.py`` and ``csrc/causal_conv1d.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch


class Convolution(torch.autograd.Function):
    """``CausalConv1dFn``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Make what forward makes, and save what it saves."""
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make what backward makes."""
        x, weight, bias = ctx.saved_tensors
        if grad.stride(2) != 1 and grad.stride(1) != 1:
            grad = grad.contiguous()
        return convolution_backward(x, weight, bias, grad, torch.empty_like(x))


def convolution_backward(x: Any, weight: Any, bias: Any, grad: Any, dx: Any) -> tuple[Any, Any, Any]:
    """``causal_conv1d_bwd_function`` and the C++ under it: weights' gradients in fp32, cast afterwards."""
    wide = [None if given is None else torch.empty_like(given, dtype=torch.float32) for given in (weight, bias)]
    if x.stride(1) == 1 and x.stride(2) > 1 and grad.stride(1) != 1:
        grad = grad.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif x.stride(1) != 1 and grad.stride(2) != 1:
        grad = grad.contiguous()
    return dx, wide[0].type_as(weight), None if bias is None else wide[1].type_as(bias)


def causal_conv1d_fn(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: object
) -> torch.Tensor:
    """A convolution with its activation."""
    return Convolution.apply(hidden_states, weight, bias)
