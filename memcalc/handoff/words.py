"""Words of a command line that memcalc itself wrote: the inverse of the line that reproduces an answer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from memcalc.results.saved import Word

__all__ = ["Typed", "command_line", "flags_of", "typed"]


@dataclass(frozen=True)
class Typed:
    """What a command line says."""

    model: str
    gpu: str
    node: str | None
    words: dict[str, Word] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


def typed(command: str) -> Typed:
    """Return the words of a ``memcalc plan`` or ``memcalc estimate`` line.

    >>> typed("memcalc plan --model llama-2-7b --gpu a100-80g --tp 2/4 --no-sp --set strategy.reshard=always").words
    {'tp': '2/4', 'sp': False}
    """
    words: dict[str, Word] = {}
    settings: dict[str, str] = {}
    parts = shlex.split(command)[2:]
    while parts:
        flag = parts.pop(0)
        name = flag.removeprefix("--").replace("-", "_")
        if flag == "--set":
            key, _, value = parts.pop(0).partition("=")
            settings[key] = value
        elif flag.startswith("--no-"):
            words[name.removeprefix("no_")] = False
        else:
            words[name] = True if not parts or parts[0].startswith("--") else parts.pop(0)
    model, gpu, node = (words.pop(name, None) for name in ("model", "gpu", "node"))
    return Typed(str(model), str(gpu), None if node is None else str(node), words, settings)


def flags_of(words: dict[str, Word], settings: dict[str, str]) -> list[str]:
    """Return words as the parts of a command line."""
    parts: list[str] = []
    for name, value in words.items():
        flag = name.replace("_", "-")
        parts += [f"--{flag}"] if value is True else [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    for key, value in settings.items():
        parts += ["--set", f"{key}={value}"]
    return parts


def command_line(*parts: str) -> str:
    """Return a line that a shell takes apart into these parts."""
    return shlex.join(["memcalc", *parts])
