"""Whether a daemon still serves an exec."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from agentd.cli.agentctl import exec as command
from agentd.client.exec import Execution
from agentd.errors import UnknownKernel, Unreachable


class Wire:
    """A WebSocket that sends one frame of output."""

    async def __aiter__(self) -> Any:
        yield aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, b"\x01output", None)


async def test_no_frame_is_read_while_output_waits() -> None:
    running = Execution(cast("Any", Wire()), "here")
    assert (await running.has_frame(0), running.is_reading) == (False, True)
    frames = aiter(running)
    assert await anext(frames) == (1, b"output")
    assert not running.is_reading, "nothing is read while the output is written"
    await frames.aclose()


ANSWERS = [
    ("an answer", None, True),
    ("a refusal", UnknownKernel("k1"), True),
    ("no connection", Unreachable("connection refused"), False),
    ("no answer", asyncio.Event(), False),
]


@pytest.mark.parametrize(
    ("answer", "served"), [case[1:] for case in ANSWERS], ids=[case[0] for case in ANSWERS]
)
async def test_daemon_is_asked_while_output_waits(
    monkeypatch: pytest.MonkeyPatch, answer: object, served: bool
) -> None:
    """A command may write a checkpoint after a signal, with a reader that takes nothing yet."""
    monkeypatch.setattr(command, "RESPONSE_TIMEOUT_S", 0.01)

    async def kernel(kernel_id: str) -> None:
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, Exception):
            raise answer

    client = cast("Any", SimpleNamespace(kernel=kernel))
    running = Execution(cast("Any", Wire()), "here")
    assert not await command._is_served(client, "k1", running), "it reads, and no frame comes"
    frames = aiter(running)
    await anext(frames)
    assert await command._is_served(client, "k1", running) is served
    await frames.aclose()
