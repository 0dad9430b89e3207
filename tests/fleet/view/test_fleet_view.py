"""Slot types accumulate and merge, a missing slot is zero, sums are exact; one view each."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.slots import BUILT_IN, ONE, ResourceSlots, SlotKind, SlotType
from agentd.errors import UnsupportedResource
from agentd_fleet.placement.choice import Constraints, PlacementPolicy, choose_candidates, read
from agentd_fleet.view.fleet_view import (
    FleetNode,
    FleetView,
    NodeStatus,
    Offer,
    SlotUsage,
    is_same_slot_type,
)
from agentd_fleet.view.reports import MAX_SLOT_TYPES

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
        view = view.with_slot_types({**found.slot_types, **view.slot_types}, number)
        view = view.with_changes([found], revision=number)
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
def test_slot_types_keep_their_first_definition(nodes) -> None:
    first: dict[str, SlotType] = {}
    for found in nodes:
        for name, item in found.slot_types.items():
            first.setdefault(name, item)
    view = fleet(*nodes)
    assert view.slot_types == first
    for found in list(view.nodes.values()):
        view = view.with_changes((), [found.node_id], 99)
    assert view.slot_types == first
    assert view.statistics() == dict.fromkeys(first, SlotUsage())


def test_unknown_fleet_slot_is_refused_with_known_ones() -> None:
    view = fleet(node("a", slot("cuda.device")))
    with pytest.raises(UnsupportedResource) as refused:
        read(view, {"tpu.chip": 1, "cuda.device": 1})
    assert (refused.value.slots, "cuda.device" in refused.value.known) == (["tpu.chip"], True)
    assert read(view, {"tpu.chip": 0, "cuda.device": 1}).accepted()["cuda.device"] == ONE


def test_conflicting_node_is_excluded_for_one_slot() -> None:
    view = fleet(
        node("a", slot("cuda.shares", ONE // 100)),
        node("b", slot("cuda.shares", ONE // 10), slot("tpu.chip")),
    )
    assert (view.node_state("a"), view.node_state("b")) == ("ready", "conflicting")
    assert view.slot_types["cuda.shares"].quantum == ONE // 100
    for name, expected in (("cuda.shares", ["a"]), ("tpu.chip", ["b"]), ("cpu", ["a", "b"])):
        request = ResourceSlots({name: ONE})
        found = choose_candidates(
            view, request, Constraints(), PlacementPolicy.RANDOM, random.Random(1)
        )
        assert sorted(candidate.node_id for candidate in found) == expected


def test_offered_slot_types_name_their_nodes() -> None:
    view = fleet(node("a", slot("tpu.chip")))
    assert view.slot_in_use_reason("tpu.chip") == "tpu.chip is offered by 1 nodes (a)"
    gone = view.with_changes((), ["a"], 2)
    assert "tpu.chip" in gone.slot_types
    assert gone.slot_in_use_reason("tpu.chip") == ""


def test_a_slot_of_a_node_of_a_newer_schema_is_not_forgotten() -> None:
    newer = node("b", status=NodeStatus.NEWER)
    view = fleet(node("a", slot("tpu.chip")), newer).with_changes((), ["a"], 2)
    assert "1 nodes of a newer schema may offer tpu.chip (b)" in view.slot_in_use_reason("tpu.chip")


AGENTS = ("main", "other")
REPORTS = st.builds(
    FleetNode,
    st.sampled_from([f"n{number}" for number in range(6)]),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(QUANTA), max_size=3).map(
        lambda types: {name: slot(name, quantum) for name, quantum in types.items()}
    ),
    st.dictionaries(
        st.sampled_from(AGENTS),
        st.builds(
            Offer,
            *[
                st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)).map(ResourceSlots)
                for _ in range(2)
            ],
        ),
    ),
    st.sampled_from(NodeStatus),
    exclusion_reason=st.sampled_from(["", "", "too new"]),
)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("changed"), st.lists(REPORTS, max_size=3), st.sets(st.just("n1"))),
        st.tuples(st.just("debited"), st.sampled_from(AGENTS), st.integers(1, 4)),
        st.tuples(st.just("slot_type"), st.sampled_from(NAMES), st.sampled_from(QUANTA)),
        st.tuples(st.just("gone"), st.sampled_from(["n2", "n3", "nowhere"]), st.none()),
    ),
    max_size=12,
)


def after(view: FleetView, kind: str, first, second, revision: int) -> FleetView:
    match kind:
        case "changed":
            return view.with_changes(first, second, revision)
        case "debited":
            return view.with_debit("n0", first, ResourceSlots({NAMES[0]: second}))
        case "slot_type":
            types = {first: slot(first, second), **view.slot_types}
            return view.with_slot_types(types, revision)
        case _:
            return view.with_changes((), [first], revision)


@given(st.lists(REPORTS, max_size=6), CHANGES)
def test_updated_sums_and_conflicts_equal_rebuilt_ones(at_first, changes) -> None:
    view = fleet(*at_first)
    for number, (kind, first, second) in enumerate(changes, 10):
        before = view, dict(view.nodes), derived(view)
        view = after(view, kind, first, second, number)
        assert derived(view) == derived(view.with_slot_types(view.slot_types, number))
        assert (dict(before[0].nodes), derived(before[0])) == before[1:]


def derived(view: FleetView):
    """Return all that follows from a view's nodes."""
    return view.statistics(), dict(view.conflicts)


