"""What a process kernel printed: one file, which is followed for as long as its writer runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from agentd.errors import Problem
from agentd.services.interfaces import LogQuery, LogStream

_CHUNK = 64 * 1024
LOG_PAUSE_S = 0.2


async def printed(
    path: Path, tail: int | None, is_running: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Yield a file's bytes, and what is added to it for as long as its writer runs."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if tail is not None:
            file.seek(tail_offset(file, tail))
        goes_on = True
        while goes_on:
            goes_on = await is_running()
            while chunk := file.read(_CHUNK):
                yield chunk
            if goes_on:
                await asyncio.sleep(LOG_PAUSE_S)


def tail_offset(file: BinaryIO, lines: int) -> int:
    """Return where the last `lines` lines begin, read backwards in blocks."""
    position = end = file.seek(0, os.SEEK_END)
    missing = lines
    while position and missing:
        start = max(0, position - _CHUNK)
        file.seek(start)
        block = file.read(position - start)
        cut = len(block) - (position == end and block.endswith(b"\n"))
        while missing and (cut := block.rfind(b"\n", 0, cut)) >= 0:
            missing -= 1
            if not missing:
                return start + cut + 1
        position = start
    return position if lines else end


def unkept(query: LogQuery) -> Iterator[Problem]:
    """Yield what of a query this runtime does not keep."""
    if query.since_ns:
        yield Problem("since", "the process runtime keeps no times of lines")
    if query.timestamps:
        yield Problem("timestamps", "the process runtime keeps no times of lines")
    if len(query.streams) < len(LogStream):
        yield Problem("stream", "the process runtime keeps both streams in one")
