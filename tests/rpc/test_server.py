"""The server's stop: whoever was let in is answered, and whoever was not still waits."""

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from agentd.core.access import Caller, Right, Role
from agentd.rpc.routes import Route
from agentd.rpc.server import Door, Endpoint, Server
from agentd.rpc.streams import Streams
from agentd.tasks import Deadline


class Site:
    """Answers one route with a word."""

    streams = Streams()

    def describe(self, openapi) -> None: ...

    async def until_open(self, patience_s: float) -> None: ...

    def require(self, request: web.Request, caller: Caller, right: Right) -> None: ...

    async def word(self, request: web.Request) -> web.Response:
        return web.Response(text="word")


ROUTES = [Route("GET", "/v1/word", Site.word, {200: str})]


@pytest.mark.filterwarnings("ignore::aiohttp.web.NotAppKeyWarning")
@pytest.mark.parametrize("rounds", range(8))
async def test_a_stop_at_any_moment_resets_nobody(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "socket"
    door = Door(path, None, Caller("operator", Role.ADMIN))
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))
        held.listen()
        server = Server("words", ROUTES, Site(), Endpoint((door,), passed={str(path): held.dup()}))
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


def _queued(listening: socket.socket) -> int:
    """How many callers whoever listens next is going to find."""
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
