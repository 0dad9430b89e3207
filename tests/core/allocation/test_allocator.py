import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import UNREADABLE_SLOT, Allocation, Ledger, Share
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import MEMORY, DeviceId, Health
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.partition.split import split
from agentd.core.slots import ONE, ResourceSlots, SlotKind
from agentd.errors import InsufficientResource
from core.machines import GIB, cores, gpus, machine, memory, shared, threads
from core.placing import CENT, EVENLY, FILL, NEAR, SNUG, given_ids, numa, place, slots


@pytest.mark.parametrize(
    ("nodes", "asked", "policy", "expected"),
    [
        # interleaved: equally good devices alternate between nodes
        ([0, 0, 1, 1], 2, EVENLY, ["cuda0", "cuda2"]),
        ([0, 0, 1, 1], 3, EVENLY, ["cuda0", "cuda1", "cuda2"]),
        ([0, 0, 1, 1, 2, 2], 3, EVENLY, ["cuda0", "cuda2", "cuda4"]),
        # one node that can hold all of it, the one with most room, the lowest on a tie
        ([0, 0, 1, 1], 2, NEAR, ["cuda0", "cuda1"]),
        ([0, 1, 1, 1], 2, NEAR, ["cuda1", "cuda2"]),
        ([0, 1, 1, 2, 2], 2, NEAR, ["cuda1", "cuda2"]),
        # none can: the nodes with most room first
        ([0, 0, 1, 1, 1], 4, NEAR, ["cuda0", "cuda2", "cuda3", "cuda4"]),
        # fill: the node with least room that still can
        ([0, 0, 0, 1, 1], 2, SNUG, ["cuda3", "cuda4"]),
        ([0, 0, 0, 1, 1], 3, SNUG, ["cuda0", "cuda1", "cuda2"]),
        ([0, 1, 1, 2, 2], 2, SNUG, ["cuda1", "cuda2"]),
        ([0, 0, 1, 1, 1], 4, SNUG, ["cuda0", "cuda2", "cuda3", "cuda4"]),
        ([0, 0, 1, None], 2, SNUG, ["cuda2", "cuda3"]),
        # near everything
        ([None, None, None], 2, NEAR, ["cuda0", "cuda1"]),
        ([0, None], 2, NEAR, ["cuda0", "cuda1"]),
        ([None, 0], 1, EVENLY, ["cuda1"]),
    ],
)
def test_the_first_step_follows_the_affinity(nodes, asked, policy, expected) -> None:
    allocation = place([*cores(2), *numa(*nodes)], slots(cuda_device=asked), policy)
    assert sorted(given_ids(allocation, "cuda")) == expected


@pytest.mark.parametrize(
    ("nodes", "asked", "policy", "expected"),
    [
        # cores 0-3 are on node 0, 4-7 on node 1
        ([0, 1], {"cuda_device": 2, "cpu": 4}, EVENLY, ["0", "1", "4", "5"]),
        ([0, 0], {"cuda_device": 2, "cpu": 2}, EVENLY, ["0", "1"]),
        ([1, 1], {"cuda_device": 2, "cpu": 2}, EVENLY, ["4", "5"]),
        ([1, 1], {"cuda_device": 1, "cpu": 4}, NEAR, ["4", "5", "6", "7"]),
        # the near node cannot hold all of it: its cores first, then others
        ([1, 1], {"cuda_device": 1, "cpu": 6}, EVENLY, ["0", "1", "4", "5", "6", "7"]),
        ([None, None], {"cuda_device": 1, "cpu": 2}, EVENLY, ["0", "4"]),
        ([None, None], {"cuda_device": 1, "cpu": 2}, NEAR, ["0", "1"]),
    ],
)
def test_later_steps_stay_near_the_steps_before(nodes, asked, policy, expected) -> None:
    allocation = place([*cores(8, 2), *numa(*nodes)], slots(**asked), policy)
    assert sorted(given_ids(allocation, "cpu")) == expected


def test_slots_are_allocated_accelerators_first_then_cpu_mem() -> None:
    devices = [*cores(2), *gpus(1, slot="rocm.device"), *gpus(1, slot="cuda.device")]
    asked = slots(mem=1, cpu=1, rocm_device=1, cuda_device=1)
    allocation = place(devices, asked)
    names = [share.device_id.name for share in allocation.shares]
    assert names == ["cuda", "rocm", "cpu", "mem"]


