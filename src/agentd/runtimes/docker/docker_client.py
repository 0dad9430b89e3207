"""The Docker Engine's HTTP API over its socket: calls, streams, lists.

Idempotent calls that meet a connection which the engine has closed are repeated by aiohttp; others
never are (ADR 11).

API: https://docs.docker.com/reference/api/engine/; the engine's own version is used, requested once
for each connection to its events.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from agentd.core.names import quote_untrusted
from agentd.runtimes.docker.docker_errors import (
    DockerError,
    DockerResponseLost,
    DockerUnreachable,
    truncate_message,
)

CALL_TIMEOUT_S = 120.0
"""Seconds that the engine may take to answer a call; streams have no limit."""
_CONNECT_TIMEOUT_S = 10.0
CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_BASE = "http://docker"
_REFUSED = 400
MAX_RESPONSE = 16 << 20
"""Maximum bytes of one response, or of one element of a list.

An inspection repeats a byte of a request, which has at most 1 MiB, at most five times: a command
appears in it twice, a label once more in the record, escaped.
"""
MAX_LIST = 256 << 20
"""Maximum bytes of a list; a thousand containers take 2 MB, with the longest labels 200 MB."""


class DockerClient:
    """A client of one engine. Its calls raise the errors of `docker_errors`."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None
        self._prefix = ""
        self._is_closed = False

    async def close(self) -> None:
        """Close all connections; every later call raises `DockerUnreachable`."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    def forget_version(self) -> None:
        """Request the API version again before the next call: a restarted engine may differ."""
        self._prefix = ""

    async def fetch_version(self, timeout_s: float = CALL_TIMEOUT_S) -> Mapping[str, Any]:
        """Return the engine's version, and use its API version from now on."""
        async with self._response("GET", "/version", timeout_s=timeout_s) as response:
            version = await _read_json(response)
        if not isinstance(version, dict) or "ApiVersion" not in version:
            raise DockerResponseLost("the engine's version response has no API version")
        self._prefix = f"/v{version['ApiVersion']}"
        return version

    async def fetch_api_version(self) -> tuple[int, ...]:
        """Return the version of the API that is used."""
        path = await self._versioned_path("")
        return tuple(int(part) for part in path.removeprefix("/v").split("."))

    async def call(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> Any:
        """Make a call and return the JSON of the response, None if it is empty."""
        path = await self._versioned_path(path)
        async with self._response(
            method, path, timeout_s=timeout_s, params=params, json=body
        ) as response:
            return await _read_json(response)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Make a call and read its response as a stream; leaving the context disconnects."""
        path = await self._versioned_path(path)
        async with self._response(method, path, params=params, headers=headers) as response:
            yield response.content

    async def iterate_list(
        self, path: str, params: Mapping[str, str]
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the objects of a list as they arrive."""
        async with self.stream("GET", path, params) as stream:
            async for item in _read_objects(stream):
                yield item

    async def _versioned_path(self, path: str) -> str:
        if not self._prefix:
            await self.fetch_version()
        return self._prefix + path

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, *, timeout_s: float | None = None, **content: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a request and yield its response, unless that is an error.

        `timeout_s` limits each wait for the engine. A response that arrived while the process was
        suspended counts, however long that was.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s)
        session = self._open_session()
        try:
            async with session.request(
                method, _BASE + path, timeout=timeout, **content
            ) as response:
                if response.status >= _REFUSED:
                    raise DockerError(
                        response.status, _error_message(await _read(response.content))
                    )
                yield response
        except aiohttp.ClientConnectorError as error:
            raise DockerUnreachable(f"{self._socket}: {error.os_error.strerror}") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise DockerUnreachable(f"{self._socket}: {error}") from error
        except aiohttp.SocketTimeoutError as error:
            reason = f"no response from the engine to {method} {path} within {timeout_s:g} s"
            raise DockerResponseLost(f"{self._socket}: {reason}") from error
        except aiohttp.ClientPayloadError as error:
            raise DockerResponseLost(f"{self._socket}: the engine cut its response off") from error
        # aiohttp: a RuntimeError is a read after it closed the connection over a malformed response
        except (aiohttp.ClientError, HttpProcessingError, OSError, RuntimeError) as error:
            reason = truncate_message(f"{type(error).__name__}: {error}")
            raise DockerResponseLost(f"{self._socket}: {reason}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise DockerUnreachable(f"{self._socket}: agentd closed the connection")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self._socket), limit=0),
                json_serialize=lambda body: msgspec.json.encode(body).decode(),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a small compressed response can be of any size
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


async def _read(stream: aiohttp.StreamReader) -> bytes:
    """Return the start of a response, hardly more than `MAX_RESPONSE`."""
    content = bytearray()
    while len(content) <= MAX_RESPONSE and (chunk := await stream.readany()):
        content += chunk
    return bytes(content)


async def _read_json(response: aiohttp.ClientResponse) -> Any:
    """Return the JSON of a response, None if it is empty.

    Raises:
        DockerResponseLost: the response is too large, or not JSON.
    """
    content = await _read(response.content)
    if len(content) > MAX_RESPONSE:
        raise DockerResponseLost(f"the engine's response exceeds {MAX_RESPONSE >> 20} MiB")
    try:
        return msgspec.json.decode(content) if content else None
    except ValueError as error:
        raise DockerResponseLost(f"the engine's response is not JSON: {error}") from error


async def _read_objects(stream: aiohttp.StreamReader) -> AsyncGenerator[Mapping[str, Any]]:
    """Yield the objects of a JSON array, without keeping them.

    Raises:
        DockerResponseLost: the response is not an array of objects, is cut, or is too large.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    text, size, parsed_at, is_open = "", 0, 0, False
    while True:
        chunk = await stream.readany()
        text += utf8.decode(chunk)
        size += len(chunk)
        if chunk and len(text) < 2 * parsed_at:
            continue  # otherwise every part of a long object would be parsed again
        if text and not is_open:
            is_open, text = text[0] == "[", text[1:]
        objects, text = _parse_objects(text)
        for item in objects:
            yield item
        parsed_at = len(text)
        if text.startswith("]") and is_open:
            return
        if not chunk or not is_open:
            raise DockerResponseLost("the engine's list is malformed or was cut")
        if len(text) > MAX_RESPONSE or size > MAX_LIST:
            raise DockerResponseLost("the engine's list is too large")


def _parse_objects(text: str) -> tuple[list[Mapping[str, Any]], str]:
    """Return the complete objects at the start of a text, and the remaining text."""
    objects: list[Mapping[str, Any]] = []
    position = 0
    with suppress(ValueError):
        while separator := _OBJECT_START.match(text, position):
            item, position = _JSON.raw_decode(text, separator.end())
            objects.append(item)
    return objects, text[position:].lstrip(_SEPARATORS)


_SEPARATORS = " \t\r\n,"
_OBJECT_START = re.compile(rf"[{_SEPARATORS}]*(?={{)")
_JSON = json.JSONDecoder()


def parse_container_id(raw: object) -> str:
    """Return a container id, which becomes part of paths.

    Raises:
        DockerResponseLost: the engine's response has another value.
    """
    if isinstance(raw, str) and CONTAINER_ID.fullmatch(raw):
        return raw
    raise DockerResponseLost(
        f"the engine's response has an invalid container id: {quote_untrusted(raw)}"
    )


def _error_message(content: bytes) -> str:
    """Return the message of an error response, whatever its format."""
    try:
        return str(msgspec.json.decode(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace").strip() or "no reason given"
