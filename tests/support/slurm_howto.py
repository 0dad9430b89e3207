"""docs/how-to/slurm.md, as an operator or a user types it on a node of a test's cluster."""

from __future__ import annotations

import re
import subprocess

from support.needs import ROOT
from support.slurm_nodes import BIN, SlurmNodes

PAGE = (ROOT / "docs/how-to/slurm.md").read_text()
MARK = "console not-run with Slurm: tests/engines"
USERS_MARK = "console not-run with Slurm, as a user: tests/engines"


def blocks(fence: str) -> list[str]:
    """Return the page's blocks with this fence."""
    return re.findall(rf"^```{re.escape(fence)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def the_block(fence: str) -> str:
    """Return the page's only block with this fence."""
    (found,) = blocks(fence)
    return found


def here(text: str, nodes: SlurmNodes) -> str:
    """Return text of the page with the places of this cluster: each node has its own files."""
    own = nodes.cluster.own
    places = {
        "/etc/agentd/slurm-gres.json": f"{own}/map.json",
        "/opt/agentd/bin/agentd-slurm-": f"{nodes.folder}/",
        "/etc/slurm/": f"{own}/",
        "/run/agentd/slurm.sock": f"{own}/slurm.sock",
        "/dev/agentd-slurm": f"{own}/dev",
        "gpu:a100": "gpu:simulated",
        "sbatch ": "sbatch --partition=gpu ",
        "NODE ": f"{nodes.node} ",
        "NODE\n": f"{nodes.node}\n",
    }
    for place, real in places.items():
        text = text.replace(place, real)
    return text


class Reader:
    """Types the blocks of the page, one after the other, on the first node."""

    def __init__(self, nodes: SlurmNodes) -> None:
        self._nodes = nodes
        self._blocks = blocks(MARK)

    def types(self, *on: str) -> list[str]:
        """Type the next block on each of these nodes and return what each command prints."""
        text = here(self._blocks.pop(0) + "\n", self._nodes)
        commands = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        return [self.type(line, node) for node in on or [self._nodes.node] for line in commands]

    def type(self, command: str, node: str | None = None) -> str:
        """Type one command as the operator."""
        node = node or self._nodes.node
        environment = self._nodes.environment(node)
        named = [f"{name}={environment[name]}" for name in environment if name[:6] == "AGENTD"]
        words = ["env", with_agentctl(), *named, "sh", "-c", command]
        return self._nodes.cluster.run(*words, node=node)

    def is_over(self) -> bool:
        """Return whether every block was typed."""
        return not self._blocks


def type_as(
    user: int, nodes: SlurmNodes, *words: str, node: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Type one command as a user on a node, with the socket that the page gives to users."""
    socket = f"AGENTD_SOCKET={nodes.cluster.own}/slurm.sock"
    words = ("env", with_agentctl(), socket, *words)
    return nodes.cluster.complete(*words, user=user, node=node or nodes.node)


def with_agentctl() -> str:
    """Return a PATH on which agentctl is, as an assignment."""
    return f"PATH={BIN}:/usr/sbin:/usr/bin:/sbin:/bin"
