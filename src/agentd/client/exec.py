"""The client side of an exec over a WebSocket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp

from agentd.client.defaults import CHUNK
from agentd.client.errors import error_from_response
from agentd.concurrency import wait_event
from agentd.errors import Unreachable

CLOSE_TIMEOUT_S = 2.0
"""Seconds that the far end may take to close."""


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
    of it is 1. A command that did not start raises the daemon's refusal at the first step.
    """

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse, address: str) -> None:
        self._websocket = websocket
        self._address = address
        self.exit_code: int | None = None
        """The exit code, None until the command has ended; 128 plus the number of a signal."""
        self.is_reading = True
        """Whether frames are read; none is while the caller is busy with the last one."""
        self._has_frame = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        async for frame in self._websocket:
            self._has_frame.set()
            if frame.type is aiohttp.WSMsgType.PING:
                await self._websocket.pong(frame.data)
            elif frame.type is aiohttp.WSMsgType.BINARY:
                self.is_reading = False
                yield frame.data[0], frame.data[1:]
                self.is_reading = True
            elif frame.type is aiohttp.WSMsgType.TEXT:
                content = json.loads(frame.data)
                if "problem" in content:
                    problem = content["problem"]
                    raise error_from_response(problem["status"], json.dumps(problem).encode(), None)
                self.exit_code = int(content["exit_code"])
                return
        raise Unreachable(f"{self._address}: the connection ended before the command did")

    async def has_frame(self, seconds: float) -> bool:
        """Wait for a frame for a limited time, and return whether one was read.

        The daemon sends one each second while the command runs, even if it prints nothing.
        """
        self._has_frame.clear()
        return await wait_event(self._has_frame, seconds)

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
