"""What can be asked of a model in which something else than attention mixes the tokens of some blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.planner.as_is import check_framework, refuse_told

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.specs.model import Model


def check_mixers(request: Request, model: Model) -> None:
    """Refuse what is not modelled beside such blocks, and pin what is therefore not searched."""
    if not model.mixers:
        return
    kinds = " and ".join(f"{kind}s" for kind in dict.fromkeys(mixer.kind for mixer in model.mixers))
    reasons = {
        "tp": f"tensor parallelism is not modelled for {kinds}",
        "cp": f"context parallelism is not modelled for {kinds}",
        "compile": f"torch.compile is not modelled for {kinds}",
    }
    refuse_told(request, reasons)
    check_framework(request, "fsdp2", f"a model with {kinds}")
    request.given.update(tp=1, cp=1)
