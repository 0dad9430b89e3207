"""Positions in logs that a runtime keeps as lines with times, and whose head it may drop.

Positions are counted from anchors: lines of known position, which are noted while a log is read, in
a small file beside the kernel's other state. Without any, the oldest line that is kept is the
first, unless older ones may have been dropped.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.host.private_folder import PrivateFolder
from agentd.services.protocols import KernelLog, LogQuery

ANCHOR_BYTES, MAX_ANCHORS = 64 << 10, 64
"""Distance between the newest anchors; every second one is dropped when they are too many."""
_UNSEEN_BYTES = 1 << 20
"""Distance from the last anchor to a position that no client has seen."""


class LogEntry(NamedTuple):
    """A line, or a part of one: its identity in the log, and the bytes that a client gets.

    The identity begins with the time, which can be compared as text, and a space.
    """

    key: str
    data: bytes


class Anchor(msgspec.Struct, frozen=True, array_like=True):
    """A line and the position at which it begins; every line before it has an earlier time."""

    position: int
    key: str


class LogSource(Protocol):
    """A kernel's log in its runtime."""

    def read(self, query: LogQuery, begin: str = "") -> AsyncGenerator[Sequence[LogEntry]]:
        """Yield the entries since a time, in the form of a query, some at a time.

        Those before the key `begin` of an anchor may be left out.
        """
        ...

    async def is_whole(self) -> bool:
        """Return whether no line has been dropped."""
        ...


class _Saved(msgspec.Struct):
    """The anchors of one log, for each form that was read; `log_id` is that of the runtime."""

    log_id: str
    anchors: dict[str, list[Anchor]] = {}


class _Notes:
    """The anchors of one log and their file; shared by all readers, so that they count alike."""

    def __init__(self, path: Path, log_id: str) -> None:
        self.lock = asyncio.Lock()
        self.is_saved = True
        self._path, self._saved = path, _Saved(log_id)
        with suppress(OSError):
            saved = PrivateFolder(path.parent).read_json(path.name, _Saved)
            if saved is not None and saved.log_id == log_id:
                self._saved = saved
        self.anchors = self._saved.anchors

    def save(self) -> None:
        """Save anchors that were added."""
        if not self.is_saved:
            with suppress(OSError):  # these are exact until the daemon is restarted
                text = msgspec.json.encode(self._saved).decode()
                PrivateFolder(self._path.parent).replace(self._path.name, text)
            self.is_saved = True


class LogPositions:
    """The positions in the logs of a runtime's kernels."""

    def __init__(self) -> None:
        self._notes: WeakValueDictionary[tuple[Path, str], _Notes] = WeakValueDictionary()

    @asynccontextmanager
    async def open(
        self, source: LogSource, query: LogQuery, path: Path, log_id: str
    ) -> AsyncIterator[KernelLog]:
        """Open a log at the position that a query selects; its anchors are in the file `path`."""
        notes = self._notes.get((path, log_id)) or _Notes(path, log_id)
        self._notes[path, log_id] = notes
        reader = _Reader(source, query, notes)
        async with notes.lock:
            begin, position = await reader.find(query)
            notes.save()
        async with aclosing(reader.read_bytes(begin, position)) as chunks:
            yield KernelLog(position, chunks)


