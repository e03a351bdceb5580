"""Processes that answer requests: one that takes too long, or dies, is replaced, and the page goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import BinaryIO

from memcalc.ui.answers import JSON, QUICK, Reply, reply

QUICK_SECONDS, SECONDS = 10.0, 60.0
"""The longest that a request may take: one that follows a control, and any other [s]."""
MOST_WAITING = 32
"""Requests that wait for a process; more are refused."""
Answering = Callable[[str, str], Awaitable[Reply]]
"""What answers a kind of request about a text."""
_HEAD = struct.Struct(">II")
_LATE = b'{"field":"","message":"This takes too long here; ask for less, or use the command line."}'
_BUSY = b'{"field":"","message":"Too many requests wait; try again in a moment."}'
_BROKEN = b'{"field":"","message":"The answer failed; the process that computed it was started anew."}'


class Worker:
    """One process, started when it is first needed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self.has_answered = False
        """Whether its process has: the first answer waits for all that is read once."""

    async def answer(self, request: str, text: str, seconds: float) -> Reply:
        """Return the answer to a request; the process is ended where it takes longer than that [s]."""
        try:
            async with asyncio.timeout(seconds):
                reply = await self._exchange(request, text)
                self.has_answered = True
                return reply
        except TimeoutError:
            await self.stop()
            return Reply(503, JSON, _LATE)
        except (asyncio.IncompleteReadError, OSError):
            await self.stop()
            return Reply(500, JSON, _BROKEN)

    async def _exchange(self, request: str, text: str) -> Reply:
        if self._process is None or self._process.returncode is not None:
            await self.start()
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            raise OSError("the process has no pipes")
        for part in (request.encode(), text.encode()):
            self._process.stdin.write(_HEAD.pack(len(part), 0) + part)
        await self._process.stdin.drain()
        output = self._process.stdout
        status, length = _HEAD.unpack(await output.readexactly(_HEAD.size))
        kind, _ = _HEAD.unpack(await output.readexactly(_HEAD.size))
        media = (await output.readexactly(kind)).decode()
        return Reply(status, media, await output.readexactly(length))

    async def start(self) -> None:
        """Start the process."""
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYDANTIC_DISABLE_PLUGINS": "__all__"}
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "memcalc.ui.workers", stdin=pipe, stdout=pipe, env=environ
        )

    async def stop(self) -> None:
        """End the process."""
        process, self._process, self.has_answered = self._process, None, False
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


class Workers:
    """Two sets of processes, so that what follows a control never waits for a search."""

    def __init__(self, quick: int = 2, others: int = 2) -> None:
        self._all = [Worker() for _ in range(quick + others)]
        self._free: dict[bool, asyncio.Queue[Worker]] = {True: asyncio.Queue(), False: asyncio.Queue()}
        for index, worker in enumerate(self._all):
            self._free[index < quick].put_nowait(worker)
        self._waiting = 0
        self._running: set[asyncio.Task[Reply]] = set()

    async def answer(self, request: str, text: str) -> Reply:
        """Return the answer to a request, by the first process that is free for its kind."""
        if self._waiting >= MOST_WAITING:
            return Reply(503, JSON, _BUSY)
        is_quick = request in QUICK
        self._waiting += 1
        try:
            worker = await self._free[is_quick].get()
        finally:
            self._waiting -= 1
        task = asyncio.create_task(self._answered(worker, request, text, is_quick))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)  # a reader that goes away leaves no process half read

    async def _answered(self, worker: Worker, request: str, text: str, is_quick: bool) -> Reply:
        try:
            return await worker.answer(request, text, QUICK_SECONDS if is_quick and worker.has_answered else SECONDS)
        finally:
            self._free[is_quick].put_nowait(worker)

    async def start(self) -> None:
        """Start all processes, so that the first answer does not wait for one."""
        await asyncio.gather(*(worker.start() for worker in self._all))

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(worker.stop() for worker in self._all))


# ------------------------------------------------------------------------------------------- the other end of the pipes


_OBJECTS = 200_000
"""New objects after which cycles are looked for: a replay makes many tuples and no cycle."""


def main() -> None:
    """Answer until there is nothing more to read."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints must not stand between answers
    gc.set_threshold(_OBJECTS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends this one
    with contextlib.suppress(BrokenPipeError):  # the server is gone
        _answer_all(source, target)


def _answer_all(source: BinaryIO, target: BinaryIO) -> None:
    while (request := _next_text(source)) is not None:
        answer = reply(request, _next_text(source) or "")
        media = answer.kind.encode()
        target.write(_HEAD.pack(answer.status, len(answer.body)) + _HEAD.pack(len(media), 0) + media + answer.body)
        target.flush()


def _next_text(source: BinaryIO) -> str | None:
    """Return the next text; None at the end."""
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, _ = _HEAD.unpack(head)
    return source.read(length).decode()


if __name__ == "__main__":
    main()
