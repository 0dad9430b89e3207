"""Connections of both clients: shared by tasks, refused, and over paths that fell silent."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentd.client import AsyncClient
from agentd.errors import TooManyStreams, Unreachable
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
import asyncio, json, subprocess, sys, threading
from aiohttp import web
from agentd.client import AsyncClient, Client
from agentd.errors import Unavailable

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
    import os
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
def test_path_that_falls_silent_ends_a_followed_log(kind: str) -> None:
    """A loopback that is down drops packets, as does a node without power."""
    program = ["unshare", "-rn", sys.executable, "-c", SILENCE, kind]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    line, outage = map(json.loads, done.stdout.splitlines())
    assert line == "line\n"
    assert outage.startswith("the log of k1 was cut off before its end: http://127.0.0.1:")


def test_importing_the_blocking_client_stays_cheap() -> None:
    program = "import sys, agentd.client; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"asyncio", "aiohttp", "pydantic", "click", "uuid", "msgspec"}
