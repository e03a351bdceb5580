"""Trains a model of the zoo on one device and counts live bytes after every operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autograd import measure, models
from memcalc.probe.live import timeline
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.probe.live.timeline import Steps, adamw


def train(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int = 2,
    micro_batches: int = 1,
) -> Steps:
    """Run training steps of a model of the zoo; a single one is run as the second, beside the optimizer's states."""
    states = stepped(model, optimizer) if steps == 1 else []
    return timeline.train(model, models.blocks_of(model), run, optimizer, steps, micro_batches, states)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Let the optimizer step on gradients of zero, and return the states that it has from then on."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def optimizer_of(model: nn.Module, kind: str, rule: str = "adamw") -> torch.optim.Optimizer:
    """Return AdamW, or SGD with ``momentum`` and ``decay`` as its rule says; ``foreach``, ``loop`` or ``fused``."""
    if rule == "adamw":
        return adamw(model, kind)
    words = {"momentum": 0.9 * ("momentum" in rule), "weight_decay": 0.1 * ("decay" in rule)}
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=kind == "foreach", fused=kind == "fused", **words)


def step_timeline(
    family: str,
    *,
    precision: str = "fp32",
    attention: str = "flash",
    dropout: bool | float | None = None,
    recompute: str = "none",
    batch: int = models.BATCH,
    seq: int = models.SEQ,
    layers: int | None = None,
    optimizer: str = "foreach",
    rule: str = "adamw",
    steps: int = 2,
    micro_batches: int = 1,
    **changes: Any,
) -> Steps:
    """Train ``family`` on one device for ``steps`` steps; arguments as in :func:`autograd.measure.saved_bytes`."""
    with cuda_like("auto" if attention == "flash" else attention):
        model, run, _ = measure.build(
            family,
            precision=precision,
            attention=attention,
            dropout=dropout,
            recompute=recompute,
            batch=batch,
            seq=seq,
            layers=layers,
            **changes,
        )
        return train(model, run, optimizer_of(model, optimizer, rule), steps, micro_batches)
