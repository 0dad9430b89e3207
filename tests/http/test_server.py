"""The server: its limits, and its stop, in which accepted clients are answered."""

import asyncio
import os
import resource
import select
import socket
from collections import Counter
from collections.abc import Hashable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import web
from msgspec.structs import replace

from agentd.concurrency import Deadline
from agentd.core.access import Caller, Right, Role
from agentd.errors import StartRefused
from agentd.http import server as servers
from agentd.http.callers import Token
from agentd.http.connections.admission import ConnectionLimit
from agentd.http.connections.request_turns import MAX_AT_ONCE, RequestTurns
from agentd.http.connections.unix_sockets import bind_unix_socket
from agentd.http.route import get
from agentd.http.server import FURTHER_FRACTION, Endpoint, Server, UnixSocket
from agentd.http.site import Site

pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")


class Words(Site):
    """Answers with a word, at once or later."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.goes_on = asyncio.Event()

    async def wait_open(self, patience_s: float) -> None: ...

    def authorize(self, request: web.Request, caller: Caller, right: Right) -> None: ...

    def audit_call(self, request: web.Request, action: str):
        raise AssertionError(action)

    async def word(self, request: web.Request) -> web.Response:
        return web.Response(text="word")

    async def wait(self, request: web.Request) -> web.Response:
        self.waiting += 1
        await self.goes_on.wait()
        return await self.word(request)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def unix_socket_at(folder: Path) -> UnixSocket:
    return UnixSocket(folder / "socket", None, Caller("operator", Role.ADMIN))


def words_at(end: Endpoint) -> Server:
    site = Words()
    routes = [
        get("/v1/word", site.word, str),
        get("/v1/wait", site.wait, str),
        get("/livez", site.word, str, right=None),
    ]
    return Server("words", routes, site, end)


@pytest.mark.parametrize("rounds", range(8))
async def test_stop_resets_no_accepted_connection(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "socket"
    door = unix_socket_at(tmp_path)
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))
        held.listen()
        server = words_at(Endpoint((door,), passed={str(path): held.dup()}))
        await server.start()
        callers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for caller in callers:
            caller.connect(str(path))
            caller.sendall(b"GET /v1/word HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            caller.setblocking(False)
        for _ in range(rounds):
            await asyncio.sleep(0)
        await server.stop(Deadline.after(10))
        outcomes = Counter(_outcome(caller) for caller in callers)
        assert outcomes.keys() <= {"200", "waits"}
        assert outcomes["waits"] == _queued(held)
    assert outcomes["200"] > 0 or rounds < 2


@pytest.mark.parametrize("is_passed", [True, False])
async def test_stop_removes_no_file_of_passed_socket(tmp_path: Path, is_passed: bool) -> None:
    path = tmp_path / "socket"
    unix = unix_socket_at(tmp_path)
    with socket.socket(socket.AF_UNIX) as held, socket.socket(socket.AF_UNIX) as client:
        if is_passed:
            held.bind(str(path))
            held.listen()
        server = words_at(Endpoint((unix,), passed={str(path): held.dup()} if is_passed else {}))
        await server.start()
        assert path.is_socket()
        await server.stop(Deadline.after(10))
        assert path.exists() is is_passed
        if is_passed:
            client.connect(str(path))


async def test_socket_without_its_file_is_a_condition(tmp_path: Path) -> None:
    server = words_at(Endpoint((unix_socket_at(tmp_path),)))
    assert [*server.conditions()] == []
    await server.start()
    assert [*server.conditions()] == []
    (tmp_path / "socket").unlink()
    (condition,) = server.conditions()
    assert condition.about == "host"
    assert condition.reason == f"the socket {tmp_path}/socket was removed, so no client finds it"
    await server.stop(Deadline.after(10))


async def test_socket_is_private_until_its_group_is_known(tmp_path: Path) -> None:
    unix = replace(unix_socket_at(tmp_path), group="team")
    server = words_at(Endpoint((unix,)))
    known: dict[str, int] = {}
    await server.start(known.get)
    assert server.ungrouped == [unix]
    assert unix.path.stat().st_mode & 0o777 == 0o600
    known["team"] = os.getegid()
    server.assign_groups(known.get)
    assert server.ungrouped == []
    assert unix.path.stat().st_mode & 0o777 == 0o660
    await server.stop(Deadline.after(10))


@pytest.mark.parametrize("successor", ["none", "link", "hard link", "file", "socket"])
async def test_no_file_but_that_of_the_socket_gets_its_group(
    tmp_path: Path, successor: str
) -> None:
    """The owner of its folder may remove or replace it; the sockets behind it get theirs."""
    paths = tmp_path / "removed", tmp_path / "kept"
    first, other = (replace(unix_socket_at(tmp_path), path=path, group=path.name) for path in paths)
    server = words_at(Endpoint((first, other)))
    known: dict[str, int] = {}
    await server.start(known.get)
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    first.path.rename(tmp_path / "former")  # a free inode may be used again
    with socket.socket(socket.AF_UNIX) as impostor:
        if successor == "link":
            first.path.symlink_to(secret)
        elif successor == "hard link":
            first.path.hardlink_to(secret)
        elif successor == "file":
            first.path.touch(mode=0o600)
        elif successor == "socket":
            impostor.bind(str(first.path))
            first.path.chmod(0o600)
        known |= {"removed": os.getegid(), "kept": os.getegid()}
        with pytest.raises(StartRefused):
            server.assign_groups(known.get)
    assert server.ungrouped == [first]
    assert other.path.stat().st_mode & 0o777 == 0o660
    assert secret.stat().st_mode & 0o777 == 0o600
    if successor != "none":
        assert first.path.stat().st_mode & 0o777 == 0o600
    await server.stop(Deadline.after(10))


async def test_stop_removes_no_file_of_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one starts as soon as this one does not listen any more."""
    path, next_ones = tmp_path / "socket", []
    close = asyncio.Server.close

    def close_and_start_next(listener: asyncio.Server) -> None:
        close(listener)
        next_ones.append(bind_unix_socket(path, None))
        next_ones[0].listen()

    server = words_at(Endpoint((unix_socket_at(tmp_path),)))
    await server.start()
    monkeypatch.setattr(asyncio.Server, "close", close_and_start_next)
    await server.stop(Deadline.after(10))
    with next_ones[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


async def test_stop_waits_a_limited_time_for_first_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "FIRST_REQUEST_S", 1.0)
    path = tmp_path / "socket"
    server = words_at(Endpoint((unix_socket_at(tmp_path),)))
    await server.start()
    with socket.socket(socket.AF_UNIX) as late, socket.socket(socket.AF_UNIX) as silent:
        for client in (late, silent):
            client.connect(str(path))
        while len(server._pending) < 2:
            await asyncio.sleep(0)
        stopping = asyncio.create_task(server.stop(Deadline.after(10)))
        while path.exists():
            await asyncio.sleep(0)
        late.sendall(b"GET /v1/word HTTP/1.1\r\nHost: x\r\n\r\n")
        await stopping
        assert late.recv(4096).startswith(b"HTTP/1.1 200")
        assert silent.recv(4096) == b""


