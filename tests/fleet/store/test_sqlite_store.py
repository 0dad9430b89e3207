"""The file of a gateway without etcd, including corrupted content."""

import sqlite3
from pathlib import Path

import msgspec
import pytest

from agentd_fleet.store.route import KernelRoute, RouteUnreadable
from agentd_fleet.store.sqlite_store import SqliteStore
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.reports import KnownNode, SlotTypeReport

CHIP = SlotTypeReport("tpu.chip", "count", "1")  # type: ignore[arg-type]


async def opened(file: Path) -> tuple[SqliteStore, FleetState]:
    state = FleetState()
    store = SqliteStore(file, [], state)
    await store.open()
    return store, state


async def test_rows_that_cannot_be_read_stop_no_start_and_no_other_row(tmp_path: Path) -> None:
    file = tmp_path / "fleet.sqlite"
    store, _ = await opened(file)
    route = KernelRoute(kernel_id="k1", node_id="n1", agent_id="main", request_hash="h", owner="o")
    await store.keep(route, 0)
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
    with pytest.raises(ValueError, match="n1"):
        state.view.without_slot_type("tpu.chip", 1)
    assert await store.forget(nodes["n1"])
    assert await store.route("k1") is None
    await store.close()
    store, state = await opened(file)
    assert sorted(state.view.nodes) == ["n2", "n3", "n4"]
    await store.close()
