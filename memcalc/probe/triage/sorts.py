"""Each allocation's category, from the stack that made it and from how long it lived.

On a GPU autograd's engine runs in a thread of its own, so that backward's allocations have no Python frame: a stack
without frames, in a trace whose other stacks have them, is backward's. What the optimizer finds alive of it is a
gradient.
"""

from __future__ import annotations

import numpy as np

from memcalc.probe.triage.frames import Reading, read_stack
from memcalc.probe.triage.lives import BEFORE, Ints, Lives
from memcalc.probe.triage.snapshot import ALLOC, Snapshot

__all__ = ["CATEGORIES", "KNOWN_BY", "Readings", "categories", "readings"]

KNOWN_BY = {
    "parameters": "made while a model was built or loaded, and never freed",
    "gradients": "made in backward, and alive when the optimizer ran or to the end",
    "optimizer states": "made by the optimizer, and never freed",
    "activations": "made in forward, and alive into backward or at this moment",
    "logits": "made at the loss, or of the size of what was",
    "attention scores": "made where scores or masks of attention are formed",
    "evaluation": "made while evaluating or generating",
    "optimizer temporaries": "made by the optimizer, and freed by it",
    "backward temporaries": "made in backward, and freed before the optimizer ran",
    "gathered weights": "made where sharded weights are gathered",
    "workspaces": "asked for by a BLAS library, and never freed",
    "temporaries": "freed before backward came",
    "inputs": "made by the data's path",
    "kept from earlier steps": "made in a step that had ended, and still alive",
    "backward": "made in backward; no optimizer ran after it, so that gradients are not told from temporaries",
    "before the recording": "there when the recording began; no stack is known",
    "unknown": "nothing says what it is",
}
CATEGORIES = tuple(KNOWN_BY)
_WORKSPACES = (8519680, 33554432)
"""cuBLAS handles as PyTorch makes them: 8.125 MiB, and 32 MiB on compute capability 9.0 (CublasHandlePool.cpp)."""
_LEAST_LOGITS = 1 << 20
_PHASES = ("", "loading", "setup", "data", "forward", "loss", "backward", "recompute", "gather", "optimizer",
    "evaluation", "generation")  # fmt: skip
_CODE = {name: code for code, name in enumerate(_PHASES)}
_MAKING = ("", "logits", "attention scores", "attention mask", "optimizer states", "gathered weights")
_DONE = {name: code for code, name in enumerate(_MAKING)}


class Readings:
    """What each stack of a snapshot says, in columns."""

    def __init__(self, said: list[Reading], engine: list[bool], blas: list[bool]) -> None:
        self.said = said
        self.phase = np.array([_CODE[one.phase] for one in said], dtype=np.int64)
        self.making = np.array([_DONE.get(one.making, 0) for one in said], dtype=np.int64)
        self.blas = np.array(blas, dtype=bool)
        self.phase[np.array(engine, dtype=bool) & (self.phase != _CODE["recompute"])] = _CODE["backward"]

    def reading(self, stack: int) -> Reading:
        """What one stack says, the engine's among them."""
        said = self.said[stack]
        return said if said.phase else Reading(phase=_PHASES[int(self.phase[stack])])

    def of(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which stacks are of a phase."""
        return np.asarray(self.phase == _CODE[name])


def readings(snapshot: Snapshot, lives: Lives) -> Readings:
    """Read every stack; that without frames is backward's where the others show that frames were recorded."""
    said = [read_stack(stack.frames) for stack in snapshot.stacks]
    found = Readings(said, [one.engine for one in snapshot.stacks], [one.blas for one in snapshot.stacks])
    made = lives.stacks[lives.kinds == ALLOC]
    if len(made) and np.mean(made != 0) > 0.2:
        found.phase[0] = _CODE["backward"]
    return found


def categories(lives: Lives, read: Readings, steps: Ints) -> Ints:
    """Return each life's number in CATEGORIES; `steps` are the entries at which steps end."""
    number = {name: at for at, name in enumerate(CATEGORIES)}
    phase, making, end = read.phase[lives.stack], read.making[lives.stack], lives.entries
    entry = read.phase[lives.stacks] if end else np.zeros(0, dtype=np.int64)
    in_trace, last = lives.born != BEFORE, np.minimum(lives.died, end)

    def during(name: str) -> Ints:
        """How many entries of a phase a life saw."""
        seen = np.concatenate(([0], np.cumsum(entry == _CODE[name])))
        return np.asarray(seen[last] - seen[np.maximum(lives.born, -1) + 1])

    stepped, backed = during("optimizer"), during("backward")
    ends = np.searchsorted(steps, last, side="left") - np.searchsorted(steps, lives.born, side="left")
    forever = lives.died >= end
    first = int(np.argmax(np.isin(entry, (_CODE["forward"], _CODE["loss"], _CODE["backward"])))) if end else 0
    out = np.full(len(lives.size), number["unknown"], dtype=np.int64)

    def put(name: str, where: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        out[where & (out == number["unknown"])] = number[name]

    unread = ~in_trace & (lives.stack == 0)
    put("before the recording", unread)
    put(
        "workspaces",
        forever & (read.blas[lives.stack] | np.isin(lives.size, _WORKSPACES)) & (phase != _CODE["optimizer"]),
    )
    put("parameters", (phase == _CODE["loading"]) & forever)
    put("parameters", in_trace & forever & (lives.born < first) & np.isin(phase, (_CODE[""], _CODE["setup"])))
    optimizer = phase == _CODE["optimizer"]
    states = optimizer & (forever | (ends > 1) | (making == _DONE["optimizer states"]))
    put("optimizer states", states)
    put("optimizer temporaries", optimizer)
    put("gathered weights", (phase == _CODE["gather"]) | (making == _DONE["gathered weights"]))
    backward = phase == _CODE["backward"]
    forward = np.isin(phase, (_CODE["forward"], _CODE["loss"], _CODE["recompute"]))
    put("logits", (backward | forward) & _like_logits(lives, making, phase))
    put("gradients", backward & (stepped > 0))
    put("gradients", backward & ~in_trace)
    ever = bool(np.any(entry == _CODE["optimizer"]))
    put("backward temporaries", backward & ~forever & ever)
    put("backward", backward)
    put("kept from earlier steps", in_trace & (ends > 0) & np.isin(phase, (_CODE["forward"], _CODE["loss"])) & forever)
    evaluating = np.isin(phase, (_CODE["evaluation"], _CODE["generation"]))
    put("logits", (making == _DONE["logits"]) & ~evaluating)
    put("evaluation", evaluating)
    put("attention scores", np.isin(making, (_DONE["attention scores"], _DONE["attention mask"])))
    put("activations", forward & (forever | (backed > 0)))
    put("temporaries", forward)
    put("inputs", phase == _CODE["data"])
    put("temporaries", phase == _CODE["loading"])
    return out


def _like_logits(lives: Lives, making: Ints, phase: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which allocations have the size of logits, or half of it before an upcast, and not that of a weight.

    No frame says what the output layer's own line or the engine made.
    """
    logits = lives.size[(making == _DONE["logits"]) & (lives.size >= _LEAST_LOGITS)] >> 9
    weights = lives.size[phase == _CODE["loading"]] >> 9
    sizes = np.setdiff1d(np.concatenate((logits, logits >> 1)), weights)
    return np.asarray(np.isin(lives.size >> 9, sizes))
