import pytest
from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import UNREADABLE_SLOT, Allocation, Ledger, Share
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import MEMORY, DeviceId, Health
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.partition.split import split
from agentd.core.slots import ONE, ResourceSlots, SlotKind
from agentd.errors import InsufficientResource
from core.machines import GIB, cores, gpus, machine, memory, shared
from core.placing import CENT, EVENLY, NEAR, SNUG, given_ids, numa, place, slots


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


def held(slot: str, *amounts: int, agent: str = "a") -> Ledger:
    """A ledger in which a kernel holds so much of cuda0, cuda1 and so on."""
    shares = (
        Share(DeviceId("cuda", f"cuda{n}"), f"GPU-{n}", slot, SlotKind.COUNT, amount)
        for n, amount in enumerate(amounts)
    )
    return Ledger().with_holding("k1", agent, Allocation(tuple(shares)))


def with_memory(ledger: Ledger, agent: str, amount: int) -> Ledger:
    share = Share(MEMORY, "mem-root", "mem", SlotKind.BYTES, amount)
    return ledger.with_holding(f"k-{agent}", agent, Allocation((share,)))


def test_a_refusal_takes_nothing_of_the_other_slots() -> None:
    with pytest.raises(InsufficientResource) as caught:
        place([*cores(2), *gpus(1)], slots(cuda_device=1, cpu=3))
    assert caught.value.slot == "cpu"
    assert caught.value.free == "2"


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

    other = with_memory(Ledger(), "b", 6 * GIB)
    assert Ledger().free(device, part) == 4 * GIB
    assert with_memory(Ledger(), "a", GIB).free(device, part) == 3 * GIB
    assert other.free(device, part) == 2 * GIB
    assert with_memory(other, "a", GIB).free(device, part) == GIB
    assert with_memory(Ledger(), "gone", 9 * GIB).free(device, part) == 0


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

    other = with_memory(Ledger(), "b", GIB)
    assert reason(other, 5 * GIB).endswith("the agent's part of it is 4 GiB")
    mine = with_memory(other, "a", 4 * GIB)
    assert reason(mine, GIB) == "the agent's part of 4 GiB is held by k-a"


def test_devices_without_numa_node_count_for_each_node() -> None:
    policy = AllocationPolicy(
        Strategy.EVENLY, Affinity.PREFER_SINGLE_NODE, allow_fragmentation=False
    )
    nodes = (0, 0, 0, 0, 0, 1, 1, None)
    devices = [*cores(1), *gpus(1, 1, 1, 1, 1, 1, 1, 1, slot="cuda.shares", nodes=nodes)]
    used = held("cuda.shares", *(amount * CENT for amount in (5, 40, 40, 40, 40)))
    allocation = place(devices, slots(cuda_shares=2.85), policy, CENT, used)
    assert sorted(given_ids(allocation, "cuda")) == ["cuda5", "cuda6", "cuda7"]
