"""A guarded loop that runs anywhere: real steps of a small model, with readings of memory that are made up."""

import logging
import sys
from pathlib import Path

import torch
from torch import nn

import memcalc
from memcalc.probe.guard import Reading

GIB = 2**30


class Growing:
    """Stands for the GPU: what the plan in force predicts, and a leak that grows from window to window."""

    leak = iter([0, 5, 11, 14, 14])

    def read(self) -> Reading:
        """Return this window's figures."""
        peak = watch.plan.peak
        return Reading(peak.allocated, peak.allocated + self.more, peak.reserved, peak.reserved + self.more)

    def reset_peaks(self) -> None:
        """Go to the next window."""
        self.more = next(self.leak, 14) * GIB

    def release(self) -> None:
        """Nothing is cached here."""


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each token."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


log = logging.getLogger("memcalc.guard")
log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler(sys.stdout))
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
plan = Path(__file__).with_name("plan.json")

watch = memcalc.guard(plan, model=model, every=2, on_pressure="step", meter=Growing())

with watch:
    for _ in range(10):
        batch = torch.randn(32, 8, 16)  # what one rank is fed in an optimizer step
        for part in watch.split(batch):
            loss = model(part).square().mean() / watch.accumulation_steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step_done()
