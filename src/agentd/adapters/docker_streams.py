"""What an engine goes on saying: the events of a node's containers, and the log of one.

Both ask through aiodocker's query: its own methods drop the moment of connection, and
decode logs as UTF-8.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
from aiodocker import Docker

from agentd.adapters.docker_answers import translating
from agentd.adapters.docker_config import KERNEL_LABEL, NODE_LABEL
from agentd.services.interfaces import LogQuery, LogStream

_ACTIONS = {"create", "start", "die", "oom", "pause", "unpause", "destroy", "rename"}


class ContainerEvent(NamedTuple):
    """What happened to which container of which kernel."""

    action: str
    container: str
    kernel_id: str


CONNECTED = ContainerEvent("", "", "")


async def events(docker: Docker, node_id: str) -> AsyncIterator[ContainerEvent]:
    """Yield what happens to a node's containers; `CONNECTED` first.

    Raises:
        RuntimeUnavailable: the connection could not be made, or broke.
    """
    filters = {"type": ["container"], "label": [f"{NODE_LABEL}={node_id}"]}
    params = {"filters": json.dumps(filters)}
    with translating():
        async with docker._query(  # noqa: SLF001 - see above
            "events", params=params, timeout=aiohttp.ClientTimeout()
        ) as response:
            try:
                yield CONNECTED
                async for line in response.content:
                    if event := _event(line):
                        yield event
            finally:
                response.close()


def _event(line: bytes) -> ContainerEvent | None:
    try:
        raw = json.loads(line)
        action, attributes = raw["Action"], raw["Actor"]["Attributes"]
    except (ValueError, KeyError, TypeError):
        return None
    if action not in _ACTIONS or KERNEL_LABEL not in attributes:
        return None
    return ContainerEvent(action, str(attributes.get("name", "")), attributes[KERNEL_LABEL])


async def printed(docker: Docker, container: str, query: LogQuery) -> AsyncIterator[bytes]:
    """Yield what a container printed, byte for byte.

    Raises:
        RuntimeUnavailable: the engine does not say, or stopped saying.
    """
    params = {
        **{stream.value: str(int(stream in query.streams)) for stream in LogStream},
        "follow": str(int(query.follow)),
        "tail": "all" if query.tail is None else str(query.tail),
        "timestamps": str(int(query.timestamps)),
        "since": f"{query.since_ns // 10**9}.{query.since_ns % 10**9:09d}",
    }
    with translating():
        async with docker._query(  # noqa: SLF001 - see above
            f"containers/{container}/logs", params=params, timeout=aiohttp.ClientTimeout()
        ) as response:
            try:
                async for chunk in _payloads(response.content):
                    yield chunk
            finally:
                response.close()


async def _payloads(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Take the frames off a log: 8 bytes of header (stream, 0, 0, 0, big-endian length)."""
    while True:
        try:
            header = await stream.readexactly(8)
            left = int.from_bytes(header[4:], "big")
            while left:
                chunk = await stream.read(min(left, 64 * 1024))
                if not chunk:
                    return
                left -= len(chunk)
                yield chunk
        except asyncio.IncompleteReadError:
            return
