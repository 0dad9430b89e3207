"""The connections that a stop waits for, and the deadline of a header."""

import asyncio
import socket

from aiohttp import web

from agentd.http.connections.admission import Newcomers
from agentd.http.connections.connection import Connection
from agentd.http.connections.turns import Kind, Turns


async def test_stop_waits_a_limited_time_for_accepted_clients() -> None:
    newcomers = Newcomers()
    await newcomers.heard(60)
    newcomers.add("asks")
    newcomers.add("hangs up")
    waiting = asyncio.create_task(newcomers.heard(60))
    for connection in ("asks", "hangs up"):
        await asyncio.sleep(0.01)
        assert not waiting.done()
        newcomers.discard(connection)
    async with asyncio.timeout(5):
        await waiting
    newcomers.add("says nothing")
    async with asyncio.timeout(5):
        await newcomers.heard(0.01)


async def test_only_a_header_that_has_begun_has_a_deadline() -> None:
    """A connection that is idle after a request with a body stays open."""

    async def handler(request: web.BaseRequest) -> web.Response:
        await connection.began(request, Kind.REQUESTS)
        if request.path == "/read":
            await request.read()
        if request.path == "/late":
            writer.write(head[:10])
            while not connection._is_next_begun:
                await asyncio.sleep(0)
        connection.ended()
        return web.Response(text="done")

    loop = asyncio.get_running_loop()
    server = web.Server(handler)
    connection = Connection(server, None, Turns(), lambda _: "a", Newcomers(), web.Response)
    here, there = socket.socketpair()
    await loop.connect_accepted_socket(lambda: connection, there)
    reader, writer = await asyncio.open_connection(sock=here)
    head = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
    assert connection._deadline is not None
    for path in (b"read", b"refused"):
        for pieces in ([head + b"abcd"], [head + b"ab", b"cd"], [head, b"abcd"]):
            for piece in pieces:
                writer.write(piece.replace(b"%s", path))
                for _ in range(3):  # turns in which the server reads it
                    await asyncio.sleep(0)
            async with asyncio.timeout(20):
                assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
            assert connection._deadline is None
    writer.write(head.replace(b"%s", b"late") + b"abcd")
    async with asyncio.timeout(20):
        await reader.readuntil(b"done")
    assert connection._deadline is not None
    connection._deadline.cancel()
    connection._deadline = None
    writer.write(head[10:20])
    async with asyncio.timeout(20):
        while connection._deadline is None:
            await asyncio.sleep(0)
    writer.close()
    await server.shutdown()
