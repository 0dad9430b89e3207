"""Routes tell the truth: two gateways, a simulated store and nodes, many interleavings."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd_fleet.nodes.calls import CALL_TIMEOUT_S
from agentd_fleet.placement.deleter import _call_timeout
from agentd_fleet.store.route import KernelRoute, RouteProgress
from agentd_fleet.view.fleet_view import NodeStatus
from fleet.simulated import NODES, Fleet, run

SEEDS = st.integers(0, 2**32)
RULES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def route(kernel_id: str, node: str = "n1", **changes: Any) -> dict[str, Any]:
    kept = KernelRoute(
        kernel_id=kernel_id,
        node_id=node,
        agent_id="main",
        request_hash="h",
        owner="o",
        progress=RouteProgress.PLACED,
    )
    return {**msgspec.to_builtins(kept), **changes}


@given(SEEDS)
@RULES
def test_one_id_at_two_gateways_at_once_is_one_kernel(monkeypatch, seed: int) -> None:
    async def story(fleet: Fleet) -> None:
        fleet.nodes.room["n1"] = 0
        made = await asyncio.gather(
            *(fleet.sometime(gateway.create("k1")) for gateway in fleet.gateways)
        )
        assert sorted(status for status, _ in made) == [200, 201]
        assert {node for _, node in made} == {"n2"}
        others = [await gateway.create("k1", "another") for gateway in fleet.gateways]
        assert others == [(0, "KernelConflict")] * 2
        await fleet.rest(60)
        assert fleet.untrue() == []

    run(seed, story, monkeypatch)


@given(SEEDS)
@RULES
def test_one_of_two_attempts_of_an_id_is_its_kernel(monkeypatch, seed: int) -> None:
    async def story(fleet: Fleet) -> None:
        fleet.nodes.losing = fleet.rng.choice((0.0, 0.3))

        async def repeated(attempt: str) -> str:
            """Repeat a create until its outcome is known, at any gateway."""
            while True:
                _, outcome = await fleet.rng.choice(fleet.gateways).create("k1", attempt=attempt)
                if outcome in (*NODES, "KernelConflict"):
                    return outcome

        attempts = ("a" * 16, "b" * 16, "")
        outcomes = await asyncio.gather(*(fleet.sometime(repeated(a)) for a in attempts))
        fleet.nodes.losing = 0.0
        ((node, kernel_id),) = fleet.nodes.attempts
        creator = fleet.nodes.attempts[node, kernel_id]
        for attempt, outcome in zip(attempts, outcomes, strict=True):
            assert outcome == (node if attempt in ("", creator) else "KernelConflict")
            for gateway in fleet.gateways:
                assert (await gateway.create("k1", attempt=attempt))[1] == outcome
        await fleet.rest(60)
        assert fleet.untrue() == []

    run(seed, story, monkeypatch)


def test_unmarked_repetition_has_the_attempt_of_its_route(monkeypatch) -> None:
    async def story(fleet: Fleet) -> None:
        fleet.nodes.swallowing = set(NODES)
        assert (await fleet.one.create("k1", attempt="a" * 16))[1] == "OutcomeUnknown"
        fleet.nodes.swallowing = set()
        status, node = await fleet.other.create("k1")
        assert (status, fleet.nodes.attempts) == (200, {(node, "k1"): "a" * 16})
        assert await fleet.one.create("k1", attempt="a" * 16) == (200, node)

    run(1, story, monkeypatch)


@given(SEEDS)
@RULES
def test_delete_answered_204_frees_the_id_everywhere(monkeypatch, seed: int) -> None:
    async def story(fleet: Fleet) -> None:
        assert (await fleet.one.create("k1"))[0] == 201
        first, second = await asyncio.gather(
            fleet.other.delete("k1"), fleet.sometime(fleet.one.delete("k1"))
        )
        assert 204 in (first[0], second[0])
        for gateway in fleet.gateways:
            assert (await gateway.create("k1", f"another {id(gateway)}"))[0] == 201
            assert await gateway.delete("k1") == (204, "")
        assert fleet.store.rows == {}

    run(seed, story, monkeypatch)


@given(SEEDS)
@RULES
def test_routes_are_true_three_minutes_after_any_failure(monkeypatch, seed: int) -> None:
    async def story(fleet: Fleet) -> None:
        rng = fleet.rng
        fleet.nodes.losing = rng.choice((0.0, 0.1))
        fleet.nodes.room = {name: rng.choice((1, 2, 100)) for name in NODES}

        async def call() -> None:
            for _ in range(6):
                gateway, name = rng.choice(fleet.gateways), f"k{rng.randrange(3)}"
                what = rng.choice((gateway.create, gateway.create, gateway.delete))
                await what(name)
                if rng.random() < 0.2:
                    fleet.nodes.prune(f"k{rng.randrange(3)}")
                if rng.random() < 0.1:
                    fleet.nodes.freeze(rng.choice(NODES), rng.uniform(0, 60))

        await asyncio.gather(*(fleet.sometime(call()) for _ in range(4)))
        fleet.nodes.losing = 0.0
        await asyncio.sleep(60)  # until the last node has thawed
        await fleet.rest()
        assert fleet.untrue() == []

    run(seed, story, monkeypatch)


def test_id_on_a_healthy_node_is_freed_despite_a_frozen_one(monkeypatch) -> None:
    async def story(fleet: Fleet) -> None:
        for number in range(20):
            assert (await fleet.one.create(f"k{number}"))[0] == 201
        fleet.nodes.frozen = {"n2"}
        healthy = list(fleet.nodes.kernels["n1"])
        fleet.nodes.kernels["n1"].clear()
        await fleet.rest(150)
        assert not fleet.store.rows.keys() & set(healthy)
        assert len(fleet.store.rows) == len(fleet.nodes.kernels["n2"])

    run(1, story, monkeypatch)


@pytest.mark.parametrize("progress", RouteProgress)
def test_kernel_outlives_a_restored_route_to_another_node(monkeypatch, progress) -> None:
    """The first kernel is deleted, the second runs; etcd goes back to the route of the first."""

    async def story(fleet: Fleet) -> None:
        past = msgspec.json.encode(route("k1", "n1", progress=progress)), 1
        fleet.nodes.room["n1"] = 0
        assert await fleet.one.create("k1", "another") == (201, "n2")
        fleet.store.rows["k1"] = past
        await fleet.one.placer.close()
        await fleet.rest(150)
        assert list(fleet.nodes.kernels["n2"]) == ["k1"]
        assert fleet.untrue() == []
        assert await fleet.other.delete("k1") == (204, "")
        await fleet.rest(60)
        assert fleet.store.rows == {}

    run(1, story, monkeypatch)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_kernel_of_a_lost_route_is_surplus_if_another_runs(monkeypatch, is_frozen) -> None:
    async def story(fleet: Fleet) -> None:
        fleet.nodes.room["n1"] = 0
        assert await fleet.one.create("k1") == (201, "n2")
        fleet.store.rows["k1"] = msgspec.json.encode(route("k1", "n1")), 1
        fleet.nodes.kernels["n1"]["k1"] = "running"
        if is_frozen:
            fleet.nodes.freeze("n1", 60)
        await fleet.one.placer.close()
        await fleet.rest(150)
        assert list(fleet.nodes.kernels["n1"]) == ["k1"]
        assert fleet.untrue() == []

    run(1, story, monkeypatch)


def test_pruned_kernel_blocks_no_later_create(monkeypatch) -> None:
    async def story(fleet: Fleet) -> None:
        assert (await fleet.one.create("k1"))[0] == 201
        await fleet.one.placer.close()
        fleet.nodes.prune("k1")
        assert (await fleet.other.create("k1", "another"))[0] == 201
        await fleet.other.placer.close()
        assert fleet.untrue() == []

    run(1, story, monkeypatch)


def test_while_the_store_cannot_be_written_a_delete_asks_no_node(monkeypatch) -> None:
    async def story(fleet: Fleet) -> None:
        _, node = await fleet.one.create("k1")
        await fleet.one.placer.close()
        fleet.store.is_full = True
        for named in (None, node):
            assert await fleet.other.delete("k1", named) == (0, "FleetStoreUnavailable")
        assert not [asked for asked in fleet.nodes.asked if asked[1] == "DELETE"]
        assert list(fleet.nodes.kernels[node]) == ["k1"]

    run(1, story, monkeypatch)


def test_unrouted_kernel_is_deleted_only_after_a_route_write(monkeypatch) -> None:
    async def story(fleet: Fleet) -> None:
        fleet.nodes.kernels["n1"]["k1"] = "running"
        fleet.store.is_full = True
        assert await fleet.one.delete("k1", "n1") == (0, "FleetStoreUnavailable")
        assert not [asked for asked in fleet.nodes.asked if asked[1] == "DELETE"]
        fleet.store.is_full = False
        assert (await fleet.one.delete("k1", "n2"))[0] == 404
        assert await fleet.one.delete("k1", "n1") == (204, "")
        assert "k1" not in fleet.nodes.kernels["n1"]
        assert fleet.store.rows == {}

    run(1, story, monkeypatch)


@pytest.mark.parametrize(
    ("value", "is_left"),
    [(b"garbage", False), (route("k1", progress="moving"), False), (route("k1", schema=2), True),
     (route("k1", "n2", progress="moving"), True), ([1], False), (route("k2"), False)],
)  # fmt: skip
def test_an_unreadable_route_is_that_ids_trouble_alone(monkeypatch, value, is_left) -> None:
    async def story(fleet: Fleet) -> None:
        assert (await fleet.one.create("k2"))[0] == 201
        await fleet.one.placer.close()
        raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
        fleet.store.rows["k1"] = raw, 1000
        fleet.nodes.kernels["n1"]["k1"] = "running"
        for gateway in fleet.gateways:
            await gateway.sweep.run_once()
            assert await gateway.delete("k1") == (0, "RouteUnreadable")
            assert await gateway.create("k1") == (0, "RouteUnreadable")
            assert (await gateway.create("k2"))[0] == 200
        fleet.store.is_full = True
        assert await fleet.one.delete("k1", "n1") == (0, "FleetStoreUnavailable")
        assert "k1" in fleet.nodes.kernels["n1"]
        fleet.store.is_full = False
        assert await fleet.one.delete("k1", "n1") == (204, "")
        assert ("k1" in fleet.store.rows) is is_left
        if is_left:
            assert fleet.store.rows["k1"][0] == raw

    run(1, story, monkeypatch)


def test_delete_ends_soon_after_its_node_stopped_being_ready(monkeypatch) -> None:
    async def story(fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        _, node = await fleet.one.create("k1")
        await fleet.one.placer.close()
        fleet.nodes.frozen = {node}
        deleting, began = asyncio.create_task(fleet.one.delete("k1")), loop.time()
        await fleet.rest(CALL_TIMEOUT_S + 30)
        assert not deleting.done()
        heard = fleet.one.state.node(node)
        assert heard is not None
        fleet.one.state.update_node(replace(heard, status=NodeStatus.DAEMON_DOWN))
        assert await deleting == (0, "NodeUnavailable")
        assert loop.time() - began <= 2 * CALL_TIMEOUT_S + 31
        assert list(fleet.nodes.kernels[node]) == ["k1"]
        assert "k1" in fleet.store.rows

    run(1, story, monkeypatch)


def test_kernel_of_a_node_that_was_not_heard_of_is_not_unknown(monkeypatch) -> None:
    async def story(fleet: Fleet) -> None:
        _, node = await fleet.one.create("k1")
        await fleet.one.placer.close()
        fleet.other.state.forget(node)
        assert await fleet.other.delete("k1") == (0, "NodeUnavailable")
        assert await fleet.other.delete("k2", node) == (0, "UnknownNode")
        fleet.store.away = "no leader"
        assert await fleet.other.delete("k2", node) == (0, "FleetStoreUnavailable")
        assert list(fleet.nodes.kernels[node]) == ["k1"]

    run(1, story, monkeypatch)


@pytest.mark.parametrize(
    ("timeout", "patience_s"),
    [("0", 150), ("30", 180), ("-1", 150), ("1e9", 3600), ("nan", 150), ("x", 3600), (None, 3600)],
)
def test_delete_gives_a_node_the_timeout_and_a_margin(timeout, patience_s) -> None:
    assert _call_timeout({} if timeout is None else {"timeout": timeout}) == patience_s
