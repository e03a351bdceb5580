"""The server: a free port of this machine alone, the processes behind it, and the browser."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec

from memcalc.errors import InputError, MissingError
from memcalc.ui.app import App
from memcalc.ui.page import page, policy
from memcalc.ui.workers import Workers

ADDRESS = "127.0.0.1"
TRIED = 20
"""Ports that are tried from the first one on."""
MOST_CONNECTIONS = 64


def serve(link: str = "", *, port: int = 8765, opens: bool = True, announce: Callable[[str], None] = print) -> None:
    """Serve the page until it is interrupted; `link` is the job that it opens with.

    The first free port from `port` on is taken. `announce` is told the address before the first request.

    Raises :class:`memcalc.errors.MissingError` without the extra ``ui``.
    """
    if find_spec("uvicorn") is None:
        raise MissingError("the page needs a server: pip install 'memcalc[ui]'.")
    listening = listener(port)
    address = f"http://{ADDRESS}:{listening.getsockname()[1]}/"
    announce(address)
    if opens:
        webbrowser.open(f"{address}#{link}" if link else address)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(served(listening))


def listener(port: int) -> socket.socket:
    """Return a socket on the first free port from `port` on, reachable from this machine alone."""
    for number in range(port, min(port + TRIED, 65536)):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, number))
        except OSError:
            listening.close()
            continue
        listening.listen()
        return listening
    raise InputError("port", port, f"none of the {TRIED} ports from it on is free")


async def served(listening: socket.socket) -> None:
    """Serve on a socket until interrupted."""
    import uvicorn

    workers = Workers()
    config = uvicorn.Config(
        App(page(), policy(), workers.answer),
        log_level="warning",
        lifespan="off",
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    await workers.start()
    try:
        await uvicorn.Server(config).serve(sockets=[listening])
    finally:
        await workers.stop()
