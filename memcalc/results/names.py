"""What components and phases are called where people read them; JSON and CSV keep the names of the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_COMPONENTS = {"reserve": "allocator cache", "context": "context, communicators", "device": "total"}
LETTERS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "buffers": "B",
    "reserve": "C",
    "context": "X",
    "weights": "W",
    "KV cache": "K",
    "CUDA graphs": "H",
    "outside PyTorch": "S",
    "policy": "Y",
    "engine": "E",
    "logits": "L",
    "critic": "V",
    "reference": "R",
    "reward model": "M",
    "weights under way": "U",
    "contexts": "X",
}
"""Parts of a GPU's memory in a bar: a letter means the same in every command."""
PHASES = {
    "forward-last": "forward, last block",
    "forward": "forward, loss",
    "loss": "backward, loss and head",
    "backward-last": "backward, last block",
    "backward-first": "backward, first block",
    "backward-end": "backward, embedding",
    "step": "optimizer step",
}
"""Phases as they are said, in the order of a step."""


def component_name(key: str) -> str:
    """Return what a component of the device figure is called on a screen; any other word as it is.

    >>> component_name("reserve"), component_name("gradients")
    ('allocator cache', 'gradients')
    """
    return _COMPONENTS.get(key, key)


def phase_name(key: str) -> str:
    """Return what a phase of a step is called on a screen; any other word as it is.

    >>> phase_name("backward-last")
    'backward, last block'
    """
    return PHASES.get(key, key)


def phase_range(phases: Sequence[str], known: Iterable[str]) -> str:
    """Return the phases of `known` in which something is alive, runs of them by their ends; nothing for all.

    >>> phase_range(["forward-last", "forward", "loss", "step"], PHASES)
    'forward, last block → backward, loss and head; optimizer step'
    """
    order = [*known]
    if not phases or set(order) <= set(phases):
        return ""
    runs: list[list[str]] = []
    for index, name in enumerate(order):
        if name not in phases:
            continue
        if runs and index and runs[-1][-1] == order[index - 1]:
            runs[-1].append(name)
        else:
            runs.append([name])
    return "; ".join(" → ".join(phase_name(name) for name in dict.fromkeys((run[0], run[-1]))) for run in runs)
