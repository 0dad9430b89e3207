"""Slurm queues, agentd runs: jobs whose work is a kernel of agentd on the job's own GPUs."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.slurm_nodes import NodesOf, SlurmNodes
from support.waiting import until

AGENTCTL = Path(sys.executable).parent / "agentctl"
WORK = "echo got $CUDA_VISIBLE_DEVICES; exec sleep 1000"


def run_script(nodes: SlurmNodes) -> str:
    """Return a job's script that runs one kernel on each of its nodes."""
    file = nodes.folder / "on-each-node"
    file.write_text(
        f'#!/bin/sh\nexport AGENTD_SOCKET="{nodes.folder}/$SLURMD_NODENAME/agentd.sock"\n'
        f'exec {AGENTCTL} run "$AGENTD_AGENT" --claim "$AGENTD_CLAIM" --rm'
        f" -s cpu=0 -- sh -c '{WORK}'\n"
    )
    file.chmod(0o755)
    return f"srun {file}"


async def kernels(nodes: SlurmNodes) -> list[dict[str, Any]]:
    """Return the kernels of all nodes that run."""
    found = []
    for daemon in nodes.daemons.values():
        found += [row for row in await daemon.get("/v1/kernels") if row["state"] == "running"]
    return found


async def until_kernels(nodes: SlurmNodes, count: int) -> list[dict[str, Any]]:
    """Wait until so many kernels run."""
    return await until(
        lambda: kernels(nodes),
        lambda rows: len(rows) == count,
        text=f"{count} kernels run",
        within_s=60,
        every_s=0.1,
    )


def devices_of(row: dict[str, Any]) -> list[str]:
    return sorted(row["allocation"]["cuda"]["cuda.device"])


async def test_job_on_three_nodes_runs_kernels_on_its_gpus(slurm: NodesOf) -> None:
    nodes = await slurm(nodes=3, gpu_count=2)
    cluster = nodes.cluster
    job = cluster.submit("-N3", "--gres=gpu:2", script=run_script(nodes))
    found = await until_kernels(nodes, 3)
    assert [devices_of(row) for row in found] == [["cuda0", "cuda1"]] * 3
    assert {row["claim_id"] for row in found} == {f"slurm-{job}"}
    output = cluster.folder / f"out-{job}"
    cluster.until(lambda: output.read_text().count("got cuda0,cuda1") == 3, "no output")

    cluster.run("scontrol", "requeue", job)
    await until_kernels(nodes, 0)
    for node in cluster.nodes:
        await nodes.until_claims({}, node)
    await until_kernels(nodes, 3)

    first, second, _ = cluster.nodes
    await nodes.daemons[first].restart(number=signal.SIGKILL)
    cluster.kill(second)
    cluster.start_node(second)
    await until_kernels(nodes, 3)

    cluster.run("scancel", job)
    await until_kernels(nodes, 0)
    for node in cluster.nodes:
        await nodes.until_claims({}, node)
        assert await nodes.daemons[node].get("/v1/kernels") == []
    cluster.until_idle()


@pytest.mark.long
async def test_time_limit_stops_the_kernel(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    job = nodes.cluster.submit("--gres=gpu:1", "--time=00:00:05", script=run_script(nodes))
    await until_kernels(nodes, 1)
    nodes.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=00:00:01")
    await nodes.until_claims({}, within_s=120)
    assert await nodes.daemon.get("/v1/kernels") == []


async def test_kernel_of_a_job_is_no_reason_for_a_placeholder(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    nodes.cluster.submit("--gres=gpu:1", script=run_script(nodes))
    await until_kernels(nodes, 1)
    nodes.sync_once()
    assert "agentd:" not in nodes.cluster.run("squeue", "-o", "%k")


async def test_epilog_deletes_kernels_of_a_killed_job(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    job = nodes.cluster.submit("--gres=gpu:1", script=run_script(nodes))
    await until_kernels(nodes, 1)
    steps = set(nodes.cluster.steps())  # without one, Slurm takes the job for running
    for pid in set(nodes.cluster.processes(job)) - steps:
        with suppress(ProcessLookupError):  # it ended with those that were killed before
            os.kill(pid, signal.SIGKILL)
    await nodes.until_claims({}, within_s=90)
    assert await nodes.daemon.get("/v1/kernels") == []
