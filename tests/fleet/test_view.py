"""Slot types accumulate and merge, a missing slot is zero, sums are exact; one view each."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.slots import BUILT_IN, ONE, ResourceSlots, SlotKind, SlotType
from agentd.errors import UnsupportedResource
from agentd_fleet.candidates import Constraints, Policy, asked, candidates, unfit
from agentd_fleet.view import FleetNode, FleetView, NodeStatus, Offer, Use, is_same

NAMES = ("cuda.device", "cuda.shares", "rocm.device", "tpu.chip")
QUANTA = (ONE, ONE // 100)


def slot(name: str, quantum: int = ONE, kind: SlotKind = SlotKind.COUNT) -> SlotType:
    return SlotType(name, kind, quantum)


def node(node_id: str, *types: SlotType, status: NodeStatus = NodeStatus.READY, **free: int):
    """A node with one agent that has 8 of each of its slots, and of it so much free."""
    known = {item.name: item for item in (*BUILT_IN, *types)}
    capacity = ResourceSlots(dict.fromkeys(known, 8 * ONE))
    left = {**capacity, **{name.replace("_", "."): n * ONE for name, n in free.items()}}
    offers = {"main": Offer(capacity, ResourceSlots(left))}
    return FleetNode(node_id, known, offers, status)


def fleet(*nodes: FleetNode) -> FleetView:
    """The view after these nodes were heard of, in this order, each teaching what is new."""
    view = FleetView()
    for number, found in enumerate(nodes, 1):
        for learned in view.learned(found):
            view = view.with_slot_type(learned, number)
        view = view.with_node(found, number)
    return view


NODES = st.lists(
    st.builds(
        lambda number, types: node(f"n{number}", *(slot(*item) for item in types.items())),
        st.integers(0, 6),
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from(QUANTA), max_size=3),
    ),
    max_size=12,
)


@given(NODES)
def test_what_any_node_ever_offered_is_known_by_its_first_definition(nodes) -> None:
    first: dict[str, SlotType] = {}
    for found in nodes:
        for name, item in found.slot_types.items():
            first.setdefault(name, item)
    view = fleet(*nodes)
    assert view.slot_types == first
    for found in list(view.nodes.values()):
        view = view.without_node(found.node_id, 99)
    assert view.slot_types == first
    assert view.statistics() == dict.fromkeys(first, Use())


@given(NODES, st.randoms(use_true_random=False))
def test_with_the_definitions_settled_the_order_of_arrival_does_not_matter(nodes, rng) -> None:
    """Which definition is the first is the store's to say; all else follows from what is there."""
    settled = FleetView(slot_types=fleet(*nodes).slot_types)
    last = {found.node_id: found for found in nodes}
    views = []
    for _ in range(2):
        order = list(last.values())
        rng.shuffle(order)
        view = settled
        for found in order:
            view = view.with_node(found, 1)
        views.append(view)
    one, other = views
    assert one.statistics() == other.statistics()
    assert one.conflicts == other.conflicts
    states = [{node_id: view.state_of(node_id) for node_id in view.nodes} for view in views]
    assert states[0] == states[1]


@given(NODES)
def test_sums_are_those_of_the_parts_and_what_is_meant_differently_is_in_none(nodes) -> None:
    view = fleet(*nodes)
    parts = [view.statistics([node_id]) for node_id in view.nodes]
    for name in view.slot_types:
        assert view.statistics()[name] == sum((part[name] for part in parts), Use())
    for node_id, names in view.conflicts.items():
        for name in names:
            assert view.statistics([node_id])[name] == Use()
            mine, theirs = view.nodes[node_id].slot_types[name], view.slot_types[name]
            assert not is_same(mine, theirs)


@given(NODES, st.sampled_from(NAMES), st.integers(1, 9), st.sampled_from(Policy))
def test_every_candidate_has_what_is_asked_and_every_other_a_reason(
    nodes, name, count, policy
) -> None:
    view = fleet(*nodes)
    request = ResourceSlots({name: count * ONE})
    found = candidates(view, request, Constraints(), policy, random.Random(7))
    for candidate in found:
        chosen = view.nodes[candidate.node_id]
        assert request <= view.understood(chosen, chosen.offers[candidate.agent_id].free)
    agents = sum(len(each.offers) for each in view.nodes.values())
    assert len(found) + sum(row.agents for row in unfit(view, request, Constraints())) == agents


