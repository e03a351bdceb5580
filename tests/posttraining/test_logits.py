"""Bytes of a logit where log-probabilities are read: live tensors of the operators that TRL's trainers run."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.posttraining.frameworks import TRL

ROWS, TOKENS, VOCAB = 4, 64, 4096


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are made, and the most that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [part for part in (out if isinstance(out, tuple | list) else (out,)) if torch.is_tensor(part)]:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def log_probs(hidden: torch.Tensor, head: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Logits in 16 bits, their fp32 copy as autocast's outputs are cast back, and log-probabilities row by row."""
    logits = (hidden @ head).float()[:, :-1] / 0.9
    chosen = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


@pytest.mark.parametrize(("gradients", "width"), [(True, TRL.trains), (False, TRL.reads)])
def test_what_a_logit_takes(gradients: bool, width: float) -> None:
    """TRL 1.10.0's own DPO and GRPO trainers were measured at 16.1 and 16.2 with gradients, and 8.05 without."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, TOKENS + 1, 8, dtype=torch.bfloat16, requires_grad=gradients)
    head = torch.randn(8, VOCAB, dtype=torch.bfloat16, requires_grad=gradients)
    index = torch.randint(0, VOCAB, (ROWS, TOKENS))
    with Live() as live, torch.set_grad_enabled(gradients):
        values = log_probs(hidden, head, index)
        if gradients:
            values.sum().backward()
    assert live.peak / (ROWS * TOKENS * VOCAB) == pytest.approx(width, rel=0.05)
