"""How fast devices are chosen.

    python benchmarks/allocate.py [--devices 8,64,512] [--slots 1,2] [--against COMMIT] [--json]

One operation is allocate and release, on a ledger that is half full, with NUMA preference. For each
number of devices: whole units and shares, `fill` and `evenly`, one device and half of all. At the
end a whole request (one GPU, four cores, memory) on a node of 64 GPUs and 256 cores, alone and
beside 1,000 kernels. `times_plain` is the time over that of the plain alternative in the same run:
free amounts in a dictionary, sorted for every request.

With two slots per device, GPUs offer memory beside their units or shares, and requests name one
slot. `uneven` means that each device has another amount of memory free. `--against` runs the
package of another commit (from a worktree of its own) in turns with this one, with one slot per
device: `times_before` is the time over that of the same case there.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Allocation, Ledger, Share
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import MEMORY, Device, DeviceId, Inventory
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.partition.split import Partition, split
from agentd.core.slots import ONE, ResourceSlots, SlotKind, SlotType

CENT = ONE // 100
MIB, GPU_MEMORY = 2**20, 80 * 2**30
BUDGET_S = 0.5
TURNS, TURN_S = 10, 0.1
ROOT = Path(__file__).parents[1]


class Case(NamedTuple):
    """One line of the table: devices, their slots, and what is asked for."""

    count: int
    strategy: str
    shares: bool
    half: bool
    slots: int = 1
    uneven: bool = False

    def __str__(self) -> str:
        kind = "shares" if self.shares else "whole"
        part = "half" if self.half else "one"
        name = f"{self.count} {kind} {self.strategy} {part}"
        name += f", {self.slots} slots" if self.slots > 1 else ""
        return name + (" uneven" if self.uneven else "")

    @property
    def before(self) -> "Case":
        """The same with one slot, which a package from before devices had several knows."""
        return self._replace(slots=1, uneven=False)


def devices(name: str, count: int, slot: str, numa_nodes: int, slots: int = 1) -> list[Device]:
    secondary = {"secondary": (_memory_of_gpu(),)} if slots > 1 else {}
    return [
        Device(
            DeviceId(name, f"{name}{n}"),
            f"{name}-{n}",
            slot,
            SlotKind.COUNT,
            ONE,
            numa_node=n * numa_nodes // count,
            **secondary,
        )
        for n in range(count)
    ]


def _memory_of_gpu() -> object:
    from agentd.core.devices import SecondarySlot  # noqa: PLC0415 - unknown to older packages

    return SecondarySlot("cuda.mem", SlotKind.BYTES, GPU_MEMORY)


def node(
    count: int, *, shares: bool, cores: int = 0, agents: int = 1, slots: int = 1
) -> tuple[Inventory, *tuple[Partition, ...]]:
    slot = "cuda.shares" if shares else "cuda.device"
    memory = Device(MEMORY, "mem", "mem", SlotKind.BYTES, 2**40)
    everything = [
        *devices("cuda", count, slot, 4, slots),
        *devices("cpu", max(cores, 1), "cpu", 4),
        memory,
    ]
    types = [
        SlotType(slot, SlotKind.COUNT, CENT if shares else ONE),
        SlotType("cpu", SlotKind.COUNT, ONE),
        SlotType("mem", SlotKind.BYTES, 1),
    ]
    if slots > 1:
        types.append(SlotType("cuda.mem", SlotKind.BYTES, MIB, primary=slot))
    names = ["a", *(f"agent-{n}" for n in range(1, agents))]
    rules = SplitRules(AllocationMode.SHARED, tuple(AgentRule(name) for name in names))
    parts = split(Inventory.of(types, everything), rules)
    return parts.inventory, *parts.partitions.values()


def half_full(
    inventory: Inventory, name: str, *, shares: bool, slots: int = 1, uneven: bool = False
) -> Ledger:
    """Every second device taken, or half of every device, each by a kernel of its own."""
    ledger = Ledger()
    for n, device in enumerate(inventory.by_name[name]):
        if shares or n % 2:
            amount = (30 + 7 * n % 40) * CENT if shares else ONE
            share = Share(device.device_id, device.stable_id, device.slot, device.kind, amount)
            if slots > 1:
                share = _share_of_two(device, inventory, amount, n if uneven else None)
            ledger = ledger.with_holding(f"{name}-{n}", "a", Allocation((share,)))
    return ledger


def _share_of_two(device: Device, inventory: Inventory, amount: int, n: int | None) -> Share:
    from agentd.core.allocation.ledger import build_share  # noqa: PLC0415 - the same

    amounts = {device.slot: amount}
    if n is not None:
        amounts["cuda.mem"] = GPU_MEMORY // 4 + 16 * n * MIB
    return build_share(device, inventory, amounts)


def time_calls(operation: Callable[[], None], budget_s: float = BUDGET_S) -> list[float]:
    """Seconds of processor time for each of as many operations as fit the budget, five at least."""
    operation()
    durations: list[float] = []
    deadline = time.process_time() + budget_s
    while time.process_time() < deadline or len(durations) < 5:
        start = time.process_time()
        operation()
        durations.append(time.process_time() - start)
    return durations


def row(durations: list[float]) -> dict[str, float]:
    ordered = sorted(durations)
    median = statistics.median(ordered)
    return {
        "ops_per_s": round(1 / median),
        "median_ms": round(median * 1000, 4),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1000, 4),
    }


def plain_call(free: dict[str, int], requested: int) -> Callable[[], None]:
    """The plain alternative: amounts in a dictionary, sorted for each request, freest first.

    It knows no holders, agents, NUMA nodes or evenness and explains nothing.
    """

    def operation() -> None:
        remaining, amounts = requested, {}
        for name, room in sorted(free.items(), key=lambda item: -item[1]):
            amounts[name] = min(room, remaining)
            remaining -= amounts[name]
            if not remaining:
                break
        for name, amount in amounts.items():
            free[name] -= amount
        for name, amount in amounts.items():
            free[name] += amount

    return operation


def one_case(case: Case, other: "Other | None" = None) -> dict[str, float]:
    inventory, partition = node(case.count, shares=case.shares, slots=case.slots)
    ledger = half_full(inventory, "cuda", shares=case.shares, slots=case.slots, uneven=case.uneven)
    request = requested_slots(case)
    (requested,) = request.values()
    free = {d.device_id.id: ledger.free(d, partition) for d in inventory.by_name["cuda"]}
    operation = allocation_call(ledger, inventory, partition, request, Strategy(case.strategy))
    figures = row(time_calls(operation))
    figures["times_plain"] = round(
        figures["median_ms"] / row(time_calls(plain_call(free, requested)))["median_ms"], 2
    )
    if other is not None:
        figures["times_before"] = round(ratio_to_other(operation, case, other), 2)
    return figures


def requested_slots(case: Case) -> ResourceSlots:
    amount = ONE
    if case.half:
        amount = case.count * ONE // 4 if case.shares else case.count // 2 * ONE
    elif case.shares:
        amount = ONE // 2
    return ResourceSlots({"cuda.shares" if case.shares else "cuda.device": amount})


def ratio_to_other(operation: Callable[[], None], case: Case, other: "Other") -> float:
    """Return the time of an operation over that of the other package.

    It is the best turn of each that counts: what else the machine does only adds to a turn.
    """
    own_medians, other_medians = [], []
    for _ in range(TURNS):
        other_medians.append(other.median_s(case.before))
        own_medians.append(statistics.median(time_calls(operation, TURN_S)))
    return min(own_medians) / min(other_medians)


class Other:
    """This program on the package of another commit, in a process that times cases on request."""

    def __init__(self, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            env=os.environ | {"PYTHONPATH": str(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def median_s(self, case: Case) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def package_of(commit: str) -> Iterator[Other]:
    """Check a commit out into a worktree of its own, for as long as its package is measured."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            other = Other(tree / "src")
            yield other
            other.end()
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def serve() -> None:
    """Time the cases that come in, one a line, and say each one's median in seconds."""
    for line in sys.stdin:
        print(case_median_s(Case(*json.loads(line))), flush=True)


