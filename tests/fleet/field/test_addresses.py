"""Addresses of a fleet without etcd: a node is its id, wherever it answers."""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agentd_fleet.store import sqlite_store
from agentd_fleet.store.route import KernelRoute
from agentd_fleet.store.sqlite_store import SqliteStore
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import Cordon
from agentd_fleet.view.reports import NodeReading

A, B = "unix:/a", "unix:/b"
REFUSED = "unreachable: Connection refused"


def up(node_id: str) -> NodeReading:
    return NodeReading(node_id=node_id)


def silent(node_id: str = "") -> NodeReading:
    return NodeReading(node_id=node_id, is_down=True, reason=REFUSED)


def denied(node_id: str = "") -> NodeReading:
    return NodeReading(node_id=node_id, is_down=True, reason="unreadable: invalid token")


Row = tuple[str, str, str]
READY_A, READY_B = ("ready", A, ""), ("ready", B, "")
CASES: dict[str, tuple[list[tuple[str, NodeReading]], dict[str, Row], int]] = {
    "one node": ([(A, up("n1"))], {"n1": READY_A}, 0),
    "a node that stops": ([(A, up("n1")), (A, silent("n1"))],
        {"n1": ("daemon-down", A, REFUSED)}, 0),
    "an address never heard": ([(A, silent())], {A: ("lost", A, REFUSED)}, 0),
    "an address that refuses the token": ([(A, denied())],
        {A: ("lost", A, "unreadable: invalid token")}, 0),
    "an address heard at last": ([(A, silent()), (A, up("n1"))], {"n1": READY_A}, 0),
    "an id learned before any answer is read": ([(A, silent("n1"))], {A: ("lost", A, REFUSED)}, 0),
    "an unreadable node": ([(A, NodeReading(node_id="n1", reason="unreadable: x"))],
        {"n1": ("ready", A, "unreadable: x")}, 0),
    "a renamed node": ([(A, up("n1")), (A, silent("n1")), (A, up("n2"))],
        {"n1": ("lost", A, f"{A} is node n2 now"), "n2": READY_A}, 0),
    "a node that moves to an address never heard": (
        [(A, up("n1")), (B, silent()), (A, silent("n1")), (B, up("n1"))],
        {"n1": READY_B, A: ("lost", A, REFUSED)}, 0),
    "a node that moves and leaves its address to another": (
        [(A, up("n1")), (B, silent()), (A, silent("n1")), (A, up("n2")), (B, up("n1"))],
        {"n1": READY_B, "n2": READY_A}, 0),
    "two nodes that swap addresses": (
        [(A, up("n1")), (B, up("n2")), (A, silent("n1")), (B, silent("n2")), (A, up("n2")),
         (B, up("n1"))], {"n1": READY_B, "n2": READY_A}, 0),
    "two nodes that swap addresses one after the other": (
        [(A, up("n1")), (B, up("n2")), (A, up("n2")), (B, up("n1"))],
        {"n1": READY_B, "n2": READY_A}, 1),
    "two nodes of one id": ([(A, up("n1")), (B, up("n1"))],
        {"n1": READY_A, B: ("lost", B, f"node id n1 is taken by {A}")}, 1),
    "two nodes of one id, one renamed": ([(A, up("n1")), (B, up("n1")), (B, up("n2"))],
        {"n1": READY_A, "n2": READY_B}, 1),
    "two nodes of one id that report often": (
        [(A, up("n1")), (B, up("n1"))] * 3,
        {"n1": READY_A, B: ("lost", B, f"node id n1 is taken by {A}")}, 1),
}  # fmt: skip


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    made = await opened(tmp_path)
    yield made
    await made.close()


async def opened(folder: Path, *addresses: str) -> SqliteStore:
    nobody: Any = None
    nodes = [(address, nobody) for address in addresses or (A, B)]
    made = SqliteStore(folder / "fleet.sqlite", nodes, FleetState())
    await made.open()
    return made


def listed(store: SqliteStore) -> dict[str, Row]:
    view = store._state.view
    return {
        node_id: (view.node_state(node_id), node.url, node.exclusion_reason)
        for node_id, node in view.nodes.items()
    }


