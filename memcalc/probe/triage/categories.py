"""Each allocation's category, from the stack that made it and from how long it lived.

On a GPU autograd's engine runs in a thread of its own, so that backward's allocations have no Python frame: a stack
without frames, in a trace whose other stacks have them, is backward's. What the optimizer finds alive of it is a
gradient.
"""

from __future__ import annotations

import numpy as np

from memcalc.probe.triage.frames import StackContext, read_stack, site_of
from memcalc.probe.triage.snapshot import ALLOC, BEFORE, Bools, Ints, Lifetimes, Snapshot
from memcalc.results.triage import TriageGrowth

KNOWN_BY = {
    "parameters": "made while a model was built or loaded, and never freed",
    "gradients": "gradients (created in backward, live at the optimizer step)",
    "optimizer states": "made by the optimizer, and never freed",
    "activations": "activations (created in forward, still live)",
    "logits": "made at the loss, or of the size of what was",
    "attention scores": "made where scores or masks of attention are formed",
    "evaluation": "made while evaluating or generating",
    "optimizer temporaries": "made by the optimizer, and freed by it",
    "backward temporaries": "made in backward, and freed before the optimizer ran",
    "gathered weights": "made where sharded weights are gathered",
    "workspaces": "asked for by a BLAS library, and never freed",
    "temporaries": "freed before backward came",
    "inputs": "made by the data's path",
    "kept from earlier steps": "made in an earlier step, and still alive",
    "backward": "made in backward; no optimizer ran after it: gradients or temporaries",
    "before the recording": "there when the recording began; no stack is known",
    "unknown": "unclassified",
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


class StackContexts:
    """The context of each stack of a snapshot, in columns."""

    def __init__(self, contexts: list[StackContext], engine: list[bool], blas: list[bool]) -> None:
        self.said = contexts
        self.phase = np.array([_CODE[stack.phase] for stack in contexts], dtype=np.int64)
        self.making = np.array([_DONE.get(stack.making, 0) for stack in contexts], dtype=np.int64)
        self.blas = np.array(blas, dtype=bool)
        self.phase[np.array(engine, dtype=bool) & (self.phase != _CODE["recompute"])] = _CODE["backward"]

    def context_of(self, stack: int) -> StackContext:
        """The context of one stack, with the engine's phase."""
        context = self.said[stack]
        return context if context.phase else StackContext(phase=_PHASES[int(self.phase[stack])])

    def of(self, name: str) -> Bools:
        """Which stacks are of a phase."""
        return np.asarray(self.phase == _CODE[name])


def stack_contexts(snapshot: Snapshot, lifetimes: Lifetimes) -> StackContexts:
    """Read every stack; one without frames is backward's where the others show that frames were recorded."""
    contexts = [read_stack(stack.frames) for stack in snapshot.stacks]
    result = StackContexts(
        contexts, [stack.engine for stack in snapshot.stacks], [stack.blas for stack in snapshot.stacks]
    )
    made = lifetimes.stacks[lifetimes.kinds == ALLOC]
    if len(made) and np.mean(made != 0) > 0.2:
        result.phase[0] = _CODE["backward"]
    return result


def category_codes(lifetimes: Lifetimes, contexts: StackContexts, steps: Ints) -> Ints:
    """Return each lifetime's number in CATEGORIES; `steps` are the entries at which steps end."""
    codes = {name: index for index, name in enumerate(CATEGORIES)}
    phase, making, entries = contexts.phase[lifetimes.stack], contexts.making[lifetimes.stack], lifetimes.entries
    entry = contexts.phase[lifetimes.stacks] if entries else np.zeros(0, dtype=np.int64)
    in_trace, last = lifetimes.born != BEFORE, np.minimum(lifetimes.died, entries)

    def during(name: str) -> Ints:
        """How many entries of a phase a lifetime saw."""
        seen = np.concatenate(([0], np.cumsum(entry == _CODE[name])))
        return np.asarray(seen[last] - seen[np.maximum(lifetimes.born, -1) + 1])

    stepped, backed = during("optimizer"), during("backward")
    ends = np.searchsorted(steps, last, side="left") - np.searchsorted(steps, lifetimes.born, side="left")
    forever = lifetimes.died >= entries
    first = int(np.argmax(np.isin(entry, (_CODE["forward"], _CODE["loss"], _CODE["backward"])))) if entries else 0
    out = np.full(len(lifetimes.size), codes["unknown"], dtype=np.int64)

    def put(name: str, where: Bools) -> None:
        out[where & (out == codes["unknown"])] = codes[name]

    put("before the recording", ~in_trace & (lifetimes.stack == 0))
    of_blas = contexts.blas[lifetimes.stack] | np.isin(lifetimes.size, _WORKSPACES)
    put("workspaces", forever & of_blas & (phase != _CODE["optimizer"]))
    put("parameters", (phase == _CODE["loading"]) & forever)
    put("parameters", in_trace & forever & (lifetimes.born < first) & np.isin(phase, (_CODE[""], _CODE["setup"])))
    optimizer = phase == _CODE["optimizer"]
    put("optimizer states", optimizer & (forever | (ends > 1) | (making == _DONE["optimizer states"])))
    put("optimizer temporaries", optimizer)
    put("gathered weights", (phase == _CODE["gather"]) | (making == _DONE["gathered weights"]))
    backward = phase == _CODE["backward"]
    forward = np.isin(phase, (_CODE["forward"], _CODE["loss"], _CODE["recompute"]))
    put("logits", (backward | forward) & _like_logits(lifetimes, making, phase))
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


def _like_logits(lifetimes: Lifetimes, making: Ints, phase: Ints) -> Bools:
    """Which allocations have the size of logits, or half of it before an upcast, and not that of a weight.

    No frame says what the output layer's own line or the engine made.
    """
    logits = lifetimes.size[(making == _DONE["logits"]) & (lifetimes.size >= _LEAST_LOGITS)] >> 9
    weights = lifetimes.size[phase == _CODE["loading"]] >> 9
    sizes = np.setdiff1d(np.concatenate((logits, logits >> 1)), weights)
    return np.asarray(np.isin(lifetimes.size >> 9, sizes))


_FEWEST = 3
"""Intervals between steps from which growth is said."""
_MOST_STEPS = 256
_SHOWN = 8


def steps_of(snapshot: Snapshot, lifetimes: Lifetimes, contexts: StackContexts) -> tuple[Ints, str]:
    """Return the entries at which steps end, and what they were found by.

    The optimizer's own entries and those of ``zero_grad`` mark the end of a step; where there are none, the training
    loop's own line, which goes back once a turn, marks a turn.
    """
    if not lifetimes.entries:
        return np.zeros(0, dtype=np.int64), ""
    marks = _optimizer_runs(snapshot, lifetimes, contexts)
    if len(marks) > 1:
        return marks, "the optimizer's allocations"
    turns = _turns(snapshot, lifetimes)
    if len(turns) > 1:
        return turns, "turns of the innermost common loop"
    return marks, "the optimizer's allocations" if len(marks) else ""


def _optimizer_runs(snapshot: Snapshot, lifetimes: Lifetimes, contexts: StackContexts) -> Ints:
    """The last entry of each run of the optimizer; a forward separates two."""
    zeroing = [any(frame.name == "zero_grad" for frame in stack.frames) for stack in snapshot.stacks]
    cleared = np.array(zeroing, dtype=bool)
    stepping = (contexts.of("optimizer") | cleared)[lifetimes.stacks]
    forward = (contexts.of("forward") | contexts.of("loss"))[lifetimes.stacks] & ~stepping
    where = np.flatnonzero(stepping)
    if not len(where):
        return where
    passed = np.concatenate(([0], np.cumsum(forward)))[where]
    last = np.append(np.flatnonzero(np.diff(passed)), len(where) - 1)
    return np.asarray(where[last])


def _turns(snapshot: Snapshot, lifetimes: Lifetimes) -> Ints:
    """Where the line of the outermost frame that changes goes back."""
    paths = [tuple((f.file, f.name, f.line) for f in reversed(stack.frames)) for stack in snapshot.stacks]
    deepest = max((len(path) for path in paths), default=0)
    for depth in range(min(deepest, 24)):
        owners: dict[tuple[str, str], int] = {}
        weights = np.bincount(lifetimes.stacks, minlength=len(paths))
        for path, weight in zip(paths, weights, strict=True):
            if len(path) > depth:
                owners[path[depth][:2]] = owners.get(path[depth][:2], 0) + int(weight)
        if not owners:
            break
        owner = max(owners, key=lambda key: owners[key])
        line = np.array([path[depth][2] if len(path) > depth and path[depth][:2] == owner else -1 for path in paths])
        where = np.flatnonzero(line[lifetimes.stacks] >= 0)
        back = np.flatnonzero(np.diff(line[lifetimes.stacks][where]) < 0)
        if len(back) > 1:
            return np.asarray(where[back])
    return np.zeros(0, dtype=np.int64)


def growth_of(snapshot: Snapshot, lifetimes: Lifetimes, steps: Ints) -> tuple[TriageGrowth, ...]:
    """Return the call sites whose live bytes grew in every interval between steps, the fastest first.

    The interval to the first step's end is not looked at, since states are made there.
    """
    if len(steps) < _FEWEST + 1:
        return ()
    moments = np.asarray(steps[np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).astype(int)])
    span = (len(steps) - 1) / (len(moments) - 1)
    width = len(snapshot.stacks)
    live = np.zeros((len(moments), width))
    count = np.zeros((len(moments), width))
    for row, moment in enumerate(moments):
        alive = lifetimes.alive_at(int(moment))
        live[row] = np.bincount(lifetimes.stack[alive], weights=lifetimes.size[alive], minlength=width)
        count[row] = np.bincount(lifetimes.stack[alive], minlength=width)
    change = np.diff(live, axis=0)
    growing = np.flatnonzero((change > 0).all(axis=0))
    sites: dict[str, list[float]] = {}
    for stack in growing:
        rates = sites.setdefault(site_of(snapshot.stacks[stack].frames), [0.0, 0.0])
        rates[0] += float(change[:, stack].mean()) / span
        rates[1] += float(np.diff(count[:, stack]).mean()) / span
    growth = [
        TriageGrowth(site=site, bytes_per_step=rate, blocks_per_step=blocks, steps=len(steps) - 1)
        for site, (rate, blocks) in sites.items()
    ]
    return tuple(sorted(growth, key=lambda site: -site.bytes_per_step)[:_SHOWN])
