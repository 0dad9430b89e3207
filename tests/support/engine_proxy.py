"""A proxy between agentd and a real engine that misbehaves as it is told."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from support.waiting import until

Answer = Callable[[web.Request, bytes], Awaitable[web.StreamResponse | None]]


class EngineProxy:
    """Passes requests on to an engine; `rules` by pattern of method and path come first.

    A rule acts once for each time it was added, and stays if it is `always`.
    """

    def __init__(self, path: Path, engine: Path) -> None:
        self.path = path
        self.asked: list[str] = []
        self._engine = engine
        self._rules: list[tuple[re.Pattern[str], Answer, bool]] = []
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._streams: set[web.StreamResponse] = set()
        self.event_filter: Callable[[bytes], list[bytes]] = lambda line: [line]

    def rule(self, pattern: str, answer: Answer, *, always: bool = False) -> None:
        self._rules.append((re.compile(pattern), answer, always))

    def clear(self) -> None:
        self._rules.clear()

    async def start(self) -> None:
        connector = aiohttp.UnixConnector(str(self._engine), limit=0)
        timeout = aiohttp.ClientTimeout()
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()

    async def stop(self) -> None:
        """Be unreachable, as an engine that is down."""
        runner, self._runner = self._runner, None
        session, self._session = self._session, None
        if runner is not None and session is not None:
            self.path.unlink(missing_ok=True)
            await self.cut()
            await runner.cleanup()
            await session.close()

    async def until_asked(self, what: str) -> None:
        """Wait for a request whose method, path and query contain a text."""
        await until(lambda: self.asked, lambda lines: what in "\n".join(lines), text=what)

    async def cut(self) -> None:
        """Break every stream that is open."""
        for stream in list(self._streams):
            transport = stream._req.transport if stream._req else None
            if transport is not None:
                transport.abort()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = f"{request.method} {request.path_qs}"
        self.asked.append(asked)
        for rule in self._rules:
            pattern, answer, always = rule
            if pattern.search(asked):
                if not always:
                    self._rules.remove(rule)
                response = await answer(request, body)
                if response is not None:
                    return response
                break
        return await self.forward(request, body)

    @asynccontextmanager
    async def engine(self, request: web.Request, body: bytes) -> AsyncIterator[Any]:
        """Ask the engine, and give its answer."""
        assert self._session is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() != "content-length"}
        async with self._session.request(
            request.method, f"http://engine{request.path_qs}", data=body or None, headers=headers
        ) as response:
            yield response

    async def forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with self.engine(request, body) as response:
            answer = web.StreamResponse(status=response.status)
            for name in ("Content-Type", "Api-Version"):
                if name in response.headers:
                    answer.headers[name] = response.headers[name]
            self._streams.add(answer)
            try:
                with suppress(ConnectionError):
                    await answer.prepare(request)
                    is_events = "/events" in request.path
                    source = response.content if is_events else response.content.iter_any()
                    async for chunk in source:
                        for part in self.event_filter(chunk) if is_events else [chunk]:
                            await answer.write(part)
                    await answer.write_eof()
            finally:
                self._streams.discard(answer)
            return answer

    async def lose(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Forward to the engine, and drop its answer."""
        async with self.engine(request, body) as response:
            await response.read()
        return self._broken(request)

    async def refuse(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Break the connection before the engine hears of it."""
        return self._broken(request)

    async def fail(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Answer 500 in the engine's place."""
        return web.json_response({"message": "it went wrong"}, status=500)

    async def nonsense(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Answer with what is not the engine's."""
        return web.Response(body=b"<html>hello</html>", content_type="text/html")

    def stall(self, gate: asyncio.Event, *, before: bool) -> Answer:
        """Wait for a gate, before the engine is asked or after it has acted."""

        async def answer(request: web.Request, body: bytes) -> web.StreamResponse | None:
            if before:
                await gate.wait()
                return None
            async with self.engine(request, body) as response:
                content = await response.read()
                status, kind = response.status, response.content_type
            await gate.wait()
            return web.Response(body=content, status=status, content_type=kind)

        return answer

    def change(self, edit: Callable[[dict[str, Any]], None]) -> Answer:
        """Change a request's body before the engine sees it."""

        async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
            content = json.loads(body)
            edit(content)
            return await self.forward(request, json.dumps(content).encode())

        return answer

    @staticmethod
    def _broken(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        raise web.HTTPGone
