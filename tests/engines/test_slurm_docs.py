"""docs/how-to/slurm.md, typed on a real cluster: agentd is switched on for one of two nodes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from agentd_slurm.claim_ids import shared_claim_id
from support.daemon import gpus
from support.slurm_cluster import gres_lines, make_device
from support.slurm_howto import Reader, here, the_block
from support.slurm_nodes import NodesOf, SlurmNodes


def page_config(nodes: SlurmNodes) -> str:
    """Return the page's configuration for a node with eight GPUs."""
    return here(the_block("toml"), nodes) + gpus(8) + 'files = ["/dev/agentd-slurm/{id}"]\n'


def without_socket(config: str) -> str:
    """Return the configuration without the socket of Slurm's users."""
    return re.sub(r"\[\[rpc\.sockets\]\]\n(?:.+\n)*", "", config)


async def test_page_switches_one_node_on_and_off(slurm: NodesOf) -> None:
    nodes = await slurm(nodes=2, text=page_config, is_switched_on=False)
    cluster, reader = nodes.cluster, Reader(nodes)
    _, printed = reader.types()
    give_gres(nodes, here(printed, nodes))
    cluster.partitions |= {"main": f"Nodes={cluster.nodes[1]} Default=YES"}
    cluster.partitions |= {"gpu": f"Nodes={cluster.nodes[0]}"}
    reader.types(*cluster.nodes)
    reader.types()
    nodes.configure_slurm(f"{here(the_block('ini'), nodes)}{nodes.reboot_program}")
    sync = nodes.start_sync(nodes.node)
    (checks,) = reader.types()
    assert [line for line in checks.splitlines() if not line.startswith("ok ")] == []

    submitted, _ = reader.types()
    job = submitted.split()[-1]
    await nodes.until_claims({f"slurm-{job}": ["cuda0", "cuda1"]})
    assert f"slurm-{job}" in reader.type("agentctl claims")
    runs_without_agentd(nodes, cluster.nodes[1])
    cluster.run("scancel", job)
    await nodes.until_claims({})
    await jobs_of_several_parts_claim_each(nodes)
    await node_reboots_when_its_job_ends(nodes, reader)
    await shards_hold_their_gpu(nodes)

    reader.types()
    cluster.until(lambda: not cluster.run("squeue", "-h"), "a job is left")
    sync.send_signal(signal.SIGTERM)
    assert sync.wait(30) == 0
    *_, claims = reader.types()
    assert "slurm-" not in claims
    await nodes.start_daemon(nodes.node, without_socket(nodes.text))
    assert [(await nodes.daemon.device(f"cuda{number}"))["agents"] for number in range(8)] == [
        *4 * [["slurm"]], *4 * [["notebooks"]]
    ]  # fmt: skip
    reader.types()
    assert reader.is_over()
    for node in cluster.nodes:
        runs_without_agentd(nodes, node)
    assert await nodes.claims() == {}


async def jobs_of_several_parts_claim_each(nodes: SlurmNodes) -> None:
    """Run an array and a heterogeneous job in the partition of the GPU node."""
    cluster, gpu = nodes.cluster, "--gres=gpu:simulated"
    part = "--partition=gpu"
    array = cluster.submit(part, "--array=0-1", f"{gpu}:2")
    tasks = [cluster.until_state(f"{array}_{task}", "RUNNING")["JobId"] for task in (0, 1)]
    of_tasks = zip(tasks, (["cuda0", "cuda1"], ["cuda2", "cuda3"]), strict=True)
    await nodes.until_claims({f"slurm-{task}": devices for task, devices in of_tasks})
    cluster.run("scancel", array)
    await nodes.until_claims({})
    script = nodes.folder / "two-components.sh"
    script.write_text("#!/bin/sh\nsleep 1000\n")
    words = ["sbatch", "--parsable", "--output=/dev/null", "-n1", ":", part, "-n1", f"{gpu}:3"]
    leader = cluster.run(*words, script).strip()  # its components are on nodes of their own
    await nodes.until_claims({f"slurm-{int(leader) + 1}": ["cuda0", "cuda1", "cuda2"]})
    cluster.run("scancel", leader)
    await nodes.until_claims({})


async def node_reboots_when_its_job_ends(nodes: SlurmNodes, reader: Reader) -> None:
    """Reboot the GPU node while a job runs, and run another one afterwards."""
    cluster, node = nodes.cluster, nodes.node
    job = cluster.submit("--partition=gpu", "--gres=gpu:1")
    await nodes.until_claims({f"slurm-{job}": ["cuda0"]})
    reader.types()
    assert cluster.node_state(node).startswith("draining")
    cluster.run("scancel", job)
    await nodes.until_rebooted(node)
    cluster.until_idle()
    assert await nodes.claims() == {}
    assert (await nodes.daemon.device("cuda4"))["state"] == "drained"
    job = cluster.submit("--partition=gpu", "--gres=gpu:2")
    await nodes.until_claims({f"slurm-{job}": ["cuda0", "cuda1"]})
    cluster.run("scancel", job)
    await nodes.until_claims({})


async def shards_hold_their_gpu(nodes: SlurmNodes) -> None:
    """Share GPUs by shards, as the page says, and run one job beside them."""
    cluster, node = nodes.cluster, nodes.node
    types, gres, line = here(the_block("ini shards"), nodes).splitlines()
    cluster.gres[node] = (f"{cluster.gres[node][0]}\n{line}", gres)
    nodes.configure_slurm(types)
    jobs = [cluster.submit("--partition=gpu", "--gres=shard:1") for _ in range(2)]
    for job in jobs:
        cluster.until_state(job, "RUNNING")
    whole = cluster.submit("--partition=gpu", "--gres=gpu:3")
    shared = shared_claim_id((await nodes.daemon.device("cuda0"))["stable_id"])
    await nodes.until_claims({f"slurm-{whole}": ["cuda1", "cuda2", "cuda3"], shared: ["cuda0"]})
    cluster.run("scancel", *jobs, whole)
    await nodes.until_claims({})


def give_gres(nodes: SlurmNodes, printed: str) -> None:
    """Copy what `agentctl slurm gres` prints for the first node; the second has GPUs too."""
    (line,) = re.findall(r"^Name=gpu .*$", printed, re.MULTILINE)
    (gres,) = re.findall(r"^Gres=.*$", printed, re.MULTILINE)
    first, second = nodes.cluster.nodes
    files = [f"{nodes.cluster.own}/dev/cuda{number}" for number in range(4)]
    assert line == f"Name=gpu Type=simulated File={','.join(files)}"
    for file in files:
        make_device(nodes.folder / first / "dev" / Path(file).name)
    nodes.cluster.gres[first] = (line, gres)
    nodes.cluster.gres[second] = gres_lines(nodes.folder / second / "dev", ["a100-0", "a100-1"])


def runs_without_agentd(nodes: SlurmNodes, node: str) -> None:
    """Run a job with a GPU to its end on a node that is not switched on."""
    partition = "gpu" if node == nodes.node else "main"
    words = [f"--partition={partition}", "--gres=gpu:1", f"--nodelist={node}"]
    job = nodes.cluster.submit(*words, script="true")
    nodes.cluster.until_state(job, "COMPLETED")