def test_mixed_plugins_live_in_one_fleet_and_a_missing_slot_is_zero() -> None:
    view = fleet(node("a", slot("cuda.device")), node("b", slot("rocm.device")), node("c"))
    assert set(view.slot_types) == {"cpu", "mem", "cuda.device", "rocm.device"}
    assert view.statistics()["cuda.device"] == Use(8 * ONE, 8 * ONE)
    assert view.statistics(["c"])["cuda.device"] == Use()
    assert view.statistics()["cpu"].capacity == 3 * 8 * ONE


def test_a_slot_that_no_node_ever_had_is_refused_with_those_there_are() -> None:
    view = fleet(node("a", slot("cuda.device")))
    with pytest.raises(UnsupportedResource) as refused:
        asked(view, {"tpu.chip": 1, "cuda.device": 1})
    assert (refused.value.slots, "cuda.device" in refused.value.known) == (["tpu.chip"], True)
    assert asked(view, {"tpu.chip": 0, "cuda.device": 1})["cuda.device"] == ONE


def test_a_node_that_means_something_else_is_left_out_for_that_slot_alone() -> None:
    view = fleet(
        node("a", slot("cuda.shares", ONE // 100)),
        node("b", slot("cuda.shares", ONE // 10), slot("tpu.chip")),
    )
    assert (view.state_of("a"), view.state_of("b")) == ("ready", "conflicting")
    assert view.slot_types["cuda.shares"].quantum == ONE // 100
    for name, expected in (("cuda.shares", ["a"]), ("tpu.chip", ["b"]), ("cpu", ["a", "b"])):
        request = ResourceSlots({name: ONE})
        found = candidates(view, request, Constraints(), Policy.RANDOM, random.Random(1))
        assert sorted(candidate.node_id for candidate in found) == expected


def test_what_is_forgotten_is_unknown_and_only_what_nobody_offers_is_forgotten() -> None:
    view = fleet(node("a", slot("tpu.chip")))
    with pytest.raises(ValueError, match=r"offered by 1 nodes \(a\)"):
        view.without_slot_type("tpu.chip", 2)
    gone = view.without_node("a", 2)
    assert "tpu.chip" in gone.slot_types
    assert "tpu.chip" not in gone.without_slot_type("tpu.chip", 3).slot_types


def test_a_request_keeps_the_view_that_it_began_with() -> None:
    before = fleet(node("a", slot("cuda.device"), cuda_device=2))
    after = before.with_node(node("a", slot("cuda.device"), cuda_device=0), 9)
    request = ResourceSlots({"cuda.device": ONE})
    choose = (request, Constraints(), Policy.RANDOM, random.Random(1))
    assert [c.node_id for c in candidates(before, *choose)] == ["a"]
    assert candidates(after, *choose) == []
    assert (before.revision, after.revision) == (1, 9)


def test_refusals_are_told_by_class() -> None:
    many = [node(f"no{n}") for n in range(7)]
    view = fleet(
        *many,
        node("full", slot("tpu.chip"), tpu_chip=0),
        node("away", slot("tpu.chip"), status=NodeStatus.LOST),
        replace(node("down", slot("tpu.chip")), status=NodeStatus.DAEMON_DOWN),
    )
    rows = unfit(view, ResourceSlots({"tpu.chip": ONE}), Constraints())
    assert {row.reason: row.agents for row in rows} == {
        "lacks tpu.chip": 7,
        "full": 1,
        "lost": 1,
        "daemon-down": 1,
    }
    assert len(rows[0].nodes) == 5


def test_constraints_narrow_and_packing_fills_the_fullest_first() -> None:
    view = fleet(
        replace(node("a", slot("cuda.device"), cuda_device=8), labels={"zone": "x"}),
        replace(node("b", slot("cuda.device"), cuda_device=2), labels={"zone": "y"}),
        replace(node("c", slot("cuda.device"), cuda_device=4), labels={"zone": "x"}),
    )
    request = ResourceSlots({"cuda.device": 2 * ONE})

    def found(policy: Policy = Policy.PACK, **wanted) -> list[str]:
        chosen = candidates(view, request, Constraints(**wanted), policy, random.Random(3))
        return [candidate.node_id for candidate in chosen]

    assert found() == ["b", "c", "a"]
    assert found(labels={"zone": "x"}) == ["c", "a"]
    assert found(nodes=frozenset({"a", "nowhere"})) == ["a"]
    assert found(agents=frozenset({"other"})) == []
    assert sorted(found(Policy.RANDOM)) == ["a", "b", "c"]
