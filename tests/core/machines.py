"""Named machines for the tables of the core's tests."""

from agentd.core.devices import MEMORY, Device, DeviceId, Inventory
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.partition.split import Split, split
from agentd.core.slots import ONE, SlotKind, SlotType

GIB = 2**30
CPU = SlotType("cpu", SlotKind.COUNT, ONE)
MEM = SlotType("mem", SlotKind.BYTES, 1)


def cores(count: int, numa_nodes: int | None = None) -> list[Device]:
    return [_core(n, None if numa_nodes is None else n * numa_nodes // count) for n in range(count)]


def threads(*physical: tuple[int | None, int]) -> list[Device]:
    """Hardware threads in the order of their ids, each with its NUMA node and core."""
    return [_core(n, node, f"core-{node}-{core}") for n, (node, core) in enumerate(physical)]


def _core(n: int, node: int | None, parent: str | None = None) -> Device:
    device_id = DeviceId("cpu", str(n))
    return Device(device_id, f"cpu-{n}", "cpu", SlotKind.COUNT, ONE, numa_node=node, parent=parent)


def memory(size: int = 32 * GIB) -> Device:
    return Device(MEMORY, "mem-root", "mem", SlotKind.BYTES, size)


def gpus(
    *capacities: float, slot: str = "cuda.device", nodes: tuple[int | None, ...] = ()
) -> list[Device]:
    name = slot.partition(".")[0]
    return [
        Device(
            DeviceId(name, f"{name}{n}"),
            f"GPU-{name}-{n}",
            slot,
            SlotKind.COUNT,
            round(capacity * ONE),
            numa_node=nodes[n] if nodes else None,
            aliases=(f"0000:0{n}:00.0",),
        )
        for n, capacity in enumerate(capacities)
    ]


def machine(*devices: Device, quantum: int = ONE) -> Inventory:
    slots = {d.slot: SlotType(d.slot, d.kind, quantum) for d in devices}
    slots.update({"cpu": CPU, "mem": MEM})
    return Inventory.of(slots.values(), devices)


def shared(inventory: Inventory, *agents: str) -> Split:
    rules = SplitRules(AllocationMode.SHARED, tuple(AgentRule(agent) for agent in agents))
    return split(inventory, rules)


def texts(result: Split) -> tuple[str, ...]:
    """The conditions of a partition, as texts."""
    return tuple(map(str, result.conditions))
