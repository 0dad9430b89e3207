"""A node that refuses a create leads to the next one, unless the request itself is refused."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentd.client.errors import error_from_problem
from agentd.error_codes import ERROR_CODES, Scope
from agentd_fleet.nodes.calls import NodeAnswer
from agentd_fleet.placement.attempts import PlacementUnknown, RouteTakenOver
from agentd_fleet.placement.choice import PlacementPolicy
from agentd_fleet.placement.search import FAILED_FOR_S
from agentd_fleet.store.route import KernelRoute
from fleet import simulated
from fleet.simulated import Fleet, run

PASSED_ON = sorted(c for c, row in ERROR_CODES.items() if row.scope in (Scope.NODE, Scope.MOMENT))
UNAVAILABLE = sorted(code for code, row in ERROR_CODES.items() if row.scope is Scope.MOMENT)
FINAL = ("CommandNotFound", "KernelConflict", "Forbidden", "UnknownClaim")


def creates(fleet: Fleet) -> list[str]:
    """Return the nodes that were asked for creates, and forget them."""
    nodes = [n for n, method, path in fleet.nodes.asked if method == "POST" and "dry" not in path]
    fleet.nodes.asked.clear()
    return nodes


def packed(fleet: Fleet) -> None:
    """Make n1 the first choice of both gateways."""
    for gateway in fleet.gateways:
        gateway.placer._policy = PlacementPolicy.PACK


@pytest.mark.parametrize("code", PASSED_ON)
def test_refusal_of_a_node_leads_to_the_next(monkeypatch: Any, code: str) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing["n1"] = code
        assert await fleet.one.create("k1") == (201, "n2")
        assert creates(fleet) == ["n1", "n2"]
        await fleet.rest(1)
        assert fleet.untrue() == []

    run(1, story, monkeypatch)


@pytest.mark.parametrize("code", UNAVAILABLE)
def test_unavailable_node_comes_last_for_a_minute(monkeypatch: Any, code: str) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing["n1"] = code
        assert (await fleet.one.create("k1"))[0] == 201
        creates(fleet)
        assert await fleet.one.create("k2") == (201, "n2")
        assert creates(fleet) == ["n2"]
        fleet.nodes.failing["n2"] = code
        assert (await fleet.one.create("k3"))[0] == 0
        assert creates(fleet) == ["n2", "n1"]  # the last choice is a choice
        fleet.nodes.failing.clear()
        await fleet.rest(FAILED_FOR_S)
        assert await fleet.one.create("k3") == (201, "n1")

    run(1, story, monkeypatch)


@pytest.mark.parametrize("code", ["ImageNotFound", "RuntimeFailure", "InvalidRequest", *FINAL])
def test_other_refusals_are_no_failure_of_the_node(monkeypatch: Any, code: str) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing["n1"] = code
        await fleet.one.create("k1")
        fleet.nodes.failing.clear()
        await fleet.rest(5)  # until a placement is no longer deducted from the view
        assert await fleet.one.create("k2") == (201, "n1")

    run(1, story, monkeypatch)


@pytest.mark.parametrize("code", FINAL)
def test_refusal_of_the_request_is_asked_of_one_node(monkeypatch: Any, code: str) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing["n1"] = code
        assert await fleet.one.create("k1") == (0, code)
        assert creates(fleet) == ["n1"]
        assert fleet.store.rows == {}

    run(1, story, monkeypatch)


ANSWERS = {
    "one is older": ({"n1": "InvalidRequest", "n2": "Draining"}, (201, "n3")),
    "one is older and one fails": ({"n1": "RuntimeFailure", "n2": "InvalidRequest"}, (201, "n3")),
    "one has the id": ({"n1": "RuntimeFailure", "n2": "KernelConflict"}, (201, "n3")),
    "one fails and the others have the id": (
        {"n1": "RuntimeFailure", "n2": "KernelConflict", "n3": "KernelConflict"},
        (0, "KernelConflict"),
    ),
    "one is of another version": (
        {"n1": "InvalidSlotCombination", "n2": "InvalidSlotAmount"},
        (201, "n3"),
    ),
    "it is invalid": (dict.fromkeys(("n1", "n2", "n3"), "InvalidRequest"), (0, "InvalidRequest")),
}


@pytest.mark.parametrize(("codes", "outcome"), ANSWERS.values(), ids=ANSWERS)
def test_refusal_of_one_node_outweighs_no_agreement(
    monkeypatch: Any, codes: dict[str, str], outcome: tuple[int, str]
) -> None:
    """Nodes refuse dry runs as well as creates."""
    monkeypatch.setattr(simulated, "NODES", ("n1", "n2", "n3"))

    async def story(fleet: Fleet) -> None:
        packed(fleet)
        created = fleet.nodes._created

        def refused(node: str, name: str, path: str) -> NodeAnswer:
            if node in codes:
                return simulated._refusal(codes[node], ERROR_CODES[codes[node]].status)
            return created(node, name, path)

        monkeypatch.setattr(fleet.nodes, "_created", refused)
        for number in range(5):
            assert await fleet.one.create(f"k{number}") == outcome
            assert len(creates(fleet)) <= 2
        assert outcome[0] == 201 or fleet.store.rows == {}

    run(1, story, monkeypatch)


AGREED = {"KernelConflict": (0, "KernelConflict")}
"""A conflict is about the id, such as that of a kernel that was deleted during its create."""


@pytest.mark.parametrize("code", ["InvalidSlotCombination", "InvalidRequest", *FINAL])
def test_refusal_of_a_create_outweighs_no_agreement(monkeypatch: Any, code: str) -> None:
    """The first node is full, the others agree, and the second one then refuses."""
    monkeypatch.setattr(simulated, "NODES", ("n1", "n2", "n3"))

    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.room["n1"] = 0
        fleet.nodes.failing = {"n2": code}
        created = fleet.nodes._created

        def agreed(node: str, name: str, path: str) -> NodeAnswer:
            if node == "n2" and "dry_run" in path:
                return NodeAnswer(200, {}, b"{}")
            return created(node, name, path)

        monkeypatch.setattr(fleet.nodes, "_created", agreed)
        assert await fleet.one.create("k1") == AGREED.get(code, (201, "n3"))
        assert ("n3" in creates(fleet)) is (code not in AGREED)

    run(1, story, monkeypatch)


@pytest.mark.parametrize("code", ["InvalidRequest", "CommandNotFound", "NotReady"])
def test_request_that_one_node_refuses_runs_at_another(monkeypatch: Any, code: str) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing, fleet.nodes.scope = {"n1": code}, "node"
        assert await fleet.one.create("k1") == (201, "n2")
        fleet.nodes.failing["n2"] = code
        assert await fleet.one.create("k2") == (0, code)
        assert sorted(creates(fleet)) == ["n1", "n1", "n2", "n2"]
        assert fleet.one.placer._failed.node_ids() == frozenset()
        assert fleet.store.rows.keys() == {"k1"}

    run(1, story, monkeypatch)


@pytest.mark.parametrize("code", ["Internal", "OutcomeUnknown"])
def test_unknown_outcome_keeps_its_route(monkeypatch: Any, code: str) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing["n1"] = code
        assert await fleet.one.create("k1") == (0, code)
        assert creates(fleet) == ["n1"]
        assert fleet.store.rows.keys() == {"k1"}

    run(1, story, monkeypatch)


def test_node_whose_answer_was_lost_comes_last(monkeypatch: Any) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.losing = 1.0
        assert await fleet.one.create("k1") == (0, "OutcomeUnknown")
        fleet.nodes.losing = 0.0
        assert await fleet.one.create("k2") == (201, "n2")
        assert fleet.store.rows.keys() == {"k1", "k2"}

    run(1, story, monkeypatch)


AFTER_A_LOST_ANSWER = ("Draining", "NotReady", "StateUnavailable", "no space", "another gateway")


@pytest.mark.parametrize("then", AFTER_A_LOST_ANSWER)
def test_create_whose_answer_was_lost_stays_unknown(monkeypatch: Any, then: str) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.losing = 1.0
        creating = asyncio.create_task(fleet.one.create("k1"))
        await asyncio.sleep(0.2)
        assert "k1" in fleet.nodes.kernels["n1"]
        if then == "no space":
            fleet.store.is_full = True
        elif then == "another gateway":
            fleet.store.rows["k1"] = (fleet.store.rows["k1"][0], 1000)
        else:
            fleet.nodes.losing, fleet.nodes.failing = 0.0, {"n1": then}
        assert await creating == (0, "OutcomeUnknown")
        assert fleet.nodes.kernels["n2"] == {}
        fleet.store.is_full, fleet.nodes.losing, fleet.nodes.failing = False, 0.0, {}
        assert await fleet.one.create("k1") == (200, "n1")

    run(1, story, monkeypatch)


REPEATED = {
    "its node loses answers": lambda fleet: setattr(fleet.nodes, "losing", 1.0),
    "its node was forgotten": lambda fleet: fleet.one.state.forget("n1"),
    "its node starts": lambda fleet: fleet.nodes.failing.update(n1="NotReady"),
    "its route cannot be written": lambda fleet: setattr(fleet.store, "is_full", True),
}


@pytest.mark.parametrize("is_placed", [True, False], ids=["placed", "placing"])
@pytest.mark.parametrize("happens", REPEATED.values(), ids=REPEATED)
def test_repeated_create_of_a_kernel_is_never_told_to_move(
    monkeypatch: Any, happens: Callable[[Fleet], object], *, is_placed: bool
) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        if not is_placed:
            monkeypatch.setattr(fleet.one.placer, "_confirm_soon", lambda _: None)
        assert await fleet.one.create("k1") == (201, "n1")
        await fleet.one.placer.close()
        happens(fleet)
        assert (await fleet.one.create("k1"))[1] in ("OutcomeUnknown", "n1")
        assert fleet.nodes.kernels["n2"] == {}

    run(1, story, monkeypatch)


@pytest.mark.parametrize("kind", [PlacementUnknown, RouteTakenOver])
def test_unknown_placement_says_so_to_clients_as_well(kind: type[PlacementUnknown]) -> None:
    route = KernelRoute(kernel_id="k1", node_id="n1", agent_id="main", request_hash="h", owner="o")
    lost = kind(route, "lost")
    assert lost.facts() == {"kernel_id": "k1", "node_id": "n1"}
    content = {"code": lost.code, "detail": str(lost), "status": 503, **lost.members()}
    for error in (lost, error_from_problem(content)):
        assert (error.scope, error.facts()["kernel_id"]) == (Scope.UNKNOWN, "k1")


def test_image_that_no_node_can_pull_is_no_failed_node(monkeypatch: Any) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing = dict.fromkeys(("n1", "n2"), "ImageUnavailable")
        assert await fleet.one.create("k1") == (0, "ImageUnavailable")
        assert fleet.one.placer._failed.node_ids() == frozenset()

    run(1, story, monkeypatch)


def test_suspended_gateway_is_no_failed_node(monkeypatch: Any) -> None:
    async def story(fleet: Fleet) -> None:
        put_route = fleet.store.put_route

        async def put_route_slowly(route: KernelRoute, expected: int) -> int | None:
            revision = await put_route(route, expected)
            await asyncio.sleep(fleet.pace.send_within_s + 1)
            return revision

        monkeypatch.setattr(fleet.store, "put_route", put_route_slowly)
        assert await fleet.one.create("k1") == (0, "OutcomeUnknown")
        assert creates(fleet) == []
        assert fleet.one.placer._failed.node_ids() == frozenset()

    run(1, story, monkeypatch)


REFUSED_BY_ALL = {
    "no node has the image": ("ImageNotFound", "ImageNotFound", "ImageNotFound"),
    "one node could try again": ("ImageNotFound", "ImageUnavailable", "ImageUnavailable"),
    "the disks are full": ("StateUnavailable", "StateUnavailable", "StateUnavailable"),
    "the engines fail": ("RuntimeFailure", "RuntimeFailure", "RuntimeFailure"),
    "a full node beside a bad name": ("ImageNotFound", "InsufficientResource", "ImageNotFound"),
    "both are full": ("InsufficientResource", "InsufficientResource", "InsufficientResource"),
    "both stop": ("Draining", "NotReady", "NodeUnavailable"),
}


@pytest.mark.parametrize(("first", "second", "told"), REFUSED_BY_ALL.values(), ids=REFUSED_BY_ALL)
def test_refusal_of_all_has_the_name_of_its_cause(
    monkeypatch: Any, first: str, second: str, told: str
) -> None:
    async def story(fleet: Fleet) -> None:
        packed(fleet)
        fleet.nodes.failing = {"n1": first, "n2": second}
        assert await fleet.one.create("k1") == (0, told)
        assert fleet.store.rows == {}

    run(1, story, monkeypatch)
