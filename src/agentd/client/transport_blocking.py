"""The transport of the blocking client: the standard library's HTTP, which loads fast."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from agentd.client.calls import Call, authorization
from agentd.client.defaults import CHUNK, DEFAULT_SOCKET, TIMEOUT_S, enable_keepalive
from agentd.client.errors import (
    broken_stream_error,
    error_from_response,
    parse_content,
    unreachable_error,
)
from agentd.client.tls import client_tls
from agentd.errors import Unavailable

if TYPE_CHECKING:
    from agentd.client.asynchronous import AsyncClient

T = TypeVar("T")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class BlockingStream:
    """An open answer, whose bytes are read as they arrive."""

    def __init__(self, response: http.client.HTTPResponse, address: str) -> None:
        self._response = response
        self._address = address
        self.headers = response.headers

    def read(self) -> bytes:
        """Return the next bytes, none at the end.

        Raises:
            Unavailable: the stream broke, or was silent for too long.
        """
        try:
            chunk = self._response.read1(CHUNK)
            if not chunk and self._response.length:
                raise http.client.IncompleteRead(b"", self._response.length)
        except (OSError, http.client.HTTPException) as error:
            raise broken_stream_error(self._address, error) from None
        return chunk


class BlockingTransport:
    """The transport of calls, one connection for each."""

    _max_bytes = sys.maxsize

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry_s: float = TIMEOUT_S,
    ) -> None:
        self._socket_path = os.fspath(socket) if socket is not None else DEFAULT_SOCKET
        self._url = url
        self._address = url or self._socket_path
        self._token, self._headers = token, authorization(token)
        self._timeout_s = timeout_s
        self._retry_s = retry_s

    def asynchronous(self) -> AsyncClient:
        """Return the asyncio client of the same daemon."""
        from agentd.client.asynchronous import AsyncClient  # noqa: PLC0415 - aiohttp is slow to load

        return AsyncClient(self._socket_path, url=self._url, token=self._token)

    def open(self, call: Call[Any], timeout_s: float | None = None) -> http.client.HTTPResponse:
        """Make a call and return the open answer.

        Raises:
            AgentdError: the daemon refused, or cannot be reached.
        """
        headers = {**self._headers, **call.headers}
        body, is_sent = None, False
        if call.body is not None:
            body, headers["Content-Type"] = json.dumps(call.body).encode(), "application/json"
        try:
            connection = self._connection(timeout_s or self._timeout_s)
            connection.connect()
            is_sent = True
            connected = connection.sock
            if self._url is not None:
                enable_keepalive(connected)
            base = urlsplit(self._url or "").path.rstrip("/")
            connection.request(call.method, f"{base}{call.path}", body, headers)
            response = connection.getresponse()
            if response.status >= http.client.MULTIPLE_CHOICES:
                retry_after = response.headers.get("Retry-After")
                raise error_from_response(response.status, response.read(), retry_after)
            if call.silence_s != 0:
                connected.settimeout(call.silence_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise unreachable_error(self._address, error, is_sent=is_sent) from None
        return response

    def execute(self, call: Call[T], *, timeout_s: float | None = None) -> T:
        """Make a call, with all pages of a list, and repeat it while the daemon is not ready.

        Raises:
            AgentdError: the daemon refused, or cannot be reached.
        """
        content, link = self._fetch(call, timeout_s)
        answer = parse_content(content)
        page = call.next_page(link)
        while page is not None:
            content, link = self._fetch(page, timeout_s)
            answer += parse_content(content)
            page = page.next_page(link)
        return cast("T", answer)

    def _fetch(self, call: Call[Any], timeout_s: float | None) -> tuple[bytes, str | None]:
        """Return the content and the header `Link` of an answer."""
        content, headers = self.fetch(call, timeout_s)
        return content, headers.get("Link")

    def fetch(
        self, call: Call[Any], timeout_s: float | None = None
    ) -> tuple[bytes, http.client.HTTPMessage]:
        """Return the content and the headers of an answer, for callers that read other headers.

        Raises:
            AgentdError: the daemon refused, or cannot be reached.
        """
        deadline = time.monotonic() + min(self._retry_s, timeout_s or self._retry_s)
        while True:
            try:
                response = self.open(call, timeout_s)
                return response.read(), response.headers
            except Unavailable as error:
                if not call.may_retry(error, deadline - time.monotonic()):
                    raise
                time.sleep(error.retry_after_s)
            except (OSError, http.client.HTTPException) as error:
                raise unreachable_error(self._address, error, is_sent=True) from None

    @contextmanager
    def _stream(self, call: Call[Any]) -> Iterator[BlockingStream]:
        """Open a stream.

        Raises:
            AgentdError: the answer is an error, or missing.
        """
        with closing(self.open(call)) as response:
            yield BlockingStream(response, self._address)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._url is None:
            return _UnixConnection(self._socket_path, timeout_s)
        url = urlsplit(self._url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("invalid address: expected http://HOST:PORT or https://HOST:PORT")
        address = url.hostname, url.port
        if url.scheme == "https":
            return http.client.HTTPSConnection(*address, timeout=timeout_s, context=client_tls())
        return http.client.HTTPConnection(*address, timeout=timeout_s)
