"""Policies by short names, and requests placed on machines of a moment."""

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Allocation, Ledger
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import DeviceId
from agentd.core.slots import ONE, ResourceSlots
from core.machines import gpus, machine, memory, shared

FILL = AllocationPolicy(Strategy.FILL, allow_fragmentation=True)
EVENLY = AllocationPolicy(Strategy.EVENLY, allow_fragmentation=True)
NEAR = AllocationPolicy(Strategy.EVENLY, Affinity.PREFER_SINGLE_NODE, allow_fragmentation=True)
SNUG = AllocationPolicy(Strategy.FILL, Affinity.PREFER_SINGLE_NODE, allow_fragmentation=True)
CENT = ONE // 100


def slots(**amounts: float) -> ResourceSlots:
    return ResourceSlots(
        {
            name.replace("_", "."): int(amount) if name == "mem" else round(amount * ONE)
            for name, amount in amounts.items()
        }
    )


def given_ids(allocation: Allocation, name: str) -> dict[str, float]:
    return {s.device_id.id: s.amount / ONE for s in allocation.shares_by_device_name(name)}


def place(devices, asked, policy=EVENLY, quantum=ONE, ledger=None, only=()) -> Allocation:
    """Allocate to the one agent of a machine; `only`: the names of the devices to choose from."""
    names = {device.name for device in only}
    choice = {name: frozenset(device for device in only if device.name == name) for name in names}
    node = shared(machine(*devices, memory(), quantum=quantum), "a")
    return allocate(ledger or Ledger(), node.inventory, node.partitions["a"], asked, policy, choice)


def named(name: str, *ids: object) -> list[DeviceId]:
    return [DeviceId(name, str(device_id)) for device_id in ids]


def numa(*nodes: int | None, capacity: float = 1, slot: str = "cuda.device"):
    return gpus(*[capacity] * len(nodes), nodes=nodes, slot=slot)
