"""Real Slurm clusters, each node with an agentd of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from support.daemon import Daemon, gpus
from support.engine import Engine
from support.other_users import GROUP
from support.slurm_cluster import SlurmCluster, gres_lines

BIN = Path(sys.executable).parent
AGENTS = """
[[agents]]
id = "slurm"
[[agents]]
id = "notebooks"
[[rpc.sockets]]
path = "{own}/slurm.sock"
group = "{group}"
role = "agent"
agents = ["slurm"]
"""
"""With a socket for the users of Slurm, as docs/how-to/slurm.md has it."""
SCRIPTS = ("prolog", "epilog", "task-prolog")


class SlurmNodes:
    """A cluster whose nodes each have an agentd with some simulated GPUs."""

    def __init__(
        self, folder: Path, nodes: int, gpu_count: int, engine: Engine | None = None
    ) -> None:
        (folder / "slurm").mkdir()
        self.folder = folder
        self.cluster = SlurmCluster(folder / "slurm", nodes)
        self.daemons: dict[str, Daemon] = {}
        self._syncs: list[subprocess.Popen[bytes]] = []
        for node in self.cluster.nodes:
            (folder / node).mkdir()
            self.cluster.folders[node] = folder / node
            self.daemons[node] = Daemon(folder / node, "docker" if engine else "process", engine)
        self.text = AGENTS.format(own=self.cluster.own, group=GROUP) + gpus(gpu_count)
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
        *,
        only: list[str] | None = None,
        text: Callable[[SlurmNodes], str] | None = None,
        is_switched_on: bool = True,
    ) -> None:
        """Start all agentds, write what `agentctl slurm gres` says, and start Slurm.

        `only` leaves devices out of gres.conf and the map. `text` returns the configuration. A
        cluster that is not switched on has an agentd on its first node, unknown to Slurm.
        """
        self.text = text(self) if text else self.text
        self._write_scripts()
        if not is_switched_on:
            await self.start_daemon(self.node)
            await asyncio.to_thread(self.cluster.start)
            return
        for node in self.daemons:
            await self.start_daemon(node)
            content = json.loads(
                self.agentctl(node, "slurm", "gres", "--agent=slurm", "--types=device", "--json")
            )
            kept = [row for row in content["devices"].values() if not only or row["id"] in only]
            content["devices"] = {str(index): row for index, row in enumerate(kept)}
            self.map_file(node).write_text(json.dumps(content))
            stand_ins = self.folder / node / "dev"
            self.cluster.gres[node] = gres_lines(stand_ins, [row["id"] for row in kept])
        self.cluster.extra |= {
            "Prolog": str(self.folder / "prolog"),
            "Epilog": str(self.folder / "epilog"),
            "TaskProlog": str(self.folder / "task-prolog"),
        }
        await asyncio.to_thread(self.cluster.start)

    async def start_daemon(self, node: str, text: str | None = None) -> None:
        """Start or restart a node's agentd, with its own folder in the configuration."""
        filled = (text or self.text).replace(str(self.cluster.own), str(self.folder / node))
        await self.daemons[node].restart(filled)

    def configure_slurm(self, settings: str) -> None:
        """Add settings to slurm.conf, and restart Slurm on each node."""
        self.cluster.extra |= dict(line.split("=", 1) for line in settings.splitlines())
        self.cluster.configure()
        for name in (*self.cluster.nodes, "slurmctld"):
            self.cluster.kill(name, signal.SIGTERM)
        self.cluster.start_controller()
        for node in self.cluster.nodes:
            self.cluster.start_node(node)
        self.cluster.until_idle()

    @property
    def reboot_program(self) -> str:
        """The setting with which `until_rebooted` sees that Slurm reboots a node."""
        return f'RebootProgram="/usr/bin/touch {self.folder}/reboots"'

    async def until_rebooted(self, node: str) -> None:
        """Wait until Slurm reboots a node, and start the node's slurmd and agentd as after it."""
        file = self.folder / "reboots"
        self.cluster.until(file.exists, "Slurm does not reboot the node")
        file.unlink()
        self.cluster.kill(node)
        daemon = self.daemons[node]
        await daemon.stop()
        daemon.boot_id = str(uuid.uuid4())
        await daemon.start()
        self.cluster.start_node(node, "-b")

    def _write_scripts(self) -> None:
        """Write the programs that slurmd runs, each with the sockets of its node."""
        own = self.cluster.own
        for name in SCRIPTS:
            file = self.folder / name
            file.write_text(
                f'#!/bin/sh\nexport AGENTD_SOCKET="{own}/agentd.sock"\n'
                f'export AGENTD_SLURM_SOCKET="{own}/slurm.sock"\n'
                f'export AGENTD_SLURM_MAP="{own}/map.json"\n'
                f'export AGENTD_SLURM_RUN="{own}/run"\n'
                f'export AGENTD_SLURM_SETTINGS="{own}/slurm.toml"\n'
                f"exec {BIN}/agentd-slurm-{name}\n"
            )
            file.chmod(0o755)

    def map_file(self, node: str) -> Path:
        """The map of a node's devices."""
        return self.folder / node / "map.json"

    def settings_file(self, node: str) -> Path:
        """The settings of a node's engine, absent unless a test writes them."""
        return self.folder / node / "slurm.toml"

    def environment(self, node: str) -> dict[str, str]:
        """Return the environment of the engine's commands."""
        socket = self.folder / node / "agentd.sock"
        named = {
            "AGENTD_SOCKET": str(socket),
            "AGENTD_SLURM_MAP": str(self.map_file(node)),
            "AGENTD_SLURM_RUN": str(self.folder / node / "run"),
            "AGENTD_SLURM_SETTINGS": str(self.settings_file(node)),
        }
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

    def sync_once(self) -> None:
        """Run `agentd-slurm sync --once` on the first node."""
        done = self.engine(self.node, "sync", "--once", "--node", self.node)
        assert done.returncode == 0, done.stderr

    def start_sync(self, node: str) -> subprocess.Popen[bytes]:
        """Start `agentd-slurm sync` for a node; for the first without telling it its name."""
        with (self.cluster.folder / "log" / f"sync-{node}").open("ab") as log:
            named = ["--node", node] if node else []
            command = self.cluster.inside(BIN / "agentd-slurm", "sync", *named)
            environment = self.environment(node or self.node)
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
