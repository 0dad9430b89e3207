"""Answers that go on: a kernel's log, byte for byte, and the node's events.

Events are server-sent (https://html.spec.whatwg.org/multipage/server-sent-events.html): `event`
says what the JSON in `data` is, `id` is what a client sends back as `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import structlog
from aiohttp import web

from agentd.errors import AgentdError
from agentd.services.events import Event, EventLog, TooSlow

log = structlog.get_logger()

LOG_PATIENCE_S = 1.0
"""How long a follower waits for the first bytes before its answer begins."""
KEEP_ALIVE_S = 15.0
WRITE_PATIENCE_S = 10.0
"""A listener that takes nothing for so long is dropped."""


async def stream_log(request: web.Request, chunks: AsyncGenerator[bytes]) -> web.StreamResponse:
    """Answer with the bytes of a log, as they come."""
    async with aclosing(chunks):
        return await _stream_log(request, chunks)


async def _stream_log(request: web.Request, chunks: AsyncGenerator[bytes]) -> web.StreamResponse:
    reading = asyncio.ensure_future(anext(chunks, b""))
    try:
        await asyncio.wait([reading], timeout=LOG_PATIENCE_S)
        if reading.done():
            reading.result()  # a runtime that does not answer is still a problem here
    except BaseException:
        await _given_up(reading)
        raise
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    await response.prepare(request)
    try:
        while chunk := await _while_connected(request, reading):
            await response.write(chunk)
            reading = asyncio.ensure_future(anext(chunks, b""))
    except AgentdError as error:
        log.warning("logs.cut", path=request.path, reason=str(error))
        raise ConnectionResetError from error  # the stream is cut: too late for a problem
    finally:
        await _given_up(reading)
    await response.write_eof()
    return response


async def _given_up(reading: asyncio.Future[bytes]) -> None:
    """Cancel a read, and wait until it has let go of what it reads from."""
    reading.cancel()
    await asyncio.wait([reading])


async def _while_connected(request: web.Request, reading: asyncio.Future[bytes]) -> bytes:
    """Wait for bytes as long as somebody wants them.

    Raises:
        ConnectionResetError: the caller hung up.
    """
    while not reading.done():
        await asyncio.wait([reading], timeout=LOG_PATIENCE_S)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError
    return reading.result()


async def stream_events(
    request: web.Request, events: EventLog, shown: Callable[[Event], object]
) -> web.StreamResponse:
    """Answer with events until the client hangs up, is too slow, or the daemon stops."""
    last_id = request.headers.get("Last-Event-ID") or request.query.get("last_event_id")
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    try:
        with events.listener(last_id) as listener:
            await response.prepare(request)
            await _write(response, b": agentd\n\n")
            async for event in listener.follow(KEEP_ALIVE_S):
                if event is None:
                    await _write(response, b": still here\n\n")
                    continue
                data = json.dumps(shown(event), separators=(",", ":"))
                frame = f"id: {events.id_of(event)}\nevent: {event.kind}\ndata: {data}\n\n"
                await _write(response, frame.encode())
    except (TooSlow, TimeoutError) as error:
        log.warning("events.listener_dropped", reason=str(error) or "it takes nothing")
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError from error
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_PATIENCE_S):
        await response.write(data)
