"""Slurm's jobs take their GPUs from agentd: real slurmctld, slurmd and munge."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from support.slurm_cluster import make_device
from support.slurm_nodes import NodesOf, SlurmNodes

GPU = {"cuda.device": "1"}


async def test_job_claims_the_devices_that_its_positions_name(slurm: NodesOf) -> None:
    nodes = await slurm(only=["cuda1", "cuda3", "cuda6"])
    job = nodes.cluster.submit("--gres=gpu:2", script="env; sleep 1000")
    nodes.cluster.until_state(job, "RUNNING")
    await nodes.until_claims({f"slurm-{job}": ["cuda1", "cuda3"]})
    output = nodes.cluster.folder / f"out-{job}"
    nodes.cluster.until(lambda: output.exists() and "AGENTD_AGENT" in output.read_text(), "-")
    claim = (await nodes.daemon.get("/v1/claims"))[0]
    assert claim["labels"] == {"engine": "slurm", "job": job, "user": "root"}
    assert claim["holder"]["name"] == f"slurm-{job}"
    nodes.cluster.run("scancel", job)
    await nodes.until_claims({})
    assert f"AGENTD_CLAIM=slurm-{job}\n" in output.read_text()
    assert "AGENTD_AGENT=slurm\n" in output.read_text()
    nodes.cluster.until_idle()


async def test_job_of_two_types_claims_both(slurm: NodesOf) -> None:
    nodes = await slurm()
    job = nodes.cluster.submit("--gres=gpu:cuda1:1,gpu:cuda3:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda1", "cuda3"]})


async def test_slurm_takes_printed_lines_of_several_files(slurm: NodesOf) -> None:
    """As of MIG instances: a file that they share, and two of each one's own."""

    def with_files(nodes: SlurmNodes) -> str:
        dev = nodes.cluster.own / "dev"
        return f'{nodes.text}files = ["{dev}/gpu", "{dev}/{{id}}-gi", "{dev}/{{id}}-ci"]\n'

    nodes = await slurm(gpu_count=2, text=with_files)
    printed = nodes.agentctl(nodes.node, "slurm", "gres", "--agent=slurm")
    lines = re.findall(r"^Name=gpu .*MultipleFiles=.*$", printed, re.MULTILINE)
    (gres,) = re.findall(r"^Gres=.*$", printed, re.MULTILINE)
    for name in ("gpu", "cuda0-gi", "cuda0-ci", "cuda1-gi", "cuda1-ci"):
        make_device(nodes.folder / nodes.node / "dev" / name)
    nodes.cluster.gres[nodes.node] = ("\n".join(lines), gres)
    nodes.configure_slurm("")
    job = nodes.cluster.submit("--gres=gpu:cuda1:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda1"]})
    other = nodes.cluster.submit("--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda1"], f"slurm-{other}": ["cuda0"]})


async def test_collision_requeues_the_job_and_drains_nothing(slurm: NodesOf) -> None:
    nodes = await slurm()
    kernel = await nodes.daemon.running("notebooks", slots=GPU, devices={"cuda": ["cuda3"]})
    job = nodes.cluster.submit("--gres=gpu:cuda3:1")
    nodes.cluster.until_requeued(job)
    fields = nodes.cluster.run("scontrol", "show", "job", job)
    assert "InsufficientResource" in fields.partition("AdminComment=")[2], fields
    assert not nodes.cluster.node_state(nodes.node).startswith("drain")
    assert f"slurm-{job}" not in await nodes.claims()
    await nodes.daemon.call("DELETE", f"/v1/kernels/{kernel['kernel_id']}?timeout=0")
    await nodes.until_claims({f"slurm-{job}": ["cuda3"]})


async def test_job_that_cannot_be_requeued_is_cancelled(slurm: NodesOf) -> None:
    nodes = await slurm()
    await nodes.daemon.running("notebooks", slots=GPU, devices={"cuda": ["cuda3"]})
    job = nodes.cluster.submit("--gres=gpu:cuda3:1", "--no-requeue")
    nodes.cluster.until_state(job, "CANCELLED")
    assert not nodes.cluster.node_state(nodes.node).startswith("drain")


async def test_silent_agentd_drains_the_node(slurm: NodesOf) -> None:
    nodes = await slurm()
    await nodes.daemon.stop()
    nodes.cluster.submit("--gres=gpu:1")
    nodes.cluster.until(
        lambda: nodes.cluster.node_state(nodes.node).startswith("drain"), "the node is in service"
    )
    assert "Prolog" in nodes.cluster.node_state(nodes.node)
    await nodes.daemon.start()
    assert await nodes.claims() == {}


async def test_orphans_of_a_killed_slurmstepd_keep_the_claim(slurm: NodesOf) -> None:
    nodes = await slurm()
    job = nodes.cluster.submit("--gres=gpu:2", script="sleep 1000 & sleep 1000")
    nodes.cluster.until(lambda: names(nodes, job).count("sleep") == 2, "the job does not run")
    held = await nodes.claims()
    for pid in [pid for pid in nodes.cluster.processes(job) if comm(pid) == "slurmstepd"]:
        os.kill(pid, signal.SIGKILL)
    nodes.cluster.run("scancel", job)
    nodes.cluster.until_state(job, "CANCELLED", "FAILED", "NODE_FAIL", "")
    orphans = nodes.cluster.processes(job)
    assert orphans, "Slurm ended the orphans"
    assert await nodes.claims() == held
    nodes.start_sync(nodes.node)
    nodes.sync_once()
    assert await nodes.claims() == held
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    await nodes.until_claims({}, within_s=30)


