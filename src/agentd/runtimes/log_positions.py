"""Positions in logs that a runtime keeps as lines with times, and whose head it may drop.

Positions are counted from anchors: lines of known position, which are noted while a log is read, in
a small file beside the kernel's other state. Without any, the oldest line that is kept is the
first, unless older ones may have been dropped.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.host.private_folder import PrivateFolder
from agentd.services.protocols import KernelLog, LogQuery

ANCHOR_BYTES, ANCHOR_PAUSE_S = 64 << 10, 10.0
"""Distance between the newest anchors: bytes, or seconds in which less was read."""
MAX_ANCHORS = 256
_ANCHORS_PER_DISTANCE = 16
"""Older anchors are fewer: the distance between two is this part of the distance to the end."""


class LogEntry(NamedTuple):
    """A line, or a part of one: its identity in the log, and the bytes that a client gets.

    The identity begins with the time, which can be compared as text, and a space.
    """

    key: str
    data: bytes

    @property
    def time(self) -> str:
        """The time of the line."""
        return self.key.partition(" ")[0]


class Anchor(msgspec.Struct, frozen=True, array_like=True):
    """A line and the position at which it begins; the oldest line that is kept if without a key."""

    position: int
    key: str = ""


class _Goal(NamedTuple):
    """The first byte to find: that of a line or a position, else the end."""

    position: int | None = None
    key: str = ""


class LogSource(Protocol):
    """A kernel's log in its runtime."""

    def read(self, query: LogQuery, begin: str = "") -> AsyncGenerator[Sequence[LogEntry]]:
        """Yield the entries that a query selects, from the one with the key `begin` if given.

        They come as they are read, some at a time. If that one was dropped, they begin later.
        """
        ...

    async def is_whole(self) -> bool:
        """Return whether no line has been dropped."""
        ...


class _Saved(msgspec.Struct):
    """The anchors of one log, for each form that was read; `log_id` is that of the runtime."""

    log_id: str
    anchors: dict[str, list[Anchor]] = {}


class LogAnchors:
    """The anchors of one log in one form, the oldest first; they are saved when one is added."""

    def __init__(self, path: Path | None, log_id: str, form: str) -> None:
        self.lock = asyncio.Lock()
        self._path, self._log_id, self._form = path, log_id, form
        self._anchors = self._load().anchors.get(form, [])
        self._noted_at = time.monotonic()

    def _load(self) -> _Saved:
        if self._path is not None:
            with suppress(OSError):
                saved = PrivateFolder(self._path.parent).read_json(self._path.name, _Saved)
                if saved is not None and saved.log_id == self._log_id:
                    return saved
        return _Saved(self._log_id)

    @property
    def first(self) -> Anchor | None:
        """The oldest anchor: no line before it is kept."""
        return self._anchors[0] if self._anchors else None

    @property
    def last(self) -> Anchor | None:
        """The newest anchor."""
        return self._anchors[-1] if self._anchors else None

    def before(self, goal: _Goal) -> Anchor | None:
        """Return the newest anchor that is not after a goal."""
        index = len(self._anchors)
        if goal.key:
            index = bisect_right(self._anchors, goal.key, key=lambda anchor: anchor.key)
        elif goal.position is not None:
            index = bisect_right(self._anchors, goal.position, key=lambda anchor: anchor.position)
        return self._anchors[index - 1] if index else None

    @property
    def positions(self) -> Mapping[str, int]:
        """The positions of all anchors, by their keys."""
        return {anchor.key: anchor.position for anchor in self._anchors}

    def is_due(self, position: int) -> bool:
        """Return whether a line at a position is to become an anchor."""
        if self.last is None or position >= self.last.position + ANCHOR_BYTES:
            return True
        is_late = time.monotonic() - self._noted_at >= ANCHOR_PAUSE_S
        return is_late and position > self.last.position

    def add(self, anchor: Anchor) -> None:
        """Add the newest anchor."""
        kept = [anchor]
        for older in reversed(self._anchors):
            gap, distance = kept[-1].position - older.position, anchor.position - older.position
            if _ANCHORS_PER_DISTANCE * gap >= distance:
                kept.append(older)
        first = [older for older in self._anchors[:1] if older not in kept[: MAX_ANCHORS - 1]]
        self._anchors = [*first, *kept[: MAX_ANCHORS - 1][::-1]]
        self._noted_at = time.monotonic()
        if self._path is None:
            return
        saved = self._load()
        saved.anchors[self._form] = self._anchors
        with suppress(OSError):  # these are exact until the daemon is restarted
            text = msgspec.json.encode(saved).decode()
            PrivateFolder(self._path.parent).replace(self._path.name, text)


