"""Kernels, claims by processes and Slurm's jobs on one node, under kills of every part.

Each workload locks the files of its devices (`device_locks`), so a device with two holders is seen
from inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.device_locks import DeviceLocks
from support.slurm_nodes import NodesOf, SlurmNodes
from support.waiting import until

AGENTCTL = Path(sys.executable).parent / "agentctl"
SECONDS = 600 if "AGENTD_SOAK" in os.environ else 120
MOST_KERNELS, MOST_CLAIMANTS, MOST_JOBS = 2, 2, 5
"""Workloads at once: together they want more than eight devices, and a job that waits gets some."""
JOB = """#!/bin/sh
for index in $(echo "$CUDA_VISIBLE_DEVICES" | tr , " "); do devices="$devices,cuda$index"; done
echo "$SLURM_JOB_ID" >>{locks}/jobs
export CUDA_VISIBLE_DEVICES="${{devices#,}}"
{command}
"""


class Traffic:
    """Everything that wants devices of one node at the same time, and what kills it."""

    def __init__(self, nodes: SlurmNodes, choice: random.Random) -> None:
        self._nodes = nodes
        self._choice = choice
        self.locks = DeviceLocks(nodes.folder, 8)
        self._claimants: list[subprocess.Popen[bytes]] = []
        self._sync = nodes.start_sync(nodes.node)
        self.done: Counter[str] = Counter()

    @property
    def _command(self) -> list[str]:
        return self.locks.command(self._choice.uniform(0.5, 6))

    async def kernel(self) -> None:
        """Create a kernel."""
        rows = await self._nodes.daemon.get("/v1/kernels")
        await self.delete_ended(rows)
        if sum(row["state"] == "running" for row in rows) >= MOST_KERNELS:
            return
        slots = {"cuda.device": str(self._choice.randint(1, 2))}
        made = await self._nodes.daemon.create("notebooks", slots=slots, command=self._command)
        self.done[f"kernel {made.status}"] += 1

    async def delete_ended(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["exit_code"] is not None:
                await self._nodes.daemon.call("DELETE", f"/v1/kernels/{row['kernel_id']}")

    async def claimant(self) -> None:
        """Start a process that claims for itself."""
        self.count_claimants()
        if len(self._claimants) >= MOST_CLAIMANTS:
            return
        slots = f"cuda.device={self._choice.randint(1, 2)}"
        command = [AGENTCTL, "claim", "notebooks", "-s", slots, "--", *self._command]
        environment = self._nodes.environment(self._nodes.node)
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
        self._claimants.append(process)

    def count_claimants(self) -> None:
        for process in [one for one in self._claimants if one.poll() is not None]:
            self._claimants.remove(process)
            self.done[f"claimant {process.returncode}"] += 1

    async def job(self) -> None:
        """Submit a job."""
        cluster = self._nodes.cluster
        if len(cluster.run("squeue", "-h", "-n", "work", check=False).splitlines()) < MOST_JOBS:
            command = shlex.join(self._command)
            gres = f"--gres=gpu:{self._choice.randint(1, 2)}"
            file = self._nodes.folder / "job"
            file.write_text(JOB.format(locks=self.locks.folder, command=command))
            words = ("sbatch", "--parsable", "--job-name=work", "--output=/dev/null", gres)
            self.done["job"] += bool(cluster.run(*words, file, check=False))

    async def cancel(self) -> None:
        """Cancel one of the jobs that run."""
        cluster = self._nodes.cluster
        jobs = cluster.run("squeue", "-h", "-n", "work", "-t", "R", "-o", "%i", check=False).split()
        if jobs:
            cluster.run("scancel", self._choice.choice(jobs), check=False)

    async def start_refused(self) -> None:
        """Start jobs at once that were sent back, which users may do: no prolog may run then."""
        cluster = self._nodes.cluster
        words = ("squeue", "-h", "-n", "work", "-t", "PD", "-o", "%i %r")
        for line in cluster.run(*words, check=False).splitlines():
            job, _, reason = line.partition(" ")
            if reason == "BeginTime":
                cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    async def kill_agentd(self) -> None:
        await self._nodes.daemon.restart(number=signal.SIGKILL)

    async def kill_slurmd(self) -> None:
        self._nodes.cluster.kill(self._nodes.node)
        self._nodes.cluster.start_node(self._nodes.node)

    async def kill_slurmctld(self) -> None:
        self._nodes.cluster.kill("slurmctld")
        self._nodes.cluster.start_controller()

    async def kill_slurmstepd(self) -> None:
        steps = list(self._nodes.cluster.steps())
        if steps:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._choice.choice(steps), signal.SIGKILL)

    async def kill_sync(self) -> None:
        self._sync.kill()
        self._sync.wait()
        self._sync = self._nodes.start_sync(self._nodes.node)

    async def kill_claimant(self) -> None:
        if self._claimants:
            self._choice.choice(self._claimants).kill()

    async def run(self, seconds: float) -> None:
        """Do one thing after the other; after a quarter of the time, kill one now and then."""
        usual: list[Callable[[], Awaitable[None]]] = [
            self.kernel, self.claimant, self.job, self.start_refused,
        ]  # fmt: skip
        kills = [
            self.cancel, self.kill_agentd, self.kill_slurmd, self.kill_slurmctld,
            self.kill_slurmstepd, self.kill_sync, self.kill_claimant,
        ]  # fmt: skip
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            is_quiet = self._choice.random() < 0.85 or passed < seconds / 4
            act = self._choice.choice(usual if is_quiet else kills)
            with contextlib.suppress(aiohttp.ClientError):
                await act()
            self.done[act.__name__] += 1
            await asyncio.sleep(self._choice.uniform(0, 0.3))

    async def end(self) -> None:
        """End all work, and wait until nothing is held."""
        cluster, daemon = self._nodes.cluster, self._nodes.daemon
        cluster.run("scancel", "--name=work", check=False)
        for process in self._claimants:
            process.wait(60)
        self.count_claimants()
        for row in await daemon.get("/v1/kernels"):
            path = f"/v1/kernels/{row['kernel_id']}?timeout=0"
            await until(  # a create that a kill cut off is unresolved at first
                lambda path=path: daemon.call("DELETE", path),
                lambda answer: answer.status in (204, 404),
                text=f"the node deletes kernel {row['kernel_id']}",
                within_s=30,
                every_s=0.2,
            )


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 600)
async def test_no_device_ever_has_two_holders(slurm: NodesOf) -> None:
    nodes = await slurm()
    traffic = Traffic(nodes, random.Random(os.environ.get("AGENTD_SEED", "0")))
    await traffic.run(SECONDS)
    await traffic.end()
    begun = traffic.locks.folder / "jobs"
    traffic.done["jobs begun"] = len(begun.read_text().split()) if begun.exists() else 0
    print(dict(traffic.done))
    assert traffic.locks.collisions == []
    for pid in nodes.cluster.members():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await nodes.until_claims({}, within_s=120)
    devices = await nodes.daemon.get("/v1/devices")
    held = [row["holders"] for row in devices if row["holders"]]
    assert held == [], await nodes.daemon.get("/v1/kernels")
    assert traffic.done["kernel 201"] > 0
    assert traffic.done["claimant 0"] > 0
    assert traffic.done["jobs begun"] > 0
    nodes.cluster.until(
        lambda: not nodes.cluster.run("squeue", "-h", "-n", "agentd", check=False),
        "a placeholder is left",
    )
