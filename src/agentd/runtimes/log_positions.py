"""Positions in logs that a runtime keeps as lines with times, and not as bytes.

A position is counted from the oldest line that is kept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from agentd.services.protocols import KernelLog, LogQuery


class LogEntry(NamedTuple):
    """A line, or a part of one: its identity in the log, and the bytes that a client gets."""

    key: str
    data: bytes


ReadEntries: TypeAlias = Callable[[LogQuery], AsyncGenerator[LogEntry]]


@asynccontextmanager
async def open_counted_log(read: ReadEntries, query: LogQuery) -> AsyncIterator[KernelLog]:
    """Open a log at the position that a query selects."""
    position = await _find_position(read, query)
    everything = replace(query, tail=None, since_ns=0)
    async with aclosing(_skip_bytes(read(everything), position)) as chunks:
        yield KernelLog(position, chunks)


async def _find_position(read: ReadEntries, query: LogQuery) -> int:
    is_selected = query.tail is not None or query.since_ns
    if not (is_selected or query.from_position):
        return 0
    first = ""
    if is_selected:
        async with aclosing(read(replace(query, follow=False))) as selected:
            async for entry in selected:
                first = entry.key
                break
    position = 0
    everything = replace(query, follow=False, tail=None, since_ns=0)
    async with aclosing(read(everything)) as entries:
        async for entry in entries:
            if first and entry.key == first:
                break
            position += len(entry.data)
            if query.from_position is not None and position >= query.from_position:
                return query.from_position
    return position


async def _skip_bytes(entries: AsyncGenerator[LogEntry], surplus: int) -> AsyncGenerator[bytes]:
    """Yield the bytes of entries after the first ones."""
    async with aclosing(entries):
        async for _, data in entries:
            if surplus < len(data):
                yield data[surplus:]
            surplus = max(0, surplus - len(data))
