"""Whether a daemon still serves an exec."""

from typing import Any, cast

import aiohttp

from agentd.client.exec import Execution


class Wire:
    """A WebSocket that sends one frame of output."""

    async def __aiter__(self) -> Any:
        yield aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, b"\x01output", None)


async def test_exec_is_served_while_its_output_waits() -> None:
    running = Execution(cast("Any", Wire()), "here")
    assert not await running.is_served(0)
    frames = aiter(running)
    assert await anext(frames) == (1, b"output")
    assert await running.is_served(0), "nothing is read while the output is written"
    await frames.aclose()
