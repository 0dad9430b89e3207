"""`agentd-slurm sync` and its placeholders, with partitions, limits and node states of sites."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from support.daemon import gpus
from support.slurm_nodes import NodesOf, SlurmNodes

GPU = {"cuda.device": "1"}
ON_CUDA3: dict[str, Any] = {"slots": GPU, "devices": {"cuda": ["cuda3"]}}
SITES = {
    "outside the default partition": [
        "PartitionName=cpu Nodes={second} Default=YES",
        "PartitionName=gpu Nodes={first}",
    ],
    "no jobs of root in one": [
        "PartitionName=main Nodes=ALL Default=YES DisableRootJobs=YES",
        "PartitionName=gpu Nodes={first} PriorityTier=5",
    ],
    "one is down": [
        "PartitionName=main Nodes=ALL Default=YES State=DOWN",
        "PartitionName=gpu Nodes={first}",
    ],
    "one is exclusive": [
        "PartitionName=main Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE PriorityTier=5",
        "PartitionName=gpu Nodes={first}",
    ],
    "limits": [
        "PartitionName=short Nodes=ALL Default=YES DefaultTime=2 MaxTime=5",
        "PartitionName=gpu Nodes={first} DefaultTime=60 MaxTime=1-0",
    ],
}


def set_partitions(nodes: SlurmNodes, *lines: str, limits: str = "NO") -> None:
    """Replace the partitions of slurm.conf."""
    first, second = nodes.cluster.nodes[0], nodes.cluster.nodes[-1]
    file = nodes.cluster.folder / "etc/slurm.conf"
    kept = [line for line in file.read_text().splitlines() if not line.startswith("PartitionName")]
    filled = (line.format(first=first, second=second) for line in lines)
    file.write_text("\n".join([*kept, f"EnforcePartLimits={limits}", *filled]) + "\n")
    nodes.cluster.run("scontrol", "reconfigure")


def placeholders(nodes: SlurmNodes) -> list[str]:
    """Return state, GPU and comment of the placeholders in the queue."""
    words = ("--all", "-h", "--name=agentd", "-t", "PD,R,S", "-o", "%T %b %k")
    return nodes.cluster.run("squeue", *words).splitlines()


def until_blocked(nodes: SlurmNodes, holder: str, gpu: str = "cuda3") -> None:
    wanted = [f"RUNNING gres:gpu:{gpu}:1 agentd:{holder}"]
    nodes.cluster.until(lambda: placeholders(nodes) == wanted, f"{gpu} is not blocked")


async def conditions(nodes: SlurmNodes) -> list[str]:
    """Return the conditions that the engine reports."""
    rows = (await nodes.daemon.get("/v1/node"))["conditions"]
    return [row["reason"] for row in rows if row["about"] == "engine/slurm"]


@pytest.mark.parametrize("limits", ["NO", "ANY", "ALL"])
async def test_placeholder_starts_in_any_partition(slurm: NodesOf, limits: str) -> None:
    nodes = await slurm(nodes=2, gpu_count=4)
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    for lines in SITES.values():
        set_partitions(nodes, *lines, limits=limits)
        nodes.sync_once()
        until_blocked(nodes, kernel)
        nodes.sync_once()
        until_blocked(nodes, kernel)
        nodes.cluster.run("scancel", "--name=agentd")
        nodes.cluster.until(lambda: not nodes.cluster.run("squeue", "-h"), "a job is left")
    assert await conditions(nodes) == []


async def test_placeholder_outranks_jobs_that_wait(slurm: NodesOf) -> None:
    """A partition whose jobs preempt others has the placeholder, which is requeued by none."""
    nodes = await slurm(gpu_count=4)
    nodes.configure_slurm("PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE")
    set_partitions(
        nodes,
        "PartitionName=main Nodes=ALL Default=YES PriorityTier=1",
        "PartitionName=urgent Nodes=ALL PriorityTier=10",
    )
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    nodes.sync_once()
    until_blocked(nodes, kernel)
    nodes.cluster.submit("--gres=gpu:cuda3:1", "--partition=urgent")
    job = nodes.cluster.submit("--gres=gpu:cuda2:1", "--partition=urgent")
    nodes.cluster.until_state(job, "RUNNING")
    until_blocked(nodes, kernel)


@pytest.mark.parametrize("command", ["drain", "reboot"])
async def test_placeholder_keeps_no_node_from_draining(slurm: NodesOf, command: str) -> None:
    nodes = await slurm(gpu_count=4)
    cluster, node = nodes.cluster, nodes.node
    nodes.configure_slurm(nodes.reboot_program)
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    nodes.sync_once()
    until_blocked(nodes, kernel)
    if command == "drain":
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
        assert cluster.node_state(node).startswith("draining")
    else:
        cluster.run("scontrol", "reboot", "ASAP", node)
    nodes.sync_once()
    wanted = "drained" if command == "drain" else "reboot"
    cluster.until(lambda: cluster.node_state(node).startswith(wanted), "the node is not idle")
    nodes.sync_once()
    assert placeholders(nodes) == []
    if command == "drain":
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    else:
        await nodes.until_rebooted(node)
    cluster.until_idle()
    cluster.until(lambda: nodes.sync_once() or placeholders(nodes), "the GPU is not blocked")
    until_blocked(nodes, kernel)


async def test_placeholder_never_waits_for_a_job(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    job = nodes.cluster.submit("--gres=gpu:cuda3:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda3"]})
    path = "/v1/devices/cuda/cuda3"
    assert (await nodes.daemon.call("POST", f"{path}/drain")).status == 200
    for _ in range(2):
        nodes.sync_once()
        assert placeholders(nodes) == []
    nodes.cluster.run("scancel", job)
    nodes.cluster.until_idle()
    nodes.sync_once()
    until_blocked(nodes, "drained")


async def test_placeholder_that_cannot_start_is_taken_back(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    nodes.settings_file(nodes.node).write_text('[placeholder]\naccount = "ops"\ntime = "10:00"\n')
    nodes.cluster.run("scontrol", "update", "PartitionName=main", "MaxTime=5")
    nodes.engine(nodes.node, "sync", "--once", "--node", nodes.node)
    nodes.cluster.until(
        lambda: nodes.cluster.run("squeue", "-h", "--name=agentd", "-o", "%r") != "None\n",
        "Slurm does not look at the placeholder",
    )
    done = nodes.engine(nodes.node, "sync", "--once", "--node", nodes.node)
    assert done.returncode == 1
    (text,) = re.findall(r"GPU cuda3 is not blocked in Slurm: Partition\w+", done.stderr)
    assert text.endswith(("TimeLimit", "Config")), "as the main or the backfill scheduler says it"
    assert await conditions(nodes) == [text]
    assert placeholders(nodes) == []
    nodes.settings_file(nodes.node).unlink()
    nodes.sync_once()
    until_blocked(nodes, kernel)
    nodes.sync_once()
    assert await conditions(nodes) == []


async def test_failing_placeholder_is_told_once(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    drained = "/v1/devices/cuda/cuda2/drain"
    assert (await nodes.daemon.call("POST", drained)).status == 200
    settings = nodes.settings_file(nodes.node)
    settings.write_text('[placeholder]\npartition = "absent"\n')
    sync = nodes.start_sync(nodes.node)
    log = nodes.cluster.folder / f"log/sync-{nodes.node}"
    reason = "GPU cuda2, cuda3 is not blocked in Slurm: sbatch: "
    nodes.cluster.until(lambda: reason in log.read_text(), "nothing is told")
    begun = len((nodes.cluster.folder / "log/slurmctld").read_text())
    tried = "_create_job: invalid partition|invalid partition specified: absent"
    nodes.cluster.until(
        lambda: any(
            word in (nodes.cluster.folder / "log/slurmctld").read_text()[begun:]
            for word in tried.split("|")
        ),
        "it is not tried again",
    )
    assert log.read_text().count("is not blocked") == 1
    (told,) = await conditions(nodes)
    assert told.startswith(reason)
    await nodes.daemon.restart()
    settings.unlink()
    nodes.cluster.until(lambda: len(placeholders(nodes)) == 2, "the GPUs are not blocked")
    nodes.cluster.until(lambda: "cuda2 is blocked" in log.read_text(), "-")
    sync.send_signal(signal.SIGTERM)
    assert sync.wait(30) == 0
    assert kernel in log.read_text()
    assert await conditions(nodes) == []


async def test_placeholders_end_with_sync_and_outlive_its_kill(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    sync = nodes.start_sync(nodes.node)
    until_blocked(nodes, kernel)
    ids = nodes.cluster.run("squeue", "-h", "--name=agentd", "-o", "%A")
    sync.kill()
    sync.wait()
    sync = nodes.start_sync(nodes.node)
    log = nodes.cluster.folder / f"log/sync-{nodes.node}"
    nodes.sync_once()
    assert nodes.cluster.run("squeue", "-h", "--name=agentd", "-o", "%A") == ids
    sync.send_signal(signal.SIGTERM)
    assert sync.wait(30) == 0
    assert placeholders(nodes) == []
    assert log.read_text().count("is blocked in Slurm") == 1


async def test_devices_of_its_own_have_no_placeholders(slurm: NodesOf) -> None:
    def text(nodes: SlurmNodes) -> str:
        mode = '[resource]\nallocation-mode = "auto-split"\n'
        return mode + nodes.text.partition("[plugins")[0] + gpus(4)

    nodes = await slurm(gpu_count=4, text=text)
    rows = await nodes.daemon.get("/v1/devices")
    device = next(row for row in rows if row["device_name"] == "cuda")
    assert device["agents"] == ["slurm"], device
    path = f"/v1/devices/cuda/{device['id']}/drain"
    assert (await nodes.daemon.call("POST", path)).status == 200
    nodes.sync_once()
    assert placeholders(nodes) == []


async def job_without_a_claim(nodes: SlurmNodes) -> str:
    """Return a job that runs on cuda3 as if Slurm had skipped its prolog."""
    begun = nodes.folder / "begun"
    job = nodes.cluster.submit("--gres=gpu:cuda3:1", script=f"touch {begun}; sleep 1000")
    nodes.cluster.until(begun.exists, "the job does not run")
    assert (await nodes.daemon.call("DELETE", f"/v1/claims/slurm-{job}")).status == 204
    return job


async def test_job_without_a_claim_is_claimed_at_the_next_look(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    job = await job_without_a_claim(nodes)
    nodes.sync_once()
    assert await nodes.claims() == {f"slurm-{job}": ["cuda3"]}
    assert nodes.cluster.state(job) == "RUNNING"


async def test_job_without_a_claim_goes_back_before_others(slurm: NodesOf) -> None:
    """Slurm may start a job without its prolog while a kernel has its GPU."""
    nodes = await slurm(gpu_count=4)
    job = await job_without_a_claim(nodes)
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    nodes.sync_once()
    nodes.cluster.until_requeued(job)
    text = nodes.cluster.run("scontrol", "show", "job", job)
    assert kernel in text.partition("AdminComment=")[2]
    device = await nodes.daemon.device("cuda3")
    assert (device["state"], len(device["holders"])) == ("ok", 1)


async def test_sync_ends_the_claim_of_a_gpu_that_jobs_shared(slurm: NodesOf) -> None:
    """A claim of shards ends when the epilog could not, and is made again for a job without."""
    nodes = await slurm(gpu_count=2)
    cluster, node = nodes.cluster, nodes.node
    lines, gres = cluster.gres[node]
    cluster.gres[node] = (f"{lines}\nName=shard Count=4", f"{gres},shard:4")
    nodes.configure_slurm("GresTypes=gpu,shard")
    begun = nodes.folder / "begun"
    job = cluster.submit("--gres=shard:1", script=f"touch {begun}; sleep 1000")
    cluster.until(begun.exists, "the job does not run")
    ((claim, devices),) = (await nodes.claims()).items()
    assert claim.startswith("slurm-dev-")
    nodes.sync_once()
    assert await nodes.claims() == {claim: devices}
    assert (await nodes.daemon.call("DELETE", f"/v1/claims/{claim}")).status == 204
    nodes.sync_once()
    assert await nodes.claims() == {claim: devices}
    assert placeholders(nodes) == []
    await nodes.daemon.stop()
    cluster.run("scancel", job)
    cluster.until(lambda: not cluster.processes(job), "the job runs")
    cluster.until_idle()
    await nodes.daemon.start()
    assert await nodes.claims() == {claim: devices}
    nodes.sync_once()
    assert await nodes.claims() == {}


@pytest.mark.long
async def test_placeholder_is_replaced_before_its_limit(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    nodes.settings_file(nodes.node).write_text('[placeholder]\ntime = "00:02:00"\n')
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    nodes.start_sync(nodes.node)
    until_blocked(nodes, kernel)
    first = nodes.cluster.run("squeue", "-h", "--name=agentd", "-o", "%A").strip()
    nodes.cluster.until_state(first, "RUNNING")
    nodes.cluster.until(lambda: nodes.cluster.state(first) != "RUNNING", "it runs on", 90)
    assert nodes.cluster.job(first)["JobState"] != "TIMEOUT"
    until_blocked(nodes, kernel)


async def test_placeholder_is_in_no_reservation_but_its_own(slurm: NodesOf) -> None:
    nodes = await slurm(gpu_count=4)
    cluster = nodes.cluster
    kernel = (await nodes.daemon.running("notebooks", **ON_CUDA3))["kernel_id"]
    nodes.sync_once()
    until_blocked(nodes, kernel)
    words = ("reservation=r", "starttime=now", "duration=60", "users=root", "flags=ignore_jobs")
    cluster.run("scontrol", "create", "reservation", f"nodes={nodes.node}", *words)
    cluster.until(
        lambda: "RESERVED" in cluster.run("scontrol", "show", "node", nodes.node), "not reserved"
    )
    nodes.sync_once()
    cluster.until(lambda: not cluster.run("squeue", "-h"), "a placeholder is left")
    nodes.sync_once()
    assert placeholders(nodes) == []
    nodes.settings_file(nodes.node).write_text('[placeholder]\nreservation = "r"\n')
    nodes.sync_once()
    until_blocked(nodes, kernel)
    nodes.sync_once()
    until_blocked(nodes, kernel)
