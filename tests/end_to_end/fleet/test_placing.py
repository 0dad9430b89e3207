"""A kernel id is on at most one node, whatever dies, freezes or loses an answer."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentd.core.access import Caller, Role
from agentd.errors import AgentdError, KernelConflict
from agentd_fleet.nodes.calls import Nodes
from agentd_fleet.placement.attempts import PlacementTimeouts, PlacementUnknown
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.placement.placer import Placer
from agentd_fleet.placement.requests import FleetKernelRequest, PlacementRequest, order_of
from agentd_fleet.placement.sweep import Sweep
from agentd_fleet.store.route import KernelRoute, RouteProgress
from agentd_fleet.store.sqlite_store import SqliteStore
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import NodeStatus
from agentd_fleet.view.reports import reading_of
from end_to_end.fleet.fleet_world import SLEEP, World
from end_to_end.fleet.node_proxy import NodeProxy

BOSS = Caller("boss", Role.ADMIN)
PACE = PlacementTimeouts(insist_s=0.5, again_s=0.05, sweep_s=0.1, settled_s=0.3)


def order(kernel_id: str = "k1", cpu: int = 1, **members: object) -> PlacementRequest:
    body = {**SLEEP, "kernel_id": kernel_id, "slots": {"cpu": cpu, "mem": "1m"}, **members}
    return order_of(FleetKernelRequest.model_validate(body), BOSS)


class Rig:
    """Two gateways' parts over one store and two real nodes, each behind a proxy."""

    def __init__(self, world: World, names: list[str]) -> None:
        self.world, self.names = world, names
        self.proxies = {
            name: NodeProxy(
                world.folder / f"p{number}.sock", world.nodes[name].folder / "agentd.sock"
            )
            for number, name in enumerate(names)
        }
        self.states = [FleetState(), FleetState()]
        self.nodes = Nodes(self.states[0])
        self.stores = [
            SqliteStore(world.folder / "fleet.sqlite", (), state) for state in self.states
        ]
        self.placers = [
            Placer(FleetBackend(store, state, self.nodes), timeouts=PACE)
            for store, state in zip(self.stores, self.states, strict=True)
        ]

    async def start(self) -> None:
        for store in self.stores:
            await store.open()
        for name, proxy in self.proxies.items():
            await proxy.start()
            await self.tell(name)
            known = self.states[0].node(name)
            assert known is not None
            await self.nodes.ask(known, BOSS, "GET", "/v1/whoami")  # they have met
            proxy.asked.clear()

    async def tell(self, name: str, status: NodeStatus = NodeStatus.READY) -> None:
        """Report a node to both gateways."""
        daemon = self.world.nodes[name]
        parts = [await daemon.get(f"/v1/{part}") for part in ("node", "slot-types", "agents")]
        reading = reading_of(*parts, await daemon.get("/v1/devices"))
        for store, state in zip(self.stores, self.states, strict=True):
            await store.heard(f"unix:{self.proxies[name].path}", reading)
            if status is not NodeStatus.READY:
                state.lose(name, 0.0)

    async def create(self, wanted: PlacementRequest, gateway: int = 0) -> str:
        placed = await self.placers[gateway].create(BOSS, wanted, self.states[gateway].view)
        return placed.node_id

    async def stop(self) -> None:
        await self.nodes.__aexit__(None, None, None)
        for proxy in self.proxies.values():
            proxy.passing.set()
            await proxy.stop()
        for store, placer in zip(self.stores, self.placers, strict=True):
            await placer.close()
            await store.close()

    def sweep(self, gateway: int = 1) -> Sweep:
        backend = FleetBackend(self.stores[gateway], self.states[gateway], self.nodes)
        return Sweep(backend, self.placers[gateway], PACE)


@pytest.fixture
async def rig(world: World) -> AsyncIterator[Rig]:
    made = Rig(world, await world.start_nodes("none", "none"))
    await made.start()
    yield made
    await made.stop()


def on(name: str) -> dict[str, object]:
    return {"placement": {"nodes": [name]}}


async def test_an_answer_that_is_lost_is_asked_for_at_that_node_again(rig: Rig) -> None:
    first, _ = rig.names
    rig.proxies[first].is_losing = True
    creating = asyncio.create_task(rig.create(order(**on(first))))
    async with asyncio.timeout(10):
        while not (await rig.world.census()):
            await asyncio.sleep(0.01)
    rig.proxies[first].is_losing = False
    assert await creating == first
    assert await rig.world.census() == {"k1": [first]}
    await rig.placers[0].close()
    kept = await rig.stores[0].route("k1")
    assert kept is not None
    assert kept.route.progress is RouteProgress.PLACED


