"""A stand-in for flash-linear-attention's kernel of Kimi Delta Attention.

As those of :mod:`autograd.mixer_kernels`: flash-linear-attention bc3b101d ``ops/kda/chunk.py`` and what it calls.
"""

from __future__ import annotations

from typing import Any

import torch

FLOAT = torch.float32


class DeltaAttention(torch.autograd.Function):
    """``ChunkKDAFunction`` with the norms of q and k in it."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
        """Make what forward makes, and save what it saves."""
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))  # input_guard
        given = (q, k, v)  # which holds them until the function returns
        batch, seq, heads, dim = v.shape
        q, q_norms = torch.empty_like(q), torch.empty(batch, seq, heads, dtype=FLOAT)
        k, k_norms = torch.empty_like(k), torch.empty(batch, seq, heads, dtype=FLOAT)
        summed = torch.empty_like(g, dtype=FLOAT)
        of_queries, of_keys = (torch.empty(batch, seq, heads, 64, dtype=k.dtype) for _ in range(2))
        diagonal = torch.empty(batch, seq, heads, 16, dtype=FLOAT)
        w, u, kg = torch.empty_like(k), torch.empty_like(v), torch.empty_like(k)
        del diagonal
        states, new = k.new_empty(batch, -(-seq // 64), heads, dim, dim), torch.empty_like(u)
        out = torch.empty_like(v)
        del w, u, kg, states, new
        ctx.save_for_backward(q, q_norms, k, k_norms, v, summed, g, beta, of_queries, of_keys)
        del given
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make what backward makes."""
        saved = ctx.saved_tensors  # all of which the real one has in variables
        q, k, v, g, beta, of_keys = (saved[n] for n in (0, 2, 4, 5, 7, 9))
        grad = grad.contiguous()
        batch, seq, heads, dim = v.shape
        w, u, qg, kg = torch.empty_like(k), torch.empty_like(v), torch.empty_like(q), torch.empty_like(k)
        states, new = k.new_empty(batch, -(-seq // 64), heads, dim, dim), torch.empty_like(u)
        dproducts = v.new_empty(batch, seq, heads, 64, dtype=FLOAT)
        dv = torch.empty_like(grad)
        dstates = torch.empty_like(states)
        dv = torch.empty_like(dv)
        dq, dk = (torch.empty_like(g, dtype=FLOAT) for _ in range(2))
        dv2, dg, db = torch.empty_like(v), torch.empty_like(g, dtype=FLOAT), torch.empty_like(beta, dtype=FLOAT)
        dkeys = torch.empty_like(of_keys, dtype=FLOAT)
        dv = dv2
        dq2, dk2 = torch.empty_like(dq), torch.empty_like(dk)
        parts = beta.new_empty(-(-dim // 32), *beta.shape, dtype=FLOAT)
        dg2 = torch.empty_like(dg)
        db = parts.sum(0).add_(db)
        dq, dk, dg = dq2, dk2, dg2
        del parts, dq2, dk2, dg2
        dg = torch.empty_like(dg)
        del w, u, qg, kg, states, new, dstates, dproducts, dkeys
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        del saved
        return dq, dk, dv, dg, db.to(beta.dtype)


def chunk_kda(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: object) -> tuple[torch.Tensor, None]:
    """The delta rule with its norms."""
    return DeltaAttention.apply(query, key, value, g, beta), None
