"""A growing list of allocator events, and the playing of a template into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.trace.tape import Record
    from memcalc.trace.template import Template

Event = tuple[str, int, int, int, str]
"""Kind, key, bytes, stream and name, as :func:`memcalc.allocator.replay` takes them."""
COMPUTE, GATHER, REDUCE, CONTEXT = 0, 1, 2, 3
"""The streams."""
STREAMS = {"compute": COMPUTE, "all-gather": GATHER, "reduce-scatter": REDUCE}


@dataclass
class Log:
    """A growing list of events; keys are given out here, and 0 stands for a tensor of no bytes."""

    events: list[Event] = field(default_factory=list)
    next_key: int = 0

    def taken(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def alloc(self, size: int, stream: int = COMPUTE, name: str = "") -> int:
        """Allocate and return the key."""
        if size <= 0:
            return 0
        self.next_key += 1
        self.events.append(("alloc", self.next_key, size, stream, name))
        return self.next_key

    def free(self, key: int) -> None:
        """Free."""
        if key:
            self.events.append(("free", key, 0, 0, ""))

    def free_all(self, keys: list[int]) -> None:
        """Free a list of tensors and empty it."""
        for key in keys:
            self.free(key)
        keys.clear()

    def pass_through(self, sizes: list[int], stream: int, name: str) -> None:
        """Tensors of which each is freed while a stream still has it, which comes to its end after the last of them."""
        keys = []
        for size in sizes:
            keys.append(self.alloc(size, COMPUTE, name))
            self.events.append(("drop", keys[-1], 0, stream, ""))
        self.events.append(("sync", 0, 0, stream, ""))
        self.free_all(keys)

    def mark(self, phase: str) -> None:
        """A phase begins."""
        self.events.append(("mark", 0, 0, 0, phase))


@dataclass
class Names:
    """Tensors by the names that a function has for them: one bound anew lets go of what it had once that is made."""

    log: Log
    keys: dict[str, int] = field(default_factory=dict)

    def bind(self, name: str, size: int) -> None:
        """Make a tensor."""
        key = self.log.alloc(size, COMPUTE, name)
        self.drop(name)
        self.keys[name] = key

    def drop(self, *names: str) -> None:
        """Let go of tensors that are there."""
        for name in names:
            self.log.free(self.take(name))

    def take(self, name: str) -> int:
        """Hand a tensor over to another owner."""
        return self.keys.pop(name, 0)


@dataclass
class Run:
    """A block or head in one micro-batch: its template, the bytes of each storage, and the keys of those alive."""

    template: Template
    sizes: list[int]
    added: Callable[[Record], None] | None = None
    """Called where a product adds to a gradient in its buffer."""
    exchanges: bool = False
    """Whether there are context-parallel ranks, so that what they exchange is on a stream of its own."""
    keys: dict[int, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    away: list[int] = field(default_factory=list)
    """Storages that are in the host's memory."""

    def forward(self, log: Log, given: int, crossing: Callable[[], None] | None = None) -> int:
        """Write forward; ``given`` is the key of the input, and the output's is returned.

        ``crossing`` is called where a head's logits leave the model for the loss.
        """
        self.keys[0] = given
        calls = [(at, crossing) for at in self.template.crossings[:1] if crossing]
        self._play_between(log, self.template.forward, None, calls)
        out = self.keys.get(self.template.output, 0)
        if self.template.output not in self.template.kept:
            self.keys.pop(self.template.output, None)
        if 0 not in self.template.kept:
            log.free(self.keys.pop(0, 0))
        return out

    def backward(
        self,
        log: Log,
        given: int,
        gradients: list[int] | None,
        crossing: Callable[[], None] | None = None,
        product: Callable[[], None] | None = None,
    ) -> int:
        """Write backward from the output's gradient; weight gradients go to ``gradients``, whose owner frees them.

        Without an owner each is added to that of an earlier micro-batch and freed, once the node that made it has its
        input's (the engine takes the node of the highest sequence number next, and ``AccumulateGrad`` has the highest
        there is: torch/csrc/autograd/functions/accumulate_grad.h). ``crossing`` is called where
        the gradient of a head's logits comes back to the model, and ``product`` once the product that follows has its
        result's memory.
        """
        self.keys[self.template.incoming] = given
        events, calls = self.template.backward, []
        for at in self.template.crossings[1:]:
            first = next((index for index in range(at, len(events)) if events[index] >= 0), at)
            calls = [(after, call) for after, call in ((at, crossing), (first + 1, product)) if call]
        self._play_between(log, events, gradients, calls)
        outgoing = self.template.outgoing
        return 0 if outgoing is None else self.keys.pop(outgoing, 0)

    def leave(self, log: Log, flowing: int) -> None:
        """What is kept for backward goes to the host; ``flowing`` is the next block's input, which stays."""
        for storage, key in self.keys.items():
            if key and key != flowing and storage != self.template.output:
                log.free(key)
                self.away.append(storage)

    def come_back(self, log: Log) -> None:
        """What had left is on the device again."""
        for storage in self.away:
            self.keys[storage] = log.alloc(self.sizes[storage], COMPUTE, self.template.names[storage])
        self.away.clear()

    def drop(self, log: Log, flowing: int = 0) -> None:
        """Free what is still alive, but for ``flowing``, which is in another's hands."""
        log.free_all([key for key in self.keys.values() if key and key != flowing])
        self.keys.clear()

    def left(self, storages: frozenset[int]) -> list[int]:
        """Take storages out of the run's hands, but for those that another owner has: their owner frees them."""
        keys = [self.keys.pop(storage) for storage in sorted(storages) if storage in self.keys]
        return [key for key in keys if key not in self.pinned]

    def pin(self, storage: int, gradient: int) -> list[int]:
        """Take a storage, and a gradient, out of the run's hands: their owner frees them."""
        self.pinned = {self.keys.get(storage, 0), gradient} - {0}
        return sorted(self.pinned)

    def _play_between(
        self,
        log: Log,
        events: tuple[int, ...],
        gradients: list[int] | None,
        calls: list[tuple[int, Callable[[], None]]],
    ) -> None:
        """Write events, with each call when so many of them are written."""
        start = 0
        for at, call in calls:
            self._play(log, events[start:at], gradients)
            call()
            start = at
        self._play(log, events[start:] if start else events, gradients)

    def _play(self, log: Log, events: tuple[int, ...], gradients: list[int] | None) -> None:
        keys, sizes, template, write = self.keys, self.sizes, self.template, log.events.append
        names, is_gradient, pinned = template.names, template.is_gradient, self.pinned
        pop, last, apart = keys.pop, log.next_key, template.is_exchanged if self.exchanges else None
        added: list[int] = []
        freed = False
        for event in events:
            if event < 0:
                freed = True
                key = pop(~event, 0)
                if key and key not in pinned:
                    write(("free", key, 0, 0, ""))
                continue
            if added and freed:
                log.free_all(added)
            size = sizes[event]
            if size > 0:
                last = key = last + 1
                write(("alloc", key, size, CONTEXT if apart and apart[event] else COMPUTE, names[event]))
            else:
                key = 0
            if not is_gradient[event]:
                keys[event] = key
            elif not key:
                if self.added is not None:
                    log.next_key = last
                    self.added(template.records[event])
                    last = log.next_key
            elif gradients is None:
                added.append(key)
                freed = False
            else:
                gradients.append(key)
        log.free_all(added)
        log.next_key = last
