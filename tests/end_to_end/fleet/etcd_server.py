"""Real etcd members on loopback, and a proxy that loses what a network would lose."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp

from support.needs import require

READY_TIMEOUT_S = 30.0
ATTEMPTS = 5


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def spared() -> list[str]:
    """The flag that spares the disk, where this etcd has it (its help does not name it)."""
    command = ["etcd", "--unsafe-no-fsync", "--version"]
    known = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return command[1:2] if known else []


class EtcdServers:
    """One or three members; `processes` has None for one that was killed."""

    def __init__(
        self, folder: Path, count: int = 1, *, quota_bytes: int = 0, options: Iterable[str] = ()
    ) -> None:
        require("etcd")
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.count = count
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self.ports: list[int] = []
        self._options = [*spared(), "--bcrypt-cost=4", *options]
        self._options += ["--heartbeat-interval=50", "--election-timeout=500"]
        self._options += [f"--quota-backend-bytes={quota_bytes}"] if quota_bytes else []
        self._password = ""

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports[: self.count])

    def log(self, number: int) -> str:
        return (self.folder / f"log-{number}").read_text()

    async def start(self) -> None:
        """Start all members, and wait until each has a leader."""
        for _ in range(ATTEMPTS):
            self.ports = free_ports(2 * self.count)
            for number in range(self.count):
                self._spawn(number)
            if await self._are_ready():
                return
            await self.stop()  # another program took one of the ports
            for number in range(self.count):
                shutil.rmtree(self.folder / f"data-{number}", ignore_errors=True)
        raise AssertionError(self.log(0))

    def _spawn(self, number: int) -> None:
        peers = [f"http://127.0.0.1:{port}" for port in self.ports[self.count :]]
        cluster = ",".join(f"m{at}={peer}" for at, peer in enumerate(peers))
        command = ["etcd", "--name", f"m{number}", "--data-dir", self.folder / f"data-{number}"]
        command += ["--listen-client-urls", self.endpoints[number]]
        command += ["--advertise-client-urls", self.endpoints[number]]
        command += ["--listen-peer-urls", peers[number]]
        command += ["--initial-advertise-peer-urls", peers[number]]
        command += ["--initial-cluster", cluster, *self._options]
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with (self.folder / f"log-{number}").open("ab") as log:
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    async def _are_ready(self) -> bool:
        """Wait until all that run answer; False where one of them ended instead."""
        running = [number for number, process in enumerate(self.processes) if process]
        async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
            while True:
                if any((one := self.processes[n]) and one.poll() is not None for n in running):
                    return False
                if all([await self._is_healthy(session, number) for number in running]):
                    return True
                await asyncio.sleep(0.02)

    async def _is_healthy(self, session: aiohttp.ClientSession, number: int) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{self.endpoints[number]}/health") as answer:
                return (await answer.json(content_type=None))["health"] == "true"
        return False

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the first member for what an operator asks for, as root once logins are needed."""
        async with aiohttp.ClientSession(self.endpoints[0]) as session:
            headers = {}
            if self._password:
                who = {"name": "root", "password": self._password}
                async with session.post("/v3/auth/authenticate", json=who) as answer:
                    headers = {"Authorization": (await answer.json())["token"]}
            async with session.post(path, json=body, headers=headers) as answer:
                content = await answer.text()
                assert answer.status == 200, content
                return await answer.json()

    async def require_logins(self, password: str, **prefixes: tuple[str, ...]) -> None:
        """Make root and users with this password, who may use the keys below their prefixes."""
        for user in ("root", *prefixes):
            await self.ask("/v3/auth/user/add", {"name": user, "password": password})
            await self.ask("/v3/auth/role/add", {"name": user})
            for prefix in map(str.encode, prefixes.get(user, ())):
                end = prefix[:-1] + bytes([prefix[-1] + 1])
                span = {"key": b64encode(prefix).decode(), "range_end": b64encode(end).decode()}
                right = {"name": user, "perm": {"permType": "READWRITE", **span}}
                await self.ask("/v3/auth/role/grant", right)
            await self.ask("/v3/auth/user/grant", {"user": user, "role": user})
        await self.ask("/v3/auth/enable", {})
        self._password = password

    async def wipe(self) -> None:
        """Delete all keys."""
        everything = b64encode(b"\0").decode()
        await self.ask("/v3/kv/deleterange", {"key": everything, "range_end": everything})

    async def compact(self, revision: int) -> None:
        """Give up what the store was before this revision."""
        await self.ask("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    def pause(self, number: int) -> None:
        self._running(number).send_signal(signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._running(number).send_signal(signal.SIGCONT)

    def _running(self, number: int) -> subprocess.Popen[bytes]:
        process = self.processes[number]
        assert process is not None, f"member {number} does not run"
        return process

    async def kill(self, number: int) -> None:
        """End a member as a power cut would."""
        process, self.processes[number] = self._running(number), None
        process.kill()
        await asyncio.to_thread(process.wait, 20)

    async def restart(self, number: int) -> None:
        """Start a member again on its folder and ports, and wait until all that run answer."""
        if self.processes[number] is not None:
            await self.kill(number)
        self._spawn(number)
        assert await self._are_ready(), self.log(number)

    async def stop(self) -> None:
        """End every member that still runs, paused ones too."""
        for number, process in enumerate(self.processes):
            if process is not None:
                await self.kill(number)


class Proxy:
    """Passes bytes on between clients and one endpoint, until told to lose some."""

    def __init__(self, endpoint: str) -> None:
        self._target = int(endpoint.rpartition(":")[2])
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""
        self.swallowed = 0
        self.is_cut = False
        self.loses: bytes | None = None
        """The next answer to a request for this path is lost, with its connection."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Drop all connections, and take none until it is mended."""
        self.is_cut = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def mend(self) -> None:
        """Take connections again."""
        self.is_cut = False

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._served(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _served(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        server, forth = await asyncio.open_connection("127.0.0.1", self._target)
        asked = [b""]
        ways = [self._passed(client, forth, asked), self._answered(server, back, asked)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for writer in (back, forth):
                writer.transport.abort()

    async def _passed(
        self, client: asyncio.StreamReader, forth: asyncio.StreamWriter, asked: list[bytes]
    ) -> None:
        while part := await client.read(65536):
            asked[0] = part
            forth.write(part)

    async def _answered(
        self, server: asyncio.StreamReader, back: asyncio.StreamWriter, asked: list[bytes]
    ) -> None:
        while part := await server.read(65536):
            if self.loses and self.loses in asked[0]:
                self.loses = None
                self.swallowed += 1
                return
            back.write(part)
