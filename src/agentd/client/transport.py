"""The transport of the asyncio client: one session with one daemon."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Self, TypeVar, cast

import aiohttp
from yarl import URL

from agentd.client.calls import Call
from agentd.client.defaults import (
    DEFAULT_SOCKET,
    TIMEOUT_S,
)
from agentd.client.errors import error_from_response, parse_content, unreachable_error
from agentd.client.names import ThreadResolver
from agentd.client.tls import client_tls
from agentd.errors import AnswerLost, InvalidRequest, Refused, Unavailable, Unreachable

T = TypeVar("T")
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)


class Transport:
    """The transport of calls: one session with one daemon."""

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
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=ThreadResolver())
            if self._url
            else aiohttp.UnixConnector(self._socket_path),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def replace_credentials(self, token: str, tls: ssl.SSLContext) -> None:
        """Use another token and TLS context for calls from now on; those in progress go on."""
        self._tls, self._headers = tls, {"Authorization": f"Bearer {token}"} if token else {}
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
            response = await session.request(
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
        if response.status >= HTTPStatus.MULTIPLE_CHOICES:
            async with response:
                retry_after = response.headers.get("Retry-After")
                raise error_from_response(
                    response.status, await self._read_body(response), retry_after
                )
        return response

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
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await session.ws_connect(
                        self._base + call.path,
                        ssl=self._tls or True,
                        max_msg_size=0,
                        autoping=False,
                    )
            except aiohttp.WSServerHandshakeError as refused:
                try:  # without a WebSocket, for the reason; until the daemon is ready
                    await self._fetch(call, self._timeout_s)
                except InvalidRequest:  # not a WebSocket; the daemon may be ready now
                    if refused.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        raise
                else:
                    reason = "the server does not support WebSockets"
                    raise Unreachable(f"{self._address}: {reason}") from None
            except TimeoutError:
                reason = f"no answer within {self._timeout_s:g} s"
                raise Unreachable(f"{self._address}: {reason}") from None
            except (aiohttp.ClientError, OSError) as error:
                raise unreachable_error(self._address, error) from None

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use it as `async with AsyncClient() as client`")
        return self._session
