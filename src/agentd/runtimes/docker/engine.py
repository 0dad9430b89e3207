"""The Docker Engine's HTTP API over its socket: calls, streams, lists.

Every answer is bounded: one that is too large is lost, and a long error message is cut.

API: https://docs.docker.com/reference/api/engine/; the version is the engine's own, asked once
for each connection to its events.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from agentd.runtimes.docker.engine_errors import (
    EngineAnswerLost,
    EngineError,
    EngineUnreachable,
    shortly,
)
from agentd.runtimes.docker.kept_connections import (
    CONNECT_TIMEOUT_S,
    REFUSED,
    Bounds,
    KeptConnections,
)

CALL_TIMEOUT_S = 120.0
"""Seconds that the engine may take to answer a call; streams have no limit."""
_NO_LIMIT = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S)
_BASE = "http://docker"
_PATH = re.compile(r"/[A-Za-z0-9/_.:-]*")
"""Of a bounded call: kinds, and ids that were checked."""
_VERSION = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
MOST_ANSWER = 16 << 20
"""Bytes of one answer, or of one element of a list.

An inspection repeats a byte of a request, which has 1 MiB, at most five times: a command stands
in it twice, a label once more in the record, escaped.
"""
MOST_LIST, MOST_LISTED = 256 << 20, 20_000
"""Bytes and elements of a list; a thousand containers take 2 MB, with the longest labels 200 MB."""
MOST_ERROR = 1 << 20
"""Bytes that are read of an answer that is an error."""


class EngineClient:
    """Calls one engine."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._connections = KeptConnections(socket)
        self._session: aiohttp.ClientSession | None = None
        self._prefix = ""
        self._is_closed = False

    async def close(self) -> None:
        """Hang up; whatever is called from now on is unreachable."""
        self._is_closed = True
        self._connections.close()
        if self._session is not None:
            await self._session.close()

    def forget_version(self) -> None:
        """Ask anew which version of the API to speak: an engine that was restarted may differ."""
        self._prefix = ""

    async def version(self) -> Mapping[str, Any]:
        """Return what the engine says of itself."""
        answer = await self._asked("GET", "/version")
        if not isinstance(answer, Mapping):
            raise EngineAnswerLost("the engine's answer to a version is something else")
        version = answer.get("ApiVersion", "1.41")
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise EngineAnswerLost("the engine's answer to a version has no API version")
        self._prefix = f"/v{version}"
        return answer

    async def call(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Call, and return the JSON of the answer; None if it has none.

        Raises:
            EngineError, EngineUnreachable, EngineAnswerLost: see `engine_errors`.
        """
        if not self._prefix:
            await self.version()
        return await self._asked(method, self._prefix + path, params, body, timeout_s)

    async def _asked(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        if not _PATH.fullmatch(path):
            raise ValueError(f"{path!r} is no path of the Engine API")
        target = f"{path}?{urlencode(params)}" if params else path
        content = None if body is None else msgspec.json.encode(body)
        most = Bounds(MOST_ANSWER, MOST_ERROR)
        answer = await self._connections.exchange(method, target, content, most, timeout_s)
        if answer.status >= REFUSED:
            raise EngineError(answer.status, _message(answer.body))
        if answer.is_cut:
            raise EngineAnswerLost(f"the engine's answer is larger than {MOST_ANSWER >> 20} MiB")
        try:
            return msgspec.json.decode(answer.body) if answer.body else None
        except (ValueError, RecursionError) as error:
            raise EngineAnswerLost(f"the engine's answer is not JSON: {error}") from error

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
            EngineError, EngineUnreachable, EngineAnswerLost: see `engine_errors`.
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
            EngineError, EngineUnreachable, EngineAnswerLost: see `engine_errors`.
        """
        if not self._prefix:
            await self.version()
        async with self._response(method, self._prefix + path, params, headers) as response:
            try:
                await _refuse_error(response)
                yield response
            finally:
                response.close()

    async def items(
        self, path: str, params: Mapping[str, str]
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the objects of a list, each as soon as it was read.

        Raises:
            EngineError, EngineUnreachable, EngineAnswerLost: see `engine_errors`.
        """
        async with self.stream("GET", path, params) as stream:
            async for item in _objects(stream):
                yield item

    def _response(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        headers: Mapping[str, str] | None,
    ) -> _Exchange:
        request = self._opened().request(method, _BASE + path, params=params, headers=headers)
        return _Exchange(self._socket, request)

    def _opened(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise EngineUnreachable(f"{self._socket}: agentd has hung up")
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=_NO_LIMIT,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # what is small on the way may be of any size
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


_FAILURES = (aiohttp.ClientError, HttpProcessingError, OSError)


class _Exchange:
    """A call and its answer; how it fails is raised in the terms of this module."""

    def __init__(
        self, socket: Path, request: AbstractAsyncContextManager[aiohttp.ClientResponse]
    ) -> None:
        self._socket = socket
        self._request = request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            return await self._request.__aenter__()
        except _FAILURES as error:
            raise self._failed(error) from error

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._request.__aexit__(kind, error, traceback)
        if isinstance(error, _FAILURES):
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> EngineUnreachable | EngineAnswerLost:
        if isinstance(error, aiohttp.ClientConnectorError):
            return EngineUnreachable(f"{self._socket}: {error.os_error.strerror}")
        why = shortly(f"{type(error).__name__}: {error}")
        return EngineAnswerLost(f"{self._socket}: {why}")


async def _refuse_error(response: aiohttp.ClientResponse) -> None:
    """Raise an answer that is an error.

    Raises:
        EngineError: it is; also one that is too large to be read refuses the call.
    """
    if response.status >= REFUSED:
        content = await _begun(response, MOST_ERROR)
        raise EngineError(response.status, _message(content))


async def _begun(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the first bytes of an answer."""
    content = bytearray()
    while len(content) < most and (chunk := await response.content.readany()):
        content += chunk
    return bytes(content[:most])


async def _objects(stream: aiohttp.StreamReader) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield the objects of a JSON array; what was yielded is not kept.

    Raises:
        EngineAnswerLost: it is not an array of objects, was cut short, or is too large.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    parts, size, count, is_open = [""], 0, 0, False
    while True:
        chunk = await stream.readany()
        parts.append(utf8.decode(chunk))
        size += len(chunk)
        rest, new = len(parts[0]), sum(map(len, parts[1:]))
        if chunk and new < rest:
            continue  # else a long object would be parsed anew with each of its parts
        text = "".join(parts)
        if text and not is_open:
            is_open, text = text[0] == "[", text[1:]
        found, text = _parsed(text)
        for item in found:
            yield item
        parts, count = [text], count + len(found)
        if text.startswith("]") and is_open:
            return
        if not chunk or not is_open:
            raise EngineAnswerLost("the engine's answer is not a list of objects, or was cut short")
        if len(text) > MOST_ANSWER or size > MOST_LIST or count > MOST_LISTED:
            raise EngineAnswerLost("the engine's list is too large to be read")


def _parsed(text: str) -> tuple[list[Mapping[str, Any]], str]:
    """Return the complete objects that a part of a list begins with, and the rest."""
    found: list[Mapping[str, Any]] = []
    rest = text.lstrip(_BETWEEN)
    with suppress(ValueError, RecursionError):
        while rest.startswith("{"):
            item, end = _JSON.raw_decode(rest)
            found.append(item)
            rest = rest[end:].lstrip(_BETWEEN)
    return found, rest


_BETWEEN = " \t\r\n,"
_JSON = json.JSONDecoder()


def _message(content: bytes) -> str:
    """Return what an engine says is wrong, in the form of its errors or in any other."""
    try:
        return str(msgspec.json.decode(content)["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return content.decode(errors="replace").strip() or "it gave no reason"
