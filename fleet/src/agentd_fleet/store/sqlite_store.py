"""A few nodes without etcd: one gateway follows them itself, and saves to one file."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from agentd.client.asynchronous import AsyncClient
from agentd.concurrency import run_endless
from agentd.core.names import is_name
from agentd.core.slots import SlotName
from agentd.errors import StateUnavailable
from agentd_fleet.nodes.reader import NodeReader
from agentd_fleet.store.route import KernelRoute, RouteUnreadable, StoredRoute, read_route
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import Cordon, FleetNode, NodeStatus
from agentd_fleet.view.reports import (
    UNREADABLE,
    KnownNode,
    NodeReading,
    SlotTypeReport,
    known_record,
    parse_cordon,
    parse_known_node,
    parse_node_report,
    parse_slot_type,
    slot_type_report,
    with_free,
)

log = structlog.get_logger()

PAGE_SIZE = 1000
FIRST_READINGS_S = 4.0
"""Seconds that nodes have for a first report before the others count as the fleet."""
TAKEOVER_S = 5.0
"""Seconds that an address is silent before another one can have its node id: as with a lease."""
_T = TypeVar("_T")
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS routes (kernel_id TEXT PRIMARY KEY, value BLOB, revision INTEGER);
CREATE TABLE IF NOT EXISTS slot_types (place INTEGER PRIMARY KEY, name TEXT UNIQUE, value BLOB);
CREATE TABLE IF NOT EXISTS known (node_id TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS cordons (node_id TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS revisions (last INTEGER);
"""
_NO_REVISION = "SELECT 0 WHERE NOT EXISTS (SELECT * FROM revisions)"
LOCK_TIMEOUT_S = 1.0
"""Seconds that a call waits for another program's lock on the file."""
RETRY_S = 2.0
"""Seconds after which a failed write of slot types and nodes is repeated."""


