"""The phase of a stack of Python frames, and what was being allocated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from memcalc.catalog import read_toml

_LIBRARY = re.compile(
    r"(site|dist)-packages/|/lib/python3[^/]*/|^<|/torch/(nn|autograd|optim|utils|_ops|_tensor|functional|distributed)"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack; ``code`` is its source line, where it is known."""

    file: str
    line: int
    name: str
    code: str = ""

    @property
    def text(self) -> str:
        """What the patterns are matched with."""
        return f"{self.file}:{self.name}:{self.code}"

    @property
    def short(self) -> str:
        """The frame as it is shown.

        >>> Frame("/job/train.py", 7, "step").short
        'train.py:7 in step'
        """
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line} in {self.name}"


@dataclass(frozen=True, slots=True)
class StackContext:
    """Which phase ran, and what was being allocated."""

    phase: str = ""
    """loading, data, forward, loss, backward, recompute, gather, optimizer, evaluation, generation or setup."""
    evidence: Frame | None = None
    making: str = ""
    """What was being made: logits, attention scores, optimizer states, predictions, kv cache …; empty if not known."""
    evaluating: bool = False
    without_grad: bool = False
    """A decorator that switches gradients off is on the stack."""


def _patterns(table: Mapping[str, Sequence[str]]) -> dict[str, re.Pattern[str]]:
    """One pattern by name for any of several signs."""
    return {name: re.compile("|".join(signs)) for name, signs in table.items()}


_TABLES = read_toml(files("memcalc.probe") / "triage" / "frames.toml")
_PHASES, _MAKING, _SIGNS = (_patterns(_TABLES[name]) for name in ("phase", "making", "sign"))
_DEEP = 6
"""Innermost frames that show what is being allocated: further out a line may run for other reasons."""


def read_stack(frames: Sequence[Frame]) -> StackContext:
    """Return the context of a stack; the innermost frame is the first.

    The innermost sign of a phase counts, since a loop that evaluates or steps calls all else. A forward inside of a
    checkpoint's backward is a recomputation.
    """
    if not frames:
        return StackContext()
    texts = [frame.text for frame in frames]
    evaluating = _first(_SIGNS["evaluation"], texts)
    generating = _first(_SIGNS["generation"], texts)
    quiet = any(map(_SIGNS["no_grad"].search, texts)) or any(map(_SIGNS["without_grad_loops"].search, texts))
    phase, index = _phase(texts)
    at_making, making = next(
        ((i, name) for i, text in enumerate(texts[:_DEEP]) for name, sign in _MAKING.items() if sign.search(text)),
        (0, ""),
    )
    if generating is not None and phase in {"", "forward", "data", "loss"}:
        phase, index = "generation", generating
    elif evaluating is not None and phase not in {"loading", "optimizer", "backward"}:
        phase, index = "evaluation", evaluating
    if making.startswith("optimizer") and phase != "optimizer":
        making = ""
    evidence = frames[index] if phase else frames[at_making] if making else None
    return StackContext(phase, evidence, making, evaluating is not None, quiet)


def _phase(texts: list[str]) -> tuple[str, int]:
    """The phase of the innermost sign, and its index."""
    recompute, optimizer = _first(_SIGNS["recompute"], texts), _first(_SIGNS["optimizer"], texts)
    matches = sorted(
        (index, order, name)
        for order, (name, sign) in enumerate(_PHASES.items())
        if (index := _first(sign, texts)) is not None
    )
    if optimizer is not None and (not matches or optimizer <= matches[0][0]):
        return "optimizer", optimizer
    if recompute is not None:
        backward = next((index for index, _, name in matches if name == "backward"), None)
        if backward is not None and backward >= recompute:
            return "recompute", recompute
    if not matches:
        return "", 0
    index, _, name = matches[0]
    return name, index


def _first(sign: re.Pattern[str], texts: Iterable[str]) -> int | None:
    return next((index for index, text in enumerate(texts) if sign.search(text)), None)


def own_site(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the program's own code: neither the standard library's nor an installed package's."""
    return next((frame for frame in frames if not _LIBRARY.search(frame.file.replace("\\", "/"))), None)


def site_of(frames: Sequence[Frame]) -> str:
    """Return a call site as it is shown: the innermost frame, and the own line that led there.

    >>> site_of([Frame("/x/site-packages/torch/nn/functional.py", 3, "linear"), Frame("/job/a.py", 7, "forward")])
    'a.py:7 in forward (functional.py:3 in linear)'
    """
    if not frames:
        return "no Python frame"
    own_frame = own_site(frames)
    inner = frames[0]
    if own_frame is None or own_frame is inner:
        return inner.short
    return f"{own_frame.short} ({inner.short})"
