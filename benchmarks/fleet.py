"""How fast the fleet decides where a kernel goes, and how often the first node asked has room.

    python benchmarks/fleet.py [--nodes 10000] [--seconds 3] [--quick] [--json]

The view and the choice are the real ones; the nodes are a ledger of what each agent has free. Two
agents to a node: CUDA, ROCm, TPU, shares of GPUs, and processors alone. Prints

- the view: time and memory to make it of all nodes' reports, the time to explain a refusal, and
  the time of a placing decision with what came in since the last one: 1,000 reports a second, each
  of a kernel that began or ended, at 100 and at 1,000 decisions a second;
- the placements, for so many simulated seconds each: creates that the first node asked had room
  for, in percent (`first`), nodes asked for each create that found one (`tries`), and creates of
  1,000 that all of the eight or less that were asked refused (`refused`) or for which the view
  knew nobody (`nobody`). A node reports a change at
  once, but once a second at most; a view's age is how long a report takes. Load is kept: for each
  kernel that begins, one of its kind ends. One gateway, or three, each with its own view and
  knowing of its own placements alone.
"""

import argparse
import gc
import heapq
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from agentd.core.slots import ONE, ResourceSlots, SlotKind, SlotType
from agentd_fleet.placement.choice import (
    Candidate,
    Constraints,
    PlacementPolicy,
    choose_candidates,
    classify_rejections,
)
from agentd_fleet.view.fleet_view import FleetNode, FleetView, Offer

