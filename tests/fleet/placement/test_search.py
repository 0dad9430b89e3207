"""Nodes that cannot be used hide no other, and are asked again when they are the last choice."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from agentd_fleet.placement.choice import PlacementPolicy
from agentd_fleet.view.fleet_view import FleetNode, NodeRuntime, NodeStatus
from fleet import simulated
from fleet.simulated import Fleet, run

FIRST_S, LATER_S = 15.0, 6.0
"""Seconds of a create beside eight dead nodes: of the first one, and from then on."""
GOOD = "good"
DEAD = {
    "packets are dropped": lambda fleet, dead: fleet.nodes.dropping.update(dead),
    "they accept and never answer": lambda fleet, dead: fleet.nodes.silent.update(dead),
    "they answer 503": lambda fleet, dead: fleet.nodes.failing.update(
        dict.fromkeys(dead, "RuntimeUnavailable")
    ),
}


def unverified(fleet: Fleet) -> None:
    """Forget that nodes have answered the gateways."""
    for gateway in fleet.gateways:
        gateway.state._answered_at.clear()


def dead_nodes(monkeypatch: Any, count: int) -> list[str]:
    """Give the fleets of this test a good node beside so many others; return the others."""
    dead = [f"dead-{number:03}" for number in range(count)]
    monkeypatch.setattr(simulated, "NODES", (*dead, GOOD))
    return dead


@pytest.mark.parametrize("policy", PlacementPolicy)
@pytest.mark.parametrize("kill", DEAD.values(), ids=DEAD)
def test_create_beside_dead_nodes_is_placed_in_time(
    monkeypatch: Any, kill: Callable[[Fleet, list[str]], None], policy: PlacementPolicy
) -> None:
    dead = dead_nodes(monkeypatch, 8)

    async def story(fleet: Fleet) -> None:
        loop, gateway = asyncio.get_running_loop(), fleet.one
        gateway.placer._policy = policy
        kill(fleet, dead)
        unverified(fleet)
        for name in dead:  # `pack` prefers what is fuller
            gateway.state.debit(name, "main", simulated.ResourceSlots({"cpu": simulated.ONE}))
        for number in range(12):
            began = loop.time()
            assert await gateway.create(f"k{number}") == (201, GOOD)
            assert loop.time() - began <= (LATER_S if number else FIRST_S)
            await fleet.rest(30)
        assert fleet.untrue() == []

    run(1, story, monkeypatch)


def test_network_that_drops_large_requests_costs_one_create(monkeypatch: Any) -> None:
    """Small requests are answered, so that each sweep finds the node as it should be."""
    (dead,) = dead_nodes(monkeypatch, 1)

    async def story(fleet: Fleet) -> None:
        loop, gateway = asyncio.get_running_loop(), fleet.one
        gateway.placer._policy = PlacementPolicy.PACK
        fleet.nodes.swallowing.add(dead)
        assert await gateway.create("k0") == (0, "OutcomeUnknown")
        for number in range(1, 20):
            await fleet.rest(60)
            assert gateway.state.unreachable == {}
            began = loop.time()
            assert await gateway.create(f"k{number}") == (201, GOOD)
            assert loop.time() - began <= LATER_S

    run(1, story, monkeypatch)


def test_dead_nodes_beyond_the_sample_hide_no_good_one(monkeypatch: Any) -> None:
    dead = dead_nodes(monkeypatch, 200)

    async def story(fleet: Fleet) -> None:
        began = asyncio.get_running_loop().time()
        fleet.nodes.dropping.update(dead)
        unverified(fleet)
        assert await fleet.one.create("k1") == (201, GOOD)
        assert asyncio.get_running_loop().time() - began <= FIRST_S
        assert fleet.store.rows.keys() == {"k1"}

    for _ in range(3):
        run(1, story, monkeypatch)


def test_node_that_can_be_reached_again_is_used_after_a_sweep(monkeypatch: Any) -> None:
    dead = dead_nodes(monkeypatch, 1)

    async def story(fleet: Fleet) -> None:
        fleet.nodes.dropping.update(dead)
        await fleet.rest(90)
        assert fleet.one.state.unreachable == {dead[0]: "dropped"}
        fleet.nodes.room[GOOD] = 0
        assert (await fleet.one.create("k1"))[0] == 0
        fleet.nodes.dropping.clear()
        await fleet.rest(20)
        assert fleet.one.state.unreachable == {}
        assert await fleet.one.create("k1") == (201, dead[0])

    run(1, story, monkeypatch)


def test_search_asks_each_node_once_when_none_can_be_used(monkeypatch: Any) -> None:
    dead = dead_nodes(monkeypatch, 40)

    async def story(fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        fleet.nodes.dropping.update((*dead, GOOD))
        for _ in range(2):
            began = loop.time()
            assert await fleet.one.create("k1") == (0, "NodeUnavailable")
            assert loop.time() - began <= FIRST_S
            assert fleet.store.rows == {}
        fleet.nodes.dropping.discard(GOOD)  # among 40 that failed as well
        assert await fleet.one.create("k1") == (201, GOOD)

    run(1, story, monkeypatch)


def test_create_whose_connection_is_cut_waits_for_its_pull(monkeypatch: Any) -> None:
    async def story(fleet: Fleet) -> None:
        fleet.nodes.pull_s, fleet.nodes.losing = 6.0, 1.0
        creating = asyncio.create_task(fleet.one.create("k1"))
        await asyncio.sleep(7)
        assert fleet.one.state.unreachable
        fleet.nodes.losing = 0.0
        assert (await creating)[0] == 200

    run(1, story, monkeypatch)


UNANSWERED = {
    "packets are dropped": lambda fleet: fleet.nodes.dropping.add("n1"),
    "it accepts and never answers": lambda fleet: fleet.nodes.silent.add("n1"),
}


@pytest.mark.parametrize("is_placed", [True, False], ids=["placed", "placing"])
@pytest.mark.parametrize("happens", UNANSWERED.values(), ids=UNANSWERED)
def test_repetition_at_a_node_known_to_be_silent_ends_soon(
    monkeypatch: Any, happens: Callable[[Fleet], None], *, is_placed: bool
) -> None:
    async def story(fleet: Fleet) -> None:
        loop, gateway = asyncio.get_running_loop(), fleet.one
        gateway.placer._policy = PlacementPolicy.PACK
        if not is_placed:
            monkeypatch.setattr(gateway.placer, "_confirm_soon", lambda _: None)
        assert await gateway.create("k1") == (201, "n1")
        await gateway.placer.close()
        happens(fleet)
        gateway.state.set_unreachable("n1", "dropped")
        for call in (gateway.create, gateway.delete):
            began = loop.time()
            assert (await call("k1"))[1] in ("OutcomeUnknown", "NodeUnavailable")
            assert loop.time() - began < 5
        assert fleet.store.rows.keys() == {"k1"}
        assert fleet.nodes.kernels["n2"] == {}

    run(1, story, monkeypatch)


@pytest.mark.parametrize("status", [NodeStatus.READY, NodeStatus.LOST])
@pytest.mark.parametrize("is_placed", [True, False], ids=["placed", "placing"])
@pytest.mark.parametrize("happens", UNANSWERED.values(), ids=UNANSWERED)
def test_repetitions_at_a_silent_node_wait_for_none(
    monkeypatch: Any, happens: Callable[[Fleet], None], status: NodeStatus, *, is_placed: bool
) -> None:
    async def story(fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        fleet.one.placer._policy = PlacementPolicy.PACK
        if not is_placed:
            monkeypatch.setattr(fleet.one.placer, "_confirm_soon", lambda _: None)
        assert await fleet.one.create("k1") == (201, "n1")
        await fleet.one.placer.close()
        happens(fleet)
        for gateway in fleet.gateways:
            if status is NodeStatus.LOST:
                gateway.state.mark_lost("n1", 0.0)
            else:
                gateway.state.set_unreachable("n1", "dropped")
        began, ends = loop.time(), []

        async def repeat(gateway: simulated.SimulatedGateway, command: str) -> str:
            answer = (await gateway.create("k1", command))[1]
            ends.append(loop.time() - began)
            return answer

        repeats = [repeat(g, c) for _ in range(5) for g in fleet.gateways for c in ("x", "other")]
        answers = await asyncio.gather(*repeats)
        assert set(answers[::2]) <= {"OutcomeUnknown", "NodeUnavailable"}
        assert set(answers[1::2]) == {"KernelConflict"}
        assert max(ends) < 5
        assert fleet.nodes.kernels["n2"] == {}

    run(1, story, monkeypatch)


def test_repetition_that_waits_for_its_first_ends_with_it(monkeypatch: Any) -> None:
    """The node is lost while a create and its repetitions wait for a pull."""

    async def story(fleet: Fleet) -> None:
        loop, gateway = asyncio.get_running_loop(), fleet.one
        gateway.placer._policy = PlacementPolicy.PACK
        fleet.nodes.pull_s = 600.0
        creating = [asyncio.create_task(gateway.create("k1")) for _ in range(9)]
        await asyncio.sleep(60)
        fleet.nodes.dropping.add("n1")
        gateway.state.mark_lost("n1", 0.0)
        await creating[0]
        ended = loop.time()
        assert {(await task)[1] for task in creating[1:]} <= {"OutcomeUnknown"}
        assert loop.time() - ended < 5
        assert fleet.nodes.kernels["n2"] == {}

    run(1, story, monkeypatch)


def test_repetition_at_a_node_that_works_again_awaits_its_pull(monkeypatch: Any) -> None:
    async def story(fleet: Fleet) -> None:
        gateway = fleet.one
        gateway.placer._policy = PlacementPolicy.PACK
        fleet.nodes.pull_s, fleet.nodes.losing = 60.0, 1.0
        assert await gateway.create("k1") == (0, "OutcomeUnknown")
        assert gateway.state.unreachable
        fleet.nodes.losing = 0.0
        assert await gateway.create("k1") == (200, "n1")

    run(1, story, monkeypatch)


RUNTIMES = {
    "its engine is unavailable": (NodeRuntime("docker", "unavailable"), "img", "n2"),
    "it runs processes, and there is an image": (NodeRuntime("process", "available"), "img", "n2"),
    "it runs containers, and there is no image": (NodeRuntime("docker", "available"), None, "n2"),
    "it runs containers": (NodeRuntime("docker", "available"), "img", "n1"),
    "it runs processes": (NodeRuntime("systemd", "starting"), None, "n1"),
    "its version is older": (None, "img", "n1"),
}


def with_runtime(fleet: Fleet, node_id: str, runtime: NodeRuntime | None) -> None:
    for gateway in fleet.gateways:
        node: FleetNode | None = gateway.state.node(node_id)
        assert node is not None
        gateway.state.update_node(replace(node, runtime=runtime))


@pytest.mark.parametrize(("runtime", "image", "node"), RUNTIMES.values(), ids=RUNTIMES)
def test_candidate_has_the_runtime_that_a_request_needs(
    monkeypatch: Any, runtime: NodeRuntime | None, image: str | None, node: str
) -> None:
    async def story(fleet: Fleet) -> None:
        fleet.one.placer._policy = PlacementPolicy.PACK
        with_runtime(fleet, "n1", runtime)
        assert await fleet.one.create("k1", image=image) == (201, node)
        assert all(asked == node for asked, *_ in fleet.nodes.asked)

    run(1, story, monkeypatch)


NOWHERE = {
    "no node takes an image": (NodeRuntime("process", "available"), "img", "InvalidRequest"),
    "all nodes require one": (NodeRuntime("docker", "available"), None, "InvalidRequest"),
    "no engine is available": (NodeRuntime("docker", "unavailable"), "img", "NodeUnavailable"),
}


@pytest.mark.parametrize(("runtime", "image", "code"), NOWHERE.values(), ids=NOWHERE)
def test_refusal_says_that_no_runtime_serves_a_request(
    monkeypatch: Any, runtime: NodeRuntime, image: str | None, code: str
) -> None:
    async def story(fleet: Fleet) -> None:
        for node_id in simulated.NODES:
            with_runtime(fleet, node_id, runtime)
        assert await fleet.one.create("k1", image=image) == (0, code)
        assert fleet.nodes.asked == []
        with_runtime(fleet, "n1", replace(runtime, name="docker", state="unavailable"))
        assert await fleet.one.create("k1", image=image) == (0, "NodeUnavailable")

    run(1, story, monkeypatch)
