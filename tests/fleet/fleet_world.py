"""A fleet of real parts: daemons with different plugins, publishers, gateways, and etcd."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from agentd_fleet.etcd import Access, Etcd
from daemon import AGENTS, Answer, Daemon, gpus
from fleet.etcd_server import EtcdServers

READY_S = 20.0
SLEEP = {"command": ["sleep", "1000"]}
PLUGINS = {
    "cuda": gpus(4),
    "rocm": gpus(2, table="rocm"),
    "tpu": gpus(4, table="tpu"),
    "shares": gpus(2, mode="shares"),
    "none": "",
}


class Program:
    """One process of agentd-fleet, with a configuration of its own."""

    def __init__(self, folder: Path, name: str, command: str, config: str) -> None:
        self.file = folder / f"{name}.toml"
        self.file.write_text(config)
        self.log_file = folder / f"{name}.log"
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("AGENTD")}
        command = [sys.executable, "-m", "agentd_fleet", self.command, "--config", str(self.file)]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    async def stop(self, number: int = signal.SIGTERM) -> None:
        process, self.process = self.process, None
        if process is not None:
            if number == signal.SIGTERM:
                process.send_signal(signal.SIGCONT)
            process.send_signal(number)
            await asyncio.to_thread(process.wait, 20)


class GatewayProgram(Program):
    """A gateway that answers on a unix socket."""

    def __init__(
        self, folder: Path, name: str, fleet: str, gateway: str = "", rpc: str = ""
    ) -> None:
        self.socket = folder / f"{name}.sock"
        config = f'{fleet}\n[gateway]\nsocket = "{self.socket}"\nstate-dir = "{folder}/{name}"\n'
        super().__init__(folder, name, "gateway", config + gateway + rpc)

    async def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connector = aiohttp.UnixConnector(str(self.socket))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, f"http://fleet{path}", json=body, headers=headers) as response,
        ):
            return Answer(response.status, response.headers.copy(), await response.read())

    async def get(self, path: str, **headers: str) -> Any:
        answer = await self.call("GET", path, headers=headers)
        assert answer.status == 200, answer.content
        return answer.json

    async def create(self, headers: Mapping[str, str] | None = None, **body: Any) -> Answer:
        return await self.call("POST", "/v1/kernels", {**SLEEP, **body}, headers)

    async def states(self) -> dict[str, str]:
        return {node["id"]: node["state"] for node in await self.get("/v1/nodes")}

    async def until(self, wanted: Mapping[str, str], within_s: float = READY_S) -> None:
        """Wait until these nodes are in these states."""
        states: dict[str, str] = {}
        try:
            async with asyncio.timeout(within_s):
                while not wanted.items() <= states.items():
                    with contextlib.suppress(aiohttp.ClientError, AssertionError):
                        states = await self.states()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{states}, not {dict(wanted)}:\n{self.log[-3000:]}") from None

    async def until_free(self, node: str, slot: str, amount: str, within_s: float = 20) -> None:
        """Wait until agent-1 of a node is told of with so much free."""
        async with asyncio.timeout(within_s):
            while True:
                nodes = {n["id"]: n for n in await self.get("/v1/nodes")}
                if nodes[node]["agents"]["agent-1"][slot]["free"] == amount:
                    return
                await asyncio.sleep(0.05)


class World:
    """All parts of a fleet in one folder; `close` ends every process by its pid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Daemon] = {}
        self.programs: list[Program] = []
        self.etcd: EtcdServers | None = None

    async def start_etcd(self, count: int = 1, **options: Any) -> EtcdServers:
        folder = self.folder / "etcd"
        folder.mkdir()
        self.etcd = EtcdServers(folder, count, **options)
        await self.etcd.start()
        return self.etcd

    async def start_nodes(self, *kinds: str, agents: str = AGENTS) -> list[str]:
        """Start daemons with these plugins; return their node ids."""
        ids = []
        for kind in kinds:
            folder = self.folder / f"{len(self.nodes)}{kind}"
            folder.mkdir()
            daemon = Daemon(folder, "process")
            daemon.node = f"n-{self.folder.name.removeprefix('agentd-')}-{folder.name}"
            self.nodes[daemon.node] = daemon
            daemon.configure(agents + PLUGINS[kind])
            ids.append(daemon.node)
        await asyncio.gather(*(self.nodes[node].start() for node in ids))
        return ids

    @property
    def kept_in(self) -> str:
        """The `[fleet]` table for etcd."""
        assert self.etcd is not None
        return f"[fleet]\netcd = {json.dumps(self.etcd.endpoints)}\n"

    def join(self, node: str, lease: int = 2, extra: str = "", kept_in: str = "") -> Program:
        """Start the publisher of a node."""
        socket = self.nodes[node].folder / "agentd.sock"
        config = f'{kept_in or self.kept_in}[join]\nsocket = "{socket}"\nurl = "unix:{socket}"\n'
        config += f'lease = {lease}\nstate-dir = "{self.folder}/install-{node}"\n{extra}'
        name = f"join-{len(self.programs)}"
        program = Program(self.folder, name, "join", config)
        self.programs.append(program)
        program.start()
        return program

    def gateway(self, kept_in: str = "", **tables: str) -> GatewayProgram:
        """Start a gateway, over etcd or over nodes that it follows itself."""
        name = f"gate-{len(self.programs)}"
        program = GatewayProgram(self.folder, name, kept_in or self.kept_in, **tables)
        self.programs.append(program)
        program.start()
        return program

    def followed(self) -> str:
        """The `[fleet]` table for all nodes without etcd."""
        listed = [f"unix:{daemon.folder}/agentd.sock" for daemon in self.nodes.values()]
        return f"[fleet]\nnodes = {json.dumps(listed)}\n"

    def client(self) -> Etcd:
        assert self.etcd is not None
        return Etcd(Access(self.etcd.endpoints))

    async def census(self) -> dict[str, list[str]]:
        """Which nodes have each kernel, as the nodes say themselves."""
        found: dict[str, list[str]] = {}
        for node, daemon in self.nodes.items():
            for kernel in await daemon.get("/v1/kernels"):
                found.setdefault(kernel["kernel_id"], []).append(node)
        return found

    async def close(self) -> None:
        for program in self.programs:
            await program.stop(signal.SIGKILL)
        if self.etcd is not None:
            await self.etcd.stop()
        for daemon in self.nodes.values():
            if daemon.process is not None:
                daemon.process.send_signal(signal.SIGCONT)
        await asyncio.gather(*(daemon.close() for daemon in self.nodes.values()))
