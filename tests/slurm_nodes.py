"""Real Slurm clusters, each node with an agentd of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from daemon import Daemon, gpus
from slurm_cluster import SlurmCluster, gres_lines, make_device

BIN = Path(sys.executable).parent
AGENTS = '[[agents]]\nid = "slurm"\n[[agents]]\nid = "notebooks"\n'
SCRIPTS = ("prolog", "epilog", "task-prolog")


class SlurmNodes:
    """A cluster whose nodes each have an agentd with some simulated GPUs."""

    def __init__(self, folder: Path, nodes: int, gpu_count: int) -> None:
        (folder / "slurm").mkdir()
        self.folder = folder
        self.cluster = SlurmCluster(folder / "slurm", nodes)
        self.daemons: dict[str, Daemon] = {}
        self._syncs: list[subprocess.Popen[bytes]] = []
        for node in self.cluster.nodes:
            (folder / node).mkdir()
            self.daemons[node] = Daemon(folder / node, "process")
        self.text = AGENTS + gpus(gpu_count)
        self.gpu_count = gpu_count

    @property
    def node(self) -> str:
        """The first node."""
        return self.cluster.nodes[0]

    @property
    def daemon(self) -> Daemon:
        """The agentd of the first node."""
        return self.daemons[self.node]

    async def start(
        self,
        only: list[str] | None = None,
        text: str | None = None,
        settings: str | None = None,
        here: Callable[[str, SlurmNodes], str] | None = None,
    ) -> None:
        """Start all agentds, write what `agentctl slurm gres` says, and start Slurm.

        `only` leaves devices out of gres.conf and the map. With `settings` of slurm.conf nothing is
        switched on: it is left to the test. `here` puts the places of this cluster into a text.
        """
        if settings is not None and here is not None:
            self._write_scripts()
            lines = here(settings, self).splitlines()
            self.cluster.extra |= dict(line.split("=", 1) for line in lines)
            await self.daemon.start(here(text or self.text, self))
            await asyncio.to_thread(self.cluster.start)
            return
        for node, daemon in self.daemons.items():
            await daemon.start(self.text)
            content = json.loads(self.agentctl(node, "slurm", "gres", "--agent=slurm", "--json"))
            kept = [row for row in content["devices"].values() if not only or row["id"] in only]
            content["devices"] = {str(index): row for index, row in enumerate(kept)}
            self.map_file(node).write_text(json.dumps(content))
            stand_ins = self.folder / node / "dev"
            self.cluster.gres[node] = gres_lines(stand_ins, [row["id"] for row in kept])
        self._write_scripts()
        self.cluster.extra |= {
            "Prolog": str(self.folder / "prolog"),
            "Epilog": str(self.folder / "epilog"),
            "TaskProlog": str(self.folder / "task-prolog"),
        }
        await asyncio.to_thread(self.cluster.start)

    def give_gres(self, lines: str, gres: str) -> None:
        """Write gres.conf and the node's `Gres=`, make the stand-ins, and restart Slurm."""
        for file in re.findall(r"File=(\S+)", lines):
            make_device(Path(file))
        self.cluster.gres[self.node] = (lines, gres)
        self.cluster.configure()
        for name in (self.node, "slurmctld"):
            self.cluster.kill(name, signal.SIGTERM)
        self.cluster.start_controller()
        self.cluster.start_node(self.node)
        self.cluster.until(self.cluster.are_idle, "the node is not idle")

    def _write_scripts(self) -> None:
        for name in SCRIPTS:
            file = self.folder / name
            file.write_text(
                f'#!/bin/sh\nexport AGENTD_SOCKET="{self.folder}/$SLURMD_NODENAME/agentd.sock"\n'
                f'export AGENTD_SLURM_SOCKET="$AGENTD_SOCKET"\n'
                f'export AGENTD_SLURM_MAP="{self.folder}/$SLURMD_NODENAME/map.json"\n'
                f"exec {BIN}/agentd-slurm-{name}\n"
            )
            file.chmod(0o755)

    def map_file(self, node: str) -> Path:
        """The map of a node's devices."""
        return self.folder / node / "map.json"

    def environment(self, node: str) -> dict[str, str]:
        """Return the environment of the engine's commands."""
        socket = self.folder / node / "agentd.sock"
        named = {"AGENTD_SOCKET": str(socket), "AGENTD_SLURM_MAP": str(self.map_file(node))}
        return {**self.cluster.environment, **named}

    def agentctl(self, node: str, *words: str) -> str:
        """Run agentctl on a node."""
        command = [BIN / "agentctl", *words]
        return subprocess.check_output(command, text=True, env=self.environment(node))

    def engine(self, node: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine on a node."""
        command = self.cluster.inside(BIN / "agentd-slurm", *words)
        environment = self.environment(node)
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    def start_sync(self, node: str) -> subprocess.Popen[bytes]:
        """Start `agentd-slurm sync` for a node."""
        with (self.cluster.folder / "log" / f"sync-{node}").open("ab") as log:
            command = self.cluster.inside(BIN / "agentd-slurm", "sync", "--node", node)
            environment = self.environment(node)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._syncs.append(process)
        return process

    async def claims(self, node: str | None = None) -> dict[str, list[str]]:
        """Return the devices of each claim of a node."""
        rows = await self.daemons[node or self.node].get("/v1/claims")
        return {
            row["claim_id"]: sorted(
                device
                for slots in row["allocation"].values()
                for amounts in slots.values()
                for device in amounts
            )
            for row in rows
        }

    async def until_claims(
        self, wanted: dict[str, list[str]], node: str | None = None, within_s: float = 60
    ) -> None:
        """Wait until the claims of a node are these."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while await self.claims(node) != wanted:
                    await asyncio.sleep(0.1)
        assert await self.claims(node) == wanted, self.cluster.logs()

    async def close(self) -> None:
        """Stop everything."""
        for process in self._syncs:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        await asyncio.to_thread(self.cluster.stop)
        for daemon in self.daemons.values():
            await daemon.close()


NodesOf = Callable[..., Awaitable[SlurmNodes]]
