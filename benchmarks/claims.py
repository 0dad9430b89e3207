"""How long a claim takes, and what many claims cost a start: `python benchmarks/claims.py`.

Starts a daemon on a folder of its own with the sim plugin, claims and releases one device at a
time, and prints JSON: milliseconds of a claim and of a release, seconds from the end of a process
to its free device, seconds of a start, and those that 1,000 claims add to it.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentd.client.asynchronous import AsyncClient
from agentd.errors import AgentdError

CONFIG = """
[node]
id = "claims"
state-dir = "{folder}/state"
runtime = "process"
[rpc]
socket = "{folder}/agentd.sock"
[host]
cpus = 8
mem = "8g"
[plugins]
allow = ["sim"]
[plugins.cuda]
plugin = "sim"
count = {devices}
"""
STARTS = 5
"""Starts without claims, and with many: their medians are compared."""


class Node:
    """A daemon on a folder."""

    def __init__(self, folder: Path, devices: int) -> None:
        self.folder = folder
        self.socket = folder / "agentd.sock"
        (folder / "agent.toml").write_text(CONFIG.format(folder=folder, devices=devices))
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> float:
        """Start it, and return the seconds until it is ready."""
        start = time.monotonic()
        config = str(self.folder / "agent.toml")
        command = [sys.executable, "-m", "agentd", "run", "--config", config]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        async with AsyncClient(self.socket, timeout_s=5) as client:
            while True:
                try:
                    await client.ready()
                    return time.monotonic() - start
                except AgentdError:
                    await asyncio.sleep(0.01)

    async def median_start(self, count: int) -> float:
        """Start it so many times, and return the seconds of the median start; it runs then."""
        durations = [await self.start()]
        for _ in range(count - 1):
            self.stop()
            durations.append(await self.start())
        return statistics.median(durations)

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


async def time_claims(client: AsyncClient, count: int) -> dict[str, float]:
    claim_times, release_times = [], []
    for number in range(count):
        start = time.perf_counter()
        body = {"claim_id": f"c{number}", "holder": {"name": "x"}, "slots": {"cuda.device": 1}}
        await client.create_claim("main", body)
        claimed_at = time.perf_counter()
        await client.release_claim(f"c{number}")
        claim_times.append(claimed_at - start)
        release_times.append(time.perf_counter() - claimed_at)
    return {
        "claim_ms": statistics.median(claim_times) * 1000,
        "release_ms": statistics.median(release_times) * 1000,
    }


async def time_until_free(client: AsyncClient, count: int) -> float:
    durations = []
    for _ in range(count):
        child = subprocess.Popen(["sleep", "1000"])
        body = {"holder": {"pid": child.pid}, "slots": {"cuda.device": 1}}
        claim = await client.create_claim("main", body)
        child.kill()
        start = time.monotonic()
        child.wait()
        while any(c["claim_id"] == claim["claim_id"] for c in await client.claims()):
            await asyncio.sleep(0.001)
        durations.append(time.monotonic() - start)
    return max(durations)


async def measure(count: int, claim_count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder), claim_count)
        try:
            empty_s = await node.median_start(STARTS)
            async with AsyncClient(node.socket) as client:
                figures = await time_claims(client, count)
                figures["free_after_s"] = await time_until_free(client, 10)
                for number in range(claim_count):
                    body = {"holder": {"name": f"n{number}"}, "slots": {"cuda.device": 1}}
                    await client.create_claim("main", body)
            node.stop()
            full_s = await node.median_start(STARTS)
            node.stop()
        finally:
            if node.process is not None and node.process.poll() is None:
                os.kill(node.process.pid, signal.SIGKILL)
    return {**figures, "start_s": empty_s, "added_s": full_s - empty_s, "many": claim_count}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--many", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="accepted for benchmarks/goals.py")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.count, arguments.many)), indent=1))


if __name__ == "__main__":
    main()
