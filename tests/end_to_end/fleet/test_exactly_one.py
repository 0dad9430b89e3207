"""Creates under chaos: of every kernel id there is one kernel at most, and none is lost unsaid.

The census is the nodes' own view. Some sixty creates here, 10,000 under `make soak`.
"""

import asyncio
import contextlib
import os
import random
import signal

import aiohttp
import pytest

from agentd_fleet.asking import Pace
from daemon import Daemon
from end_to_end.fleet.fleet_world import GatewayProgram, World

SOAK = bool(os.environ.get("AGENTD_SOAK"))
CREATES, CALLERS, TROUBLES = (10_000, 24, 500) if SOAK else (60, 3, 6)
GAVE_UP = {"InsufficientResource", "UnsupportedResource"}


class Chaos:
    """Kills, freezes and revives parts of a fleet, one after the other, until it is over."""

    def __init__(self, world: World, gateways: list[GatewayProgram], rng: random.Random) -> None:
        self.world, self.gateways, self.rng = world, gateways, rng
        self.done: list[str] = []
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.rng.uniform(0.05, 0.2))
            await self.once()

    async def once(self) -> None:
        what = self.rng.choice([self.gateway_dies, self.daemon_dies, self.freeze, self.publisher])
        self.done.append(what.__name__)
        await what()

    async def gateway_dies(self) -> None:
        gateway = self.rng.choice(self.gateways)
        await gateway.stop(signal.SIGKILL)
        gateway.start()

    async def daemon_dies(self) -> None:
        daemon = self.rng.choice(list(self.world.nodes.values()))
        await daemon.stop(signal.SIGKILL)
        await daemon.start()

    async def publisher(self) -> None:
        program = self.rng.choice([p for p in self.world.programs if p.command == "join"])
        await program.stop(signal.SIGKILL)
        program.start()

    async def freeze(self) -> None:
        """Stop a process for a while: a daemon, a gateway, a publisher, or etcd."""
        pids = [program.pid for program in self.world.programs]
        pids += [d.process.pid for d in self.world.nodes.values() if d.process is not None]
        etcd = self.world.etcd
        assert etcd is not None
        pids += [process.pid for process in etcd.processes if process is not None]
        pid = self.rng.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.1, 3.0))
        os.kill(pid, signal.SIGCONT)


async def settled(gateways: list[GatewayProgram], kernel_id: str, rng: random.Random) -> str:
    """Order a kernel again and again, at any gateway, until the answer is certain."""
    patience = 120
    async with asyncio.timeout(patience):
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                async with asyncio.timeout(20):
                    body = {"kernel_id": kernel_id, "slots": {"cpu": 0, "mem": "1m"}}
                    answer = await rng.choice(gateways).create(**body)
                if answer.status in (200, 201):
                    return answer.json["node_id"]
                if answer.json["code"] in GAVE_UP:
                    return ""
            await asyncio.sleep(0.05)


async def deleted(daemon: Daemon, kernel_id: str) -> None:
    """Delete a kernel at its node, which may be dead or frozen for a while."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(20):
                    await daemon.call("DELETE", f"/v1/kernels/{kernel_id}?timeout=0")
                return
            await asyncio.sleep(0.05)


def said_of(world: World, kernels: set[str]) -> str:
    """What all logs say of some kernels."""
    logs = [program.log for program in world.programs] + [d.log for d in world.nodes.values()]
    lines = [line for log in logs for line in log.splitlines()]
    named = [line for line in lines if any(f'"{kernel}"' in line for kernel in kernels)]
    return "\n".join(sorted(named, key=lambda line: line.partition('"timestamp"')[2]))


@pytest.mark.timeout(6 * 3600 if SOAK else 240)
async def test_no_kernel_id_is_on_two_nodes_and_none_is_lost(world: World) -> None:
    seed = int(os.environ["AGENTD_SEED"])
    rng = random.Random(seed)
    await world.start_etcd(3)
    nodes = await world.start_nodes("cuda", "rocm", "none")
    for node in nodes:
        world.join(node)
    gateways = [world.gateway() for _ in range(2)]
    for gateway in gateways:
        await gateway.until(dict.fromkeys(nodes, "ready"))
    chaos = Chaos(world, gateways, rng)
    breaking = asyncio.create_task(chaos.run())
    told: dict[str, str] = {}

    async def call() -> None:
        while len(told) < CREATES or len(chaos.done) < TROUBLES:
            told[name := f"k{len(told)}"] = ""
            told[name] = await settled(gateways, name, rng)
            if not SOAK:
                await asyncio.sleep(rng.uniform(0, 0.3))
            elif told[name]:  # the nodes would be full of processes
                await deleted(world.nodes[told[name]], name)

    try:
        await asyncio.gather(*(call() for _ in range(CALLERS)))
    finally:
        chaos.is_over = True
        await breaking
        print(f"seed {seed}: {len(told)} creates, {len(chaos.done)} troubles")
    census = await world.census()
    placed = {name: [node] for name, node in told.items() if node}
    names = census.keys() if SOAK else census.keys() | placed.keys()
    odd = {name for name in names if census.get(name) != placed.get(name)}
    assert not odd, said_of(world, odd)
    pace = Pace()
    assert pace.settled_s >= pace.fresh_s + 20 + 10 + 30, "longer than a request is under way"
