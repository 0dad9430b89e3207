"""GPUs that offer shares and memory, and whole devices with memory, for tables of tests."""

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Allocation, Ledger
from agentd.core.allocation.policy import AllocationPolicy
from agentd.core.devices import Device, DeviceId, Inventory, SecondarySlot
from agentd.core.partition.split import Split
from agentd.core.slots import ONE, ResourceSlots, SlotKind, SlotType, parse_amount
from core.machines import CPU, GIB, MEM, cores, memory, shared

CENT, MIB = ONE // 100, 2**20
SHARES = SlotType("cuda.shares", SlotKind.COUNT, CENT)
GPU_MEMORY = SlotType("cuda.mem", SlotKind.BYTES, MIB, primary="cuda.shares")
WHOLE = SlotType("npu.device", SlotKind.COUNT, ONE)
NPU_MEMORY = SlotType("npu.mem", SlotKind.BYTES, MIB, primary="npu.device")
TYPES = {slot.name: slot for slot in (SHARES, GPU_MEMORY, WHOLE, NPU_MEMORY, CPU, MEM)}
PLAIN = AllocationPolicy()


def gpu(
    number: int, gib: float | None = 80, name: str = "cuda", slot: str = "cuda.shares", **changes
) -> Device:
    """Return a device with so much memory; None: it cannot be read, and is not offered."""
    kept = () if gib is None else (SecondarySlot(f"{name}.mem", SlotKind.BYTES, int(gib * GIB)),)
    return Device(
        DeviceId(name, f"{name}{number}"),
        f"GPU-{name}-{number}",
        slot,
        SlotKind.COUNT,
        ONE,
        secondary=kept,
        **changes,
    )


def npu(number: int, gib: float = 80) -> Device:
    return gpu(number, gib, "npu", "npu.device")


def node(*devices: Device, agents: str = "a") -> Split:
    inventory = Inventory.of(TYPES.values(), [*cores(1), memory(), *devices])
    return shared(inventory, *agents)


def asked(**amounts: object) -> ResourceSlots:
    """Return amounts as they are written in a request; `cuda_mem` is `cuda.mem`."""
    names = {name.replace("_", "."): amount for name, amount in amounts.items()}
    return ResourceSlots({name: parse_amount(text, TYPES[name]) for name, text in names.items()})


def place(
    split: Split,
    request: ResourceSlots,
    ledger: Ledger | None = None,
    policy: AllocationPolicy = PLAIN,
    agent: str = "a",
    only=None,
) -> Allocation:
    only = {} if only is None else {"cuda": frozenset(DeviceId("cuda", name) for name in only)}
    part = split.partitions[agent]
    return allocate(ledger or Ledger(), split.inventory, part, request, policy, only)


def holding(split: Split, *requests: ResourceSlots, agent: str = "a") -> Ledger:
    """Return the ledger after kernels k1, k2 and so on were created one after the other."""
    ledger = Ledger()
    for number, request in enumerate(requests, 1):
        ledger = ledger.with_holding(f"k{number}", agent, place(split, request, ledger))
    return ledger


def charged(allocation: Allocation) -> dict[str, tuple[str, ...]]:
    """Return what is charged by device: wholes of a count, GiB or MiB of bytes."""
    return {
        share.device_id.id: tuple(_shown(kind, amount) for _, kind, amount in share.amounts)
        for share in allocation.shares
    }


def _shown(kind: SlotKind, amount: int) -> str:
    if kind is not SlotKind.BYTES:
        return f"{amount / ONE:g}"
    return f"{amount // GIB}g" if amount % GIB == 0 else f"{amount / MIB:g}m"
