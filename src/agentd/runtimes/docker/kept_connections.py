"""Persistent connections to the engine, for calls with small responses.

A create makes three calls, so the cost of one exchange is most of what agentd adds to a create.
Here an exchange is one write, one read and httptools' parser; streams and lists use aiohttp
(ADR 0011).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import httptools

from agentd.runtimes.docker.engine_errors import EngineAnswerLost, EngineUnreachable, shortly

CONNECT_TIMEOUT_S = 10.0
MOST_IDLE = 8
"""Maximum idle connections."""
REFUSED = 400
_FINAL = 200
_MOST_HEADERS = 64 << 10
_CLOSED = "agentd closed the connection"
_REPEATED = frozenset({"GET", "DELETE"})
"""Methods that are retried if a persistent connection ended before the response."""


class EngineAnswer(NamedTuple):
    """A response; `is_cut` if its body exceeds the bound."""

    status: int
    body: bytes
    is_cut: bool = False


class Bounds(NamedTuple):
    """Maximum bytes of a response, and of an error response."""

    answer: int
    error: int


class KeptConnections:
    """Connections to one engine, one for each concurrent call."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._idle: list[_EngineConnection] = []
        self._used: set[_EngineConnection] = set()
        self._is_closed = False

    async def exchange(
        self, method: str, target: str, body: bytes | None, most: Bounds, timeout_s: float
    ) -> EngineAnswer:
        """Send a request and return its response; cancelling disconnects.

        `target` is a path and a query as they are sent. No wait is ended by cancelling the task
        (see `agentd.concurrency.uninterrupted`).

        Raises:
            EngineUnreachable, EngineAnswerLost: see `engine_errors`.
        """
        request, loop = _request(method, target, body), asyncio.get_running_loop()
        while True:
            is_kept = bool(self._idle)
            connection = self._idle.pop() if is_kept else await self._connected()
            if self._is_closed:
                connection.hang_up(_CLOSED)
                raise EngineUnreachable(f"{self._socket}: {_CLOSED}")
            self._used.add(connection)
            late = f"no response from the engine within {timeout_s:g} s"
            timer = loop.call_later(timeout_s, connection.hang_up, late)
            try:
                answer = await connection.ask(request, most)
            except _NotAnswered as error:
                if is_kept and method in _REPEATED:
                    continue
                raise EngineAnswerLost(f"{self._socket}: {error}") from error
            except EngineAnswerLost as error:
                raise EngineAnswerLost(f"{self._socket}: {error}") from error
            finally:
                timer.cancel()
                self._used.discard(connection)
                self._keep(connection)
            return answer

    def close(self) -> None:
        """Close all connections; calls in progress fail with `EngineAnswerLost`."""
        self._is_closed = True
        for connection in [*self._idle, *self._used]:
            connection.hang_up(_CLOSED)
        self._idle.clear()

    def _keep(self, connection: _EngineConnection) -> None:
        if connection.is_free and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.hang_up("the call was abandoned")

    async def _connected(self) -> _EngineConnection:
        connecting = asyncio.create_task(
            asyncio.get_running_loop().create_unix_connection(
                lambda: _EngineConnection(self._forget), str(self._socket)
            )
        )
        try:
            await asyncio.wait([connecting], timeout=CONNECT_TIMEOUT_S)
            if connecting.done():
                return connecting.result()[1]
        except OSError as error:
            raise EngineUnreachable(f"{self._socket}: {error.strerror or error}") from error
        finally:
            connecting.cancel()
        raise EngineUnreachable(f"{self._socket}: no connection within {CONNECT_TIMEOUT_S:g} s")

    def _forget(self, connection: _EngineConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)


def _request(method: str, target: str, body: bytes | None) -> bytes:
    content = b"" if body is None else body
    kind = "" if body is None else "Content-Type: application/json\r\n"
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: docker\r\nAccept-Encoding: identity\r\n"
        f"{kind}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode("ascii") + content


class _NotAnswered(Exception):
    """The connection ended before the first byte of a response."""


class _EngineConnection(asyncio.Protocol):
    """One connection with one exchange at a time; also the callbacks of httptools' parser."""

    def __init__(self, on_lost: Callable[[_EngineConnection], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[EngineAnswer] | None = None
        self._most = Bounds(0, 0)
        self._received = 0
        self._status = 0
        self._body = bytearray()

    @property
    def is_free(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and self._answer is None

    def ask(self, request: bytes, most: Bounds) -> asyncio.Future[EngineAnswer]:
        """Send a request; the future gets the response, `EngineAnswerLost` or `_NotAnswered`."""
        answer: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            answer.set_exception(_NotAnswered("the connection has ended"))
            return answer
        self._answer, self._most = answer, most
        self._received, self._status, self._body = 0, 0, bytearray()
        self._transport.write(request)
        return answer

    def hang_up(self, why: str) -> None:
        """Close the connection."""
        self._fail(EngineAnswerLost(why))
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.hang_up("")  # data without a request cannot be trusted
            self._on_lost(self)
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.hang_up(shortly(f"the response is not HTTP/1.1: {error}"))
            return
        if self._answer is not None:
            if len(self._body) > self._bound:
                self._complete()
                self.hang_up("")
            elif self._received - len(self._body) > self._bound + _MOST_HEADERS:
                self.hang_up("the response is too large")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost(self)
        if self._received == 0:
            self._fail(_NotAnswered(str(error or "the connection ended before the response")))
        elif self._status >= REFUSED:  # Go's server ends its own refusals without a length
            self._complete()
        else:
            self._fail(EngineAnswerLost(str(error or "the connection ended within the response")))

    # httptools.HTTPProtocol

    def on_message_begin(self) -> None:
        if self._answer is None:  # a second response to one request
            self.hang_up("")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        if self._status < _FINAL:
            return
        self._complete()
        if not self._parser.should_keep_alive():
            self.hang_up("")

    @property
    def _bound(self) -> int:
        return self._most.answer if self._status < REFUSED else self._most.error

    def _complete(self) -> None:
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            body = bytes(self._body[: self._bound])
            waiting.set_result(
                EngineAnswer(self._status, body, is_cut=len(self._body) > self._bound)
            )

    def _fail(self, error: Exception) -> None:
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)
