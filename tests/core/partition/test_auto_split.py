"""Auto-split on machines as they are: sockets, hardware threads, MIG parts, GPUs out of order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.devices import Device, DeviceId
from agentd.core.partition.auto_split import split_units
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitOrder, SplitRules
from agentd.core.partition.split import Split, split
from agentd.core.slots import ONE, SlotKind
from core.machines import GIB, cores, gpus, machine, memory, texts, threads

ONE_SOCKET = threads(*((0, n) for n in range(4)))
ONE_SOCKET_SMT = threads(*((0, n % 4) for n in range(8)))
"""Linux numbers the first threads of all cores, then the second ones."""
TWO_SOCKETS_SMT = threads(*((n % 8 // 4, n % 4) for n in range(16)))
ALTERNATING = threads(*((n % 2, n // 2) for n in range(8)))
"""Two sockets whose cores are numbered in turn."""
SUB_NUMA = threads(*((n // 2, n % 2) for n in range(8)))
"""One socket in four sub-NUMA clusters of two cores."""


def mig(gpu: int, *profiles: str) -> list[Device]:
    return [
        Device(
            DeviceId("cuda", f"cuda{gpu}:{n}"),
            f"MIG-{gpu}-{n}",
            f"cuda.device:{profile}-mig",
            SlotKind.UNIQUE,
            ONE,
            parent=f"GPU-cuda-{gpu}",
        )
        for n, profile in enumerate(profiles)
    ]


def dealt(
    devices: list[Device], agents: int = 2, order: SplitOrder = SplitOrder.ID, reserved: int = 0
) -> Split:
    rules = SplitRules(
        AllocationMode.AUTO_SPLIT,
        tuple(AgentRule(f"a{n}") for n in range(1, agents + 1)),
        reserved_cpu=reserved,
        order=order,
    )
    return split(machine(*devices, memory(8 * GIB)), rules)


def ids(node: Split, name: str) -> list[list[str]]:
    return [
        [device_id.id for device_id in part.devices if device_id.name == name]
        for part in node.partitions.values()
    ]


@pytest.mark.parametrize(
    ("machine_cores", "agents", "reserved", "expected"),
    [
        (ONE_SOCKET, 3, 0, ["01", "2", "3"]),
        (cores(4), 3, 0, ["01", "2", "3"]),
        (ONE_SOCKET_SMT, 2, 0, ["0145", "2367"]),
        (ONE_SOCKET_SMT, 3, 0, ["0145", "26", "37"]),
        # core 0 loses a thread to the reservation, and stays a core
        (ONE_SOCKET_SMT, 2, 1, ["145", "2367"]),
        (ALTERNATING, 2, 0, ["0246", "1357"]),
        (ALTERNATING, 3, 0, ["024", "136", "57"]),
        (SUB_NUMA, 2, 0, ["0123", "4567"]),
    ],
)
def test_cores_are_dealt_as_physical_cores_node_by_node(
    machine_cores, agents, reserved, expected
) -> None:
    node = dealt(machine_cores, agents, reserved=reserved)
    assert ["".join(sorted(mine)) for mine in ids(node, "cpu")] == [
        "".join(sorted(mine)) for mine in expected
    ]
    assert texts(node) == ()


def test_two_sockets_with_threads_give_each_agent_a_socket() -> None:
    node = dealt(TWO_SOCKETS_SMT)
    assert ids(node, "cpu") == [
        ["0", "1", "2", "3", "8", "9", "10", "11"],
        ["4", "5", "6", "7", "12", "13", "14", "15"],
    ]


def test_auto_split_deals_threads_when_cores_are_few() -> None:
    node = dealt(threads((0, 0), (0, 1), (0, 0), (0, 1)), 3)
    assert ids(node, "cpu") == [["0", "2"], ["1"], ["3"]]
    assert texts(node) == ("cpu 1, 3 are threads of one core and go to a2 and a3",)


@pytest.mark.parametrize(
    ("accelerators", "agents", "expected"),
    [
        # two whole GPUs and two parts: everybody gets one of each
        ([*gpus(1, 1), *mig(2, "3g.40gb", "3g.40gb")], 2,
         [["cuda0", "cuda2:0"], ["cuda1", "cuda2:1"]]),
        # mixed profiles of two GPUs
        ([*mig(0, "1g.10gb", "3g.40gb", "1g.10gb"), *mig(1, "3g.40gb", "1g.10gb", "1g.10gb")], 2,
         [["cuda0:0", "cuda0:1", "cuda0:2"], ["cuda1:0", "cuda1:1", "cuda1:2"]]),
    ],
)  # fmt: skip
def test_devices_of_each_slot_are_dealt_separately(accelerators, agents, expected) -> None:
    assert ids(dealt([*cores(4), *accelerators], agents), "cuda") == expected


EIGHT = gpus(*[1] * 8, nodes=(0, 1) * 4)
"""Eight GPUs over two nodes in alternating order."""


def test_auto_split_by_numa_keeps_agents_on_one_node() -> None:
    by_id = dealt([*TWO_SOCKETS_SMT, *EIGHT])
    assert ids(by_id, "cuda")[0] == ["cuda0", "cuda1", "cuda2", "cuda3"]
    by_node = dealt([*TWO_SOCKETS_SMT, *EIGHT], order=SplitOrder.NUMA)
    assert ids(by_node, "cuda") == [
        ["cuda0", "cuda2", "cuda4", "cuda6"],
        ["cuda1", "cuda3", "cuda5", "cuda7"],
    ]
    assert ids(by_node, "cpu") == ids(dealt(TWO_SOCKETS_SMT), "cpu")


def test_each_agent_is_near_its_devices_whatever_their_order() -> None:
    """The GPUs of the first agent are on node 1."""
    turned = [replace(gpu, numa_node=1 - gpu.numa_node) for gpu in EIGHT[:2]]
    node = dealt([*TWO_SOCKETS_SMT, *turned], 2, SplitOrder.NUMA)
    assert ids(node, "cuda") == [["cuda1"], ["cuda0"]]
    assert ids(node, "cpu")[0][:4] == ["0", "1", "2", "3"]
    only_far = dealt([*TWO_SOCKETS_SMT, *turned[:1]], 2, SplitOrder.NUMA)
    assert ids(only_far, "cuda") == [["cuda0"], []]
    assert ids(only_far, "cpu")[0][:4] == ["4", "5", "6", "7"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=24),
    st.integers(1, 6),
    st.sampled_from(SplitOrder),
    st.lists(st.sampled_from([None, 0, 1, 2]), max_size=8),
)
def test_auto_split_deals_everything_once_and_keeps_cores(physical, agents, order, nodes) -> None:
    machine_cores = threads(*physical)
    accelerators = gpus(*[1] * len(nodes), nodes=tuple(nodes))
    node = dealt([*machine_cores, *accelerators], agents, order)
    for name, count in (("cpu", len(machine_cores)), ("cuda", len(accelerators))):
        everybody = [device_id for mine in ids(node, name) for device_id in mine]
        assert len(everybody) == len({*everybody}) == count
    sizes = sorted(map(len, ids(node, "cuda")), reverse=True)
    assert sizes == split_units(len(accelerators), agents)
    owners = {i: n for n, mine in enumerate(ids(node, "cpu")) for i in mine}
    of_core: dict[str | None, set[int]] = {}
    for thread in machine_cores:
        of_core.setdefault(thread.parent, set()).add(owners[thread.device_id.id])
    if len(of_core) >= agents:
        assert all(len(whose) == 1 for whose in of_core.values())
        assert all(ids(node, "cpu"))
