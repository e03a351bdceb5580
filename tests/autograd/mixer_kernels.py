"""Stand-ins for the kernels of flash-linear-attention, causal-conv1d and mamba-ssm, which are built for GPUs alone.

Each is an autograd function that saves what the real one saves, and makes each tensor that the real one makes, in its
order; none computes. Sources: flash-linear-attention bc3b101d ``ops/gated_delta_rule/chunk.py`` and what it calls;
mamba e9594ce ``ops/triton/ssd_combined.py`` and what it calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from autograd import kimi_delta, selective_scan
from autograd.convolutions import causal_conv1d_fn

FLOAT = torch.float32


class DeltaRule(torch.autograd.Function):
    """``ChunkGatedDeltaRuleFunction`` with the norms of q and k in it."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
        """Make what forward makes, and save what it saves."""
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))  # input_guard
        given = (q, k, v)  # which holds them until the function returns
        batch, seq, heads, dim = v.shape
        keys, key_dim = k.shape[2:]
        chunks = -(-seq // 64)
        q, q_norms = torch.empty_like(q), torch.empty(batch, seq, keys, dtype=FLOAT)
        k, k_norms = torch.empty_like(k), torch.empty(batch, seq, keys, dtype=FLOAT)
        g = torch.empty_like(g)
        solved = torch.empty(batch, seq, heads, 64, dtype=k.dtype)
        w, u = k.new_empty(batch, seq, heads, key_dim), torch.empty_like(v)
        states, new = k.new_empty(batch, chunks, heads, key_dim, dim), torch.empty_like(u)
        out = torch.empty_like(v)
        ctx.save_for_backward(q, q_norms, k, k_norms, v, g, beta, beta, solved)
        del given, w, u, states, new
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make what backward makes."""
        q, _, k, _, v, g, beta, _, _ = ctx.saved_tensors
        grad = grad.contiguous()
        batch, seq, heads, dim = v.shape
        keys, key_dim = k.shape[2:]
        chunks = -(-seq // 64)
        w, u = k.new_empty(batch, seq, heads, key_dim), torch.empty_like(v)
        states, new = k.new_empty(batch, chunks, heads, key_dim, dim), torch.empty_like(u)
        dv = torch.empty_like(grad)
        dstates = torch.empty_like(states)
        dv = torch.empty_like(dv)
        dq, dk = (k.new_empty(batch, seq, heads, key_dim) for _ in range(2))
        dg, dw = torch.empty_like(g), torch.empty_like(w)
        if keys != heads:
            dq, dk = torch.empty_like(q), torch.empty_like(k)
        dk2 = k.new_empty(batch, seq, heads, key_dim)
        dv2, dg2, db = torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
        if keys != heads:
            dk2 = torch.empty_like(k)
        dg = torch.empty_like(g)
        del w, u, states, new, dstates, dv, dw, dk2, dg2
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        return dq, dk, dv2, dg, db


def chunk_gated_delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, **_: object
) -> tuple[torch.Tensor, None]:
    """The delta rule with its norms."""
    return DeltaRule.apply(query, key, value, g, beta), None


class Scan(torch.autograd.Function):
    """``MambaSplitConv1dScanCombinedFn`` with the output projection in it; sums over parts of the heads are in one."""

    @staticmethod
    def forward(ctx: Any, given: Any, filters: Any, bias: Any, steps: Any, decay: Any, skip: Any, norm: Any,
                projection: Any, shape: tuple[int, ...]) -> torch.Tensor:  # fmt: skip
        """Make what forward makes, and save what it saves."""
        chunk, heads, dim, groups, state = shape
        batch, seq, _ = given.shape
        chunks = -(-seq // chunk)
        x = given.new_empty(batch, seq, filters.shape[0])
        wide, sums = (torch.empty(batch, heads, chunks, chunk, dtype=FLOAT) for _ in range(2))
        states = torch.empty(batch, chunks, heads, dim, state, dtype=FLOAT)
        states = torch.empty_like(states, dtype=given.dtype)
        products = torch.empty(batch, chunks, groups, chunk, chunk, dtype=FLOAT)
        gated = given.new_empty(batch, seq, heads, dim) if norm is None else None
        scanned = given.new_empty(batch, seq, heads, dim)
        norms = None
        if norm is not None:
            gated = torch.empty_like(scanned)
            norms = torch.empty(groups * batch * seq, dtype=FLOAT)
        result = gated.view(batch, seq, -1)
        if torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")
            result, projection = result.to(narrow), projection.to(narrow)
        out = result @ projection.t()
        ctx.save_for_backward(given, filters, bias, scanned, decay, skip, steps, norm, norms, projection)
        ctx.shape = shape
        del x, wide, sums, states, products
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make what backward makes."""
        given, filters, bias, scanned, decay, skip, steps, norm, _, projection = ctx.saved_tensors
        chunk, heads, dim, groups, state = ctx.shape
        batch, seq, _ = given.shape
        chunks = -(-seq // chunk)
        again = torch.empty_like(scanned)
        x = given.new_empty(batch, seq, filters.shape[0])
        result, dx = torch.empty_like(given), torch.empty_like(x)
        inner = grad @ projection
        if norm is not None:
            inner_norm = torch.empty_like(scanned)
        copied = given.new_empty(batch, seq, heads)
        sums, wide = (torch.empty(batch, heads, chunks, chunk, dtype=FLOAT) for _ in range(2))
        products = torch.empty(batch, chunks, groups, chunk, chunk, dtype=FLOAT)
        states = torch.empty(batch, chunks, heads, dim, state, dtype=FLOAT)
        states = torch.empty_like(states)
        if norm is None:
            inner_norm = torch.empty_like(inner)
        dstates = torch.empty_like(states)
        dstates, states = (torch.empty_like(states, dtype=given.dtype) for _ in range(2))
        dsteps, dnext = torch.empty_like(wide), torch.empty_like(wide)
        db, dc = (torch.empty(batch, seq, groups, state, dtype=FLOAT) for _ in range(2))
        dbefore, dproducts = torch.empty_like(wide), torch.empty_like(products)
        del again, x, dx, inner, inner_norm, copied, sums, wide, products, states, dstates, dsteps, dnext, db, dc
        del dbefore, dproducts
        like = [None if weight is None else torch.empty_like(weight) for weight in (filters, bias, steps, decay, skip)]
        return result, *like, None if norm is None else torch.empty_like(norm), torch.empty_like(projection), None


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, conv1d_weight: Any, conv1d_bias: Any, dt_bias: Any, A: Any, D: Any, chunk_size: int,  # noqa: N803
    rmsnorm_weight: Any = None, outproj_weight: Any = None, headdim: int = 0, ngroups: int = 1, **_: object,
) -> torch.Tensor:  # fmt: skip
    """The one kernel of a Mamba-2 mixer."""
    heads = D.shape[0]
    state = (conv1d_weight.shape[0] - heads * headdim) // ngroups // 2
    shape = chunk_size, heads, headdim, ngroups, state
    given = zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight, outproj_weight
    return Scan.apply(*given, shape)


FAMILIES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h",
    "mamba", "falcon_mamba", "mamba2", "jamba", "olmo_hybrid", "kimi_linear",
)  # fmt: skip
"""Those whose classes look for the kernels."""
KERNELS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "mamba2_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "chunk_kimi_delta_attention": kimi_delta.chunk_kda,
    "mamba_inner_fn": selective_scan.mamba_inner_fn,
    "mamba_selective_scan": selective_scan.selective_scan_fn,
}


@contextmanager
def installed(family: str) -> Iterator[None]:
    """Let the class of a family find the kernels, if it looks for any."""
    if family not in FAMILIES:
        yield
        return
    folder = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}.get(family, family)
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    found = {name: kernel for name, kernel in KERNELS.items() if hasattr(module, name)}
    with mock.patch.multiple(module, **found):
        yield
