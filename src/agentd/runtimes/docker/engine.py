"""The Docker Engine's HTTP API over its socket: calls, streams, lists.

Every response is bounded: one that is too large counts as lost, and a long error message is cut.

API: https://docs.docker.com/reference/api/engine/; the engine's own version is used, requested once
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
    EngineAnswer,
    KeptConnections,
)

CALL_TIMEOUT_S = 120.0
"""Seconds that the engine may take to answer a call; streams have no limit."""
_NO_LIMIT = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S)
_BASE = "http://docker"
_PATH = re.compile(r"/[A-Za-z0-9/_.:-]*")
"""Paths of bounded calls: kinds and validated ids."""
_VERSION = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
MOST_ANSWER = 16 << 20
"""Maximum bytes of one response, or of one element of a list.

An inspection repeats a byte of a request, which has at most 1 MiB, at most five times: a command
appears in it twice, a label once more in the record, escaped.
"""
MOST_LIST, MOST_LISTED = 256 << 20, 20_000
"""Maximum bytes and elements of a list.

A thousand containers take 2 MB, with the longest labels 200 MB.
"""
MOST_ERROR = 1 << 20
"""Maximum bytes read of an error response."""


class EngineClient:
    """A client of one engine."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._connections = KeptConnections(socket)
        self._session: aiohttp.ClientSession | None = None
        self._prefix = ""
        self._is_closed = False

    async def close(self) -> None:
        """Close all connections; every later call raises `EngineUnreachable`."""
        self._is_closed = True
        self._connections.close()
        if self._session is not None:
            await self._session.close()

    def forget_version(self) -> None:
        """Request the API version again before the next call: a restarted engine may differ."""
        self._prefix = ""

    async def version(self) -> Mapping[str, Any]:
        """Return the engine's version, and use its API version from now on."""
        answer = await self._asked("GET", "/version")
        if not isinstance(answer, Mapping):
            raise EngineAnswerLost("malformed version response of the engine")
        version = answer.get("ApiVersion", "1.41")
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise EngineAnswerLost("the engine's version response has no API version")
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
        """Make a call and return the JSON of the response, None if it is empty.

        Raises:
            EngineError, EngineUnreachable, EngineAnswerLost: see `engine_errors`.
        """
        if not self._prefix:
            await self.version()
        return await self._asked(method, self._prefix + path, params, body, timeout_s)

    async def call_and_show(self, method: str, path: str, shown: str, patience_s: float) -> Any:
        """Make a call, and return what the engine shows at another path after it.

        Both requests are sent together; the second is repeated if only the first was answered.
        `patience_s` is the time for the second.

        Raises:
            EngineError, EngineUnreachable, EngineAnswerLost: see `engine_errors`.
        """
        if not self._prefix:
            await self.version()
        paths = _checked(self._prefix + path), _checked(self._prefix + shown)
        called, answer = await self._connections.exchange_and_get(
            method, *paths, Bounds(MOST_ANSWER, MOST_ERROR), (CALL_TIMEOUT_S, patience_s)
        )
        _content(called)
        if answer is None:
            return await self._asked("GET", paths[1], timeout_s=patience_s)
        return _content(answer)

    async def _asked(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        target = f"{_checked(path)}?{urlencode(params)}" if params else _checked(path)
        content = None if body is None else msgspec.json.encode(body)
        most = Bounds(MOST_ANSWER, MOST_ERROR)
        return _content(await self._connections.exchange(method, target, content, most, timeout_s))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Make a call and read its response as a stream; leaving the context disconnects.

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
        """Make a call and return the response once its header is read; leaving disconnects.

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
        """Yield the objects of a list as they arrive.

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
            raise EngineUnreachable(f"{self._socket}: agentd closed the connection")
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=_NO_LIMIT,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a small compressed response can be of any size
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


_FAILURES = (aiohttp.ClientError, HttpProcessingError, OSError)


class _Exchange:
    """One call and its response; converts aiohttp's errors to those of `engine_errors`."""

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
    """Raise an error response.

    Raises:
        EngineError: the response is an error; one that is too large is cut.
    """
    if response.status >= REFUSED:
        content = await _begun(response, MOST_ERROR)
        raise EngineError(response.status, _message(content))


async def _begun(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the first `most` bytes of a response."""
    content = bytearray()
    while len(content) < most and (chunk := await response.content.readany()):
        content += chunk
    return bytes(content[:most])


async def _objects(stream: aiohttp.StreamReader) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield the objects of a JSON array, without keeping them.

    Raises:
        EngineAnswerLost: the response is not an array of objects, is cut, or is too large.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    parts, size, count, is_open = [""], 0, 0, False
    while True:
        chunk = await stream.readany()
        parts.append(utf8.decode(chunk))
        size += len(chunk)
        rest, new = len(parts[0]), sum(map(len, parts[1:]))
        if chunk and new < rest:
            continue  # otherwise every part of a long object would be parsed again
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
            raise EngineAnswerLost("the engine's list is malformed or was cut")
        if len(text) > MOST_ANSWER or size > MOST_LIST or count > MOST_LISTED:
            raise EngineAnswerLost("the engine's list is too large")


def _parsed(text: str) -> tuple[list[Mapping[str, Any]], str]:
    """Return the complete objects at the start of a text, and the rest."""
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


def _checked(path: str) -> str:
    """Return a path of the Engine API if it has the form of one."""
    if not _PATH.fullmatch(path):
        raise ValueError(f"invalid Engine API path {path!r}")
    return path


def _content(answer: EngineAnswer) -> Any:
    """Return the JSON of a response, None if it is empty.

    Raises:
        EngineError: the response is an error.
        EngineAnswerLost: the response is too large, or not JSON.
    """
    if answer.status >= REFUSED:
        raise EngineError(answer.status, _message(answer.body))
    if answer.is_cut:
        raise EngineAnswerLost(f"the engine's response exceeds {MOST_ANSWER >> 20} MiB")
    try:
        return msgspec.json.decode(answer.body) if answer.body else None
    except (ValueError, RecursionError) as error:
        raise EngineAnswerLost(f"the engine's response is not JSON: {error}") from error


def _message(content: bytes) -> str:
    """Return the message of an error response, whatever its format."""
    try:
        return str(msgspec.json.decode(content)["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return content.decode(errors="replace").strip() or "no reason given"
