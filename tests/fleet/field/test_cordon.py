"""An operator keeps new kernels off a node, whatever the node's state; nothing else changes."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agentd.core.access import Caller, Role
from agentd.core.slots import ONE, ResourceSlots
from agentd.errors import AgentdError, InsufficientResource, NodeUnavailable
from agentd.http.prometheus import render_exposition
from agentd_fleet.gateway.metrics import GatewayCounts, fleet_metrics
from agentd_fleet.gateway.views import node_view
from agentd_fleet.nodes.calls import NodeAnswer
from agentd_fleet.placement.choice import (
    Constraints,
    NodeCordoned,
    PlacementPolicy,
    choose_candidates,
    classify_rejections,
)
from agentd_fleet.placement.refusals import refusal_error
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import Cordon, FleetNode, FleetView, NodeRuntime, NodeStatus
from fleet import simulated
from fleet.simulated import Fleet, run
from fleet.view.test_fleet_view import fleet, node

ROOT = Caller("root", Role.ADMIN)
DISK = Cordon("new disk", "ann", "2026-01-01T12:00:00+00:00")
ONE_CPU = ResourceSlots({"cpu": ONE})


def ready(name: str, cpu: int = 4) -> FleetNode:
    return replace(node(name, cpu=cpu), url=f"https://{name}:6001")


@dataclass(frozen=True)
class Case:
    """Nodes of a fleet, and the outcome of a request for one CPU."""

    nodes: list[FleetNode]
    chosen: set[str] = field(default_factory=set)
    named: str = ""
    error: type[AgentdError] | None = None
    text: str = ""


CORDONED = replace(ready("c"), cordon=DISK)
CASES = {
    "others have room": Case([CORDONED, ready("a")], {"a"}),
    "it is named": Case([CORDONED, ready("a")], set(), "c", NodeUnavailable, "cordoned: new disk"),
    "no reason was given": Case(
        [replace(CORDONED, cordon=Cordon())], set(), "c", NodeUnavailable, "1 cordoned"
    ),
    "it is down, too": Case(
        [replace(CORDONED, status=NodeStatus.DAEMON_DOWN)], set(), "", NodeUnavailable, "new disk"
    ),
    "it is lost, and its agents are unknown": Case(
        [replace(CORDONED, status=NodeStatus.LOST, offers={}), ready("a")],
        set(),
        "c",
        NodeUnavailable,
        "1 cordoned: new disk",
    ),
    "the others are full": Case(
        [CORDONED, ready("a", 0)], set(), "", InsufficientResource, "cordoned: new disk"
    ),
    "all are cordoned": Case(
        [CORDONED, replace(CORDONED, node_id="d")], set(), "", NodeUnavailable, "2 cordoned"
    ),
}


@pytest.mark.parametrize("policy", PlacementPolicy)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cordoned_node_gets_no_kernel(case: Case, policy: PlacementPolicy) -> None:
    view = fleet(*case.nodes)
    constraints = Constraints(nodes=frozenset({case.named}) if case.named else None)
    chosen = choose_candidates(view, ONE_CPU, constraints, policy, random.Random(1))
    assert {candidate.node_id for candidate in chosen} == case.chosen
    if case.error is not None:
        error = refusal_error(view, ONE_CPU, constraints, [])
        assert (type(error), case.text in str(error)) == (case.error, True), error


def test_many_cordons_hide_no_node_with_room() -> None:
    view = fleet(*(replace(CORDONED, node_id=f"c{n}") for n in range(600)), ready("a"))
    for policy in PlacementPolicy:
        chosen = choose_candidates(view, ONE_CPU, Constraints(), policy, random.Random(2))
        assert [candidate.node_id for candidate in chosen] == ["a"]
    (rows,) = classify_rejections(view, ONE_CPU, Constraints(nodes=frozenset({"c1"})))
    assert (rows.reason, rows.count, rows.nodes) == ("cordoned: new disk", 1, ("c1",))


def test_cordon_during_a_create_holds_for_its_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node fails after a long pull, in which an operator cordons the other one."""

    async def story(fleet: Fleet) -> None:
        fleet.one.placer._policy = PlacementPolicy.PACK
        fleet.nodes.failing["n1"] = "ImageUnavailable"
        answer = fleet.nodes._created

        def cordon_first(node: str, name: str, path: str) -> NodeAnswer:
            if "dry_run" not in path:
                fleet.one.state.set_cordon("n2", DISK)
            return answer(node, name, path)

        monkeypatch.setattr(fleet.nodes, "_created", cordon_first)
        assert await fleet.one.create("k1") == (0, "ImageUnavailable")
        assert fleet.nodes.kernels == {"n1": {}, "n2": {}}
        fleet.one.state.set_cordon("n2", None)
        fleet.nodes.failing.clear()
        assert (await fleet.one.create("k1"))[0] == 201

    run(1, story, monkeypatch)


