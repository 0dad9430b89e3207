"""A handful of nodes without etcd: one gateway follows them itself, and remembers in one file."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from agentd.client.aio import AsyncClient
from agentd.core.slots import SlotName, SlotType
from agentd.errors import StateUnavailable
from agentd_fleet.reading import NodeReader
from agentd_fleet.report import (
    Reading,
    SlotTypeReport,
    published_in,
    slot_type_in,
    slot_type_report,
    with_free,
)
from agentd_fleet.route import Kept, Route
from agentd_fleet.state import FleetState
from agentd_fleet.view import FleetNode

log = structlog.get_logger()

PAGE = 1000
FIRST_WORD_S = 4.0
"""How long nodes have to say a first word before the others are taken for the fleet."""
_T = TypeVar("_T")
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS routes (kernel_id TEXT PRIMARY KEY, value BLOB, revision INTEGER);
CREATE TABLE IF NOT EXISTS slot_types (place INTEGER PRIMARY KEY, name TEXT UNIQUE, value BLOB);
CREATE TABLE IF NOT EXISTS revisions (last INTEGER);
INSERT INTO revisions SELECT 0 WHERE NOT EXISTS (SELECT * FROM revisions);
"""


class SqliteStore:
    """`Store` in a file of this gateway's own, with the nodes asked one by one."""

    def __init__(
        self, file: Path, nodes: Sequence[tuple[str, AsyncClient]], state: FleetState
    ) -> None:
        self._file = file
        self._nodes = nodes
        self._state = state
        self._address: dict[str, str] = {}
        self._unheard = {address for address, _ in nodes}
        self._until = time.monotonic() + FIRST_WORD_S
        self._thread = ThreadPoolExecutor(1, "routes")
        self._base: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file, and know the slot types that it remembers.

        Raises:
            StateUnavailable: it cannot be used.
        """
        await self._do(self._opened)
        query = "SELECT value FROM slot_types ORDER BY place"
        for (value,) in await self._do(lambda: self._rows(query)):
            self._state.learn(slot_type_in(msgspec.json.decode(value, type=SlotTypeReport)))

    async def close(self) -> None:
        """Close the file."""
        if self._base is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._base.close)
        self._thread.shutdown()

    def why_not_live(self) -> str:
        if not self._unheard or time.monotonic() > self._until:
            return ""
        return f"{', '.join(sorted(self._unheard))} did not answer yet"

    async def route(self, kernel_id: str) -> Kept | None:
        query = "SELECT value, revision FROM routes WHERE kernel_id = ?"
        row = await self._do(lambda: self._sql(query, kernel_id).fetchone())
        return None if row is None else _kept(*row)

    async def keep(self, route: Route, expected: int) -> int | None:
        return await self._do(lambda: self._swapped(route, expected))

    def _swapped(self, route: Route, expected: int) -> int | None:
        value, kernel_id = msgspec.json.encode(route), route.kernel_id
        (revision,) = self._sql("UPDATE revisions SET last = last + 1 RETURNING last").fetchone()
        if expected:
            query = "UPDATE routes SET value = ?, revision = ? WHERE kernel_id = ? AND revision = ?"
            done = self._sql(query, value, revision, kernel_id, expected)
        else:
            query = "INSERT OR IGNORE INTO routes VALUES (?, ?, ?)"
            done = self._sql(query, kernel_id, value, revision)
        return revision if done.rowcount else None

    async def drop(self, kernel_id: str, expected: int) -> bool:
        query = "DELETE FROM routes WHERE kernel_id = ? AND revision = ?"
        return await self._do(lambda: self._sql(query, kernel_id, expected).rowcount > 0)

    async def routes(self) -> AsyncIterator[list[Kept]]:
        query = (
            "SELECT kernel_id, value, revision FROM routes WHERE kernel_id > ? ORDER BY 1 LIMIT ?"
        )
        after = ""
        while rows := await self._do(partial(self._rows, query, after, PAGE)):
            yield [_kept(value, revision) for _, value, revision in rows]
            after = rows[-1][0]

    def _rows(self, query: str, *values: object) -> list[Any]:
        return self._sql(query, *values).fetchall()

    async def _learn(self, slots: Sequence[SlotType]) -> None:
        """Keep slot types whose names are not known yet, in one transaction."""
        query = "INSERT OR IGNORE INTO slot_types (name, value) VALUES (?, ?)"

        def insert() -> None:
            for slot in slots:
                self._sql(query, slot.name, msgspec.json.encode(slot_type_report(slot)))

        await self._do(insert)
        for slot in slots:
            self._state.learn(slot)

    async def unlearn(self, name: SlotName) -> None:
        await self._do(lambda: self._sql("DELETE FROM slot_types WHERE name = ?", name))
        self._state.unlearn(name)

    async def forget(self, node: FleetNode) -> None:
        self._address.pop(node.node_id, None)
        self._state.forget(node.node_id)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for address, client in self._nodes:
                group.create_task(self._follow(address, client))

    async def _follow(self, address: str, client: AsyncClient) -> None:
        async def told(reading: Reading) -> None:
            await self.heard(address, reading)

        async with client:
            await NodeReader(client, told).run()

    async def heard(self, address: str, reading: Reading) -> None:
        """Take in what a node says that is followed at an address."""
        node_id = reading.node_id
        self._unheard.discard(address)
        first = self._address.setdefault(node_id, address)
        if first != address:
            log.error("fleet.duplicate_node", node_id=node_id, first=first, second=address)
            return
        report = reading.reported(install_id="", boot_id="", url=address, labels={})
        said, free = msgspec.json.encode(report), msgspec.json.encode(reading.free)
        node = with_free(published_in(node_id, said, seen_at=time.time()), free)
        if new := self._state.learned(node):
            await self._learn(new)
        self._state.note(node)

    def _opened(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._base = sqlite3.connect(self._file, check_same_thread=False)
        self._base.executescript(_SCHEMA)

    def _sql(self, query: str, *values: object) -> sqlite3.Cursor:
        if self._base is None:
            raise RuntimeError("the store has not been opened")
        return self._base.execute(query, values)

    async def _do(self, work: Callable[[], _T]) -> _T:
        """Do something with the file off the event loop, as one transaction."""

        def done() -> _T:
            with self._base or contextlib.nullcontext():
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, done)
        except (sqlite3.Error, OSError) as error:
            raise StateUnavailable(f"{self._file}: {error}") from None


def _kept(value: bytes, revision: int) -> Kept:
    return Kept(msgspec.json.decode(value, type=Route), revision)
