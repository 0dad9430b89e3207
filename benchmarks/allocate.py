"""How fast devices are chosen.

    python benchmarks/allocate.py [--devices 8,64,512] [--json]

One operation is allocate and release, on a ledger that is half full, with NUMA preference. For each
number of devices: whole units and shares, `fill` and `evenly`, one device and half of all. At the
end a whole request (one GPU, four cores, memory) on a node of 64 GPUs and 256 cores, alone and
beside 1,000 kernels. `times_plain` is the time over that of the plain alternative in the same run:
free amounts in a dictionary, sorted for every request.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

from agentd.core.allocation.allocator import (
    Affinity,
    Allocation,
    AllocationPolicy,
    Ledger,
    Share,
    Strategy,
    allocate,
    release,
)
from agentd.core.devices import MEMORY, Device, DeviceId, Inventory
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.partition.split import Partition, split
from agentd.core.slots import ONE, ResourceSlots, SlotKind, SlotType

CENT = ONE // 100
BUDGET_S = 0.5


def devices(name: str, count: int, slot: str, numa_nodes: int) -> list[Device]:
    return [
        Device(
            DeviceId(name, f"{name}{n}"),
            f"{name}-{n}",
            slot,
            SlotKind.COUNT,
            ONE,
            numa_node=n * numa_nodes // count,
        )
        for n in range(count)
    ]


def node(
    count: int, *, shares: bool, cores: int = 0, agents: int = 1
) -> tuple[Inventory, *tuple[Partition, ...]]:
    slot = "cuda.shares" if shares else "cuda.device"
    memory = Device(MEMORY, "mem", "mem", SlotKind.BYTES, 2**40)
    everything = [
        *devices("cuda", count, slot, 4),
        *devices("cpu", max(cores, 1), "cpu", 4),
        memory,
    ]
    types = [
        SlotType(slot, SlotKind.COUNT, CENT if shares else ONE),
        SlotType("cpu", SlotKind.COUNT, ONE),
        SlotType("mem", SlotKind.BYTES, 1),
    ]
    names = ["a", *(f"agent-{n}" for n in range(1, agents))]
    rules = SplitRules(AllocationMode.SHARED, tuple(AgentRule(name) for name in names))
    parts = split(Inventory.of(types, everything), rules)
    return parts.inventory, *parts.partitions.values()


def half_full(inventory: Inventory, name: str, *, shares: bool) -> Ledger:
    """Every second device taken, or half of every device, each by a kernel of its own."""
    ledger = Ledger()
    for n, device in enumerate(inventory.by_name[name]):
        if shares or n % 2:
            amount = (30 + 7 * n % 40) * CENT if shares else ONE
            share = Share(device.device_id, device.stable_id, device.slot, device.kind, amount)
            ledger = ledger.with_held(f"{name}-{n}", "a", Allocation((share,)))
    return ledger


def timed(operation: Callable[[], None]) -> list[float]:
    """Seconds for each of as many operations as fit the budget, five at least."""
    operation()
    taken: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while time.perf_counter() < end or len(taken) < 5:
        before = time.perf_counter()
        operation()
        taken.append(time.perf_counter() - before)
    return taken


def row(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    median = statistics.median(ordered)
    return {
        "ops_per_s": round(1 / median),
        "median_ms": round(median * 1000, 4),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1000, 4),
    }


def plain(free: dict[str, int], wanted: int) -> Callable[[], None]:
    """The plain alternative: amounts in a dictionary, sorted for each request, freest first.

    It knows no holders, agents, NUMA nodes or evenness and explains nothing.
    """

    def operation() -> None:
        left, taken = wanted, {}
        for name, room in sorted(free.items(), key=lambda item: -item[1]):
            taken[name] = min(room, left)
            left -= taken[name]
            if not left:
                break
        for name, amount in taken.items():
            free[name] -= amount
        for name, amount in taken.items():
            free[name] += amount

    return operation


def one_case(count: int, strategy: Strategy, *, shares: bool, half: bool) -> dict[str, float]:
    inventory, partition = node(count, shares=shares)
    ledger = half_full(inventory, "cuda", shares=shares)
    slot = "cuda.shares" if shares else "cuda.device"
    wanted = ONE
    if half:
        wanted = count * ONE // 4 if shares else count // 2 * ONE
    elif shares:
        wanted = ONE // 2
    request = ResourceSlots({slot: wanted})
    free = {d.device_id.id: ledger.free(d, partition) for d in inventory.by_name["cuda"]}
    ours = row(timed(allocating(ledger, inventory, partition, request, strategy)))
    ours["times_plain"] = round(ours["median_ms"] / row(timed(plain(free, wanted)))["median_ms"], 2)
    return ours


def allocating(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    request: ResourceSlots,
    strategy: Strategy,
) -> Callable[[], None]:
    policy = AllocationPolicy(strategy, Affinity.PREFER_SINGLE_NODE, allow_fragmentation=True)

    def operation() -> None:
        allocation = allocate(ledger, inventory, partition, request, policy)
        release(ledger.with_held("k", "a", allocation), "k")

    return operation


def whole_request(kernels: int, agents: int) -> dict[str, float]:
    """On a node whose memory is held by so many other kernels, shared by so many agents."""
    inventory, partition, *others = node(64, shares=False, cores=256, agents=agents)
    ledger = half_full(inventory, "cuda", shares=False)
    for n in range(kernels):
        share = Share(MEMORY, "mem-root", "mem", SlotKind.BYTES, 2**20)
        ledger = ledger.with_held(f"mem-{n}", "a", Allocation((share,)))
    request = ResourceSlots({"cuda.device": ONE, "cpu": 4 * ONE, "mem": 2**30})
    for other in others:
        allocate(ledger, inventory, other, request, AllocationPolicy())
    return row(timed(allocating(ledger, inventory, partition, request, Strategy.EVENLY)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="8,64,512")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for count in map(int, options.devices.split(",")):
        for shares, strategy, half in itertools.product((False, True), Strategy, (False, True)):
            kind = "shares" if shares else "whole"
            name = f"{count} {kind} {strategy.value} {'half' if half else 'one'}"
            results[name] = one_case(count, strategy, shares=shares, half=half)
    for kernels, agents in ((0, 1), (1000, 1), (0, 64)):
        name = f"64 GPUs 256 cores, {kernels} kernels, {agents} agents"
        results[name] = whole_request(kernels, agents)
    if options.json:
        print(json.dumps(results))
        return
    for name, figures in results.items():
        print(f"{name:34}", *(f"{key}={value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
