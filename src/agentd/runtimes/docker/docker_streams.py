"""Streams of an engine: the events of a node's containers, and the log of one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from datetime import datetime
from zlib import crc32

import aiohttp
import msgspec

from agentd.core.names import name_or_empty
from agentd.runtimes.docker.container_config import KERNEL_LABEL, LOG_DRIVER, NODE_LABEL
from agentd.runtimes.docker.docker_client import DockerClient, parse_container_id
from agentd.runtimes.docker.docker_errors import DockerResponseLost
from agentd.runtimes.docker.error_translation import errors_as_unavailable, translate_errors
from agentd.runtimes.log_positions import LogEntry
from agentd.services.protocols import LogQuery, LogStream

SILENCE_S = 10.0
"""Seconds of silence before the engine is probed, and seconds that it has to answer."""
_MAX_LINE_BYTES, _CHUNK_BYTES = 8 << 20, 64 << 10
_RECENT_LINES = 4096
_SEEKS_SINCE = (1, 42)
"""Versions of the API whose `since` ends at the first line that is not older; it was a filter."""
_DEFAULT_OPTIONS = {"max-size": str(20 << 20), "max-file": "5"}
"""The options of the driver `local` that a container does not set."""
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
    """A container's log."""

    docker: DockerClient
    container: str

    async def read(self, query: LogQuery, begin: str = "") -> AsyncGenerator[Sequence[LogEntry]]:
        """Yield lines, or parts of long ones.

        Raises:
            RuntimeUnavailable: the engine does not answer, or stopped answering.
        """
        since_ns = query.since_ns
        with translate_errors():
            if begin and await self.docker.fetch_api_version() >= _SEEKS_SINCE:
                since_ns = _nanoseconds(begin.partition(" ")[0])
        params = {
            **{stream.value: str(int(stream in query.streams)) for stream in LogStream},
            "follow": str(int(query.follow)),
            "timestamps": "1",
            "since": f"{since_ns // 10**9}.{since_ns % 10**9:09d}",
        }
        repeated = _RepeatedLines()
        with translate_errors():
            async with self.docker.stream("GET", self._path, params) as stream:
                async for lines in _read_lines_of_log(stream):
                    entries = []
                    for number, line in lines:
                        time, _, text = line.partition(b" ")
                        key = f"{time.decode(errors='replace')} {crc32(text):08x}"
                        if not (query.follow and repeated.has(number, key)):
                            entries.append(LogEntry(key, line if query.timestamps else text))
                    if entries:
                        yield entries

    async def is_whole(self) -> bool:
        """Return whether the log is too small to have been rotated, as far as that shows.

        With times and frames it has more bytes here than in the engine's files. If one file is
        kept, as by the drivers of Podman, every log with a line may have had others.
        """
        params = {"stdout": "1", "stderr": "1", "timestamps": "1"}
        size = rotated_bytes = 0
        with translate_errors():
            inspection = await self.docker.call("GET", f"/containers/{self.container}/json")
            log = (inspection.get("HostConfig") or {}).get("LogConfig") or {}
            if log.get("Type", LOG_DRIVER) == LOG_DRIVER:
                options = _DEFAULT_OPTIONS | (log.get("Config") or {})
                with suppress(ValueError):
                    rotated_bytes = int(options["max-size"]) * (int(options["max-file"]) - 1)
            async with self.docker.stream("GET", self._path, params) as stream:
                while chunk := await stream.readany():
                    size += len(chunk)
                    if size >= rotated_bytes:
                        return False
        return True

    @property
    def _path(self) -> str:
        return f"/containers/{self.container}/logs"


class _RepeatedLines:
    """The lines that an engine before version 23 repeats to a follower when it rotates their file.

    They are older than a line before them in the same stream, and were read not long ago.
    """

    def __init__(self) -> None:
        self._newest: dict[int, str] = {}
        self._recent, self._less_recent = set[str](), set[str]()
        self._is_repeating = False

    def has(self, stream: int, key: str) -> bool:
        """Return whether a line was read before, and note it."""
        time = key.partition(" ")[0]
        is_older = time < self._newest.get(stream, "")
        is_known = key in self._recent or key in self._less_recent
        self._is_repeating = (is_older or self._is_repeating) and is_known
        if not self._is_repeating:
            self._newest[stream] = time
            self._recent.add(key)
            if len(self._recent) > _RECENT_LINES:
                self._recent, self._less_recent = set(), self._recent
        return self._is_repeating


def _nanoseconds(time: str) -> int:
    """Return the time of a line in nanoseconds since the epoch, 0 if it is malformed."""
    try:
        seconds = int(datetime.fromisoformat(time).replace(microsecond=0).timestamp())
    except (ValueError, OverflowError):
        return 0
    fraction = re.search(r"\.(\d{1,9})", time)
    return seconds * 10**9 + int(fraction[1].ljust(9, "0") if fraction else 0)


async def _read_lines_of_log(
    stream: aiohttp.StreamReader,
) -> AsyncGenerator[Sequence[tuple[int, bytes]]]:
    """Yield the lines of a log as they arrive, or parts of long ones, each with its stream.

    Raises:
        DockerResponseLost: a frame is too long for a part of a line, or was cut.
    """
    unread = b""
    while chunk := await stream.readany():
        unread += chunk
        lines, begin = [], 0
        while begin + 8 <= len(unread):
            end = begin + 8 + int.from_bytes(unread[begin + 4 : begin + 8], "big")
            if end - begin > _MAX_LINE_BYTES:
                raise DockerResponseLost("endless line in the log of the engine")
            if end > len(unread):
                break
            lines.append((unread[begin], unread[begin + 8 : end]))
            begin = end
        unread = unread[begin:]
        if lines:
            yield lines
    if unread:
        raise DockerResponseLost("the engine cut the log off")


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
