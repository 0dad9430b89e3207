"""Streaming responses: a kernel's log, byte for byte, and the node's events.

Events are server-sent (https://html.spec.whatwg.org/multipage/server-sent-events.html): `event` is
the type of the JSON in `data`; a client sends `id` back as `Last-Event-ID`. A client that hangs up
or stops reading loses its stream and everything that was opened for it.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import structlog
from aiohttp import web

from agentd.core.access import Caller
from agentd.errors import AgentdError, TooManyStreams
from agentd.events import Event, EventLog, TooSlow
from agentd.http.callers import caller_of
from agentd.http.connections.client_warnings import warn_of_client
from agentd.http.connections.connection import connection_of
from agentd.http.connections.request_turns import end_turn

log = structlog.get_logger()

FIRST_CHUNK_TIMEOUT_S = 1.0
"""Seconds that a follower waits for the first bytes before the response begins."""
KEEP_ALIVE_S = 15.0
HANG_UP_POLL_S = 0.5
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of a stream: nginx and proxies like it keep a response back without the second."""
LOG_POSITION = "Log-Position"
"""The header with the position of a log's first byte: bytes since the kernel began."""
LOG_KERNEL = "Log-Kernel"
"""The header with the kernel of a log, which an id that is used again does not tell."""
MAX_STREAMS = 64
"""Maximum open streams of one caller."""


class Streams:
    """The open streams and their callers."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[object], Caller] = {}

    @contextmanager
    def register(self, request: web.Request, *, may_pause: bool = False) -> Iterator[None]:
        """Register a stream while it is open; it ends when the client hangs up.

        With `may_pause` it survives a client that stops reading.

        Raises:
            TooManyStreams: the caller has reached the maximum.
        """
        caller, task, transport = caller_of(request), asyncio.current_task(), request.transport
        open_count = sum(1 for other in self._open.values() if other.name == caller.name)
        if open_count >= MAX_STREAMS:
            raise TooManyStreams(f"{caller.name} has {open_count} open streams, the maximum")
        if task is None or transport is None:
            raise ConnectionResetError("the client has hung up")
        self._open[task] = caller
        connection_of(request).may_pause = may_pause
        end_turn(request)
        watch = asyncio.create_task(_cancel_on_hang_up(transport, task))
        try:
            yield
        finally:
            watch.cancel()
            del self._open[task]

    def end_caller(self, name: str) -> None:
        """End every stream of a caller, including those that it opened for others."""
        for task, caller in self._open.items():
            if name in (caller.name, caller.via):
                task.cancel()

    def end_all(self) -> None:
        """End every stream, because the server stops."""
        for task in self._open:
            task.cancel()


async def _cancel_on_hang_up(transport: asyncio.Transport, stream: asyncio.Task[object]) -> None:
    """Cancel a stream when its client hangs up, also while nothing is read from the client."""
    poll = select.poll()
    poll.register(
        transport.get_extra_info("socket"), select.POLLRDHUP | select.POLLHUP | select.POLLERR
    )
    while not (transport.is_closing() or poll.poll(0)):  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(HANG_UP_POLL_S)
    transport.abort()
    stream.cancel()


async def stream_log(
    request: web.Request, kernel: str, position: int, chunks: AsyncGenerator[bytes]
) -> web.StreamResponse:
    """Stream the bytes of a log from a position; only a log that is complete has a last chunk."""
    next_chunk = asyncio.ensure_future(anext(chunks, b""))
    try:
        await asyncio.wait([next_chunk], timeout=FIRST_CHUNK_TIMEOUT_S)
        if next_chunk.done():
            next_chunk.result()  # a runtime that does not answer is still a problem response here
        headers = {
            **HEADERS,
            "Content-Type": "application/octet-stream",
            LOG_POSITION: str(position),
            LOG_KERNEL: kernel,
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            while chunk := await next_chunk:
                await response.write(chunk)
                next_chunk = asyncio.ensure_future(anext(chunks, b""))
        except AgentdError as error:
            log.warning("logs.interrupted", path=request.path, reason=str(error))
            raise ConnectionResetError from error  # too late for a problem response
        await response.write_eof()
        return response
    finally:
        next_chunk.cancel()
        await asyncio.wait([next_chunk])
        await chunks.aclose()


async def stream_events(
    request: web.Request, events: EventLog, encode: Callable[[Event], bytes]
) -> web.StreamResponse:
    """Stream events until the client hangs up, falls behind, or the daemon stops.

    `encode` returns the bytes of an event, empty if the client must not see it.
    """
    last_id = request.headers.get("Last-Event-ID") or request.query.get("last_event_id")
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
    with events.subscribe(last_id) as listener:
        await response.prepare(request)
        await response.write(b": agentd\n\n")
        try:
            async for event in listener.follow(KEEP_ALIVE_S):
                if event is None:
                    await response.write(b": still here\n\n")
                elif data := encode(event):
                    await response.write(data)
        except TooSlow as error:
            warn_of_client("stream.dropped", path=request.path, reason=str(error))
            connection_of(request).close()  # too late for a problem response
            raise ConnectionResetError(str(error)) from None
    await response.write_eof()
    return response
