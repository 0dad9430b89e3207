"""Names that users choose, of jobs, claims and processes, and the names of tasks of an array."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.host_faults import HOSTILE_NAMES, named_process
from support.slurm_cluster import CGROUPS
from support.slurm_nodes import NodesOf, SlurmNodes

GPU = {"cuda.device": "1"}
NOBODY = 65534


async def test_colliding_task_of_an_array_is_requeued_alone(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    array, first, kernel = await collide(nodes)
    nodes.cluster.until_requeued(f"{array}_1")
    assert nodes.cluster.job(f"{array}_1")["JobId"] == array
    still_runs(nodes, f"{array}_0")
    await nodes.daemon.call("DELETE", f"/v1/kernels/{kernel}?timeout=0")
    await nodes.until_claims({f"slurm-{first}": ["cuda0"], f"slurm-{array}": ["cuda1"]})
    still_runs(nodes, f"{array}_0")


async def test_colliding_task_without_requeue_is_cancelled_alone(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    array, first, _ = await collide(nodes, "--no-requeue")
    nodes.cluster.until_state(f"{array}_1", "CANCELLED")
    still_runs(nodes, f"{array}_0")
    await nodes.until_claims({f"slurm-{first}": ["cuda0"]})
    assert "idle" not in nodes.cluster.node_state(nodes.node)


async def collide(nodes: SlurmNodes, *options: str) -> tuple[str, str, str]:
    """Submit an array whose last task, which has the id of the array, gets a GPU of a kernel."""
    kernel = await nodes.daemon.running("notebooks", slots=GPU, devices={"cuda": ["cuda1"]})
    array = nodes.cluster.submit("--array=0-1", "--gres=gpu:1", *options)
    first = nodes.cluster.until_state(f"{array}_0", "RUNNING")["JobId"]
    return array, first, kernel["kernel_id"]


def still_runs(nodes: SlurmNodes, job: str) -> None:
    fields = nodes.cluster.job(job)
    assert (fields["JobState"], fields["Restarts"]) == ("RUNNING", "0")


async def test_task_prolog_sends_one_task_of_an_array_back(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    goes, ran = nodes.folder / "goes", nodes.folder / "ran"
    script = f"while ! [ -e {goes} ]; do sleep 0.1; done; srun --overlap touch {ran}; sleep 1000"
    array = nodes.cluster.submit("--array=0-1", "--gres=gpu:1", script=script)
    first = nodes.cluster.until_state(f"{array}_0", "RUNNING")["JobId"]
    await nodes.until_claims({f"slurm-{first}": ["cuda0"], f"slurm-{array}": ["cuda1"]})
    assert (await nodes.daemon.call("DELETE", f"/v1/claims/slurm-{array}")).status == 204
    goes.touch()
    nodes.cluster.until_requeued(f"{array}_1")
    nodes.cluster.until(ran.exists, "the other task did not start its step")
    still_runs(nodes, f"{array}_0")


async def test_colliding_component_requeues_its_job_and_no_other(slurm: NodesOf) -> None:
    nodes = await slurm(nodes=2, gpu_count=2)
    first, second = nodes.cluster.nodes
    daemon = nodes.daemons[second]
    await daemon.running("notebooks", slots=GPU, devices={"cuda": ["cuda0"]})
    other = nodes.cluster.submit("--gres=gpu:cuda1:1", f"--nodelist={first}")
    component = "--gres=gpu:cuda0:1"
    words = (f"--nodelist={first}", component, ":", f"--nodelist={second}", component)
    leader = nodes.cluster.submit(*words)
    for name in (f"{leader}+0", f"{leader}+1"):
        nodes.cluster.until_requeued(name)
    still_runs(nodes, other)
    await nodes.until_claims({f"slurm-{other}": ["cuda1"]})
    await nodes.until_claims({}, second)


@pytest.mark.parametrize("name", HOSTILE_NAMES[:2])
async def test_names_of_processes_drain_no_node(slurm: NodesOf, name: bytes) -> None:
    nodes = await slurm(gpu_count=1)
    with named_process(name) as process, in_cgroup(process.pid, os.fsdecode(name)):
        job = nodes.cluster.submit("--gres=gpu:1", "--no-requeue")
        await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
        nodes.sync_once()
        nodes.cluster.run("scancel", job)
        await nodes.until_claims({})
        nodes.cluster.until_idle()


@contextlib.contextmanager
def in_cgroup(pid: int, name: str) -> Iterator[None]:
    """With a process in a cgroup of version 2 whose name users could choose."""
    mounts = (CGROUPS, CGROUPS / "unified")
    (top,) = (mount for mount in mounts if (mount / "cgroup.procs").exists())
    folder = top / f"agentd-test-{pid}-{name}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(pid))
        yield
        (top / "cgroup.procs").write_text(str(pid))
    finally:
        folder.rmdir()


LIES = (
    "--job-name=x UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 Account=a",
    "--job-name=x\nJobId=1 JobName=x UserId=root(0) GroupId=root(0) MCS_label=N/A",
    "--mcs-label=x Priority=1 Nice=0 Account=(null) QOS=(null) JobState=PENDING Reason=None",
)
"""Slurm's answer about such a job could be one about another."""


