"""Persistent connections to the engine, for calls with small responses.

A create makes three calls, so the cost of one exchange is most of what agentd adds to a create.
Here an exchange is one write, one read and httptools' parser; streams and lists use aiohttp
(ADR 0011). A call and the GET that follows it are sent together, without waiting for the response
in between (pipelining, RFC 9112, section 9.3.2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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
        request, is_repeatable = _request(method, target, body), method in _REPEATED
        (answer,) = await self._answers(request, most, (timeout_s,), is_repeatable=is_repeatable)
        return answer

    async def exchange_and_get(
        self, method: str, target: str, shown: str, most: Bounds, timeouts_s: tuple[float, float]
    ) -> tuple[EngineAnswer, EngineAnswer | None]:
        """Send a request and a GET of the path `shown`, and return both responses.

        The second is None if the first is an error, or if the connection ended between the two.
        `timeouts_s` limits the wait for the first, and from there for the second. Otherwise as
        `exchange`.
        """
        requests = _request(method, target, None) + _request("GET", shown, None)
        is_repeatable = method in _REPEATED
        found = await self._answers(requests, most, timeouts_s, is_repeatable=is_repeatable)
        return found[0], found[1] if len(found) > 1 else None

    async def _answers(
        self, requests: bytes, most: Bounds, timeouts_s: Sequence[float], *, is_repeatable: bool
    ) -> list[EngineAnswer]:
        """Send requests, one for each timeout, and return at least the first response."""
        while True:
            is_kept = bool(self._idle)
            connection = self._idle.pop() if is_kept else await self._connected()
            if self._is_closed:
                connection.hang_up(_CLOSED)
                raise EngineUnreachable(f"{self._socket}: {_CLOSED}")
            self._used.add(connection)
            try:
                return await connection.ask(requests, most, timeouts_s)
            except _NotAnswered as error:
                if is_kept and is_repeatable:
                    continue
                raise EngineAnswerLost(f"{self._socket}: {error}") from error
            except EngineAnswerLost as error:
                raise EngineAnswerLost(f"{self._socket}: {error}") from error
            finally:
                self._used.discard(connection)
                self._keep(connection)

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
        self._waiting: asyncio.Future[list[EngineAnswer]] | None = None
        self._answers: list[EngineAnswer] = []
        self._timeouts_s: Sequence[float] = ()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._most = Bounds(0, 0)
        self._received = 0
        self._status = 0
        self._body = bytearray()

    @property
    def is_free(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and self._waiting is None

    def ask(
        self, requests: bytes, most: Bounds, timeouts_s: Sequence[float]
    ) -> asyncio.Future[list[EngineAnswer]]:
        """Send requests; the future gets the responses, `EngineAnswerLost` or `_NotAnswered`.

        There is one timeout for each request, counted from the response before it. If the first
        response is an error, or the connection ends, no second one follows.
        """
        waiting = asyncio.get_running_loop().create_future()
        if self._transport is None:
            waiting.set_exception(_NotAnswered("the connection has ended"))
            return waiting
        self._waiting, self._most, self._timeouts_s = waiting, most, timeouts_s
        self._expect_answer()
        self._transport.write(requests)
        return waiting

    def _expect_answer(self) -> None:
        self._received, self._status, self._body = 0, 0, bytearray()
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._timeouts_s[len(self._answers)]
        if self._timer is None or self._timer.when() > self._due:
            self._stop_timer()
            self._timer = loop.call_at(self._due, self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        """Hang up if a response is late; one timer serves many exchanges."""
        self._timer, loop = None, asyncio.get_running_loop()
        if self._waiting is None:
            return
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._look_at_the_time)
        else:
            timeout_s = self._timeouts_s[len(self._answers)]
            self.hang_up(f"no response from the engine within {timeout_s:g} s")

    def hang_up(self, why: str) -> None:
        """Close the connection."""
        self._end(EngineAnswerLost(why))
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            self.hang_up("")  # data without a request cannot be trusted
            self._on_lost(self)
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.hang_up(shortly(f"the response is not HTTP/1.1: {error}"))
            return
        if self._waiting is not None:
            if len(self._body) > self._bound:
                self._complete()
                self.hang_up("")
            elif self._received - len(self._body) > self._bound + _MOST_HEADERS:
                self.hang_up("the response is too large")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._stop_timer()
        self._on_lost(self)
        if self._received == 0:
            self._end(_NotAnswered(str(error or "the connection ended before the response")))
        elif self._status >= REFUSED:  # Go's server ends its own refusals without a length
            self._complete()
        else:
            self._end(EngineAnswerLost(str(error or "the connection ended within the response")))

    # httptools.HTTPProtocol

    def on_message_begin(self) -> None:
        if self._waiting is None:  # more responses than requests
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
        if self._waiting is None or self._waiting.done():
            return
        body = bytes(self._body[: self._bound])
        is_cut = len(self._body) > self._bound
        self._answers.append(EngineAnswer(self._status, body, is_cut=is_cut))
        if len(self._answers) == len(self._timeouts_s):
            self._end()
        elif self._status < REFUSED:
            self._expect_answer()
        else:  # nobody may take the second response for that of another request
            self.hang_up("")

    def _end(self, error: Exception | None = None) -> None:
        """End the exchange; responses that have come count more than an error."""
        waiting, self._waiting = self._waiting, None
        answers, self._answers, self._body = self._answers, [], bytearray()
        if waiting is None or waiting.done():
            return
        if answers or error is None:
            waiting.set_result(answers)
        else:
            waiting.set_exception(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
