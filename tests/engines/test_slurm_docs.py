"""docs/how-to/slurm.md, typed on a real cluster: agentd is switched on for one of two nodes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from support.daemon import gpus
from support.slurm_cluster import gres_lines, make_device
from support.slurm_howto import Reader, here, the_block
from support.slurm_nodes import NodesOf, SlurmNodes


def page_config(nodes: SlurmNodes) -> str:
    """Return the page's configuration for a node with eight GPUs."""
    return here(the_block("toml"), nodes) + gpus(8) + 'files = ["/dev/agentd-slurm/{id}"]\n'


def without_slurm(config: str) -> str:
    """Return the configuration without the tables that name the agent of Slurm."""
    tables = re.split(r"\n(?=\[\[|\[plugins|\[resource)", config)
    return "\n".join(table for table in tables if '"slurm"' not in table)


async def test_page_switches_one_node_on_and_off(slurm: NodesOf) -> None:
    nodes = await slurm(nodes=2, text=page_config, is_switched_on=False)
    cluster, reader = nodes.cluster, Reader(nodes)
    _, printed = reader.types()
    give_gres(nodes, here(printed, nodes))
    cluster.partitions |= {"main": f"Nodes={cluster.nodes[1]} Default=YES"}
    cluster.partitions |= {"gpu": f"Nodes={cluster.nodes[0]}"}
    reader.types(*cluster.nodes)
    reader.types()
    nodes.configure_slurm(here(the_block("ini"), nodes))
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

    reader.types()
    cluster.until(lambda: not cluster.run("squeue", "-h"), "a job is left")
    sync.send_signal(signal.SIGTERM)
    assert sync.wait(30) == 0
    *_, claims = reader.types()
    assert "slurm-" not in claims
    await nodes.start_daemon(nodes.node, without_slurm(nodes.text))
    assert [row["agent_id"] for row in await nodes.daemon.get("/v1/agents")] == ["notebooks"]
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
