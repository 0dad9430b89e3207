"""A server that answers in the place of a node's daemon, and what a test damages of it."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

AMOUNTS = {"capacity": "8", "allocated": "0", "free": "8"}
NODE_PAGES: dict[str, Any] = {
    "/v1/node": {
        "id": "n1",
        "version": "1.0",
        "generation": 1,
        "runtime": {"name": "process", "state": "available", "reason": ""},
    },
    "/v1/slot-types": [
        {"name": "cpu", "kind": "count", "quantum": "1", "exclusive_group": None, "unit": "core"}
    ],
    "/v1/agents": [{"agent_id": "main", "slots": {"cpu": AMOUNTS}}],
    "/v1/devices": [
        {"agents": ["main"], "state": "ok", "model": "a chip", "slots": {"cpu": AMOUNTS}}
    ],
}


class StubNode:
    """A server in a daemon's place; `damage` answers some paths in its own way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = copy.deepcopy(NODE_PAGES)
        self.damage: dict[str, Callable[[], web.StreamResponse]] = {}
        self.events: set[asyncio.Event] = set()
        self.asked = 0
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{rest:.*}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.UnixSite(self.runner, str(self.path)).start()

    async def stop(self) -> None:
        assert self.runner is not None
        self.end_streams()
        await self.runner.cleanup()

    def end_streams(self) -> None:
        for stream in self.events:
            stream.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        path = request.path
        if path in self.damage:
            response = self.damage[path]()
            if isinstance(response, web.Response):
                return response
            return await self.pour(request, response)
        if path == "/v1/events":
            return await self.stream(request)
        own_id = {"Agentd-Node": request.headers.get("Agentd-Node", "")}
        return web.json_response(self.answers.get(path, {}), headers=own_id)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        ended = asyncio.Event()
        self.events.add(ended)
        await ended.wait()
        self.events.discard(ended)
        return response

    async def pour(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Answer with zeros that never end."""
        await response.prepare(request)
        while True:
            await response.write(b"0" * 65536)
