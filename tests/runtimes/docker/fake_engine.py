"""An engine that answers as a test tells it to."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeEngine:
    """An HTTP server on a unix socket that answers as it is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answer: Handler | None = None
        self.asked: list[str] = []
        self.version = b'{"ApiVersion": "1.41"}'
        self.hung_up = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if request.path == "/version":
            return web.Response(body=self.version)
        assert self.answer is not None
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise


def says(status: int, body: bytes) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    return answer
