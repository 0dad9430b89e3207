"""Streams of an engine: the events of a node's containers, and the log of one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import datetime
from zlib import crc32

import aiohttp
import msgspec

from agentd.core.names import name_or_empty
from agentd.runtimes.docker.container_config import KERNEL_LABEL, NODE_LABEL
from agentd.runtimes.docker.docker_client import DockerClient, parse_container_id
from agentd.runtimes.docker.docker_errors import DockerResponseLost
from agentd.runtimes.docker.error_translation import errors_as_unavailable, translate_errors
from agentd.runtimes.log_positions import LogEntry
from agentd.services.protocols import LogQuery, LogStream

SILENCE_S = 10.0
"""Seconds of silence before the engine is probed, and seconds that it has to answer."""
_MAX_LINE_BYTES, _CHUNK_BYTES = 8 << 20, 64 << 10
DESTROY = "destroy"
CREATE_ACTIONS = ("create", "start")
_OBSERVED_ACTIONS = {
    *CREATE_ACTIONS, "die", "oom", "pause", "unpause", DESTROY, "rename", "update"
}  # fmt: skip


class ContainerEvent(msgspec.Struct, frozen=True):
    """An event of a container; `kernel_id` is empty if its label is invalid."""

    action: str
    container: str
    name: str
    kernel_id: str


CONNECTED = ContainerEvent("", "", "", "")


async def watch_container_events(
    docker: DockerClient, node_id: str
) -> AsyncGenerator[ContainerEvent]:
    """Yield the events of a node's containers; `CONNECTED` first.

    Raises:
        RuntimeUnavailable: the connection was refused, could not be made, or broke.
    """
    filters = {"type": ["container"], "label": [f"{NODE_LABEL}={node_id}"]}
    params = {"filters": msgspec.json.encode(filters).decode()}
    with errors_as_unavailable():
        async with docker.stream("GET", "/events", params) as stream:
            yield CONNECTED
            async for line in _read_lines(stream, docker):
                if event := _parse_event(line):
                    yield event


async def _read_lines(stream: aiohttp.StreamReader, docker: DockerClient) -> AsyncGenerator[bytes]:
    """Yield lines, which may be long: an event carries all labels and a command line.

    Raises:
        DockerResponseLost: a line is endless, or the engine has stopped answering.
    """
    unread = b""
    while chunk := await _read_and_probe(stream, docker):
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(unread) > _MAX_LINE_BYTES:
            raise DockerResponseLost("endless event of the engine")


async def _read_and_probe(stream: aiohttp.StreamReader, docker: DockerClient) -> bytes:
    """Return the next bytes, empty at the end; probe the engine during long silences.

    Raises:
        DockerResponseLost: the engine is frozen, so its silence means nothing.
    """
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                return await stream.readany()
        try:
            await docker.fetch_version(SILENCE_S)
        except DockerResponseLost as error:
            raise DockerResponseLost(f"the engine is frozen: {error}") from error


class _Actor(msgspec.Struct):
    ID: str
    Attributes: dict[str, str]


class _RawEvent(msgspec.Struct):
    """An event of the Engine API (SystemEvents)."""

    Action: str
    Actor: _Actor


def _parse_event(line: bytes) -> ContainerEvent | None:
    """Parse an event; None if it is malformed or not about a kernel.

    Raises:
        DockerResponseLost: the container id is invalid.
    """
    try:
        event = msgspec.json.decode(line, type=_RawEvent)
    except msgspec.MsgspecError:
        return None
    attributes = event.Actor.Attributes
    if event.Action not in _OBSERVED_ACTIONS or KERNEL_LABEL not in attributes:
        return None
    kernel_id = name_or_empty(attributes[KERNEL_LABEL])
    container = parse_container_id(event.Actor.ID)
    return ContainerEvent(event.Action, container, attributes.get("name", ""), kernel_id)


class ContainerLog(msgspec.Struct, frozen=True):
    """A container's log; an engine that has written `rotated_bytes` may have dropped its head."""

    docker: DockerClient
    container: str
    rotated_bytes: int

    async def read(self, query: LogQuery, begin: str = "") -> AsyncGenerator[LogEntry]:
        """Yield lines, or parts of long ones.

        Raises:
            RuntimeUnavailable: the engine does not answer, or stopped answering.
        """
        since_ns = _nanoseconds(begin.partition(" ")[0]) if begin else query.since_ns
        params = {
            **{stream.value: str(int(stream in query.streams)) for stream in LogStream},
            "follow": str(int(query.follow)),
            "tail": "all" if query.tail is None else str(query.tail),
            "timestamps": "1",
            "since": f"{since_ns // 10**9}.{since_ns % 10**9:09d}",
        }
        with translate_errors():
            async with self.docker.stream("GET", self._path, params) as stream:
                async for line in _read_lines_of_log(stream):
                    time, _, text = line.partition(b" ")
                    key = f"{time.decode(errors='replace')} {crc32(text):08x}"
                    yield LogEntry(key, line if query.timestamps else text)

    async def is_whole(self) -> bool:
        """Return whether the log is too small to have been rotated, as far as that shows.

        With times and frames it has more bytes here than in the engine's files.
        """
        params = {"stdout": "1", "stderr": "1", "timestamps": "1"}
        size = 0
        with translate_errors():
            async with self.docker.stream("GET", self._path, params) as stream:
                while chunk := await stream.readany():
                    size += len(chunk)
                    if 0 < self.rotated_bytes <= size:
                        return False
        return True

    @property
    def _path(self) -> str:
        return f"/containers/{self.container}/logs"


def _nanoseconds(time: str) -> int:
    """Return the time of a line in nanoseconds since the epoch, 0 if it is malformed."""
    try:
        seconds = int(datetime.fromisoformat(time).replace(microsecond=0).timestamp())
    except (ValueError, OverflowError):
        return 0
    fraction = re.search(r"\.(\d{1,9})", time)
    return seconds * 10**9 + int(fraction[1].ljust(9, "0") if fraction else 0)


async def _read_lines_of_log(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the lines of a log, or parts of long ones, each in a frame of its own.

    Raises:
        DockerResponseLost: a frame is too long for a part of a line, or was cut.
    """
    while True:
        header = b""
        try:
            header = await stream.readexactly(8)
            if (size := int.from_bytes(header[4:], "big")) > _MAX_LINE_BYTES:
                raise DockerResponseLost("endless line in the log of the engine")
            frame = await stream.readexactly(size)
        except asyncio.IncompleteReadError as error:
            if header or error.partial:
                raise DockerResponseLost("the engine cut the log off") from error
            return
        yield frame


async def read_frames(
    stream: aiohttp.StreamReader | asyncio.StreamReader,
) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield the output in frames, each with its stream.

    A frame begins with the number of the stream, three zeros and the length in four bytes.
    """
    while True:
        try:
            header = await stream.readexactly(8)
        except asyncio.IncompleteReadError:
            return
        remaining = int.from_bytes(header[4:], "big")
        while remaining and (chunk := await stream.read(min(remaining, _CHUNK_BYTES))):
            remaining -= len(chunk)
            yield header[0], chunk
