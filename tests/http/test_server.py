"""The stop of a server: accepted clients are answered, others keep waiting."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from agentd.concurrency import Deadline
from agentd.core.access import Caller, Right, Role
from agentd.http.audit import Auditor
from agentd.http.callers import Token
from agentd.http.connections.connection import Connection
from agentd.http.connections.turns import ROUNDS, Kind
from agentd.http.connections.unix_sockets import unix_socket
from agentd.http.route import get
from agentd.http.server import Endpoint, Server, UnixSocket
from agentd.http.site import Site


class Words(Site):
    """Answers one route with a word."""

    async def until_open(self, patience_s: float) -> None: ...

    def require(self, request: web.Request, caller: Caller, right: Right) -> None: ...

    def auditor(self, request: web.Request, action: str) -> Auditor:
        raise AssertionError(action)

    async def word(self, request: web.Request) -> web.Response:
        return web.Response(text="word")


def words_at(end: Endpoint) -> Server:
    site = Words()
    return Server("words", [get("/v1/word", site.word, str)], site, end)


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")
@pytest.mark.parametrize("rounds", range(8))
async def test_stop_resets_no_accepted_connection(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "socket"
    door = UnixSocket(path, None, Caller("operator", Role.ADMIN))
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


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")
@pytest.mark.parametrize("is_passed", [True, False])
async def test_stop_removes_no_file_of_passed_socket(tmp_path: Path, is_passed: bool) -> None:
    path = tmp_path / "socket"
    unix = UnixSocket(path, None, Caller("operator", Role.ADMIN))
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


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")
async def test_stop_removes_no_file_of_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one starts as soon as this one does not listen any more."""
    path, next_ones = tmp_path / "socket", []
    close = asyncio.Server.close

    def close_and_start_next(listener: asyncio.Server) -> None:
        close(listener)
        next_ones.append(unix_socket(path, None))
        next_ones[0].listen()

    server = words_at(Endpoint((UnixSocket(path, None, Caller("operator", Role.ADMIN)),)))
    await server.start()
    monkeypatch.setattr(asyncio.Server, "close", close_and_start_next)
    await server.stop(Deadline.after(10))
    with next_ones[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[Server, Counter[Hashable]]]:
    """A server on a socket and TCP, and the turns that it grants."""
    path, port = tmp_path / "socket", 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    operator = Caller("operator", Role.ADMIN)
    tokens = (Token("one", Caller("team", Role.ADMIN)), Token("two", Caller("other", Role.ADMIN)))
    end = Endpoint((UnixSocket(path, None, operator),), host="127.0.0.1", port=port, tokens=tokens)
    server = words_at(end)
    granted: Counter[Hashable] = Counter()
    serve = server._turns._serve
    server._turns._serve = lambda line, amount: (granted.update([line]), serve(line, amount))  # type: ignore[method-assign]
    await server.start()
    try:
        yield server, granted
    finally:
        await server.stop(Deadline.after(10))


async def word(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str = "") -> None:
    head = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(f"GET /v1/word HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
    assert (await reader.readuntil(b"word")).startswith(b"HTTP/1.1 200")


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")
async def test_a_caller_with_one_connection_takes_no_turns(tmp_path: Path) -> None:
    """One that asks one thing after the other costs nothing more than it did."""
    async with serving(tmp_path) as (server, granted):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        for _ in range(3):
            await word(reader, writer)
        assert not granted
        assert server._turns._round == 0
        writer.write(b"GET /v1/word HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        for _ in range(3):
            await reader.readuntil(b"word")
        assert granted.total() >= 2
        writer.close()


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")
async def test_an_answer_takes_fewer_rounds_than_are_between_two_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else more than a turn of another caller could fall between a request and its answer."""
    rounds, ended = 0, []
    end = Connection.ended
    monkeypatch.setattr(Connection, "ended", lambda self: (end(self), ended.append(rounds)))
    async with serving(tmp_path):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "socket"))
            for _ in range(2):
                caller.sendall(b"GET /v1/word HTTP/1.1\r\nHost: x\r\n\r\n")
                rounds, ended[:] = 0, []
                while not ended:
                    await asyncio.sleep(0)
                    rounds += 1
                assert ended[0] < ROUNDS - 1  # what is granted is served a round later


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")
async def test_connections_with_one_token_are_one_caller(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, granted):
        port = server._endpoint.port
        made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for streams, token in zip(made, ["one", "one", "two"], strict=True):
            await word(*streams, token)
        granted.clear()
        for streams, token in zip(made, ["one", "one", "two"], strict=True):
            await word(*streams, token)
        asked = {line: number for line, number in granted.items() if line[1] is Kind.REQUESTS}
        assert asked == {(("team", ""), Kind.REQUESTS): 2}
        for _, writer in made:
            writer.close()


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
