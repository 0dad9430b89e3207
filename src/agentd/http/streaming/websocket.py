"""WebSockets (RFC 6455) of callers, whose frames are served in turns.

A ping or a pong, a text frame and an empty binary frame are control frames. A caller that sends
too many of them is cut off with the code 1008.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

import structlog
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from agentd.http.connections.fair import FairConnection
from agentd.http.connections.turns import Kind

log = structlog.get_logger()

MAX_FRAME = 1 << 20
"""Bytes of a frame."""
FAREWELL_S = 2.0
"""Seconds that a caller may take to close its side after the last frame."""
MAX_CONTROL = 256
"""Control frames in `CONTROL_WINDOW_S`."""
CONTROL_WINDOW_S = 1.0


class TooManyControlFrames(Exception):
    """A caller sent more than `MAX_CONTROL` control frames in `CONTROL_WINDOW_S`."""

    def __init__(self) -> None:
        super().__init__(f"more than {MAX_CONTROL} control frames in {CONTROL_WINDOW_S:g} s")


class FairSocket(web.WebSocketResponse):
    """A caller's WebSocket."""

    def __init__(self, request: web.Request) -> None:
        super().__init__(max_msg_size=MAX_FRAME, timeout=FAREWELL_S, compress=False, autoping=False)
        if not isinstance(request.protocol, FairConnection):
            raise TypeError("expected a request of a FairConnection")
        self._connection = request.protocol
        self._window_ends = 0.0
        self._controls = 0

    async def frames(self) -> AsyncGenerator[WSMessage]:
        """Yield text and binary frames in the caller's turns, and answer pings.

        Raises:
            TooManyControlFrames: the caller is to be cut off.
        """
        async for frame in self:
            await self._connection.turn(Kind.FRAMES)
            if frame.type is not WSMsgType.BINARY or not frame.data:
                self._count_control()
            if frame.type is WSMsgType.PING:
                await self.pong(frame.data)
            elif frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                yield frame

    async def send_fairly(self, data: bytes | str) -> None:
        """Send a frame in the caller's turn."""
        await self.turn_to_write(len(data))
        if isinstance(data, str):
            await self.send_str(data)
        else:
            await self.send_bytes(data)

    async def turn_to_write(self, size: int) -> None:
        """Return when the caller's turn has room for bytes of a stream."""
        await self._connection.turn_to_write(size)

    async def end(self, error: BaseException | None = None) -> None:
        """Close the WebSocket, with the code 1008 after `TooManyControlFrames`."""
        code, message = WSCloseCode.OK, b""
        if isinstance(error, TooManyControlFrames):
            code, message = WSCloseCode.POLICY_VIOLATION, str(error).encode()
        self._connection.reads_little()
        with suppress(ConnectionError):
            await self.close(code=code, message=message)

    def _count_control(self) -> None:
        now = time.monotonic()
        if now >= self._window_ends:
            self._window_ends, self._controls = now + CONTROL_WINDOW_S, 0
        self._controls += 1
        if self._controls > MAX_CONTROL:
            raise TooManyControlFrames


PROBE_S = 1.0
"""Seconds between heartbeats."""


async def probe(wire: web.WebSocketResponse) -> None:
    """Send a client heartbeats until its connection fails.

    Nothing arrives from a client that closed a TCP connection behind input that is not read, since
    the receive window is full. Its system resets the connection when it receives something. A pong
    that nobody asked for is a heartbeat without an answer (RFC 6455, section 5.5.3): a client
    whose input is not read could not send one.
    """
    while True:
        await asyncio.sleep(PROBE_S)
        await wire.pong()
