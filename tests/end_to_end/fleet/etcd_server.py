"""Real etcd members on loopback, with what operators do to them."""

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


def signed(folder: Path, ttl: str = "10m") -> str:
    """Make keys for signed tokens, which are bound to a revision, and return etcd's option."""
    require("openssl")
    private, public = folder / "private.pem", folder / "public.pem"
    for command in (
        ["genrsa", "-out", private],
        ["rsa", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    keys = f"pub-key={public},priv-key={private},sign-method=RS256"
    return f"--auth-token=jwt,{keys},ttl={ttl}"


class EtcdServers:
    """One or three members; `processes` has None for one that was killed."""

    def __init__(
        self,
        folder: Path,
        count: int = 1,
        *,
        quota_bytes: int = 0,
        is_signed: bool = False,
        options: Iterable[str] = (),
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
        self._options += [signed(folder)] if is_signed else []
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
        membership = self._membership(number)
        command = ["etcd", *membership, "--listen-client-urls", self.endpoints[number]]
        command += ["--advertise-client-urls", self.endpoints[number]]
        command += ["--listen-peer-urls", membership[-1], *self._options]
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with (self.folder / f"log-{number}").open("ab") as log:
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def _membership(self, number: int) -> list[str]:
        """Return the options that a member and the restore of its folder have in common."""
        peers = [f"http://127.0.0.1:{port}" for port in self.ports[self.count :]]
        cluster = ",".join(f"m{at}={peer}" for at, peer in enumerate(peers))
        own = ["--name", f"m{number}", "--data-dir", str(self.folder / f"data-{number}")]
        return [*own, "--initial-cluster", cluster, "--initial-advertise-peer-urls", peers[number]]

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
            await self.add_user(user, password, *prefixes.get(user, ()))
        await self.ask("/v3/auth/enable", {})
        self._password = password

    async def add_user(self, user: str, password: str, *prefixes: str) -> None:
        """Make a user, which makes all signed tokens invalid."""
        await self.ask("/v3/auth/user/add", {"name": user, "password": password})
        await self.ask("/v3/auth/role/add", {"name": user})
        for prefix in map(str.encode, prefixes):
            end = prefix[:-1] + bytes([prefix[-1] + 1])
            span = {"key": b64encode(prefix).decode(), "range_end": b64encode(end).decode()}
            right = {"name": user, "perm": {"permType": "READWRITE", **span}}
            await self.ask("/v3/auth/role/grant", right)
        await self.grant(user)

    async def grant(self, user: str) -> None:
        """Give a user the role of its name."""
        await self.ask("/v3/auth/user/grant", {"user": user, "role": user})

    async def revoke(self, user: str) -> None:
        """Take the role of its name from a user."""
        await self.ask("/v3/auth/user/revoke", {"name": user, "role": user})

    async def change_password(self, user: str, password: str) -> None:
        """Give a user another password; its tokens stay valid until they are refused."""
        await self.ask("/v3/auth/user/changepw", {"name": user, "password": password})

    async def back_up(self) -> Path:
        """Save a snapshot of the store and return its file, for `restore`."""
        file = self.folder / f"backup-{len([*self.folder.glob('backup-*')])}"
        login = ["--user", f"root:{self._password}"] if self._password else []
        await self._etcdctl("--endpoints", self.endpoints[0], *login, "snapshot", "save", str(file))
        return file

    async def restore(self, backup: Path | None) -> None:
        """Make the store what it was at a backup, or with None empty, and start all members.

        They have the same addresses, and answer with the same cluster id.
        """
        await self.stop()
        for number in range(self.count):
            shutil.rmtree(self.folder / f"data-{number}")
            if backup is not None:
                own = self._membership(number)
                await self._etcdctl("snapshot", "restore", str(backup), *own)
            self._spawn(number)
        if backup is None:
            self._password = ""
        assert await self._are_ready(), self.log(0)

    async def _etcdctl(self, *words: str) -> None:
        require("etcdctl")
        env = {**os.environ, "ETCDCTL_API": "3"}
        command = ["etcdctl", *words]
        done = await asyncio.to_thread(
            subprocess.run, command, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

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
