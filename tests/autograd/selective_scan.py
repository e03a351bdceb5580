"""Stand-ins for mamba-ssm's selective scan, alone and in the one function of a Mamba mixer.

As those of :mod:`autograd.mixer_kernels`: mamba e9594ce ``ops/selective_scan_interface.py``,
``csrc/selective_scan/selective_scan.cpp`` and ``ops/triton/layer_norm.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from autograd.convolutions import convolution_backward

FLOAT = torch.float32
CHUNK = 2048


def scan_forward(u: Any, delta: Any, a: Any, b: Any, c: Any, z: Any) -> tuple[torch.Tensor, ...]:
    """``selective_scan_fwd``: the output before the gate, states, and the output."""
    if not u.dtype == delta.dtype == b.dtype == c.dtype == z.dtype:
        raise TypeError("the kernel takes one dtype")
    out_z, out = torch.empty_like(z), torch.empty_like(delta)
    batch, dim, seq = u.shape
    return out, torch.empty(batch, dim, -(-seq // CHUNK), 2 * a.shape[1], dtype=FLOAT), out_z


def scan_backward(
    u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any, z: Any, bias: Any, out: Any, dz: Any, *, again: bool
) -> tuple[Any, ...]:
    """``selective_scan_bwd``: the gradients, and with ``again`` the gated output."""
    dz = torch.empty_like(z) if dz is None else dz
    out_z = torch.empty_like(out) if again else None
    du, ddelta, da = torch.empty_like(u), torch.empty_like(delta), torch.empty_like(a)
    db, dc = torch.empty_like(b, dtype=FLOAT), torch.empty_like(c, dtype=FLOAT)
    dd, dbias = torch.empty_like(d), torch.empty_like(bias)
    return du, ddelta, da, db.to(b.dtype), dc.to(c.dtype), dd, dbias, dz, out_z


class SelectiveScan(torch.autograd.Function):
    """``SelectiveScanFn``."""

    @staticmethod
    def forward(ctx: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any, z: Any, bias: Any) -> torch.Tensor:
        """Make what forward makes, and save what it saves."""
        u, delta, b, c, z = (given if given.stride(-1) == 1 else given.contiguous() for given in (u, delta, b, c, z))
        b, c = (given.unsqueeze(1) for given in (b, c))
        out, x, out_z = scan_forward(u, delta, a, b, c, z)
        ctx.save_for_backward(u, delta, a, b, c, d, z, bias, x, out)
        return out_z

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        """Make what backward makes."""
        u, delta, a, b, c, d, z, bias, states, out = ctx.saved_tensors
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        du, ddelta, da, db, dc, dd, dbias, dz, _ = scan_backward(u, delta, a, b, c, d, z, bias, out, None, again=False)
        del states
        return du, ddelta, da, db.squeeze(1), dc.squeeze(1), dd, dz, dbias


def selective_scan_fn(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,  # noqa: N803
    **_: object,
) -> torch.Tensor:  # fmt: skip
    """The scan."""
    return SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``rearrange(x, "b d l -> (b l) d")``."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A norm of each token's channels, of a tensor with the tokens last."""
    batch, dim, seq = x.shape
    rows = rows_of(x).contiguous()
    del x
    out = rms_norm_forward(rows, weight)
    del rows
    return out.reshape(batch, seq, dim).transpose(1, 2).contiguous()


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``_layer_norm_fwd``."""
    out, statistics = torch.empty_like(x), torch.empty(x.shape[0], dtype=FLOAT)
    del weight, statistics
    return out


class Inner(torch.autograd.Function):
    """``MambaInnerFn``."""

    @staticmethod
    def forward(ctx: Any, xz: Any, conv: Any, conv_bias: Any, x_proj: Any, dt_proj: Any, out_proj: Any, a: Any, d: Any,
                bias: Any, *norms: Any) -> torch.Tensor:  # fmt: skip
        """Make what forward makes, and save what it saves."""
        batch, _, seq = xz.shape
        rank, state = dt_proj.shape[1], a.shape[-1]
        if torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")
            x_proj, dt_proj, out_proj = (weight.to(narrow) for weight in (x_proj, dt_proj, out_proj))
        if xz.stride(-1) != 1:
            xz = xz.contiguous()
        x, z = xz.chunk(2, dim=1)
        convolved = torch.empty_like(x)
        selected = torch.nn.functional.linear(rows_of(convolved), x_proj)
        delta = (dt_proj @ selected[:, :rank].t()).reshape(-1, batch, seq).transpose(0, 1)
        b, c = (
            part.reshape(batch, seq, state).transpose(1, 2).contiguous()
            for part in (selected[:, rank : rank + state], selected[:, -state:])
        )
        if norms[0] is not None:
            b = normalised(b, norms[0])
            c = normalised(c, norms[1])
            delta = normalised(delta, norms[2])
        out, states, out_z = scan_forward(convolved, delta, a, b, c, z)
        ctx.save_for_backward(
            xz, conv, conv_bias, selected, x_proj, dt_proj, out_proj, a, b, c, d, bias, states, *norms, out
        )
        del convolved, delta
        return torch.nn.functional.linear(out_z.transpose(1, 2), out_proj)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        """Make what backward makes."""
        xz, conv, conv_bias, selected, x_proj, dt_proj, out_proj, a, b, c, d, bias, states, *norms, out = (
            ctx.saved_tensors
        )
        batch, _, seq = xz.shape
        rank, state = dt_proj.shape[1], a.shape[-1]
        x, z = xz.chunk(2, dim=1)
        convolved = torch.empty_like(x)
        delta = (dt_proj @ selected[:, :rank].t()).reshape(-1, batch, seq).transpose(0, 1)
        if norms[0] is not None:
            delta = normalised(delta, norms[2])
            b, c = normalised(b, norms[0]), normalised(c, norms[1])
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        dout = dout.permute(2, 0, 1).reshape(dout.shape[-1], -1)
        dout_y = (out_proj.t() @ dout).reshape(-1, batch, seq).transpose(0, 1)
        du, ddelta, da, db, dc, dd, dbias, dz, out_z = scan_backward(
            convolved, delta, a, b, c, d, z, bias, out, dz, again=True
        )
        dout_proj = torch.einsum("eB,dB->ed", dout, out_z.transpose(0, 1).reshape(-1, batch * seq))
        dselected = torch.empty_like(selected)
        db = rows_of(db).contiguous()
        dselected[:, rank : rank + state] = db
        db = None
        dc = rows_of(dc).contiguous()
        dselected[:, -state:] = dc
        dc = None
        ddelta = ddelta.transpose(0, 1).reshape(-1, batch * seq)
        ddt_proj = torch.einsum("dB,Br->dr", ddelta, selected[:, :rank])
        dselected[:, :rank] = torch.einsum("dB,dr->Br", ddelta, dt_proj)
        du = du.transpose(0, 1).reshape(-1, batch * seq)
        dx_proj = torch.einsum("Br,Bd->rd", dselected, rows_of(convolved))
        du = torch.addmm(du, x_proj.t(), dselected.t(), out=du)
        du = du.reshape(-1, batch, seq).transpose(0, 1)
        dx, dconv, dconv_bias = convolution_backward(x, conv, conv_bias, du, dx)
        del dout_y, states
        return dxz, dconv, dconv_bias, dx_proj, ddt_proj, dout_proj, da, dd, dbias, None, None, None


def mamba_inner_fn(
    xz: Any, conv1d_weight: Any, conv1d_bias: Any, x_proj_weight: Any, delta_proj_weight: Any, out_proj_weight: Any,
    out_proj_bias: Any, A: Any, B: Any = None, C: Any = None, D: Any = None, delta_bias: Any = None,  # noqa: N803
    b_rms_weight: Any = None, c_rms_weight: Any = None, dt_rms_weight: Any = None, **_: object,
) -> torch.Tensor:  # fmt: skip
    """The one function of a Mamba mixer."""
    if out_proj_bias is not None or B is not None or C is not None:
        raise NotImplementedError("the gradient of its bias has no shape")
    weights = x_proj_weight, delta_proj_weight, out_proj_weight
    norms = b_rms_weight, c_rms_weight, dt_rms_weight
    return Inner.apply(xz, conv1d_weight.squeeze(1), conv1d_bias, *weights, A, D, delta_bias, *norms)
