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
COMPUTE, GATHER, REDUCE, CONTEXT, UPLOAD = range(5)
"""The streams."""
Script = list[tuple[list[Event], int | None]]
"""Events that are the same in every micro-batch and block, and what a :class:`Run` does after each of these lists: an
event of its template; None where it is done."""
ROOT = 5
"""What tells streams of one root of FSDP 2 from those of the next."""
STREAMS = {"compute": COMPUTE, "all-gather": GATHER, "reduce-scatter": REDUCE}


@dataclass
class Log:
    """A growing list of events; keys are given out here, and 0 stands for a tensor of no bytes."""

    events: list[Event] = field(default_factory=list)
    next_key: int = 0
    scripts: dict[tuple[int, int, int, int, bool], Script] = field(default_factory=dict)
    """Of parts of templates, by events and sizes: a key is used again once it is free."""

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

    def drop_all(self, keys: list[int]) -> None:
        """Tensors are let go of before another stream is done with them, each by an event of its own."""
        self.events += [("drop", key, 0, -key, "") for key in keys if key]

    def collect(self, keys: list[int]) -> None:
        """The other stream is done with tensors that were dropped."""
        self.events += [("sync", 0, 0, -key, "") for key in keys if key]
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
            self._play(log, events, start, at, gradients)
            call()
            start = at
        self._play(log, events, start, len(events), gradients)

    def _play(self, log: Log, events: tuple[int, ...], start: int, end: int, gradients: list[int] | None) -> None:
        """Write a part of the events; what comes and goes within it is written once for all blocks like this one."""
        part = id(events), id(self.sizes), start, end, gradients is None
        if part not in log.scripts:
            log.scripts[part] = self._script(log, events[start:end], owned=gradients is not None)
        keys, pinned, is_gradient, write = self.keys, self.pinned, self.template.is_gradient, log.events.append
        for passing, event in log.scripts[part]:
            log.events += passing
            if event is None:
                return
            if event < 0:
                key = keys.pop(~event, 0)
                if key and key not in pinned:
                    write(("free", key, 0, 0, ""))
            elif not is_gradient[event]:
                keys[event] = log.alloc(self.sizes[event], self._stream(event), self.template.names[event])
            elif gradients is not None and self.sizes[event] > 0:
                gradients.append(log.alloc(self.sizes[event], self._stream(event), self.template.names[event]))
            elif self.added is not None:
                self.added(self.template.records[event])

    def _stream(self, storage: int) -> int:
        return CONTEXT if self.exchanges and self.template.is_exchanged[storage] else COMPUTE

    def _script(self, log: Log, events: tuple[int, ...], *, owned: bool) -> Script:
        """What comes and goes within some events, up to each event of a storage that is there before or after them."""
        script: Script = []
        part, within = Log(next_key=log.next_key), self._within(events)
        keys: dict[int, int] = {}
        added: list[int] = []
        freed = False
        for at, event in enumerate(events):
            freed = freed or event < 0
            if event >= 0 and freed:
                part.free_all(added)
            if at in within:
                if event < 0:
                    part.free(keys[~event])
                else:
                    keys[event] = part.alloc(self.sizes[event], self._stream(event), self.template.names[event])
            elif event < 0 or owned or not self.template.is_gradient[event] or self.sizes[event] <= 0:
                script.append((part.taken(), event))
            else:
                added.append(part.alloc(self.sizes[event], self._stream(event), self.template.names[event]))
                freed = False
        part.free_all(added)
        log.next_key = part.next_key
        return [*script, (part.taken(), None)]

    def _within(self, events: tuple[int, ...]) -> set[int]:
        """Which events are those of storages that come and go within them; a gradient has another owner."""
        within: set[int] = set()
        frees: dict[int, int] = {}
        for at in range(len(events) - 1, -1, -1):
            event = events[at]
            if event < 0:
                frees[~event] = at
            elif event in frees and not self.template.is_gradient[event]:
                within |= {at, frees.pop(event)}
        return within
