"""Calls of the asyncio client alone: exec, and events over one connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from agentd.client.calls import Call, events_call
from agentd.client.events import EventParser, NodeEvent
from agentd.client.exec import Execution, close_websocket
from agentd.client.paths import api_path
from agentd.client.transport import AsyncStream, Transport
from agentd.errors import Unavailable


class StreamCalls(Transport):
    """The transport, and the calls that the blocking client lacks."""

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

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[AsyncIterator[NodeEvent]]:
        """Listen to new events over one connection, and end with it.

        Raises:
            AgentdError: the events are not available.
        """
        async with self._stream(events_call()) as stream:
            yield _parse_events(stream, self._max_bytes)


async def _parse_events(stream: AsyncStream, max_bytes: int) -> AsyncIterator[NodeEvent]:
    """Yield the events of a stream until its connection ends.

    Raises:
        Refused: a line exceeds `max_bytes`, or is not an event.
    """
    parser = EventParser(max_bytes)
    with suppress(Unavailable):
        while chunk := await stream.read():
            for event in parser.parse(chunk):
                yield event