@given(st.lists(REPORTS, max_size=8), st.sampled_from(NAMES))
def test_the_sums_of_all_are_those_of_each_counted_by_hand(reports, name) -> None:
    view = fleet(*reports)
    expected = SlotUsage()
    for found in view.nodes.values():
        mine = found.slot_types.get(name)
        if (
            found.status is NodeStatus.LOST
            or not mine
            or not is_same_slot_type(mine, view.slot_types[name])
        ):
            continue
        for offer in found.offers.values():
            expected += SlotUsage(offer.capacity[name], offer.free[name])
    assert view.statistics().get(name, SlotUsage()) == expected
    assert view.statistics(list(view.nodes)).get(name, SlotUsage()) == expected
    agents = [view.statistics(agents=[agent]).get(name, SlotUsage()) for agent in AGENTS]
    assert sum(agents, SlotUsage()) == expected


class CountedSlots(ResourceSlots):
    """Amounts that count their lookups."""

    __slots__ = ()
    lookups = 0

    def __getitem__(self, name: str) -> int:
        CountedSlots.lookups += 1
        return super().__getitem__(name)


def test_sums_of_a_node_take_no_lookup_per_agent_and_slot() -> None:
    """One node may have any number of agents, and its reports are folded on the event loop."""
    types = [slot(f"x{number}.y") for number in range(MAX_SLOT_TYPES)]
    amounts = CountedSlots({"x0.y": ONE})
    offers = {f"a{number}": Offer(amounts, amounts) for number in range(50_000)}
    large = FleetNode("n1", {item.name: item for item in types}, offers)
    view = FleetView(slot_types=large.slot_types).with_changes([large])
    assert view.usages["x0.y"] == SlotUsage(50_000 * ONE, 50_000 * ONE)
    assert CountedSlots.lookups <= 3 * len(offers)


def test_debit_lasts_until_the_node_reports() -> None:
    view = fleet(node("a", slot("cuda.device"), cuda_device=2))
    given = view.with_debit("a", "main", ResourceSlots({"cuda.device": 3 * ONE, "cpu": ONE}))
    assert given.statistics()["cuda.device"] == SlotUsage(8 * ONE, 0, 3 * ONE)
    assert given.statistics()["cpu"] == SlotUsage(8 * ONE, 7 * ONE, ONE)
    assert given.revision == view.revision
    assert view.statistics()["cuda.device"].free == 2 * ONE
    told_again = given.with_changes([node("a", slot("cuda.device"), cuda_device=1)], revision=9)
    assert told_again.statistics()["cuda.device"].free == ONE
    for unknown in (("a", "nobody"), ("nowhere", "main")):
        assert view.with_debit(*unknown, ResourceSlots({"cpu": ONE})) is view


def test_last_report_of_a_batch_counts() -> None:
    view = fleet(node("a"), node("b")).with_changes(
        [node("c", cpu=1), node("a", cpu=3), node("c", cpu=2)],
        forgotten=["a", "b", "x"],
        revision=7,
    )
    assert {each: view.statistics([each])["cpu"].free // ONE for each in view.nodes} == {
        "a": 3,
        "c": 2,
    }
    assert (view.revision, view.statistics()["cpu"].free) == (7, 5 * ONE)


