"""Candidates are exactly the suitable agents, in the promised order; others have a reason."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.slots import ONE, ResourceSlots
from agentd.errors import InsufficientResource, NodeUnavailable
from agentd_fleet.placement.choice import (
    SAMPLE_SIZES,
    Candidate,
    Constraints,
    PlacementPolicy,
    choose_candidates,
    classify_rejections,
)
from agentd_fleet.placement.refusals import refusal_error
from agentd_fleet.view.fleet_view import FleetNode, FleetView, NodeStatus, Offer
from fleet.view.test_fleet_view import GIB, fleet, gpu_node, node, slot


def fits(request: ResourceSlots, free: ResourceSlots) -> bool:
    return all(amount <= free[name] for name, amount in request.items())


def test_refusals_are_told_by_class() -> None:
    many = [node(f"no{n}") for n in range(7)]
    view = fleet(
        *many,
        node("full", slot("tpu.chip"), tpu_chip=0),
        node("away", slot("tpu.chip"), status=NodeStatus.LOST),
        replace(node("down", slot("tpu.chip")), status=NodeStatus.DAEMON_DOWN),
    )
    rows = classify_rejections(view, ResourceSlots({"tpu.chip": ONE}), Constraints())
    assert {row.reason: row.count for row in rows} == {
        "lack tpu.chip": 7,
        "full": 1,
        "lost": 1,
        "daemon-down": 1,
    }
    assert len(rows[0].nodes) == 5


def test_refusal_shows_bytes_for_people_in_its_text_alone() -> None:
    view = fleet(gpu_node("a", 1, 80, cuda_mem=10 * GIB))
    wanted = ResourceSlots({"cuda.mem": 20 * GIB})
    refused = refusal_error(view, wanted, Constraints(), [])
    assert str(refused).startswith("insufficient cuda.mem: requested 20 GiB; ")
    assert isinstance(refused, InsufficientResource)
    assert (refused.requested, refused.free) == (str(20 * GIB), str(10 * GIB))


AMOUNTS = st.dictionaries(
    st.sampled_from(["cpu", "cuda.device", "tpu.chip"]), st.integers(0, 4), max_size=3
).map(ResourceSlots)
MODELS = st.sets(st.sampled_from(["H100", "MI300X"])).map(frozenset)
TYPES = {name: slot(name) for name in ("cpu", "cuda.device", "tpu.chip")}
ODD = {**TYPES, "tpu.chip": slot("tpu.chip", ONE // 2)}
VIEWS = st.lists(
    st.builds(
        lambda number, types, offers, status, **more: FleetNode(
            f"n{number}", types, offers, status, **more
        ),
        st.integers(0, 9),
        st.sampled_from([TYPES, TYPES, TYPES, {"cpu": TYPES["cpu"]}, ODD]),
        st.dictionaries(st.sampled_from("ab"), st.builds(Offer, AMOUNTS, AMOUNTS)),
        st.sampled_from([NodeStatus.READY] * 3 + [NodeStatus.LOST]),
        labels=st.sampled_from([{}, {"zone": "x"}]),
        exclusion_reason=st.sampled_from(["", "", "", "too new"]),
        models=st.dictionaries(st.sampled_from("ab"), MODELS),
    ),
    max_size=12,
).map(lambda nodes: FleetView(slot_types=TYPES).with_changes(nodes, revision=1))
CONSTRAINTS = st.builds(
    Constraints,
    st.none() | st.sets(st.sampled_from([f"n{n}" for n in range(11)])).map(frozenset),
    st.none() | st.sets(st.sampled_from("ab")).map(frozenset),
    st.sampled_from([{}, {}, {"zone": "x"}]),
    st.none() | MODELS,
)


def fitting(view: FleetView, request: ResourceSlots, wanted: Constraints) -> list[Candidate]:
    """Return the suitable agents, found by checking all."""
    return [
        Candidate(found.node_id, agent)
        for found in view.nodes.values()
        for agent, offer in found.offers.items()
        if found.status is NodeStatus.READY
        and not found.exclusion_reason
        and fits(request, view.common_slots(found, offer.free))
        and (wanted.nodes is None or found.node_id in wanted.nodes)
        and (wanted.agents is None or agent in wanted.agents)
        and found.has_labels(wanted.labels)
        and (wanted.models is None or wanted.models & found.models.get(agent, frozenset()))
    ]


@given(
    VIEWS,
    AMOUNTS,
    CONSTRAINTS,
    st.sampled_from(PlacementPolicy),
    st.integers(1, 20),
    st.integers(),
)
def test_candidates_are_of_those_that_fit_and_as_many_as_wanted(
    view, request, wanted, policy, most, seed
) -> None:
    found = choose_candidates(view, request, wanted, policy, random.Random(seed), most)
    everyone = fitting(view, request, wanted)
    assert len(found) == len(set(found)) == min(most, len(everyone))
    assert set(found) <= set(everyone)
    allowed = [
        found
        for node_id, found in view.nodes.items()
        if (wanted.nodes is None or node_id in wanted.nodes) and found.has_labels(wanted.labels)
    ]
    listed = sum(
        wanted.agents is None or agent in wanted.agents
        for found in allowed
        for agent in found.offers
    )
    listed += sum(found.status is NodeStatus.LOST and not found.offers for found in allowed)
    rows = classify_rejections(view, request, wanted)
    assert len(everyone) + sum(row.count for row in rows) == listed


@given(VIEWS, AMOUNTS, st.sampled_from(PlacementPolicy), st.integers(1, 20), st.integers())
def test_sample_with_too_few_suitable_agents_is_extended(view, request, policy, most, seed) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SAMPLE_SIZES, policy, 2)
        found = choose_candidates(view, request, Constraints(), policy, random.Random(seed), most)
    everyone = fitting(view, request, Constraints())
    assert len(found) == len(set(found)) == min(most, len(everyone))
    assert set(found) <= set(everyone)


@given(VIEWS, AMOUNTS, st.sampled_from(PlacementPolicy), st.integers(1, 20), st.integers())
def test_nodes_that_failed_are_the_last_choice(view, request, policy, most, seed) -> None:
    last = {f"n{number}" for number in range(0, 10, 2)}
    found = choose_candidates(
        view, request, Constraints(), policy, random.Random(seed), most, last=last
    )
    everyone = fitting(view, request, Constraints())
    assert len(found) == len(set(found)) == min(most, len(everyone))
    are_last = [each.node_id in last for each in found]
    assert are_last == sorted(are_last)
    assert sum(not it for it in are_last) == min(
        most, sum(each.node_id not in last for each in everyone)
    )


@given(VIEWS, st.integers(0, 4))
def test_pack_chooses_the_least_left_over(view, amount) -> None:
    request = ResourceSlots({"tpu.chip": amount})
    found = choose_candidates(
        view, request, Constraints(), PlacementPolicy.PACK, random.Random(1), 100
    )
    free = [view.nodes[each.node_id].offers[each.agent_id].free["tpu.chip"] for each in found]
    assert free == sorted(free) if amount else found == sorted(found)


def test_pack_compares_all_nodes_if_none_of_a_sample_has_room() -> None:
    chips = [0, *range(1, 13)]  # the first is drawn first, the second last
    nodes = [node(f"n{free:02}", slot("tpu.chip"), tpu_chip=free) for free in chips]
    request = ResourceSlots({"tpu.chip": ONE})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SAMPLE_SIZES, PlacementPolicy.PACK, 1)
        patch.setattr(random.Random, "random", lambda _self: 0.0)
        choice = random.Random()
        found = choose_candidates(
            fleet(*nodes), request, Constraints(), PlacementPolicy.PACK, choice
        )
    assert [each.node_id for each in found] == [f"n{free:02}" for free in range(1, 9)]


def test_pack_fills_the_scarcest_slot_first() -> None:
    view = fleet(
        node("a", slot("tpu.chip"), cpu=2, tpu_chip=4),
        node("b", slot("tpu.chip"), cpu=8, tpu_chip=2),
        node("c", slot("tpu.chip"), cpu=6, tpu_chip=2),
    )
    request = ResourceSlots({"cpu": ONE, "tpu.chip": 2 * ONE})
    found = choose_candidates(view, request, Constraints(), PlacementPolicy.PACK, random.Random(1))
    assert [each.node_id for each in found] == ["c", "b", "a"]


def test_by_chance_each_that_fits_is_as_likely_as_the_others() -> None:
    view = fleet(*(node(f"n{n}", slot("tpu.chip"), tpu_chip=n) for n in range(6)))
    choice, request = random.Random(5), ResourceSlots({"tpu.chip": 2 * ONE})
    first = [
        choose_candidates(view, request, Constraints(), PlacementPolicy.RANDOM, choice, 1)[
            0
        ].node_id
        for _ in range(4000)
    ]
    assert {each: round(first.count(each) / 400) / 10 for each in set(first)} == dict.fromkeys(
        ["n2", "n3", "n4", "n5"], pytest.approx(0.25, abs=0.05)
    )


def test_missing_model_and_withheld_node_have_own_reasons() -> None:
    view = fleet(
        replace(node("a", slot("tpu.chip")), models={"main": frozenset({"v5e", "v6e"})}),
        replace(node("b", slot("tpu.chip")), models={"main": frozenset({"v4"})}),
        node("c", slot("tpu.chip")),
        replace(
            node("d", slot("tpu.chip")), exclusion_reason="schema 2 is newer than this gateway's"
        ),
        node("e", slot("tpu.chip"), tpu_chip=0),
    )
    request, wanted = ResourceSlots({"tpu.chip": ONE}), Constraints(models=frozenset({"v6e"}))
    found = choose_candidates(view, request, wanted, PlacementPolicy.PACK, random.Random(1))
    assert found == [Candidate("a", "main")]
    assert {
        row.reason: (row.count, row.nodes) for row in classify_rejections(view, request, wanted)
    } == {
        "no device of model v6e": (3, ("b", "c", "e")),
        "schema 2 is newer than this gateway's": (1, ("d",)),
    }
    too_much = classify_rejections(view, ResourceSlots({"tpu.chip": 9 * ONE}), Constraints())
    assert too_much[0].reason == "too small for tpu.chip"


def test_node_excluded_by_its_report_lacks_no_resources() -> None:
    view = fleet(replace(node("a"), exclusion_reason="unreadable: x"), node("b", cpu=0))
    for name, kind in (("a", NodeUnavailable), ("b", InsufficientResource)):
        constraints = Constraints(nodes=frozenset({name}))
        assert isinstance(refusal_error(view, ResourceSlots({"cpu": ONE}), constraints, []), kind)


@pytest.mark.parametrize(
    ("status", "reason"), [(NodeStatus.NEWER, "newer schema"), (NodeStatus.LOST, "lost")]
)
def test_nodes_with_unknown_agents_are_one_unnamed_class(status: NodeStatus, reason: str) -> None:
    view = FleetView().with_changes(
        [FleetNode("hidden", {}, {}, status, exclusion_reason="so")], revision=1
    )
    for agents, nodes in ((None, ("hidden",)), (frozenset({"main"}), ())):
        refused = refusal_error(view, ResourceSlots(), Constraints(agents=agents), [])
        assert isinstance(refused, NodeUnavailable)
        assert refused.content["classes"] == [{"reason": reason, "count": 1, "nodes": [*nodes]}]