CPU, MEM = "cpu", "mem"
GIB = 2**30
AGENTS = ("agent-1", "agent-2")
TYPES = {
    name: SlotType(name, SlotKind.BYTES if name == MEM else SlotKind.COUNT, quantum)
    for name, quantum in {
        CPU: ONE,
        MEM: 1,
        "cuda.device": ONE,
        "cuda.shares": ONE // 100,
        "rocm.device": ONE,
        "tpu.chip": ONE,
    }.items()
}
KINDS = {  # of a node: its share of all nodes, and what each of its two agents has of its own
    "cuda.device": (40, 4 * ONE),
    "rocm.device": (20, 2 * ONE),
    "tpu.chip": (20, 2 * ONE),
    "cuda.shares": (10, 4 * ONE),
    CPU: (10, 64 * ONE),
}
KERNELS = {  # how much a kernel of a kind asks for
    "cuda.device": (ONE, ONE, 2 * ONE, 4 * ONE),
    "rocm.device": (ONE, 2 * ONE),
    "tpu.chip": (ONE, 2 * ONE),
    "cuda.shares": (ONE // 4, ONE // 2, ONE),
    CPU: (2 * ONE, 8 * ONE, 16 * ONE),
}
LOADS, AGES, RATES, GATEWAYS = (50, 80, 90, 95, 99), (0, 1, 5), (100, 1500), (1, 3)
MOST_TRIES = 8


class Kernel(msgspec.Struct):
    kind: str
    slots: ResourceSlots
    where: Candidate


class Ledger:
    """What every agent has free, exactly, and the kernels that hold the rest."""

    def __init__(self, nodes: int, chance: random.Random) -> None:
        self.chance = chance
        self.kind_of: dict[str, str] = {}
        self.agents: dict[str, list[Candidate]] = {kind: [] for kind in KINDS}
        self.free: dict[Candidate, ResourceSlots] = {}
        self.kernels: dict[str, list[Kernel]] = {kind: [] for kind in KINDS}
        pattern = [kind for kind, (share, _) in KINDS.items() for _ in range(share)]
        self.chance.shuffle(pattern)
        self.capacity = {
            kind: ResourceSlots({CPU: 64 * ONE, MEM: 512 * GIB, kind: amount})
            for kind, (_, amount) in KINDS.items()
        }
        for number in range(nodes):
            node_id, kind = f"node-{number:05}", pattern[number % len(pattern)]
            self.kind_of[node_id] = kind
            for agent in AGENTS:
                self.agents[kind].append(Candidate(node_id, agent))
                self.free[Candidate(node_id, agent)] = self.capacity[kind]

    def wanted(self, kind: str) -> ResourceSlots:
        amount = self.chance.choice(KERNELS[kind])
        cores = amount if kind == CPU else 4 * ONE
        return ResourceSlots({CPU: cores, MEM: 16 * GIB, kind: amount})

    def place(self, kind: str, slots: ResourceSlots, candidate: Candidate) -> bool:
        free = self.free[candidate]
        if any(free[name] < amount for name, amount in slots.items()):
            return False
        remaining = {name: free[name] - amount for name, amount in slots.items()}
        self.free[candidate] = ResourceSlots({**free, **remaining})
        self.kernels[kind].append(Kernel(kind, slots, candidate))
        return True

    def end_one(self, kind: str) -> Candidate | None:
        kernels = self.kernels[kind]
        if not kernels:
            return None
        index = self.chance.randrange(len(kernels))
        kernels[index], kernels[-1] = kernels[-1], kernels[index]
        ended = kernels.pop()
        self.free[ended.where] += ended.slots
        return ended.where

    def fill(self, percent: int) -> None:
        """Place kernels by chance until so much of each kind's own slot is held."""
        for kind, (_, amount) in KINDS.items():
            remaining = amount * len(self.agents[kind]) * percent // 100
            while remaining > 0:
                slots = self.wanted(kind)
                if slots[kind] > remaining:
                    slots = ResourceSlots({**slots, kind: remaining})
                if self.place(kind, slots, self.chance.choice(self.agents[kind])):
                    remaining -= slots[kind]

    def report(self, node_id: str) -> FleetNode:
        """Return what a node says of itself, in values of its own, as if just read."""
        kind = self.kind_of[node_id]
        offers = {
            agent: Offer(
                ResourceSlots(self.capacity[kind]),
                ResourceSlots(self.free[Candidate(node_id, agent)]),
            )
            for agent in AGENTS
        }
        types = {name: TYPES[name] for name in (CPU, MEM, kind)}
        return FleetNode(node_id, types, offers)

    def reports(self) -> list[FleetNode]:
        return [self.report(node_id) for node_id in self.kind_of]


class Reports:
    """Reports on their way: sent at once, but once a second by a node, and so long on the way."""

    def __init__(self, ledger: Ledger, age_s: float, gateways: int) -> None:
        self._ledger, self._age_s = ledger, age_s
        self._due: list[tuple[float, str]] = []
        self._next_s: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._in_transit: list[deque[tuple[float, FleetNode]]] = [deque() for _ in range(gateways)]

    def changed(self, node_id: str, now_s: float) -> None:
        if node_id not in self._waiting:
            self._waiting.add(node_id)
            heapq.heappush(self._due, (max(now_s, self._next_s.get(node_id, 0.0)), node_id))

    def arrived(self, gateway: int, now_s: float) -> Iterable[FleetNode]:
        while self._due and self._due[0][0] <= now_s:
            sent_s, node_id = heapq.heappop(self._due)
            self._waiting.discard(node_id)
            self._next_s[node_id] = sent_s + 1
            for queue in self._in_transit:
                queue.append((sent_s + self._age_s, self._ledger.report(node_id)))
        queue = self._in_transit[gateway]
        while queue and queue[0][0] <= now_s:
            yield queue.popleft()[1]


def placements(
    nodes: int,
    load: int,
    policy: PlacementPolicy,
    age_s: float,
    rate: int,
    gateways: int,
    seconds: float,
) -> dict[str, float]:
    chance = random.Random(f"{load} {policy} {age_s} {rate} {gateways}")
    ledger = Ledger(nodes, chance)
    ledger.fill(load)
    reports = Reports(ledger, age_s, gateways)
    views = [FleetView(slot_types=TYPES).with_changes(ledger.reports(), revision=1)] * gateways
    kinds, weights = [*KINDS], [share for share, _ in KINDS.values()]
    first = tried = placed = refused = without_candidates = 0
    creates = int(seconds * rate) + int(age_s * rate)
    for number in range(creates):
        now_s, gateway = number / rate, number % gateways
        if number == int(age_s * rate):  # from here on the views are as old as they are to be
            first = tried = placed = refused = without_candidates = 0
        view = views[gateway].with_changes(reports.arrived(gateway, now_s))
        kind = chance.choices(kinds, weights)[0]
        slots = ledger.wanted(kind)
        ranked = choose_candidates(view, slots, Constraints(), policy, chance, MOST_TRIES)
        for tries, candidate in enumerate(ranked, 1):
            if ledger.place(kind, slots, candidate):
                placed, tried, first = placed + 1, tried + tries, first + (tries == 1)
                view = view.with_debit(*candidate, slots)
                reports.changed(candidate.node_id, now_s)
                if ended := ledger.end_one(kind):
                    reports.changed(ended.node_id, now_s)
                break
        else:
            refused, without_candidates = refused + bool(ranked), without_candidates + (not ranked)
        views[gateway] = view
    with_candidates = placed + refused
    creates = max(1, with_candidates + without_candidates)
    return {
        "first": round(100 * first / max(1, with_candidates), 2),
        "tries": round(tried / max(1, placed), 3),
        "refused": round(1000 * refused / creates, 2),
        "nobody": round(1000 * without_candidates / creates, 2),
    }


def decisions(
    ledger: Ledger, view: FleetView, policy: PlacementPolicy, rate: int
) -> dict[str, float]:
    """Milliseconds of decisions, with the reports that came since the one before."""
    decision_times, update_times, debit_times = [], [], []
    chance = ledger.chance
    slots = ResourceSlots({"cuda.device": ONE, CPU: 4 * ONE, MEM: 16 * GIB})
    for _ in range(1000):
        count = sum(chance.random() < 1 / 100 for _ in range(100_000 // rate))
        ended = [ledger.end_one(chance.choice([*KINDS])) for _ in range(count)]
        reports = [ledger.report(candidate.node_id) for candidate in ended if candidate]
        before = time.perf_counter()
        view = view.with_changes(reports)
        updated = time.perf_counter()
        ranked = choose_candidates(view, slots, Constraints(), policy, chance)
        decided = time.perf_counter()
        view = view.with_debit(*ranked[0], slots)
        debit_times.append(time.perf_counter() - decided)
        decision_times.append(decided - before)
        update_times.append(updated - before)
        ledger.place("cuda.device", slots, ranked[0])
    names = ("decision", "of which reports", "debit after it")
    return {
        f"{name} {label}": milliseconds(times, part)
        for name, times in zip(names, (decision_times, update_times, debit_times), strict=True)
        for label, part in (("p50", 0.5), ("p99", 0.99))
    }


def milliseconds(times: list[float], part: float) -> float:
    return round(sorted(times)[int(len(times) * part)] * 1000, 3)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def of_the_view(nodes: int) -> dict[str, Any]:
    ledger = Ledger(nodes, random.Random(1))
    ledger.fill(80)
    gc.collect()
    initial_mib = resident_mib()
    reports = ledger.reports()
    with_reports_mib = resident_mib()
    before = time.perf_counter()
    view = FleetView(slot_types=TYPES).with_changes(reports, revision=1)
    view.statistics()
    built_ms = (time.perf_counter() - before) * 1000
    results: dict[str, Any] = {
        "build_ms": round(built_ms, 1),
        "reports_mib": round(with_reports_mib - initial_mib, 1),
        "view_mib": round(resident_mib() - with_reports_mib, 1),
    }
    del reports
    gc.collect()
    gc.freeze()
    refusals = []
    for _ in range(30):
        before = time.perf_counter()
        classify_rejections(view, ResourceSlots({"cuda.device": 9 * ONE, CPU: ONE}), Constraints())
        refusals.append(time.perf_counter() - before)
    results["unfit_ms"] = milliseconds(refusals, 0.5)
    for policy, rate in itertools.product(PlacementPolicy, (100, 1000)):
        results[f"{policy} {rate}/s"] = decisions(ledger, view, policy, rate)
        view = FleetView(slot_types=TYPES).with_changes(ledger.reports(), revision=1)
    gc.unfreeze()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--quick", action="store_true", help="few cases, each a second")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = itertools.product(LOADS, PlacementPolicy, AGES, RATES, GATEWAYS)
    seconds = options.seconds
    if options.quick:
        cases, seconds = (
            itertools.product((50, 90, 99), PlacementPolicy, (0, 1), (100, 1500), (1,)),
            1.0,
        )
    results: dict[str, Any] = {"nodes": options.nodes, "view": of_the_view(options.nodes)}
    if not options.json:
        for name, figures in results["view"].items():
            print(f"{name:14} {figures}", flush=True)
        print("load policy age_s creates/s gateways first tries refused nobody")
    results["placements"] = []
    for load, policy, age_s, rate, gateways in cases:
        figures = placements(options.nodes, load, policy, age_s, rate, gateways, seconds)
        case = {"load": load, "policy": policy.value, "age_s": age_s, "creates_per_s": rate}
        row = {**case, "gateways": gateways, **figures}
        results["placements"].append(row)
        if not options.json:
            print(*(f"{value!s:>7}" for value in row.values()), flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
