"""Two kernels, a notebook and a gang over three nodes, while agentd is killed at random.

Every workload locks the files of its devices (`device_locks`), so a device with two holders is seen
from inside. Where systemd runs, the notebook is in a scope and leaves a child behind, which goes on
using the devices; `make soak` runs this module on such a machine.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentd.host.systemd.availability import systemd_problems
from support.checked_node import SEED, SOAK_S, CheckedNode
from support.daemon import AGENTS, Answer, Daemon, gpus
from support.device_locks import COLLISION, DeviceLocks
from support.waiting import until

AGENTCTL = Path(sys.executable).parent / "agentctl"
SECONDS = SOAK_S or 15.0
GPUS = (8, 4, 4)
"""Devices of each node; together the workloads of the first want more than it has."""
KERNELS, GANG, NOTEBOOK = (1, 3), 4, (1, 4)
"""Fewest and most devices of a kernel and of the notebook, and those of the gang on each node."""
TTL_S, SHORT_TTL_S = 60, 1
"""Of a gang's claims, and of those that it abandons."""
HAS_SCOPES = not systemd_problems()
REFUSED, UNREACHABLE = 1, 3
NEEDED = ("kernel", "notebook 0", "gang", "deaths")
"""Each happens at least once, however slow the machine."""


class Site:
    """One node: its agentd and the locks of its devices."""

    def __init__(self, folder: Path, number: int, devices: int) -> None:
        folder.mkdir(mode=0o755)
        self.daemon = Daemon(folder, "process")
        self.daemon.node = f"{folder.parent.name}-{number}"
        self.devices = devices
        self.checked_node = CheckedNode(self.daemon)
        self.locks = DeviceLocks(folder, devices)
        self._is_up = asyncio.Event()

    async def start(self) -> None:
        await self.daemon.start(AGENTS + gpus(self.devices))
        self._is_up.set()

    async def kill(self) -> float:
        """Kill agentd and start it again; return how long the start took (s)."""
        self._is_up.clear()
        await self.checked_node.kill()
        killed = time.monotonic()
        assert await self.checked_node.start()
        self._is_up.set()
        return time.monotonic() - killed

    async def answer(self, method: str, path: str, body: Any = None) -> Answer:
        """Repeat a call until it is answered, and not for want of a plugin after a start."""
        while True:
            await self._is_up.wait()
            answer = await self.checked_node.try_call(method, path, body)
            if answer.status not in (0, 503):
                return answer
            await asyncio.sleep(0.1)

    async def remove(self, path: str) -> None:
        """Delete a kernel or a claim that may exist."""
        answer = await self.answer("DELETE", path)
        assert answer.status in (204, 404), answer.content

    async def kernel(self, kernel_id: str, count: int, seconds: float, **body: Any) -> bool:
        """Create a kernel; return whether it got its devices."""
        slots = {"cuda.device": count, "cpu": 0, "mem": "16m"}
        content = {"kernel_id": kernel_id, "command": self.locks.command(seconds), "slots": slots}
        answer = await self.answer("POST", "/v1/agents/agent-1/kernels", content | body)
        assert answer.status in (200, 201, 404, 409), answer.content
        return answer.status in (200, 201)

    async def ended(self, kernel_id: str) -> None:
        """Wait for the end of a kernel, which must be its own, and delete it."""
        path = f"/v1/kernels/{kernel_id}"
        while (kernel := (await self.answer("GET", path)).json)["exit_code"] is None:
            await asyncio.sleep(0.1)
        assert kernel["exit_code"] == 0, kernel
        await self.remove(path)

    async def look(self) -> None:
        """Fail if a device has two holders."""
        devices = (await self.answer("GET", "/v1/devices")).json
        for device in devices:
            if device["device_name"] == "cuda":
                assert len(device["holders"]) <= 1, device

    async def until_free(self) -> None:
        await until(
            lambda: self.daemon.get("/v1/devices"),
            lambda value: not any(device["holders"] for device in value),
            within_s=60,
        )