def test_node_cordoned_during_a_pull_gets_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull ends with a refusal, long after the request took its view of the fleet."""
    monkeypatch.setattr(simulated, "NODES", ("n1", "n2", "n3"))

    async def story(fleet: Fleet) -> None:
        gateway = fleet.one
        gateway.placer._policy = PlacementPolicy.PACK
        fleet.nodes.pull_s, fleet.nodes.failing["n1"] = 60.0, "RuntimeUnavailable"
        creating = asyncio.create_task(gateway.create("k1"))
        await asyncio.sleep(10)
        gateway.state.set_cordon("n2", DISK)
        assert await creating == (201, "n3")
        assert not gateway.placer._failed.is_suspect("n2")

    run(1, story, monkeypatch)


def test_cordon_after_the_view_has_its_reason_in_the_refusal() -> None:
    view = fleet(ready("c"))
    refused = [("c", NodeCordoned(CORDONED))]
    error = refusal_error(view, ONE_CPU, Constraints(nodes=frozenset({"c"})), refused)
    assert isinstance(error, NodeUnavailable)
    assert "1 cordoned: new disk" in str(error)


async def test_cordon_stays_over_reports_and_losses() -> None:
    state = FleetState()
    state.set_cordon("a", DISK)
    for change in ({}, {"status": NodeStatus.DAEMON_DOWN}, {"status": NodeStatus.LOST}, {}):
        state.update_node(replace(ready("a"), **change))
        assert state.view.nodes["a"].cordon == DISK
    assert state.view.node_state("a") == "ready"
    state.set_cordon("a", None)
    assert state.view.nodes["a"].cordon is None


REASONS = {
    "nothing": ({}, "", 1),
    "a cordon": ({"cordon": DISK}, "", 1),
    "unreadable": ({"exclusion_reason": "unreadable: no id"}, "unreadable: no id", 0),
    "no engine": (
        {"runtime": NodeRuntime("docker", "unavailable")}, "runtime docker is unavailable", 0
    ),
    "an engine that starts": ({"runtime": NodeRuntime("docker", "starting")}, "", 1),
    "an expired certificate": (
        {"unreachable": "certificate has expired"}, "unreachable: certificate has expired", 0
    ),
    "a loss": ({"status": NodeStatus.LOST}, "", 0),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason", "usable"), REASONS.values(), ids=REASONS)
def test_reason_and_metric_say_whether_a_node_is_usable(
    change: dict[str, object], reason: str, usable: int
) -> None:
    view = fleet(replace(ready("a"), **change))
    assert node_view(view, view.nodes["a"], None)["reason"] == reason
    assert f'agentd_fleet_node_usable{{node_id="a"}} {usable}.0' in scrape(view, ROOT)


async def test_unavailable_runtime_is_logged_once() -> None:
    state, down = FleetState(), NodeRuntime("docker", "unavailable")
    with capture_logs() as logged:
        for runtime in (down, down, NodeRuntime("docker", "available"), down):
            state.update_node(replace(ready("a"), runtime=runtime))
            state.mark_lost("a", 1.0)
    assert [row["reason"] for row in logged] == ["runtime docker is unavailable"] * 2


def test_metric_of_a_node_is_for_callers_that_see_it() -> None:
    view = fleet(ready("a"))
    for agents, is_shown in ((None, True), ({*view.nodes["a"].offers}, True), ({"x"}, False)):
        caller = Caller("eye", Role.READ, None if agents is None else frozenset(agents))
        assert ('node_id="a"' in scrape(view, caller)) is is_shown


def scrape(view: FleetView, caller: Caller) -> str:
    metrics = fleet_metrics(view, caller, GatewayCounts(), is_live=True)
    return render_exposition(metrics).decode()