async def test_job_that_could_be_another_is_refused_without_a_drain(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    for lie in LIES:
        options = ("--gres=gpu:1", lie, "--output=/dev/null", "--no-requeue")
        job = nodes.cluster.submit(*options, user=NOBODY)
        nodes.cluster.until_state(job, "CANCELLED")
        assert "looks like another job" in nodes.cluster.run("scontrol", "show", "job", job)
    assert await nodes.claims() == {}
    nodes.cluster.until_idle()


async def test_sync_ends_the_claim_of_a_job_with_any_name(slurm: NodesOf) -> None:
    """Users may rename a job that runs."""
    nodes = await slurm(gpu_count=1)
    (nodes.folder / "epilog").write_text("#!/bin/sh\n")
    job = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    name = LIES[0].removeprefix("--job-name=")
    nodes.cluster.run("scontrol", "update", f"JobId={job}", f"Name={name}")
    for wanted in ({f"slurm-{job}": ["cuda0"]}, {}):
        nodes.sync_once()
        assert await nodes.claims() == wanted
        nodes.cluster.run("scancel", job)
        nodes.cluster.until_idle()


async def test_names_of_jobs_change_no_claim(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    gpus = f"Nodes={nodes.node} CPU_IDs=0 GRES=gpu:1(IDX:0)"
    lie = f"agentd:x\nJobId=1 JobState=PENDING NodeList= {gpus}"
    for text in (lie, os.fsdecode(b"\xff\r\x85 cut \xc3")):
        words = (f"--job-name={text}", f"--comment={text}", f"--mcs-label={text}", "-o/dev/null")
        job = nodes.cluster.submit("--gres=gpu:cuda1:1", *words, user=NOBODY)
        await nodes.until_claims({f"slurm-{job}": ["cuda1"]})
        nodes.sync_once()
        nodes.cluster.run("scancel", job)
        await nodes.until_claims({})


async def test_id_that_a_record_of_before_has_is_not_needed(slurm: NodesOf) -> None:
    """Another team's claim has the id of one job, an ended kernel names that of the next."""
    nodes = await slurm(gpu_count=2)
    job = int(nodes.cluster.submit(script="true")) + 1
    await take(nodes, job, mem="1m")
    await take(nodes, job + 1, mem="1m")
    body = {"kernel_id": "old", "claim": f"slurm-{job + 1}", "command": ["true"]}
    assert (await nodes.daemon.create("notebooks", **body)).status == 201
    await nodes.daemon.until("old", "terminated")
    taken = await nodes.claims()
    assert [*taken] == [f"slurm-{job}"]

    script = "env; sleep 1000"
    for number, claim in ((job, f"slurm-{job}-2"), (job + 1, f"slurm-{job + 1}")):
        options = ("--gres=gpu:cuda1:1", f"--output={nodes.folder}/out-%j")
        assert nodes.cluster.submit(*options, script=script) == str(number)
        await nodes.until_claims({**taken, claim: ["cuda1"]})
        output = nodes.folder / f"out-{number}"
        nodes.cluster.until(lambda file=output: said(file), "the job says nothing")
        assert f"AGENTD_CLAIM={claim}\n" in output.read_text()
        nodes.cluster.run("scontrol", "requeue", str(number))
        nodes.cluster.until_state(str(number), "PENDING")
        await nodes.until_claims(taken)
        nodes.cluster.until_state(str(number), "RUNNING")
        await nodes.until_claims({**taken, claim: ["cuda1"]})
        nodes.start_sync(nodes.node)
        nodes.cluster.kill(nodes.node)  # the epilog is never run
        nodes.cluster.run("scancel", str(number))
        for pid in nodes.cluster.processes(str(number)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        nodes.cluster.start_node(nodes.node)
        await nodes.until_claims(taken)
    assert (await nodes.daemon.get("/v1/kernels/old"))["state"] == "terminated"


def said(file: Path) -> bool:
    return file.exists() and "AGENTD_AGENT" in file.read_text()


async def take(nodes: SlurmNodes, job: int, **slots: str) -> None:
    """Claim with the id of a job for another team, as could be done before admins alone could."""
    body: dict[str, Any] = {"claim_id": f"slurm-{job}", "slots": slots, "holder": {"name": "x"}}
    answer = await nodes.daemon.call("POST", "/v1/agents/notebooks/claims", body)
    assert answer.status == 201


async def test_job_without_gpus_asks_nobody(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=1)
    asked = record_calls(nodes)
    await nodes.daemon.stop()
    for _ in range(3):
        job = nodes.cluster.submit(script="srun true")
        nodes.cluster.until_state(job, "COMPLETED")
    nodes.cluster.until_idle()
    assert not asked.exists(), asked.read_text()

    await nodes.daemon.start()
    job = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    nodes.cluster.run("scancel", job)
    await nodes.until_claims({})
    assert asked.read_text() == f"scontrol --all -o -d show job {job}\n"


def record_calls(nodes: SlurmNodes) -> Path:
    """Put programs before Slurm's that write down each call of the engine."""
    folder, asked = nodes.folder / "before", nodes.folder / "asked"
    folder.mkdir()
    for name in ("scontrol", "squeue", "scancel"):
        (folder / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >>{asked}\nexec /usr/bin/{name} "$@"\n'
        )
        (folder / name).chmod(0o755)
    (nodes.folder / nodes.node / "slurm.toml").write_text(f'[slurm]\nbin = "{folder}"\n')
    return asked


async def test_epilog_after_a_restart_of_slurmctld_releases(slurm: NodesOf) -> None:
    """Slurm 22.05 names no GPUs to the epilogs of jobs that ran meanwhile."""
    nodes = await slurm(gpu_count=1)
    job = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    mark = nodes.folder / nodes.node / "run" / job
    assert mark.exists()
    nodes.cluster.kill("slurmctld", 15)
    nodes.cluster.start_controller()
    nodes.cluster.run("scancel", job)
    await nodes.until_claims({})
    nodes.cluster.until(lambda: not mark.exists(), "the mark is left")
