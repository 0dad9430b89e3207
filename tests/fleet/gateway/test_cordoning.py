"""A cordon is what the store has: a gateway that answers 200 has written it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from agentd.core.access import Caller, Role
from agentd.errors import UnknownNode
from agentd_fleet.gateway import handlers
from agentd_fleet.gateway.views import FleetNodeView
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.store.route import StoreUnavailable
from agentd_fleet.store.sqlite_store import SqliteStore
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import Cordon, FleetNode
from agentd_fleet.view.reports import NodeReading

DISK = Cordon("new disk", "ann", "2026-01-01T12:00:00+00:00")


class LateStore:
    """Cordons whose events reach the gateway only when a test says so."""

    def __init__(self, state: FleetState) -> None:
        self.state = state
        self.keys: dict[str, Cordon | None] = {"n1": DISK}
        self.events: list[tuple[str, Cordon | None]] = []
        self.is_away = False
        self.deliver()

    def stale_reason(self) -> str:
        return "etcd does not answer" if self.is_away else ""

    def change(self, node_id: str, cordon: Cordon | None) -> None:
        self.keys[node_id] = cordon
        self.events.append((node_id, cordon))

    async def set_cordon(self, node_id: str, cordon: Cordon | None) -> None:
        if self.is_away:
            raise StoreUnavailable("etcd does not answer")
        self.change(node_id, cordon)
        self.deliver()

    def deliver(self) -> None:
        """Apply the events in their order, as a watch does."""
        for event in self.events or list(self.keys.items()):
            self.state.set_cordon(*event)
        self.events.clear()


class Operator:
    """Cordons nodes through one gateway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = FleetState()
        self.state.update_node(FleetNode("n1", {}, {}))
        self.store = LateStore(self.state)
        backend: Any = FleetBackend(self.store, self.state, SimpleNamespace())
        placer: Any = None
        self.gateway = handlers.Gateway(backend, placer)
        self.body = b""

        async def body(_: object) -> bytes:
            return self.body

        monkeypatch.setattr(handlers, "caller_of", lambda _: Caller("ben", Role.ADMIN))
        monkeypatch.setattr(handlers, "receive_body", body)

    async def cordon(self, node: str = "n1", **members: str) -> FleetNodeView:
        self.body = json.dumps(members).encode()
        request = make_mocked_request("POST", "/", match_info={"node": node})
        response = await self.gateway.cordon_node(request)
        assert isinstance(response.body, bytes)
        return json.loads(response.body)


@pytest.fixture
async def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    return Operator(monkeypatch)


async def test_cordon_of_a_cordoned_node_needs_the_store(operator: Operator) -> None:
    """This gateway is cut off, and cannot know that another one has uncordoned the node."""
    operator.store.change("n1", None)
    operator.store.is_away = True
    with pytest.raises(StoreUnavailable):
        await operator.cordon()


async def test_cordon_survives_an_uncordon_that_comes_late(operator: Operator) -> None:
    operator.store.change("n1", None)  # by another gateway, and not heard of here
    shown = await operator.cordon()
    operator.store.deliver()
    assert operator.state.view.nodes["n1"].cordon == operator.store.keys["n1"] == DISK
    assert shown["cordon"] == {"reason": "new disk", "by": "ann", "since": DISK.since}


REASONS = {
    "none": ({}, DISK),
    "the same": ({"reason": "new disk"}, DISK),
    "another": ({"reason": "fans"}, Cordon("fans", "ben", DISK.since)),
}


@pytest.mark.parametrize(("body", "expected"), REASONS.values(), ids=REASONS)
async def test_cordon_keeps_its_time_with_the_reason(
    operator: Operator, body: dict[str, str], expected: Cordon
) -> None:
    await operator.cordon(**body)
    assert operator.store.keys["n1"] == expected


ADDRESSES = ["unix:/run/n2.sock", "https://n2:6001"]


@pytest.mark.parametrize("address", ADDRESSES)
async def test_address_that_never_told_its_id_has_no_cordon(
    operator: Operator, tmp_path: Path, address: str
) -> None:
    """The node would answer with its id, and without the cordon."""
    nodes = SqliteStore(tmp_path / "fleet.db", [], operator.state)
    await nodes.open()
    await nodes.apply_reading(address, NodeReading(node_id="", is_down=True, reason="no such file"))
    assert address in operator.state.view.nodes
    with pytest.raises(UnknownNode, match=f"{address} has not told its node id yet"):
        await operator.cordon(address)
    assert operator.store.keys == {"n1": DISK}
    await nodes.close()
