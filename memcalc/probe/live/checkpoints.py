"""Wraps blocks of a model in activation checkpoints by a policy's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_groups(policy: str, count: int) -> list[range]:
    """Return the runs of blocks that share one checkpoint: ``none``, ``full``, ``every-N`` or ``segments-K``."""
    if policy == "none":
        return []
    if policy == "full":
        return [range(i, i + 1) for i in range(count)]
    word, _, number = policy.rpartition("-")
    if word == "every":  # torchtitan wraps each block whose number, from 1, is a multiple of N
        return [range(i, i + 1) for i in range(count) if (i + 1) % int(number) == 0]
    size = -(-count // int(number))
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


def wrap_blocks(found: Mapping[str, nn.Module], policy: str) -> None:
    """Checkpoint blocks, given by path, by ``policy``: separately in each list of blocks (encoder, decoder)."""
    lists: dict[str, list[nn.Module]] = {}
    for path, block in found.items():
        lists.setdefault(path.rpartition(".")[0], []).append(block)
    for blocks in lists.values():
        for group in recompute_groups(policy, len(blocks)):
            _wrap([blocks[i] for i in group])


def _wrap(group: list[nn.Module]) -> None:
    if len(group) == 1:
        forward = group[0].forward
        # Transformers binds the keyword arguments to the function, and so does this: they are not saved as inputs
        group[0].forward = lambda *args, **kwargs: checkpoint(
            lambda *inputs: forward(*inputs, **kwargs), *args, use_reentrant=False
        )
        return
    forwards = [block.forward for block in group]
    tuples: list[bool] = []

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            out = forward(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        tuples[:] = [isinstance(out, tuple)]
        return out

    def first(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *inputs: run(*inputs, **kwargs), hidden, *args, use_reentrant=False)

    group[0].forward = first
    for block in group[1:]:
        block.forward = lambda hidden, *_, **__: (hidden,) if tuples[0] else hidden