async def test_frozen_node_keeps_the_kernel_id(rig: Rig) -> None:
    first, second = rig.names
    rig.proxies[first].passing.clear()
    creating = asyncio.create_task(rig.create(order(placement={"nodes": [first, second]})))
    rig.proxies[second].passing.clear()
    async with asyncio.timeout(10):
        while not (asked := [n for n in rig.names if rig.proxies[n].asked.is_set()]):
            await asyncio.sleep(0.01)
    (node,) = asked
    await rig.tell(node, NodeStatus.LOST)
    with pytest.raises(PlacementUnknown) as unknown:
        await creating
    assert unknown.value.facts() == {"kernel_id": "k1", "node_id": node}
    other = next(name for name in rig.names if name != node)
    rig.proxies[other].passing.set()
    with pytest.raises(PlacementUnknown):  # by another gateway too, though another node has room
        await rig.create(order(placement={"nodes": [first, second]}), gateway=1)
    rig.proxies[node].passing.set()
    await rig.tell(node)
    assert await rig.create(order(placement={"nodes": [first, second]}), gateway=1) == node
    assert await rig.world.census() == {"k1": [node]}


async def test_gateway_takes_over_routes_of_a_dead_one(rig: Rig) -> None:
    wanted = order()
    first, _ = rig.names
    left = KernelRoute(
        kernel_id="k1", node_id=first, agent_id="agent-1", request_hash=wanted.request_hash,
        owner="the dead",
    )  # fmt: skip
    assert await rig.stores[0].keep(left, 0)
    with pytest.raises(KernelConflict):
        await rig.create(order(cpu=2), gateway=1)
    assert await rig.create(wanted, gateway=1) == first
    assert await rig.world.census() == {"k1": [first]}


async def test_unresolved_create_is_resolved_by_its_node(rig: Rig) -> None:
    first, second = rig.names
    for kernel_id, node in (("there", first), ("never", first), ("away", second)):
        route = KernelRoute(
            kernel_id=kernel_id, node_id=node, agent_id="agent-1", request_hash="x", owner="o"
        )
        assert await rig.stores[0].keep(route, 0)
    await rig.world.nodes[first].running(kernel_id="there", **SLEEP)
    rig.proxies[second].passing.clear()
    await rig.tell(second, NodeStatus.LOST)
    await rig.proxies[second].stop()
    sweep = rig.sweep()
    for _ in range(2):
        await sweep.once()
    assert await rig.stores[0].route("never") is not None, "it is too new to be anybody's"
    async with asyncio.timeout(10):
        while await rig.stores[0].route("never") is not None:
            await sweep.once()
    await sweep.once()
    there, away = await rig.stores[0].route("there"), await rig.stores[0].route("away")
    assert there is not None
    assert there.route.progress is RouteProgress.PLACED
    assert away is not None
    assert away.route.progress is RouteProgress.PLACING


async def test_overtaken_placement_tries_no_other_node(rig: Rig) -> None:
    """The first gateway is refused by a node that is full, when the second has taken over."""
    first, second = rig.names
    await rig.world.nodes[first].running(kernel_id="big", slots={"cpu": 8, "mem": "1m"}, **SLEEP)
    rig.proxies[first].passing.clear()
    rig.proxies[second].passing.clear()
    slow = asyncio.create_task(rig.create(order(cpu=4)))
    async with asyncio.timeout(10):
        while not any(proxy.asked.is_set() for proxy in rig.proxies.values()):
            await asyncio.sleep(0.01)
    taken = asyncio.create_task(rig.create(order(cpu=4), gateway=1))
    kept = await rig.stores[0].route("k1")
    async with asyncio.timeout(10):
        while (now := await rig.stores[0].route("k1")) == kept:
            await asyncio.sleep(0.01)
    assert now is not None
    assert kept is not None
    assert now.route.node_id == kept.route.node_id
    for proxy in rig.proxies.values():
        proxy.passing.set()
    outcomes = await asyncio.gather(slow, taken, return_exceptions=True)
    census = await rig.world.census()
    assert len(census.get("k1", [])) <= 1
    for outcome in outcomes:
        assert isinstance(outcome, AgentdError) or [outcome] == census["k1"], outcomes


async def test_a_full_node_sends_the_order_on_and_leaves_nothing(rig: Rig) -> None:
    first, second = rig.names
    await rig.world.nodes[first].running(kernel_id="big", slots={"cpu": 8, "mem": "1m"}, **SLEEP)
    found = {await rig.create(order(f"k{n}", cpu=2)) for n in range(4)}
    assert found == {second}
    with pytest.raises(AgentdError) as refused:
        await rig.create(order("k9", cpu=2))
    assert refused.value.code == "InsufficientResource"
    assert await rig.stores[0].route("k9") is None
    nowhere = order_of(FleetKernelRequest.model_validate({**SLEEP, "kernel_id": "bad", "command":
                       ["/nowhere"], "slots": {"cpu": 0}}), BOSS)  # fmt: skip
    with pytest.raises(AgentdError) as refused:
        await rig.create(nowhere)
    assert refused.value.code == "CommandNotFound"
    assert await rig.stores[0].route("bad") is None