SHARES = slot("cuda.shares", ONE // 100)
MEMORY = SlotType("cuda.mem", SlotKind.BYTES, 2**20, primary="cuda.shares")
GIB = 2**30


def gpu_node(node_id: str, gpus: int, gib: int, **free: int) -> FleetNode:
    """A node with one agent that has so many GPUs with so much memory, and so much of it free."""
    known = {item.name: item for item in (*BUILT_IN, SHARES, MEMORY)}
    capacity = {"cpu": 8 * ONE, "mem": 64 * GIB, "cuda.shares": gpus * ONE}
    capacity["cuda.mem"] = gpus * gib * GIB
    left = capacity | {name.replace("_", "."): amount for name, amount in free.items()}
    offer = Offer(ResourceSlots(capacity), ResourceSlots(left))
    return FleetNode(node_id, known, {"main": offer})


def found_for(view: FleetView, **request: int) -> list[str]:
    asks = ResourceSlots({name.replace("_", "."): amount for name, amount in request.items()})
    chosen = choose_candidates(view, asks, Constraints(), PlacementPolicy.PACK, random.Random(3))
    return [candidate.node_id for candidate in chosen]


def test_slots_left_out_of_a_request_are_derived_per_agent() -> None:
    view = fleet(gpu_node("large", 2, 80), gpu_node("small", 2, 40))
    half = ResourceSlots({"cuda.shares": ONE // 2})
    charged = {
        n: view.with_derived_slots(view.nodes[n], "main", half)["cuda.mem"] for n in view.nodes
    }
    assert charged == {"large": 40 * GIB, "small": 20 * GIB}
    memory = ResourceSlots({"cuda.mem": 20 * GIB})
    assert view.with_derived_slots(view.nodes["large"], "main", memory)["cuda.shares"] == ONE // 4
    both = ResourceSlots({"cuda.shares": ONE, "cuda.mem": GIB})
    assert view.with_derived_slots(view.nodes["large"], "main", both) == both
    cores = ResourceSlots({"cpu": ONE})
    assert view.with_derived_slots(view.nodes["large"], "main", cores) is cores


def test_candidates_have_the_derived_slots_free() -> None:
    view = fleet(gpu_node("a", 1, 80, cuda_mem=10 * GIB), gpu_node("b", 1, 80))
    assert found_for(view, cuda_shares=ONE // 2) == ["b"]
    assert set(found_for(view, cuda_shares=ONE // 10)) == {"a", "b"}


def test_pending_placements_take_the_derived_slots() -> None:
    view = fleet(gpu_node("a", 1, 80))
    debited = view.with_debit("a", "main", ResourceSlots({"cuda.mem": 60 * GIB}))
    free = debited.nodes["a"].offers["main"].free
    assert (free["cuda.shares"], free["cuda.mem"]) == (ONE // 4, 20 * GIB)
    assert found_for(debited, cuda_shares=ONE // 2) == []


def test_another_primary_slot_is_a_conflict() -> None:
    other = SlotType("cuda.mem", SlotKind.BYTES, 2**20)
    stranger = FleetNode("b", {**gpu_node("b", 1, 80).slot_types, "cuda.mem": other}, {})
    view = fleet(gpu_node("a", 1, 80), stranger)
    assert view.conflicts == {"b": frozenset({"cuda.mem"})}
    coarse = SlotType("cuda.mem", SlotKind.BYTES, 2**30, primary="cuda.shares")
    assert not is_same_slot_type(MEMORY, coarse)


def test_a_slot_with_another_meaning_on_a_node_is_not_derived() -> None:
    stranger = gpu_node("b", 1, 80)
    types = {**stranger.slot_types, "cuda.mem": SlotType("cuda.mem", SlotKind.BYTES, 7)}
    stranger = FleetNode("b", types, stranger.offers)
    view = fleet(gpu_node("a", 1, 80, cuda_mem=0), stranger)
    assert found_for(view, cuda_shares=ONE // 2) == ["b"]
