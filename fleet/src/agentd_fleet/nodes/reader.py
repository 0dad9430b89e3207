"""Readings of one node over its API, after every event.

Whatever a node answers, or does not, becomes a reading with the reason, and concerns that node
alone: its reader ends only when it is cancelled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from msgspec.structs import replace

from agentd.client.asynchronous import AsyncClient
from agentd.client.events import NodeEvent
from agentd.concurrency import wait_event
from agentd.core.names import name_or_empty
from agentd.errors import Unavailable
from agentd_fleet.view.fleet_state import MAX_LOGGED
from agentd_fleet.view.reports import (
    NodeReading,
    parse_node_answer,
    parse_reading,
    reason_line,
    unreadable_reason,
)

log = structlog.get_logger()

RETRY_S = 30.0
"""Seconds after which a node is read without an event."""
PAUSE_S, LEAST_S = 0.2, 0.8
"""Seconds in which events are collected before a reading, and minimum between two readings."""
BACKOFF_S = (0.1, 2.0)
MAX_ANSWER = 16 << 20
"""Maximum bytes of an answer or event of a node."""
PROBE_PERIOD_S, PROBE_TIMEOUT_S = 1.0, 3.0
"""Seconds between liveness probes, and that a probe may take."""


class NodeReader:
    """Follows one daemon; reports its readings, and why it is unavailable or unreadable.

    `on_reading` must not raise.
    """

    def __init__(
        self,
        address: str,
        client: AsyncClient,
        on_reading: Callable[[NodeReading], Awaitable[None]],
    ) -> None:
        self._address = address
        self._client = client
        self._on_reading = on_reading
        self._last_reading = NodeReading()
        self._logged_reasons: set[str] = set()

    async def run(self) -> None:
        """Follow until cancelled; the client must be open."""
        loop = asyncio.get_running_loop()
        pause_s, max_pause_s = BACKOFF_S
        while True:
            read_at, is_node, reason = math.inf, False, "unreachable: the event stream ended"
            try:
                is_node = await self._read_node_id()
                async with self._client.listening() as events:
                    await self._read()
                    read_at = loop.time()
                    await self._follow(events)
                is_node = False
            except (Unavailable, TimeoutError, OSError) as error:
                reason = reason_line(f"unreachable: {str(error) or 'no answer in time'}")
                is_node = False
            except Exception as error:  # noqa: BLE001 - a node may answer anything
                reason = unreadable_reason(error)
            await self._report_failure(reason, is_down=not is_node)
            if loop.time() - read_at > max_pause_s:  # the next attempt tells whether it is down
                pause_s = BACKOFF_S[0]
                self._logged_reasons.clear()
            else:
                pause_s = min(pause_s * 2, max_pause_s)
                self._log_failure(reason)
            await asyncio.sleep(pause_s)

    async def _read_node_id(self) -> bool:
        """Learn the id, so that a node whose other answers cannot be read is listed."""
        node: object = await self._client.node()
        node_id = name_or_empty(node.get("id")) if isinstance(node, dict) else ""
        if node_id and node_id != self._last_reading.node_id:
            self._last_reading = NodeReading(node_id=node_id, is_down=True)
        return bool(node_id)

    async def _report_failure(self, reason: str, *, is_down: bool) -> None:
        """Report that the node does not answer, or cannot be read."""
        reading = replace(self._last_reading, is_down=is_down, reason=reason)
        if reading != self._last_reading:
            self._last_reading = reading
            await self._on_reading(reading)

    def _log_failure(self, reason: str) -> None:
        """Log each reason once until the node has been read again, and not too many."""
        if reason in self._logged_reasons or len(self._logged_reasons) >= MAX_LOGGED:
            return
        self._logged_reasons.add(reason)
        event = "node.read_failed"
        if reason.startswith("unreachable: "):
            event = "node.unreachable"
        node_id = self._last_reading.node_id
        log.warning(event, address=self._address, node_id=node_id, reason=reason)

    async def _read(self) -> None:
        client = self._client
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            node, agents = await client.node(), await client.agents()
            slot_types, devices = await client.slot_types(), await client.devices()
            if (
                parse_node_answer(await client.node()).generation
                != parse_node_answer(node).generation
            ):
                raise TimeoutError("the node changed during the reading")
        self._last_reading = parse_reading(node, slot_types, agents, devices)
        await self._on_reading(self._last_reading)

    async def _follow(self, events: AsyncIterator[NodeEvent]) -> None:
        """Read again after events, until the stream ends or the daemon does not answer."""
        changed = asyncio.Event()
        listening = asyncio.create_task(_set_on_events(events, changed))
        listening.add_done_callback(lambda _: changed.set())
        loop = asyncio.get_running_loop()
        read_at = loop.time()
        try:
            while not listening.done():
                if await wait_event(changed, PROBE_PERIOD_S):
                    pause_s = max(PAUSE_S, read_at + LEAST_S - loop.time())
                    await asyncio.wait([listening], timeout=pause_s)
                else:
                    async with asyncio.timeout(PROBE_TIMEOUT_S):
                        await self._client.alive()
                if listening.done() or not (changed.is_set() or loop.time() - read_at > RETRY_S):
                    continue
                changed.clear()
                await self._read()
                read_at = loop.time()
            listening.result()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def _set_on_events(events: AsyncIterator[NodeEvent], changed: asyncio.Event) -> None:
    async for event in events:
        if event.kind != "audit":
            changed.set()
