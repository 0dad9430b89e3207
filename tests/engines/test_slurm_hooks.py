"""Slurm's hooks on a site's day: shared GPUs, an absent slurmctld, users' environments."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
from pathlib import Path

import pytest

from support.slurm_nodes import NodesOf, SlurmNodes

AGENTCTL = Path(sys.executable).parent / "agentctl"
GPU = {"cuda.device": "1"}


async def with_shared_gpus(slurm: NodesOf) -> SlurmNodes:
    """Return a node with two GPUs that jobs share by shards, and one more with MPS."""
    nodes = await slurm(nodes=2, gpu_count=2)
    for node, (name, count) in zip(nodes.cluster.nodes, (("shard", 8), ("mps", 200)), strict=True):
        lines, gres = nodes.cluster.gres[node]
        nodes.cluster.gres[node] = (f"{lines}\nName={name} Count={count}", f"{gres},{name}:{count}")
    nodes.configure_slurm("GresTypes=gpu,shard,mps")
    return nodes


async def shared_claim(nodes: SlurmNodes, node: str, device: str) -> str:
    stable_id = (await nodes.daemons[node].device(device))["stable_id"]
    return f"slurm-dev-{hashlib.sha256(stable_id.encode()).hexdigest()[:16]}"


@pytest.mark.parametrize("gres", ["shard:2", "mps:50"])
async def test_shared_gpu_is_held_until_its_last_job_ends(slurm: NodesOf, gres: str) -> None:
    nodes = await with_shared_gpus(slurm)
    node = nodes.cluster.nodes[gres.startswith("mps")]
    ran = nodes.folder / "ran"
    script = f"srun touch {ran}-$SLURM_JOB_ID; sleep 1000"
    jobs = [nodes.cluster.submit(f"--gres={gres}", f"-w{node}", script=script) for _ in range(2)]
    held = {await shared_claim(nodes, node, "cuda0"): ["cuda0"]}
    for job in jobs:
        nodes.cluster.until_state(job, "RUNNING")
        nodes.cluster.until(Path(f"{ran}-{job}").exists, "the task did not start")
        await nodes.until_claims(held, node)
    (claim,) = await nodes.daemons[node].get("/v1/claims")
    assert claim["labels"] == {"engine": "slurm"}
    whole = nodes.cluster.submit("--gres=gpu:1", f"-w{node}")
    await nodes.until_claims({**held, f"slurm-{whole}": ["cuda1"]}, node)
    nodes.cluster.run("scancel", jobs[0], whole)
    marks = nodes.folder / node / "run"
    nodes.cluster.until(lambda: not (marks / jobs[0]).exists(), "the epilog did not run")
    await nodes.until_claims(held, node)
    nodes.cluster.run("scancel", jobs[1])
    await nodes.until_claims({}, node)
    nodes.cluster.until_idle()


async def test_shard_of_a_held_gpu_sends_the_job_back(slurm: NodesOf) -> None:
    nodes = await with_shared_gpus(slurm)
    kernels = [await nodes.daemon.running("notebooks", slots=GPU) for _ in range(2)]
    job = nodes.cluster.submit("--gres=shard:1", f"-w{nodes.node}")
    nodes.cluster.until_requeued(job)
    reason = nodes.cluster.run("scontrol", "show", "job", job).partition("AdminComment=")[2]
    assert f"cuda0 is held by kernel {kernels[0]['kernel_id']}" in reason
    assert await nodes.claims() == {}


async def test_type_that_contradicts_the_map_is_named(slurm: NodesOf) -> None:
    """The order of the GPUs changed, and the map is an old one."""
    nodes = await slurm(gpu_count=4)
    content = json.loads(nodes.map_file(nodes.node).read_text())
    devices = content["devices"]
    devices["0"], devices["3"] = devices["3"], devices["0"]
    nodes.map_file(nodes.node).write_text(json.dumps(content))
    job = nodes.cluster.submit("--gres=gpu:cuda3:1")
    nodes.cluster.until_requeued(job)
    reason = nodes.cluster.run("scontrol", "show", "job", job).partition("AdminComment=")[2]
    assert "GPU 3 is of type cuda3 in Slurm, but the map has cuda0" in reason
    assert await nodes.claims() == {}
    nodes.cluster.submit("--gres=gpu:cuda1:1")
    nodes.cluster.until(lambda: nodes.cluster.run("squeue", "-h", "-tR"), "no job runs")


async def test_prolog_waits_for_an_absent_slurmctld(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=1)
    hold_prolog(nodes)
    jobs = [nodes.cluster.submit(gres) for gres in ("--gres=gpu:1", "--gres=gpu:0")]
    nodes.cluster.until((nodes.folder / "begun").exists, "the prolog does not begin")
    nodes.cluster.kill("slurmctld", signal.SIGTERM)
    (nodes.folder / "goes").touch()
    await asyncio.sleep(18)
    nodes.cluster.start_controller()
    await nodes.until_claims({f"slurm-{jobs[0]}": ["cuda0"]})
    for job in jobs:
        nodes.cluster.until_state(job, "RUNNING")
    assert not nodes.cluster.node_state(nodes.node).startswith("drain")


def hold_prolog(nodes: SlurmNodes) -> None:
    """Make prologs wait until the file `goes` exists."""
    file = nodes.folder / "prolog"
    head, _, rest = file.read_text().partition("\n")
    begun, goes = nodes.folder / "begun", nodes.folder / "goes"
    wait = f": > {begun}\nwhile ! [ -e {goes} ]; do /bin/sleep 0.1; done"
    file.write_text(f"{head}\n{wait}\n{rest}")


@pytest.mark.parametrize(
    "assignment",
    ["PYTHONHOME=/none", "PYTHONPATH=/none", "LD_LIBRARY_PATH=/none", "LD_PRELOAD=/none.so"],
)
async def test_users_environment_stops_no_task(slurm: NodesOf, assignment: str) -> None:
    nodes = await slurm(gpu_count=1)
    for gres in ("--gres=gpu:1", "--gres=gpu:0"):
        script = f"export {assignment}; srun env"
        job = nodes.cluster.submit(gres, script=script)
        nodes.cluster.until_state(job, "COMPLETED")
        said = (nodes.cluster.folder / f"out-{job}").read_text()
        assert (f"AGENTD_CLAIM=slurm-{job}\n" in said) == (gres == "--gres=gpu:1")


async def test_crash_of_the_task_prolog_stops_no_task(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=1)
    file = nodes.folder / "task-prolog"
    file.write_text(file.read_text().replace("\nexec", "\nexport AGENTD_SLURM_MAP=/\nexec"))
    nodes.map_file(nodes.node).chmod(0)
    job = nodes.cluster.submit("--gres=gpu:1", script="srun echo ran")
    nodes.cluster.until_state(job, "COMPLETED")
    assert "ran\n" in (nodes.cluster.folder / f"out-{job}").read_text()


async def test_components_have_claims_of_their_own(slurm: NodesOf) -> None:
    nodes = await slurm(nodes=2, gpu_count=2)
    first, second = nodes.cluster.nodes
    script = "srun --het-group=0,1 sh -c 'echo $AGENTD_CLAIM $AGENTD_SLOTS'; sleep 1000"
    words = (f"-w{second}", "--gres=gpu:1", ":", f"-w{first}", "--gres=gpu:2")
    job = nodes.cluster.submit(*words, script=script)
    component = str(int(job) + 1)
    await nodes.until_claims({f"slurm-{component}": ["cuda0", "cuda1"]}, first)
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]}, second)
    output = nodes.cluster.folder / f"out-{job}"
    said = [f"slurm-{job} cuda.device=1", f"slurm-{component} cuda.device=2"]
    nodes.cluster.until(
        lambda: output.exists() and sorted(output.read_text().splitlines()) == said, "-"
    )
    nodes.cluster.run("scancel", job)
    for node in (first, second):
        await nodes.until_claims({}, node)


async def test_each_task_runs_a_kernel_on_its_own_gpu(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=2)
    run = f'{AGENTCTL} run slurm --claim "$AGENTD_CLAIM" --rm -s cpu=0'
    file = nodes.folder / "kernel"
    file.write_text(
        f"#!/bin/sh\nexport AGENTD_SOCKET={nodes.cluster.own}/slurm.sock\n"
        f"exec {run} -- sh -c 'echo got $CUDA_VISIBLE_DEVICES; sleep 1000'\n"
    )
    file.chmod(0o755)
    script = f"srun -n2 --gpus-per-task=1 {file}"
    job = nodes.cluster.submit("-n2", "--gres=gpu:2", script=script)
    output = nodes.cluster.folder / f"out-{job}"
    nodes.cluster.until(
        lambda: output.exists() and output.read_text().count("got") == 2, "no two kernels"
    )
    assert sorted(output.read_text().split()) == ["cuda0", "cuda1", "got", "got"]


async def test_job_started_by_hand_after_its_refusal_runs_nothing(slurm: NodesOf) -> None:
    """Slurm may run no prolog for a job that it starts within a second of its requeue."""
    nodes = await slurm(gpu_count=1)
    kernel = await nodes.daemon.running("notebooks", slots=GPU)
    ran = nodes.folder / "ran"
    job = nodes.cluster.submit("--gres=gpu:1", script=f"touch {ran}")
    for restarts in range(1, 4):
        nodes.cluster.until(
            lambda wanted=restarts: int(nodes.cluster.job(job)["Restarts"]) >= wanted, "-"
        )
        nodes.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
    assert not ran.exists()
    assert await nodes.claims() == {}
    assert not nodes.cluster.node_state(nodes.node).startswith("drain")
    await nodes.daemon.call("DELETE", f"/v1/kernels/{kernel['kernel_id']}?timeout=0")
    nodes.cluster.until(ran.exists, "the job does not run")


@pytest.mark.parametrize(("count", "keeps"), [(12, True), (1, False)])
async def test_epilog_ends_stubborn_kernels_together(
    slurm: NodesOf, count: int, keeps: object
) -> None:
    """They ignore TERM; the one that does not keep the claim ended it."""
    nodes = await slurm(gpu_count=count)
    job = nodes.cluster.submit(f"--gres=gpu:{count}")
    await nodes.until_claims({f"slurm-{job}": sorted(f"cuda{n}" for n in range(count))})
    command = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    for _ in range(count):
        body = {"claim": f"slurm-{job}", "keep_claim": keeps, "command": command}
        slots = {"cpu": "0", **GPU}
        assert (await nodes.daemon.create("slurm", slots=slots, **body)).status == 201
    nodes.cluster.run("scancel", job)
    nodes.cluster.until_state(job, "CANCELLED")
    async with asyncio.timeout(15):
        while await nodes.daemon.get("/v1/kernels") or await nodes.claims():
            await asyncio.sleep(0.1)
    nodes.cluster.until_idle()
