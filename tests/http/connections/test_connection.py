"""The deadlines of a connection: a header that has begun, and a response that is not read."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from agentd.http.connections import connection as connections
from agentd.http.connections.admission import ConnectionLimit
from agentd.http.connections.connection import Connection, connection_of
from support.certificates import certificate


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))
    return context


def trusting() -> ssl.SSLContext:
    """The context of a client that accepts every certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@asynccontextmanager
async def connected(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Connection, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server, and the client's side of it."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        connection_of(request).begin_request(request)
        try:
            return await handler(request)
        finally:
            connection_of(request).finish_request()

    server = web.Server(answer)
    connection = Connection(server, set(), None, lambda: tls)
    here, there = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, there)
    secured = {"ssl": trusting(), "server_hostname": "x"} if tls else {}
    reader, writer = await asyncio.open_connection(sock=here, **secured)
    try:
        async with asyncio.timeout(20):
            yield connection, reader, writer
    finally:
        writer.close()
        await server.shutdown()


async def test_only_a_header_that_has_begun_has_a_deadline() -> None:
    """A connection that is idle after a request with a body stays open."""

    async def handler(request: web.BaseRequest) -> web.Response:
        if request.path == "/read":
            await request.read()
        return web.Response(text="done")

    async with connected(handler) as (connection, reader, writer):
        head = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
        assert connection._header_timer is not None
        for path in (b"read", b"refused"):
            for pieces in ([head + b"abcd"], [head + b"ab", b"cd"], [head, b"abcd"]):
                for piece in pieces:
                    writer.write(piece.replace(b"%s", path))
                    for _ in range(3):  # rounds in which the server reads it
                        await asyncio.sleep(0)
                assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
                assert connection._header_timer is None
        writer.write(head[:10])
        while connection._header_timer is None:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("size", "has_tls"),
    [
        pytest.param(100, False, id="many small responses"),
        pytest.param(10_000_000, False, id="large responses"),
        pytest.param(10_000_000, True, id="responses in the transport below that of TLS"),
    ],
)
async def test_connection_closes_if_a_response_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tls: ssl.SSLContext, size: int, *, has_tls: bool
) -> None:
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 0.01)

    async def handler(_: web.BaseRequest) -> web.Response:
        return web.Response(body=bytes(size))

    async with connected(handler, tls if has_tls else None) as (connection, reader, writer):
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        while not connection._transport.is_closing():
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
            await asyncio.sleep(0)
        transport.resume_reading()
        assert await reader.read(1)


async def test_request_with_the_end_of_a_handshake_has_no_deadline(
    monkeypatch: pytest.MonkeyPatch, tls: ssl.SSLContext
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)

    async def answer(request: web.BaseRequest) -> web.Response:
        connection_of(request).begin_request(request)
        await asyncio.sleep(1)
        return web.Response()

    server, loop = web.Server(answer), asyncio.get_running_loop()
    here, there = socket.socketpair()
    here.setblocking(False)
    await loop.connect_accepted_socket(lambda: Connection(server, set(), None, lambda: tls), there)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting().wrap_bio(incoming, outgoing, server_hostname="x")

    async def received(act: Callable[[], bytes | None]) -> bytes | None:
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(here, outgoing.read())
                incoming.write(await loop.sock_recv(here, 1 << 16))

    async with asyncio.timeout(20):
        await received(client.do_handshake)
        client.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # sent with the last of the handshake
        assert (await received(client.read) or b"").startswith(b"HTTP/1.1 200")
    here.close()
    await server.shutdown()


async def test_connection_stays_while_a_response_is_read_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 0.01)
    size = 10_000_000

    async def handler(_: web.BaseRequest) -> web.Response:
        return web.Response(body=bytes(size))

    async with connected(handler) as (_, reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert len(await reader.readexactly(size)) == size


async def test_bodies_over_tls_arrive_whole(tls: ssl.SSLContext) -> None:
    """Records of TLS have every size, and several are read at once."""
    bodies: list[bytes] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        connection_of(request).begin_request(request)
        bodies.append(await request.read())
        connection_of(request).finish_request()
        return web.Response()

    server, limits, loop = web.Server(answer), ConnectionLimit(1, 1), asyncio.get_running_loop()
    connection = Connection(server, set(), limits, lambda: tls)
    here, there = socket.socketpair()
    await loop.connect_accepted_socket(lambda: connection, there)
    _, writer = await asyncio.open_connection(sock=here, ssl=trusting(), server_hostname="x")
    sent = [bytes([65 + size % 26]) * size for size in (5, 700, 2047, 2048, 5000, 20_000)]
    async with asyncio.timeout(20):
        for size in (1, 10, 1000, 3000):
            for body in sent:
                writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body))
                writer.write(b"\r\n")
                for at in range(0, len(body), size):
                    writer.write(body[at : at + size])
            while len(bodies) < len(sent):
                await asyncio.sleep(0)
            assert bodies == sent
            bodies.clear()
        assert not limits.try_acquire()
        writer.close()
        while server.connections:
            await asyncio.sleep(0)
    assert limits.try_acquire(), "a connection that has ended is still counted"
