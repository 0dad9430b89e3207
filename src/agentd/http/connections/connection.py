"""One HTTP connection, with its deadlines and its place among the limits.

Malformed HTTP is answered with a problem and logged without a traceback, at a limited rate.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable, Hashable
from typing import Any

from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from agentd.http.connections.admission import Limits, Newcomers, enable_keepalive
from agentd.http.connections.client_warnings import warn_of_client
from agentd.http.connections.fair import FairConnection
from agentd.http.connections.turns import Kind, Turns

HEADER_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 75.0
READ_TIMEOUT_S = 10.0
LOOK_PAUSE_S = 0.5
ACCEPT_ROUNDS = 3
"""Rounds of the event loop after which an accepted socket is a connection."""


class TlsHandshake(asyncio.Protocol):
    """A TCP connection during its TLS handshake: counted, in turns, and with a deadline.

    Clients that are not identified yet share the turns of one caller.
    """

    def __init__(
        self,
        connection: Connection,
        limits: Limits,
        tls: ssl.SSLContext,
        turns: Turns,
        tasks: set[Any],
    ) -> None:
        self._connection = connection
        self._turns = turns
        self._limits = limits
        self._tls = tls
        self._tasks = tasks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a gate is for streams")
        if not self._limits.admit():
            transport.abort()
            return
        transport.pause_reading()  # data received before `start_tls` would be lost
        task = asyncio.get_running_loop().create_task(self._handshake(transport))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._connection.comes()

    async def _handshake(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        await self._turns.wait(None, Kind.REQUESTS)
        try:
            secured = await loop.start_tls(
                transport,
                self._connection,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=HEADER_TIMEOUT_S,
            )
        except (OSError, ssl.SSLError) as error:
            warn_of_client("tls.handshake_failed", reason=str(error)[:200])
            transport.abort()
            secured = None
        if secured is None:
            self._limits.release()
            self._connection.stays_away()
        else:
            self._connection.take_over(secured)


class Connection(FairConnection):
    """A connection that is closed when a request header is late or a response is not read.

    It counts against `limits` if given.
    """

    def __init__(
        self,
        server: web.Server,
        limits: Limits | None,
        turns: Turns,
        payer: Callable[[asyncio.BaseTransport], Hashable],
        newcomers: Newcomers,
        broken: Callable[[str], web.Response],
    ) -> None:
        super().__init__(server, turns, payer, keepalive_timeout=KEEP_ALIVE_S)
        self._limits = limits
        self._newcomers = newcomers
        self._broken = broken
        self._is_counted = False
        self._in_request = False
        self._is_next_begun = False
        self._body: StreamReader = EMPTY_PAYLOAD
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._stream: asyncio.Task[object] | None = None
        self._may_pause = False

    def comes(self) -> None:
        """Register the connection as accepted without a request."""
        self._newcomers.add(self)

    def stays_away(self) -> None:
        """Unregister the connection after its first request or its end."""
        self._newcomers.discard(self)

    def take_over(self, transport: asyncio.BaseTransport) -> None:
        """Take over a connection that is already counted."""
        self._is_counted = True
        self.connection_made(transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        enable_keepalive(transport.get_extra_info("socket"))
        if self._limits is not None and not self._is_counted:
            self._is_counted = self._limits.admit()
            if not self._is_counted:
                self.force_close()
                return
        self.comes()
        self._expect_header()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.stays_away()
        if self._is_counted and self._limits is not None:
            self._limits.release()
            self._is_counted = False
        for timer in (self._deadline, self._unread, self._looking):
            if timer is not None:
                timer.cancel()
        if self._stream is not None:
            self._stream.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_of_body = not self._body.is_eof()
        super().data_received(data)
        is_of_header = data and not (is_of_body or self._messages)
        if is_of_header and self._in_request:
            self._is_next_begun = True
        elif is_of_header and self._deadline is None:
            self._expect_header()

    async def began(self, request: web.BaseRequest, kind: Kind) -> None:
        """Begin a request whose header is complete, once the caller has a turn."""
        self.stays_away()
        self._in_request, self._is_next_begun, self._body = True, False, request.content
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        await self.turn_to_ask(kind)

    def ended(self) -> None:
        """Finish a request; the next one may take its time."""
        self._in_request = False
        self._stream, self._may_pause = None, False
        if self.transport is not None and self.transport.get_write_buffer_size():
            self._expect_reading()
        if self._is_next_begun and self._deadline is None:
            self._expect_header()

    def _expect_header(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HEADER_TIMEOUT_S, self.force_close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._may_pause:
            self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _expect_reading(self, before: int | None = None) -> None:
        """Close the connection if the client reads nothing of a response for a while."""
        transport = self.transport
        if transport is None:
            return
        left = transport.get_write_buffer_size()
        if before is not None and left >= before:
            warn_of_client("connection.stalled", unread_bytes=left)
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._unread = loop.call_later(READ_TIMEOUT_S, self._expect_reading, left)

    def carries(self, stream: asyncio.Task[object], *, may_pause: bool = False) -> None:
        """Cancel the streaming task as soon as the client hangs up.

        With `may_pause` the client may stop reading for a while.
        """
        self._stream, self._may_pause = stream, may_pause
        self._look()

    def _look(self) -> None:
        """Poll for a hangup, also while requests are queued and nothing is read."""
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if self._stream is None or sock is None:
            return
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        if poll.poll(0):
            self._stream.cancel()
            if self.transport is not None:
                self.transport.abort()  # nobody reads the rest
            return
        self._looking = asyncio.get_running_loop().call_later(LOOK_PAUSE_S, self._look)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP with a problem."""
        why = (message or str(exc) or "not HTTP").splitlines()
        warn_of_client("request.rejected", status=status, reason=why[0][:200])
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        response = self._broken(" ".join(part.strip() for part in why)[:500])
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Suppress the parent's log of disconnected clients; `handle_error` logs more."""
        del args, kwargs