class SqliteStore:
    """`route.Store` in a file of this gateway, which reads the nodes itself."""

    def __init__(
        self, file: Path, nodes: Sequence[tuple[str, AsyncClient]], state: FleetState
    ) -> None:
        self._file = file
        self._nodes = nodes
        self._state = state
        self._readings: dict[str, NodeReading] = {}
        """The latest reading of each address; without an id, it has never answered."""
        self._silent_since: dict[str, float] = {}
        self._address_by_node: dict[str, str] = {}
        self._doubles: dict[str, str] = {}
        """By address, the id that it answered with while the node's own address did, too."""
        self._logged_doubles: set[tuple[str, str]] = set()
        self._known_values: dict[str, bytes] = {}
        self._unwritten: dict[tuple[str, str], bytes] = {}
        """Values by table and name: what the nodes reported and the file lacks."""
        self._has_unwritten = asyncio.Event()
        self._unreadable: set[tuple[str, int]] = set()
        self._first_readings_until = time.monotonic() + FIRST_READINGS_S
        self._thread = ThreadPoolExecutor(1, "routes")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file and load its slot types and nodes.

        Raises:
            StateUnavailable: the file is unusable.
        """
        await self._transact(self._create_tables)
        query = "SELECT value FROM slot_types ORDER BY place"
        for (value,) in await self._transact(lambda: self._rows(query)):
            try:
                slot = parse_slot_type(msgspec.json.decode(_bytes(value), type=SlotTypeReport))
            except UNREADABLE as error:
                log.warning("slot_type.read_failed", reason=str(error))
            else:
                self._state.add_slot_type(slot)
        addresses = {address for address, _ in self._nodes}
        for node_id, value in await self._transact(
            lambda: self._rows("SELECT node_id, value FROM known")
        ):
            if is_name(node_id):
                self._known_values[node_id] = _bytes(value)
                node = parse_known_node(node_id, self._known_values[node_id])
                reason = (
                    ""
                    if node.url in addresses
                    else f"{node.url} is not in the nodes of the settings"
                )
                self._state.update_node(replace(node, seen_at=time.time(), exclusion_reason=reason))
                self._expect(node)
        for node_id, value in await self._transact(
            lambda: self._rows("SELECT node_id, value FROM cordons")
        ):
            self._state.set_cordon(node_id, parse_cordon(_bytes(value)))

    def _expect(self, node: FleetNode) -> None:
        """Keep a node's id for the address that had it, as for one that is silent since now."""
        if not node.url:
            return
        self._address_by_node[node.node_id] = node.url
        self._silent_since[node.url] = time.monotonic()
        record = msgspec.json.decode(self._known_values[node.node_id], type=KnownNode)
        self._doubles.update(dict.fromkeys(record.rival.splitlines(), node.node_id))
        asyncio.get_running_loop().call_later(TAKEOVER_S, self._apply, node.node_id)

    async def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    def stale_reason(self) -> str:
        heard = {address for address, reading in self._readings.items() if reading.node_id}
        unheard = sorted(address for address, _ in self._nodes if address not in heard)
        if not unheard or (heard and time.monotonic() > self._first_readings_until):
            return ""
        return f"{', '.join(unheard)} did not answer yet"

    async def route(self, kernel_id: str) -> StoredRoute | None:
        query = "SELECT value, revision FROM routes WHERE kernel_id = ?"
        row = await self._transact(lambda: self._execute(query, kernel_id).fetchone())
        return None if row is None else read_route(kernel_id, _bytes(row[0]), row[1])

    async def put_route(self, route: KernelRoute, expected: int) -> int | None:
        value = msgspec.json.encode(route)
        return await self._transact(lambda: self._swap_route(route.kernel_id, value, expected))

    async def rewrite(self, unreadable: RouteUnreadable) -> int | None:
        work = partial(
            self._swap_route, unreadable.kernel_id, unreadable.value, unreadable.revision
        )
        return await self._transact(work)

    def _swap_route(self, kernel_id: str, value: bytes, expected: int) -> int | None:
        (revision,) = self._execute(
            "UPDATE revisions SET last = last + 1 RETURNING last"
        ).fetchone()
        if expected:
            query = "UPDATE routes SET value = ?, revision = ? WHERE kernel_id = ? AND revision = ?"
            cursor = self._execute(query, value, revision, kernel_id, expected)
        else:
            query = "INSERT OR IGNORE INTO routes VALUES (?, ?, ?)"
            cursor = self._execute(query, kernel_id, value, revision)
        return revision if cursor.rowcount else None

    async def delete_route(self, kernel_id: str, expected: int) -> bool:
        query = "DELETE FROM routes WHERE kernel_id = ? AND revision = ?"
        return await self._transact(lambda: self._execute(query, kernel_id, expected).rowcount > 0)

    async def routes(self) -> AsyncIterator[list[StoredRoute]]:
        query = (
            "SELECT kernel_id, value, revision FROM routes WHERE kernel_id > ? ORDER BY 1 LIMIT ?"
        )
        after = ""
        while rows := await self._transact(partial(self._rows, query, after, PAGE_SIZE)):
            yield [stored for row in rows if (stored := self._try_parse_route(*row)) is not None]
            after = rows[-1][0]

    def _try_parse_route(self, kernel_id: str, value: object, revision: int) -> StoredRoute | None:
        try:
            return read_route(kernel_id, _bytes(value), revision)
        except RouteUnreadable as error:
            if (key_revision := (kernel_id, revision)) not in self._unreadable:
                self._unreadable.add(key_revision)
                log.warning("route.read_failed", key=kernel_id, reason=str(error))
            return None

    def _rows(self, query: str, *values: object) -> list[Any]:
        return self._execute(query, *values).fetchall()

    async def forget_slot_type(self, name: SlotName) -> None:
        await self._transact(partial(self._delete, "slot_types", name))
        self._state.forget_slot_type(name)

    async def set_cordon(self, node_id: str, cordon: Cordon | None) -> None:
        if cordon is None:
            work = partial(self._execute, "DELETE FROM cordons WHERE node_id = ?", node_id)
        else:
            value = msgspec.json.encode(cordon)
            work = partial(
                self._execute, "INSERT OR REPLACE INTO cordons VALUES (?, ?)", node_id, value
            )
        await self._transact(work)
        self._state.set_cordon(node_id, cordon)

    async def forget(self, node: FleetNode) -> bool:
        node_id = node.node_id
        if not await self._transact(partial(self._delete_node, node_id)):
            return False
        self._known_values.pop(node_id, None)
        self._address_by_node.pop(node_id, None)
        self._state.set_cordon(node_id, None)
        self._state.forget(node_id)
        self._apply(node_id)
        return True

    def _delete_node(self, node_id: str) -> bool:
        """Delete a node and the routes to it, unless it answers once the file is locked."""
        self._execute("DELETE FROM cordons WHERE node_id = ?", node_id)
        for row in self._rows("SELECT kernel_id, value, revision FROM routes"):
            stored = self._try_parse_route(*row)
            if stored is not None and stored.route.node_id == node_id:
                self._execute("DELETE FROM routes WHERE kernel_id = ?", stored.route.kernel_id)
        address = self._address_by_node.get(node_id)
        if address is not None and address not in self._silent_since:
            self._connect().rollback()
            return False
        self._delete("known", node_id)
        return True

    async def run(self) -> None:
        follows = (self._follow(address, client) for address, client in self._nodes)
        await run_endless(self._write(), *follows)

    async def _follow(self, address: str, client: AsyncClient) -> None:
        async def on_reading(reading: NodeReading) -> None:
            await self.apply_reading(address, reading)

        async with client:
            await NodeReader(address, client, on_reading).run()

    async def apply_reading(self, address: str, reading: NodeReading) -> None:
        """Apply a reading of an address, which may be of another node than the one before.

        Every node is listed once, from the first of its addresses that answered, until that has
        been silent for a while. One that was not heard yet is silent since the start. A double has
        other kernels, so it gets the id only when that node is renamed or forgotten. An address
        without a node is listed under its own name.
        """
        self._readings[address] = reading
        if not reading.is_down:
            self._silent_since.pop(address, None)
        elif address not in self._silent_since:
            self._silent_since[address] = time.monotonic()
            asyncio.get_running_loop().call_later(TAKEOVER_S, self._apply, reading.node_id)
        if reading.node_id and self._doubles.get(address) != reading.node_id:
            self._doubles.pop(address, None)
        located = [n for n, own_address in self._address_by_node.items() if own_address == address]
        for node_id in dict.fromkeys((*located, reading.node_id)):
            self._apply(node_id, changed=address)

    def _apply(self, node_id: str, changed: str = "") -> None:
        """Apply the readings of a node's addresses; that of the address `changed` is new."""
        readings = {a: read for a, read in self._readings.items() if read.node_id == node_id}
        address = first = self._address_by_node.get(node_id, "")
        first_id = self._readings[first].node_id if first in self._readings else ""
        is_free = not first or first_id not in ("", node_id)
        silent_s = time.monotonic() - self._silent_since.get(first, math.inf)
        if node_id and (is_free or silent_s >= TAKEOVER_S):
            excluded = self._silent_since.keys() | (set() if is_free else self._doubles.keys())
            address = next((a for a in readings if a not in excluded), first)
        if (own := readings.pop(address, None)) is None:
            if is_free and self._address_by_node.pop(node_id, ""):
                self._state.mark_lost(node_id, time.time())
        elif changed == address or address != first:
            self._update_node(address, own)
            self._set_reason(self._lost_nodes(address), f"{address} is node {node_id} now")
        if address != first:
            self._address_by_node[node_id] = address
            self._doubles.pop(address, None)
            log.info("node.located", node_id=node_id, address=address, previous=first)
            self._state.forget(address)
            self._apply("")  # an address that was listed as this node is not this node
        for other, reading in readings.items():
            reason = reading.reason
            if node_id and other not in self._silent_since:
                reason = f"node id {node_id} is taken by {address}"
                if address in self._silent_since:
                    reason += ", which does not answer"
                else:
                    self._doubles[other] = node_id
                    self._log_double(node_id, address, other)
            entry = FleetNode(other, {}, {}, NodeStatus.LOST, other, seen_at=time.time())
            self._set_reason(self._lost_nodes(other) or [entry], reason)
        if own is not None:
            self._record(address, own)

    def _log_double(self, node_id: str, first: str, second: str) -> None:
        if (node_id, second) not in self._logged_doubles:
            self._logged_doubles.add((node_id, second))
            log.error("node.duplicate_id", node_id=node_id, first=first, second=second)

    def _lost_nodes(self, address: str) -> list[FleetNode]:
        """Return the lost nodes that were last at an address, or the entry of the address."""
        nodes = self._state.view.nodes.values()
        return [node for node in nodes if node.url == address and node.status is NodeStatus.LOST]

    def _set_reason(self, nodes: Iterable[FleetNode], reason: str) -> None:
        """List nodes with a reason."""
        for node in nodes:
            if node.exclusion_reason != reason:
                self._state.update_node(replace(node, exclusion_reason=reason))

    def _update_node(self, address: str, reading: NodeReading) -> None:
        node_id = reading.node_id
        report = reading.to_report(install_id="", boot_id="", url=address, labels={})
        report_bytes, free = msgspec.json.encode(report), msgspec.json.encode(reading.free)
        node = with_free(parse_node_report(node_id, report_bytes, seen_at=time.time()), free)
        for slot in self._state.new_slot_types(node):
            self._state.add_slot_type(slot)
            value = msgspec.json.encode(slot_type_report(slot))
            self._write_soon("slot_types", slot.name, value)
        self._state.update_node(node)

    def _record(self, address: str, reading: NodeReading) -> None:
        """Record a node with its doubles; slot types of an unreadable one stay as they were."""
        node_id = reading.node_id
        recorded = self._known_values.get(node_id)
        doubles = sorted(double for double, n in self._doubles.items() if n == node_id)
        types = None if reading.reason else reading.slot_types
        value = known_record(recorded, address, types, "\n".join(doubles))
        if value != recorded and not (reading.reason and recorded is None):
            self._known_values[node_id] = value
            self._write_soon("known", node_id, value)

    def _write_soon(self, table: str, name: str, value: bytes) -> None:
        self._unwritten[table, name] = value
        self._has_unwritten.set()

    async def _write(self) -> None:
        """Write what the nodes reported, and repeat failed writes."""
        reason = ""
        while await self._has_unwritten.wait():
            self._has_unwritten.clear()
            values = dict(self._unwritten)
            try:
                await self._transact(partial(self._insert, values))
            except StateUnavailable as error:
                if not reason:
                    log.warning("store.write_failed", reason=str(error))
                reason = str(error)
                self._has_unwritten.set()
                await asyncio.sleep(RETRY_S)
                continue
            if reason:
                log.info("store.recovered", values=len(values))
                reason = ""
            for key, value in values.items():
                if self._unwritten.get(key) == value:
                    del self._unwritten[key]

    def _insert(self, values: Mapping[tuple[str, str], bytes]) -> None:
        queries = {
            "slot_types": "INSERT OR IGNORE INTO slot_types (name, value) VALUES (?, ?)",
            "known": "INSERT OR REPLACE INTO known VALUES (?, ?)",
        }
        for (table, name), value in values.items():
            if (table, name) in self._unwritten:
                self._execute(queries[table], name, value)

    def _delete(self, table: str, name: str) -> None:
        column = {"slot_types": "name", "known": "node_id"}[table]
        self._execute(f"DELETE FROM {table} WHERE {column} = ?", name)  # noqa: S608 - two tables
        self._unwritten.pop((table, name), None)

    def _create_tables(self) -> None:
        self._connect().executescript(_SCHEMA)
        if self._rows(_NO_REVISION):  # an insert would need the lock of an existing file, too
            self._execute("INSERT INTO revisions VALUES (0)")

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self._file, timeout=LOCK_TIMEOUT_S, check_same_thread=False
            )
        return self._connection

    def _execute(self, query: str, *values: object) -> sqlite3.Cursor:
        return self._connect().execute(query, values)

    async def _transact(self, work: Callable[[], _T]) -> _T:
        """Run work on the file off the event loop, in one transaction."""

        def run_in_transaction() -> _T:
            connection = self._connect()
            try:
                with connection:
                    return work()
            except sqlite3.Error as error:
                # A connection to a read-only file stays read-only after the file is writable again.
                if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:
                    connection.close()
                    self._connection = None
                raise

        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, run_in_transaction
            )
        except (sqlite3.Error, OSError) as error:
            raise StateUnavailable(f"{self._file}: {error}") from None


def _bytes(value: object) -> bytes:
    """Return a column as bytes, whatever it contains."""
    return value if isinstance(value, bytes) else str(value).encode()
