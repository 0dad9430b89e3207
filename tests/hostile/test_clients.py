"""Clients that mean harm: half requests, readers that read nothing, followers that hang up.

The figures are the contract's under `make soak`, and smaller ones else; the machine may be busy, so
a deadline of milliseconds holds under soak alone.
"""

import asyncio
import contextlib
import gzip
import json
import os
import resource
import socket
import ssl
import threading
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

import aiohttp
import pytest

from end_to_end.test_events import DROPPED
from hostile.attacks import FRAMES, SLEEP, Client
from support.certificates import certificate
from support.daemon import AGENTS, BASE, Daemon, gpus
from support.daemon_pool import Serving
from support.waiting import until

SOAK = bool(os.environ.get("AGENTD_SOAK"))
HALF, READERS, FOLLOWERS = (2000, 1000, 500) if SOAK else (700, 150, 100)
MOST = 400
PATIENCE_S = 0.25
"""Seconds within which 99 of 100 `/livez` on the unix socket are answered, whatever others do."""
DEADLINES = {
    "agentd.http.connections.connection.HEADER_TIMEOUT_S": 3.0,
    "agentd.http.connections.connection.READ_TIMEOUT_S": 1.5,
}


class Node:
    """A node that listens on TCP, and how it does."""

    def __init__(self, daemon: Daemon, tls: str = "", max_connections: int = MOST) -> None:
        self.daemon = daemon
        daemon.deadlines = DEADLINES
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (daemon.folder / "token").write_text("secret\n")
        (daemon.folder / "token").chmod(0o600)
        listen = f'listen = "127.0.0.1:{self.port}"\ntoken-file = "{daemon.folder}/token"\n'
        listen += f"{tls}max-connections = {max_connections}\n[host]"
        daemon.configure(AGENTS + gpus(), BASE.replace("[host]", listen))
        self.answered_s: list[float] = []

    @property
    def pid(self) -> int:
        assert self.daemon.process is not None
        return self.daemon.process.pid

    @property
    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    @property
    def memory_kib(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    async def back_to(self, descriptors: int, within_s: float = 20) -> None:
        """Wait until no more descriptors are open than before."""
        await until(
            lambda: self.descriptors,
            lambda count: count <= descriptors + 2,
            text=f"agentd has {descriptors} descriptors",
            within_s=within_s,
        )

    async def are_dropped(self, count: int, sent: bytes) -> None:
        """Connect many clients that send no more, and wait until agentd has dropped them all."""
        before = self.descriptors
        async with AsyncExitStack() as stack:
            readers = []
            for _ in range(count):
                reader, writer = await self.connected()
                stack.callback(writer.close)
                writer.write(sent)
                readers.append(reader)
            assert (await self.daemon.call("GET", "/v1/node")).status == 200
            assert self.descriptors <= before + MOST + 40  # with those about to be dropped
            async with asyncio.timeout(30):
                for reader in readers:
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
        await self.back_to(before)
        assert self.daemon.log.count("\n") < 200

    async def deaf_client(self, stack: AsyncExitStack) -> socket.socket:
        """Connect a client that takes little of an answer."""
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock

    def watched(self, is_over: threading.Event) -> None:
        """Ask for `/livez` on the unix socket again and again, and note the time to each answer.

        In a thread of its own: what the clients here take of their loop is not the node's time.
        """
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.daemon.folder / "agentd.sock"))
            while not is_over.wait(0.02):
                before = time.monotonic()
                sock.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
                assert sock.recv(4096).startswith(b"HTTP/1.1 200")
                self.answered_s.append(time.monotonic() - before)

    def request(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n".encode()

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def plain(folder: Path) -> AsyncIterator[Daemon]:
    """A node on the process runtime."""
    made = Daemon(folder, "process")
    yield made
    await made.close()


@pytest.fixture
async def node(plain: Daemon, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    made = Node(plain, max_connections=getattr(request, "param", MOST))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    await plain.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 16384), most))
    is_over = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(made.watched, is_over))
    yield made
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    is_over.set()
    await watching
    late_s = [taken for taken in made.answered_s if taken > PATIENCE_S]
    assert not SOAK or len(late_s) <= len(made.answered_s) / 100, f"/livez took {late_s} s"


async def test_half_requests_do_not_block_other_clients(node: Node) -> None:
    await node.are_dropped(HALF, b"GET /v1/node HTTP/1.1\r\nHost: ")


@pytest.mark.parametrize("node", [READERS + 100], indirect=True, ids=["room for all"])
async def test_clients_that_read_no_logs_are_disconnected(node: Node) -> None:
    """The first 64 of a caller get an answer that they do not read; all others a 429."""
    await node.daemon.running(
        kernel_id="loud", command=["sh", "-c", "yes | head -c 30000000; sleep 1000"]
    )
    before, memory = node.descriptors, node.memory_kib
    refused = 0
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(READERS):
            sock = await node.deaf_client(stack)
            await asyncio.get_running_loop().sock_sendall(
                sock, node.request("/v1/kernels/loud/logs?follow=true")
            )
            readers.append(sock)
        await until(lambda: DROPPED.search(node.daemon.log), within_s=30)
        for sock in readers:
            head = await asyncio.get_running_loop().sock_recv(sock, 12)
            refused += head.endswith(b"429")
    assert refused == READERS - 64
    await node.back_to(before)
    assert node.memory_kib < memory + 100_000


