"""What can be asked of a model in which something else than attention mixes the tokens of some blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.planner.as_is import check_framework, refuse_told

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model


KERNELS = {
    "gated delta net": "flash-linear-attention and causal-conv1d",
    "Mamba-2 mixer": "mamba-ssm and causal-conv1d",
}
"""Packages whose kernels a class takes where they are installed; its own code in their place keeps far more."""


def check_mixers(request: Request, model: Model) -> None:
    """Refuse what is not modelled beside such blocks, and pin what is therefore not searched."""
    gated = any(attention.output_gate for attention in model.attentions)
    kinds = [*model.mixer_kinds, *["gated attention"] * gated]
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
    request.given.update(tp=1, cp=1)
    if any(mixer.kind == "Mamba-2 mixer" for mixer in model.mixers):
        refuse_told(request, {"quantize": "the kernel of Mamba-2 mixers reads the output projection's weight itself"})
    packages = dict.fromkeys(KERNELS[mixer.kind] for mixer in model.mixers if mixer.kind in KERNELS)
    if packages:
        request.assumptions["mixer kernels"] = f"{', '.join(packages)} installed"
