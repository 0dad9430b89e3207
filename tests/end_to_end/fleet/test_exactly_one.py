"""Creates and deletes under chaos: one kernel of an id at most, none lost unsaid, routes true.

The census is the nodes' own view, and the oracle of routes what is in etcd once all faults have
ended. Some sixty creates here; under `make soak` as many as there is time for.

A store that is restored has lost what was written since its backup. An id that was created or
deleted in between is free for it, or belongs to a node that has it no more: created again, it may
come to a second node. Such ids are counted, and nothing is promised of them but that a kernel
somebody was told of still runs there.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter, deque
from typing import Any

import aiohttp
import pytest

from agentd_fleet.placement.attempts import PlacementTimeouts
from agentd_fleet.store.route import read_route
from end_to_end.fleet.chaos import PASSWORD, Chaos, ChaosFleet
from end_to_end.fleet.fleet_world import World

SOAK_S = float(os.environ.get("AGENTD_SOAK", "0"))
CREATES, CALLERS, TROUBLES = (0, 24, 0) if SOAK_S else (60, 3, 11)
"""All kinds of harm at least once."""
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


class Callers:
    """Create and delete kernels through any gateway, and note where each was said to be."""

    def __init__(self, fleet: ChaosFleet, chaos: Chaos, rng: random.Random) -> None:
        self.fleet, self.chaos, self.rng = fleet, chaos, rng
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
                await self._delete(oldest)
                self.told[oldest] = ""
            if not SOAK_S:
                await asyncio.sleep(self.rng.uniform(0, 0.3))

    async def _one(self, name: str) -> None:
        what = self.rng.choice(("stays", "goes", "goes", "comes back", "ends"))
        if what == "ends":
            short = {"command": ["true"], "placement": {"nodes": [self.fleet.nodes[2]]}}
            await self._create(f"ended-{name}", **short)
        self.told[name] = await self._create(name)
        if what in ("goes", "comes back"):
            is_free = await self._delete(name)
            self.told[name] = ""
            if what == "comes back" and is_free:
                other = {"slots": {"cpu": 0, "mem": "2m"}}
                self.told[name] = await self._create(name, **other)

    async def _create(self, kernel_id: str, **more: Any) -> str:
        """Order a kernel again and again, at any gateway, until the answer is certain."""
        body = {"kernel_id": kernel_id, "slots": {"cpu": 0, "mem": "1m"}, **more}
        with self.fleet.change(kernel_id):
            async with asyncio.timeout(120):
                while True:
                    with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                        async with asyncio.timeout(20):
                            answer = await self.rng.choice(self.fleet.gateways).create(**body)
                        if answer.status in (200, 201):
                            return answer.json["node_id"]
                        if answer.json["code"] in GAVE_UP:
                            return ""
                        if answer.json["code"] == "KernelConflict":
                            assert self.fleet.is_unrecorded(kernel_id), answer.content
                            return ""
                    await asyncio.sleep(0.05)

    async def _delete(self, kernel_id: str) -> bool:
        """Delete a kernel through any gateway; return whether the first that was asked did so."""
        path, tries = f"/v1/kernels/{kernel_id}?timeout=0", 0
        with self.fleet.change(kernel_id):
            async with asyncio.timeout(120):
                while True:
                    tries += 1
                    with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                        async with asyncio.timeout(20):
                            gateway = self.rng.choice(self.fleet.gateways)
                            answer = await gateway.call("DELETE", path)
                        if answer.status == 204 or answer.json["code"] == "UnknownKernel":
                            return answer.status == 204 and tries == 1
                    await asyncio.sleep(0.05)


async def untrue(world: World) -> list[str]:
    """The routes in etcd to nodes that do not have their kernel, all nodes being ready."""
    census = await world.census()
    async with world.client("root", PASSWORD) as etcd:
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
    fleet = await ChaosFleet.start(world, ("cuda", "rocm", "pruned"), QUICK)
    chaos = Chaos(fleet, rng)
    breaking = asyncio.create_task(chaos.run())
    callers = Callers(fleet, chaos, rng)
    calling = asyncio.gather(*(callers.run() for _ in range(CALLERS)))
    try:
        await asyncio.wait([calling, breaking], return_when=asyncio.FIRST_COMPLETED)
    finally:
        chaos.is_over = True
        await asyncio.gather(calling, breaking)
        print(f"seed {seed}: {len(callers.told)} creates, {len(fleet.unrecorded)} of them in what")
        print(f"a restore has lost, {len(chaos.done)} troubles: {dict(Counter(chaos.done))}")
    for gateway in fleet.gateways:
        await gateway.until(dict.fromkeys(fleet.nodes, "ready"), within_s=60)
    await until_true(world)
    census = await world.census()
    assert not {n for n, on in census.items() if len(on) > 1} - fleet.unrecorded
    lasting = {name: on for name, on in census.items() if not name.startswith("ended-")}
    placed = {name: [node] for name, node in callers.told.items() if node}
    odd = {name for name in lasting.keys() | placed if lasting.get(name) != placed.get(name)}
    assert not odd - fleet.unrecorded, said_of(world, odd)
    lost = {name for name in odd & placed.keys() if placed[name][0] not in lasting.get(name, [])}
    assert not lost, said_of(world, lost)
    assert not fleet.clone or fleet.clone not in {on for nodes in census.values() for on in nodes}
    pace = PlacementTimeouts()
    assert pace.absent_for_s >= pace.send_within_s + 20 + 10 + 30, (
        "longer than a request is under way"
    )