async def test_followers_with_queued_requests_leave_nothing(node: Node) -> None:
    """With its queue full the server reads no more, and is not told of the end."""
    await node.daemon.running(kernel_id="quiet", command=["sh", "-c", "echo one; sleep 1000"])
    before = node.descriptors
    for path in ("/v1/kernels/quiet/logs?follow=true", "/v1/events"):
        writers = []
        for _ in range(20):
            reader, writer = await node.connected()
            writer.write(node.request(path) + 400 * node.request("/livez"))
            writers.append(writer)
            assert b"200 OK" in await reader.readline()
        for writer in writers:
            writer.transport.abort()
        await node.back_to(before, within_s=5)


async def test_clients_that_read_no_answer_are_disconnected(node: Node) -> None:
    """Many answers requested at once, and none read."""
    command = ["sh", "-c", "exec sleep 1000", "x" * 30000]
    for number in range(60):
        await node.daemon.running(
            kernel_id=f"k{number}", command=command, slots={"cpu": 0, "mem": "1m"}
        )
    before = node.descriptors
    async with AsyncExitStack() as stack:
        for _ in range(10):
            sock = await node.deaf_client(stack)
            sock.send(8 * node.request("/v1/kernels"))
        await until(lambda: "connection.stalled" in node.daemon.log, within_s=60)
        await node.back_to(before, within_s=40)


async def test_silent_tls_clients_do_not_block_others(plain: Daemon) -> None:
    certificate(plain.folder)
    made = Node(plain, f'tls-cert = "{plain.folder}/cert"\ntls-key = "{plain.folder}/key"\n')
    await plain.start()
    await made.are_dropped(HALF, b"")
    context = ssl.create_default_context(cafile=plain.folder / "cert")
    context.check_hostname = False
    headers = {"Authorization": "Bearer secret"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"https://127.0.0.1:{made.port}/v1/whoami", ssl=context) as answer,
    ):
        assert (await answer.json())["role"] == "admin"


async def test_busy_socket_does_not_block_other_sockets(plain: Daemon) -> None:
    team = f'[[rpc.sockets]]\npath = "{plain.folder}/team.sock"\nrole = "read"\n'
    made = Node(plain, max_connections=40)
    with plain.config_file.open("a") as file:
        file.write(team)
    await plain.start()
    before = made.descriptors
    async with AsyncExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_unix_connection(str(plain.folder / "team.sock"))
                stack.callback(writer.close)
                writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await plain.call("GET", "/v1/node")).status == 200
        await made.back_to(before + 50)  # those that are too many are accepted, and dropped
    await made.back_to(before)


async def test_followers_that_hang_up_leave_nothing(node: Node) -> None:
    await node.daemon.running(kernel_id="quiet", command=["sh", "-c", "echo one; sleep 1000"])
    before = node.descriptors
    for start in range(0, FOLLOWERS, 50):
        writers = []
        for number in range(start, start + 50):
            reader, writer = await node.connected()
            path = "/v1/events" if number % 2 else "/v1/kernels/quiet/logs?follow=true"
            writer.write(node.request(path))
            writers.append(writer)
            assert b"200 OK" in await reader.readline()
        for writer in writers:
            writer.transport.abort()
        await node.back_to(before, within_s=5)


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"GET  / HTTP/9\r\n\r\n",
     b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 20000 + b"\r\n\r\n", b"foo bar\r\n\r\n"],
)  # fmt: skip
async def test_malformed_request_is_a_problem(node: Node, sent: bytes) -> None:
    for _ in range(20):
        reader, writer = await node.connected()
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"application/problem+json" in head
        content = json.loads(body)
        assert (content["status"], content["code"]) == (400, "BadRequest")
    assert "Traceback" not in node.daemon.log
    assert node.daemon.log.count("request.rejected") <= 3


@pytest.mark.parametrize(
    ("query", "where"), [("?dry_run=true&dry_run=false", "dry_run"), ("?tail=1&tail=2", "tail")]
)
async def test_a_parameter_that_is_given_twice_is_refused(
    serving_process: Serving, query: str, where: str
) -> None:
    plain = await serving_process()
    path = "/v1/kernels/k1/logs" if where == "tail" else "/v1/agents/agent-1/kernels"
    answer = await plain.call("GET" if where == "tail" else "POST", path + query, None)
    assert answer.status == 422
    assert answer.json["errors"] == [{"where": where, "why": "given more than once"}]


async def test_a_member_that_is_given_twice_is_refused(serving_process: Serving) -> None:
    plain = await serving_process()
    body = b'{"command": ["true"], "slots": {"cpu": 1, "cpu": 2}}'
    answer = await plain.call("POST", "/v1/agents/agent-1/kernels", data=body)
    assert answer.status == 422
    assert answer.json["errors"] == [{"where": "cpu", "why": "given more than once"}]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_compressed_body_is_not_decompressed(serving_process: Serving, encoding: str) -> None:
    plain = await serving_process()
    body = b'{"command": ["true"]}'
    data = {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}.get(encoding, b"\x0b")
    headers = {"Content-Encoding": encoding}
    answer = await plain.call("POST", "/v1/agents/agent-1/kernels", data=data, headers=headers)
    assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")
    assert "not JSON" in answer.json["errors"][0]["why"]


@pytest.mark.parametrize("name", ["resize", "signal", "stdin-closed", "ping", "pong", "empty"])
async def test_a_flood_of_control_frames_is_cut_off(serving_process: Serving, name: str) -> None:
    daemon = await serving_process()
    await daemon.running(kernel_id="k1", command=["sleep", "100000"])
    reader, writer = await asyncio.open_unix_connection(str(daemon.folder / "agentd.sock"))
    writer.writelines(islice(Client("").socket(SLEEP, FRAMES[name]), 3))
    policy_violation = (1008).to_bytes(2, "big")
    async with asyncio.timeout(30):
        await reader.readuntil(policy_violation + b"more than 256 control frames in 1 s")
    writer.transport.abort()
