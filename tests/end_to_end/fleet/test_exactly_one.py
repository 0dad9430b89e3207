"""Creates and deletes under chaos: one kernel of an id at most, none lost unsaid, routes true.

The census is the nodes' own view, and the oracle of routes what is in etcd once all faults have
ended. Some sixty creates here; under `make soak` as many as there is time for.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import deque
from typing import Any

import aiohttp
import pytest

from agentd_fleet.placement.attempts import PlacementTimeouts
from agentd_fleet.store.etcd_transport import EtcdRefused, EtcdUnavailable
from agentd_fleet.store.route import read_route
from end_to_end.fleet.fleet_world import GatewayProgram, World
from end_to_end.fleet.network import Proxy

SOAK_S = float(os.environ.get("AGENTD_SOAK", "0"))
CREATES, CALLERS, TROUBLES = (0, 24, 0) if SOAK_S else (60, 3, 6)
MOST_LASTING = 150
"""Kernels that run at once: in an hour more would be made than a machine has processes for."""
QUICK = {
    "agentd_fleet.placement.attempts.PlacementTimeouts.retry_for_s": 2.0,
    "agentd_fleet.placement.attempts.PlacementTimeouts.send_within_s": 5.0,
    "agentd_fleet.placement.attempts.PlacementTimeouts.sweep_period_s": 1.0,
    "agentd_fleet.placement.attempts.PlacementTimeouts.absent_for_s": 10.0,
    "agentd_fleet.store.etcd_store.SILENCE_S": 1.0,
}
"""A gateway's deadlines here: longer than a freeze and what may be in a frozen node's socket."""
TRUE_WITHIN_S = 180.0
GAVE_UP = {"InsufficientResource", "UnsupportedResource"}


class Chaos:
    """Kills, freezes and revives parts of a fleet, one after the other, until it is over."""

    def __init__(
        self,
        world: World,
        gateways: list[GatewayProgram],
        proxies: list[Proxy],
        rng: random.Random,
    ) -> None:
        self.world, self.gateways, self.proxies, self.rng = world, gateways, proxies, rng
        self.done: list[str] = []
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.rng.uniform(0.05, 0.2))
            await self.once()

    async def once(self) -> None:
        what = self.rng.choice(
            [self.gateway_dies, self.daemon_dies, self.freeze, self.publisher, self.cut]
        )
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

    async def cut(self) -> None:
        """Cut one gateway from etcd for a while, in which what it has not heard of is given up."""
        etcd = self.world.etcd
        assert etcd is not None
        for proxy in self.proxies:
            await proxy.cut()
        await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        async with self.world.client() as client:
            with contextlib.suppress(EtcdUnavailable, EtcdRefused, AssertionError):
                await etcd.compact(await client.revision())
        for proxy in self.proxies:
            proxy.mend()

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


async def settled(
    gateways: list[GatewayProgram], kernel_id: str, rng: random.Random, **more: Any
) -> str:
    """Order a kernel again and again, at any gateway, until the answer is certain."""
    patience = 120
    async with asyncio.timeout(patience):
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                async with asyncio.timeout(20):
                    body = {"kernel_id": kernel_id, "slots": {"cpu": 0, "mem": "1m"}, **more}
                    answer = await rng.choice(gateways).create(**body)
                if answer.status in (200, 201):
                    return answer.json["node_id"]
                if answer.json["code"] in GAVE_UP:
                    return ""
                assert answer.json["code"] != "KernelConflict", answer.content
            await asyncio.sleep(0.05)


async def deleted(gateways: list[GatewayProgram], kernel_id: str, rng: random.Random) -> bool:
    """Delete a kernel through any gateway; tell whether the first that was asked did so."""
    tries = 0
    async with asyncio.timeout(120):
        while True:
            tries += 1
            with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                async with asyncio.timeout(20):
                    path = f"/v1/kernels/{kernel_id}?timeout=0"
                    answer = await rng.choice(gateways).call("DELETE", path)
                if answer.status == 204 or answer.json["code"] == "UnknownKernel":
                    return answer.status == 204 and tries == 1
            await asyncio.sleep(0.05)


class Callers:
    """Create and delete kernels through any gateway, and note where each was said to be."""

    def __init__(
        self, gateways: list[GatewayProgram], pruned: str, chaos: Chaos, rng: random.Random
    ) -> None:
        self.gateways, self.pruned, self.chaos, self.rng = gateways, pruned, chaos, rng
        self.told: dict[str, str] = {}
        self._lasting: deque[str] = deque()
        self._end = time.monotonic() + SOAK_S

    def _is_more(self) -> bool:
        is_short = len(self.told) < CREATES or len(self.chaos.done) < TROUBLES
        return is_short or time.monotonic() < self._end

    async def run(self) -> None:
        while self._is_more():
            self.told[name := f"k{len(self.told)}"] = ""
            await self._one(name)
            if self.told[name]:
                self._lasting.append(name)
            if len(self._lasting) > MOST_LASTING:
                oldest = self._lasting.popleft()
                await deleted(self.gateways, oldest, self.rng)
                self.told[oldest] = ""
            if not SOAK_S:
                await asyncio.sleep(self.rng.uniform(0, 0.3))

    async def _one(self, name: str) -> None:
        what = self.rng.choice(("stays", "goes", "goes", "comes back", "ends"))
        if what == "ends":
            short = {"command": ["true"], "placement": {"nodes": [self.pruned]}}
            await settled(self.gateways, f"ended-{name}", self.rng, **short)
        self.told[name] = await settled(self.gateways, name, self.rng)
        if what in ("goes", "comes back"):
            is_free = await deleted(self.gateways, name, self.rng)
            self.told[name] = ""
            if what == "comes back" and is_free:
                other = {"slots": {"cpu": 0, "mem": "2m"}}
                self.told[name] = await settled(self.gateways, name, self.rng, **other)


async def untrue(world: World) -> list[str]:
    """The routes in etcd to nodes that do not have their kernel, all nodes being ready."""
    census = await world.census()
    async with world.client() as etcd:
        found, _ = await etcd.range("/agentd/main/routes/")
    routes = [read_route(pair.key.rpartition("/")[2], pair.value, 1).route for pair in found]
    return [r.kernel_id for r in routes if r.node_id not in census.get(r.kernel_id, [])]


async def until_true(world: World) -> None:
    """Wait until all routes are true, as long as is promised at most."""
    odd: list[str] = []
    try:
        async with asyncio.timeout(TRUE_WITHIN_S):
            while odd := await untrue(world):
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(said_of(world, set(odd))) from None


def said_of(world: World, kernels: set[str]) -> str:
    """Return all log lines about some kernels."""
    logs = [program.log for program in world.programs] + [d.log for d in world.nodes.values()]
    lines = [line for log in logs for line in log.splitlines()]
    named = [line for line in lines if any(f'"{kernel}"' in line for kernel in kernels)]
    return "\n".join(sorted(named, key=lambda line: line.partition('"timestamp"')[2]))


@pytest.mark.timeout(SOAK_S + 1800 if SOAK_S else 400)
async def test_no_kernel_id_is_on_two_nodes_and_none_is_lost(world: World) -> None:
    seed = int(os.environ["AGENTD_SEED"])
    rng = random.Random(seed)
    servers = await world.start_etcd(3)
    nodes = await world.start_nodes("cuda", "rocm", "pruned")
    for node in nodes:
        world.join(node)
    proxies = [Proxy(endpoint) for endpoint in servers.endpoints]
    for proxy in proxies:
        await proxy.start()
    through = json.dumps([proxy.endpoint for proxy in proxies])
    gateways = [
        world.gateway(deadlines=QUICK),
        world.gateway(f"[fleet]\netcd = {through}\n", deadlines=QUICK),
    ]
    for gateway in gateways:
        await gateway.until(dict.fromkeys(nodes, "ready"))
    chaos = Chaos(world, gateways, proxies, rng)
    breaking = asyncio.create_task(chaos.run())
    callers = Callers(gateways, nodes[2], chaos, rng)
    try:
        await asyncio.gather(*(callers.run() for _ in range(CALLERS)))
    finally:
        chaos.is_over = True
        await breaking
        print(f"seed {seed}: {len(callers.told)} creates, {len(chaos.done)} troubles")
    for gateway in gateways:
        await gateway.until(dict.fromkeys(nodes, "ready"), within_s=60)
    await until_true(world)
    for proxy in proxies:
        await proxy.stop()
    census = await world.census()
    assert not {name for name, on in census.items() if len(on) > 1}
    lasting = {name: on for name, on in census.items() if not name.startswith("ended-")}
    placed = {name: [node] for name, node in callers.told.items() if node}
    odd = {name for name in lasting.keys() | placed if lasting.get(name) != placed.get(name)}
    assert not odd, said_of(world, odd)
    pace = PlacementTimeouts()
    assert pace.absent_for_s >= pace.send_within_s + 20 + 10 + 30, (
        "longer than a request is under way"
    )