def case_median_s(case: Case) -> float:
    inventory, partition = node(case.count, shares=case.shares)
    ledger = half_full(inventory, "cuda", shares=case.shares)
    request = requested_slots(case)
    operation = allocation_call(ledger, inventory, partition, request, Strategy(case.strategy))
    return statistics.median(time_calls(operation, TURN_S))


def allocation_call(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    request: ResourceSlots,
    strategy: Strategy,
) -> Callable[[], None]:
    policy = AllocationPolicy(strategy, Affinity.PREFER_SINGLE_NODE, allow_fragmentation=True)

    def operation() -> None:
        allocation = allocate(ledger, inventory, partition, request, policy)
        ledger.with_holding("k", "a", allocation).without("k")

    return operation


def whole_request(kernels: int, agents: int) -> dict[str, float]:
    """On a node whose memory is held by so many other kernels, shared by so many agents."""
    inventory, partition, *others = node(64, shares=False, cores=256, agents=agents)
    ledger = half_full(inventory, "cuda", shares=False)
    for n in range(kernels):
        share = Share(MEMORY, "mem-root", "mem", SlotKind.BYTES, 2**20)
        ledger = ledger.with_holding(f"mem-{n}", "a", Allocation((share,)))
    request = ResourceSlots({"cuda.device": ONE, "cpu": 4 * ONE, "mem": 2**30})
    for other in others:
        allocate(ledger, inventory, other, request, AllocationPolicy())
    return row(time_calls(allocation_call(ledger, inventory, partition, request, Strategy.EVENLY)))


def cases(counts: list[int], slots: list[int]) -> Iterator[Case]:
    for count, number in itertools.product(counts, slots):
        for shares, strategy, half in itertools.product((False, True), Strategy, (False, True)):
            case = Case(count, strategy.value, shares, half, number)
            yield case
            if number > 1 and shares:
                yield case._replace(uneven=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="8,64,512")
    parser.add_argument("--slots", default="1", help="slots per device, 1 or 1,2")
    parser.add_argument("--against", metavar="COMMIT", help="compare with the package of a commit")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    counts = [int(count) for count in options.devices.split(",")]
    slots = [int(count) for count in options.slots.split(",")]
    results: dict[str, dict[str, float]] = {}
    with package_of(options.against) if options.against else nullcontext() as other:
        for case in cases(counts, slots):
            results[str(case)] = one_case(case, other)
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
