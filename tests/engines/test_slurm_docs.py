"""docs/how-to/slurm.md, typed on a real cluster of one node."""

from __future__ import annotations

import re
from typing import Any

from daemon import gpus
from needs import ROOT
from slurm_nodes import BIN, NodesOf, SlurmNodes

PAGE = (ROOT / "docs/how-to/slurm.md").read_text()
MARK = "console not-run with Slurm: tests/engines"


def blocks(fence: str) -> list[str]:
    """Return the page's blocks with this fence."""
    return re.findall(rf"^```{re.escape(fence)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def here(text: str, nodes: SlurmNodes) -> str:
    """Return text of the page with the places of this cluster."""
    places = {
        "/etc/agentd/slurm-gres.json": str(nodes.map_file(nodes.node)),
        "/opt/agentd/bin/agentd-slurm-": f"{nodes.folder}/",
        "/etc/slurm/": f"{nodes.folder}/",
        "/run/agentd/slurm.sock": str(nodes.folder / nodes.node / "slurm.sock"),
        "/dev/agentd-slurm": str(nodes.folder / nodes.node / "dev"),
        "NODE ": f"{nodes.node} ",
        "NODE\n": f"{nodes.node}\n",
    }
    for place, real in places.items():
        text = text.replace(place, real)
    return text


class Reader:
    """Types the blocks of the page, one after the other."""

    def __init__(self, nodes: SlurmNodes) -> None:
        self._nodes = nodes
        self._blocks = blocks(MARK)

    def types(self) -> list[str]:
        """Type the next block and return what each command prints."""
        text = here(self._blocks.pop(0) + "\n", self._nodes)
        return [self.type(line[2:]) for line in text.splitlines() if line.startswith("$ ")]

    def type(self, command: str) -> str:
        """Type one command."""
        cluster = self._nodes.cluster
        environment = self._nodes.environment(self._nodes.node)
        named = [f"{name}={environment[name]}" for name in environment if name[:6] == "AGENTD"]
        path = f"PATH={BIN}:{environment['PATH']}"
        return cluster.run("env", path, *named, "sh", "-c", command)

    def is_over(self) -> bool:
        """Return whether every block was typed."""
        return not self._blocks


async def test_page_switches_slurm_on_and_off(slurm: NodesOf) -> None:
    (text,) = blocks("toml")
    (settings,) = blocks("ini")
    nodes = await slurm(text=text + gpus(4), settings=settings, here=here)
    cluster, reader = nodes.cluster, Reader(nodes)
    _, printed = reader.types()
    gres = here(printed, nodes)
    lines = re.findall(r"^Name=gpu .*$", gres, re.MULTILINE)
    assert [line.split("Type=")[1].split()[0] for line in lines] == ["cuda0", "cuda1"]
    nodes.give_gres("\n".join(lines), re.findall(r"^Gres=.*$", gres, re.MULTILINE)[0])
    reader.types()
    job = cluster.submit("--gres=gpu:1", script="true")
    cluster.until_state(job, "COMPLETED")
    reader.types()

    (checks,) = reader.types()
    assert [line for line in checks.splitlines() if not line.startswith("ok ")] == []
    submitted, _ = reader.types()
    job = submitted.split()[-1]
    await nodes.until_claims({f"slurm-{job}": ["cuda0", "cuda1"]})
    assert f"slurm-{job}" in reader.type("agentctl claims")
    cluster.run("scancel", job)
    await nodes.until_claims({})

    await run_kernel(nodes, reader)
    reader.types()
    cluster.until(lambda: not cluster.run("squeue", "-h"), "a job is left")
    reader.types()
    reader.types()
    assert reader.is_over()
    job = cluster.submit("--gres=gpu:1")
    cluster.until_state(job, "RUNNING")
    assert await nodes.claims() == {}


async def run_kernel(nodes: Any, reader: Reader) -> None:
    """Submit the page's batch script, on one node and without an image."""
    (script,) = blocks("bash")
    script = here(script, nodes).replace("--nodes=3", "--nodes=1")
    script = script.replace("--image train:1 -- ./train", "-s cpu=0 -- echo trained")
    file = nodes.folder / "job"
    file.write_text(script.replace("agentctl", str(BIN / "agentctl")))
    job = reader.type(f"sbatch --parsable --output={nodes.folder}/trained {file}").strip()
    nodes.cluster.until_state(job, "COMPLETED")
    assert (nodes.folder / "trained").read_text() == "trained\n"
    await nodes.until_claims({})
