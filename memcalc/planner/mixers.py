"""What can be asked of a model whose blocks are more than attention over all tokens and an MLP, dense or routed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import CombinationError, UncountedError
from memcalc.planner.as_is import check_framework, refuse_told
from memcalc.planner.recorded import recorded_precisions
from memcalc.specs.mixers import Mamba

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model


KERNELS = {
    "gated delta net": "flash-linear-attention and causal-conv1d",
    "delta attention": "flash-linear-attention and causal-conv1d",
    "Mamba-2 mixer": "mamba-ssm and causal-conv1d",
    "Mamba mixer": "mamba-ssm and causal-conv1d",
}
"""Packages whose kernels a class takes where they are installed; its own code in their place keeps far more."""


def check_mixers(request: Request, model: Model) -> None:
    """Refuse what is not modelled beside such blocks, and pin what is therefore not searched."""
    gated = any(attention.output_gate or attention.head_gate for attention in model.attentions)
    chunked = any(attention.chunked or attention.scaled_queries for attention in model.attentions)
    normed = any(attention.value_norm for attention in model.attentions)
    kinds = [
        *model.mixer_kinds,
        *["gated attention"] * gated,
        *["chunked attention"] * chunked,
        *["norms of values"] * normed,
        *[model.unlisted_experts] * bool(model.unlisted_experts),
    ]
    if model.unlisted_experts:
        experts = model.unlisted_experts
        unquantised = f"{experts} are parameters that quantisation of linear layers leaves as they are: not modelled"
        refuse_told(request, {"ep": f"expert parallelism is not modelled for {experts}", "quantize": unquantised})
        request.given.update(ep=1)
    if normed:
        refuse_told(request, {"kernels": "Liger 0.8 has none for some operators of a model with norms of values"})
    if kinds:
        _check(request, model, " and ".join(kinds))


def _check(request: Request, model: Model, kinds: str) -> None:
    reasons = {
        "tp": f"tensor parallelism is not modelled for {kinds}",
        "cp": f"context parallelism is not modelled for {kinds}",
        "compile": f"torch.compile is not modelled for {kinds}",
    }
    refuse_told(request, reasons)
    check_framework(request, "fsdp2", f"a model with {kinds}")
    if model.mixers and request.given.get("kernels") == "te":
        raise UncountedError("kernels", "te", f"TransformerEngine's modules are not modelled for {kinds}")
    request.given.update(tp=1, cp=1)
    if any(mixer.kind == "Mamba-2 mixer" for mixer in model.mixers):
        refuse_told(request, {"quantize": "the kernel of Mamba-2 mixers reads the output projection's weight itself"})
    _check_scans(request, model)
    packages = dict.fromkeys(KERNELS[mixer.kind] for mixer in model.mixers if mixer.kind in KERNELS)
    if packages:
        request.assumptions["mixer kernels"] = f"{', '.join(packages)} installed"


def _check_scans(request: Request, model: Model) -> None:
    """Refuse what the kernels of Mamba mixers cannot do, and what is not modelled beside them."""
    scans = [mixer for mixer in model.mixers if isinstance(mixer, Mamba)]
    if not scans:
        return
    reason = "the kernels of Mamba mixers read weights of their linear layers themselves"
    refuse_told(request, {"lora": f"adapters are not modelled: {reason}", "quantize": reason})
    if any(mixer.bias and mixer.norms != "learned" for mixer in scans):
        allowed = "its output's bias cannot be trained: MambaInnerFn of mamba-ssm gives it a gradient without a shape"
        raise CombinationError("model", model.name, allowed)
    precision = str(request.given.get("precision", ""))
    if precision and not scannable(model, [precision]):
        raise CombinationError("precision", precision, AUTOCAST)


AUTOCAST = "autocast leaves normalised B and C in fp32, which the scan of mamba-ssm refuses beside 16-bit channels"


def known_precisions(model: Model, able: list[str]) -> list[str]:
    """Of some precisions those in which a model runs, or was recorded."""
    return recorded_precisions(model, scannable(model, able))


def scannable(model: Model, precisions: list[str]) -> list[str]:
    """Of some precisions those in which the scans of a model run: learned norms on B and C widen them under autocast.

    Source: mamba e9594ce ``csrc/selective_scan/selective_scan.cpp``, which wants one dtype.
    """
    normed = any(isinstance(mixer, Mamba) and mixer.norms == "learned" for mixer in model.mixers)
    return [name for name in precisions if not (normed and name.endswith("-autocast"))]