@pytest.mark.parametrize("case", CASES)
async def test_node_is_listed_where_it_answers(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    readings, expected, doubles = CASES[case]
    monkeypatch.setattr(sqlite_store, "TAKEOVER_S", 0.0)
    with capture_logs() as logged:
        for address, reading in readings:
            await store.apply_reading(address, reading)
    assert listed(store) == expected
    assert sum(event["event"] == "node.duplicate_id" for event in logged) == doubles


async def test_second_of_an_id_waits_while_the_first_restarts(
    store: SqliteStore,
) -> None:
    """A daemon that restarts keeps its id, and the kernels that are routed to it."""
    with capture_logs() as logged:
        for address, reading in ((A, up("n1")), (A, silent("n1")), (B, up("n1"))):
            await store.apply_reading(address, reading)
        reason = f"node id n1 is taken by {A}, which does not answer"
        assert listed(store) == {"n1": ("daemon-down", A, REFUSED), B: ("lost", B, reason)}
        assert [event["event"] for event in logged] == ["node.located"]
        await store.apply_reading(A, up("n1"))
        assert [event["event"] for event in logged] == ["node.located", "node.duplicate_id"]
    assert listed(store)["n1"] == READY_A


async def test_proven_duplicate_gets_the_id_only_after_a_forget(store: SqliteStore) -> None:
    """It has other kernels, and those of the first one must outlive its long restart."""
    readings = [(A, up("n1")), (B, up("n1")), (A, silent("n1")), (B, silent("n1")), (B, up("n1"))]
    for address, reading in readings:
        await store.apply_reading(address, reading)
        age_silence(store)
        assert store._address_by_node == {"n1": A}
    assert await store.forget(store._state.view.nodes["n1"])
    assert listed(store) == {"n1": READY_B, A: ("lost", A, REFUSED)}
    with capture_logs() as logged:
        await store.apply_reading(A, up("n1"))
    assert [event["event"] for event in logged] == ["node.duplicate_id"]
    assert listed(store)["n1"] == READY_B


async def reopened(store: SqliteStore) -> SqliteStore:
    """Write and close a store, as at the end of a gateway, and open its file again."""
    await store._transact(partial(store._insert, store._unwritten))
    await store.close()
    return await opened(store._file.parent)


def age_silence(store: SqliteStore) -> None:
    """Age the silence of all silent addresses, so that another one may take over."""
    for address in store._silent_since:
        store._silent_since[address] -= sqlite_store.TAKEOVER_S
    for node_id in dict(store._address_by_node):
        store._apply(node_id)  # as the timer does


DOUBLE = ("lost", B, f"node id n1 is taken by {A}")
WAITING = ("lost", B, f"{DOUBLE[2]}, which does not answer")
RESTARTS: dict[str, tuple[list[tuple[str, NodeReading]], dict[str, Row]]] = {
    "the first before it": ([(A, up("n1")), (B, up("n1"))], {"n1": READY_A, B: DOUBLE}),
    "the first after it": ([(B, up("n1")), (A, up("n1"))], {"n1": READY_A, B: DOUBLE}),
    "the first never": ([(B, up("n1"))], {"n1": ("lost", A, ""), B: WAITING}),
    "the first in vain": ([(A, silent()), (B, silent()), (B, up("n1"))],
        {"n1": ("lost", A, REFUSED), B: WAITING}),
    "another node there": ([(B, up("n1")), (A, up("n2"))], {"n1": READY_B, "n2": READY_A}),
    "another node at the double's": ([(B, up("n2")), (A, silent()), (B, up("n1"))],
        {"n1": READY_B, "n2": ("lost", B, f"{B} is node n1 now"), A: ("lost", A, REFUSED)}),
}  # fmt: skip


async def test_reason_names_an_address_that_is_no_longer_listed(tmp_path: Path) -> None:
    """One machine at two addresses is a double; without the first it waits for a forget."""
    store = await opened(tmp_path)
    for address in (A, B):
        await store.apply_reading(address, up("n1"))
    await store._transact(partial(store._insert, store._unwritten))
    await store.close()
    store = await opened(tmp_path, B)
    await store.apply_reading(B, up("n1"))
    reason = f"{A} is not in the nodes of the settings"
    assert listed(store) == {"n1": ("lost", A, reason), B: WAITING}
    assert await store.forget(store._state.view.nodes["n1"])
    assert listed(store) == {"n1": READY_B}
    await store.close()


@pytest.mark.parametrize("case", RESTARTS)
async def test_restarted_gateway_gives_no_double_the_id_with(tmp_path: Path, case: str) -> None:
    """Its node's kernels would be lost to their callers, and could be created again."""
    readings, expected = RESTARTS[case]
    store = await opened(tmp_path)
    for address in (A, B):
        await store.apply_reading(address, up("n1"))
    for _ in range(2):
        store = await reopened(store)
    for address, reading in readings:
        await store.apply_reading(address, reading)
        age_silence(store)
    assert listed(store) == expected
    await store.close()


async def test_node_that_moved_is_found_after_a_restart(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.apply_reading(A, up("n1"))
    store = await reopened(store)
    await store.apply_reading(A, silent())
    await store.apply_reading(B, up("n1"))
    assert listed(store) == {"n1": ("lost", A, REFUSED), B: WAITING}
    age_silence(store)
    assert listed(store) == {"n1": READY_B, A: ("lost", A, REFUSED)}
    store = await reopened(store)
    assert store._address_by_node == {"n1": B}
    await store.close()


@pytest.mark.parametrize("reading", [up("n1"), NodeReading(node_id="n1", reason="unreadable: x")])
async def test_node_that_answers_is_not_forgotten(store: SqliteStore, reading: NodeReading) -> None:
    await store.apply_reading(A, reading)
    assert not await store.forget(store._state.view.nodes["n1"])
    assert listed(store).keys() == {"n1"}


async def test_silent_node_is_forgotten_until_it_answers(store: SqliteStore) -> None:
    for reading in (up("n1"), silent("n1")):
        await store.apply_reading(A, reading)
    assert await store.forget(store._state.view.nodes["n1"])
    assert listed(store) == {A: ("lost", A, REFUSED)}
    other = NodeReading(node_id="n1", is_down=True, reason="unreachable: No such file")
    await store.apply_reading(A, other)
    assert listed(store) == {A: ("lost", A, other.reason)}
    await store.apply_reading(A, up("n1"))
    assert listed(store) == {"n1": READY_A}


async def test_address_of_a_node_in_the_file_is_listed_as_that_node(tmp_path: Path) -> None:
    """After a start, no second entry for a node that does not answer yet."""
    rows = []
    for reading in (up("n1"), silent(), up("n2")):
        store = await opened(tmp_path)
        await store.apply_reading(A, reading)
        await store._transact(partial(store._insert, store._unwritten))
        rows.append(listed(store))
        await store.close()
    assert rows == [
        {"n1": READY_A},
        {"n1": ("lost", A, REFUSED)},
        {"n1": ("lost", A, f"{A} is node n2 now"), "n2": READY_A},
    ]


async def test_node_that_returns_during_its_forget_stays(store: SqliteStore) -> None:
    """A forget may wait for another program's lock, and the node takes kernels meanwhile."""
    for reading in (up("n1"), silent("n1")):
        await store.apply_reading(A, reading)
    cordon = Cordon("repair")
    await store.set_cordon("n1", cordon)
    route = KernelRoute(kernel_id="k1", node_id="n1", agent_id="main", request_hash="h", owner="o")
    assert await store.put_route(route, 0)
    is_locked = threading.Event()
    holding = asyncio.create_task(store._transact(is_locked.wait))
    forgetting = asyncio.create_task(store.forget(store._state.view.nodes["n1"]))
    await asyncio.sleep(0)
    await store.apply_reading(A, up("n1"))
    is_locked.set()
    await holding
    assert not await forgetting
    assert listed(store) == {"n1": READY_A}
    assert store._state.view.nodes["n1"].cordon == cordon
    assert await store.route("k1")
    assert await store._transact(lambda: store._rows("SELECT node_id FROM cordons")) == [("n1",)]
    await store._transact(partial(store._insert, store._unwritten))
    assert await store._transact(lambda: store._rows("SELECT node_id FROM known")) == [("n1",)]
