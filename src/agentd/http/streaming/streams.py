"""Streaming responses: a kernel's log, byte for byte, and the node's events.

Events are server-sent (https://html.spec.whatwg.org/multipage/server-sent-events.html): `event` is
the type of the JSON in `data`; a client sends `id` back as `Last-Event-ID`. A client that hangs up
or stops reading loses its stream and everything that was opened for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

import structlog
from aiohttp import web

from agentd.core.access import Caller
from agentd.errors import AgentdError, TooManyStreams
from agentd.events import Event, EventLog, TooSlow
from agentd.http.callers import caller_of
from agentd.http.connections.client_warnings import ClientWarnings
from agentd.http.connections.connection import Connection
from agentd.http.connections.fair import turn_to_write

log = structlog.get_logger()
warn_of_client = ClientWarnings()

LOG_PATIENCE_S = 1.0
"""Seconds that a follower waits for the first bytes before the response begins."""
KEEP_ALIVE_S = 15.0
WRITE_PATIENCE_S = 10.0
"""Seconds after which a client that does not read is dropped."""
MAX_AT_ONCE = 32
"""Events written at once to a client that lags behind."""
MOST_STREAMS = 64
"""Maximum open streams of one caller."""


class Streams:
    """The open streams and their callers."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[object], Caller] = {}

    @contextmanager
    def opened(self, request: web.Request, *, may_pause: bool = False) -> Iterator[None]:
        """Register a stream while it is open; it ends when the client hangs up.

        With `may_pause` it survives a client that stops reading.

        Raises:
            TooManyStreams: the caller has reached the maximum.
        """
        caller, task = caller_of(request), asyncio.current_task()
        mine = sum(1 for other in self._open.values() if other.name == caller.name)
        if mine >= MOST_STREAMS:
            raise TooManyStreams(f"{caller.name} has {mine} open streams, the maximum")
        if task is not None:
            self._open[task] = caller
            if isinstance(request.protocol, Connection):
                request.protocol.carries(task, may_pause=may_pause)
        try:
            yield
        finally:
            if task is not None:
                del self._open[task]

    def cut(self, name: str) -> None:
        """End every stream of a caller, including those that it opened for others."""
        for task, caller in self._open.items():
            if name in (caller.name, caller.via):
                task.cancel()

    def end(self) -> None:
        """End every stream, because the server stops."""
        for task in self._open:
            task.cancel()


async def stream_log(request: web.Request, chunks: AsyncGenerator[bytes]) -> web.StreamResponse:
    """Stream the bytes of a log."""
    async with aclosing(chunks):
        return await _stream_log(request, chunks)


async def _stream_log(request: web.Request, chunks: AsyncGenerator[bytes]) -> web.StreamResponse:
    reading = asyncio.ensure_future(anext(chunks, b""))
    try:
        await asyncio.wait([reading], timeout=LOG_PATIENCE_S)
        if reading.done():
            reading.result()  # a runtime that does not answer is still a problem response here
    except BaseException:
        await _given_up(reading)
        raise
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    try:
        await response.prepare(request)
        while chunk := await reading:
            await _write(request, response, chunk)
            reading = asyncio.ensure_future(anext(chunks, b""))
    except AgentdError as error:
        log.warning("logs.interrupted", path=request.path, reason=str(error))
        raise ConnectionResetError from error  # the stream is cut; too late for a problem response
    finally:
        await _given_up(reading)
    await response.write_eof()
    return response


async def _given_up(reading: asyncio.Future[bytes]) -> None:
    """Cancel a read and wait until its resources are released."""
    reading.cancel()
    await asyncio.wait([reading])


async def stream_events(
    request: web.Request, events: EventLog, encoded: Callable[[Event], bytes]
) -> web.StreamResponse:
    """Stream events until the client hangs up, falls behind, or the daemon stops.

    `encoded` returns the bytes of an event, empty if the client must not see it.
    """
    last_id = request.headers.get("Last-Event-ID") or request.query.get("last_event_id")
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    with events.listener(last_id) as listener:
        await response.prepare(request)
        await _write(request, response, b": agentd\n\n")
        try:
            async for event in listener.follow(KEEP_ALIVE_S):
                if event is None:
                    await _write(request, response, b": still here\n\n")
                elif data := b"".join(map(encoded, (event, *listener.more(MAX_AT_ONCE)))):
                    await _write(request, response, data)
        except TooSlow as error:
            _dropped(request, str(error))
    await response.write_eof()
    return response


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write to a client in its caller's turn.

    Raises:
        ConnectionResetError: the client disconnected or does not read.
    """
    await turn_to_write(request, len(data))
    try:
        async with asyncio.timeout(WRITE_PATIENCE_S):
            await response.write(data)
    except TimeoutError:
        _dropped(request, f"read nothing for {WRITE_PATIENCE_S:g} s")


def _dropped(request: web.Request, why: str) -> None:
    warn_of_client("stream.dropped", path=request.path, reason=why)
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError(why)
