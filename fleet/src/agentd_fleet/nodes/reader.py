"""Readings of one node over its API, after every event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from msgspec.structs import replace

from agentd.client.asynchronous import AsyncClient
from agentd.client.events import NodeEvent
from agentd.errors import AgentdError
from agentd.views import SlotTypeView
from agentd_fleet.view.reports import NodeReading, reading_of

AGAIN_S = 30.0
"""Seconds after which a node is read without an event."""
PAUSE_S, LEAST_S = 0.2, 0.8
"""Seconds in which events are collected before a reading, and minimum between two readings."""
BACKOFF_S = (0.1, 2.0)
PROBE_S, PROBE_PATIENCE_S = 1.0, 3.0
"""Seconds between liveness probes, and that a probe may take."""


class NodeReader:
    """Follows one daemon; reports its readings, and when it is unavailable."""

    def __init__(self, client: AsyncClient, told: Callable[[NodeReading], Awaitable[None]]) -> None:
        self._client = client
        self._told = told
        self._last: NodeReading | None = None
        self._types: tuple[int, list[SlotTypeView]] | None = None

    async def run(self) -> None:
        """Follow until cancelled; the client must be open."""
        pause_s, most_s = BACKOFF_S
        while True:
            self._types = None
            with contextlib.suppress(AgentdError, TimeoutError, OSError):
                async with self._client.listening() as events:
                    await self._read()
                    pause_s = BACKOFF_S[0]
                    await self._follow(events)
            if self._last is not None and not self._last.is_down:
                self._last = replace(self._last, is_down=True)
                await self._told(self._last)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, most_s)

    async def _read(self) -> None:
        client = self._client
        async with asyncio.timeout(PROBE_PATIENCE_S):
            node, agents = await client.node(), await client.agents()
            if self._types is None or self._types[0] != node["generation"]:
                self._types = node["generation"], await client.slot_types()
            devices = await client.devices()
            if (await client.node())["generation"] != node["generation"]:
                self._types = None
                raise TimeoutError("the node changed during the reading")
        self._last = reading_of(node, self._types[1], agents, devices)
        await self._told(self._last)

    async def _follow(self, events: AsyncIterator[NodeEvent]) -> None:
        """Read again after events, until the stream ends or the daemon does not answer."""
        changed = asyncio.Event()
        hearing = asyncio.create_task(_hear(events, changed))
        loop = asyncio.get_running_loop()
        read_at = loop.time()
        try:
            while not hearing.done():
                if await _within(PROBE_S, changed, hearing):
                    pause_s = max(PAUSE_S, read_at + LEAST_S - loop.time())
                    await asyncio.wait([hearing], timeout=pause_s)
                elif not hearing.done():
                    async with asyncio.timeout(PROBE_PATIENCE_S):
                        await self._client.alive()
                if hearing.done() or not (changed.is_set() or loop.time() - read_at > AGAIN_S):
                    continue
                changed.clear()
                await self._read()
                read_at = loop.time()
        finally:
            hearing.cancel()
            await asyncio.wait([hearing])


async def _hear(events: AsyncIterator[NodeEvent], changed: asyncio.Event) -> None:
    with contextlib.suppress(AgentdError, OSError):
        async for event in events:
            if event.kind != "audit":
                changed.set()


async def _within(seconds: float, event: asyncio.Event, ended: asyncio.Task[None]) -> bool:
    """Wait for an event, until the timeout or until `ended` is done."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return event.is_set()