def test_shares_on_equal_devices_are_halved_or_filled() -> None:
    devices = [*cores(1), *gpus(1, 1, slot="cuda.shares")]
    asked = slots(cuda_shares=1.5)
    assert given_ids(place(devices, asked, quantum=CENT), "cuda") == {"cuda0": 0.75, "cuda1": 0.75}
    assert given_ids(place(devices, asked, FILL, CENT), "cuda") == {"cuda0": 1, "cuda1": 0.5}


def test_parts_are_equal_on_fewest_devices_or_refused() -> None:
    whole = AllocationPolicy(allow_fragmentation=False)
    devices = [*cores(1), *gpus(1, 1, 1, slot="cuda.shares")]
    asked = slots(cuda_shares=1.5)
    allocation = place(devices, asked, whole, CENT)
    assert sorted(given_ids(allocation, "cuda").values()) == [0.75, 0.75]
    held = (
        Share(DeviceId("cuda", f"cuda{n}"), f"GPU-{n}", "cuda.shares", SlotKind.COUNT, 40 * CENT)
        for n in range(3)
    )
    used = Ledger().with_held("k", "a", Allocation(tuple(held)))
    with pytest.raises(InsufficientResource):
        place(devices, asked, whole, CENT, used)
    assert place(devices, asked, EVENLY, CENT, used)


def test_a_refusal_takes_nothing_of_the_other_slots() -> None:
    with pytest.raises(InsufficientResource) as caught:
        place([*cores(2), *gpus(1)], slots(cuda_device=1, cpu=3))
    assert caught.value.slot == "cpu"
    assert caught.value.free == "2"


def held(slot: str, amount: int, device: str = "cuda0", agent: str = "a") -> Ledger:
    share = Share(DeviceId("cuda", device), f"GPU-{device}", slot, SlotKind.COUNT, amount)
    return Ledger().with_held("k1", agent, Allocation((share,)))