class _Reader:
    """A reader of one log, which counts bytes and notes anchors."""

    def __init__(self, source: LogSource, query: LogQuery, notes: _Notes) -> None:
        self._source, self._notes = source, notes
        self._query = replace(query, tail=None, since_ns=0)
        self._kept = replace(self._query, follow=False)
        self._form = f"{'+'.join(sorted(query.streams))} timestamps={query.timestamps}"
        self._anchors = notes.anchors.setdefault(self._form, [])
        self._is_sorted = True
        """Whether no line was older than one before it."""

    async def find(self, query: LogQuery) -> tuple[Anchor, int]:
        """Return the position of the first byte that a query selects, and an anchor before it."""
        key, index = "", len(self._anchors)
        if query.since_ns:
            async with aclosing(self._source.read(replace(query, follow=False))) as selected:
                first = await anext(selected, None)
            key = first[0].key if first else ""
            query = replace(query, tail=query.tail if first else 0)
            if key:
                index = bisect_right(self._anchors, key, key=lambda anchor: anchor.key)
        elif query.tail is None:
            begin = query.from_position or 0
            index = bisect_right(self._anchors, begin, key=lambda anchor: anchor.position)
        back = 1
        with suppress(RuntimeUnavailable):  # the line was dropped, or its key is damaged
            while back <= index:
                nearest = self._anchors[index - back]
                if (position := await self._count(nearest, query, key)) is not None:
                    return nearest, position
                back *= 2
        oldest = await self._find_oldest(query.from_position or 0)
        position = await self._count(oldest, query, key)
        if position is None:
            position = oldest.position
        if not self._is_sorted:  # an engine may not find the anchors by their times
            return oldest, position
        index = bisect_right(self._anchors, position, key=lambda anchor: anchor.position)
        return self._anchors[index - 1] if index else oldest, position

    async def _count(self, begin: Anchor, query: LogQuery, key: str) -> int | None:
        """Return the position of the first byte that a query selects, which may be the end.

        That is the line with a key, if given. None if it is not there, or too few lines are.
        """
        position, starts, is_start = begin.position, deque[int](maxlen=query.tail or 0), True
        last = query.from_position or 0 if query.tail is None and not query.since_ns else None
        async with aclosing(self._read(self._kept, begin)) as batches:
            async for entries in batches:
                for entry in entries:
                    if entry.key == key:
                        if query.tail is None:
                            return position
                        starts.clear()
                        is_start, key = True, ""
                    if is_start:
                        starts.append(position)
                    position += len(entry.data)
                    is_start = entry.data.endswith(b"\n")
                    if last is not None and position > last:
                        return max(begin.position, last)
                await asyncio.sleep(0)
        if not query.tail:
            return None if key else position
        is_enough = len(starts) == query.tail or (query.since_ns and not key)
        return starts[0] if is_enough else None

    async def _find_oldest(self, asked: int) -> Anchor:
        """Return the oldest line, at a position that no client has seen if it is unknown."""
        oldest, size = "", 0
        known = {anchor.key: number for number, anchor in enumerate(self._anchors)}
        async with aclosing(self._source.read(self._kept)) as batches:
            async for entries in batches:
                oldest = oldest or entries[0].key
                if not known:
                    break
                for entry in entries:
                    if (number := known.get(entry.key)) is not None:
                        begin = Anchor(max(0, self._anchors[number].position - size), oldest)
                        self._anchors[: number + (not size)] = [begin]
                        return begin
                    size += len(entry.data)
                await asyncio.sleep(0)
        position = 0
        if known or not await self._source.is_whole():
            position = _UNSEEN_BYTES + (self._anchors[-1].position if known else 0)
        begin = Anchor(max(position, asked + 1) if position else 0, oldest)
        if known or begin.position > position:  # other readers go on counting from theirs
            self._anchors = []
        if oldest:
            self._anchors.append(begin)
        if begin.position == position:  # what a caller asks for is nothing to count from
            self._notes.anchors[self._form], self._notes.is_saved = self._anchors, False
        return begin

    async def _read(self, query: LogQuery, begin: Anchor) -> AsyncGenerator[Sequence[LogEntry]]:
        """Yield entries from an anchor on, and note others.

        Raises:
            RuntimeUnavailable: the line of the anchor was dropped.
        """
        position, newest, awaited = begin.position, begin.key, begin.key
        dropped = RuntimeUnavailable(f"output before {position} was dropped")
        async with aclosing(self._source.read(query, begin.key)) as batches:
            async for batch in batches:
                skipped = 0
                for entry in batch if awaited else ():
                    if entry.key == awaited:
                        awaited = ""
                        break
                    if entry.key > awaited:
                        raise dropped
                    skipped += 1
                if awaited:
                    continue
                entries = batch[skipped:]
                for entry in entries:
                    if entry.key > newest:
                        self._note(position, entry.key, newest)
                        newest = entry.key
                    elif entry.key < newest:
                        self._is_sorted = False
                    position += len(entry.data)
                yield entries
        if awaited:
            raise dropped

    def _note(self, position: int, key: str, before: str) -> None:
        """Note an anchor if it is due, and the first line of its time."""
        anchors = self._anchors
        is_due = not anchors or position >= anchors[-1].position + ANCHOR_BYTES
        if is_due and key.partition(" ")[0] != before.partition(" ")[0]:
            anchors.append(Anchor(position, key))
            if len(anchors) > MAX_ANCHORS:
                anchors[:] = [*anchors[:-1:2], anchors[-1]]
            self._notes.is_saved = False

    async def read_bytes(self, begin: Anchor, first: int) -> AsyncGenerator[bytes]:
        """Yield the bytes from a position after an anchor."""
        surplus = first - begin.position
        async with aclosing(self._read(self._query, begin)) as batches:
            async for entries in batches:
                self._notes.save()
                data = b"".join([entry.data for entry in entries])
                if surplus < len(data):
                    yield data[surplus:]
                surplus = max(0, surplus - len(data))
