"""A fleet of real parts: daemons with different plugins, publishers, gateways, and etcd."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_transport import EtcdCredentials
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.network import Proxy
from support.daemon import AGENTS, BASE, Answer, Daemon, Process, gpus
from support.fork_server import spawn
from support.needs import require
from support.waiting import until

READY_S = 20.0
SLEEP = {"command": ["sleep", "1000"]}
PLUGINS = {
    "cuda": gpus(4),
    "rocm": gpus(2, table="rocm"),
    "tpu": gpus(4, table="tpu"),
    "shares": gpus(2, mode="shares"),
    "none": "",
    "pruned": "",
}
CONTAINER = "import os, sys; os.execvp('unshare', ['unshare', '--pid', '--mount', '--fork',"
CONTAINER += " '--mount-proc', '--kill-child', 'sh', '-c', sys.argv[1], sys.executable,"
CONTAINER += " '-m', 'agentd', *sys.argv[2:]])"
NO_CGROUPS = 'mount -t tmpfs -o ro none /sys/fs/cgroup && exec "$0" "$@"'
"""A system container's own processes and cgroups, with the host's boot id and network."""
FEW_ENDED = BASE.replace("[rpc]", "keep-ended = 2\n[rpc]")
"""Of nodes of kind `pruned`."""


class Program:
    """One process of agentd-fleet, with a configuration of its own."""

    def __init__(self, folder: Path, name: str, command: str, config: str) -> None:
        self.file = folder / f"{name}.toml"
        self.file.write_text(config)
        self.log_file = folder / f"{name}.log"
        self.command = command
        self.process: Process | None = None
        self.prefix: tuple[str, ...] = ()
        self.environ: dict[str, str] = {}
        self.deadlines: dict[str, float] = {}
        """Shorter deadlines than the product's; unused in a soak."""

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.is_file() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def until_logged(self, text: str, times: int = 1) -> None:
        """Wait until the log has a text so many times."""
        wanted = f"{text!r} in the log {times} times"
        await until(lambda: self.log.count(text), lambda count: count >= times, text=wanted)

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("AGENTD")}
        env |= self.environ
        words = [self.command, "--config", str(self.file)]
        with self.log_file.open("ab") as log:
            if not self.prefix:
                number = log.fileno()
                shorter = {} if "AGENTD_SOAK" in os.environ else self.deadlines
                self.process = spawn(
                    "agentd-fleet", words, env, stdout=number, stderr=number, deadlines=shorter
                )
                return
            command = [*self.prefix, sys.executable, "-m", "agentd_fleet", *words]
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
        states: dict[str, str] | None = None
        try:
            async with asyncio.timeout(within_s):
                while states is None or not wanted.items() <= states.items():
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


