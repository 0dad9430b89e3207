"""Logs of process kernels: files of bounded size, followed while the kernel runs.

Files are found in the bundle as it was opened. They are read in bounded pieces, beside the event
loop. The files are agentd's own: a kernel writes into a pipe of its shim.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from agentd.concurrency import complete_shielded
from agentd.errors import Problem
from agentd.runtimes.process.bundle import Bundle
from agentd.services.protocols import LogQuery, LogStream

_CHUNK_BYTES = 64 * 1024
POLL_S = 0.2
"""Seconds between polls of a followed file."""
TAIL_BYTES = 16 << 20
"""Maximum bytes searched for the last lines; earlier output counts as old."""


class LogReader:
    """A reader of one log's files, from the oldest to the newest; blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = -1
        self._file: BinaryIO | None = None

    def open(self, tail: int | None) -> int:
        """Open the oldest file, or seek to `tail` lines before the end.

        Returns:
            The number of bytes from there to the current end.
        """
        try:
            self._folder = Bundle(self._path.parent).open_folder()
        except FileNotFoundError:
            return 0
        self._path = Path(f"/proc/self/fd/{self._folder}") / self._path.name
        files = self._files()
        if tail is not None:
            return self._seek_tail(files, tail)
        if files:
            self._file = _open_file(files[0])
        return sum(_size(path) for path in files)

    def _files(self) -> list[Path]:
        """Return the existing files, oldest first: the highest number, at last the one without."""
        name = re.compile(rf"{re.escape(self._path.name)}(?:\.(\d+))?")
        paths = self._path.parent.iterdir()
        numbered = [(int(m[1] or 0), p) for p in paths if (m := name.fullmatch(p.name))]
        return [path for _, path in sorted(numbered, reverse=True)]

    def _seek_tail(self, files: Sequence[Path], lines: int) -> int:
        remaining, size = TAIL_BYTES, 0
        for path in reversed(files):
            file = _open_file(path)
            if file is None:
                continue
            is_newest = self._file is None
            self._replace_file(file)
            offset, lines, remaining = _seek_lines(file, lines, remaining, is_newest=is_newest)
            size += file.seek(0, os.SEEK_END) - offset
            file.seek(offset)
            if not lines or not remaining:
                break
        return size

    def read(self) -> bytes:
        """Return the next piece, empty if there is nothing new."""
        if self._file is None and self._folder >= 0:
            self._file = _open_file(self._path)
        while self._file is not None:
            if chunk := self._file.read(_CHUNK_BYTES):
                return chunk
            following = self._open_next()
            if following is None:
                self._rewind_if_cut()
                return self._file.read(_CHUNK_BYTES)
            if chunk := self._file.read(_CHUNK_BYTES):  # printed between the two reads
                following.close()
                return chunk
            self._replace_file(following)
        return b""

    def _open_next(self) -> BinaryIO | None:
        """Open the next file, None if the current one is the newest."""
        if self._file is None:
            return None
        status = os.fstat(self._file.fileno())
        files = self._files()
        for index, path in enumerate(files):
            try:
                is_current = os.path.samestat(path.lstat(), status)
            except FileNotFoundError:
                continue
            if is_current:
                return _open_file(files[index + 1]) if index + 1 < len(files) else None
        return _open_file(files[0]) if files else None

    def _rewind_if_cut(self) -> None:
        """Start over in a file that was emptied because it could not be rotated."""
        if self._file is not None:
            size = os.fstat(self._file.fileno()).st_size
            if size < self._file.tell():
                self._file.seek(0)

    def close(self) -> None:
        """Close the file and its folder."""
        self._replace_file(None)
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


async def read_log(
    path: Path, tail: int | None, is_running: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """Yield a log's bytes, and new output while the kernel runs.

    Unless it is followed, only the output up to the time of the call is returned.
    """
    reader = LogReader(path)
    try:
        follows = is_alive = await asyncio.to_thread(is_running)
        remaining = await complete_shielded(
            asyncio.to_thread(reader.open, tail)
        )  # all of it if nothing runs
        while True:
            while chunk := await complete_shielded(asyncio.to_thread(reader.read)):
                yield chunk if follows else chunk[:remaining]
                remaining -= len(chunk)
                if remaining <= 0 and not follows:
                    return
            if not is_alive:
                return
            await asyncio.sleep(POLL_S)
            is_alive = await asyncio.to_thread(is_running)
    finally:
        reader.close()


def query_problems(query: LogQuery) -> Iterator[Problem]:
    """Yield the parts of a query that this runtime cannot answer."""
    if query.since_ns:
        yield Problem("since", "the process runtime does not record times")
    if query.timestamps:
        yield Problem("timestamps", "the process runtime does not record times")
    if len(query.streams) < len(LogStream):
        yield Problem("stream", "the process runtime merges both streams")
