"""The client of the Engine's API: three ways to fail, and nothing left open."""

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web

from agentd.errors import RuntimeUnavailable
from agentd.runtimes.docker import docker_streams
from agentd.runtimes.docker.docker_client import DockerClient
from agentd.runtimes.docker.docker_errors import DockerError, DockerResponseLost, DockerUnreachable
from agentd.runtimes.docker.docker_streams import watch_container_events
from runtimes.docker.fake_engine import FakeEngine, says

VERSION = b'HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n{"ApiVersion": "1.41"}'


@pytest.fixture
def engine(fake_engine: FakeEngine) -> FakeEngine:
    return fake_engine


async def test_version_is_requested_once_per_connection(engine, client) -> None:
    engine.answer = says(200, b"[]")
    for _ in range(2):
        assert await client.call("GET", "/containers/json") == []
    engine.version = b'{"ApiVersion": "1.45"}'
    client.forget_version()
    await client.call("GET", "/info")
    assert engine.asked == [
        "GET /version", "GET /v1.41/containers/json", "GET /v1.41/containers/json",
        "GET /version", "GET /v1.45/info",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"message": "No such container"}', "No such container"),
        (b"plain words", "plain words"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"", "no reason given"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
async def test_a_refusal_carries_status_and_message(engine, client, body, message) -> None:
    engine.answer = says(404, body)
    with pytest.raises(DockerError, match=r".*") as caught:
        await client.call("GET", "/x")
    assert (caught.value.status, caught.value.message) == (404, message)


def breaking(engine: FakeEngine, times: int) -> None:
    """Answer once, then receive so many requests and break their connections."""
    broken = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal broken
        if len(engine.asked) > 2 and broken < times:
            broken += 1
            assert request.transport is not None
            request.transport.abort()
        return web.Response(body=b"{}")

    engine.answer = answer


async def test_a_mutating_call_is_never_repeated(engine, client) -> None:
    breaking(engine, times=1)
    assert await client.call("GET", "/info") == {}
    with pytest.raises(DockerResponseLost):
        await client.call("POST", "/containers/create", body={"a": 1})
    assert engine.asked.count("POST /v1.41/containers/create") == 1


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_idempotent_call_is_repeated_once(engine, client, method) -> None:
    breaking(engine, times=1)
    assert await client.call("GET", "/info") == {}
    assert await client.call(method, "/containers/a") == {}
    breaking(engine, times=2)
    with pytest.raises(DockerResponseLost):
        await client.call(method, "/containers/b")
    assert engine.asked.count(f"{method} /v1.41/containers/b") == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"x" * 100_000,
    ],
)
async def test_a_malformed_response_is_a_lost_answer(folder: Path, answer: bytes) -> None:
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for response in (VERSION, answer):
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(response)
        writer.close()

    async with await asyncio.start_unix_server(serve, folder / "engine.sock"):
        client = DockerClient(folder / "engine.sock")
        with pytest.raises(DockerResponseLost):
            await client.call("POST", "/containers/create", body={"a": 1})
        await client.close()
    assert len(requests) == 2


async def test_an_answer_counts_after_a_suspension(folder: Path, monkeypatch) -> None:
    """It has arrived by the time that the loop notices the end of the timeout."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "engine.sock"))
    listener.listen()
    loop = asyncio.get_running_loop()
    client = DockerClient(folder / "engine.sock")
    with listener:
        calling = asyncio.create_task(client.call("POST", "/containers/create", timeout_s=5))
        connection = await asyncio.to_thread(lambda: listener.accept()[0])
        with connection:
            await asyncio.to_thread(connection.recv, 65536)
            connection.sendall(VERSION)
            await asyncio.to_thread(connection.recv, 65536)
            await asyncio.sleep(0)
            connection.sendall(b'HTTP/1.1 201 Created\r\nContent-Length: 11\r\n\r\n{"Id": "a"}')
            now = loop.time()
            monkeypatch.setattr(loop, "time", lambda: now + 3600)
            assert await calling == {"Id": "a"}
            await client.close()


async def test_refused_connection_counts_as_never_asked(folder: Path) -> None:
    client = DockerClient(folder / "none.sock")
    with pytest.raises(DockerUnreachable, match=r"none\.sock: No such file"):
        await client.call("POST", "/containers/create")
    await client.close()


async def test_doubled_answer_of_events_is_a_lost_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_streams, "SILENCE_S", 0.05)
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n"
    connected = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"/events" not in await reader.readuntil(b"\r\n\r\n"):
            writer.write(VERSION)
        writer.write(answer)
        await connected.wait()
        writer.write(answer)
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, folder / "engine.sock"):
        client = DockerClient(folder / "engine.sock")
        events = watch_container_events(client, "node-1")
        assert await anext(events) == docker_streams.CONNECTED
        connected.set()
        with pytest.raises(RuntimeUnavailable):
            await anext(events)
        await client.close()


async def test_leaving_a_stream_hangs_up(engine: FakeEngine, client: DockerClient) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"line\n")
                await asyncio.sleep(0.01)
        finally:
            engine.hung_up.set()

    engine.answer = endless
    async with client.stream("GET", "/events", {}) as stream:
        assert await stream.readline() == b"line\n"
    async with asyncio.timeout(10):
        await engine.hung_up.wait()


async def test_refused_events_are_a_state_of_the_engine(engine, client) -> None:
    engine.answer = says(503, b'{"message": "is starting"}')
    with pytest.raises(RuntimeUnavailable, match="is starting"):
        await anext(watch_container_events(client, "node-1"))


async def test_a_call_that_is_never_answered_is_a_lost_answer(
    engine: FakeEngine, client: DockerClient
) -> None:
    gate, received = asyncio.Event(), asyncio.Event()

    async def never(_: web.Request) -> web.StreamResponse:
        received.set()
        await gate.wait()
        return web.Response()

    engine.answer = never
    with pytest.raises(DockerResponseLost, match=r"within 0\.01 s"):
        await client.call("POST", "/containers/x/start", timeout_s=0.01)
    async with asyncio.timeout(20):
        await received.wait()
        received.clear()
        calling = asyncio.create_task(client.call("POST", "/containers/x/start"))
        await received.wait()
    await client.close()
    with pytest.raises(DockerResponseLost):
        await calling
    with pytest.raises(DockerUnreachable, match="agentd closed the connection"):
        await client.call("DELETE", "/containers/x")
    gate.set()
