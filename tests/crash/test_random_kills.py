"""Dying at random while several clients create, stop and delete without pause."""

import asyncio
import random
from typing import Any

import pytest

from support.checked_node import NO_ANSWER, SEED, SOAK_S, CheckedNode, until_soak_ends
from support.daemon import AGENTS, gpus

DEATHS = 100_000 if SOAK_S else 12
NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(8, "shares")
CLIENTS = 4
LONGEST_LIFE_S = 1.5


class Client:
    """Creates, stops and deletes kernels of its own, and remembers what it was told."""

    def __init__(self, node: CheckedNode, name: str, chance: random.Random) -> None:
        self.node = node
        self.name = name
        self.chance = chance
        self.bodies: dict[str, dict[str, Any]] = {}
        self.told: dict[str, Any] = {}
        self.ending: set[str] = set()
        self.calls = 0
        self._number = 0

    async def run(self) -> None:
        while True:
            await self.step()
            self.calls += 1

    async def step(self) -> None:
        mine = sorted(self.told.keys() - self.ending)
        choice = self.chance.random()
        if choice < 0.5 or not mine:
            await self._create()
        elif choice < 0.65:
            kernel_id = self.chance.choice(mine)
            self.ending.add(kernel_id)
            await self.node.try_call("POST", f"/v1/kernels/{kernel_id}/stop", {"timeout": 0})
        elif choice < 0.75:
            await self.again(self.chance.choice(mine))
        else:
            await self._delete(self.chance.choice(mine))

    async def _create(self) -> None:
        self._number += 1
        kernel_id = f"{self.name}-{self._number}"
        body = {"slots": {"cuda.shares": self.chance.choice(["0.3", "0.5", 1]), "cpu": 0,
                          "mem": "8m"}}  # fmt: skip
        self.bodies[kernel_id] = body
        answer = await self.node.create(kernel_id, "agent-1", **body)
        assert answer.status in (201, 409, 503, NO_ANSWER.status)
        if answer.status == 201:
            self.told[kernel_id] = answer.json

    async def _delete(self, kernel_id: str) -> None:
        self.ending.add(kernel_id)
        answer = await self.node.remove(kernel_id)
        if answer.status in (204, 404):
            self.told.pop(kernel_id)
            self.ending.discard(kernel_id)

    async def again(self, kernel_id: str) -> None:
        """The same create is the same kernel."""
        answer = await self.node.create(kernel_id, **self.bodies[kernel_id])
        if answer is not NO_ANSWER:
            assert answer.status == 200
            same = ("container_id", "pid", "created_at")
            assert [answer.json[m] for m in same] == [self.told[kernel_id][m] for m in same]


async def one_life(node: CheckedNode, clients: list[Client], chance: random.Random) -> None:
    """Run the clients until the daemon dies, restart it, and check everything."""
    work = [asyncio.create_task(client.run()) for client in clients]
    await asyncio.wait(work, timeout=chance.uniform(0.05, LONGEST_LIFE_S),
                       return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    lived = node.live_commands()
    await node.kill()
    for task in work:
        task.cancel()
    ends = await asyncio.gather(*work, return_exceptions=True)
    failed = [end for end in ends if isinstance(end, AssertionError)]
    assert not failed, failed
    assert await node.start()
    census = await node.check()
    now = node.live_commands()
    for client in clients:
        for kernel_id in client.told.keys() - client.ending:
            assert now.get(kernel_id) == lived.get(kernel_id, now.get(kernel_id)), kernel_id
            assert kernel_id in now, kernel_id
            assert census.recorded[kernel_id].state == "running"
            await client.again(kernel_id)


@pytest.mark.long
@pytest.mark.timeout(300 + 2 * SOAK_S)
async def test_random_deaths_under_load_lose_nothing(node: CheckedNode) -> None:
    runtime = node.daemon.runtime
    chance = random.Random(SEED)
    clients = [Client(node, f"c{n}", random.Random(SEED + n)) for n in range(CLIENTS)]
    assert await node.start(text=NODE)
    for _ in until_soak_ends(range(DEATHS)):
        await one_life(node, clients, chance)
    await node.remove_kernels_except()
    await node.check()
    calls = sum(client.calls for client in clients)
    print(f"\n{runtime}, seed {SEED}: {node.deaths} deaths, {calls} calls, no violation")
