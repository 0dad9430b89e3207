"""What a gateway costs with many nodes that have many slot types.

    python benchmarks/fleet_scale.py [--creates 0] [--json]

Simulated with the real reports, view and choice, each case in a process of its own: the time to
read the reports of all nodes into a view, the memory of that, and the time of an update (a report
of one node read, and the view after it), of a debit, and of a decision by each policy, where
nothing fits, and of the refusal then. Times are those of the processor. Each node has two agents,
and 7 or 47 slot types.

With `--creates 20` a gateway over a real etcd is asked for 100 creates a second, for so many
seconds, among 400 nodes that answer at once and report after each.
"""

import argparse
import asyncio
import gc
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from agentd.core.slots import ONE, ResourceSlots
from agentd_fleet.placement.choice import (
    Constraints,
    PlacementPolicy,
    choose_candidates,
    classify_rejections,
)
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.view.fleet_view import FleetView
from agentd_fleet.view.reports import parse_node_report, parse_slot_type, with_free
from end_to_end.fleet.fleet_world import Pool, World
from support.fleet_reports import free_report, node_report, slot_types

NODES, TYPES, ROUNDS = (400, 10_000), (7, 47), 2000
RATE, STEADY_NODES = 100, 400
REPORT_S = 0.2
"""How long a publisher waits before it reports a change."""
WANTED = ResourceSlots({"cpu": ONE, "dev0.unit": ONE})
TOO_MUCH = ResourceSlots({"cpu": 64 * ONE, "dev0.unit": 64 * ONE})
"""What every agent has, and none has free."""


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def spread_ms(work: Callable[[int], object], rounds: int = ROUNDS) -> dict[str, float]:
    durations = []
    for number in range(rounds):
        before = time.process_time()
        work(number)
        durations.append(time.process_time() - before)
    durations.sort()
    return {
        name: round(durations[int(rounds * part)] * 1000, 3)
        for name, part in (("p50", 0.5), ("p99", 0.99))
    }


def simulated(nodes: int, types: int) -> dict[str, Any]:
    choice = random.Random(1)
    names = [f"node-{number}" for number in range(nodes)]
    reports = {name: node_report(number, types) for number, name in enumerate(names)}
    free = {name: free_report(types, choice) for name in names}
    gc.collect()
    initial_mib, before = resident_mib(), time.process_time()
    types_of_fleet = [parse_slot_type(item) for item in slot_types(types)]
    published = {
        name: parse_node_report(name, report, seen_at=0.0) for name, report in reports.items()
    }
    view = FleetView(slot_types={slot.name: slot for slot in types_of_fleet})
    view = view.with_changes(with_free(published[name], free[name]) for name in names)
    view.statistics()
    result: dict[str, Any] = {
        "nodes": nodes,
        "slot_types": types,
        "start_s": round(time.process_time() - before, 2),
        "view_mib": round(resident_mib() - initial_mib, 1),
    }
    gc.collect()
    updates = [(choice.choice(names), free_report(types, choice)) for _ in range(ROUNDS)]

    def update(number: int) -> None:
        nonlocal view
        name, report = updates[number]
        view = view.with_changes([with_free(published[name], report)], revision=number)

    def debit(number: int) -> None:
        nonlocal view
        view = view.with_debit(updates[number][0], "agent-1", WANTED)

    result["update_ms"] = spread_ms(update)
    result["debit_ms"] = spread_ms(debit)
    for policy in PlacementPolicy:
        result[f"{policy.value}_ms"] = spread_ms(
            lambda _, policy=policy: choose_candidates(view, WANTED, Constraints(), policy, choice)
        )
    result["nothing_fits_ms"] = spread_ms(
        lambda _: choose_candidates(view, TOO_MUCH, Constraints(), PlacementPolicy.PACK, choice),
        100,
    )
    result["refusal_ms"] = spread_ms(
        lambda _: classify_rejections(view, TOO_MUCH, Constraints()), 100
    )
    return result


