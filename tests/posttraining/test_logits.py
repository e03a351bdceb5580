"""Bytes of a logit where log-probabilities are read: live tensors of the operators that TRL's trainers run."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.formulas.activations import split_log_prob_bytes
from memcalc.posttraining.figures import OF_STANDARD
from memcalc.posttraining.frameworks import TRL
from memcalc.posttraining.phases import ENTROPIES, TRAINED

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


class CrossEntropy(torch.autograd.Function):
    """Megatron-LM's ``_VocabParallelCrossEntropy`` on one rank: softmax and gradient in place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token."""
        logits = logits.float()
        logits -= logits.max(dim=-1, keepdim=True)[0]
        chosen = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        loss = total.log() - chosen
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, index)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of the logits."""
        softmax, index = ctx.saved_tensors
        softmax.scatter_add_(-1, index.unsqueeze(-1), -torch.ones_like(index, dtype=softmax.dtype).unsqueeze(-1))
        return softmax.mul_(gradients[0].unsqueeze(-1)), None


class Entropy(torch.autograd.Function):
    """verl's ``_VocabParallelEntropy`` on one rank; its compiled sum of products has no tensor of its own."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        """Return the entropy of each token."""
        softmax = logits - logits.max(dim=-1, keepdim=True)[0]
        softmax.exp_().div_(softmax.sum(dim=-1, keepdim=True))
        mean = torch.einsum("rtv,rtv->rt", softmax, logits).unsqueeze(-1)
        ctx.save_for_backward(logits, softmax, mean)
        return mean.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits, in the place of the softmax."""
        logits, softmax, mean = ctx.saved_tensors
        softmax.mul_(logits.sub_(mean)).mul_(gradients[0].unsqueeze(-1))
        logits.add_(mean)
        return softmax.mul_(-1)


def megatron_loss(hidden: torch.Tensor, head: torch.Tensor, index: torch.Tensor, entropy: bool) -> torch.Tensor:
    """What verl 0.10's Megatron engine reads of a packed micro-batch; 16-bit logits are gone once they are cast."""
    logits = (hidden @ head).float()
    logits.div_(torch.full(index.shape, 0.9).unsqueeze(-1))
    copy = logits.clone() if entropy else logits
    spread = Entropy.apply(logits) if entropy else 0
    del logits
    return (CrossEntropy.apply(copy, index) + 0.01 * spread).sum()


@pytest.mark.parametrize(
    ("gradients", "entropy", "width"),
    [(True, False, TRAINED), (True, True, ENTROPIES), (False, False, OF_STANDARD), (False, True, ENTROPIES)],
)
def test_what_a_logit_takes_by_megatron_workers_of_verl(gradients: bool, entropy: bool, width: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1, ROWS * TOKENS, 8, dtype=torch.bfloat16, requires_grad=gradients)
    head = torch.randn(8, VOCAB, dtype=torch.bfloat16, requires_grad=gradients)
    index = torch.randint(0, VOCAB, (1, ROWS * TOKENS))
    with Live() as live, torch.set_grad_enabled(gradients):
        loss = megatron_loss(hidden, head, index, entropy)
        if gradients:
            loss.backward()
    assert live.peak / (ROWS * TOKENS * VOCAB) == pytest.approx(width, rel=0.05)


def fused_backward(hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of verl's ``efficient_entropy_backward`` by its default method, with any gradients of the logits."""
    inputs, weights = torch.empty_like(hidden), torch.empty_like(head)
    logits = torch.empty(len(hidden), 9504, dtype=hidden.dtype)
    starts = range(0, len(head), 9504)
    for start in starts:
        logits.fill_(0.5)
        rows = head[start : start + 9504]
        if start == starts[-1]:
            logits = logits[:, : len(rows)].contiguous()
        if start == 0:
            torch.matmul(logits, rows, out=inputs)
        else:
            inputs += torch.matmul(logits, rows)
        torch.matmul(logits.T, hidden, out=weights[start : start + 9504])
    return inputs, weights


@pytest.mark.parametrize(("vocab", "width"), [(19008, 512), (22000, 64), (9000, 256), (16000, 128)])
def test_what_a_fused_kernel_of_verl_holds_under_megatron(vocab: int, width: int) -> None:
    with Live() as live:
        hidden, head = torch.ones(96, width, dtype=torch.bfloat16), torch.ones(vocab, width, dtype=torch.bfloat16)
        fused_backward(hidden, head)
    given = 2 * (96 + vocab) * width
    assert live.peak - given == pytest.approx(int(split_log_prob_bytes(96, vocab, width)), rel=0.01)
