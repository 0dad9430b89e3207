"""The ends of an exec, as its client sees them."""

from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import pytest

from agentd.client import exec as exec_client
from agentd.client.exec import Execution
from agentd.errors import Refused, Unreachable

OUTPUT = aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, b"\x01output", None)
PING = aiohttp.WSMessage(aiohttp.WSMsgType.PING, b"a", None)
PONG = aiohttp.WSMessage(aiohttp.WSMsgType.PONG, b"", None)
END = aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, '{"exit_code": 7}', None)
CLOSED = aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)
SILENT = TimeoutError()


class Wire:
    """A WebSocket that sends frames, or is silent for half of the time that is allowed."""

    def __init__(self, *frames: aiohttp.WSMessage | TimeoutError) -> None:
        self._frames = [*frames]
        self.closed = False
        self.pongs: list[bytes] = []

    async def receive(self, timeout: float) -> aiohttp.WSMessage:
        assert timeout == exec_client.SILENCE_S / 2
        frame = self._frames.pop(0)
        self.closed = frame is CLOSED
        if isinstance(frame, TimeoutError):
            raise frame
        return frame

    async def pong(self, data: bytes) -> None:
        self.pongs.append(data)


@pytest.mark.parametrize(
    ("frames", "end"),
    [
        ((OUTPUT, END), 7),
        ((SILENT, PONG, SILENT, END), 7),
        ((SILENT, PING, SILENT, OUTPUT, SILENT, END), 7),
        ((SILENT, SILENT), "here: no sign of life for 10 s"),
        ((OUTPUT, PONG, SILENT, SILENT), "here: no sign of life for 10 s"),
        ((OUTPUT, CLOSED), "here: the connection ended before the command did"),
    ],
)
async def test_exec_ends_or_its_node_is_lost(
    frames: Sequence[aiohttp.WSMessage | TimeoutError], end: int | str
) -> None:
    wire = Wire(*frames)
    running = Execution(cast("Any", wire), "here")
    try:
        output = [data async for data in running]
    except Unreachable as error:
        assert (str(error), running.exit_code) == (end, None)
    else:
        assert (running.exit_code, output) == (end, [(1, b"output")] * (OUTPUT in frames))
    assert wire.pongs == [b"a"] * (PING in frames)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "1", "null", "{}", '{"exit_code": null}', '{"problem": {}}', '{"problem": 1}'],
)
async def test_malformed_last_frame_is_an_error(text: str) -> None:
    frame = aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, text, None)
    empty = aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, b"", None)
    with pytest.raises(Refused, match="malformed last frame"):
        async for _ in Execution(cast("Any", Wire(empty, frame)), "here"):
            pass
