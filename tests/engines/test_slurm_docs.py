"""docs/how-to/slurm.md, typed on a real cluster: agentd is switched on for one of two nodes."""

from __future__ import annotations

import re
import signal

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


def give_gres(nodes: SlurmNodes, printed: str) -> None:
    """Copy what `agentctl slurm gres` prints for the first node; the second has GPUs too."""
    lines = re.findall(r"^Name=gpu .*$", printed, re.MULTILINE)
    types = [re.findall(r"Type=(\S+)", line)[0] for line in lines]
    assert types == ["cuda0", "cuda1", "cuda2", "cuda3"]
    first, second = nodes.cluster.nodes
    for name in types:
        make_device(nodes.folder / first / "dev" / name)
    (gres,) = re.findall(r"^Gres=.*$", printed, re.MULTILINE)
    nodes.cluster.gres[first] = ("\n".join(lines), gres)
    nodes.cluster.gres[second] = gres_lines(nodes.folder / second / "dev", ["a100-0", "a100-1"])


def runs_without_agentd(nodes: SlurmNodes, node: str) -> None:
    """Run a job with a GPU to its end on a node that is not switched on."""
    job = nodes.cluster.submit("--gres=gpu:1", f"--nodelist={node}", script="true")
    nodes.cluster.until_state(job, "COMPLETED")