@pytest.mark.parametrize(
    ("change", "ledger", "why"),
    [
        ({}, held("cuda.device", ONE), "held by k1"),
        ({}, held("cuda.shares", ONE // 2), "kernel k1 holds cuda.shares of it"),
        ({}, held(UNREADABLE_SLOT, 0), "an unreadable share"),
        ({"health": Health.UNHEALTHY, "reason": "Xid 79"}, Ledger(), "unhealthy: Xid 79"),
        ({"gone": True, "reason": "not found"}, Ledger(), "gone: not found"),
        ({"drained": True}, Ledger(), "drained"),
    ],
)
def test_refusal_gives_a_reason_for_each_device(change, ledger, why) -> None:
    devices = [*cores(1), *(replace(d, **change) for d in gpus(1))]
    with pytest.raises(InsufficientResource) as caught:
        place(devices, slots(cuda_device=1), ledger=ledger)
    (row,) = caught.value.explain
    assert why in row["reason"]
    assert (row["device"], row["free"], row["considered"]) == ("cuda0", "0", False)


def test_unknown_health_is_not_unhealthy() -> None:
    devices = [*cores(1), *(replace(d, health=Health.UNKNOWN) for d in gpus(1))]
    assert place(devices, slots(cuda_device=1))


def test_other_agents_devices_are_explained_not_given() -> None:
    node = split(
        machine(*cores(2), memory(), *gpus(1, 1)),
        SplitRules(AllocationMode.AUTO_SPLIT, (AgentRule("a"), AgentRule("b"))),
    )
    with pytest.raises(InsufficientResource) as caught:
        allocate(Ledger(), node.inventory, node.partitions["a"], slots(cuda_device=2), EVENLY)
    assert [row["reason"] for row in caught.value.explain] == [
        "has 1 of the 2",
        "not in the partition of a",
    ]


def test_an_agent_s_memory_is_the_less_of_its_own_and_the_node_s() -> None:
    node = split(
        machine(*cores(2), memory(8 * GIB)),
        SplitRules(AllocationMode.AUTO_SPLIT, (AgentRule("a"), AgentRule("b"))),
    )
    device, part = node.inventory.by_id[MEMORY], node.partitions["a"]

    def use(ledger: Ledger, agent: str, amount: int) -> Ledger:
        share = Share(MEMORY, "mem-root", "mem", SlotKind.BYTES, amount)
        return ledger.with_held(f"{agent}-{amount}", agent, Allocation((share,)))

    assert Ledger().free(device, part) == 4 * GIB
    assert use(Ledger(), "a", GIB).free(device, part) == 3 * GIB
    assert use(Ledger(), "b", 6 * GIB).free(device, part) == 2 * GIB
    assert use(use(Ledger(), "b", 6 * GIB), "a", GIB).free(device, part) == GIB
    assert use(Ledger(), "gone", 9 * GIB).free(device, part) == 0


def test_moved_device_is_not_free_while_a_kernel_holds_it() -> None:
    devices = [*cores(2), memory(), *gpus(1, slot="cuda.shares")]
    node = split(
        machine(*devices, quantum=CENT), SplitRules(AllocationMode.AUTO_SPLIT, (AgentRule("b"),))
    )
    ledger = held("cuda.shares", ONE // 2, agent="a")
    with pytest.raises(InsufficientResource) as caught:
        allocate(ledger, node.inventory, node.partitions["b"], slots(cuda_shares=0.2), EVENLY)
    assert "held by k1 of another agent" in caught.value.explain[0]["reason"]
    in_common = shared(node.inventory, "b")
    assert allocate(
        ledger, in_common.inventory, in_common.partitions["b"], slots(cuda_shares=0.2), EVENLY
    )


def test_equal_parts_are_sought_on_each_node_before_they_spread() -> None:
    policy = AllocationPolicy(
        Strategy.EVENLY, Affinity.PREFER_SINGLE_NODE, allow_fragmentation=False
    )
    capacities = [1.0, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0]
    devices = gpus(*capacities, slot="cuda.shares", nodes=(0, 0, 0, 0, 0, 1, 1))
    allocation = place([*cores(1), *devices], slots(cuda_shares=2), policy, CENT)
    assert given_ids(allocation, "cuda") == {"cuda5": 1, "cuda6": 1}


def reasons(devices, asked, policy=EVENLY, quantum=ONE, ledger=None) -> list[str]:
    with pytest.raises(InsufficientResource) as caught:
        place(devices, asked, policy, quantum, ledger)
    return [str(row["reason"]) for row in caught.value.explain]


def test_refusal_mentions_equal_parts_only_when_fragmented():
    whole = AllocationPolicy(allow_fragmentation=False)
    assert reasons([*cores(2)], slots(cpu=3), whole) == ["has 1 of the 3"] * 2
    assert reasons([*cores(1), *gpus(1)], slots(cuda_device=2), whole) == ["has 1 of the 2"]
    shares = [*cores(1), *gpus(1, 1, slot="cuda.shares")]
    used = held("cuda.shares", 40 * CENT)
    assert reasons(shares, slots(cuda_shares=1.5), whole, CENT, used) == [
        "has 0.6, too little for an equal part of 0.75; the rest is held by k1",
        "has enough for an equal part of 0.75, and too few others do",
    ]
    assert reasons(shares, slots(cuda_shares=1.7), whole, CENT, used) == [
        "has 0.6 of the 1.7; the rest is held by k1",
        "has 1 of the 1.7",
    ]


def test_memory_refusal_names_the_agents_own_kernels() -> None:
    rules = SplitRules(AllocationMode.AUTO_SPLIT, (AgentRule("a"), AgentRule("b")))
    node = split(machine(*cores(2), memory(8 * GIB)), rules)

    def reason(ledger: Ledger, amount: int) -> str:
        part, asked = node.partitions["a"], ResourceSlots({"mem": amount})
        with pytest.raises(InsufficientResource) as caught:
            allocate(ledger, node.inventory, part, asked, EVENLY)
        return str(caught.value.explain[0]["reason"])

    def use(ledger: Ledger, agent: str, amount: int) -> Ledger:
        share = Share(MEMORY, "mem-root", "mem", SlotKind.BYTES, amount)
        return ledger.with_held(f"k-{agent}", agent, Allocation((share,)))

    other = use(Ledger(), "b", GIB)
    assert reason(other, 5 * GIB).endswith("the agent's part of it is 4 GiB")
    mine = use(other, "a", 4 * GIB)
    assert reason(mine, GIB) == "the agent's part of 4 GiB is held by k-a"


def test_devices_without_numa_node_count_for_each_node() -> None:
    policy = AllocationPolicy(
        Strategy.EVENLY, Affinity.PREFER_SINGLE_NODE, allow_fragmentation=False
    )
    nodes = (0, 0, 0, 0, 0, 1, 1, None)
    devices = [*cores(1), *gpus(1, 1, 1, 1, 1, 1, 1, 1, slot="cuda.shares", nodes=nodes)]
    used = Ledger()
    for number, amount in enumerate((5, 40, 40, 40, 40)):
        share = Share(
            DeviceId("cuda", f"cuda{number}"),
            f"GPU-{number}",
            "cuda.shares",
            SlotKind.COUNT,
            amount * CENT,
        )
        used = used.with_held(f"k{number}", "a", Allocation((share,)))
    allocation = place(devices, slots(cuda_shares=2.85), policy, CENT, used)
    assert sorted(given_ids(allocation, "cuda")) == ["cuda5", "cuda6", "cuda7"]


def test_releasing_twice_changes_nothing() -> None:
    ledger = held("cuda.device", ONE)
    once = ledger.without("k1")
    assert once == Ledger()
    assert once.without("k1") is once
    assert ledger.without("other") is ledger


AMOUNTS = st.fixed_dictionaries(
    {},
    optional={
        "cuda.shares": st.integers(0, 250).map(lambda n: n * CENT),
        "npu.device": st.integers(0, 4).map(lambda n: n * ONE),
        "cpu": st.integers(0, 5).map(lambda n: n * ONE),
        "mem": st.integers(0, 3 * GIB),
    },
)
POLICIES = st.builds(
    AllocationPolicy, st.sampled_from(Strategy), st.sampled_from(Affinity), st.booleans()
)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), AMOUNTS, st.booleans()), max_size=12),
    POLICIES,
    st.sampled_from(AllocationMode),
)
def test_no_share_is_ever_given_twice(steps, policy, mode) -> None:
    devices = [
        *threads(*((n % 4 // 2, n % 2) for n in range(8))),
        memory(8 * GIB),
        *gpus(1, 1, 0.5, 1, slot="cuda.shares", nodes=(0, 0, 1, None)),
        *gpus(1, 1, 1, slot="npu.device", nodes=(0, 1, 1)),
    ]
    inventory = machine(*devices, quantum=CENT)
    whole = replace(inventory.slot_types["npu.device"], quantum=ONE)
    inventory = replace(inventory, slot_types={**inventory.slot_types, "npu.device": whole})
    rules = (AgentRule("a"), AgentRule("b"))
    if mode is AllocationMode.MANUAL:
        mode = AllocationMode.AUTO_SPLIT
    node = split(inventory, SplitRules(mode, rules))
    ledger = Ledger()
    for number, (agent, amounts, is_release) in enumerate(steps):
        if is_release and ledger.holdings:
            before = ledger
            name = next(iter(ledger.holdings))
            holding = ledger.holdings[name]
            ledger = ledger.without(name)
            assert ledger.with_held(name, holding.agent_id, holding.allocation).held == before.held
        asked = ResourceSlots(amounts)
        try:
            got = allocate(ledger, node.inventory, node.partitions[agent], asked, policy)
        except InsufficientResource as error:
            assert error.explain
            continue
        assert _summed(got) == asked
        assert len({share.device_id for share in got.shares}) == len(got.shares)
        shuffled = ResourceSlots(dict(random.sample(list(amounts.items()), len(amounts))))
        again = allocate(ledger, node.inventory, node.partitions[agent], shuffled, policy)
        assert again == got
        ledger = ledger.with_held(f"k{number}", agent, got)
        for device in node.inventory.devices:
            assert ledger.used(device.device_id) <= device.capacity
        if mode is not AllocationMode.SHARED:
            for device_id, holders in ledger.held.items():
                owners = {ledger.holdings[name].agent_id for name in holders}
                assert device_id == MEMORY or len(owners) == 1


def _summed(allocation: Allocation) -> ResourceSlots:
    total = ResourceSlots()
    for share in allocation.shares:
        total += ResourceSlots({share.slot: share.amount})
    return total
