"""Whether a daemon still serves an exec."""

from typing import Any, cast

import aiohttp
import pytest

from agentd.cli.agentctl import exec as command
from agentd.client import AsyncClient
from agentd.client.calls import Call
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
    running = Execution(cast("Any", Wire()), "here")
    assert not await command._is_served(client, "k1", running), "it reads, and no frame comes"
    frames = aiter(running)
    await anext(frames)
    assert await command._is_served(client, "k1", running) is served
    await frames.aclose()
