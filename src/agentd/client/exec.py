"""The client side of an exec over a WebSocket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import aiohttp

from agentd.client.defaults import CHUNK
from agentd.client.errors import error_from_response
from agentd.errors import Refused, Unreachable

CLOSE_TIMEOUT_S = 2.0
"""Seconds that the far end may take to close."""

SILENCE_S = 10.0
"""Seconds without a frame of the far end, which sends one each second, after which it is lost."""


async def read_frames(
    websocket: aiohttp.ClientWebSocketResponse,
) -> AsyncGenerator[aiohttp.WSMessage]:
    """Yield frames until the connection ends, and answer pings.

    Raises:
        TimeoutError: the far end is silent.
    """
    is_silent = False
    while not websocket.closed:
        try:
            frame = await websocket.receive(SILENCE_S / 2)
        except TimeoutError:
            if is_silent:
                raise TimeoutError(f"no sign of life for {SILENCE_S:g} s") from None
            is_silent = True  # or this process was stopped, and there are frames now
            continue
        is_silent = False
        if frame.type is aiohttp.WSMsgType.PING:
            await websocket.pong(frame.data)
        yield frame


async def close_websocket(websocket: aiohttp.ClientWebSocketResponse) -> None:
    """Close a WebSocket, even if the far end reads no more; unread data is lost."""
    connection = websocket.get_extra_info("socket")
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await websocket.close()
    with suppress(OSError):
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)


class Execution:
    """A command that runs inside a kernel; leaving the context ends it.

        async with client.exec("train-1", ["sh", "-c", "nvidia-smi"]) as command:
            async for stream, data in command:
                ...
        print(command.exit_code)

    Iteration yields the stream (1 standard output, 2 standard error) and bytes; with a terminal all
    of it is 1. A command that did not start raises the daemon's refusal at the first step. A lost
    connection and ten seconds of silence raise `Unreachable`; the node then ends the command.
    """

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse, address: str) -> None:
        self._websocket = websocket
        self._address = address
        self.exit_code: int | None = None
        """The exit code, None until the command has ended; 128 plus the number of a signal."""

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        reason = "the connection ended before the command did"
        try:
            async for frame in read_frames(self._websocket):
                if frame.type is aiohttp.WSMsgType.BINARY and frame.data:
                    yield frame.data[0], frame.data[1:]
                elif frame.type is aiohttp.WSMsgType.TEXT:
                    self.exit_code = _parse_exit_code(frame.data)
                    return
        except (TimeoutError, ConnectionError) as error:
            reason = str(error) or reason
        raise Unreachable(f"{self._address}: {reason}")

    async def write(self, data: bytes) -> None:
        """Write input; returns when there is room for more."""
        for start in range(0, len(data), CHUNK):
            await self._websocket.send_bytes(data[start : start + CHUNK])

    async def close_input(self) -> None:
        """Close the command's input."""
        await self._websocket.send_str(json.dumps({"stdin": "closed"}))

    async def resize(self, columns: int, rows: int) -> None:
        """Set the size of the terminal."""
        await self._websocket.send_str(json.dumps({"resize": [columns, rows]}))

    async def send_signal(self, name: str) -> None:
        """Send a signal by its name, such as INT."""
        await self._websocket.send_str(json.dumps({"signal": name}))


def _parse_exit_code(text: str) -> int:
    """Return the exit code in the last frame.

    Raises:
        AgentdError: the command did not start, or the frame is malformed.
    """
    try:
        content = json.loads(text)
        if "problem" not in content:
            return int(content["exit_code"])
        status = int(content["problem"]["status"])
    except (ValueError, TypeError, LookupError):
        raise Refused("Internal", f"malformed last frame: {text:.100}", {}) from None
    raise error_from_response(status, json.dumps(content["problem"]).encode(), None)
