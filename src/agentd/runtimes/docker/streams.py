"""Streams of an engine: the events of a node's containers, and the log of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import aiohttp
import msgspec

from agentd.core.names import name_or_empty
from agentd.runtimes.docker.container_config import KERNEL_LABEL, NODE_LABEL
from agentd.runtimes.docker.engine import EngineClient
from agentd.runtimes.docker.engine_errors import EngineAnswerLost
from agentd.runtimes.docker.error_translation import translating
from agentd.runtimes.docker.ids import container_id
from agentd.services.protocols import LogQuery, LogStream

_EXPECTED_S = 600.0
SILENCE_S = 10.0
"""Seconds of silence before the engine is probed, and seconds that it has to answer."""
GATHER_S = 0.02
"""Seconds in which events gather unread: a create and a removal cause two each."""
_MOST_REMOVED = 256
_LONGEST_LINE = 8 << 20
KILL = "kill"
"""A signal was sent to the container, by any client."""
DESTROY = "destroy"
_ACTIONS = {
    KILL, "create", "start", "die", "oom", "pause", "unpause", DESTROY, "rename", "update"
}  # fmt: skip


class ContainerEvent(NamedTuple):
    """An event of a container; `kernel_id` is empty if its label is invalid."""

    action: str
    container: str
    name: str
    kernel_id: str


CONNECTED = ContainerEvent("", "", "", "")


class OwnEvents:
    """Events that agentd's own creates and removals cause, and that carry no news.

    A create and a start are expected once, for a limited time, and only while listening: an event
    that never came must not hide a later one of the same name. Events of a removed container are
    recognized by its id, which is never reused.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}
        self._removed: dict[str, None] = {}
        self.is_listening = False

    def listen(self) -> None:
        self._until.clear()
        self._removed.clear()
        self.is_listening = True

    def stop_listening(self) -> None:
        self.is_listening = False
        self._until.clear()

    def expect(self, name: str) -> None:
        """Expect a container's create and start."""
        if self.is_listening:
            until = time.monotonic() + _EXPECTED_S
            self._until |= {("create", name): until, ("start", name): until}

    def forget(self, name: str) -> None:
        """Stop expecting events of a container."""
        for action in ("create", "start"):
            self._until.pop((action, name), None)

    def removed(self, container: str) -> None:
        """Record a removed container, whose further events carry no news."""
        if self.is_listening and container:
            self._removed[container] = None
            if len(self._removed) > _MOST_REMOVED:
                del self._removed[next(iter(self._removed))]

    def is_own(self, event: ContainerEvent) -> bool:
        """Return whether an event was expected; it is expected only once."""
        if event.action in ("die", DESTROY):
            self.forget(event.name)
        if event.container in self._removed:
            if event.action == DESTROY:
                del self._removed[event.container]
            return True
        return self._until.pop((event.action, event.name), 0.0) > time.monotonic()


async def events(engine: EngineClient, node_id: str) -> AsyncGenerator[ContainerEvent]:
    """Yield the events of a node's containers; `CONNECTED` first.

    Raises:
        RuntimeUnavailable: the connection could not be made, or broke.
    """
    filters = {"type": ["container"], "label": [f"{NODE_LABEL}={node_id}"]}
    params = {"filters": msgspec.json.encode(filters).decode()}
    with translating():
        async with engine.answer("GET", "/events", params) as answer:
            yield CONNECTED
            async for line in _lines(answer, engine):
                if event := _event(line):
                    yield event


async def _lines(answer: aiohttp.ClientResponse, engine: EngineClient) -> AsyncGenerator[bytes]:
    """Yield lines, which may be long: an event carries all labels and a command line.

    After a line, reading pauses for a moment, so that a burst wakes the loop only once.

    Raises:
        EngineAnswerLost: a line is endless, or the engine has stopped answering.
    """
    rest = b""
    while chunk := await _while_it_answers(answer.content, engine):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        with _paused(answer):
            await asyncio.sleep(GATHER_S)
        if len(rest) > _LONGEST_LINE:
            raise EngineAnswerLost("endless event of the engine")


@contextmanager
def _paused(answer: aiohttp.ClientResponse) -> Iterator[None]:
    """Pause reading; data waits in the socket meanwhile."""
    transport = answer.connection.transport if answer.connection else None
    if not isinstance(transport, asyncio.ReadTransport) or not transport.is_reading():
        yield
        return
    transport.pause_reading()
    try:
        yield
    finally:
        if not transport.is_closing():
            transport.resume_reading()


async def _while_it_answers(stream: aiohttp.StreamReader, engine: EngineClient) -> bytes:
    """Return the next bytes, empty at the end; probe the engine during long silences.

    Raises:
        EngineAnswerLost: the engine is frozen, so its silence means nothing.
    """
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                return await stream.readany()
        try:
            async with asyncio.timeout(SILENCE_S):
                await engine.version()
        except TimeoutError:
            why = f"no response for {SILENCE_S:g} s"
            raise EngineAnswerLost(f"the engine is frozen: {why}") from None


def _event(line: bytes) -> ContainerEvent | None:
    """Parse an event; None if it is malformed or not about a kernel.

    Raises:
        EngineAnswerLost: the container id is invalid.
    """
    try:
        raw = msgspec.json.decode(line)
        action, actor = raw["Action"], raw["Actor"]
        attributes = actor["Attributes"]
        if action not in _ACTIONS or KERNEL_LABEL not in attributes:
            return None
        container, name = container_id(actor["ID"]), str(attributes.get("name", ""))
        return ContainerEvent(action, container, name, name_or_empty(attributes[KERNEL_LABEL]))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


async def printed(engine: EngineClient, container: str, query: LogQuery) -> AsyncGenerator[bytes]:
    """Yield a container's output, byte for byte.

    Raises:
        RuntimeUnavailable: the engine does not answer, or stopped answering.
    """
    params = {
        **{stream.value: str(int(stream in query.streams)) for stream in LogStream},
        "follow": str(int(query.follow)),
        "tail": "all" if query.tail is None else str(query.tail),
        "timestamps": str(int(query.timestamps)),
        "since": f"{query.since_ns // 10**9}.{query.since_ns % 10**9:09d}",
    }
    with translating():
        async with engine.stream("GET", f"/containers/{container}/logs", params) as stream:
            async for chunk in _payloads(stream):
                yield chunk


async def _payloads(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the payloads of log frames, whose header has 8 bytes (stream, 0, 0, 0, length)."""
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
