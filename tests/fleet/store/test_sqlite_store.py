"""The file of a gateway without etcd, including corrupted content."""

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agentd.core.slots import SlotKind
from agentd.errors import StateUnavailable
from agentd_fleet.store import sqlite_store
from agentd_fleet.store.route import KernelRoute, RouteUnreadable
from agentd_fleet.store.sqlite_store import SqliteStore
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.reports import KnownNode, NodeReading, SlotTypeReport
from support.waiting import until

CHIP = SlotTypeReport("tpu.chip", "count", "1")


async def opened(file: Path) -> tuple[SqliteStore, FleetState]:
    state = FleetState()
    store = SqliteStore(file, [], state)
    await store.open()
    return store, state


async def test_rows_that_cannot_be_read_stop_no_start_and_no_other_row(tmp_path: Path) -> None:
    file = tmp_path / "fleet.sqlite"
    store, _ = await opened(file)
    route = KernelRoute(kernel_id="k1", node_id="n1", agent_id="main", request_hash="h", owner="o")
    await store.put_route(route, 0)
    await store.close()
    known = KnownNode(first_seen="2026", url="unix:/there", slot_types=[CHIP])
    with sqlite3.connect(file) as base:
        for node, value in (("n1", msgspec.json.encode(known)), ("n2", b"[]"), ("n3", None),
                            ("n4", b'{"schema": 9}'), ("../n5", b"{}")):  # fmt: skip
            base.execute("INSERT INTO known VALUES (?, ?)", (node, value))
        base.execute("INSERT INTO slot_types VALUES (1, 'odd', NULL)")
        base.execute("INSERT INTO routes VALUES ('k2', NULL, 1)")
    store, state = await opened(file)
    nodes = state.view.nodes
    assert {name: node.status for name, node in nodes.items()} == dict.fromkeys(
        ("n1", "n2", "n3", "n4"), "lost"
    )
    with pytest.raises(RouteUnreadable):
        await store.route("k2")
    assert [[kept.route async for page in store.routes() for kept in page]] == [[route]]
    assert "n1" in state.view.slot_in_use_reason("tpu.chip")
    assert await store.forget(nodes["n1"])
    assert await store.route("k1") is None
    await store.close()
    store, state = await opened(file)
    assert sorted(state.view.nodes) == ["n2", "n3", "n4"]
    await store.close()


HOLD = """
import sqlite3, sys
base = sqlite3.connect(sys.argv[1], isolation_level=None)
base.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.asynccontextmanager
async def locked(file: Path) -> AsyncIterator[None]:
    """Hold the write lock of a file in another process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, file, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert await process.stdout.readline() == b"locked\n"
        yield
    finally:
        process.stdin.close()
        await process.wait()


async def until_written(store: SqliteStore) -> None:
    await until(lambda: not store._unwritten)


def reading(node_id: str, *names: str) -> NodeReading:
    """Return a reading with slot types of these names, whose units fill some pages."""
    types = [SlotTypeReport(name, SlotKind.COUNT, "1", unit="x" * 100) for name in names]
    return NodeReading(
        node_id=node_id, slot_types=types, agents={"main": dict.fromkeys(names, "1")}
    )


async def test_forgotten_node_is_not_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "RETRY_S", 0.05)
    store, state = await opened(tmp_path / "fleet.sqlite")
    await store.apply_reading("unix:/1", reading("n1", "chip.unit"))
    await store.apply_reading("unix:/1", NodeReading(node_id="n1", is_down=True, reason="away"))
    node = state.node("n1")
    assert node is not None
    assert await store.forget(node)
    await store.forget_slot_type("chip.unit")
    running = asyncio.create_task(store.run())
    for _ in range(2):
        await store.apply_reading("unix:/2", reading("n2", "other.unit"))
    await until_written(store)
    running.cancel()
    await asyncio.wait([running])
    await store.close()
    store, state = await opened(tmp_path / "fleet.sqlite")
    assert sorted(state.view.nodes) == ["n2"]
    assert "chip.unit" not in state.view.slot_types
    await store.close()


async def test_store_opens_while_another_program_has_the_lock(tmp_path: Path) -> None:
    file = tmp_path / "fleet.sqlite"
    store, _ = await opened(file)
    route = KernelRoute(kernel_id="k1", node_id="n1", agent_id="main", request_hash="h", owner="o")
    await store.put_route(route, 0)
    async with locked(file):
        second, _ = await opened(file)
        kept = await second.route("k1")
        assert kept is not None
        assert kept.route == route
        await second.close()
    await store.close()


async def test_file_that_was_read_only_is_opened_again(tmp_path: Path) -> None:
    """SQLite's connections to a read-only file never write, also after the file is writable."""
    store, _ = await opened(tmp_path / "new/fleet.sqlite")
    route = KernelRoute(kernel_id="k1", node_id="n1", agent_id="main", request_hash="h", owner="o")
    await store._transact(lambda: store._rows("PRAGMA query_only = 1"))
    with pytest.raises(StateUnavailable, match="readonly"):
        await store.put_route(route, 0)
    assert await store.route("k1") is None
    assert await store.put_route(route, 0)
    await store.close()
