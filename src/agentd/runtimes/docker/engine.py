"""The Docker Engine's HTTP API over its socket: calls, streams, and three ways to fail.

    EngineError         it was asked, and refused or failed: a status and a message
    EngineUnreachable   it was not asked: there was no connection
    AnswerLost          it was asked, and its answer was lost or is not one of the Engine API

API: https://docs.docker.com/reference/api/engine/; the version is the engine's own, asked once
for each connection to its events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

_NO_LIMIT = aiohttp.ClientTimeout(sock_connect=10.0)
_BASE = "http://docker"
_REFUSED = 400


class EngineError(Exception):
    """The engine refused or failed, and said so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class EngineUnreachable(Exception):
    """No connection could be made, so the engine knows of nothing."""


class AnswerLost(Exception):
    """The engine may have acted, and did not say so."""


class EngineClient:
    """Calls one engine."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None
        self._prefix = ""

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()

    def forget_version(self) -> None:
        """Ask anew which version of the API to speak: an engine that was restarted may differ."""
        self._prefix = ""

    async def version(self) -> Mapping[str, Any]:
        """Return what the engine says of itself."""
        answer = await self._asked("GET", "/version")
        if not isinstance(answer, Mapping):
            raise AnswerLost("the engine's answer to a version is something else")
        self._prefix = f"/v{answer.get('ApiVersion', '1.41')}"
        return answer

    async def call(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Any:  # noqa: ANN401 - JSON
        """Call, and return the JSON of the answer; None if it has none.

        Raises:
            EngineError, EngineUnreachable, AnswerLost: see above.
        """
        if not self._prefix:
            await self.version()
        return await self._asked(method, self._prefix + path, params, body)

    async def _asked(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Any:  # noqa: ANN401 - JSON
        async with self._response(method, path, params, body) as response:
            content = await response.read()
            if response.status >= _REFUSED:
                raise EngineError(response.status, _message(content))
            try:
                return msgspec.json.decode(content) if content else None
            except (ValueError, RecursionError) as error:
                raise AnswerLost(f"the engine's answer is not JSON: {error}") from error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Call, and read what comes; leaving hangs up.

        Raises:
            EngineError, EngineUnreachable, AnswerLost: see above.
        """
        async with self.answer(method, path, params, headers) as response:
            yield response.content

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Call, and return the answer as soon as it begins; leaving hangs up.

        Raises:
            EngineError, EngineUnreachable, AnswerLost: see above.
        """
        if not self._prefix:
            await self.version()
        async with self._response(method, self._prefix + path, params, None, headers) as response:
            try:
                if response.status >= _REFUSED:
                    raise EngineError(response.status, _message(await response.read()))
                yield response
            finally:
                response.close()

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: object,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        sent = dict(headers or {})
        data = None
        if body is not None:
            data, sent["Content-Type"] = msgspec.json.encode(body), "application/json"
        try:
            async with self._opened().request(
                method, _BASE + path, params=params, data=data, headers=sent
            ) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(f"{self._socket}: {error.os_error.strerror}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerLost(f"{self._socket}: {type(error).__name__}: {error}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=0)
            no_cookies = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=_NO_LIMIT, cookie_jar=no_cookies
            )
        return self._session


def _message(content: bytes) -> str:
    """Return what an engine says is wrong, in the form of its errors or in any other."""
    try:
        return str(msgspec.json.decode(content)["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return content.decode(errors="replace").strip() or "it gave no reason"
