"""What a gateway adds to a create, how soon a lost node is known, and what publishers cost.

    python benchmarks/gateway.py [--rounds 60] [--publishers 0] [--known 0] [--lease 5] [--json]

Starts etcd, one daemon, its publisher and a gateway. Creates are paired: one at the node, one
through the gateway, in turn, each removed again. With `--publishers 500` so many more nodes are
simulated, each with a lease of its own kept alive over the real client, and free amounts that
change once a second: what etcd and the gateway take for that is read from /proc. With
`--known 10000` so many nodes stand in etcd when a gateway starts: how long until it has its view
of them, and its memory.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from create import processor_s, pss_mib

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.view.reports import FreeReport, NodeReport, SlotTypeReport
from end_to_end.fleet.fleet_world import SLEEP, GatewayProgram, Pool, World


async def creates(world: World, gateway: GatewayProgram, node: str, rounds: int) -> dict[str, Any]:
    """Create at the node and through the gateway in turn."""
    daemon = world.nodes[node]
    slots = {"slots": {"cpu": 1, "mem": "1m"}, **SLEEP}
    durations: dict[str, list[float]] = {"node": [], "gateway": []}

    async def timed(name: str, number: int) -> None:
        kernel = f"{name}{number}"
        before = time.perf_counter()
        if name == "node":
            answer = await daemon.create(kernel_id=kernel, **slots)
        else:
            answer = await gateway.create(kernel_id=kernel, **slots)
        durations[name].append(time.perf_counter() - before)
        assert answer.status == 201, answer.content
        await gateway.call("DELETE", f"/v1/kernels/{kernel}?node={node}&timeout=0")

    for number in range(rounds):
        for name in ("node", "gateway"):
            await timed(name, number)
    pairs = zip(durations["gateway"], durations["node"], strict=True)
    return {
        "node_ms": statistics.median(durations["node"]) * 1000,
        "gateway_ms": statistics.median(durations["gateway"]) * 1000,
        "added_ms": statistics.median(a - b for a, b in pairs) * 1000,
    }


def report(number: int) -> tuple[bytes, bytes]:
    name = ("cuda.device", "rocm.device", "tpu.chip")[number % 3]
    types = [SlotTypeReport("cpu", "count", "1"), SlotTypeReport(name, "count", "1")]
    amounts = {"cpu": "64", name: "8"}
    agents = {"agent-1": amounts, "agent-2": amounts}
    node_report = NodeReport(
        install_id=f"i{number}",
        boot_id="b",
        version="0",
        url=f"https://node-{number}:6001",
        agents=agents,
        capacity=amounts,
        slot_types=types,
    )
    free = {"cpu": str(random.randrange(64)), name: str(random.randrange(8))}
    free_report = FreeReport(dict.fromkeys(agents, free), {}, free)
    return msgspec.json.encode(node_report), msgspec.json.encode(free_report)


async def publish(etcd: EtcdClient, number: int, lease_s: int) -> None:
    """Be a publisher: a lease, what there is, and what is free once a second."""
    node_report, free = report(number)
    await asyncio.sleep(random.random() * lease_s)
    lease = await etcd.grant(lease_s)
    await etcd.put(f"/agentd/main/nodes/sim-{number}", node_report, lease=lease)
    renewed_at = time.monotonic()
    while True:
        _, free = report(number)
        await etcd.put(f"/agentd/main/free/sim-{number}", free, lease=lease)
        if time.monotonic() - renewed_at > lease_s / 3:
            await etcd.keep_alive(lease)
            renewed_at = time.monotonic()
        await asyncio.sleep(1.0)


async def simulated(
    world: World, gateway: GatewayProgram, count: int, lease_s: int
) -> dict[str, Any]:
    """Have many more nodes publish, and read what that costs."""
    assert world.etcd is not None
    (etcd_process,) = [process for process in world.etcd.processes if process is not None]
    async with world.client() as etcd:
        tasks = [asyncio.create_task(publish(etcd, number, lease_s)) for number in range(count)]
        await asyncio.sleep(lease_s + 5)
        pids = {"etcd": etcd_process.pid, "gateway": gateway.pid}
        before, start = {name: processor_s(pid) for name, pid in pids.items()}, time.monotonic()
        await asyncio.sleep(10)
        elapsed_s = time.monotonic() - start
        fleet_stats = await gateway.get("/v1/stats")
        result = {
            f"{name}_cores": (processor_s(pid) - before[name]) / elapsed_s
            for name, pid in pids.items()
        }
        result |= {f"{name}_pss_mib": pss_mib(pid) for name, pid in pids.items()}
        result |= {"nodes": len(fleet_stats["nodes"]), "failed": sum(task.done() for task in tasks)}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return result


async def start_among(world: World, count: int) -> dict[str, Any]:
    """Start a gateway where many nodes are known already."""
    async with world.client() as etcd:
        for first in range(0, count, 100):
            numbers = range(first, min(first + 100, count))
            reports = [(number, report(number)) for number in numbers]
            await asyncio.gather(
                *(etcd.put(f"/agentd/main/nodes/sim-{n}", parts[0]) for n, parts in reports),
                *(etcd.put(f"/agentd/main/free/sim-{n}", parts[1]) for n, parts in reports),
            )
    before = time.monotonic()
    gateway = world.gateway()
    async with asyncio.timeout(120):
        while "gateway.ready" not in gateway.log:
            await asyncio.sleep(0.02)
    ready_s = time.monotonic() - before
    memory = pss_mib(gateway.pid)
    return {"nodes": len(await gateway.states()), "ready_s": ready_s, "pss_mib": memory}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
    pool = Pool(folder)
    world = World(folder, pool)
    try:
        await world.start_etcd()
        (node,) = await world.start_nodes("cuda")
        publisher = world.join(node, lease=options.lease)
        gateway = world.gateway()
        await gateway.until({node: "ready"})
        result: dict[str, Any] = await creates(world, gateway, node, options.rounds)
        result["publisher_pss_mib"] = pss_mib(publisher.pid)
        result["gateway_pss_mib"] = pss_mib(gateway.pid)
        process = world.nodes[node].process
        assert process is not None
        before = time.monotonic()
        process.kill()
        await gateway.until({node: "daemon-down"})
        result["daemon_down_s"] = time.monotonic() - before
        os.kill(publisher.pid, signal.SIGKILL)
        before = time.monotonic()
        await gateway.until({node: "lost"}, within_s=60)
        result["lost_s"] = time.monotonic() - before
        await asyncio.to_thread(process.wait)
        world.nodes[node].process = None
        publisher.process.wait()
        publisher.process = None
        if options.publishers:
            result["simulated"] = await simulated(world, gateway, options.publishers, options.lease)
        if options.known:
            result["start"] = await start_among(world, options.known)
        return result
    finally:
        await world.close()
        await pool.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--publishers", type=int, default=0)
    parser.add_argument("--known", type=int, default=0)
    parser.add_argument("--lease", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = asyncio.run(run(options))
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:20} {value if isinstance(value, dict) else f'{value:.2f}'}")


if __name__ == "__main__":
    main()