class LogPositions:
    """The positions in the logs of a runtime's kernels."""

    def __init__(self) -> None:
        self._anchors: WeakValueDictionary[tuple[Path | None, str, str], LogAnchors] = (
            WeakValueDictionary()
        )
        """Shared by all readers of a log, so that they count alike."""

    @asynccontextmanager
    async def open(
        self, source: LogSource, query: LogQuery, path: Path | None, log_id: str
    ) -> AsyncIterator[KernelLog]:
        """Open a log at the position that a query selects; its anchors are in the file `path`."""
        form = f"{'+'.join(sorted(query.streams))} timestamps={query.timestamps}"
        key = (path, log_id, form)
        anchors = self._anchors.get(key) or LogAnchors(path, log_id, form)
        self._anchors[key] = anchors
        reader = _Reader(source, replace(query, tail=None, since_ns=0), anchors)
        async with anchors.lock:
            begin, position = await reader.find(await _goal(source, query))
        async with aclosing(reader.read_bytes(begin, position)) as chunks:
            yield KernelLog(position, chunks)


async def _goal(source: LogSource, query: LogQuery) -> _Goal:
    """Return the first byte that a query selects."""
    if query.tail is None and not query.since_ns:
        return _Goal(query.from_position or 0)
    async with aclosing(source.read(replace(query, follow=False))) as selected:
        first = await anext(selected, None)
    return _Goal(key=first[0].key if first else "")


class _Dropped(RuntimeUnavailable):
    """A line is not kept any more, so nothing can be counted from it."""


class _Reader:
    """A reader of one log, which counts bytes and notes anchors."""

    def __init__(self, source: LogSource, query: LogQuery, anchors: LogAnchors) -> None:
        self._source, self._query, self._anchors = source, query, anchors
        self._kept = replace(query, follow=False)
        self._oldest: Anchor | None = None
        """The oldest line that is kept, if it was looked for."""

    async def find(self, goal: _Goal) -> tuple[Anchor, int]:
        """Return the position of the first byte at the goal, and an anchor to read it from."""
        position = None
        if begin := self._anchors.before(goal):
            with suppress(RuntimeUnavailable):  # the line was dropped, or its key is damaged
                position = await self._count(begin, goal)
        if begin is None or position is None:
            begin = self._oldest = await self._find_oldest(goal)
            position = await self._count(begin, goal)
        if position is None:  # it was dropped meanwhile
            position = begin.position
        nearest = self._anchors.before(_Goal(position))
        is_nearer = nearest is not None and nearest.position > begin.position
        return nearest if nearest and is_nearer else begin, position

    async def _count(self, begin: Anchor, goal: _Goal) -> int | None:
        """Return the position of a goal, or the end; None if its line is not there."""
        position = begin.position
        async with aclosing(self._read(self._kept, begin)) as batches:
            async for entries in batches:
                for entry in entries:
                    if entry.key == goal.key:
                        return position
                    position += len(entry.data)
                    if goal.position is not None and position > goal.position:
                        return max(begin.position, goal.position)
        return None if goal.key else position

    async def _find_oldest(self, goal: _Goal) -> Anchor:
        """Return the oldest line, at a position that no client has seen if it is unknown."""
        oldest, size, positions = "", 0, self._anchors.positions
        async with aclosing(self._source.read(self._kept)) as batches:
            async for entries in batches:
                oldest = oldest or entries[0].key
                if self._anchors.last is None:
                    break
                for entry in entries:
                    if (known := positions.get(entry.key)) is not None:
                        return Anchor(max(0, known - size), oldest)
                    size += len(entry.data)
        if self._anchors.last is not None:
            unseen = self._anchors.last.position + ANCHOR_BYTES
        elif await self._source.is_whole():
            return Anchor(0, oldest)
        else:
            unseen = 0
        begin = Anchor(max(unseen, goal.position or 0) + 1, oldest)
        if oldest:
            self._anchors.add(begin)
        return begin

    async def _read(self, query: LogQuery, begin: Anchor) -> AsyncGenerator[Sequence[LogEntry]]:
        """Yield entries, and note anchors.

        Raises:
            _Dropped: the line to begin with was dropped.
        """
        position, time_before, expected = begin.position, "", begin.key
        is_oldest = begin in (self._anchors.first, self._oldest)
        key = "" if is_oldest else begin.key  # a clock may have been set back since its time
        async with aclosing(self._source.read(query, key)) as batches:
            async for entries in batches:
                if expected not in ("", entries[0].key):
                    raise _Dropped(f"output before {position} was dropped")
                expected = ""
                for entry in entries:
                    if self._anchors.is_due(position) and entry.time != time_before:
                        self._anchors.add(Anchor(position, entry.key))
                    time_before = entry.time
                    position += len(entry.data)
                yield entries
        if expected:
            raise _Dropped(f"output before {position} was dropped")

    async def read_bytes(self, begin: Anchor, first: int) -> AsyncGenerator[bytes]:
        """Yield the bytes from a position after an anchor."""
        surplus = first - begin.position
        async with aclosing(self._read(self._query, begin)) as batches:
            async for entries in batches:
                data = b"".join([entry.data for entry in entries])
                if surplus < len(data):
                    yield data[surplus:]
                surplus = max(0, surplus - len(data))