async def test_probes_do_not_wait_for_turns_of_their_caller(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = words_at(Endpoint((unix_socket_at(tmp_path),)))
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, Deadline.after(10))

        async def ask(asked: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_unix_connection(path)
            stack.callback(writer.close)
            writer.write(f"GET {asked} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return reader

        readers = [await ask("/v1/wait") for _ in range(MAX_AT_ONCE)]
        while server._site.waiting < MAX_AT_ONCE:
            await asyncio.sleep(0)
        waits = await ask("/v1/word")
        async with asyncio.timeout(20):
            assert (await (await ask("/livez")).readuntil(b"word")).startswith(b"HTTP/1.1 200")
            server._site.goes_on.set()
            for reader in (*readers, waits):
                assert (await reader.readuntil(b"word")).startswith(b"HTTP/1.1 200")


async def test_connections_with_one_token_share_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[Hashable] = []

    async def begin(_: RequestTurns, request: web.Request, caller: Hashable) -> None:
        del request
        owners.append(caller)

    monkeypatch.setattr(RequestTurns, "begin", begin)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        unix = unix_socket_at(tmp_path)
        tokens = tuple(Token(name, Caller(name, Role.ADMIN)) for name in ("one", "two"))
        passed = {f"127.0.0.1:{port}": listening}
        server = words_at(Endpoint((unix,), "127.0.0.1", port, tokens, passed=passed))
        await server.start()
        for token in ("one", "one", "two", "none"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"Authorization: Bearer {token}\r\nConnection: close\r\n"
            writer.write(f"GET /v1/word HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
            await reader.read()
            writer.close()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        writer.write(b"GET /v1/word HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.read()
        writer.close()
        await server.stop(Deadline.after(10))
    assert owners == [("one", ""), ("one", ""), ("two", ""), None, (str(unix.path), os.geteuid())]


def _queued(listening: socket.socket) -> int:
    """Return the number of clients in a listening socket's queue."""
    listening.setblocking(False)
    number = 0
    with suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            number += 1
    return number


def _outcome(caller: socket.socket) -> str:
    with caller:
        try:
            return caller.recv(4096).split()[1].decode()
        except BlockingIOError:
            return "waits"
        except ConnectionResetError:
            return "reset"


async def test_clients_beyond_the_limit_take_few_descriptors(tmp_path: Path) -> None:
    """A flood over TCP leaves descriptors to the operator's socket, also before it is refused."""
    unix = unix_socket_at(tmp_path)
    with socket.socket() as listening, ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        passed = {f"127.0.0.1:{port}": listening}
        end = Endpoint((unix,), "127.0.0.1", port, passed=passed, max_connections=1)
        server = words_at(end)
        await server.start()
        clients = [stack.enter_context(socket.socket()) for _ in range(200)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        before = most = descriptors()
        async with asyncio.timeout(20):
            while not all(select.select([client], [], [], 0)[0] for client in clients[1:]):
                await asyncio.sleep(0)
                most = max(most, descriptors())
        await server.stop(Deadline.after(10))
    assert most - before < len(clients) / 4


def test_limit_of_a_tiny_fraction_is_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    limit = ConnectionLimit(1024, FURTHER_FRACTION / 200)
    assert [limit.try_acquire(), limit.try_acquire()] == [True, False]


async def test_full_socket_leaves_connections_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    sockets = [
        UnixSocket(tmp_path / name, None, Caller(name, Role.ADMIN)) for name in ("op", "a", "b")
    ]
    server = words_at(Endpoint((*sockets,)))
    await server.start()
    request = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"

    async def answered(name: str) -> bool:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / name))
        stack.callback(writer.close)
        with suppress(ConnectionError):
            writer.write(request)
            return bool(await reader.readline())
        return False

    with ExitStack() as stack:
        async with asyncio.timeout(20):
            assert [await answered("a") for _ in range(6)] == [True] * 4 + [False] * 2
            assert [await answered(name) for name in ("b", "op")] == [True, True]
    await server.stop(Deadline.after(10))