class Nodes:
    """Nodes that answer every create at once, and report it to etcd as a publisher does."""

    def __init__(self, etcd: EtcdClient, socket: Path, types: int) -> None:
        self._etcd, self._socket, self._types = etcd, socket, types
        self._choice = random.Random(1)
        self._reporting: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/agents/{agent}/kernels", self._create)
        app.router.add_get("/v1/node", self._answer_probe)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.UnixSite(self._runner, self._socket).start()
        for first in range(0, STEADY_NODES, 50):
            numbers = range(first, min(first + 50, STEADY_NODES))
            await asyncio.gather(*(self._publish(number) for number in numbers))

    async def stop(self) -> None:
        await asyncio.gather(*self._reporting.values())
        await self._runner.cleanup()

    async def _publish(self, number: int) -> None:
        report = node_report(number, self._types, f"unix:{self._socket}")
        await self._etcd.put(f"/agentd/main/nodes/node-{number}", report)
        await self._report(f"node-{number}")

    async def _report(self, node: str) -> None:
        await self._etcd.put(f"/agentd/main/free/{node}", free_report(self._types, self._choice))

    async def _create(self, request: web.Request) -> web.Response:
        node, body = request.headers["Agentd-Node"], await request.json()
        if node not in self._reporting and "dry_run" not in request.query:
            self._reporting[node] = asyncio.create_task(self._report_later(node))
        content = {"kernel_id": body["kernel_id"], "agent_id": request.match_info["agent"]}
        return web.json_response(content, status=201, headers={"Agentd-Node": node})

    async def _answer_probe(self, request: web.Request) -> web.Response:
        node = request.headers["Agentd-Node"]
        return web.json_response({"id": node}, headers={"Agentd-Node": node})

    async def _report_later(self, node: str) -> None:
        await asyncio.sleep(REPORT_S)
        del self._reporting[node]
        await self._report(node)


async def steady(seconds: int, types: int) -> dict[str, Any]:
    """Create at a steady rate, whether or not earlier creates have been answered."""
    folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
    pool = Pool(folder)
    world = World(folder, pool)
    durations: list[float] = []
    try:
        await world.start_etcd()
        async with world.client() as etcd:
            nodes = Nodes(etcd, folder / "nodes.sock", types)
            await nodes.start()
            before = time.monotonic()
            gateway = world.gateway()
            while "gateway.ready" not in gateway.log:
                await asyncio.sleep(0.02)
            ready_s = time.monotonic() - before
            connector = aiohttp.UnixConnector(str(gateway.socket), limit=0)
            async with aiohttp.ClientSession("http://fleet", connector=connector) as session:

                async def create(number: int) -> None:
                    slots = {"cpu": 0, "mem": "1m", "dev1.unit": 1}
                    body = {"kernel_id": f"k{number}", "command": ["a"], "slots": slots}
                    start = time.perf_counter()
                    async with session.post("/v1/kernels", json=body) as response:
                        assert response.status == 201, await response.text()
                    durations.append(time.perf_counter() - start)

                first_start, tasks = time.perf_counter(), []
                for number in range(seconds * RATE):
                    await asyncio.sleep(max(0, first_start + number / RATE - time.perf_counter()))
                    tasks.append(asyncio.create_task(create(number)))
                await asyncio.gather(*tasks)
            await nodes.stop()
    finally:
        await world.close()
        await pool.close()
        shutil.rmtree(folder, ignore_errors=True)
    durations.sort()
    parts = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    create_ms = {
        name: round(durations[int(len(durations) * part)] * 1000, 1) for name, part in parts
    }
    case = {"nodes": STEADY_NODES, "slot_types": types}
    return {**case, "ready_s": round(ready_s, 2), "create_ms": create_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--creates", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for nodes, types in itertools.product(NODES, TYPES):
        with ProcessPoolExecutor(1) as alone:
            results.append(alone.submit(simulated, nodes, types).result())
    if options.creates:
        results += [asyncio.run(steady(options.creates, types)) for types in TYPES]
    for result in results:
        print(json.dumps(result) if options.json else result)


if __name__ == "__main__":
    main()
