"""The connection of a client, in front of aiohttp's handler of its requests.

It does what aiohttp's sites cannot: it counts against a limit, its TLS handshake included; it is
closed if a header that has begun does not end in time, or if a response is not read.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from agentd.http.connections.admission import ConnectionLimit, enable_keepalive
from agentd.http.connections.client_warnings import warn_of_client
from agentd.http.connections.handler import ConnectionHandler
from agentd.http.connections.unix_sockets import SocketPeer, read_peer

HEADER_TIMEOUT_S = 10.0
"""Seconds for a TLS handshake, and for a header that has begun."""
READ_TIMEOUT_S = 10.0
"""Seconds in which a client reads a part of its response."""
READ_BYTES = 2048
"""Bytes read from a connection at once; the other connections are next."""
UNREAD_BYTES = 1 << 18
"""Bytes from the client that are discarded at the end."""


class Connection(asyncio.BufferedProtocol):
    """A connection; it is `pending` until its first request."""

    def __init__(
        self,
        server: web.Server,
        pending: set[Connection],
        limits: ConnectionLimit | None,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self.peer: SocketPeer | None = None
        """The client, if the connection is one of a unix socket."""
        self.may_pause = False
        """Whether the client may stop reading for a while."""
        self._handler = ConnectionHandler(server, self)
        self._pending = pending
        self._limits = limits
        self._tls = tls
        self._plain_transport: asyncio.Transport
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self._buffer = memoryview(bytearray(READ_BYTES))  # a slice is filled in place over TLS
        self._early_data = b""  # received with the end of the TLS handshake
        self._is_open = self._is_served = self._is_in_request = self._is_paused = False
        self._body: StreamReader = EMPTY_PAYLOAD
        self._header_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain_transport = self._transport = cast("asyncio.Transport", transport)
        self._socket = transport.get_extra_info("socket")  # over TLS unknown at the end
        if self._limits is not None and not self._limits.try_acquire():
            self.close()
            return
        self._is_open = True
        self._pending.add(self)
        self.peer = read_peer(transport)
        enable_keepalive(self._socket)
        if (context := self._tls()) is None:
            self._serve()
        else:
            self._transport.pause_reading()  # data received before `start_tls` would be lost
            self._handshake = asyncio.create_task(self._start_tls(context))

    async def _start_tls(self, context: ssl.SSLContext) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self._plain_transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=HEADER_TIMEOUT_S,
            )
        except (OSError, ssl.SSLError) as error:
            warn_of_client("tls.handshake_failed", reason=str(error)[:200])
            secured = None
        if secured is None or secured.is_closing():
            self.close()
            self._release()
        else:
            self._transport = secured
            self._serve()

    def _serve(self) -> None:
        self._is_served = True
        self._start_header_timer()
        self._handler.connection_made(self._transport)
        if self._early_data:
            self._handler.data_received(self._early_data)

    def connection_lost(self, exc: BaseException | None) -> None:
        with suppress(OSError):  # Linux would reset the connection, and the last response with it
            os.read(self._socket.fileno(), UNREAD_BYTES)
        self._handler.connection_lost(exc)
        self._release()

    def _release(self) -> None:
        """Uncount the connection and stop its timers."""
        if self._is_open and self._limits is not None:
            self._limits.release()
        self._is_open = False
        self._pending.discard(self)
        self._cancel_header_timer()
        self._cancel_reading_timer()

    def close(self) -> None:
        """Close the connection without delay."""
        self._plain_transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])
        if not self._is_served:
            self._early_data += data
            return
        if self._header_timer is None and not self._is_in_request and self._body.is_eof():
            self._start_header_timer()
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def begin_request(self, request: web.BaseRequest) -> None:
        """Begin a request: its header is complete."""
        self._pending.discard(self)
        self._is_in_request, self._body = True, request.content
        self._cancel_header_timer()
        if not self._is_paused:
            self._cancel_reading_timer()

    def finish_request(self) -> None:
        """End a request: its response will be written, and the next header may take its time."""
        self._is_in_request = False
        self._start_reading_timer()

    def pause_writing(self) -> None:
        self._is_paused = True
        self._handler.pause_writing()
        if not self.may_pause:
            self._start_reading_timer(self._unread_bytes())

    def resume_writing(self) -> None:
        self._is_paused = False
        self._handler.resume_writing()
        self._cancel_reading_timer()
        if not self._is_in_request:
            self._start_reading_timer()

    def _start_header_timer(self) -> None:
        self._header_timer = asyncio.get_running_loop().call_later(HEADER_TIMEOUT_S, self.close)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _start_reading_timer(self, unread: float = math.inf) -> None:
        """Close the connection if `unread` bytes or more are unread after a while."""
        self._cancel_reading_timer()
        if self._is_open:
            loop = asyncio.get_running_loop()
            self._reading_timer = loop.call_later(READ_TIMEOUT_S, self._check_reading, unread)

    def _cancel_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()

    def _unread_bytes(self) -> int:
        """Return the bytes that wait for the client, over TLS those of both transports."""
        transports = {self._plain_transport, self._transport}
        return sum(transport.get_write_buffer_size() for transport in transports)

    def _check_reading(self, previous_unread: float) -> None:
        unread = self._unread_bytes()
        if unread >= previous_unread:
            warn_of_client("connection.stalled", unread_bytes=unread)
            self.close()
        elif unread:
            self._start_reading_timer(unread)


def connection_of(request: web.BaseRequest) -> Connection:
    """Return the connection of a request."""
    if not isinstance(request.protocol, ConnectionHandler):
        raise TypeError("expected a request of a Connection")
    return request.protocol.connection
