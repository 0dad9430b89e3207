"""Connections of both clients: shared by tasks, refused, and over paths that fell silent."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentd.client import AsyncClient, Client
from agentd.client.defaults import enable_keepalive
from agentd.errors import InvalidRequest, RefusedForNow, TooManyStreams, Unreachable
from support.fork_server import run
from support.web_server import served


async def test_tasks_share_one_client_and_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[aiohttp.ClientSession] = []
    make = aiohttp.ClientSession

    def open_session(**options: Any) -> aiohttp.ClientSession:
        sessions.append(make(**options))
        return sessions[-1]

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "n1"})

    monkeypatch.setattr(aiohttp, "ClientSession", open_session)
    client = AsyncClient(tmp_path / "socket")
    all_entered = asyncio.Barrier(8)

    async def use(number: int) -> None:
        async with client:
            await all_entered.wait()
            for _ in range(number):
                assert (await client.node())["id"] == "n1"

    async with served(tmp_path / "socket", answer):
        await asyncio.gather(*(use(number) for number in range(8)))
        assert [session.closed for session in sessions] == [True]
        with pytest.raises(RuntimeError, match="async with AsyncClient"):
            await client.node()
        async with client:
            assert (await client.node())["id"] == "n1"
    assert [session.closed for session in sessions] == [True, True]


@pytest.mark.parametrize("kind", ["socket", "tcp"])
async def test_many_calls_in_progress_delay_no_other(tmp_path: Path, kind: str) -> None:
    """As of creates that wait for a pull, and of logs that are followed."""
    all_began, count = asyncio.Event(), 0

    async def answer(_: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count == 120:
            all_began.set()
        await all_began.wait()
        return web.json_response({"id": "n1"})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    if kind == "socket":
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        client = AsyncClient(tmp_path / "socket", timeout_s=20)
    else:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = AsyncClient(url=f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=20)
    async with client:
        answers = await asyncio.gather(*(client.node() for _ in range(120)))
    assert {node["id"] for node in answers} == {"n1"}
    await runner.cleanup()


async def test_signal_that_a_proxy_may_have_passed_on_is_sent_once(tmp_path: Path) -> None:
    sent: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        sent.append(request.path)
        return web.Response(status=503, text="upstream connect error or reset before headers")

    path = tmp_path / "socket"
    async with served(path, answer):
        async with AsyncClient(path) as client:
            with pytest.raises(RefusedForNow):
                await client.signal_kernel("k1", "INT")
        with pytest.raises(RefusedForNow):
            await asyncio.to_thread(Client(path).signal_kernel, "k1", "INT")
    assert sent == ["/v1/kernels/k1/signal"] * 2


@pytest.mark.parametrize("client", [AsyncClient, Client])
@pytest.mark.parametrize("token", ["pass€word", "two\nlines"])
def test_token_that_no_header_can_have_is_refused(client: Any, token: str) -> None:
    with pytest.raises(InvalidRequest, match="token: it is not printable ASCII"):
        client(token=token)


def test_client_of_an_ended_loop_is_opened_again(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"id": "n1"})

    client = AsyncClient(tmp_path / "socket")

    async def enter_only() -> None:
        async with served(tmp_path / "socket", answer):
            await client.__aenter__()
            assert (await client.node())["id"] == "n1"
            with pytest.raises(RuntimeError, match="open in another event loop"):
                await asyncio.to_thread(asyncio.run, client.__aenter__())

    async def use() -> None:
        async with served(tmp_path / "socket", answer), client:
            assert (await client.node())["id"] == "n1"

    asyncio.run(enter_only())
    asyncio.run(use())
    asyncio.run(use())


async def test_refused_exec_raises_the_first_answer(tmp_path: Path) -> None:
    """Asked again without a WebSocket, a node with a free stream says that it expects one."""
    asked: list[bool] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append("Upgrade" in request.headers)
        code, status = ("TooManyStreams", 429) if len(asked) == 1 else ("InvalidRequest", 422)
        return web.json_response({"code": code, "detail": "so", "status": status}, status=status)

    async with served(tmp_path / "socket", answer), AsyncClient(tmp_path / "socket") as node:
        with pytest.raises(TooManyStreams):
            async with node.exec("k1", ["true"]):
                pass
    assert asked == [True]


async def test_server_without_websockets_is_an_error(tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async with served(tmp_path / "socket", answer), AsyncClient(tmp_path / "socket") as node:
        with pytest.raises(Unreachable, match="does not support WebSockets"):
            async with node.exec("k1", ["true"]):
                pass


SILENCE = """
import asyncio, json, os, subprocess, sys, threading
from aiohttp import web
from agentd.client import AsyncClient, Client, defaults
from agentd.errors import Unavailable

seconds = {5: 1, 2: 1, 3: 2, 10_000: 2_000}  # a tenth of the time is enough here
defaults.TCP_OPTIONS = [(*name, seconds.get(value, value)) for *name, value in defaults.TCP_OPTIONS]
kind = sys.argv[1]
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

async def answer(request):
    response = web.StreamResponse(headers={"Log-Position": "0"})
    await response.prepare(request)
    await response.write(b"line\\n")
    await asyncio.sleep(3600)

async def read(node, told):
    async for chunk in node.logs("k1", follow=True, on_outage=told.append):
        print(json.dumps(chunk.decode()), flush=True)
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)

async def main():
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url, told = f"http://127.0.0.1:{runner.addresses[0][1]}", []
    def blocking():
        for chunk in Client(url=url).logs("k1", follow=True, on_outage=told.append):
            print(json.dumps(chunk.decode()), flush=True)
            subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    async with AsyncClient(url=url) as node:
        if kind == "asyncio":
            reading = asyncio.create_task(read(node, told))
        else:
            threading.Thread(target=blocking, daemon=True).start()
        while not told:
            await asyncio.sleep(0.05)
    print(json.dumps(str(told[0])), flush=True)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
def test_path_that_falls_silent_ends_a_followed_log(kind: str) -> None:
    """A loopback that is down drops packets, as does a node without power."""
    program = ["unshare", "-rn", sys.executable, "-c", SILENCE, kind]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    line, outage = map(json.loads, done.stdout.splitlines())
    assert line == "line\n"
    assert outage.startswith("the log of k1 was cut off before its end: ")


def test_dead_path_is_noticed_within_about_ten_seconds() -> None:
    with socket.socket() as connection:
        enable_keepalive(connection)
        options = ("SO_KEEPALIVE", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        levels = (socket.SOL_SOCKET, *[socket.IPPROTO_TCP] * 3)
        values = [
            connection.getsockopt(level, getattr(socket, name))
            for level, name in zip(levels, options, strict=True)
        ]
        assert values == [1, 5, 2, 3]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


def test_importing_the_blocking_client_stays_cheap() -> None:
    program = "import sys, agentd.client; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"asyncio", "aiohttp", "pydantic", "click", "uuid", "msgspec"}


@pytest.mark.parametrize(
    ("head", "body", "reason"),
    [
        ("Content-Length: 100", "[]", "IncompleteRead"),
        ("Content-Length: 7", "<html/>", "the answer is not JSON"),
    ],
    ids=["cut", "not JSON"],
)
async def test_odd_list_of_a_fleet_is_one_error(head: str, body: str, reason: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(20):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await asyncio.to_thread(run, "agentctl", "--fleet", url, "ls")
    assert (done.returncode, reason in done.stderr) == (1, True), done
    assert "Traceback" not in done.stderr