class Traffic:
    """Everything that wants devices at the same time, and what kills agentd."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.done: Counter[str] = Counter()
        self._is_over = False

    async def kernel(self, chance: random.Random, name: str) -> None:
        """Create one kernel, and delete it after its end or before."""
        site = self.sites[0]
        if await site.kernel(name, chance.randint(*KERNELS), chance.uniform(0, 1)):
            if chance.random() < 0.7:
                await site.ended(name)
            self.done["kernel"] += 1
        else:
            self.done["kernel refused"] += 1
        await site.remove(f"/v1/kernels/{name}?timeout=0")

    async def notebook(self, chance: random.Random, name: str) -> None:
        """Run a process on devices that it claims for itself, and kill it now and then."""
        site = self.sites[0]
        left_s = chance.uniform(0, 1) if HAS_SCOPES else 0
        process = await asyncio.create_subprocess_exec(
            AGENTCTL, "claim", "agent-1", *(["--scope"] if HAS_SCOPES else []), "--id", name,
            "-s", f"cuda.device={chance.randint(*NOTEBOOK)}",
            "--", *site.locks.command(chance.uniform(0, 1), left_s),
            env={**os.environ, "AGENTD_SOCKET": str(site.daemon.folder / "agentd.sock")},
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        if chance.random() < 0.2:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), chance.uniform(0, 1))
            with suppress(ProcessLookupError):
                process.kill()
        status = await process.wait()
        assert status in (0, REFUSED, UNREACHABLE, -signal.SIGKILL, COLLISION)
        self.done[f"notebook {status}"] += 1

    async def gang(self, chance: random.Random, name: str) -> None:
        """Claim on every node, then create on every node, or release everything."""
        is_abandoned = chance.random() < 0.2
        slots, holder = {"cuda.device": GANG}, {"ttl": SHORT_TTL_S if is_abandoned else TTL_S}
        body = {"claim_id": name, "holder": holder, "slots": slots}
        begun = time.monotonic()
        for site in self.sites:
            answer = await site.answer("POST", "/v1/agents/agent-1/claims", body)
            if answer.status not in (200, 201):
                assert answer.status == 409, answer.content
                self.done["gang refused"] += 1
                await self._undo(name)
                return
        if is_abandoned:
            self.done["gang abandoned"] += 1
            return
        seconds = chance.uniform(0, 1)
        for site in self.sites:
            if not await site.kernel(name, GANG, seconds, claim=name):
                assert time.monotonic() - begun > TTL_S, "a claim ended before its time"
                self.done["gang late"] += 1
                await self._undo(name)
                return
        for site in self.sites:
            await site.ended(name)
        self.done["gang"] += 1

    async def _undo(self, name: str) -> None:
        for site in self.sites:
            await site.remove(f"/v1/kernels/{name}?timeout=0")
            await site.remove(f"/v1/claims/{name}")

    async def _repeat(self, act: Callable[[random.Random, str], Awaitable[None]], who: str) -> None:
        chance, number = random.Random(f"{SEED} {who}"), 0
        while not self._is_over:
            number += 1
            await act(chance, f"{who}-{number}")
            await asyncio.sleep(chance.uniform(0, 0.1))

    async def run(self, seconds: float) -> None:
        """Run everything for some seconds at least, and kill an agentd every now and then."""
        chance, end = random.Random(SEED), time.monotonic() + seconds
        start_s = 0.0  # a slow machine gets as long for its work as for a start
        kinds = {"a": self.kernel, "b": self.kernel, "notebook": self.notebook, "gang": self.gang}
        work = [asyncio.create_task(self._repeat(act, who)) for who, act in kinds.items()]
        try:
            while time.monotonic() < end or not all(self.done[kind] for kind in NEEDED):
                pause_s = start_s + chance.uniform(0.1, 2)
                if (await asyncio.wait(work, timeout=pause_s, return_when="FIRST_COMPLETED"))[0]:
                    break
                site = chance.choice(self.sites)
                start_s = await site.kill()
                self.done["deaths"] += 1
                await asyncio.gather(*(site.look() for site in self.sites))
            self._is_over = True
            async with asyncio.timeout(120):
                await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()


@pytest.fixture
async def sites(folder: Path) -> AsyncIterator[list[Site]]:
    """Three nodes."""
    made = [Site(folder / str(n), n, devices) for n, devices in enumerate(GPUS)]
    for site in made:
        await site.start()
    yield made
    for site in made:
        await site.daemon.close()


@pytest.mark.long
@pytest.mark.timeout(300 + 2 * SOAK_S)
async def test_kernels_notebook_and_gang_never_meet(sites: list[Site]) -> None:
    traffic = Traffic(sites)
    try:
        await traffic.run(SECONDS)
    finally:
        print(f"\nseed {SEED}: {dict(sorted(traffic.done.items()))}")
        assert [each for site in sites for each in site.locks.collisions] == []
    for site in sites:
        await site.until_free()
        assert await site.daemon.get("/v1/claims") == []
        assert await site.daemon.get("/v1/kernels") == []
        await site.checked_node.check()
