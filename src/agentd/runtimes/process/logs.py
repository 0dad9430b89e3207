"""Logs of process kernels: files of bounded size, followed while the kernel runs.

Files are found in the bundle as it was opened, and each has in its name the position at which it
begins. They are read in bounded pieces, beside the event loop. The files are agentd's own: a kernel
writes into a pipe of its shim.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from agentd.concurrency import complete_shielded
from agentd.errors import Problem, RuntimeUnavailable
from agentd.runtimes.host.private_folder import list_names, os_errors_as_unavailable
from agentd.runtimes.process.bundle import LOG_PREFIX, Bundle
from agentd.services.protocols import KernelLog, LogQuery, LogStream

_CHUNK_BYTES = 64 * 1024
POLL_S = 0.2
"""Seconds between polls of a followed file."""
MAX_HELD_FILES = 32
TAIL_BYTES = 16 << 20
"""Maximum bytes searched for the last lines; earlier output counts as old."""
_FILE_NAME = re.compile(re.escape(LOG_PREFIX) + r"(\d{1,18})")


class LogReader:
    """A reader of one log's files, from the oldest to the newest; blocking."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._folder = -1
        self._file: BinaryIO | None = None
        self._file_position = -1
        self._held: dict[int, BinaryIO] = {}
        """The newest files at `open`, unless followed: rotations take nothing away from it."""
        self.position = 0
        """The position of the next byte."""

    def open(self, query: LogQuery) -> int:
        """Seek to the first byte that a query selects; return the position of the end."""
        try:
            self._folder = Bundle(self._bundle).open_folder()
        except FileNotFoundError:
            return 0
        positions = self._file_positions()
        end = positions[-1] + _size(self._path(positions[-1])) if positions else 0
        begin = query.from_position or 0
        if query.tail is not None:
            begin = self._find_tail(positions, end, query.tail)
        for position in () if query.follow else positions[-MAX_HELD_FILES:]:
            if file := _open_file(self._path(position)):
                self._held[position] = file
        self._seek(begin)
        return end

    def _path(self, position: int) -> Path:
        return Path(f"/proc/self/fd/{self._folder}/{LOG_PREFIX}{position}")

    def _file_positions(self) -> list[int]:
        """Return the positions at which the existing files begin, the oldest first."""
        names = list_names(Path(f"/proc/self/fd/{self._folder}")) if self._folder >= 0 else ()
        existing = {int(found[1]) for name in names if (found := _FILE_NAME.fullmatch(name))}
        return sorted(existing | self._held.keys())

    def _find_tail(self, positions: list[int], end: int, lines: int) -> int:
        remaining, begin = TAIL_BYTES, end
        for position in reversed(positions):
            file = _open_file(self._path(position))
            if file is None or not remaining:
                break
            with file:
                is_newest = position == positions[-1]
                offset, lines, remaining = _seek_lines(file, lines, remaining, is_newest=is_newest)
            begin = position + offset
            if not lines:
                break
        return begin

    def _seek(self, position: int) -> None:
        """Go to a position, to the next one that is kept, or to the end."""
        is_newest_open = False
        while not is_newest_open:  # files may be rotated away after they were listed
            positions = self._file_positions()
            is_newest_open = not positions
            for file_position in positions:
                file = self._held.pop(file_position, None) or _open_file(self._path(file_position))
                if file is None:
                    continue
                self._replace_file(file)
                self._file_position = file_position
                end = file_position + file.seek(0, os.SEEK_END)
                self.position = max(file_position, min(position, end))
                file.seek(self.position - file_position)
                if position < end:
                    return
                is_newest_open = file_position == positions[-1]

    def read(self) -> bytes:
        """Return the next piece, empty if there is nothing new.

        Raises:
            RuntimeUnavailable: the bytes at this position are lost, and later ones are not.
        """
        while not (chunk := self._file.read(_CHUNK_BYTES) if self._file else b""):
            if self._file_position >= max(self._file_positions(), default=-1):
                return b""
            position = self.position
            self._seek(position)
            if self.position != position:
                raise RuntimeUnavailable(f"output lost from {position} to {self.position}")
        self.position += len(chunk)
        return chunk

    def close(self) -> None:
        """Close the file and its folder."""
        self._replace_file(None)
        for file in self._held.values():
            file.close()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _replace_file(self, file: BinaryIO | None) -> None:
        if self._file is not None:
            self._file.close()
        self._file = file


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _open_file(path: Path) -> BinaryIO | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    return os.fdopen(descriptor, "rb", buffering=0)


def _seek_lines(
    file: BinaryIO, lines: int, remaining: int, *, is_newest: bool
) -> tuple[int, int, int]:
    """Find the last lines of a file, backwards; return offset, lines and bytes left.

    The newline at the very end of a log begins no line; one at the end of an older file does.
    """
    position = end = file.seek(0, os.SEEK_END)
    while position and lines and remaining:
        start = max(0, position - min(_CHUNK_BYTES, remaining))
        file.seek(start)
        block = file.read(position - start)
        remaining -= position - start
        cut = len(block) - (is_newest and position == end and block.endswith(b"\n"))
        while lines and (cut := block.rfind(b"\n", 0, cut)) >= 0:
            lines -= 1
            if not lines:
                return start + cut + 1, 0, remaining
        position = start
    return (position if lines else end), lines, remaining


@asynccontextmanager
async def open_log(
    bundle: Path, query: LogQuery, is_running: Callable[[], bool]
) -> AsyncIterator[KernelLog]:
    """Open a log, with new output while the kernel runs.

    Unless it is followed, it ends with the output up to the time of the call.
    """
    reader = LogReader(bundle)
    try:
        with os_errors_as_unavailable():
            is_alive = await asyncio.to_thread(is_running)
            end = await complete_shielded(asyncio.to_thread(reader.open, query))
        async with aclosing(_read(reader, end, is_running, is_alive=is_alive)) as chunks:
            yield KernelLog(reader.position, chunks)
    finally:
        reader.close()


async def _read(
    reader: LogReader, end: int, is_running: Callable[[], bool], *, is_alive: bool
) -> AsyncGenerator[bytes]:
    follows = is_alive  # otherwise nothing is printed any more, or nobody asked for it
    with os_errors_as_unavailable():
        while follows or reader.position < end:
            while chunk := await complete_shielded(asyncio.to_thread(reader.read)):
                surplus = 0 if follows else max(0, reader.position - end)
                yield chunk[: len(chunk) - surplus]
                if not follows and reader.position >= end:
                    return
            if not is_alive:
                return
            await asyncio.sleep(POLL_S)
            is_alive = await asyncio.to_thread(is_running)


def query_problems(query: LogQuery) -> Iterator[Problem]:
    """Yield the parts of a query that this runtime cannot answer."""
    if query.since_ns:
        yield Problem("since", "the process runtime does not record times")
    if query.timestamps:
        yield Problem("timestamps", "the process runtime does not record times")
    if len(query.streams) < len(LogStream):
        yield Problem("stream", "the process runtime merges both streams")
