"""The transport of the asyncio client: one session with one daemon."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Self, TypeVar, cast

import aiohttp
from yarl import URL

from agentd.client.calls import Call, authorization
from agentd.client.defaults import CHUNK, DEFAULT_SOCKET, TIMEOUT_S, enable_keepalive
from agentd.client.errors import (
    broken_stream_error,
    error_from_response,
    parse_content,
    unreachable_error,
)
from agentd.client.names import ThreadResolver
from agentd.client.tls import client_tls
from agentd.errors import AnswerLost, Refused, Unavailable, Unreachable

T = TypeVar("T")
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)


class AsyncStream:
    """An open answer, whose bytes are read as they arrive."""

    def __init__(self, response: aiohttp.ClientResponse, address: str) -> None:
        self._response = response
        self._address = address
        self.headers = response.headers

    async def read(self) -> bytes:
        """Return the next bytes, none at the end.

        Raises:
            Unavailable: the stream broke, or was silent for too long.
        """
        try:
            return await self._response.content.read(CHUNK)
        except (aiohttp.ClientError, OSError) as error:
            raise broken_stream_error(self._address, error) from None


class Transport:
    """The transport of calls: one session with one daemon."""

    _sleep = staticmethod(asyncio.sleep)

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        max_bytes: int = sys.maxsize,
    ) -> None:
        is_encrypted = (url or "").startswith("https:")
        self._tls = client_tls() if tls is None and is_encrypted else tls
        self._socket_path = os.fspath(socket) if socket is not None else DEFAULT_SOCKET
        self._url = url
        self._address = url or self._socket_path
        self._base = (url or "http://agentd").rstrip("/")
        self._headers = authorization(token)
        self._timeout_s = self._retry_s = timeout_s
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is not None and self._loop is not loop:
            if not self._loop.is_closed():
                raise RuntimeError("this client is open in another event loop")
            self._session, self._users = None, 0  # that loop ended before its client was closed
        self._users += 1
        if self._session is None:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=ThreadResolver(), socket_factory=_socket_with_keepalive, limit=0
                )
                if self._url
                else aiohttp.UnixConnector(self._socket_path, limit=0),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                raise_for_status=self._raise_refusal,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if self._users == 0 and self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def replace_credentials(self, token: str, tls: ssl.SSLContext) -> None:
        """Use another token and TLS context for calls from now on; those in progress go on."""
        self._tls, self._headers = tls, authorization(token)
        if self._session is not None:
            self._session.headers.update(self._headers)

    async def execute(self, call: Call[T], *, timeout_s: float | None = None) -> T:
        """Make a call, with all pages of a list, and repeat it while the daemon is not ready.

        Raises:
            AgentdError: the daemon refused, or did not answer in time.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        content, link = await self._fetch(call, timeout_s)
        answer = parse_content(content)
        page = call.next_page(link)
        while page is not None:
            content, link = await self._fetch(page, timeout_s)
            answer += parse_content(content)
            page = page.next_page(link)
        return cast("T", answer)

    async def _fetch(self, call: Call[Any], timeout_s: float) -> tuple[bytes, str | None]:
        """Return the content and the header `Link` of an answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        async with await self._open_response(call) as response:
                            return await self._read_body(response), response.headers.get("Link")
                    except Unavailable as error:
                        if not call.may_retry(error, deadline - loop.time()):
                            raise
                        pause_s = error.retry_after_s
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            raise AnswerLost(f"{self._address}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise unreachable_error(self._address, error, is_sent=True) from None

    async def _open_response(
        self, call: Call[Any], *, silence_s: float | None = None
    ) -> aiohttp.ClientResponse:
        """Send a call and return the open answer; `silence_s` ends a silent one.

        Raises:
            AgentdError: the answer is an error, or missing.
            RuntimeError: the client is not open.
        """
        session = self._open_session
        try:
            return await session.request(
                call.method,
                self._base + call.path,
                json=call.body,
                headers=call.headers,
                allow_redirects=False,
                ssl=self._tls or True,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._timeout_s, sock_read=silence_s
                ),
            )
        except (aiohttp.ClientError, OSError) as error:
            is_sent = not isinstance(error, NOT_SENT)
            raise unreachable_error(self._address, error, is_sent=is_sent) from None

    async def _raise_refusal(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error of an answer, also of one to a request for a WebSocket.

        Raises:
            AgentdError: the answer is an error.
        """
        if response.status >= HTTPStatus.MULTIPLE_CHOICES:
            body, retry_after = await self._read_body(response), response.headers.get("Retry-After")
            raise error_from_response(response.status, body, retry_after)

    @asynccontextmanager
    async def _stream(self, call: Call[Any]) -> AsyncIterator[AsyncStream]:
        """Open a stream, whose answer must begin in time.

        Raises:
            AgentdError: the answer is an error, or missing.
        """
        silence_s = self._timeout_s if call.silence_s == 0 else call.silence_s
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._open_response(call, silence_s=silence_s)
        except TimeoutError:
            reason = f"no answer within {self._timeout_s:g} s"
            raise Unreachable(f"{self._address}: {reason}") from None
        async with response:
            yield AsyncStream(response, self._address)

    async def _read_body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer.

        Raises:
            Refused: it exceeds the limit of this client.
        """
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                raise Refused("Internal", f"the answer exceeds {self._max_bytes} bytes", {})
        return bytes(body)

    @asynccontextmanager
    async def forward(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Forward a request unchanged, and yield the answer, whatever its status.

        Raises:
            Unreachable: there is no answer.
        """
        session = self._open_session
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        try:
            async with session.request(
                method,
                URL(self._base + path, encoded=True),
                data=body,
                headers=headers,
                ssl=self._tls or True,
                timeout=timeout,
                allow_redirects=False,
                auto_decompress=False,
                raise_for_status=False,
            ) as response:
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable_error(self._address, error) from None

    async def _connect_websocket(self, call: Call[Any]) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket, and repeat it while the daemon is not ready for it.

        Raises:
            AgentdError: the daemon refused, or did not answer in time.
        """
        session = self._open_session
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await session.ws_connect(
                        self._base + call.path,
                        ssl=self._tls or True,
                        max_msg_size=0,
                        autoping=False,
                    )
            except Unavailable as error:
                if not call.may_retry(error, deadline - loop.time()):
                    raise
                pause_s = error.retry_after_s
            except aiohttp.WSServerHandshakeError:
                reason = "the server does not support WebSockets"
                raise Unreachable(f"{self._address}: {reason}") from None
            except TimeoutError:
                reason = f"no answer within {self._timeout_s:g} s"
                raise Unreachable(f"{self._address}: {reason}") from None
            except (aiohttp.ClientError, OSError) as error:
                raise unreachable_error(self._address, error) from None
            await asyncio.sleep(pause_s)

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use it as `async with AsyncClient() as client`")
        return self._session


def _socket_with_keepalive(address_info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address_info
    connection = socket.socket(family, kind, protocol)
    enable_keepalive(connection)
    return connection