class Pool:
    """Daemons and an etcd that go on from one test to the next: their start takes longer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.idle: dict[str, list[Daemon]] = {}
        self.made = 0
        self._etcd: EtcdServers | None = None

    async def etcd(self) -> EtcdServers:
        """Return a member without keys, for tests that leave it as it is."""
        if self._etcd is None:
            servers = EtcdServers(self.folder / "etcd")
            await servers.start()
            self._etcd = servers
        await self._etcd.wipe()
        return self._etcd

    async def take(self, kind: str) -> Daemon:
        """Return a daemon with these plugins and no kernels."""
        if idle := self.idle.get(kind):
            return idle.pop()
        folder = self.folder / f"{self.made}{kind}"
        self.made += 1
        folder.mkdir()
        daemon = Daemon(folder, "process")
        daemon.node = f"n-{self.folder.name.removeprefix('agentd-')}-{folder.name}"
        daemon.configure(AGENTS + PLUGINS[kind], FEW_ENDED if kind == "pruned" else BASE)
        await daemon.start()
        return daemon

    async def give_back(self, kind: str, daemon: Daemon) -> None:
        """Take a daemon back, whatever was done to it."""
        if daemon.process is None:
            await daemon.start()
        daemon.process.send_signal(signal.SIGCONT)
        kernels = [kernel["kernel_id"] for kernel in await daemon.get("/v1/kernels")]
        for at in range(0, len(kernels), 16):
            some = kernels[at : at + 16]
            await asyncio.gather(
                *(daemon.call("DELETE", f"/v1/kernels/{name}?timeout=0") for name in some)
            )
        for plugin in await daemon.get("/v1/plugins"):
            if plugin["state"] == "stopped":
                await daemon.call("POST", f"/v1/plugins/{plugin['name']}/start")
        for device in await daemon.get("/v1/devices"):
            if device["state"] == "drained":
                path = f"/v1/devices/{device['device_name']}/{device['id']}/undrain"
                await daemon.call("POST", path)
        self.idle.setdefault(kind, []).append(daemon)

    async def close(self) -> None:
        daemons = [daemon for idle in self.idle.values() for daemon in idle]
        await asyncio.gather(*(daemon.close() for daemon in daemons))
        if self._etcd is not None:
            await self._etcd.stop()


class World:
    """All parts of a fleet in one folder; `close` ends every process of its own by its pid."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        self.folder = folder
        self.pool = pool
        self.nodes: dict[str, Daemon] = {}
        self.kinds: dict[str, str] = {}
        self.programs: list[Program] = []
        self.proxies: list[Proxy] = []
        self.etcd: EtcdServers | None = None
        self.has_own_etcd = False

    async def start_etcd(
        self, count: int = 1, *, is_own: bool = False, **options: Any
    ) -> EtcdServers:
        """Return the pool's etcd, or one of its own for a test that harms or changes it."""
        self.has_own_etcd = is_own or count > 1 or bool(options)
        if not self.has_own_etcd:
            self.etcd = await self.pool.etcd()
            return self.etcd
        folder = self.folder / "etcd"
        folder.mkdir()
        self.etcd = EtcdServers(folder, count, **options)
        await self.etcd.start()
        return self.etcd

    async def start_nodes(self, *kinds: str) -> list[str]:
        """Start daemons with these plugins; return their node ids."""
        daemons = await asyncio.gather(*(self.pool.take(kind) for kind in kinds))
        for kind, daemon in zip(kinds, daemons, strict=True):
            self.nodes[daemon.node] = daemon
            self.kinds[daemon.node] = kind
        return [daemon.node for daemon in daemons]

    async def clone(self, node: str) -> str:
        """Start a container made from the image of a node, which has joined, as another node.

        Its daemon has that one's id and its publisher that one's state. Takes root.
        """
        require("root")
        name = f"{node}-clone{sum(kind == '' for kind in self.kinds.values())}"
        folder = self.folder / name[-20:]
        folder.mkdir()
        daemon = Daemon(folder, "process")
        daemon.node = node
        daemon.program = ("-c", CONTAINER, NO_CGROUPS)
        daemon.configure(AGENTS + PLUGINS[self.kinds[node]])
        await daemon.start()
        shutil.copytree(self.folder / f"install-{node}", self.folder / f"install-{name}")
        self.nodes[name], self.kinds[name] = daemon, ""
        return name

    async def proxy(self, target: str, tls: ssl.SSLContext | None = None) -> Proxy:
        """Start a proxy before an endpoint of etcd, or before a node of this world."""
        if target in self.nodes:
            target = f"unix:{self.nodes[target].folder}/agentd.sock"
        proxy = Proxy(target, tls)
        await proxy.start()
        self.proxies.append(proxy)
        return proxy

    @property
    def kept_in(self) -> str:
        """The `[fleet]` table for etcd."""
        return self.kept_as("")

    def kept_as(
        self, user: str, password: str = "", fleet: str = "main", endpoints: Iterable[str] = ()
    ) -> str:
        """Return the `[fleet]` table for a user of etcd, whose password is in a file of its own."""
        assert self.etcd is not None
        listed = json.dumps([*endpoints] or self.etcd.endpoints)
        table = f'[fleet]\nname = "{fleet}"\netcd = {listed}\n'
        if not user:
            return table
        file = self.folder / f"password-{user}"
        file.touch(0o600)
        file.write_text(f"{password}\n")
        return f'{table}etcd-user = "{user}"\netcd-password-file = "{file}"\n'

    def join(
        self,
        node: str,
        *,
        lease: int = 2,
        kept_in: str = "",
        url: str = "",
        prefix: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        deadlines: Mapping[str, float] | None = None,
    ) -> Program:
        """Start the publisher of a node, or another one; without a URL gateways use its socket."""
        socket = self.nodes[node].folder / "agentd.sock"
        config = f'{kept_in or self.kept_in}[join]\nsocket = "{socket}"\n'
        config += f'url = "{url or f"unix:{socket}"}"\n'
        config += f'lease = {lease}\nstate-dir = "{self.folder}/install-{node}"\n'
        name = f"join-{len(self.programs)}"
        program = Program(self.folder, name, "join", config)
        program.prefix, program.environ = prefix, dict(environ or {})
        program.deadlines = dict(deadlines or {})
        self.programs.append(program)
        program.start()
        return program

    def gateway(
        self,
        kept_in: str = "",
        *,
        prefix: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        deadlines: Mapping[str, float] | None = None,
        **tables: str,
    ) -> GatewayProgram:
        """Start a gateway, over etcd or over nodes that it follows itself."""
        name = f"gate-{len(self.programs)}"
        program = GatewayProgram(self.folder, name, kept_in or self.kept_in, **tables)
        program.prefix, program.environ = prefix, dict(environ or {})
        program.deadlines = dict(deadlines or {})
        self.programs.append(program)
        program.start()
        return program

    def followed(self) -> str:
        """The `[fleet]` table for all nodes without etcd."""
        listed = [f"unix:{daemon.folder}/agentd.sock" for daemon in self.nodes.values()]
        return f"[fleet]\nnodes = {json.dumps(listed)}\n"

    def client(self, user: str = "", password: str = "") -> EtcdClient:
        assert self.etcd is not None
        return EtcdClient(EtcdCredentials(self.etcd.endpoints, user, password))

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
        for proxy in self.proxies:
            await proxy.stop()
        if self.etcd is not None and self.has_own_etcd:
            await self.etcd.stop()
        for node, daemon in self.nodes.items():
            if self.kinds[node]:
                await self.pool.give_back(self.kinds[node], daemon)
            else:  # a clone: its kernels end with its pid namespace
                await daemon.stop(signal.SIGKILL)
                daemon.notes.close()
