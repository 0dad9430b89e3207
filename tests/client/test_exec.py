"""Whether a daemon still serves an exec."""

from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import pytest

from agentd.cli.agentctl import exec as command
from agentd.client import AsyncClient
from agentd.client import exec as exec_client
from agentd.client.calls import Call
from agentd.client.exec import Execution
from agentd.errors import Refused, UnknownKernel, Unreachable

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


async def test_no_frame_is_read_while_output_waits() -> None:
    running = Execution(cast("Any", Wire(OUTPUT)), "here")
    assert (await running.has_frame(0), running.is_reading) == (False, True)
    frames = aiter(running)
    assert await anext(frames) == (1, b"output")
    assert not running.is_reading, "nothing is read while the output is written"
    await frames.aclose()


ANSWERS = [
    ("an answer", None, True),
    ("a refusal", UnknownKernel("k1"), True),
    ("no connection, or no answer", Unreachable("no answer within 5 s"), False),
]


@pytest.mark.parametrize(
    ("answer", "served"), [case[1:] for case in ANSWERS], ids=[case[0] for case in ANSWERS]
)
async def test_daemon_is_asked_while_output_waits(
    monkeypatch: pytest.MonkeyPatch, answer: object, served: bool
) -> None:
    """A command may write a checkpoint after a signal, with a reader that takes nothing yet."""
    monkeypatch.setattr(command, "RESPONSE_TIMEOUT_S", 0.01)

    async def fetch(call: Call[Any], timeout_s: float) -> tuple[bytes, None]:
        assert (call.path, timeout_s) == ("/v1/kernels/k1", command.RESPONSE_TIMEOUT_S)
        if isinstance(answer, Exception):
            raise answer
        return b"{}", None

    client = AsyncClient("nowhere")
    monkeypatch.setattr(client, "_fetch", fetch)
    running = Execution(cast("Any", Wire(OUTPUT)), "here")
    assert not await command._is_served(client, "k1", running), "it reads, and no frame comes"
    frames = aiter(running)
    await anext(frames)
    assert await command._is_served(client, "k1", running) is served
    await frames.aclose()
