"""Calls of the asyncio client whose answers are streams: exec, logs and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import aiohttp

from agentd.client import calls
from agentd.client.calls import Call
from agentd.client.defaults import CHUNK, SILENCE_S
from agentd.client.errors import cut_log_error
from agentd.client.events import EventParser, NodeEvent
from agentd.client.exec import Execution, close_websocket
from agentd.client.paths import api_path
from agentd.client.transport import Transport
from agentd.errors import Refused, Unavailable, Unreachable

RECONNECT_S = 1.0


class StreamCalls(Transport):
    """The transport, and the calls whose answers are streams."""

    @asynccontextmanager
    async def exec(
        self,
        kernel_id: str,
        command: Sequence[str],
        *,
        tty: bool = False,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        node: str | None = None,
    ) -> AsyncIterator[Execution]:
        """Run a command in a kernel; see `Execution`.

        At a gateway `node` names the kernel's node, if the fleet did not place it.
        """
        websocket = await self._connect_websocket(
            Call("GET", api_path("kernels", kernel_id, "exec", node=node))
        )
        request = {"command": list(command), "tty": tty, "env": dict(env or {})}
        try:
            await websocket.send_json({**request, "working_dir": working_dir})
            yield Execution(websocket, self._address)
        finally:
            await close_websocket(websocket)

    async def logs(
        self,
        kernel_id: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: str | float | None = None,
        timestamps: bool = False,
        stream: str | None = None,
        node: str | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield a kernel's output as it arrives; with `follow` until the kernel ends.

        At a gateway `node` names the kernel's node, if the fleet did not place it.

        Raises:
            AgentdError: the log cannot be read, or was cut off before its end.
        """
        query = {"follow": follow, "tail": tail, "since": since, "timestamps": timestamps}
        call = calls.logs_call(kernel_id, node, **query, stream=stream)
        async with await self._open_stream(call) as response:
            try:
                async for chunk in response.content.iter_chunked(CHUNK):
                    yield chunk
            except aiohttp.ClientError:
                await self._raise_cut_log(kernel_id, node)

    async def _raise_cut_log(self, kernel_id: str, node: str | None) -> NoReturn:
        """Read a log that broke once more, and raise the reason."""
        try:
            await self._fetch(calls.logs_call(kernel_id, node, tail=0), self._timeout_s)
        except Unavailable as cause:
            raise cut_log_error(kernel_id, cause) from None
        raise cut_log_error(kernel_id, None) from None

    async def _open_stream(
        self, call: Call[bytes], *, silence_s: float | None = None
    ) -> aiohttp.ClientResponse:
        """Open a stream, whose answer must begin in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._open_response(call, silence_s=silence_s)
        except TimeoutError:
            reason = f"no answer within {self._timeout_s:g} s"
            raise Unreachable(f"{self._address}: {reason}") from None

    @asynccontextmanager
    async def listening(
        self, *, after: str | None = None
    ) -> AsyncIterator[AsyncIterator[NodeEvent]]:
        """Listen to new events over one connection, and end with it.

        Raises:
            AgentdError: the events are not available.
        """
        stream = await self._open_stream(calls.events_call(after), silence_s=SILENCE_S)
        async with stream as response:
            yield _parse_events(response.content.iter_any(), self._max_bytes)

    async def events(self, *, after: str | None = None) -> AsyncIterator[NodeEvent]:
        """Yield events of the node forever, and reconnect after a lost connection.

        If events were missed, one of kind `reset` asks the reader to list everything again.
        """
        has_connected = False
        while True:
            try:
                async with self.listening(after=after) as events:
                    if has_connected and after is None:
                        yield NodeEvent("reset", {"reason": "the connection was lost"}, "")
                    has_connected = True
                    async for event in events:
                        after = event.id
                        yield event
            except Unavailable:
                pass
            await asyncio.sleep(RECONNECT_S)


async def _parse_events(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[NodeEvent]:
    """Yield the events of a stream until its connection ends.

    A line may be as long as a kernel's command and labels.

    Raises:
        Refused: a line exceeds `max_bytes`, or is not an event.
    """
    frames, partial_line = EventParser(), bytearray()
    with suppress(aiohttp.ClientError, TimeoutError):
        async for chunk in chunks:
            partial_line += chunk
            if b"\n" in chunk:
                *lines, partial_line = partial_line.split(b"\n")
                for line in lines:
                    if (event := frames.parse_line(line)) is not None:
                        yield event
            if len(partial_line) > max_bytes:
                raise Refused("Internal", f"an event exceeds {max_bytes} bytes", {})
