"""The command line that reproduces an answer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memcalc.planner.choices import OR
from memcalc.planner.request import SEARCHED

if TYPE_CHECKING:
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model

__all__ = ["command_line", "said"]


def said(words: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Words with the calibration that was taken, also where it was found and not named."""
    return {**words, **({"calibration": request.calibration} if request.calibration else {})}


def command_line(
    command: str,
    model: str | Model,
    gpu: str | GPU,
    node: str | None,
    words: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
) -> str:
    """The command line that reproduces the answer."""
    chip = gpu if isinstance(gpu, str) else gpu.name
    parts = ["memcalc", command, *_model_words(model), "--gpu", chip, *(["--node", node] if node else [])]
    for name, value in words.items():
        if value is None or (value is False and name != "sp"):
            continue
        flag = f"--{name.replace('_', '-')}"
        parts += [flag] if value is True else ["--no-sp"] if value is False else [flag, _typed(name, value)]
    for key, value in (settings or {}).items():
        parts += ["--set", f"{key}={value}"]
    return shlex.join(parts)


def _model_words(model: str | Model) -> list[str]:
    """How a model is told on the command line: by its name, or as the module that it was recorded from."""
    if isinstance(model, str):
        return ["--model", model]
    if model.recording is None:
        return ["--model", model.name]
    words = [part for name, value in model.recording.words for part in (f"--{name}", value)]
    return ["--module", model.recording.origin, *words]


def _typed(name: str, value: object) -> str:
    """A value as it is typed: a list is several values for a search, or all that is offloaded or trained."""
    if not isinstance(value, tuple | list | set | frozenset):
        return str(value)
    between = OR if name in SEARCHED and name != "offload" else ","
    return between.join(map(str, value))
