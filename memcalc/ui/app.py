"""The page over HTTP on a free port of this machine alone: who may ask, how much, and what goes back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import Any

from memcalc.errors import InputError, MissingError
from memcalc.ui.answers import HTML, JSON, REQUESTS, Reply
from memcalc.ui.page import page, policy
from memcalc.ui.workers import Answering, Workers

MOST_BYTES = 1 << 20
"""Of a request's body."""
MOST_QUERY = 48 << 10
"""Of an address [bytes]."""
BODY_SECONDS = 10.0
"""The longest that a body may take to arrive [s]."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine for itself: a page under any other name is not this one, whatever its address."""
_HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:]+\])(?::\d{1,5})?")
_FILES = {"export": "memcalc-job.zip"}

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class App:
    """The page and what it asks for."""

    def __init__(self, page: str, policy: str, answering: Answering) -> None:
        self._page = page.encode()
        self._policy = policy
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        answer = refusal(scope) or await self._answer(scope, receive)
        name = _FILES.get(_request(scope), "") if answer.status == 200 else ""
        await send({"type": "http.response.start", "status": answer.status, "headers": self._headers(answer, name)})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        if scope["path"] == "/" and scope["method"] in {"GET", "HEAD"}:
            return Reply(200, HTML, self._page)
        request = _request(scope)
        if request not in REQUESTS or scope["method"] not in {"GET", "POST"}:
            return _refused(404, "There is no such page.")
        text: str | None = scope["query_string"].decode("latin-1")
        if scope["method"] == "POST":
            text = await _body(receive)
        if text is None:
            return _refused(413, f"A request holds at most {MOST_BYTES // 1024} KiB.")
        return await _while_read(self._answering(request, text), receive)

    def _headers(self, answer: Reply, filename: str) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": answer.kind,
            "content-length": str(len(answer.body)),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
        }
        if answer.body is self._page:
            headers["content-security-policy"] = self._policy
        if filename:
            headers["content-disposition"] = f'attachment; filename="{filename}"'
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def refusal(scope: Scope) -> Reply | None:
    """Return the answer to a request that did not come from this page, or that is too long; None for all others.

    A name that leads here from elsewhere (DNS rebinding) is seen in Host, a page of another origin in Origin or in
    Sec-Fetch-Site. A link to the page itself may come from anywhere: nothing is computed for it.
    """
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get("host", "")
    match = _HOST.fullmatch(host)
    if match is None or match[1].lower() not in LOCAL:
        return _refused(421, "This page is served under 127.0.0.1 and localhost only.")
    if headers.get("origin", f"http://{host}") != f"http://{host}":
        return _refused(403, "Only this page may ask.")
    if scope["path"] != "/" and headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        return _refused(403, "Only this page may ask.")
    if len(scope["query_string"]) > MOST_QUERY:
        return _refused(414, f"An address holds at most {MOST_QUERY // 1024} KiB.")
    return None


async def _while_read(answering: Awaitable[Reply], receive: Receive) -> Reply:
    """Return an answer; one that nobody waits for any more is given up where it has not begun."""
    answer = asyncio.ensure_future(answering)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else _refused(499, "Nobody waits for this any more.")
    finally:
        gone.cancel()
        answer.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request(scope: Scope) -> str:
    return str(scope["path"]).removeprefix("/api/") if str(scope["path"]).startswith("/api/") else ""


def _refused(status: int, message: str) -> Reply:
    return Reply(status, JSON, f'{{"field":"","message":"{message}"}}'.encode())


async def _body(receive: Receive) -> str | None:
    """Return the body as text; None where it is too large, comes too slowly, or is no text."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return b"".join([part async for part in _parts(receive)]).decode()
    except (TimeoutError, OverflowError, UnicodeDecodeError):
        return None


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    size, more = 0, True
    while more:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size > MOST_BYTES:
            raise OverflowError
        more = message.get("more_body", False)
        yield part


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