def names(nodes: SlurmNodes, job: str) -> list[str]:
    """Return the names of a job's processes."""
    found = []
    for pid in nodes.cluster.processes(job):
        with contextlib.suppress(FileNotFoundError):
            found.append(comm(pid))
    return found


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


async def test_foreign_kernel_is_blocked_by_a_placeholder(slurm: NodesOf) -> None:
    nodes = await slurm()
    nodes.start_sync(nodes.node)
    kernel = await nodes.daemon.running("notebooks", slots=GPU, devices={"cuda": ["cuda3"]})
    nodes.cluster.until(lambda: placeholders(nodes), "no placeholder", within_s=12)
    (found,) = placeholders(nodes)
    assert found["comment"] == f"agentd:{kernel['kernel_id']}"
    assert found["gres_detail"] == ["gpu:cuda3:1(IDX:3)"]
    assert await nodes.claims() == {}
    job = nodes.cluster.submit("--gres=gpu:7")
    await nodes.until_claims({f"slurm-{job}": [f"cuda{n}" for n in range(8) if n != 3]})
    await nodes.daemon.call("DELETE", f"/v1/kernels/{kernel['kernel_id']}?timeout=0")
    nodes.cluster.until(lambda: not placeholders(nodes), "a placeholder is left", within_s=12)


def placeholders(nodes: Any) -> list[dict[str, Any]]:
    """Return the placeholders that block a GPU."""
    rows = json.loads(nodes.cluster.run("squeue", "--json"))["jobs"]
    return [
        row
        for row in rows
        if row["comment"].startswith("agentd:") and row["job_state"] == "RUNNING"
    ]


async def test_stale_claim_ends_only_once_the_job_is_over(slurm: NodesOf) -> None:
    nodes = await slurm()
    body = {
        "slots": GPU,
        "holder": {"name": "slurm-4711"},
        "labels": {"engine": "slurm", "job": "4711"},
        "claim_id": "slurm-4711",
    }
    assert (await nodes.daemon.call("POST", "/v1/agents/slurm/claims", body)).status == 201
    job = nodes.cluster.submit("--gres=gpu:cuda5:1")
    await nodes.until_claims({"slurm-4711": ["cuda0"], f"slurm-{job}": ["cuda5"]})
    nodes.start_sync(nodes.node)
    await nodes.until_claims({f"slurm-{job}": ["cuda5"]}, within_s=30)
    assert nodes.cluster.state(job) == "RUNNING"


async def test_step_takes_the_gpus_of_its_own_node(slurm: NodesOf) -> None:
    """A step inherits SLURM_JOB_GPUS of its caller, on another node or on none."""
    nodes = await slurm(nodes=2, gpu_count=2)
    cluster, (first, second) = nodes.cluster, nodes.cluster.nodes
    other = cluster.submit("--gres=gpu:cuda0:1", f"--nodelist={first}")
    await nodes.until_claims({f"slurm-{other}": ["cuda0"]})
    script = f"srun sh -c 'touch {nodes.folder}/ran-$SLURMD_NODENAME'; sleep 1000"
    job = cluster.submit("-N2", "--gres=gpu:1", script=script)
    await nodes.until_claims({f"slurm-{other}": ["cuda0"], f"slurm-{job}": ["cuda1"]})
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]}, second)
    ran = [nodes.folder / f"ran-{node}" for node in (first, second)]
    cluster.until(lambda: all(file.exists() for file in ran), "a step did not start")
    assert cluster.job(job)["Restarts"] == "0"
    cluster.run("scancel", job)
    await nodes.until_claims({}, second)
    printed = cluster.run("srun", "--gres=gpu:1", f"--nodelist={second}", "env")
    assert "SLURM_STEP_GPUS=0" in printed.splitlines()
    assert "AGENTD_AGENT=slurm" in printed.splitlines()


async def test_no_task_starts_on_gpus_without_a_claim(slurm: NodesOf) -> None:
    """Slurm runs no prolog for an id that slurmd still knows: then the task prolog refuses."""
    nodes = await slurm()
    goes, ran = nodes.folder / "goes", nodes.folder / "ran"
    script = f"while ! [ -e {goes} ]; do sleep 0.1; done; srun --overlap touch {ran}"
    job = nodes.cluster.submit("--gres=gpu:cuda3:1", script=script)
    await nodes.until_claims({f"slurm-{job}": ["cuda3"]})
    assert (await nodes.daemon.call("DELETE", f"/v1/claims/slurm-{job}")).status == 204
    goes.touch()
    nodes.cluster.until_requeued(job)
    assert not ran.exists()
    nodes.cluster.until(ran.exists, "the job does not run again")


async def test_doctor_names_the_setting_that_is_wrong(slurm: NodesOf) -> None:
    nodes = await slurm()
    done = nodes.engine(nodes.node, "doctor", "--node", nodes.node)
    assert done.returncode == 0, done.stdout + done.stderr
    config = nodes.cluster.folder / "etc/slurm.conf"
    config.write_text(config.read_text().replace("proctrack/cgroup", "proctrack/linuxproc"))
    nodes.cluster.kill("slurmctld", signal.SIGTERM)
    nodes.cluster.start_controller()
    done = nodes.engine(nodes.node, "doctor", "--node", nodes.node)
    assert done.returncode == 1
    assert "FAIL ProctrackType: got proctrack/linuxproc, expected proctrack/cgroup" in done.stdout
