"""WebSockets (RFC 6455) with limits for frames.

Pings, pongs, text frames and empty binary frames are control frames. A client that sends too many
of them is disconnected with code 1008.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

MAX_FRAME = 1 << 20
"""Maximum bytes of a frame."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that a client may take to close its side after the last frame."""
MAX_CONTROL = 256
"""Maximum control frames in `CONTROL_WINDOW_S`."""
CONTROL_WINDOW_S = 1.0
FRAMES_AT_ONCE = 64
"""Frames of a client that are served before others have their turn."""


class TooManyControlFrames(Exception):
    """A client sent more than `MAX_CONTROL` control frames in `CONTROL_WINDOW_S`."""

    def __init__(self) -> None:
        super().__init__(f"more than {MAX_CONTROL} control frames in {CONTROL_WINDOW_S:g} s")


class LimitedSocket(web.WebSocketResponse):
    """A WebSocket with limits for the size of frames and the number of control frames."""

    def __init__(self) -> None:
        super().__init__(  # aiohttp refuses a frame that reaches its limit
            max_msg_size=MAX_FRAME + 1, timeout=CLOSE_TIMEOUT_S, compress=False, autoping=False
        )
        self._window_ends = 0.0
        self._controls = 0

    async def frames(self) -> AsyncGenerator[WSMessage]:
        """Yield text and binary frames, and answer pings.

        Raises:
            TooManyControlFrames: the client sent too many; disconnect it.
        """
        number = 0
        async for frame in self:
            number += 1
            if number % FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if frame.type is not WSMsgType.BINARY or not frame.data:
                self._count_control()
            if frame.type is WSMsgType.PING:
                await self.pong(frame.data)
            elif frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                yield frame

    async def end(self, error: BaseException | None = None) -> None:
        """Close the WebSocket, with code 1008 after `TooManyControlFrames`."""
        code, message = WSCloseCode.OK, b""
        if isinstance(error, TooManyControlFrames):
            code, message = WSCloseCode.POLICY_VIOLATION, str(error).encode()
        with suppress(ConnectionError):
            await self.close(code=code, message=message)

    def _count_control(self) -> None:
        now = time.monotonic()
        if now >= self._window_ends:
            self._window_ends, self._controls = now + CONTROL_WINDOW_S, 0
        self._controls += 1
        if self._controls > MAX_CONTROL:
            raise TooManyControlFrames


HEARTBEAT_S = 1.0
"""Seconds between heartbeats."""


async def send_heartbeats(wire: web.WebSocketResponse) -> None:
    """Send heartbeats to a client until its connection fails.

    A client that closes a TCP connection while its input is not read goes unnoticed, because the
    receive window is full. Its system resets the connection when a heartbeat arrives. An
    unsolicited pong is a heartbeat without an answer (RFC 6455, section 5.5.3); a client whose
    input is not read could not answer a ping.
    """
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await wire.pong()
