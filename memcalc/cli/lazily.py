"""Commands that are built when they are asked for: an invocation runs one of them, and each has some forty options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Commands"]


class Commands(Mapping[str, Any]):
    """The commands of a group by name, each built once."""

    def __init__(self) -> None:
        self._makers: dict[str, Callable[[], Any]] = {}
        self._built: dict[str, Any] = {}

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Add a command that `make` builds."""
        self._makers[name] = make

    def __getitem__(self, name: str) -> Any:
        """Return a command, built."""
        if name not in self._built:
            self._built[name] = self._makers[name]()
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, in the order in which they were added."""
        return iter(self._makers)

    def __len__(self) -> int:
        """Count the commands."""
        return len(self._makers)
